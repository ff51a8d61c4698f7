/* What the parts of the convolution share: the geometry of one call. */
#ifndef TY_KERNELS_CPU_CONV_H
#define TY_KERNELS_CPU_CONV_H

#include "gemm.h"

/* x [n, c, h, w], weight [o, c/groups, kh, kw], y [n, o, oh, ow]. */
typedef struct conv_shape {
  int64_t n, c, h, w, o, kh, kw, oh, ow;
  int64_t sh, sw, ph, pw, dh, dw, groups;
  int64_t cg, og; /* channels per group */
} conv_shape;

static inline conv_shape conv_shape_of(const ty_view *x, const ty_view *weight, const ty_view *y, const ty_p_conv *p) {
  return (conv_shape){
    .n = x->size[0],
    .c = x->size[1],
    .h = x->size[2],
    .w = x->size[3],
    .o = weight->size[0],
    .kh = weight->size[2],
    .kw = weight->size[3],
    .oh = y->size[2],
    .ow = y->size[3],
    .sh = p->stride[0],
    .sw = p->stride[1],
    .ph = p->padding[0],
    .pw = p->padding[1],
    .dh = p->dilation[0],
    .dw = p->dilation[1],
    .groups = p->groups,
    .cg = weight->size[1],
    .og = weight->size[0] / p->groups,
  };
}

static inline bool conv_is_depthwise(const conv_shape *s) { return s->cg == 1 && s->og == 1 && s->groups > 1; }

#endif
