/* A batch of matrix products as both ways to compute it see it: the library's (matmul_library.cu) and our own
 * (matmul.cu). */
#ifndef TY_KERNELS_CUDA_MATMUL_CUH
#define TY_KERNELS_CUDA_MATMUL_CUH

#include "cuda.cuh"

enum { MM_BATCH_DIMS = TY_MAX_DIMS - 2 };

/* out[batch] = activation(a[batch] b[batch] + bias + residual[batch]); out and residual are contiguous. Dimensions of the
 * batch are merged and stand from the innermost out; strides count elements. */
struct mm_task {
  int dtype, out_dtype; /* of a and b, of out and residual; the bias is f32 where they are f16 or bf16 */
  ty_activation activation;
  int64_t m, n, k;
  const void *a, *b, *bias, *residual;
  void *out;
  int64_t a_row, a_col, b_row, b_col;
  int64_t count;
  int batch_dims;
  int64_t size[MM_BATCH_DIMS], a_step[MM_BATCH_DIMS], b_step[MM_BATCH_DIMS];
};

enum mm_outcome { MM_DONE, MM_FAILED /* after ty_fail() */, MM_NOT_THERE /* no library, or it does not do this one */ };
mm_outcome mm_by_library(const mm_task &t);

#endif
