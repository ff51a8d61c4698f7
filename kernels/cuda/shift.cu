/* matmul_shift: a thread has an output; products are shifts of integers. */
#include "cuda.cuh"

namespace {

enum { THREADS = 128 };

__global__ void __launch_bounds__(THREADS)
    product(const int8_t *x, const int8_t *codes, int32_t *y, int64_t count, int64_t rows, int64_t columns) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
    const int8_t *line = x + i / rows * columns, *code = codes + i % rows * columns;
    uint32_t sum = 0;
    for (int64_t k = 0; k < columns; k++) {
      const int32_t c = code[k];
      const uint32_t shifted = static_cast<uint32_t>(static_cast<int32_t>(line[k]))
                               << ((static_cast<uint32_t>(c < 0 ? -c : c) - 1) & 31);
      sum = c > 0 ? sum + shifted : c < 0 ? sum - shifted : sum;
    }
    y[i] = static_cast<int32_t>(sum);
  }
}

} // namespace

TY_CUDA_KERNEL(matmul_shift) {
  const int64_t count = k->out[0]->count, rows = k->in[1]->size[0], columns = k->in[1]->size[1];
  if (!count) return true;
  const int8_t *x = static_cast<const int8_t *>(k->in[0]->data), *codes = static_cast<const int8_t *>(k->in[1]->data);
  int32_t *y = static_cast<int32_t *>(k->out[0]->data);
  return TY_LAUNCH(product, ty_cuda_blocks(count, THREADS), THREADS, 0, x, codes, y, count, rows, columns);
}
