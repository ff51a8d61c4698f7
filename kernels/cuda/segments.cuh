/* Segments of positions, by where each begins and the last one ends. What is wrong with the offsets is reported;
 * kernels read them through ty_offsets, which never leads out of the positions. */
#ifndef TY_KERNELS_CUDA_SEGMENTS_CUH
#define TY_KERNELS_CUDA_SEGMENTS_CUH

#include "indexing.cuh"

struct ty_offsets {
  const int64_t *at; /* [m + 1] */
  int64_t m, n;
  TY_DEVICE_MEMBER int64_t begin(int64_t s) const { return at[s] < 0 ? 0 : at[s] < n ? at[s] : n; }
  /* The segment that holds position j. */
  TY_DEVICE_MEMBER int64_t segment(int64_t j) const {
    int64_t low = 0, high = m;
    while (low + 1 < high) {
      int64_t middle = (low + high) / 2;
      if (at[middle] <= j) low = middle;
      else high = middle;
    }
    return low;
  }
};

static inline ty_offsets ty_offsets_of(const ty_view *offsets, int64_t n) {
  return { static_cast<const int64_t *>(offsets->data), offsets->count - 1, n };
}

static __global__ void __launch_bounds__(INDEX_THREADS) ty_check_offsets(const ty_offsets o, ty_cuda_watch watch) {
  for (int64_t i = int64_t{ blockIdx.x } * INDEX_THREADS + threadIdx.x; i <= o.m;
       i += int64_t{ gridDim.x } * INDEX_THREADS) {
    const int64_t x = o.at[i];
    if (x < (i ? o.at[i - 1] : 0) || x > o.n || (i == 0 && x != 0) || (i == o.m && x != o.n))
      ty_report(watch, TY_NOT_RISING, x, o.n, i);
  }
}

static inline bool ty_offsets_checked(const ty_offsets &o) {
  return TY_LAUNCH(ty_check_offsets, ty_cuda_blocks(o.m + 1, INDEX_THREADS), INDEX_THREADS, 0, o, ty_cuda_watched());
}

#endif
