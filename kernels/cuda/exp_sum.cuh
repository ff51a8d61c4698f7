/* Sums of exponentials in one pass: the largest element so far, and the sum relative to it. */
#ifndef TY_KERNELS_CUDA_EXP_SUM_CUH
#define TY_KERNELS_CUDA_EXP_SUM_CUH

#include "cuda.cuh"

TY_DEVICE float ty_exp(float x) { return expf(x); }
TY_DEVICE double ty_exp(double x) { return exp(x); }
TY_DEVICE float ty_log(float x) { return logf(x); }
TY_DEVICE double ty_log(double x) { return log(x); }
template <class X> TY_DEVICE bool ty_finite(X x) { return x - x == 0; }
/* The larger; of NaN and a number NaN. */
template <class X> TY_DEVICE X ty_top(X a, X b) { return ty_larger<X>{}(a, b); }

/* sum exp(x - top) of what has been seen; where `top` is infinite or NaN it is the result and `sum` means nothing. */
template <class X> struct ty_exp_sum { X top, sum; };

template <class X> TY_DEVICE ty_exp_sum<X> ty_exp_sum_start() { return { -std::numeric_limits<X>::infinity(), 0 }; }

template <class X, int N> TY_DEVICE void ty_exp_sum_add(ty_exp_sum<X> &s, const X *x) {
  X top = s.top;
#pragma unroll
  for (int j = 0; j < N; j++) top = ty_top(top, x[j]);
  if (ty_finite(top)) {
    X sum = 0;
#pragma unroll
    for (int j = 0; j < N; j++) sum += ty_exp(x[j] - top);
    s.sum = (top == s.top ? s.sum : s.sum * ty_exp(s.top - top)) + sum;
  }
  s.top = top;
}

template <class X> TY_DEVICE void ty_exp_sum_join(ty_exp_sum<X> &s, const ty_exp_sum<X> &t) {
  X top = ty_top(s.top, t.top);
  if (ty_finite(top)) s.sum = s.sum * ty_exp(s.top - top) + t.sum * ty_exp(t.top - top);
  s.top = top;
}

/* log(sum(exp)) */
template <class X> TY_DEVICE X ty_exp_sum_log(const ty_exp_sum<X> &s) {
  return ty_finite(s.top) ? s.top + ty_log(s.sum) : s.top;
}

#endif
