/* x W' where both are contiguous in k and x has few rows, for one element type of sums; included by gemm_thin.h. W is
 * read where it lies, once from memory: packing it would cost as much as the products. A row of x with a row of W makes
 * a vector of sums, whose lanes are added up at the end. Every sum is taken in the same order: in blocks of k, and over
 * the lanes. */

#if TY_VECTOR_BYTES == 64
#define DOT_COLUMNS 3
#define DOT_ALONE 3
#else
#define DOT_COLUMNS 2
#define DOT_ALONE 4 /* for one row of x */
#endif
#define DOT_ROWS 8 /* room for MR, in fours */
enum {
  NAME(dots_few) = 12 * MR,          /* rows of x up to which W is read rather than packed and converted */
  NAME(dots_far) = 4 << 20,          /* bytes of W that come from memory, not from a cache */
  NAME(dots_ahead) = 4096,           /* bytes: nearer than that, memory does not answer in time */
  NAME(dots_part) = 16 * 3,          /* rows of W that stay in the second cache for the rows of x */
  NAME(dots_k) = 4096 / sizeof(REAL) /* elements of k in a block, when x has more rows than a kernel */
};

typedef void NAME(dots_fn)(int64_t steps, const REAL *restrict x, const void *w, int64_t w_row, const void *rest,
                           const void *next, int64_t next_row, REAL *restrict sums);
typedef struct NAME(dots_kind) {
  int64_t size, parts; /* bytes of an element of W; vectors of sums that a step of k feeds */
  NAME(dots_fn) * run[2][MR];
  NAME(dots_fn) * alone; /* one row of x, DOT_ALONE rows of W; NULL: run */
} NAME(dots_kind);

/* Keeps a vector of x in a register: a load for each product of every row would be too many, and one for each of half
 * the rows saves instructions. */
#if defined(__AVX512F__)
#define KEEP(v) __asm__("" : "+v"(v));
#elif defined(__SSE2__)
#define KEEP(v) __asm__("" : "+x"(v));
#else
#define KEEP(v)
#endif

#define IN REAL
#define PARTS 1
#define LOAD(q, p) (*(const V *)(p))
#define EACH(x) NAME(whole_##x)
#include "gemm_dots_kernels.h"

#ifdef HALVES
/* Of pairs of bf16 first the even ones, then the odd ones: one instruction each. x lies in the same order. */
typedef uint32_t half_pairs __attribute__((vector_size(TY_VECTOR_BYTES), aligned(2), may_alias));
static inline V load_bf16_pairs(int odd, const uint16_t *p) {
  half_bits pairs = *(const half_pairs *)p;
  return (V)(odd ? pairs & 0xffff0000u : pairs << 16);
}

#define IN uint16_t
#define PARTS 2
#define LOAD(q, p) load_bf16_pairs(q, p)
#define EACH(x) NAME(bf16_##x)
#include "gemm_dots_kernels.h"

#define IN uint16_t
#define PARTS 1
#define LOAD(q, p) load_f16(p)
#define EACH(x) NAME(f16_##x)
#include "gemm_dots_kernels.h"
#endif

typedef struct NAME(dots) {
  const ty_gemm *g;
  const NAME(dots_kind) * kind;
  bool turned;     /* C' = W x' */
  int64_t m, n, k; /* m rows of x, n of W */
  const REAL *x;   /* by groups of rows: [steps][parts][rows][VL] */
  int64_t group;   /* rows in a group */
  const char *w;
  int64_t w_row;
} NAME(dots);

/* out[j * out_row + i] += the sum of the lanes of sums[j][i]. What lies past `rows` is 0 or falls past the rows of
 * x. */
static void NAME(add_lanes)(const REAL *sums, int64_t rows, int64_t columns, REAL *out, int64_t out_row) {
  for (int64_t j = 0; j < columns; j++, sums += DOT_ROWS * VL, out += out_row)
    for (int64_t i = 0; i < rows; i += 4) {
      NAME(quad) r[4];
      for (int q = 0; q < 4; q++) {
        const REAL *s = sums + (i + q) * VL;
        r[q] = VL < 4 ? (NAME(quad)){ s[0], s[1] } : *(const NAME(quad) *)s;
        for (int l = 4; l < VL; l += 4) r[q] += *(const NAME(quad) *)(s + l);
      }
      NAME(quad) a = SHUFFLE(r[0], r[1], 0, 4, 1, 5) + SHUFFLE(r[0], r[1], 2, 6, 3, 7);
      NAME(quad) b = SHUFFLE(r[2], r[3], 0, 4, 1, 5) + SHUFFLE(r[2], r[3], 2, 6, 3, 7);
      *(NAME(quad) *)(out + i) += SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7);
    }
}

/* Rows j0 .. j1 of W: their sums, out[j][i]. */
static void NAME(dots_sums)(const NAME(dots) * t, int64_t j0, int64_t j1, REAL *out, int64_t out_row) {
  int64_t size = t->kind->size, step = t->kind->parts * VL, whole = t->k / step, left = t->k % step;
  int64_t padded = (whole + (left > 0)) * step, block = t->group < t->m ? NAME(dots_k) / step : whole;
  /* Memory gives one stream of halves a third more than three; of f32, less. Without AVX-512 a sum of one row alone
   * waits for itself longer than for memory. */
  bool one = TY_VECTOR_BYTES == 64 && t->m == 1 && size < (int64_t)sizeof(REAL) &&
             t->n * t->w_row * size >= NAME(dots_far);
  int64_t most = one         ? 1
                 : t->m == 1 ? DOT_ALONE
                             : DOT_COLUMNS,
          ahead = one ? NAME(dots_ahead) / (t->w_row * size) + 1 : most; /* rows */
  REAL sums[DOT_ALONE * DOT_ROWS * VL] __attribute__((aligned(64))) = { 0 }, rest[DOT_ALONE * VL] = { 0 };
  for (int64_t s0 = 0; s0 == 0 || s0 < whole; s0 += block) {
    bool last = s0 + block >= whole;
    int64_t steps = last ? whole - s0 : block;
    for (int64_t i = 0; i < t->m; i += t->group) {
      int64_t rows = MIN2(t->group, t->m - i);
      const REAL *x = t->x + i * padded + s0 * step * rows;
      for (int64_t j = j0, columns; j < j1; j += columns) {
        columns = j1 - j < most ? 1 : most;
        const char *w = t->w + (j * t->w_row + s0 * step) * size, *next = w;
        int64_t group = i / t->group, next_row = 0;
        if (t->m <= 2 * t->group) { /* W comes in at the speed of memory: the next rows of this block */
          if (group == 0) {
            next += ahead * t->w_row * size;
            next_row = t->w_row;
          }
        } else if (group < columns) { /* each of the first groups asks for one row of the next block, or part */
          next += (last ? (NAME(dots_part) + group) * t->w_row - s0 * step : group * t->w_row + steps * step) * size;
        }
        bool ends = last && left;
        if (ends)
          for (int64_t c = 0; c < columns; c++)
            memcpy((char *)rest + c * step * size, w + (c * t->w_row + steps * step) * size, (size_t)(left * size));
        NAME(dots_fn) *run = columns > DOT_COLUMNS ? t->kind->alone : t->kind->run[columns > 1][rows - 1];
        run(steps, x, w, t->w_row, ends ? rest : NULL, next, next_row, sums);
        NAME(add_lanes)(sums, rows, columns, out + (j - j0) * out_row + i, out_row);
      }
    }
    if (last) break;
  }
}

static void NAME(dots_columns)(void *context, int64_t begin, int64_t end) {
  const NAME(dots) *t = context;
  const ty_gemm *g = t->g;
  REAL out[NAME(dots_part) * (NAME(dots_few) + DOT_ROWS)], turned[NAME(dots_few) * NAME(dots_part)];
  int64_t out_row = t->m + DOT_ROWS;
  for (int64_t j0 = begin; j0 < end && !ty_interrupted; j0 += NAME(dots_part)) {
    int64_t j1 = MIN2(end, j0 + NAME(dots_part));
    for (int64_t at = 0; at < (j1 - j0) * out_row; at++) out[at] = 0;
    NAME(dots_sums)(t, j0, j1, out, out_row);
    if (g->add) {
      int64_t c_i = t->turned ? 1 : g->c_row, c_j = t->turned ? g->c_row : 1;
      for (int64_t i = 0; i < t->m; i++)
        for (int64_t j = j0; j < j1; j++) ((REAL *)g->c)[i * c_i + j * c_j] += out[(j - j0) * out_row + i];
    } else if (t->turned) {
      NAME(finish_part)(g, j0, j1, 0, t->m, out, out_row);
    } else {
      NAME(transpose)(out, out_row, j1 - j0, t->m, turned, NAME(dots_part));
      NAME(finish_part)(g, 0, t->m, j0, j1, turned, NAME(dots_part));
    }
  }
}

/* x, with strides, to the order in which the kernels read it. */
static void NAME(dots_pack)(const NAME(dots) * t, const void *x, int64_t x_row, int64_t x_col, REAL *to) {
  int64_t parts = t->kind->parts, step = parts * VL;
  for (int64_t i0 = 0; i0 < t->m; i0 += t->group) {
    int64_t rows = MIN2(t->group, t->m - i0);
    for (int64_t p = 0; p < t->k; p += step, to += step * rows) {
      int64_t count = MIN2(step, t->k - p);
      for (int64_t r = 0; r < rows; r++) {
        REAL line[2 * VL] = { 0 };
        NAME(pack_any)(t->g, x, x_col, x_row, (i0 + r) * x_row + p * x_col, count, 1, line, 1);
        for (int64_t q = 0; q < parts; q++)
          for (int64_t l = 0; l < VL; l++) to[(q * rows + r) * VL + l] = line[l * parts + q];
      }
    }
  }
}

/* Whether the product was one of these; *ok: done without failure. */
static bool NAME(dots_product)(const ty_gemm *g, bool *ok) {
  bool by_a = g->a_col == 1, by_b = g->b_row == 1, turned = by_a && (g->n < g->m || !by_b);
  if (!by_a && !by_b) return false;
  NAME(dots) t = { g, &NAME(whole_dots_kind), turned, g->m, g->n, g->k, NULL, 0, g->b, g->b_col };
  if (turned) t = (NAME(dots)){ g, t.kind, turned, g->n, g->m, g->k, NULL, 0, g->a, g->a_row };
  /* Adding up the lanes is little beside a long k, and beside packing W for few rows: twice as many if it is also
   * converted. */
  bool packs = false;
#ifdef HALVES
  packs = g->half == TY_BF16 && TY_KERNEL(gemm_has_bf16)(); /* the instruction wins where W is read more than once */
#endif
  if (t.k < 128 || (t.m > THIN && (t.m > (g->half ? NAME(dots_few) : 6 * MR) || t.m * 8 > t.k || packs))) return false;
  if (t.m * t.n * t.k <= SMALL_WORK && t.m > 1) return false;
#ifdef HALVES
  if (g->half) t.kind = g->half == TY_BF16 ? &NAME(bf16_dots_kind) : &NAME(f16_dots_kind);
#endif
  int64_t groups = (t.m + MR - 1) / MR, step = t.kind->parts * VL;
  t.group = (t.m + groups - 1) / groups;
  size_t bytes = sizeof(REAL) * (size_t)(t.m * ((t.k + step - 1) / step * step));
  REAL *packed = ty_scratch_alloc(bytes);
  *ok = packed != NULL;
  if (!packed) return true;
  t.x = packed;
  if (turned) NAME(dots_pack)(&t, g->b, g->b_col, g->b_row, packed);
  else NAME(dots_pack)(&t, g->a, g->a_row, g->a_col, packed);
  int64_t grain = 1 + SERIAL_WORK / 8 / (t.m * t.k);
  ty_parallel_for(t.n, (grain + NAME(dots_part) - 1) / NAME(dots_part) * NAME(dots_part), NAME(dots_columns), &t);
  ty_scratch_free(packed, bytes);
  return true;
}

#undef DOT_COLUMNS
#undef DOT_ALONE
#undef DOT_ROWS
#undef KEEP
