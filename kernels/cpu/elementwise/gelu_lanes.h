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

/* What vectors of 16 and of 8 do not have in common. */
#if defined(__AVX512F__)
typedef __m512 ty_gelu_vector;
#define GELU(op) _mm512_##op
TY_GELU_INLINE __m512 ty_gelu_absolute(__m512 x) { return _mm512_abs_ps(x); }
TY_GELU_INLINE __m512 ty_gelu_estimate(__m512 x) { return _mm512_rcp14_ps(x); }
/* The integer nearest to x y, `power` for what follows; e times that power of two. */
TY_GELU_INLINE __m512 ty_gelu_whole(__m512 x, __m512 y, __m512 *power) {
  return *power = _mm512_roundscale_ps(_mm512_mul_ps(x, y), 0);
}
TY_GELU_INLINE __m512 ty_gelu_scaled(__m512 e, __m512 power) { return _mm512_scalef_ps(e, power); }
#else
typedef __m256 ty_gelu_vector;
#define GELU(op) _mm256_##op
TY_GELU_INLINE __m256 ty_gelu_absolute(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
TY_GELU_INLINE __m256 ty_gelu_estimate(__m256 x) { return _mm256_rcp_ps(x); }
TY_GELU_INLINE __m256 ty_gelu_whole(__m256 x, __m256 y, __m256 *power) {
  const __m256 magic = _mm256_set1_ps(12582912.0f); /* adding it rounds to an integer, then in the lowest bits */
  *power = _mm256_fmadd_ps(x, y, magic);
  return _mm256_sub_ps(*power, magic);
}
TY_GELU_INLINE __m256 ty_gelu_scaled(__m256 e, __m256 power) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(power), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(e), exponent));
}
#endif

TY_GELU_INLINE ty_gelu_vector ty_gelu_polynomial(const float *c, const int count, ty_gelu_vector x) {
  ty_gelu_vector p = GELU(set1_ps)(c[0]);
#pragma GCC unroll 8
  for (int i = 1; i < count; i++) p = GELU(fmadd_ps)(p, x, GELU(set1_ps)(c[i]));
  return p;
}

TY_GELU_INLINE ty_gelu_vector ty_gelu_lanes(ty_gelu_vector x, const bool half) {
  const ty_gelu_vector a = GELU(min_ps)(GELU(set1_ps)(14.5f), ty_gelu_absolute(x)); /* of NaN, NaN */
  const ty_gelu_vector d = GELU(add_ps)(a, GELU(set1_ps)(3)), r = ty_gelu_estimate(d);
  const ty_gelu_vector t = GELU(fmadd_ps)(r, GELU(fnmadd_ps)(d, r, GELU(set1_ps)(1)), r);
  const ty_gelu_vector s = GELU(fmadd_ps)(t, GELU(set1_ps)(7.24137931f), GELU(set1_ps)(-1.4137931f));
  const ty_gelu_vector p = half ? ty_gelu_polynomial(ty_gelu_half_terms, 6, s)
                                : ty_gelu_polynomial(ty_gelu_terms, 9, s);
  const ty_gelu_vector c = GELU(set1_ps)(-0.72134752f), square = GELU(mul_ps)(a, a);
  ty_gelu_vector power, n = ty_gelu_whole(square, c, &power);
  ty_gelu_vector f = GELU(fmsub_ps)(square, c, n);
  if (!half) {
    f = GELU(fmadd_ps)(square, GELU(set1_ps)(-9.62981495e-09f), f);
    f = GELU(fmadd_ps)(GELU(fmsub_ps)(a, a, square), c, f);
  }
  const ty_gelu_vector e = half ? ty_gelu_polynomial(ty_gelu_half_powers, 5, f)
                                : ty_gelu_polynomial(ty_gelu_powers, 6, f);
  const ty_gelu_vector below = GELU(mul_ps)(GELU(mul_ps)(p, ty_gelu_scaled(e, power)), GELU(mul_ps)(t, a));
  return GELU(fnmadd_ps)(below, GELU(set1_ps)(0x1p-64f), GELU(max_ps)(GELU(setzero_ps)(), x));
}
#undef GELU
#endif

#endif
