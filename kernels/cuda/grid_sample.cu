/* Images and volumes sampled at the positions of a grid (kernels/grid_sample.h), and the gradient for the grid. A thread
 * finds the neighbours of a position and goes through the channels. */
#include "../grid_sample.h"

#include "cuda.cuh"

namespace {

enum { THREADS = 128 };

struct sampling {
  ty_p_grid_sample p;
  int64_t count, channels, pixels, places; /* count: positions of all images */
  int dims, taps;
  int64_t size[3];
};

template <class T> struct axis;
template <> struct axis<float> {
  typedef ty_grid_axis_f32 type;
  static TY_DEVICE_MEMBER void of(const ty_p_grid_sample &p, float g, int64_t size, type *a) {
    ty_grid_axis_of_f32(&p, g, size, a);
  }
};
template <> struct axis<double> {
  typedef ty_grid_axis_f64 type;
  static TY_DEVICE_MEMBER void of(const ty_p_grid_sample &p, double g, int64_t size, type *a) {
    ty_grid_axis_of_f64(&p, g, size, a);
  }
};

/* fn(pixel, tap along each dimension of the image, the last first) for the neighbours that are there. */
template <class T, class Fn>
TY_DEVICE void each_neighbour(const sampling &s, const typename axis<T>::type *a, const Fn &fn) {
  const int outer = s.dims == 3 ? s.taps : 1, last = s.dims - 1;
  for (int z = 0; z < outer; z++) {
    const int64_t plane = s.dims == 3 ? a[0].at[z] : 0;
    if (plane < 0) continue;
    for (int y = 0; y < s.taps; y++) {
      const int64_t row = a[last - 1].at[y];
      if (row < 0) continue;
      for (int x = 0; x < s.taps; x++) {
        const int64_t column = a[last].at[x];
        if (column >= 0) fn((plane * s.size[last - 1] + row) * s.size[last] + column, x, y, z);
      }
    }
  }
}

template <class T> TY_DEVICE void find(const sampling &s, const T *grid, int64_t position, typename axis<T>::type *a) {
  for (int d = 0; d < s.dims; d++) axis<T>::of(s.p, grid[position * s.dims + s.dims - 1 - d], s.size[d], a + d);
}

template <class T> __global__ void __launch_bounds__(THREADS) sample(sampling s, const T *image, const T *grid, T *to) {
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < s.count; i += int64_t{ gridDim.x } * THREADS) {
    typename axis<T>::type a[3];
    find(s, grid, i, a);
    const int64_t n = i / s.places, place = i - n * s.places;
    const int last = s.dims - 1;
    for (int64_t c = 0; c < s.channels; c++) {
      const T *x = image + (n * s.channels + c) * s.pixels;
      T sum = 0;
      each_neighbour<T>(s, a, [&](int64_t pixel, int j, int k, int l) {
        const T outer = s.dims == 3 ? a[0].weight[l] : T(1);
        sum += outer * a[last - 1].weight[k] * a[last].weight[j] * x[pixel];
      });
      to[(n * s.channels + c) * s.places + place] = sum;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(THREADS) slopes(sampling s, const T *gradient, const T *image, const T *grid, T *to) {
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < s.count; i += int64_t{ gridDim.x } * THREADS) {
    typename axis<T>::type a[3];
    find(s, grid, i, a);
    const int64_t n = i / s.places, place = i - n * s.places;
    const int last = s.dims - 1;
    T by[3] = { 0, 0, 0 };
    for (int64_t c = 0; c < s.channels; c++) {
      const T *x = image + (n * s.channels + c) * s.pixels;
      const T g = gradient[(n * s.channels + c) * s.places + place];
      each_neighbour<T>(s, a, [&](int64_t pixel, int j, int k, int l) {
        const T v = g * x[pixel], wx = a[last].weight[j], wy = a[last - 1].weight[k];
        const T wz = s.dims == 3 ? a[0].weight[l] : T(1);
        by[0] += v * a[last].slope[j] * wy * wz;
        by[1] += v * wx * a[last - 1].slope[k] * wz;
        if (s.dims == 3) by[2] += v * wx * wy * a[0].slope[l];
      });
    }
    for (int d = 0; d < s.dims; d++) to[i * s.dims + d] = by[d];
  }
}

sampling sampling_of(const ty_kernel_args *k, const ty_view *image, const ty_view *grid) {
  sampling s = {};
  s.p = *static_cast<const ty_p_grid_sample *>(k->params);
  s.dims = image->ndim - 2;
  s.taps = ty_grid_taps(s.p.mode);
  s.channels = image->size[1];
  s.pixels = s.places = 1;
  for (int d = 0; d < s.dims; d++) {
    s.size[d] = image->size[2 + d];
    s.pixels *= image->size[2 + d];
    s.places *= grid->size[1 + d];
  }
  s.count = image->size[0] * s.places;
  return s;
}

} // namespace

/* in: x, grid. */
TY_CUDA_KERNEL(grid_sample) {
  if (k->out[0]->count == 0) return true;
  const sampling s = sampling_of(k, k->in[0], k->in[1]);
  return ty_for_reals(k->in[0]->dtype, "grid_sample", [&](auto type) {
    typedef decltype(type) T;
    const T *x = static_cast<const T *>(k->in[0]->data), *grid = static_cast<const T *>(k->in[1]->data);
    T *to = static_cast<T *>(k->out[0]->data);
    return TY_LAUNCH(sample<T>, ty_cuda_blocks(s.count, THREADS), THREADS, 0, s, x, grid, to);
  });
}

/* in: g, x, grid. */
TY_CUDA_KERNEL(grid_sample_backward_grid) {
  if (k->out[0]->count == 0) return true;
  const sampling s = sampling_of(k, k->in[1], k->in[2]);
  return ty_for_reals(k->in[1]->dtype, "grid_sample_backward_grid", [&](auto type) {
    typedef decltype(type) T;
    const T *g = static_cast<const T *>(k->in[0]->data), *x = static_cast<const T *>(k->in[1]->data);
    const T *grid = static_cast<const T *>(k->in[2]->data);
    T *to = static_cast<T *>(k->out[0]->data);
    return TY_LAUNCH(slopes<T>, ty_cuda_blocks(s.count, THREADS), THREADS, 0, s, g, x, grid, to);
  });
}
