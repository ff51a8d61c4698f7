/* Attention in halves on tensor cores, after FlashAttention-2 (Dao 2023): see attention.cu, which cuts the work, and
 * attention_tensor.cuh. Sums and the softmax are f32; the weights are narrowed for the product with the values. */
#include "attention_tensor.cuh"

/* The largest over the quad of threads that has a row, and the sum. */
TY_DEVICE float at_quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
TY_DEVICE float at_quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <class T, int W, int MT, int KEYS, bool CAP>
__global__ void __launch_bounds__(AT_TENSOR_THREADS) at_tensor_forward(const at_plan p, const at_result out) {
  enum { ROWS = AT_WARPS * 16 * MT, NT = KEYS / 8, OT = W / 8 };
  const float none = -std::numeric_limits<float>::infinity();
  const int tiles = (p.rows + ROWS - 1) / ROWS;
  const int split = static_cast<int>(blockIdx.x % out.splits), task = static_cast<int>(blockIdx.x / out.splits);
  const int r0 = (tiles - 1 - task % tiles) * ROWS; /* those that see the most of a causal mask begin first */
  const int kv_head = task / tiles % p.kv_heads, b = task / tiles / p.kv_heads;
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP, row = static_cast<int>(threadIdx.x) / TY_WARP * 16 * MT;
  const bool awake = r0 + row < p.rows; /* a warp with no rows only brings keys */

  TY_SHARED_DYNAMIC(ty_chunk, room);
  const ty_chunks queries = room, keys = queries + ROWS * W / 8, values = keys + KEYS * W / 8;
  const ty_chunks facts = values + KEYS * W / 8;
  const int last = min(r0 + ROWS, p.rows) - 1;
  at_span any, all;
  at_rows_see(p, r0, last, &any, &all);
  const int end = min((any.high + KEYS - 1) / KEYS, (split + 1) * out.split_tiles);
  auto next_from = [&](int jt) { /* the next tile of which any row sees anything */
                                 return at_touches(any, jt * KEYS, jt * KEYS + KEYS) ? jt
                                                                                     : max(jt, any.gap_high / KEYS);
  };
  const int first = next_from(max(any.low / KEYS, split * out.split_tiles));
  at_bring_rows<T, W, ROWS>(queries, p, p.q, b, kv_head, r0);
  if (first < end) at_bring_keys<T, W, KEYS>(keys, p, p.k, b, kv_head, first * KEYS);
  ty_commit_copies();
  for (int i = static_cast<int>(threadIdx.x); i < ROWS; i += AT_TENSOR_THREADS)
    at_put_facts(facts + i * AT_FACTS, at_facts_of(p, b, kv_head, r0 + i));

  float sums[MT][OT][4] = {}, maximum[MT][2], total[MT][2] = {};
#pragma unroll
  for (int m = 0; m < MT; m++) maximum[m][0] = maximum[m][1] = none;
  for (int jt = first, next; jt < end; jt = next) {
    const int j0 = jt * KEYS;
    next = next_from(jt + 1);
    ty_wait_for_copies<0>(); /* the keys; the barrier also ends all use of the values before */
    __syncthreads();
    at_bring_keys<T, W, KEYS>(values, p, p.v, b, kv_head, j0);
    ty_commit_copies();
    float s[MT][NT][4] = {};
    if (awake) at_multiply_rows<T, W, MT, NT>(queries, row, keys, s);
    ty_wait_for_copies<0>();
    __syncthreads();
    if (next < end) at_bring_keys<T, W, KEYS>(keys, p, p.k, b, kv_head, next * KEYS);
    ty_commit_copies();
    if (!awake) continue;

    /* Where all is seen the scale waits until the exponent, which takes it in the same multiplication and addition. */
    float factor = static_cast<float>(p.scale * 1.4426950408889634);
    if (CAP || p.mask || factor < 0 || !at_covers(all, j0, j0 + KEYS)) {
      factor = 1;
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const at_facts known = at_get_facts(facts + (row + m * 16 + h * 8 + lane / 4) * AT_FACTS, at_two_facts(p));
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++)
              s[m][n][e] = at_score2<CAP>(p, known, j0 + n * 8 + lane % 4 * 2 + e % 2, s[m][n][e]);
        }
    }
    uint32_t weights[MT][NT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      float rescale[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float top = none;
#pragma unroll
        for (int n = 0; n < NT; n++) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        top = fmaxf(at_quad_max(top) * factor, maximum[m][h]);
        const float shift = top == none ? 0 : top; /* nothing seen yet: the weights are exp(-infinity) */
        rescale[h] = at_exp2(maximum[m][h] - shift);
        maximum[m][h] = top;
        float part = 0;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) {
            s[m][n][e] = at_exp2(fmaf(s[m][n][e], factor, -shift));
            part += s[m][n][e];
          }
        total[m][h] = total[m][h] * rescale[h] + part;
      }
      if (__any_sync(0xffffffffu, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
        for (int n = 0; n < OT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) sums[m][n][e] *= rescale[e / 2];
      }
    }
    at_narrow<T, MT, NT>(s, weights);
    at_weigh_rows<T, W, MT, NT, OT>(weights, values, 0, sums);
  }
  ty_wait_for_copies<0>();
  if (!awake) return;

  float inverse[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = at_quad_sum(total[m][h]);
      const int i = row + m * 16 + h * 8 + lane / 4, r = r0 + i;
      inverse[m][h] = sum == 0 ? 0 : 1 / sum;
      if (r >= p.rows) continue;
      if (out.splits > 1) {
        const int64_t at = (int64_t{ split } * (gridDim.x / out.splits) + task) * ROWS + i;
        float *to = static_cast<float *>(out.sums) + at * p.v.width;
#pragma unroll
        for (int n = 0; n < OT; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int column = n * 8 + lane % 4 * 2 + e;
            if (column < p.v.width) to[column] = sums[m][n][2 * h + e];
          }
        if (lane % 4 == 0) {
          float *both = static_cast<float *>(out.totals) + 2 * at;
          both[0] = maximum[m][h] * AT_LN2, both[1] = sum;
        }
      } else if (lane % 4 == 0) {
        const int64_t at = int64_t{ b * p.kv_heads + kv_head } * p.rows + r;
        static_cast<float *>(out.lse)[at] = sum == 0 ? none : maximum[m][h] * AT_LN2 + logf(sum);
      }
    }
  if (out.splits > 1) return;
  T *base = static_cast<T *>(out.y) + int64_t{ b * p.kv_heads + kv_head } * p.rows * p.v.width;
  at_store_rows<T, MT, OT>(static_cast<const T *>(out.y), sums, inverse, row, 0, p.v.width, [&](int i) -> T * {
    return r0 + i < p.rows ? base + int64_t{ r0 + i } * p.v.width : nullptr;
  });
}

template <class T, int W, int MT, int KEYS, bool CAP>
static bool at_launch_as(const at_plan &p, const at_result &out, unsigned tasks) {
  enum { ROWS = AT_WARPS * 16 * MT };
  const size_t chunks = (ROWS + 2 * KEYS) * W / 8 + ROWS * AT_FACTS;
  return TY_LAUNCH((at_tensor_forward<T, W, MT, KEYS, CAP>), tasks * static_cast<unsigned>(out.splits),
                   AT_TENSOR_THREADS, chunks * sizeof(ty_chunk), p, out);
}

template <class T, int W, int MT, int KEYS>
static bool at_launch(const at_plan &p, const at_result &out, unsigned tasks) {
  return p.softcap > 0 ? at_launch_as<T, W, MT, KEYS, true>(p, out, tasks)
                       : at_launch_as<T, W, MT, KEYS, false>(p, out, tasks);
}

/* 32 rows for each warp and 64 keys, as long as their sums fit into its registers. */
int ty_cuda_attention_rows(const at_plan &p) { return at_tensor_width(p) > 128 ? 64 : 128; }
int ty_cuda_attention_keys(const at_plan &p) { return at_tensor_width(p) == 128 ? 32 : 64; }

bool ty_cuda_attention_tensor(const at_plan &p, const at_result &out, int dtype, unsigned tasks) {
  auto launch = [&](auto x) {
    typedef decltype(x) T;
    switch (at_tensor_width(p)) {
      case 64: return at_launch<T, 64, 2, 64>(p, out, tasks);
      case 128: return at_launch<T, 128, 2, 32>(p, out, tasks);
      default: return at_launch<T, 256, 1, 64>(p, out, tasks);
    }
  };
  return dtype == TY_F16 ? launch(ty_f16{}) : launch(ty_bf16{});
}
