/* Eigenvalues and eigenvectors of symmetric matrices: Householder's reflections to a tridiagonal matrix, divide and
 * conquer of that by LAPACK, in one thread, since its own threads and ours would wait for the same cores; then the
 * reflections of the vectors. The sign of a vector is free: its largest element is positive, so that every device gives
 * the same. */
#include <math.h>

#include "factorization.h"
#include "reflections.h"

ty_kernel TY_KERNEL(eigh_symmetric);

enum {
  FEW = 48,   /* rows up to which the vectors are reflected one by one */
  PIECES = 8, /* of a triangle times a vector */
  STRIP = 96  /* rows of a triangle that are one product */
};
#define TRIDIAGONAL_ROOM(n) ((4 * PANEL + 1 + PIECES) * (int64_t)(n))

#define REAL float
#define FN(name) name##_f32
#define CALL(name) j->lapack->s##name
#define TYPE TY_F32
#define SAFE SAFE_f32
#define SMALL 0x1p-51f /* numbers whose squares, sums and quotients stay in the type lie between this and its inverse */
#include "eigh_real.h"
#undef REAL
#undef FN
#undef CALL
#undef TYPE
#undef SAFE
#undef SMALL

#define REAL double
#define FN(name) name##_f64
#define CALL(name) j->lapack->d##name
#define TYPE TY_F64
#define SAFE SAFE_f64
#define SMALL 0x1p-485
#include "eigh_real.h"

bool TY_KERNEL(eigh_symmetric)(const ty_kernel_args *k) {
  job j;
  return k->in[0]->count == 0 || (run_threads(k, k->in[0], eigh_f32, eigh_f64, 1, &j) && converged(&j));
}
