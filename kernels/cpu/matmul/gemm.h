/* Matrix products for the other kernels of this folder: C = A B, with any strides on A and B. */
#ifndef TY_KERNELS_CPU_GEMM_H
#define TY_KERNELS_CPU_GEMM_H

#include "../../kept.h"
#include "../../tiling.h"
#include "../cpu.h"

#define TY_PANEL_BYTES (2 * TY_VECTOR_BYTES) /* of a row of a full panel */

/* Fills a panel of B: dst[i * stride + j] = B[k0 + i][j0 + j] for i < kc and j < nc; nc elements are at most
 * TY_PANEL_BYTES. */
typedef void ty_gemm_pack(const void *context, int64_t k0, int64_t kc, int64_t j0, int64_t nc, void *dst,
                          int64_t stride);

/* C = activation(A B + bias + residual). Strides count elements. C's columns are contiguous. */
typedef struct ty_gemm {
  int64_t m, n, k;
  const void *a;
  int64_t a_row, a_col;
  const void *b;
  int64_t b_row, b_col;
  void *c;
  int64_t c_row;
  const void *bias;     /* [n], added to every row; or NULL */
  const void *row_bias; /* [m], added to every column; or NULL */
  ty_activation activation;
  const void *residual; /* like C, with rows of its own; or NULL */
  int64_t residual_row;
  bool add;                   /* C += A B; excludes the biases and what follows them */
  ty_dtype half;              /* TY_F16 or TY_BF16: the type of A and B in a product with f32 sums and biases; else 0 */
  ty_dtype c_half;            /* the same of C and residual; excludes `add` */
  ty_gemm_pack *pack;         /* when set, B exists only through it, and `b` is its context */
  int64_t k0;                 /* added to the k0 of `pack` */
  bool signed_bytes;          /* A of matmul_int8 is i8, not u8 */
  struct ty_storage *weights; /* of B, when packed panels of it may be kept (ty_kernel_args.weights); else NULL */
} ty_gemm;

/* Threaded unless called from a parallel piece. The result does not depend on the number of threads. False after
 * ty_fail() when scratch memory is short. */
bool TY_KERNEL(gemm_f32)(const ty_gemm *g);
bool TY_KERNEL(gemm_f64)(const ty_gemm *g);
/* gemm_f32 for large products of bf16 where the CPU has a fast instruction for them. */
bool TY_KERNEL(gemm_has_bf16)(void);
bool TY_KERNEL(gemm_bf16)(const ty_gemm *g);
/* gemm_f32 by the CPU's tiles of sums, where it has them, for products that are large enough. */
bool TY_KERNEL(gemm_has_tiles)(void);
bool TY_KERNEL(gemm_tiles)(const ty_gemm *g);
/* The same of matmul_int8. */
bool TY_KERNEL(gemm_int8_has_tiles)(const ty_gemm *g);
bool TY_KERNEL(gemm_int8_tiles)(const ty_gemm *g);

static inline bool ty_gemm_run(ty_dtype dtype, const ty_gemm *g) {
  return dtype == TY_F64 ? TY_KERNEL(gemm_f64)(g) : TY_KERNEL(gemm_f32)(g);
}

#endif
