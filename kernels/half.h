/* f16 and bf16 to f32 and back: one value (branch-free integer code that vectorises; also for CUDA), or a block.
 * Rounds to nearest even; NaN stays NaN, overflow becomes infinity, denormals are kept. */
#ifndef TY_KERNELS_HALF_H
#define TY_KERNELS_HALF_H

#include "scalar.h"

#if defined(__AVX512F__) || defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

TY_INLINE float ty_f16_to_f32(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
  /* The exponent's bias differs by 112; a multiplication also normalises denormals. */
  uint32_t finite = ty_bits_f32(ty_from_bits_f32(magnitude) * 0x1p112f);
  return ty_from_bits_f32(((h & 0x7fff) >= 0x7c00 ? magnitude | 0x7f800000u : finite) | sign);
}

TY_INLINE uint16_t ty_f32_to_f16(float x) {
  uint32_t u = ty_bits_f32(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13;
  /* Below 2^-14: adding 0.5 leaves the result, rounded by the addition, in the low bits. */
  uint32_t tiny = ty_bits_f32(ty_from_bits_f32(a) + 0.5f) - 0x3f000000u;
  uint32_t special = a > 0x7f800000u ? 0x7e00u | ((a >> 13) & 0x3ffu) : 0x7c00u;
  uint32_t h = a < 0x38800000u ? tiny : normal;
  return (uint16_t)((a >= 0x477ff000u ? special : h) | sign);
}

TY_INLINE float ty_bf16_to_f32(uint16_t h) { return ty_from_bits_f32((uint32_t)h << 16); }

TY_INLINE uint16_t ty_f32_to_bf16(float x) {
  uint32_t u = ty_bits_f32(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  return (uint16_t)((u & 0x7fffffff) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}

#ifndef __CUDACC__

TY_INLINE void ty_f16_load(float *__restrict__ out, const uint16_t *__restrict__ in, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(in + i))));
#endif
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(in + i))));
#endif
  for (; i < n; i++) out[i] = ty_f16_to_f32(in[i]);
}

TY_INLINE void ty_f16_store(uint16_t *__restrict__ out, const float *__restrict__ in, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i *)(void *)(out + i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(void *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; i++) out[i] = ty_f32_to_f16(in[i]);
}

TY_INLINE void ty_bf16_load(float *__restrict__ out, const uint16_t *__restrict__ in, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = ty_bf16_to_f32(in[i]);
}

/* By hand for AVX2, for which compilers unpack and pack halves through more steps than there are. */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define TY_BF16_VECTORS

/* The bf16 of each in its upper half; what is in the lower half means nothing. */
TY_INLINE __m256i ty_bf16_upper(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

/* Of 16 beside each other the first, third ... and the second, fourth ... */
TY_INLINE __m256 ty_bf16_evens(const uint16_t *x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)(const void *)x), 16));
}
TY_INLINE __m256 ty_bf16_odds(const uint16_t *x) {
  const __m256i pairs = _mm256_loadu_si256((const __m256i *)(const void *)x);
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}
TY_INLINE void ty_bf16_put_pairs(uint16_t *x, __m256 evens, __m256 odds) {
  const __m256i low = _mm256_srli_epi32(ty_bf16_upper(evens), 16);
  _mm256_storeu_si256((__m256i *)(void *)x, _mm256_blend_epi16(low, ty_bf16_upper(odds), 0xaa));
}
#endif

TY_INLINE void ty_bf16_store(uint16_t *__restrict__ out, const float *__restrict__ in, int64_t n) {
  int64_t i = 0;
#if defined(TY_BF16_VECTORS)
  for (; i + 16 <= n; i += 16) {
    const __m256i low = _mm256_srli_epi32(ty_bf16_upper(_mm256_loadu_ps(in + i)), 16);
    const __m256i high = _mm256_srli_epi32(ty_bf16_upper(_mm256_loadu_ps(in + i + 8)), 16);
    _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
  }
#endif
  for (; i < n; i++) out[i] = ty_f32_to_bf16(in[i]);
}

/* `dtype` is TY_F16 or TY_BF16. */
TY_INLINE void ty_half_load(ty_dtype dtype, float *__restrict__ out, const void *__restrict__ in, int64_t n) {
  if (dtype == TY_F16) ty_f16_load(out, (const uint16_t *)in, n);
  else ty_bf16_load(out, (const uint16_t *)in, n);
}

TY_INLINE void ty_half_store(ty_dtype dtype, void *__restrict__ out, const float *__restrict__ in, int64_t n) {
  if (dtype == TY_F16) ty_f16_store((uint16_t *)out, in, n);
  else ty_bf16_store((uint16_t *)out, in, n);
}

#endif
#endif
