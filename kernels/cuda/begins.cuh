/* Where packed sequences begin: reported when it cannot be. */
#ifndef TY_KERNELS_CUDA_BEGINS_CUH
#define TY_KERNELS_CUDA_BEGINS_CUH

#include "../attention_span.h"
#include "cuda.cuh"

static __global__ void __launch_bounds__(256) ty_check_begins(const ty_reach reach, ty_cuda_watch watch) {
  for (int64_t i = threadIdx.x; i < reach.count; i += blockDim.x)
    if (!ty_reach_rises(&reach, i)) ty_report(watch, TY_INDEX_OUT_OF_RANGE, reach.begins[i * reach.step], reach.s + 1);
}
static inline bool ty_begins_checked(const ty_reach &reach) {
  return !reach.begins || TY_LAUNCH(ty_check_begins, 1, 256, 0, reach, ty_cuda_watched());
}

#endif
