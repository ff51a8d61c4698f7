/* finite_list: whether no element of many tensors is infinite or NaN, which those are whose exponent has all its bits.
 * Each block looks at chunks of the tensors; whoever finds one writes so. */
#include "cuda.cuh"

enum { THREADS = 256, CHUNK = 32768, BATCH = 64 /* tensors of a launch: their table is an argument of the kernel */ };

struct finite_batch {
  int n;
  const void *data[BATCH];
  int64_t count[BATCH], start[BATCH + 1]; /* start: chunks before each tensor */
  uint8_t dtype[BATCH];
};

template <class T> TY_DEVICE bool some_bad(const void *data, int64_t from, int64_t n, T ones) {
  const T *x = static_cast<const T *>(data) + from;
  bool bad = false;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) bad |= (x[i] & ones) == ones;
  return bad;
}

__global__ void __launch_bounds__(THREADS) finite_begin(bool *out) {
  if (threadIdx.x == 0) *out = true;
}

__global__ void __launch_bounds__(THREADS) finite_chunks(const finite_batch b, bool *out) {
  for (int64_t u = blockIdx.x; u < b.start[b.n]; u += gridDim.x) {
    int low = 0, high = b.n; /* the last tensor that begins at u or before */
    while (high - low > 1) {
      int mid = (low + high) / 2;
      if (b.start[mid] <= u) low = mid;
      else high = mid;
    }
    const int64_t from = (u - b.start[low]) * CHUNK, rest = b.count[low] - from,
                  n = rest < CHUNK ? rest : int64_t{ CHUNK };
    bool bad;
    switch (b.dtype[low]) {
      case TY_F64: bad = some_bad<uint64_t>(b.data[low], from, n, UINT64_C(0x7ff0000000000000)); break;
      case TY_F32: bad = some_bad<uint32_t>(b.data[low], from, n, UINT32_C(0x7f800000)); break;
      case TY_F16: bad = some_bad<uint16_t>(b.data[low], from, n, 0x7c00); break;
      default: bad = some_bad<uint16_t>(b.data[low], from, n, 0x7f80); break;
    }
    if (bad) *out = false;
  }
}

/* in: n tensors; out: one bool. */
TY_CUDA_KERNEL(finite_list) {
  bool *out = static_cast<bool *>(k->out[0]->data);
  if (!TY_LAUNCH(finite_begin, 1, THREADS, 0, out)) return false;
  finite_batch b;
  b.n = 0;
  b.start[0] = 0;
  for (int i = 0; i < k->nin; i++) {
    const ty_view *x = k->in[i];
    if (x->count > 0) { /* empty tensors have no chunk */
      b.data[b.n] = x->data;
      b.count[b.n] = x->count;
      b.dtype[b.n] = static_cast<uint8_t>(x->dtype);
      b.start[b.n + 1] = b.start[b.n] + (x->count + CHUNK - 1) / CHUNK;
      b.n++;
    }
    if (b.n == 0 || (b.n < BATCH && i + 1 < k->nin)) continue;
    if (!TY_LAUNCH(finite_chunks, ty_cuda_blocks(b.start[b.n], 1, 8), THREADS, 0, b, out)) return false;
    b.n = 0;
  }
  return true;
}
