/* Eigenvalues and eigenvectors of symmetric matrices: Householder's reflections to a tridiagonal matrix, divide and
 * conquer of that, then the reflections of the vectors. The sign of a vector is free: its largest element is
 * positive, so that every device gives the same. */
#include <math.h>

#include "factorization.h"
#include "reflections.h"

ty_kernel TY_KERNEL(eigh_symmetric);

enum {
  FEW = 48,           /* rows up to which the vectors are reflected one by one */
  PIECES = 8,         /* of a triangle times a vector */
  STRIP = 96,         /* rows of a triangle that are one product */
  MOST_ROWS = 16,     /* of a block that is not cut in two */
  MOST_STEPS = 60,    /* for one of its values, of which two are usual */
  FEW_TO_SHARE = 128, /* rows below which threads would wait longer than they work */
};
enum { DIVERGED = 1, NO_MEMORY };   /* how divide and conquer fails */
enum { UPPER, BOTH, LOWER, KINDS }; /* which part of a vector of two neighbours is not 0 */
#define TRIDIAGONAL_ROOM(n) ((4 * PANEL + 1 + PIECES) * (int64_t)(n))
#define CONQUER_ROOM(n) (2 * (int64_t)(n) * ((n) + TY_VECTOR_BYTES / 4) + 4 * (int64_t)(n))

#define REAL float
#define FN(name) name##_f32
#define EPSILON 0x1p-24f
#define TYPE TY_F32
#define SAFE SAFE_f32
#define SMALL 0x1p-51f /* numbers whose squares, sums and quotients stay in the type lie between this and its inverse */
#include "eigh_real.h"
#undef REAL
#undef FN
#undef EPSILON
#undef TYPE
#undef SAFE
#undef SMALL

#define REAL double
#define FN(name) name##_f64
#define EPSILON 0x1p-53
#define TYPE TY_F64
#define SAFE SAFE_f64
#define SMALL 0x1p-485
#include "eigh_real.h"

bool TY_KERNEL(eigh_symmetric)(const ty_kernel_args *k) {
  job j;
  return k->in[0]->count == 0 || (run_threads(k, k->in[0], eigh_f32, eigh_f64, 0, &j) && converged(&j));
}
