/* group_norm and batch_norm, and their gradients. A row is what is normalised together: the channels of a group in one
 * image, or one channel in all images. The formulas are those of norm_rows.cuh. */
#include "activation.cuh"
#include "channels.cuh"

/* x [n, channels, spatial]. */
struct shape {
  int64_t n, channels, spatial, groups; /* groups 0: batch norm */
  int64_t rows, width, in_row;          /* in_row: channels of a row */
  ty_activation activation;
  shape(const ty_view *x, const ty_p_norm *p)
      : n(x->size[0]), channels(x->size[1]), spatial(1), groups(p ? p->groups : 0),
        activation(p ? p->activation : TY_NO_ACTIVATION) {
    for (int d = 2; d < x->ndim; d++) spatial *= x->size[d];
    in_row = groups ? channels / groups : 1;
    rows = groups ? n * groups : channels;
    width = groups ? in_row * spatial : n * spatial;
  }
  ch_rows whole_rows() const {
    return groups ? ch_rows(rows, width, width, width, width)
                  : ch_rows(rows, width, spatial, channels * spatial, spatial);
  }
};

/* Which channel and which row a segment (a channel of an image) belongs to. */
struct owners {
  bool by_group;
  ch_divisor by_channels, by_in_row;
  explicit owners(const shape &s)
      : by_group(s.groups != 0), by_channels(s.channels, s.n * s.channels), by_in_row(s.in_row, s.n * s.channels) {}
};
TY_DEVICE int64_t channel_of(const owners &o, int64_t segment) {
  return segment - ch_divide(segment, o.by_channels) * o.by_channels.n;
}
TY_DEVICE int64_t row_of(const owners &o, int64_t segment, int64_t channel) {
  return o.by_group ? ch_divide(segment, o.by_in_row) : channel;
}

/* ---- forward ---- */

/* Sums of x and of its square, around the first element of the row. */
template <class T> struct moments {
  const T *x;
  struct of_row {
    const T *x;
    double first;
    template <int V> TY_DEVICE_MEMBER void add(int64_t at, double &a, double &b) const {
      ty_compute<T> v[V];
      ty_load<V>(x + at, v);
      for (int j = 0; j < V; j++) {
        const double d = static_cast<double>(v[j]) - first;
        a += d, b += d * d;
      }
    }
  };
  TY_DEVICE_MEMBER of_row begin(int64_t, int64_t place) const { return { x, static_cast<double>(ty_widen(x[place])) }; }
};

template <class C> struct statistic {
  C mean, low, rstd; /* a mean in two parts: the second is what the first was rounded by */
};

template <class T>
__global__ void __launch_bounds__(CH_THREADS)
    take_statistics(statistic<ty_compute<T>> *all, ty_compute<T> *mean_out, ty_compute<T> *rstd_out,
                    ty_compute<T> *var_out, const ch_sums *sums, const T *x, const ch_rows c, double eps) {
  typedef ty_compute<T> C;
  for (int64_t row = int64_t{ blockIdx.x } * CH_THREADS + threadIdx.x; row < c.rows;
       row += int64_t{ gridDim.x } * CH_THREADS) {
    const double n = static_cast<double>(c.width);
    double a = 0, b = 0;
    for (int64_t i = 0; i < c.parts; i++) a += sums[row * c.parts + i].a, b += sums[row * c.parts + i].b;
    a /= n;
    const double first = c.width ? static_cast<double>(ty_widen(x[row * c.row_step])) : 0.0, average = first + a;
    double var = b / n - a * a;
    if (var < 0) var = 0; /* NaN stays */
    statistic<C> s;
    s.mean = static_cast<C>(average);
    s.low = static_cast<C>(average - static_cast<double>(s.mean));
    s.rstd = static_cast<C>(1 / sqrt(var + eps));
    all[row] = s;
    mean_out[row] = s.mean + s.low;
    if (rstd_out) rstd_out[row] = s.rstd;
    if (var_out) var_out[row] = static_cast<C>(var);
  }
}

template <class T> struct normalise {
  typedef ty_compute<T> C;
  const T *x;
  const C *weight, *bias;
  T *y;
  const statistic<C> *all;
  owners owner;
  ty_activation activation;
  template <int V> TY_DEVICE_MEMBER void put(int64_t at, int64_t segment) const {
    const int64_t channel = channel_of(owner, segment);
    const statistic<C> s = all[row_of(owner, segment, channel)];
    const C scale = weight ? s.rstd * weight[channel] : s.rstd, shift = bias ? bias[channel] : C(0);
    C v[V];
    ty_load<V>(x + at, v);
    for (int j = 0; j < V; j++) v[j] = ty_activate(activation, (v[j] - s.mean - s.low) * scale + shift);
    ty_store<V>(y + at, v);
  }
};

/* out: y, mean, and rstd or (batch norm) variance. */
static bool forward(const ty_kernel_args *k, const shape &s, const char *op) {
  const double eps = static_cast<const ty_p_norm *>(k->params)->eps;
  if (s.rows == 0) return true;
  return ty_for_floats(k->in[0]->dtype, op, [&](auto element) {
    typedef decltype(element) T;
    typedef ty_compute<T> C;
    enum { V = 16 / sizeof(T) };
    const T *x = static_cast<const T *>(k->in[0]->data);
    const C *weight = ty_data_of<C>(k->in[1]), *bias = ty_data_of<C>(k->in[2]);
    T *y = static_cast<T *>(k->out[0]->data);
    C *mean = static_cast<C *>(k->out[1]->data), *last = static_cast<C *>(k->out[2]->data);
    C *rstd = s.groups ? last : nullptr, *var = s.groups ? nullptr : last;
    const bool packs = ty_aligned(x) && ty_aligned(y);
    const ch_rows c = s.whole_rows();
    ty_cuda_scratch sum_room(static_cast<size_t>(c.rows * c.parts) * sizeof(ch_sums));
    ty_cuda_scratch row_room(static_cast<size_t>(c.rows) * sizeof(statistic<C>));
    if (!sum_room.data || !row_room.data) return false;
    ch_sums *sums = sum_room.as<ch_sums>();
    statistic<C> *all = row_room.as<statistic<C>>();
    if (s.width ? !ch_sum<V>(sums, c, moments<T>{ x }, packs)
                : !ty_cuda_zero(sums, static_cast<size_t>(c.rows * c.parts) * sizeof(ch_sums)))
      return false;
    return TY_LAUNCH(take_statistics<T>, ty_cuda_blocks(c.rows, CH_THREADS), CH_THREADS, 0, all, mean, rstd, var, sums,
                     x, c, eps) &&
           (s.width == 0 || ch_run<V>(k->out[0]->count, s.spatial,
                                      normalise<T>{ x, weight, bias, y, all, owners(s), s.activation }, packs));
  });
}

TY_CUDA_KERNEL(group_norm) {
  return forward(k, shape(k->in[0], static_cast<const ty_p_norm *>(k->params)), "group_norm");
}

TY_CUDA_KERNEL(batch_norm_fused) { return forward(k, shape(k->in[0], nullptr), "batch_norm"); }

/* ---- gradients ---- */

/* What the elements of a segment share: g through the activation, and h. */
template <class C> struct segment_numbers {
  C mean, rstd, scale, shift;
  ty_activation activation;
  template <int V, class T> TY_DEVICE_MEMBER void read(const T *g_at, const T *x_at, C *g, C *h) const {
    ty_load<V>(g_at, g);
    ty_load<V>(x_at, h);
    for (int j = 0; j < V; j++) {
      const C away = h[j] - mean;
      if (activation) g[j] *= ty_activation_slope(activation, away * scale + shift);
      h[j] = away * rstd;
    }
  }
};

template <class T> struct back {
  typedef ty_compute<T> C;
  const T *g, *x;
  const C *mean, *rstd, *weight, *bias;
  owners owner;
  ty_activation activation;
  TY_DEVICE_MEMBER segment_numbers<C> of(int64_t row, int64_t channel) const {
    const C r = rstd[row];
    return { mean[row], r, weight ? r * weight[channel] : r, bias ? bias[channel] : C(0), activation };
  }
};

/* Sums of g and of g h, for segments (group norm) or for whole channels. */
template <class T> struct gradient_sums {
  back<T> b;
  struct of_row {
    const T *g, *x;
    segment_numbers<ty_compute<T>> numbers;
    template <int V> TY_DEVICE_MEMBER void add(int64_t at, double &sum, double &sum_h) const {
      ty_compute<T> v[V], h[V], part = 0, part_h = 0;
      numbers.template read<V>(g + at, x + at, v, h);
      for (int j = 0; j < V; j++) part += v[j], part_h += v[j] * h[j];
      sum += static_cast<double>(part), sum_h += static_cast<double>(part_h);
    }
  };
  TY_DEVICE_MEMBER of_row begin(int64_t segment, int64_t) const {
    const int64_t channel = b.owner.by_group ? channel_of(b.owner, segment) : segment;
    return { b.g, b.x, b.of(row_of(b.owner, segment, channel), channel) };
  }
};

template <class C> struct averages { C g, g_h; };

/* The averages of w g and w g h of each row, by a warp: a row has `segments` neighbouring sums of `parts` parts. */
template <class C>
__global__ void __launch_bounds__(CH_THREADS)
    take_averages(averages<C> *to, const ch_sums *sums, const C *weight, int64_t rows, int64_t segments, int64_t parts,
                  int64_t groups, int64_t width) {
  const int lane = threadIdx.x % TY_WARP, warps = CH_THREADS / TY_WARP;
  for (int64_t row = int64_t{ blockIdx.x } * warps + threadIdx.x / TY_WARP; row < rows;
       row += int64_t{ gridDim.x } * warps) {
    double a = 0, b = 0;
    for (int64_t i = lane; i < segments * parts; i += TY_WARP) {
      const int64_t channel = row % groups * segments + i / parts;
      const double w = weight ? static_cast<double>(weight[channel]) : 1.0;
      const ch_sums s = sums[row * segments * parts + i];
      a += w * s.a, b += w * s.b;
    }
    a = ty_warp_reduce(a, ty_plus<double>{});
    b = ty_warp_reduce(b, ty_plus<double>{});
    if (lane == 0)
      to[row] = averages<C>{ static_cast<C>(a / static_cast<double>(width)),
                             static_cast<C>(b / static_cast<double>(width)) };
  }
}

/* Gradients of weight and bias: the sums of each channel over `n` images, by a warp. */
template <class C>
__global__ void __launch_bounds__(CH_THREADS)
    sum_images(C *dw, C *db, const ch_sums *sums, int64_t n, int64_t channels, int64_t parts) {
  const int lane = threadIdx.x % TY_WARP, warps = CH_THREADS / TY_WARP;
  for (int64_t channel = int64_t{ blockIdx.x } * warps + threadIdx.x / TY_WARP; channel < channels;
       channel += int64_t{ gridDim.x } * warps) {
    double a = 0, b = 0;
    for (int64_t i = lane; i < n * parts; i += TY_WARP) {
      const int64_t image = i / parts;
      const ch_sums s = sums[(image * channels + channel) * parts + (i - image * parts)];
      a += s.a, b += s.b;
    }
    a = ty_warp_reduce(a, ty_plus<double>{});
    b = ty_warp_reduce(b, ty_plus<double>{});
    if (lane) continue;
    dw[channel] = static_cast<C>(b);
    if (db) db[channel] = static_cast<C>(a);
  }
}

template <class T> struct gradient {
  typedef ty_compute<T> C;
  back<T> b;
  const averages<C> *all;
  T *dx;
  template <int V> TY_DEVICE_MEMBER void put(int64_t at, int64_t segment) const {
    const int64_t channel = channel_of(b.owner, segment), row = row_of(b.owner, segment, channel);
    const segment_numbers<C> numbers = b.of(row, channel);
    const averages<C> a = all[row];
    const C w = b.weight ? b.weight[channel] : C(1);
    C g[V], h[V];
    numbers.template read<V>(b.g + at, b.x + at, g, h);
    for (int j = 0; j < V; j++) g[j] = numbers.rstd * (g[j] * w - a.g - h[j] * a.g_h);
    ty_store<V>(dx + at, g);
  }
};

/* in: g, x, mean, rstd, weight, bias (which matters to an activation); out: dx, and dweight and dbias unless empty. */
static bool backward(const ty_kernel_args *k, const shape &s, const ty_view *bias_view, const char *op) {
  return ty_for_floats(k->in[1]->dtype, op, [&](auto element) {
    typedef decltype(element) T;
    typedef ty_compute<T> C;
    enum { V = 16 / sizeof(T) };
    const ty_view *const *in = k->in;
    T *dx = static_cast<T *>(k->out[0]->data);
    C *dw = ty_data_of<C>(k->out[1]), *db = ty_data_of<C>(k->out[2]);
    const back<T> b = { static_cast<const T *>(in[0]->data),
                        static_cast<const T *>(in[1]->data),
                        static_cast<const C *>(in[2]->data),
                        static_cast<const C *>(in[3]->data),
                        ty_data_of<C>(in[4]),
                        ty_data_of<C>(bias_view),
                        owners(s),
                        s.activation };
    if (k->out[0]->count == 0) { /* sums of nothing */
      const size_t bytes = static_cast<size_t>(s.channels) * sizeof(C);
      return (!dw || ty_cuda_zero(dw, bytes)) && (!db || ty_cuda_zero(db, bytes));
    }
    const bool packs = ty_aligned(b.g) && ty_aligned(b.x) && ty_aligned(dx);
    const ch_rows c = s.groups ? ch_rows(s.n * s.channels, s.spatial, s.spatial, s.spatial, s.spatial) : s.whole_rows();
    ty_cuda_scratch sum_room(static_cast<size_t>(c.rows * c.parts) * sizeof(ch_sums));
    ty_cuda_scratch row_room(static_cast<size_t>(s.rows) * sizeof(averages<C>));
    if (!sum_room.data || !row_room.data) return false;
    ch_sums *sums = sum_room.as<ch_sums>();
    averages<C> *all = row_room.as<averages<C>>();
    const C *weight = b.weight;
    const int64_t groups = s.groups ? s.groups : s.rows;
    return ch_sum<V>(sums, c, gradient_sums<T>{ b }, packs) &&
           TY_LAUNCH(take_averages<C>, ty_cuda_blocks(s.rows, CH_THREADS / TY_WARP), CH_THREADS, 0, all, sums, weight,
                     s.rows, s.in_row, c.parts, groups, s.width) &&
           (!dw || TY_LAUNCH(sum_images<C>, ty_cuda_blocks(s.channels, CH_THREADS / TY_WARP), CH_THREADS, 0, dw, db,
                             sums, c.rows / s.channels, s.channels, c.parts)) &&
           ch_run<V>(k->out[0]->count, s.spatial, gradient<T>{ b, all, dx }, packs);
  });
}

TY_CUDA_KERNEL(group_norm_backward) {
  return backward(k, shape(k->in[1], static_cast<const ty_p_norm *>(k->params)), k->in[5], "group_norm");
}

TY_CUDA_KERNEL(batch_norm_backward) { return backward(k, shape(k->in[1], nullptr), nullptr, "batch_norm"); }
