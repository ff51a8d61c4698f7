/* Choosing the elements of a row that stay, and the product that reads the weights of those alone. */
#include <string.h>

#include "../../half.h"
#include "../../scalar.h"
#include "../cpu.h"

/* ---- sparsify ---- */

enum { SELECT_WORK = 8192, DIGITS = 256 };

typedef struct select_job {
  const void *x, *scale;
  void *out;
  int64_t n, count;
  double threshold;
  char *room; /* keys of a row, for each row */
} select_job;

/* Scores are not negative, so that their bits, as a number, have their order, and NaN comes out largest. The digits of
 * the count-th largest are found from the highest on: how many keys have each, among those that begin like it. */
#define SELECT(name, REAL, KEY, fabs_)                                                                            \
  static KEY name##_least(const KEY *keys, int64_t n, int64_t count, int64_t *equal) {                            \
    KEY prefix = 0, mask = 0;                                                                                     \
    for (int shift = 8 * (int)sizeof(KEY) - 8; shift >= 0; shift -= 8) {                                          \
      int64_t found[DIGITS] = { 0 };                                                                              \
      for (int64_t i = 0; i < n; i++)                                                                             \
        if ((keys[i] & mask) == prefix) found[keys[i] >> shift & (DIGITS - 1)]++;                                 \
      int digit = DIGITS - 1;                                                                                     \
      for (; found[digit] < count; digit--) count -= found[digit];                                                \
      prefix |= (KEY)digit << shift, mask |= (KEY)(DIGITS - 1) << shift;                                          \
    }                                                                                                             \
    *equal = count;                                                                                               \
    return prefix;                                                                                                \
  }                                                                                                               \
  static void name(void *context, int64_t begin, int64_t end) {                                                   \
    const select_job *c = context;                                                                                \
    const REAL *scale = c->scale;                                                                                 \
    for (int64_t r = begin; r < end; r++) {                                                                       \
      const REAL *restrict x = (const REAL *)c->x + r * c->n;                                                     \
      REAL *restrict out = (REAL *)c->out + r * c->n;                                                             \
      if (c->count == 0) {                                                                                        \
        const REAL threshold = (REAL)c->threshold;                                                                \
        for (int64_t i = 0; i < c->n; i++) out[i] = fabs_(x[i] * (scale ? scale[i] : 1)) <= threshold ? 0 : x[i]; \
        continue;                                                                                                 \
      }                                                                                                           \
      KEY *keys = (KEY *)c->room + r * c->n;                                                                      \
      for (int64_t i = 0; i < c->n; i++) {                                                                        \
        const REAL score = fabs_(x[i] * (scale ? scale[i] : 1));                                                  \
        memcpy(keys + i, &score, sizeof score);                                                                   \
      }                                                                                                           \
      int64_t equal;                                                                                              \
      const KEY least = name##_least(keys, c->n, c->count, &equal);                                               \
      for (int64_t i = 0; i < c->n; i++) {                                                                        \
        const bool stays = keys[i] > least || (keys[i] == least && equal-- > 0);                                  \
        out[i] = stays ? x[i] : 0;                                                                                \
      }                                                                                                           \
    }                                                                                                             \
  }
SELECT(select_f32, float, uint32_t, __builtin_fabsf)
SELECT(select_f64, double, uint64_t, __builtin_fabs)

/* in: x [..., n], scale [n] or NULL. */
bool TY_KERNEL(sparsify)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *out = k->out[0];
  const ty_p_sparsify *p = k->params;
  if (x->count == 0) return true;
  const size_t bytes = (size_t)x->count * ty_dtype_size[x->dtype];
  const int64_t n = x->size[x->ndim - 1];
  if (p->count >= n) {
    memcpy(out->data, x->data, bytes);
    return true;
  }
  select_job c = { .x = x->data,
                   .scale = k->in[1] ? k->in[1]->data : NULL,
                   .out = out->data,
                   .n = n,
                   .count = p->count,
                   .threshold = p->threshold };
  if (p->count && !(c.room = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(x->count / n, (SELECT_WORK + n - 1) / n, x->dtype == TY_F64 ? select_f64 : select_f32, &c);
  if (c.room) ty_scratch_free(c.room, bytes);
  return true;
}

/* ---- sparse_linear ---- */

enum {
  AT_ONCE = 8,   /* rows of the weight */
  CHUNK = 1024,  /* outputs whose sums stay in the first cache */
  LINE = 64,     /* bytes */
  WORK = 1 << 15 /* products that are worth a thread */
};

typedef struct product_job {
  const void *weight;
  const void *x, *bias; /* x: of the rows that count, widened; their positions in `kept` */
  void *out;
  const int64_t *kept;
  int64_t count, width; /* width: of a row of the weight, in elements */
} product_job;

/* Rows eight at a time are added to the sums of a chunk; while they are read, the rows that come next are asked for. */
#define PRODUCT(name, REAL, E, WIDEN, STORE)                                                                         \
  static inline void name##_rows(REAL *restrict sums, const E *const *rows, const REAL *x, const E *const *next,     \
                                 int64_t n) {                                                                        \
    enum { L = LINE / sizeof(E) };                                                                                   \
    const E *restrict r0 = rows[0], *restrict r1 = rows[1], *restrict r2 = rows[2], *restrict r3 = rows[3];          \
    const E *restrict r4 = rows[4], *restrict r5 = rows[5], *restrict r6 = rows[6], *restrict r7 = rows[7];          \
    const REAL x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3], x4 = x[4], x5 = x[5], x6 = x[6], x7 = x[7];               \
    int64_t j = 0;                                                                                                   \
    for (; j + L <= n; j += L) {                                                                                     \
      for (int r = 0; next && r < AT_ONCE; r++) __builtin_prefetch(next[r] + j);                                     \
      _Pragma("omp simd") for (int l = 0; l < L; l++) sums[j + l] += x0 * WIDEN(r0[j + l]) + x1 * WIDEN(r1[j + l]) + \
                                                                     x2 * WIDEN(r2[j + l]) + x3 * WIDEN(r3[j + l]) + \
                                                                     x4 * WIDEN(r4[j + l]) + x5 * WIDEN(r5[j + l]) + \
                                                                     x6 * WIDEN(r6[j + l]) + x7 * WIDEN(r7[j + l]);  \
    }                                                                                                                \
    for (; j < n; j++)                                                                                               \
      sums[j] += x0 * WIDEN(r0[j]) + x1 * WIDEN(r1[j]) + x2 * WIDEN(r2[j]) + x3 * WIDEN(r3[j]) + x4 * WIDEN(r4[j]) + \
                 x5 * WIDEN(r5[j]) + x6 * WIDEN(r6[j]) + x7 * WIDEN(r7[j]);                                          \
  }                                                                                                                  \
  static void name(void *context, int64_t begin, int64_t end) {                                                      \
    const product_job *c = context;                                                                                  \
    const REAL *x = c->x, *bias = c->bias;                                                                           \
    REAL sums[CHUNK];                                                                                                \
    for (int64_t j0 = begin; j0 < end; j0 += CHUNK) {                                                                \
      const E *weight = (const E *)c->weight + j0;                                                                   \
      const int64_t n = end - j0 < CHUNK ? end - j0 : CHUNK;                                                         \
      for (int64_t j = 0; j < n; j++) sums[j] = bias ? bias[j0 + j] : 0;                                             \
      int64_t p = 0;                                                                                                 \
      for (; p + AT_ONCE <= c->count; p += AT_ONCE) {                                                                \
        const bool more = p + 2 * AT_ONCE <= c->count;                                                               \
        const E *rows[AT_ONCE], *next[AT_ONCE];                                                                      \
        for (int r = 0; r < AT_ONCE; r++) {                                                                          \
          rows[r] = weight + c->kept[p + r] * c->width;                                                              \
          if (more) next[r] = weight + c->kept[p + AT_ONCE + r] * c->width;                                          \
        }                                                                                                            \
        name##_rows(sums, rows, x + p, more ? next : NULL, n);                                                       \
      }                                                                                                              \
      for (; p < c->count; p++) {                                                                                    \
        const E *row = weight + c->kept[p] * c->width;                                                               \
        _Pragma("omp simd") for (int64_t j = 0; j < n; j++) sums[j] += x[p] * WIDEN(row[j]);                         \
      }                                                                                                              \
      E *out = (E *)c->out + j0;                                                                                     \
      STORE;                                                                                                         \
    }                                                                                                                \
  }
#define SAME(x) (x)
PRODUCT(product_f32, float, float, SAME, memcpy(out, sums, (size_t)n * sizeof *out))
PRODUCT(product_f64, double, double, SAME, memcpy(out, sums, (size_t)n * sizeof *out))
PRODUCT(product_f16, float, uint16_t, ty_f16_to_f32, ty_f16_store(out, sums, n))
PRODUCT(product_bf16, float, uint16_t, ty_bf16_to_f32, ty_bf16_store(out, sums, n))

static ty_range_fn *product_of(ty_dtype dtype) {
  switch (dtype) {
    case TY_F64: return product_f64;
    case TY_F16: return product_f16;
    case TY_BF16: return product_bf16;
    default: return product_f32;
  }
}

/* The elements of x that are not zero, in `values`, and their positions. */
static int64_t gather(const ty_view *x, void *values, int64_t *kept) {
  int64_t count = 0;
  for (int64_t i = 0; i < x->count; i++) {
    kept[count] = i;
    if (x->dtype == TY_F64) {
      const double v = ((const double *)x->data)[i];
      ((double *)values)[count] = v;
      count += v != 0;
    } else {
      float v;
      if (x->dtype == TY_F32) v = ((const float *)x->data)[i];
      else ty_half_load((ty_dtype)x->dtype, &v, (const uint16_t *)x->data + i, 1);
      ((float *)values)[count] = v;
      count += v != 0;
    }
  }
  return count;
}

/* in: x [in], weight [in, out], bias [out] or NULL, f32 where the others are f16 or bf16. */
bool TY_KERNEL(sparse_linear)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *weight = k->in[1], *out = k->out[0];
  if (out->count == 0) return true;
  const size_t real = x->dtype == TY_F64 ? sizeof(double) : sizeof(float);
  const size_t bytes = (size_t)(x->count + 1) * (real + sizeof(int64_t));
  int64_t *kept = ty_scratch_alloc(bytes);
  if (!kept) return false;
  product_job c = { .weight = weight->data,
                    .x = kept + x->count + 1,
                    .bias = k->in[2] ? k->in[2]->data : NULL,
                    .out = out->data,
                    .kept = kept,
                    .width = out->count };
  c.count = gather(x, kept + x->count + 1, kept);
  /* Every row is read in as long runs as the threads allow: the rows that are left out cut up what is read as it is.
   * Which columns a thread has changes no sum. */
  int64_t grain = 1 + WORK / (c.count + 1), runs = out->count / ty_parallel_threads();
  if (runs > CHUNK) runs = CHUNK;
  if (grain < runs) grain = runs;
  ty_parallel_for(out->count, (grain + LINE - 1) / LINE * LINE, product_of((ty_dtype)x->dtype), &c);
  ty_scratch_free(kept, bytes);
  return true;
}
