/* x * scale + shift per channel of [n, channels, spatial]: batch_norm by running statistics. */
#include "channels.cuh"

static int64_t positions(const ty_view *x) {
  int64_t n = 1;
  for (int d = 2; d < x->ndim; d++) n *= x->size[d];
  return n;
}

/* shift NULL counts as 0. */
template <class T> struct affine {
  typedef ty_compute<T> C;
  const T *x;
  const C *scale, *shift;
  T *y;
  ch_divisor by_channels; /* of segments */
  template <int V> TY_DEVICE_MEMBER void put(int64_t at, int64_t segment) const {
    const int64_t channel = segment - ch_divide(segment, by_channels) * by_channels.n;
    const C a = scale[channel], b = shift ? shift[channel] : C(0);
    C v[V];
    ty_load<V>(x + at, v);
    for (int j = 0; j < V; j++) v[j] = v[j] * a + b;
    ty_store<V>(y + at, v);
  }
};

template <class T> static bool apply(const ty_view *x, const ty_view *scale, const ty_view *shift, const ty_view *y) {
  typedef ty_compute<T> C;
  const T *from = static_cast<const T *>(x->data);
  T *to = static_cast<T *>(y->data);
  return ch_run<16 / sizeof(T)>(y->count, positions(x),
                                affine<T>{ from, static_cast<const C *>(scale->data),
                                           shift ? static_cast<const C *>(shift->data) : nullptr, to,
                                           ch_divisor(x->size[1], x->size[0] * x->size[1]) },
                                ty_aligned(from) && ty_aligned(to));
}

/* in: x, scale, shift. */
TY_CUDA_KERNEL(channel_affine) {
  if (k->out[0]->count == 0) return true;
  return ty_for_floats(k->in[0]->dtype, "channel_affine",
                       [&](auto x) { return apply<decltype(x)>(k->in[0], k->in[1], k->in[2], k->out[0]); });
}

template <class T> struct products {
  const T *g, *x;
  TY_DEVICE_MEMBER products begin(int64_t, int64_t) const { return *this; }
  template <int V> TY_DEVICE_MEMBER void add(int64_t at, double &sum, double &sum_x) const {
    ty_compute<T> u[V], v[V], part = 0, part_x = 0;
    ty_load<V>(g + at, u);
    ty_load<V>(x + at, v);
    for (int j = 0; j < V; j++) part += u[j], part_x += u[j] * v[j];
    sum += static_cast<double>(part), sum_x += static_cast<double>(part_x);
  }
};

template <class C>
__global__ void __launch_bounds__(CH_THREADS)
    sum_parts(C *dscale, C *dshift, const ch_sums *sums, int64_t channels, int64_t parts) {
  for (int64_t c = int64_t{ blockIdx.x } * CH_THREADS + threadIdx.x; c < channels;
       c += int64_t{ gridDim.x } * CH_THREADS) {
    double a = 0, b = 0;
    for (int64_t i = 0; i < parts; i++) a += sums[c * parts + i].a, b += sums[c * parts + i].b;
    dscale[c] = static_cast<C>(b), dshift[c] = static_cast<C>(a);
  }
}

/* in: g, x, scale; out: dx, dscale, dshift. */
TY_CUDA_KERNEL(channel_affine_backward) {
  const ty_view *x = k->in[1];
  const int64_t channels = x->size[1], spatial = positions(x);
  if (channels == 0) return true;
  return ty_for_floats(x->dtype, "channel_affine", [&](auto element) {
    typedef decltype(element) T;
    typedef ty_compute<T> C;
    C *dscale = static_cast<C *>(k->out[1]->data), *dshift = static_cast<C *>(k->out[2]->data);
    const size_t bytes = static_cast<size_t>(channels) * sizeof(C);
    if (x->count == 0) return ty_cuda_zero(dscale, bytes) && ty_cuda_zero(dshift, bytes);
    const T *g = static_cast<const T *>(k->in[0]->data), *from = static_cast<const T *>(x->data);
    const ch_rows c(channels, x->size[0] * spatial, spatial, channels * spatial, spatial);
    ty_cuda_scratch room(static_cast<size_t>(channels * c.parts) * sizeof(ch_sums));
    if (!room.data) return false;
    ch_sums *sums = room.as<ch_sums>();
    return ch_sum<16 / sizeof(T)>(sums, c, products<T>{ g, from }, ty_aligned(g) && ty_aligned(from)) &&
           TY_LAUNCH(sum_parts<C>, ty_cuda_blocks(channels, CH_THREADS), CH_THREADS, 0, dscale, dshift, sums, channels,
                     c.parts) &&
           apply<T>(k->in[0], k->in[2], nullptr, k->out[0]);
  });
}
