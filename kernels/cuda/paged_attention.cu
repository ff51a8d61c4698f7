/* Attention of packed queries of many sequences to keys in pages. A block of threads has one query of one head. Its warps
 * share the keys: a thread has one of 32 for the scores, then channels of the result for their values; the softmax is
 * carried along, and the warps' parts are joined in order. */
#include "cuda.cuh"

namespace {

enum { WARPS = 4, THREADS = WARPS * TY_WARP, MOST = 8 /* channels of a thread */ };

struct pa_job {
  int64_t rows, heads, kv_heads, d, dv, slots, most, sequences, page, window;
  double scale, softcap;
  const int64_t *pages, *begins, *lengths;
};

template <class C> TY_DEVICE C pa_none() { return -std::numeric_limits<C>::infinity(); }

/* Reports what would lead out of the tensors: a thread has a place of the list of pages. */
__global__ void __launch_bounds__(THREADS) pa_check(const pa_job j, ty_cuda_watch watch) {
  const int64_t n = j.sequences * (j.most + 1);
  for (int64_t at = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; at < n;
       at += static_cast<int64_t>(gridDim.x) * THREADS) {
    const int64_t i = at / (j.most + 1), e = at % (j.most + 1), from = j.begins[i], to = j.begins[i + 1];
    if (e == j.most) {
      const bool rises = from >= 0 && from <= to && to <= j.rows && (i > 0 || from == 0) &&
                         (i + 1 < j.sequences || to == j.rows);
      if (!rises) ty_report(watch, TY_INDEX_OUT_OF_RANGE, to, j.rows + 1);
      else if (j.lengths[i] < to - from || j.lengths[i] > j.most * j.page)
        ty_report(watch, TY_INDEX_OUT_OF_RANGE, j.lengths[i], j.most * j.page + 1);
    } else if (e * j.page < j.lengths[i]) {
      ty_in_range(watch, j.pages[i * j.most + e], j.slots / j.page);
    }
  }
}

template <class T, class K>
__global__ void __launch_bounds__(THREADS)
    pa_forward(const pa_job j, const T *q, const K *keys, const K *values, T *out) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP, warp = static_cast<int>(threadIdx.x) / TY_WARP;
  TY_SHARED(T, maxima, WARPS);
  TY_SHARED(T, totals, WARPS);
  TY_SHARED(T, parts, WARPS * MOST * TY_WARP);
  for (int64_t at = blockIdx.x; at < j.rows * j.heads; at += gridDim.x) {
    const int64_t row = at / j.heads, head = at % j.heads, kv_head = head / (j.heads / j.kv_heads);
    int64_t low = 0, high = j.sequences; /* the sequence of this row */
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (j.begins[middle] <= row) low = middle;
      else high = middle;
    }
    const int64_t length = min(max(j.lengths[low], int64_t{ 0 }), j.most * j.page);
    const int64_t here = length - j.begins[low + 1] + row; /* the key at which the query stands */
    const int64_t end = min(here + 1, length), first = j.window < 0 ? 0 : max(here - j.window, int64_t{ 0 });
    const T *own = q + at * j.d;
    T maximum = pa_none<T>(), total = 0, sums[MOST] = {};
    for (int64_t j0 = first + warp * TY_WARP; j0 < end; j0 += THREADS) {
      const int64_t key = j0 + lane;
      int64_t slot = -1;
      if (key < end) {
        const int64_t page = j.pages[low * j.most + key / j.page];
        if (page >= 0 && page < j.slots / j.page) slot = page * j.page + key % j.page;
      }
      T score = pa_none<T>();
      if (slot >= 0) {
        const K *k = keys + (slot * j.kv_heads + kv_head) * j.d;
        score = 0;
        for (int64_t c = 0; c < j.d; c++) score += own[c] * static_cast<T>(ty_widen(k[c]));
        score *= static_cast<T>(j.scale);
        if (j.softcap > 0) score = static_cast<T>(j.softcap) * tanh(score / static_cast<T>(j.softcap));
      }
      const T top = max(maximum, ty_warp_reduce(score, ty_larger<T>{})), shift = top == pa_none<T>() ? T(0) : top;
      const T factor = exp(maximum - shift), weight = exp(score - shift);
      total = total * factor + ty_warp_reduce(weight, ty_plus<T>{});
      maximum = top;
#pragma unroll
      for (int e = 0; e < MOST; e++) sums[e] *= factor;
      const int some = static_cast<int>(min(end - j0, static_cast<int64_t>(TY_WARP)));
      for (int i = 0; i < some; i++) {
        const T of_key = __shfl_sync(0xffffffffu, weight, i);
        const int64_t where = __shfl_sync(0xffffffffu, slot, i);
        if (where < 0) continue;
        const K *v = values + (where * j.kv_heads + kv_head) * j.dv;
#pragma unroll
        for (int e = 0; e < MOST; e++)
          if (lane + e * TY_WARP < j.dv) sums[e] += of_key * static_cast<T>(ty_widen(v[lane + e * TY_WARP]));
      }
    }
    if (lane == 0) maxima[warp] = maximum, totals[warp] = total;
#pragma unroll
    for (int e = 0; e < MOST; e++) parts[(warp * MOST + e) * TY_WARP + lane] = sums[e];
    __syncthreads();
    T top = pa_none<T>(), all = 0;
    for (int w = 0; w < WARPS; w++) top = max(top, static_cast<T>(maxima[w]));
    const T shift = top == pa_none<T>() ? T(0) : top;
    for (int w = 0; w < WARPS; w++) all += totals[w] * exp(maxima[w] - shift);
    for (int64_t c = threadIdx.x; c < j.dv; c += THREADS) {
      T y = 0;
      for (int w = 0; w < WARPS; w++) y += parts[w * MOST * TY_WARP + static_cast<int>(c)] * exp(maxima[w] - shift);
      out[at * j.dv + c] = all == T(0) ? T(0) : y / all;
    }
    __syncthreads();
  }
}

template <class T, class K> bool launch(const ty_kernel_args *k, const pa_job &j) {
  const T *q = ty_data_of<const T>(k->in[0]);
  const K *keys = ty_data_of<const K>(k->in[1]), *values = ty_data_of<const K>(k->in[2]);
  T *out = ty_data_of<T>(k->out[0]);
  const pa_job job = j;
  const ty_cuda_watch watch = ty_cuda_watched();
  return TY_LAUNCH(pa_check, ty_cuda_blocks(j.sequences * (j.most + 1), THREADS), THREADS, 0, job, watch) &&
         TY_LAUNCH((pa_forward<T, K>), ty_cuda_blocks(j.rows * j.heads, 1), THREADS, 0, job, q, keys, values, out);
}

} // namespace

/* in: q in f32 or f64, k, v, pages, cu_seqlens, lengths; out: the result. */
TY_CUDA_KERNEL(paged_attention) {
  const ty_view *q = k->in[0], *keys = k->in[1], *values = k->in[2];
  const ty_p_paged *p = static_cast<const ty_p_paged *>(k->params);
  pa_job j = {};
  j.rows = q->size[0], j.heads = q->size[1], j.d = q->size[2];
  j.slots = keys->size[0], j.kv_heads = keys->size[1], j.dv = values->size[2];
  j.sequences = k->in[5]->size[0], j.most = k->in[3]->size[1], j.page = p->page, j.window = p->window;
  j.scale = p->scale, j.softcap = p->softcap;
  j.pages = ty_data_of<const int64_t>(k->in[3]), j.begins = ty_data_of<const int64_t>(k->in[4]);
  j.lengths = ty_data_of<const int64_t>(k->in[5]);
  if (j.dv > MOST * TY_WARP)
    return ty_fail(TY_EUNSUPPORTED, "paged_attention: on cuda values are at most %d wide, got %lld",
                   static_cast<int>(MOST * TY_WARP), static_cast<long long>(j.dv));
  if (j.rows * j.heads == 0) return true;
  switch (keys->dtype) {
    case TY_F64: return launch<double, double>(k, j);
    case TY_F32: return launch<float, float>(k, j);
    case TY_F16: return launch<float, ty_f16>(k, j);
    case TY_BF16: return launch<float, ty_bf16>(k, j);
    default: return ty_cuda_no_kernel("paged_attention", keys->dtype);
  }
}
