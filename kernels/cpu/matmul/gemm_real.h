/* The matrix product for one element type of sums; included by gemm.c with REAL, NAME(x) and SCALAR(x) set, and HALVES
 * where the operands may be f16 or bf16.
 *
 * Every element of C is summed over k in the same order whatever the number of threads: see gemm_blocked.h, and before
 * that in parts fixed by the shape alone when C is too small to give every thread a tile. */

#define UNIT REAL
#define GROUP 1
#define STARTS 0
#define STRIDED
#define MULTIPLY_ADD(c, a, b) c += (a) * (b)
#define ELEMENT(g) ((int64_t)((g)->half ? 2 : sizeof(REAL)))
#define SMALL_WORK 65536  /* m n k up to which nothing is packed but what must be */
#define TILES_WORK 262144 /* m n k from which tiles are faster */

#ifndef KC
#define KC 256 /* a panel of B, KC x NR, stays in the first cache */
#endif

static inline int64_t NAME(least)(int64_t a, int64_t b) { return a < b ? a : b; }
#define MIN2(a, b) NAME(least)(a, b)

#include "gemm_micro.h"
#include "../transpose_real.h"
#include "gemm_pack.h"
#include "gemm_finish.h"
#include "gemm_blocked.h"

/* Rows i0 .. i1 and columns j0 .. j1 of C from their sums. */
static void NAME(finish_part)(const ty_gemm *g, int64_t i0, int64_t i1, int64_t j0, int64_t j1, const REAL *sums,
                              int64_t sums_row) {
  for (int64_t j = j0; j < j1; j += NR) NAME(finish)(g, i0, i1 - i0, j, MIN2(NR, j1 - j), sums + j - j0, sums_row);
}

/* ---- small products: one thread, no scratch memory ---- */

static void NAME(small)(const ty_gemm *g) {
  REAL panel[KC * NR] __attribute__((aligned(64))), edge[MR * NR] __attribute__((aligned(64)));
  for (int64_t j = 0; j < g->n; j += NR) {
    int64_t nc = MIN2(NR, g->n - j), width = nc > VL ? NR : VL, b_row = g->b_row;
    const REAL *b = (const REAL *)g->b + j;
    if (g->pack || g->b_col != 1 || nc != width) {
      NAME(pack_b)(g, 0, g->k, j, nc, panel);
      b = panel;
      b_row = NR;
    }
    for (int64_t i = 0; i < g->m; i += MR) {
      int64_t mr = MIN2(MR, g->m - i);
      const REAL *a = (const REAL *)g->a + i * g->a_row;
      REAL *to = (REAL *)g->c + i * g->c_row + j, *c = nc == width ? to : edge;
      int64_t c_row = c == edge ? NR : g->c_row;
      NAME(micro)[width == NR][mr - 1](g->k, a, g->a_row, g->a_col, b, b_row, c, c_row, g->add && c != edge);
      if (NAME(finishes)(g)) {
        NAME(finish)(g, i, mr, j, nc, c, c_row);
      } else if (c == edge) {
        for (int64_t r = 0; r < mr; r++)
          for (int64_t s = 0; s < nc; s++)
            to[r * g->c_row + s] = g->add ? to[r * g->c_row + s] + edge[r * NR + s] : edge[r * NR + s];
      }
    }
  }
}

#include "gemm_thin.h"

/* Whether A is better read where it lies: it is used too few times, or is small enough to stay cached. Where B is packed,
 * so is A: the kernel for panels of both asks for B in time. */
static bool NAME(reads_a)(const ty_gemm *g) {
  if (g->half || g->c_half) return false;
  int pack = ty_tiling_asked().pack;
  if (pack || g->a_col != 1) return pack < 0;
  if (g->m <= MR) return true;
  return (g->b_col == 1 || g->pack) && (g->m <= 8 * MR || g->n <= 4 * NR || g->m * g->k <= 65536);
}

#ifdef HALVES
/* Whether a product is better done on tiles: it fills them, and packing is little beside it. bf16 is packed as it is, and
 * wins from a quarter of a tile on. */
static bool NAME(on_tiles)(const ty_gemm *g) {
  if (!TY_KERNEL(gemm_has_tiles)() || (g->half && g->pack)) return false;
  int64_t least = g->half == TY_BF16 ? 9 : 24;
  return g->m >= least && g->n >= least && g->k >= 32 && g->m * g->n * g->k >= TILES_WORK;
}
#endif

static bool NAME(whole)(const ty_gemm *g) {
  bool ok;
#ifdef HALVES
  if (NAME(on_tiles)(g)) return TY_KERNEL(gemm_tiles)(g);
#endif
  if (NAME(thin_product)(g, &ok)) return ok;
  if (!g->half && !g->c_half && g->k <= KC && g->m * g->n * g->k <= SMALL_WORK) {
    NAME(small)(g);
    return true;
  }
#ifdef HALVES
  if (g->half == TY_BF16 && !g->pack && TY_KERNEL(gemm_has_bf16)()) return TY_KERNEL(gemm_bf16)(g);
#endif
  return NAME(tiled)(g, !NAME(reads_a)(g));
}

/* ---- a small C with a long k: sums of parts of k ---- */

typedef struct NAME(parts) {
  const ty_gemm *g;
  REAL *sums; /* [parts][m][n] */
  int64_t part, count;
  bool failed;
} NAME(parts);

static void NAME(sum_parts)(void *context, int64_t begin, int64_t end) {
  NAME(parts) *s = context;
  for (int64_t p = begin; p < end; p++) {
    ty_gemm g = *s->g;
    int64_t k0 = p * s->part;
    g.k = MIN2(s->part, s->g->k - k0);
    g.k0 = s->g->k0 + k0;
    g.a = (const char *)g.a + k0 * g.a_col * ELEMENT(&g);
    if (!g.pack) g.b = (const char *)g.b + k0 * g.b_row * ELEMENT(&g);
    g.c = s->sums + p * g.m * g.n;
    g.c_row = g.n;
    g.bias = g.row_bias = g.residual = NULL;
    g.activation = TY_NO_ACTIVATION;
    g.c_half = 0;
    g.add = false;
    if (!NAME(whole)(&g)) s->failed = true;
  }
}

static bool NAME(split)(const ty_gemm *g) {
  int64_t count = MIN2(g->k / 1024, 32);
  int64_t part = ((g->k + count - 1) / count + 63) / 64 * 64;
  count = (g->k + part - 1) / part;
  size_t bytes = sizeof(REAL) * (size_t)(count * g->m * g->n);
  NAME(parts) s = { .g = g, .sums = ty_scratch_alloc(bytes), .part = part, .count = count };
  if (!s.sums) return false;
  ty_parallel_for(count, 1, NAME(sum_parts), &s);
  if (!s.failed && !ty_interrupted) {
    int64_t area = g->m * g->n;
    for (int64_t p = 1; p < count; p++)
      for (int64_t i = 0; i < area; i++) s.sums[i] += s.sums[p * area + i];
    if (g->add) {
      for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++) ((REAL *)g->c)[i * g->c_row + j] += s.sums[i * g->n + j];
    } else {
      NAME(finish_part)(g, 0, g->m, 0, g->n, s.sums, g->n);
    }
  }
  ty_scratch_free(s.sums, bytes);
  return s.failed ? ty_fail(TY_ENOMEM, "out of memory for a matrix product") : true;
}

bool GEMM(const ty_gemm *g) {
  if (g->m == 0 || g->n == 0) return true;
  if (g->k == 0) {
    const REAL none[NR] = { 0 }; /* sums of nothing */
    for (int64_t j = 0; j < g->n && !g->add; j += NR) NAME(finish)(g, 0, g->m, j, MIN2(NR, g->n - j), none, 0);
    return true;
  }
  bool long_rows = (g->m <= THIN || g->n <= THIN) && (g->m > 64 || g->n > 64);
  if (g->k >= 2048 && g->m * g->n <= 16384 && !long_rows) return NAME(split)(g);
  return NAME(whole)(g);
}

#undef V
#undef W
#undef VL
#undef NR
