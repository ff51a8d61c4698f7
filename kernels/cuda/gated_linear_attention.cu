/* Gated linear attention, with the mathematics of kernels/cpu/attention/gated_linear_attention.c: chunks of 16 tokens, decays as
 * products of exp(g). What the tokens of a chunk do to each other, 16 x 16 weights, is found for all chunks at once. Then
 * a block walks along a sequence with a part of the state in shared memory: of its columns where the result has columns
 * of the state, of its rows where it has rows (gradients of q and k), as those parts never meet. */
#include "begins.cuh"
#include "exp_sum.cuh"

namespace {

enum { CHUNK = 16, PAIRS = CHUNK * CHUNK, SLICE = 32, THREADS = 128, PREFERRED = 96 << 10, MOST = 200 << 10 };

template <class T> struct operand { /* any strides; data NULL: absent */
  const T *data;
  int64_t stride[4];
  operand() : data(nullptr), stride() {}
  explicit operand(const ty_view *v) : data(v ? static_cast<const T *>(v->data) : nullptr), stride() {
    for (int d = 0; v && d < 4; d++) stride[d] = v->stride[d];
  }
  TY_DEVICE_MEMBER T at(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return data[a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]];
  }
};

template <class T> struct job {
  operand<T> q, k, v, g, state, dy, dstate;
  ty_reach packed;
  int64_t sequences, heads, length;
  int dk, dv, tile; /* tile: columns or rows of the state that a block has */
  T scale;
  T *weights, *scores; /* [b, h, t][CHUNK]: of token i and j <= i of its chunk */
  T *columns, *last;   /* results: o or the gradient of v, and the state */
  T *dq, *dkeys, *dg, *dinitial;
  T *running; /* [line][dk]: what all gates do by way of the last state */
};

/* One head of one sequence: tokens [begin, end) of a row. */
struct line {
  int64_t sequence, head, row, begin, end;
};
template <class T> TY_DEVICE line line_of(const job<T> &p, int64_t at) {
  line l = { at / p.heads, at % p.heads, at / p.heads, 0, p.length };
  if (!p.packed.begins) return l;
  l.row = 0;
  l.begin = p.packed.begins[l.sequence * p.packed.step];
  l.end = p.packed.begins[(l.sequence + 1) * p.packed.step];
  l.begin = l.begin < 0 ? 0 : l.begin < p.length ? l.begin : p.length; /* what is wrong has been reported */
  l.end = l.end < l.begin ? l.begin : l.end < p.length ? l.end : p.length;
  return l;
}
template <class T> TY_DEVICE int64_t token_of(const job<T> &p, const line &l, int64_t t) {
  return (l.row * p.heads + l.head) * p.length + t;
}

/* Weights q k' with their decay (GATED), or scores dy v'. */
template <class T, bool GATED> __global__ void __launch_bounds__(PAIRS) pairs(const job<T> p) {
  TY_SHARED(T, left, CHUNK * (SLICE + 1));
  TY_SHARED(T, right, CHUNK * (SLICE + 1));
  TY_SHARED(T, decay, CHUNK * (SLICE + 1));
  const line l = line_of(p, blockIdx.x);
  const int i = threadIdx.x / CHUNK, j = threadIdx.x % CHUNK, width = GATED ? p.dk : p.dv;
  for (int64_t t = l.begin + (int64_t)blockIdx.y * CHUNK; t < l.end; t += (int64_t)gridDim.y * CHUNK) {
    const int n = static_cast<int>(l.end - t < CHUNK ? l.end - t : int64_t{ CHUNK });
    T sum = 0;
    for (int first = 0; first < width; first += SLICE) {
      const int slice = width - first < SLICE ? width - first : SLICE;
      __syncthreads();
      for (int e = threadIdx.x; e < n * slice; e += PAIRS) {
        const int row = e / slice, d = e % slice, to = row * (SLICE + 1) + d;
        if (GATED) {
          left[to] = p.q.at(l.row, l.head, t + row, first + d) * p.scale;
          right[to] = p.k.at(l.row, l.head, t + row, first + d);
          decay[to] = ty_exp(p.g.at(l.row, l.head, t + row, first + d));
        } else {
          left[to] = p.dy.at(l.row, l.head, t + row, first + d);
          right[to] = p.v.at(l.row, l.head, t + row, first + d);
        }
      }
      __syncthreads();
      if (j > i || i >= n) continue;
      for (int d = 0; d < slice; d++) {
        T w = left[i * (SLICE + 1) + d] * right[j * (SLICE + 1) + d];
        if (GATED)
          for (int m = j + 1; m <= i; m++) w *= decay[m * (SLICE + 1) + d];
        sum += w;
      }
    }
    if (j <= i && i < n) (GATED ? p.weights : p.scores)[token_of(p, l, t + i) * CHUNK + j] = sum;
  }
}

/* The pairs of a chunk, to shared memory. */
template <class T>
TY_DEVICE void fetch_pairs(const job<T> &p, const line &l, int64_t t, int n, const T *from, ty_shared_ptr<T> to) {
  for (int e = threadIdx.x; e < n * CHUNK; e += THREADS)
    if (e % CHUNK <= e / CHUNK) to[e] = from[token_of(p, l, t) * CHUNK + e];
}

template <class T> static size_t columns_room(const job<T> &p, int tile) {
  return ((size_t)p.dk * tile + (2 * CHUNK + 1) * (size_t)p.dk + CHUNK * tile + PAIRS) * sizeof(T);
}

/* Columns of the state S, walking on: o = since q S + weights v. BACK: of its gradient D, walking back: the gradient of
 * v, until k D + weights' dy. */
template <class T, bool BACK> __global__ void __launch_bounds__(THREADS) walk_columns(const job<T> p) {
  TY_SHARED_DYNAMIC(T, shared);
  const int dk = p.dk, tile = p.tile, first = (int)blockIdx.y * tile;
  ty_shared_ptr<T> state = shared, into = state + dk * tile, onto = into + CHUNK * dk, whole = onto + CHUNK * dk;
  ty_shared_ptr<T> values = whole + dk, pair = values + CHUNK * tile;
  const line l = line_of(p, blockIdx.x);
  const operand<T> &begin = BACK ? p.dstate : p.state, &given = BACK ? p.dy : p.v;
  for (int e = threadIdx.x; e < dk * tile; e += THREADS) {
    const int c = first + e % tile;
    state[e] = begin.data && c < p.dv ? begin.at(l.sequence, l.head, e / tile, c) : T(0);
  }
  const int64_t chunks = (l.end - l.begin + CHUNK - 1) / CHUNK;
  for (int64_t turn = 0; turn < chunks; turn++) {
    const int64_t t = l.begin + (BACK ? chunks - 1 - turn : turn) * CHUNK;
    const int n = static_cast<int>(l.end - t < CHUNK ? l.end - t : int64_t{ CHUNK });
    __syncthreads();
    for (int d = threadIdx.x; d < dk; d += THREADS) {
      T decay = 1;
      for (int i = 0; i < n; i++) {
        decay *= ty_exp(p.g.at(l.row, l.head, t + i, d));
        into[i * dk + d] = p.q.at(l.row, l.head, t + i, d) * p.scale * decay;
      }
      whole[d] = decay;
      decay = 1;
      for (int i = n - 1; i >= 0; i--) {
        onto[i * dk + d] = p.k.at(l.row, l.head, t + i, d) * decay;
        decay *= ty_exp(p.g.at(l.row, l.head, t + i, d));
      }
    }
    for (int e = threadIdx.x; e < n * tile; e += THREADS) {
      const int c = first + e % tile;
      values[e] = c < p.dv ? given.at(l.row, l.head, t + e / tile, c) : T(0);
    }
    fetch_pairs<T>(p, l, t, n, p.weights, pair);
    __syncthreads();
    for (int e = threadIdx.x; e < n * tile; e += THREADS) {
      const int i = e / tile, c = e % tile;
      T sum = 0;
      for (int d = 0; d < dk; d++) sum += (BACK ? onto : into)[i * dk + d] * state[d * tile + c];
      if (BACK)
        for (int m = i; m < n; m++) sum += pair[m * CHUNK + i] * values[m * tile + c];
      else
        for (int m = 0; m <= i; m++) sum += pair[i * CHUNK + m] * values[m * tile + c];
      if (first + c < p.dv) p.columns[token_of(p, l, t + i) * p.dv + first + c] = sum;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < dk * tile; e += THREADS) {
      const int d = e / tile, c = e % tile;
      T s = whole[d] * state[e];
      for (int i = 0; i < n; i++) s += (BACK ? into : onto)[i * dk + d] * values[i * tile + c];
      state[e] = s;
    }
  }
  for (int e = threadIdx.x; !BACK && e < dk * tile; e += THREADS) { /* each thread has written these elements itself */
    const int c = first + e % tile;
    if (c < p.dv) p.last[((l.sequence * p.heads + l.head) * dk + e / tile) * p.dv + c] = state[e];
  }
}

template <class T> static size_t rows_room(const job<T> &p, int tile) {
  return ((size_t)tile * (p.dv + 1) + 2 * CHUNK * (size_t)p.dv + (6 * CHUNK + 2) * tile + PAIRS) * sizeof(T);
}

/* Rows of the state S, walking on: the gradient of q, since (dy S') + scores k. BACK: of its gradient D: that of k, until
 * (v D') + scores' q, and that of g, the sums of q dq - k dk from the end, without what a token does to itself. */
template <class T, bool BACK> __global__ void __launch_bounds__(THREADS) walk_rows(const job<T> p) {
  TY_SHARED_DYNAMIC(T, shared);
  const int dv = p.dv, tile = p.tile, first = (int)blockIdx.y * tile, pitch = dv + 1;
  const int high = p.dk - first < tile ? p.dk - first : tile;
  ty_shared_ptr<T> state = shared, dy = state + tile * pitch, v = dy + CHUNK * dv, q = v + CHUNK * dv;
  ty_shared_ptr<T> k = q + CHUNK * tile, decay = k + CHUNK * tile, since = decay + CHUNK * tile;
  ty_shared_ptr<T> until = since + CHUNK * tile, others = until + CHUNK * tile, whole = others + CHUNK * tile;
  ty_shared_ptr<T> running = whole + tile, pair = running + tile;
  const line l = line_of(p, blockIdx.x);
  const operand<T> &begin = BACK ? p.dstate : p.state;
  for (int e = threadIdx.x; e < high * dv; e += THREADS)
    state[e / dv * pitch + e % dv] = begin.data ? begin.at(l.sequence, l.head, first + e / dv, e % dv) : T(0);
  if (BACK)
    for (int d = threadIdx.x; d < high; d += THREADS) running[d] = p.running[(int64_t)blockIdx.x * p.dk + first + d];
  const int64_t chunks = (l.end - l.begin + CHUNK - 1) / CHUNK;
  for (int64_t turn = 0; turn < chunks; turn++) {
    const int64_t t = l.begin + (BACK ? chunks - 1 - turn : turn) * CHUNK;
    const int n = static_cast<int>(l.end - t < CHUNK ? l.end - t : int64_t{ CHUNK });
    __syncthreads();
    for (int d = threadIdx.x; d < high; d += THREADS) {
      T a = 1;
      for (int i = 0; i < n; i++) {
        const int e = i * tile + d;
        q[e] = p.q.at(l.row, l.head, t + i, first + d) * p.scale;
        k[e] = p.k.at(l.row, l.head, t + i, first + d);
        decay[e] = ty_exp(p.g.at(l.row, l.head, t + i, first + d));
        a *= decay[e];
        since[e] = a;
      }
      whole[d] = a;
      a = 1;
      for (int i = n - 1; i >= 0; i--) {
        until[i * tile + d] = a;
        a *= decay[i * tile + d];
      }
    }
    for (int e = threadIdx.x; e < n * dv; e += THREADS) {
      dy[e] = p.dy.at(l.row, l.head, t + e / dv, e % dv);
      v[e] = p.v.at(l.row, l.head, t + e / dv, e % dv);
    }
    fetch_pairs<T>(p, l, t, n, p.scores, pair);
    __syncthreads();
    for (int e = threadIdx.x; e < n * high; e += THREADS) {
      const int i = e / high, d = e % high;
      const int64_t to = token_of(p, l, t + i) * p.dk + first + d;
      T sum = 0, a = 1;
      for (int c = 0; c < dv; c++) sum += state[d * pitch + c] * (BACK ? v : dy)[i * dv + c];
      sum *= (BACK ? until : since)[i * tile + d];
      if (BACK) {
        for (int m = i + 1; m < n; m++) {
          a *= decay[m * tile + d];
          sum += pair[m * CHUNK + i] * q[m * tile + d] * a;
        }
        others[i * tile + d] = sum;
        p.dkeys[to] = sum + pair[i * CHUNK + i] * q[i * tile + d];
      } else {
        for (int m = i - 1; m >= 0; m--) {
          a *= decay[(m + 1) * tile + d];
          sum += pair[i * CHUNK + m] * k[m * tile + d] * a;
        }
        p.dg[to] = q[i * tile + d] * sum;
        p.dq[to] = p.scale * (sum + pair[i * CHUNK + i] * k[i * tile + d]);
      }
    }
    __syncthreads();
    for (int d = threadIdx.x; BACK && d < high; d += THREADS)
      for (int i = n - 1; i >= 0; i--) {
        T *dg = p.dg + token_of(p, l, t + i) * p.dk + first + d;
        *dg = running[d] += *dg - k[i * tile + d] * others[i * tile + d];
      }
    for (int e = threadIdx.x; e < high * dv; e += THREADS) {
      const int d = e / dv, c = e % dv;
      T s = whole[d] * state[d * pitch + c];
      for (int i = 0; i < n; i++) {
        const int at = i * tile + d;
        s += BACK ? q[at] * since[at] * dy[i * dv + c] : k[at] * until[at] * v[i * dv + c];
      }
      state[d * pitch + c] = s;
    }
  }
  for (int e = threadIdx.x; BACK && e < high * dv; e += THREADS)
    p.dinitial[((l.sequence * p.heads + l.head) * p.dk + first + e / dv) * dv + e % dv] =
        state[e / dv * pitch + e % dv];
  __syncthreads();
  for (int d = threadIdx.x; !BACK && d < high; d += THREADS) {
    T sum = 0;
    for (int c = 0; p.dstate.data && c < dv; c++)
      sum += state[d * pitch + c] * p.dstate.at(l.sequence, l.head, first + d, c);
    p.running[(int64_t)blockIdx.x * p.dk + first + d] = sum;
  }
}

/* Launches a walk with as wide a tile as shared memory has good room for. */
template <class T, class Room, class Launch> static bool walk(job<T> p, int width, Room room, Launch launch) {
  p.tile = 32;
  while (p.tile > 1 && (p.tile >= 2 * width || room(p, p.tile) > PREFERRED)) p.tile /= 2;
  if (room(p, p.tile) > MOST)
    return ty_fail(TY_EUNSUPPORTED, "gated_linear_attention: heads as wide as %d and %d are too wide for the GPU", p.dk,
                   p.dv);
  if (width == 0 || p.sequences * p.heads == 0) return true;
  return launch(p, dim3((unsigned)(p.sequences * p.heads), (unsigned)((width + p.tile - 1) / p.tile)), room(p, p.tile));
}

template <class T> static job<T> job_of(const ty_view *const *in, const ty_p_attention *params) {
  const ty_view *q = in[0], *begins = in[5];
  job<T> p = {};
  p.q = operand<T>(q), p.k = operand<T>(in[1]), p.v = operand<T>(in[2]), p.g = operand<T>(in[3]);
  p.state = operand<T>(in[4]);
  p.packed = ty_reach_of(q->size[2], q->size[2], params, begins);
  p.sequences = begins ? begins->size[0] - 1 : q->size[0];
  p.heads = q->size[1];
  p.length = q->size[2];
  p.dk = (int)q->size[3];
  p.dv = (int)in[2]->size[3];
  p.scale = (T)params->scale;
  return p;
}

template <class T, bool GATED> static bool run_pairs(const job<T> &p) {
  int64_t lines = p.sequences * p.heads, chunks = (p.length + CHUNK - 1) / CHUNK;
  if (lines == 0 || chunks == 0) return true;
  return TY_LAUNCH((pairs<T, GATED>), dim3((unsigned)lines, (unsigned)(chunks < 65535 ? chunks : 65535)), PAIRS, 0, p);
}

/* Tokens that belong to no sequence get zeros. */
static bool clear_outside(const ty_reach &packed, const ty_view *out) {
  return !packed.begins || !out->count || ty_cuda_zero(out->data, (size_t)ty_view_bytes(out));
}

template <class T, bool BACK> static bool run_columns(const job<T> &p) {
  return walk(p, p.dv, columns_room<T>, [](const job<T> &q, dim3 grid, size_t room) {
    return TY_LAUNCH((walk_columns<T, BACK>), grid, THREADS, room, q);
  });
}
template <class T, bool BACK> static bool run_rows(const job<T> &p) {
  return walk(p, p.dk, rows_room<T>, [](const job<T> &q, dim3 grid, size_t room) {
    return TY_LAUNCH((walk_rows<T, BACK>), grid, THREADS, room, q);
  });
}

} // namespace

/* in: q, k, v, g, state, begins; out: o, last state. */
TY_CUDA_KERNEL(gated_linear_attention) {
  return ty_for_reals(k->in[0]->dtype, "gated_linear_attention", [&](auto kind) {
    typedef decltype(kind) T;
    job<T> p = job_of<T>(k->in, static_cast<const ty_p_attention *>(k->params));
    ty_cuda_scratch weights((size_t)(k->in[0]->size[0] * p.heads * p.length * CHUNK + 1) * sizeof(T));
    if (!weights.data) return false;
    p.weights = weights.as<T>();
    p.columns = ty_data_of<T>(k->out[0]), p.last = ty_data_of<T>(k->out[1]);
    return ty_begins_checked(p.packed) && clear_outside(p.packed, k->out[0]) && run_pairs<T, true>(p) &&
           run_columns<T, false>(p);
  });
}

/* in: as above, then the gradients of o and of the last state; out: the gradients of q, k, v, g and of the state. */
TY_CUDA_KERNEL(gated_linear_attention_backward) {
  return ty_for_reals(k->in[0]->dtype, "gated_linear_attention_backward", [&](auto kind) {
    typedef decltype(kind) T;
    job<T> p = job_of<T>(k->in, static_cast<const ty_p_attention *>(k->params));
    const int64_t pair_count = k->in[0]->size[0] * p.heads * p.length * CHUNK, lines = p.sequences * p.heads;
    ty_cuda_scratch scratch((size_t)(2 * pair_count + lines * p.dk + 1) * sizeof(T));
    if (!scratch.data) return false;
    p.weights = scratch.as<T>(), p.scores = p.weights + pair_count, p.running = p.scores + pair_count;
    p.dy = operand<T>(k->in[6]), p.dstate = operand<T>(k->in[7]);
    p.dq = ty_data_of<T>(k->out[0]), p.dkeys = ty_data_of<T>(k->out[1]), p.columns = ty_data_of<T>(k->out[2]);
    p.dg = ty_data_of<T>(k->out[3]), p.dinitial = ty_data_of<T>(k->out[4]);
    for (int i = 0; i < 4; i++)
      if (!clear_outside(p.packed, k->out[i])) return false;
    return ty_begins_checked(p.packed) && run_pairs<T, true>(p) && run_pairs<T, false>(p) && run_columns<T, true>(p) &&
           run_rows<T, false>(p) && run_rows<T, true>(p);
  });
}
