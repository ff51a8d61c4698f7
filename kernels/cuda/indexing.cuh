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

/* The sum of what the threads before this one in the block brought, and of all; `room` has 32 elements. */
template <class T> TY_DEVICE T index_sum_before(T own, T *total, ty_shared_ptr<T> room) {
  const int warp = threadIdx.x / TY_WARP, lane = threadIdx.x % TY_WARP, warps = blockDim.x / TY_WARP;
  T sum = own;
  for (int step = 1; step < TY_WARP; step *= 2) {
    T other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == TY_WARP - 1) room[warp] = sum;
  __syncthreads();
  T all = 0;
  for (int w = 0; w < warps; w++) {
    if (w == warp) sum += all;
    all += room[w];
  }
  __syncthreads();
  *total = all;
  return sum - own;
}

/* Each of n numbers becomes the sum of those before it, by one block; the sum of all. */
template <class T> TY_DEVICE T index_sum_up(T *numbers, int64_t n, ty_shared_ptr<T> room) {
  T before = 0, total;
  for (int64_t begin = 0; begin < n; begin += blockDim.x) {
    int64_t i = begin + threadIdx.x;
    T sum = index_sum_before(i < n ? numbers[i] : T(0), &total, room);
    if (i < n) numbers[i] = before + sum;
    before += total;
  }
  return before;
}

#endif
