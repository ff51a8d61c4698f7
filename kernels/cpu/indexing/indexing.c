/* Reading and writing by index: gather, index_select, ravel_index, nonzero. Pure moves work on elements of 1, 2, 4 or 8 bytes,
 * whatever their dtype. Writers (scatter ...) are in scatter.c. */
#include "../../indexing.h"
#include "../cpu.h"

#include <stdatomic.h>
#include <string.h>

#include "indexing.h"

#define GRAIN 16384

/* ---- gather ---- */

typedef struct gather_ctx {
  ty_index_map map;
  const char *x;
  char *out;
  atomic_bool bad;
} gather_ctx;

static inline __attribute__((always_inline)) void gather_rows(gather_ctx *c, int64_t begin, int64_t end,
                                                              const size_t esize, const bool wide) {
  const ty_index_map *m = &c->map;
  bool bad = false;
  for (int64_t r = begin; r < end;) {
    int64_t o = r / m->count, stop = (o + 1) * m->count;
    if (stop > end) stop = end;
    const char *x = c->x + ty_index_outer(m, o) * (int64_t)esize;
    if (m->inner == 1 && m->step == 1 && m->size) { /* along the last dimension */
      const void *index = m->index;                 /* nothing that bytes are written to is read again */
      const uint64_t size = (uint64_t)m->size;
      char *restrict out = c->out;
      for (; r < stop; r++) {
        uint64_t at = (uint64_t)ty_index_at(index, r, wide);
        bad |= at >= size;
        memcpy(out + (size_t)r * esize, x + (at < size ? at : 0) * esize, esize);
      }
    }
    for (; r < stop; r++) {
      for (int64_t i = 0; i < m->inner; i++) {
        int64_t at = ty_index_at(m->index, r * m->inner + i, wide);
        if ((uint64_t)at >= (uint64_t)m->size) {
          bad = true;
          continue;
        }
        int64_t from = at * m->step + (m->inner_map ? m->inner_map[i] : i);
        memcpy(c->out + (size_t)(r * m->inner + i) * esize, x + (size_t)from * esize, esize);
      }
    }
  }
  if (bad) atomic_store(&c->bad, true);
}

#define GATHER(bytes)                                                    \
  static void gather##bytes(void *context, int64_t begin, int64_t end) { \
    gather_ctx *c = context;                                             \
    if (c->map.wide) gather_rows(c, begin, end, bytes, true);            \
    else gather_rows(c, begin, end, bytes, false);                       \
  }
GATHER(1)
GATHER(2)
GATHER(4)
GATHER(8)

static ty_range_fn *by_size(size_t bytes, ty_range_fn *f1, ty_range_fn *f2, ty_range_fn *f4, ty_range_fn *f8) {
  return bytes == 1 ? f1 : bytes == 2 ? f2 : bytes == 4 ? f4 : f8;
}

/* in: x, index; dim. out has the shape of index. */
bool TY_KERNEL(gather)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *index = k->in[1], *out = k->out[0];
  const ty_p_dim *p = k->params;
  if (out->count == 0) return true;
  gather_ctx c = { .x = x->data, .out = out->data };
  if (!ty_index_map_init(&c.map, x, index, p->dim)) return false;
  int64_t grain = GRAIN / c.map.inner;
  ty_parallel_for(c.map.outer * c.map.count, grain,
                  by_size(ty_dtype_size[x->dtype], gather1, gather2, gather4, gather8), &c);
  ty_index_map_free(&c.map);
  return !atomic_load(&c.bad) || ty_index_report(index, c.map.size);
}

/* ---- index_select ---- */

typedef struct select_ctx {
  const char *x;
  char *out;
  const void *index;
  bool wide;
  int64_t count, size;
  size_t row;
} select_ctx;

static inline __attribute__((always_inline)) void select_rows(const select_ctx *c, int64_t begin, int64_t end,
                                                              const size_t row) {
  for (int64_t r = begin; r < end;) {
    int64_t o = r / c->count, stop = (o + 1) * c->count, j = r - o * c->count;
    if (stop > end) stop = end;
    const char *x = c->x + (size_t)(o * c->size) * row;
    for (; r < stop; r++, j++)
      memcpy(c->out + (size_t)r * row, x + (size_t)ty_index_at(c->index, j, c->wide) * row, row);
  }
}

static void select1(void *c, int64_t begin, int64_t end) { select_rows(c, begin, end, 1); }
static void select2(void *c, int64_t begin, int64_t end) { select_rows(c, begin, end, 2); }
static void select4(void *c, int64_t begin, int64_t end) { select_rows(c, begin, end, 4); }
static void select8(void *c, int64_t begin, int64_t end) { select_rows(c, begin, end, 8); }
static void select_long(void *context, int64_t begin, int64_t end) {
  const select_ctx *c = context;
  select_rows(c, begin, end, c->row);
}

/* in: x, index of any shape taken flat; dim. */
bool TY_KERNEL(index_select)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *index = k->in[1], *out = k->out[0];
  const ty_p_dim *p = k->params;
  ty_lines l = ty_lines_of(x, p->dim);
  if (!ty_index_check(index, l.size)) return false;
  if (out->count == 0) return true;
  select_ctx c = { .x = x->data,
                   .out = out->data,
                   .index = index->data,
                   .wide = index->dtype == TY_I64,
                   .count = index->count,
                   .size = l.size,
                   .row = (size_t)l.inner * ty_dtype_size[x->dtype] };
  ty_range_fn *f = c.row > 8 || (c.row & (c.row - 1)) ? select_long
                                                      : by_size(c.row, select1, select2, select4, select8);
  ty_parallel_for(l.outer * c.count, 1 + (int64_t)(4 * GRAIN / c.row), f, &c);
  return true;
}

/* ---- ravel_index ---- */

typedef struct ravel_ctx {
  const ty_kernel_args *k;
  atomic_bool bad;
} ravel_ctx;

static void ravel_range(void *context, int64_t begin, int64_t end) {
  ravel_ctx *c = context;
  const ty_p_sizes *p = c->k->params;
  int64_t *restrict out = c->k->out[0]->data;
  bool bad = false;
  for (int j = 0; j < p->n; j++) {
    const int64_t *restrict index = c->k->in[j]->data;
    const int64_t size = p->size[j];
    for (int64_t i = begin; i < end; i++) {
      int64_t at = index[i] < 0 ? index[i] + size : index[i];
      bad |= (uint64_t)at >= (uint64_t)size;
      out[i] = (j ? (int64_t)((uint64_t)out[i] * (uint64_t)size) : 0) + at;
    }
  }
  if (bad) atomic_store(&c->bad, true);
}

/* in: positions i64 in each of the dimensions; sizes. out: their number over all. */
bool TY_KERNEL(ravel_index)(const ty_kernel_args *k) {
  const ty_p_sizes *p = k->params;
  ravel_ctx c = { .k = k };
  ty_parallel_for(k->out[0]->count, GRAIN, ravel_range, &c);
  if (!atomic_load(&c.bad)) return true;
  for (int j = 0; j < p->n; j++) {
    for (int64_t i = 0; i < k->in[j]->count; i++) {
      int64_t at = ((const int64_t *)k->in[j]->data)[i];
      if (at < -p->size[j] || at >= p->size[j])
        return ty_fail(TY_EINDEX, "index %lld is out of range for size %lld", (long long)at, (long long)p->size[j]);
    }
  }
  return true;
}

/* ---- nonzero ---- */

typedef struct nonzero_ctx {
  const ty_view *x;
  int64_t *start; /* per chunk: how many elements are nonzero; then: where its positions begin */
  int64_t *out;
} nonzero_ctx;

enum { LOOKED = 256 }; /* elements that are looked through at once */

/* A float is zero when all its bits but the sign are. Where elements are set is found without branches, which would be
 * guessed wrong for every second one of many masks. */
#define NONZERO(T, bytes)                                                                    \
  static int find##bytes(const void *x, int64_t begin, int n, T mask, int *restrict found) { \
    const T *restrict p = (const T *)x + begin;                                              \
    int count = 0;                                                                           \
    for (int i = 0; i < n; i++) {                                                            \
      found[count] = i;                                                                      \
      count += (p[i] & mask) != 0;                                                           \
    }                                                                                        \
    return count;                                                                            \
  }                                                                                          \
  static int64_t count##bytes(const void *x, int64_t begin, int64_t end, T mask) {           \
    const T *restrict p = x;                                                                 \
    int64_t n = 0;                                                                           \
    for (int64_t i = begin; i < end; i++) n += (p[i] & mask) != 0;                           \
    return n;                                                                                \
  }
NONZERO(uint8_t, 1)
NONZERO(uint16_t, 2)
NONZERO(uint32_t, 4)
NONZERO(uint64_t, 8)

static uint64_t value_bits(ty_dtype d) {
  uint64_t all = UINT64_MAX >> (64 - 8 * ty_dtype_size[d]);
  return ty_is_float(d) ? all >> 1 : all;
}

static void nonzero_count(void *context, int64_t begin, int64_t end) {
  nonzero_ctx *c = context;
  uint64_t mask = value_bits((ty_dtype)c->x->dtype);
  const void *x = c->x->data;
  for (int64_t b = begin; b < end; b += GRAIN) {
    int64_t e = b + GRAIN < end ? b + GRAIN : end;
    int64_t n;
    switch (ty_dtype_size[c->x->dtype]) {
      case 1: n = count1(x, b, e, (uint8_t)mask); break;
      case 2: n = count2(x, b, e, (uint16_t)mask); break;
      case 4: n = count4(x, b, e, (uint32_t)mask); break;
      default: n = count8(x, b, e, mask);
    }
    c->start[b / GRAIN] = n;
  }
}

static void nonzero_fill(void *context, int64_t begin, int64_t end) {
  nonzero_ctx *c = context;
  const ty_view *x = c->x;
  const uint64_t mask = value_bits((ty_dtype)x->dtype);
  const int last = x->ndim - 1;
  const int64_t width = x->ndim ? x->size[last] : 1;
  int64_t *out = c->out + c->start[begin / GRAIN] * x->ndim;
  int64_t row = 0, row_end = -1, at[TY_MAX_DIMS] = { 0 };
  int found[LOOKED];
  if (last < 0) return;
  for (int64_t block = begin; block < end; block += LOOKED) {
    const int n = end - block < LOOKED ? (int)(end - block) : LOOKED;
    int count;
    switch (ty_dtype_size[x->dtype]) {
      case 1: count = find1(x->data, block, n, (uint8_t)mask, found); break;
      case 2: count = find2(x->data, block, n, (uint16_t)mask, found); break;
      case 4: count = find4(x->data, block, n, (uint32_t)mask, found); break;
      default: count = find8(x->data, block, n, mask, found);
    }
    for (int f = 0; f < count; f++) {
      const int64_t i = block + found[f];
      if (i >= row_end) { /* the leading coordinates change only from row to row */
        int64_t rest = i / width;
        row = rest * width;
        row_end = row + width;
        for (int d = last - 1; d >= 0; d--) {
          at[d] = rest % x->size[d];
          rest /= x->size[d];
        }
      }
      for (int d = 0; d < last; d++) *out++ = at[d];
      *out++ = i - row;
    }
  }
}

/* in: x; out: [count, ndim] with the count that the op has found. */
bool TY_KERNEL(nonzero)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *out = k->out[0];
  if (x->count == 0) return true;
  int64_t chunks = (x->count + GRAIN - 1) / GRAIN, total = 0;
  nonzero_ctx c = { .x = x, .out = out->data, .start = ty_scratch_alloc((size_t)chunks * sizeof(int64_t)) };
  if (!c.start) return false;
  ty_parallel_for(x->count, GRAIN, nonzero_count, &c);
  for (int64_t i = 0; i < chunks && !ty_interrupted; i++) {
    int64_t n = c.start[i];
    c.start[i] = total;
    total += n;
  }
  bool ok = ty_interrupted || total == out->size[0] ||
            ty_fail(TY_EINVAL, "the tensor changed while it was read: %lld nonzero elements, then %lld",
                    (long long)out->size[0], (long long)total);
  if (ok && !ty_interrupted) ty_parallel_for(x->count, GRAIN, nonzero_fill, &c);
  ty_scratch_free(c.start, (size_t)chunks * sizeof(int64_t));
  return ok;
}
