/* layer_norm and rms_norm, and their gradients. */
#include "norm_rows.cuh"

template <class T> struct tensor {
  const T *x;
  template <int V> TY_DEVICE_MEMBER void first(int64_t at, ty_compute<T> *v) const { ty_load<V>(x + at, v); }
  template <int V> TY_DEVICE_MEMBER void again(int64_t at, ty_compute<T> *v) const { ty_load<V>(x + at, v); }
};

template <class T> struct gradient {
  T *dx;
  template <int V> TY_DEVICE_MEMBER void put(int64_t at, const ty_compute<T> *v) const { ty_store<V>(dx + at, v); }
};

/* in: x, weight and, when centred, bias; out: y, [mean,] rstd. */
static bool forward(const ty_kernel_args *k, const char *op, bool centred) {
  return ty_for_floats(k->in[0]->dtype, op, [&](auto element) {
    typedef decltype(element) T;
    typedef ty_compute<T> C;
    const T *x = static_cast<const T *>(k->in[0]->data);
    norm_rows<T> job = {};
    job.weight = ty_data_of<C>(k->in[1]), job.bias = centred ? ty_data_of<C>(k->in[2]) : nullptr;
    job.y = static_cast<T *>(k->out[0]->data);
    job.mean = centred ? static_cast<C *>(k->out[1]->data) : nullptr;
    job.rstd = static_cast<C *>(k->out[centred ? 2 : 1]->data);
    job.rows = k->out[1]->count;
    job.width = job.rows ? k->in[0]->count / job.rows : 0;
    job.eps = static_cast<const ty_p_norm *>(k->params)->eps;
    job.centred = centred;
    return norm_forward(job, tensor<T>{ x }, norm_packs<T>(job.width, { x, job.y, job.weight, job.bias }));
  });
}

TY_CUDA_KERNEL(layer_norm) { return forward(k, "layer_norm", true); }
TY_CUDA_KERNEL(rms_norm) { return forward(k, "rms_norm", false); }

/* in: g, x, [mean,] rstd, weight; out: dx, and dweight and dbias unless they are empty. */
static bool backward(const ty_kernel_args *k, const char *op, bool centred) {
  return ty_for_floats(k->in[0]->dtype, op, [&](auto element) {
    typedef decltype(element) T;
    typedef ty_compute<T> C;
    const ty_view *const *in = k->in;
    const int at = centred ? 3 : 2;
    T *dx = static_cast<T *>(k->out[0]->data);
    C *dw = ty_data_of<C>(k->out[1]), *db = centred ? ty_data_of<C>(k->out[2]) : nullptr;
    norm_rows_back<T> job = {};
    job.g = static_cast<const T *>(in[0]->data), job.x = static_cast<const T *>(in[1]->data);
    job.mean = centred ? static_cast<const C *>(in[2]->data) : nullptr;
    job.rstd = static_cast<const C *>(in[at]->data), job.weight = ty_data_of<C>(in[at + 1]);
    job.rows = in[at]->count;
    job.width = job.rows ? in[1]->count / job.rows : k->out[1]->count;
    job.centred = centred;
    return norm_backward(job, gradient<T>{ dx }, dw, db, norm_packs<T>(job.width, { job.g, job.x, job.weight, dx }));
  });
}

TY_CUDA_KERNEL(layer_norm_backward) { return backward(k, "layer_norm", true); }
TY_CUDA_KERNEL(rms_norm_backward) { return backward(k, "rms_norm", false); }
