/* Forward and backward variables of CTC and of transducers: the formulas of kernels/cpu/norm/trellis_real.h. A block takes a
 * sequence; its threads share the states of a step, or the places of a diagonal, and wait for each other between them. */
#include "cuda.cuh"

enum { THREADS = 128 };

template <class C> struct trellis_job {
  const C *first, *second, *g, *alpha, *loss; /* ctc: emission; rnnt: blank and label */
  const bool *skip;
  const int64_t *steps, *targets; /* lengths */
  C *out, *more;
  int64_t n, t, m; /* sequences, steps, states */
  int64_t most;    /* targets */
  ty_cuda_watch watch;
};

TY_DEVICE float exp_of(float x) { return ty_exp_f32(x); }
TY_DEVICE double exp_of(double x) { return exp(x); }
TY_DEVICE float log_of(float x) { return ty_log_f32(x); }
TY_DEVICE double log_of(double x) { return log(x); }
template <class C> TY_DEVICE C never() { return -std::numeric_limits<C>::infinity(); }

template <class C> TY_DEVICE C sum3(C a, C b, C c) {
  C top = a > b ? a : b;
  top = top > c ? top : c;
  const C by = top == never<C>() ? C(0) : top;
  return by + log_of(exp_of(a - by) + exp_of(b - by) + exp_of(c - by));
}
template <class C> TY_DEVICE C sum2(C a, C b) { return sum3(a, b, never<C>()); }

/* The lengths of a sequence; false where one is wrong, which is reported. */
template <class C> TY_DEVICE bool lengths_of(const trellis_job<C> &j, int64_t i, int64_t *steps, int64_t *targets) {
  *steps = j.steps[i], *targets = j.targets[i];
  return ty_in_range(j.watch, *steps, j.t + 1) && ty_in_range(j.watch, *targets, j.most + 1);
}

template <class C> __global__ void __launch_bounds__(THREADS) ctc_forward(const trellis_job<C> j) {
  const int me = static_cast<int>(threadIdx.x);
  for (int64_t i = blockIdx.x; i < j.n; i += gridDim.x) {
    int64_t steps, targets;
    const bool good = lengths_of(j, i, &steps, &targets);
    const int64_t n = 2 * targets + 1;
    const C *e = j.first + i * j.t * j.m;
    const bool *skip = j.skip + i * j.m;
    C *alpha = j.more + i * j.t * j.m;
    for (int64_t t = 0; t < j.t; t++) {
      for (int64_t s = me; s < j.m; s += THREADS) {
        C value = never<C>();
        if (good && t < steps && s < n) {
          const C *from = alpha + (t - 1) * j.m;
          if (t == 0) value = s < 2 ? e[s] : value;
          else
            value = sum3(from[s], s > 0 ? from[s - 1] : never<C>(), s > 1 && skip[s] ? from[s - 2] : never<C>()) +
                    e[t * j.m + s];
        }
        alpha[t * j.m + s] = value;
      }
      __syncthreads();
    }
    if (me == 0) {
      const C *last = alpha + (steps - 1) * j.m;
      j.out[i] = !good        ? never<C>()
                 : steps == 0 ? (n == 1 ? C(0) : -never<C>())
                              : -sum2(last[n - 1], n > 1 ? last[n - 2] : never<C>());
    }
    __syncthreads();
  }
}

template <class C> __global__ void __launch_bounds__(THREADS) ctc_back(const trellis_job<C> j) {
  const int me = static_cast<int>(threadIdx.x);
  for (int64_t i = blockIdx.x; i < j.n; i += gridDim.x) {
    int64_t steps, targets;
    const bool good = lengths_of(j, i, &steps, &targets);
    const int64_t n = 2 * targets + 1;
    const C *e = j.first + i * j.t * j.m, *alpha = j.alpha + i * j.t * j.m;
    const bool *skip = j.skip + i * j.m;
    C *d = j.out + i * j.t * j.m; /* the backward variables first */
    const C g = j.g[i], loss = j.loss[i];
    const bool any = good && loss != -never<C>() && g != 0;
    for (int64_t t = j.t - 1; t >= 0; t--) {
      for (int64_t s = me; s < j.m; s += THREADS) {
        C value = 0;
        if (any && t < steps && s < n) {
          if (t == steps - 1) {
            value = s >= n - 2 ? C(0) : never<C>();
          } else {
            const C *next = d + (t + 1) * j.m, *et = e + (t + 1) * j.m;
            value = sum3(next[s] + et[s], s + 1 < n ? next[s + 1] + et[s + 1] : never<C>(),
                         s + 2 < n && skip[s + 2] ? next[s + 2] + et[s + 2] : never<C>());
          }
        }
        d[t * j.m + s] = value;
      }
      __syncthreads();
    }
    if (any)
      for (int64_t t = 0; t < steps; t++)
        for (int64_t s = me; s < n; s += THREADS)
          d[t * j.m + s] = -g * exp_of(alpha[t * j.m + s] + d[t * j.m + s] + loss);
    __syncthreads();
  }
}

template <class C> __global__ void __launch_bounds__(THREADS) rnnt_forward(const trellis_job<C> j) {
  const int me = static_cast<int>(threadIdx.x);
  for (int64_t i = blockIdx.x; i < j.n; i += gridDim.x) {
    int64_t steps, targets;
    const bool good = lengths_of(j, i, &steps, &targets);
    const C *blank = j.first + i * j.t * j.m, *label = j.second + i * j.t * j.m;
    C *alpha = j.more + i * j.t * j.m;
    for (int64_t diagonal = 0; diagonal < j.t + j.m - 1; diagonal++) {
      for (int64_t u = me; u < j.m; u += THREADS) {
        const int64_t t = diagonal - u, at = t * j.m + u;
        if (t < 0 || t >= j.t) continue;
        C value = never<C>();
        if (good && t < steps && u <= targets)
          value = diagonal == 0 ? C(0)
                                : sum2(t > 0 ? alpha[at - j.m] + blank[at - j.m] : never<C>(),
                                       u > 0 ? alpha[at - 1] + label[at - 1] : never<C>());
        alpha[at] = value;
      }
      __syncthreads();
    }
    if (me == 0) {
      const int64_t last = (steps - 1) * j.m + targets;
      j.out[i] = good && steps > 0 ? -(alpha[last] + blank[last]) : -never<C>();
    }
    __syncthreads();
  }
}

template <class C> __global__ void __launch_bounds__(THREADS) rnnt_back(const trellis_job<C> j) {
  const int me = static_cast<int>(threadIdx.x);
  for (int64_t i = blockIdx.x; i < j.n; i += gridDim.x) {
    int64_t steps, targets;
    const bool good = lengths_of(j, i, &steps, &targets);
    const C *blank = j.first + i * j.t * j.m, *label = j.second + i * j.t * j.m, *alpha = j.alpha + i * j.t * j.m;
    C *dblank = j.out + i * j.t * j.m, *dlabel = j.more + i * j.t * j.m; /* dblank: the backward variables first */
    const C g = j.g[i], loss = j.loss[i];
    const bool any = good && loss != -never<C>() && g != 0;
    for (int64_t diagonal = j.t + j.m - 2; diagonal >= 0; diagonal--) {
      for (int64_t u = me; u < j.m; u += THREADS) {
        const int64_t t = diagonal - u, at = t * j.m + u;
        if (t < 0 || t >= j.t) continue;
        C value = 0;
        if (any && t < steps && u <= targets) {
          const C after = t < steps - 1 ? dblank[at + j.m] : u == targets ? C(0) : never<C>();
          value = after + blank[at];
          if (u < targets) value = sum2(value, dblank[at + 1] + label[at]);
        }
        dblank[at] = value;
      }
      __syncthreads();
    }
    for (int64_t t = 0; t < j.t; t++)
      for (int64_t u = me; u < j.m; u += THREADS) {
        const int64_t at = t * j.m + u;
        const bool there = any && t < steps && u < targets;
        dlabel[at] = there ? -g * exp_of(alpha[at] + label[at] + dblank[at + 1] + loss) : C(0);
      }
    __syncthreads();
    if (any)
      for (int64_t u = me; u <= targets; u += THREADS) /* a thread has all steps of a place: the next is still beta */
        for (int64_t t = 0; t < steps; t++) {
          const int64_t at = t * j.m + u;
          const C after = t < steps - 1 ? dblank[at + j.m] : u == targets ? C(0) : never<C>();
          dblank[at] = -g * exp_of(alpha[at] + blank[at] + after + loss);
        }
    __syncthreads();
  }
}

template <class C> static const C *at(const ty_view *v) { return static_cast<const C *>(v->data); }

template <class C> static trellis_job<C> job_of(const ty_kernel_args *k, const ty_view *x, int lengths) {
  trellis_job<C> j = {};
  j.first = at<C>(x);
  j.steps = at<int64_t>(k->in[lengths]), j.targets = at<int64_t>(k->in[lengths + 1]);
  j.out = static_cast<C *>(k->out[0]->data);
  if (k->nout > 1) j.more = static_cast<C *>(k->out[1]->data);
  j.n = x->size[0], j.t = x->size[1], j.m = x->size[2];
  j.watch = ty_cuda_watched();
  return j;
}

template <class C> static bool ctc(const ty_kernel_args *k) {
  trellis_job<C> j = job_of<C>(k, k->in[0], 2);
  j.skip = at<bool>(k->in[1]), j.most = j.m / 2;
  return j.n == 0 || TY_LAUNCH((ctc_forward<C>), ty_cuda_blocks(j.n, 1), THREADS, 0, j);
}
template <class C> static bool ctc_backward(const ty_kernel_args *k) {
  trellis_job<C> j = job_of<C>(k, k->in[1], 3);
  j.g = at<C>(k->in[0]), j.skip = at<bool>(k->in[2]), j.alpha = at<C>(k->in[5]), j.loss = at<C>(k->in[6]);
  j.most = j.m / 2;
  return j.n == 0 || TY_LAUNCH((ctc_back<C>), ty_cuda_blocks(j.n, 1), THREADS, 0, j);
}
template <class C> static bool rnnt(const ty_kernel_args *k) {
  trellis_job<C> j = job_of<C>(k, k->in[0], 2);
  j.second = at<C>(k->in[1]), j.most = j.m - 1;
  return j.n == 0 || TY_LAUNCH((rnnt_forward<C>), ty_cuda_blocks(j.n, 1), THREADS, 0, j);
}
template <class C> static bool rnnt_backward(const ty_kernel_args *k) {
  trellis_job<C> j = job_of<C>(k, k->in[1], 3);
  j.g = at<C>(k->in[0]), j.second = at<C>(k->in[2]), j.alpha = at<C>(k->in[5]), j.loss = at<C>(k->in[6]);
  j.most = j.m - 1;
  return j.n == 0 || TY_LAUNCH((rnnt_back<C>), ty_cuda_blocks(j.n, 1), THREADS, 0, j);
}

/* Arguments as the kernels of kernels/cpu/norm/trellis.c have them. */
TY_CUDA_KERNEL(ctc_trellis) { return k->in[0]->dtype == TY_F64 ? ctc<double>(k) : ctc<float>(k); }
TY_CUDA_KERNEL(ctc_trellis_backward) {
  return k->in[1]->dtype == TY_F64 ? ctc_backward<double>(k) : ctc_backward<float>(k);
}
TY_CUDA_KERNEL(rnnt_trellis) { return k->in[0]->dtype == TY_F64 ? rnnt<double>(k) : rnnt<float>(k); }
TY_CUDA_KERNEL(rnnt_trellis_backward) {
  return k->in[1]->dtype == TY_F64 ? rnnt_backward<double>(k) : rnnt_backward<float>(k);
}
