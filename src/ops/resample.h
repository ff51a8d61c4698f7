/* The modes of interpolate, and those of its dimensions that go one after the other. */
#ifndef TY_OPS_RESAMPLE_H
#define TY_OPS_RESAMPLE_H

#include "../../kernels/resample.h"
#include "op.h"

typedef enum ty_resize_mode {
  TY_RESIZE_NEAREST,
  TY_RESIZE_NEAREST_EXACT,
  TY_RESIZE_AREA,
  TY_RESIZE_LINEAR,
  TY_RESIZE_BILINEAR,
  TY_RESIZE_BICUBIC,
  TY_RESIZE_TRILINEAR
} ty_resize_mode;

/* x with its last n dimensions of sizes `out`: differentiable ops. scale: out / in, 0: from sizes. */
ty_tensor *ty_resize(ty_tensor *x, int n, const int64_t *out, ty_resize_mode mode, bool align_corners, double scale,
                     bool antialias);

#endif
