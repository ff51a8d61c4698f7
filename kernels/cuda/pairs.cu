/* Distances between all pairs of points of two sets, and their gradient. */
#include "cuda.cuh"

enum { THREADS = 256 };

struct pairs_job {
  int64_t n, m, d, count; /* points of x and y in each of a batch, coordinates; results */
  double p;
};

TY_DEVICE float power(float x, float p) { return ty_pow_f32(x, p); }
TY_DEVICE double power(double x, double p) { return ty_pow_f64(x, p); }
TY_DEVICE float root(float x) { return ty_sqrt_f32(x); }
TY_DEVICE double root(double x) { return ty_sqrt_f64(x); }
template <class T> TY_DEVICE T size_of(T x) { return x < 0 ? -x : x; }

template <class T> __global__ void distances(const pairs_job j, const T *xs, const T *ys, T *out) {
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < j.count; i += int64_t{ gridDim.x } * THREADS) {
    const int64_t row = i / j.m;
    const T *x = xs + row * j.d, *y = ys + (row / j.n * j.m + i % j.m) * j.d;
    T s = 0;
    for (int64_t t = 0; t < j.d; t++) {
      const T v = size_of(x[t] - y[t]);
      if (j.p == 2) s += v * v;
      else if (j.p == 1) s += v;
      else if (j.p == 0) s += v != 0;
      else if (j.p > std::numeric_limits<double>::max()) s = (v > s) | (v != v) ? v : s;
      else s += power(v, static_cast<T>(j.p));
    }
    if (j.p == 2) s = root(s);
    else if (j.p != 1 && j.p != 0 && j.p <= std::numeric_limits<double>::max()) s = power(s, static_cast<T>(1 / j.p));
    out[i] = s;
  }
}

/* A thread for each coordinate of x. */
template <class T>
__global__ void gradients(const pairs_job j, const T *gs, const T *rs, const T *xs, const T *ys, T *out) {
  const bool largest = j.p > std::numeric_limits<double>::max();
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < j.count; i += int64_t{ gridDim.x } * THREADS) {
    const int64_t row = i / j.d, t = i % j.d;
    const T *x = xs + row * j.d;
    T sum = 0;
    for (int64_t b = 0; b < j.m && j.p != 0; b++) {
      const T *y = ys + (row / j.n * j.m + b) * j.d;
      const T g = gs[row * j.m + b], r = rs[row * j.m + b], v = x[t] - y[t];
      if (r == 0 || v == 0) continue;
      T w = g;
      if (largest) {
        T most = 0, reached = 0;
        for (int64_t e = 0; e < j.d; e++) {
          const T u = size_of(x[e] - y[e]);
          most = u > most ? u : most;
        }
        for (int64_t e = 0; e < j.d; e++) reached += size_of(x[e] - y[e]) == most;
        w = size_of(v) == most ? g / reached : T(0);
      } else if (j.p == 2) {
        w = g / r * size_of(v);
      } else if (j.p != 1) {
        w = power(size_of(v) / r, static_cast<T>(j.p - 1)) * g;
      }
      sum += v < 0 ? -w : w;
    }
    out[i] = sum;
  }
}

static pairs_job job_of(const ty_kernel_args *k, const ty_view *x, const ty_view *y) {
  return { x->size[x->ndim - 2], y->size[y->ndim - 2], x->size[x->ndim - 1], k->out[0]->count,
           static_cast<const ty_p_scalars *>(k->params)->a };
}

TY_CUDA_KERNEL(cdist) {
  if (k->out[0]->count == 0) return true;
  const pairs_job j = job_of(k, k->in[0], k->in[1]);
  return ty_for_reals(k->in[0]->dtype, "cdist", [&](auto e) {
    typedef decltype(e) T;
    const T *x = static_cast<const T *>(k->in[0]->data), *y = static_cast<const T *>(k->in[1]->data);
    T *out = static_cast<T *>(k->out[0]->data);
    return TY_LAUNCH((distances<T>), ty_cuda_blocks(j.count, THREADS), THREADS, 0, j, x, y, out);
  });
}

TY_CUDA_KERNEL(cdist_backward) {
  if (k->out[0]->count == 0) return true;
  const pairs_job j = job_of(k, k->in[2], k->in[3]);
  return ty_for_reals(k->in[0]->dtype, "cdist_backward", [&](auto e) {
    typedef decltype(e) T;
    const T *g = static_cast<const T *>(k->in[0]->data), *r = static_cast<const T *>(k->in[1]->data);
    const T *x = static_cast<const T *>(k->in[2]->data), *y = static_cast<const T *>(k->in[3]->data);
    T *out = static_cast<T *>(k->out[0]->data);
    return TY_LAUNCH((gradients<T>), ty_cuda_blocks(j.count, THREADS), THREADS, 0, j, g, r, x, y, out);
  });
}
