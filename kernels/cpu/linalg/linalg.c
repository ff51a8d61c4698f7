/* Factorizations, by LAPACK: a thread for each of many matrices, its own threads for a few. Signs that are free are
 * chosen so that every device gives the same: no negative diagonal in r, a positive largest element in each left
 * singular vector. */
#include <math.h>
#include <string.h>

#include "factorization.h"
#include "../matmul/gemm.h"

#define REAL float
#define FN(name) name##_f32
#define CALL(name) j->lapack->s##name
#define GEMM TY_KERNEL(gemm_f32)
#include "linalg_real.h"
#undef REAL
#undef FN
#undef CALL
#undef GEMM

#define REAL double
#define FN(name) name##_f64
#define CALL(name) j->lapack->d##name
#define GEMM TY_KERNEL(gemm_f64)
#include "linalg_real.h"

bool TY_KERNEL(cholesky_factor)(const ty_kernel_args *k) {
  job j;
  if (k->in[0]->count == 0) return true;
  if (!run(k, k->in[0], cholesky_f32, cholesky_f64, &j)) return false;
  return j.failed == INT64_MAX || ty_fail(TY_EINVAL,
                                          "x: matrix %lld is not positive definite: its leading minor of order %d is "
                                          "not positive",
                                          (long long)j.failed, j.info);
}

bool TY_KERNEL(triangular_solve)(const ty_kernel_args *k) {
  job j;
  if (k->in[1]->count == 0) return true;
  const ty_view *b = k->in[1];
  ty_view turned = *b; /* m: right-hand sides */
  turned.size[b->ndim - 2] = b->size[b->ndim - 1];
  turned.size[b->ndim - 1] = b->size[b->ndim - 2];
  return run(k, &turned, solve_triangular_f32, solve_triangular_f64, &j);
}

bool TY_KERNEL(svd)(const ty_kernel_args *k) {
  job j;
  return k->in[0]->count == 0 || (run(k, k->in[0], svd_f32, svd_f64, &j) && converged(&j));
}
