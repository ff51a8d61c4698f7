/* Running sums, products, extremes and first-order linear recurrences along one dimension. f32 accumulates in f64. */
#include <math.h>

#include "../cpu.h"

#include "../lines.h"

#define GRAIN 16384
#define LANES 128   /* neighbouring lines that advance together when the dimension is not the last */
#define CHUNK 32768 /* a long line is cut into pieces of this length, summed first, then scanned */
#define FEW_LINES 16

typedef struct scan_ctx {
  ty_lines l;
  bool reverse;
  const void *x;
  void *y;
  void *sums; /* what precedes each chunk; of extremes, the positions */
  int64_t chunks;
} scan_ctx;

/* A range is made of pieces: lines when inner is 1, else blocks of LANES lines of one outer position. */
static int64_t pieces_of(const ty_lines *l) {
  return l->inner == 1 ? l->outer : l->outer * ((l->inner + LANES - 1) / LANES);
}

typedef struct piece {
  int64_t base; /* of the first element */
  int lanes;    /* neighbouring lines */
} piece;

static piece piece_at(const ty_lines *l, int64_t p) {
  if (l->inner == 1) return (piece){ p * l->size, 1 };
  int64_t blocks = (l->inner + LANES - 1) / LANES, o = p / blocks, i = p % blocks * LANES;
  return (piece){ o * l->size * l->inner + i, (int)(l->inner - i < LANES ? l->inner - i : LANES) };
}

static void run(const ty_lines *l, ty_range_fn *fn, void *context) {
  int64_t pieces = pieces_of(l), each = l->outer * l->size * l->inner / (pieces ? pieces : 1) + 1;
  ty_parallel_for(pieces, (GRAIN + each - 1) / each, fn, context);
}

#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))

/* A: what accumulates; one: the neutral element; JOIN: the operation */
#define SCAN(name, T, A, one, JOIN)                                                                 \
  static void name(void *context, int64_t begin, int64_t end) {                                     \
    const scan_ctx *c = context;                                                                    \
    for (int64_t p = begin; p < end; p++) {                                                         \
      piece w = piece_at(&c->l, p);                                                                 \
      const T *x = (const T *)c->x + w.base;                                                        \
      T *y = (T *)c->y + w.base;                                                                    \
      int64_t step = c->reverse ? -c->l.inner : c->l.inner;                                         \
      int64_t at = c->reverse ? (c->l.size - 1) * c->l.inner : 0;                                   \
      if (w.lanes == 1) {                                                                           \
        A sum = one;                                                                                \
        for (int64_t t = 0; t < c->l.size; t++, at += step) y[at] = (T)(sum = JOIN(sum, (A)x[at])); \
        continue;                                                                                   \
      }                                                                                             \
      A sum[LANES];                                                                                 \
      for (int i = 0; i < LANES; i++) sum[i] = one;                                                 \
      for (int64_t t = 0; t < c->l.size; t++, at += step) {                                         \
        const T *restrict from = x + at;                                                            \
        T *restrict to = y + at;                                                                    \
        for (int i = 0; i < w.lanes; i++) to[i] = (T)(sum[i] = JOIN(sum[i], (A)from[i]));           \
      }                                                                                             \
    }                                                                                               \
  }
SCAN(cumsum_f32, float, double, 0, PLUS)
SCAN(cumsum_f64, double, double, 0, PLUS)
SCAN(cumsum_i64, uint64_t, uint64_t, 0, PLUS)
SCAN(cumprod_f32, float, double, 1, TIMES)
SCAN(cumprod_f64, double, double, 1, TIMES)
SCAN(cumprod_i64, uint64_t, uint64_t, 1, TIMES)

/* log(exp(a) + exp(b)) */
static inline double log_plus(double a, double b) {
  if (a == b) return a + 0.69314718055994530942; /* infinities too */
  return a > b ? a + log1p(exp(b - a)) : b + log1p(exp(a - b));
}
SCAN(logcumsumexp_f32, float, double, -(double)INFINITY, log_plus)
SCAN(logcumsumexp_f64, double, double, -(double)INFINITY, log_plus)

/* The extreme so far and where it is, of equal ones the last; from a NaN on, NaN. */
#define EXTREME(name, T, AT_LEAST)                                                     \
  static void name(void *context, int64_t begin, int64_t end) {                        \
    const scan_ctx *c = context;                                                       \
    for (int64_t p = begin; p < end; p++) {                                            \
      piece w = piece_at(&c->l, p);                                                    \
      const T *x = (const T *)c->x + w.base;                                           \
      T *y = (T *)c->y + w.base;                                                       \
      int64_t *at = (int64_t *)c->sums + w.base;                                       \
      if (c->l.inner == 1) { /* a line: what is new is rare, and foreseen not to be */ \
        T most = c->l.size ? x[0] : 0;                                                 \
        int64_t last = 0;                                                              \
        for (int64_t t = 0; t < c->l.size; t++) {                                      \
          if (__builtin_expect((x[t] AT_LEAST most) || x[t] != x[t], 0)) {             \
            most = x[t];                                                               \
            last = t;                                                                  \
          }                                                                            \
          y[t] = most;                                                                 \
          at[t] = last;                                                                \
        }                                                                              \
        continue;                                                                      \
      }                                                                                \
      T best[LANES];                                                                   \
      int64_t where[LANES];                                                            \
      for (int64_t t = 0; t < c->l.size; t++) {                                        \
        const T *restrict from = x + t * c->l.inner;                                   \
        T *restrict to = y + t * c->l.inner;                                           \
        int64_t *restrict positions = at + t * c->l.inner;                             \
        for (int i = 0; i < w.lanes; i++) {                                            \
          bool better = t == 0 || (from[i] AT_LEAST best[i]) || (from[i] != from[i]);  \
          best[i] = better ? from[i] : best[i];                                        \
          where[i] = better ? t : where[i];                                            \
          to[i] = best[i];                                                             \
          positions[i] = where[i];                                                     \
        }                                                                              \
      }                                                                                \
    }                                                                                  \
  }
#define EXTREMES(type, T)       \
  EXTREME(cummax_##type, T, >=) \
  EXTREME(cummin_##type, T, <=)
EXTREMES(f32, float)
EXTREMES(f64, double)
EXTREMES(i64, int64_t)
EXTREMES(i32, int32_t)
EXTREMES(i16, int16_t)
EXTREMES(i8, int8_t)
EXTREMES(u8, uint8_t)

/* Long lines: ranges count chunks of all lines; inner is 1. */
#define LONG(name, T, A)                                                                              \
  static void name##_totals(void *context, int64_t begin, int64_t end) {                              \
    const scan_ctx *c = context;                                                                      \
    for (int64_t i = begin; i < end; i++) {                                                           \
      int64_t from = i % c->chunks * CHUNK, to = from + CHUNK < c->l.size ? from + CHUNK : c->l.size; \
      const T *restrict x = (const T *)c->x + i / c->chunks * c->l.size;                              \
      A sum = 0;                                                                                      \
      _Pragma("omp simd reduction(+ : sum)") for (int64_t j = from; j < to; j++) sum += (A)x[j];      \
      ((A *)c->sums)[i] = sum;                                                                        \
    }                                                                                                 \
  }                                                                                                   \
  static void name##_scan(void *context, int64_t begin, int64_t end) {                                \
    const scan_ctx *c = context;                                                                      \
    for (int64_t i = begin; i < end; i++) {                                                           \
      int64_t from = i % c->chunks * CHUNK, to = from + CHUNK < c->l.size ? from + CHUNK : c->l.size; \
      const T *x = (const T *)c->x + i / c->chunks * c->l.size;                                       \
      T *y = (T *)c->y + i / c->chunks * c->l.size;                                                   \
      A sum = ((const A *)c->sums)[i];                                                                \
      if (c->reverse)                                                                                 \
        for (int64_t j = to - 1; j >= from; j--) y[j] = (T)(sum += (A)x[j]);                          \
      else                                                                                            \
        for (int64_t j = from; j < to; j++) y[j] = (T)(sum += (A)x[j]);                               \
    }                                                                                                 \
  }                                                                                                   \
  static bool name(scan_ctx *c) {                                                                     \
    c->chunks = (c->l.size + CHUNK - 1) / CHUNK;                                                      \
    int64_t all = c->l.outer * c->chunks;                                                             \
    A *sums = ty_scratch_alloc((size_t)all * sizeof(A));                                              \
    if (!sums) return false;                                                                          \
    c->sums = sums;                                                                                   \
    ty_parallel_for(all, 1, name##_totals, c);                                                        \
    for (int64_t o = 0; o < c->l.outer && !ty_interrupted; o++) {                                     \
      A before = 0;                                                                                   \
      for (int64_t i = 0; i < c->chunks; i++) {                                                       \
        int64_t at = o * c->chunks + (c->reverse ? c->chunks - 1 - i : i);                            \
        A sum = sums[at];                                                                             \
        sums[at] = before;                                                                            \
        before += sum;                                                                                \
      }                                                                                               \
    }                                                                                                 \
    ty_parallel_for(all, 1, name##_scan, c);                                                          \
    ty_scratch_free(sums, (size_t)all * sizeof(A));                                                   \
    return true;                                                                                      \
  }
LONG(long_f32, float, double)
LONG(long_f64, double, double)
LONG(long_i64, uint64_t, uint64_t)

/* in: x; dim, flag: from the end. Integers are i64. */
bool TY_KERNEL(cumsum)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  scan_ctx c = { .l = ty_lines_of(k->in[0], p->dim), .reverse = p->flag, .x = k->in[0]->data, .y = k->out[0]->data };
  int d = k->in[0]->dtype;
  if (c.l.inner == 1 && c.l.outer < FEW_LINES && c.l.size > CHUNK)
    return d == TY_F32 ? long_f32(&c) : d == TY_F64 ? long_f64(&c) : long_i64(&c);
  run(&c.l, d == TY_F32 ? cumsum_f32 : d == TY_F64 ? cumsum_f64 : cumsum_i64, &c);
  return true;
}

/* A product over chunks could overflow where the running product does not: lines stay whole. */
bool TY_KERNEL(cumprod)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  scan_ctx c = { .l = ty_lines_of(k->in[0], p->dim), .x = k->in[0]->data, .y = k->out[0]->data };
  int d = k->in[0]->dtype;
  run(&c.l, d == TY_F32 ? cumprod_f32 : d == TY_F64 ? cumprod_f64 : cumprod_i64, &c);
  return true;
}

bool TY_KERNEL(logcumsumexp)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  scan_ctx c = { .l = ty_lines_of(k->in[0], p->dim), .x = k->in[0]->data, .y = k->out[0]->data };
  run(&c.l, k->in[0]->dtype == TY_F32 ? logcumsumexp_f32 : logcumsumexp_f64, &c);
  return true;
}

#define EXTREME_ENTRY(name)                                                                                  \
  bool TY_KERNEL(name)(const ty_kernel_args *k) {                                                            \
    static ty_range_fn *const fn[TY_DTYPES] = {                                                              \
      [TY_F32] = name##_f32, [TY_F64] = name##_f64, [TY_I64] = name##_i64, [TY_I32] = name##_i32,            \
      [TY_I16] = name##_i16, [TY_I8] = name##_i8,   [TY_U8] = name##_u8,   [TY_BOOL] = name##_u8,            \
    };                                                                                                       \
    const ty_p_dim *p = k->params;                                                                           \
    scan_ctx c = {                                                                                           \
      .l = ty_lines_of(k->in[0], p->dim), .x = k->in[0]->data, .y = k->out[0]->data, .sums = k->out[1]->data \
    };                                                                                                       \
    run(&c.l, fn[k->in[0]->dtype], &c);                                                                      \
    return true;                                                                                             \
  }
EXTREME_ENTRY(cummax)
EXTREME_ENTRY(cummin)

/* ---- h[t] = a[t] h[t-1] + b[t] ---- */

typedef struct recurrence_ctx {
  ty_lines l;
  bool reverse;
  const void *a, *b, *h; /* b: the gradient g in the backward */
  void *out, *da, *db;
} recurrence_ctx;

/* Backward: with s[t] = g[t] + a[t+1] s[t+1], the gradient of b[t] is s[t] and that of a[t] is s[t] h[t-1]. */
#define RECURRENCE(name, T)                                                                                  \
  static void name(void *context, int64_t begin, int64_t end) {                                              \
    const recurrence_ctx *c = context;                                                                       \
    for (int64_t p = begin; p < end; p++) {                                                                  \
      piece w = piece_at(&c->l, p);                                                                          \
      int64_t step = c->reverse ? -c->l.inner : c->l.inner;                                                  \
      int64_t at = w.base + (c->reverse ? (c->l.size - 1) * c->l.inner : 0);                                 \
      const T *a = c->a, *b = c->b;                                                                          \
      T *h = c->out;                                                                                         \
      if (w.lanes == 1) {                                                                                    \
        double state = 0;                                                                                    \
        for (int64_t t = 0; t < c->l.size; t++, at += step)                                                  \
          h[at] = (T)(state = (double)a[at] * state + (double)b[at]);                                        \
        continue;                                                                                            \
      }                                                                                                      \
      double state[LANES];                                                                                   \
      for (int i = 0; i < w.lanes; i++) state[i] = 0;                                                        \
      for (int64_t t = 0; t < c->l.size; t++, at += step) {                                                  \
        const T *restrict pa = a + at, *restrict pb = b + at;                                                \
        T *restrict ph = h + at;                                                                             \
        for (int i = 0; i < w.lanes; i++) ph[i] = (T)(state[i] = (double)pa[i] * state[i] + (double)pb[i]);  \
      }                                                                                                      \
    }                                                                                                        \
  }                                                                                                          \
  static void name##_backward(void *context, int64_t begin, int64_t end) {                                   \
    const recurrence_ctx *c = context;                                                                       \
    for (int64_t p = begin; p < end; p++) {                                                                  \
      piece w = piece_at(&c->l, p);                                                                          \
      int64_t step = c->reverse ? c->l.inner : -c->l.inner;                                                  \
      int64_t at = w.base + (c->reverse ? 0 : (c->l.size - 1) * c->l.inner);                                 \
      const T *a = c->a, *g = c->b, *h = c->h;                                                               \
      T *da = c->da, *db = c->db;                                                                            \
      if (w.lanes == 1) {                                                                                    \
        double carry = 0; /* a[t+1] s[t+1] */                                                                \
        for (int64_t t = 0; t < c->l.size; t++, at += step) {                                                \
          double s = (double)g[at] + carry;                                                                  \
          db[at] = (T)s;                                                                                     \
          da[at] = t + 1 == c->l.size ? 0 : (T)(s * (double)h[at + step]);                                   \
          carry = (double)a[at] * s;                                                                         \
        }                                                                                                    \
        continue;                                                                                            \
      }                                                                                                      \
      double carry[LANES];                                                                                   \
      for (int i = 0; i < w.lanes; i++) carry[i] = 0;                                                        \
      for (int64_t t = 0; t < c->l.size; t++, at += step) {                                                  \
        bool first = t + 1 == c->l.size;                                                                     \
        const T *restrict pa = a + at, *restrict pg = g + at, *restrict before = first ? pg : h + at + step; \
        T *restrict pda = da + at, *restrict pdb = db + at;                                                  \
        for (int i = 0; i < w.lanes; i++) {                                                                  \
          double s = (double)pg[i] + carry[i];                                                               \
          pdb[i] = (T)s;                                                                                     \
          pda[i] = first ? 0 : (T)(s * (double)before[i]);                                                   \
          carry[i] = (double)pa[i] * s;                                                                      \
        }                                                                                                    \
      }                                                                                                      \
    }                                                                                                        \
  }
RECURRENCE(recur_f32, float)
RECURRENCE(recur_f64, double)

/* in: a, b; dim, flag: from the end. */
bool TY_KERNEL(linear_scan)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  recurrence_ctx c = { .l = ty_lines_of(k->in[0], p->dim),
                       .reverse = p->flag,
                       .a = k->in[0]->data,
                       .b = k->in[1]->data,
                       .out = k->out[0]->data };
  run(&c.l, k->out[0]->dtype == TY_F32 ? recur_f32 : recur_f64, &c);
  return true;
}

/* in: g, a, h; out: the gradients of a and b; dim, flag as in the forward. */
bool TY_KERNEL(linear_scan_backward)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  recurrence_ctx c = { .l = ty_lines_of(k->in[0], p->dim),
                       .reverse = p->flag,
                       .b = k->in[0]->data,
                       .a = k->in[1]->data,
                       .h = k->in[2]->data,
                       .da = k->out[0]->data,
                       .db = k->out[1]->data };
  run(&c.l, k->out[0]->dtype == TY_F32 ? recur_f32_backward : recur_f64_backward, &c);
  return true;
}
