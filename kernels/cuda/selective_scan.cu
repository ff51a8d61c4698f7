/* Selective state spaces, with the mathematics of kernels/cpu/recurrence/selective_scan.c. TEAM lanes hold the states of a channel,
 * EACH of them a lane; a block has TEAMS neighbouring channels, which walk along a sequence together and share what b
 * and c say of a token. Backward, the states of every CHUNK-th token are kept and those between made anew; the
 * gradients of b and c are summed over a block's channels first, then over blocks in their order. */
#include "exp_sum.cuh"

namespace {

enum { TEAM = 16, TEAMS = 8, THREADS = TEAM * TEAMS, EACH = 8, CHUNK = 16, MOST = TEAM * EACH };

template <class T> struct job {
  const T *u, *delta, *a, *b, *c, *state, *dy, *dlast;
  T *y, *last, *du, *ddelta, *dstate;
  T *starts, *within, *parts, *rates; /* backward: states before chunks, those in one; parts of db and dc, and of da */
  int64_t batch, length, channels, states, tiles;
};

/* The channel of this thread's team, in sequence blockIdx.y; behind the last one it is the last again, which nobody
 * stores. */
template <class T> struct seat {
  int64_t at, channel, row; /* row: of the channel among all sequences' */
  int lane;
  bool mine;
  TY_DEVICE_MEMBER explicit seat(const job<T> &p) {
    lane = static_cast<int>(threadIdx.x) % TEAM;
    at = blockIdx.y;
    channel = (int64_t)blockIdx.x * TEAMS + threadIdx.x / TEAM;
    mine = channel < p.channels;
    channel = mine ? channel : p.channels - 1;
    row = at * p.channels + channel;
  }
};

/* Of the lanes of a team, in each of them. */
template <class T> TY_DEVICE T team_sum(T x) {
  for (int step = TEAM / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <class T> TY_DEVICE void read_states(const job<T> &p, const seat<T> &s, const T *from, T *h) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int64_t n = s.lane + e * TEAM;
    h[e] = from && n < p.states ? from[s.row * p.states + n] : T(0);
  }
}
template <class T> TY_DEVICE void write_states(const job<T> &p, const seat<T> &s, T *to, const T *h) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int64_t n = s.lane + e * TEAM;
    if (s.mine && n < p.states) to[s.row * p.states + n] = h[e];
  }
}

template <class T> TY_DEVICE void read_rates(const job<T> &p, const seat<T> &s, T *a) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int64_t n = s.lane + e * TEAM;
    a[e] = n < p.states ? p.a[s.channel * p.states + n] : T(0);
  }
}

/* One token: the states behind it; returns what c reads of this lane's. */
template <class T> TY_DEVICE T advance(const job<T> &p, const seat<T> &s, int64_t t, const T *a, T *h) {
  const int64_t token = s.at * p.length + t, at = token * p.channels + s.channel;
  const T step = p.delta[at], added = step * p.u[at];
  T sum = 0;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int64_t n = s.lane + e * TEAM;
    if (n >= p.states) continue;
    h[e] = ty_exp(step * a[e]) * h[e] + added * p.b[token * p.states + n];
    sum += h[e] * p.c[token * p.states + n];
  }
  return sum;
}

template <class T> __global__ void __launch_bounds__(THREADS) walk(const job<T> p) {
  const seat<T> s(p);
  T a[EACH], h[EACH];
  read_rates(p, s, a);
  read_states(p, s, p.state, h);
  for (int64_t t = 0; t < p.length; t++) {
    const T y = team_sum(advance(p, s, t, a, h));
    if (s.mine && s.lane == 0) p.y[(s.at * p.length + t) * p.channels + s.channel] = y;
  }
  write_states(p, s, p.last, h);
}

template <class T> __global__ void __launch_bounds__(THREADS) walk_back(const job<T> p) {
  TY_SHARED(T, shares, 2 * THREADS);
  const seat<T> s(p);
  const int64_t chunks = (p.length + CHUNK - 1) / CHUNK, rows = p.batch * p.channels, size = rows * p.states;
  T a[EACH], h[EACH], g[EACH], da[EACH];
  read_rates(p, s, a);
  read_states(p, s, p.state, h);
  read_states(p, s, p.dlast, g);
  for (int e = 0; e < EACH; e++) da[e] = 0;
  for (int64_t t = 0; t < p.length; t++) {
    if (t % CHUNK == 0) write_states(p, s, p.starts + t / CHUNK * size, h);
    advance(p, s, t, a, h);
  }
  for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
    const int64_t begin = chunk * CHUNK, end = begin + CHUNK < p.length ? begin + CHUNK : p.length;
    /* Each thread reads what it has written itself. */
    read_states(p, s, s.mine ? p.starts + chunk * size : nullptr, h);
    for (int64_t t = begin; t < end; t++) {
      advance(p, s, t, a, h);
      write_states(p, s, p.within + (t - begin) * size, h);
    }
    for (int64_t t = end - 1; t >= begin; t--) {
      const int64_t token = s.at * p.length + t, at = token * p.channels + s.channel;
      const T step = p.delta[at], value = p.u[at], dy = s.mine ? p.dy[at] : T(0);
      const T *before = t > begin ? p.within + (t - begin - 1) * size : p.starts + chunk * size;
      T past[EACH], into = 0, slope = 0;
      read_states(p, s, s.mine ? p.within + (t - begin) * size : nullptr, h);
      read_states(p, s, s.mine ? before : nullptr, past);
      for (int e = 0; e < EACH; e++) { /* all threads alike: there are barriers */
        const int64_t n = s.lane + e * TEAM, first = e * TEAM;
        if (first >= p.states) break;
        T by_in = 0, by_out = 0;
        if (n < p.states && s.mine) {
          const T all = g[e] + p.c[token * p.states + n] * dy, held = all * ty_exp(step * a[e]);
          const T rate = held * past[e];
          by_in = all * step * value;
          by_out = h[e] * dy;
          into += all * p.b[token * p.states + n];
          slope += rate * a[e];
          da[e] += rate * step;
          g[e] = held;
        }
        shares[threadIdx.x] = by_in;
        shares[THREADS + threadIdx.x] = by_out;
        __syncthreads();
        if (threadIdx.x < 2 * TEAM && first + threadIdx.x % TEAM < p.states) {
          T sum = 0;
          for (int team = 0; team < TEAMS; team++)
            sum += shares[threadIdx.x / TEAM * THREADS + team * TEAM + threadIdx.x % TEAM];
          const int64_t part = threadIdx.x / TEAM * p.tiles + blockIdx.x;
          p.parts[(part * p.batch * p.length + token) * p.states + first + threadIdx.x % TEAM] = sum;
        }
        __syncthreads();
      }
      into = team_sum(into);
      slope = team_sum(slope);
      if (s.mine && s.lane == 0) {
        p.du[at] = step * into;
        p.ddelta[at] = value * into + slope;
      }
    }
  }
  write_states(p, s, p.dstate, g);
  write_states(p, s, p.rates, da);
}

/* to[e] = the sum of from[part][e], in the order of the parts. */
template <class T> __global__ void __launch_bounds__(256) sum_parts(T *to, const T *from, int64_t parts, int64_t n) {
  for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < n; e += (int64_t)gridDim.x * blockDim.x) {
    T sum = 0;
    for (int64_t part = 0; part < parts; part++) sum += from[part * n + e];
    to[e] = sum;
  }
}
template <class T> static bool run_sum(T *to, const T *from, int64_t parts, int64_t n) {
  return n == 0 || TY_LAUNCH((sum_parts<T>), ty_cuda_blocks(n, 256), 256, 0, to, from, parts, n);
}

template <class T> static job<T> job_of(const ty_kernel_args *k) {
  job<T> p = {};
  p.u = ty_data_of<T>(k->in[0]), p.delta = ty_data_of<T>(k->in[1]), p.a = ty_data_of<T>(k->in[2]);
  p.b = ty_data_of<T>(k->in[3]), p.c = ty_data_of<T>(k->in[4]), p.state = ty_data_of<T>(k->in[5]);
  p.batch = k->in[0]->size[0], p.length = k->in[0]->size[1], p.channels = k->in[0]->size[2];
  p.states = k->in[2]->size[1];
  p.tiles = (p.channels + TEAMS - 1) / TEAMS;
  return p;
}

template <class T> static bool fits(const job<T> &p) {
  if (p.states > MOST)
    return ty_fail(TY_EUNSUPPORTED, "selective_scan: a: expected at most %d states of a channel on a GPU, got %lld",
                   (int)MOST, (long long)p.states);
  return p.batch <= 65535 ||
         ty_fail(TY_EUNSUPPORTED, "selective_scan: u: expected at most 65535 sequences on a GPU, got %lld",
                 (long long)p.batch);
}

} // namespace

/* in: u, delta, a, b, c, state; out: y, the last state. */
TY_CUDA_KERNEL(selective_scan) {
  return ty_for_reals(k->in[0]->dtype, "selective_scan", [&](auto kind) {
    typedef decltype(kind) T;
    job<T> p = job_of<T>(k);
    p.y = ty_data_of<T>(k->out[0]), p.last = ty_data_of<T>(k->out[1]);
    if (!fits(p)) return false;
    if (p.batch * p.channels == 0) return true;
    return TY_LAUNCH((walk<T>), dim3((unsigned)p.tiles, (unsigned)p.batch), THREADS, 0, p);
  });
}

/* in: as above, then the gradients of y and of the last state; out: those of u, delta, a, b, c and of the state. */
TY_CUDA_KERNEL(selective_scan_backward) {
  return ty_for_reals(k->in[0]->dtype, "selective_scan_backward", [&](auto kind) {
    typedef decltype(kind) T;
    job<T> p = job_of<T>(k);
    p.dy = ty_data_of<T>(k->in[6]), p.dlast = ty_data_of<T>(k->in[7]);
    p.du = ty_data_of<T>(k->out[0]), p.ddelta = ty_data_of<T>(k->out[1]), p.dstate = ty_data_of<T>(k->out[5]);
    if (!fits(p)) return false;
    const int64_t tokens = p.batch * p.length * p.states, size = p.batch * p.channels * p.states;
    const int64_t chunks = (p.length + CHUNK - 1) / CHUNK;
    ty_cuda_scratch scratch((size_t)((chunks + CHUNK + 1) * size + 2 * p.tiles * tokens + 1) * sizeof(T));
    if (!scratch.data) return false;
    p.starts = scratch.as<T>(), p.within = p.starts + chunks * size, p.rates = p.within + CHUNK * size;
    p.parts = p.rates + size;
    if (p.batch * p.channels > 0 &&
        !TY_LAUNCH((walk_back<T>), dim3((unsigned)p.tiles, (unsigned)p.batch), THREADS, 0, p))
      return false;
    return run_sum(ty_data_of<T>(k->out[2]), p.rates, p.batch, p.channels * p.states) &&
           run_sum(ty_data_of<T>(k->out[3]), p.parts, p.tiles, tokens) &&
           run_sum(ty_data_of<T>(k->out[4]), p.parts + p.tiles * tokens, p.tiles, tokens);
  });
}
