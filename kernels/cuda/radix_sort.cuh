/* Stable radix sort of pairs of key and position, from the lowest digit: every tile counts its digits, the counts are
 * summed up, and every tile puts its pairs behind those of the tiles before it, in the order in which they came. A tile
 * is brought into the order of its digits in shared memory first, so that neighbours are written together. */
#ifndef TY_KERNELS_CUDA_RADIX_SORT_CUH
#define TY_KERNELS_CUDA_RADIX_SORT_CUH

#include "indexing.cuh"

enum {
  RADIX_THREADS = 256,
  RADIX_WARPS = RADIX_THREADS / TY_WARP,
  RADIX_BITS = 8,
  RADIX_DIGITS = 1 << RADIX_BITS /* one for each thread */
};
template <class K> constexpr int radix_rounds = 64 / sizeof(K); /* pairs of a thread */
template <class K> constexpr int radix_tile = radix_rounds<K> *RADIX_THREADS;
template <class K> static inline uint32_t radix_tiles(uint32_t n) {
  return n / radix_tile<K> + (n % radix_tile<K> != 0);
}

template <class K> TY_DEVICE uint32_t radix_digit(K key, int shift) {
  return static_cast<uint32_t>(key >> shift) & (RADIX_DIGITS - 1);
}

/* Pairs in memory, to read or to write; positions NULL: 0, 1, 2 ... */
template <class K> struct radix_pairs {
  K *keys;
  uint32_t *positions;
  TY_DEVICE_MEMBER K key(uint32_t i) const { return keys[i]; }
  TY_DEVICE_MEMBER uint32_t position(uint32_t i) const { return positions ? positions[i] : i; }
  TY_DEVICE_MEMBER void put(uint32_t i, K key, uint32_t position) const {
    keys[i] = key;
    positions[i] = position;
  }
};

/* counts: [digit][tile] */
template <class K, class From>
__global__ void __launch_bounds__(RADIX_THREADS) radix_count(const From from, uint32_t n, int shift, uint32_t *counts) {
  TY_SHARED(uint32_t, found, RADIX_DIGITS);
  found[threadIdx.x] = 0;
  __syncthreads();
  const uint32_t begin = blockIdx.x * radix_tile<K> + threadIdx.x;
#pragma unroll
  for (int r = 0; r < radix_rounds<K>; r++) {
    const uint32_t i = begin + r * RADIX_THREADS;
    if (i < n) atomicAdd(found + radix_digit<K>(from.key(i), shift), 1u);
  }
  __syncthreads();
  counts[threadIdx.x * gridDim.x + blockIdx.x] = found[threadIdx.x];
}

/* A block for each digit. */
static __global__ void __launch_bounds__(RADIX_THREADS)
    radix_sum_up(uint32_t *counts, uint32_t tiles, uint32_t *totals) {
  TY_SHARED(uint32_t, room, TY_WARP);
  uint32_t total = index_sum_up(counts + blockIdx.x * tiles, tiles, room);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

template <class K, class From, class To>
__global__ void __launch_bounds__(RADIX_THREADS, 1)
    radix_place(const From from, uint32_t n, int shift, const uint32_t *starts, const uint32_t *totals, const To to) {
  enum { ROUNDS = radix_rounds<K> };
  TY_SHARED(uint32_t, place, RADIX_WARPS * RADIX_DIGITS); /* counts of each warp, then where its pairs go in the tile */
  TY_SHARED(uint32_t, away, RADIX_DIGITS);                /* from there to where they go in memory */
  TY_SHARED(uint32_t, room, TY_WARP);
  TY_SHARED(K, keys, radix_tile<K>);
  TY_SHARED(uint32_t, positions, radix_tile<K>);
  const int warp = threadIdx.x / TY_WARP, lane = threadIdx.x % TY_WARP;
  for (int w = 0; w < RADIX_WARPS; w++) place[w * RADIX_DIGITS + threadIdx.x] = 0;
  __syncthreads();
  const uint32_t tile = blockIdx.x * radix_tile<K>, begin = tile + warp * (ROUNDS * TY_WARP) + lane;
  const unsigned earlier = (1u << lane) - 1;
  K key[ROUNDS];
  uint32_t position[ROUNDS], rank[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const uint32_t i = begin + r * TY_WARP;
    key[r] = i < n ? from.key(i) : K(0);
    position[r] = i < n ? from.position(i) : 0;
  }
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const bool valid = begin + r * TY_WARP < n;
    const uint32_t digit = radix_digit(key[r], shift);
    unsigned alike = __ballot_sync(0xffffffffu, valid); /* the lanes with this digit */
#pragma unroll
    for (int b = 0; b < RADIX_BITS; b++) {
      const unsigned set = __ballot_sync(0xffffffffu, digit >> b & 1);
      alike &= digit >> b & 1 ? set : ~set;
    }
    const uint32_t before = place[warp * RADIX_DIGITS + digit];
    __syncwarp();
    if (valid && !(alike & earlier)) place[warp * RADIX_DIGITS + digit] = before + __popc(alike);
    __syncwarp();
    rank[r] = before + __popc(alike & earlier);
  }
  __syncthreads();
  uint32_t all, own = 0;
  for (int w = 0; w < RADIX_WARPS; w++) own += place[w * RADIX_DIGITS + threadIdx.x];
  uint32_t in_tile = index_sum_before(own, &all, room), start = index_sum_before(totals[threadIdx.x], &all, room);
  if (gridDim.x > 1) start += starts[threadIdx.x * gridDim.x + blockIdx.x];
  away[threadIdx.x] = start - in_tile;
  for (int w = 0; w < RADIX_WARPS; w++) {
    const uint32_t count = place[w * RADIX_DIGITS + threadIdx.x];
    place[w * RADIX_DIGITS + threadIdx.x] = in_tile;
    in_tile += count;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    if (begin + r * TY_WARP >= n) continue;
    const uint32_t at = place[warp * RADIX_DIGITS + radix_digit(key[r], shift)] + rank[r];
    keys[at] = key[r];
    positions[at] = position[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const uint32_t at = r * RADIX_THREADS + threadIdx.x;
    if (at >= n - tile) continue;
    const K moved = keys[at];
    to.put(at + away[radix_digit(moved, shift)], moved, positions[at]);
  }
}

/* One digit of n pairs. counts: room for radix_counts<K>(n) numbers. */
template <class K> static inline size_t radix_counts(uint32_t n) {
  return (size_t{ radix_tiles<K>(n) } + 1) * RADIX_DIGITS;
}
template <class K, class From, class To>
static inline bool radix_pass(const From &from, const To &to, uint32_t n, int shift, uint32_t *counts) {
  const uint32_t tiles = radix_tiles<K>(n);
  uint32_t *totals = tiles == 1 ? counts : counts + size_t{ tiles } * RADIX_DIGITS; /* the counts of the only tile */
  return TY_LAUNCH((radix_count<K, From>), tiles, RADIX_THREADS, 0, from, n, shift, counts) &&
         (tiles == 1 || TY_LAUNCH(radix_sum_up, RADIX_DIGITS, RADIX_THREADS, 0, counts, tiles, totals)) &&
         TY_LAUNCH((radix_place<K, From, To>), tiles, RADIX_THREADS, 0, from, n, shift, counts, totals, to);
}

#endif
