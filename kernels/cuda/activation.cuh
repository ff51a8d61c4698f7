/* The activations of ty_activation (params.h) on one number, for kernels that apply them before they store. */
#ifndef TY_KERNELS_CUDA_ACTIVATION_CUH
#define TY_KERNELS_CUDA_ACTIVATION_CUH

#include "cuda.cuh"

#define TY_IF_F32(kind, f) \
  if (which == kind) return ty_##f##_f32(x);
#define TY_IF_F64(kind, f) \
  if (which == kind) return ty_##f##_f64(x);
TY_DEVICE float ty_activate(ty_activation which, float x) {
  TY_EACH_ACTIVATION(TY_IF_F32)
  return x;
}
TY_DEVICE double ty_activate(ty_activation which, double x) {
  TY_EACH_ACTIVATION(TY_IF_F64)
  return x;
}
#undef TY_IF_F32
#undef TY_IF_F64

#endif
