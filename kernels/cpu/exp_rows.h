/* Exponentials of whole rows: what softmax and cross entropy are made of. */
#ifndef TY_KERNELS_CPU_EXP_ROWS_H
#define TY_KERNELS_CPU_EXP_ROWS_H

#include "exp_weight.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define ROW_INLINE static inline __attribute__((unused))

#if defined(__AVX512F__)
/* The lanes of a row that are left at i. */
ROW_INLINE __mmask16 row_mask(int64_t i, int64_t n) { return (__mmask16)(n - i >= 16 ? 0xffff : (1u << (n - i)) - 1); }

/* Four maxima and two sums side by side: one would wait for itself. Of NaN and a number, row_max() is either. */
ROW_INLINE float row_max_f32(const float *x, int64_t n) {
  __m512 m[4];
  int64_t i = 0;
  for (int k = 0; k < 4; k++) m[k] = _mm512_set1_ps(-INFINITY);
  for (; i + 64 <= n; i += 64)
    for (int k = 0; k < 4; k++) m[k] = _mm512_max_ps(_mm512_loadu_ps(x + i + 16 * k), m[k]);
  for (; i < n; i += 16)
    m[0] = _mm512_mask_max_ps(m[0], row_mask(i, n), _mm512_maskz_loadu_ps(row_mask(i, n), x + i), m[0]);
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(m[0], m[1]), _mm512_max_ps(m[2], m[3])));
}

ROW_INLINE float row_exp_sum_f32(float *y, const float *x, int64_t n, float top) {
  const __m512 t = _mm512_set1_ps(top);
  __m512 a = _mm512_setzero_ps(), b = a;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m512 e = ty_exp_weights(_mm512_sub_ps(_mm512_loadu_ps(x + i), t));
    __m512 f = ty_exp_weights(_mm512_sub_ps(_mm512_loadu_ps(x + i + 16), t));
    if (y) _mm512_storeu_ps(y + i, e), _mm512_storeu_ps(y + i + 16, f);
    a = _mm512_add_ps(a, e), b = _mm512_add_ps(b, f);
  }
  for (; i < n; i += 16) {
    __mmask16 m = row_mask(i, n);
    __m512 e = ty_exp_weights(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, x + i), t));
    if (y) _mm512_mask_storeu_ps(y + i, m, e);
    a = _mm512_mask_add_ps(a, m, a, e);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(a, b));
}

ROW_INLINE void row_exp_scale_f32(float *y, const float *x, int64_t n, float top, float scale) {
  const __m512 t = _mm512_set1_ps(top), s = _mm512_set1_ps(scale);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(y + i, _mm512_mul_ps(ty_exp_weights(_mm512_sub_ps(_mm512_loadu_ps(x + i), t)), s));
  if (i < n) {
    __mmask16 m = row_mask(i, n);
    _mm512_mask_storeu_ps(y + i, m,
                          _mm512_mul_ps(ty_exp_weights(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, x + i), t)), s));
  }
}
#endif

/* The largest element; the sum of exp(x - top), which go to y unless it is NULL; y = exp(x - top) * scale. */
#define ROWS(REAL, suffix)                                                                                            \
  ROW_INLINE REAL row_max_##suffix(const REAL *x, int64_t n) {                                                        \
    REAL top = (REAL)-INFINITY;                                                                                       \
    _Pragma("omp simd reduction(max : top)") for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;           \
    return top;                                                                                                       \
  }                                                                                                                   \
  ROW_INLINE REAL row_exp_sum_##suffix(REAL *restrict y, const REAL *restrict x, int64_t n, REAL top) {               \
    REAL sum = 0;                                                                                                     \
    if (!y)                                                                                                           \
      _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++)                                          \
          sum += ty_exp_weight_##suffix(x[i] - top);                                                                  \
    else _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++) {                                     \
        y[i] = ty_exp_weight_##suffix(x[i] - top);                                                                    \
        sum += y[i];                                                                                                  \
      }                                                                                                               \
    return sum;                                                                                                       \
  }                                                                                                                   \
  ROW_INLINE void row_exp_scale_##suffix(REAL *restrict y, const REAL *restrict x, int64_t n, REAL top, REAL scale) { \
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = ty_exp_weight_##suffix(x[i] - top) * scale;            \
  }
#if !defined(__AVX512F__)
ROWS(float, f32)
#endif
ROWS(double, f64)
#undef ROWS

#endif
