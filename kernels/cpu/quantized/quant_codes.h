/* What products multiply: rows of block-quantized weights as bytes with scales, w = scale code - offset, and rows of x
 * rounded to bytes. Included by files that are compiled for one instruction set. */
#ifndef TY_KERNELS_CPU_QUANT_CODES_H
#define TY_KERNELS_CPU_QUANT_CODES_H

#include "../../quant_blocks.h"
#include "../cpu.h"

/* Of a format: elements with one scale, and the code that stands for 0; formats with mins have 0. */
static inline int code_group(ty_dtype dtype) {
  return dtype == TY_Q2_K || dtype == TY_Q3_K || dtype == TY_Q6_K || dtype == TY_NVFP4 ? 16 : 32;
}
static inline int code_zero(ty_dtype dtype) {
  if (dtype == TY_MXFP4 || dtype == TY_NVFP4) return 12;
  return dtype == TY_Q8_0 ? 128 : dtype == TY_Q4_0 ? 8 : dtype == TY_Q6_K ? 32 : dtype == TY_Q3_K ? 4 : 0;
}

typedef uint8_t code_bytes __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint16_t code_words __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint8_t code_half __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t code_half_words __attribute__((vector_size(16), aligned(1), may_alias));

/* A vector of bytes seen as words, for shifts; what comes from the neighbour is to be masked. */
#define AS_WORDS(v, shift) ((code_bytes)((code_words)(v)shift))

/* Each decodes `blocks` blocks to codes. */

static inline void codes_q8_0(const ty_q8_0 *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < blocks; i++) *(code_bytes *)(code + 32 * i) = *(const code_bytes *)b[i].q ^ 0x80;
}

#if defined(__AVX2__)
/* The low nibbles of sixteen bytes, then the high ones, as one vector: what is stored in halves and read as a whole
 * would have to wait until it is in the cache. */
static inline __m256i code_nibbles(const uint8_t *q) {
  __m128i v = _mm_loadu_si128((const __m128i *)(const void *)q);
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
}

static inline void codes_q4_0(const ty_q4_0 *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < blocks; i++) _mm256_storeu_si256((__m256i *)(void *)(code + 32 * i), code_nibbles(b[i].q));
}
#else
static inline void codes_q4_0(const ty_q4_0 *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < blocks; i++) {
    code_half q = *(const code_half *)b[i].q;
    *(code_half *)(code + 32 * i) = q & 15;
    *(code_half *)(code + 32 * i + 16) = (code_half)((code_half_words)q >> 4) & 15;
  }
}
#endif

/* 32 bytes of codes of two bits are four groups; `high` has their third bits, from bit 0 on, or none. */
static inline void codes_low(code_bytes q, code_bytes high, uint8_t *restrict code) {
  *(code_bytes *)code = (q & 3) | AS_WORDS((high & 1), << 2);
  *(code_bytes *)(code + 32) = (AS_WORDS(q, >> 2) & 3) | AS_WORDS((high & 2), << 1);
  *(code_bytes *)(code + 64) = (AS_WORDS(q, >> 4) & 3) | (high & 4);
  *(code_bytes *)(code + 96) = (AS_WORDS(q, >> 6) & 3) | (AS_WORDS(high, >> 1) & 4);
}

static inline void codes_q2_k(const ty_q2_k *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < 2 * blocks; i++, code += 128)
    codes_low(*(const code_bytes *)(b[i / 2].q + i % 2 * 32), (code_bytes){ 0 }, code);
}

static inline void codes_q3_k(const ty_q3_k *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < blocks; i++, code += 256) {
    const code_bytes high = *(const code_bytes *)b[i].high;
    codes_low(*(const code_bytes *)b[i].q, high, code);
    codes_low(*(const code_bytes *)(b[i].q + 32), AS_WORDS(high, >> 4) & 15, code + 128);
  }
}

static inline void codes_q4_k(const ty_q4_k *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < 4 * blocks; i++, code += 64) {
    code_bytes q = *(const code_bytes *)(b[i / 4].q + i % 4 * 32);
    *(code_bytes *)code = q & 15;
    *(code_bytes *)(code + 32) = AS_WORDS(q, >> 4) & 15;
  }
}

static inline void codes_q6_k(const ty_q6_k *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < 2 * blocks; i++, code += 128) {
    const uint8_t *low = b[i / 2].low + i % 2 * 64;
    code_bytes low0 = *(const code_bytes *)low, low1 = *(const code_bytes *)(low + 32);
    code_bytes high = *(const code_bytes *)(b[i / 2].high + i % 2 * 32);
    *(code_bytes *)code = (low0 & 15) | (AS_WORDS(high, << 4) & 48);
    *(code_bytes *)(code + 32) = (low1 & 15) | (AS_WORDS(high, << 2) & 48);
    *(code_bytes *)(code + 64) = (AS_WORDS(low0, >> 4) & 15) | (high & 48);
    *(code_bytes *)(code + 96) = (AS_WORDS(low1, >> 4) & 15) | (AS_WORDS(high, >> 2) & 48);
  }
}
#undef AS_WORDS

/* Codes of E2M1 to the numbers, twice as large, plus 12. */
#if defined(__AVX2__)
static inline __m256i codes_e2m1(__m256i q) {
  const __m128i number = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(number), q);
}

static inline void codes_mxfp4(const ty_mxfp4 *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < blocks; i++)
    _mm256_storeu_si256((__m256i *)(void *)(code + 32 * i), codes_e2m1(code_nibbles(b[i].q)));
}

static inline void codes_nvfp4(const ty_nvfp4 *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < 2 * blocks; i++) { /* eight bytes are sixteen elements */
    __m256i q = _mm256_permute4x64_epi64(code_nibbles(b[i / 2].q + i % 2 * 16), _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256((__m256i *)(void *)(code + 32 * i), codes_e2m1(q));
  }
}
#else
static inline void codes_e2m1(const uint8_t *q, int64_t n, int64_t apart, uint8_t *restrict code) {
  static const int8_t twice[16] = { TY_E2M1_TWICE };
  for (int64_t i = 0; i < n; i++) {
    code[i] = (uint8_t)(twice[q[i] & 15] + 12);
    code[i + apart] = (uint8_t)(twice[q[i] >> 4] + 12);
  }
}

static inline void codes_mxfp4(const ty_mxfp4 *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < blocks; i++) codes_e2m1(b[i].q, 16, 16, code + 32 * i);
}

static inline void codes_nvfp4(const ty_nvfp4 *b, int64_t blocks, uint8_t *restrict code) {
  for (int64_t i = 0; i < 4 * blocks; i++) codes_e2m1(b[i / 4].q + i % 4 * 8, 8, 8, code + 16 * i);
}
#endif

/* ---- scales ---- */

enum { SCALES_AT_ONCE = 64 }; /* blocks */

/* The f16 numbers `step` bytes apart from d on. */
static inline void gather_f16(const uint8_t *d, int64_t step, int64_t count, float *restrict out) {
  uint16_t half[SCALES_AT_ONCE];
  for (int64_t i = 0; i < count; i += SCALES_AT_ONCE) {
    int64_t n = count - i < SCALES_AT_ONCE ? count - i : SCALES_AT_ONCE;
    for (int64_t j = 0; j < n; j++, d += step) memcpy(&half[j], d, 2);
    ty_f16_load(out + i, half, n);
  }
}

/* Sixteen bytes as f32, the first eight times a, the others times b. */
#if defined(__AVX512F__)
#define SCALES_16(name, type, widen)                                                         \
  static inline void name(const type *s, float a, float b, float *low, float *high) {        \
    __m512 x = _mm512_cvtepi32_ps(widen(_mm_loadu_si128((const __m128i *)(const void *)s))); \
    _mm256_storeu_ps(low, _mm256_mul_ps(_mm512_castps512_ps256(x), _mm256_set1_ps(a)));      \
    _mm256_storeu_ps(high, _mm256_mul_ps(_mm512_extractf32x8_ps(x, 1), _mm256_set1_ps(b)));  \
  }
#else
#define SCALES_16(name, type, widen)                                                  \
  static inline void name(const type *s, float a, float b, float *low, float *high) { \
    for (int j = 0; j < 8; j++) low[j] = a * (float)s[j];                             \
    for (int j = 0; j < 8; j++) high[j] = b * (float)s[j + 8];                        \
  }
#endif
SCALES_16(scales_u8, uint8_t, _mm512_cvtepu8_epi32)
SCALES_16(scales_i8, int8_t, _mm512_cvtepi8_epi32)
#undef SCALES_16

static inline void scales_q4_k(const ty_q4_k *b, int64_t blocks, float *restrict scale, float *restrict min) {
  float d[SCALES_AT_ONCE], dmin[SCALES_AT_ONCE];
  for (int64_t i = 0; i < blocks; i++, b++, scale += 8, min += 8) {
    if (i % SCALES_AT_ONCE == 0) {
      int64_t n = blocks - i < SCALES_AT_ONCE ? blocks - i : SCALES_AT_ONCE;
      gather_f16(b->d, sizeof *b, n, d);
      gather_f16(b->dmin, sizeof *b, n, dmin);
    }
    uint32_t s[3], six[4]; /* the scales, then the mins, of 6 bits */
    memcpy(s, b->scale, 12);
    six[0] = s[0] & 0x3f3f3f3f;
    six[1] = (s[2] & 0x0f0f0f0f) | (s[0] >> 2 & 0x30303030);
    six[2] = s[1] & 0x3f3f3f3f;
    six[3] = (s[2] >> 4 & 0x0f0f0f0f) | (s[1] >> 2 & 0x30303030);
    scales_u8((const uint8_t *)six, d[i % SCALES_AT_ONCE], dmin[i % SCALES_AT_ONCE], scale, min);
  }
}

static inline void scales_q6_k(const ty_q6_k *b, int64_t blocks, float *restrict scale) {
  float d[SCALES_AT_ONCE];
  for (int64_t i = 0; i < blocks; i++, b++, scale += 16) {
    if (i % SCALES_AT_ONCE == 0)
      gather_f16(b->d, sizeof *b, blocks - i < SCALES_AT_ONCE ? blocks - i : SCALES_AT_ONCE, d);
    scales_i8(b->scale, d[i % SCALES_AT_ONCE], d[i % SCALES_AT_ONCE], scale, scale + 8);
  }
}

static inline void scales_q2_k(const ty_q2_k *b, int64_t blocks, float *restrict scale, float *restrict min) {
  for (int64_t i = 0; i < blocks; i++, b++, scale += 16, min += 16) {
    const code_half s = *(const code_half *)b->scale, low = s & 15, high = (code_half)((code_half_words)s >> 4) & 15;
    const float d = ty_block_f16(b->d), dmin = ty_block_f16(b->dmin);
    scales_u8((const uint8_t *)&low, d, d, scale, scale + 8);
    scales_u8((const uint8_t *)&high, dmin, dmin, min, min + 8);
  }
}

static inline void scales_q3_k(const ty_q3_k *b, int64_t blocks, float *restrict scale) {
  for (int64_t i = 0; i < blocks; i++, b++, scale += 16) {
    int8_t s[16];
    for (int j = 0; j < 16; j++) s[j] = (int8_t)ty_q3_k_scale(b->scale, j);
    const float d = ty_block_f16(b->d);
    scales_i8(s, d, d, scale, scale + 8);
  }
}

static inline void scales_mxfp4(const ty_mxfp4 *b, int64_t blocks, float *restrict scale) {
  for (int64_t i = 0; i < blocks; i++) scale[i] = ty_e8m0_half(b[i].e);
}

/* The bits of E4M3, as those of an f32 number, are 2^120 times too small a one. */
static inline void scales_nvfp4(const ty_nvfp4 *b, int64_t blocks, float factor, float *restrict scale) {
  uint8_t bits[4 * SCALES_AT_ONCE];
  for (int64_t i = 0; i < blocks; i += SCALES_AT_ONCE, scale += 4 * SCALES_AT_ONCE) {
    int64_t n = blocks - i < SCALES_AT_ONCE ? blocks - i : SCALES_AT_ONCE;
    for (int64_t j = 0; j < n; j++) memcpy(bits + 4 * j, b[i + j].scale, 4);
    for (int64_t j = 0; j < 4 * n; j++) {
      uint32_t s = bits[j] & 127, f = s == 127 ? 0x7fc00000 : s << 20;
      float value;
      memcpy(&value, &f, sizeof value);
      scale[j] = value * 0x1p120f * factor * 0.5f;
    }
  }
}

/* Where a row has the block of element k. */
static inline const uint8_t *block_at(ty_dtype dtype, const void *row, int64_t k) {
  return (const uint8_t *)row + (dtype == TY_NVFP4 ? TY_NVFP4_HEAD : 0) +
         k / ty_dtype_block[dtype] * ty_dtype_size[dtype];
}

/* Elements [k0, k0 + n) of a row, in whole blocks: scales and, of formats with mins, min [n / code_group]. */
static inline void row_scales(ty_dtype dtype, const void *row, int64_t k0, int64_t n, float *scale, float *min) {
  const uint8_t *at = block_at(dtype, row, k0);
  switch (dtype) {
    case TY_Q8_0:
    case TY_Q4_0: gather_f16(at, ty_dtype_size[dtype], n / 32, scale); break;
    case TY_Q2_K: scales_q2_k((const ty_q2_k *)at, n / 256, scale, min); break;
    case TY_Q3_K: scales_q3_k((const ty_q3_k *)at, n / 256, scale); break;
    case TY_Q4_K: scales_q4_k((const ty_q4_k *)at, n / 256, scale, min); break;
    case TY_MXFP4: scales_mxfp4((const ty_mxfp4 *)at, n / 32, scale); break;
    case TY_NVFP4: scales_nvfp4((const ty_nvfp4 *)at, n / 64, ty_nvfp4_factor(row), scale); break;
    default: scales_q6_k((const ty_q6_k *)at, n / 256, scale);
  }
}

/* Their codes [n]. */
static inline void row_codes(ty_dtype dtype, const void *row, int64_t k0, int64_t n, uint8_t *code) {
  const uint8_t *at = block_at(dtype, row, k0);
  switch (dtype) {
    case TY_Q8_0: codes_q8_0((const ty_q8_0 *)at, n / 32, code); break;
    case TY_Q4_0: codes_q4_0((const ty_q4_0 *)at, n / 32, code); break;
    case TY_Q2_K: codes_q2_k((const ty_q2_k *)at, n / 256, code); break;
    case TY_Q3_K: codes_q3_k((const ty_q3_k *)at, n / 256, code); break;
    case TY_Q4_K: codes_q4_k((const ty_q4_k *)at, n / 256, code); break;
    case TY_MXFP4: codes_mxfp4((const ty_mxfp4 *)at, n / 32, code); break;
    case TY_NVFP4: codes_nvfp4((const ty_nvfp4 *)at, n / 64, code); break;
    default: codes_q6_k((const ty_q6_k *)at, n / 256, code);
  }
}

/* ---- x ---- */

/* Rows of x as bytes, x ~ scale q in groups of 32, in blocks of `block` elements of k: [block of k][row][element], and
 * the same for what there is of each group.
 *
 * In lines, which is the order of quant_few.h, k is filled up with zeros. Each half of a group of 32 lies beside those
 * of the three groups that it is multiplied together with, and scale holds, of 512 elements, what vectors of scales of
 * W are multiplied with: where W has groups of 32, 16 scales and 16 sums, times zero; with mins 8 and 8 for each block
 * of 256; where it has groups of 16, 16 and 16 for each block. Q2_K, Q3_K and the formats of E2M1 have orders of their
 * own (code_low_line, code_e2m1_line).
 *
 * In eights, which is the order of quant_eights.h, k is filled up, too: the first halves of groups i and i + 4 of eight
 * lie side by side, behind them the second ones, and scale holds 8 scales and 8 sums as above. Where W has groups of
 * 16, elements lie as they are, and there are 16 sums. */
typedef struct coded {
  int64_t rows, k, block; /* rows: with those that pad */
  ty_dtype dtype;         /* of the weights */
  int group, zero;        /* of their format */
  bool lines, eights, mins;
  bool power; /* scales are powers of two */
  bool wide;  /* some of which, if so, are too far from 1 to be multiplied with by adding exponents */
  int8_t *q;
  float *scale, *sum; /* sum, of `group` elements: scale times the sum of q */
  int32_t *start;     /* for each `group` elements: the sum of q times -zero */
} coded;

enum { LINE = 512, EIGHT = 256, EIGHT_FACTORS = 24 };

static inline int64_t line_factors(ty_dtype dtype) { return 2 * LINE / code_group(dtype); }

static inline int64_t coded_at(const coded *c, int64_t row, int64_t k) {
  int64_t b = k / c->block;
  return (b * c->rows + row) * c->block + k - b * c->block;
}

/* Groups whose largest magnitude is this or less become zeros. */
#define TOO_SMALL 1e-30f

enum { GROUPS_AT_ONCE = 8 };

/* What groups of 32 numbers become: bytes, their scales, and the sums of the bytes of each half. */
typedef struct coded_groups {
  int8_t q[GROUPS_AT_ONCE][32] __attribute__((aligned(64)));
  float scale[GROUPS_AT_ONCE];
  int32_t sum[GROUPS_AT_ONCE][2];
} coded_groups;

#if defined(__AVX512F__)
/* The largest of each of eight vectors of integers. */
static inline __m256i largest_of_eight(const __m512i v[8]) {
  __m512i two[4], four[2];
  for (int i = 0; i < 4; i++)
    two[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                              _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    four[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm512_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  __m512i all = _mm512_max_epi32(_mm512_shuffle_i32x4(four[0], four[1], 0x88),
                                 _mm512_shuffle_i32x4(four[0], four[1], 0xdd));
  all = _mm512_max_epi32(all, _mm512_shuffle_i32x4(all, all, 0xb1));
  return _mm512_castsi512_si256(_mm512_shuffle_i32x4(all, all, 0x08));
}

static inline void code_groups(const float *x, bool power, coded_groups *to) {
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  /* The largest as integers, for which infinity and NaN are larger than all numbers. */
  __m512i largest[GROUPS_AT_ONCE];
  for (int i = 0; i < GROUPS_AT_ONCE; i++)
    largest[i] = _mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(x + 32 * i), no_sign),
                                  _mm512_and_si512(_mm512_loadu_si512(x + 32 * i + 16), no_sign));
  __m256i bits = largest_of_eight(largest);
  __m256 most = _mm256_castsi256_ps(bits), scale = _mm256_div_ps(most, _mm256_set1_ps(127));
  __mmask8 none = _mm256_cmp_ps_mask(most, _mm256_set1_ps(TOO_SMALL), _CMP_LE_OQ);
  __mmask8 bad = _mm256_cmpge_epi32_mask(bits, _mm256_set1_epi32(0x7f800000));
  if (power)
    scale = _mm256_castsi256_ps(_mm256_and_si256(
        _mm256_add_epi32(_mm256_castps_si256(scale), _mm256_set1_epi32(0x7fffff)), _mm256_set1_epi32((int)0xff800000)));
  scale = _mm256_mask_mov_ps(_mm256_mask_mov_ps(scale, none, _mm256_set1_ps(1)), bad, _mm256_set1_ps(NAN));
  _mm256_storeu_ps(to->scale, scale);
  __m512 inverse = _mm512_castps256_ps512(_mm256_maskz_div_ps((__mmask8) ~(none | bad), _mm256_set1_ps(1), scale));
  __m512i sum[4]; /* of four codes each */
  for (int i = 0; i < 4; i++, x += 64) {
    __m512i v[4];
    for (int j = 0; j < 4; j++)
      v[j] = _mm512_cvtps_epi32(
          _mm512_mul_ps(_mm512_loadu_ps(x + 16 * j), _mm512_permutexvar_ps(_mm512_set1_epi32(2 * i + j / 2), inverse)));
    __m512i code = _mm512_permutexvar_epi32(
        in_order, _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3])));
    _mm512_store_si512(to->q[2 * i], code);
    sum[i] = _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_set1_epi8(1), code), _mm512_set1_epi16(1));
  }
  __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[0], sum[1]), _mm512_unpackhi_epi32(sum[0], sum[1]));
  __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[2], sum[3]), _mm512_unpackhi_epi32(sum[2], sum[3]));
  __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  _mm512_storeu_si512(to->sum, _mm512_permutexvar_epi32(in_order, all));
}
#elif defined(__AVX2__)
/* The largest of each of eight vectors of integers. */
static inline __m256i largest_of_eight(const __m256i v[8]) {
  __m256i two[4], four[2];
  for (int i = 0; i < 4; i++)
    two[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                              _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    four[i] = _mm256_max_epi32(_mm256_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm256_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  return _mm256_max_epi32(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                          _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

static inline void code_groups(const float *x, bool power, coded_groups *to) {
  const __m256i no_sign = _mm256_set1_epi32(0x7fffffff), in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  /* The largest as integers, for which infinity and NaN are larger than all numbers. */
  __m256i largest[GROUPS_AT_ONCE];
  for (int i = 0; i < GROUPS_AT_ONCE; i++) {
    __m256i v[4];
    for (int j = 0; j < 4; j++)
      v[j] = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(x + 32 * i + 8 * j)), no_sign);
    largest[i] = _mm256_max_epi32(_mm256_max_epi32(v[0], v[1]), _mm256_max_epi32(v[2], v[3]));
  }
  const __m256i bits = largest_of_eight(largest);
  const __m256 most = _mm256_castsi256_ps(bits), one = _mm256_set1_ps(1);
  const __m256 none = _mm256_cmp_ps(most, _mm256_set1_ps(TOO_SMALL), _CMP_LE_OQ);
  const __m256 bad = _mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x7f7fffff)));
  __m256 scale = _mm256_div_ps(most, _mm256_set1_ps(127));
  if (power)
    scale = _mm256_castsi256_ps(_mm256_and_si256(
        _mm256_add_epi32(_mm256_castps_si256(scale), _mm256_set1_epi32(0x7fffff)), _mm256_set1_epi32((int)0xff800000)));
  scale = _mm256_blendv_ps(_mm256_blendv_ps(scale, one, none), _mm256_set1_ps(NAN), bad);
  _mm256_storeu_ps(to->scale, scale);
  float inverse[GROUPS_AT_ONCE];
  _mm256_storeu_ps(inverse, _mm256_andnot_ps(_mm256_or_ps(none, bad), _mm256_div_ps(one, scale)));
  for (int i = 0; i < GROUPS_AT_ONCE; i++, x += 32) {
    const __m256 factor = _mm256_set1_ps(inverse[i]);
    __m256i v[4];
    for (int j = 0; j < 4; j++) v[j] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * j), factor));
    const __m256i code = _mm256_permutevar8x32_epi32(
        _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3])), in_order);
    _mm256_store_si256((__m256i *)(void *)to->q[i], code);
    __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), code), _mm256_set1_epi16(1));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, _MM_SHUFFLE(1, 0, 3, 2)));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, _MM_SHUFFLE(2, 3, 0, 1)));
    to->sum[i][0] = _mm256_cvtsi256_si32(sum);
    to->sum[i][1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum, 1));
  }
}
#else
/* The scale of a group of which the largest magnitude is `most`: most / 127, or the next power of two above it. Groups
 * of next to nothing become zeros. */
static inline float code_scale(float most, bool power) {
  if (most <= TOO_SMALL) return 1;
  float scale = most / 127;
  if (!power) return scale;
  uint32_t bits;
  memcpy(&bits, &scale, sizeof bits);
  bits = (bits + 0x7fffff) & 0xff800000;
  memcpy(&scale, &bits, sizeof scale);
  return scale;
}

static inline float code_32(const float *restrict x, bool power, int8_t *restrict q, int32_t sum[2]) {
  float most = 0, any = 0;
  for (int i = 0; i < 32; i++) {
    float a = fabsf(x[i]);
    most = a > most ? a : most;
    any += x[i] - x[i]; /* NaN when there is one, or an infinity */
  }
  float scale = code_scale(most, power), inverse = most > TOO_SMALL ? 1 / scale : 0;
  for (int i = 0; i < 32; i++) {
    float r = x[i] * inverse;
    q[i] = (int8_t)(int)(r > -127.4f && r < 127.4f ? r + copysignf(0.5f, r) : 0);
  }
  sum[0] = sum[1] = 0;
  for (int i = 0; i < 16; i++) sum[0] += q[i], sum[1] += q[i + 16];
  return scale + any;
}

static inline void code_groups(const float *x, bool power, coded_groups *to) {
  for (int i = 0; i < GROUPS_AT_ONCE; i++) to->scale[i] = code_32(x + 32 * i, power, to->q[i], to->sum[i]);
}
#endif

/* Group g of a line for Q2_K or Q3_K: of each two groups of four, (0, 1) and (2, 3), a vector of the first halves of
 * the first one, one of the second one, then those of the second halves; a vector has 16 bytes of each four groups. Of
 * the factors, two vectors are for the sums of two groups, two lanes each of which the second are four times as large.
 * Behind them is a scale for each group, and the sums of 16 elements as words. Scales of Q3_K are 256 times as large,
 * and each code is 4 too large. */
static inline void code_low_line(const coded *c, int g, const int8_t q[32], float scale, const int32_t sum[2],
                                 int8_t *line, float *factor) {
  const int lane = g / 4, j = g % 4;
  const int16_t sums[2] = { (int16_t)sum[0], (int16_t)sum[1] };
  line += j / 2 * 256 + j % 2 * 64 + lane * 16;
  memcpy(line, q, 16);
  memcpy(line + 128, q + 16, 16);
  memcpy(factor + 48 + g, sums, sizeof sums);
  if (c->dtype == TY_Q3_K) scale *= 0x1p-8f;
  factor[32 + g] = c->dtype == TY_Q3_K ? 4 * scale : scale;
  factor += j / 2 * 16 + lane * 4 + j % 2 * 2;
  factor[0] = factor[1] = j % 2 ? 0.25f * scale : scale;
}

/* Group g of a line for MXFP4, whose scales are twice what they are to be, or NVFP4. */
static inline void code_e2m1_line(const coded *c, int g, const int8_t q[32], float scale, const int32_t sum[2],
                                  int8_t *line, float *factor) {
  line += g / 4 * 128 + g % 4 * 16;
  if (c->dtype == TY_MXFP4) {
    memcpy(line, q, 16);
    memcpy(line + 64, q + 16, 16);
    factor += g % 4 * 4 + g / 4;
    factor[0] = 0.5f * scale;
    factor[16] = 0.5f * scale * (float)(c->zero * (sum[0] + sum[1]));
    return;
  }
  factor += g / 8 * 32 + g % 8 * 2;
  for (int i = 0; i < 2; i++) {
    memcpy(line + 8 * i, q + 16 * i, 8);
    memcpy(line + 8 * i + 64, q + 16 * i + 8, 8);
    factor[i] = scale;
    factor[16 + i] = scale * (float)(c->zero * sum[i]);
  }
}

/* Group g of a line. */
static inline void code_line(const coded *c, int g, const int8_t q[32], float scale, const int32_t sum[2], int8_t *line,
                             float *factor) {
  if (c->dtype == TY_Q2_K || c->dtype == TY_Q3_K) {
    code_low_line(c, g, q, scale, sum, line, factor);
    return;
  }
  if (c->dtype == TY_MXFP4 || c->dtype == TY_NVFP4) {
    code_e2m1_line(c, g, q, scale, sum, line, factor);
    return;
  }
  if (c->group == 16) {
    factor += g / 8 * 32 + g % 8 * 2;
    factor[0] = factor[1] = scale;
    factor[16] = scale * (float)(c->zero * sum[0]), factor[17] = scale * (float)(c->zero * sum[1]);
    memcpy(line + 32 * g, q, 32);
    return;
  }
  int place = c->mins ? g % 2 * 2 + g / 2 % 2 : g % 4;
  memcpy(line + g / 4 * 128 + place * 16, q, 16);
  memcpy(line + g / 4 * 128 + place * 16 + 64, q + 16, 16);
  if (c->mins) factor += g / 8 * 8; /* sums follow 8 scales, else 16 */
  factor[g] = scale;
  factor[g + (c->mins ? 8 : 16)] = scale * (float)((c->mins ? 1 : c->zero) * (sum[0] + sum[1]));
}

/* Group g of eight. */
static inline void code_eight(const coded *c, int g, const int8_t q[32], float scale, const int32_t sum[2], int8_t *to,
                              float *factor) {
  factor[g] = scale;
  factor += 8;
  if (c->group == 16) {
    memcpy(to + 32 * g, q, 32);
    for (int i = 0; i < 2; i++) factor[2 * g + i] = scale * (float)(c->zero * sum[i]);
    return;
  }
  to += g % 4 * 64 + g / 4 * 16;
  memcpy(to, q, 16);
  memcpy(to + 32, q + 16, 16);
  factor[g] = scale * (float)((c->mins ? 1 : c->zero) * (sum[0] + sum[1]));
}

/* The first n groups, which lie from `at` on. */
static inline void put_groups(const coded_groups *from, int64_t n, int64_t at, coded *c) {
  if (c->power)
    for (int64_t i = 0; i < n; i++)
      if (!(from->scale[i] > 0x1p-60f && from->scale[i] < 0x1p60f)) __atomic_store_n(&c->wide, true, __ATOMIC_RELAXED);
  if (c->lines) {
    int64_t line = at / LINE;
    for (int64_t i = 0; i < n; i++)
      code_line(c, (int)(at % LINE / 32 + i), from->q[i], from->scale[i], from->sum[i], c->q + line * LINE,
                c->scale + line * line_factors(c->dtype));
    return;
  }
  if (c->eights) {
    int64_t eight = at / EIGHT;
    for (int i = 0; i < GROUPS_AT_ONCE; i++)
      code_eight(c, i, from->q[i], from->scale[i], from->sum[i], c->q + at, c->scale + eight * EIGHT_FACTORS);
    return;
  }
  memcpy(c->q + at, from->q, (size_t)(32 * n));
  for (int64_t i = 0; i < n; i++) {
    int32_t first = from->sum[i][0], second = from->sum[i][1];
    c->scale[at / 32 + i] = from->scale[i];
    if (c->group == 32) {
      c->sum[at / 32 + i] = from->scale[i] * (float)(first + second);
      c->start[at / 32 + i] = -c->zero * (first + second);
      continue;
    }
    float *sum = c->sum + at / 16 + 2 * i;
    int32_t *start = c->start + at / 16 + 2 * i;
    sum[0] = from->scale[i] * (float)first, sum[1] = from->scale[i] * (float)second;
    start[0] = -c->zero * first, start[1] = -c->zero * second;
  }
}

/* Elements [k, k + n) of row `row`, in whole groups, at most GROUPS_AT_ONCE of them. x: the row, NULL: zeros. */
static inline void code_part(const float *x, int64_t row, int64_t k, int64_t n, coded *c) {
  coded_groups g;
  int64_t there = !x || k >= c->k ? 0 : c->k - k < n ? c->k - k : n;
  if (there == 32 * GROUPS_AT_ONCE) {
    code_groups(x + k, c->power, &g);
  } else {
    float part[32 * GROUPS_AT_ONCE] = { 0 };
    if (there) memcpy(part, x + k, (size_t)there * sizeof *part);
    code_groups(part, c->power, &g);
  }
  put_groups(&g, n / 32, coded_at(c, row, k), c);
}

/* Rows [begin, end) of x [rows][k], beyond which are rows of zeros; block after block, because that is how they lie. */
static inline void code_x(const float *restrict x, int64_t rows, int64_t begin, int64_t end, coded *c) {
  enum { PART = 32 * GROUPS_AT_ONCE, SOON_ROWS = 3 };
  int64_t whole = c->lines ? LINE : c->eights ? EIGHT : 1, stop = (c->k + whole - 1) / whole * whole;
  for (int64_t k0 = 0; k0 < stop; k0 += c->block)
    for (int64_t row = begin; row < end; row++) {
      int64_t k1 = k0 + c->block < stop ? k0 + c->block : stop;
      for (int64_t k = k0; k < k1; k += PART) {
        /* Rows lie too far apart for the processor to see what comes next. */
        for (int64_t i = 0; i < PART && row + SOON_ROWS < rows; i += 16)
          __builtin_prefetch(x + (row + SOON_ROWS) * c->k + k + i, 0, 3);
        code_part(row < rows ? x + row * c->k : NULL, row, k, k1 - k < PART ? k1 - k : PART, c);
      }
    }
}

#endif
