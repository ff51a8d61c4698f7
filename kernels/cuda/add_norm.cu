/* dropout(x) + residual, normalised, in one pass each way. The mask is drawn again for the gradient: element i stays,
 * scaled by 1/(1-p), when its random word (params.h says which) is at least p 2^32. */
#include "../philox.h"
#include "norm_rows.cuh"

template <class C> struct mask {
  uint64_t seed, offset;
  uint32_t least;
  C scale;
  explicit mask(const ty_p_random &p)
      : seed(p.seed), offset(p.offset), least(static_cast<uint32_t>(p.a * 0x1p32)),
        scale(static_cast<C>(1 / (1 - p.a))) {}

  /* Multiplies elements at .. at + V - 1: those of whole blocks, or of a part of one. */
  template <int V> TY_DEVICE_MEMBER void apply(int64_t at, C *v) const {
    enum { IN_BLOCK = V < 4 ? V : 4 };
    if (least == 0) return;
    for (int i = 0; i < V; i += IN_BLOCK) {
      const ty_philox words = ty_philox_block(seed, offset + static_cast<uint64_t>(at + i) / 4);
      for (int j = 0; j < IN_BLOCK; j++) {
        const int which = static_cast<int>(at % 4) + j;
        const uint32_t low = which & 1 ? words.w[1] : words.w[0], high = which & 1 ? words.w[3] : words.w[2];
        v[i + j] = (which & 2 ? high : low) >= least ? v[i + j] * scale : C(0);
      }
    }
  }
};

template <class T> struct sum_of {
  typedef ty_compute<T> C;
  const T *x, *residual;
  T *sum;
  mask<C> drop;
  template <int V> TY_DEVICE_MEMBER void add(int64_t at, C *v) const {
    C r[V];
    ty_load<V>(x + at, v);
    ty_load<V>(residual + at, r);
    drop.template apply<V>(at, v);
    for (int j = 0; j < V; j++) v[j] += r[j];
  }
  template <int V> TY_DEVICE_MEMBER void first(int64_t at, C *v) const {
    add<V>(at, v);
    ty_store<V>(sum + at, v);
  }
  template <int V> TY_DEVICE_MEMBER void again(int64_t at, C *v) const { /* a half in memory is rounded already */
    if constexpr (std::is_same<T, C>::value) ty_load<V>(sum + at, v);
    else add<V>(at, v);
  }
};

/* in: x, residual, weight, bias; out: sum, y, mean, rstd. */
TY_CUDA_KERNEL(add_norm) {
  const ty_p_add_norm &p = *static_cast<const ty_p_add_norm *>(k->params);
  return ty_for_floats(k->in[0]->dtype, "add_norm", [&](auto element) {
    typedef decltype(element) T;
    typedef ty_compute<T> C;
    const T *x = static_cast<const T *>(k->in[0]->data), *residual = static_cast<const T *>(k->in[1]->data);
    T *sum = static_cast<T *>(k->out[0]->data);
    norm_rows<T> job = {};
    job.weight = ty_data_of<C>(k->in[2]), job.bias = ty_data_of<C>(k->in[3]);
    job.y = static_cast<T *>(k->out[1]->data);
    job.mean = static_cast<C *>(k->out[2]->data), job.rstd = static_cast<C *>(k->out[3]->data);
    job.rows = k->out[3]->count;
    job.width = job.rows ? k->in[0]->count / job.rows : 0;
    job.eps = p.eps;
    job.centred = p.centred;
    return norm_forward(job, sum_of<T>{ x, residual, sum, mask<C>(p.random) },
                        norm_packs<T>(job.width, { x, residual, sum, job.y, job.weight, job.bias }));
  });
}

template <class T> struct gradients {
  const T *g_sum; /* may be NULL */
  T *dsum, *dx;   /* dx only where dropout makes it differ */
  mask<ty_compute<T>> drop;
  template <int V> TY_DEVICE_MEMBER void put(int64_t at, ty_compute<T> *v) const {
    ty_compute<T> more[V] = {};
    if (g_sum) ty_load<V>(g_sum + at, more);
    for (int j = 0; j < V; j++) v[j] += more[j];
    ty_store<V>(dsum + at, v);
    if (!dx) return;
    drop.template apply<V>(at, v);
    ty_store<V>(dx + at, v);
  }
};

/* in: g, g_sum, sum, mean, rstd, weight; out: dsum, dx, dweight and dbias, the last three empty where not wanted. */
TY_CUDA_KERNEL(add_norm_backward) {
  const ty_p_add_norm &p = *static_cast<const ty_p_add_norm *>(k->params);
  const ty_view *const *in = k->in;
  return ty_for_floats(in[2]->dtype, "add_norm", [&](auto element) {
    typedef decltype(element) T;
    typedef ty_compute<T> C;
    T *dsum = static_cast<T *>(k->out[0]->data), *dx = ty_data_of<T>(k->out[1]);
    C *dw = ty_data_of<C>(k->out[2]), *db = ty_data_of<C>(k->out[3]);
    const T *g_sum = ty_data_of<T>(in[1]);
    norm_rows_back<T> job = {};
    job.g = static_cast<const T *>(in[0]->data), job.x = static_cast<const T *>(in[2]->data);
    job.mean = static_cast<const C *>(in[3]->data), job.rstd = static_cast<const C *>(in[4]->data);
    job.weight = ty_data_of<C>(in[5]);
    job.rows = in[4]->count;
    job.width = job.rows ? in[2]->count / job.rows : k->out[2]->count;
    job.centred = p.centred;
    return norm_backward(job, gradients<T>{ g_sum, dsum, dx, mask<C>(p.random) }, dw, db,
                         norm_packs<T>(job.width, { job.g, job.x, job.weight, g_sum, dsum, dx }));
  });
}
