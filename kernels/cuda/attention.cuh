/* What the kernels of attention share: the problem; and, for those without tensor cores, tiles of 64 query rows by 64 keys, of which each of 256 threads
 * computes 4 x 4. Query rows of all heads that share a key-value head are counted together, so that decoding with grouped
 * heads reads the keys once. Elements are computed with as C, float or double, and stand in shared memory so. */
#ifndef TY_KERNELS_CUDA_ATTENTION_CUH
#define TY_KERNELS_CUDA_ATTENTION_CUH

#include "begins.cuh"

enum { AT_TILE = 64, AT_SIDE = 16, AT_EACH = AT_TILE / AT_SIDE, AT_THREADS = AT_SIDE * AT_SIDE };

/* A tile is 64 rows of packs of 16 bytes, in chunks of at most 32 packs; longer rows are taken chunk by chunk. A thread
 * sums up to two packs of each row of a result. */
enum { AT_CHUNK = 32, AT_WEIGHTS_GAP = 1 };
template <class C> using at_pack = ty_pack<C, 16 / sizeof(C)>;

/* One operand [batch, heads, length, width]. */
struct at_view {
  const void *data;
  int64_t stride[4];
  int width;
  bool packs; /* 16 bytes' worth of C can be loaded at once */
};

struct at_plan {
  at_view q, k, v;
  int batch, heads, kv_heads, group, t, s, rows; /* rows: group * t */
  ty_reach reach;
  double scale, softcap; /* softcap 0: none */
  const void *mask;      /* NULL or [batch, heads, t, s] */
  int64_t mask_stride[4];
  bool mask_is_bool;
};

static inline at_view at_view_of(const ty_view *v, size_t compute_bytes) {
  int64_t n = 16 / static_cast<int64_t>(compute_bytes);
  at_view x = { v->data, {}, static_cast<int>(v->size[3]), v->stride[3] == 1 && v->size[3] % n == 0 };
  x.packs = x.packs && reinterpret_cast<uintptr_t>(v->data) % (ty_dtype_size[v->dtype] * static_cast<size_t>(n)) == 0;
  for (int d = 0; d < 4; d++) {
    x.stride[d] = v->stride[d];
    x.packs = x.packs && (d == 3 || v->stride[d] % n == 0);
  }
  return x;
}

/* Halves of up to this width go to the tensor cores: attention_tensor.cu and attention_tensor_backward.cu, but for the
 * gradients of capped scores. */
enum { AT_TENSOR_WIDEST = 256 };
static inline bool at_on_tensor_cores(const ty_view *q, const ty_view *v) {
  return ty_is_half((ty_dtype)q->dtype) && q->size[3] <= AT_TENSOR_WIDEST && v->size[3] <= AT_TENSOR_WIDEST;
}
/* Of an element in shared memory: tensor cores take halves as they are. */
static inline size_t at_computed_bytes(const ty_view *q, bool tensor) {
  return q->dtype == TY_F64 ? 8 : tensor ? 2 : 4;
}

/* Where the results go. */
struct at_result {
  void *y, *lse;
  int splits, split_tiles; /* parts of the keys, and tiles of each */
  void *sums;              /* with splits: [split][tile][row][dv] sums, then [split][tile][row][2] maximum and total */
  void *totals;
};

struct at_gradients {
  at_view g, y;
  const void *lse;
  int64_t lse_stride[3];
  void *delta; /* [batch, heads, t] */
  void *dq, *dk, *dv, *dmask;
  int mask_size[4];
};

/* Rows and keys of their tiles, and the launch for `tasks` tiles of rows in out.splits parts. */
int ty_cuda_attention_rows(const at_plan &p);
int ty_cuda_attention_keys(const at_plan &p);
bool ty_cuda_attention_tensor(const at_plan &p, const at_result &out, int dtype, unsigned tasks);
bool ty_cuda_attention_tensor_backward(const at_plan &p, const at_gradients &a, int dtype);

/* False after ty_fail() for what is longer than positions in a tile can count. */
static inline bool at_plan_of(at_plan *p, const ty_view *q, const ty_view *k, const ty_view *v, const ty_view *mask,
                              const ty_view *begins, const ty_p_attention *params, bool tensor) {
  const int64_t most = INT32_MAX - 2 * AT_TILE;
  int64_t group = k->size[1] ? q->size[1] / k->size[1] : 0, reach = q->size[2] + k->size[2];
  if (group * q->size[2] > most || reach > most || q->size[3] > most || v->size[3] > most)
    return ty_fail(TY_EUNSUPPORTED, "attention: too long for cuda");
  size_t bytes = at_computed_bytes(q, tensor);
  *p = {};
  p->q = at_view_of(q, bytes), p->k = at_view_of(k, bytes), p->v = at_view_of(v, bytes);
  p->batch = static_cast<int>(q->size[0]), p->heads = static_cast<int>(q->size[1]);
  p->kv_heads = static_cast<int>(k->size[1]), p->group = static_cast<int>(group);
  p->t = static_cast<int>(q->size[2]), p->s = static_cast<int>(k->size[2]);
  p->rows = p->group * p->t;
  p->reach = ty_reach_of(p->t, p->s, params, begins);
  p->scale = params->scale, p->softcap = params->softcap;
  if (!mask) return true;
  p->mask = mask->data;
  p->mask_is_bool = mask->dtype == TY_BOOL;
  for (int d = 0; d < 4; d++) p->mask_stride[d] = mask->stride[d];
  return true;
}

TY_ELEMENT int at_tiles(int n) { return (n + AT_TILE - 1) / AT_TILE; }
/* Packs of a row, and chunks of packs; a row of nothing has one chunk. */
template <class C> TY_ELEMENT int at_packs(int width) {
  return (width + 16 / static_cast<int>(sizeof(C)) - 1) / (16 / static_cast<int>(sizeof(C)));
}
TY_ELEMENT int at_chunks(int packs) { return packs > AT_CHUNK ? (packs + AT_CHUNK - 1) / AT_CHUNK : 1; }
/* From row to row of a tile in shared memory: odd, which spreads the rows over the banks. */
TY_ELEMENT int at_pitch(int packs) { return (packs < AT_CHUNK ? packs : AT_CHUNK) | 1; }
template <class C> TY_ELEMENT constexpr int at_weights_pitch() {
  return AT_TILE * static_cast<int>(sizeof(C)) / 16 + 1;
}

/* ---- who sees whom ---- */

/* Keys [low, high) without [gap_low, gap_high). */
struct at_span {
  int low, high, gap_low, gap_high;
};
TY_DEVICE at_span at_span_of(const at_plan &p, int pos) { /* may be empty, with low >= high */
  const ty_span x = ty_span_of(&p.reach, pos);
  return { static_cast<int>(x.low), static_cast<int>(x.high), static_cast<int>(x.gap_low),
           static_cast<int>(x.gap_high) };
}
TY_DEVICE bool at_has(const at_span &x, int key) {
  return key >= x.low && key < x.high && !(key >= x.gap_low && key < x.gap_high);
}
/* Whether it has any of the keys [from, to), and all. */
TY_DEVICE bool at_touches(const at_span &x, int from, int to) {
  return from < x.high && to > x.low && !(from >= x.gap_low && to <= x.gap_high);
}
TY_DEVICE bool at_covers(const at_span &x, int from, int to) {
  return from >= x.low && to <= x.high && (to <= x.gap_low || from >= x.gap_high);
}

/* A query row, and the keys that it may see. */
struct at_row {
  int head, pos;
  at_span keys;
};

/* Row r of a key-value head; from `end` on there is none. */
TY_DEVICE at_row at_row_of(const at_plan &p, int kv_head, int r, int end) {
  at_row x = { kv_head * p.group, 0, {} };
  if (r >= end) return x;
  x.head += r / p.t;
  x.pos = r % p.t;
  const at_span span = at_span_of(p, x.pos);
  if (span.low < span.high) x.keys = span;
  return x;
}

/* The keys that any of the rows first to last may see, and those that all of them see. Bounds rise with the position:
 * what lies in the first one's gap lies in that of all its sequence, and other sequences begin later. */
TY_DEVICE void at_rows_see(const at_plan &p, int first, int last, at_span *any, at_span *all) {
  const bool one_head = first / p.t == last / p.t;
  const at_span a = at_span_of(p, one_head ? first % p.t : 0), b = at_span_of(p, one_head ? last % p.t : p.t - 1);
  *any = { a.low, b.high, a.gap_low, a.gap_high };
  if (any->low >= any->high) *any = {};
  *all = { b.low, min(a.high, b.high), b.gap_low, b.gap_high };
}
TY_DEVICE at_span at_tile_sees(const at_plan &p, int first, int end) {
  at_span any, all;
  at_rows_see(p, first, min(first + AT_TILE, end) - 1, &any, &all);
  return any;
}

TY_DEVICE float at_tanh(float x) { return ty_tanh_f32(x); }
TY_DEVICE double at_tanh(double x) { return ty_tanh_f64(x); }

/* The score of a row and a key, from their product: -infinity where the key is hidden. bend: where there is a cap of
 * scores, what their derivatives are to be multiplied by. */
template <class C>
TY_DEVICE C at_score(const at_plan &p, int b, const at_row &row, int key, C product, C *bend = nullptr) {
  const C hidden = -std::numeric_limits<C>::infinity();
  if (!at_has(row.keys, key)) return hidden;
  C x = product * static_cast<C>(p.scale);
  if (p.softcap > 0) {
    const C bent = at_tanh(x / static_cast<C>(p.softcap));
    x = static_cast<C>(p.softcap) * bent;
    if (bend) *bend = 1 - bent * bent;
  }
  if (!p.mask) return x;
  int64_t at = b * p.mask_stride[0] + row.head * p.mask_stride[1] + row.pos * p.mask_stride[2] + key * p.mask_stride[3];
  if (p.mask_is_bool) return static_cast<const uint8_t *>(p.mask)[at] ? x : hidden;
  return x + static_cast<const C *>(p.mask)[at];
}

TY_DEVICE float at_exp(float x) { /* of what is at most about 0 */
#ifdef TY_ON_GPU
  return __expf(x);
#else
  return expf(x);
#endif
}
TY_DEVICE double at_exp(double x) { return exp(x); }

/* ---- tiles ---- */

/* Columns [V c, V c + V) of a row that begins at `row`; zeros beyond its width. */
template <class C, class T> TY_DEVICE at_pack<C> at_read(const at_view &v, const T *row, int c) {
  enum { V = 16 / sizeof(C) };
  at_pack<C> x;
  if (v.packs) {
    ty_pack<T, V> raw = *reinterpret_cast<const ty_pack<T, V> *>(row + c * V);
#pragma unroll
    for (int i = 0; i < V; i++) x.v[i] = ty_widen(raw.v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < V; i++) x.v[i] = c * V + i < v.width ? ty_widen(row[(c * V + i) * v.stride[3]]) : C{};
  }
  return x;
}

/* Fills a tile with a chunk of the rows that row(i) finds, which is NULL where there is none. */
template <class C, class T, class Row>
TY_DEVICE void at_load(ty_shared_ptr<at_pack<C>> tile, const at_view &v, int chunk, const Row &row) {
  const int packs = at_packs<C>(v.width), pitch = at_pitch(packs), from = chunk * AT_CHUNK;
  const int n = min(packs - from, static_cast<int>(AT_CHUNK));
  for (int i = static_cast<int>(threadIdx.x); i < AT_TILE * n; i += AT_THREADS) {
    int r = i / n, c = i % n;
    const T *at = row(r);
    tile[r * pitch + c] = at ? at_read<C, T>(v, at, from + c) : at_pack<C>{};
  }
}

/* Rows [r0, end) of a key-value head. */
template <class C, class T>
TY_DEVICE void at_load_rows(ty_shared_ptr<at_pack<C>> tile, const at_plan &p, const at_view &v, int b, int kv_head,
                            int r0, int end, int chunk) {
  const T *base = static_cast<const T *>(v.data) + b * v.stride[0] + int64_t{ kv_head } * p.group * v.stride[1];
  at_load<C, T>(tile, v, chunk, [&](int i) -> const T * {
    return r0 + i < end ? base + (r0 + i) / p.t * v.stride[1] + (r0 + i) % p.t * v.stride[2] : nullptr;
  });
}

template <class C, class T>
TY_DEVICE void at_load_keys(ty_shared_ptr<at_pack<C>> tile, const at_plan &p, const at_view &v, int b, int kv_head,
                            int j0, int chunk) {
  const T *base = static_cast<const T *>(v.data) + b * v.stride[0] + kv_head * v.stride[1];
  at_load<C, T>(tile, v, chunk,
                [&](int i) -> const T * { return j0 + i < p.s ? base + (j0 + i) * v.stride[2] : nullptr; });
}

/* sum[i][j] += the product of row 4 ty + i of one tile and row tx + 16 j of another, over n packs. */
template <class C>
TY_DEVICE void at_products(ty_shared_ptr<at_pack<C>> own, ty_shared_ptr<at_pack<C>> other, int pitch, int n,
                           C (&sum)[AT_EACH][AT_EACH]) {
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE, ty = static_cast<int>(threadIdx.x) / AT_SIDE;
  for (int c = 0; c < n; c++) {
    at_pack<C> x[AT_EACH], y[AT_EACH];
#pragma unroll
    for (int i = 0; i < AT_EACH; i++) {
      x[i] = own[(ty * AT_EACH + i) * pitch + c];
      y[i] = other[(tx + i * AT_SIDE) * pitch + c];
    }
#pragma unroll
    for (int e = 0; e < static_cast<int>(16 / sizeof(C)); e++)
#pragma unroll
      for (int i = 0; i < AT_EACH; i++)
#pragma unroll
        for (int j = 0; j < AT_EACH; j++) sum[i][j] += x[i].v[e] * y[j].v[e];
  }
}

/* Puts what each thread has of a tile where at_weigh() finds it: with the other side's rows outside. */
template <class C> TY_DEVICE void at_put(ty_shared_ptr<at_pack<C>> weights, const C (&x)[AT_EACH][AT_EACH]) {
  enum { V = 16 / sizeof(C) };
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE, ty = static_cast<int>(threadIdx.x) / AT_SIDE;
#pragma unroll
  for (int j = 0; j < AT_EACH; j++)
#pragma unroll
    for (int i = 0; i < AT_EACH; i += V) {
      at_pack<C> y;
#pragma unroll
      for (int e = 0; e < V; e++) y.v[e] = x[i + e][j];
      weights[(tx + j * AT_SIDE) * at_weights_pitch<C>() + (ty * AT_EACH + i) / V] = y;
    }
}

/* sum[i] += the rows [0, n) of a tile, each times its weight for row 4 ty + i; of their packs number tx and tx + 16. */
template <class C, int NP>
TY_DEVICE void at_weigh(ty_shared_ptr<at_pack<C>> weights, ty_shared_ptr<at_pack<C>> tile, int pitch, int packs, int n,
                        at_pack<C> (&sum)[AT_EACH][NP]) {
  enum { V = 16 / sizeof(C) };
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE, ty = static_cast<int>(threadIdx.x) / AT_SIDE;
  if (tx >= packs) return;
  for (int o = 0; o < n; o++) {
    at_pack<C> w[AT_EACH / V];
#pragma unroll
    for (int i = 0; i < AT_EACH / V; i++) w[i] = weights[o * at_weights_pitch<C>() + ty * AT_EACH / V + i];
#pragma unroll
    for (int c = 0; c < NP; c++) {
      if (tx + c * AT_SIDE >= packs) break;
      at_pack<C> x = tile[o * pitch + tx + c * AT_SIDE];
#pragma unroll
      for (int i = 0; i < AT_EACH; i++)
#pragma unroll
        for (int e = 0; e < V; e++) sum[i][c].v[e] += w[i / V].v[i % V] * x.v[e];
    }
  }
}

/* Stores `packs` packs of a row whose chunk begins at `to`, of which `width` elements are left. */
template <class C, class T, int NP> TY_DEVICE void at_store(T *to, int width, const at_pack<C> (&x)[NP], C factor) {
  enum { V = 16 / sizeof(C) };
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE;
  const bool whole = width % V == 0 && reinterpret_cast<uintptr_t>(to) % (V * sizeof(T)) == 0;
#pragma unroll
  for (int c = 0; c < NP; c++) {
    int at = (tx + c * AT_SIDE) * V;
    ty_pack<T, V> y;
#pragma unroll
    for (int e = 0; e < V; e++) y.v[e] = ty_narrow<T>(x[c].v[e] * factor);
    if (whole && at < width) {
      *reinterpret_cast<ty_pack<T, V> *>(to + at) = y;
    } else {
#pragma unroll
      for (int e = 0; e < V; e++)
        if (at + e < width) to[at + e] = y.v[e];
    }
  }
}

template <class C> TY_DEVICE C at_across(C x, bool largest) { /* the sum or the maximum over the 16 threads of a row */
#pragma unroll
  for (int step = AT_SIDE / 2; step > 0; step /= 2) {
    C y = __shfl_xor_sync(0xffffffffu, x, step);
    x = largest ? (y > x ? y : x) : x + y;
  }
  return x;
}

/* Where the tiles of one side stand in shared memory, and how long their rows are. */
template <class C> struct at_room {
  ty_shared_ptr<at_pack<C>> own_d, own_v, other_d, other_v, weights, slopes;
  int d_packs, v_packs, d_pitch, v_pitch, d_chunks, v_chunks;
};

template <class C> TY_DEVICE at_room<C> at_room_of(const at_plan &p, ty_shared_ptr<at_pack<C>> room) {
  at_room<C> m;
  m.d_packs = at_packs<C>(p.q.width), m.v_packs = at_packs<C>(p.v.width);
  m.d_pitch = at_pitch(m.d_packs), m.v_pitch = at_pitch(m.v_packs);
  m.d_chunks = at_chunks(m.d_packs), m.v_chunks = at_chunks(m.v_packs);
  m.own_d = room;
  m.own_v = m.own_d + AT_TILE * m.d_pitch;
  m.other_d = m.own_v + AT_TILE * m.v_pitch;
  m.other_v = m.other_d + AT_TILE * m.d_pitch;
  m.slopes = m.other_v + AT_TILE * m.v_pitch;
  m.weights = m.slopes + AT_TILE * at_weights_pitch<C>();
  return m;
}
template <class C> static size_t at_room_bytes(const at_plan &p, int weights) {
  int packs = 2 * at_pitch(at_packs<C>(p.q.width)) + 2 * at_pitch(at_packs<C>(p.v.width));
  return sizeof(at_pack<C>) * AT_TILE * static_cast<size_t>(packs + weights * at_weights_pitch<C>());
}

#endif
