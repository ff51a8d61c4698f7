/* Images resized by nearest neighbour or bilinearly, and the gradient. Where rows and columns of the result lie in the
 * image is found once, by a kernel of its own. */
#include "../sample.h"
#include "planes.cuh"

namespace {

/* The positions of the result that lie at a position of the image or next to it: begin .. end. */
struct range {
  int32_t begin, end;
};

struct side { /* one dimension */
  int in, out;
  double step;
  ty_sample *samples; /* [out] */
  range *ranges;      /* [in], in the gradient */
};

__global__ void find_samples(ty_p_interpolate p, side rows, side columns) {
  const bool second = blockIdx.y;
  const side s = second ? columns : rows;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < s.out; i += gridDim.x * blockDim.x)
    s.samples[i] = ty_sample_of(&p, second, i, s.step, s.in, s.out);
}

/* The first position of the result whose sample begins at `at` or later: samples ascend. */
TY_DEVICE int lower_bound(const side &s, int at) {
  int low = 0, high = s.out;
  while (low < high) {
    int middle = low + (high - low) / 2;
    if (s.samples[middle].first < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

__global__ void find_ranges(side rows, side columns) {
  const side s = blockIdx.y ? columns : rows;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < s.in; i += gridDim.x * blockDim.x)
    s.ranges[i] = range{ lower_bound(s, i - 1), lower_bound(s, i + 1) };
}

template <class T>
__global__ void __launch_bounds__(PLANES_THREADS)
    resize(const T *from, T *to, side rows, side columns, bool linear, planes_shape out) {
  for (uint32_t i = planes_first(); i < out.count; i += planes_step()) {
    planes_at at = planes_of(out, i);
    const T *x = from + at.plane * (int64_t{ rows.in } * columns.in);
    ty_sample r = rows.samples[at.row], c = columns.samples[at.column];
    const T *top = x + int64_t{ r.first } * columns.in;
    if (!linear) {
      to[i] = top[c.first];
      continue;
    }
    typedef ty_compute<T> C;
    const T *bottom = x + int64_t{ r.second } * columns.in;
    const C v = static_cast<C>(r.weight), u = static_cast<C>(c.weight);
    const C a = (1 - u) * ty_widen(top[c.first]) + u * ty_widen(top[c.second]);
    const C b = (1 - u) * ty_widen(bottom[c.first]) + u * ty_widen(bottom[c.second]);
    to[i] = ty_narrow<T>((1 - v) * a + v * b);
  }
}

/* What a sample takes from position i. */
template <class T> TY_DEVICE T share_of(const ty_sample &s, int i) {
  T weight = static_cast<T>(s.weight);
  return (s.first == i ? 1 - weight : T(0)) + (s.second == i ? weight : T(0));
}

/* Every position of the image gathers the gradients of those samples that took from it. */
template <class T>
__global__ void __launch_bounds__(PLANES_THREADS)
    resize_backward(const T *from, T *to, side rows, side columns, planes_shape image) {
  for (uint32_t i = planes_first(); i < image.count; i += planes_step()) {
    planes_at at = planes_of(image, i);
    const T *g = from + at.plane * (int64_t{ rows.out } * columns.out);
    range r = rows.ranges[at.row], c = columns.ranges[at.column];
    typedef ty_compute<T> C;
    C sum = 0;
    for (int row = r.begin; row < r.end; row++) {
      C v = share_of<C>(rows.samples[row], static_cast<int>(at.row)), line = 0;
      if (v == 0) continue;
      for (int column = c.begin; column < c.end; column++) {
        C u = share_of<C>(columns.samples[column], static_cast<int>(at.column));
        if (u != 0) line += u * ty_widen(g[int64_t{ row } * columns.out + column]);
      }
      sum += v * line;
    }
    to[i] = ty_narrow<T>(sum);
  }
}

bool run(const ty_kernel_args *k, const ty_view *image, const ty_view *result, bool backward) {
  const ty_p_interpolate p = *static_cast<const ty_p_interpolate *>(k->params);
  if (k->out[0]->count == 0) return true;
  side s[2];
  int64_t in = 0, out = 0;
  for (int d = 0; d < 2; d++) {
    int64_t a = image->size[2 + d], b = result->size[2 + d];
    if (a > 1 << 30 || b > 1 << 30)
      return ty_fail(TY_EUNSUPPORTED, "images of more than 2^30 rows or columns are not supported on cuda");
    s[d].in = static_cast<int>(a);
    s[d].out = static_cast<int>(b);
    s[d].step = ty_sample_step(&p, d, a, b);
    in += a;
    out += b;
  }
  ty_cuda_scratch memory(sizeof(ty_sample) * static_cast<size_t>(out) + sizeof(range) * static_cast<size_t>(in));
  if (!memory.data) return false;
  s[0].samples = memory.as<ty_sample>();
  s[1].samples = s[0].samples + s[0].out;
  s[0].ranges = reinterpret_cast<range *>(s[1].samples + s[1].out);
  s[1].ranges = s[0].ranges + s[0].in;
  const side rows = s[0], columns = s[1];
  if (!TY_LAUNCH(find_samples, dim3(ty_cuda_blocks(out, 128), 2), 128, 0, p, rows, columns)) return false;
  if (backward && !TY_LAUNCH(find_ranges, dim3(ty_cuda_blocks(in, 128), 2), 128, 0, rows, columns)) return false;
  return ty_for_floats(image->dtype, "interpolate", [&](auto type) {
    typedef decltype(type) T;
    return planes_in_parts<T>(k->in[0], k->out[0], [&](const T *from, T *to, int64_t, const planes_shape &shape) {
      if (backward)
        return TY_LAUNCH(resize_backward<T>, planes_blocks(shape.count), PLANES_THREADS, 0, from, to, rows, columns,
                         shape);
      bool linear = p.mode == 1;
      return TY_LAUNCH(resize<T>, planes_blocks(shape.count), PLANES_THREADS, 0, from, to, rows, columns, linear,
                       shape);
    });
  });
}

} // namespace

TY_CUDA_KERNEL(interpolate) { return run(k, k->in[0], k->out[0], false); }
TY_CUDA_KERNEL(interpolate_backward) { return run(k, k->out[0], k->in[0], true); }
