/* finite_list: whether no element of many tensors is infinite or NaN, which those are whose exponent has all its bits.
 * Each block looks at chunks of the tensors; whoever finds one writes so. */
#include "tensor_list.cuh"

enum { THREADS = TY_LIST_THREADS };

template <class T> TY_DEVICE bool some_bad(const void *data, int64_t from, int64_t n, T ones) {
  const T *x = static_cast<const T *>(data) + from;
  bool bad = false;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) bad |= (x[i] & ones) == ones;
  return bad;
}

__global__ void __launch_bounds__(THREADS) finite_begin(bool *out) {
  if (threadIdx.x == 0) *out = true;
}

__global__ void __launch_bounds__(THREADS) finite_chunks(const ty_tensor_list b, bool *out) {
  for (int64_t u = blockIdx.x; u < b.start[b.n]; u += gridDim.x) {
    const ty_list_chunk c = ty_list_chunk_at(b, u);
    bool bad;
    switch (c.dtype) {
      case TY_F64: bad = some_bad<uint64_t>(c.data, c.from, c.n, UINT64_C(0x7ff0000000000000)); break;
      case TY_F32: bad = some_bad<uint32_t>(c.data, c.from, c.n, UINT32_C(0x7f800000)); break;
      case TY_F16: bad = some_bad<uint16_t>(c.data, c.from, c.n, 0x7c00); break;
      default: bad = some_bad<uint16_t>(c.data, c.from, c.n, 0x7f80); break;
    }
    if (bad) *out = false;
  }
}

/* in: n tensors; out: one bool. */
TY_CUDA_KERNEL(finite_list) {
  bool *out = static_cast<bool *>(k->out[0]->data);
  return TY_LAUNCH(finite_begin, 1, THREADS, 0, out) &&
         ty_each_tensor_list(k, [&](const ty_tensor_list &b, unsigned blocks, int64_t) {
           return TY_LAUNCH(finite_chunks, blocks, THREADS, 0, b, out);
         });
}
