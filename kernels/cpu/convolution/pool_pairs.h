/* Windows of stride 2 on rows of f32, by AVX2: what lies in pairs is taken apart by shuffles, in registers, since a
 * store that is read again at another place waits. Results are in the order 0 1 4 5 2 3 6 7 until pool_in_order(). */
#ifndef TY_KERNELS_CPU_POOL_PAIRS_H
#define TY_KERNELS_CPU_POOL_PAIRS_H

#if defined(__AVX2__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define POOL_INLINE static inline __attribute__((always_inline))

POOL_INLINE __m256 pool_evens(__m256 low, __m256 high) { return _mm256_shuffle_ps(low, high, 0x88); }
POOL_INLINE __m256 pool_odds(__m256 low, __m256 high) { return _mm256_shuffle_ps(low, high, 0xdd); }
POOL_INLINE __m256i pool_in_order(__m256i x) { return _mm256_permute4x64_epi64(x, 0xd8); }
POOL_INLINE __m256 pool_ordered(__m256 x) { return _mm256_castsi256_ps(pool_in_order(_mm256_castps_si256(x))); }

/* Where x takes the place of the best so far: where it is larger, and the first NaN. */
POOL_INLINE __m256 pool_better(__m256 x, __m256 best) {
  return _mm256_and_ps(_mm256_cmp_ps(x, best, _CMP_NLE_UQ), _mm256_cmp_ps(best, best, _CMP_ORD_Q));
}

/* The means of n squares of 2 x 2 of two rows: (a + c) + (b + d), times a quarter, which is exact. */
static void pool_mean_squares(const float *above, const float *below, float *y, int64_t n) {
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    const __m256 low = _mm256_add_ps(_mm256_loadu_ps(above + 2 * j), _mm256_loadu_ps(below + 2 * j));
    const __m256 high = _mm256_add_ps(_mm256_loadu_ps(above + 2 * j + 8), _mm256_loadu_ps(below + 2 * j + 8));
    const __m256 sums = _mm256_add_ps(pool_evens(low, high), pool_odds(low, high));
    _mm256_storeu_ps(y + j, pool_ordered(_mm256_mul_ps(sums, _mm256_set1_ps(0.25f))));
  }
  for (; j < n; j++) y[j] = ((above[2 * j] + below[2 * j]) + (above[2 * j + 1] + below[2 * j + 1])) * 0.25f;
}

/* y[j] = x[2 j] + x[2 j + 1] + x[2 j + 2] for j < n; x may be read for whole vectors of j. */
static void pool_sum_threes(const float *x, float *y, int64_t n) {
  for (int64_t j = 0; j < n; j += 8) {
    const __m256 a = _mm256_loadu_ps(x + 2 * j), b = _mm256_loadu_ps(x + 2 * j + 8);
    const __m256 c = _mm256_loadu_ps(x + 2 * j + 2), d = _mm256_loadu_ps(x + 2 * j + 10);
    const __m256 sum = pool_ordered(_mm256_add_ps(_mm256_add_ps(pool_evens(a, b), pool_odds(a, b)), pool_evens(c, d)));
    if (j + 8 <= n) _mm256_storeu_ps(y + j, sum);
    else memcpy(y + j, &sum, sizeof *y * (size_t)(n - j));
  }
}

/* Positions first, first + 2 ... first + 14, each with what `where` adds, which is in the order of pairs. */
POOL_INLINE void pool_positions(int64_t *position, __m256i first, __m256i where) {
  const __m256i next = _mm256_add_epi64(first, _mm256_set1_epi64x(8)), sorted = pool_in_order(where);
  _mm256_storeu_si256((__m256i *)(void *)position,
                      _mm256_add_epi64(first, _mm256_cvtepi32_epi64(_mm256_castsi256_si128(sorted))));
  _mm256_storeu_si256((__m256i *)(void *)(position + 4),
                      _mm256_add_epi64(next, _mm256_cvtepi32_epi64(_mm256_extracti128_si256(sorted, 1))));
}

/* The larger of n pairs of a row and its position; that of the first element is `at`. */
static void pool_max_pairs(const float *x, int64_t at, float *y, int64_t *position, int64_t n) {
  const __m256i one = _mm256_set1_epi32(1);
  __m256i first = _mm256_add_epi64(_mm256_set1_epi64x(at), _mm256_setr_epi64x(0, 2, 4, 6));
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    const __m256 a = _mm256_loadu_ps(x + 2 * j), b = _mm256_loadu_ps(x + 2 * j + 8);
    const __m256 second = pool_better(pool_odds(a, b), pool_evens(a, b));
    _mm256_storeu_ps(y + j, pool_ordered(_mm256_blendv_ps(pool_evens(a, b), pool_odds(a, b), second)));
    pool_positions(position + j, first, _mm256_and_si256(_mm256_castps_si256(second), one));
    first = _mm256_add_epi64(first, _mm256_set1_epi64x(16));
  }
  for (; j < n; j++) {
    const float *pair = x + 2 * j;
    const int most = !(pair[1] <= pair[0]) && pair[0] == pair[0];
    y[j] = pair[most];
    position[j] = at + 2 * j + most;
  }
}

/* The largest of n squares of 2 x 2 of two rows, w apart, and its position; that of the first element is `at`. */
static void pool_max_squares(const float *above, const float *below, int64_t w, int64_t at, float *y, int64_t *position,
                             int64_t n) {
  const __m256i row = _mm256_set1_epi32((int)w), one = _mm256_set1_epi32(1);
  __m256i first = _mm256_add_epi64(_mm256_set1_epi64x(at), _mm256_setr_epi64x(0, 2, 4, 6));
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    const __m256 a = _mm256_loadu_ps(above + 2 * j), b = _mm256_loadu_ps(above + 2 * j + 8);
    const __m256 c = _mm256_loadu_ps(below + 2 * j), d = _mm256_loadu_ps(below + 2 * j + 8);
    const __m256 second = pool_better(pool_odds(a, b), pool_evens(a, b));
    const __m256 fourth = pool_better(pool_odds(c, d), pool_evens(c, d));
    const __m256 upper = _mm256_blendv_ps(pool_evens(a, b), pool_odds(a, b), second);
    const __m256 lower = _mm256_blendv_ps(pool_evens(c, d), pool_odds(c, d), fourth), under = pool_better(lower, upper);
    const __m256i here = _mm256_and_si256(_mm256_castps_si256(second), one);
    const __m256i there = _mm256_add_epi32(_mm256_and_si256(_mm256_castps_si256(fourth), one), row);
    _mm256_storeu_ps(y + j, pool_ordered(_mm256_blendv_ps(upper, lower, under)));
    pool_positions(position + j, first, _mm256_blendv_epi8(here, there, _mm256_castps_si256(under)));
    first = _mm256_add_epi64(first, _mm256_set1_epi64x(16));
  }
  for (; j < n; j++) {
    const float four[4] = { above[2 * j], above[2 * j + 1], below[2 * j], below[2 * j + 1] };
    int most = 0;
    for (int i = 1; i < 4; i++) most = !(four[i] <= four[most]) && four[most] == four[most] ? i : most;
    y[j] = four[most];
    position[j] = at + 2 * j + most / 2 * w + most % 2;
  }
}

/* Eight elements of a row from `at` on, -infinity where they lie outside of it. */
POOL_INLINE __m256 pool_inside(const float *row, int64_t w, int64_t at) {
  if (at >= 0 && at + 8 <= w) return _mm256_loadu_ps(row + at);
  const __m256i low = _mm256_set1_epi32(at < -8 ? 8 : at < 0 ? (int)-at : 0);
  const __m256i high = _mm256_set1_epi32(at >= w ? 0 : w - at < 8 ? (int)(w - at) : 8);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(low, lane), _mm256_cmpgt_epi32(high, lane));
  return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), _mm256_maskload_ps(row + at, in), _mm256_castsi256_ps(in));
}

/* The largest of the elements start + 2 j .. start + 2 j + 2 of a row, and which of them it is, for j < n, a multiple
 * of 8; -infinity where there are none. */
static void pool_max_threes(const float *row, int64_t w, int64_t start, float *most, int32_t *where, int64_t n) {
  for (int64_t j = 0; j < n; j += 8) {
    const int64_t at = start + 2 * j;
    const __m256 a = pool_inside(row, w, at), b = pool_inside(row, w, at + 8);
    const __m256 third = pool_evens(pool_inside(row, w, at + 2), pool_inside(row, w, at + 10));
    const __m256 first = pool_evens(a, b), odd = pool_odds(a, b), second = pool_better(odd, first);
    const __m256 pair = _mm256_blendv_ps(first, odd, second), last = pool_better(third, pair);
    const __m256i of_pair = _mm256_and_si256(_mm256_castps_si256(second), _mm256_set1_epi32(1));
    const __m256i of_all = _mm256_blendv_epi8(of_pair, _mm256_set1_epi32(2), _mm256_castps_si256(last));
    _mm256_storeu_ps(most + j, pool_ordered(_mm256_blendv_ps(pair, third, last)));
    _mm256_storeu_si256((__m256i *)(void *)(where + j), pool_in_order(of_all));
  }
}

#endif
#endif
