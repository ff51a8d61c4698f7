/* Block-quantized tensors: encoding, decoding, rows by index. */
#include "../quant_importance.h"
#include "indexing.cuh"
#include "quant.cuh"

namespace {

enum { THREADS = 256 };

/* ---- decoding ---- */

struct rows_of {
  const uint8_t *x;
  int64_t row_bytes, columns, rows; /* of x */
  int64_t count;                    /* of out, in packs of four */
};

/* Four elements of a thread; neighbours in a row. */
template <class F, bool INDEXED>
__global__ void __launch_bounds__(THREADS) decode(const rows_of r, index_list index, float *out, ty_cuda_watch watch) {
  const int64_t packs = r.columns / 4;
  for (int64_t i = int64_t{ blockIdx.x } * THREADS + threadIdx.x; i < r.count; i += int64_t{ gridDim.x } * THREADS) {
    int64_t row = i / packs, k = (i - row * packs) * 4, from = row;
    if (INDEXED) from = index_at(index, row);
    if (INDEXED && !ty_in_range(watch, from, r.rows)) continue;
    float v[4];
    F::decode(r.x + from * r.row_bytes, r.columns, k, v);
    ty_store<4>(out + 4 * i, v);
  }
}

rows_of rows_for(const ty_view *x, const ty_view *out) {
  int64_t columns = x->size[x->ndim - 1];
  return { static_cast<const uint8_t *>(x->data), ty_row_bytes(static_cast<ty_dtype>(x->dtype), columns), columns,
           x->count / columns, out->count / 4 };
}

/* ---- encoding ---- */

TY_DEVICE void encode_one(const float *x, const float *, ty_q8_0 *b) { ty_encode_q8_0(x, b); }
#define ENCODE_ONE(type)                                                    \
  TY_DEVICE void encode_one(const float *x, const float *w, ty_##type *b) { \
    ty_encode_##type(x, b);                                                 \
    if (w) ty_improve_##type(x, w, b);                                      \
  }
ENCODE_ONE(q4_0)
ENCODE_ONE(q2_k)
ENCODE_ONE(q3_k)
ENCODE_ONE(q4_k)
ENCODE_ONE(q6_k)
ENCODE_ONE(mxfp4)
#undef ENCODE_ONE

/* A block of N elements by each thread. importance: of a row's columns, or null. */
template <class B, int N>
__global__ void __launch_bounds__(THREADS)
    encode(const float *x, const float *importance, B *out, int64_t blocks, int64_t row_blocks) {
  for (int64_t i = int64_t{ blockIdx.x } * THREADS + threadIdx.x; i < blocks; i += int64_t{ gridDim.x } * THREADS)
    encode_one(x + i * N, importance ? importance + i % row_blocks * N : nullptr, out + i);
}

template <class B, int N> bool encode_all(const float *x, const float *importance, const ty_view *out) {
  int64_t blocks = out->count / N, row_blocks = out->size[out->ndim - 1] / N;
  return TY_LAUNCH((encode<B, N>), ty_cuda_blocks(blocks, THREADS), THREADS, 0, x, importance,
                   static_cast<B *>(out->data), blocks, row_blocks);
}

/* The blocks of a row that share a scale, by a block of threads. */
__global__ void __launch_bounds__(TY_NF4_GROUP)
    encode_nf4(const float *x, uint8_t *out, int64_t columns, int64_t row_bytes, int64_t groups, int64_t all) {
  TY_SHARED(float, room, TY_WARP);
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    int64_t row = i / groups, group = i - row * groups, block = group * TY_NF4_GROUP + threadIdx.x;
    bool mine = block < columns / 64;
    const float *from = x + row * columns + block * 64;
    float most = ty_block_reduce(mine ? fabsf(ty_extreme(from, 64)) : 0.0f, ty_larger<float>{}, room);
    float unit = ty_nf4_unit(most);
    uint8_t *to = out + row * row_bytes;
    if (threadIdx.x == 0) memcpy(to + group * sizeof unit, &unit, sizeof unit);
    if (mine) ty_encode_nf4(from, unit, reinterpret_cast<ty_nf4 *>(to + ty_nf4_head(columns)) + block);
  }
}

/* A row by a block of threads: its factor is that of the whole row. */
__global__ void __launch_bounds__(THREADS) encode_nvfp4(const float *x, const float *importance, uint8_t *out,
                                                        int64_t columns, int64_t row_bytes, int64_t rows) {
  TY_SHARED(float, room, TY_WARP);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float *from = x + row * columns;
    uint8_t *to = out + row * row_bytes;
    ty_nvfp4 *blocks = reinterpret_cast<ty_nvfp4 *>(to + TY_NVFP4_HEAD);
    float most = 0.0f;
    for (int64_t b = threadIdx.x; b < columns / 64; b += THREADS)
      most = ty_larger<float>{}(most, fabsf(ty_extreme(from + 64 * b, 64)));
    const float factor = ty_nvfp4_unit(ty_block_reduce(most, ty_larger<float>{}, room));
    if (threadIdx.x == 0) memcpy(to, &factor, sizeof factor);
    for (int64_t b = threadIdx.x; b < columns / 64; b += THREADS) {
      ty_encode_nvfp4(from + 64 * b, factor, blocks + b);
      if (importance) ty_improve_nvfp4(from + 64 * b, importance + 64 * b, factor, blocks + b);
    }
  }
}

} // namespace

TY_CUDA_KERNEL(quantize) {
  const ty_view *x = k->in[0], *out = k->out[0];
  if (!out->count) return true;
  const float *from = static_cast<const float *>(x->data);
  const float *importance = k->nin > 1 && k->in[1] ? static_cast<const float *>(k->in[1]->data) : nullptr;
  switch (out->dtype) {
    case TY_Q8_0: return encode_all<ty_q8_0, 32>(from, importance, out);
    case TY_Q4_0: return encode_all<ty_q4_0, 32>(from, importance, out);
    case TY_Q2_K: return encode_all<ty_q2_k, 256>(from, importance, out);
    case TY_Q3_K: return encode_all<ty_q3_k, 256>(from, importance, out);
    case TY_Q4_K: return encode_all<ty_q4_k, 256>(from, importance, out);
    case TY_Q6_K: return encode_all<ty_q6_k, 256>(from, importance, out);
    case TY_MXFP4: return encode_all<ty_mxfp4, 32>(from, importance, out);
    case TY_NVFP4: {
      int64_t columns = x->size[x->ndim - 1], rows = x->count / columns;
      return TY_LAUNCH(encode_nvfp4, ty_cuda_blocks(rows, 1), THREADS, 0, from, importance,
                       static_cast<uint8_t *>(out->data), columns, ty_row_bytes(TY_NVFP4, columns), rows);
    }
    case TY_NF4: break;
    default: return ty_cuda_no_kernel("quantize", out->dtype);
  }
  int64_t columns = x->size[x->ndim - 1], group = 64 * TY_NF4_GROUP, groups = (columns + group - 1) / group;
  int64_t all = x->count / columns * groups;
  return TY_LAUNCH(encode_nf4, ty_cuda_blocks(all, 1), TY_NF4_GROUP, 0, from, static_cast<uint8_t *>(out->data),
                   columns, ty_row_bytes(TY_NF4, columns), groups, all);
}

TY_CUDA_KERNEL(dequantize) {
  const ty_view *x = k->in[0], *out = k->out[0];
  if (!out->count) return true;
  rows_of r = rows_for(x, out);
  return quant_for(x->dtype, "dequantize", [&](auto format) {
    typedef decltype(format) F;
    return TY_LAUNCH((decode<F, false>), ty_cuda_blocks(r.count, THREADS), THREADS, 0, r, index_list{},
                     static_cast<float *>(out->data), ty_cuda_watched());
  });
}

TY_CUDA_KERNEL(embedding_quantized) {
  const ty_view *x = k->in[0], *out = k->out[0];
  index_list index = index_list_of(k->in[1]);
  if (!out->count) return true;
  rows_of r = rows_for(x, out);
  return quant_for(x->dtype, "embedding", [&](auto format) {
    typedef decltype(format) F;
    return TY_LAUNCH((decode<F, true>), ty_cuda_blocks(r.count, THREADS), THREADS, 0, r, index,
                     static_cast<float *>(out->data), ty_cuda_watched());
  });
}
