/* What kernels over a list of tensors share: the tensors of a launch, cut into chunks, of which blocks take one after the
 * other. */
#ifndef TYCHO_KERNELS_CUDA_TENSOR_LIST_CUH
#define TYCHO_KERNELS_CUDA_TENSOR_LIST_CUH

#include "cuda.cuh"

enum {
  TY_LIST_THREADS = 256,
  TY_LIST_CHUNK = 32768,
  TY_LIST_TENSORS = 64 /* of a launch: an argument of the kernel */
};

struct ty_tensor_list {
  int n;
  const void *data[TY_LIST_TENSORS];
  int64_t count[TY_LIST_TENSORS], start[TY_LIST_TENSORS + 1]; /* start: chunks before each tensor */
  uint8_t dtype[TY_LIST_TENSORS];
};

struct ty_list_chunk {
  const void *data; /* of the whole tensor */
  int64_t from, n;  /* elements */
  uint8_t dtype;
};

/* Chunk u of a list. */
TY_DEVICE ty_list_chunk ty_list_chunk_at(const ty_tensor_list &b, int64_t u) {
  int low = 0, high = b.n; /* the last tensor that begins at u or before */
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    if (b.start[mid] <= u) low = mid;
    else high = mid;
  }
  const int64_t from = (u - b.start[low]) * TY_LIST_CHUNK, rest = b.count[low] - from;
  return { b.data[low], from, rest < TY_LIST_CHUNK ? rest : int64_t{ TY_LIST_CHUNK }, b.dtype[low] };
}

/* launch(list, blocks, chunks before) for the inputs of a kernel, as many at a time as a launch takes: false where one
 * fails. Empty tensors have no chunk. */
template <class Launch> bool ty_each_tensor_list(const ty_kernel_args *k, const Launch &launch) {
  ty_tensor_list b;
  b.n = 0;
  b.start[0] = 0;
  int64_t before = 0;
  for (int i = 0; i < k->nin; i++) {
    const ty_view *x = k->in[i];
    if (x->count > 0) {
      b.data[b.n] = x->data;
      b.count[b.n] = x->count;
      b.dtype[b.n] = static_cast<uint8_t>(x->dtype);
      b.start[b.n + 1] = b.start[b.n] + (x->count + TY_LIST_CHUNK - 1) / TY_LIST_CHUNK;
      b.n++;
    }
    if (b.n == 0 || (b.n < TY_LIST_TENSORS && i + 1 < k->nin)) continue;
    if (!launch(b, ty_cuda_blocks(b.start[b.n], 1, 8), before)) return false;
    before += b.start[b.n];
    b.n = 0;
  }
  return true;
}

#endif
