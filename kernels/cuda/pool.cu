/* Pooling over windows: maximum with its position, mean, and the gradients of both. */
#include "../window.h"
#include "planes.cuh"

namespace {

enum { WIDE = 24 }; /* windows of at least so many positions are shared by a warp */

struct pool {
  ty_p_pool p;
  int h, w, oh, ow;
  ew_divisor stride[2]; /* of windows, where positions fit 32 bits */
  bool fits;
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
    ty_compute<T> most = ty_widen(x[best]);
    for (int row = static_cast<int>(v.first); row < bottom; row += static_cast<int>(v.step))
      for (int column = static_cast<int>(u.first); column < right; column += static_cast<int>(u.step)) {
        const ty_compute<T> t = ty_widen(x[row * q.w + column]);
        if (t > most || (t != t && most == most)) { /* the first of equals, and the first NaN, wins */
          most = t;
          best = row * q.w + column;
        }
      }
    to[i] = ty_narrow<T>(most);
    position[i] = best;
  }
}

template <class T>
__global__ void __launch_bounds__(PLANES_THREADS) mean_windows(const T *from, T *to, pool q, planes_shape out) {
  for (uint32_t i = planes_first(); i < out.count; i += planes_step()) {
    planes_at at = planes_of(out, i);
    const T *x = from + at.plane * (int64_t{ q.h } * q.w);
    ty_window v = ty_window_of(&q.p, 0, at.row, q.h, q.oh), u = ty_window_of(&q.p, 1, at.column, q.w, q.ow);
    typedef ty_compute<T> C;
    C sum = 0;
    for (int64_t row = v.first; row < v.last; row++)
      for (int64_t column = u.first; column < u.last; column++) sum += ty_widen(x[row * q.w + column]);
    to[i] = ty_narrow<T>(sum / static_cast<C>(v.count * u.count));
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
    typedef ty_compute<T> C;
    C sum = 0;
    for (int k = lane; k < n; k += TY_WARP) {
      int row = k / width;
      sum += ty_widen(x[(v.first + row) * q.w + u.first + (k - row * width)]);
    }
    sum = ty_warp_reduce(sum, ty_plus<C>{});
    if (lane == 0) to[i] = ty_narrow<T>(sum / static_cast<C>(v.count * u.count));
  }
}

/* The windows that reach over position i: first .. last. With dilation not all of them see it. */
TY_DEVICE void windows_over(const pool &q, int d, int i, int size, int windows, int *first, int *last) {
  const ty_p_pool &p = q.p;
  if (p.adaptive) {
    *first = static_cast<int>(int64_t{ i } * windows / size);
    *last = static_cast<int>(((i + int64_t{ 1 }) * windows + size - 1) / size - 1);
    return;
  }
  int64_t end = i + p.padding[d], start = end - (p.kernel[d] - 1) * p.dilation[d];
  const int64_t up = start <= 0 ? 0 : start + p.stride[d] - 1;
  const int64_t most = q.fits ? ew_divide(static_cast<uint32_t>(end), q.stride[d]) : end / p.stride[d];
  *first = static_cast<int>(q.fits ? ew_divide(static_cast<uint32_t>(up), q.stride[d]) : up / p.stride[d]);
  *last = static_cast<int>(most < windows ? most : windows - 1);
}

/* Every position of the image gathers what the windows over it bring. */
template <class T>
__global__ void __launch_bounds__(PLANES_THREADS, 1) spread_means(const T *from, T *to, pool q, planes_shape image) {
  for (uint32_t i = planes_first(); i < image.count; i += planes_step()) {
    planes_at at = planes_of(image, i);
    const T *g = from + at.plane * (int64_t{ q.oh } * q.ow);
    int top, bottom, left, right;
    windows_over(q, 0, static_cast<int>(at.row), q.h, q.oh, &top, &bottom);
    windows_over(q, 1, static_cast<int>(at.column), q.w, q.ow, &left, &right);
    typedef ty_compute<T> C;
    C sum = 0;
    for (int oy = top; oy <= bottom; oy++) {
      int64_t rows = ty_window_of(&q.p, 0, oy, q.h, q.oh).count;
      for (int ox = left; ox <= right; ox++)
        sum += ty_widen(g[oy * q.ow + ox]) / static_cast<C>(rows * ty_window_of(&q.p, 1, ox, q.w, q.ow).count);
    }
    to[i] = ty_narrow<T>(sum);
  }
}

/* Every position gathers from the windows that chose it, in their order. */
template <class T>
__global__ void __launch_bounds__(PLANES_THREADS, 1)
    spread_maxima(const T *from, const int64_t *position, T *to, pool q, planes_shape image, ty_cuda_watch watch) {
  for (uint32_t i = planes_first(); i < image.count; i += planes_step()) {
    planes_at at = planes_of(image, i);
    const int64_t results = int64_t{ q.oh } * q.ow, pixels = int64_t{ q.h } * q.w;
    const int64_t own = int64_t{ at.row } * q.w + at.column;
    const T *g = from + at.plane * results;
    const int64_t *chosen = position + at.plane * results;
    int top, bottom, left, right;
    windows_over(q, 0, static_cast<int>(at.row), q.h, q.oh, &top, &bottom);
    windows_over(q, 1, static_cast<int>(at.column), q.w, q.ow, &left, &right);
    ty_compute<T> sum = 0;
    for (int oy = top; oy <= bottom; oy++)
      for (int ox = left; ox <= right; ox++) {
        const int64_t which = chosen[oy * q.ow + ox];
        if (which == own) sum += ty_widen(g[oy * q.ow + ox]);
        else ty_in_range(watch, which, pixels);
      }
    to[i] = ty_narrow<T>(sum);
  }
}

pool pool_of(const ty_kernel_args *k, const ty_view *image, const ty_view *result) {
  pool q = {};
  q.p = *static_cast<const ty_p_pool *>(k->params);
  q.h = static_cast<int>(image->size[2]), q.w = static_cast<int>(image->size[3]);
  q.oh = static_cast<int>(result->size[2]), q.ow = static_cast<int>(result->size[3]);
  const int64_t most = 1 << 29;
  q.fits = !q.p.adaptive;
  for (int d = 0; d < 2 && q.fits; d++) {
    q.fits = q.p.padding[d] < most && q.p.stride[d] < most && image->size[2 + d] <= 2 * most;
    if (q.fits) q.stride[d].set(static_cast<uint32_t>(q.p.stride[d]));
  }
  return q;
}

} // namespace

TY_CUDA_KERNEL(max_pool2d) {
  const ty_view *x = k->in[0], *y = k->out[0];
  pool q = pool_of(k, x, y);
  int64_t *position = static_cast<int64_t *>(k->out[1]->data);
  return ty_for_floats(x->dtype, "max_pool2d", [&](auto type) {
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
  return ty_for_floats(x->dtype, "avg_pool2d", [&](auto type) {
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
  return ty_for_floats(g->dtype, "avg_pool2d_backward", [&](auto type) {
    typedef decltype(type) T;
    return planes_in_parts<T>(g, dx, [&](const T *from, T *to, int64_t, const planes_shape &image) {
      return TY_LAUNCH(spread_means<T>, planes_blocks(image.count), PLANES_THREADS, 0, from, to, q, image);
    });
  });
}

/* in: g, positions as max_pool2d gave them. */
TY_CUDA_KERNEL(max_pool2d_backward) {
  const ty_view *g = k->in[0], *dx = k->out[0];
  pool q = pool_of(k, dx, g);
  const int64_t *position = static_cast<const int64_t *>(k->in[1]->data);
  const int64_t results = int64_t{ q.oh } * q.ow, pixels = int64_t{ q.h } * q.w;
  const ty_cuda_watch watch = ty_cuda_watched();
  return ty_for_floats(g->dtype, "max_pool2d_backward", [&](auto type) {
    typedef decltype(type) T;
    return planes_in_parts<T>(g, dx, [&](const T *from, T *to, int64_t done, const planes_shape &image) {
      const int64_t *chosen = position + done / pixels * results;
      return TY_LAUNCH(spread_maxima<T>, planes_blocks(image.count), PLANES_THREADS, 0, from, chosen, to, q, image,
                       watch);
    });
  });
}
