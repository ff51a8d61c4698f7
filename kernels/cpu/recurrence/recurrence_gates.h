/* What the gates of recurrent cells are made of, for whole vectors of f32: shorter than the general functions of
 * scalar.h (no two factors of an exponential, no two formulas of tanh), within some 3 ulp, NaN for NaN. */
#ifndef TY_KERNELS_CPU_RECURRENCE_GATES_H
#define TY_KERNELS_CPU_RECURRENCE_GATES_H

#include "../exp_weight.h"

/* 2^(x * factor), for results that are normal numbers, as 2^n (1 + m). */
static inline __m512 gate_exp2(__m512 x, float factor, __m512 *m) {
  const __m512 by = _mm512_set1_ps(factor), rounder = _mm512_set1_ps(TY_ROUNDER_F32);
  __m512 z = _mm512_fmadd_ps(x, by, rounder), f = _mm512_fmsub_ps(x, by, _mm512_sub_ps(z, rounder));
  *m = _mm512_mul_ps(ty_exp2_slopes(f), f);
  __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(z), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)));
}

/* The second operand comes out of min and max when one is NaN. */
static inline __m512 gate_clamp(__m512 x, float limit) {
  return _mm512_min_ps(_mm512_set1_ps(limit), _mm512_max_ps(_mm512_set1_ps(-limit), x));
}

static inline __m512 gate_sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1);
  __m512 m, s = gate_exp2(gate_clamp(x, 87), -1.44269504f, &m);
  return _mm512_div_ps(one, _mm512_fmadd_ps(s, m, _mm512_add_ps(s, one)));
}

/* e / (e + 2) with e = exp(2x) - 1, which keeps its digits near 0. Beyond the limit it is 1. */
static inline __m512 gate_tanh(__m512 x) {
  __m512 m, s = gate_exp2(gate_clamp(x, 9.2f), 2.88539008f, &m);
  __m512 e = _mm512_fmadd_ps(s, m, _mm512_sub_ps(s, _mm512_set1_ps(1)));
  return _mm512_div_ps(e, _mm512_add_ps(e, _mm512_set1_ps(2)));
}

/* log(sigmoid(x)) = min(x, 0) - log(1 + e), e = exp(-|x|), and its slope, sigmoid(-x). The logarithm is
 * 2 artanh(e / (2 + e)), by a minimax polynomial within 4e-9. */
static inline __m512 gate_log_sigmoid(__m512 x, __m512 *slope) {
  const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1);
  __m512 e = ty_exp_weights(_mm512_sub_ps(zero, _mm512_abs_ps(x)));
  __m512 s = _mm512_div_ps(e, _mm512_add_ps(e, _mm512_set1_ps(2))), w = _mm512_mul_ps(s, s);
  __m512 p = _mm512_set1_ps(0.281783342f);
  p = _mm512_fmadd_ps(p, w, _mm512_set1_ps(0.279606014f));
  p = _mm512_fmadd_ps(p, w, _mm512_set1_ps(0.400249094f));
  p = _mm512_fmadd_ps(p, w, _mm512_set1_ps(0.66666317f));
  p = _mm512_fmadd_ps(p, w, _mm512_set1_ps(2));
  __mmask16 negative = _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ);
  *slope = _mm512_div_ps(_mm512_mask_mov_ps(e, negative, one), _mm512_add_ps(e, one));
  return _mm512_fnmadd_ps(s, p, _mm512_min_ps(zero, x));
}

/* Of the maximum of a and b what the gradient gives a: at a tie both have half. */
static inline __m512 gate_share(__m512 a, __m512 b) {
  __m512 share = _mm512_mask_mov_ps(_mm512_set1_ps(0.5f), _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), _mm512_set1_ps(1));
  return _mm512_mask_mov_ps(share, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), _mm512_setzero_ps());
}

#endif
