/* Positions sorted by index, so that sums over repeated indices have one order, whatever runs first. */
#ifndef TY_KERNELS_CUDA_INDEX_SORT_CUH
#define TY_KERNELS_CUDA_INDEX_SORT_CUH

#include <utility>

#include "radix_sort.cuh"

/* Room for up to n pairs; the caller writes `keys` of all positions, then sorts. */
class index_sorter {
public:
  explicit index_sorter(uint32_t n)
      : memory_((size_t{ n } * 4 + radix_counts<uint32_t>(n)) * sizeof(uint32_t)), ok(memory_.data),
        keys(memory_.as<uint32_t>()), positions(keys + n), other_keys_(keys + 2 * size_t{ n }),
        other_positions_(keys + 3 * size_t{ n }), counts_(keys + 4 * size_t{ n }) {}

  /* keys below `limit`, of n positions */
  bool sort(uint32_t n, uint32_t limit) {
    typedef radix_pairs<uint32_t> pairs;
    bool first = true;
    for (int shift = 0; first || (shift < 32 && (limit - 1) >> shift); shift += RADIX_BITS, first = false) {
      const pairs from = { keys, first ? nullptr : positions }, to = { other_keys_, other_positions_ };
      if (!radix_pass<uint32_t>(from, to, n, shift, counts_)) return false;
      std::swap(keys, other_keys_);
      std::swap(positions, other_positions_);
    }
    return true;
  }

private:
  ty_cuda_scratch memory_;

public:
  const bool ok; /* else after ty_fail() */
  uint32_t *keys, *positions;

private:
  uint32_t *other_keys_, *other_positions_, *counts_;
};

#endif
