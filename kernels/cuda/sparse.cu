/* Choosing the elements of a row that stay, and the product that reads the weights of those alone. */
#include "cuda.cuh"

namespace {

enum { THREADS = 256, WARPS = THREADS / TY_WARP, DIGITS = 256 };

/* ---- sparsify: a block for each row ---- */

template <class T> struct select_job {
  const T *x;
  const ty_compute<T> *scale;
  T *out;
  int64_t rows, n, count;
  double threshold;
};

TY_DEVICE uint32_t bits_of(float x) { return ty_bits_f32(x); }
TY_DEVICE uint64_t bits_of(double x) { return ty_bits_f64(x); }

template <class T> TY_DEVICE ty_compute<T> score_at(const select_job<T> &j, const T *x, int64_t i) {
  const ty_compute<T> v = ty_widen(x[i]) * (j.scale ? j.scale[i] : ty_compute<T>(1));
  return v < 0 ? -v : v;
}

/* Without its sign, so that NaN is the largest; -0 becomes 0. */
template <class T> TY_DEVICE auto key_at(const select_job<T> &j, const T *x, int64_t i) {
  auto bits = bits_of(score_at(j, x, i));
  typedef decltype(bits) K;
  return static_cast<K>(bits & ~(K{ 1 } << (8 * sizeof(K) - 1)));
}

template <class T> __global__ void __launch_bounds__(THREADS) select_above(const select_job<T> j) {
  const ty_compute<T> threshold = static_cast<ty_compute<T>>(j.threshold);
  for (int64_t r = blockIdx.x; r < j.rows; r += gridDim.x) {
    const T *x = j.x + r * j.n;
    for (int64_t i = threadIdx.x; i < j.n; i += THREADS)
      j.out[r * j.n + i] = score_at(j, x, i) <= threshold ? ty_narrow<T>(0) : x[i];
  }
}

/* The digits of the count-th largest key are found from the highest on: how many keys have each, among those that begin
 * like it. Of equal keys the first stay. */
template <class T> __global__ void __launch_bounds__(THREADS) select_largest(const select_job<T> j) {
  typedef decltype(key_at(j, j.x, 0)) K;
  TY_SHARED(uint32_t, found, DIGITS);
  TY_SHARED(uint32_t, room, WARPS);
  TY_SHARED(int64_t, left, 1);
  TY_SHARED(K, digits, 1);
  const int warp = threadIdx.x / TY_WARP, lane = threadIdx.x % TY_WARP;
  for (int64_t r = blockIdx.x; r < j.rows; r += gridDim.x) {
    const T *x = j.x + r * j.n;
    K prefix = 0, mask = 0;
    int64_t count = j.count;
    for (int shift = 8 * static_cast<int>(sizeof(K)) - 8; shift >= 0; shift -= 8) {
      found[threadIdx.x] = 0;
      __syncthreads();
      for (int64_t i = threadIdx.x; i < j.n; i += THREADS) {
        const K key = key_at(j, x, i);
        if ((key & mask) == prefix) atomicAdd(found + static_cast<int>(key >> shift & (DIGITS - 1)), 1u);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        int64_t rest = count;
        int digit = DIGITS - 1;
        for (; found[digit] < rest; digit--) rest -= found[digit];
        left[0] = rest;
        digits[0] = prefix | static_cast<K>(digit) << shift;
      }
      __syncthreads();
      count = left[0];
      prefix = digits[0];
      mask |= static_cast<K>(DIGITS - 1) << shift;
    }
    /* `count` of those that equal the least stay, the first ones. */
    for (int64_t i0 = 0; i0 < j.n; i0 += THREADS) {
      const int64_t i = i0 + threadIdx.x;
      const K key = i < j.n ? key_at(j, x, i) : K{ 0 };
      const bool equal = i < j.n && key == prefix;
      const unsigned vote = __ballot_sync(0xffffffffu, equal);
      if (lane == 0) room[warp] = __popc(vote);
      __syncthreads();
      int64_t before = __popc(vote & ((1u << lane) - 1)), all = 0;
      for (int w = 0; w < WARPS; w++) {
        before += w < warp ? room[w] : 0;
        all += room[w];
      }
      if (i < j.n) j.out[r * j.n + i] = key > prefix || (equal && before < count) ? x[i] : ty_narrow<T>(0);
      count -= all;
      __syncthreads();
    }
  }
}

/* ---- sparse_linear ---- */

/* A block has TY_WARP * V outputs and one of `parts` of the inputs, of which each warp takes 32 at a time: the lanes look
 * which are not zero, and then read the weights of one after another together. */
template <class T> struct product_job {
  const T *x, *weight;
  ty_compute<T> *sums;   /* [parts, out] */
  int64_t in, out, each; /* each: inputs of a part */
};

template <class T, int V> __global__ void __launch_bounds__(THREADS) product(const product_job<T> j) {
  typedef ty_compute<T> C;
  TY_SHARED(C, room, WARPS * TY_WARP * V);
  const int warp = threadIdx.x / TY_WARP, lane = threadIdx.x % TY_WARP;
  const int64_t column = (int64_t{ blockIdx.x } * TY_WARP + lane) * V;
  const int64_t begin = blockIdx.y * j.each, end = begin + j.each < j.in ? begin + j.each : j.in;
  const bool inside = column < j.out;
  const T *weight = j.weight + (inside ? column : 0);
  C sum[V] = {};
  for (int64_t base = begin + warp * TY_WARP; base < end; base += THREADS) {
    const C own = base + lane < end ? ty_widen(j.x[base + lane]) : C(0);
    unsigned rest = __ballot_sync(0xffffffffu, own != 0);
    while (rest) { /* four rows are on their way at once */
      int at[4];
      C x[4], w[4][V];
      int n = 0;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        at[r] = rest ? __ffs(static_cast<int>(rest)) - 1 : -1;
        rest &= rest - 1;
        x[r] = __shfl_sync(0xffffffffu, own, at[r] < 0 ? 0 : at[r]);
        n += at[r] >= 0;
      }
#pragma unroll
      for (int r = 0; r < 4; r++)
        if (r < n && inside) ty_load<V>(weight + (base + at[r]) * j.out, w[r]);
#pragma unroll
      for (int r = 0; r < 4; r++)
        if (r < n && inside)
#pragma unroll
          for (int v = 0; v < V; v++) sum[v] += x[r] * w[r][v];
    }
  }
#pragma unroll
  for (int v = 0; v < V; v++) room[(warp * V + v) * TY_WARP + lane] = sum[v];
  __syncthreads();
  for (int i = threadIdx.x; i < TY_WARP * V; i += THREADS) { /* v * 32 + lane, as they lie */
    C all = room[i];
    for (int w = 1; w < WARPS; w++) all += room[w * TY_WARP * V + i];
    const int64_t to = (int64_t{ blockIdx.x } * TY_WARP + i % TY_WARP) * V + i / TY_WARP;
    if (to < j.out) j.sums[blockIdx.y * j.out + to] = all;
  }
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    sum_parts(const ty_compute<T> *sums, const ty_compute<T> *bias, T *y, int64_t out, int parts) {
  for (int64_t i = int64_t{ blockIdx.x } * THREADS + threadIdx.x; i < out; i += int64_t{ gridDim.x } * THREADS) {
    ty_compute<T> all = bias ? bias[i] : ty_compute<T>(0);
    for (int p = 0; p < parts; p++) all += sums[p * out + i];
    y[i] = ty_narrow<T>(all);
  }
}

template <class T, int V> bool run_product(const ty_kernel_args *k) {
  typedef ty_compute<T> C;
  product_job<T> j = {
    ty_data_of<const T>(k->in[0]), ty_data_of<const T>(k->in[1]), nullptr, k->in[0]->count, k->out[0]->count, 0
  };
  const C *bias = ty_data_of<const C>(k->in[2]);
  T *y = ty_data_of<T>(k->out[0]);
  const int64_t tiles = (j.out + TY_WARP * V - 1) / (TY_WARP * V);
  /* As many blocks as the GPU runs at once, none with fewer inputs than its threads. */
  int64_t parts = (int64_t{ 8 } * ty_cuda_processors() + tiles - 1) / tiles, most = (j.in + THREADS - 1) / THREADS;
  if (parts > most) parts = most;
  if (parts < 1) parts = 1;
  j.each = ((j.in + parts - 1) / parts + THREADS - 1) / THREADS * THREADS;
  ty_cuda_scratch scratch(static_cast<size_t>(parts * j.out) * sizeof(C));
  if (!scratch.data) return false;
  j.sums = scratch.as<C>();
  const C *sums = j.sums;
  const int64_t out = j.out;
  const int count = static_cast<int>(parts);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  return TY_LAUNCH((product<T, V>), grid, THREADS, 0, j) &&
         TY_LAUNCH((sum_parts<T>), ty_cuda_blocks(out, THREADS), THREADS, 0, sums, bias, y, out, count);
}

} // namespace

/* in: x [..., n], scale [n] or NULL. */
TY_CUDA_KERNEL(sparsify) {
  const ty_view *x = k->in[0];
  const ty_p_sparsify *p = static_cast<const ty_p_sparsify *>(k->params);
  if (x->count == 0) return true;
  return ty_for_floats(x->dtype, "sparsify", [&](auto type) {
    typedef decltype(type) T;
    const int64_t n = x->size[x->ndim - 1];
    const select_job<T> j = { ty_data_of<const T>(x),
                              ty_data_of<const ty_compute<T>>(k->in[1]),
                              ty_data_of<T>(k->out[0]),
                              x->count / n,
                              n,
                              p->count < n ? p->count : n,
                              p->threshold };
    const unsigned blocks = ty_cuda_blocks(j.rows, 1);
    return p->count ? TY_LAUNCH((select_largest<T>), blocks, THREADS, 0, j)
                    : TY_LAUNCH((select_above<T>), blocks, THREADS, 0, j);
  });
}

/* in: x [in], weight [in, out], bias [out] or NULL, f32 where the others are f16 or bf16. */
TY_CUDA_KERNEL(sparse_linear) {
  if (k->out[0]->count == 0) return true;
  return ty_for_floats(k->in[0]->dtype, "sparse_linear", [&](auto type) {
    typedef decltype(type) T;
    enum { V = 16 / sizeof(T) };
    return k->out[0]->count % V == 0 && ty_aligned(k->in[1]->data) ? run_product<T, V>(k) : run_product<T, 1>(k);
  });
}
