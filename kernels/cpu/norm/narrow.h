/* Rows of a few f32, held in one to four registers: what a loop needs around its vectors (its setup, the elements left
 * over, the sum across lanes through memory) would cost more than the row. With AVX-512 only, whose masks make any
 * width a whole number of registers. */
#ifndef TY_KERNELS_CPU_NARROW_H
#define TY_KERNELS_CPU_NARROW_H

#if defined(__AVX512F__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "../exp_rows.h"

enum { NARROW_LANES = 16, NARROW_MOST = 4, NARROW_WIDTH = NARROW_LANES * NARROW_MOST };

#define NARROW_INLINE static inline __attribute__((always_inline, unused))

/* A function over rows in `v` registers, whose last one has `last` lanes. */
#define NARROW_CALL(fn, width, ...)                                                     \
  do {                                                                                  \
    const int v_ = (int)(((width) + NARROW_LANES - 1) / NARROW_LANES);                  \
    const __mmask16 last_ = (__mmask16)(0xffffu >> (v_ * NARROW_LANES - (int)(width))); \
    switch (v_) {                                                                       \
      case 1: fn(__VA_ARGS__, 1, last_); break;                                         \
      case 2: fn(__VA_ARGS__, 2, last_); break;                                         \
      case 3: fn(__VA_ARGS__, 3, last_); break;                                         \
      default: fn(__VA_ARGS__, 4, last_);                                               \
    }                                                                                   \
  } while (0)

#define NARROW_EACH(i) _Pragma("GCC unroll 4") for (int i = 0; i < v; i++)

NARROW_INLINE __mmask16 narrow_mask(int i, int v, __mmask16 last) { return i == v - 1 ? last : (__mmask16)0xffff; }

/* Lanes beyond the row hold `rest`. */
NARROW_INLINE void narrow_load(__m512 *to, const float *from, int v, __mmask16 last, float rest) {
  NARROW_EACH(i)
  to[i] = _mm512_mask_loadu_ps(_mm512_set1_ps(rest), narrow_mask(i, v, last), from + i * NARROW_LANES);
}

NARROW_INLINE void narrow_store(float *to, const __m512 *from, int v, __mmask16 last) {
  NARROW_EACH(i) _mm512_mask_storeu_ps(to + i * NARROW_LANES, narrow_mask(i, v, last), from[i]);
}

NARROW_INLINE float narrow_sum(const __m512 *x, int v) {
  __m512 s = x[0];
  if (v > 1) s = _mm512_add_ps(s, x[1]);
  if (v > 2) s = _mm512_add_ps(s, v > 3 ? _mm512_add_ps(x[2], x[3]) : x[2]);
  return _mm512_reduce_add_ps(s);
}

/* Of NaN and a number, either. */
NARROW_INLINE float narrow_max(const __m512 *x, int v) {
  __m512 m = x[0];
  for (int i = 1; i < v; i++) m = _mm512_max_ps(m, x[i]);
  return _mm512_reduce_max_ps(m);
}

/* The maxima of up to NARROW_LANES rows and the logarithms of their sums of exp(x - maximum), taken together: of the
 * rows that are not there, 1 goes in. */
NARROW_INLINE void narrow_log_sums(const float *x, int64_t n, int rows, float *top, float *sum, int v, __mmask16 last) {
  for (int r = 0; r < NARROW_LANES; r++) sum[r] = 1;
  for (int r = 0; r < rows; r++) {
    __m512 row[NARROW_MOST];
    narrow_load(row, x + r * n, v, last, -INFINITY);
    top[r] = narrow_max(row, v);
    NARROW_EACH(i) row[i] = ty_exp_weights(_mm512_sub_ps(row[i], _mm512_set1_ps(top[r])));
    sum[r] = narrow_sum(row, v);
  }
#pragma omp simd
  for (int r = 0; r < NARROW_LANES; r++) sum[r] = ty_log_f32(sum[r]);
}

#endif
#endif
