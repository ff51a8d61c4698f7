/* The matrix product for one element type; included by gemm.c with REAL and NAME(x) set.
 *
 * Large products follow Goto and van de Geijn 2008: C is cut into tiles, which are computed independently; a tile goes
 * through k in blocks and copies panels of B (and A, where its rows are not contiguous) in the order in which the
 * micro-kernel reads them. Every element of C is summed over k in the same order whatever the number of threads: in
 * blocks of KC, and before that in parts fixed by the shape alone when C is too small to give every thread a tile. */

#include "gemm_micro.h"
#include "transpose_real.h"

#define KC 256       /* a panel of B, KC x NR, stays in the L1 cache */
#define MT (MR * 48) /* a tile of A, MT x KC, stays in the L2 cache */
#define NT (NR * 24)
#define SMALL_WORK 65536   /* m n k up to which nothing is packed but what must be */
#define SERIAL_WORK 262144 /* ... up to which one thread is faster than two */
#define CHUNK 1024         /* columns of a thin result that stay in the L1 cache */
#define THIN 16            /* rows or columns up to which reading the large operand is the cost */

static inline int64_t NAME(least)(int64_t a, int64_t b) { return a < b ? a : b; }
#define MIN2(a, b) NAME(least)(a, b)

/* ---- packing ---- */

/* dst[c * stride + r] = src[r * row + c] for r < rows, c < columns. */
static void NAME(transpose)(const REAL *restrict src, int64_t row, int64_t rows, int64_t columns, REAL *restrict dst,
                            int64_t stride) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const REAL *s = src + r * row;
    NAME(transpose_4)(s, s + row, s + 2 * row, s + 3 * row, columns, dst + r, stride);
  }
  for (; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) dst[c * stride + r] = src[r * row + c];
}

/* dst[i * stride + j] = src[i * row + j * column] */
static void NAME(pack)(const REAL *restrict src, int64_t row, int64_t column, int64_t rows, int64_t columns,
                       REAL *restrict dst, int64_t stride) {
  if (column == 1) {
    if (columns == NR) {
      for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < NR; j++) dst[i * stride + j] = src[i * row + j];
    } else if (columns == MR) {
      for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < MR; j++) dst[i * stride + j] = src[i * row + j];
    } else {
      for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) dst[i * stride + j] = src[i * row + j];
    }
  } else if (row == 1) {
    NAME(transpose)(src, column, columns, rows, dst, stride);
  } else {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) dst[i * stride + j] = src[i * row + j * column];
  }
}

/* Columns j0 .. j0+nc of B, rows k0 .. k0+kc, as a panel [kc][NR] with zeros past nc. */
static void NAME(pack_b)(const ty_gemm *g, int64_t k0, int64_t kc, int64_t j0, int64_t nc, REAL *restrict dst) {
  if (g->pack) {
    g->pack(g->b, g->k0 + k0, kc, j0, nc, dst, NR);
  } else {
    NAME(pack)((const REAL *)g->b + k0 * g->b_row + j0 * g->b_col, g->b_row, g->b_col, kc, nc, dst, NR);
  }
  if (nc < NR)
    for (int64_t i = 0; i < kc; i++)
      for (int64_t j = nc; j < NR; j++) dst[i * NR + j] = 0;
}

static void NAME(fill_bias)(const ty_gemm *g, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  const REAL *bias = g->bias, *row_bias = g->row_bias;
  for (int64_t i = i0; i < i1; i++) {
    REAL *restrict c = (REAL *)g->c + i * g->c_row;
    REAL base = row_bias ? row_bias[i] : 0;
    if (bias) {
      for (int64_t j = j0; j < j1; j++) c[j] = base + bias[j];
    } else {
      for (int64_t j = j0; j < j1; j++) c[j] = base;
    }
  }
}

/* ---- large products ---- */

typedef struct NAME(tiling) {
  const ty_gemm *g;
  int64_t tile_m, tile_n, tiles_n;
  bool packs_a, failed;
} NAME(tiling);

/* Rows i0 .. i1 of one block of A as panels [k][rows], each as high as the micro-kernel (the last: as it is). */
static void NAME(pack_a)(const ty_gemm *g, int64_t i0, int64_t i1, int64_t k0, int64_t kc, REAL *dst) {
  for (int64_t i = i0; i < i1; i += MR, dst += MR * kc) {
    int64_t mr = MIN2(MR, i1 - i);
    NAME(pack)((const REAL *)g->a + i * g->a_row + k0 * g->a_col, g->a_col, g->a_row, kc, mr, dst, mr);
  }
}

/* Asks early for what the hardware does not foresee: rows of C, too far apart, and the next rows of A. */
static void NAME(prefetch)(const REAL *c, int64_t c_row, int64_t rows, int64_t columns, const REAL *a, int64_t a_row,
                           int64_t k) {
  for (int64_t r = 0; r < rows; r++) {
    __builtin_prefetch(c + r * c_row, 1);
    __builtin_prefetch(c + r * c_row + columns - 1, 1);
  }
  if (a)
    for (int64_t r = 0; r < MR; r++)
      for (int64_t p = 0; p < k; p += 64 / (int64_t)sizeof(REAL)) __builtin_prefetch(a + r * a_row + p, 0, 2);
}

/* Writes finished sums [rows][NR] to C. */
static void NAME(finish)(const ty_gemm *g, int64_t i, int64_t rows, int64_t j, int64_t columns,
                         const REAL *restrict sums) {
  for (int64_t r = 0; r < rows; r++, sums += NR) {
    REAL *restrict c = (REAL *)g->c + (i + r) * g->c_row + j;
    if (g->add) {
      for (int64_t s = 0; s < columns; s++) c[s] += sums[s];
    } else if (g->bias || g->row_bias) {
      REAL base = g->row_bias ? ((const REAL *)g->row_bias)[i + r] : 0;
      const REAL *bias = g->bias;
      if (bias) {
        for (int64_t s = 0; s < columns; s++) c[s] = base + bias[j + s] + sums[s];
      } else {
        for (int64_t s = 0; s < columns; s++) c[s] = base + sums[s];
      }
    } else if (columns == NR) {
      for (int64_t s = 0; s < NR; s++) c[s] = sums[s];
    } else {
      for (int64_t s = 0; s < columns; s++) c[s] = sums[s];
    }
  }
}

static bool NAME(goes_straight)(const ty_gemm *g, int64_t columns) {
  return (columns == NR || columns == VL) && !g->add && !g->bias && !g->row_bias;
}

/* The tile of C at i0 .. i1, j0 .. j1. With more than one block of k it is summed in `sums`, panel by panel, which is
 * faster than going over the scattered rows of C every time. */
static void NAME(tile)(const NAME(tiling) * t, int64_t i0, int64_t i1, int64_t j0, int64_t j1, REAL *packed_a,
                       REAL *sums) {
  const ty_gemm *g = t->g;
  REAL panel[KC * NR] __attribute__((aligned(64))), edge[MR * NR] __attribute__((aligned(64)));
  bool in_place = !g->pack && g->b_col == 1 && i1 - i0 <= 4 * MR; /* B is read too rarely to pay for packing */
  for (int64_t k0 = 0; k0 < g->k && !ty_interrupted; k0 += KC) {
    int64_t kc = MIN2(KC, g->k - k0);
    bool last = k0 + kc == g->k;
    if (packed_a) NAME(pack_a)(g, i0, i1, k0, kc, packed_a);
    for (int64_t j = j0; j < j1; j += NR) {
      int64_t nc = MIN2(NR, j1 - j), b_row = NR;
      const REAL *b = panel;
      if (in_place && nc == NR) {
        b = (const REAL *)g->b + k0 * g->b_row + j;
        b_row = g->b_row;
      } else {
        NAME(pack_b)(g, k0, kc, j, nc, panel);
      }
      bool straight = !sums && NAME(goes_straight)(g, nc);
      for (int64_t i = i0; i < i1; i += MR) {
        int64_t mr = MIN2(MR, i1 - i), a_row = packed_a ? 1 : g->a_row, a_col = packed_a ? mr : g->a_col;
        const REAL *a = packed_a ? packed_a + (i - i0) * kc : (const REAL *)g->a + i * g->a_row + k0 * g->a_col;
        REAL *c = (REAL *)g->c + i * g->c_row + j;
        if (last) {
          bool ahead = j == j0 && !packed_a && i + 2 * MR <= i1;
          NAME(prefetch)(c, g->c_row, mr, nc, ahead ? a + MR * a_row : NULL, a_row, kc);
        }
        NAME(micro_fn) *micro = NAME(micro)[nc > VL][mr - 1];
        if (straight) {
          micro(kc, a, a_row, a_col, b, b_row, c, g->c_row, false);
        } else {
          REAL *s = sums ? sums + (j - j0) * (i1 - i0) + (i - i0) * NR : edge;
          micro(kc, a, a_row, a_col, b, b_row, s, NR, k0 > 0);
          if (last) NAME(finish)(g, i, mr, j, nc, s);
        }
      }
    }
  }
}

static void NAME(tiles)(void *context, int64_t begin, int64_t end) {
  NAME(tiling) *t = context;
  const ty_gemm *g = t->g;
  int64_t wide = (t->tile_n + NR - 1) / NR * NR;
  int64_t for_a = t->packs_a ? t->tile_m * MIN2(g->k, KC) : 0, for_sums = g->k > KC ? t->tile_m * wide : 0;
  size_t bytes = sizeof(REAL) * (size_t)(for_a + for_sums);
  REAL *scratch = bytes ? ty_scratch_alloc(bytes) : NULL;
  if (bytes && !scratch) {
    t->failed = true;
    return;
  }
  for (int64_t i = begin; i < end; i++) {
    int64_t m = i / t->tiles_n * t->tile_m, n = i % t->tiles_n * t->tile_n;
    NAME(tile)
    (t, m, MIN2(m + t->tile_m, g->m), n, MIN2(n + t->tile_n, g->n), for_a ? scratch : NULL,
     for_sums ? scratch + for_a : NULL);
  }
  if (scratch) ty_scratch_free(scratch, bytes);
}

/* The size of `count` even tiles of n, in whole units. */
static int64_t NAME(even)(int64_t n, int64_t count, int64_t unit) {
  int64_t size = ((n + count - 1) / count + unit - 1) / unit * unit;
  return MIN2(size, n);
}

static bool NAME(tiled)(const ty_gemm *g) {
  NAME(tiling) t = { .g = g };
  int64_t rows = (g->m + MT - 1) / MT, columns = (g->n + NT - 1) / NT;
  int threads = g->m * g->n * g->k > SERIAL_WORK ? ty_parallel_threads() : 1;
  t.packs_a = g->a_col != 1 || (g->m >= 768 && g->n >= 768);
  while (threads > 1 && rows * columns < 4 * threads) { /* too few to share out evenly; narrow tiles cost least */
    if (g->n > columns * 2 * NR) columns *= 2;
    else if (g->m > rows * 8 * MR) rows *= 2;
    else break;
  }
  t.tile_m = NAME(even)(g->m, rows, MR);
  t.tile_n = NAME(even)(g->n, columns, NR);
  t.tiles_n = (g->n + t.tile_n - 1) / t.tile_n;
  int64_t tiles = (g->m + t.tile_m - 1) / t.tile_m * t.tiles_n;
  if (threads > 1) ty_parallel_for(tiles, 1, NAME(tiles), &t);
  else NAME(tiles)(&t, 0, tiles);
  return !t.failed;
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
    bool straight = NAME(goes_straight)(g, nc);
    for (int64_t i = 0; i < g->m; i += MR) {
      int64_t mr = MIN2(MR, g->m - i);
      const REAL *a = (const REAL *)g->a + i * g->a_row;
      REAL *c = straight ? (REAL *)g->c + i * g->c_row + j : edge;
      NAME(micro)[width == NR][mr - 1](g->k, a, g->a_row, g->a_col, b, b_row, c, straight ? g->c_row : NR, false);
      if (!straight) NAME(finish)(g, i, mr, j, nc, edge);
    }
  }
}

/* ---- thin products: a few rows (or columns) times a large matrix, at the speed of memory ---- */

typedef struct NAME(thin) {
  int64_t m, n, k; /* m small, n shared out */
  const REAL *a, *b;
  int64_t a_row, a_col, b_row, b_col, c_i, c_j;
  REAL *c;
} NAME(thin);

/* c += a b; a and b with contiguous k. */
static void NAME(thin_dot)(void *context, int64_t begin, int64_t end) {
  const NAME(thin) *t = context;
  int64_t j = begin;
  for (; j + 4 <= end; j += 4) {
    int64_t i = 0;
    const REAL *b = t->b + j * t->b_col;
    REAL *c = t->c + j * t->c_j;
    for (; i + 2 <= t->m; i += 2)
      NAME(dot_24)(t->k, t->a + i * t->a_row, t->a_row, b, t->b_col, c + i * t->c_i, t->c_i, t->c_j);
    if (i < t->m) NAME(dot_14)(t->k, t->a + i * t->a_row, t->a_row, b, t->b_col, c + i * t->c_i, t->c_i, t->c_j);
  }
  for (; j < end; j++)
    for (int64_t i = 0; i < t->m; i++) NAME(dot_11)
  (t->k, t->a + i * t->a_row, t->a_row, t->b + j * t->b_col, t->b_col, t->c + i * t->c_i + j * t->c_j, t->c_i, t->c_j);
}

/* c += a b; b and c with contiguous columns. Eight rows of b at a time, which stay cached for the rows of a. */
static void NAME(thin_rows)(void *context, int64_t begin, int64_t end) {
  const NAME(thin) *t = context;
  for (int64_t j0 = begin; j0 < end; j0 += CHUNK) {
    int64_t n = MIN2(CHUNK, end - j0), p = 0, row = t->b_row;
    for (; p + 8 <= t->k; p += 8) {
      const REAL *restrict b = t->b + p * row + j0;
      for (int64_t i = 0; i < t->m; i++) {
        const REAL *a = t->a + i * t->a_row + p * t->a_col;
        REAL *restrict c = t->c + i * t->c_i + j0;
        REAL x0 = a[0], x1 = a[t->a_col], x2 = a[2 * t->a_col], x3 = a[3 * t->a_col];
        REAL x4 = a[4 * t->a_col], x5 = a[5 * t->a_col], x6 = a[6 * t->a_col], x7 = a[7 * t->a_col];
#define AT(r) (*(const V *)(b + r * row + j))
        int64_t j = 0;
        for (; j + VL <= n; j += VL) {
          if (i == 0)
            for (int r = 8; r < 16; r++) __builtin_prefetch(b + r * row + j);
          *(V *)(c + j) = *(V *)(c + j) + x0 * AT(0) + x1 * AT(1) + x2 * AT(2) + x3 * AT(3) + x4 * AT(4) + x5 * AT(5) +
                          x6 * AT(6) + x7 * AT(7);
        }
#undef AT
        for (; j < n; j++)
          c[j] = c[j] + x0 * b[j] + x1 * b[row + j] + x2 * b[2 * row + j] + x3 * b[3 * row + j] + x4 * b[4 * row + j] +
                 x5 * b[5 * row + j] + x6 * b[6 * row + j] + x7 * b[7 * row + j];
      }
    }
    for (; p < t->k; p++) {
      const REAL *restrict b = t->b + p * row + j0;
      for (int64_t i = 0; i < t->m; i++) {
        REAL *restrict c = t->c + i * t->c_i + j0, x = t->a[i * t->a_row + p * t->a_col];
#pragma omp simd
        for (int64_t j = 0; j < n; j++) c[j] += x * b[j];
      }
    }
  }
}

/* Whether the product was one of these; *ok: done without failure. */
static bool NAME(thin_product)(const ty_gemm *g, bool *ok) {
  if (g->pack || (g->m > THIN && g->n > THIN) || g->k < 64) return false;
  NAME(thin) t = { g->m, g->n, g->k, g->a, g->b, g->a_row, g->a_col, g->b_row, g->b_col, g->c_row, 1, g->c };
  if (g->m > THIN) /* C' = B' A' */
    t = (NAME(thin)){ g->n, g->m, g->k, g->b, g->a, g->b_col, g->b_row, g->a_col, g->a_row, 1, g->c_row, g->c };
  bool dot = t.b_row == 1 && t.k >= 128, rows = t.b_col == 1 && t.c_j == 1 && t.n >= 128;
  if (!dot && !rows) return false;
  if (t.m * t.n * t.k <= SMALL_WORK && t.m > 1) return false;
  size_t bytes = 0;
  REAL *copy = NULL;
  if (dot && t.a_col != 1) {
    bytes = sizeof(REAL) * (size_t)(t.m * t.k);
    copy = ty_scratch_alloc(bytes);
    *ok = copy != NULL;
    if (!copy) return true;
    NAME(pack)(t.a, t.a_row, t.a_col, t.m, t.k, copy, t.k);
    t.a = copy;
    t.a_row = t.k;
    t.a_col = 1;
  }
  if (!g->add) NAME(fill_bias)(g, 0, g->m, 0, g->n);
  int64_t grain = 1 + SERIAL_WORK / 8 / (t.m * t.k);
  if (dot) {
    ty_parallel_for(t.n, (grain + 3) / 4 * 4, NAME(thin_dot), &t);
  } else {
    ty_parallel_for(t.n, (grain + 63) / 64 * 64, NAME(thin_rows), &t);
  }
  if (copy) ty_scratch_free(copy, bytes);
  *ok = true;
  return true;
}

static bool NAME(whole)(const ty_gemm *g) {
  bool ok;
  if (NAME(thin_product)(g, &ok)) return ok;
  if (g->k <= KC && g->m * g->n * g->k <= SMALL_WORK) {
    NAME(small)(g);
    return true;
  }
  return NAME(tiled)(g);
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
    g.a = (const REAL *)g.a + k0 * g.a_col;
    if (!g.pack) g.b = (const REAL *)g.b + k0 * g.b_row;
    g.c = s->sums + p * g.m * g.n;
    g.c_row = g.n;
    g.bias = g.row_bias = NULL;
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
    if (!g->add) NAME(fill_bias)(g, 0, g->m, 0, g->n);
    for (int64_t p = 0; p < count; p++)
      for (int64_t i = 0; i < g->m; i++) {
        REAL *restrict c = (REAL *)g->c + i * g->c_row;
        const REAL *restrict sum = s.sums + (p * g->m + i) * g->n;
        for (int64_t j = 0; j < g->n; j++) c[j] += sum[j];
      }
  }
  ty_scratch_free(s.sums, bytes);
  return s.failed ? ty_fail(TY_ENOMEM, "out of memory for a matrix product") : true;
}

bool GEMM(const ty_gemm *g) {
  if (g->m == 0 || g->n == 0) return true;
  if (g->k == 0) {
    if (!g->add) NAME(fill_bias)(g, 0, g->m, 0, g->n);
    return true;
  }
  bool long_rows = (g->m <= THIN || g->n <= THIN) && (g->m > 64 || g->n > 64);
  if (g->k >= 2048 && g->m * g->n <= 16384 && !long_rows) return NAME(split)(g);
  return NAME(whole)(g);
}

#undef V
#undef VL
#undef NR
