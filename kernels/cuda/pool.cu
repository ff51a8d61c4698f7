/* Pooling over windows: maximum with its position, mean and its gradient. */
#include "../window.h"
#include "planes.cuh"

namespace {

enum { WIDE = 24 }; /* windows of at least so many positions are shared by a warp */

struct pool {
  ty_p_pool p;
  int h, w, oh, ow;
};

template <class T>
__global__ void __launch_bounds__(PLANES_THREADS)
    max_windows(const T *from, T *to, int64_t *position, pool q, planes_shape out) {
  for (uint32_t i = planes_first(); i < out.count; i += planes_step()) {
    planes_at at = planes_of(out, i);
    const T *x = from + at.plane * (int64_t{ q.h } * q.w);
    ty_window v = ty_window_of(&q.p, 0, at.row, q.h, q.oh), u = ty_window_of(&q.p, 1, at.column, q.w, q.ow);
    const int bottom = static_cast<int>(v.last), right = static_cast<int>(u.last);
    int best = static_cast<int>(v.first * q.w + u.first);
    T most = x[best];
    for (int row = static_cast<int>(v.first); row < bottom; row += static_cast<int>(v.step))
      for (int column = static_cast<int>(u.first); column < right; column += static_cast<int>(u.step)) {
        T t = x[row * q.w + column];
        if (t > most || (t != t && most == most)) { /* the first of equals, and the first NaN, wins */
          most = t;
          best = row * q.w + column;
        }
      }
    to[i] = most;
    position[i] = best;
  }
}

template <class T>
__global__ void __launch_bounds__(PLANES_THREADS) mean_windows(const T *from, T *to, pool q, planes_shape out) {
  for (uint32_t i = planes_first(); i < out.count; i += planes_step()) {
    planes_at at = planes_of(out, i);
    const T *x = from + at.plane * (int64_t{ q.h } * q.w);
    ty_window v = ty_window_of(&q.p, 0, at.row, q.h, q.oh), u = ty_window_of(&q.p, 1, at.column, q.w, q.ow);
    T sum = 0;
    for (int64_t row = v.first; row < v.last; row++)
      for (int64_t column = u.first; column < u.last; column++) sum += x[row * q.w + column];
    to[i] = sum / static_cast<T>(v.count * u.count);
  }
}

/* A warp for each window. */
template <class T>
__global__ void __launch_bounds__(PLANES_THREADS) wide_mean_windows(const T *from, T *to, pool q, planes_shape out) {
  const int lane = threadIdx.x % TY_WARP;
  for (uint32_t i = planes_first() / TY_WARP; i < out.count; i += planes_step() / TY_WARP) {
    planes_at at = planes_of(out, i);
    const T *x = from + at.plane * (int64_t{ q.h } * q.w);
    ty_window v = ty_window_of(&q.p, 0, at.row, q.h, q.oh), u = ty_window_of(&q.p, 1, at.column, q.w, q.ow);
    int width = static_cast<int>(u.last - u.first), n = static_cast<int>(v.last - v.first) * width;
    T sum = 0;
    for (int k = lane; k < n; k += TY_WARP) {
      int row = k / width;
      sum += x[(v.first + row) * q.w + u.first + (k - row * width)];
    }
    sum = ty_warp_reduce(sum, ty_plus<T>{});
    if (lane == 0) to[i] = sum / static_cast<T>(v.count * u.count);
  }
}

/* The windows that see position i: first .. last. */
TY_DEVICE void windows_over(const ty_p_pool &p, int d, int64_t i, int64_t size, int64_t windows, int64_t *first,
                            int64_t *last) {
  if (p.adaptive) {
    *first = i * windows / size;
    *last = ((i + 1) * windows + size - 1) / size - 1;
    return;
  }
  int64_t end = i + p.padding[d], start = end - p.kernel[d] + 1;
  *first = start <= 0 ? 0 : (start + p.stride[d] - 1) / p.stride[d];
  *last = end / p.stride[d] < windows ? end / p.stride[d] : windows - 1;
}

/* Every position of the image gathers what the windows over it bring. */
template <class T>
__global__ void __launch_bounds__(PLANES_THREADS) spread_means(const T *from, T *to, pool q, planes_shape image) {
  for (uint32_t i = planes_first(); i < image.count; i += planes_step()) {
    planes_at at = planes_of(image, i);
    const T *g = from + at.plane * (int64_t{ q.oh } * q.ow);
    int64_t top, bottom, left, right;
    windows_over(q.p, 0, at.row, q.h, q.oh, &top, &bottom);
    windows_over(q.p, 1, at.column, q.w, q.ow, &left, &right);
    T sum = 0;
    for (int64_t oy = top; oy <= bottom; oy++) {
      int64_t rows = ty_window_of(&q.p, 0, oy, q.h, q.oh).count;
      for (int64_t ox = left; ox <= right; ox++)
        sum += g[oy * q.ow + ox] / static_cast<T>(rows * ty_window_of(&q.p, 1, ox, q.w, q.ow).count);
    }
    to[i] = sum;
  }
}

pool pool_of(const ty_kernel_args *k, const ty_view *image, const ty_view *result) {
  return pool{ *static_cast<const ty_p_pool *>(k->params), static_cast<int>(image->size[2]),
               static_cast<int>(image->size[3]), static_cast<int>(result->size[2]), static_cast<int>(result->size[3]) };
}

} // namespace

TY_CUDA_KERNEL(max_pool2d) {
  const ty_view *x = k->in[0], *y = k->out[0];
  pool q = pool_of(k, x, y);
  int64_t *position = static_cast<int64_t *>(k->out[1]->data);
  return ty_for_reals(x->dtype, "max_pool2d", [&](auto type) {
    typedef decltype(type) T;
    return planes_in_parts<T>(x, y, [&](const T *from, T *to, int64_t done, const planes_shape &out) {
      int64_t *where = position + done;
      return TY_LAUNCH(max_windows<T>, planes_blocks(out.count), PLANES_THREADS, 0, from, to, where, q, out);
    });
  });
}

TY_CUDA_KERNEL(avg_pool2d) {
  const ty_view *x = k->in[0], *y = k->out[0];
  pool q = pool_of(k, x, y);
  int64_t taps = q.p.kernel[0] * q.p.kernel[1];
  if (q.p.adaptive && y->count) taps = int64_t{ q.h } * q.w / (int64_t{ q.oh } * q.ow);
  return ty_for_reals(x->dtype, "avg_pool2d", [&](auto type) {
    typedef decltype(type) T;
    return planes_in_parts<T>(x, y, [&](const T *from, T *to, int64_t, const planes_shape &out) {
      if (taps >= WIDE)
        return TY_LAUNCH(wide_mean_windows<T>, planes_blocks(int64_t{ out.count } * TY_WARP), PLANES_THREADS, 0, from,
                         to, q, out);
      return TY_LAUNCH(mean_windows<T>, planes_blocks(out.count), PLANES_THREADS, 0, from, to, q, out);
    });
  });
}

TY_CUDA_KERNEL(avg_pool2d_backward) {
  const ty_view *g = k->in[0], *dx = k->out[0];
  pool q = pool_of(k, dx, g);
  return ty_for_reals(g->dtype, "avg_pool2d_backward", [&](auto type) {
    typedef decltype(type) T;
    return planes_in_parts<T>(g, dx, [&](const T *from, T *to, int64_t, const planes_shape &image) {
      return TY_LAUNCH(spread_means<T>, planes_blocks(image.count), PLANES_THREADS, 0, from, to, q, image);
    });
  });
}
