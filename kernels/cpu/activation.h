/* The activations of ty_activation on runs of numbers, in place: what is done to results while they are in the first
 * cache. */
#ifndef TY_KERNELS_CPU_ACTIVATION_H
#define TY_KERNELS_CPU_ACTIVATION_H

#include "../params.h"
#include "../scalar.h"

#define TY_ACTIVATE(suffix, type, CASES)                                                     \
  static inline void ty_activate_##suffix(ty_activation kind, type *restrict x, int64_t n) { \
    switch (kind) {                                                                          \
      TY_EACH_ACTIVATION(CASES)                                                              \
      default: break;                                                                        \
    }                                                                                        \
  }
#define TY_CASE_F32(kind, f)                                                       \
  case kind:                                                                       \
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++) x[i] = ty_##f##_f32(x[i]); \
    break;
#define TY_CASE_F64(kind, f) \
  case kind: _Pragma("omp simd") for (int64_t i = 0; i < n; i++) x[i] = ty_##f##_f64(x[i]); break;
TY_ACTIVATE(f32, float, TY_CASE_F32)
TY_ACTIVATE(f64, double, TY_CASE_F64)
#undef TY_ACTIVATE
#undef TY_CASE_F32
#undef TY_CASE_F64

#endif
