/* Sums of f16 and bf16 that lie beside each other, widened on the way. */
#ifndef TY_KERNELS_CPU_HALF_SUMS_H
#define TY_KERNELS_CPU_HALF_SUMS_H

#include "../../half.h"
#include "../cpu.h"

#if defined(__F16C__)
static inline __m256 widened_f16(const uint16_t *x) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)x));
}
#endif

/* Four sums side by side: one would wait for itself. */
static double sum_f16(const uint16_t *restrict x, int64_t n) {
  float sum = 0;
  int64_t i = 0;
#if defined(__F16C__)
  __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
  for (; i + 32 <= n; i += 32) {
    a = _mm256_add_ps(a, widened_f16(x + i));
    b = _mm256_add_ps(b, widened_f16(x + i + 8));
    c = _mm256_add_ps(c, widened_f16(x + i + 16));
    d = _mm256_add_ps(d, widened_f16(x + i + 24));
  }
  for (; i + 8 <= n; i += 8) a = _mm256_add_ps(a, widened_f16(x + i));
  float lanes[8];
  _mm256_storeu_ps(lanes, _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)));
  for (int k = 0; k < 8; k++) sum += lanes[k];
#endif
  for (; i < n; i++) sum += ty_f16_to_f32(x[i]);
  return (double)sum;
}

/* Two bf16 as one number: the second is its upper half, the first that of the number shifted. */
typedef uint32_t bf16_pairs __attribute__((vector_size(TY_VECTOR_BYTES), may_alias, aligned(2)));
typedef float pair_sums __attribute__((vector_size(TY_VECTOR_BYTES)));

static double sum_bf16(const uint16_t *restrict x, int64_t n) {
  enum { LANES = TY_VECTOR_BYTES / 4 };
  pair_sums s = { 0 }, t = s, u = s, v = s;
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    const bf16_pairs a = *(const bf16_pairs *)(const void *)(x + i);
    const bf16_pairs b = *(const bf16_pairs *)(const void *)(x + i + 2 * LANES);
    s += (pair_sums)(a << 16), t += (pair_sums)(a & 0xffff0000u);
    u += (pair_sums)(b << 16), v += (pair_sums)(b & 0xffff0000u);
  }
  s = (s + t) + (u + v);
  float sum = 0;
  for (int k = 0; k < LANES; k++) sum += s[k];
  for (; i < n; i++) sum += ty_bf16_to_f32(x[i]);
  return (double)sum;
}

static double sum_halves(ty_dtype dtype, const uint16_t *x, int64_t n) {
  return dtype == TY_F16 ? sum_f16(x, n) : sum_bf16(x, n);
}

#if defined(TY_BF16_VECTORS)
/* The sums of whole vectors of 16 in the order in which add_four_halves() left them: the even ones, then the odd
 * ones. */
static void in_order(float *sums, int64_t n) {
  for (int64_t i = 0; i + 16 <= n; i += 16) {
    const __m256 evens = _mm256_loadu_ps(sums + i), odds = _mm256_loadu_ps(sums + i + 8);
    const __m256 low = _mm256_unpacklo_ps(evens, odds), high = _mm256_unpackhi_ps(evens, odds);
    _mm256_storeu_ps(sums + i, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(sums + i + 8, _mm256_permute2f128_ps(low, high, 0x31));
  }
}
#endif

/* sums[i] += x[0][i] + ... + x[3][i]; of bf16 in the order of in_order() */
static void add_four_halves(ty_dtype dtype, float *restrict sums, const uint16_t *const *x, int64_t n) {
  const uint16_t *restrict a = x[0], *restrict b = x[1], *restrict c = x[2], *restrict d = x[3];
  int64_t i = 0;
  if (dtype == TY_BF16) {
#if defined(TY_BF16_VECTORS)
#define FOUR(of) _mm256_add_ps(_mm256_add_ps(of(a + i), of(b + i)), _mm256_add_ps(of(c + i), of(d + i)))
    for (; i + 16 <= n; i += 16) {
      const __m256 evens = FOUR(ty_bf16_evens), odds = FOUR(ty_bf16_odds);
      _mm256_storeu_ps(sums + i, _mm256_add_ps(_mm256_loadu_ps(sums + i), evens));
      _mm256_storeu_ps(sums + i + 8, _mm256_add_ps(_mm256_loadu_ps(sums + i + 8), odds));
    }
#undef FOUR
#endif
    for (; i < n; i++)
      sums[i] += (ty_bf16_to_f32(a[i]) + ty_bf16_to_f32(b[i])) + (ty_bf16_to_f32(c[i]) + ty_bf16_to_f32(d[i]));
    return;
  }
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m256 low = _mm256_add_ps(widened_f16(a + i), widened_f16(b + i));
    const __m256 high = _mm256_add_ps(widened_f16(c + i), widened_f16(d + i));
    _mm256_storeu_ps(sums + i, _mm256_add_ps(_mm256_loadu_ps(sums + i), _mm256_add_ps(low, high)));
  }
#endif
  for (; i < n; i++)
    sums[i] += (ty_f16_to_f32(a[i]) + ty_f16_to_f32(b[i])) + (ty_f16_to_f32(c[i]) + ty_f16_to_f32(d[i]));
}

/* sums[i]: the sum of x[..][i] over the rows. */
static void column_sums_of_halves(ty_dtype dtype, float *sums, const void *const *x, int64_t rows, int64_t n) {
  float room[TY_VECTOR_BYTES];
  const uint16_t *four[4];
  for (int64_t i = 0; i < n; i++) sums[i] = 0;
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    for (int k = 0; k < 4; k++) {
      four[k] = x[r + k];
      /* Short pieces of rows that lie apart: memory is not asked for the next ones otherwise. */
      if (r + k + 4 < rows)
        for (int64_t i = 0; i < n; i += 32) __builtin_prefetch((const uint16_t *)x[r + k + 4] + i);
    }
    add_four_halves(dtype, sums, four, n);
  }
#if defined(TY_BF16_VECTORS)
  if (dtype == TY_BF16) in_order(sums, n);
#endif
  for (; r < rows; r++)
    for (int64_t i = 0; i < n; i += TY_VECTOR_BYTES) {
      const int64_t m = n - i < TY_VECTOR_BYTES ? n - i : TY_VECTOR_BYTES;
      ty_half_load(dtype, room, (const uint16_t *)x[r] + i, m);
      for (int64_t k = 0; k < m; k++) sums[i + k] += room[k];
    }
}

#endif
