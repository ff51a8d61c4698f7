/* What the factorizations share: a job of many matrices, its threads, and the first matrix that failed. */
#ifndef TY_KERNELS_CPU_FACTORIZATION_H
#define TY_KERNELS_CPU_FACTORIZATION_H

#include <limits.h>

#include "../../lapack.h"
#include "../cpu.h"

enum {
  NOT_FINITE = -1,
  TY_FEW_UNKNOWNS = 24, /* up to which triangles are not solved by halves, */
  TY_MANY_SIDES = 16,   /* nor with fewer right-hand sides */
  TY_ONE_THREAD = 384   /* rows or columns below which LAPACK's own threads wait for each other longer than they work */
};

typedef struct job {
  const ty_kernel_args *k;
  const ty_lapack *lapack;
  int m, n;       /* of each matrix; of a system: right-hand sides, unknowns */
  int64_t failed; /* the first matrix that did, or INT64_MAX */
  int info;
  bool out_of_memory;
} job;

/* Of several threads; which of two failures is told does not matter much, but the earlier matrix is. */
static inline void note(job *j, int64_t i, int info) {
  int64_t before = __atomic_load_n(&j->failed, __ATOMIC_RELAXED);
  while (i < before)
    if (__atomic_compare_exchange_n(&j->failed, &before, i, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) j->info = info;
}

/* The length of the workspace that LAPACK wants: it says so as a number of the type, which f32 rounds. */
static inline int room_of(double wanted) { return (int)(wanted * 1.0001) + 64; }

/* [..., m, n] of the input that gives the shape. most: threads that LAPACK may take for one matrix; 0: it isn't asked,
 * and none need be there. */
static inline bool run_threads(const ty_kernel_args *k, const ty_view *shape, ty_range_fn *f32, ty_range_fn *f64,
                               int most, job *j) {
  const ty_view *x = k->in[0];
  int64_t m = shape->size[shape->ndim - 2], n = shape->size[shape->ndim - 1];
  *j = (job){ .k = k, .lapack = most > 0 ? ty_lapack_open() : NULL, .failed = INT64_MAX };
  if (most > 0 && !j->lapack) return false;
  if (m > INT_MAX / 64 || n > INT_MAX / 64)
    return ty_fail(TY_EINVAL, "matrices have at most %d rows and columns", INT_MAX / 64);
  j->m = (int)m;
  j->n = (int)n;
  int64_t batch = 1;
  for (int d = 0; d < x->ndim - 2; d++) batch *= x->size[d];
  int threads = ty_parallel_threads();
  if (j->lapack && j->lapack->set_threads)
    j->lapack->set_threads(batch >= threads ? 1 : threads < most ? threads : most);
  ty_range_fn *fn = x->dtype == TY_F64 ? f64 : f32;
  if (batch >= threads) ty_parallel_for(batch, 1, fn, j);
  else fn(j, 0, batch);
  if (j->out_of_memory) return ty_fail(TY_ENOMEM, "out of memory for a factorization");
  return j->failed == INT64_MAX || j->info != NOT_FINITE ||
         ty_fail(TY_EINVAL, "x: matrix %lld holds a number that is not finite", (long long)j->failed);
}

static inline __attribute__((unused)) bool run(const ty_kernel_args *k, const ty_view *shape, ty_range_fn *f32,
                                               ty_range_fn *f64, job *j) {
  const ty_view *x = k->in[0];
  const int64_t m = x->size[x->ndim - 2], n = x->size[x->ndim - 1];
  return run_threads(k, shape, f32, f64, (m < n ? m : n) < TY_ONE_THREAD ? 1 : INT_MAX, j);
}

/* After run(), where LAPACK iterates. */
static inline __attribute__((unused)) bool converged(const job *j) {
  return j->failed == INT64_MAX ||
         ty_fail(TY_EINVAL, "x: matrix %lld: the iteration did not converge", (long long)j->failed);
}

#endif
