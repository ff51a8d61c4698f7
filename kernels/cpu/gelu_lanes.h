/* gelu of a vector: ty_gelu_f32 with a quotient that is an estimate and a step of Newton's, and an exponential whose
 * powers of two cost an instruction. Within 5 ulp, 10 at -13, where results begin to be denormal. */
#ifndef TY_KERNELS_CPU_GELU_LANES_H
#define TY_KERNELS_CPU_GELU_LANES_H

#include "exp_weight.h"

#if defined(__AVX512F__)
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
#endif

#endif
