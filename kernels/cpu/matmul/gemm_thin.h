/* A few rows times a large matrix, or with it, at the speed of memory, for one element type of sums; included by
 * gemm_real.h. */

#define CHUNK 1024 /* columns of a result that stay in the first cache */
#define THIN 16    /* rows or columns up to which reading the large operand is the cost */

typedef struct NAME(thin) {
  const ty_gemm *g;
  const REAL *a;
  int64_t a_row, a_col, c_row;
  REAL *c; /* the sums: in C, or apart */
} NAME(thin);

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
#endif

#include "gemm_dots.h"

#define IN REAL
#define LOAD(p) (*(const V *)(p))
#define ONE(p) (*(p))
#define EACH(x) NAME(whole_##x)
#include "gemm_thin_kernels.h"

#ifdef HALVES
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
#endif

static void NAME(thin_rows)(void *context, int64_t begin, int64_t end) {
  const NAME(thin) *t = context;
  const ty_gemm *g = t->g;
  for (int64_t i = 0; i < g->m && !g->add; i++)
    for (int64_t j = begin; j < end; j++) t->c[i * t->c_row + j] = 0;
#ifdef HALVES
  if (g->half == TY_BF16) NAME(bf16_rows)(t, begin, end);
  else if (g->half == TY_F16) NAME(f16_rows)(t, begin, end);
  else
#endif
    NAME(whole_rows)(t, begin, end);
  if (NAME(finishes)(g)) NAME(finish_part)(g, 0, g->m, begin, end, t->c + begin, t->c_row);
}

/* Whether the product was one of these; *ok: done without failure. */
static bool NAME(thin_product)(const ty_gemm *g, bool *ok) {
  if (g->pack || g->k < 64) return false;
  if (NAME(dots_product)(g, ok)) return true;
  if (g->m > THIN || g->b_col != 1 || g->n < 128) return false;
  if (g->m * g->n * g->k <= SMALL_WORK && g->m > 1) return false;
  NAME(thin) t = { g, g->a, g->a_row, g->a_col, g->c_row, g->c };
  size_t for_a = g->half ? sizeof(REAL) * (size_t)(g->m * g->k) : 0;
  size_t for_c = g->c_half ? sizeof(REAL) * (size_t)(g->m * g->n) : 0;
  REAL *scratch = NULL;
  if (for_a + for_c) {
    scratch = ty_scratch_alloc(for_a + for_c);
    *ok = scratch != NULL;
    if (!scratch) return true;
  }
  if (for_c) {
    t.c = scratch;
    t.c_row = g->n;
  }
  if (for_a) {
    REAL *copy = scratch + (g->c_half ? g->m * g->n : 0);
    for (int64_t p = 0; p < g->k; p += KC)
      NAME(pack_any)(g, g->a, g->a_row, g->a_col, p * g->a_col, g->m, MIN2(KC, g->k - p), copy + p, g->k);
    t.a = copy;
    t.a_row = g->k;
    t.a_col = 1;
  }
  int64_t grain = 1 + SERIAL_WORK / 8 / (g->m * g->k), runs = MIN2(g->n / 4, CHUNK); /* B is read in long runs */
  if (grain < runs) grain = runs;
  ty_parallel_for(g->n, (grain + 63) / 64 * 64, NAME(thin_rows), &t);
  if (scratch) ty_scratch_free(scratch, for_a + for_c);
  *ok = true;
  return true;
}
