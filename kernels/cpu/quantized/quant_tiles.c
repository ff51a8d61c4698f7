/* Products of many rows of x with block-quantized weights on tiles of sums (tiles.h). Rows of x are rounded to bytes as
 * everywhere (quant_codes.h); Q8_0 is multiplied as bytes too (quant_tiles_scaled.h). Other weights are decoded to one
 * or two numbers of bf16 that add up to them, and bytes of x times their scales likewise (quant_tiles_parts.h): what
 * the parts of both make is summed up in the tiles, which no scales interrupt. One number holds E2M1 with a scale of
 * few bits, and bytes with a power of two; two have 16 bits, whose rounding is far below that of x to bytes.
 *
 * Elements i and i + 16 of each group of 32 lie side by side in a unit, which spares both sides a shuffle. */
#include "quant_tiles.h"

#include "dequantize.h"
#include "../matmul/gemm.h"
#include "quant_codes.h"

#if defined(__AVX512F__)
#include "../tiles.h"
#endif

#if defined(TY_TILES)

/* Up to here products stay in range: of scales of x, and of weights. */
#define FAR_X 0x1p54f
#define FAR_W 0x1p54f

#define MIN2(a, b) ((a) < (b) ? (a) : (b))
#define INLINE static inline __attribute__((always_inline))

/* Rows of W or x in a panel; units of one part of a step of it; elements of k in a block; rows of W that are asked for
 * ahead of decoding. */
enum { PANEL = 32, STEP = 2 * TY_TILE * TY_TILE, MOST_K = 256, SOON = 4 };

INLINE __m512i upper_half(__m512 x) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  return _mm512_add_epi32(_mm512_castps_si512(x), half);
}

/* A unit of each lane's two numbers: part p of `parts`, `apart` units from the one before. */
INLINE void put_units(const int parts, __m512 x0, __m512 x1, uint32_t *to, int64_t apart) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
#pragma GCC unroll 2
  for (int p = 0; p < parts; p++, to += apart) {
    __m512i h0 = upper_half(x0), h1 = _mm512_and_si512(upper_half(x1), upper);
    _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(h0, 16), h1));
    x0 = _mm512_sub_ps(x0, _mm512_castsi512_ps(_mm512_and_si512(h0, upper)));
    x1 = _mm512_sub_ps(x1, _mm512_castsi512_ps(h1));
  }
}

static void note_far(const ty_quant_product *p) {
  __atomic_store_n(&((ty_quant_product *)(uintptr_t)p)->far, true, __ATOMIC_RELAXED);
}

#include "quant_tiles_w.h"
#include "quant_tiles_x.h"

/* Rows r .. r+rows of y, columns j .. j+columns, from sums [PANEL of columns][PANEL of rows]. */
static void put_turned(const ty_quant_product *p, int64_t j, int64_t columns, int64_t r, int64_t rows,
                       const float *sums) {
  for (int64_t half = 0; half < columns; half += TY_TILE, sums += TY_TILE * PANEL) {
    const __mmask16 in = columns - half < TY_TILE ? (__mmask16)((1 << (columns - half)) - 1) : 0xffff;
    __m512 bias = p->bias ? _mm512_maskz_loadu_ps(in, p->bias + j + half) : _mm512_setzero_ps(),
           factor = _mm512_set1_ps(1);
    float factors[TY_TILE] = { 0 };
    if (p->dtype == TY_NVFP4) {
      for (int64_t i = 0; i < TY_TILE && half + i < columns; i++)
        factors[i] = ty_nvfp4_factor(p->w + (j + half + i) * p->w_row);
      factor = _mm512_loadu_ps(factors);
    }
    for (int64_t first = 0; first < rows; first += TY_TILE) {
      __m512i from[TY_TILE];
      float turned[TY_TILE][TY_TILE] __attribute__((aligned(64)));
      for (int64_t i = 0; i < TY_TILE; i++) from[i] = _mm512_loadu_si512(sums + i * PANEL + first);
      ty_tile_turn(from, (uint32_t *)(void *)turned, TY_TILE);
      float *y = p->y + (r + first) * p->n + j + half;
      for (int64_t i = 0; i < TY_TILE && first + i < rows; i++, y += p->n)
        _mm512_mask_storeu_ps(y, in, _mm512_fmadd_ps(_mm512_load_ps(turned[i]), factor, bias));
    }
  }
}

#include "quant_tiles_scaled.h"

typedef float REAL;

#define PARTS_W 2
#define PARTS_X 1
#define NAME(x) x##_21
#include "quant_tiles_parts.h"

#define PARTS_W 1
#define PARTS_X 2
#define NAME(x) x##_12
#include "quant_tiles_parts.h"

#define PARTS_W 2
#define PARTS_X 2
#define NAME(x) x##_22
#include "quant_tiles_parts.h"

bool TY_KERNEL(quant_has_tiles)(ty_dtype dtype, int64_t rows, int64_t n) {
  int64_t least = 17; /* rows of x from which on this beats bytes in vectors, or f32 */
  if (ty_tiles() == TY_NO_TILES || dtype == TY_NF4) return false;
  if (dtype == TY_Q8_0) least = 56;
  if (dtype == TY_Q4_0 || dtype == TY_Q4_K) least = 64;
  if (dtype == TY_Q6_K) least = 88;
  if (dtype == TY_MXFP4) least = 28;
  return rows >= least && n >= 16;
}

bool TY_KERNEL(quant_tiles)(ty_quant_product *p) {
  ty_gemm g = { .m = p->n, .n = p->rows, .k = p->k, .a = p, .b = p->x, .b_row = 1, .b_col = p->k, .c = p->y };
  switch (p->dtype) {
    case TY_Q8_0: return by_scaled_sums(p);
    case TY_Q4_0:
    case TY_Q4_K: return tiled_21(&g, true);
    case TY_MXFP4:
    case TY_NVFP4: return tiled_12(&g, true);
    default: return tiled_22(&g, true);
  }
}

#else
bool TY_KERNEL(quant_has_tiles)(ty_dtype dtype, int64_t rows, int64_t n) { return false; }
bool TY_KERNEL(quant_tiles)(ty_quant_product *p) { return false; }
#endif
