/* Multi-resolution hash grids (kernels/hash_grid.h), with a small network behind them, and their gradients. Encoding, a
 * thread takes a level of a point. In networks a block takes POINTS of them at a time, a lane each: their features and
 * units stand in shared memory as lines, next to each other, and nothing is kept for the backward pass. Gradients of
 * weights are sums over parts of the points, whose number depends on n alone, in their order; the table's is made of
 * ops that sort (src/ops/hash_grid.c). */
#include "../hash_grid.h"

#include "cuda.cuh"

namespace {

enum {
  POINTS = TY_WARP,
  LINE = POINTS + 1, /* elements from one line to the next: neighbouring lines begin in different banks */
  WARPS = 4,
  THREADS = WARPS * POINTS,
  UNITS = 4, /* that a thread sums at once */
  LEAST_PART = 4 * POINTS,
  MOST_PARTS = 512,
  MOST_SHARED = 96 << 10
};

template <class T> struct job {
  const T *x, *table, *g, *first, *last, *hidden;
  T *to, *sums; /* sums: of each part, as first, hidden and last lie */
  int32_t *row;
  int64_t n, part, size;
  int dims, levels, features, all; /* features: of a level, and of all */
  int width, layers, out;
  ty_hash_level level[TY_HASH_LEVELS];
};

template <class T> job<T> job_of(const ty_kernel_args *k, const ty_view *x, int64_t all) {
  const ty_p_hash_grid *p = static_cast<const ty_p_hash_grid *>(k->params);
  job<T> j = {};
  j.x = ty_data_of<T>(x);
  j.n = x->size[0];
  j.dims = p->dims;
  j.levels = p->levels;
  j.all = static_cast<int>(all);
  j.features = j.all / p->levels;
  for (int l = 0; l < p->levels; l++) j.level[l] = ty_hash_level_of(p, l);
  return j;
}

TY_DEVICE float place(float x, int32_t resolution, int32_t *cell) { return ty_hash_place_f32(x, resolution, cell); }
TY_DEVICE double place(double x, int32_t resolution, int32_t *cell) { return ty_hash_place_f64(x, resolution, cell); }

template <class T> struct cell {
  int32_t at[TY_HASH_DIMS];
  T far[TY_HASH_DIMS];
  TY_DEVICE_MEMBER cell(const job<T> &j, int64_t point, int level) {
    for (int d = 0; d < j.dims; d++) far[d] = place(j.x[point * j.dims + d], j.level[level].resolution, at + d);
  }
  TY_DEVICE_MEMBER int64_t row(const job<T> &j, int level, int k) const {
    return j.level[level].first + ty_hash_row(&j.level[level], j.dims, at, k);
  }
  /* Of corner k, but for dimension `without`. */
  TY_DEVICE_MEMBER T weight(const job<T> &j, int k, int without) const {
    T w = 1;
    for (int d = 0; d < j.dims; d++)
      if (d != without) w *= k >> d & 1 ? far[d] : 1 - far[d];
    return w;
  }
};

template <class T> TY_DEVICE T feature(const job<T> &j, const cell<T> &c, int level, int f) {
  T sum = 0;
  for (int k = 0; k < 1 << j.dims; k++) sum += c.weight(j, k, -1) * j.table[c.row(j, level, k) * j.features + f];
  return sum;
}

/* ---- the grid ---- */

template <class T> __global__ void __launch_bounds__(THREADS) encode(const job<T> j) {
  const int64_t count = j.n * j.levels;
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS) {
    const int level = static_cast<int>(i % j.levels);
    const cell<T> c(j, i / j.levels, level);
    for (int f = 0; f < j.features; f++) j.to[i * j.features + f] = feature(j, c, level, f);
  }
}

template <class T> __global__ void __launch_bounds__(THREADS) corners(const job<T> j) {
  const int64_t count = j.n * j.levels;
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS) {
    const int level = static_cast<int>(i % j.levels);
    const cell<T> c(j, i / j.levels, level);
    for (int k = 0; k < 1 << j.dims; k++) {
      j.row[(i << j.dims) + k] = static_cast<int32_t>(c.row(j, level, k));
      j.to[(i << j.dims) + k] = c.weight(j, k, -1);
    }
  }
}

template <class T> __global__ void __launch_bounds__(THREADS) slopes(const job<T> j) {
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < j.n; i += int64_t{ gridDim.x } * THREADS) {
    T by[TY_HASH_DIMS] = { 0, 0, 0 };
    for (int level = 0; level < j.levels; level++) {
      const cell<T> c(j, i, level);
      const T *g = j.g + i * j.all + level * j.features;
      for (int k = 0; k < 1 << j.dims; k++) {
        const T *row = j.table + c.row(j, level, k) * j.features;
        T value = 0;
        for (int f = 0; f < j.features; f++) value += g[f] * row[f];
        value *= static_cast<T>(j.level[level].resolution);
        for (int d = 0; d < j.dims; d++) by[d] += (k >> d & 1 ? value : -value) * c.weight(j, k, d);
      }
    }
    for (int d = 0; d < j.dims; d++) {
      const T x = j.x[i * j.dims + d];
      j.to[i * j.dims + d] = x >= 0 && x <= 1 ? by[d] : T(0);
    }
  }
}

/* ---- the network: places in shared memory are counted in elements ---- */

template <class T> TY_DEVICE void encode_points(const job<T> &j, int64_t begin, ty_shared_ptr<T> room, int to) {
  const int lane = threadIdx.x % POINTS;
  const int64_t point = begin + lane;
  for (int level = threadIdx.x / POINTS; level < j.levels; level += WARPS) {
    if (point < j.n) {
      const cell<T> c(j, point, level);
      for (int f = 0; f < j.features; f++) room[to + (level * j.features + f) * LINE + lane] = feature(j, c, level, f);
    } else {
      for (int f = 0; f < j.features; f++) room[to + (level * j.features + f) * LINE + lane] = 0;
    }
  }
  __syncthreads();
}

enum finish { STORED, RECTIFIED, GATED };

/* Lines of a layer's results: element (o, i) of its weights lies o * row + i * column behind w. GATED: what is not above
 * 0 at `gate` becomes 0. */
template <class T>
TY_DEVICE void multiply(ty_shared_ptr<T> room, const T *w, int row, int column, int in, int from, int out, int to,
                        finish how, int gate) {
  const int lane = threadIdx.x % POINTS;
  for (int o = threadIdx.x / POINTS * UNITS; o < out; o += WARPS * UNITS) {
    T sum[UNITS] = {};
    int at[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) at[u] = (o + u < out ? o + u : out - 1) * row;
    for (int i = 0; i < in; i++) {
      const T x = room[from + i * LINE + lane];
#pragma unroll
      for (int u = 0; u < UNITS; u++) sum[u] += w[at[u] + i * column] * x;
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      if (o + u >= out) continue;
      const int place = (o + u) * LINE + lane;
      if (how == RECTIFIED && sum[u] < 0) sum[u] = 0;
      if (how == GATED && !(T(room[gate + place]) > 0)) sum[u] = 0;
      room[to + place] = sum[u];
    }
  }
  __syncthreads();
}

template <class T> TY_DEVICE const T *weights_of(const job<T> &j, int layer) {
  return layer == 0 ? j.first : j.hidden + static_cast<int64_t>(layer - 1) * j.width * j.width;
}

template <class T> TY_DEVICE void to_rows(const job<T> &j, ty_shared_ptr<T> room, int from, int64_t begin, int rows) {
  for (int i = threadIdx.x; i < rows * POINTS; i += THREADS) {
    const int64_t point = begin + i / rows;
    if (point < j.n) j.to[point * rows + i % rows] = room[from + i % rows * LINE + i / rows];
  }
  __syncthreads();
}

template <class T> int widest(const job<T> &j) { return j.all > j.width ? j.all : j.width; }

/* Two places for lines, and those of the results. */
template <class T> __global__ void __launch_bounds__(THREADS) field(const job<T> j, int lines) {
  TY_SHARED_DYNAMIC(T, room);
  const int place[2] = { 0, lines * LINE }, last = 2 * lines * LINE;
  for (int64_t begin = blockIdx.x * int64_t{ POINTS }; begin < j.n; begin += int64_t{ gridDim.x } * POINTS) {
    encode_points(j, begin, room, place[0]);
    for (int l = 0; l <= j.layers; l++) {
      const int in = l ? j.width : j.all;
      multiply(room, weights_of(j, l), in, 1, in, place[l % 2], j.width, place[1 - l % 2], RECTIFIED, 0);
    }
    multiply(room, j.last, j.width, 1, j.width, place[1 - j.layers % 2], j.out, last, STORED, 0);
    to_rows(j, room, last, begin, j.out);
  }
}

/* sums[o][i] += the points' g[o] h[i]; each element belongs to one thread. */
template <class T>
TY_DEVICE void add_weights(ty_shared_ptr<T> room, int g, int out, int h, int in, T *sums, bool begins) {
  for (int e = threadIdx.x; e < out * in; e += THREADS) {
    const int o = e / in, i = e - o * in;
    T sum = begins ? T(0) : sums[e];
    for (int p = 0; p < POINTS; p++) sum += T(room[g + o * LINE + p]) * T(room[h + i * LINE + p]);
    sums[e] = sum;
  }
}

template <class T> __global__ void __launch_bounds__(THREADS) field_back(const job<T> j, int lines) {
  TY_SHARED_DYNAMIC(T, room);
  const int units = j.width * LINE, features = 0, h = j.all * LINE, dy = h + (j.layers + 1) * units;
  const int gradient[2] = { dy + j.out * LINE, dy + j.out * LINE + lines * LINE };
  const int square = j.width * j.width;
  T *sums = j.sums + blockIdx.x * j.size, *hidden = sums + j.width * j.all, *last = hidden + j.layers * square;
  const int64_t start = blockIdx.x * j.part, stop = start + j.part < j.n ? start + j.part : j.n;
  for (int64_t begin = start; begin < stop; begin += POINTS) {
    const bool begins = begin == start;
    encode_points(j, begin, room, features);
    for (int l = 0; l <= j.layers; l++) {
      const int in = l ? j.width : j.all;
      multiply(room, weights_of(j, l), in, 1, in, l ? h + (l - 1) * units : features, j.width, h + l * units, RECTIFIED,
               0);
    }
    for (int i = threadIdx.x; i < j.out * POINTS; i += THREADS) {
      const int64_t point = begin + i / j.out;
      room[dy + i % j.out * LINE + i / j.out] = point < j.n ? j.g[point * j.out + i % j.out] : T(0);
    }
    __syncthreads();
    add_weights(room, dy, j.out, h + j.layers * units, j.width, last, begins);
    multiply(room, j.last, 1, j.width, j.out, dy, j.width, gradient[0], GATED, h + j.layers * units);
    int at = 0;
    for (int l = j.layers; l > 0; l--, at = 1 - at) {
      add_weights(room, gradient[at], j.width, h + (l - 1) * units, j.width, hidden + (l - 1) * square, begins);
      multiply(room, weights_of(j, l), 1, j.width, j.width, gradient[at], j.width, gradient[1 - at], GATED,
               h + (l - 1) * units);
    }
    add_weights(room, gradient[at], j.width, features, j.all, sums, begins);
    multiply(room, j.first, 1, j.all, j.width, gradient[at], j.all, gradient[1 - at], STORED, 0);
    to_rows(j, room, gradient[1 - at], begin, j.all);
  }
}

/* Element i of first, hidden and last, one behind the other. */
template <class T>
__global__ void __launch_bounds__(THREADS) add_parts(const T *sums, int64_t parts, int64_t size, T *first,
                                                     int64_t firsts, T *hidden, int64_t hiddens, T *last) {
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < size; i += int64_t{ gridDim.x } * THREADS) {
    T sum = 0;
    for (int64_t part = 0; part < parts; part++) sum += sums[part * size + i];
    if (i < firsts) first[i] = sum;
    else if (i < firsts + hiddens) hidden[i - firsts] = sum;
    else last[i - firsts - hiddens] = sum;
  }
}

template <class T> bool take_network(job<T> *j, const ty_view *first, const ty_view *last, const ty_view *hidden) {
  j->first = ty_data_of<T>(first);
  j->last = ty_data_of<T>(last);
  j->hidden = ty_data_of<T>(hidden);
  if (first->size[0] > 4096 || last->size[0] > 4096)
    return ty_fail(TY_EUNSUPPORTED, "hash_field: more than 4096 units are not supported on cuda");
  j->width = static_cast<int>(first->size[0]);
  j->out = static_cast<int>(last->size[0]);
  if (hidden && hidden->size[0] > 64)
    return ty_fail(TY_EUNSUPPORTED, "hash_field: more than 64 layers are not supported on cuda");
  j->layers = hidden ? static_cast<int>(hidden->size[0]) : 0;
  return true;
}

bool fits(size_t bytes) {
  return bytes <= MOST_SHARED ||
         ty_fail(TY_EUNSUPPORTED, "hash_field: a network of this size does not fit into the %d KiB of a block on cuda",
                 MOST_SHARED >> 10);
}

} // namespace

/* in: x, table; out: features. */
TY_CUDA_KERNEL(hash_grid) {
  if (k->out[0]->count == 0) return true;
  return ty_for_reals(k->out[0]->dtype, "hash_grid", [&](auto type) {
    typedef decltype(type) T;
    job<T> j = job_of<T>(k, k->in[0], k->out[0]->size[1]);
    j.table = ty_data_of<T>(k->in[1]);
    j.to = ty_data_of<T>(k->out[0]);
    return TY_LAUNCH(encode<T>, ty_cuda_blocks(j.n * j.levels, THREADS), THREADS, 0, j);
  });
}

/* in: g, x, table; out: the gradient of x. */
TY_CUDA_KERNEL(hash_grid_backward_input) {
  if (k->out[0]->count == 0) return true;
  return ty_for_reals(k->out[0]->dtype, "hash_grid_backward_input", [&](auto type) {
    typedef decltype(type) T;
    job<T> j = job_of<T>(k, k->in[1], k->in[0]->size[1]);
    j.g = ty_data_of<T>(k->in[0]);
    j.table = ty_data_of<T>(k->in[2]);
    j.to = ty_data_of<T>(k->out[0]);
    return TY_LAUNCH(slopes<T>, ty_cuda_blocks(j.n, THREADS), THREADS, 0, j);
  });
}

/* in: x; out: rows, weights. */
TY_CUDA_KERNEL(hash_corners) {
  if (k->out[0]->count == 0) return true;
  return ty_for_reals(k->out[1]->dtype, "hash_corners", [&](auto type) {
    typedef decltype(type) T;
    job<T> j = job_of<T>(k, k->in[0], static_cast<const ty_p_hash_grid *>(k->params)->levels);
    j.row = ty_data_of<int32_t>(k->out[0]);
    j.to = ty_data_of<T>(k->out[1]);
    return TY_LAUNCH(corners<T>, ty_cuda_blocks(j.n * j.levels, THREADS), THREADS, 0, j);
  });
}

/* in: x, table, first, last, hidden or NULL; out: y. */
TY_CUDA_KERNEL(hash_field) {
  if (k->out[0]->count == 0) return true;
  return ty_for_reals(k->out[0]->dtype, "hash_field", [&](auto type) {
    typedef decltype(type) T;
    job<T> j = job_of<T>(k, k->in[0], k->in[2]->size[1]);
    if (!take_network(&j, k->in[2], k->in[3], k->in[4])) return false;
    j.table = ty_data_of<T>(k->in[1]);
    j.to = ty_data_of<T>(k->out[0]);
    const int lines = widest(j);
    const size_t bytes = static_cast<size_t>(2 * lines + j.out) * LINE * sizeof(T);
    return fits(bytes) && TY_LAUNCH(field<T>, ty_cuda_blocks(j.n, POINTS), THREADS, bytes, j, lines);
  });
}

/* in: g, then as above; out: gradients of the features, first, last and hidden; the table is never asked for. */
TY_CUDA_KERNEL(hash_field_backward) {
  return ty_for_reals(k->out[0]->dtype, "hash_field_backward", [&](auto type) {
    typedef decltype(type) T;
    job<T> j = job_of<T>(k, k->in[1], k->in[3]->size[1]);
    if (!take_network(&j, k->in[3], k->in[4], k->in[5])) return false;
    j.g = ty_data_of<T>(k->in[0]);
    j.table = ty_data_of<T>(k->in[2]);
    j.to = ty_data_of<T>(k->out[0]);
    const int64_t firsts = k->out[1]->count, hiddens = k->out[3]->count, size = firsts + hiddens + k->out[2]->count;
    const int64_t each = (j.n + MOST_PARTS - 1) / MOST_PARTS, whole = (each + POINTS - 1) / POINTS * POINTS;
    j.part = whole > LEAST_PART ? whole : int64_t{ LEAST_PART };
    j.size = size;
    const int64_t parts = (j.n + j.part - 1) / j.part;
    const int lines = widest(j);
    const size_t bytes = static_cast<size_t>(j.all + (j.layers + 1) * j.width + j.out + 2 * lines) * LINE * sizeof(T);
    ty_cuda_scratch memory((static_cast<size_t>(parts * size) + 1) * sizeof(T));
    if (!memory.data || !fits(bytes)) return false;
    j.sums = memory.as<T>();
    if (parts && !TY_LAUNCH(field_back<T>, static_cast<unsigned>(parts), THREADS, bytes, j, lines)) return false;
    T *first = ty_data_of<T>(k->out[1]), *last = ty_data_of<T>(k->out[2]), *hidden = ty_data_of<T>(k->out[3]);
    const T *sums = j.sums;
    return TY_LAUNCH(add_parts<T>, ty_cuda_blocks(size, THREADS), THREADS, 0, sums, parts, size, first, firsts, hidden,
                     hiddens, last);
  });
}
