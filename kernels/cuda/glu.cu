/* Gated linear units: x times an activation of a gate, and both gradients in one pass. */
#include "activation.cuh"
#include "elementwise.cuh"

/* x and gate as two views: of two tensors, or of the halves of one. */
struct halves {
  ty_view x, gate;
  halves(const ty_view *both, const ty_view *other) : x(*both), gate(*(other ? other : both)) {
    if (other) return;
    int last = x.ndim - 1;
    x.size[last] = gate.size[last] = both->size[last] / 2;
    x.count = gate.count = both->count / 2;
    gate.data = static_cast<char *>(gate.data) + x.size[last] * ty_dtype_size[x.dtype];
  }
};

struct gated {
  ty_activation activation;
  template <class X> TY_DEVICE_MEMBER X operator()(X x, X gate) const { return x * ty_activate(activation, gate); }
};

static ty_activation activation_of(const ty_kernel_args *k) {
  return static_cast<const ty_p_activation *>(k->params)->activation;
}

/* in: x, gate (NULL: x is both halves). */
TY_CUDA_KERNEL(glu) {
  if (k->out[0]->count == 0) return true;
  halves v(k->in[0], k->in[1]);
  const ty_view *in[] = { &v.x, &v.gate };
  ty_kernel_args args = { 1, 2, k->out, in, nullptr, nullptr };
  return ty_for_floats(v.x.dtype, "glu", [&](auto x) {
    typedef decltype(x) T;
    return ew_run<2, T, T>(&args, gated{ activation_of(k) });
  });
}

/* The plan's output is dx; dgate, laid out alike, begins `apart` elements from it. */
template <class T, int V>
__global__ void __launch_bounds__(EW_THREADS) glu_gradients(const ew_plan p, ty_activation activation, int64_t apart) {
  const uint32_t groups = static_cast<uint32_t>(p.count) / V, step = gridDim.x * EW_THREADS;
  for (uint32_t i = blockIdx.x * EW_THREADS + threadIdx.x; i < groups; i += step) {
    int64_t offset[EW_OPERANDS];
    ty_compute<T> g[V], x[V], gate[V];
    ew_offsets<3>(p, i * V, offset);
    ew_load<V, T>(p, 1, offset[1], g);
    ew_load<V, T>(p, 2, offset[2], x);
    ew_load<V, T>(p, 3, offset[3], gate);
    for (int j = 0; j < V; j++) {
      const ty_compute<T> v = gate[j];
      gate[j] = g[j] * x[j] * ty_activation_slope(activation, v);
      x[j] = g[j] * ty_activate(activation, v);
    }
    ew_store<V, T>(p, offset[0], x);
    ew_store<V, T>(p, offset[0] + apart, gate);
  }
}

/* in: g, x, gate (NULL: x is both halves); out: dx and, for a gate, dgate. */
TY_CUDA_KERNEL(glu_backward) {
  if (k->in[0]->count == 0) return true;
  halves in_views(k->in[1], k->in[2]), out_views(k->out[0], k->in[2] ? k->out[1] : nullptr);
  const ty_view *in[] = { k->in[0], &in_views.x, &in_views.gate };
  return ty_for_floats(in[0]->dtype, "glu", [&](auto x) {
    typedef decltype(x) T;
    enum { V = 16 / sizeof(T) };
    static const int bytes[EW_OPERANDS] = { sizeof(T), sizeof(T), sizeof(T), sizeof(T) };
    const int64_t apart = (static_cast<char *>(out_views.gate.data) - static_cast<char *>(out_views.x.data)) /
                          static_cast<int64_t>(sizeof(T));
    const ty_activation activation = activation_of(k);
    ew_plan whole;
    ew_make_plan(&whole, &out_views.x, in, 3);
    return ew_in_parts(whole, bytes, [&](const ew_plan &p) {
      if (apart % V == 0 && ew_vectors(p, V, bytes))
        return TY_LAUNCH((glu_gradients<T, V>), ty_cuda_blocks(p.count / V, EW_THREADS), EW_THREADS, 0, p, activation,
                         apart);
      return TY_LAUNCH((glu_gradients<T, 1>), ty_cuda_blocks(p.count, EW_THREADS), EW_THREADS, 0, p, activation, apart);
    });
  });
}
