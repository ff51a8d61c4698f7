/* Batched matrix products [batch..., m, k] x [batch..., k, n] and what linear layers do to them. Floats and bytes go to
 * cuBLASLt where it is installed; the kernel here is for other integers, for what the library does not take, and for the
 * emulated device. */
#include "matmul.cuh"

#include "activation.cuh"

enum { MM_SIDE = 16, MM_THREADS = MM_SIDE * MM_SIDE };

/* Sums of integers wrap around, so they are unsigned; halves are summed in f32. */
template <class Acc, class T> TY_DEVICE Acc mm_widen(T x) { return static_cast<Acc>(ty_widen(x)); }
template <class Out, class Acc> TY_DEVICE Out mm_narrow(Acc x) {
  return ty_narrow<Out>(static_cast<ty_compute<Out>>(x));
}

/* N elements of an operand whose neighbours are `step` apart; zeros from `left` on. */
template <int N, class Acc, class T> TY_DEVICE ty_pack<Acc, N> mm_load(const T *from, int64_t step, int left) {
  ty_pack<Acc, N> x;
#pragma unroll
  for (int i = 0; i < N; i++) x.v[i] = i < left ? mm_widen<Acc>(from[i * step]) : Acc{};
  return x;
}

/* A block computes a tile of 16 E x 16 E, a thread E x E elements of it, in packs of 16 bytes that lie 16 packs apart. The
 * tiles of A and B stand in shared memory with k outside, so that both are read in packs; two of each take turns, one
 * being filled while the other is multiplied. */
template <class A, class B, class Out, class Acc, int E, int DEPTH>
__global__ void __launch_bounds__(MM_THREADS, 1) mm_tiles(const mm_task t, bool vectors) {
  enum {
    V = 16 / sizeof(Acc),
    TILE = MM_SIDE * E,
    PACKS = TILE / V, /* of a row of a tile */
    ROW = PACKS + 1,  /* with the gap that spreads the rows over the banks */
    EACH = E / V,     /* packs of a thread in a row */
    LOADS = DEPTH * PACKS / MM_THREADS
  };
  static_assert(LOADS * MM_THREADS == DEPTH * PACKS, "each thread loads as many packs");
  typedef ty_pack<Acc, V> pack;
  TY_SHARED(pack, a_tile, 2 * DEPTH * ROW);
  TY_SHARED(pack, b_tile, 2 * DEPTH * ROW);
  const int tid = static_cast<int>(threadIdx.x), tx = tid % MM_SIDE, ty = tid / MM_SIDE;
  const int64_t down = (t.m + TILE - 1) / TILE, row0 = blockIdx.x % down * TILE, column0 = blockIdx.x / down * TILE;
  /* Neighbouring threads load neighbours in memory. */
  const bool a_along = t.a_row != 1, b_along = t.b_col != 1;

  for (int64_t batch = blockIdx.y; batch < t.count; batch += gridDim.y) {
    const A *a = static_cast<const A *>(t.a);
    const B *b = static_cast<const B *>(t.b);
    int64_t rest = batch;
    for (int d = 0; d < t.batch_dims; d++) {
      a += rest % t.size[d] * t.a_step[d];
      b += rest % t.size[d] * t.b_step[d];
      rest /= t.size[d];
    }
    /* Where this thread's packs come from, and how much of each there is. */
    const A *a_from[LOADS];
    const B *b_from[LOADS];
    int a_left[LOADS], b_left[LOADS], a_depth[LOADS], b_depth[LOADS];
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
      int i = tid + l * MM_THREADS;
      a_depth[l] = a_along ? i % DEPTH : i / PACKS;
      b_depth[l] = b_along ? i % DEPTH : i / PACKS;
      int64_t row = row0 + (a_along ? i / DEPTH : i % PACKS) * V,
              column = column0 + (b_along ? i / DEPTH : i % PACKS) * V;
      a_from[l] = a + row * t.a_row + a_depth[l] * t.a_col;
      b_from[l] = b + column * t.b_col + b_depth[l] * t.b_row;
      a_left[l] = static_cast<int>(t.m - row < V ? t.m - row : int64_t{ V });
      b_left[l] = static_cast<int>(t.n - column < V ? t.n - column : int64_t{ V });
    }
    pack a_next[LOADS], b_next[LOADS];
    auto fetch = [&](int64_t depth) {
#pragma unroll
      for (int l = 0; l < LOADS; l++) {
        a_next[l] = mm_load<V, Acc>(a_from[l], t.a_row, a_depth[l] < depth ? a_left[l] : 0);
        b_next[l] = mm_load<V, Acc>(b_from[l], t.b_col, b_depth[l] < depth ? b_left[l] : 0);
        a_from[l] += DEPTH * t.a_col;
        b_from[l] += DEPTH * t.b_row;
      }
    };
    auto put = [&](int half) {
#pragma unroll
      for (int l = 0; l < LOADS; l++) {
        int i = tid + l * MM_THREADS, base = half * DEPTH * ROW;
        a_tile[base + (a_along ? i % DEPTH * ROW + i / DEPTH : i / PACKS * ROW + i % PACKS)] = a_next[l];
        b_tile[base + (b_along ? i % DEPTH * ROW + i / DEPTH : i / PACKS * ROW + i % PACKS)] = b_next[l];
      }
    };

    Acc sum[E][E] = {};
    if (t.k > 0) {
      fetch(t.k);
      put(0);
    }
    __syncthreads();
    int half = 0;
    for (int64_t left = t.k; left > 0; left -= DEPTH, half ^= 1) {
      bool more = left > DEPTH;
      if (more) fetch(left - DEPTH);
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        pack x[EACH], y[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          x[e] = a_tile[(half * DEPTH + k) * ROW + ty + e * MM_SIDE];
          y[e] = b_tile[(half * DEPTH + k) * ROW + tx + e * MM_SIDE];
        }
#pragma unroll
        for (int i = 0; i < E; i++)
#pragma unroll
          for (int j = 0; j < E; j++) sum[i][j] += x[i / V].v[i % V] * y[j / V].v[j % V];
      }
      if (more) put(half ^ 1);
      __syncthreads();
    }

    /* What follows is said once, not E x E times: a loop takes the pack that is first in the sums and moves up the
     * others, because an array of registers has no index. */
#pragma unroll 1
    for (int i = 0; i < E * EACH; i++) {
      pack x;
#pragma unroll
      for (int j = 0; j < V; j++) x.v[j] = sum[0][j];
#pragma unroll
      for (int j = 0; j + V < E * E; j++) sum[j / E][j % E] = sum[(j + V) / E][(j + V) % E];
      int64_t row = row0 + (i / EACH / V * MM_SIDE + ty) * V + i / EACH % V;
      int64_t column = column0 + (i % EACH * MM_SIDE + tx) * V;
      int64_t left = t.n - column, at = (batch * t.m + row) * t.n + column;
      if (row >= t.m || left <= 0) continue;
      ty_pack<Out, V> y;
#pragma unroll
      for (int j = 0; j < V; j++) {
        if constexpr (std::is_floating_point<Acc>::value) {
          if (t.bias && j < left) x.v[j] += static_cast<const Acc *>(t.bias)[column + j];
          if (t.residual && j < left) x.v[j] += ty_widen(static_cast<const Out *>(t.residual)[at + j]);
          x.v[j] = ty_activate(t.activation, x.v[j]);
        }
        y.v[j] = mm_narrow<Out>(x.v[j]);
      }
      Out *to = static_cast<Out *>(t.out) + at;
      if (vectors) {
        *reinterpret_cast<ty_pack<Out, V> *>(to) = y;
      } else {
#pragma unroll
        for (int j = 0; j < V; j++)
          if (j < left) to[j] = y.v[j];
      }
    }
  }
}

template <class A, class B, class Out, class Acc, int E> static bool mm_launch(const mm_task &t) {
  enum { TILE = MM_SIDE * E, V = 16 / sizeof(Acc), WIDTH = V * sizeof(Out), DEPTH = E == 8 ? 8 : 16 };
  int64_t blocks = ((t.m + TILE - 1) / TILE) * ((t.n + TILE - 1) / TILE);
  if (blocks > INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "matmul: a product too large for cuda");
  dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(t.count < 65535 ? t.count : 65535));
  bool vectors = t.n % V == 0 && reinterpret_cast<uintptr_t>(t.out) % WIDTH == 0;
  return TY_LAUNCH((mm_tiles<A, B, Out, Acc, E, DEPTH>), grid, MM_THREADS, 0, t, vectors);
}

/* Large tiles read less, once there are enough of them for all processors. */
template <class T> static bool mm_floats(const mm_task &t) {
  if (((t.m + 127) / 128) * ((t.n + 127) / 128) * t.count >= ty_cuda_processors() && t.m > 64 && t.n > 64)
    return mm_launch<T, T, T, float, 8>(t);
  return mm_launch<T, T, T, float, 4>(t);
}

static bool mm_own(const mm_task &t) {
  switch (t.dtype) {
    case TY_F32: return mm_floats<float>(t);
    case TY_F16: return mm_floats<ty_f16>(t);
    case TY_BF16: return mm_floats<ty_bf16>(t);
    case TY_F64: return mm_launch<double, double, double, double, 4>(t);
    case TY_U8: return mm_launch<uint8_t, uint8_t, uint8_t, uint32_t, 4>(t);
    case TY_I8: return mm_launch<int8_t, int8_t, int8_t, uint32_t, 4>(t);
    case TY_I16: return mm_launch<int16_t, int16_t, int16_t, uint32_t, 4>(t);
    case TY_I32: return mm_launch<int32_t, int32_t, int32_t, uint32_t, 4>(t);
    case TY_I64: return mm_launch<int64_t, int64_t, int64_t, uint64_t, 4>(t);
    default: return ty_cuda_no_kernel("matmul", t.dtype);
  }
}

/* a and b have the result's batch sizes, with strides of 0 where they broadcast, or none at all. */
static void mm_set_batch(mm_task *t, const ty_view *a, const ty_view *b, const ty_view *out) {
  t->count = 1;
  t->batch_dims = 0;
  for (int d = out->ndim - 3; d >= 0; d--) {
    int64_t a_step = d < a->ndim - 2 ? a->stride[d] : 0, b_step = d < b->ndim - 2 ? b->stride[d] : 0;
    int last = t->batch_dims - 1;
    if (out->size[d] == 1) continue;
    t->count *= out->size[d];
    if (last >= 0 && a_step == t->a_step[last] * t->size[last] && b_step == t->b_step[last] * t->size[last]) {
      t->size[last] *= out->size[d];
      continue;
    }
    t->size[++last] = out->size[d];
    t->a_step[last] = a_step;
    t->b_step[last] = b_step;
    t->batch_dims++;
  }
}

static mm_task mm_task_of(const ty_kernel_args *k) {
  const ty_view *a = k->in[0], *b = k->in[1], *out = k->out[0];
  const ty_p_activation *params = static_cast<const ty_p_activation *>(k->params);
  mm_task t = {};
  t.dtype = a->dtype, t.out_dtype = out->dtype;
  t.activation = params ? params->activation : TY_NO_ACTIVATION;
  t.m = out->size[out->ndim - 2], t.n = out->size[out->ndim - 1], t.k = a->size[a->ndim - 1];
  t.a = a->data, t.b = b->data, t.out = out->data;
  t.bias = k->nin > 2 && k->in[2] ? k->in[2]->data : nullptr;
  t.residual = k->nin > 3 && k->in[3] ? k->in[3]->data : nullptr;
  t.a_row = a->stride[a->ndim - 2], t.a_col = a->stride[a->ndim - 1];
  t.b_row = b->stride[b->ndim - 2], t.b_col = b->stride[b->ndim - 1];
  mm_set_batch(&t, a, b, out);
  return t;
}

/* Whether the library has taken it; *ok: whether that went well. */
static bool mm_taken(const mm_task &t, bool *ok) {
  mm_outcome outcome = mm_by_library(t);
  *ok = outcome == MM_DONE;
  return outcome != MM_NOT_THERE;
}

TY_CUDA_KERNEL(matmul) {
  if (k->out[0]->count == 0) return true;
  mm_task t = mm_task_of(k);
  bool ok;
  return mm_taken(t, &ok) ? ok : mm_own(t);
}

/* Exact products of bytes with sums of i32. */
TY_CUDA_KERNEL(matmul_int8) {
  if (k->out[0]->count == 0) return true;
  mm_task t = mm_task_of(k);
  bool ok;
  if (t.dtype == TY_U8) return mm_launch<uint8_t, int8_t, int32_t, uint32_t, 4>(t);
  return mm_taken(t, &ok) ? ok : mm_launch<int8_t, int8_t, int32_t, uint32_t, 4>(t);
}
