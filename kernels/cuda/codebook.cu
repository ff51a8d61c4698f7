/* linear_codebook for few rows of x: a warp for each row of the weight, lanes along its codes; the codebook lies in shared
 * memory where it fits. Many rows are multiplied with a decoded weight, by the op (src/ops/codebook.c). */
#include "cuda.cuh"

namespace {

enum { THREADS = 128, WARPS = THREADS / TY_WARP, FEW = 8, ROOM = 2048 /* numbers: 256 entries of 8 */ };

struct task {
  const float *x, *codebook;
  const uint8_t *codes;
  float *y;
  int64_t n, k, places;
  int rows, entries, d;
};

template <bool NEAR> __global__ void __launch_bounds__(THREADS) product(const task t, ty_cuda_watch watch) {
  TY_SHARED(float, room, ROOM);
  if (NEAR) {
    for (int i = threadIdx.x; i < t.entries * t.d; i += THREADS) room[i] = t.codebook[i];
    __syncthreads();
  }
  const int lane = threadIdx.x % TY_WARP;
  for (int64_t j = int64_t{ blockIdx.x } * WARPS + threadIdx.x / TY_WARP; j < t.n; j += int64_t{ gridDim.x } * WARPS) {
    float sum[FEW] = {};
    for (int64_t p = lane; p < t.places; p += TY_WARP) {
      const int code = t.codes[j * t.places + p];
      if (!ty_in_range(watch, code, t.entries)) continue;
      for (int e = 0; e < t.d; e++) {
        const float w = NEAR ? static_cast<float>(room[code * t.d + e]) : t.codebook[code * t.d + e];
#pragma unroll
        for (int r = 0; r < FEW; r++)
          if (r < t.rows) sum[r] += w * t.x[r * t.k + p * t.d + e];
      }
    }
#pragma unroll
    for (int r = 0; r < FEW; r++) {
      if (r >= t.rows) break;
      const float all = ty_warp_reduce(sum[r], ty_plus<float>{});
      if (lane == 0) t.y[r * t.n + j] = all;
    }
  }
}

} // namespace

TY_CUDA_KERNEL(linear_codebook) {
  const ty_view *x = k->in[0], *codes = k->in[1], *codebook = k->in[2], *out = k->out[0];
  if (!out->count) return true;
  const task t = { static_cast<const float *>(x->data),
                   static_cast<const float *>(codebook->data),
                   static_cast<const uint8_t *>(codes->data),
                   static_cast<float *>(out->data),
                   codes->size[0],
                   x->size[x->ndim - 1],
                   codes->size[1],
                   static_cast<int>(out->count / codes->size[0]),
                   static_cast<int>(codebook->size[0]),
                   static_cast<int>(codebook->size[1]) };
  const unsigned blocks = ty_cuda_blocks(t.n, WARPS);
  return codebook->count <= int64_t{ ROOM } ? TY_LAUNCH((product<true>), blocks, THREADS, 0, t, ty_cuda_watched())
                                            : TY_LAUNCH((product<false>), blocks, THREADS, 0, t, ty_cuda_watched());
}
