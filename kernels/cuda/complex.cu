/* Complex numbers as pairs: products and absolute values. And frames added up where they overlap. */
#include "cuda.cuh"

namespace {

enum { THREADS = 256 };

template <class T>
__global__ void __launch_bounds__(THREADS)
    complex_products(const T *a, const T *b, T *y, int64_t n, int64_t na, int64_t nb, T sign) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < n; i += step) {
    const T *p = a + 2 * (i % na), *q = b + 2 * (i % nb);
    const T ar = p[0], ai = p[1], br = q[0], bi = sign * q[1];
    y[2 * i] = ar * br - ai * bi;
    y[2 * i + 1] = ar * bi + ai * br;
  }
}

template <class T> __global__ void __launch_bounds__(THREADS) complex_sizes(const T *x, T *y, int64_t n) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < n; i += step)
    y[i] = hypot(x[2 * i], x[2 * i + 1]);
}

/* A thread for a position, which adds its frames in their order. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    frame_sums(const T *x, T *y, int64_t all, int64_t hop, int64_t count, int64_t size, int64_t length) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < all; i += step) {
    const int64_t line = i / length, at = i % length;
    T sum = 0;
    for (int64_t k = at < size ? 0 : (at - size) / hop + 1; k < count && k * hop <= at; k++)
      sum += x[(line * count + k) * size + at - k * hop];
    y[i] = sum;
  }
}

} // namespace

TY_CUDA_KERNEL(complex_mul) {
  const ty_view *out = k->out[0];
  const int64_t n = out->count / 2, na = k->in[0]->count / 2, nb = k->in[1]->count / 2;
  if (!n) return true;
  const bool flag = static_cast<const ty_p_dim *>(k->params)->flag;
  return ty_for_reals(out->dtype, "complex_mul", [&](auto type) {
    typedef decltype(type) T;
    const T *a = ty_data_of<const T>(k->in[0]), *b = ty_data_of<const T>(k->in[1]);
    T *y = ty_data_of<T>(out), sign = flag ? T(-1) : T(1);
    return TY_LAUNCH(complex_products<T>, ty_cuda_blocks(n, THREADS), THREADS, 0, a, b, y, n, na, nb, sign);
  });
}

TY_CUDA_KERNEL(complex_abs) {
  const ty_view *out = k->out[0];
  const int64_t n = out->count;
  if (!n) return true;
  return ty_for_reals(out->dtype, "complex_abs", [&](auto type) {
    typedef decltype(type) T;
    const T *x = ty_data_of<const T>(k->in[0]);
    T *y = ty_data_of<T>(out);
    return TY_LAUNCH(complex_sizes<T>, ty_cuda_blocks(n, THREADS), THREADS, 0, x, y, n);
  });
}

TY_CUDA_KERNEL(overlap_add) {
  const ty_view *in = k->in[0], *out = k->out[0];
  const int64_t all = out->count, hop = static_cast<const ty_p_dim *>(k->params)->k;
  if (!all) return true;
  const int64_t count = in->size[in->ndim - 2], size = in->size[in->ndim - 1], length = out->size[out->ndim - 1];
  return ty_for_reals(out->dtype, "overlap_add", [&](auto type) {
    typedef decltype(type) T;
    const T *x = ty_data_of<const T>(in);
    T *y = ty_data_of<T>(out);
    return TY_LAUNCH(frame_sums<T>, ty_cuda_blocks(all, THREADS), THREADS, 0, x, y, all, hop, count, size, length);
  });
}
