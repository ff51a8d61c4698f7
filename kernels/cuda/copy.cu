/* Copies between layouts and dtypes, and constants: copy, fill, arange. */
#include "elementwise.cuh"

/* From one element type to another: floats to integers towards zero, beyond the range to its end and NaN to 0; integers
 * to integers wrap around. */
template <class Out, class X> struct converted {
  TY_DEVICE_MEMBER ty_compute<Out> operator()(X x) const {
    typedef ty_compute<Out> R;
    if constexpr (std::is_same<R, bool>::value) return x != 0;
    else if constexpr (std::is_floating_point<R>::value || !std::is_floating_point<X>::value) return static_cast<R>(x);
    else {
      const R low = std::numeric_limits<R>::min(), high = std::numeric_limits<R>::max();
      return x != x ? 0 : x <= static_cast<X>(low) ? low : x >= static_cast<X>(high) ? high : static_cast<R>(x);
    }
  }
};

template <class Fn> static bool for_any(int dtype, Fn fn) {
  return dtype == TY_BOOL ? fn(bool{}) : ty_for_numbers(dtype, "copy", fn);
}

TY_CUDA_KERNEL(copy) {
  int to = k->out[0]->dtype, from = k->in[0]->dtype;
  if (to == from)
    return ty_for_sizes(to, [&](auto x) { return ew_run<1, decltype(x), decltype(x)>(k, ew_unchanged{}); });
  return for_any(to, [&](auto y) {
    return for_any(from, [&](auto x) {
      typedef decltype(x) In;
      typedef decltype(y) Out;
      return ew_run<1, Out, In>(k, converted<Out, ty_compute<In>>{});
    });
  });
}

/* ---- constants ---- */

TY_CUDA_KERNEL(fill) {
  ty_number value = static_cast<const ty_p_numbers *>(k->params)->a;
  ty_view number = *k->out[0];
  bool exact = number.dtype == TY_I64;
  number.number = true; /* converted by the copy */
  number.data = exact ? static_cast<void *>(&value.i) : &value.f;
  number.dtype = exact ? TY_I64 : TY_F64;
  memset(number.stride, 0, sizeof number.stride);
  const ty_view *in = &number;
  ty_kernel_args args = { 1, 1, k->out, &in, nullptr, nullptr };
  return ty_cuda_copy(&args);
}

template <class T>
__global__ void __launch_bounds__(EW_THREADS) count_up(T *out, int64_t n, double start, double step) {
  int64_t stride = int64_t{ gridDim.x } * EW_THREADS;
  for (int64_t i = int64_t{ blockIdx.x } * EW_THREADS + threadIdx.x; i < n; i += stride)
    out[i] = ty_narrow<T>(converted<T, double>{}(start + static_cast<double>(i) * step));
}

/* Products on the way may wrap around. */
__global__ void __launch_bounds__(EW_THREADS) count_up_whole(int64_t *out, int64_t n, uint64_t start, uint64_t step) {
  int64_t stride = int64_t{ gridDim.x } * EW_THREADS;
  for (int64_t i = int64_t{ blockIdx.x } * EW_THREADS + threadIdx.x; i < n; i += stride)
    out[i] = static_cast<int64_t>(start + static_cast<uint64_t>(i) * step);
}

TY_CUDA_KERNEL(arange) {
  const ty_p_range *p = static_cast<const ty_p_range *>(k->params);
  const ty_view *out = k->out[0];
  double start = p->start.f, step = p->step.f;
  if (out->count && p->whole && out->dtype == TY_I64) {
    int64_t *to = static_cast<int64_t *>(out->data), n = out->count; /* a launch may outlive what *k points to */
    uint64_t first = static_cast<uint64_t>(p->start.i), by = static_cast<uint64_t>(p->step.i);
    return TY_LAUNCH(count_up_whole, ty_cuda_blocks(n, EW_THREADS), EW_THREADS, 0, to, n, first, by);
  }
  return out->count == 0 || for_any(out->dtype, [&](auto x) {
           typedef decltype(x) T;
           T *to = static_cast<T *>(out->data);
           int64_t n = out->count;
           return TY_LAUNCH(count_up<T>, ty_cuda_blocks(n, EW_THREADS), EW_THREADS, 0, to, n, start, step);
         });
}
