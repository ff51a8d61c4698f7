/* Gradients of attention in halves on tensor cores: what attention_backward.cu says, with the tiles of
 * attention_tensor.cuh. The tiles of the other side come in two stages, one on its way while the other is used. Products
 * of weights are narrowed; every sum is f32 and has one owner and one order. */
#include "attention_tensor.cuh"

/* The facts of each row, [batch, heads, t]: a warp takes a row. */
template <class T>
__global__ void __launch_bounds__(AT_TENSOR_THREADS)
    at_find_facts(const at_plan p, const at_gradients a, ty_chunk *to) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
  const int64_t n = int64_t{ p.batch } * p.heads * p.t, each = AT_WARPS;
  for (int64_t i = blockIdx.x * each + threadIdx.x / TY_WARP; i < n; i += gridDim.x * each) {
    const int kv_rows = static_cast<int>(i / p.rows), r = static_cast<int>(i % p.rows);
    const int b = kv_rows / p.kv_heads, kv_head = kv_rows % p.kv_heads;
    const at_row row = at_row_of(p, kv_head, r, p.rows);
    const T *g = static_cast<const T *>(a.g.data) + b * a.g.stride[0] + row.head * a.g.stride[1] +
                 row.pos * a.g.stride[2];
    const T *y = static_cast<const T *>(a.y.data) + b * a.y.stride[0] + row.head * a.y.stride[1] +
                 row.pos * a.y.stride[2];
    float sum = 0;
    for (int c = lane; c < p.v.width; c += TY_WARP)
      sum += ty_widen(g[c * a.g.stride[3]]) * ty_widen(y[c * a.y.stride[3]]);
    sum = ty_warp_reduce(sum, ty_plus<float>{});
    if (lane != 0) continue;
    const float lse = static_cast<const float *>(
        a.lse)[b * a.lse_stride[0] + row.head * a.lse_stride[1] + row.pos * a.lse_stride[2]];
    at_facts f = at_facts_of(p, b, kv_head, r);
    f.delta = sum;
    f.lse = lse * AT_LOG2E;
    if (lse == -std::numeric_limits<float>::infinity()) { /* it saw nothing: its weights are 0 */
      f.lse = -f.lse;
      f.keys = {};
    }
    at_put_facts(to + i * AT_FACTS, f);
  }
}

/* The facts of the rows from r0 of a key-value head, of which `facts` is the first. */
template <int ROWS> TY_DEVICE void at_bring_facts(ty_chunks to, const at_plan &p, const ty_chunk *facts, int r0) {
  for (int i = static_cast<int>(threadIdx.x); i < ROWS * AT_FACTS; i += AT_TENSOR_THREADS)
    ty_copy_async(to + i, r0 + i / AT_FACTS < p.rows ? facts + int64_t{ r0 } * AT_FACTS + i : nullptr);
}

/* From both products to the weight and the slope of the score. What the row does not see stays out even where the hidden
 * key holds NaN. */
TY_DEVICE void at_slope2(float score, const at_facts &row, float *weight, float *slope) {
  const bool seen = score != -std::numeric_limits<float>::infinity();
  const float w = at_exp2(score - row.lse);
  *weight = seen ? w : 0;
  *slope = seen ? w * (*slope - row.delta) : 0;
}

/* dQ: a block owns a tile of query rows. */
template <class T, int W, int MT, int KEYS>
__global__ void __launch_bounds__(AT_TENSOR_THREADS)
    at_tensor_queries(const at_plan p, const at_gradients a, const ty_chunk *all_facts) {
  enum { ROWS = AT_WARPS * 16 * MT, NT = KEYS / 8, OT = W / 8 };
  const int tiles = (p.rows + ROWS - 1) / ROWS, task = static_cast<int>(blockIdx.x);
  const int r0 = (tiles - 1 - task % tiles) * ROWS, kv_head = task / tiles % p.kv_heads, b = task / tiles / p.kv_heads;
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP, row = static_cast<int>(threadIdx.x) / TY_WARP * 16 * MT;
  const bool awake = r0 + row < p.rows;
  const ty_chunk *facts_from = all_facts + int64_t{ b * p.kv_heads + kv_head } * p.rows * AT_FACTS;

  TY_SHARED_DYNAMIC(ty_chunk, room);
  const ty_chunks queries = room, slopes = queries + ROWS * W / 8, others = slopes + ROWS * W / 8;
  const ty_chunks facts = others + 4 * KEYS * W / 8; /* others: keys and values of one stage, then of the next */
  const ty_chunks seen = facts + ROWS * AT_FACTS;    /* by any row, by all */
  const int last = min(r0 + ROWS, p.rows) - 1;
  at_span any, all;
  at_rows_see(p, r0, last, &any, &all);
  const int first = any.low / KEYS, end = (any.high + KEYS - 1) / KEYS;
  if (threadIdx.x == 0) {
    seen[0] = at_chunk_of(any);
    seen[1] = at_chunk_of(all);
  }
  const float factor = static_cast<float>(p.scale * 1.4426950408889634);
  at_bring_rows<T, W, ROWS>(queries, p, p.q, b, kv_head, r0);
  at_bring_rows<T, W, ROWS>(slopes, p, a.g, b, kv_head, r0);
  at_bring_facts<ROWS>(facts, p, facts_from, r0);
  auto bring = [&](int jt, int stage) {
    const ty_chunks keys = others + stage * (2 * KEYS * W / 8);
    at_bring_keys<T, W, KEYS>(keys, p, p.k, b, kv_head, jt * KEYS);
    at_bring_keys<T, W, KEYS>(keys + KEYS * W / 8, p, p.v, b, kv_head, jt * KEYS);
    ty_commit_copies();
  };
  if (first < end) bring(first, 0);

  float sums[MT][OT][4] = {};
  for (int jt = first, next, stage = 0; jt < end; jt = next, stage ^= 1) {
    const int j0 = jt * KEYS;
    const ty_chunks keys = others + stage * (2 * KEYS * W / 8);
    ty_wait_for_copies<0>();
    __syncthreads(); /* this also ends all use of the other stage */
    const at_span by_any = at_span_in(seen[0]);
    next = at_touches(by_any, j0 + KEYS, j0 + 2 * KEYS) ? jt + 1 : max(jt + 1, by_any.gap_high / KEYS);
    if (next < end) bring(next, stage ^ 1);
    if (!awake) continue;
    float s[MT][NT][4] = {}, ds[MT][NT][4] = {};
    at_multiply_rows<T, W, MT, NT>(queries, row, keys, s);
    at_multiply_rows<T, W, MT, NT>(slopes, row, keys + KEYS * W / 8, ds);
    const bool all_seen = !p.mask && at_covers(at_span_in(seen[1]), j0, j0 + KEYS);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const at_facts known = at_get_facts(facts + (row + m * 16 + h * 8 + lane / 4) * AT_FACTS, at_two_facts(p));
        if (all_seen) {
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++)
              ds[m][n][e] = at_exp2(fmaf(s[m][n][e], factor, -known.lse)) * (ds[m][n][e] - known.delta);
        } else {
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++)
              at_slope2(at_score2(p, known, j0 + n * 8 + lane % 4 * 2 + e % 2, s[m][n][e]), known, &s[m][n][e],
                        &ds[m][n][e]);
        }
      }
    uint32_t weights[MT][NT][2];
    at_narrow<T, MT, NT>(ds, weights);
    at_weigh_rows<T, W, MT, NT, OT>(weights, keys, 0, sums);
  }
  ty_wait_for_copies<0>();
  if (!awake) return;
  float scale[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++) scale[m][0] = scale[m][1] = static_cast<float>(p.scale);
  T *base = static_cast<T *>(a.dq) + int64_t{ b * p.kv_heads + kv_head } * p.rows * p.q.width;
  at_store_rows<T, MT, OT>(static_cast<const T *>(a.dq), sums, scale, row, 0, p.q.width, [&](int i) -> T * {
    return r0 + i < p.rows ? base + int64_t{ r0 + i } * p.q.width : nullptr;
  });
}

/* dK and dV, of at most 128 columns each: a block owns a tile of keys, and takes both products across, so that what it
 * owns is rows again. */
template <class T, int W, int MT, int ROWS>
__global__ void __launch_bounds__(AT_TENSOR_THREADS)
    at_tensor_keys(const at_plan p, const at_gradients a, const ty_chunk *all_facts) {
  enum {
    KEYS = AT_WARPS * 16 * MT,
    PIECE = ROWS / MT, /* rows at once: both products of more would not fit into registers beside the sums */
    NT = PIECE / 8,
    OT = (W > 128 ? 128 : W) / 8,
    STAGE = ROWS * (W / 4 + AT_FACTS) + 1
  };
  const int tiles = (p.s + KEYS - 1) / KEYS, task = static_cast<int>(blockIdx.x),
            from = static_cast<int>(blockIdx.y) * OT;
  const int j0 = task % tiles * KEYS, kv_head = task / tiles % p.kv_heads, b = task / tiles / p.kv_heads;
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP, key = static_cast<int>(threadIdx.x) / TY_WARP * 16 * MT;
  const bool awake = j0 + key < p.s;
  const ty_chunk *facts_from = all_facts + int64_t{ b * p.kv_heads + kv_head } * p.rows * AT_FACTS;

  TY_SHARED_DYNAMIC(ty_chunk, room);
  const ty_chunks keys = room, values = keys + KEYS * W / 8, others = values + KEYS * W / 8;
  const float factor = static_cast<float>(p.scale * 1.4426950408889634);
  at_bring_keys<T, W, KEYS>(keys, p, p.k, b, kv_head, j0);
  at_bring_keys<T, W, KEYS>(values, p, p.v, b, kv_head, j0);
  at_span all = {}; /* that the next tile's rows all see: it goes to shared memory with them */
  /* The next tile of rows of which any sees any of the keys. */
  auto next_from = [&](int r0) {
    for (; r0 < p.rows; r0 += ROWS) {
      at_span any;
      at_rows_see(p, r0, min(r0 + ROWS, p.rows) - 1, &any, &all);
      if (at_touches(any, j0, j0 + KEYS)) break;
    }
    return r0;
  };
  auto bring = [&](int r0, int stage) {
    const ty_chunks queries = others + stage * STAGE;
    at_bring_rows<T, W, ROWS>(queries, p, p.q, b, kv_head, r0);
    at_bring_rows<T, W, ROWS>(queries + ROWS * W / 8, p, a.g, b, kv_head, r0);
    at_bring_facts<ROWS>(queries + ROWS * W / 4, p, facts_from, r0);
    if (threadIdx.x == 0) queries[STAGE - 1] = at_chunk_of(all);
    ty_commit_copies();
  };
  int r0 = next_from(0), stage = 0;
  if (r0 < p.rows) bring(r0, 0);

  float dk[MT][OT][4] = {}, dv[MT][OT][4] = {};
  while (r0 < p.rows) {
    const ty_chunks queries = others + stage * STAGE, slopes = queries + ROWS * W / 8, facts = slopes + ROWS * W / 8;
    const int next = next_from(r0 + ROWS);
    ty_wait_for_copies<0>();
    __syncthreads(); /* this also ends all use of the other stage */
    if (next < p.rows) bring(next, stage ^ 1);
    const bool all_seen = !p.mask && at_covers(at_span_in(queries[STAGE - 1]), j0, j0 + KEYS);
#pragma unroll 1
    for (int i0 = 0; awake && i0 < ROWS; i0 += PIECE) {
      const ty_chunks piece = queries + i0 * W / 8, piece_slopes = slopes + i0 * W / 8;
      float s[MT][NT][4] = {}, ds[MT][NT][4] = {};
      at_multiply_rows<T, W, MT, NT>(keys, key, piece, s);
      at_multiply_rows<T, W, MT, NT>(values, key, piece_slopes, ds);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const at_facts known = at_get_facts(facts + (i0 + n * 8 + lane % 4 * 2 + i) * AT_FACTS, at_two_facts(p));
#pragma unroll
          for (int m = 0; m < MT; m++)
#pragma unroll
            for (int e = i; e < 4; e += 2) {
              if (all_seen) {
                s[m][n][e] = at_exp2(fmaf(s[m][n][e], factor, -known.lse));
                ds[m][n][e] = s[m][n][e] * (ds[m][n][e] - known.delta);
              } else {
                at_slope2(at_score2(p, known, j0 + key + m * 16 + e / 2 * 8 + lane / 4, s[m][n][e]), known, &s[m][n][e],
                          &ds[m][n][e]);
              }
            }
        }
      uint32_t weights[MT][NT][2];
      at_narrow<T, MT, NT>(s, weights);
      at_weigh_rows<T, W, MT, NT, OT>(weights, piece_slopes, from, dv);
      at_narrow<T, MT, NT>(ds, weights);
      at_weigh_rows<T, W, MT, NT, OT>(weights, piece, from, dk);
    }
    r0 = next;
    stage ^= 1;
  }
  ty_wait_for_copies<0>();
  if (!awake) return;
  float scale[MT][2], one[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++) {
    scale[m][0] = scale[m][1] = static_cast<float>(p.scale);
    one[m][0] = one[m][1] = 1;
  }
  const int64_t rows_before = int64_t{ b * p.kv_heads + kv_head } * p.s + j0;
  T *to_k = static_cast<T *>(a.dk) + rows_before * p.q.width, *to_v = static_cast<T *>(a.dv) + rows_before * p.v.width;
  at_store_rows<T, MT, OT>(static_cast<const T *>(a.dk), dk, scale, key, from, p.q.width,
                           [&](int i) -> T * { return j0 + i < p.s ? to_k + int64_t{ i } * p.q.width : nullptr; });
  at_store_rows<T, MT, OT>(static_cast<const T *>(a.dv), dv, one, key, from, p.v.width,
                           [&](int i) -> T * { return j0 + i < p.s ? to_v + int64_t{ i } * p.v.width : nullptr; });
}

/* MQ and MK: sixteens of rows of a warp; KEYS and ROWS: of the other side's tile. */
template <class T, int W, int MQ, int KEYS, int MK, int ROWS>
static bool at_launch(const at_plan &p, const at_gradients &a, const ty_chunk *facts) {
  enum { OWN_ROWS = AT_WARPS * 16 * MQ, OWN_KEYS = AT_WARPS * 16 * MK };
  const int64_t heads = int64_t{ p.batch } * p.kv_heads, row_tasks = heads * ((p.rows + OWN_ROWS - 1) / OWN_ROWS),
                key_tasks = heads * ((p.s + OWN_KEYS - 1) / OWN_KEYS);
  if (row_tasks > INT32_MAX || key_tasks > INT32_MAX)
    return ty_fail(TY_EUNSUPPORTED, "attention_backward: a batch too large for cuda");
  const size_t row_room = (2 * OWN_ROWS + 4 * KEYS) * W / 8 + OWN_ROWS * AT_FACTS + 2;
  const size_t key_room = (2 * OWN_KEYS + 4 * ROWS) * W / 8 + 2 * (ROWS * AT_FACTS + 1);
  bool ok = true;
  if (row_tasks)
    ok = TY_LAUNCH((at_tensor_queries<T, W, MQ, KEYS>), static_cast<unsigned>(row_tasks), AT_TENSOR_THREADS,
                   row_room * sizeof(ty_chunk), p, a, facts);
  if (ok && key_tasks)
    ok = TY_LAUNCH((at_tensor_keys<T, W, MK, ROWS>), dim3(static_cast<unsigned>(key_tasks), W > 128 ? 2 : 1),
                   AT_TENSOR_THREADS, key_room * sizeof(ty_chunk), p, a, facts);
  return ok;
}

bool ty_cuda_attention_tensor_backward(const at_plan &p, const at_gradients &a, int dtype) {
  const int64_t rows = int64_t{ p.batch } * p.heads * p.t;
  ty_cuda_scratch room(static_cast<size_t>(rows + 1) * AT_FACTS * sizeof(ty_chunk));
  if (!room.data) return false;
  ty_chunk *facts = room.as<ty_chunk>();
  auto run = [&](auto x) {
    typedef decltype(x) T;
    if (rows && !TY_LAUNCH((at_find_facts<T>), ty_cuda_blocks(rows, AT_WARPS), AT_TENSOR_THREADS, 0, p, a, facts))
      return false;
    switch (at_tensor_width(p)) {
      case 64: return at_launch<T, 64, 2, 32, 2, 32>(p, a, facts);
      case 128: return at_launch<T, 128, 2, 32, 1, 32>(p, a, facts);
      default: return at_launch<T, 256, 1, 32, 1, 32>(p, a, facts);
    }
  };
  return dtype == TY_F16 ? run(ty_f16{}) : run(ty_bf16{});
}
