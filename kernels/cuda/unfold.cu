/* Windows of images as columns, and columns summed up to images. Every element of the result is computed by itself. */
#include "planes.cuh"

namespace {

struct windows {
  ty_p_pool p;
  int h, w, oh, ow, taps;
};

/* A plane of the result is what one tap sees; the planes before this part: `before`. */
template <class T>
__global__ void __launch_bounds__(PLANES_THREADS)
    unfold_taps(const T *from, T *to, windows q, int64_t before, planes_shape out) {
  for (uint32_t i = planes_first(); i < out.count; i += planes_step()) {
    const planes_at at = planes_of(out, i);
    const int64_t plane = before + at.plane, image = plane / q.taps;
    const int tap = static_cast<int>(plane - image * q.taps), kx = static_cast<int>(q.p.kernel[1]);
    const int64_t row = at.row * q.p.stride[0] - q.p.padding[0] + tap / kx * q.p.dilation[0];
    const int64_t column = at.column * q.p.stride[1] - q.p.padding[1] + tap % kx * q.p.dilation[1];
    const bool seen = row >= 0 && row < q.h && column >= 0 && column < q.w;
    to[i] = seen ? from[(image * q.h + row) * q.w + column] : ty_narrow<T>(ty_compute<T>(0));
  }
}

/* The window whose tap k lies at `position`, or -1. */
TY_DEVICE int window_at(const ty_p_pool &p, int d, int64_t position, int64_t k, int count) {
  const int64_t start = position + p.padding[d] - k * p.dilation[d];
  if (start < 0 || start % p.stride[d]) return -1;
  const int64_t i = start / p.stride[d];
  return i < count ? static_cast<int>(i) : -1;
}

template <class T>
__global__ void __launch_bounds__(PLANES_THREADS)
    fold_pixels(const T *from, T *to, windows q, int64_t before, planes_shape out) {
  const int64_t area = int64_t{ q.oh } * q.ow;
  for (uint32_t i = planes_first(); i < out.count; i += planes_step()) {
    const planes_at at = planes_of(out, i);
    const T *x = from + (before + at.plane) * q.taps * area;
    ty_compute<T> sum = 0;
    for (int64_t ky = 0; ky < q.p.kernel[0]; ky++) {
      const int oy = window_at(q.p, 0, at.row, ky, q.oh);
      if (oy < 0) continue;
      for (int64_t kx = 0; kx < q.p.kernel[1]; kx++) {
        const int ox = window_at(q.p, 1, at.column, kx, q.ow);
        if (ox >= 0) sum += ty_widen(x[(ky * q.p.kernel[1] + kx) * area + int64_t{ oy } * q.ow + ox]);
      }
    }
    to[i] = ty_narrow<T>(sum);
  }
}

bool run(const ty_kernel_args *k, const ty_view *image, bool back) {
  windows q = {};
  q.p = *static_cast<const ty_p_pool *>(k->params);
  q.h = static_cast<int>(image->size[2]), q.w = static_cast<int>(image->size[3]);
  q.taps = static_cast<int>(q.p.kernel[0] * q.p.kernel[1]);
  int64_t out[2];
  for (int d = 0; d < 2; d++)
    out[d] = (image->size[2 + d] + 2 * q.p.padding[d] - q.p.dilation[d] * (q.p.kernel[d] - 1) - 1) / q.p.stride[d] + 1;
  q.oh = static_cast<int>(out[0]), q.ow = static_cast<int>(out[1]);
  const int64_t images = image->size[0] * image->size[1];
  if (k->out[0]->count == 0) return true;
  /* The result as planes: of pixels, or of what a tap sees. */
  const int64_t planes = back ? images : images * q.taps, h = back ? q.h : q.oh, w = back ? q.w : q.ow;
  if (h * w >= 1 << 30 || int64_t{ q.h } * q.w >= 1 << 30)
    return ty_fail(TY_EUNSUPPORTED, "images of 2^30 pixels and more are not supported on cuda");
  const int64_t most = ((1 << 30) - 1) / (h * w);
  return ty_for_floats(k->out[0]->dtype, back ? "fold" : "unfold", [&](auto type) {
    typedef decltype(type) T;
    for (int64_t begin = 0; begin < planes; begin += most) {
      const int64_t n = most < planes - begin ? most : planes - begin;
      planes_shape shape;
      shape.count = static_cast<uint32_t>(n * h * w);
      shape.row.set(static_cast<uint32_t>(h));
      shape.column.set(static_cast<uint32_t>(w));
      const T *from = static_cast<const T *>(k->in[0]->data);
      T *to = static_cast<T *>(k->out[0]->data) + begin * h * w;
      const unsigned blocks = planes_blocks(shape.count);
      const bool ok = back ? TY_LAUNCH(fold_pixels<T>, blocks, PLANES_THREADS, 0, from, to, q, begin, shape)
                           : TY_LAUNCH(unfold_taps<T>, blocks, PLANES_THREADS, 0, from, to, q, begin, shape);
      if (!ok) return false;
    }
    return true;
  });
}

} // namespace

TY_CUDA_KERNEL(unfold) { return run(k, k->in[0], false); }
TY_CUDA_KERNEL(fold) { return run(k, k->out[0], true); }
