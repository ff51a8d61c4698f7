/* conv2d and the gradient of its input: a matrix product whose second matrix, all windows of the image, is read from
 * the image tile by tile; and sums by single threads where there are too few channels for tiles. The weight's gradient
 * is in conv_weight.cu, the entries in conv_library.cu. */
#include "activation.cuh"
#include "conv.cuh"
#include "conv_tile.cuh"

namespace {

template <class T> struct conv_data {
  const T *x, *weight, *bias, *residual; /* the last two, or NULL */
  T *y;
};

/* Where a position of the part of y that is computed lies in it. */
TY_DEVICE conv_place place_of(const conv_problem &p, int64_t at) {
  return conv_place_of(at, p.rows.out * p.columns.out, p.columns.out);
}

/* Offset in y of a place in channel 0 of the group 0. */
TY_DEVICE int64_t offset_in_y(const conv_problem &p, const conv_place &at) {
  int64_t area = int64_t{ p.rows.y_size } * p.columns.y_size;
  return at.image * p.groups * p.rows_of_weight * area +
         int64_t{ at.row * p.rows.y_stride + p.rows.y_start } * p.columns.y_size + at.column * p.columns.y_stride +
         p.columns.y_start;
}

template <class T> TY_DEVICE void finish(const conv_problem &p, const conv_data<T> &d, int channel, int64_t at, T sum) {
  if (d.bias) sum += d.bias[channel];
  if (d.residual) sum += d.residual[at];
  d.y[at] = ty_activate(p.activation, sum);
}

/* 16 x 16 threads, each with TM x TN results; blocks over positions, channels of y, groups. */
template <class T, int TM, int TN>
__global__ void __launch_bounds__(TILE_THREADS) conv_tiles(const conv_problem p, const conv_data<T> d) {
  typedef conv_tile<T, TM, TN> tile;
  enum { M = tile::M, N = tile::N, K = TILE_K, LOADS_A = M * K / TILE_THREADS, LOADS_B = N * K / TILE_THREADS };
  TY_SHARED_DYNAMIC(T, shared);
  const int64_t positions = p.images * p.rows.out * p.columns.out;
  const int m0 = blockIdx.y * M, group = blockIdx.z, depth = p.channels * p.rows.taps * p.columns.taps;
  const int64_t n0 = int64_t{ blockIdx.x } * N;

  /* This thread loads one column of the windows' tile, and the weights at one depth. */
  const int column = threadIdx.x % N, column_k = threadIdx.x / N, weight_k = threadIdx.x % K,
            weight_m = threadIdx.x / K;
  const int64_t plane = int64_t{ p.rows.in } * p.columns.in;
  const bool inside = n0 + column < positions;
  const conv_place at = place_of(p, inside ? n0 + column : 0);
  const int row0 = at.row * p.rows.stride + p.rows.start, column0 = at.column * p.columns.stride + p.columns.start;
  const T *x = d.x + (at.image * p.groups + group) * p.channels * plane;
  const T *weight = d.weight + group * p.weight_group + p.weight_start;

  T a[LOADS_A], b[LOADS_B];
  auto load = [&](int k0) {
    const uint32_t k = static_cast<uint32_t>(k0 + weight_k), c = ew_divide(k, p.taps), tap = k - c * p.taps.d;
    const uint32_t ta = ew_divide(tap, p.tap_columns), tb = tap - ta * p.tap_columns.d;
    const T *from = weight + c * p.weight_c + ta * p.weight_a + tb * p.weight_b;
#pragma unroll
    for (int i = 0; i < LOADS_A; i++) {
      int m = m0 + weight_m + i * (TILE_THREADS / K);
      a[i] = k0 + weight_k < depth && m < p.rows_of_weight ? from[m * p.weight_m] : T(0);
    }
#pragma unroll
    for (int i = 0; i < LOADS_B; i++) {
      const int q = k0 + column_k + i * (TILE_THREADS / N);
      const uint32_t qc = ew_divide(static_cast<uint32_t>(q), p.taps), qt = q - qc * p.taps.d;
      const uint32_t qa = ew_divide(qt, p.tap_columns), qb = qt - qa * p.tap_columns.d;
      const int r = row0 + static_cast<int>(qa) * p.rows.step, s = column0 + static_cast<int>(qb) * p.columns.step;
      const bool valid = inside && q < depth && static_cast<uint32_t>(r) < static_cast<uint32_t>(p.rows.in) &&
                         static_cast<uint32_t>(s) < static_cast<uint32_t>(p.columns.in);
      b[i] = valid ? x[qc * plane + r * p.columns.in + s] : T(0);
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
  t.run(shared, p.rows_of_weight - m0, positions - n0, 0, depth, load, store);

  /* One row of results at a time: the loop stays a loop, and the activations are there once. */
  int64_t to[TN];
#pragma unroll
  for (int j = 0; j < TN; j++) {
    int64_t n = n0 + tile::column_of(threadIdx.x % 16, j);
    to[j] = n < positions ? offset_in_y(p, place_of(p, n)) : -1;
  }
  const int64_t area = int64_t{ p.rows.y_size } * p.columns.y_size;
#pragma unroll 1
  for (int i = 0; i < TM; i++) {
    const int m = m0 + tile::row_of(threadIdx.x / 16, i), channel = group * p.rows_of_weight + m;
#pragma unroll 1
    for (int j = 0; j < TN; j++) {
      if (m < p.rows_of_weight && to[0] >= 0) finish(p, d, channel, to[0] + channel * area, t.sum[0][0]);
      t.turn_row();
      const int64_t first = to[0];
#pragma unroll
      for (int q = 1; q < TN; q++) to[q - 1] = to[q];
      to[TN - 1] = first;
    }
    t.next_row();
  }
}

/* A thread for each result. */
template <class T>
__global__ void __launch_bounds__(TILE_THREADS) conv_singly(const conv_problem p, const conv_data<T> d) {
  const int64_t area = int64_t{ p.rows.out } * p.columns.out, y_area = int64_t{ p.rows.y_size } * p.columns.y_size;
  const int64_t channels = int64_t{ p.groups } * p.rows_of_weight, planes = p.images * channels;
  const int64_t plane = int64_t{ p.rows.in } * p.columns.in;
  const int64_t chunks = (area + TILE_THREADS - 1) / TILE_THREADS;
  for (int64_t block = blockIdx.x; block < planes * chunks; block += gridDim.x) {
    const int64_t y_plane = block / chunks, image = y_plane / channels;
    const int channel = static_cast<int>(y_plane - image * channels), group = channel / p.rows_of_weight;
    const int i = static_cast<int>((block - y_plane * chunks) * TILE_THREADS + threadIdx.x);
    if (i >= area) continue;
    const int row = i / p.columns.out, column = i - row * p.columns.out;
    const int row0 = row * p.rows.stride + p.rows.start, column0 = column * p.columns.stride + p.columns.start;
    const T *weight = d.weight + group * p.weight_group + p.weight_start +
                      (channel - group * p.rows_of_weight) * p.weight_m;
    const T *x = d.x + (image * p.groups + group) * p.channels * plane;
    T sum = 0;
    for (int c = 0; c < p.channels; c++, x += plane, weight += p.weight_c)
      for (int a = 0; a < p.rows.taps; a++) {
        const int r = row0 + a * p.rows.step;
        if (static_cast<uint32_t>(r) >= static_cast<uint32_t>(p.rows.in)) continue;
        const T *line = x + int64_t{ r } * p.columns.in, *taps = weight + a * p.weight_a;
        for (int b = 0; b < p.columns.taps; b++) {
          const int s = column0 + b * p.columns.step;
          if (static_cast<uint32_t>(s) < static_cast<uint32_t>(p.columns.in)) sum += line[s] * taps[b * p.weight_b];
        }
      }
    const int64_t at = y_plane * y_area + int64_t{ row * p.rows.y_stride + p.rows.y_start } * p.columns.y_size +
                       column * p.columns.y_stride + p.columns.y_start;
    finish(p, d, channel, at, sum);
  }
}

template <class T, int TM, int TN> bool launch_tiles(const conv_problem &p, const conv_data<T> &d) {
  typedef conv_tile<T, TM, TN> tile;
  const int64_t positions = p.images * p.rows.out * p.columns.out, columns = (positions + tile::N - 1) / tile::N;
  const int64_t rows = (p.rows_of_weight + tile::M - 1) / tile::M;
  if (columns > INT32_MAX || rows > 65535)
    return ty_fail(TY_EUNSUPPORTED, "a convolution of so many channels or positions is not supported on cuda");
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(rows), static_cast<unsigned>(p.groups));
  return TY_LAUNCH((conv_tiles<T, TM, TN>), grid, TILE_THREADS, tile::BYTES, p, d);
}

int64_t tiles_of(const conv_problem &p, int m, int n) {
  return (p.images * p.rows.out * p.columns.out + n - 1) / n * ((p.rows_of_weight + m - 1) / m) * p.groups;
}

/* Large tiles where there are enough of them, low ones for few channels. */
bool launch(const conv_problem &p, const conv_data<float> &d) {
  if (p.rows_of_weight <= 32) return launch_tiles<float, 2, 8>(p, d);
  if (p.rows_of_weight <= 64 || tiles_of(p, 128, 128) < ty_cuda_processors()) return launch_tiles<float, 4, 4>(p, d);
  return launch_tiles<float, 8, 8>(p, d);
}
bool launch(const conv_problem &p, const conv_data<double> &d) { return launch_tiles<double, 4, 4>(p, d); }

template <class T> bool compute(const conv_problem &p, const conv_data<T> &d) {
  int64_t area = int64_t{ p.rows.out } * p.columns.out;
  if (area == 0) return true;
  if (p.rows_of_weight < 8 || p.groups > 65535) { /* most of a tile would be empty */
    int64_t blocks = p.images * p.groups * p.rows_of_weight * ((area + TILE_THREADS - 1) / TILE_THREADS);
    return TY_LAUNCH(conv_singly<T>, ty_cuda_blocks(blocks, 1), TILE_THREADS, 0, p, d);
  }
  return launch(p, d);
}

} // namespace

bool ty_conv_forward(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *weight = k->in[1], *y = k->out[0];
  const ty_view *bias = k->nin > 2 ? k->in[2] : nullptr, *residual = k->nin > 3 ? k->in[3] : nullptr;
  const ty_p_conv *options = static_cast<const ty_p_conv *>(k->params);
  conv_shape s;
  if (!conv_shape_of(x, weight, y, options, &s)) return false;
  if (y->count == 0) return true;
  conv_problem p;
  p.rows = { s.h, s.kh, s.oh, s.stride[0], -s.padding[0], s.dilation[0], 1, 0, s.oh };
  p.columns = { s.w, s.kw, s.ow, s.stride[1], -s.padding[1], s.dilation[1], 1, 0, s.ow };
  p.channels = static_cast<int>(s.cg);
  p.rows_of_weight = static_cast<int>(s.og);
  p.groups = static_cast<int>(s.groups);
  p.images = s.n;
  p.weight_b = 1;
  p.weight_a = s.kw;
  p.weight_c = int64_t{ s.kh } * s.kw;
  p.weight_m = s.cg * p.weight_c;
  p.weight_group = s.og * p.weight_m;
  p.weight_start = 0;
  p.activation = options->activation;
  conv_ready(&p);
  return ty_for_reals(y->dtype, "conv2d", [&](auto type) {
    typedef decltype(type) T;
    const conv_data<T> d = { static_cast<const T *>(x->data), static_cast<const T *>(weight->data),
                             static_cast<const T *>(bias ? bias->data : nullptr),
                             static_cast<const T *>(residual ? residual->data : nullptr), static_cast<T *>(y->data) };
    return compute(p, d);
  });
}

namespace {

/* The positions i * stride + place of the input, along one dimension: the taps that hit them are first, first + apart
 * ...; tap t of those sees g at i + start - t * step. */
struct phase {
  conv_side side;
  int first, apart;
};

phase phase_of(const conv_shape &s, int d, int place) {
  const int in = d ? s.w : s.h, out = d ? s.ow : s.oh, taps = d ? s.kw : s.kh, stride = s.stride[d];
  int common = stride, rest = s.dilation[d];
  while (rest) {
    int next = common % rest;
    common = rest;
    rest = next;
  }
  phase f;
  f.apart = stride / common;
  for (f.first = 0; f.first < f.apart && f.first < taps; f.first++)
    if ((place + s.padding[d] - int64_t{ f.first } * s.dilation[d]) % stride == 0) break;
  const bool any = f.first < f.apart && f.first < taps;
  f.side.in = out;
  f.side.taps = any ? (taps - f.first + f.apart - 1) / f.apart : 0;
  f.side.out = (in - place + stride - 1) / stride;
  f.side.stride = 1;
  f.side.start = any ? static_cast<int>((place + s.padding[d] - int64_t{ f.first } * s.dilation[d]) / stride) : 0;
  f.side.step = -(s.dilation[d] / common);
  f.side.y_stride = stride;
  f.side.y_start = place;
  f.side.y_size = in;
  return f;
}

} // namespace

bool ty_conv_backward_input(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *weight = k->in[1], *dx = k->out[0];
  conv_shape s;
  if (!conv_shape_of(dx, weight, g, static_cast<const ty_p_conv *>(k->params), &s)) return false;
  if (dx->count == 0) return true;
  return ty_for_reals(dx->dtype, "conv2d_backward_input", [&](auto type) {
    typedef decltype(type) T;
    const conv_data<T> d = { static_cast<const T *>(g->data), static_cast<const T *>(weight->data), nullptr, nullptr,
                             static_cast<T *>(dx->data) };
    for (int i = 0; i < s.stride[0] && i < s.h; i++)
      for (int j = 0; j < s.stride[1] && j < s.w; j++) {
        phase rows = phase_of(s, 0, i), columns = phase_of(s, 1, j);
        conv_problem p;
        p.rows = rows.side;
        p.columns = columns.side;
        p.channels = static_cast<int>(s.og);
        p.rows_of_weight = static_cast<int>(s.cg);
        p.groups = static_cast<int>(s.groups);
        p.images = s.n;
        p.weight_b = columns.apart;
        p.weight_a = int64_t{ rows.apart } * s.kw;
        p.weight_m = int64_t{ s.kh } * s.kw;
        p.weight_c = s.cg * p.weight_m;
        p.weight_group = s.og * p.weight_c;
        p.weight_start = int64_t{ rows.first } * s.kw + columns.first;
        p.activation = TY_NO_ACTIVATION;
        conv_ready(&p);
        if (!compute(p, d)) return false;
      }
    return true;
  });
}
