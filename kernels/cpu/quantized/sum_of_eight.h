/* The sum of a vector of eight f32, for AVX2. */
#ifndef TY_KERNELS_CPU_SUM_OF_EIGHT_H
#define TY_KERNELS_CPU_SUM_OF_EIGHT_H

#if defined(__AVX2__)
#include <immintrin.h>

static inline float sum_of_eight(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
#endif

#endif
