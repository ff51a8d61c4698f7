/* Edges around a tensor (kernels/pad.h), a thread for each element of the result. Only the width of elements matters. */
#include "../pad.h"

#include "elementwise.cuh"

namespace {

struct pad_shape {
  int ndim;
  int64_t in[TY_MAX_DIMS], out[TY_MAX_DIMS], before[TY_MAX_DIMS];
};

template <class T>
__global__ void __launch_bounds__(EW_THREADS)
    pad_elements(T *to, const T *from, const T *value, int64_t count, ty_padding mode, pad_shape s) {
  const int64_t step = int64_t{ gridDim.x } * EW_THREADS;
  for (int64_t i = int64_t{ blockIdx.x } * EW_THREADS + threadIdx.x; i < count; i += step) {
    int64_t rest = i, at = 0, stride = 1;
    for (int d = s.ndim - 1; d >= 0 && at >= 0; d--) {
      const int64_t next = rest / s.out[d];
      const int64_t source = ty_pad_source(mode, rest - next * s.out[d] - s.before[d], s.in[d]);
      rest = next;
      at = source < 0 ? -1 : at + source * stride;
      stride *= s.in[d];
    }
    to[i] = at < 0 ? *value : from[at];
  }
}

} // namespace

TY_CUDA_KERNEL(pad_edges) {
  const ty_view *out = k->out[0], *in = k->in[0], *value = k->in[1];
  const ty_p_pad *p = static_cast<const ty_p_pad *>(k->params);
  if (out->count == 0) return true;
  pad_shape s = {};
  s.ndim = out->ndim;
  for (int d = 0; d < s.ndim; d++) {
    s.in[d] = in->size[d];
    s.out[d] = out->size[d];
    s.before[d] = p->before[d];
  }
  const ty_padding mode = p->mode;
  const int64_t count = out->count;
  return ty_for_sizes(out->dtype, [&](auto x) {
    typedef decltype(x) T;
    T *to = static_cast<T *>(out->data);
    const T *from = static_cast<const T *>(in->data), *one = static_cast<const T *>(value->data);
    return TY_LAUNCH((pad_elements<T>), ty_cuda_blocks(count, EW_THREADS), EW_THREADS, 0, to, from, one, count, mode,
                     s);
  });
}
