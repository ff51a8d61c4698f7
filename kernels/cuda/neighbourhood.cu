/* Neighbourhood attention: kernels/neighbourhood.h. A warp has a place of the grid; its threads have a key (or, for the
 * gradients of keys, a query) of the window each, 32 at a time, and then channels of the result. */
#include "../neighbourhood.h"
#include "cuda.cuh"

namespace {

enum { THREADS = 128, EACH = 4 /* channels of a thread at a time */ };

struct na_job {
  int64_t heads, rows, columns, d, dv;
  int64_t window[2];
  double scale;
};

template <class T> struct na_data { const T *q, *k, *v, *g, *lse, *delta; /* the last three: of the backward pass */ };

/* Places of a window, row by row. */
struct na_window {
  int64_t head, top, left, width, count;
};
TY_DEVICE int64_t na_place(const na_job &j, const na_window &w, int64_t i) {
  return w.head + (w.top + i / w.width) * j.columns + w.left + i % w.width;
}

/* What place `at` sees, and by what it is seen. */
TY_DEVICE na_window na_sees(const na_job &j, int64_t at) {
  const int64_t places = j.rows * j.columns, row = at % places / j.columns, column = at % j.columns;
  return { at / places * places, ty_neighbours_begin(row, j.rows, j.window[0]),
           ty_neighbours_begin(column, j.columns, j.window[1]), j.window[1], j.window[0] * j.window[1] };
}
TY_DEVICE na_window na_seen(const na_job &j, int64_t at) {
  const int64_t places = j.rows * j.columns, row = at % places / j.columns, column = at % places % j.columns;
  const int64_t top = ty_neighbours_first(row, j.window[0]), left = ty_neighbours_first(column, j.window[1]);
  const int64_t height = ty_neighbours_last(row, j.rows, j.window[0]) - top + 1;
  const int64_t width = ty_neighbours_last(column, j.columns, j.window[1]) - left + 1;
  return { at / places * places, top, left, width, height * width };
}

template <class T> TY_DEVICE T na_dot(const T *a, const T *b, int64_t n) {
  T sum = 0;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

/* to[c] = sum over the window of weight(place) from[place, c]. Every thread of the warp arrives. */
template <class T, class Weight>
TY_DEVICE void na_gather(const na_job &j, const na_window &w, const T *from, int64_t channels, T *to, Weight weight) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
  for (int64_t c0 = 0; c0 < channels; c0 += TY_WARP * EACH) {
    T sum[EACH] = {};
    for (int64_t first = 0; first < w.count; first += TY_WARP) {
      const T own = first + lane < w.count ? weight(na_place(j, w, first + lane)) : T(0);
      const int keys = static_cast<int>(min(w.count - first, static_cast<int64_t>(TY_WARP)));
      for (int i = 0; i < keys; i++) {
        const T other = __shfl_sync(0xffffffffu, own, i);
        const T *row = from + na_place(j, w, first + i) * channels;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const int64_t c = c0 + lane + e * TY_WARP;
          if (c < channels) sum[e] += other * row[c];
        }
      }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int64_t c = c0 + lane + e * TY_WARP;
      if (c < channels) to[c] = sum[e];
    }
  }
}

template <class T> __global__ void __launch_bounds__(THREADS) na_forward(na_job j, na_data<T> x, T *out, T *lse) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
  const int64_t count = j.heads * j.rows * j.columns, each = THREADS / TY_WARP;
  const T scale = static_cast<T>(j.scale);
  for (int64_t at = blockIdx.x * each + threadIdx.x / TY_WARP; at < count; at += gridDim.x * each) {
    const na_window w = na_sees(j, at);
    const T *q = x.q + at * j.d;
    T most = -std::numeric_limits<T>::infinity(), sum = 0;
    for (int64_t i = lane; i < w.count; i += TY_WARP) {
      const T score = scale * na_dot(q, x.k + na_place(j, w, i) * j.d, j.d);
      if (score > most) {
        sum = sum == T(0) ? T(0) : sum * exp(most - score);
        most = score;
      }
      sum += exp(score - most);
    }
    const T all = ty_warp_reduce(most, ty_larger<T>{});
    sum = ty_warp_reduce(sum == T(0) ? T(0) : sum * exp(most - all), ty_plus<T>{});
    const T own = all + log(sum);
    if (lane == 0) lse[at] = own;
    na_gather(j, w, x.v, j.dv, out + at * j.dv,
              [&](int64_t key) { return static_cast<T>(exp(scale * na_dot(q, x.k + key * j.d, j.d) - own)); });
  }
}

/* delta = rowsum(g y), a thread a row. */
template <class T>
__global__ void __launch_bounds__(THREADS) na_deltas(int64_t count, int64_t dv, const T *g, const T *y, T *delta) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * THREADS)
    delta[i] = na_dot(g + i * dv, y + i * dv, dv);
}

template <class T> struct na_pair { T weight, slope; };
template <class T> TY_DEVICE na_pair<T> na_weigh(const na_job &j, const na_data<T> &x, int64_t query, int64_t key) {
  const T scale = static_cast<T>(j.scale);
  const T weight = exp(scale * na_dot(x.q + query * j.d, x.k + key * j.d, j.d) - x.lse[query]);
  return { weight, weight * scale * (na_dot(x.g + query * j.dv, x.v + key * j.dv, j.dv) - x.delta[query]) };
}

template <class T>
__global__ void __launch_bounds__(THREADS) na_gradients(na_job j, na_data<T> x, T *dq, T *dk, T *dv) {
  const int64_t count = j.heads * j.rows * j.columns, each = THREADS / TY_WARP;
  for (int64_t at = blockIdx.x * each + threadIdx.x / TY_WARP; at < count; at += gridDim.x * each) {
    const na_window sees = na_sees(j, at), seen = na_seen(j, at);
    na_gather(j, sees, x.k, j.d, dq + at * j.d, [&](int64_t key) { return na_weigh(j, x, at, key).slope; });
    na_gather(j, seen, x.q, j.d, dk + at * j.d, [&](int64_t query) { return na_weigh(j, x, query, at).slope; });
    na_gather(j, seen, x.g, j.dv, dv + at * j.dv, [&](int64_t query) { return na_weigh(j, x, query, at).weight; });
  }
}

na_job job_of(const ty_view *q, const ty_view *v, const void *params) {
  const ty_p_neighbourhood *p = static_cast<const ty_p_neighbourhood *>(params);
  return { q->size[0] * q->size[1],        q->size[2], q->size[3], q->size[4], v->size[4],
           { p->window[0], p->window[1] }, p->scale };
}

} // namespace

/* in: q, k, v; out: the result and the rows' log-sum-exp. */
TY_CUDA_KERNEL(neighbourhood_attention) {
  const na_job j = job_of(k->in[0], k->in[2], k->params);
  const int64_t count = j.heads * j.rows * j.columns;
  return !count || ty_for_reals(k->in[0]->dtype, "neighbourhood_attention", [&](auto type) {
    typedef decltype(type) T;
    const na_data<T> x = { ty_data_of<const T>(k->in[0]),
                           ty_data_of<const T>(k->in[1]),
                           ty_data_of<const T>(k->in[2]),
                           nullptr,
                           nullptr,
                           nullptr };
    T *out = ty_data_of<T>(k->out[0]), *lse = ty_data_of<T>(k->out[1]);
    return TY_LAUNCH(na_forward<T>, ty_cuda_blocks(count, THREADS / TY_WARP), THREADS, 0, j, x, out, lse);
  });
}

/* in: g, q, k, v, y, lse; out: dq, dk, dv. */
TY_CUDA_KERNEL(neighbourhood_attention_backward) {
  const na_job j = job_of(k->in[1], k->in[3], k->params);
  const int64_t count = j.heads * j.rows * j.columns;
  if (!count) return true;
  ty_cuda_scratch scratch(static_cast<size_t>(count) * sizeof(double));
  return scratch.data && ty_for_reals(k->in[1]->dtype, "neighbourhood_attention_backward", [&](auto type) {
           typedef decltype(type) T;
           T *delta = scratch.as<T>();
           const na_data<T> x = { ty_data_of<const T>(k->in[1]), ty_data_of<const T>(k->in[2]),
                                  ty_data_of<const T>(k->in[3]), ty_data_of<const T>(k->in[0]),
                                  ty_data_of<const T>(k->in[5]), delta };
           const T *y = ty_data_of<const T>(k->in[4]);
           T *dq = ty_data_of<T>(k->out[0]), *dk = ty_data_of<T>(k->out[1]), *dv = ty_data_of<T>(k->out[2]);
           const int64_t width = j.dv;
           const T *g = x.g;
           return TY_LAUNCH(na_deltas<T>, ty_cuda_blocks(count, THREADS), THREADS, 0, count, width, g, y, delta) &&
                  TY_LAUNCH(na_gradients<T>, ty_cuda_blocks(count, THREADS / TY_WARP), THREADS, 0, j, x, dq, dk, dv);
         });
}
