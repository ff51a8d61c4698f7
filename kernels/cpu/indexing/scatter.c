/* Writing by index: scatter, scatter_add, scatter_combine, index_add, index_copy. Every destination belongs to one
 * task, and a task visits its sources in ascending order: nothing races, the last of repeated indices wins, and sums do
 * not depend on the threads. */
#include "../../half.h"
#include "../../indexing.h"
#include "combine.h"

#include <stdatomic.h>
#include <string.h>

#include "indexing.h"

enum {
  GRAIN = 32768,
  LINE = 16,  /* elements of a block at least: four bytes each are a cache line, which then belongs to one task */
  PART = 512, /* elements of a row of halves that are added up at a time */
  MANY = 8    /* threads and elements of a destination, from which ranges of destinations are worth their many looks */
};

/* ---- out starts as a copy of x, or as zeros when there is none ---- */

typedef struct fill_ctx {
  char *out;
  const char *x;
} fill_ctx;

static void fill_range(void *context, int64_t begin, int64_t end) {
  const fill_ctx *c = context;
  if (c->x) memcpy(c->out + begin, c->x + begin, (size_t)(end - begin));
  else memset(c->out + begin, 0, (size_t)(end - begin));
}

static void fill(const ty_view *out, const ty_view *x) {
  if (x && x->data == out->data) return; /* in place */
  fill_ctx c = { out->data, x ? x->data : NULL };
  ty_parallel_for(out->count * ty_dtype_size[out->dtype], 1 << 18, fill_range, &c);
}

/* ---- how the work is cut: outer positions, then blocks of inner positions, then ranges of destinations ---- */

typedef struct cut {
  int64_t outer, blocks, block, ranges, range; /* block, range: their lengths */
} cut;

static cut cut_work(int64_t outer, int64_t count, int64_t inner, int64_t size) {
  cut w = { outer, 1, inner, 1, size };
  int64_t wanted = outer * count * inner < GRAIN ? 1 : (int64_t)ty_parallel_threads();
  if (ty_parallel_threads() == 1 || outer >= wanted || size < 2) return w;
  int64_t most = inner / LINE;
  int64_t blocks = (wanted + outer - 1) / outer;
  if (most > 1) {
    if (blocks > most) blocks = most;
    w.block = (inner + blocks - 1) / blocks;
    w.blocks = (inner + w.block - 1) / w.block;
  } else if (inner >= MANY && ty_parallel_threads() >= MANY) {
    /* Every task looks at all indices and serves its own destinations. With few tasks, or one element to add, one
     * thread is faster: a branch that is taken each second time costs more than it. */
    w.ranges = blocks < size ? blocks : size;
    w.range = (size + w.ranges - 1) / w.ranges;
    w.ranges = (size + w.range - 1) / w.range;
  }
  return w;
}

typedef struct task {
  int64_t outer, i0, i1, lo, hi;
} task;

static task cut_task(const cut *w, int64_t t, int64_t inner, int64_t size) {
  task k;
  int64_t range = t % w->ranges, block = t / w->ranges % w->blocks;
  k.outer = t / (w->ranges * w->blocks);
  k.i0 = block * w->block;
  k.i1 = k.i0 + w->block < inner ? k.i0 + w->block : inner;
  k.lo = range * w->range;
  k.hi = k.lo + w->range < size ? k.lo + w->range : size;
  return k;
}

static void run_tasks(const cut *w, int64_t work, ty_range_fn *fn, void *context) {
  int64_t tasks = w->outer * w->blocks * w->ranges;
  int64_t each = work / tasks + 1;
  ty_parallel_for(tasks, (GRAIN + each - 1) / each, fn, context);
}

/* ---- scatter and scatter_add ---- */

typedef struct scatter_ctx {
  ty_index_map map;
  cut work;
  void *out;
  const void *src;
  int64_t src_step; /* 0: one value for all */
  atomic_bool bad;
} scatter_ctx;

/* PUT(destination, value) */
#define SCATTER(name, T, PUT, ...)                                                                                    \
  static inline                                                                                                       \
      __attribute__((always_inline)) void name##_tasks(scatter_ctx *c, int64_t begin, int64_t end, const bool wide) { \
    const ty_index_map *m = &c->map;                                                                                  \
    const T *src = c->src;                                                                                            \
    bool bad = false;                                                                                                 \
    for (int64_t t = begin; t < end; t++) {                                                                           \
      task k = cut_task(&c->work, t, m->inner, m->size);                                                              \
      T *out = (T *)c->out + ty_index_outer(m, k.outer);                                                              \
      if (m->inner == 1 && m->step == 1 && k.lo == 0 && k.hi == m->size) { /* along the last dimension */             \
        const T *from = src + k.outer * m->count * c->src_step;                                                       \
        const void *index = m->index;                                                                                 \
        const int64_t first = k.outer * m->count, count = m->count, step = c->src_step;                               \
        const uint64_t size = (uint64_t)m->size;                                                                      \
        for (int64_t j = 0; j < count; j++) {                                                                         \
          uint64_t at = (uint64_t)ty_index_at(index, first + j, wide);                                                \
          if (at >= size) bad = true;                                                                                 \
          else PUT(out[at], from[j * step]);                                                                          \
        }                                                                                                             \
        continue;                                                                                                     \
      }                                                                                                               \
      for (int64_t j = 0; j < m->count; j++) {                                                                        \
        int64_t row = (k.outer * m->count + j) * m->inner;                                                            \
        for (int64_t i = k.i0; i < k.i1; i++) {                                                                       \
          int64_t at = ty_index_at(m->index, row + i, wide);                                                          \
          if ((uint64_t)at >= (uint64_t)m->size) bad = true;                                                          \
          else if (at >= k.lo && at < k.hi)                                                                           \
            PUT(out[at * m->step + (m->inner_map ? m->inner_map[i] : i)], src[(row + i) * c->src_step]);              \
        }                                                                                                             \
      }                                                                                                               \
    }                                                                                                                 \
    if (bad) atomic_store(&c->bad, true);                                                                             \
  }                                                                                                                   \
  static void name(void *context, int64_t begin, int64_t end) {                                                       \
    scatter_ctx *c = context;                                                                                         \
    if (c->map.wide) name##_tasks(c, begin, end, true);                                                               \
    else name##_tasks(c, begin, end, false);                                                                          \
  }

#define SET(to, from) (to) = (from)
SCATTER(scatter1, uint8_t, SET)
SCATTER(scatter2, uint16_t, SET)
SCATTER(scatter4, uint32_t, SET)
SCATTER(scatter8, uint64_t, SET)
TY_EACH_SUM(SCATTER)

static bool scatter(const ty_kernel_args *k, ty_range_fn *fn) {
  const ty_view *x = k->in[0], *index = k->in[1], *src = k->in[2], *out = k->out[0];
  const ty_p_dim *p = k->params;
  fill(out, x);
  if (index->count == 0) return true;
  scatter_ctx c = { .out = out->data, .src = src->data, .src_step = src->count > 1 };
  if (!ty_index_map_init(&c.map, out, index, p->dim)) return false;
  c.work = cut_work(c.map.outer, c.map.count, c.map.inner, c.map.size);
  run_tasks(&c.work, index->count, fn, &c);
  ty_index_map_free(&c.map);
  return !atomic_load(&c.bad) || ty_index_report(index, c.map.size);
}

/* in: x (which out may be) or NULL for zeros, index, src (shaped like index, or one value); dim. */
bool TY_KERNEL(scatter)(const ty_kernel_args *k) {
  switch (ty_dtype_size[k->out[0]->dtype]) {
    case 1: return scatter(k, scatter1);
    case 2: return scatter(k, scatter2);
    case 4: return scatter(k, scatter4);
    default: return scatter(k, scatter8);
  }
}

/* The same, adding. */
bool TY_KERNEL(scatter_add)(const ty_kernel_args *k) { return scatter(k, TY_BY_SIZE(k->out[0]->dtype, add)); }

/* ---- scatter_combine ---- */

TY_EACH_EXTREME(SCATTER)
TY_EACH_PRODUCT(SCATTER)

/* The same, combining: p_dim.k says how. */
bool TY_KERNEL(scatter_combine)(const ty_kernel_args *k) {
  const int d = k->out[0]->dtype;
  switch (((const ty_p_dim *)k->params)->k) {
    case TY_COMBINE_MAX: return scatter(k, TY_BY_DTYPE(d, larger));
    case TY_COMBINE_MIN: return scatter(k, TY_BY_DTYPE(d, smaller));
    default: return scatter(k, TY_BY_SIZE(d, times));
  }
}

/* ---- index_add, index_copy ---- */

typedef struct index_add_ctx {
  cut work;
  void *out;
  const void *src;
  const void *index;
  bool wide, one;                   /* one: a value for all */
  int64_t count, size, inner, skip; /* skip: an index that adds nothing */
} index_add_ctx;

#define INDEX_ADD(name, T)                                                               \
  static void name(void *context, int64_t begin, int64_t end) {                          \
    const index_add_ctx *c = context;                                                    \
    for (int64_t t = begin; t < end; t++) {                                              \
      task k = cut_task(&c->work, t, c->inner, c->size);                                 \
      for (int64_t j = 0; j < c->count; j++) {                                           \
        int64_t at = ty_index_at(c->index, j, c->wide);                                  \
        if (at < k.lo || at >= k.hi || at == c->skip) continue;                          \
        T *restrict out = (T *)c->out + (k.outer * c->size + at) * c->inner;             \
        const T *restrict src = (const T *)c->src + (k.outer * c->count + j) * c->inner; \
        for (int64_t i = k.i0; i < k.i1; i++) out[i] += src[i];                          \
      }                                                                                  \
    }                                                                                    \
  }
INDEX_ADD(rows_u8, uint8_t)
INDEX_ADD(rows_u16, uint16_t)
INDEX_ADD(rows_u32, uint32_t)
INDEX_ADD(rows_u64, uint64_t)
INDEX_ADD(rows_f32, float)
INDEX_ADD(rows_f64, double)

#define INDEX_COPY(name, T)                                                  \
  static void name(void *context, int64_t begin, int64_t end) {              \
    const index_add_ctx *c = context;                                        \
    for (int64_t t = begin; t < end; t++) {                                  \
      task k = cut_task(&c->work, t, c->inner, c->size);                     \
      for (int64_t j = 0; j < c->count; j++) {                               \
        int64_t at = ty_index_at(c->index, j, c->wide);                      \
        if (at < k.lo || at >= k.hi) continue;                               \
        T *restrict out = (T *)c->out + (k.outer * c->size + at) * c->inner; \
        const T *restrict src = c->src;                                      \
        if (c->one) {                                                        \
          for (int64_t i = k.i0; i < k.i1; i++) out[i] = *src;               \
        } else {                                                             \
          src += (k.outer * c->count + j) * c->inner;                        \
          memcpy(out + k.i0, src + k.i0, (size_t)(k.i1 - k.i0) * sizeof(T)); \
        }                                                                    \
      }                                                                      \
    }                                                                        \
  }
INDEX_COPY(set_u8, uint8_t)
INDEX_COPY(set_u16, uint16_t)
INDEX_COPY(set_u32, uint32_t)
INDEX_COPY(set_u64, uint64_t)

static bool by_rows(const ty_kernel_args *k, ty_range_fn *fn, bool one, int64_t skip) {
  const ty_view *x = k->in[0], *index = k->in[1], *src = k->in[2], *out = k->out[0];
  const ty_p_dim *p = k->params;
  ty_lines l = ty_lines_of(out, p->dim);
  if (!ty_index_check(index, l.size)) return false;
  fill(out, x);
  if (out->count == 0 || index->count == 0) return true;
  index_add_ctx c = { .out = out->data,
                      .src = src->data,
                      .index = index->data,
                      .wide = index->dtype == TY_I64,
                      .one = one,
                      .count = index->count,
                      .size = l.size,
                      .inner = l.inner,
                      .skip = skip };
  c.work = cut_work(l.outer, c.count, l.inner, l.size);
  run_tasks(&c.work, l.outer * c.count * l.inner, fn, &c);
  return true;
}

/* in: x (which out may be), index of any shape taken flat, src or one value; dim. */
bool TY_KERNEL(index_copy)(const ty_kernel_args *k) {
  bool one = k->in[2]->ndim == 0;
  switch (ty_dtype_size[k->out[0]->dtype]) {
    case 1: return by_rows(k, set_u8, one, -1);
    case 2: return by_rows(k, set_u16, one, -1);
    case 4: return by_rows(k, set_u32, one, -1);
    default: return by_rows(k, set_u64, one, -1);
  }
}

/* ---- index_add of long rows: a destination after another, so that each is read and written once ---- */

typedef struct sorted_add {
  const void *x, *src; /* x: NULL for zeros */
  void *out;
  const int64_t *begin, *order; /* where the sources of each destination begin among all, in ascending order */
  int64_t inner, all;
  ty_dtype dtype;
} sorted_add;

#define SORTED_ADD(name, T)                                                           \
  static void name(void *context, int64_t begin, int64_t end) {                       \
    const sorted_add *c = context;                                                    \
    const int64_t n = c->inner;                                                       \
    const size_t bytes = (size_t)n * sizeof(T);                                       \
    for (int64_t r = begin; r < end; r++) {                                           \
      T *restrict out = (T *)c->out + r * n;                                          \
      const T *x = c->x ? (const T *)c->x + r * n : NULL;                             \
      if (!x) memset(out, 0, bytes);                                                  \
      for (int64_t p = c->begin[r]; p < c->begin[r + 1]; p++) {                       \
        const T *restrict src = (const T *)c->src + c->order[p] * n;                  \
        if (p + 1 < c->all) { /* rows in no order are not foreseen by the hardware */ \
          const char *next = (const char *)((const T *)c->src + c->order[p + 1] * n); \
          for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);        \
        }                                                                             \
        if (x && x != out && p == c->begin[r]) {                                      \
          const T *restrict from = x;                                                 \
          for (int64_t i = 0; i < n; i++) out[i] = from[i] + src[i];                  \
        } else {                                                                      \
          for (int64_t i = 0; i < n; i++) out[i] += src[i];                           \
        }                                                                             \
      }                                                                               \
      if (x && x != out && c->begin[r] == c->begin[r + 1]) memcpy(out, x, bytes);     \
    }                                                                                 \
  }
SORTED_ADD(sorted_u8, uint8_t)
SORTED_ADD(sorted_u16, uint16_t)
SORTED_ADD(sorted_u32, uint32_t)
SORTED_ADD(sorted_u64, uint64_t)
SORTED_ADD(sorted_f32, float)
SORTED_ADD(sorted_f64, double)

/* Of halves: sums in f32, each rounded once; a part of a row at a time, since a row that many add to is one task's
 * else. Rows that nothing is added to stay as they are where out is x. */
static void sorted_half(void *context, int64_t begin, int64_t end) {
  const sorted_add *c = context;
  const int64_t parts = (c->inner + PART - 1) / PART;
  float sum[PART], next[PART];
  for (int64_t t = begin; t < end; t++) {
    const int64_t r = t / parts, i = t % parts * PART, n = c->inner - i < PART ? c->inner - i : PART;
    const int64_t first = c->begin[r], last = c->begin[r + 1], at = r * c->inner + i;
    if (first == last && c->x == c->out) continue;
    if (c->x) ty_half_load(c->dtype, sum, (const uint16_t *)c->x + at, n);
    else memset(sum, 0, (size_t)n * sizeof *sum);
    for (int64_t p = first; p < last; p++) {
      ty_half_load(c->dtype, next, (const uint16_t *)c->src + c->order[p] * c->inner + i, n);
      for (int64_t j = 0; j < n; j++) sum[j] += next[j];
    }
    ty_half_store(c->dtype, (uint16_t *)c->out + at, sum, n);
  }
}

/* Sorts the indices by destination; false where that does not pay: destinations are too uneven, or rows short. Halves
 * have no other way. */
static bool add_sorted(const ty_kernel_args *k, ty_range_fn *fn, int64_t skip, bool half) {
  const ty_view *x = k->in[0], *index = k->in[1], *src = k->in[2], *out = k->out[0];
  const ty_lines l = ty_lines_of(out, ((const ty_p_dim *)k->params)->dim);
  const bool wide = index->dtype == TY_I64;
  const int64_t count = index->count;
  const bool pays = l.inner * ty_dtype_size[out->dtype] >= 256 && 4 * count >= l.size;
  if (l.outer != 1 || !out->count || (!pays && !half)) return false;
  const size_t bytes = sizeof(int64_t) * (size_t)(l.size + 1 + count);
  int64_t *begin = ty_scratch_alloc(bytes), *order = begin + l.size + 1, most = 0;
  if (!begin) return false;
  memset(begin, 0, sizeof *begin * (size_t)(l.size + 1));
  for (int64_t j = 0; j < count; j++) {
    const int64_t at = ty_index_at(index->data, j, wide);
    if (at != skip && ++begin[at] > most) most = begin[at];
  }
  const bool even = half || most <= 8 * (count / l.size + 1);
  if (even) {
    int64_t sum = 0;
    for (int64_t r = 0; r <= l.size; r++) begin[r] = sum += begin[r]; /* the end of each */
    for (int64_t j = count - 1; j >= 0; j--) {
      const int64_t at = ty_index_at(index->data, j, wide);
      if (at != skip) order[--begin[at]] = j;
    }
    sorted_add c = { x ? x->data : NULL, src->data, out->data, begin, order, l.inner, begin[l.size], out->dtype };
    const int64_t parts = half ? (l.inner + PART - 1) / PART : 1, length = half && l.inner > PART ? PART : l.inner;
    ty_parallel_for(l.size * parts, 1 + GRAIN / (length * (1 + count / l.size)), fn, &c);
  }
  ty_scratch_free(begin, bytes);
  return even;
}

/* in: x (which out may be) or NULL for zeros, index of any shape taken flat, src; dim, k: an index that adds nothing
 * (-1: none). Of halves dim is 0, that of rows. */
bool TY_KERNEL(index_add)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  const ty_view *out = k->out[0];
  if (!ty_index_check(k->in[1], ty_lines_of(out, p->dim).size)) return false;
  if (out->dtype == TY_F16 || out->dtype == TY_BF16) return !out->count || add_sorted(k, sorted_half, p->k, true);
  if (add_sorted(k, TY_BY_SIZE(out->dtype, sorted), p->k, false)) return true;
  return by_rows(k, TY_BY_SIZE(out->dtype, rows), false, p->k);
}
