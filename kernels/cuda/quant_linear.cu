/* Products with block-quantized weights for few rows: the weight is read once and decoded in registers, the products
 * are of f32. Many rows are multiplied with a decoded weight, by the op (src/ops/quantize.c). */
#include "quant.cuh"

namespace {

enum { THREADS = 128, WARPS = THREADS / TY_WARP, FEW = 8 };

struct task {
  const uint8_t *w;
  const float *x, *bias;
  float *y;
  int64_t row_bytes, columns, n; /* of w: n rows */
  int rows;
};

/* y[r][j]: a warp for each row of w, lanes along k. */
template <class F, int ROWS> __global__ void __launch_bounds__(THREADS) dots(const task t) {
  const int lane = threadIdx.x % TY_WARP;
  for (int64_t j = int64_t{ blockIdx.x } * WARPS + threadIdx.x / TY_WARP; j < t.n; j += int64_t{ gridDim.x } * WARPS) {
    const uint8_t *row = t.w + j * t.row_bytes;
    for (int r0 = 0; r0 < t.rows; r0 += ROWS) {
      float sum[ROWS] = {};
#pragma unroll 4
      for (int64_t k = 4 * lane; k < t.columns; k += 4 * TY_WARP) {
        float w[4];
        F::decode(row, t.columns, k, w);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          if (r0 + r >= t.rows) break;
          float x[4];
          ty_load<4>(t.x + (r0 + r) * t.columns + k, x);
#pragma unroll
          for (int i = 0; i < 4; i++) sum[r] += w[i] * x[i];
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        if (r0 + r >= t.rows) break;
        float all = ty_warp_reduce(sum[r], ty_plus<float>{});
        if (lane == 0) t.y[(r0 + r) * t.n + j] = all + (t.bias ? t.bias[j] : 0.0f);
      }
    }
  }
}

/* dx[r][k] = sum over j of g[r][j] w[j][k]: four columns of a row by each thread. g is in x, dx in y. */
template <class F> __global__ void __launch_bounds__(THREADS) turned(const task t) {
  const int64_t packs = t.columns / 4, count = packs * t.rows;
  for (int64_t i = int64_t{ blockIdx.x } * THREADS + threadIdx.x; i < count; i += int64_t{ gridDim.x } * THREADS) {
    int64_t r = i / packs, k = (i - r * packs) * 4;
    float sum[4] = {};
    for (int64_t j = 0; j < t.n; j++) {
      float w[4], g = t.x[r * t.n + j];
      F::decode(t.w + j * t.row_bytes, t.columns, k, w);
#pragma unroll
      for (int c = 0; c < 4; c++) sum[c] += g * w[c];
    }
    ty_store<4>(t.y + r * t.columns + k, sum);
  }
}

task task_of(const ty_kernel_args *k, int64_t out_width) {
  const ty_view *w = k->in[1];
  int64_t columns = w->size[1];
  return { ty_data_of<const uint8_t>(w),
           ty_data_of<const float>(k->in[0]),
           k->nin > 2 ? ty_data_of<const float>(k->in[2]) : nullptr,
           ty_data_of<float>(k->out[0]),
           ty_row_bytes(static_cast<ty_dtype>(w->dtype), columns),
           columns,
           w->size[0],
           static_cast<int>(k->out[0]->count / out_width) };
}

} // namespace

TY_CUDA_KERNEL(linear_quantized) {
  if (!k->out[0]->count) return true;
  const task t = task_of(k, k->in[1]->size[0]);
  return quant_for(k->in[1]->dtype, "linear", [&](auto format) {
    typedef decltype(format) F;
    unsigned blocks = ty_cuda_blocks(t.n, WARPS);
    return t.rows == 1 ? TY_LAUNCH((dots<F, 1>), blocks, THREADS, 0, t)
                       : TY_LAUNCH((dots<F, FEW>), blocks, THREADS, 0, t);
  });
}

TY_CUDA_KERNEL(linear_quantized_backward) {
  if (!k->out[0]->count) return true;
  const task t = task_of(k, k->in[1]->size[1]);
  return quant_for(k->in[1]->dtype, "linear", [&](auto format) {
    typedef decltype(format) F;
    return TY_LAUNCH((turned<F>), ty_cuda_blocks(t.columns / 4 * t.rows, THREADS), THREADS, 0, t);
  });
}
