/* Reductions. The view comes with the reduced dimensions last. Every result is the merge of states over fixed runs of
 * elements in a fixed order, so it does not depend on the number of threads. */
#include <math.h>
#include <string.h>

#include "../../half.h"
#include "../../scalar.h"
#include "../cpu.h"
#include "half_sums.h"
#include "../row_sums.h"

typedef enum kind { SUM, MEAN, SQUARES, PROD, MAX, MIN, ARGMAX, ARGMIN, ANY, ALL, LOGSUMEXP, VAR } kind;

/* a: sum (of squares), product, extreme, mean or maximum of floats; i: of integers; b: sum of exponentials or of squared
 * deviations; n: how many elements (or whether any); at: position of the extreme. */
typedef struct state {
  double a, b;
  int64_t i, n, at;
} state;

enum { BLOCK = 512, LONG_BLOCK = 4096, COLUMNS = 256, ROWS = 32, PIECE = 32768 };

static state start(kind k) {
  switch (k) {
    case PROD: return (state){ .a = 1, .i = 1 };
    case ALL: return (state){ .i = 1 };
    case LOGSUMEXP: return (state){ .a = -INFINITY };
    default: return (state){ 0 };
  }
}

/* Whether the extreme t comes before s, which is earlier: ties and NaN stay with the first. */
static bool replaces(kind k, bool integer, const state *s, const state *t) {
  if (!s->n) return true;
  bool largest = k == MAX || k == ARGMAX;
  if (integer) return largest ? t->i > s->i : t->i < s->i;
  return (largest ? t->a > s->a : t->a < s->a) || (t->a != t->a && s->a == s->a);
}

/* s = s and then t */
static void merge(kind k, bool integer, state *s, const state *t) {
  switch (k) {
    case SUM:
    case MEAN:
    case SQUARES:
      s->a += t->a;
      s->i = (int64_t)((uint64_t)s->i + (uint64_t)t->i);
      return;
    case PROD:
      s->a *= t->a;
      s->i = (int64_t)((uint64_t)s->i * (uint64_t)t->i);
      return;
    case ANY: s->i |= t->i; return;
    case ALL: s->i &= t->i; return;
    case MAX:
    case MIN:
    case ARGMAX:
    case ARGMIN:
      if (t->n && replaces(k, integer, s, t)) *s = *t;
      return;
    case LOGSUMEXP:
      if (!t->n) return;
      if (!s->n) {
        *s = *t;
      } else if (s->a != s->a || t->a != t->a) {
        s->a = NAN;
      } else {
        double m = s->a > t->a ? s->a : t->a;
        if (isfinite(m)) s->b = s->b * exp(s->a - m) + t->b * exp(t->a - m);
        s->a = m;
      }
      return;
    case VAR: { /* Chan, Golub and LeVeque 1979 */
      if (!t->n) return;
      double d = t->a - s->a, n = (double)(s->n + t->n);
      s->b += t->b + d * d * ((double)s->n * (double)t->n / n);
      s->a += d * (double)t->n / n;
      s->n += t->n;
      return;
    }
  }
}

/* n and the mean and squared deviations of floats whose squares do not fit a float. */
static state wide_deviations(const float *x, int64_t n) {
  double mean = 0, squares = 0;
  for (int64_t i = 0; i < n; i++) mean += (double)x[i];
  mean /= (double)n;
  for (int64_t i = 0; i < n; i++) squares += ((double)x[i] - mean) * ((double)x[i] - mean);
  return (state){ .n = n, .a = mean, .b = squares };
}

#define IS_NAN(x) ((x) != (x))
#define MASK int32_t
#define NOT_A_NUMBER NAN
#define WRAP(type) type
#define REAL float
#define WIDE double
#define WIDE_FIELD a
#define WIDE_IS_INT false
#define INTEGER 0
#define SUFFIX f32
#define EXP ty_exp_f32
#define TOO_NARROW(squares) (!((squares) > 0x1p-100f && (squares) < INFINITY))
#include "reduce_real.h"
#undef REAL
#undef SUFFIX
#undef EXP
#undef TOO_NARROW
#undef MASK
#define MASK int64_t
#define REAL double
#define SUFFIX f64
#define EXP exp
#define TOO_NARROW(squares) false
#include "reduce_real.h"
#undef REAL
#undef WIDE
#undef WIDE_FIELD
#undef WIDE_IS_INT
#undef INTEGER
#undef SUFFIX
#undef EXP
#undef TOO_NARROW
#undef IS_NAN
#undef NOT_A_NUMBER
#undef WRAP
#define IS_NAN(x) false
#define NOT_A_NUMBER 0
#define WRAP(type) uint64_t
#define REAL int64_t
#define WIDE int64_t
#define WIDE_FIELD i
#define WIDE_IS_INT true
#define INTEGER 1
#define SUFFIX i64
#include "reduce_real.h"

/* ---- what is reduced ---- */

typedef struct plan {
  kind k;
  const char *data;
  ty_dtype dtype;
  int size; /* bytes of an element */
  int nkept, nreduced;
  int64_t kept_size[TY_MAX_DIMS], kept_stride[TY_MAX_DIMS];
  int64_t reduced_size[TY_MAX_DIMS], reduced_stride[TY_MAX_DIMS];
  int64_t kept, reduced;
  const ty_view *out;
  double correction;
  bool root;
  int64_t pieces, piece; /* the reduced elements are cut into pieces when there are few results */
  state *partial;
} plan;

/* Neighbouring dimensions that are one run in memory become one; sizes of 1 go. */
static int collapse(const ty_view *v, int first, int last, int64_t *size, int64_t *stride, int64_t *count) {
  int n = 0;
  *count = 1;
  for (int d = first; d < last; d++) {
    *count *= v->size[d];
    if (v->size[d] == 1) continue;
    if (n && stride[n - 1] == v->stride[d] * v->size[d]) {
      size[n - 1] *= v->size[d];
      stride[n - 1] = v->stride[d];
    } else {
      size[n] = v->size[d];
      stride[n++] = v->stride[d];
    }
  }
  if (!n) size[0] = 1, stride[0] = 1, n = 1;
  return n;
}

static int64_t offset_of(int n, const int64_t *size, const int64_t *stride, int64_t index) {
  int64_t offset = 0;
  for (int d = n - 1; d > 0; d--) {
    offset += index % size[d] * stride[d];
    index /= size[d];
  }
  return offset + index * stride[0];
}

/* n elements, `stride` apart, in the compute type: in place when they lie so already. */
static const void *load(const plan *p, const char *from, int64_t stride, int64_t n, void *buffer) {
  switch (p->dtype) {
#define GATHER(type, real, convert)                                      \
  {                                                                      \
    const type *x = (const type *)(const void *)from;                    \
    real *y = buffer;                                                    \
    for (int64_t i = 0; i < n; i++) y[i] = (real)convert(x[i * stride]); \
    return y;                                                            \
  }
    case TY_F32:
      if (stride == 1) return from;
      GATHER(float, float, )
    case TY_F64:
      if (stride == 1) return from;
      GATHER(double, double, )
    case TY_I64:
      if (stride == 1) return from;
      GATHER(int64_t, int64_t, )
    case TY_F16:
      if (stride == 1) {
        ty_f16_load(buffer, (const uint16_t *)(const void *)from, n);
        return buffer;
      }
      GATHER(uint16_t, float, ty_f16_to_f32)
    case TY_BF16:
      if (stride == 1) {
        ty_bf16_load(buffer, (const uint16_t *)(const void *)from, n);
        return buffer;
      }
      GATHER(uint16_t, float, ty_bf16_to_f32)
    case TY_I32: GATHER(int32_t, int64_t, )
    case TY_I16: GATHER(int16_t, int64_t, )
    case TY_I8: GATHER(int8_t, int64_t, )
    default: GATHER(uint8_t, int64_t, )
#undef GATHER
  }
}

static bool is_integer(const plan *p) { return !ty_is_float(p->dtype); }

static void merge_block(const plan *p, const void *x, int64_t n, int64_t first, state *s) {
  if (p->dtype == TY_F64) merge_block_f64(p->k, x, n, first, s);
  else if (is_integer(p)) merge_block_i64(p->k, x, n, first, s);
  else merge_block_f32(p->k, x, n, first, s);
}

static bool sums_halves(const plan *p, int64_t stride) {
  return stride == 1 && ty_is_half(p->dtype) && (p->k == SUM || p->k == MEAN);
}

/* Reduced elements [begin, end) of the result whose first element is `base`. */
static void reduce_run(const plan *p, const char *base, int64_t begin, int64_t end, state *s) {
  double buffer[BLOCK];
  int last = p->nreduced - 1;
  int64_t width = p->reduced_size[last], stride = p->reduced_stride[last];
  bool in_place = stride == 1 && (p->dtype == TY_F32 || p->dtype == TY_F64 || p->dtype == TY_I64);
  bool extreme = p->k == MAX || p->k == MIN || p->k == ARGMAX || p->k == ARGMIN; /* has no rounding to keep small */
  /* So many that a lane of the four vectors of sum() adds up 32 of them. */
  const int64_t sums = BLOCK * (TY_VECTOR_BYTES / 16);
  int64_t most = in_place && extreme ? LONG_BLOCK : in_place ? sums : BLOCK;
  bool halves = sums_halves(p, stride);
  for (int64_t i = begin; i < end;) {
    int64_t in_row = i % width, n = width - in_row;
    if (n > end - i) n = end - i;
    if (n > most) n = most;
    const char *from = base + offset_of(p->nreduced, p->reduced_size, p->reduced_stride, i) * p->size;
    if (n < 32 && last > 0 && end - i > n) { /* short rows: fill the block from several */
      int64_t filled = 0;
      while (filled < BLOCK && i + filled < end) {
        int64_t at = (i + filled) % width, take = width - at;
        if (take > BLOCK - filled) take = BLOCK - filled;
        if (take > end - i - filled) take = end - i - filled;
        from = base + offset_of(p->nreduced, p->reduced_size, p->reduced_stride, i + filled) * p->size;
        char *room = (char *)buffer + filled * (p->dtype == TY_F64 || is_integer(p) ? 8 : 4);
        const void *x = load(p, from, stride, take, room);
        if (x != room) memcpy(room, x, (size_t)take * (size_t)p->size);
        filled += take;
      }
      merge_block(p, buffer, filled, i, s);
      i += filled;
      continue;
    }
    if (halves) s->a += sum_halves(p->dtype, (const uint16_t *)(const void *)from, n);
    else merge_block(p, load(p, from, stride, n, buffer), n, i, s);
    i += n;
  }
}

/* ---- results ---- */

static void store(const plan *p, int64_t index, const state *s) {
  char *to = (char *)p->out->data + index * ty_dtype_size[p->out->dtype];
  double f = s->a;
  int64_t i = s->i;
  switch (p->k) {
    case MEAN: f = s->a / (double)p->reduced; break;
    case LOGSUMEXP: f = s->a != s->a ? NAN : isfinite(s->a) ? s->a + log(s->b) : s->a; break;
    case VAR: {
      double n = (double)s->n - p->correction;
      f = s->n ? s->b / (n > 0 ? n : 0) : NAN;
      break;
    }
    case ARGMAX:
    case ARGMIN: i = s->at; break;
    default: break;
  }
  if (p->root) f = sqrt(f);
  switch (p->out->dtype) {
    case TY_F64: *(double *)(void *)to = f; break;
    case TY_F32: *(float *)(void *)to = (float)f; break;
    case TY_F16: *(uint16_t *)(void *)to = ty_f32_to_f16((float)f); break;
    case TY_BF16: *(uint16_t *)(void *)to = ty_f32_to_bf16((float)f); break;
    case TY_I64: *(int64_t *)(void *)to = i; break;
    case TY_I32: *(int32_t *)(void *)to = (int32_t)i; break;
    case TY_I16: *(int16_t *)(void *)to = (int16_t)i; break;
    default: *to = (char)i; break;
  }
}

/* Neighbouring results; the plain ones without looking at the kind each time. */
static void store_many(const plan *p, int64_t index, const state *s, int64_t n) {
  bool plain = p->k == SUM || p->k == MEAN || p->k == PROD || p->k == MAX || p->k == MIN;
  if (p->out->dtype != TY_F32 || !plain) {
    for (int64_t j = 0; j < n; j++) store(p, index + j, &s[j]);
    return;
  }
  float *to = (float *)p->out->data + index;
  double count = p->k == MEAN ? (double)p->reduced : 1;
  for (int64_t j = 0; j < n; j++) to[j] = (float)(s[j].a / count);
}

/* Sums and means of f32 rows that are one block each, without a state between. */
static void each_short_row(const plan *p, int64_t begin, int64_t end) {
  const int64_t n = p->reduced;
  const double count = p->k == MEAN ? (double)n : 1;
  float *to = p->out->data;
  for (int64_t i = begin; i < end; i += 4) {
    const int64_t rows = end - i < 4 ? end - i : 4;
    const float *x[4];
    float sum[4];
    for (int64_t r = 0; r < 4; r++)
      x[r] = (const float *)p->data + offset_of(p->nkept, p->kept_size, p->kept_stride, i + (r < rows ? r : rows - 1));
    if (n <= ROW_SUMS_MOST) {
      row_sums_four(x, n, sum);
      for (int64_t r = 0; r < rows; r++) to[i + r] = (float)((double)sum[r] / count);
    } else {
      for (int64_t r = 0; r < rows; r++) to[i + r] = (float)(sum_f32(x[r], n) / count);
    }
  }
}

static void each_kept(void *context, int64_t begin, int64_t end) {
  const plan *p = context;
  if (p->dtype == TY_F32 && p->out->dtype == TY_F32 && (p->k == SUM || p->k == MEAN) && p->nreduced == 1 &&
      p->reduced_stride[0] == 1 && p->reduced <= BLOCK) {
    each_short_row(p, begin, end);
    return;
  }
  for (int64_t i = begin; i < end; i++) {
    state s = start(p->k);
    const char *base = p->data + offset_of(p->nkept, p->kept_size, p->kept_stride, i) * p->size;
    reduce_run(p, base, 0, p->reduced, &s);
    store(p, i, &s);
  }
}

static void each_piece(void *context, int64_t begin, int64_t end) {
  const plan *p = context;
  for (int64_t u = begin; u < end; u++) {
    int64_t i = u / p->pieces, first = u % p->pieces * p->piece;
    int64_t last = first + p->piece < p->reduced ? first + p->piece : p->reduced;
    const char *base = p->data + offset_of(p->nkept, p->kept_size, p->kept_stride, i) * p->size;
    p->partial[u] = start(p->k);
    reduce_run(p, base, first, last, &p->partial[u]);
  }
}

/* ---- columns: neighbouring results side by side, a state for each. For kept dimensions that are contiguous, and for
 * short rows, which are turned into columns ---- */

/* Unit: one piece of the rows of one strip of columns of one outer result. */
typedef struct columns {
  const plan *p;
  int64_t strips, piece, pieces;
  state *partial;
} columns;

/* Rows [first, last) of the columns that start at `from`. */
static void reduce_columns(const plan *p, const char *from, int64_t first, int64_t last, int64_t width, state *s) {
  double buffer[ROWS * COLUMNS];
  const void *row[ROWS];
  int inner = p->nreduced - 1;
  int64_t stride = p->kept_stride[p->nkept - 1];
  int64_t bytes = p->dtype == TY_F64 || is_integer(p) ? 8 : 4;
  const bool halves = sums_halves(p, stride);
  double wide[COLUMNS]; /* of halves: side by side, as the states are not */
  if (halves) memset(wide, 0, sizeof *wide * (size_t)width);
  for (int64_t i = first; i < last;) {
    int64_t rows = last - i < ROWS ? last - i : ROWS;
    const char *x = NULL;
    for (int64_t r = 0; r < rows; r++) {
      if (r == 0 || (i + r) % p->reduced_size[inner] == 0)
        x = from + offset_of(p->nreduced, p->reduced_size, p->reduced_stride, i + r) * p->size;
      row[r] = halves ? x : load(p, x, stride, width, (char *)buffer + r * width * bytes);
      x += p->reduced_stride[inner] * p->size;
    }
    if (halves) {
      float *sums = (float *)buffer;
      column_sums_of_halves(p->dtype, sums, row, rows, width);
      for (int64_t j = 0; j < width; j++) wide[j] += (double)sums[j];
    } else if (p->dtype == TY_F64) merge_columns_f64(p->k, row, rows, width, i, s);
    else if (is_integer(p)) merge_columns_i64(p->k, row, rows, width, i, s);
    else merge_columns_f32(p->k, row, rows, width, i, s);
    i += rows;
  }
  for (int64_t j = 0; halves && j < width; j++) s[j].a += wide[j];
}

static void each_strip(void *context, int64_t begin, int64_t end) {
  const columns *c = context;
  const plan *p = c->p;
  int64_t total = p->kept_size[p->nkept - 1];
  const state fresh = start(p->k);
  state own[COLUMNS];
  for (int64_t u = begin; u < end; u++) {
    int64_t piece = u % c->pieces, strip = u / c->pieces % c->strips, outer = u / c->pieces / c->strips;
    int64_t column = strip * COLUMNS, width = total - column < COLUMNS ? total - column : COLUMNS;
    int64_t index = outer * total + column;
    const char *from = p->data + offset_of(p->nkept, p->kept_size, p->kept_stride, index) * p->size;
    int64_t first = piece * c->piece, last = first + c->piece < p->reduced ? first + c->piece : p->reduced;
    state *s = c->partial ? c->partial + u * COLUMNS : own;
    memcpy(s, &fresh, sizeof *s);
    for (int64_t j = 1; j < width; j++) memcpy(&s[j], s, sizeof *s); /* gcc builds a constant anew each time */
    reduce_columns(p, from, first, last, width, s);
    if (!c->partial) store_many(p, index, s, width);
  }
}

static bool reduce_in_columns(const plan *p) {
  int64_t total = p->kept_size[p->nkept - 1];
  columns c = { .p = p, .strips = (total + COLUMNS - 1) / COLUMNS };
  int64_t width = total < COLUMNS ? total : COLUMNS;
  c.piece = 4 * PIECE / width / ROWS * ROWS;
  c.pieces = (p->reduced + c.piece - 1) / c.piece;
  int64_t strips = p->kept / total * c.strips, units = strips * c.pieces;
  size_t bytes = c.pieces > 1 ? (size_t)units * COLUMNS * sizeof *c.partial : 0;
  if (bytes && !(c.partial = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(units, PIECE / (width * (p->reduced < c.piece ? p->reduced : c.piece)) + 1, each_strip, &c);
  if (!bytes) return true;
  for (int64_t u = 0; u < strips; u++) {
    int64_t column = u % c.strips * COLUMNS, index = u / c.strips * total + column;
    state *s = c.partial + u * c.pieces * COLUMNS;
    int64_t n = total - column < COLUMNS ? total - column : COLUMNS;
    for (int64_t i = 1; i < c.pieces; i++)
      for (int64_t j = 0; j < n; j++) merge(p->k, is_integer(p), &s[j], &s[i * COLUMNS + j]);
    store_many(p, index, s, n);
  }
  ty_scratch_free(c.partial, bytes);
  return true;
}

/* ---- all ---- */

static bool reduce_to(kind k, bool root, const ty_kernel_args *args) {
  const ty_view *in = args->in[0];
  const ty_p_reduce *r = args->params;
  plan p = { .k = k,
             .data = in->data,
             .dtype = (ty_dtype)in->dtype,
             .size = ty_dtype_size[in->dtype],
             .out = args->out[0],
             .correction = r->a,
             .root = root };
  int split = in->ndim - r->ndim_reduced;
  p.nkept = collapse(in, 0, split, p.kept_size, p.kept_stride, &p.kept);
  p.nreduced = collapse(in, split, in->ndim, p.reduced_size, p.reduced_stride, &p.reduced);
  if (p.kept == 0) return true;
  if (p.reduced == 0) {
    state s = start(k);
    if (k == MEAN) s.a = NAN;
    for (int64_t i = 0; i < p.kept; i++) {
      p.reduced = k == MEAN ? 1 : 0;
      store(&p, i, &s);
    }
    return true;
  }
  int64_t side = p.kept_size[p.nkept - 1];
  if (side >= 8 && p.reduced > 1 &&
      (p.kept_stride[p.nkept - 1] == 1 ? p.reduced_stride[p.nreduced - 1] != 1 : p.reduced <= ROWS))
    return reduce_in_columns(&p);
  if (p.kept >= 64 || p.reduced <= PIECE) {
    ty_parallel_for(p.kept, p.reduced < PIECE ? PIECE / p.reduced + 1 : 1, each_kept, &p);
    return true;
  }
  p.piece = PIECE;
  p.pieces = (p.reduced + PIECE - 1) / PIECE;
  size_t bytes = (size_t)(p.kept * p.pieces) * sizeof *p.partial;
  if (!(p.partial = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(p.kept * p.pieces, 1, each_piece, &p);
  for (int64_t i = 0; i < p.kept; i++) {
    state s = start(k);
    for (int64_t j = 0; j < p.pieces; j++) merge(k, is_integer(&p), &s, &p.partial[i * p.pieces + j]);
    store(&p, i, &s);
  }
  ty_scratch_free(p.partial, bytes);
  return true;
}

#define REDUCTION(name, kind) \
  bool TY_KERNEL(name)(const ty_kernel_args *k) { return reduce_to(kind, false, k); }
#define ROOT_OF_REDUCTION(name, kind) \
  bool TY_KERNEL(name)(const ty_kernel_args *k) { return reduce_to(kind, true, k); }

REDUCTION(sum, SUM)
REDUCTION(mean, MEAN)
REDUCTION(var, VAR)
ROOT_OF_REDUCTION(std, VAR)
ROOT_OF_REDUCTION(norm, SQUARES)
REDUCTION(prod, PROD)
REDUCTION(max, MAX)
REDUCTION(min, MIN)
REDUCTION(argmax, ARGMAX)
REDUCTION(argmin, ARGMIN)
REDUCTION(any, ANY)
REDUCTION(all, ALL)
REDUCTION(logsumexp, LOGSUMEXP)
