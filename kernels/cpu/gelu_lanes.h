/* gelu of a vector: within 8 ulp, 10 at -13, where results begin to be denormal; for halves, whose squares float holds
 * exactly, a shorter form within 2e-5 of itself. TY_HAS_GELU_LANES: there are such forms.
 *
 * x Phi(x) = max(x, 0) - a Phi(-a) with a = |x|. Phi(-a) exp(a^2 / 2) is t times a polynomial in t = 1 / (a + 3), for a
 * up to 14.5; s is t stretched over [-1, 1]. The quotient is an estimate and a step of Newton's. exp(-a^2 / 2) 2^64 is
 * a power of two, a^2 = square + rest; 2^64 keeps it off the denormals. */
#ifndef TY_KERNELS_CPU_GELU_LANES_H
#define TY_KERNELS_CPU_GELU_LANES_H

#include <stdbool.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>

#define TY_HAS_GELU_LANES
#define TY_GELU_INLINE static inline __attribute__((always_inline))

/* Of the polynomial in s, within 6e-8 and 1.8e-5, and of 2^f 2^64 for |f| <= 1/2. */
static const float ty_gelu_terms[] = { -5.8422218e-05f, 0.000143996294f, 0.000626329915f,
                                       -0.00208334625f, -0.0074447412f,  0.0217117816f,
                                       0.173103273f,    0.490615636f,    0.823385537f };
static const float ty_gelu_half_terms[] = { -0.00193626236f, -0.00662549445f, 0.0217153188f,
                                            0.172820002f,    0.490599811f,    0.823399723f };
static const float ty_gelu_powers[] = { 0x1.5c08dep+54f, 0x1.3d0c52p+57f, 0x1.c6b6e6p+59f,
                                        0x1.ebf918p+61f, 0x1.62e428p+63f, 0x1.000002p+64f };
static const float ty_gelu_half_powers[] = { 0.00957089011f * 0x1p64f, 0.0559176877f * 0x1p64f, 0.240247145f * 0x1p64f,
                                             0.69312185f * 0x1p64f, 0.999999285f * 0x1p64f };

#if defined(__AVX512F__)
TY_GELU_INLINE __m512 ty_gelu_polynomial(const float *c, const int count, __m512 x) {
  __m512 p = _mm512_set1_ps(c[0]);
#pragma GCC unroll 8
  for (int i = 1; i < count; i++) p = _mm512_fmadd_ps(p, x, _mm512_set1_ps(c[i]));
  return p;
}

TY_GELU_INLINE __m512 ty_gelu_lanes(__m512 x, const bool half) {
  const __m512 a = _mm512_min_ps(_mm512_set1_ps(14.5f), _mm512_abs_ps(x)); /* of NaN, NaN */
  const __m512 d = _mm512_add_ps(a, _mm512_set1_ps(3)), r = _mm512_rcp14_ps(d);
  const __m512 t = _mm512_fmadd_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(1)), r);
  const __m512 s = _mm512_fmadd_ps(t, _mm512_set1_ps(7.24137931f), _mm512_set1_ps(-1.4137931f));
  const __m512 p = half ? ty_gelu_polynomial(ty_gelu_half_terms, 6, s) : ty_gelu_polynomial(ty_gelu_terms, 9, s);
  const __m512 c = _mm512_set1_ps(-0.72134752f), square = _mm512_mul_ps(a, a);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(square, c), 0);
  __m512 f = _mm512_fmsub_ps(square, c, n);
  if (!half) {
    f = _mm512_fmadd_ps(square, _mm512_set1_ps(-9.62981495e-09f), f);
    f = _mm512_fmadd_ps(_mm512_fmsub_ps(a, a, square), c, f);
  }
  const __m512 e = half ? ty_gelu_polynomial(ty_gelu_half_powers, 5, f) : ty_gelu_polynomial(ty_gelu_powers, 6, f);
  const __m512 below = _mm512_mul_ps(_mm512_mul_ps(p, _mm512_scalef_ps(e, n)), _mm512_mul_ps(t, a));
  return _mm512_fnmadd_ps(below, _mm512_set1_ps(0x1p-64f), _mm512_max_ps(_mm512_setzero_ps(), x));
}
#else
TY_GELU_INLINE __m256 ty_gelu_polynomial(const float *c, const int count, __m256 x) {
  __m256 p = _mm256_set1_ps(c[0]);
#pragma GCC unroll 8
  for (int i = 1; i < count; i++) p = _mm256_fmadd_ps(p, x, _mm256_set1_ps(c[i]));
  return p;
}

TY_GELU_INLINE __m256 ty_gelu_lanes(__m256 x, const bool half) {
  const __m256 sign = _mm256_set1_ps(-0.0f), magic = _mm256_set1_ps(12582912.0f);   /* adding it rounds to an integer */
  const __m256 a = _mm256_min_ps(_mm256_set1_ps(14.5f), _mm256_andnot_ps(sign, x)); /* of NaN, NaN */
  const __m256 d = _mm256_add_ps(a, _mm256_set1_ps(3)), r = _mm256_rcp_ps(d);
  const __m256 t = _mm256_fmadd_ps(r, _mm256_fnmadd_ps(d, r, _mm256_set1_ps(1)), r);
  const __m256 s = _mm256_fmadd_ps(t, _mm256_set1_ps(7.24137931f), _mm256_set1_ps(-1.4137931f));
  const __m256 p = half ? ty_gelu_polynomial(ty_gelu_half_terms, 6, s) : ty_gelu_polynomial(ty_gelu_terms, 9, s);
  const __m256 c = _mm256_set1_ps(-0.72134752f), square = _mm256_mul_ps(a, a);
  const __m256 shifted = _mm256_fmadd_ps(square, c, magic), n = _mm256_sub_ps(shifted, magic);
  __m256 f = _mm256_fmsub_ps(square, c, n);
  if (!half) {
    f = _mm256_fmadd_ps(square, _mm256_set1_ps(-9.62981495e-09f), f);
    f = _mm256_fmadd_ps(_mm256_fmsub_ps(a, a, square), c, f);
  }
  __m256 e = half ? ty_gelu_polynomial(ty_gelu_half_powers, 5, f) : ty_gelu_polynomial(ty_gelu_powers, 6, f);
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  e = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(e), exponent));
  const __m256 below = _mm256_mul_ps(_mm256_mul_ps(p, e), _mm256_mul_ps(t, a));
  return _mm256_fnmadd_ps(below, _mm256_set1_ps(0x1p-64f), _mm256_max_ps(_mm256_setzero_ps(), x));
}
#endif
#endif

#endif
