/* Attention of blocks of queries to listed blocks of keys. What is listed is numbered through, key by key, and tiles of
 * 64 of these places are gathered; otherwise the tiles are those of attention.cu. Gradients of keys and values walk the
 * lists turned about: which entries name a block, so that every sum has one owner and one order. */
#include "attention.cuh"

struct bs_plan {
  at_plan p;
  const int64_t *blocks, *order, *begins; /* [b, h, queries, kept], [b, h, queries * kept], [b, h, keys + 1] */
  int64_t block_stride[4], order_stride[3], begin_stride[3];
  int query_block, key_block, queries, keys, kept;
};

/* The key at a place of a list; -1: none. */
TY_DEVICE int bs_key(const bs_plan &x, const int64_t *list, int place) {
  const int entry = place / x.key_block;
  if (entry >= x.kept) return -1;
  const int64_t block = list[entry * x.block_stride[3]];
  if (block < 0 || block >= x.keys) return -1; /* what is out of range has been reported */
  const int64_t key = block * x.key_block + place % x.key_block;
  return key < x.p.s ? static_cast<int>(key) : -1;
}
/* Whether there is any block in the tile that begins at this place. */
TY_DEVICE bool bs_any(const bs_plan &x, const int64_t *list, int place) {
  const int last = min((place + AT_TILE - 1) / x.key_block, x.kept - 1);
  for (int entry = place / x.key_block; entry <= last; entry++)
    if (list[entry * x.block_stride[3]] >= 0) return true;
  return false;
}

/* A block of threads: up to 64 queries of one block. */
struct bs_task {
  int b, head, kv_head, block, first, end; /* queries [first, end) */
  const int64_t *list;
};
TY_DEVICE bs_task bs_task_of(const bs_plan &x, int task) {
  const int tiles = at_tiles(x.query_block);
  bs_task t;
  t.block = task / tiles % x.queries;
  t.head = task / tiles / x.queries % x.p.heads, t.b = task / tiles / x.queries / x.p.heads;
  t.kv_head = t.head / x.p.group;
  t.first = t.block * x.query_block + task % tiles * AT_TILE;
  t.end = min(min((t.block + 1) * x.query_block, x.p.t), t.first + AT_TILE);
  t.list = x.blocks + t.b * x.block_stride[0] + t.head * x.block_stride[1] + t.block * x.block_stride[2];
  return t;
}

template <class T> TY_DEVICE const T *bs_base(const at_view &v, int b, int head) {
  return static_cast<const T *>(v.data) + b * v.stride[0] + head * v.stride[1];
}
/* A tile of the rows `first` to `end` of a head, and one of the keys at the places from `place` on. */
template <class C, class T>
TY_DEVICE void bs_load(ty_shared_ptr<at_pack<C>> tile, const at_view &v, int b, int head, int first, int end,
                       int chunk) {
  const T *base = bs_base<T>(v, b, head);
  at_load<C, T>(tile, v, chunk, [&](int i) -> const T * {
    return first + i < end ? base + int64_t{ first + i } * v.stride[2] : nullptr;
  });
}
template <class C, class T>
TY_DEVICE void bs_gather(ty_shared_ptr<at_pack<C>> tile, const bs_plan &x, const at_view &v, const bs_task &t,
                         int place, int chunk) {
  const T *base = bs_base<T>(v, t.b, t.kv_head);
  at_load<C, T>(tile, v, chunk, [&](int i) -> const T * {
    const int key = bs_key(x, t.list, place + i);
    return key >= 0 ? base + int64_t{ key } * v.stride[2] : nullptr;
  });
}

__global__ void bs_check(const bs_plan x, const ty_cuda_watch watch) {
  const int64_t n = int64_t{ x.p.batch } * x.p.heads * x.queries * x.kept;
  for (int64_t i = blockIdx.x * int64_t{ blockDim.x } + threadIdx.x; i < n; i += int64_t{ gridDim.x } * blockDim.x) {
    const int64_t entry = i % x.kept, block = i / x.kept % x.queries, of = i / x.kept / x.queries;
    const int64_t at = x.blocks[of / x.p.heads * x.block_stride[0] + of % x.p.heads * x.block_stride[1] +
                                block * x.block_stride[2] + entry * x.block_stride[3]];
    if (at != -1) ty_in_range(watch, at, x.keys);
  }
}

template <class T, int NP>
__global__ void __launch_bounds__(AT_THREADS) bs_forward(const bs_plan x, const at_result out) {
  typedef ty_compute<T> C;
  enum { V = 16 / sizeof(C) };
  const at_plan &p = x.p;
  const C none = -std::numeric_limits<C>::infinity();
  const int d_packs = at_packs<C>(p.q.width), v_packs = at_packs<C>(p.v.width);
  const int chunks = at_chunks(d_packs), d_pitch = at_pitch(d_packs), v_pitch = at_pitch(v_packs);
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE, ty = static_cast<int>(threadIdx.x) / AT_SIDE;
  const bs_task t = bs_task_of(x, static_cast<int>(blockIdx.x));
  const int v_chunk = static_cast<int>(blockIdx.y),
            v_left = min(v_packs - v_chunk * AT_CHUNK, static_cast<int>(AT_CHUNK));
  TY_SHARED_DYNAMIC(at_pack<C>, room);
  ty_shared_ptr<at_pack<C>> queries = room, keys = queries + AT_TILE * d_pitch, values = keys + AT_TILE * d_pitch;
  ty_shared_ptr<at_pack<C>> weights = values + AT_TILE * v_pitch;
  C maximum[AT_EACH], total[AT_EACH];
  at_pack<C> sums[AT_EACH][NP] = {};
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) maximum[i] = none, total[i] = 0;
  bool fresh = true;
  const int places = t.first < t.end ? x.kept * x.key_block : 0;
  for (int place = 0; place < places; place += AT_TILE) {
    if (!bs_any(x, t.list, place)) continue;
    C s[AT_EACH][AT_EACH] = {};
    for (int chunk = 0; chunk < chunks; chunk++) {
      __syncthreads();
      if (fresh || chunks > 1) bs_load<C, T>(queries, p.q, t.b, t.head, t.first, t.end, chunk);
      bs_gather<C, T>(keys, x, p.k, t, place, chunk);
      if (chunk == 0) bs_gather<C, T>(values, x, p.v, t, place, v_chunk);
      __syncthreads();
      at_products<C>(queries, keys, d_pitch, min(d_packs - chunk * AT_CHUNK, static_cast<int>(AT_CHUNK)), s);
    }
    bool there[AT_EACH];
#pragma unroll
    for (int j = 0; j < AT_EACH; j++) there[j] = bs_key(x, t.list, place + tx + j * AT_SIDE) >= 0;
#pragma unroll
    for (int i = 0; i < AT_EACH; i++) {
      C top = none;
#pragma unroll
      for (int j = 0; j < AT_EACH; j++) {
        s[i][j] = there[j] ? s[i][j] * static_cast<C>(p.scale) : none;
        top = s[i][j] > top ? s[i][j] : top;
      }
      top = at_across(top, true);
      top = top > maximum[i] ? top : maximum[i];
      const C shift = top == none ? C{} : top, factor = at_exp(maximum[i] - shift);
      maximum[i] = top;
      total[i] *= factor;
#pragma unroll
      for (int j = 0; j < AT_EACH; j++) {
        s[i][j] = at_exp(s[i][j] - shift);
        total[i] += s[i][j];
      }
#pragma unroll
      for (int c = 0; c < NP; c++)
#pragma unroll
        for (int e = 0; e < V; e++) sums[i][c].v[e] *= factor;
    }
    fresh = false;
    at_put<C>(weights, s);
    __syncthreads();
    at_weigh<C, NP>(weights, values, v_pitch, v_left, min(places - place, static_cast<int>(AT_TILE)), sums);
  }
  const int left = p.v.width - v_chunk * AT_CHUNK * V;
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) {
    const C sum = at_across(total[i], false);
    const int row = t.first + ty * AT_EACH + i;
    if (row >= t.end) continue;
    const int64_t at = (int64_t{ t.b } * p.heads + t.head) * p.t + row;
    at_store<C, T, NP>(static_cast<T *>(out.y) + at * p.v.width + v_chunk * AT_CHUNK * V, left, sums[i],
                       sum == 0 ? C{} : 1 / sum);
    if (tx == 0 && v_chunk == 0) static_cast<C *>(out.lse)[at] = sum == 0 ? none : maximum[i] + log(sum);
  }
}

/* ---- gradients ---- */

struct bs_gradients {
  at_view g, y;
  const void *lse, *dlse; /* dlse: NULL or wanted */
  int64_t lse_stride[3], dlse_stride[3];
  void *delta, *dq, *dk, *dv; /* delta [batch, heads, t] */
};

/* delta = rowsum(g y) - dlse: a warp takes a row. */
template <class T> __global__ void __launch_bounds__(AT_THREADS) bs_deltas(const at_plan p, const bs_gradients a) {
  typedef ty_compute<T> C;
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
  const int64_t n = int64_t{ p.batch } * p.heads * p.t, each = AT_THREADS / TY_WARP;
  for (int64_t i = blockIdx.x * each + threadIdx.x / TY_WARP; i < n; i += gridDim.x * each) {
    const int64_t pos = i % p.t, head = i / p.t % p.heads, b = i / p.t / p.heads;
    const T *g = bs_base<T>(a.g, static_cast<int>(b), static_cast<int>(head)) + pos * a.g.stride[2];
    const T *y = bs_base<T>(a.y, static_cast<int>(b), static_cast<int>(head)) + pos * a.y.stride[2];
    C sum = 0;
    for (int c = lane; c < p.v.width; c += TY_WARP)
      sum += ty_widen(g[c * a.g.stride[3]]) * ty_widen(y[c * a.y.stride[3]]);
    sum = ty_warp_reduce(sum, ty_plus<C>{});
    if (lane != 0) continue;
    if (a.dlse)
      sum -= static_cast<const C *>(a.dlse)[b * a.dlse_stride[0] + head * a.dlse_stride[1] + pos * a.dlse_stride[2]];
    static_cast<C *>(a.delta)[i] = sum;
  }
}

/* What the weights of a row take; one that is not there or saw nothing is not seen. */
template <class C> struct bs_known {
  C lse, delta;
  bool there;
};
template <class C>
TY_DEVICE bs_known<C> bs_known_of(const at_plan &p, const bs_gradients &a, int b, int head, int row) {
  bs_known<C> x = { 0, 0, row >= 0 };
  if (!x.there) return x;
  x.lse = static_cast<const C *>(a.lse)[b * a.lse_stride[0] + head * a.lse_stride[1] + row * a.lse_stride[2]];
  x.delta = static_cast<const C *>(a.delta)[(int64_t{ b } * p.heads + head) * p.t + row];
  x.there = x.lse != -std::numeric_limits<C>::infinity();
  return x;
}
template <class C>
TY_DEVICE void bs_slope(const at_plan &p, const bs_known<C> &known, bool there, C *weight, C *slope) {
  const bool seen = known.there && there;
  const C w = at_exp(seen ? *weight * static_cast<C>(p.scale) - known.lse : C{});
  *weight = seen ? w : 0;
  *slope = seen ? w * (*slope - known.delta) : 0;
}

template <class T, int NP>
__global__ void __launch_bounds__(AT_THREADS, 1) bs_query_gradients(const bs_plan x, const bs_gradients a) {
  typedef ty_compute<T> C;
  enum { V = 16 / sizeof(C) };
  const at_plan &p = x.p;
  const bs_task t = bs_task_of(x, static_cast<int>(blockIdx.x));
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE, ty = static_cast<int>(threadIdx.x) / AT_SIDE;
  const int result = static_cast<int>(blockIdx.y);
  TY_SHARED_DYNAMIC(at_pack<C>, room);
  const at_room<C> m = at_room_of<C>(p, room);
  at_pack<C> sums[AT_EACH][NP] = {};
  bs_known<C> rows[AT_EACH];
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) {
    const int row = t.first + ty * AT_EACH + i;
    rows[i] = bs_known_of<C>(p, a, t.b, t.head, row < t.end ? row : -1);
  }
  bool fresh = true;
  const int places = t.first < t.end ? x.kept * x.key_block : 0;
  for (int place = 0; place < places; place += AT_TILE) {
    if (!bs_any(x, t.list, place)) continue;
    C s[AT_EACH][AT_EACH] = {}, ds[AT_EACH][AT_EACH] = {};
    for (int chunk = 0; chunk < m.d_chunks; chunk++) {
      __syncthreads();
      if (fresh || m.d_chunks > 1) bs_load<C, T>(m.own_d, p.q, t.b, t.head, t.first, t.end, chunk);
      bs_gather<C, T>(m.other_d, x, p.k, t, place, chunk);
      __syncthreads();
      at_products<C>(m.own_d, m.other_d, m.d_pitch, min(m.d_packs - chunk * AT_CHUNK, static_cast<int>(AT_CHUNK)), s);
    }
    for (int chunk = 0; chunk < m.v_chunks; chunk++) {
      __syncthreads();
      if (fresh || m.v_chunks > 1) bs_load<C, T>(m.own_v, a.g, t.b, t.head, t.first, t.end, chunk);
      bs_gather<C, T>(m.other_v, x, p.v, t, place, chunk);
      __syncthreads();
      at_products<C>(m.own_v, m.other_v, m.v_pitch, min(m.v_packs - chunk * AT_CHUNK, static_cast<int>(AT_CHUNK)), ds);
    }
    fresh = false;
#pragma unroll
    for (int j = 0; j < AT_EACH; j++) {
      const bool there = bs_key(x, t.list, place + tx + j * AT_SIDE) >= 0;
#pragma unroll
      for (int i = 0; i < AT_EACH; i++) bs_slope(p, rows[i], there, &s[i][j], &ds[i][j]);
    }
    at_put<C>(m.slopes, ds);
    if (m.d_chunks > 1) bs_gather<C, T>(m.other_d, x, p.k, t, place, result); /* its readers have met since */
    __syncthreads();
    at_weigh<C, NP>(m.slopes, m.other_d, m.d_pitch, min(m.d_packs - result * AT_CHUNK, static_cast<int>(AT_CHUNK)),
                    min(places - place, static_cast<int>(AT_TILE)), sums);
  }
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) {
    const int row = t.first + ty * AT_EACH + i, from = result * AT_CHUNK * V;
    if (row >= t.end) continue;
    const int64_t at = (int64_t{ t.b } * p.heads + t.head) * p.t + row;
    at_store<C, T, NP>(static_cast<T *>(a.dq) + at * p.q.width + from, p.q.width - from, sums[i],
                       static_cast<C>(p.scale));
  }
}

/* The query at a place of the entries [begin, end) that name a block; -1: none. */
TY_DEVICE int bs_query(const bs_plan &x, const int64_t *order, int begin, int end, int place) {
  const int entry = begin + place / x.query_block;
  if (entry >= end) return -1;
  const int64_t row = order[entry * x.order_stride[2]] / x.kept * x.query_block + place % x.query_block;
  return row < x.p.t ? static_cast<int>(row) : -1;
}

template <class T, int NP>
__global__ void __launch_bounds__(AT_THREADS, 1) bs_key_gradients(const bs_plan x, const bs_gradients a) {
  typedef ty_compute<T> C;
  enum { V = 16 / sizeof(C) };
  const at_plan &p = x.p;
  const int tiles = at_tiles(x.key_block), task = static_cast<int>(blockIdx.x), block = task / tiles % x.keys;
  const int kv_head = task / tiles / x.keys % p.kv_heads, b = task / tiles / x.keys / p.kv_heads;
  const int first = block * x.key_block + task % tiles * AT_TILE;
  const int end = min(min((block + 1) * x.key_block, p.s), first + AT_TILE), result = static_cast<int>(blockIdx.y);
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE, ty = static_cast<int>(threadIdx.x) / AT_SIDE;
  TY_SHARED_DYNAMIC(at_pack<C>, room);
  const at_room<C> m = at_room_of<C>(p, room);
  at_pack<C> dk[AT_EACH][NP] = {}, dv[AT_EACH][NP] = {};
  bool fresh = true;
  for (int head = kv_head * p.group; head < (kv_head + 1) * p.group && first < end; head++) {
    const int64_t *order = x.order + b * x.order_stride[0] + head * x.order_stride[1];
    const int64_t *begins = x.begins + b * x.begin_stride[0] + head * x.begin_stride[1];
    const int from = static_cast<int>(begins[block * x.begin_stride[2]]);
    const int to = static_cast<int>(begins[(block + 1) * x.begin_stride[2]]);
    const int64_t places = int64_t{ to - from } * x.query_block;
    for (int64_t at = 0; at < places; at += AT_TILE) {
      const int place = static_cast<int>(at);
      C s[AT_EACH][AT_EACH] = {}, ds[AT_EACH][AT_EACH] = {};
      auto load = [&](ty_shared_ptr<at_pack<C>> tile, const at_view &v, int chunk) {
        const T *base = bs_base<T>(v, b, head);
        at_load<C, T>(tile, v, chunk, [&](int i) -> const T * {
          const int row = bs_query(x, order, from, to, place + i);
          return row >= 0 ? base + int64_t{ row } * v.stride[2] : nullptr;
        });
      };
      for (int chunk = 0; chunk < m.d_chunks; chunk++) {
        __syncthreads();
        if (fresh || m.d_chunks > 1) bs_load<C, T>(m.own_d, p.k, b, kv_head, first, end, chunk);
        load(m.other_d, p.q, chunk);
        __syncthreads();
        at_products<C>(m.own_d, m.other_d, m.d_pitch, min(m.d_packs - chunk * AT_CHUNK, static_cast<int>(AT_CHUNK)), s);
      }
      for (int chunk = 0; chunk < m.v_chunks; chunk++) {
        __syncthreads();
        if (fresh || m.v_chunks > 1) bs_load<C, T>(m.own_v, p.v, b, kv_head, first, end, chunk);
        load(m.other_v, a.g, chunk);
        __syncthreads();
        at_products<C>(m.own_v, m.other_v, m.v_pitch, min(m.v_packs - chunk * AT_CHUNK, static_cast<int>(AT_CHUNK)),
                       ds);
      }
      fresh = false;
#pragma unroll
      for (int j = 0; j < AT_EACH; j++) {
        const bs_known<C> row = bs_known_of<C>(p, a, b, head, bs_query(x, order, from, to, place + tx + j * AT_SIDE));
#pragma unroll
        for (int i = 0; i < AT_EACH; i++) bs_slope(p, row, first + ty * AT_EACH + i < end, &s[i][j], &ds[i][j]);
      }
      at_put<C>(m.weights, s);
      at_put<C>(m.slopes, ds);
      if (m.d_chunks > 1 && result < m.d_chunks) load(m.other_d, p.q, result);
      __syncthreads(); /* also: the products with other_v have been read */
      if (m.v_chunks > 1 && result < m.v_chunks) {
        load(m.other_v, a.g, result);
        __syncthreads();
      }
      const int n = static_cast<int>(min(places - at, static_cast<int64_t>(AT_TILE)));
      at_weigh<C, NP>(m.weights, m.other_v, m.v_pitch, min(m.v_packs - result * AT_CHUNK, static_cast<int>(AT_CHUNK)),
                      n, dv);
      at_weigh<C, NP>(m.slopes, m.other_d, m.d_pitch, min(m.d_packs - result * AT_CHUNK, static_cast<int>(AT_CHUNK)), n,
                      dk);
    }
  }
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) {
    const int key = first + ty * AT_EACH + i, from = result * AT_CHUNK * V;
    if (key >= end) continue;
    const int64_t at = (int64_t{ b } * p.kv_heads + kv_head) * p.s + key;
    at_store<C, T, NP>(static_cast<T *>(a.dk) + at * p.q.width + from, p.q.width - from, dk[i],
                       static_cast<C>(p.scale));
    at_store<C, T, NP>(static_cast<T *>(a.dv) + at * p.v.width + from, p.v.width - from, dv[i], C{ 1 });
  }
}

/* False after ty_fail(). The lists are checked on the GPU. */
static bool bs_plan_of(bs_plan *x, const ty_view *q, const ty_view *k, const ty_view *v, const ty_view *blocks,
                       const ty_p_blocks *params) {
  *x = {};
  const ty_p_attention plain = { params->scale, 0, false, false, -1, 0 };
  if (!at_plan_of(&x->p, q, k, v, nullptr, nullptr, &plain, false)) return false;
  const int64_t most = INT32_MAX / 2, keys = (k->size[2] + params->key_block - 1) / params->key_block;
  x->query_block = static_cast<int>(params->query_block < q->size[2] + 1 ? params->query_block : q->size[2] + 1);
  x->key_block = static_cast<int>(params->key_block < k->size[2] + 1 ? params->key_block : k->size[2] + 1);
  if (blocks->size[3] * x->key_block > most || blocks->size[2] * blocks->size[3] > most ||
      blocks->size[2] * x->query_block > most)
    return ty_fail(TY_EUNSUPPORTED, "block_sparse_attention: too long for cuda");
  x->queries = static_cast<int>(blocks->size[2]), x->kept = static_cast<int>(blocks->size[3]);
  x->keys = static_cast<int>(keys);
  x->blocks = static_cast<const int64_t *>(blocks->data);
  for (int d = 0; d < 4; d++) x->block_stride[d] = blocks->stride[d];
  const int64_t n = q->size[0] * q->size[1] * blocks->size[2] * blocks->size[3];
  const bs_plan plan = *x;
  const ty_cuda_watch watch = ty_cuda_watched();
  return n == 0 || TY_LAUNCH(bs_check, ty_cuda_blocks(n, AT_THREADS), AT_THREADS, 0, plan, watch);
}

TY_CUDA_KERNEL(block_sparse_attention) {
  bs_plan x;
  if (!bs_plan_of(&x, k->in[0], k->in[1], k->in[2], k->in[3], static_cast<const ty_p_blocks *>(k->params)))
    return false;
  const at_result out = { k->out[0]->data, k->out[1]->data, 1, 0, nullptr, nullptr };
  const int64_t tasks = int64_t{ x.p.batch } * x.p.heads * x.queries * at_tiles(x.query_block);
  if (tasks == 0) return true;
  if (tasks > INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "block_sparse_attention: a batch too large for cuda");
  return ty_for_floats(k->in[0]->dtype, "block_sparse_attention", [&](auto type) {
    typedef decltype(type) T;
    typedef ty_compute<T> C;
    const int d_packs = at_packs<C>(x.p.q.width), v_packs = at_packs<C>(x.p.v.width);
    const size_t room = sizeof(at_pack<C>) * AT_TILE *
                        static_cast<size_t>(2 * at_pitch(d_packs) + at_pitch(v_packs) + at_weights_pitch<C>());
    const dim3 grid(static_cast<unsigned>(tasks), static_cast<unsigned>(at_chunks(v_packs)));
    return v_packs <= AT_SIDE ? TY_LAUNCH((bs_forward<T, 1>), grid, AT_THREADS, room, x, out)
                              : TY_LAUNCH((bs_forward<T, 2>), grid, AT_THREADS, room, x, out);
  });
}

/* in: g, q, k, v, y, lse, dlse, blocks, order, begins; out: dq, dk, dv. */
TY_CUDA_KERNEL(block_sparse_attention_backward) {
  const ty_view *q = k->in[1], *lse = k->in[5], *dlse = k->in[6], *order = k->in[8], *begins = k->in[9];
  bs_plan x;
  if (!bs_plan_of(&x, q, k->in[2], k->in[3], k->in[7], static_cast<const ty_p_blocks *>(k->params))) return false;
  x.order = static_cast<const int64_t *>(order->data), x.begins = static_cast<const int64_t *>(begins->data);
  bs_gradients a = {};
  const size_t bytes = at_computed_bytes(q, false);
  a.g = at_view_of(k->in[0], bytes), a.y = at_view_of(k->in[4], bytes);
  a.lse = lse->data, a.dlse = dlse ? dlse->data : nullptr;
  for (int d = 0; d < 3; d++) {
    x.order_stride[d] = order->stride[d], x.begin_stride[d] = begins->stride[d];
    a.lse_stride[d] = lse->stride[d], a.dlse_stride[d] = dlse ? dlse->stride[d] : 0;
  }
  a.dq = k->out[0]->data, a.dk = k->out[1]->data, a.dv = k->out[2]->data;
  const int64_t rows = int64_t{ x.p.batch } * x.p.heads * x.p.t;
  const int64_t row_tasks = int64_t{ x.p.batch } * x.p.heads * x.queries * at_tiles(x.query_block);
  const int64_t key_tasks = int64_t{ x.p.batch } * x.p.kv_heads * x.keys * at_tiles(x.key_block);
  if (row_tasks > INT32_MAX || key_tasks > INT32_MAX)
    return ty_fail(TY_EUNSUPPORTED, "block_sparse_attention_backward: a batch too large for cuda");
  ty_cuda_scratch delta(static_cast<size_t>(rows + 1) * sizeof(double));
  if (!delta.data) return false;
  a.delta = delta.data;
  return ty_for_floats(q->dtype, "block_sparse_attention_backward", [&](auto type) {
    typedef decltype(type) T;
    typedef ty_compute<T> C;
    const int d_packs = at_packs<C>(x.p.q.width), v_packs = at_packs<C>(x.p.v.width);
    const unsigned d_chunks = static_cast<unsigned>(at_chunks(d_packs)),
                   v_chunks = static_cast<unsigned>(at_chunks(v_packs));
    if (rows && !TY_LAUNCH((bs_deltas<T>), ty_cuda_blocks(rows, AT_THREADS / TY_WARP), AT_THREADS, 0, x.p, a))
      return false;
    if (row_tasks && !TY_LAUNCH((bs_query_gradients<T, 2>), dim3(static_cast<unsigned>(row_tasks), d_chunks),
                                AT_THREADS, at_room_bytes<C>(x.p, 1), x, a))
      return false;
    return !key_tasks || TY_LAUNCH((bs_key_gradients<T, 2>),
                                   dim3(static_cast<unsigned>(key_tasks), d_chunks > v_chunks ? d_chunks : v_chunks),
                                   AT_THREADS, at_room_bytes<C>(x.p, 2), x, a);
  });
}
