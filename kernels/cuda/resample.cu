/* One dimension resized (kernels/resample.h), and the gradient of that. Neighbours and weights are found once, by a
 * kernel of their own; the gradient gathers from the positions of the result that took from one of the input. */
#include "../resample.h"

#include "planes.cuh"

namespace {

struct side {
  int in, out, taps;
  double step;
  ty_resample_span *spans; /* [out] */
  double *weights;         /* [out, taps] */
};

__global__ void find_spans(ty_p_resample p, side s) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < s.out; i += gridDim.x * blockDim.x)
    s.spans[i] = ty_resample_span_of(&p, i, s.step, s.in, s.out, s.taps, s.weights + int64_t{ i } * s.taps);
}

/* Planes [in, inner] and [out, inner]. */
template <class T>
__global__ void __launch_bounds__(PLANES_THREADS) resample(const T *from, T *to, side s, int inner, planes_shape out) {
  for (uint32_t i = planes_first(); i < out.count; i += planes_step()) {
    const planes_at at = planes_of(out, i);
    const ty_resample_span span = s.spans[at.row];
    const double *w = s.weights + int64_t{ at.row } * s.taps;
    const T *x = from + (int64_t{ at.plane } * s.in + span.first) * inner + at.column;
    typedef ty_compute<T> C;
    C sum = 0;
    for (int t = 0; t < span.count; t++) sum += static_cast<C>(w[t]) * ty_widen(x[int64_t{ t } * inner]);
    to[i] = ty_narrow<T>(sum);
  }
}

/* The first position of the result whose neighbours reach to `at` or beyond: their ends ascend. */
TY_DEVICE int first_over(const side &s, int at) {
  int low = 0, high = s.out;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (s.spans[middle].first + s.spans[middle].count <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}

template <class T>
__global__ void __launch_bounds__(PLANES_THREADS)
    resample_backward(const T *from, T *to, side s, int inner, planes_shape image) {
  for (uint32_t i = planes_first(); i < image.count; i += planes_step()) {
    const planes_at at = planes_of(image, i);
    const int here = static_cast<int>(at.row);
    const T *g = from + int64_t{ at.plane } * s.out * inner + at.column;
    typedef ty_compute<T> C;
    C sum = 0;
    for (int row = first_over(s, here); row < s.out && s.spans[row].first <= here; row++)
      sum += static_cast<C>(s.weights[int64_t{ row } * s.taps + (here - s.spans[row].first)]) *
             ty_widen(g[int64_t{ row } * inner]);
    to[i] = ty_narrow<T>(sum);
  }
}

/* x as [outer, 1, size, inner]. */
ty_view planes_view(const ty_view *x, int dim) {
  ty_view v = *x;
  int64_t outer = 1, inner = 1;
  for (int d = 0; d < dim; d++) outer *= x->size[d];
  for (int d = dim + 1; d < x->ndim; d++) inner *= x->size[d];
  v.size[0] = outer, v.size[1] = 1, v.size[2] = x->size[dim], v.size[3] = inner;
  v.ndim = 4;
  return v;
}

bool run(const ty_kernel_args *k, bool back) {
  const ty_p_resample p = *static_cast<const ty_p_resample *>(k->params);
  if (k->out[0]->count == 0) return true;
  const ty_view from = planes_view(k->in[0], p.dim), to = planes_view(k->out[0], p.dim);
  const int64_t in = back ? to.size[2] : from.size[2], out = back ? from.size[2] : to.size[2];
  const int64_t taps = ty_resample_taps(&p, in, out);
  if (in > 1 << 30 || out > 1 << 30 || to.size[3] > 1 << 30)
    return ty_fail(TY_EUNSUPPORTED, "dimensions of more than 2^30 positions are not supported on cuda");
  ty_cuda_scratch memory(static_cast<size_t>(out) *
                         (sizeof(ty_resample_span) + sizeof(double) * static_cast<size_t>(taps)));
  if (!memory.data) return false;
  side s = {};
  s.in = static_cast<int>(in), s.out = static_cast<int>(out), s.taps = static_cast<int>(taps);
  s.step = ty_resample_step(&p, in, out);
  s.weights = memory.as<double>();
  s.spans = reinterpret_cast<ty_resample_span *>(s.weights + out * taps);
  if (!TY_LAUNCH(find_spans, ty_cuda_blocks(out, 128), 128, 0, p, s)) return false;
  const int inner = static_cast<int>(to.size[3]);
  return ty_for_floats(from.dtype, "resample", [&](auto type) {
    typedef decltype(type) T;
    return planes_in_parts<T>(&from, &to, [&](const T *a, T *b, int64_t, const planes_shape &shape) {
      const unsigned blocks = planes_blocks(shape.count);
      if (back) return TY_LAUNCH(resample_backward<T>, blocks, PLANES_THREADS, 0, a, b, s, inner, shape);
      return TY_LAUNCH(resample<T>, blocks, PLANES_THREADS, 0, a, b, s, inner, shape);
    });
  });
}

} // namespace

TY_CUDA_KERNEL(resample) { return run(k, false); }
TY_CUDA_KERNEL(resample_backward) { return run(k, true); }
