/* Block-quantized formats: the layout of a block and its values. Q8_0, Q4_0, Q2_K, Q3_K, Q4_K and Q6_K are those of ggml and of
 * GGUF files, byte for byte (docs/gguf.md and ggml-common.h there). NF4 is the 4-bit NormalFloat of Dettmers et al.
 * 2023 ("QLoRA"), with the scales of blocks in 8 bits (double quantization). MXFP4 (Rouhani et al. 2023, "Microscaling
 * Data Formats for Deep Learning"; also ggml's bytes) and NVFP4 have elements of E2M1, floats of four bits. Members are bytes, so that blocks may lie
 * at any address; a code times its scale is rounded once more where a minimum is taken away, never fused. Also for
 * CUDA. */
#ifndef TY_KERNELS_QUANT_BLOCKS_H
#define TY_KERNELS_QUANT_BLOCKS_H

#include "half.h"

typedef struct ty_q8_0 { /* x = d q */
  uint8_t d[2];
  int8_t q[32];
} ty_q8_0;

typedef struct ty_q4_0 { /* x = d (q - 8); low nibbles are elements 0 to 15, high ones 16 to 31 */
  uint8_t d[2];
  uint8_t q[16];
} ty_q4_0;

/* x = d scale q - dmin min, with a scale (low nibble) and min (high one) for each 16 elements. Each 32 bytes of q are 128
 * elements: bits 0 and 1 are the first 32, bits 2 and 3 the next. */
typedef struct ty_q2_k {
  uint8_t scale[16];
  uint8_t q[64];
  uint8_t d[2], dmin[2];
} ty_q2_k;

/* x = d (scale - 32) (q - 4), a 6-bit scale for each 16 elements. The low two bits of codes lie as in Q2_K, the third of
 * element 32 j + i is bit j of high[i]. */
typedef struct ty_q3_k {
  uint8_t high[32];
  uint8_t q[64];
  uint8_t scale[12];
  uint8_t d[2];
} ty_q3_k;

/* x = d scale q - dmin min, with a 6-bit scale and min for each 32 elements. Each 32 bytes of q are 64 elements: first
 * the low nibbles, then the high ones. */
typedef struct ty_q4_k {
  uint8_t d[2], dmin[2];
  uint8_t scale[12];
  uint8_t q[128];
} ty_q4_k;

/* x = d scale (q - 32), a scale for each 16 elements. Of each half of 128 elements, low holds the low 4 bits (64 bytes:
 * low nibbles are elements 0 to 63, high ones 64 to 127), high the upper 2 (byte i: elements i, i + 32, i + 64, i +
 * 96). */
typedef struct ty_q6_k {
  uint8_t low[128], high[64];
  int8_t scale[16];
  uint8_t d[2];
} ty_q6_k;

/* A row of NF4: an f32 scale for each TY_NF4_GROUP blocks, then the blocks. x = scale absmax^2 level[q]: 255^2 stands
 * for the largest magnitude of the group, and squares keep the relative error of smaller ones low. Low nibbles are
 * elements 0 to 31, high ones 32 to 63. 4.125 bits, and 32 more for each 16384 elements or row: 4.127 in long rows. */
typedef struct ty_nf4 {
  uint8_t absmax;
  uint8_t q[32];
} ty_nf4;

/* The numbers of E2M1 by code, twice as large, which makes them integers: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and negative. */
#define TY_E2M1_TWICE 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

typedef struct ty_mxfp4 { /* x = 2^(e - 127) number[q]; low nibbles are elements 0 to 15, high ones 16 to 31 */
  uint8_t e;              /* E8M0: 255 is NaN */
  uint8_t q[16];
} ty_mxfp4;

/* A row of NVFP4: an f32 factor, then the blocks, which are ggml's. x = factor scale number[q], a scale in E4M3 for each
 * 16 elements, in whose 8 bytes low nibbles are elements 0 to 7 and high ones 8 to 15. Other files have one factor for a
 * whole tensor: then that of all rows is the same. */
typedef struct ty_nvfp4 {
  uint8_t scale[4];
  uint8_t q[32];
} ty_nvfp4;

enum { TY_NVFP4_HEAD = 4 }; /* bytes in front of a row's blocks */

/* Quantiles of the normal distribution, as the paper's appendix E lists them. */
#define TY_NF4_LEVELS                                                                                 \
  -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,    \
      -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, \
      0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f

TY_INLINE float ty_block_f16(const uint8_t *d) {
  uint16_t h;
  memcpy(&h, d, sizeof h);
  return ty_f16_to_f32(h);
}

/* The scale of part j (0 to 15) of a Q3_K block, -32 to 31: four bits in a nibble, two more in the last four bytes. */
TY_INLINE int ty_q3_k_scale(const uint8_t *s, int j) {
  int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
  return (low | (s[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32;
}

/* The 6-bit scale and min of part j (0 to 7) of a Q4_K block. */
TY_INLINE void ty_q4_k_part(const uint8_t *s, int j, int *scale, int *min) {
  if (j < 4) {
    *scale = s[j] & 63;
    *min = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *min = s[j + 4] >> 4 | (s[j] >> 6) << 4;
  }
}

/* Half of the number that a scale in E8M0 stands for: what is multiplied with numbers twice as large. */
TY_INLINE float ty_e8m0_half(uint8_t e) {
  return e == 255 ? NAN : ty_from_bits_f32(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

/* A number >= 0 in E4M3; its bits are those of an f16 number 2^8 times as small. */
TY_INLINE uint16_t ty_e4m3_f16(uint8_t s) { return (uint16_t)((s & 127) == 127 ? 0x7e00 : (s & 127) << 7); }

/* The scale of part j (0 to 3) of a block of NVFP4 times the row's factor, rounded once, halved. */
TY_INLINE float ty_nvfp4_half(float factor, const ty_nvfp4 *b, int j) {
  return ty_f16_to_f32(ty_e4m3_f16(b->scale[j])) * 256 * factor * 0.5f;
}

TY_INLINE float ty_nvfp4_factor(const void *row) {
  float factor;
  memcpy(&factor, row, sizeof factor);
  return factor;
}

/* Where the blocks of an NF4 row of `columns` begin, in bytes. */
TY_INLINE int64_t ty_nf4_head(int64_t columns) {
  int64_t group = 64 * TY_NF4_GROUP;
  return (columns + group - 1) / group * (int64_t)sizeof(float);
}

/* The magnitude that the levels of block `i` of a row, which is at b, are multiplied by. */
TY_INLINE float ty_nf4_absmax(const void *row, int64_t i, const ty_nf4 *b) {
  float scale;
  memcpy(&scale, (const char *)row + i / TY_NF4_GROUP * (int64_t)sizeof scale, sizeof scale);
  return scale * (float)(b->absmax * b->absmax);
}

#endif
