/* Index tensors of i64 or i32, and where the elements that they name lie. */
#ifndef TY_KERNELS_CUDA_INDEXING_CUH
#define TY_KERNELS_CUDA_INDEXING_CUH

#include "../cpu/lines.h"
#include "elementwise.cuh"

enum { INDEX_THREADS = 256 };

struct index_list {
  const void *data;
  bool wide; /* i64 */
};
static inline index_list index_list_of(const ty_view *index) { return { index->data, index->dtype == TY_I64 }; }
TY_DEVICE int64_t index_at(const index_list &list, int64_t i) {
  return list.wide ? static_cast<const int64_t *>(list.data)[i] : static_cast<const int32_t *>(list.data)[i];
}

/* gather and scatter: positions of a moving tensor [shaped like the index] against those of the tensor x that is
 * indexed along `dim`. Operands of the plan: the moving tensor, x at position 0 of `dim`, and the index. */
struct index_map {
  ew_plan plan;
  int64_t size, step; /* of x along `dim` */
  bool wide;
  int bytes[EW_OPERANDS];
};

static inline void index_map_init(index_map *m, const ty_view *x, const ty_view *index, int dim,
                                  const ty_view *moving) {
  ty_view line = *index, flat = *index, from = *index;
  int64_t stride = 1;
  for (int d = index->ndim - 1; d >= 0; d--) {
    line.size[d] = index->size[d];
    line.stride[d] = d == dim ? 0 : stride;
    if (d == dim) m->step = stride;
    stride *= x->size[d];
  }
  if (index->ndim == 0) m->step = 1;
  m->size = index->ndim ? x->size[dim] : 1;
  m->wide = index->dtype == TY_I64;
  line.data = x->data;
  from.data = moving->data;
  if (moving->count == 1) memset(from.stride, 0, sizeof from.stride); /* one value for all */
  const ty_view *in[] = { &line, &flat };
  ew_make_plan(&m->plan, &from, in, 2);
  m->bytes[0] = m->bytes[1] = ty_dtype_size[x->dtype];
  m->bytes[2] = ty_dtype_size[index->dtype];
}

#endif
