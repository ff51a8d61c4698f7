/* gelu of a vector: ty_gelu_f32 with a quotient that is an estimate and a step of Newton's, and an exponential whose
 * powers of two cost an instruction. Within 5 ulp (of AVX2 7), 10 at -13, where results begin to be denormal. TY_HAS_GELU_LANES:
 * there is such a form. */
#ifndef TY_KERNELS_CPU_GELU_LANES_H
#define TY_KERNELS_CPU_GELU_LANES_H

#include "exp_weight.h"

#if defined(__AVX512F__)
#define TY_HAS_GELU_LANES
/* x Phi(x) = max(x, 0) - a Phi(-a) with a = |x|, b = a / sqrt(2), and 2 Phi(-a) = erfc(b). */
static inline __m512 ty_gelu_lanes(__m512 x) {
  const __m512 one = _mm512_set1_ps(1), two = _mm512_set1_ps(2);
  const __m512 a = _mm512_min_ps(_mm512_set1_ps(14.5f), _mm512_abs_ps(x)); /* of NaN, NaN */
  const __m512 b = _mm512_mul_ps(a, _mm512_set1_ps(0.707106781f));
  /* what exp(-b^2) is multiplied by, as ty_erfc_fraction_f32 has it */
  const __m512 sum = _mm512_add_ps(b, two), twice = _mm512_fmadd_ps(b, two, one), below = _mm512_mul_ps(sum, twice);
  __m512 r = _mm512_rcp14_ps(below);
  r = _mm512_fmadd_ps(r, _mm512_fnmadd_ps(below, r, one), r);
  const __m512 s = _mm512_mul_ps(_mm512_mul_ps(_mm512_sub_ps(b, two), twice), r);
  static const float terms[] = { -0.0012306266f, 0.00131351012f, 0.0086343661f,  -0.00805914029f, -0.0542060286f,
                                 0.164054915f,   -0.166031063f,  -0.0927639306f, 1.27697837f };
  __m512 p = _mm512_set1_ps(-0.000400319463f);
#pragma GCC unroll 9
  for (int i = 0; i < 9; i++) p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(terms[i]));
  p = _mm512_mul_ps(p, _mm512_mul_ps(sum, r));
  /* exp(-b^2) / 2 as a power of two, a^2 = square + rest */
  const __m512 c = _mm512_set1_ps(-0.72134752f), c_rest = _mm512_set1_ps(-9.62981495e-09f);
  const __m512 square = _mm512_mul_ps(a, a), rest = _mm512_fmsub_ps(a, a, square);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(square, c), 0);
  __m512 f = _mm512_fmadd_ps(square, c_rest, _mm512_fmsub_ps(square, c, n));
  f = _mm512_fmadd_ps(rest, c, f);
  const __m512 e = _mm512_scalef_ps(_mm512_fmadd_ps(ty_exp2_slopes(f), f, one), _mm512_sub_ps(n, one));
  return _mm512_fnmadd_ps(a, _mm512_mul_ps(e, p), _mm512_max_ps(_mm512_setzero_ps(), x));
}
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#define TY_HAS_GELU_LANES
/* x Phi(x) = max(x, 0) - a Phi(-a) with a = |x|. Phi(-a) exp(a^2 / 2) is t times a polynomial in t = 1 / (a + 3), within
 * 6e-8 of itself for a up to 14.5; s is t stretched over [-1, 1]. */
static inline __m256 ty_gelu_lanes(__m256 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f), magic = _mm256_set1_ps(12582912.0f);   /* adding it rounds to an integer */
  const __m256 a = _mm256_min_ps(_mm256_set1_ps(14.5f), _mm256_andnot_ps(sign, x)); /* of NaN, NaN */
  const __m256 d = _mm256_add_ps(a, _mm256_set1_ps(3)), r = _mm256_rcp_ps(d);
  const __m256 t = _mm256_fmadd_ps(r, _mm256_fnmadd_ps(d, r, _mm256_set1_ps(1)), r);
  const __m256 s = _mm256_fmadd_ps(t, _mm256_set1_ps(7.24137931f), _mm256_set1_ps(-1.4137931f));
  static const float terms[] = { 0.000143996294f, 0.000626329915f, -0.00208334625f, -0.0074447412f,
                                 0.0217117816f,   0.173103273f,    0.490615636f,    0.823385537f };
  __m256 p = _mm256_set1_ps(-5.8422218e-05f);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) p = _mm256_fmadd_ps(p, s, _mm256_set1_ps(terms[i]));
  /* exp(-a^2 / 2) 2^64 as a power of two, a^2 = square + rest; 2^64 keeps it off the denormals */
  const __m256 c = _mm256_set1_ps(-0.72134752f), c_rest = _mm256_set1_ps(-9.62981495e-09f);
  const __m256 square = _mm256_mul_ps(a, a), rest = _mm256_fmsub_ps(a, a, square);
  const __m256 shifted = _mm256_fmadd_ps(square, c, magic), n = _mm256_sub_ps(shifted, magic);
  __m256 f = _mm256_fmadd_ps(square, c_rest, _mm256_fmsub_ps(square, c, n));
  f = _mm256_fmadd_ps(rest, c, f);
  static const float powers[] = { 0x1.3d0c52p+57f, 0x1.c6b6e6p+59f, 0x1.ebf918p+61f, 0x1.62e428p+63f, 0x1.000002p+64f };
  __m256 e = _mm256_set1_ps(0x1.5c08dep+54f);
#pragma GCC unroll 5
  for (int i = 0; i < 5; i++) e = _mm256_fmadd_ps(e, f, _mm256_set1_ps(powers[i]));
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  e = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(e), exponent));
  const __m256 below = _mm256_mul_ps(_mm256_mul_ps(p, e), _mm256_mul_ps(t, a));
  return _mm256_fnmadd_ps(below, _mm256_set1_ps(0x1p-64f), _mm256_max_ps(_mm256_setzero_ps(), x));
}
#endif

#endif
