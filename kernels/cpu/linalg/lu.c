/* LU with partial pivoting, and systems and determinants by it: small matrices by loops, others by halves, whose
 * products are our own and run in threads. */
#include <math.h>
#include <string.h>

#include "factorization.h"
#include "../matmul/gemm.h"

enum { SMALL = TY_FEW_UNKNOWNS }; /* rows and columns up to which loops are faster */

#define REAL float
#define FN(name) name##_f32
#define CALL(name) j->lapack->s##name
#define GEMM TY_KERNEL(gemm_f32)
#include "lu_real.h"
#undef REAL
#undef FN
#undef CALL
#undef GEMM

#define REAL double
#define FN(name) name##_f64
#define CALL(name) j->lapack->d##name
#define GEMM TY_KERNEL(gemm_f64)
#include "lu_real.h"

/* out: the factors, and the row of x that each of their rows is. */
bool TY_KERNEL(lu_factor)(const ty_kernel_args *k) {
  job j;
  if (k->in[0]->count == 0) { /* the rows of nothing are in order */
    const int64_t m = k->in[0]->size[k->in[0]->ndim - 2];
    for (int64_t i = 0; i < k->out[1]->count; i++) ((int64_t *)k->out[1]->data)[i] = i % m;
    return true;
  }
  return run(k, k->in[0], lu_factor_f32, lu_factor_f64, &j);
}

/* in: a [..., n, n], b [..., n, m]; out: x, and lu_factor's of a. */
bool TY_KERNEL(lu_system)(const ty_kernel_args *k) {
  job j;
  if (k->in[0]->count == 0) return true;
  if (!run(k, k->in[1], lu_system_f32, lu_system_f64, &j)) return false;
  return j.failed == INT64_MAX ||
         ty_fail(TY_EINVAL, "a: matrix %lld is singular: pivot %d is zero", (long long)j.failed, j.info - 1);
}

bool TY_KERNEL(slogdet)(const ty_kernel_args *k) {
  job j;
  if (k->out[0]->count == 0) return true;
  return run(k, k->in[0], slogdet_f32, slogdet_f64, &j);
}
