/* Sums of short rows of f32, four rows at a time: what one row's lanes are added up with costs more than its elements.
 * A row's sum is the same whichever rows it is taken with. */
#ifndef TY_KERNELS_CPU_ROW_SUMS_H
#define TY_KERNELS_CPU_ROW_SUMS_H

#include "cpu.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { ROW_SUMS_MOST = 127 }; /* elements of a row; longer ones are worth several sums side by side */

static inline void row_sums_four(const float *const x[4], int64_t n, float sum[4]) {
#if defined(__AVX2__)
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i rest = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n % 8)), lane);
  const int64_t whole = n / 8 * 8;
  __m256 a = _mm256_maskload_ps(x[0] + whole, rest), b = _mm256_maskload_ps(x[1] + whole, rest);
  __m256 c = _mm256_maskload_ps(x[2] + whole, rest), d = _mm256_maskload_ps(x[3] + whole, rest);
  for (int64_t i = 0; i < whole; i += 8) {
    a = _mm256_add_ps(a, _mm256_loadu_ps(x[0] + i));
    b = _mm256_add_ps(b, _mm256_loadu_ps(x[1] + i));
    c = _mm256_add_ps(c, _mm256_loadu_ps(x[2] + i));
    d = _mm256_add_ps(d, _mm256_loadu_ps(x[3] + i));
  }
  const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(sum, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#else
  for (int k = 0; k < 4; k++) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < n; i++) s += x[k][i];
    sum[k] = s;
  }
#endif
}

/* Rows that lie one after the other. */
static __attribute__((unused)) void row_sums(const float *x, int64_t n, int64_t rows, float *sum) {
  for (int64_t r = 0; r < rows; r += 4) {
    const float *from[4];
    float four[4];
    for (int k = 0; k < 4; k++) from[k] = x + (r + k < rows ? r + k : rows - 1) * n;
    row_sums_four(from, n, four);
    for (int k = 0; k < 4 && r + k < rows; k++) sum[r + k] = four[k];
  }
}

#endif
