/* Segments of positions along a dimension: bringing equal elements of an index together, reductions, what gives their
 * result back to every position, and softmax. Positions are cut into pieces of a fixed number, each for one task, and
 * where a segment goes over several pieces its parts are put together from the first to the last: nothing depends on
 * the threads. */
#include "segments.h"

#include <string.h>

#include "../../indexing.h"
#include "combine.h"
#include "../exp_weight.h"
#include "indexing.h"

enum {
  PIECE = 8192, /* elements */
  LEAST = 16,   /* positions of a piece */
  FEW = 8       /* columns of softmax, fewer than which have their exponentials taken together */
};

/* ---- equal elements together ---- */

typedef struct sort_job {
  const ty_view *index;
  int64_t *order, *counts; /* counts [chunks, m]: of each chunk's elements, then where its next one goes */
  int64_t m, chunk;
} sort_job;

static void count_chunks(void *context, int64_t begin, int64_t end) {
  const sort_job *c = context;
  const bool wide = c->index->dtype == TY_I64;
  for (int64_t k = begin; k < end; k++) {
    int64_t *counts = c->counts + k * c->m, last = (k + 1) * c->chunk;
    if (last > c->index->count) last = c->index->count;
    for (int64_t i = k * c->chunk; i < last; i++) counts[ty_index_at(c->index->data, i, wide)]++;
  }
}

static void place_chunks(void *context, int64_t begin, int64_t end) {
  const sort_job *c = context;
  const bool wide = c->index->dtype == TY_I64;
  for (int64_t k = begin; k < end; k++) {
    int64_t *next = c->counts + k * c->m, last = (k + 1) * c->chunk;
    if (last > c->index->count) last = c->index->count;
    for (int64_t i = k * c->chunk; i < last; i++) c->order[next[ty_index_at(c->index->data, i, wide)]++] = i;
  }
}

/* in: index [n]; out: order [n], offsets [m + 1]. */
bool TY_KERNEL(segments_of)(const ty_kernel_args *k) {
  const ty_view *index = k->in[0];
  int64_t *offsets = k->out[1]->data, n = index->count, m = k->out[1]->count - 1, chunks = ty_parallel_threads();
  if (!ty_index_check(index, m)) return false;
  if (n < 1 << 15 || chunks * m > 2 * n) chunks = 1;
  const size_t bytes = sizeof(int64_t) * (size_t)(chunks * m + 1);
  sort_job c = { .index = index, .order = k->out[0]->data, .m = m, .chunk = (n + chunks - 1) / chunks };
  if (!(c.counts = ty_scratch_alloc(bytes))) return false;
  memset(c.counts, 0, bytes);
  ty_parallel_for(chunks, 1, count_chunks, &c);
  int64_t done = 0;
  for (int64_t s = 0; s < m; s++) {
    offsets[s] = done;
    for (int64_t t = 0; t < chunks; t++) {
      int64_t *at = c.counts + t * m + s, count = *at;
      *at = done;
      done += count;
    }
  }
  offsets[m] = done;
  if (!ty_interrupted) ty_parallel_for(chunks, 1, place_chunks, &c);
  ty_scratch_free(c.counts, bytes);
  return true;
}

/* ---- the work, in pieces ---- */

typedef struct job {
  const void *x, *y;
  void *out, *partial; /* partial: two rows for each piece, of what comes into it and of what goes on behind it */
  const int64_t *offsets, *order;
  int64_t n, m, inner, piece, pieces;
  ty_number empty;
} job;

/* Position j of what segments are counted in. */
static inline int64_t position(const job *c, int64_t j) { return c->order ? c->order[j] : j; }

typedef struct piece {
  int64_t outer, begin, end;
} piece;

static inline piece piece_of(const job *c, int64_t t) {
  piece p = { .outer = t / c->pieces, .begin = t % c->pieces * c->piece };
  p.end = p.begin + c->piece < c->n ? p.begin + c->piece : c->n;
  return p;
}

/* Whole positions along a dimension, in segments: false after ty_fail(). */
static bool prepare(job *c, const ty_kernel_args *k, const ty_view *whole, int64_t *outer) {
  const ty_p_segments *p = k->params;
  const ty_view *offsets = k->in[1], *order = k->in[2];
  const ty_lines l = ty_lines_of(whole, p->dim);
  *c = (job){ .x = k->in[0]->data,
              .out = k->out[0]->data,
              .offsets = offsets->data,
              .order = order ? order->data : NULL,
              .n = l.size,
              .m = offsets->count - 1,
              .inner = l.inner,
              .empty = p->empty };
  c->piece = l.inner > PIECE / LEAST ? LEAST : PIECE / (l.inner ? l.inner : 1);
  c->pieces = (l.size + c->piece - 1) / c->piece;
  *outer = l.outer;
  return ty_offsets_check(offsets, l.size) && (!order || ty_index_check(order, l.size));
}

/* ---- reductions ---- */

/* `count` vectors (a constant) of columns of the positions [first, last), which are some. */
#define COLUMNS_OF(name, T, V, JOIN)                                                                             \
  static inline __attribute__((always_inline)) void name(T *to, const T *x, const int64_t *order, int64_t first, \
                                                         int64_t last, int64_t inner, const int count) {         \
    V sum[8];                                                                                                    \
    const V *row = (const V *)(x + (order ? order[first] : first) * inner);                                      \
    _Pragma("GCC unroll 8") for (int i = 0; i < count; i++) sum[i] = row[i];                                     \
    for (int64_t j = first + 1; j < last; j++) {                                                                 \
      row = (const V *)(x + (order ? order[j] : j) * inner);                                                     \
      _Pragma("GCC unroll 8") for (int i = 0; i < count; i++) JOIN(sum[i], row[i]);                              \
    }                                                                                                            \
    _Pragma("GCC unroll 8") for (int i = 0; i < count; i++)((V *)to)[i] = sum[i];                                \
  }

#define ROWS(name, T, JOIN, JOIN_ALL)                                                                           \
  typedef T name##_lanes __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(T)), may_alias));          \
  typedef T name##_few __attribute__((vector_size(16), aligned(sizeof(T)), may_alias));                         \
  COLUMNS_OF(name##_wide, T, name##_lanes, JOIN_ALL)                                                            \
  COLUMNS_OF(name##_narrow, T, name##_few, JOIN_ALL)                                                            \
  COLUMNS_OF(name##_single, T, T, JOIN)                                                                         \
  /* Of neighbours, several sums side by side: one would wait for itself. */                                    \
  static T name##_run(const T *x, int64_t n) {                                                                  \
    enum { WIDTH = 4 * TY_VECTOR_BYTES / sizeof(T), SOME = 16 / sizeof(T) };                                    \
    T sums[WIDTH], sum;                                                                                         \
    const int64_t width = n >= 2 * WIDTH ? WIDTH : SOME, whole = n / width * width;                             \
    if (width == WIDTH) name##_wide(sums, x, NULL, 0, n / width, width, 4);                                     \
    else name##_narrow(sums, x, NULL, 0, n / width, width, 1);                                                  \
    sum = sums[0];                                                                                              \
    for (int64_t i = 1; i < width; i++) JOIN(sum, sums[i]);                                                     \
    for (int64_t i = whole; i < n; i++) JOIN(sum, x[i]);                                                        \
    return sum;                                                                                                 \
  }                                                                                                             \
  static inline void name##_rows(T *to, const T *x, const int64_t *order, int64_t first, int64_t last,          \
                                 int64_t inner) {                                                               \
    enum { LANES = TY_VECTOR_BYTES / sizeof(T), QUARTER = 16 / sizeof(T) };                                     \
    int64_t i = 0;                                                                                              \
    if (inner == 1 && !order && last - first >= 2 * QUARTER) {                                                  \
      to[0] = name##_run(x + first, last - first);                                                              \
      return;                                                                                                   \
    }                                                                                                           \
    for (; i + 8 * LANES <= inner; i += 8 * LANES) name##_wide(to + i, x + i, order, first, last, inner, 8);    \
    if (i + 4 * LANES <= inner) name##_wide(to + i, x + i, order, first, last, inner, 4), i += 4 * LANES;       \
    if (i + 2 * LANES <= inner) name##_wide(to + i, x + i, order, first, last, inner, 2), i += 2 * LANES;       \
    if (i + LANES <= inner) name##_wide(to + i, x + i, order, first, last, inner, 1), i += LANES;               \
    if (i + 2 * QUARTER <= inner) name##_narrow(to + i, x + i, order, first, last, inner, 2), i += 2 * QUARTER; \
    for (; i + QUARTER <= inner; i += QUARTER) name##_narrow(to + i, x + i, order, first, last, inner, 1);      \
    for (; i < inner; i++) name##_single(to + i, x + i, order, first, last, inner, 1);                          \
  }                                                                                                             \
  static void name(void *context, int64_t begin, int64_t end) {                                                 \
    const job *c = context;                                                                                     \
    for (int64_t t = begin; t < end; t++) {                                                                     \
      const piece p = piece_of(c, t);                                                                           \
      const T *x = (const T *)c->x + p.outer * c->n * c->inner;                                                 \
      T *out = (T *)c->out + p.outer * c->m * c->inner, *partial = (T *)c->partial + t * 2 * c->inner;          \
      int64_t s = ty_segment_at(c->offsets, c->m, p.begin);                                                     \
      for (int64_t j = p.begin, stop; j < p.end; j = stop, s++) {                                               \
        while (c->offsets[s + 1] == j) s++; /* empty ones */                                                    \
        stop = c->offsets[s + 1] < p.end ? c->offsets[s + 1] : p.end;                                           \
        const bool comes = c->offsets[s]<p.begin, goes = c->offsets[s + 1]> p.end;                              \
        T *to = comes ? partial : goes ? partial + c->inner : out + s * c->inner;                               \
        name##_rows(to, x, c->order, j, stop, c->inner);                                                        \
      }                                                                                                         \
    }                                                                                                           \
  }                                                                                                             \
  /* Segments without positions, and those of several pieces. */                                                \
  static void join_##name(void *context, int64_t begin, int64_t end) {                                          \
    const job *c = context;                                                                                     \
    const T empty = (T)((T)0.5 != 0 ? c->empty.f : (double)0) + (T)((T)0.5 != 0 ? 0 : c->empty.i);              \
    int64_t outer = begin / c->m, s = begin % c->m, edge = 0; /* edge: where the piece of a ends */             \
    for (int64_t t = begin; t < end; t++) {                                                                     \
      const int64_t a = c->offsets[s], b = c->offsets[s + 1];                                                   \
      T *to = (T *)c->out + t * c->inner;                                                                       \
      while (edge <= a) edge = a < edge + c->piece ? edge + c->piece : (a / c->piece + 1) * c->piece;           \
      if (a == b) {                                                                                             \
        for (int64_t i = 0; i < c->inner; i++) to[i] = empty;                                                   \
      } else if (b > edge) {                                                                                    \
        const int64_t p = edge / c->piece;                                                                      \
        const T *from = (const T *)c->partial + ((outer * c->pieces + p - 1) * 2 + 1) * c->inner;               \
        memcpy(to, from, sizeof(T) * (size_t)c->inner);                                                         \
        for (int64_t q = p; q * c->piece < b; q++) {                                                            \
          from = (const T *)c->partial + (outer * c->pieces + q) * 2 * c->inner;                                \
          for (int64_t i = 0; i < c->inner; i++) JOIN(to[i], from[i]);                                          \
        }                                                                                                       \
      }                                                                                                         \
      if (++s == c->m) s = 0, edge = 0, outer++;                                                                \
    }                                                                                                           \
  }
TY_EACH_SUM(ROWS)
TY_EACH_PRODUCT(ROWS)
TY_EACH_EXTREME(ROWS)

static bool reduce(const ty_kernel_args *k, ty_range_fn *fn, ty_range_fn *join) {
  int64_t outer;
  job c;
  if (!prepare(&c, k, k->in[0], &outer)) return false;
  if (k->out[0]->count == 0) return true;
  const size_t bytes = c.pieces > 1 ? (size_t)(outer * c.pieces * 2 * c.inner) * ty_dtype_size[k->out[0]->dtype] : 0;
  if (bytes && !(c.partial = ty_scratch_alloc(bytes))) return false;
  if (c.pieces) ty_parallel_for(outer * c.pieces, 1, fn, &c);
  if (!ty_interrupted) ty_parallel_for(outer * c.m, 1 + PIECE / c.inner, join, &c);
  if (bytes) ty_scratch_free(c.partial, bytes);
  return true;
}

/* in: x, offsets [m + 1], order [n] or NULL; what `k` of the parameters says. */
bool TY_KERNEL(segment_sum)(const ty_kernel_args *k) {
  const int d = k->out[0]->dtype;
  return reduce(k, TY_BY_SIZE(d, add), TY_BY_SIZE(d, join_add));
}

bool TY_KERNEL(segment_combine)(const ty_kernel_args *k) {
  const int d = k->out[0]->dtype;
  switch (((const ty_p_segments *)k->params)->k) {
    case TY_COMBINE_MAX: return reduce(k, TY_BY_DTYPE(d, larger), TY_BY_DTYPE(d, join_larger));
    case TY_COMBINE_MIN: return reduce(k, TY_BY_DTYPE(d, smaller), TY_BY_DTYPE(d, join_smaller));
    default: return reduce(k, TY_BY_SIZE(d, times), TY_BY_SIZE(d, join_times));
  }
}

/* ---- back to every position ---- */

#define SPREAD(name, T)                                                                                     \
  static void name(void *context, int64_t begin, int64_t end) {                                             \
    const job *c = context;                                                                                 \
    for (int64_t t = begin; t < end; t++) {                                                                 \
      const piece p = piece_of(c, t);                                                                       \
      const T *x = (const T *)c->x + p.outer * c->m * c->inner;                                             \
      T *out = (T *)c->out + p.outer * c->n * c->inner;                                                     \
      int64_t s = ty_segment_at(c->offsets, c->m, p.begin);                                                 \
      for (int64_t j = p.begin; j < p.end; s++) {                                                           \
        const int64_t stop = c->offsets[s + 1] < p.end ? c->offsets[s + 1] : p.end;                         \
        const T *row = x + s * c->inner;                                                                    \
        if (c->inner == 1)                                                                                  \
          for (; j < stop; j++) out[position(c, j)] = *row;                                                 \
        else                                                                                                \
          for (; j < stop; j++) memcpy(out + position(c, j) * c->inner, row, sizeof(T) * (size_t)c->inner); \
      }                                                                                                     \
    }                                                                                                       \
  }
SPREAD(spread_1, uint8_t)
SPREAD(spread_2, uint16_t)
SPREAD(spread_4, uint32_t)
SPREAD(spread_8, uint64_t)

/* in: g, offsets [m + 1], order [n] or NULL. Positions that the order leaves out are 0. */
bool TY_KERNEL(segment_spread)(const ty_kernel_args *k) {
  int64_t outer;
  job c;
  const ty_view *out = k->out[0];
  if (!prepare(&c, k, out, &outer)) return false;
  if (out->count == 0) return true;
  if (c.order) memset(out->data, 0, (size_t)out->count * ty_dtype_size[out->dtype]);
  static ty_range_fn *const by_size[] = { [1] = spread_1, [2] = spread_2, [4] = spread_4, [8] = spread_8 };
  ty_parallel_for(outer * c.pieces, 1, by_size[ty_dtype_size[out->dtype]], &c);
  return true;
}

/* ---- softmax ---- */

#define REAL float
#define FN(name) name##_f32
#include "segments_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "segments_real.h"

/* in: x, offsets [m + 1], order [n] or NULL. */
bool TY_KERNEL(segment_weights)(const ty_kernel_args *k) {
  int64_t outer;
  job c;
  const ty_view *out = k->out[0];
  if (!prepare(&c, k, out, &outer)) return false;
  if (out->count == 0) return true;
  const size_t bytes = (size_t)out->count * ty_dtype_size[out->dtype];
  if (c.order) memset(out->data, 0, bytes);
  const bool apart = c.order && c.inner < FEW; /* positions in the order of the segments */
  c.partial = out->data;
  if (apart && !(c.partial = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(outer * c.pieces, 1, out->dtype == TY_F64 ? weights_f64 : weights_f32, &c);
  if (apart) ty_scratch_free(c.partial, bytes);
  return true;
}

/* in: g, offsets, order or NULL, y. */
bool TY_KERNEL(segment_weights_backward)(const ty_kernel_args *k) {
  int64_t outer;
  job c;
  const ty_view *out = k->out[0];
  if (!prepare(&c, k, out, &outer)) return false;
  if (out->count == 0) return true;
  if (c.order) memset(out->data, 0, (size_t)out->count * ty_dtype_size[out->dtype]);
  c.y = k->in[3]->data;
  ty_parallel_for(outer * c.pieces, 1, out->dtype == TY_F64 ? weights_backward_f64 : weights_backward_f32, &c);
  return true;
}
