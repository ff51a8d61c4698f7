/* Convolutions of bf16 and f32 on tiles of sums (tiles.h): what is multiplied is the source itself, packed once, not a
 * matrix of its windows. f32 is split into three numbers of bf16, as in matrix products (gemm_tiles_pack.h). */
#include <string.h>

#include "../activation.h"
#include "conv_lattice.h"
#include "conv_tiles.h"

#include "../../half.h"

#if defined(__AVX512F__)
#include "../tiles.h"
#endif

#if defined(TY_TILES)
/* 16 sums as bf16, to the nearest. */
TILE_INLINE __m256i rounded(__m512 x) {
  __m512i u = _mm512_castps_si512(x), even = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i sum = _mm512_add_epi32(u, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  sum = _mm512_mask_or_epi32(sum, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
}

#define PLANES 1
#define PIECE uint16_t
#define NAME(x) x##_bf16
#define MEETINGS TY_MEETINGS_1_1
#include "conv_tiles_elements.h"
#include "conv_tiles_real.h"
#include "conv_tiles_weight_real.h"
#undef PLANES
#undef PIECE
#undef NAME
#undef MEETINGS

#define PLANES 3
#define PIECE float
#define NAME(x) x##_f32
#define MEETINGS TY_MEETINGS_3_3
#include "conv_tiles_elements.h"
#include "conv_tiles_real.h"
#include "conv_tiles_weight_real.h"

/* 1x1 kernels see images whose rows are long: a few rows of the image as one. */
static conv_shape long_rows(const conv_shape *given) {
  enum { LONG = 1024 };
  conv_shape s = *given;
  if (s.kh * s.kw != 1 || s.sh != 1 || s.sw != 1 || s.ph || s.pw) return s;
  int64_t together = 1;
  for (int64_t n = 2; n <= s.h && n * s.w <= LONG; n++)
    if (s.h % n == 0) together = n;
  s.h /= together, s.w *= together, s.oh = s.h, s.ow = s.w;
  return s;
}

bool TY_KERNEL(conv_tiles)(const conv_shape *given, const conv_tiles_call *c, bool *done) {
  lattice l;
  conv_shape rows = long_rows(given), *s = &rows;
  *done = false;
  if (ty_tiles() == TY_NO_TILES) return true;
  if (c->backward ? !lattice_backward(s, &l) : !lattice_forward(s, &l)) return true;
  bool ok, odd;
  if (c->half) {
    job_bf16 j = {
      .l = &l, .x = c->x, .residual = c->residual, .y = c->y, .bias = c->bias, .activation = c->activation
    };
    ok = run_bf16(&j, s, c->weight, c->backward);
    odd = j.odd;
  } else {
    job_f32 j = {
      .l = &l, .x = c->x, .residual = c->residual, .y = c->y, .bias = c->bias, .activation = c->activation
    };
    ok = run_f32(&j, s, c->weight, c->backward);
    odd = j.odd;
  }
  *done = ok && !odd;
  return ok;
}

bool TY_KERNEL(conv_tiles_weight)(const conv_shape *given, ty_dtype half, const void *g, const void *x, void *dw,
                                  bool *done) {
  lattice l;
  conv_shape rows = long_rows(given), *s = &rows;
  *done = false;
  if (ty_tiles() == TY_NO_TILES || !lattice_forward(s, &l)) return true;
  bool ok, odd;
  if (half) {
    slopes_bf16 w = { .l = &l, .s = s, .x = x, .g = g, .dw = dw };
    ok = slopes_of_bf16(&w), odd = w.odd;
  } else {
    slopes_f32 w = { .l = &l, .s = s, .x = x, .g = g, .dw = dw };
    ok = slopes_of_f32(&w), odd = w.odd;
  }
  *done = ok && !odd;
  return ok;
}

#else
bool TY_KERNEL(conv_tiles_weight)(const conv_shape *s, ty_dtype half, const void *g, const void *x, void *dw,
                                  bool *done) {
  *done = false;
  return true;
}

bool TY_KERNEL(conv_tiles)(const conv_shape *s, const conv_tiles_call *c, bool *done) {
  *done = false;
  return true;
}
#endif
