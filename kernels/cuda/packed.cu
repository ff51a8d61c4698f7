/* Products with weights that are stored without their zeros, and such weights as dense ones: kernels/packed.h. Memory
 * gives few bytes; the multiplications of zeros are done (CSL) or not (bitmap). Sums are of f32, without tensor cores. */
#include "../packed.h"
#include "cuda.cuh"

namespace {

enum { THREADS = 256, WARPS = THREADS / TY_WARP, WORD = 32, FEW = 8, SOME = 16 };

struct packed_task {
  const float *x;
  const uint16_t *values;
  const uint32_t *words;
  const uint8_t *bits;
  const int64_t *starts;
  float *y;
  uint16_t *dense;
  int64_t n, rows, columns, count;
  ty_cuda_watch watch;
};

/* ---- bitmap ---- */

/* Bits [32 word, 32 word + 32) of a row, none behind the columns. */
TY_DEVICE uint32_t word_at(const packed_task &t, const uint8_t *bits, int64_t word) {
  const int64_t bytes = (t.columns + 7) / 8;
  uint32_t mask = 0;
  for (int64_t i = 4 * word; i < 4 * word + 4 && i < bytes; i++) mask |= uint32_t{ bits[i] } << (8 * (i - 4 * word));
  const int64_t left = t.columns - WORD * word;
  return left >= WORD ? mask : left > 0 ? mask & ((1u << left) - 1) : 0;
}

/* Calls visit(column, value) for the elements of a row, one word for each lane; starts and values are checked. */
template <class Visit> TY_DEVICE void visit_row(const packed_task &t, int64_t r, Visit visit) {
  const int lane = threadIdx.x % TY_WARP;
  const uint8_t *bits = t.bits + r * ((t.columns + 7) / 8);
  int64_t at = t.starts[r];
  for (int64_t word0 = 0; word0 * WORD < t.columns; word0 += TY_WARP) {
    uint32_t mask = word_at(t, bits, word0 + lane);
    const int mine = __popc(mask);
    int before = mine;
    for (int step = 1; step < TY_WARP; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, before, static_cast<unsigned>(step));
      if (lane >= step) before += other;
    }
    const int all = __shfl_sync(0xffffffffu, before, TY_WARP - 1);
    int64_t from = at + before - mine;
    if (mine == 0 || (ty_in_range(t.watch, from, t.count) && ty_in_range(t.watch, from + mine - 1, t.count)))
      for (; mask; mask &= mask - 1, from++)
        visit((word0 + lane) * WORD + __popc((mask & (0u - mask)) - 1), t.values[from]);
    at += all;
  }
  if (lane == 0 && at != t.starts[r + 1]) ty_report(t.watch, TY_INDEX_OUT_OF_RANGE, t.starts[r + 1], t.count);
}

__global__ void __launch_bounds__(THREADS) bitmap_product(const packed_task t) {
  const int lane = threadIdx.x % TY_WARP;
  for (int64_t r = int64_t{ blockIdx.x } * WARPS + threadIdx.x / TY_WARP; r < t.rows; r += int64_t{ gridDim.x } * WARPS)
    for (int64_t b0 = 0; b0 < t.n; b0 += FEW) {
      float sum[FEW] = {};
      visit_row(t, r, [&](int64_t column, uint16_t value) {
        const float w = ty_f16_to_f32(value);
#pragma unroll
        for (int b = 0; b < FEW; b++)
          if (b0 + b < t.n) sum[b] += w * t.x[(b0 + b) * t.columns + column];
      });
#pragma unroll
      for (int b = 0; b < FEW; b++) {
        const float all = ty_warp_reduce(sum[b], ty_plus<float>{});
        if (lane == 0 && b0 + b < t.n) t.y[(b0 + b) * t.rows + r] = all;
      }
    }
}

__global__ void __launch_bounds__(THREADS) bitmap_dense(const packed_task t) {
  for (int64_t r = int64_t{ blockIdx.x } * WARPS + threadIdx.x / TY_WARP; r < t.rows; r += int64_t{ gridDim.x } * WARPS)
    visit_row(t, r, [&](int64_t column, uint16_t value) { t.dense[r * t.columns + column] = value; });
}

/* ---- tiled CSL ---- */

/* A block for each row of tiles and SOME rows of x, a thread for each row of the tile. */
__global__ void __launch_bounds__(TY_CSL_TALL) csl_product(const packed_task t) {
  TY_SHARED(float, tile, TY_CSL_TILE);
  TY_SHARED(float, xs, SOME *TY_CSL_WIDE);
  const int64_t across = (t.columns + TY_CSL_WIDE - 1) / TY_CSL_WIDE, row = int64_t{ blockIdx.x } * TY_CSL_TALL;
  const int64_t b0 = int64_t{ blockIdx.y } * SOME, mine = row + threadIdx.x;
  float sum[SOME] = {};
  for (int64_t j = 0; j < across; j++) {
    const int64_t number = int64_t{ blockIdx.x } * across + j, column = j * TY_CSL_WIDE;
    for (int i = threadIdx.x; i < TY_CSL_TILE; i += TY_CSL_TALL) tile[i] = 0.0f;
    for (int i = threadIdx.x; i < SOME * TY_CSL_WIDE; i += TY_CSL_TALL) {
      const int64_t b = b0 + i / TY_CSL_WIDE, c = column + i % TY_CSL_WIDE;
      xs[i] = b < t.n && c < t.columns ? t.x[b * t.columns + c] : 0.0f;
    }
    __syncthreads();
    const int64_t begin = t.starts[number], end = t.starts[number + 1];
    if (begin <= end && ty_in_range(t.watch, begin, t.count + 1) && ty_in_range(t.watch, end, t.count + 1)) {
      for (int64_t i = begin + threadIdx.x; i < end; i += TY_CSL_TALL) {
        const uint32_t word = t.words[i], place = word >> 16;
        if (ty_in_range(t.watch, place, TY_CSL_TILE) && ty_in_range(t.watch, row + place % TY_CSL_TALL, t.rows) &&
            ty_in_range(t.watch, column + place / TY_CSL_TALL, t.columns))
          tile[place] = ty_f16_to_f32(static_cast<uint16_t>(word));
      }
    } else if (threadIdx.x == 0) {
      ty_report(t.watch, TY_INDEX_OUT_OF_RANGE, end, t.count);
    }
    __syncthreads();
    for (int c = 0; c < TY_CSL_WIDE; c++) {
      const float w = tile[c * TY_CSL_TALL + threadIdx.x];
#pragma unroll
      for (int b = 0; b < SOME; b++) sum[b] += w * xs[b * TY_CSL_WIDE + c];
    }
    __syncthreads();
  }
  for (int b = 0; b < SOME; b++)
    if (mine < t.rows && b0 + b < t.n) t.y[(b0 + b) * t.rows + mine] = sum[b];
}

__global__ void __launch_bounds__(THREADS) csl_dense(const packed_task t) {
  const int64_t across = (t.columns + TY_CSL_WIDE - 1) / TY_CSL_WIDE;
  const int64_t tiles = across * ((t.rows + TY_CSL_TALL - 1) / TY_CSL_TALL);
  for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
    const int64_t row = number / across * TY_CSL_TALL, column = number % across * TY_CSL_WIDE;
    const int64_t begin = t.starts[number], end = t.starts[number + 1];
    if (begin > end || !ty_in_range(t.watch, begin, t.count + 1) || !ty_in_range(t.watch, end, t.count + 1)) continue;
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
      const uint32_t word = t.words[i], place = word >> 16;
      const int64_t r = row + place % TY_CSL_TALL, c = column + place / TY_CSL_TALL;
      if (ty_in_range(t.watch, place, TY_CSL_TILE) && ty_in_range(t.watch, r, t.rows) &&
          ty_in_range(t.watch, c, t.columns))
        t.dense[r * t.columns + c] = static_cast<uint16_t>(word);
    }
  }
}

packed_task product_of(const ty_kernel_args *k, int64_t rows) {
  packed_task t = {};
  t.x = ty_data_of<const float>(k->in[0]);
  t.y = ty_data_of<float>(k->out[0]);
  t.rows = rows;
  t.columns = k->in[0]->size[k->in[0]->ndim - 1];
  t.n = k->out[0]->count / rows;
  t.count = k->in[1]->count;
  t.watch = ty_cuda_watched();
  return t;
}

packed_task dense_of(const ty_kernel_args *k) {
  packed_task t = {};
  t.dense = static_cast<uint16_t *>(k->out[0]->data);
  t.rows = k->out[0]->size[0];
  t.columns = k->out[0]->size[1];
  t.count = k->in[0]->count;
  t.watch = ty_cuda_watched();
  return t;
}

} // namespace

/* in: x f32 [..., columns], values f16, bitmap u8 [rows, (columns + 7) / 8], starts i64 [rows + 1]. */
TY_CUDA_KERNEL(linear_bitmap) {
  if (k->out[0]->count == 0) return true;
  packed_task t = product_of(k, k->in[2]->size[0]);
  t.values = static_cast<const uint16_t *>(k->in[1]->data);
  t.bits = static_cast<const uint8_t *>(k->in[2]->data);
  t.starts = ty_data_of<const int64_t>(k->in[3]);
  return TY_LAUNCH(bitmap_product, ty_cuda_blocks(t.rows, WARPS), THREADS, 0, t);
}

/* in: values f16, bitmap u8 [rows, (columns + 7) / 8], starts i64 [rows + 1]. */
TY_CUDA_KERNEL(dense_bitmap) {
  if (k->out[0]->count == 0) return true;
  packed_task t = dense_of(k);
  t.values = static_cast<const uint16_t *>(k->in[0]->data);
  t.bits = static_cast<const uint8_t *>(k->in[1]->data);
  t.starts = ty_data_of<const int64_t>(k->in[2]);
  return ty_cuda_zero(t.dense, static_cast<size_t>(k->out[0]->count) * sizeof(uint16_t)) &&
         TY_LAUNCH(bitmap_dense, ty_cuda_blocks(t.rows, WARPS), THREADS, 0, t);
}

/* in: x f32 [..., columns], words i32, starts i64 [tiles + 1]. */
TY_CUDA_KERNEL(linear_csl) {
  const ty_view *out = k->out[0];
  if (out->count == 0) return true;
  packed_task t = product_of(k, out->size[out->ndim - 1]);
  t.words = static_cast<const uint32_t *>(k->in[1]->data);
  t.starts = ty_data_of<const int64_t>(k->in[2]);
  const dim3 grid(static_cast<unsigned>(ty_csl_count(t.rows, TY_CSL_TALL)),
                  static_cast<unsigned>((t.n + SOME - 1) / SOME));
  return TY_LAUNCH(csl_product, grid, TY_CSL_TALL, 0, t);
}

/* in: words i32, starts i64 [tiles + 1]. */
TY_CUDA_KERNEL(dense_csl) {
  if (k->out[0]->count == 0) return true;
  packed_task t = dense_of(k);
  t.words = static_cast<const uint32_t *>(k->in[0]->data);
  t.starts = ty_data_of<const int64_t>(k->in[1]);
  const int64_t tiles = ty_csl_count(t.rows, TY_CSL_TALL) * ty_csl_count(t.columns, TY_CSL_WIDE);
  return ty_cuda_zero(t.dense, static_cast<size_t>(k->out[0]->count) * sizeof(uint16_t)) &&
         TY_LAUNCH(csl_dense, ty_cuda_blocks(tiles, 1), THREADS, 0, t);
}
