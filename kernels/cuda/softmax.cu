/* softmax and log_softmax along one dimension, and their gradients. A row that fits stays in the registers of a team of
 * threads between being read and being written; of longer rows each is read twice by one block, the second time mostly
 * from the L2 cache. Lines whose elements lie apart are taken 32 or more side by side. */
#include "../cpu/lines.h"
#include "exp_sum.cuh"
#include "teams.cuh"

enum { THREADS = 256, MOST_THREADS = 1024, MOST_HOLDING = 512 };
template <class T> constexpr int held = 64 / sizeof(ty_compute<T>); /* elements of a row in a thread's registers */

/* x: forward the input, backward the result, with the gradient g. */
template <class T> struct softmax_job {
  const T *x, *g;
  T *out;
  int64_t size, rows, inner;
  bool log;
  int team;
};

/* ---- one line: what is summed, and what comes out of it ---- */

/* Forward: exp(x - top) / sum, or x - log(sum exp). */
template <class T> struct forward_line {
  typedef ty_exp_sum<T> S;
  enum { INPUTS = 1 };
  TY_DEVICE_MEMBER static S start() { return ty_exp_sum_start<T>(); }
  TY_DEVICE_MEMBER static T nothing() { return -std::numeric_limits<T>::infinity(); } /* what changes no sum */
  template <int N> TY_DEVICE_MEMBER static void add(S &s, const T *x, const T *, bool) { ty_exp_sum_add<T, N>(s, x); }
  TY_DEVICE_MEMBER static void join(S &s, const S &t) { ty_exp_sum_join(s, t); }
  TY_DEVICE_MEMBER static void scale(S &s, bool log) { /* the sum becomes what every element needs of it */
    s.sum = !ty_finite(s.top) ? s.top - s.top : log ? ty_log(s.sum) : 1 / s.sum;
  }
  TY_DEVICE_MEMBER static T result(const S &s, T x, T, bool log) {
    return log ? x - s.top - s.sum : ty_exp(x - s.top) * s.sum;
  }
};

/* Backward: y (g - sum g y), or g - exp(y) sum g. */
template <class T> struct backward_line {
  typedef T S;
  enum { INPUTS = 2 };
  TY_DEVICE_MEMBER static S start() { return 0; }
  TY_DEVICE_MEMBER static T nothing() { return 0; }
  template <int N> TY_DEVICE_MEMBER static void add(S &s, const T *y, const T *g, bool log) {
#pragma unroll
    for (int j = 0; j < N; j++) s += log ? g[j] : g[j] * y[j];
  }
  TY_DEVICE_MEMBER static void join(S &s, const S &t) { s += t; }
  TY_DEVICE_MEMBER static void scale(S &, bool) {}
  TY_DEVICE_MEMBER static T result(const S &s, T y, T g, bool log) { return log ? g - ty_exp(y) * s : y * (g - s); }
};

/* ---- rows that stay in registers ---- */

template <class T, int V, class Line>
__global__ void __launch_bounds__(MOST_HOLDING, 1) softmax_held(const softmax_job<T> j) {
  typedef typename Line::S S;
  typedef ty_compute<T> C;
  enum { HELD = held<T>, PACKS = HELD / V };
  TY_SHARED(S, room, TY_WARP);
  const int team = j.team, lane = static_cast<int>(threadIdx.x) % team;
  const int64_t per_block = blockDim.x / static_cast<unsigned>(team);
  for (int64_t first = blockIdx.x * per_block; first < j.rows; first += gridDim.x * per_block) {
    const int64_t row = first + static_cast<int>(threadIdx.x) / team;
    const int n = row < j.rows ? static_cast<int>(j.size) : 0;
    C x[HELD], g[Line::INPUTS > 1 ? HELD : 1];
    S s = Line::start();
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      x[i] = Line::nothing();
      if (Line::INPUTS > 1) g[Line::INPUTS > 1 ? i : 0] = 0;
    }
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      const int at = (i * team + lane) * V;
      if (at >= n) continue;
      ty_load<V>(j.x + row * j.size + at, x + i * V);
      if (Line::INPUTS > 1) ty_load<V>(j.g + row * j.size + at, g + (Line::INPUTS > 1 ? i * V : 0));
    }
    if (j.size <= team * V) Line::template add<V>(s, x, g, j.log); /* all is in the first pack */
    else Line::template add<HELD>(s, x, g, j.log);
    ty_team_join(
        s, team, [](S &a, const S &b) { Line::join(a, b); }, room);
    Line::scale(s, j.log);
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      const int at = (i * team + lane) * V;
      if (at >= n) continue;
#pragma unroll
      for (int v = 0; v < V; v++)
        x[i * V + v] = Line::result(s, x[i * V + v], g[Line::INPUTS > 1 ? i * V + v : 0], j.log);
      ty_store<V>(j.out + row * j.size + at, x + i * V);
    }
  }
}

/* ---- longer rows: one block each ---- */

template <class T, int V, class Line>
__global__ void __launch_bounds__(MOST_THREADS) softmax_long(const softmax_job<T> j) {
  typedef typename Line::S S;
  typedef ty_compute<T> C;
  enum { PACKS = V > 4 ? 2 : 8 / V, EACH = PACKS * V };
  TY_SHARED(S, room, TY_WARP);
  const int64_t step = int64_t{ blockDim.x } * V;
  for (int64_t row = blockIdx.x; row < j.rows; row += gridDim.x) {
    const T *from = j.x + row * j.size, *from_g = Line::INPUTS > 1 ? j.g + row * j.size : nullptr;
    T *to = j.out + row * j.size;
    C x[EACH], g[Line::INPUTS > 1 ? EACH : 1];
    S s = Line::start();
    int64_t at = int64_t{ threadIdx.x } * V;
    for (; at + (PACKS - 1) * step < j.size; at += PACKS * step) {
#pragma unroll
      for (int i = 0; i < PACKS; i++) {
        ty_load<V>(from + at + i * step, x + i * V);
        if (Line::INPUTS > 1) ty_load<V>(from_g + at + i * step, g + (Line::INPUTS > 1 ? i * V : 0));
      }
      Line::template add<EACH>(s, x, g, j.log);
    }
    for (; at < j.size; at += step) {
      ty_load<V>(from + at, x);
      if (Line::INPUTS > 1) ty_load<V>(from_g + at, g);
      Line::template add<V>(s, x, g, j.log);
    }
    ty_team_join(
        s, static_cast<int>(blockDim.x), [](S &a, const S &b) { Line::join(a, b); }, room);
    Line::scale(s, j.log);
#pragma unroll(V > 4 ? 2 : 4)
    for (at = int64_t{ threadIdx.x } * V; at < j.size; at += step) {
      ty_load<V>(from + at, x);
      if (Line::INPUTS > 1) ty_load<V>(from_g + at, g);
#pragma unroll
      for (int v = 0; v < V; v++) x[v] = Line::result(s, x[v], g[Line::INPUTS > 1 ? v : 0], j.log);
      ty_store<V>(to + at, x);
    }
  }
}

/* ---- lines whose elements lie apart: neighbouring threads take neighbouring lines, `team` threads each ---- */

template <class T, class Line> __global__ void __launch_bounds__(THREADS, 1) softmax_columns(const softmax_job<T> j) {
  typedef typename Line::S S;
  typedef ty_compute<T> C;
  enum { UNROLL = 4 };
  TY_SHARED(S, room, THREADS);
  const int lines = THREADS / j.team, lane = static_cast<int>(threadIdx.x) / lines;
  const int64_t all = j.rows * j.inner;
  for (int64_t first = int64_t{ blockIdx.x } * lines; first < all; first += int64_t{ gridDim.x } * lines) {
    const int64_t line = first + static_cast<int>(threadIdx.x) % lines, outer = line / j.inner;
    const int64_t base = outer * j.size * j.inner + (line - outer * j.inner), n = line < all ? j.size : 0;
    C x[UNROLL], g[UNROLL];
    S s = Line::start();
    int64_t i = lane;
    for (; i + (UNROLL - 1) * j.team < n; i += UNROLL * j.team) {
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        x[u] = ty_widen(j.x[base + (i + u * j.team) * j.inner]);
        if (Line::INPUTS > 1) g[u] = ty_widen(j.g[base + (i + u * j.team) * j.inner]);
      }
      Line::template add<UNROLL>(s, x, g, j.log);
    }
    for (; i < n; i += j.team) {
      x[0] = ty_widen(j.x[base + i * j.inner]);
      if (Line::INPUTS > 1) g[0] = ty_widen(j.g[base + i * j.inner]);
      Line::template add<1>(s, x, g, j.log);
    }
    if (j.team > 1) {
      room[threadIdx.x] = s;
      __syncthreads();
      s = room[static_cast<int>(threadIdx.x) % lines];
      for (int other = 1; other < j.team; other++) {
        S t = room[other * lines + static_cast<int>(threadIdx.x) % lines];
        Line::join(s, t);
      }
      __syncthreads();
    }
    Line::scale(s, j.log);
#pragma unroll 4
    for (i = lane; i < n; i += j.team) {
      const int64_t at = base + i * j.inner;
      j.out[at] = ty_narrow<T>(Line::result(s, ty_widen(j.x[at]), Line::INPUTS > 1 ? ty_widen(j.g[at]) : C(0), j.log));
    }
  }
}

/* ---- entries ---- */

template <class T, int V, class Line> static bool run_rows(softmax_job<T> j) {
  enum { HELD = held<T> };
  const int64_t packs = (j.size + V - 1) / V;
  if (packs > int64_t{ MOST_HOLDING } * HELD / V)
    return TY_LAUNCH((softmax_long<T, V, Line>), ty_cuda_blocks(j.rows, 1), MOST_THREADS, 0, j);
  /* A warp holds what it can; in short rows neighbouring lanes have neighbouring elements. */
  j.team = ty_power_of_two(packs, TY_WARP);
  if (packs > TY_WARP * HELD / V) j.team = ty_power_of_two((packs * V + HELD - 1) / HELD, MOST_HOLDING);
  const int block = j.team > THREADS ? j.team : j.team > TY_WARP ? j.team : THREADS;
  const int64_t per_block = block / j.team;
  return TY_LAUNCH((softmax_held<T, V, Line>), ty_cuda_blocks(j.rows, per_block), block, 0, j);
}

template <class T, class Line> static bool run(const ty_kernel_args *k, const void *x, const void *g, bool log) {
  enum { V = 16 / sizeof(T) };
  ty_lines l = ty_lines_of(k->out[0], static_cast<const ty_p_dim *>(k->params)->dim);
  if (k->out[0]->count == 0) return true;
  softmax_job<T> j = { static_cast<const T *>(x),
                       static_cast<const T *>(g),
                       static_cast<T *>(k->out[0]->data),
                       l.size,
                       l.outer,
                       l.inner,
                       log,
                       1 };
  if (l.inner == 1) {
    bool whole = l.size % V == 0 && ty_aligned(x) && ty_aligned(g) && ty_aligned(j.out);
    return whole ? run_rows<T, V, Line>(j) : run_rows<T, 1, Line>(j);
  }
  int64_t lines = l.outer * l.inner;
  j.team = ty_power_of_two((l.size + 7) / 8, THREADS / ty_power_of_two(lines, TY_WARP));
  return TY_LAUNCH((softmax_columns<T, Line>), ty_cuda_blocks(lines, THREADS / j.team), THREADS, 0, j);
}

static bool forward(const ty_kernel_args *k, const char *op, bool log) {
  return ty_for_floats(k->in[0]->dtype, op, [&](auto x) {
    typedef decltype(x) T;
    return run<T, forward_line<ty_compute<T>>>(k, k->in[0]->data, nullptr, log);
  });
}

static bool backward(const ty_kernel_args *k, const char *op, bool log) {
  return ty_for_floats(k->in[0]->dtype, op, [&](auto x) {
    typedef decltype(x) T;
    return run<T, backward_line<ty_compute<T>>>(k, k->in[1]->data, k->in[0]->data, log);
  });
}

TY_CUDA_KERNEL(softmax) { return forward(k, "softmax", false); }
TY_CUDA_KERNEL(log_softmax) { return forward(k, "log_softmax", true); }
TY_CUDA_KERNEL(softmax_backward) { return backward(k, "softmax_backward", false); }
TY_CUDA_KERNEL(log_softmax_backward) { return backward(k, "log_softmax_backward", true); }
