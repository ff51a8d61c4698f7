/* Gradients of attention. With P the weights, computed again from the rows' log-sum-exp, G the result's gradient and
 * delta = rowsum(G y): dV = P' G, dS = P (G V' - delta), dQ = dS K, dK = dS' Q (Dao et al. 2022). One kernel walks tiles
 * of query rows along the keys for dQ, one tiles of keys along the query rows for dK and dV, so that every sum has one
 * owner and one order. */
#include "attention.cuh"
#include "attention_library.cuh"

/* The products Q K' and G V' of the rows from r0 (before `end`) and the keys from j0; which side is the own one, indexed
 * by i and loaded only when it is new, is said by ROWS_OWN. */
template <class T, bool ROWS_OWN, class C>
TY_DEVICE void at_both_products(const at_plan &p, const at_gradients &a, const at_room<C> &m, int b, int kv_head,
                                int r0, int end, int j0, bool fresh, C (&s)[AT_EACH][AT_EACH],
                                C (&ds)[AT_EACH][AT_EACH]) {
  for (int chunk = 0; chunk < m.d_chunks; chunk++) {
    bool own = fresh || m.d_chunks > 1;
    __syncthreads();
    if (own || !ROWS_OWN) at_load_rows<C, T>(ROWS_OWN ? m.own_d : m.other_d, p, p.q, b, kv_head, r0, end, chunk);
    if (own || ROWS_OWN) at_load_keys<C, T>(ROWS_OWN ? m.other_d : m.own_d, p, p.k, b, kv_head, j0, chunk);
    __syncthreads();
    at_products<C>(m.own_d, m.other_d, m.d_pitch, min(m.d_packs - chunk * AT_CHUNK, static_cast<int>(AT_CHUNK)), s);
  }
  for (int chunk = 0; chunk < m.v_chunks; chunk++) {
    bool own = fresh || m.v_chunks > 1;
    __syncthreads();
    if (own || !ROWS_OWN) at_load_rows<C, T>(ROWS_OWN ? m.own_v : m.other_v, p, a.g, b, kv_head, r0, end, chunk);
    if (own || ROWS_OWN) at_load_keys<C, T>(ROWS_OWN ? m.other_v : m.own_v, p, p.v, b, kv_head, j0, chunk);
    __syncthreads();
    at_products<C>(m.own_v, m.other_v, m.v_pitch, min(m.v_packs - chunk * AT_CHUNK, static_cast<int>(AT_CHUNK)), ds);
  }
}

/* What the weights of a row take. A row that saw nothing has no keys. */
template <class C> struct at_known {
  at_row row;
  C lse, delta;
};
template <class C>
TY_DEVICE at_known<C> at_known_of(const at_plan &p, const at_gradients &a, int b, int kv_head, int r, int end) {
  at_known<C> x = { at_row_of(p, kv_head, r, end), 0, 0 };
  if (r >= end) return x;
  x.lse = static_cast<const C *>(
      a.lse)[b * a.lse_stride[0] + x.row.head * a.lse_stride[1] + x.row.pos * a.lse_stride[2]];
  x.delta = static_cast<const C *>(a.delta)[(int64_t{ b } * p.heads + x.row.head) * p.t + x.row.pos];
  if (x.lse == -std::numeric_limits<C>::infinity()) x.row.keys = {};
  return x;
}

/* From both products to the weight and the slope of the score, before its cap or (BENT: false, as the mask wants it)
 * after. What the row does not see stays out even where the hidden key holds NaN. */
template <bool BENT, class C>
TY_DEVICE void at_slope(const at_plan &p, int b, const at_known<C> &known, int key, C *weight, C *slope) {
  bool seen = at_has(known.row.keys, key);
  C bend = 1;
  C w = at_exp(at_score(p, b, known.row, key, *weight, &bend) - known.lse);
  *weight = seen ? w : 0;
  *slope = seen ? w * (*slope - known.delta) * (BENT ? bend : 1) : 0;
}

/* delta: a warp takes a row. */
template <class T> __global__ void __launch_bounds__(AT_THREADS) at_deltas(const at_plan p, const at_gradients a) {
  typedef ty_compute<T> C;
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
  const int64_t n = int64_t{ p.batch } * p.heads * p.t, each = AT_THREADS / TY_WARP;
  for (int64_t i = blockIdx.x * each + threadIdx.x / TY_WARP; i < n; i += gridDim.x * each) {
    int64_t pos = i % p.t, head = i / p.t % p.heads, b = i / p.t / p.heads;
    const T *g = static_cast<const T *>(a.g.data) + b * a.g.stride[0] + head * a.g.stride[1] + pos * a.g.stride[2];
    const T *y = static_cast<const T *>(a.y.data) + b * a.y.stride[0] + head * a.y.stride[1] + pos * a.y.stride[2];
    C sum = 0;
    for (int c = lane; c < p.v.width; c += TY_WARP)
      sum += ty_widen(g[c * a.g.stride[3]]) * ty_widen(y[c * a.y.stride[3]]);
    sum = ty_warp_reduce(sum, ty_plus<C>{});
    if (lane == 0) static_cast<C *>(a.delta)[i] = sum;
  }
}

template <class T, int NP>
__global__ void __launch_bounds__(AT_THREADS) at_query_gradients(const at_plan p, const at_gradients a) {
  typedef ty_compute<T> C;
  enum { V = 16 / sizeof(C) };
  const int tiles = at_tiles(p.rows), task = static_cast<int>(blockIdx.x), r0 = (tiles - 1 - task % tiles) * AT_TILE;
  const int kv_head = task / tiles % p.kv_heads, b = task / tiles / p.kv_heads, result = static_cast<int>(blockIdx.y);
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE, ty = static_cast<int>(threadIdx.x) / AT_SIDE;
  TY_SHARED_DYNAMIC(at_pack<C>, room);
  const at_room<C> m = at_room_of<C>(p, room);
  at_known<C> rows[AT_EACH];
  at_pack<C> sums[AT_EACH][NP] = {};
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) rows[i] = at_known_of<C>(p, a, b, kv_head, r0 + ty * AT_EACH + i, p.rows);
  const at_span span = at_tile_sees(p, r0, p.rows);
  const int first = span.low / AT_TILE * AT_TILE; /* which is never skipped */
  for (int j0 = first; j0 < span.high; j0 += AT_TILE) {
    if (!at_touches(span, j0, j0 + AT_TILE)) continue;
    C s[AT_EACH][AT_EACH] = {}, ds[AT_EACH][AT_EACH] = {};
    at_both_products<T, true, C>(p, a, m, b, kv_head, r0, p.rows, j0, j0 == first, s, ds);
#pragma unroll
    for (int i = 0; i < AT_EACH; i++)
#pragma unroll
      for (int j = 0; j < AT_EACH; j++) at_slope<true>(p, b, rows[i], j0 + tx + j * AT_SIDE, &s[i][j], &ds[i][j]);
    at_put<C>(m.slopes, ds);
    if (m.d_chunks > 1) at_load_keys<C, T>(m.other_d, p, p.k, b, kv_head, j0, result); /* its readers have met since */
    __syncthreads();
    at_weigh<C, NP>(m.slopes, m.other_d, m.d_pitch, min(m.d_packs - result * AT_CHUNK, static_cast<int>(AT_CHUNK)),
                    min(span.high - j0, static_cast<int>(AT_TILE)), sums);
  }
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) {
    if (r0 + ty * AT_EACH + i >= p.rows) continue;
    int64_t at = (int64_t{ b } * p.heads + rows[i].row.head) * p.t + rows[i].row.pos;
    int from = result * AT_CHUNK * V;
    at_store<C, T, NP>(static_cast<T *>(a.dq) + at * p.q.width + from, p.q.width - from, sums[i],
                       static_cast<C>(p.scale));
  }
}

template <class T, int NP>
__global__ void __launch_bounds__(AT_THREADS) at_key_gradients(const at_plan p, const at_gradients a) {
  typedef ty_compute<T> C;
  enum { V = 16 / sizeof(C) };
  const int tiles = at_tiles(p.s), task = static_cast<int>(blockIdx.x), j0 = task % tiles * AT_TILE;
  const int kv_head = task / tiles % p.kv_heads, b = task / tiles / p.kv_heads, result = static_cast<int>(blockIdx.y);
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE, ty = static_cast<int>(threadIdx.x) / AT_SIDE;
  TY_SHARED_DYNAMIC(at_pack<C>, room);
  const at_room<C> m = at_room_of<C>(p, room);
  at_pack<C> dk[AT_EACH][NP] = {}, dv[AT_EACH][NP] = {};
  bool fresh = true;
  for (int r0 = 0; r0 < p.rows; r0 += AT_TILE) {
    if (!at_touches(at_tile_sees(p, r0, p.rows), j0, j0 + AT_TILE)) continue;
    C s[AT_EACH][AT_EACH] = {}, ds[AT_EACH][AT_EACH] = {};
    at_both_products<T, false, C>(p, a, m, b, kv_head, r0, p.rows, j0, fresh, s, ds);
    fresh = false;
#pragma unroll
    for (int j = 0; j < AT_EACH; j++) {
      const at_known<C> row = at_known_of<C>(p, a, b, kv_head, r0 + tx + j * AT_SIDE, p.rows);
#pragma unroll
      for (int i = 0; i < AT_EACH; i++) at_slope<true>(p, b, row, j0 + ty * AT_EACH + i, &s[i][j], &ds[i][j]);
    }
    at_put<C>(m.weights, s);
    at_put<C>(m.slopes, ds);
    if (m.d_chunks > 1 && result < m.d_chunks) at_load_rows<C, T>(m.other_d, p, p.q, b, kv_head, r0, p.rows, result);
    __syncthreads(); /* also: the products with other_v have been read */
    if (m.v_chunks > 1 && result < m.v_chunks) {
      at_load_rows<C, T>(m.other_v, p, a.g, b, kv_head, r0, p.rows, result);
      __syncthreads();
    }
    const int n = min(p.rows - r0, static_cast<int>(AT_TILE));
    at_weigh<C, NP>(m.weights, m.other_v, m.v_pitch, min(m.v_packs - result * AT_CHUNK, static_cast<int>(AT_CHUNK)), n,
                    dv);
    at_weigh<C, NP>(m.slopes, m.other_d, m.d_pitch, min(m.d_packs - result * AT_CHUNK, static_cast<int>(AT_CHUNK)), n,
                    dk);
  }
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) {
    int key = j0 + ty * AT_EACH + i, from = result * AT_CHUNK * V;
    if (key >= p.s) continue;
    int64_t at = (int64_t{ b } * p.kv_heads + kv_head) * p.s + key;
    at_store<C, T, NP>(static_cast<T *>(a.dk) + at * p.q.width + from, p.q.width - from, dk[i],
                       static_cast<C>(p.scale));
    at_store<C, T, NP>(static_cast<T *>(a.dv) + at * p.v.width + from, p.v.width - from, dv[i], C{ 1 });
  }
}

/* The gradient of an added mask, of which each element may serve many batches, heads, queries or keys. A block owns the
 * elements of one batch and head of the mask that a tile needs, or all tiles of a dimension in which they share. */
template <class T>
__global__ void __launch_bounds__(AT_THREADS, 1) at_mask_gradient(const at_plan p, const at_gradients a) {
  typedef ty_compute<T> C;
  enum { V = 16 / sizeof(C) };
  const int *size = a.mask_size;
  const int own_rows = size[2] == 1 ? 1 : at_tiles(p.t), own_keys = size[3] == 1 ? 1 : at_tiles(p.s);
  const int tid = static_cast<int>(threadIdx.x), tx = tid % AT_SIDE, ty = tid / AT_SIDE;
  const int task = static_cast<int>(blockIdx.x), key_tile = task % own_keys, row_tile = task / own_keys % own_rows;
  const int of = task / own_keys / own_rows, of_head = of % size[1], of_batch = of / size[1];
  TY_SHARED_DYNAMIC(at_pack<C>, room);
  const at_room<C> m = at_room_of<C>(p, room);
  C sum[AT_EACH][AT_EACH] = {};
  for (int b = of_batch; b < p.batch; b += size[0])
    for (int head = of_head; head < p.heads; head += size[1]) {
      const int kv_head = head / p.group, row_begin = head % p.group * p.t, row_end = row_begin + p.t;
      const int last_row = size[2] == 1 ? at_tiles(p.t) : row_tile + 1;
      for (int rt = row_tile; rt < last_row; rt++) {
        const int r0 = row_begin + rt * AT_TILE;
        const at_span span = at_tile_sees(p, r0, row_end);
        const int last_key = size[3] == 1 ? at_tiles(p.s) : key_tile + 1;
        for (int jt = key_tile; jt < last_key; jt++) {
          const int j0 = jt * AT_TILE;
          if (!at_touches(span, j0, j0 + AT_TILE)) continue;
          C s[AT_EACH][AT_EACH] = {}, ds[AT_EACH][AT_EACH] = {};
          at_both_products<T, true, C>(p, a, m, b, kv_head, r0, row_end, j0, true, s, ds);
#pragma unroll
          for (int i = 0; i < AT_EACH; i++) {
            const at_known<C> row = at_known_of<C>(p, a, b, kv_head, r0 + ty * AT_EACH + i, row_end);
#pragma unroll
            for (int j = 0; j < AT_EACH; j++) {
              at_slope<false>(p, b, row, j0 + tx + j * AT_SIDE, &s[i][j], &ds[i][j]);
              sum[i][j] += ds[i][j];
            }
          }
        }
      }
    }
  at_put<C>(m.slopes, sum); /* [key][row] */
  __syncthreads();
  auto at = [&](int row, int key) {
    at_pack<C> x = m.slopes[key * at_weights_pitch<C>() + row / V];
    return x.v[row % V];
  };
  const int r0 = row_tile * AT_TILE, j0 = key_tile * AT_TILE;
  C *to = static_cast<C *>(a.dmask) + int64_t{ of } * size[2] * size[3];
  if (size[2] == 1 && size[3] == 1) {
    C all = 0;
    if (tid == 0)
      for (int key = 0; key < AT_TILE; key++)
        for (int row = 0; row < AT_TILE; row++) all += at(row, key);
    if (tid == 0) *to = all;
  } else if (size[2] == 1 || size[3] == 1) {
    if (tid >= AT_TILE || tid >= (size[2] == 1 ? p.s - j0 : p.t - r0)) return;
    C all = 0;
    for (int i = 0; i < AT_TILE; i++) all += size[2] == 1 ? at(i, tid) : at(tid, i);
    to[size[2] == 1 ? j0 + tid : r0 + tid] = all;
  } else {
    for (int i = tid; i < AT_TILE * AT_TILE; i += AT_THREADS) {
      int row = i / AT_TILE, key = i % AT_TILE;
      if (r0 + row < p.t && j0 + key < p.s) to[int64_t{ r0 + row } * p.s + j0 + key] = at(row, key);
    }
  }
}

template <class T> static bool at_mask_run(const at_plan &p, const at_gradients &a) {
  typedef ty_compute<T> C;
  int64_t tasks = int64_t{ a.mask_size[0] } * a.mask_size[1] * (a.mask_size[2] == 1 ? 1 : at_tiles(p.t)) *
                  (a.mask_size[3] == 1 ? 1 : at_tiles(p.s));
  if (tasks > INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "attention_backward: a mask too large for cuda");
  return TY_LAUNCH((at_mask_gradient<T>), static_cast<unsigned>(tasks), AT_THREADS, at_room_bytes<C>(p, 1), p, a);
}

template <class T> static bool at_run_deltas(const at_plan &p, const at_gradients &a) {
  int64_t n = int64_t{ p.batch } * p.heads * p.t;
  return n == 0 || TY_LAUNCH((at_deltas<T>), ty_cuda_blocks(n, AT_THREADS / TY_WARP), AT_THREADS, 0, p, a);
}

template <class T> static bool at_run_operands(const at_plan &p, const at_gradients &a) {
  typedef ty_compute<T> C;
  int d_packs = at_packs<C>(p.q.width), v_packs = at_packs<C>(p.v.width);
  int64_t heads = int64_t{ p.batch } * p.kv_heads, row_tasks = heads * at_tiles(p.rows),
          key_tasks = heads * at_tiles(p.s);
  unsigned d_chunks = static_cast<unsigned>(at_chunks(d_packs)), v_chunks = static_cast<unsigned>(at_chunks(v_packs));
  if (row_tasks > INT32_MAX || key_tasks > INT32_MAX)
    return ty_fail(TY_EUNSUPPORTED, "attention_backward: a batch too large for cuda");
  bool ok = true;
  if (row_tasks) {
    dim3 grid(static_cast<unsigned>(row_tasks), d_chunks);
    ok = d_packs <= AT_SIDE ? TY_LAUNCH((at_query_gradients<T, 1>), grid, AT_THREADS, at_room_bytes<C>(p, 1), p, a)
                            : TY_LAUNCH((at_query_gradients<T, 2>), grid, AT_THREADS, at_room_bytes<C>(p, 1), p, a);
  }
  if (ok && key_tasks) {
    dim3 grid(static_cast<unsigned>(key_tasks), d_chunks > v_chunks ? d_chunks : v_chunks);
    const size_t bytes = at_room_bytes<C>(p, 2);
    if constexpr (sizeof(T) > 2) /* halves as narrow as that are the tensor cores', but for capped scores */
      if (d_packs <= AT_SIDE && v_packs <= AT_SIDE)
        return TY_LAUNCH((at_key_gradients<T, 1>), grid, AT_THREADS, bytes, p, a);
    ok = TY_LAUNCH((at_key_gradients<T, 2>), grid, AT_THREADS, bytes, p, a);
  }
  return ok;
}

/* in: g, q, k, v, y, lse, mask, begins; out: dq, dk, dv and, when it has elements, the gradient of the mask. */
TY_CUDA_KERNEL(attention_backward) {
  dnn_outcome outcome = ty_attention_backward_by_library(k);
  if (outcome != DNN_NOT_THERE) return outcome == DNN_DONE;
  const ty_view *q = k->in[1], *lse = k->in[5], *dmask = k->nout > 3 ? k->out[3] : nullptr;
  const ty_p_attention *params = static_cast<const ty_p_attention *>(k->params);
  const bool tensor = at_on_tensor_cores(q, k->in[3]) && params->softcap == 0;
  at_plan p;
  if (!at_plan_of(&p, q, k->in[2], k->in[3], k->in[6], k->in[7], params, tensor) || !ty_begins_checked(p.reach))
    return false;
  at_gradients a = {};
  size_t bytes = at_computed_bytes(q, tensor);
  a.g = at_view_of(k->in[0], bytes), a.y = at_view_of(k->in[4], bytes);
  a.lse = lse->data;
  for (int d = 0; d < 3; d++) a.lse_stride[d] = lse->stride[d];
  a.dq = k->out[0]->data, a.dk = k->out[1]->data, a.dv = k->out[2]->data;
  if (dmask && dmask->count) {
    a.dmask = dmask->data;
    for (int d = 0; d < 4; d++) a.mask_size[d] = static_cast<int>(dmask->size[d]);
  }
  if (tensor && !ty_cuda_attention_tensor_backward(p, a, q->dtype)) return false;
  if (tensor && !a.dmask) return true;
  ty_cuda_scratch delta((static_cast<size_t>(p.batch) * static_cast<size_t>(p.heads) * static_cast<size_t>(p.t) + 1) *
                        sizeof(double));
  if (!delta.data) return false;
  a.delta = delta.data;
  return ty_for_floats(q->dtype, "attention_backward", [&](auto x) {
    typedef decltype(x) T;
    return at_run_deltas<T>(p, a) && (tensor || at_run_operands<T>(p, a)) && (!a.dmask || at_mask_run<T>(p, a));
  });
}
