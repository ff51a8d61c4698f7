/* Matrix products of f32 and f64, and of f16 and bf16 with sums of f32. */
#include <string.h>

#include "../activation.h"
#include "gemm.h"

#include "../../half.h"

#define REAL float
#define NAME(x) x##_f32
#define SCALAR(x) ty_##x##_f32
#define HALVES
#define GEMM TY_KERNEL(gemm_f32)
#include "gemm_real.h"
#undef REAL
#undef NAME
#undef SCALAR
#undef HALVES
#undef GEMM

#define REAL double
#define NAME(x) x##_f64
#define SCALAR(x) ty_##x##_f64
#define GEMM TY_KERNEL(gemm_f64)
#include "gemm_real.h"
