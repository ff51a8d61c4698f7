/* Elements in another order or left out: flip, tril, triu. Only the width of the elements matters. */
#include "elementwise.cuh"

TY_CUDA_KERNEL(flip) {
  int64_t dims = static_cast<const ty_p_dim *>(k->params)->k, shift = 0;
  if (k->out[0]->count == 0) return true;
  /* Copying out of the mirrored positions of the input: the driver takes negative strides, views do not. */
  ty_view mirrored = *k->in[0];
  for (int d = 0; d < mirrored.ndim; d++) {
    if (!(dims >> d & 1)) continue;
    shift += (mirrored.size[d] - 1) * mirrored.stride[d];
    mirrored.stride[d] = -mirrored.stride[d];
  }
  mirrored.data = static_cast<char *>(mirrored.data) + shift * ty_dtype_size[mirrored.dtype];
  const ty_view *in = &mirrored;
  ty_kernel_args args = { 1, 1, k->out, &in, nullptr, nullptr };
  return ty_for_sizes(mirrored.dtype, [&](auto x) {
    typedef decltype(x) T;
    return ew_run<1, T, T>(&args, ew_unchanged{});
  });
}

/* Groups of V neighbours in a row of m elements; rows i of n keep the columns before, or from, i + edge. */
template <class T, int V>
__global__ void __launch_bounds__(EW_THREADS)
    keep_triangle(T *to, const T *from, int64_t groups, int64_t n, int64_t m, int64_t edge, bool lower) {
  typedef ty_pack<T, V> pack;
  const int64_t step = int64_t{ gridDim.x } * EW_THREADS;
  for (int64_t g = int64_t{ blockIdx.x } * EW_THREADS + threadIdx.x; g < groups; g += step) {
    const int64_t row = g * V / m, j = g * V - row * m, limit = row % n + edge;
    pack x = {};
    if (lower ? j < limit : j + V > limit) x = reinterpret_cast<const pack *>(from)[g];
    for (int k = 0; k < V; k++)
      if ((j + k < limit) != lower) x.v[k] = 0;
    reinterpret_cast<pack *>(to)[g] = x;
  }
}

static bool keep(const ty_kernel_args *k, bool lower) {
  const ty_view *out = k->out[0], *in = k->in[0];
  if (out->count == 0) return true;
  const int64_t n = out->size[out->ndim - 2], m = out->size[out->ndim - 1];
  const int64_t diagonal = static_cast<const ty_p_dim *>(k->params)->k;
  /* beyond all columns and rows it makes no difference how far */
  const int64_t edge = (diagonal > m ? m : diagonal < -n ? -n : diagonal) + (lower ? 1 : 0);
  return ty_for_sizes(out->dtype, [&](auto x) {
    typedef decltype(x) T;
    enum { V = 16 / sizeof(T) };
    T *to = static_cast<T *>(out->data);
    const T *from = static_cast<const T *>(in->data);
    const bool vectors = m % V == 0 && ty_aligned(to) && ty_aligned(from);
    const int64_t groups = vectors ? out->count / V : out->count;
    if (vectors)
      return TY_LAUNCH((keep_triangle<T, V>), ty_cuda_blocks(groups, EW_THREADS), EW_THREADS, 0, to, from, groups, n, m,
                       edge, lower);
    return TY_LAUNCH((keep_triangle<T, 1>), ty_cuda_blocks(groups, EW_THREADS), EW_THREADS, 0, to, from, groups, n, m,
                     edge, lower);
  });
}

TY_CUDA_KERNEL(tril) { return keep(k, true); }
TY_CUDA_KERNEL(triu) { return keep(k, false); }
