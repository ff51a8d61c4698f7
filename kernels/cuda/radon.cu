/* Parallel projections and their adjoint: kernels/radon.h. A thread follows a line, or gathers for a pixel. */
#include "../radon.h"
#include "cuda.cuh"

namespace {

enum { THREADS = 256 };

struct radon_job {
  int64_t n, h, w, angles, detectors;
  double spacing;
  const ty_radon_view *views;
};

__global__ void __launch_bounds__(THREADS) radon_views(const void *angles, bool wide, int64_t n, ty_radon_view *views) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * THREADS)
    views[i] = ty_radon_view_of(wide ? static_cast<const double *>(angles)[i]
                                     : static_cast<double>(static_cast<const float *>(angles)[i]));
}

template <class T> __global__ void __launch_bounds__(THREADS) radon_lines(radon_job j, const T *from, T *to) {
  const int64_t count = j.n * j.angles * j.detectors, step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count; i += step) {
    const int64_t detector = i % j.detectors, line = i / j.detectors;
    const ty_radon_view v = j.views[line % j.angles];
    const ty_radon_lines l = ty_radon_lines_of(&v, j.h, j.w, j.detectors, j.spacing);
    const int64_t rows = v.by_rows ? j.h : j.w, width = v.by_rows ? j.w : j.h;
    const int64_t across = v.by_rows ? 1 : j.w, down = v.by_rows ? j.w : 1;
    const T *picture = from + line / j.angles * j.h * j.w;
    T sum = 0;
    for (int64_t y = 0; y < rows; y++) {
      const double at = l.first + static_cast<double>(y) * l.by_line + static_cast<double>(detector) * l.by_detector;
      if (!(at > -1 && at < static_cast<double>(width))) continue;
      const double before = floor(at);
      const int64_t k = static_cast<int64_t>(before);
      const T part = static_cast<T>(at - before);
      const T left = k >= 0 ? picture[y * down + k * across] : T(0);
      const T right = k + 1 < width ? picture[y * down + (k + 1) * across] : T(0);
      sum += left + part * (right - left);
    }
    to[i] = sum * static_cast<T>(l.length);
  }
}

template <class T> __global__ void __launch_bounds__(THREADS) radon_pixels(radon_job j, const T *from, T *to) {
  const int64_t count = j.n * j.h * j.w, step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count; i += step) {
    const int64_t x = i % j.w, line = i / j.w, y = line % j.h;
    const T *picture = from + line / j.h * j.angles * j.detectors;
    T total = 0;
    for (int64_t a = 0; a < j.angles; a++) {
      const ty_radon_view v = j.views[a];
      const ty_radon_pixels p = ty_radon_pixels_of(&v, j.h, j.w, j.detectors, j.spacing);
      const double at = p.first + static_cast<double>(y) * p.by_row + static_cast<double>(x) * p.by_column;
      double begin = ceil(at - p.reach), end = floor(at + p.reach);
      begin = begin > 0 ? begin : 0;
      end = end < static_cast<double>(j.detectors - 1) ? end : static_cast<double>(j.detectors - 1);
      double sum = 0;
      for (double d = begin; d <= end; d++)
        sum += (1 - fabs(d - at) / p.reach) * static_cast<double>(picture[a * j.detectors + static_cast<int64_t>(d)]);
      total += static_cast<T>(sum * p.length);
    }
    to[i] = total;
  }
}

bool run(const ty_kernel_args *k, const ty_view *picture, const ty_view *projections, bool backward) {
  const ty_view *angles = k->in[1];
  if (!k->out[0]->count) return true;
  ty_cuda_scratch scratch(static_cast<size_t>(angles->count) * sizeof(ty_radon_view) + 1);
  if (!scratch.data) return false;
  ty_radon_view *views = scratch.as<ty_radon_view>();
  radon_job j = { picture->size[0],
                  picture->size[1],
                  picture->size[2],
                  projections->size[1],
                  projections->size[2],
                  static_cast<const ty_p_radon *>(k->params)->spacing,
                  views };
  const bool wide = angles->dtype == TY_F64;
  const int64_t n = angles->count;
  const void *data = angles->data;
  if (n && !TY_LAUNCH(radon_views, ty_cuda_blocks(n, THREADS), THREADS, 0, data, wide, n, views)) return false;
  return ty_for_reals(picture->dtype, backward ? "backproject" : "radon", [&](auto type) {
    typedef decltype(type) T;
    const T *from = ty_data_of<const T>(k->in[0]);
    T *to = ty_data_of<T>(k->out[0]);
    const unsigned blocks = ty_cuda_blocks(k->out[0]->count, THREADS);
    return backward ? TY_LAUNCH(radon_pixels<T>, blocks, THREADS, 0, j, from, to)
                    : TY_LAUNCH(radon_lines<T>, blocks, THREADS, 0, j, from, to);
  });
}

} // namespace

TY_CUDA_KERNEL(radon) { return run(k, k->in[0], k->out[0], false); }
TY_CUDA_KERNEL(backproject) { return run(k, k->out[0], k->in[0], true); }
