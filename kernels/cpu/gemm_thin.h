/* A few rows (or columns) times a large matrix, at the speed of memory, for one element type of sums; included by
 * gemm_real.h. */

#define CHUNK 1024 /* columns of a result that stay in the first cache */
#define THIN 16    /* rows or columns up to which reading the large operand is the cost */

typedef struct NAME(thin) {
  const ty_gemm *g;
  bool turned;     /* C' = B' A' */
  int64_t m, n, k; /* m small, n shared out */
  const REAL *a;
  const void *b; /* REAL or of type g->half */
  int64_t a_row, a_col, b_row, b_col, c_i, c_j;
  REAL *c; /* the sums: in C, or apart */
} NAME(thin);

static inline REAL NAME(lanes)(V v) {
  REAL s = 0;
  for (int i = 0; i < VL; i++) s += v[i];
  return s;
}

#define IN REAL
#define LOAD(p) (*(const V *)(p))
#define ONE(p) (*(p))
#define EACH(x) NAME(whole_##x)
#include "gemm_thin_kernels.h"

#ifdef HALVES
typedef uint16_t halves __attribute__((vector_size(TY_VECTOR_BYTES / 2), aligned(2), may_alias));
typedef uint32_t half_bits __attribute__((vector_size(TY_VECTOR_BYTES)));
static inline V load_bf16(const uint16_t *p) {
  return (V)(__builtin_convertvector(*(const halves *)p, half_bits) << 16);
}
static inline V load_f16(const uint16_t *p) {
#if TY_VECTOR_BYTES == 64
  return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
#elif defined(__F16C__)
  return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
#else
  V v;
  for (int i = 0; i < VL; i++) v[i] = ty_f16_to_f32(p[i]);
  return v;
#endif
}

#define IN uint16_t
#define LOAD(p) load_bf16(p)
#define ONE(p) ty_bf16_to_f32(*(p))
#define EACH(x) NAME(bf16_##x)
#include "gemm_thin_kernels.h"

#define IN uint16_t
#define LOAD(p) load_f16(p)
#define ONE(p) ty_f16_to_f32(*(p))
#define EACH(x) NAME(f16_##x)
#include "gemm_thin_kernels.h"

#define BY_TYPE(t, what, begin, end)                                \
  if ((t)->g->half == TY_BF16) NAME(bf16_##what)(t, begin, end);    \
  else if ((t)->g->half == TY_F16) NAME(f16_##what)(t, begin, end); \
  else NAME(whole_##what)(t, begin, end)
#else
#define BY_TYPE(t, what, begin, end) NAME(whole_##what)(t, begin, end)
#endif

/* The sums of columns (turned: rows) begin .. end begin with 0. */
static void NAME(thin_begin)(const NAME(thin) * t, int64_t begin, int64_t end) {
  if (t->g->add) return;
  for (int64_t i = 0; i < t->m; i++)
    for (int64_t j = begin; j < end; j++) t->c[i * t->c_i + j * t->c_j] = 0;
}

static void NAME(thin_end)(const NAME(thin) * t, int64_t begin, int64_t end) {
  if (!NAME(finishes)(t->g)) return;
  if (t->turned) {
    NAME(finish_part)(t->g, begin, end, 0, t->m, t->c + begin * t->c_j, t->c_j);
  } else {
    NAME(finish_part)(t->g, 0, t->m, begin, end, t->c + begin, t->c_i);
  }
}

static void NAME(thin_dots)(void *context, int64_t begin, int64_t end) {
  const NAME(thin) *t = context;
  NAME(thin_begin)(t, begin, end);
  BY_TYPE(t, dots, begin, end);
  NAME(thin_end)(t, begin, end);
}

static void NAME(thin_rows)(void *context, int64_t begin, int64_t end) {
  const NAME(thin) *t = context;
  NAME(thin_begin)(t, begin, end);
  BY_TYPE(t, rows, begin, end);
  NAME(thin_end)(t, begin, end);
}

/* Whether the product was one of these; *ok: done without failure. */
static bool NAME(thin_product)(const ty_gemm *g, bool *ok) {
  if (g->pack || (g->m > THIN && g->n > THIN) || g->k < 64) return false;
  NAME(thin) t = { g, false, g->m, g->n, g->k, g->a, g->b, g->a_row, g->a_col, g->b_row, g->b_col, g->c_row, 1, g->c };
  if (g->m > THIN)
    t = (NAME(
        thin)){ g, true, g->n, g->m, g->k, g->b, g->a, g->b_col, g->b_row, g->a_col, g->a_row, 1, g->c_row, g->c };
  bool dot = t.b_row == 1 && t.k >= 128, rows = t.b_col == 1 && !t.turned && t.n >= 128;
  if (!dot && !rows) return false;
  if (t.m * t.n * t.k <= SMALL_WORK && t.m > 1) return false;
  bool copies = g->half || (dot && t.a_col != 1);
  size_t for_a = copies ? sizeof(REAL) * (size_t)(t.m * t.k) : 0;
  size_t for_c = g->c_half ? sizeof(REAL) * (size_t)(t.m * t.n) : 0;
  REAL *scratch = NULL;
  if (for_a + for_c) {
    scratch = ty_scratch_alloc(for_a + for_c);
    *ok = scratch != NULL;
    if (!scratch) return true;
  }
  if (for_c) {
    t.c = scratch;
    t.c_i = t.turned ? 1 : t.n;
    t.c_j = t.turned ? t.m : 1;
  }
  if (copies) {
    REAL *copy = scratch + (g->c_half ? t.m * t.n : 0);
    const void *a = t.turned ? g->b : g->a;
    for (int64_t p = 0; p < t.k; p += KC)
      NAME(pack_any)(g, a, t.a_row, t.a_col, p * t.a_col, t.m, MIN2(KC, t.k - p), copy + p, t.k);
    t.a = copy;
    t.a_row = t.k;
    t.a_col = 1;
  }
  int64_t grain = 1 + SERIAL_WORK / 8 / (t.m * t.k), runs = MIN2(t.n / 4, CHUNK); /* rows of B are read in long runs */
  if (rows && !dot && grain < runs) grain = runs;
  if (dot) ty_parallel_for(t.n, (grain + 3) / 4 * 4, NAME(thin_dots), &t);
  else ty_parallel_for(t.n, (grain + 63) / 64 * 64, NAME(thin_rows), &t);
  if (scratch) ty_scratch_free(scratch, for_a + for_c);
  *ok = true;
  return true;
}

#undef BY_TYPE
