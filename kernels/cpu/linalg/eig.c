/* Eigenvalues of general real matrices, by LAPACK (balancing, Hessenberg form, shifted QR), in rising order of their
 * real, then their imaginary parts. A vector has length 1, and the first of its elements that are about the largest is
 * real and positive, so that every LAPACK gives the same. */
#include <math.h>
#include <string.h>

#include "factorization.h"

ty_kernel TY_KERNEL(eig_factor);

#define REAL float
#define FN(name) name##_f32
#define CALL(name) j->lapack->s##name
#include "eig_real.h"
#undef REAL
#undef FN
#undef CALL

#define REAL double
#define FN(name) name##_f64
#define CALL(name) j->lapack->d##name
#include "eig_real.h"

/* out: values [..., n, 2]; also vectors [..., n, n, 2] and which element of each is real [..., n]. */
bool TY_KERNEL(eig_factor)(const ty_kernel_args *k) {
  job j;
  return k->in[0]->count == 0 || (run(k, k->in[0], eig_f32, eig_f64, &j) && converged(&j));
}

bool TY_KERNEL(eig_values)(const ty_kernel_args *k) { return TY_KERNEL(eig_factor)(k); }
