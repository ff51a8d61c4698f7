/* Norms of rows: mean and deviation of each row, the row normalised, and the gradients. A warp or a block keeps a row
 * in registers; rows that do not fit are read again. With h = (x - mean) rstd and w g the gradient of h:
 * dx = rstd (w g - average(w g) - h average(w g h)) (Ioffe and Szegedy 2015); without the middle term for rms norm.
 * Weight gradients are summed by every block over its rows, then over the blocks in order. */
#ifndef TY_KERNELS_CUDA_NORM_ROWS_CUH
#define TY_KERNELS_CUDA_NORM_ROWS_CUH

#include <initializer_list>

#include "cuda.cuh"

enum {
  NORM_WARPS = 8,   /* of a block where each has a row */
  NORM_WIDEST = 512 /* threads of a block that has one */
};
static constexpr int norm_most_threads(bool block) { return block ? int{ NORM_WIDEST } : NORM_WARPS * TY_WARP; }

/* So many packs of V elements in a thread's registers; of halves a pack is twice as long. */
template <int V> constexpr int norm_packs_of(int packs) { return V > 4 ? packs * 4 / V : packs; }

/* Rows of T. Parameters and statistics are of what these are computed with. */
template <class T> struct norm_rows {
  typedef ty_compute<T> C;
  const C *weight, *bias;
  T *y;
  C *mean, *rstd; /* mean: NULL for rms norm */
  int64_t rows, width;
  double eps;
  bool centred;
};

/* 1 / sqrt(x): a row's work beside its memory is little, and in double it would not be. */
TY_DEVICE float norm_rstd(float x) { return 1 / sqrtf(x); }
TY_DEVICE double norm_rstd(double x) { return 1 / sqrt(x); }

/* The sum over the threads that have a row: of the block, or of the warp. */
template <bool BLOCK> TY_DEVICE double norm_sum(double x, ty_shared_ptr<double> room) {
  if constexpr (BLOCK) return ty_block_reduce(x, ty_plus<double>{}, room);
  else return ty_warp_reduce(x, ty_plus<double>{});
}

/* fn(column, values) for a thread's elements of a row: in registers, or (ITEMS is 0) what read(column, values)
 * gives. */
template <int V, int ITEMS, class C, class Read, class Fn>
TY_DEVICE void norm_each(C (*x)[V], int64_t n, int first, int step, const Read &read, const Fn &fn) {
  if constexpr (ITEMS > 0) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int64_t c = first + i * step;
      if (c < n) fn(c, x[i]);
    }
  } else {
    for (int64_t c = first; c < n; c += step) {
      read(c, x[0]);
      fn(c, x[0]);
    }
  }
}

/* share: 1 / width. source.first<V>(at, v) gives elements of x, source.again<V>(at, v) the same later. */
template <class T, int V, int ITEMS, bool BLOCK, class Source>
__global__ void __launch_bounds__(norm_most_threads(BLOCK), 1)
    norm_rows_forward(const norm_rows<T> job, const Source source, double share) {
  typedef ty_compute<T> C;
  TY_SHARED(double, room, TY_WARP);
  const int team = BLOCK ? static_cast<int>(blockDim.x) : int{ TY_WARP }, lane = threadIdx.x % team,
            teams = blockDim.x / team;
  const int first = lane * V, step = team * V;
  const int64_t n = job.width;
  for (int64_t row = int64_t{ blockIdx.x } * teams + threadIdx.x / team; row < job.rows;
       row += int64_t{ gridDim.x } * teams) {
    const int64_t base = row * n;
    C x[ITEMS ? ITEMS : 1][V];
    double sum = 0, square = 0;
    if constexpr (ITEMS > 0) {
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (first + i * step < n) source.template first<V>(base + first + i * step, x[i]);
    }
    const auto read = [&](int64_t c, C *v) { source.template first<V>(base + c, v); };
    const auto again = [&](int64_t c, C *v) { source.template again<V>(base + c, v); };
    C mean = 0, low = 0; /* a mean in two parts: the second is what the first was rounded by */
    norm_each<V, ITEMS>(x, n, first, step, read, [&](int64_t, const C *v) {
      C part = 0;
      for (int j = 0; j < V; j++) part += v[j];
      sum += static_cast<double>(part);
    });
    if (job.centred) {
      const double all = norm_sum<BLOCK>(sum, room);
      /* In f64 there is no second part: the mean of equal elements has to be what they are. */
      const double average = std::is_same<C, double>::value ? all / static_cast<double>(n) : all * share;
      mean = static_cast<C>(average);
      low = static_cast<C>(average - static_cast<double>(mean));
    }
    norm_each<V, ITEMS>(x, n, first, step, again, [&](int64_t, const C *v) {
      C part = 0;
      for (int j = 0; j < V; j++) part += (v[j] - mean - low) * (v[j] - mean - low);
      square += static_cast<double>(part);
    });
    const double var = norm_sum<BLOCK>(square, room) * share;
    const C rstd = norm_rstd(static_cast<C>(var + job.eps));
    norm_each<V, ITEMS>(x, n, first, step, again, [&](int64_t c, C *v) {
      C w[V], b[V];
      for (int j = 0; j < V; j++) w[j] = 1, b[j] = 0;
      if (job.weight) ty_load<V>(job.weight + c, w);
      if (job.bias) ty_load<V>(job.bias + c, b);
      for (int j = 0; j < V; j++) v[j] = (v[j] - mean - low) * rstd * w[j] + b[j];
      ty_store<V>(job.y + base + c, v);
    });
    if (lane) continue;
    if (job.mean) job.mean[row] = mean + low;
    job.rstd[row] = rstd;
  }
}

/* Threads of a block for a row, with so many elements each. */
static inline unsigned norm_threads(int64_t width, int each) {
  int64_t threads = (width + each - 1) / each;
  threads = (threads + TY_WARP - 1) / TY_WARP * TY_WARP;
  const int64_t least = TY_WARP, most = NORM_WIDEST;
  return static_cast<unsigned>(threads < least ? least : threads < most ? threads : most);
}

/* Blocks for so many rows, a block having `teams` of them at a time and `threads` threads. */
static inline unsigned norm_blocks(int64_t rows, int teams, unsigned threads, int most) {
  int64_t blocks = (rows + teams - 1) / teams, room = 2048 / threads;
  int64_t limit = int64_t{ ty_cuda_processors() } * (room < most ? room : most);
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < limit ? blocks : limit);
}

template <class T, int V, class Source> static bool norm_forward_packed(const norm_rows<T> &job, const Source &source) {
  enum { BLOCK = NORM_WARPS * TY_WARP };
  const int64_t n = job.width, most = 64;
  const double share = 1 / static_cast<double>(n);
  const unsigned few = norm_blocks(job.rows, NORM_WARPS, BLOCK, most);
  enum { FEW = norm_packs_of<V>(2), MORE = norm_packs_of<V>(8), EACH = norm_packs_of<V>(4) };
  if (n <= FEW * TY_WARP * V)
    return TY_LAUNCH((norm_rows_forward<T, V, FEW, false, Source>), few, BLOCK, 0, job, source, share);
  if (n <= MORE * TY_WARP * V)
    return TY_LAUNCH((norm_rows_forward<T, V, MORE, false, Source>), few, BLOCK, 0, job, source, share);
  const unsigned threads = norm_threads(n, EACH * V), blocks = norm_blocks(job.rows, 1, threads, most);
  if (n <= EACH * NORM_WIDEST * V)
    return TY_LAUNCH((norm_rows_forward<T, V, EACH, true, Source>), blocks, threads, 0, job, source, share);
  return TY_LAUNCH((norm_rows_forward<T, V, 0, true, Source>), blocks, threads, 0, job, source, share);
}

template <class T, class Source> static bool norm_forward(const norm_rows<T> &job, const Source &source, bool packs) {
  if (job.rows == 0) return true;
  if (packs) return norm_forward_packed<T, 16 / sizeof(T)>(job, source);
  return norm_forward_packed<T, 1>(job, source);
}

/* ---- gradients ---- */

template <class T> struct norm_rows_back {
  typedef ty_compute<T> C;
  const T *g, *x;
  const C *mean, *rstd, *weight;
  C *partial; /* NULL: no gradients for the weight. [blocks][2][width]: sums of g h and of g */
  int64_t rows, width;
  bool centred;
};

/* target.put<V>(at, v) takes the gradient of elements of x. ITEMS 0: partial is left to norm_columns. */
template <class T, int V, int ITEMS, bool BLOCK, class Target>
__global__ void __launch_bounds__(norm_most_threads(BLOCK), 1)
    norm_rows_backward(const norm_rows_back<T> job, const Target target, double share) {
  typedef ty_compute<T> C;
  enum { KEPT = ITEMS ? ITEMS : 1, COLUMNS = BLOCK ? 1 : KEPT * V * TY_WARP };
  TY_SHARED(double, room, TY_WARP);
  TY_SHARED(C, sums, 2 * COLUMNS); /* of the warps of a block */
  const int team = BLOCK ? static_cast<int>(blockDim.x) : int{ TY_WARP }, lane = threadIdx.x % team,
            teams = blockDim.x / team;
  const int first = lane * V, step = team * V;
  const int64_t n = job.width;
  C dw[KEPT][V] = {}, db[KEPT][V] = {};
  for (int64_t row = int64_t{ blockIdx.x } * teams + threadIdx.x / team; row < job.rows;
       row += int64_t{ gridDim.x } * teams) {
    const int64_t base = row * n;
    const C mean = job.centred ? job.mean[row] : C(0), rstd = job.rstd[row];
    C g[KEPT][V], h[KEPT][V];
    const auto read = [&](int64_t c, C *g_at, C *h_at) {
      ty_load<V>(job.g + base + c, g_at);
      ty_load<V>(job.x + base + c, h_at);
      for (int j = 0; j < V; j++) h_at[j] = (h_at[j] - mean) * rstd;
    };
    const auto weigh = [&](int64_t c, C *w) {
      for (int j = 0; j < V; j++) w[j] = 1;
      if (job.weight) ty_load<V>(job.weight + c, w);
    };
    double sum = 0, sum_h = 0;
    const auto add = [&](int64_t c, const C *g_at, const C *h_at) {
      C w[V], part = 0, part_h = 0;
      weigh(c, w);
      for (int j = 0; j < V; j++) part += g_at[j] * w[j], part_h += g_at[j] * w[j] * h_at[j];
      sum += static_cast<double>(part), sum_h += static_cast<double>(part_h);
    };
    if constexpr (ITEMS > 0) {
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (first + i * step < n) read(first + i * step, g[i], h[i]);
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        if (first + i * step >= n) continue;
        add(first + i * step, g[i], h[i]);
        for (int j = 0; j < V; j++) dw[i][j] += g[i][j] * h[i][j], db[i][j] += g[i][j];
      }
    } else {
      for (int64_t c = first; c < n; c += step) {
        read(c, g[0], h[0]);
        add(c, g[0], h[0]);
      }
    }
    C a = 0;
    if (job.centred) a = static_cast<C>(norm_sum<BLOCK>(sum, room) * share);
    const C a_h = static_cast<C>(norm_sum<BLOCK>(sum_h, room) * share);
    const auto put = [&](int64_t c, C *g_at, const C *h_at) {
      C w[V];
      weigh(c, w);
      for (int j = 0; j < V; j++) g_at[j] = rstd * (g_at[j] * w[j] - a - h_at[j] * a_h);
      target.template put<V>(base + c, g_at);
    };
    if constexpr (ITEMS > 0) {
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (first + i * step < n) put(first + i * step, g[i], h[i]);
    } else {
      for (int64_t c = first; c < n; c += step) {
        read(c, g[0], h[0]);
        put(c, g[0], h[0]);
      }
    }
  }
  if (ITEMS == 0 || !job.partial) return;
  C *to = job.partial + int64_t{ blockIdx.x } * 2 * n;
  if constexpr (BLOCK) {
    for (int i = 0; i < ITEMS; i++) {
      const int64_t c = first + i * step;
      if (c >= n) continue;
      ty_store<V>(to + c, dw[i]);
      ty_store<V>(to + n + c, db[i]);
    }
  } else {
    for (int w = 0; w < NORM_WARPS; w++) { /* in turn */
      if (threadIdx.x / TY_WARP == static_cast<unsigned>(w)) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
          for (int j = 0; j < V; j++) {
            const int c = first + i * step + j;
            sums[c] = w ? sums[c] + dw[i][j] : dw[i][j];
            sums[COLUMNS + c] = w ? sums[COLUMNS + c] + db[i][j] : db[i][j];
          }
      }
      __syncthreads();
    }
    for (int c = threadIdx.x; c < n; c += blockDim.x) {
      const C dw_all = sums[c], db_all = sums[COLUMNS + c];
      to[c] = dw_all, to[n + c] = db_all;
    }
  }
}

enum { NORM_TILE = 32, NORM_DEEP = 16 };

/* The sums of g h and of g over a part of the rows, for rows that are too wide for registers. */
template <class T> __global__ void __launch_bounds__(NORM_TILE *NORM_DEEP) norm_columns(const norm_rows_back<T> job) {
  typedef ty_compute<T> C;
  TY_SHARED(double, room, 2 * NORM_TILE * NORM_DEEP);
  const int64_t column = int64_t{ blockIdx.x } * NORM_TILE + threadIdx.x, n = job.width;
  double dw = 0, db = 0;
  if (column < n)
    for (int64_t row = int64_t{ blockIdx.y } * NORM_DEEP + threadIdx.y; row < job.rows;
         row += int64_t{ gridDim.y } * NORM_DEEP) {
      const C g = ty_widen(job.g[row * n + column]), mean = job.centred ? job.mean[row] : C(0);
      dw += static_cast<double>(g * ((ty_widen(job.x[row * n + column]) - mean) * job.rstd[row]));
      db += static_cast<double>(g);
    }
  const int at = threadIdx.y * NORM_TILE + threadIdx.x, other = NORM_TILE * NORM_DEEP;
  room[at] = dw, room[other + at] = db;
  __syncthreads();
  if (threadIdx.y || column >= n) return;
  for (int y = 1; y < NORM_DEEP; y++) {
    dw += room[y * NORM_TILE + threadIdx.x];
    db += room[other + y * NORM_TILE + threadIdx.x];
  }
  C *to = job.partial + int64_t{ blockIdx.y } * 2 * n;
  to[column] = static_cast<C>(dw), to[n + column] = static_cast<C>(db);
}

/* The sums over the blocks; db may be NULL. */
template <class C>
__global__ void __launch_bounds__(NORM_TILE *NORM_DEEP)
    norm_sum_partial(C *dw, C *db, const C *partial, int64_t blocks, int64_t n) {
  TY_SHARED(double, room, NORM_TILE *NORM_DEEP);
  const int64_t column = int64_t{ blockIdx.x } * NORM_TILE + threadIdx.x;
  const bool second = blockIdx.y;
  double sum = 0;
  if (column < n)
    for (int64_t b = threadIdx.y; b < blocks; b += NORM_DEEP)
      sum += static_cast<double>(partial[(2 * b + second) * n + column]);
  room[threadIdx.y * NORM_TILE + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || column >= n) return;
  for (int y = 1; y < NORM_DEEP; y++) sum += room[y * NORM_TILE + threadIdx.x];
  (second ? db : dw)[column] = static_cast<C>(sum);
}

template <class T, int V, class Target>
static bool norm_backward_packed(norm_rows_back<T> job, const Target &target, ty_compute<T> *dw, ty_compute<T> *db) {
  typedef ty_compute<T> C;
  enum { WARPS = NORM_WARPS * TY_WARP, EACH = norm_packs_of<V>(4) };
  const double share = 1 / static_cast<double>(job.width);
  const int64_t n = job.width, tiles = (n + NORM_TILE - 1) / NORM_TILE;
  const bool narrow = n <= EACH * TY_WARP * V, kept = n <= EACH * NORM_WIDEST * V;
  const unsigned threads = narrow ? unsigned{ WARPS } : norm_threads(n, EACH * V);
  const unsigned blocks = norm_blocks(job.rows, narrow ? 4 * NORM_WARPS : 1, threads, 4);
  const unsigned parts = kept ? blocks : norm_blocks((job.rows + 63) / 64, 1, NORM_TILE * NORM_DEEP, 1);
  ty_cuda_scratch room(dw ? static_cast<size_t>(parts) * 2 * static_cast<size_t>(n) * sizeof(C) : 1);
  if (!room.data) return false;
  job.partial = dw ? room.as<C>() : nullptr;
  bool ok = narrow ? TY_LAUNCH((norm_rows_backward<T, V, EACH, false, Target>), blocks, threads, 0, job, target, share)
            : kept ? TY_LAUNCH((norm_rows_backward<T, V, EACH, true, Target>), blocks, threads, 0, job, target, share)
                   : TY_LAUNCH((norm_rows_backward<T, V, 0, true, Target>), blocks, threads, 0, job, target, share);
  if (!ok || !dw) return ok;
  const C *partial = job.partial;
  const dim3 block(NORM_TILE, NORM_DEEP), grid(static_cast<unsigned>(tiles), parts),
      all(static_cast<unsigned>(tiles), db ? 2 : 1);
  if (!kept && !TY_LAUNCH(norm_columns<T>, grid, block, 0, job)) return false;
  return TY_LAUNCH(norm_sum_partial<C>, all, block, 0, dw, db, partial, int64_t{ parts }, n);
}

/* dw and db: NULL where they are not wanted. */
template <class T, class Target>
static bool norm_backward(const norm_rows_back<T> &job, const Target &target, ty_compute<T> *dw, ty_compute<T> *db,
                          bool packs) {
  if (job.width == 0) return true;
  if (job.rows == 0) {
    const size_t bytes = static_cast<size_t>(job.width) * sizeof(*dw);
    return (!dw || ty_cuda_zero(dw, bytes)) && (!db || ty_cuda_zero(db, bytes));
  }
  if (packs) return norm_backward_packed<T, 16 / sizeof(T)>(job, target, dw, db);
  return norm_backward_packed<T, 1>(job, target, dw, db);
}

/* Whether rows of these tensors are moved 16 bytes at a time; NULL counts as aligned. */
template <class T> static bool norm_packs(int64_t width, std::initializer_list<const void *> data) {
  bool packs = width % static_cast<int64_t>(16 / sizeof(T)) == 0;
  for (const void *p : data) packs = packs && ty_aligned(p);
  return packs;
}

#endif
