/* Positions sorted by index, so that sums over repeated indices have one order, whatever runs first. Radix sort from
 * the lowest digit: every tile counts its digits, the counts are summed up, and every tile puts its pairs of key and
 * position behind those of the tiles before it, in the order in which they came. */
#ifndef TY_KERNELS_CUDA_INDEX_SORT_CUH
#define TY_KERNELS_CUDA_INDEX_SORT_CUH

#include <utility>

#include "indexing.cuh"

enum {
  SORT_THREADS = 256,
  SORT_WARPS = SORT_THREADS / TY_WARP,
  SORT_ROUNDS = 16,
  SORT_TILE = SORT_ROUNDS * SORT_THREADS,
  SORT_BITS = 8,
  SORT_DIGITS = 1 << SORT_BITS /* one for each thread */
};

TY_DEVICE uint32_t sort_digit(uint32_t key, int shift) { return key >> shift & (SORT_DIGITS - 1); }

/* counts: [digit][tile] */
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_count(const uint32_t *keys, uint32_t n, int shift, uint32_t *counts) {
  TY_SHARED(uint32_t, found, SORT_DIGITS);
  found[threadIdx.x] = 0;
  __syncthreads();
  const uint32_t begin = blockIdx.x * SORT_TILE + threadIdx.x;
#pragma unroll
  for (int r = 0; r < SORT_ROUNDS; r++) {
    uint32_t i = begin + r * SORT_THREADS;
    if (i < n) atomicAdd(found + sort_digit(keys[i], shift), 1u);
  }
  __syncthreads();
  counts[threadIdx.x * gridDim.x + blockIdx.x] = found[threadIdx.x];
}

/* A block for each digit. */
static __global__ void __launch_bounds__(SORT_THREADS) sort_sum_up(uint32_t *counts, uint32_t tiles, uint32_t *totals) {
  TY_SHARED(uint32_t, room, TY_WARP);
  uint32_t total = index_sum_up(counts + blockIdx.x * tiles, tiles, room);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

/* positions: NULL for 0, 1, 2 ... */
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_place(const uint32_t *keys, const uint32_t *positions, uint32_t n, int shift, const uint32_t *starts,
               const uint32_t *totals, uint32_t *keys_out, uint32_t *positions_out) {
  TY_SHARED(uint32_t, place, SORT_WARPS * SORT_DIGITS); /* counts of each warp, then where its pairs go */
  TY_SHARED(uint32_t, room, TY_WARP);
  const int warp = threadIdx.x / TY_WARP, lane = threadIdx.x % TY_WARP;
  for (int w = 0; w < SORT_WARPS; w++) place[w * SORT_DIGITS + threadIdx.x] = 0;
  __syncthreads();
  const uint32_t begin = blockIdx.x * SORT_TILE + warp * (SORT_ROUNDS * TY_WARP) + lane;
  const unsigned earlier = (1u << lane) - 1;
  uint32_t key[SORT_ROUNDS], rank[SORT_ROUNDS];
#pragma unroll
  for (int r = 0; r < SORT_ROUNDS; r++) {
    uint32_t i = begin + r * TY_WARP;
    if (i - lane >= n) break; /* the whole warp */
    bool valid = i < n;
    key[r] = valid ? keys[i] : 0;
    uint32_t digit = sort_digit(key[r], shift);
    unsigned alike = __ballot_sync(0xffffffffu, valid); /* the lanes with this digit */
#pragma unroll
    for (int b = 0; b < SORT_BITS; b++) {
      unsigned set = __ballot_sync(0xffffffffu, digit >> b & 1);
      alike &= digit >> b & 1 ? set : ~set;
    }
    uint32_t before = place[warp * SORT_DIGITS + digit];
    __syncwarp();
    if (valid && !(alike & earlier)) place[warp * SORT_DIGITS + digit] = before + __popc(alike);
    __syncwarp();
    rank[r] = before + __popc(alike & earlier);
  }
  __syncthreads();
  uint32_t total, at = index_sum_before(totals[threadIdx.x], &total, room);
  if (gridDim.x > 1) at += starts[threadIdx.x * gridDim.x + blockIdx.x];
  for (int w = 0; w < SORT_WARPS; w++) {
    uint32_t count = place[w * SORT_DIGITS + threadIdx.x];
    place[w * SORT_DIGITS + threadIdx.x] = at;
    at += count;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < SORT_ROUNDS; r++) {
    uint32_t i = begin + r * TY_WARP;
    if (i >= n) continue;
    uint32_t to = place[warp * SORT_DIGITS + sort_digit(key[r], shift)] + rank[r];
    keys_out[to] = key[r];
    positions_out[to] = positions ? positions[i] : i;
  }
}

/* Room for up to n pairs; the caller writes `keys` of all positions, then sorts. */
class index_sorter {
public:
  explicit index_sorter(uint32_t n)
      : memory_((size_t{ n } * 4 + size_t{ tiles_of(n) } * SORT_DIGITS + SORT_DIGITS) * sizeof(uint32_t)),
        ok(memory_.data), keys(memory_.as<uint32_t>()), positions(keys + n), other_keys_(keys + 2 * size_t{ n }),
        other_positions_(keys + 3 * size_t{ n }), counts_(keys + 4 * size_t{ n }) {}

  /* keys below `limit`, of n positions */
  bool sort(uint32_t n, uint32_t limit) {
    const uint32_t tiles = tiles_of(n), count = n;
    uint32_t *starts = counts_, *totals = counts_ + size_t{ tiles } * SORT_DIGITS;
    bool first = true;
    for (int shift = 0; first || (shift < 32 && (limit - 1) >> shift); shift += SORT_BITS, first = false) {
      const uint32_t *from = keys, *numbers = first ? nullptr : positions;
      uint32_t *to = other_keys_, *to_positions = other_positions_;
      if (tiles == 1) totals = starts; /* the counts of the only tile */
      if (!TY_LAUNCH(sort_count, tiles, SORT_THREADS, 0, from, count, shift, starts) ||
          (tiles > 1 && !TY_LAUNCH(sort_sum_up, SORT_DIGITS, SORT_THREADS, 0, starts, tiles, totals)) ||
          !TY_LAUNCH(sort_place, tiles, SORT_THREADS, 0, from, numbers, count, shift, starts, totals, to, to_positions))
        return false;
      std::swap(keys, other_keys_);
      std::swap(positions, other_positions_);
    }
    return true;
  }

private:
  static uint32_t tiles_of(uint32_t n) { return n / SORT_TILE + (n % SORT_TILE != 0); }
  ty_cuda_scratch memory_;

public:
  const bool ok; /* else after ty_fail() */
  uint32_t *keys, *positions;

private:
  uint32_t *other_keys_, *other_positions_, *counts_;
};

#endif
