/* Random orders and draws: randperm, multinomial. The numbers are the CPU's, so that both give the same. */
#include "../philox.h"
#include "cuda.cuh"

/* Sorts rows of pairs by key, then by index: tiles in shared memory, then runs of double length, each element finding
 * its place in the other run by bisection. */
struct keyed {
  uint64_t key;
  int64_t index;
};
enum { THREADS = 256, TILE = 1024 };

TY_DEVICE bool before(const keyed &a, const keyed &b) { return a.key != b.key ? a.key < b.key : a.index < b.index; }

/* Bitonic (Batcher 1968); what is beyond a row comes last. */
__global__ void __launch_bounds__(THREADS) sort_tiles(keyed *x, int64_t rows, int64_t n) {
  TY_SHARED(keyed, tile, TILE);
  const int64_t tiles = (n + TILE - 1) / TILE;
  for (int64_t t = blockIdx.x; t < rows * tiles; t += gridDim.x) {
    const int64_t row = t / tiles, first = (t - row * tiles) * TILE;
    keyed *at = x + row * n + first;
    const int count = n - first < TILE ? static_cast<int>(n - first) : int{ TILE };
    for (int i = threadIdx.x; i < TILE; i += THREADS) tile[i] = i < count ? at[i] : keyed{ UINT64_MAX, INT64_MAX };
    __syncthreads();
    for (int length = 2; length <= TILE; length *= 2)
      for (int step = length / 2; step > 0; step /= 2) {
        for (int pair = threadIdx.x; pair < TILE / 2; pair += THREADS) {
          const int i = pair / step * 2 * step + pair % step, j = i + step;
          const keyed a = tile[i], b = tile[j];
          if (before(b, a) == ((i & length) == 0)) tile[i] = b, tile[j] = a;
        }
        __syncthreads();
      }
    for (int i = threadIdx.x; i < count; i += THREADS) at[i] = tile[i];
    __syncthreads();
  }
}

__global__ void __launch_bounds__(THREADS)
    merge_runs(keyed *to, const keyed *from, int64_t count, int64_t n, int64_t length) {
  const int64_t step = int64_t{ gridDim.x } * THREADS;
  for (int64_t i = int64_t{ blockIdx.x } * THREADS + threadIdx.x; i < count; i += step) {
    const int64_t row = i / n, at = i - row * n, run = at / length, base = row * n;
    const int64_t pair = run / 2 * 2 * length;            /* where both runs begin */
    const int64_t other = run % 2 ? pair : pair + length; /* the other one, if there is one */
    int64_t low = other;
    int64_t high = low + length < n ? low + length : n;
    const keyed x = from[i];
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (before(from[base + middle], x)) low = middle + 1;
      else high = middle;
    }
    to[base + pair + (at - run * length) + (low - other)] = x;
  }
}

/* The sorted pairs are in x or in spare, which is returned; NULL after ty_fail(). */
static const keyed *sort_rows(keyed *x, keyed *spare, int64_t rows, int64_t n) {
  const int64_t tiles = rows * ((n + TILE - 1) / TILE);
  if (!TY_LAUNCH(sort_tiles, ty_cuda_blocks(tiles, 1), THREADS, 0, x, rows, n)) return nullptr;
  for (int64_t length = TILE; length < n; length *= 2) {
    const keyed *from = x;
    keyed *to = spare;
    if (!TY_LAUNCH(merge_runs, ty_cuda_blocks(rows * n, THREADS), THREADS, 0, to, from, rows * n, n, length))
      return nullptr;
    spare = x, x = to;
  }
  return x;
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    take_indices(T *to, const keyed *from, int64_t count, int64_t each, int64_t n) {
  const int64_t step = int64_t{ gridDim.x } * THREADS;
  for (int64_t i = int64_t{ blockIdx.x } * THREADS + threadIdx.x; i < count; i += step)
    to[i] = static_cast<T>(from[i / each * n + i % each].index);
}

/* ---- randperm ---- */

/* Keys of 53 bits: two words an element. */
__global__ void __launch_bounds__(THREADS) draw_keys(keyed *to, int64_t n, uint64_t seed, uint64_t offset) {
  const int64_t step = int64_t{ gridDim.x } * THREADS;
  for (int64_t i = int64_t{ blockIdx.x } * THREADS + threadIdx.x; i < n; i += step) {
    const ty_philox b = ty_philox_block(seed, offset + static_cast<uint64_t>(i) / 2);
    const uint32_t high = i % 2 ? b.w[2] : b.w[0], low = i % 2 ? b.w[3] : b.w[1];
    to[i] = keyed{ static_cast<uint64_t>(high >> 5) << 26 | low >> 6, i };
  }
}

TY_CUDA_KERNEL(randperm) {
  const ty_p_random *p = static_cast<const ty_p_random *>(k->params);
  const ty_view *out = k->out[0];
  const int64_t n = out->count;
  if (n == 0) return true;
  ty_cuda_scratch room(static_cast<size_t>(n) * 2 * sizeof(keyed));
  if (!room.data) return false;
  keyed *x = room.as<keyed>();
  const uint64_t seed = p->seed, offset = p->offset;
  if (!TY_LAUNCH(draw_keys, ty_cuda_blocks(n, THREADS), THREADS, 0, x, n, seed, offset)) return false;
  const keyed *sorted = sort_rows(x, x + n, 1, n);
  return sorted && ty_for_integers(out->dtype, "randperm", [&](auto element) {
           typedef decltype(element) T;
           T *to = static_cast<T *>(out->data);
           return TY_LAUNCH(take_indices<T>, ty_cuda_blocks(n, THREADS), THREADS, 0, to, sorted, n, n, n);
         });
}

/* ---- multinomial ---- */

TY_DEVICE double uniform_at(uint64_t seed, uint64_t offset, int64_t i) {
  const ty_philox b = ty_philox_block(seed, offset + static_cast<uint64_t>(i) / 4);
  const uint32_t low = i & 1 ? b.w[1] : b.w[0], high = i & 1 ? b.w[3] : b.w[2];
  return (static_cast<double>(i & 2 ? high : low) + 0.5) * 0x1p-32;
}

/* Running sums of each row, by a block; reports rows that are no probabilities, or have fewer than `least` positive
 * ones (0: one is enough). A row's last sum is then 0. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    add_up(double *sums, const T *probs, int64_t rows, int64_t n, int64_t least, const ty_cuda_watch watch) {
  TY_SHARED(double, room, TY_WARP);
  const int lane = threadIdx.x % TY_WARP, warp = threadIdx.x / TY_WARP;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    double before_us = 0;
    int64_t positive = 0;
    bool bad = false;
    for (int64_t first = 0; first < n; first += THREADS) {
      const int64_t i = first + threadIdx.x;
      const double p = i < n ? static_cast<double>(probs[row * n + i]) : 0;
      const bool wrong = !(p >= 0) || p == INFINITY;
      if (wrong) ty_report(watch, TY_NO_PROBABILITY, row, static_cast<int64_t>(ty_bits_f64(p)));
      bad |= __syncthreads_or(wrong) != 0;
      positive += __syncthreads_count(p > 0);
      double sum = p;
      for (int step = 1; step < TY_WARP; step *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      if (lane == TY_WARP - 1) room[warp] = sum;
      __syncthreads();
      double of_warps = 0;
      for (int w = 0; w < THREADS / TY_WARP; w++) {
        if (w == warp) sum += before_us + of_warps;
        of_warps += room[w];
      }
      before_us += of_warps;
      __syncthreads();
      if (sums && i < n) sums[row * n + i] = sum;
    }
    const bool few = !bad && positive < (least ? least : 1);
    if (few && threadIdx.x == 0) ty_report(watch, TY_FEW_PROBABILITIES, row, positive, positive ? least : 0);
    if (sums && (bad || few) && threadIdx.x == 0) sums[row * n + n - 1] = 0;
  }
}

/* The first place whose running sum exceeds a random number. */
template <class T>
__global__ void __launch_bounds__(THREADS) draw_places(int64_t *to, const double *sums, const T *probs, int64_t draws,
                                                       int64_t each, int64_t n, uint64_t seed, uint64_t offset) {
  const int64_t step = int64_t{ gridDim.x } * THREADS;
  for (int64_t i = int64_t{ blockIdx.x } * THREADS + threadIdx.x; i < draws; i += step) {
    const int64_t row = i / each * n;
    const double u = uniform_at(seed, offset, i) * sums[row + n - 1];
    int64_t low = 0, high = n - 1;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (sums[row + middle] > u) high = middle;
      else low = middle + 1;
    }
    while (low > 0 && static_cast<double>(probs[row + low]) == 0) low--; /* rounding at the very end */
    to[i] = low;
  }
}

/* Exponential arrival times with rates probs, of which the smallest are drawn (Efraimidis and Spirakis 2006). They are
 * not negative, so that their bits are in their order. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    draw_arrivals(keyed *to, const T *probs, int64_t count, int64_t n, uint64_t seed, uint64_t offset) {
  const int64_t step = int64_t{ gridDim.x } * THREADS;
  for (int64_t i = int64_t{ blockIdx.x } * THREADS + threadIdx.x; i < count; i += step) {
    const double rate = static_cast<double>(probs[i]);
    const double time = rate > 0 ? -log(uniform_at(seed, offset, i)) / rate : static_cast<double>(INFINITY);
    to[i] = keyed{ ty_bits_f64(time), i % n };
  }
}

/* a: draws per row, b: with replacement. */
TY_CUDA_KERNEL(multinomial) {
  const ty_p_random *p = static_cast<const ty_p_random *>(k->params);
  const ty_view *in = k->in[0], *out = k->out[0];
  if (out->count == 0) return true;
  const int64_t n = in->size[in->ndim - 1], each = static_cast<int64_t>(p->a), draws = out->count, rows = draws / each;
  const bool again = p->b != 0;
  const uint64_t seed = p->seed, offset = p->offset;
  const ty_cuda_watch watch = ty_cuda_watched();
  int64_t *to = static_cast<int64_t *>(out->data);
  ty_cuda_scratch room(static_cast<size_t>(rows * n) * (again ? sizeof(double) : 2 * sizeof(keyed)));
  if (!room.data) return false;
  return ty_for_reals(in->dtype, "multinomial", [&](auto element) {
    typedef decltype(element) T;
    const T *probs = static_cast<const T *>(in->data);
    double *sums = again ? room.as<double>() : nullptr;
    const int64_t least = again ? 0 : each, all = rows * n;
    if (!TY_LAUNCH(add_up<T>, ty_cuda_blocks(rows, 1), THREADS, 0, sums, probs, rows, n, least, watch)) return false;
    if (again)
      return TY_LAUNCH(draw_places<T>, ty_cuda_blocks(draws, THREADS), THREADS, 0, to, sums, probs, draws, each, n,
                       seed, offset);
    keyed *x = room.as<keyed>();
    if (!TY_LAUNCH(draw_arrivals<T>, ty_cuda_blocks(all, THREADS), THREADS, 0, x, probs, all, n, seed, offset))
      return false;
    const keyed *sorted = sort_rows(x, x + all, rows, n);
    return sorted &&
           TY_LAUNCH(take_indices<int64_t>, ty_cuda_blocks(draws, THREADS), THREADS, 0, to, sorted, draws, each, n);
  });
}
