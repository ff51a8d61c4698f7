/* Convolutions on the CPU's tiles of sums (conv_tiles.c). */
#ifndef TY_KERNELS_CPU_CONV_TILES_H
#define TY_KERNELS_CPU_CONV_TILES_H

#include "conv.h"

typedef struct conv_tiles_call {
  ty_dtype half; /* TY_BF16, or 0: f32 */
  bool backward; /* the gradient of the input: x is that of the results, y that of the input */
  const void *x, *weight, *residual;
  const float *bias;
  ty_activation activation;
  void *y;
} conv_tiles_call;

/* A convolution or the gradient of its input; *done says whether it was: on this CPU, of this shape, with these
 * numbers. False after ty_fail() when scratch memory is short. */
bool TY_KERNEL(conv_tiles)(const conv_shape *s, const conv_tiles_call *c, bool *done);
/* The same of the gradient of its weight. */
bool TY_KERNEL(conv_tiles_weight)(const conv_shape *s, ty_dtype half, const void *g, const void *x, void *dw,
                                  bool *done);

#endif
