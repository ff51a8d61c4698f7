/* The product of PARTS_W numbers for each weight and PARTS_X for each element of x; included by quant_tiles.c with
 * NAME(x) set. It is that of gemm_blocked.h with W for A and x' for B, so that weights, which are more, need not be
 * turned: sums are those of y', and are turned in the end. */

typedef struct NAME(unit) {
  uint32_t room[2]; /* for the larger number of parts */
} NAME(unit);
#define UNIT NAME(unit)
#define GROUP 2
#define UNITS(g) ((g)->k / 2)
#define STARTS 0
#define ELEMENT(g) ((int64_t)sizeof(float))
#define MR PANEL
#define NR PANEL
#define VL PANEL
#define KC (MOST_K / 2)
#define MT 256         /* a tile of W, MT x KC, stays in the second cache */
#define MOST_N(g) 1024 /* and so do MT x 1024 sums */
#define SUMS_APART(g) true
#define PACKS_ALL true

#include "../matmul/gemm_ahead.h"

enum { NAME(step_w) = PARTS_W * STEP, NAME(step_x) = PARTS_X * STEP };

/* ---- 32 x 32 sums ---- */

/* Which parts of W and x meet in a step, the largest last, in an order in which one of the two stays. */
#if PARTS_W == 2 && PARTS_X == 2
#define MEETINGS TY_MEETINGS_2_2
#elif PARTS_W == 2
#define MEETINGS TY_MEETINGS_2_1
#else
#define MEETINGS TY_MEETINGS_1_2
#endif

#define MEET(pw, px, loads_w, loads_x)                                   \
  if (loads_w) { TY_TILES_A(w + (pw)*STEP, TY_TILE * TY_TILE, TY_TILE) } \
  if (loads_x) { TY_TILES_B(x + (px)*STEP, TY_TILE, PANEL) }             \
  TY_TILES_MULTIPLY(_tile_dpbf16ps)

/* c [PANEL][PANEL] = the sums of `steps` steps, or added to what is there. */
__attribute__((noinline, target(TY_TILES_TARGET))) static void NAME(native)(int64_t steps, const uint32_t *w,
                                                                            const uint32_t *x, float *c, bool add) {
  if (add) {
    TY_TILES_SUMS(_tile_loadd, c, PANEL)
  } else {
    TY_TILES_CLEAR()
  }
  for (int64_t s = 0; s < steps; s++, w += NAME(step_w), x += NAME(step_x)) { MEETINGS(MEET) }
  TY_TILES_SUMS(_tile_stored, c, PANEL)
}

/* The same without the instructions. */
static void NAME(plain)(int64_t steps, const uint32_t *w, const uint32_t *x, float *c, bool add) {
  if (!add) memset(c, 0, sizeof *c * PANEL * PANEL);
#define MEET_PLAIN(pw, px, loads_w, loads_x) \
  ty_tiles_plainly(32, w + (pw)*STEP, TY_TILE * TY_TILE, TY_TILE, x + (px)*STEP, TY_TILE, PANEL, c, PANEL);
  for (int64_t s = 0; s < steps; s++, w += NAME(step_w), x += NAME(step_x)) { MEETINGS(MEET_PLAIN) }
}

/* ---- for gemm_blocked.h, whose A is W and whose B is x' ---- */

/* Rows j0 .. j0+nc of x, units k0 .. k0+kc, as [steps][parts][16 units][PANEL]. */
static void NAME(pack_b)(const ty_gemm *g, int64_t k0, int64_t kc, int64_t j0, int64_t nc, UNIT *panel) {
  const ty_quant_product *p = g->a;
  for (int64_t s = 0, steps = kc / TY_TILE; s < steps; s += GROUPS_AT_ONCE)
    for (int64_t r = 0; r < PANEL; r += TY_TILE) {
      uint32_t *to = panel->room + s * NAME(step_x) + r;
      int64_t n = MIN2(GROUPS_AT_ONCE, steps - s);
      if (put_rows(p, PARTS_X, j0 + r, nc - r, 2 * k0 + 32 * s, n, to, NAME(step_x))) note_far(p);
    }
}

/* Rows i .. i+mr of W, units k0 .. k0+kc, as [steps][parts][PANEL][16 units]; the last row stands for those that are
 * missing. */
static void NAME(pack_rows)(const ty_quant_product *p, int64_t i, int64_t mr, int64_t k0, int64_t kc, uint32_t *to) {
  for (int64_t r = 0; r < PANEL; r++) {
    if (r + SOON < mr) fetch_row(p, i + r + SOON, 2 * k0, kc / TY_TILE);
    target t = { to + r * TY_TILE, NAME(step_w) };
    if (put_row(p, i + MIN2(r, mr - 1), 2 * k0, kc / TY_TILE, t)) note_far(p);
  }
}

#define ENTER ty_tiles_open()
#define LEAVE ty_tiles_close()
#define MULTIPLY "../quantized/quant_tiles_multiply.h" /* seen from gemm_blocked.h */
#include "../matmul/gemm_blocked.h"

#include "../matmul/gemm_blocked_end.h"
#undef MEETINGS
#undef MEET
#undef MEET_PLAIN
#undef PARTS_W
#undef PARTS_X
#undef NAME
