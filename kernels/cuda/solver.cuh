/* cuSOLVER's dense factorizations, declared here because builds need no header of it. Its matrices have their columns one
 * after the other, and it does one at a time, on the stream of this thread's GPU. */
#ifndef TY_KERNELS_CUDA_SOLVER_CUH
#define TY_KERNELS_CUDA_SOLVER_CUH

#include "cuda.cuh"

typedef struct cusolverDnContext *solver_handle;
enum {
  SOLVER_UPPER = 1,
  SOLVER_AS_IT_IS = 0,
  SOLVER_VECTORS = 1
}; /* cublasFillMode_t, cublasOperation_t, cusolverEigMode_t */

/* X(name, parameters); T is the type. Each returns 0 or an error. */
#define TY_EACH_SOLVER(X)                                                                                             \
  X(potrf_bufferSize, (solver_handle, int uplo, int n, T *a, int lda, int *lwork))                                    \
  X(potrf, (solver_handle, int uplo, int n, T *a, int lda, T *work, int lwork, int *info))                            \
  X(getrf_bufferSize, (solver_handle, int m, int n, T *a, int lda, int *lwork))                                       \
  X(getrf, (solver_handle, int m, int n, T *a, int lda, T *work, int *pivots, int *info))                             \
  X(getrs,                                                                                                            \
    (solver_handle, int trans, int n, int columns, const T *a, int lda, const int *pivots, T *b, int ldb, int *info)) \
  X(geqrf_bufferSize, (solver_handle, int m, int n, T *a, int lda, int *lwork))                                       \
  X(geqrf, (solver_handle, int m, int n, T *a, int lda, T *tau, T *work, int lwork, int *info))                       \
  X(orgqr_bufferSize, (solver_handle, int m, int n, int k, const T *a, int lda, const T *tau, int *lwork))            \
  X(orgqr, (solver_handle, int m, int n, int k, T *a, int lda, const T *tau, T *work, int lwork, int *info))          \
  X(gesvd_bufferSize, (solver_handle, int m, int n, int *lwork))                                                      \
  X(gesvd, (solver_handle, signed char jobu, signed char jobvt, int m, int n, T *a, int lda, T *s, T *u, int ldu,     \
            T *vt, int ldvt, T *work, int lwork, T *rwork, int *info))                                                \
  X(syevd_bufferSize, (solver_handle, int jobz, int uplo, int n, const T *a, int lda, const T *w, int *lwork))        \
  X(syevd, (solver_handle, int jobz, int uplo, int n, T *a, int lda, T *w, T *work, int lwork, int *info))

#define TY_SOLVER_MEMBER(name, parameters) int(*name) parameters;
template <class T> struct solver_functions { TY_EACH_SOLVER(TY_SOLVER_MEMBER) };

/* cuSOLVER for this thread's GPU, and nobody else's until it is destroyed. */
class solver {
public:
  solver(); /* handle: NULL after ty_fail() where there is none */
  ~solver();
  solver(const solver &) = delete;
  solver &operator=(const solver &) = delete;
  template <class T> const solver_functions<T> &of() const;
  /* Whether a call succeeded; false after ty_fail(). */
  bool ok(int status, const char *name) const;
  solver_handle handle;
};

#endif
