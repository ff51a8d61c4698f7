/* Stochastic rounding of parameters in half precision: up or down with chances that make the mean exact, so that steps
 * smaller than half of the last place are not lost. Gupta et al. 2015, "Deep Learning with Limited Numerical Precision".
 * The random bits are a hash of what identifies the rounding: the value, the gradient, the place in the tensor and the
 * step. They are the same for every backend, every number of threads and every division of a step into parts. */
#ifndef TY_KERNELS_OPTIM_ROUND_H
#define TY_KERNELS_OPTIM_ROUND_H

#include "scalar.h"

/* The finalizer of MurmurHash3, whose every bit depends on all. */
TY_INLINE uint32_t ty_mixed(uint32_t u) {
  u = (u ^ u >> 16) * UINT32_C(0x85ebca6b);
  u = (u ^ u >> 13) * UINT32_C(0xc2b2ae35);
  return u ^ u >> 16;
}

/* 32 random bits for the rounding of x, element i of its tensor, in a step. */
TY_INLINE uint32_t ty_rounding_bits(float x, float g, uint32_t i, uint32_t step) {
  return ty_mixed(ty_mixed(i * UINT32_C(0x9e3779b1) + step * UINT32_C(0x7feb352d)) ^ ty_bits_f32(x) ^
                  ty_bits_f32(g) * UINT32_C(0x846ca68b));
}

/* x rounded to a neighbour in bf16, or in f16, which both hold it exactly. What is not finite stays. */
TY_INLINE float ty_bf16_neighbour(float x, uint32_t random) {
  const uint32_t u = ty_bits_f32(x);
  const uint32_t rounded = (u + (random & 0xffff)) & 0xffff0000;
  return ty_from_bits_f32((u & 0x7f800000) == 0x7f800000 ? u : rounded);
}

TY_INLINE float ty_f16_neighbour(float x, uint32_t random) {
  const uint32_t u = ty_bits_f32(x), magnitude = u & 0x7fffffff;
  const float normal = ty_from_bits_f32((u + (random & 0x1fff)) & ~UINT32_C(0x1fff));
  /* Below the least normal number the last place is 2^-24. */
  const float count = ty_from_bits_f32(magnitude < 0x38800000 ? magnitude : 0) * 16777216.0f;
  const float small = (float)(int32_t)(count + (float)(random >> 8) * 0x1p-24f) * 0x1p-24f;
  const float rounded = ty_from_bits_f32(ty_bits_f32(small) | (u & 0x80000000));
  return magnitude >= 0x7f800000 ? x : magnitude < 0x38800000 ? rounded : normal;
}

#endif
