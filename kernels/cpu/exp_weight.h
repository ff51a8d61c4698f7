/* exp() of what is at most about 0, as in softmax weights: half the work of the general one. */
#ifndef TY_KERNELS_CPU_EXP_WEIGHT_H
#define TY_KERNELS_CPU_EXP_WEIGHT_H

#include "../scalar.h"

/* exp(x) for x < 80; 0 where the result would be denormal; NaN for NaN. */
static inline float ty_exp_weight_f32(float x) {
  int32_t n;
  float p = 1.0f + ty_expm1_reduced_f32(ty_exp_reduce_f32(x < -87.3f ? -87.3f : x, &n));
  return x < -87.3f ? 0.0f : p * ty_exp2_int_f32(n);
}
static inline double ty_exp_weight_f64(double x) { return exp(x); }

#endif
