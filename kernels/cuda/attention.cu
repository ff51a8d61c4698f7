/* Attention without the [t, s] matrix, after FlashAttention (Dao et al. 2022): a block of threads walks a tile of query
 * rows along the keys and carries the softmax (Milakov and Gimelshein 2018). Where there are few tiles, the keys of each
 * are split among blocks and the parts are joined in order. All cuts depend on the shapes and the GPU alone. */
#include <optional>

#include "attention.cuh"
#include "attention_library.cuh"

/* Divides the sums of a row; one that has seen nothing is 0. */
template <class C> TY_DEVICE C at_inverse(C total) { return total == 0 ? C{} : 1 / total; }
template <class C> TY_DEVICE C at_lse(C maximum, C total) {
  return total == 0 ? -std::numeric_limits<C>::infinity() : maximum + log(total);
}

template <class T, int NP>
__global__ void __launch_bounds__(AT_THREADS) at_forward(const at_plan p, const at_result out) {
  typedef ty_compute<T> C;
  enum { V = 16 / sizeof(C) };
  const C none = -std::numeric_limits<C>::infinity();
  const int tiles = at_tiles(p.rows), d_packs = at_packs<C>(p.q.width), v_packs = at_packs<C>(p.v.width);
  const int chunks = at_chunks(d_packs), d_pitch = at_pitch(d_packs), v_pitch = at_pitch(v_packs);
  const int tx = static_cast<int>(threadIdx.x) % AT_SIDE, ty = static_cast<int>(threadIdx.x) / AT_SIDE;
  const int split = static_cast<int>(blockIdx.x % out.splits), task = static_cast<int>(blockIdx.x / out.splits);
  const int tile = tiles - 1 - task % tiles; /* those that see the most of a causal mask begin first */
  const int kv_head = task / tiles % p.kv_heads, b = task / tiles / p.kv_heads, r0 = tile * AT_TILE;
  const int v_chunk = static_cast<int>(blockIdx.y),
            v_left = min(v_packs - v_chunk * AT_CHUNK, static_cast<int>(AT_CHUNK));

  TY_SHARED_DYNAMIC(at_pack<C>, room);
  ty_shared_ptr<at_pack<C>> queries = room, keys = queries + AT_TILE * d_pitch, values = keys + AT_TILE * d_pitch;
  ty_shared_ptr<at_pack<C>> weights = values + AT_TILE * v_pitch;

  at_row rows[AT_EACH];
  C maximum[AT_EACH], total[AT_EACH];
  at_pack<C> sums[AT_EACH][NP] = {};
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) {
    rows[i] = at_row_of(p, kv_head, r0 + ty * AT_EACH + i, p.rows);
    maximum[i] = none;
    total[i] = 0;
  }
  const at_span span = at_tile_sees(p, r0, p.rows);
  int first = max(span.low / AT_TILE, split * out.split_tiles);
  int end = min(at_tiles(span.high), (split + 1) * out.split_tiles);
  bool fresh = true;
  for (int jt = first; jt < end; jt++) {
    const int j0 = jt * AT_TILE;
    if (!at_touches(span, j0, j0 + AT_TILE)) continue;
    C s[AT_EACH][AT_EACH] = {};
    for (int chunk = 0; chunk < chunks; chunk++) {
      __syncthreads();
      if (fresh || chunks > 1) at_load_rows<C, T>(queries, p, p.q, b, kv_head, r0, p.rows, chunk);
      at_load_keys<C, T>(keys, p, p.k, b, kv_head, j0, chunk);
      if (chunk == 0) at_load_keys<C, T>(values, p, p.v, b, kv_head, j0, v_chunk);
      __syncthreads();
      at_products<C>(queries, keys, d_pitch, min(d_packs - chunk * AT_CHUNK, static_cast<int>(AT_CHUNK)), s);
    }
#pragma unroll
    for (int i = 0; i < AT_EACH; i++) {
      C top = none;
#pragma unroll
      for (int j = 0; j < AT_EACH; j++) {
        s[i][j] = at_score(p, b, rows[i], j0 + tx + j * AT_SIDE, s[i][j]);
        top = s[i][j] > top ? s[i][j] : top;
      }
      top = at_across(top, true);
      top = top > maximum[i] ? top : maximum[i];
      C shift = top == none ? C{} : top; /* nothing seen yet: the weights are exp(-infinity) */
      C factor = at_exp(maximum[i] - shift);
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
    at_weigh<C, NP>(weights, values, v_pitch, v_left, min(span.high - j0, static_cast<int>(AT_TILE)), sums);
  }

  const int left = p.v.width - v_chunk * AT_CHUNK * V;
#pragma unroll
  for (int i = 0; i < AT_EACH; i++) {
    C sum = at_across(total[i], false);
    int r = ty * AT_EACH + i;
    if (r0 + r >= p.rows) continue;
    if (out.splits > 1) {
      int64_t at = (int64_t{ split } * (gridDim.x / out.splits) + task) * AT_TILE + r;
      at_store<C, C, NP>(static_cast<C *>(out.sums) + at * p.v.width + v_chunk * AT_CHUNK * V, left, sums[i], C{ 1 });
      if (tx == 0 && v_chunk == 0) {
        C *to = static_cast<C *>(out.totals) + 2 * at;
        to[0] = maximum[i], to[1] = sum;
      }
    } else {
      int64_t at = (int64_t{ b } * p.heads + rows[i].head) * p.t + rows[i].pos;
      at_store<C, T, NP>(static_cast<T *>(out.y) + at * p.v.width + v_chunk * AT_CHUNK * V, left, sums[i],
                         at_inverse(sum));
      if (tx == 0 && v_chunk == 0) static_cast<C *>(out.lse)[at] = at_lse(maximum[i], sum);
    }
  }
}

/* Joins the splits: a warp takes a row. */
template <class T>
__global__ void __launch_bounds__(AT_THREADS) at_join(const at_plan p, const at_result out, int tasks, int tile_rows) {
  typedef ty_compute<T> C;
  const C none = -std::numeric_limits<C>::infinity();
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP, tiles = (p.rows + tile_rows - 1) / tile_rows;
  const int64_t n = int64_t{ tasks } * tile_rows, each = AT_THREADS / TY_WARP;
  for (int64_t i = blockIdx.x * each + threadIdx.x / TY_WARP; i < n; i += gridDim.x * each) {
    int task = static_cast<int>(i / tile_rows);
    int r = (tiles - 1 - task % tiles) * tile_rows + static_cast<int>(i % tile_rows);
    if (r >= p.rows) continue;
    int kv_head = task / tiles % p.kv_heads, b = task / tiles / p.kv_heads;
    const C *totals = static_cast<const C *>(out.totals), *sums = static_cast<const C *>(out.sums);
    C top = none, total = 0;
    for (int s = 0; s < out.splits; s++) {
      C m = totals[2 * (s * n + i)];
      top = m > top ? m : top;
    }
    C shift = top == none ? C{} : top;
    for (int s = 0; s < out.splits; s++) total += totals[2 * (s * n + i) + 1] * at_exp(totals[2 * (s * n + i)] - shift);
    at_row row = at_row_of(p, kv_head, r, p.rows);
    int64_t at = (int64_t{ b } * p.heads + row.head) * p.t + row.pos;
    for (int c = lane; c < p.v.width; c += TY_WARP) {
      C y = 0;
      for (int s = 0; s < out.splits; s++)
        y += sums[(s * n + i) * p.v.width + c] * at_exp(totals[2 * (s * n + i)] - shift);
      static_cast<T *>(out.y)[at * p.v.width + c] = ty_narrow<T>(y * at_inverse(total));
    }
    if (lane == 0) static_cast<C *>(out.lse)[at] = at_lse(top, total);
  }
}

template <class T> static bool at_launch(const at_plan &p, const at_result &out, unsigned tasks) {
  typedef ty_compute<T> C;
  int d_packs = at_packs<C>(p.q.width), v_packs = at_packs<C>(p.v.width);
  size_t room = sizeof(at_pack<C>) * AT_TILE *
                static_cast<size_t>(2 * at_pitch(d_packs) + at_pitch(v_packs) + at_weights_pitch<C>());
  dim3 grid(tasks * static_cast<unsigned>(out.splits), static_cast<unsigned>(at_chunks(v_packs)));
  return v_packs <= AT_SIDE ? TY_LAUNCH((at_forward<T, 1>), grid, AT_THREADS, room, p, out)
                            : TY_LAUNCH((at_forward<T, 2>), grid, AT_THREADS, room, p, out);
}

/* launch(out, tasks) does the rest, for tiles of so many rows and keys. */
template <class T, class Launch>
static bool at_run(const at_plan &p, at_result out, int tile_rows, int tile_keys, const Launch &launch) {
  typedef ty_compute<T> C;
  enum { FEWEST = 4 }; /* tiles of keys that are worth a block */
  int64_t tasks = int64_t{ p.batch } * p.kv_heads * ((p.rows + tile_rows - 1) / tile_rows);
  int key_tiles = (p.s + tile_keys - 1) / tile_keys, processors = ty_cuda_processors();
  if (tasks == 0) return true;
  out.splits = 1;
  out.split_tiles = key_tiles + 1;
  if (tasks * 2 <= processors && key_tiles >= 2 * FEWEST) {
    int64_t wanted = (2 * processors + tasks - 1) / tasks, most = key_tiles / FEWEST;
    out.splits = static_cast<int>(wanted < most ? wanted : most);
    out.split_tiles = (key_tiles + out.splits - 1) / out.splits;
    out.splits = (key_tiles + out.split_tiles - 1) / out.split_tiles;
  }
  if (tasks * out.splits > INT32_MAX) return ty_fail(TY_EUNSUPPORTED, "attention: a batch too large for cuda");
  size_t rows = static_cast<size_t>(tasks * tile_rows * out.splits);
  std::optional<ty_cuda_scratch> parts;
  if (out.splits > 1) {
    parts.emplace(rows * (static_cast<size_t>(p.v.width) + 2) * sizeof(C));
    if (!parts->data) return false;
    out.totals = parts->data;
    out.sums = parts->template as<C>() + 2 * rows;
  }
  int n = static_cast<int>(tasks);
  if (!launch(out, static_cast<unsigned>(n))) return false;
  if (out.splits == 1) return true;
  unsigned blocks = ty_cuda_blocks(tasks * tile_rows, AT_THREADS / TY_WARP);
  return TY_LAUNCH((at_join<T>), blocks, AT_THREADS, 0, p, out, n, tile_rows);
}

TY_CUDA_KERNEL(attention) {
  dnn_outcome outcome = ty_attention_by_library(k);
  if (outcome != DNN_NOT_THERE) return outcome == DNN_DONE;
  const int dtype = k->in[0]->dtype;
  const ty_p_attention *params = static_cast<const ty_p_attention *>(k->params);
  const bool tensor = at_on_tensor_cores(k->in[0], k->in[2]);
  at_plan p;
  if (!at_plan_of(&p, k->in[0], k->in[1], k->in[2], k->in[3], k->in[4], params, tensor) || !ty_begins_checked(p.reach))
    return false;
  at_result out = { k->out[0]->data, k->out[1]->data, 1, 0, nullptr, nullptr };
  return ty_for_floats(dtype, "attention", [&](auto x) {
    typedef decltype(x) T;
    if (!tensor)
      return at_run<T>(p, out, AT_TILE, AT_TILE,
                       [&](const at_result &to, unsigned tasks) { return at_launch<T>(p, to, tasks); });
    return at_run<T>(
        p, out, ty_cuda_attention_rows(p), ty_cuda_attention_keys(p),
        [&](const at_result &to, unsigned tasks) { return ty_cuda_attention_tensor(p, to, dtype, tasks); });
  });
}
