/* Recurrent layers: all steps of LSTM, GRU and sLSTM, and their gradients. Where the weights of a head fit into shared
 * memory, one launch walks all steps: a block has a head and some rows of the batch, and keeps the weights and the hidden
 * states there. Otherwise every step is a launch, whose blocks share the units of the heads and read the weights by
 * the caches. Sums are taken in one order in both ways. */
#include "recurrence.cuh"

enum {
  RNN_UNITS = 64, /* of a block at once: threads side by side */
  RNN_EACH = 4,   /* rows of a thread */
  RNN_TALL = 4,   /* threads one below the other, at most */
  RNN_PACK = 256  /* threads of the packing */
};

template <class T> struct rnn_job {
  typedef ty_compute<T> C;
  ty_cell cell;
  int64_t steps, batch, heads, d, width, plane;
  int64_t from, to; /* the steps of this launch */
  const T *x, *w;
  const C *bias, *state, *packed; /* packed: the weights [head][k][gate][unit] */
  T *y;
  C *last, *kept, *saved;
  const T *g, *at_y; /* the way back */
  const C *at_states, *at_gates;
  T *dx, *du;
  C *dstate;
  int states; /* besides h */
};

/* Weights [head][row][k], a row for each unit of each gate, to [head][k][row]; n of them. */
template <class T>
__global__ void __launch_bounds__(RNN_PACK)
    rnn_pack(const T *w, ty_compute<T> *to, int64_t n, int64_t rows, int64_t d) {
  for (int64_t i = int64_t{ blockIdx.x } * RNN_PACK + threadIdx.x; i < n; i += int64_t{ gridDim.x } * RNN_PACK) {
    int64_t row = i % rows, k = i / rows % d, head = i / rows / d;
    to[i] = ty_widen(w[(head * rows + row) * d + k]);
  }
}

/* What a thread has: a unit at a time, and rows. */
struct rnn_place {
  int64_t head, row;
  int rows; /* of the thread that there are */
  int tile; /* rows of the block */
  int lane, step;
  int64_t unit, end; /* units from `unit` on, RNN_UNITS apart */
};
template <class T> TY_DEVICE rnn_place rnn_place_of(const rnn_job<T> &j, bool alone) {
  rnn_place p;
  p.tile = static_cast<int>(blockDim.y) * RNN_EACH;
  p.head = blockIdx.z;
  p.row = int64_t{ blockIdx.y } * p.tile + threadIdx.y * RNN_EACH;
  const int64_t left = j.batch - p.row;
  p.rows = left <= 0 ? 0 : left < RNN_EACH ? static_cast<int>(left) : int{ RNN_EACH };
  p.unit = (alone ? 0 : int64_t{ blockIdx.x } * RNN_UNITS) + threadIdx.x;
  p.end = alone ? j.d : p.unit < j.d ? p.unit + 1 : p.unit;
  p.lane = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  p.step = static_cast<int>(blockDim.x * blockDim.y);
  return p;
}

/* sum[r][g] = over k of h(r, k) times w(k, g). */
template <int G, class C, class H, class W>
TY_DEVICE void rnn_product(int64_t n, const H &h, const W &w, C (&sum)[RNN_EACH][G]) {
#pragma unroll 4
  for (int64_t k = 0; k < n; k++) {
    C b[G];
#pragma unroll
    for (int g = 0; g < G; g++) b[g] = w(k, g);
#pragma unroll
    for (int r = 0; r < RNN_EACH; r++) {
      C a = h(r, k);
#pragma unroll
      for (int g = 0; g < G; g++) sum[r][g] += a * b[g];
    }
  }
}

/* The gates of a thread's rows of one unit at step t; put(r, h) takes the new h. */
template <int G, class T, class H, class W, class Put>
TY_DEVICE void rnn_forward_step(const rnn_job<T> &j, const rnn_place &p, int64_t t, int64_t unit, const H &h,
                                const W &w, const Put &put) {
  typedef ty_compute<T> C;
  const int64_t at = p.head * G * j.d + unit;
  C x[RNN_EACH][G], u[RNN_EACH][G];
#pragma unroll
  for (int r = 0; r < RNN_EACH; r++)
#pragma unroll
    for (int g = 0; g < G; g++) {
      x[r][g] = r < p.rows ? ty_widen(j.x[(t * j.batch + p.row + r) * G * j.width + at + g * j.d]) : C(0);
      u[r][g] = j.bias ? j.bias[at + g * j.d] : C(0);
    }
  rnn_product<G, C>(j.d, h, w, u);
#pragma unroll
  for (int r = 0; r < RNN_EACH; r++) {
    if (r >= p.rows) continue;
    const int64_t row = p.row + r, place = row * j.width + p.head * j.d + unit;
    C *kept = j.kept ? j.kept + t * j.states * j.plane + place : nullptr;
    C *saved = j.saved ? j.saved + ((t * j.batch + row) * j.width + p.head * j.d) * TY_SAVED_GATES + unit : nullptr;
    C before = h(r, unit);
    T y = ty_narrow<T>(
        rnn_forward_unit<G, C>(j.cell, x[r], u[r], before, j.last + j.plane + place, kept, saved, j.plane, j.d));
    j.y[t * j.plane + place] = y;
    put(r, ty_widen(y));
    if (t == j.steps - 1) j.last[place] = ty_widen(y);
  }
}

/* h before step t, of a row and a unit. */
template <class T> TY_DEVICE ty_compute<T> rnn_h(const rnn_job<T> &j, const T *y, int64_t t, int64_t place) {
  return t == 0 ? j.state[place] : ty_widen(y[(t - 1) * j.plane + place]);
}

template <int G, class T>
__global__ void __launch_bounds__(RNN_UNITS *RNN_TALL, 1) rnn_forward_alone(const rnn_job<T> j) {
  typedef ty_compute<T> C;
  const rnn_place p = rnn_place_of(j, true);
  const int d = static_cast<int>(j.d), weights = G * d * d;
  TY_SHARED_DYNAMIC(C, room);
  ty_shared_ptr<C> w = room, now = room + weights, next = now + p.tile * d;
  for (int i = p.lane; i < weights; i += p.step) w[i] = j.packed[p.head * weights + i];
  for (int i = p.lane; i < p.tile * d; i += p.step) {
    int64_t row = int64_t{ blockIdx.y } * p.tile + i / d;
    now[i] = row < j.batch ? j.state[row * j.width + p.head * d + i % d] : C(0);
    next[i] = C(0);
  }
  const int mine = static_cast<int>(threadIdx.y) * RNN_EACH * d;
  for (int64_t t = 0; t < j.steps; t++) {
    __syncthreads();
    for (int unit = static_cast<int>(p.unit); unit < d; unit += RNN_UNITS)
      rnn_forward_step<G, T>(
          j, p, t, unit, [&](int r, int64_t k) -> C { return now[mine + r * d + static_cast<int>(k)]; },
          [&](int64_t k, int g) -> C { return w[(static_cast<int>(k) * G + g) * d + unit]; },
          [&](int r, C h) { next[mine + r * d + unit] = h; });
    ty_shared_ptr<C> other = now;
    now = next;
    next = other;
  }
}

template <int G, class T>
__global__ void __launch_bounds__(RNN_UNITS *RNN_TALL, 1) rnn_forward_shared(const rnn_job<T> j) {
  typedef ty_compute<T> C;
  const rnn_place p = rnn_place_of(j, false);
  if (p.unit >= p.end || p.rows == 0) return;
  const int64_t t = j.from, unit = p.unit, base = p.row * j.width + p.head * j.d;
  const C *w = j.packed + p.head * G * j.d * j.d + unit;
  rnn_forward_step<G, T>(
      j, p, t, unit,
      [&](int r, int64_t k) -> C { return r < p.rows ? rnn_h(j, j.y, t, base + r * j.width + k) : C(0); },
      [&](int64_t k, int g) -> C { return w[(k * G + g) * j.d]; }, [](int, C) {});
}

/* ---- backward ---- */

/* The gradients of the gates of a thread's rows of one unit at step t; put(r, g, value) takes those of u. */
template <int G, class T, class Put>
TY_DEVICE void rnn_backward_gates(const rnn_job<T> &j, const rnn_place &p, int64_t t, int64_t unit, const Put &put) {
  typedef ty_compute<T> C;
  for (int r = 0; r < p.rows; r++) {
    const int64_t row = p.row + r, place = row * j.width + p.head * j.d + unit;
    const int64_t gates = (t * j.batch + row) * G * j.width + p.head * G * j.d + unit;
    const C *before = t ? j.at_states + (t - 1) * j.states * j.plane + place : j.state + j.plane + place;
    const C *saved = j.at_gates + ((t * j.batch + row) * j.width + p.head * j.d) * TY_SAVED_GATES + unit;
    C dh = j.dstate[place] + (j.g ? ty_widen(j.g[t * j.plane + place]) : C(0)), dx[G], du[G];
    C h = G == 3 ? rnn_h(j, j.at_y, t, place) : C(0);
    j.dstate[place] = rnn_backward_unit<G, C>(j.cell, dh, h, before, j.at_states + t * j.states * j.plane + place,
                                              saved, j.dstate + j.plane + place, j.plane, j.d, dx, du);
#pragma unroll
    for (int g = 0; g < G; g++) {
      j.dx[gates + g * j.d] = ty_narrow<T>(dx[g]);
      if (G == 3) j.du[gates + g * j.d] = ty_narrow<T>(du[g]);
      put(r, g, du[g]);
    }
  }
}

template <class T>
TY_DEVICE void rnn_add_dh(const rnn_job<T> &j, const rnn_place &p, int64_t unit,
                          const ty_compute<T> (&sum)[RNN_EACH][1]) {
#pragma unroll
  for (int r = 0; r < RNN_EACH; r++)
    if (r < p.rows) j.dstate[(p.row + r) * j.width + p.head * j.d + unit] += sum[r][0];
}

template <int G, class T>
__global__ void __launch_bounds__(RNN_UNITS *RNN_TALL, 1) rnn_backward_alone(const rnn_job<T> j) {
  typedef ty_compute<T> C;
  const rnn_place p = rnn_place_of(j, true);
  const int d = static_cast<int>(j.d), n = G * d;
  TY_SHARED_DYNAMIC(C, room);
  ty_shared_ptr<C> w = room, du = room + n * d;
  for (int i = p.lane; i < n * d; i += p.step) w[i] = ty_widen(j.w[p.head * n * d + i]);
  for (int i = p.lane; i < p.tile * n; i += p.step) du[i] = C(0);
  const int mine = static_cast<int>(threadIdx.y) * RNN_EACH * n;
  for (int64_t t = j.steps - 1; t >= 0; t--) {
    __syncthreads();
    for (int unit = static_cast<int>(p.unit); unit < d; unit += RNN_UNITS)
      rnn_backward_gates<G, T>(j, p, t, unit, [&](int r, int g, C value) { du[mine + r * n + g * d + unit] = value; });
    __syncthreads();
    for (int unit = static_cast<int>(p.unit); unit < d; unit += RNN_UNITS) {
      C sum[RNN_EACH][1] = {};
      rnn_product<1, C>(
          n, [&](int r, int64_t k) -> C { return du[mine + r * n + static_cast<int>(k)]; },
          [&](int64_t k, int) -> C { return w[static_cast<int>(k) * d + unit]; }, sum);
      rnn_add_dh(j, p, unit, sum);
    }
  }
}

template <int G, class T>
__global__ void __launch_bounds__(RNN_UNITS *RNN_TALL, 1) rnn_gates_shared(const rnn_job<T> j) {
  const rnn_place p = rnn_place_of(j, false);
  if (p.unit < p.end) rnn_backward_gates<G, T>(j, p, j.from, p.unit, [](int, int, ty_compute<T>) {});
}

template <int G, class T>
__global__ void __launch_bounds__(RNN_UNITS *RNN_TALL, 1) rnn_backward_shared(const rnn_job<T> j) {
  typedef ty_compute<T> C;
  const rnn_place p = rnn_place_of(j, false);
  if (p.unit >= p.end || p.rows == 0) return;
  const int64_t n = G * j.d;
  const T *w = j.w + p.head * n * j.d + p.unit;
  const T *du = j.du + (j.from * j.batch + p.row) * G * j.width + p.head * n;
  C sum[RNN_EACH][1] = {};
  rnn_product<1, C>(
      n, [&](int r, int64_t k) -> C { return r < p.rows ? ty_widen(du[r * G * j.width + k]) : C(0); },
      [&](int64_t k, int) -> C { return ty_widen(w[k * j.d]); }, sum);
  rnn_add_dh(j, p, p.unit, sum);
}

/* ---- entries ---- */

/* The most shared memory that a block of this GPU can have. */
static int64_t rnn_shared_bytes(void) {
  int bytes = 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ty_cuda_gpu()) != cudaSuccess) return 0;
  return bytes;
}

struct rnn_shape {
  dim3 block, alone, shared; /* grids of one launch for all steps, and of one for each */
  int64_t tile;
};
template <class T> static bool rnn_shape_of(const rnn_job<T> &j, rnn_shape *s) {
  const int64_t groups = (j.batch + RNN_EACH - 1) / RNN_EACH, tall = groups < RNN_TALL ? groups : int64_t{ RNN_TALL };
  const int64_t rows = (groups + tall - 1) / tall, units = (j.d + RNN_UNITS - 1) / RNN_UNITS;
  if (rows > 65535 || j.heads > 65535) return ty_fail(TY_EUNSUPPORTED, "recurrence: a batch too large for cuda");
  s->tile = tall * RNN_EACH;
  s->block = dim3(RNN_UNITS, static_cast<unsigned>(tall));
  s->alone = dim3(1, static_cast<unsigned>(rows), static_cast<unsigned>(j.heads));
  s->shared = dim3(static_cast<unsigned>(units), static_cast<unsigned>(rows), static_cast<unsigned>(j.heads));
  return true;
}

template <int G, class T> static bool rnn_run_forward(rnn_job<T> j) {
  typedef ty_compute<T> C;
  const int64_t n = j.heads * G * j.d * j.d;
  rnn_shape s = {};
  if (!rnn_shape_of(j, &s)) return false;
  ty_cuda_scratch packed(static_cast<size_t>(n) * sizeof(C));
  if (!packed.data) return false;
  C *to = packed.as<C>();
  j.packed = to;
  const int64_t rows = G * j.d;
  if (!TY_LAUNCH(rnn_pack<T>, ty_cuda_blocks(n, RNN_PACK), RNN_PACK, 0, j.w, to, n, rows, j.d)) return false;
  const int64_t bytes = (G * j.d + 2 * s.tile) * j.d * static_cast<int64_t>(sizeof(C));
  if (bytes <= rnn_shared_bytes())
    return TY_LAUNCH((rnn_forward_alone<G, T>), s.alone, s.block, static_cast<size_t>(bytes), j);
  for (j.from = 0; j.from < j.steps; j.from++)
    if (!TY_LAUNCH((rnn_forward_shared<G, T>), s.shared, s.block, 0, j)) return false;
  return true;
}

template <int G, class T> static bool rnn_run_backward(rnn_job<T> j) {
  typedef ty_compute<T> C;
  rnn_shape s = {};
  if (!rnn_shape_of(j, &s)) return false;
  const int64_t bytes = (j.d + s.tile) * G * j.d * static_cast<int64_t>(sizeof(C));
  if (bytes <= rnn_shared_bytes())
    return TY_LAUNCH((rnn_backward_alone<G, T>), s.alone, s.block, static_cast<size_t>(bytes), j);
  for (j.from = j.steps - 1; j.from >= 0; j.from--)
    if (!TY_LAUNCH((rnn_gates_shared<G, T>), s.shared, s.block, 0, j) ||
        !TY_LAUNCH((rnn_backward_shared<G, T>), s.shared, s.block, 0, j))
      return false;
  return true;
}

template <class T> static rnn_job<T> rnn_job_of(const ty_kernel_args *k, const ty_view *y, const ty_view *w) {
  rnn_job<T> j = {};
  j.cell = static_cast<const ty_p_recurrence *>(k->params)->cell;
  j.states = ty_cell_states(j.cell) - 1;
  j.steps = y->size[0], j.batch = y->size[1], j.width = y->size[2], j.plane = j.batch * j.width;
  j.heads = w->size[0], j.d = w->size[2];
  j.w = static_cast<const T *>(w->data);
  return j;
}

static bool rnn_copy(void *to, const void *from, const ty_view *like) {
  const size_t bytes = static_cast<size_t>(ty_view_bytes(like));
  if (!from) return ty_cuda_zero(to, bytes);
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, ty_cuda_stream());
  return error == cudaSuccess || ty_fail(TY_EUNSUPPORTED, "copying on cuda: %s", cudaGetErrorString(error));
}

/* in: x, weight, bias, state; out: y, last, states, gates, the last two empty where they are not kept. */
TY_CUDA_KERNEL(recurrence_steps) {
  const ty_view *y = k->out[0], *state = k->in[3];
  if (state->count && !rnn_copy(k->out[1]->data, state->data, state)) return false;
  if (y->count == 0) return true;
  return ty_for_floats(y->dtype, "recurrence", [&](auto x) {
    typedef decltype(x) T;
    typedef ty_compute<T> C;
    rnn_job<T> j = rnn_job_of<T>(k, y, k->in[1]);
    j.x = static_cast<const T *>(k->in[0]->data);
    j.bias = ty_data_of<const C>(k->in[2]);
    j.state = static_cast<const C *>(state->data);
    j.y = static_cast<T *>(y->data);
    j.last = static_cast<C *>(k->out[1]->data);
    j.kept = ty_data_of<C>(k->out[2]);
    j.saved = ty_data_of<C>(k->out[3]);
    return j.cell == TY_GRU ? rnn_run_forward<3>(j) : rnn_run_forward<4>(j);
  });
}

/* in: weight, state, y, states, gates, g, g_last; out: dx, du, dstate. */
TY_CUDA_KERNEL(recurrence_backward) {
  const ty_view *y = k->in[2], *last = k->in[6], *dstate = k->out[2];
  if (dstate->count && !rnn_copy(dstate->data, last ? last->data : nullptr, dstate)) return false;
  if (y->count == 0) return true;
  return ty_for_floats(y->dtype, "recurrence_backward", [&](auto x) {
    typedef decltype(x) T;
    typedef ty_compute<T> C;
    rnn_job<T> j = rnn_job_of<T>(k, y, k->in[0]);
    j.state = static_cast<const C *>(k->in[1]->data);
    j.at_y = static_cast<const T *>(y->data);
    j.at_states = static_cast<const C *>(k->in[3]->data);
    j.at_gates = static_cast<const C *>(k->in[4]->data);
    j.g = ty_data_of<const T>(k->in[5]);
    j.dx = static_cast<T *>(k->out[0]->data);
    j.du = j.cell == TY_GRU ? static_cast<T *>(k->out[1]->data) : j.dx;
    j.dstate = static_cast<C *>(dstate->data);
    return j.cell == TY_GRU ? rnn_run_backward<3>(j) : rnn_run_backward<4>(j);
  });
}
