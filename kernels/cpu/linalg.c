/* Factorizations, by LAPACK: a thread for each of many matrices, its own threads for a few. Signs that are free are
 * chosen so that every device gives the same: no negative diagonal in r, a positive largest element in each left
 * singular vector and eigenvector. */
#include <limits.h>
#include <math.h>
#include <string.h>

#include "../lapack.h"
#include "cpu.h"

enum { NOT_FINITE = -1 };

typedef struct job {
  const ty_kernel_args *k;
  const ty_lapack *lapack;
  int m, n;       /* of each matrix; of a system: right-hand sides, unknowns */
  int64_t failed; /* the first matrix that did, or INT64_MAX */
  int info;
  bool out_of_memory;
} job;

/* Of several threads; which of two failures is told does not matter much, but the earlier matrix is. */
static void note(job *j, int64_t i, int info) {
  int64_t before = __atomic_load_n(&j->failed, __ATOMIC_RELAXED);
  while (i < before)
    if (__atomic_compare_exchange_n(&j->failed, &before, i, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) j->info = info;
}

/* The length of the workspace that LAPACK wants: it says so as a number of the type, which f32 rounds. */
static int room_of(double wanted) { return (int)(wanted * 1.0001) + 64; }

#define REAL float
#define FN(name) name##_f32
#define CALL(name) j->lapack->s##name
#include "linalg_real.h"
#undef REAL
#undef FN
#undef CALL

#define REAL double
#define FN(name) name##_f64
#define CALL(name) j->lapack->d##name
#include "linalg_real.h"

/* [..., m, n] of the input that gives the shape. */
static bool run(const ty_kernel_args *k, const ty_view *shape, ty_range_fn *f32, ty_range_fn *f64, job *j) {
  const ty_view *x = k->in[0];
  int64_t m = shape->size[shape->ndim - 2], n = shape->size[shape->ndim - 1];
  *j = (job){ .k = k, .lapack = ty_lapack_open(), .failed = INT64_MAX };
  if (!j->lapack) return false;
  if (m > INT_MAX / 64 || n > INT_MAX / 64)
    return ty_fail(TY_EINVAL, "matrices have at most %d rows and columns", INT_MAX / 64);
  j->m = (int)m;
  j->n = (int)n;
  int64_t batch = 1;
  for (int d = 0; d < x->ndim - 2; d++) batch *= x->size[d];
  int threads = ty_parallel_threads();
  if (j->lapack->set_threads) j->lapack->set_threads(batch >= threads ? 1 : threads);
  ty_range_fn *fn = x->dtype == TY_F64 ? f64 : f32;
  if (batch >= threads) ty_parallel_for(batch, 1, fn, j);
  else fn(j, 0, batch);
  if (j->out_of_memory) return ty_fail(TY_ENOMEM, "out of memory for a factorization");
  return j->failed == INT64_MAX || j->info != NOT_FINITE ||
         ty_fail(TY_EINVAL, "x: matrix %lld holds a number that is not finite", (long long)j->failed);
}

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

bool TY_KERNEL(solve)(const ty_kernel_args *k) {
  job j;
  if (k->in[1]->count == 0) return true;
  const ty_view *b = k->in[1];
  ty_view turned = *b;
  turned.size[b->ndim - 2] = b->size[b->ndim - 1];
  turned.size[b->ndim - 1] = b->size[b->ndim - 2];
  if (!run(k, &turned, solve_f32, solve_f64, &j)) return false;
  return j.failed == INT64_MAX ||
         ty_fail(TY_EINVAL, "a: matrix %lld is singular: pivot %d is zero", (long long)j.failed, j.info - 1);
}

bool TY_KERNEL(slogdet)(const ty_kernel_args *k) {
  job j;
  if (k->out[0]->count == 0) return true;
  return run(k, k->in[0], slogdet_f32, slogdet_f64, &j);
}

bool TY_KERNEL(qr)(const ty_kernel_args *k) {
  job j;
  if (k->in[0]->count == 0) return true;
  return run(k, k->in[0], qr_f32, qr_f64, &j);
}

static bool converged(const job *j) {
  return j->failed == INT64_MAX ||
         ty_fail(TY_EINVAL, "x: matrix %lld: the iteration did not converge", (long long)j->failed);
}

bool TY_KERNEL(svd)(const ty_kernel_args *k) {
  job j;
  return k->in[0]->count == 0 || (run(k, k->in[0], svd_f32, svd_f64, &j) && converged(&j));
}

bool TY_KERNEL(eigh_symmetric)(const ty_kernel_args *k) {
  job j;
  return k->in[0]->count == 0 || (run(k, k->in[0], eigh_f32, eigh_f64, &j) && converged(&j));
}
