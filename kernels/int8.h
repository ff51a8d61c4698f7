/* Parameters of convolutions and sums of bytes. A code stands for (code - zero) * scale. */
#ifndef TY_KERNELS_INT8_H
#define TY_KERNELS_INT8_H

#include <stdint.h>

/* Results are cut to [low, 127]. */
typedef struct ty_p_conv_int8 {
  int64_t stride[2], padding[2], groups;
  int32_t x_zero, y_zero, low;
} ty_p_conv_int8;

/* y = (a - a_zero) * a_scale + (b - b_zero) * b_scale + y_zero; g * a_scale where y was not cut. */
typedef struct ty_p_int8 {
  double a_scale, b_scale;
  int32_t a_zero, b_zero, y_zero, low;
} ty_p_int8;

#endif
