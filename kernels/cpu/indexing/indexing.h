/* Index tensors: reading i64 or i32, checking values before they are used, and where a position of an index tensor lies
 * in the tensor it indexes. */
#ifndef TY_KERNELS_CPU_INDEXING_H
#define TY_KERNELS_CPU_INDEXING_H

#include "../lines.h"

static inline __attribute__((always_inline)) int64_t ty_index_at(const void *index, int64_t i, bool wide) {
  return wide ? ((const int64_t *)index)[i] : ((const int32_t *)index)[i];
}

/* Fails on the first value outside [0, size); called once one is known to exist, or to look for one. */
static inline bool ty_index_report(const ty_view *index, int64_t size) {
  for (int64_t i = 0; i < index->count; i++) {
    int64_t at = ty_index_at(index->data, i, index->dtype == TY_I64);
    if (at < 0 || at >= size)
      return ty_fail(TY_EINDEX, "index %lld is out of range for size %lld", (long long)at, (long long)size);
  }
  return true;
}

static inline bool ty_index_check(const ty_view *index, int64_t size) {
  bool bad = false;
  if (index->dtype == TY_I64) {
    const int64_t *p = index->data;
    for (int64_t i = 0; i < index->count; i++) bad |= (uint64_t)p[i] >= (uint64_t)size;
  } else {
    const int32_t *p = index->data;
    for (int64_t i = 0; i < index->count; i++) bad |= (uint64_t)(int64_t)p[i] >= (uint64_t)size;
  }
  return !bad || ty_index_report(index, size);
}

/* gather and scatter: `index` has the rank of `x` and may be smaller than it in the other dimensions. */
typedef struct ty_index_map {
  const void *index;
  bool wide;
  int64_t outer, count, inner; /* the index around `dim` */
  int64_t size, step;          /* of x along `dim` */
  int64_t *inner_map;          /* offset in x of an inner position; NULL: the same number */
  bool outer_linear;
  int ndim_outer;
  const ty_view *x, *shape;
} ty_index_map;

static inline bool ty_index_map_init(ty_index_map *m, const ty_view *x, const ty_view *index, int dim) {
  ty_lines li = ty_lines_of(index, dim), lx = ty_lines_of(x, dim);
  *m = (ty_index_map){ .index = index->data,
                       .wide = index->dtype == TY_I64,
                       .outer = li.outer,
                       .count = li.size,
                       .inner = li.inner,
                       .size = lx.size,
                       .step = lx.inner,
                       .outer_linear = true,
                       .ndim_outer = dim,
                       .x = x,
                       .shape = index };
  for (int d = 1; d < dim; d++) m->outer_linear &= index->size[d] == x->size[d];
  bool inner_linear = true;
  for (int d = dim + 2; d < index->ndim; d++) inner_linear &= index->size[d] == x->size[d];
  if (inner_linear || li.inner == 0) return true;
  m->inner_map = ty_scratch_alloc((size_t)li.inner * sizeof(int64_t));
  if (!m->inner_map) return false;
  for (int64_t i = 0; i < li.inner; i++) {
    int64_t rest = i, at = 0, stride = 1;
    for (int d = index->ndim - 1; d > dim; d--) {
      at += rest % index->size[d] * stride;
      rest /= index->size[d];
      stride *= x->size[d];
    }
    m->inner_map[i] = at;
  }
  return true;
}

static inline void ty_index_map_free(ty_index_map *m) {
  if (m->inner_map) ty_scratch_free(m->inner_map, (size_t)m->inner * sizeof(int64_t));
}

/* Offset in x of outer position o of the index. */
static inline int64_t ty_index_outer(const ty_index_map *m, int64_t o) {
  int64_t stride = m->size * m->step, at = 0;
  if (m->outer_linear) return o * stride;
  for (int d = m->ndim_outer - 1; d >= 0; d--) {
    at += o % m->shape->size[d] * stride;
    o /= m->shape->size[d];
    stride *= m->x->size[d];
  }
  return at;
}

#endif
