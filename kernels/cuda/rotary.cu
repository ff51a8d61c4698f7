/* Rotary position embedding: pairs of elements of each vector turned by the angles of its position. */
#include "elementwise.cuh"

extern "C" bool ty_cuda_copy(const ty_kernel_args *k);

/* C: what T is computed with, of which the angles are. Output and first input are the first elements of all pairs; the second ones lie to_apart and from_apart
 * elements further. */
template <class T, int V>
__global__ void __launch_bounds__(EW_THREADS) rotate(const ew_plan p, int64_t to_apart, int64_t from_apart) {
  typedef ty_compute<T> C;
  const uint32_t groups = static_cast<uint32_t>(p.count) / V, step = gridDim.x * EW_THREADS;
  for (uint32_t i = blockIdx.x * EW_THREADS + threadIdx.x; i < groups; i += step) {
    int64_t offset[EW_OPERANDS];
    C a[V], b[V], c[V], s[V], y[V];
    ew_offsets<3>(p, i * V, offset);
    ew_load<V, T>(p, 1, offset[1], a);
    ew_load<V, T>(p, 1, offset[1] + from_apart, b);
    ew_load<V, C>(p, 2, offset[2], c);
    ew_load<V, C>(p, 3, offset[3], s);
    for (int j = 0; j < V; j++) {
      y[j] = a[j] * c[j] - b[j] * s[j];
      b[j] = b[j] * c[j] + a[j] * s[j];
    }
    ew_store<V, T>(p, offset[0], y);
    ew_store<V, T>(p, offset[0] + to_apart, b);
  }
}

/* `size` elements of the last dimension of v from `from` on, `step` apart. */
static ty_view part(const ty_view *v, int64_t from, int64_t size, int64_t step) {
  ty_view part = *v;
  int last = v->ndim - 1;
  part.data = static_cast<char *>(v->data) + from * v->stride[last] * ty_dtype_size[v->dtype];
  part.size[last] = size;
  part.stride[last] = step * v->stride[last];
  part.count = v->count / v->size[last] * size;
  part.contiguous = false;
  return part;
}

/* in: x [..., width], cos and sin seen as [..., pairs]; flag: interleaved. */
TY_CUDA_KERNEL(rotary) {
  const ty_view *out = k->out[0], *x = k->in[0];
  if (out->count == 0) return true;
  const bool interleaved = static_cast<const ty_p_dim *>(k->params)->flag;
  const int last = out->ndim - 1;
  const int64_t width = out->size[last], pairs = k->in[1]->size[last], rest = width - 2 * pairs;
  const int64_t next = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
  if (rest) { /* what has no angle stays */
    ty_view to = part(out, 2 * pairs, rest, 1), from = part(x, 2 * pairs, rest, 1);
    const ty_view *tos = &to, *froms = &from;
    ty_kernel_args args = { 1, 1, &tos, &froms, nullptr, nullptr };
    if (!ty_cuda_copy(&args)) return false;
  }
  if (pairs == 0) return true;
  ty_view to = part(out, 0, pairs, next), from = part(x, 0, pairs, next);
  const ty_view *in[] = { &from, k->in[1], k->in[2] };
  const int64_t to_apart = apart * out->stride[last], from_apart = apart * x->stride[last];
  return ty_for_floats(out->dtype, "rotary", [&](auto element) {
    typedef decltype(element) T;
    enum { V = 16 / sizeof(T) };
    static const int bytes[EW_OPERANDS] = { sizeof(T), sizeof(T), sizeof(ty_compute<T>), sizeof(ty_compute<T>) };
    ew_plan whole;
    ew_make_plan(&whole, &to, in, 3);
    return ew_in_parts(whole, bytes, [&](const ew_plan &p) {
      if (to_apart % V == 0 && from_apart % V == 0 && ew_vectors(p, V, bytes))
        return TY_LAUNCH((rotate<T, V>), ty_cuda_blocks(p.count / V, EW_THREADS), EW_THREADS, 0, p, to_apart,
                         from_apart);
      return TY_LAUNCH((rotate<T, 1>), ty_cuda_blocks(p.count, EW_THREADS), EW_THREADS, 0, p, to_apart, from_apart);
    });
  });
}
