/* Values of block-quantized tensors on the device, four at a time. */
#ifndef TY_KERNELS_CUDA_QUANT_CUH
#define TY_KERNELS_CUDA_QUANT_CUH

#include "../quant_blocks.h"
#include "cuda.cuh"

TY_DEVICE float quant_f16(const uint8_t *d) {
  uint16_t h = static_cast<uint16_t>(d[0] | d[1] << 8);
  return ty_widen(ty_f16{ h });
}

/* x y - z, rounded twice as on the CPU. */
TY_DEVICE float quant_apart(float x, float y, float z) {
#ifdef TY_ON_GPU
  return __fmul_rn(x, y) - z;
#else
  return x * y - z;
#endif
}

/* Elements k .. k + 3 of a row, k a multiple of 4. */
template <int FORMAT> struct quant_format;

template <> struct quant_format<TY_Q8_0> {
  static __device__ __forceinline__ void decode(const uint8_t *row, int64_t, int64_t k, float *v) {
    const ty_q8_0 *b = reinterpret_cast<const ty_q8_0 *>(row) + k / 32;
    float d = quant_f16(b->d);
    for (int i = 0; i < 4; i++) v[i] = d * static_cast<float>(b->q[k % 32 + i]);
  }
};

template <> struct quant_format<TY_Q4_0> {
  static __device__ __forceinline__ void decode(const uint8_t *row, int64_t, int64_t k, float *v) {
    const ty_q4_0 *b = reinterpret_cast<const ty_q4_0 *>(row) + k / 32;
    int shift = k % 32 < 16 ? 0 : 4;
    float d = quant_f16(b->d);
    for (int i = 0; i < 4; i++) v[i] = d * static_cast<float>((b->q[k % 16 + i] >> shift & 15) - 8);
  }
};

template <> struct quant_format<TY_Q2_K> {
  static __device__ __forceinline__ void decode(const uint8_t *row, int64_t, int64_t k, float *v) {
    const ty_q2_k *b = reinterpret_cast<const ty_q2_k *>(row) + k / 256;
    int at = static_cast<int>(k % 256), shift = at % 128 / 32 * 2, s = b->scale[at / 16];
    float d = quant_f16(b->d) * static_cast<float>(s & 15), m = quant_f16(b->dmin) * static_cast<float>(s >> 4);
    const uint8_t *q = b->q + at / 128 * 32 + at % 32;
    for (int i = 0; i < 4; i++) v[i] = quant_apart(d, static_cast<float>(q[i] >> shift & 3), m);
  }
};

template <> struct quant_format<TY_Q3_K> {
  static __device__ __forceinline__ void decode(const uint8_t *row, int64_t, int64_t k, float *v) {
    const ty_q3_k *b = reinterpret_cast<const ty_q3_k *>(row) + k / 256;
    int at = static_cast<int>(k % 256), part = at / 32, shift = part % 4 * 2;
    float d = quant_f16(b->d) * static_cast<float>(ty_q3_k_scale(b->scale, at / 16));
    const uint8_t *q = b->q + at / 128 * 32 + at % 32, *high = b->high + at % 32;
    for (int i = 0; i < 4; i++) {
      int code = (q[i] >> shift & 3) | (high[i] >> part & 1) << 2;
      v[i] = d * static_cast<float>(code - 4);
    }
  }
};

template <> struct quant_format<TY_Q4_K> {
  static __device__ __forceinline__ void decode(const uint8_t *row, int64_t, int64_t k, float *v) {
    const ty_q4_k *b = reinterpret_cast<const ty_q4_k *>(row) + k / 256;
    int part = static_cast<int>(k % 256 / 32), scale, min, shift = part & 1 ? 4 : 0;
    ty_q4_k_part(b->scale, part, &scale, &min);
    float d = quant_f16(b->d) * static_cast<float>(scale), m = quant_f16(b->dmin) * static_cast<float>(min);
    const uint8_t *q = b->q + part / 2 * 32 + k % 32;
    for (int i = 0; i < 4; i++) v[i] = quant_apart(d, static_cast<float>(q[i] >> shift & 15), m);
  }
};

template <> struct quant_format<TY_Q6_K> {
  static __device__ __forceinline__ void decode(const uint8_t *row, int64_t, int64_t k, float *v) {
    const ty_q6_k *b = reinterpret_cast<const ty_q6_k *>(row) + k / 256;
    int at = static_cast<int>(k % 256), half = at / 128, quarter = at % 128 / 32, l = at % 32;
    const uint8_t *low = b->low + half * 64 + quarter % 2 * 32 + l, *high = b->high + half * 32 + l;
    float d = quant_f16(b->d) * static_cast<float>(b->scale[at / 16]);
    for (int i = 0; i < 4; i++) {
      int q = (low[i] >> (quarter < 2 ? 0 : 4) & 15) | (high[i] >> 2 * quarter & 3) << 4;
      v[i] = d * static_cast<float>(q - 32);
    }
  }
};

template <> struct quant_format<TY_NF4> {
  static __device__ __forceinline__ void decode(const uint8_t *row, int64_t columns, int64_t k, float *v) {
    const float level[16] = { TY_NF4_LEVELS };
    const ty_nf4 *b = reinterpret_cast<const ty_nf4 *>(row + ty_nf4_head(columns)) + k / 64;
    float absmax = ty_nf4_absmax(row, k / 64, b);
    int shift = k % 64 < 32 ? 0 : 4;
    for (int i = 0; i < 4; i++) v[i] = absmax * level[b->q[k % 32 + i] >> shift & 15];
  }
};

template <> struct quant_format<TY_MXFP4> {
  static __device__ __forceinline__ void decode(const uint8_t *row, int64_t, int64_t k, float *v) {
    const int8_t twice[16] = { TY_E2M1_TWICE };
    const ty_mxfp4 *b = reinterpret_cast<const ty_mxfp4 *>(row) + k / 32;
    int shift = k % 32 < 16 ? 0 : 4;
    float d = ty_e8m0_half(b->e);
    for (int i = 0; i < 4; i++) v[i] = d * static_cast<float>(twice[b->q[k % 16 + i] >> shift & 15]);
  }
};

template <> struct quant_format<TY_NVFP4> {
  static __device__ __forceinline__ void decode(const uint8_t *row, int64_t, int64_t k, float *v) {
    const int8_t twice[16] = { TY_E2M1_TWICE };
    const ty_nvfp4 *b = reinterpret_cast<const ty_nvfp4 *>(row + TY_NVFP4_HEAD) + k / 64;
    int part = static_cast<int>(k % 64 / 16), shift = k % 16 < 8 ? 0 : 4;
    float d = ty_nvfp4_half(ty_nvfp4_factor(row), b, part);
    for (int i = 0; i < 4; i++) v[i] = d * static_cast<float>(twice[b->q[8 * part + k % 8 + i] >> shift & 15]);
  }
};

/* fn(quant_format<...>{}) for the dtype. */
template <class Fn> static inline bool quant_for(int dtype, const char *op, Fn fn) {
  switch (dtype) {
    case TY_Q8_0: return fn(quant_format<TY_Q8_0>{});
    case TY_Q4_0: return fn(quant_format<TY_Q4_0>{});
    case TY_Q2_K: return fn(quant_format<TY_Q2_K>{});
    case TY_Q3_K: return fn(quant_format<TY_Q3_K>{});
    case TY_Q4_K: return fn(quant_format<TY_Q4_K>{});
    case TY_Q6_K: return fn(quant_format<TY_Q6_K>{});
    case TY_NF4: return fn(quant_format<TY_NF4>{});
    case TY_MXFP4: return fn(quant_format<TY_MXFP4>{});
    case TY_NVFP4: return fn(quant_format<TY_NVFP4>{});
    default: return ty_cuda_no_kernel(op, dtype);
  }
}

#endif
