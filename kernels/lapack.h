/* LAPACK, loaded when the first factorization is asked for: OpenBLAS where there is one, else what the system calls
 * liblapack. Its matrices have their columns one after the other, ours their rows: a matrix of ours is the transpose
 * of one of theirs, and the kernels ask for the factorization of that. */
#ifndef TY_KERNELS_LAPACK_H
#define TY_KERNELS_LAPACK_H

#include "base.h"

/* getrf, getrs and syevd only serve what stands in for cuSOLVER in tests/cuda_emu.
 * X(name, parameters); C: a character, I: an integer, R: numbers, N: the length of a character, as Fortran passes it */
#define TY_EACH_LAPACK(X, C, I, R, N)                                                                         \
  X(potrf, (C uplo, I n, R a, I lda, I info, N))                                                              \
  X(trsm, (C side, C uplo, C trans, C diag, I m, I n, R alpha, R a, I lda, R b, I ldb, N, N, N, N))           \
  X(getrf, (I m, I n, R a, I lda, I pivots, I info))                                                          \
  X(getrs, (C trans, I n, I columns, R a, I lda, I pivots, R b, I ldb, I info, N))                            \
  X(gelqf, (I m, I n, R a, I lda, R tau, R work, I lwork, I info))                                            \
  X(orglq, (I m, I n, I k, R a, I lda, R tau, R work, I lwork, I info))                                       \
  X(gesdd, (C job, I m, I n, R a, I lda, R s, R u, I ldu, R vt, I ldvt, R work, I lwork, I iwork, I info, N)) \
  X(syevd, (C job, C uplo, I n, R a, I lda, R w, R work, I lwork, I iwork, I liwork, I info, N, N))           \
  X(geev, (C left, C right, I n, R a, I lda, R re, R im, R vl, I ldvl, R vr, I ldvr, R work, I lwork, I info, N, N))

#define TY_LAPACK_MEMBER_F32(name, parameters) void(*s##name) parameters;
#define TY_LAPACK_MEMBER_F64(name, parameters) void(*d##name) parameters;
typedef struct ty_lapack {
  TY_EACH_LAPACK(TY_LAPACK_MEMBER_F32, const char *, int *, float *, size_t)
  TY_EACH_LAPACK(TY_LAPACK_MEMBER_F64, const char *, int *, double *, size_t)
  void (*set_threads)(int n); /* NULL: it has none of its own */
  char name[64];
} ty_lapack;

/* NULL after ty_fail() when there is none. */
const ty_lapack *ty_lapack_open(void);

#endif
