/* where: elements of x or y as a condition of any dtype is nonzero. Only the width of the elements matters. */
#include "elementwise.cuh"

extern "C" bool ty_cuda_copy(const ty_kernel_args *k);

struct choice {
  template <class X> TY_DEVICE_MEMBER X operator()(bool condition, X x, X y) const { return condition ? x : y; }
};

static bool choose(const ty_kernel_args *k) {
  return ty_for_sizes(k->out[0]->dtype, [&](auto x) {
    typedef decltype(x) T;
    return ew_run<3, T, T, bool>(k, choice{});
  });
}

/* A condition of another dtype than bool, which is rare, is converted first. */
TY_CUDA_KERNEL(where) {
  if (k->out[0]->count == 0 || k->in[0]->dtype == TY_BOOL) return choose(k);
  ty_view condition = *k->in[0];
  ty_cuda_scratch room(static_cast<size_t>(condition.count));
  if (!room.data) return false;
  condition.data = room.data;
  condition.dtype = TY_BOOL;
  int64_t stride = 1;
  for (int d = condition.ndim - 1; d >= 0; d--) {
    condition.stride[d] = stride;
    stride *= condition.size[d];
  }
  const ty_view *out = &condition, *in[] = { &condition, k->in[1], k->in[2] };
  ty_kernel_args conversion = { 1, 1, &out, k->in, nullptr, nullptr }, rest = { 1, 3, k->out, in, nullptr, nullptr };
  return ty_cuda_copy(&conversion) && choose(&rest);
}
