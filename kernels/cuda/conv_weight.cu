/* The gradient of conv2d for its weight: products of g [o, positions] and the windows [positions, c * kh * kw] of the
 * image. The positions are many and the results few: they are cut into parts, whose sums are added up in order. */
#include "conv.cuh"
#include "conv_tile.cuh"

namespace {

struct weight_problem {
  conv_shape s;
  int64_t positions, part; /* of g, over all images; how many of them a block sums up */
  int64_t count;           /* of the weight: partial sums are that far apart */
  int width;               /* cg * kh * kw */
};

/* Blocks over the tiles of a group, parts, groups. */
template <class T, int TM, int TN>
__global__ void __launch_bounds__(TILE_THREADS) weight_tiles(const weight_problem p, const T *g, const T *x, T *sums) {
  typedef conv_tile<T, TM, TN> tile;
  enum { M = tile::M, N = tile::N, K = TILE_K, EACH = TILE_THREADS / K, LOADS_A = M / EACH, LOADS_B = N / EACH };
  TY_SHARED_DYNAMIC(T, shared);
  const conv_shape &s = p.s;
  const int tiles = (p.width + N - 1) / N, group = blockIdx.z;
  const int m0 = static_cast<int>(blockIdx.x) / tiles * M, n0 = static_cast<int>(blockIdx.x) % tiles * N;
  const int64_t begin = blockIdx.y * p.part, end = begin + p.part < p.positions ? begin + p.part : p.positions;
  const int area = s.oh * s.ow;
  const int64_t plane = int64_t{ s.h } * s.w;

  /* This thread loads at one depth, that is position, and walks on with it; its taps stay. */
  const int load_k = threadIdx.x % K, load_line = threadIdx.x / K;
  conv_place at = conv_place_of(begin + load_k, area, s.ow);
  int64_t channel[LOADS_B];
  int row[LOADS_B], column[LOADS_B];
#pragma unroll
  for (int i = 0; i < LOADS_B; i++) {
    int n = n0 + load_line + i * EACH, c = n / (s.kh * s.kw), tap = n - c * (s.kh * s.kw), a = tap / s.kw;
    channel[i] = n < p.width ? (group * s.cg + c) * plane : -1;
    row[i] = a * s.dilation[0] - s.padding[0];
    column[i] = (tap - a * s.kw) * s.dilation[1] - s.padding[1];
  }
  T a[LOADS_A], b[LOADS_B];
  auto load = [&](int64_t k) {
    const bool valid = k + load_k < end;
    const T *from_g = g + (at.image * s.o + group * s.og) * area + at.row * s.ow + at.column;
    const T *from_x = x + at.image * s.c * plane;
#pragma unroll
    for (int i = 0; i < LOADS_A; i++) {
      int m = m0 + load_line + i * EACH;
      a[i] = valid && m < s.og ? from_g[int64_t{ m } * area] : T(0);
    }
#pragma unroll
    for (int i = 0; i < LOADS_B; i++) {
      const int r = at.row * s.stride[0] + row[i], q = at.column * s.stride[1] + column[i];
      const bool inside = valid && channel[i] >= 0 && static_cast<uint32_t>(r) < static_cast<uint32_t>(s.h) &&
                          static_cast<uint32_t>(q) < static_cast<uint32_t>(s.w);
      b[i] = inside ? from_x[channel[i] + r * s.w + q] : T(0);
    }
    for (at.column += K; at.column >= s.ow;) {
      at.column -= s.ow;
      if (++at.row == s.oh) {
        at.row = 0;
        at.image++;
      }
    }
  };
  auto store = [&](int half) {
    ty_shared_ptr<T> to = shared + half * tile::SIZE;
#pragma unroll
    for (int i = 0; i < LOADS_A; i++) to[load_k * tile::ROW_A + load_line + i * EACH] = a[i];
#pragma unroll
    for (int i = 0; i < LOADS_B; i++) to[tile::B + load_k * tile::ROW_B + load_line + i * EACH] = b[i];
  };
  tile t;
  t.run(shared, s.og - m0, p.width - n0, begin, end, load, store);
  T *to = sums + blockIdx.y * p.count + group * s.og * p.width;
#pragma unroll
  for (int i = 0; i < TM; i++) {
    const int m = m0 + tile::row_of(threadIdx.x / 16, i);
#pragma unroll
    for (int j = 0; j < TN; j++) {
      const int n = n0 + tile::column_of(threadIdx.x % 16, j);
      if (m < s.og && n < p.width) to[int64_t{ m } * p.width + n] = t.sum[i][j];
    }
  }
}

/* Small groups: a block for some taps of one pair of channels; blocks over pairs and groups of taps, parts. */
enum { TAPS = 9 };

template <class T>
__global__ void __launch_bounds__(TILE_THREADS) weight_singly(const weight_problem p, const T *g, const T *x, T *sums) {
  TY_SHARED(T, room, TILE_THREADS / TY_WARP * TAPS);
  const conv_shape &s = p.s;
  const int taps = s.kh * s.kw, tap_groups = (taps + TAPS - 1) / TAPS, area = s.oh * s.ow;
  const int64_t plane = int64_t{ s.h } * s.w, pair = blockIdx.x / tap_groups, o = pair / s.cg, c = pair - o * s.cg;
  const int tap0 = static_cast<int>(blockIdx.x - pair * tap_groups) * TAPS;
  const int64_t begin = blockIdx.y * p.part, end = begin + p.part < p.positions ? begin + p.part : p.positions;
  g += o * area;
  x += (o / s.og * s.cg + c) * plane;
  T sum[TAPS];
#pragma unroll
  for (int i = 0; i < TAPS; i++) sum[i] = 0;
  for (int64_t k = begin + threadIdx.x; k < end; k += TILE_THREADS) {
    const conv_place at = conv_place_of(k, area, s.ow);
    const T slope = g[at.image * s.o * area + at.row * s.ow + at.column];
    const T *image = x + at.image * s.c * plane;
    int ta = tap0 / s.kw, tb = tap0 - ta * s.kw;
#pragma unroll
    for (int i = 0; i < TAPS; i++) {
      const int r = at.row * s.stride[0] - s.padding[0] + ta * s.dilation[0];
      const int q = at.column * s.stride[1] - s.padding[1] + tb * s.dilation[1];
      const bool inside = tap0 + i < taps && static_cast<uint32_t>(r) < static_cast<uint32_t>(s.h) &&
                          static_cast<uint32_t>(q) < static_cast<uint32_t>(s.w);
      if (inside) sum[i] += slope * image[r * s.w + q];
      if (++tb == s.kw) {
        tb = 0;
        ta++;
      }
    }
  }
  const int warp = threadIdx.x / TY_WARP;
#pragma unroll
  for (int i = 0; i < TAPS; i++) {
    if (tap0 + i >= taps) break;
    T all = ty_warp_reduce(sum[i], ty_plus<T>{});
    if (threadIdx.x % TY_WARP == 0) room[warp * TAPS + i] = all;
  }
  __syncthreads();
  const int i = threadIdx.x;
  if (i >= TAPS || tap0 + i >= taps) return;
  T all = 0;
  for (int w = 0; w < TILE_THREADS / TY_WARP; w++) all += room[w * TAPS + i];
  sums[blockIdx.y * p.count + pair * taps + tap0 + i] = all;
}

template <class T>
__global__ void __launch_bounds__(256) add_parts(const T *sums, int64_t parts, int64_t count, T *dw) {
  for (int64_t i = int64_t{ blockIdx.x } * 256 + threadIdx.x; i < count; i += int64_t{ gridDim.x } * 256) {
    T sum = sums[i];
    for (int64_t part = 1; part < parts; part++) sum += sums[part * count + i];
    dw[i] = sum;
  }
}

/* launch(problem, parts, where the sums go) with as many parts as keep the GPU busy that has `blocks` without. */
template <class T, class Launch> bool in_parts(weight_problem p, int64_t blocks, T *dw, const Launch &launch) {
  enum { LEAST = 512 }; /* positions of a part */
  int64_t parts = (int64_t{ ty_cuda_processors() } * 4 + blocks - 1) / blocks, most = (p.positions + LEAST - 1) / LEAST;
  if (parts > most) parts = most;
  p.part = (p.positions + parts - 1) / parts;
  p.part = (p.part + TILE_K - 1) / TILE_K * TILE_K;
  parts = (p.positions + p.part - 1) / p.part;
  if (parts == 1) return launch(p, 1u, dw);
  if (parts > 65535) return ty_fail(TY_EUNSUPPORTED, "so many parts of a sum are not supported on cuda");
  ty_cuda_scratch memory(static_cast<size_t>(parts * p.count) * sizeof(T));
  const T *sums = memory.as<T>();
  return memory.data && launch(p, static_cast<unsigned>(parts), memory.as<T>()) &&
         TY_LAUNCH(add_parts<T>, ty_cuda_blocks(p.count, 256), 256, 0, sums, parts, p.count, dw);
}

template <class T, int TM, int TN> bool run_tiles(const weight_problem &p, const T *g, const T *x, T *dw) {
  typedef conv_tile<T, TM, TN> tile;
  const int64_t tiles = (p.s.og + tile::M - 1) / tile::M * ((p.width + tile::N - 1) / tile::N);
  if (tiles > INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "so many channels are not supported on cuda");
  return in_parts(p, tiles * p.s.groups, dw, [&](const weight_problem &q, unsigned parts, T *sums) {
    const dim3 grid(static_cast<unsigned>(tiles), parts, static_cast<unsigned>(q.s.groups));
    return TY_LAUNCH((weight_tiles<T, TM, TN>), grid, TILE_THREADS, tile::BYTES, q, g, x, sums);
  });
}

template <class T> bool run_singly(const weight_problem &p, const T *g, const T *x, T *dw) {
  const int64_t blocks = p.s.o * p.s.cg * ((p.s.kh * p.s.kw + TAPS - 1) / TAPS);
  if (blocks > INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "so many channels are not supported on cuda");
  return in_parts(p, blocks, dw, [&](const weight_problem &q, unsigned parts, T *sums) {
    const dim3 grid(static_cast<unsigned>(blocks), parts);
    return TY_LAUNCH(weight_singly<T>, grid, TILE_THREADS, 0, q, g, x, sums);
  });
}

bool run(const weight_problem &p, const float *g, const float *x, float *dw) {
  if (p.s.og <= 64 || p.width <= 64) return run_tiles<float, 4, 4>(p, g, x, dw);
  return run_tiles<float, 8, 8>(p, g, x, dw);
}
bool run(const weight_problem &p, const double *g, const double *x, double *dw) {
  return run_tiles<double, 4, 4>(p, g, x, dw);
}

} // namespace

bool ty_conv_backward_weight(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *x = k->in[1], *dw = k->out[0];
  weight_problem p;
  if (!conv_shape_of(x, dw, g, static_cast<const ty_p_conv *>(k->params), &p.s)) return false;
  if (dw->count == 0) return true;
  p.positions = p.s.n * p.s.oh * p.s.ow;
  p.part = p.positions;
  p.count = dw->count;
  p.width = static_cast<int>(p.s.cg * p.s.kh * p.s.kw);
  if (p.positions == 0) return ty_cuda_zero(dw->data, static_cast<size_t>(dw->count) * ty_dtype_size[dw->dtype]);
  return ty_for_reals(dw->dtype, "conv2d_backward_weight", [&](auto type) {
    typedef decltype(type) T;
    const T *from_g = static_cast<const T *>(g->data), *from_x = static_cast<const T *>(x->data);
    T *to = static_cast<T *>(dw->data);
    if (p.s.groups > 1 && (p.s.og < 8 || p.s.groups > 65535)) return run_singly(p, from_g, from_x, to);
    return run(p, from_g, from_x, to);
  });
}
