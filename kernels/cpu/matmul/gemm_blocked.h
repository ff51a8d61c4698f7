/* Large matrix products for one element type, after Goto and van de Geijn 2008: C is cut into tiles, which are computed
 * independently; a tile goes through k in blocks and copies panels of B, and of A, in the order in which the
 * micro-kernel reads them. Every element of C is summed over k in the same order, in blocks of KC, whatever the tiles.
 *
 * Panels are packed one by one just before their first use, while their sources are already on the way: the
 * micro-kernels ask for the lines of the next panels as they go.
 *
 * Included with what gemm_micro.h wants, besides GROUP (elements of k in a unit), ELEMENT(g) (bytes of an element of A
 * and B), pack_a, pack_b, finish, finishes, and if STARTS is 1 starts, which writes the row before a panel; or with what
 * gemm_tiles_real.h sets, whose MULTIPLY is another file than gemm_multiply.h. */

#ifndef MULTIPLY
#define MULTIPLY "gemm_multiply.h"
#define MT (MR * 64) /* a tile of A, MT x KC, stays in the second */
#define MOST_N(g) (NR * ((g)->c_half ? 16 : 32))
#define UNITS(g) (((g)->k + GROUP - 1) / GROUP)
#define PACKS_ALL false
#define SUMS_APART(g) ((g)->c_half != 0)
#define ENTER
#define LEAVE
#endif
#define SERIAL_WORK 262144 /* m n k up to which one thread is faster than two */

typedef struct NAME(tiling) {
  const ty_gemm *g;
  int64_t tile_m, tile_n, tiles_n;
  UNIT *kept; /* all panels of B, or NULL: they are packed as they are needed */
  bool packs_a, failed;
} NAME(tiling);

/* ---- panels of B that are kept ----
 * Those of one block of k after the other, [block][panel][STARTS + kc][NR]. */

/* The panel at k0, j, of kc units. */
static UNIT *NAME(kept_panel)(const NAME(tiling) * t, int64_t k0, int64_t kc, int64_t j) {
  int64_t wide = (t->g->n + NR - 1) / NR * NR;
  return t->kept + (k0 + k0 / KC * STARTS) * wide + j * (STARTS + kc) + STARTS * NR;
}

static void NAME(fill_panel)(const ty_gemm *g, int64_t k0, int64_t kc, int64_t j, int64_t nc, UNIT *panel) {
  NAME(pack_b)(g, k0, kc, j, nc, panel);
#if STARTS
  NAME(starts)(g, kc, panel);
#endif
}

static void NAME(fill_panels)(void *context, int64_t begin, int64_t end) {
  const NAME(tiling) *t = context;
  const ty_gemm *g = t->g;
  int64_t units = UNITS(g);
  for (int64_t j = begin * NR; j < end * NR && j < g->n; j += NR)
    for (int64_t k0 = 0; k0 < units; k0 += KC) {
      int64_t kc = MIN2(KC, units - k0);
      NAME(fill_panel)(g, k0, kc, j, MIN2(NR, g->n - j), NAME(kept_panel)(t, k0, kc, j));
    }
}

static ty_kept NAME(open_kept)(NAME(tiling) * t, int threads) {
  static const char maker;
  const ty_gemm *g = t->g;
  int64_t units = UNITS(g), panels = (g->n + NR - 1) / NR, blocks = (units + KC - 1) / KC;
  ty_kept_form form = { g->b, &maker, { g->n, g->k, g->b_row, g->b_col, g->half, g->signed_bytes } };
  size_t bytes = sizeof(UNIT) * (size_t)((units + blocks * STARTS) * panels * NR);
  ty_kept kept = ty_kept_open(g->weights, &form, bytes, PACKS_ALL && g->m > MT);
  t->kept = kept.data;
  if (!kept.data || kept.filled) return kept;
  if (threads > 1) ty_parallel_for_all(panels, 1, NAME(fill_panels), t);
  else NAME(fill_panels)(t, 0, panels);
  return kept;
}

/* ---- tiles ---- */

/* The panel of B that follows the one at k0, j in a tile of columns j0 .. j1, or its source. */
static ty_region NAME(next_panel)(const NAME(tiling) * t, int64_t units, int64_t k0, int64_t j, int64_t j0,
                                  int64_t j1) {
  const ty_gemm *g = t->g;
  j += NR;
  if (j >= j1) {
    j = j0;
    k0 += KC;
  }
  if (k0 >= units || g->pack) return (ty_region){ 0 };
  int64_t size = ELEMENT(g), kc = MIN2(KC, units - k0), nc = MIN2(NR, j1 - j);
  if (t->kept)
    return (ty_region){ (const char *)NAME(kept_panel)(t, k0, kc, j), 0, 1, kc * NR * (int64_t)sizeof(UNIT), 0 };
  kc *= GROUP;
  const char *b = (const char *)g->b + (k0 * GROUP * g->b_row + j * g->b_col) * size;
  if (g->b_col == 1) return (ty_region){ b, g->b_row * size, kc, nc * size, 0 };
  return (ty_region){ b, g->b_col * size, nc, kc * size, 0 };
}

/* Where the loops over a tile of C stand. */
typedef struct {
  int64_t i0, i1, j0, j1; /* the tile */
  UNIT *packed_a;         /* room for its rows of A; NULL: A is read where it lies */
  REAL *sums;             /* where sums wait for the next block, if they do apart from C; NULL: in C */
  int64_t k0, kc;         /* the block of k, in units */
  bool last, add;         /* it is the last one; its sums are added to what is there */
  int64_t j, nc;          /* the panel of B */
  const UNIT *b;
  int64_t b_row;
  ty_region next; /* what is read after this panel, of which each tile of rows asks for a share ahead */
  int64_t share;
#ifdef ROW_MARKS
  bool marks[MT / MR]; /* of the tile's rows of A in this block, for MULTIPLY */
#endif
} NAME(place);

#include MULTIPLY /* panel_of_tile */

/* The tile of C at i0 .. i1, j0 .. j1. Sums go to C, or if they are to lie apart (where C is of half precision, and from
 * the tiles of the CPU) and k has several blocks to `sums`, panel by panel. */
static void NAME(tile)(const NAME(tiling) * t, int64_t i0, int64_t i1, int64_t j0, int64_t j1, UNIT *packed_a,
                       REAL *sums) {
  const ty_gemm *g = t->g;
  UNIT space[(STARTS + KC) * NR] __attribute__((aligned(64))), *const panel = space + STARTS * NR;
  NAME(place) at = { .i0 = i0, .i1 = i1, .j0 = j0, .j1 = j1, .packed_a = packed_a, .sums = sums };
  int64_t units = UNITS(g);
#ifdef STRIDED
  /* B is too rarely read to pay for packing, and its rows do not all fall into the same sets of the cache. */
  bool apart = g->b_row * ELEMENT(g) % 4096 != 0;
  bool in_place = GROUP == 1 && !packed_a && !g->pack && g->b_col == 1 && i1 - i0 <= (apart ? 8 : 4) * MR;
#endif
  for (at.k0 = 0; at.k0 < units && !ty_interrupted; at.k0 += KC) {
    at.kc = MIN2(KC, units - at.k0);
    at.last = at.k0 + at.kc == units;
    at.add = g->add || at.k0 > 0;
    for (at.j = j0; at.j < j1; at.j += NR) {
      at.nc = MIN2(NR, j1 - at.j);
      at.b = t->kept ? NAME(kept_panel)(t, at.k0, at.kc, at.j) : panel;
      at.b_row = NR;
      bool there = t->kept != NULL;
#ifdef STRIDED
      if (in_place && at.nc == NR) {
        at.b = (const UNIT *)g->b + at.k0 * g->b_row + at.j;
        at.b_row = g->b_row;
        there = true;
      }
#endif
      if (!there) NAME(fill_panel)(g, at.k0, at.kc, at.j, at.nc, panel);
      at.next = NAME(next_panel)(t, units, at.k0, at.j, j0, j1);
      at.share = (ty_region_lines(&at.next) * MR + i1 - i0 - 1) / (i1 - i0);
      NAME(panel_of_tile)(g, &at);
    }
  }
}

static void NAME(tiles)(void *context, int64_t begin, int64_t end) {
  NAME(tiling) *t = context;
  const ty_gemm *g = t->g;
  int64_t wide = (t->tile_n + NR - 1) / NR * NR, units = UNITS(g);
  int64_t rows = (t->tile_m + MR - 1) / MR * MR;
  int64_t for_sums = SUMS_APART(g) && units > KC ? rows * wide : 0;
  int64_t for_a = t->packs_a ? rows * MIN2(units, KC) : 0;
  size_t bytes = sizeof(UNIT) * (size_t)for_a + sizeof(REAL) * (size_t)for_sums;
  char *scratch = bytes ? ty_scratch_alloc(bytes) : NULL;
  if (bytes && !scratch) {
    t->failed = true;
    return;
  }
  ENTER;
  for (int64_t i = begin; i < end; i++) {
    int64_t m = i / t->tiles_n * t->tile_m, n = i % t->tiles_n * t->tile_n;
    NAME(tile)
    (t, m, MIN2(m + t->tile_m, g->m), n, MIN2(n + t->tile_n, g->n),
     for_a ? (UNIT *)(void *)(scratch + sizeof(REAL) * (size_t)for_sums) : NULL,
     for_sums ? (REAL *)(void *)scratch : NULL);
  }
  LEAVE;
  if (scratch) ty_scratch_free(scratch, bytes);
}

/* The size of `count` even tiles of n, in whole units. */
static int64_t NAME(even)(int64_t n, int64_t count, int64_t unit) {
  int64_t size = ((n + count - 1) / count + unit - 1) / unit * unit;
  return MIN2(size, n);
}

static bool NAME(tiled)(const ty_gemm *g, bool packs_a) {
  NAME(tiling) t = { .g = g, .packs_a = packs_a };
  int64_t most_n = MOST_N(g);
  int64_t rows = (g->m + MT - 1) / MT, columns = (g->n + most_n - 1) / most_n;
  double work = (double)g->m * (double)g->n * (double)g->k;
  int threads = work > SERIAL_WORK ? ty_parallel_threads() : 1;
  int64_t wanted = work > 1e9 ? 2 * threads : threads;
  ty_tiling asked = ty_tiling_asked();
  bool by_shape = asked.rows == 0 && asked.columns == 0;
  if (asked.rows > 0) rows = (g->m + asked.rows - 1) / asked.rows;
  if (asked.columns > 0) columns = (g->n + asked.columns - 1) / asked.columns;
  while (by_shape && threads > 1 && rows * columns < wanted) { /* too few to share out evenly */
    if (g->n / columns > g->m / rows && g->n > columns * 2 * NR) columns *= 2;
    else if (g->m > rows * 2 * MR) rows *= 2;
    else if (g->n > columns * 2 * NR) columns *= 2;
    else break;
  }
  /* A few tiles are as many for every thread: three for two threads would take the time of four. */
  while (by_shape && rows * columns < 8 * threads && rows * columns % threads && g->n > (columns + 1) * 2 * NR)
    columns++;
  t.tile_m = NAME(even)(g->m, rows, MR);
  t.tile_n = NAME(even)(g->n, columns, NR);
  t.tiles_n = (g->n + t.tile_n - 1) / t.tile_n;
  int64_t tiles = (g->m + t.tile_m - 1) / t.tile_m * t.tiles_n;
  ty_kept kept = NAME(open_kept)(&t, threads);
  if (PACKS_ALL && g->m > MT && !kept.data) return false;
  if (threads > 1) ty_parallel_for(tiles, 1, NAME(tiles), &t);
  else NAME(tiles)(&t, 0, tiles);
  ty_kept_close(&kept, true);
  return !t.failed;
}
