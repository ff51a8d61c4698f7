/* matmul_int8 on tiles of sums (tiles.h): a step takes 64 elements of k, four neighbours in a unit. */
#include "gemm.h"

#if defined(__AVX512F__)
#include "../tiles.h"
#endif

#if defined(TY_TILES)

#define MIN2(a, b) ((a) < (b) ? (a) : (b))

typedef int32_t REAL;
#define NAME(x) x##_tiles_int8
#define UNIT uint32_t
#define GROUP 4
#define PIECE uint8_t
#define UNITS(g) (((g)->k + 63) / 64 * TY_TILE)
#define STARTS 0
#define ELEMENT(g) 1
#define MR 32
#define NR 32
#define VL 32
#define KC 512         /* a panel of B nearly stays in the first cache, */
#define MT 256         /* a tile of A, MT x KC, in the second */
#define MOST_N(g) 1024 /* and so do MT x 1024 sums */
#define SUMS_APART(g) true
#define PACKS_ALL true

#include "gemm_ahead.h"

enum { STEP = TY_TILE * 2 * TY_TILE }; /* units of a step, of A as of B */

/* ---- panels ---- */

static __mmask64 first_bytes(int64_t n) { return n >= 64 ? ~(__mmask64)0 : n <= 0 ? 0 : ((__mmask64)1 << n) - 1; }

/* 16 lines of 16 units, neighbours in k. Of the lines `lines` exist, of k `k` elements; the others are 0. */
static void lines_of_units(const uint8_t *from, int64_t line_stride, int64_t k_stride, int64_t lines, int64_t k,
                           __m512i *to) {
  uint8_t gathered[TY_TILE][64];
  if (k_stride != 1) {
    for (int64_t q = 0; q < 64 && q < k; q++)
      for (int64_t i = 0; i < TY_TILE && i < lines; i++) gathered[i][q] = from[i * line_stride + q * k_stride];
    from = gathered[0], line_stride = 64;
  }
  for (int64_t i = 0; i < TY_TILE; i++)
    to[i] = _mm512_maskz_loadu_epi8(i < lines ? first_bytes(k) : 0, from + i * line_stride);
}

/* 16 units of 16 lines from rows of elements that are neighbours across the lines. */
static void units_of_rows(const uint8_t *from, int64_t k_stride, int64_t lines, int64_t k, __m512i *to) {
  const __mmask16 in = (__mmask16)first_bytes(MIN2(lines, TY_TILE));
  for (int64_t u = 0; u < TY_TILE; u++, from += 4 * k_stride, k -= 4) {
    __m128i r[4];
    for (int q = 0; q < 4; q++) r[q] = _mm_maskz_loadu_epi8(q < k ? in : 0, from + q * k_stride);
    __m128i low = _mm_unpacklo_epi8(r[0], r[1]), high = _mm_unpackhi_epi8(r[0], r[1]);
    __m128i low2 = _mm_unpacklo_epi8(r[2], r[3]), high2 = _mm_unpackhi_epi8(r[2], r[3]);
    __m512i v = _mm512_castsi128_si512(_mm_unpacklo_epi16(low, low2));
    v = _mm512_inserti32x4(v, _mm_unpackhi_epi16(low, low2), 1);
    v = _mm512_inserti32x4(v, _mm_unpacklo_epi16(high, high2), 2);
    to[u] = _mm512_inserti32x4(v, _mm_unpackhi_epi16(high, high2), 3);
  }
}

/* A block of 16 lines (rows of A, columns of B) by 64 elements of k. Rows of `to` are `row` units apart: a row for each
 * line, or, turned, for each unit. */
static void put_block(const uint8_t *from, int64_t line_stride, int64_t k_stride, int64_t lines, int64_t k, bool turned,
                      uint32_t *to, int64_t row) {
  __m512i v[TY_TILE];
  bool by_rows = line_stride == 1 && k_stride != 1;
  if (by_rows) units_of_rows(from, k_stride, lines, k, v);
  else lines_of_units(from, line_stride, k_stride, lines, k, v);
  if (by_rows != turned) {
    ty_tile_turn(v, to, row);
    return;
  }
  for (int64_t i = 0; i < TY_TILE; i++) _mm512_storeu_si512(to + i * row, v[i]);
}

/* Columns j0 .. j0+nc of B, units k0 .. k0+kc, as [steps][16 units][NR]. */
static void NAME(pack_b)(const ty_gemm *g, int64_t k0, int64_t kc, int64_t j0, int64_t nc, uint32_t *panel) {
  const uint8_t *b = (const uint8_t *)g->b + 4 * k0 * g->b_row + j0 * g->b_col;
  for (int64_t k = 0; k < 4 * kc; k += 64, panel += STEP)
    for (int64_t j = 0; j < NR; j += TY_TILE)
      put_block(b + k * g->b_row + j * g->b_col, g->b_col, g->b_row, nc - j, g->k - 4 * k0 - k, true, panel + j, NR);
}

/* Rows i .. i+mr of A, units k0 .. k0+kc, as [steps][MR][16 units]. */
static void pack_rows(const ty_gemm *g, int64_t i, int64_t mr, int64_t k0, int64_t kc, uint32_t *to) {
  const uint8_t *a = (const uint8_t *)g->a + i * g->a_row + 4 * k0 * g->a_col;
  for (int64_t k = 0; k < 4 * kc; k += 64, to += STEP)
    for (int64_t r = 0; r < MR; r += TY_TILE)
      put_block(a + r * g->a_row + k * g->a_col, g->a_row, g->a_col, mr - r, g->k - 4 * k0 - k, false, to + r * TY_TILE,
                TY_TILE);
}

/* ---- 32 x 32 sums ---- */

#define STEPS(multiply)                                       \
  for (int64_t s = 0; s < steps; s++, a += STEP, b += STEP) { \
    TY_TILES_A(a, TY_TILE *TY_TILE, TY_TILE)                  \
    TY_TILES_B(b, TY_TILE, NR)                                \
    TY_TILES_MULTIPLY(multiply)                               \
  }

/* c [MR][NR] = the sums of `steps` steps, or added to what is there. */
__attribute__((noinline, target(TY_TILES_TARGET))) static void native(int64_t steps, const uint32_t *a,
                                                                      const uint32_t *b, int32_t *c, bool has_sign,
                                                                      bool add) {
  if (add) {
    TY_TILES_SUMS(_tile_loadd, c, NR)
  } else {
    TY_TILES_CLEAR()
  }
  if (has_sign) {
    STEPS(_tile_dpbssd)
  } else {
    STEPS(_tile_dpbusd)
  }
  TY_TILES_SUMS(_tile_stored, c, NR)
}

/* The same without the instructions. */
static void plain(int64_t steps, const uint32_t *a, const uint32_t *b, int32_t *c, bool has_sign, bool add) {
  if (!add) memset(c, 0, sizeof *c * MR * NR);
  for (int64_t s = 0; s < steps; s++, a += STEP, b += STEP)
    for (int64_t i = 0; i < MR; i++)
      for (int64_t u = 0; u < TY_TILE; u++)
        for (int64_t j = 0; j < NR; j++)
          for (int q = 0; q < 4; q++) {
            uint8_t x = (uint8_t)(a[i * TY_TILE + u] >> 8 * q);
            int32_t y = (int8_t)(b[u * NR + j] >> 8 * q);
            c[i * NR + j] = (int32_t)((uint32_t)c[i * NR + j] + (uint32_t)((has_sign ? (int8_t)x : x) * y));
          }
}

#define ENTER ty_tiles_open()
#define LEAVE ty_tiles_close()
#define MULTIPLY "gemm_tiles_int8.h"
#include "gemm_blocked.h"

bool TY_KERNEL(gemm_int8_has_tiles)(const ty_gemm *g) {
  return ty_tiles() != TY_NO_TILES && g->m >= 16 && g->n >= 16 && g->k >= 32;
}

bool TY_KERNEL(gemm_int8_tiles)(const ty_gemm *g) { return NAME(tiled)(g, true); }

#else
bool TY_KERNEL(gemm_int8_has_tiles)(const ty_gemm *g) { return false; }
bool TY_KERNEL(gemm_int8_tiles)(const ty_gemm *g) { return false; }
#endif
