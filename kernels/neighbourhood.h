/* Windows of neighbourhood attention, as the CPU and the GPU share them (Hassani et al. 2023, "Neighborhood Attention
 * Transformer"): place i of n along a side sees `window` of them, itself in the middle; near a border the window is
 * moved inwards, so that all see as many. */
#ifndef TY_KERNELS_NEIGHBOURHOOD_H
#define TY_KERNELS_NEIGHBOURHOOD_H

#include "scalar.h"

/* The first place that place i sees. */
TY_INLINE int64_t ty_neighbours_begin(int64_t i, int64_t n, int64_t window) {
  const int64_t begin = i - window / 2, last = n - window;
  return begin < 0 ? 0 : begin > last ? last : begin;
}

/* The places that see place j: from `first` to `last`. */
TY_INLINE int64_t ty_neighbours_first(int64_t j, int64_t window) {
  return j < window ? 0 : j - window + 1 + window / 2;
}
TY_INLINE int64_t ty_neighbours_last(int64_t j, int64_t n, int64_t window) {
  return j >= n - window ? n - 1 : j + window / 2;
}

#endif
