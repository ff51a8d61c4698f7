/* Places in sorted lines, counts between edges, single order statistics. */
#include "../cpu/lines.h"
#include "cuda.cuh"

enum { THREADS = 256 };

/* ---- places ---- */

template <class T> TY_DEVICE bool less_than(T a, T b) { /* NaN is largest */
  return (a < b) | ((b != b) & (a == a));
}

template <class T> TY_DEVICE int64_t place_of(const T *s, int64_t n, T v, bool right) {
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t mid = (low + high) / 2;
    const bool before = right ? !less_than(v, s[mid]) : less_than(s[mid], v);
    if (before) low = mid + 1;
    else high = mid;
  }
  return low;
}

template <class T>
__global__ void find_places(const T *sorted, const T *values, int64_t *at, int64_t count, int64_t n, int64_t m,
                            bool right, bool shared) {
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS)
    at[i] = place_of(sorted + (shared ? 0 : i / m * n), n, values[i], right);
}

TY_CUDA_KERNEL(searchsorted) {
  const ty_p_dim &p = *static_cast<const ty_p_dim *>(k->params);
  const ty_view *s = k->in[0], *v = k->in[1];
  const int64_t count = v->count, n = s->size[s->ndim - 1], m = v->ndim ? v->size[v->ndim - 1] : 1;
  if (count == 0) return true;
  const bool right = p.flag, shared = p.flag2;
  const auto launch = [&](auto x) {
    typedef decltype(x) T;
    const T *sorted = static_cast<const T *>(s->data), *values = static_cast<const T *>(v->data);
    int64_t *at = static_cast<int64_t *>(k->out[0]->data);
    return TY_LAUNCH((find_places<T>), ty_cuda_blocks(count, THREADS), THREADS, 0, sorted, values, at, count, n, m,
                     right, shared);
  };
  if (s->dtype == TY_I64) return launch(int64_t{});
  return ty_for_reals(s->dtype, "searchsorted", launch);
}

/* ---- counts ---- */

template <class T>
__global__ void count_between(const T *xs, const T *e, unsigned long long *counts, int64_t count, int64_t bins,
                              bool even) {
  const T low = e[0], high = e[bins], factor = static_cast<T>(bins) / (high - low);
  const bool divided = even && factor <= std::numeric_limits<T>::max();
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS) {
    const T x = xs[i];
    if (!(x >= low && x <= high)) continue;
    int64_t b;
    if (divided) {
      b = static_cast<int64_t>((x - low) * factor);
      if (b >= bins) b = bins - 1;
      while (b > 0 && x < e[b]) b--;
      while (b + 1 < bins && x >= e[b + 1]) b++;
    } else {
      b = place_of(e, bins + 1, x, true) - 1;
      if (b >= bins) b = bins - 1;
    }
    atomicAdd(counts + b, 1ull);
  }
}

TY_CUDA_KERNEL(histogram_counts) {
  const bool even = static_cast<const ty_p_dim *>(k->params)->flag;
  const int64_t count = k->in[0]->count, bins = k->out[0]->count;
  if (!ty_cuda_zero(k->out[0]->data, static_cast<size_t>(bins) * sizeof(int64_t))) return false;
  if (count == 0) return true;
  return ty_for_reals(k->in[0]->dtype, "histogram_counts", [&](auto x) {
    typedef decltype(x) T;
    const T *xs = static_cast<const T *>(k->in[0]->data), *edges = static_cast<const T *>(k->in[1]->data);
    unsigned long long *counts = static_cast<unsigned long long *>(k->out[0]->data);
    return TY_LAUNCH((count_between<T>), ty_cuda_blocks(count, THREADS), THREADS, 0, xs, edges, counts, count, bins,
                     even);
  });
}

/* ---- order statistics: from the sorted line ---- */

extern "C" ty_kernel ty_cuda_sort;

struct pick_job {
  int64_t size, inner, lines, rank;
  bool median, skip;
};

template <class T> TY_DEVICE bool is_nan(T x) { return x != x; }
TY_DEVICE bool is_nan(ty_f16 x) { return (x.bits & 0x7fff) > 0x7c00; }
TY_DEVICE bool is_nan(ty_bf16 x) { return (x.bits & 0x7fff) > 0x7f80; }

template <class T>
__global__ void pick(const pick_job j, const T *sorted, const int64_t *order, T *values, int64_t *positions) {
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < j.lines; i += int64_t{ gridDim.x } * THREADS) {
    const int64_t base = i / j.inner * j.size * j.inner + i % j.inner;
    int64_t rank = j.rank;
    if (j.median || j.skip) {
      int64_t low = 0, high = j.size; /* the first NaN, which are at the end */
      while (low < high) {
        const int64_t mid = (low + high) / 2;
        if (is_nan(sorted[base + mid * j.inner])) high = mid;
        else low = mid + 1;
      }
      if (j.median) rank = low < j.size ? low : (j.size - 1) / 2;
      else rank = low > 0 ? (low - 1) / 2 : 0;
    }
    values[i] = sorted[base + rank * j.inner];
    positions[i] = order[base + rank * j.inner];
  }
}

TY_CUDA_KERNEL(order_statistic) {
  const ty_p_dim &p = *static_cast<const ty_p_dim *>(k->params);
  const ty_view *x = k->in[0];
  if (k->out[0]->count == 0) return true;
  const ty_lines l = ty_lines_of(x, p.dim);
  const pick_job j = { l.size, l.inner, l.outer * l.inner, p.k, p.flag, p.flag2 };
  const size_t bytes = ty_dtype_size[x->dtype];
  ty_cuda_scratch values(static_cast<size_t>(x->count) * bytes), order(static_cast<size_t>(x->count) * sizeof(int64_t));
  if (!values.data || !order.data) return false;
  ty_view sorted = *x, at = *x;
  sorted.data = values.data;
  at.data = order.data;
  at.dtype = TY_I64;
  const ty_view *out[] = { &sorted, &at };
  ty_p_dim rising = {};
  rising.dim = p.dim;
  const ty_kernel_args args = { 2, 1, out, k->in, &rising, nullptr };
  if (!ty_cuda_sort(&args)) return false;
  const auto launch = [&](auto e) {
    typedef decltype(e) T;
    const T *from = values.as<T>();
    const int64_t *positions = order.as<int64_t>();
    T *to = static_cast<T *>(k->out[0]->data);
    int64_t *to_positions = static_cast<int64_t *>(k->out[1]->data);
    return TY_LAUNCH((pick<T>), ty_cuda_blocks(j.lines, THREADS), THREADS, 0, j, from, positions, to, to_positions);
  };
  if (x->dtype == TY_BOOL) return launch(uint8_t{});
  return ty_for_numbers(x->dtype, "order_statistic", launch);
}
