/* Running extremes and log-sum-exps along one dimension: a thread for each line. */
#include "../cpu/lines.h"
#include "cuda.cuh"

enum { THREADS = 64 };

struct running_job {
  int64_t size, inner, lines;
};

static running_job job_of(const ty_kernel_args *k) {
  const ty_lines l = ty_lines_of(k->out[0], static_cast<const ty_p_dim *>(k->params)->dim);
  return { l.size, l.inner, l.outer * l.inner };
}
TY_DEVICE int64_t base_of(const running_job &j, int64_t line) {
  return line / j.inner * j.size * j.inner + line % j.inner;
}

template <class T, bool LARGEST>
__global__ void running_extreme(const running_job j, const T *x, T *y, int64_t *positions) {
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < j.lines; i += int64_t{ gridDim.x } * THREADS) {
    int64_t at = base_of(j, i), where = 0;
    T best = T(0);
    for (int64_t t = 0; t < j.size; t++, at += j.inner) {
      const T v = x[at];
      if (t == 0 || (LARGEST ? v >= best : v <= best) || v != v) {
        best = v;
        where = t;
      }
      y[at] = best;
      positions[at] = where;
    }
  }
}

template <bool LARGEST> static bool extreme(const ty_kernel_args *k, const char *op) {
  if (k->out[0]->count == 0) return true;
  const running_job j = job_of(k);
  const auto launch = [&](auto e) {
    typedef decltype(e) T;
    const T *x = static_cast<const T *>(k->in[0]->data);
    T *y = static_cast<T *>(k->out[0]->data);
    int64_t *positions = static_cast<int64_t *>(k->out[1]->data);
    return TY_LAUNCH((running_extreme<T, LARGEST>), ty_cuda_blocks(j.lines, THREADS), THREADS, 0, j, x, y, positions);
  };
  const int dtype = k->in[0]->dtype;
  if (dtype == TY_BOOL) return launch(uint8_t{});
  return ty_is_float((ty_dtype)dtype) ? ty_for_reals(dtype, op, launch) : ty_for_integers(dtype, op, launch);
}

TY_CUDA_KERNEL(cummax) { return extreme<true>(k, "cummax"); }
TY_CUDA_KERNEL(cummin) { return extreme<false>(k, "cummin"); }

template <class T> __global__ void running_log_sum(const running_job j, const T *x, T *y) {
  for (int64_t i = blockIdx.x * int64_t{ THREADS } + threadIdx.x; i < j.lines; i += int64_t{ gridDim.x } * THREADS) {
    int64_t at = base_of(j, i);
    double sum = -std::numeric_limits<double>::infinity();
    for (int64_t t = 0; t < j.size; t++, at += j.inner) {
      const double v = static_cast<double>(x[at]);
      if (v == sum) sum += 0.69314718055994530942; /* infinities too */
      else sum = v > sum ? v + log1p(exp(sum - v)) : sum + log1p(exp(v - sum));
      y[at] = static_cast<T>(sum);
    }
  }
}

TY_CUDA_KERNEL(logcumsumexp) {
  if (k->out[0]->count == 0) return true;
  const running_job j = job_of(k);
  return ty_for_reals(k->in[0]->dtype, "logcumsumexp", [&](auto e) {
    typedef decltype(e) T;
    const T *x = static_cast<const T *>(k->in[0]->data);
    T *y = static_cast<T *>(k->out[0]->data);
    return TY_LAUNCH((running_log_sum<T>), ty_cuda_blocks(j.lines, THREADS), THREADS, 0, j, x, y);
  });
}
