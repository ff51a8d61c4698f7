/* The matrix product on tiles for one type of elements; included by gemm_tiles.c with PLANES, PIECE (the type of an
 * element) and NAME(x) set. Sums are of f32, in blocks of k as everywhere (gemm_blocked.h).
 *
 * f32 and f16 are sums of numbers of bf16 (gemm_tiles_pack.h), and their products sums of products of these, of which
 * those below the last bit of a f32 are left out. The unit adds up the products of a pair without rounding between, so
 * that errors are below those of a chain of additions of f32. */

typedef struct NAME(unit) {
  uint32_t plane[PLANES];
} NAME(unit);
#define UNIT NAME(unit)
#define GROUP 2
#define UNITS(g) (((g)->k + 31) / 32 * TY_TILE)
#define STARTS 1
#define ELEMENT(g) ((int64_t)sizeof(PIECE))
#define MR 32
#define NR 32
#define VL 32
#define KC (PLANES == 1 ? 1024 : 256) /* a panel of B stays in the first cache */
#define MT 256                        /* a tile of A, MT x KC, stays in the second */
#define MOST_N(g) 1024                /* and so do MT x 1024 sums */
#define SUMS_APART(g) true
#define PACKS_ALL true /* B once for all tiles: packing costs as much as many products */

#include "gemm_ahead.h"
#include "gemm_finish.h"
#include "gemm_tiles_pack.h"

static void NAME(starts)(const ty_gemm *g, int64_t kc, UNIT *panel) {} /* pack_b has done it */

/* ---- 32 x 32 sums ---- */

#if PLANES == 3
#define MEETINGS TY_MEETINGS_3_3
#elif PLANES == 2
#define MEETINGS TY_MEETINGS_2_2
#else
#define MEETINGS TY_MEETINGS_1_1
#endif

#define MEET(pa, pb, loads_a, loads_b)                                         \
  if (loads_a) { TY_TILES_A(a + (pa)*NAME(step), TY_TILE * TY_TILE, TY_TILE) } \
  if (loads_b) { TY_TILES_B(b + (pb)*NAME(step), TY_TILE, NR) }                \
  TY_TILES_MULTIPLY(_tile_dpbf16ps)

/* c [MR][NR] = the sums of `steps` steps, or added to what is there. */
__attribute__((noinline, target(TY_TILES_TARGET))) static void NAME(native)(int64_t steps, const uint32_t *a,
                                                                            const uint32_t *b, float *c, bool add) {
  if (add) {
    TY_TILES_SUMS(_tile_loadd, c, NR)
  } else {
    TY_TILES_CLEAR()
  }
  for (int64_t s = 0; s < steps; s++, a += NAME(whole_step), b += NAME(whole_step)) { MEETINGS(MEET) }
  TY_TILES_SUMS(_tile_stored, c, NR)
}

/* The same without the instructions. */
static void NAME(plain)(int64_t steps, const uint32_t *a, const uint32_t *b, float *c, bool add) {
  if (!add) memset(c, 0, MR * NR * sizeof *c);
#define MEET_PLAIN(pa, pb, loads_a, loads_b) \
  ty_tiles_plainly(32, a + (pa)*NAME(step), TY_TILE * TY_TILE, TY_TILE, b + (pb)*NAME(step), TY_TILE, NR, c, NR);
  for (int64_t s = 0; s < steps; s++, a += NAME(whole_step), b += NAME(whole_step)) { MEETINGS(MEET_PLAIN) }
}

/* ---- what has no parts ---- */

#if PLANES > 1
static inline float NAME(element)(const void *from, int64_t at) {
#if PLANES == 2
  return ty_f16_to_f32(((const uint16_t *)from)[at]);
#else
  return ((const float *)from)[at];
#endif
}

/* Sums [MR][NR] of a block from the elements themselves, or added to c: by vectors, eight rows at a time. */
static void NAME(odd_block)(const ty_gemm *g, int64_t i, int64_t mr, int64_t k0, int64_t kc, int64_t j, int64_t nc,
                            float *c, bool add) {
  enum { ROWS = 8 };
  int64_t first = 2 * k0, count = MIN2(2 * kc, g->k - first);
  float panel[2 * KC * NR] __attribute__((aligned(64))), rows[2 * KC * ROWS];
  if (nc < NR || !g->pack) memset(panel, 0, sizeof *panel * (size_t)(count * NR));
  if (g->pack) g->pack(g->b, g->k0 + first, count, j, nc, panel, NR);
  else
    for (int64_t k = 0; k < count; k++)
      for (int64_t s = 0; s < nc; s++)
        panel[k * NR + s] = NAME(element)(g->b, (first + k) * g->b_row + (j + s) * g->b_col);
  for (int64_t r = 0; r < mr; r += ROWS, c += ROWS * NR) {
    __m512 sums[ROWS][2];
    for (int64_t k = 0; k < count; k++)
      for (int q = 0; q < ROWS; q++)
        rows[k * ROWS + q] = r + q < mr ? NAME(element)(g->a, (i + r + q) * g->a_row + (first + k) * g->a_col) : 0;
#pragma GCC unroll 8
    for (int q = 0; q < ROWS; q++)
      for (int v = 0; v < 2; v++) sums[q][v] = add ? _mm512_loadu_ps(c + q * NR + 16 * v) : _mm512_setzero_ps();
    for (int64_t k = 0; k < count; k++) {
      __m512 y0 = _mm512_load_ps(panel + k * NR), y1 = _mm512_load_ps(panel + k * NR + 16);
#pragma GCC unroll 8
      for (int q = 0; q < ROWS; q++) {
        __m512 x = _mm512_set1_ps(rows[k * ROWS + q]);
        sums[q][0] = _mm512_fmadd_ps(x, y0, sums[q][0]);
        sums[q][1] = _mm512_fmadd_ps(x, y1, sums[q][1]);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < ROWS; q++)
      for (int v = 0; v < 2; v++) _mm512_storeu_ps(c + q * NR + 16 * v, sums[q][v]);
  }
}
#endif

#define ROW_MARKS
#define ENTER ty_tiles_open()
#define LEAVE ty_tiles_close()
#define MULTIPLY "gemm_tiles_multiply.h"
#include "gemm_blocked.h"

bool TILED(const ty_gemm *g) { return NAME(tiled)(g, true); }

#include "gemm_blocked_end.h"
#undef LOAD_16
#undef MEETINGS
#undef MEET
#undef MEET_PLAIN
#undef PLANES
#undef PIECE
#undef NAME
#undef SCALAR
#undef TILED
