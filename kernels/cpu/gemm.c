/* Matrix products of f32 and f64. */
#include "gemm.h"

#define REAL float
#define NAME(x) x##_f32
#define GEMM TY_KERNEL(gemm_f32)
#include "gemm_real.h"
#undef REAL
#undef NAME
#undef GEMM

#define REAL double
#define NAME(x) x##_f64
#define GEMM TY_KERNEL(gemm_f64)
#include "gemm_real.h"
