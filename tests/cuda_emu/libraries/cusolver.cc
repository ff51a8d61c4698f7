/* Stands in for cuSOLVER: the calls that kernels/cuda/linalg.cu makes, answered by LAPACK on the host, and QR by
 * Householder's reflections as in any textbook. Strict about sizes; workspaces are spoilt so that nobody relies on them. */
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../../../kernels/cuda/solver.cuh"
extern "C" {
#include "../../../kernels/lapack.h"
}

struct cusolverDnContext {
  cudaStream_t stream;
};

namespace {

enum status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 3 };
enum { WORK = 64 };

/* LAPACK's function of the type. */
#define OF(T, name)                                                                \
  [] {                                                                             \
    if constexpr (std::is_same<T, float>::value) return ty_lapack_open()->s##name; \
    else return ty_lapack_open()->d##name;                                         \
  }()

template <class Work> int later(solver_handle handle, const Work &work) {
  if (!handle || !ty_lapack_open()) return NOT_INITIALIZED;
  return ty_emu::enqueue(handle->stream, work) ? SUCCESS : INVALID_VALUE;
}

template <class T> bool spoil(T *work, int n) {
  memset(work, 0xff, sizeof *work * static_cast<size_t>(n));
  return true;
}

template <class T> int potrf(solver_handle h, int uplo, int n, T *a, int lda, T *work, int lwork, int *info) {
  if (n < 0 || lda < n || lwork < WORK || (uplo != 0 && uplo != 1)) return INVALID_VALUE;
  return later(h, [=]() mutable {
    OF(T, potrf)(uplo ? "U" : "L", &n, a, &lda, info, 1);
    return spoil(work, lwork);
  });
}

template <class T> int getrf(solver_handle h, int m, int n, T *a, int lda, T *work, int *pivots, int *info) {
  if (m < 0 || n < 0 || lda < m || !pivots) return INVALID_VALUE;
  return later(h, [=]() mutable {
    OF(T, getrf)(&m, &n, a, &lda, pivots, info);
    return spoil(work, WORK);
  });
}

template <class T>
int getrs(solver_handle h, int trans, int n, int columns, const T *a, int lda, const int *pivots, T *b, int ldb,
          int *info) {
  if (n < 0 || columns < 0 || lda < n || ldb < n || (trans != 0 && trans != 1)) return INVALID_VALUE;
  return later(h, [=]() mutable {
    OF(T, getrs)
    (trans ? "T" : "N", &n, &columns, const_cast<T *>(a), &lda, const_cast<int *>(pivots), b, &ldb, info, 1);
    return true;
  });
}

/* (1 - tau v v') applied to column c of a, from row k on; v has an implied 1 in front. */
template <class T> void reflect(T *a, int m, int lda, int k, const T *v, double tau, int c) {
  T *x = a + static_cast<int64_t>(c) * lda;
  double dot = static_cast<double>(x[k]);
  for (int i = k + 1; i < m; i++) dot += static_cast<double>(v[i]) * static_cast<double>(x[i]);
  dot *= tau;
  x[k] = static_cast<T>(static_cast<double>(x[k]) - dot);
  for (int i = k + 1; i < m; i++) x[i] = static_cast<T>(static_cast<double>(x[i]) - dot * static_cast<double>(v[i]));
}

template <class T> int geqrf(solver_handle h, int m, int n, T *a, int lda, T *tau, T *work, int lwork, int *info) {
  if (m < 0 || n < 0 || lda < m || lwork < WORK) return INVALID_VALUE;
  return later(h, [=] {
    for (int k = 0; k < m && k < n; k++) {
      T *x = a + static_cast<int64_t>(k) * lda;
      double rest = 0, head = static_cast<double>(x[k]);
      for (int i = k + 1; i < m; i++) rest += static_cast<double>(x[i]) * static_cast<double>(x[i]);
      tau[k] = 0;
      if (rest == 0) continue;
      const double norm = -std::copysign(std::sqrt(head * head + rest), head);
      tau[k] = static_cast<T>((norm - head) / norm);
      for (int i = k + 1; i < m; i++) x[i] = static_cast<T>(static_cast<double>(x[i]) / (head - norm));
      x[k] = static_cast<T>(norm);
      for (int c = k + 1; c < n; c++) reflect(a, m, lda, k, x, static_cast<double>(tau[k]), c);
    }
    *info = 0;
    return spoil(work, lwork);
  });
}

template <class T>
int orgqr(solver_handle h, int m, int n, int k, T *a, int lda, const T *tau, T *work, int lwork, int *info) {
  if (m < 0 || n > m || k > n || lda < m || lwork < WORK) return INVALID_VALUE;
  return later(h, [=] {
    std::vector<T> v(a, a + static_cast<int64_t>(lda) * n);
    for (int c = 0; c < n; c++) {
      memset(a + static_cast<int64_t>(c) * lda, 0, sizeof *a * static_cast<size_t>(m));
      a[static_cast<int64_t>(c) * lda + c] = 1;
      for (int r = k - 1; r >= 0; r--)
        reflect(a, m, lda, r, v.data() + static_cast<int64_t>(r) * lda, static_cast<double>(tau[r]), c);
    }
    *info = 0;
    return spoil(work, lwork);
  });
}

template <class T>
int gesvd(solver_handle h, signed char jobu, signed char jobvt, int m, int n, T *a, int lda, T *s, T *u, int ldu, T *vt,
          int ldvt, T *work, int lwork, T *rest, int *info) {
  if (m < n || lda < m || ldu < m || ldvt < n || jobu != 'S' || jobvt != 'S' || lwork < WORK) return INVALID_VALUE;
  return later(h, [=]() mutable {
    int least = -1;
    T want;
    std::vector<int> iwork(8 * static_cast<size_t>(n));
    OF(T, gesdd)("S", &m, &n, a, &lda, s, u, &ldu, vt, &ldvt, &want, &least, iwork.data(), info, 1);
    int room = static_cast<int>(want * T(1.0001)) + 64;
    std::vector<T> own(static_cast<size_t>(room));
    OF(T, gesdd)("S", &m, &n, a, &lda, s, u, &ldu, vt, &ldvt, own.data(), &room, iwork.data(), info, 1);
    return spoil(a, lda * n) && spoil(rest, n) && spoil(work, lwork);
  });
}

template <class T>
int syevd(solver_handle h, int jobz, int uplo, int n, T *a, int lda, T *w, T *work, int lwork, int *info) {
  if (n < 0 || lda < n || jobz != 1 || lwork < WORK) return INVALID_VALUE;
  return later(h, [=]() mutable {
    int least = -1, iwant;
    T want;
    OF(T, syevd)("V", uplo ? "U" : "L", &n, a, &lda, w, &want, &least, &iwant, &least, info, 1, 1);
    int room = static_cast<int>(want * T(1.0001)) + 64;
    std::vector<T> own(static_cast<size_t>(room));
    std::vector<int> iwork(static_cast<size_t>(iwant));
    OF(T, syevd)("V", uplo ? "U" : "L", &n, a, &lda, w, own.data(), &room, iwork.data(), &iwant, info, 1, 1);
    return spoil(work, lwork);
  });
}

} // namespace

extern "C" {
int cusolverGetVersion(int *version) {
  *version = 12004;
  return SUCCESS;
}
int cusolverDnCreate(solver_handle *handle) {
  *handle = new cusolverDnContext{ nullptr };
  return SUCCESS;
}
int cusolverDnSetStream(solver_handle handle, cudaStream_t stream) {
  handle->stream = stream;
  return SUCCESS;
}

#define BOTH(X) X(S, float) X(D, double)
#define FUNCTIONS(P, T)                                                                                             \
  int cusolverDn##P##potrf_bufferSize(solver_handle, int, int, T *, int, int *n) { return *n = WORK, SUCCESS; }     \
  int cusolverDn##P##getrf_bufferSize(solver_handle, int, int, T *, int, int *n) { return *n = WORK, SUCCESS; }     \
  int cusolverDn##P##geqrf_bufferSize(solver_handle, int, int, T *, int, int *n) { return *n = WORK, SUCCESS; }     \
  int cusolverDn##P##orgqr_bufferSize(solver_handle, int, int, int, const T *, int, const T *, int *n) {            \
    return *n = WORK, SUCCESS;                                                                                      \
  }                                                                                                                 \
  int cusolverDn##P##gesvd_bufferSize(solver_handle, int, int, int *n) { return *n = WORK, SUCCESS; }               \
  int cusolverDn##P##syevd_bufferSize(solver_handle, int, int, int, const T *, int, const T *, int *n) {            \
    return *n = WORK, SUCCESS;                                                                                      \
  }                                                                                                                 \
  int cusolverDn##P##potrf(solver_handle h, int uplo, int n, T *a, int lda, T *work, int lwork, int *info) {        \
    return potrf(h, uplo, n, a, lda, work, lwork, info);                                                            \
  }                                                                                                                 \
  int cusolverDn##P##getrf(solver_handle h, int m, int n, T *a, int lda, T *work, int *pivots, int *info) {         \
    return getrf(h, m, n, a, lda, work, pivots, info);                                                              \
  }                                                                                                                 \
  int cusolverDn##P##getrs(solver_handle h, int trans, int n, int columns, const T *a, int lda, const int *pivots,  \
                           T *b, int ldb, int *info) {                                                              \
    return getrs(h, trans, n, columns, a, lda, pivots, b, ldb, info);                                               \
  }                                                                                                                 \
  int cusolverDn##P##geqrf(solver_handle h, int m, int n, T *a, int lda, T *tau, T *work, int lwork, int *info) {   \
    return geqrf(h, m, n, a, lda, tau, work, lwork, info);                                                          \
  }                                                                                                                 \
  int cusolverDn##P##orgqr(solver_handle h, int m, int n, int k, T *a, int lda, const T *tau, T *work, int lwork,   \
                           int *info) {                                                                             \
    return orgqr(h, m, n, k, a, lda, tau, work, lwork, info);                                                       \
  }                                                                                                                 \
  int cusolverDn##P##gesvd(solver_handle h, signed char jobu, signed char jobvt, int m, int n, T *a, int lda, T *s, \
                           T *u, int ldu, T *vt, int ldvt, T *work, int lwork, T *rest, int *info) {                \
    return gesvd(h, jobu, jobvt, m, n, a, lda, s, u, ldu, vt, ldvt, work, lwork, rest, info);                       \
  }                                                                                                                 \
  int cusolverDn##P##syevd(solver_handle h, int jobz, int uplo, int n, T *a, int lda, T *w, T *work, int lwork,     \
                           int *info) {                                                                             \
    return syevd(h, jobz, uplo, n, a, lda, w, work, lwork, info);                                                   \
  }
BOTH(FUNCTIONS)
}
