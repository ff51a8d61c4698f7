/* exp() of what is at most about 0, as in softmax weights: half the work of the general one. */
#ifndef TY_KERNELS_CPU_EXP_WEIGHT_H
#define TY_KERNELS_CPU_EXP_WEIGHT_H

#include "../scalar.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

static inline float ty_exp_weight_f32(float x) { return ty_exp_flushed_f32(x); }
#if defined(__AVX512F__)
/* (2^f - 1) / f for |f| <= 1/2, so that 2^f is within 3e-9. */
static inline __m512 ty_exp2_slopes(__m512 f) {
  __m512 p = _mm512_set1_ps(0x1.446c7ep-13f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.5f48c8p-10f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.3b29d8p-7f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6aeccp-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebfbe0p-3f));
  return _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e430p-1f));
}

/* The same for a vector, in half the instructions: 2^(x log2(e)). */
static inline __m512 ty_exp_weights(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504f);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, log2e), 0);
  __m512 f = _mm512_fmsub_ps(x, log2e, n), p = _mm512_fmadd_ps(ty_exp2_slopes(f), f, _mm512_set1_ps(1));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ), p, n);
}
#endif

static inline double ty_exp_weight_f64(double x) { return exp(x); }

#endif
