/* Convolutions in window order: Lu, Chu and Liu 2023, "Im2win: An Efficient Convolution Paradigm on GPU". What the
 * windows of a row of results see of a channel is written once, column by column, [columns][kh], so that each window is
 * one run; products of runs with kernels in that order are summed by tiles in shared memory, the next piece of which is
 * fetched while one is multiplied. */
#include "conv.cuh"
#include "conv_tile.cuh"

namespace {

struct problem {
  conv_shape s;
  int used;                /* columns that windows see */
  int64_t line, positions; /* elements of a row of windows; results of a channel in all images */
  ew_divisor taps, height; /* kh * kw, kh */
};

template <class T> __global__ void __launch_bounds__(TILE_THREADS) write_windows(const problem p, const T *x, T *to) {
  const int64_t count = p.s.n * p.s.c * p.s.oh * p.line;
  for (int64_t i = blockIdx.x * int64_t{ TILE_THREADS } + threadIdx.x; i < count;
       i += int64_t{ gridDim.x } * TILE_THREADS) {
    const int64_t row = i / p.line, plane = row / p.s.oh;
    const uint32_t at = static_cast<uint32_t>(i - row * p.line), u = ew_divide(at, p.height);
    const int h = static_cast<int>(row - plane * p.s.oh) * p.s.stride[0] - p.s.padding[0] +
                  static_cast<int>(at - u * p.height.d) * p.s.dilation[0];
    const int w = static_cast<int>(u) - p.s.padding[1];
    const bool there = h >= 0 && h < p.s.h && w >= 0 && w < p.s.w;
    to[i] = there ? x[(plane * p.s.h + h) * p.s.w + w] : T(0);
  }
}

/* 16 x 16 threads, each with TM x TN results; blocks over positions, channels of y, groups. Depth goes through channels,
 * columns of a window, and its rows. */
template <class T, int TM, int TN>
__global__ void __launch_bounds__(TILE_THREADS)
    multiply_windows(const problem p, const T *windows, const T *weights, const T *bias, T *y) {
  typedef conv_tile<T, TM, TN> tile;
  enum { M = tile::M, N = tile::N, K = TILE_K, LOADS_A = M * K / TILE_THREADS, LOADS_B = N * K / TILE_THREADS };
  TY_SHARED_DYNAMIC(T, shared);
  const conv_shape &s = p.s;
  const int m0 = blockIdx.y * M, group = blockIdx.z, og = static_cast<int>(s.og);
  const int taps = s.kh * s.kw, depth = static_cast<int>(s.cg) * taps;
  const int64_t n0 = int64_t{ blockIdx.x } * N, area = int64_t{ s.oh } * s.ow, plane = s.oh * p.line;

  /* This thread loads one column of the windows' tile, and the weights at one depth. */
  const int column = threadIdx.x % N, column_k = threadIdx.x / N, weight_k = threadIdx.x % K,
            weight_m = threadIdx.x / K;
  const bool inside = n0 + column < p.positions;
  const int64_t place = inside ? n0 + column : 0, image = place / area, at = place - image * area, row = at / s.ow;
  const T *from = windows + (image * s.c + group * s.cg) * plane + row * p.line +
                  (at - row * s.ow) * s.stride[1] * s.kh;
  const T *kernels = weights + group * s.og * depth;

  T a[LOADS_A], b[LOADS_B];
  auto load = [&](int64_t k0) {
    const uint32_t k = static_cast<uint32_t>(k0) + weight_k, c = ew_divide(k, p.taps), tap = k - c * p.taps.d;
    const uint32_t v = ew_divide(tap, p.height), h = tap - v * p.height.d;
#pragma unroll
    for (int i = 0; i < LOADS_A; i++) {
      const int m = m0 + weight_m + i * (TILE_THREADS / K);
      const bool there = static_cast<int>(k) < depth && m < og;
      a[i] = there ? kernels[int64_t{ m } * depth + c * taps + h * s.kw + v] : T(0);
    }
#pragma unroll
    for (int i = 0; i < LOADS_B; i++) {
      const uint32_t q = static_cast<uint32_t>(k0) + column_k + i * (TILE_THREADS / N);
      const uint32_t qc = ew_divide(q, p.taps), qt = q - qc * p.taps.d, qv = ew_divide(qt, p.height);
      const int64_t run = int64_t{ qv } * s.dilation[1] * s.kh + (qt - qv * p.height.d);
      b[i] = inside && static_cast<int>(q) < depth ? from[qc * plane + run] : T(0);
    }
  };
  auto store = [&](int half) {
    ty_shared_ptr<T> to = shared + half * tile::SIZE;
#pragma unroll
    for (int i = 0; i < LOADS_A; i++) to[weight_k * tile::ROW_A + weight_m + i * (TILE_THREADS / K)] = a[i];
#pragma unroll
    for (int i = 0; i < LOADS_B; i++) to[tile::B + (column_k + i * (TILE_THREADS / N)) * tile::ROW_B + column] = b[i];
  };

  tile t;
  t.run(shared, og - m0, p.positions - n0, 0, depth, load, store);

#pragma unroll
  for (int j = 0; j < TN; j++) {
    const int64_t n = n0 + tile::column_of(threadIdx.x % 16, j);
    if (n >= p.positions) continue;
    const int64_t of = n / area;
    T *to = y + (of * s.o + group * s.og) * area + (n - of * area);
#pragma unroll
    for (int i = 0; i < TM; i++) {
      const int m = m0 + tile::row_of(threadIdx.x / 16, i);
      if (m < og) to[m * area] = t.sum[i][j] + (bias ? bias[group * s.og + m] : T(0));
    }
  }
}

template <class T, int TM, int TN>
bool multiply(const problem &p, const T *windows, const T *weights, const T *bias, T *y) {
  typedef conv_tile<T, TM, TN> tile;
  const int64_t columns = (p.positions + tile::N - 1) / tile::N, rows = (p.s.og + tile::M - 1) / tile::M;
  if (columns > INT32_MAX || rows > 65535 || p.s.groups > 65535)
    return ty_fail(TY_EUNSUPPORTED, "a convolution of so many channels or positions is not supported on cuda");
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(rows), static_cast<unsigned>(p.s.groups));
  return TY_LAUNCH((multiply_windows<T, TM, TN>), grid, TILE_THREADS, tile::BYTES, p, windows, weights, bias, y);
}

/* Large tiles where there are enough of them, low ones for few channels. */
bool run(const problem &p, const float *windows, const float *weights, const float *bias, float *y) {
  const int64_t tiles = (p.positions + 127) / 128 * ((p.s.og + 127) / 128) * p.s.groups;
  if (p.s.og <= 32) return multiply<float, 2, 8>(p, windows, weights, bias, y);
  if (p.s.og <= 64 || tiles < ty_cuda_processors()) return multiply<float, 4, 4>(p, windows, weights, bias, y);
  return multiply<float, 8, 8>(p, windows, weights, bias, y);
}
bool run(const problem &p, const double *windows, const double *weights, const double *bias, double *y) {
  return multiply<double, 4, 4>(p, windows, weights, bias, y);
}

} // namespace

/* in: x, weight, bias or NULL. */
TY_CUDA_KERNEL(conv2d_im2win) {
  const ty_view *x = k->in[0], *weight = k->in[1], *bias = k->in[2], *y = k->out[0];
  if (y->count == 0) return true;
  problem p;
  if (!conv_shape_of(x, weight, y, static_cast<const ty_p_conv *>(k->params), &p.s)) return false;
  const conv_shape &s = p.s;
  p.used = (s.ow - 1) * s.stride[1] + (s.kw - 1) * s.dilation[1] + 1;
  p.line = int64_t{ p.used } * s.kh;
  p.positions = s.n * s.oh * s.ow;
  if (p.line > INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "rows of 2^31 elements of windows are not supported on cuda");
  p.taps.set(static_cast<uint32_t>(s.kh * s.kw));
  p.height.set(static_cast<uint32_t>(s.kh));
  return ty_for_reals(y->dtype, "conv2d_im2win", [&](auto type) {
    typedef decltype(type) T;
    const int64_t count = s.n * s.c * s.oh * p.line;
    ty_cuda_scratch memory((static_cast<size_t>(count) + 1) * sizeof(T));
    if (!memory.data) return false;
    T *windows = memory.as<T>();
    const T *from = ty_data_of<T>(x);
    if (count && !TY_LAUNCH(write_windows<T>, ty_cuda_blocks(count, TILE_THREADS), TILE_THREADS, 0, p, from, windows))
      return false;
    return run(p, windows, ty_data_of<T>(weight), ty_data_of<T>(bias), ty_data_of<T>(y));
  });
}
