/* 1x1 convolutions of bf16 by the CPU's instruction for pairs of them (AVX512_BF16): two neighbouring channels at a time,
 * 32 positions by MR results. */
#include <string.h>

#include "conv.h"

enum { LANES = 32, MR = 12 }; /* positions of a block; results that share what is loaded of x */

#if defined(__AVX512F__) && (__GNUC__ >= 10)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512bw")

typedef struct job {
  const conv_shape *s;
  const uint16_t *x;
  const uint32_t *weight; /* [blocks of MR results, pairs, MR] */
  const float *bias;
  uint16_t *y;
  int64_t area, pairs, blocks;
  size_t bytes; /* of the pairs of a block of positions */
  bool failed;
} job;

/* Pairs of channels of 32 positions: those 8k .. 8k+3 and those 8k+4 .. 8k+7 of each 8. */
static void pack_positions(const job *j, const uint16_t *x, __mmask32 mask, __m512i *to) {
  const int64_t c = j->s->c;
  for (int64_t i = 0; i < j->pairs; i++) {
    const uint16_t *line = x + 2 * i * j->area;
    __m512i a = _mm512_maskz_loadu_epi16(mask, line);
    __m512i b = 2 * i + 1 < c ? _mm512_maskz_loadu_epi16(mask, line + j->area) : _mm512_setzero_si512();
    to[2 * i] = _mm512_unpacklo_epi16(a, b);
    to[2 * i + 1] = _mm512_unpackhi_epi16(a, b);
  }
}

static void store(uint16_t *y, __mmask32 mask, __m512 low, __m512 high) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  __m512 a = _mm512_permutex2var_ps(low, first, high), b = _mm512_permutex2var_ps(low, second, high);
  _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

static void multiply(const job *j, const __m512i *restrict x, int64_t block, uint16_t *y, __mmask32 mask) {
  const uint32_t *weight = j->weight + block * j->pairs * MR;
  __m512 low[MR], high[MR];
#pragma GCC unroll 12
  for (int r = 0; r < MR; r++) {
    int64_t o = block * MR + r;
    low[r] = high[r] = _mm512_set1_ps(j->bias && o < j->s->o ? j->bias[o] : 0);
  }
  for (int64_t i = 0; i < j->pairs; i++, weight += MR) {
    const __m512bh a = (__m512bh)x[2 * i], b = (__m512bh)x[2 * i + 1];
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
      const __m512bh w = (__m512bh)_mm512_set1_epi32((int)weight[r]);
      low[r] = _mm512_dpbf16_ps(low[r], w, a);
      high[r] = _mm512_dpbf16_ps(high[r], w, b);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < MR; r++)
    if (block * MR + r < j->s->o) store(y + (block * MR + r) * j->area, mask, low[r], high[r]);
}

/* Units are blocks of positions of an image. */
static void positions(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const int64_t strips = (j->area + LANES - 1) / LANES;
  char *scratch = ty_scratch_alloc(j->bytes + 64);
  if (!scratch) j->failed = true;
  __m512i *x = (__m512i *)(void *)(scratch + (64 - (uintptr_t)scratch % 64) % 64);
  for (int64_t u = begin; u < end && !j->failed && !ty_interrupted; u++) {
    int64_t n = u / strips, at = u % strips * LANES, count = j->area - at < LANES ? j->area - at : LANES;
    __mmask32 mask = count == LANES ? 0xffffffffu : (1u << count) - 1;
    pack_positions(j, j->x + n * j->s->c * j->area + at, mask, x);
    for (int64_t block = 0; block < j->blocks; block++) multiply(j, x, block, j->y + n * j->s->o * j->area + at, mask);
  }
  if (scratch) ty_scratch_free(scratch, j->bytes + 64);
}

static void pack_weight(const conv_shape *s, const uint16_t *w, bool turned, int64_t pairs, uint32_t *to) {
  for (int64_t o = 0; o < (s->o + MR - 1) / MR * MR; o++)
    for (int64_t i = 0; i < pairs; i++) {
      uint32_t pair = 0;
      for (int64_t q = 0; q < 2 && o < s->o && 2 * i + q < s->c; q++)
        pair |= (uint32_t)w[turned ? (2 * i + q) * s->o + o : o * s->c + 2 * i + q] << 16 * q;
      to[(o / MR * pairs + i) * MR + o % MR] = pair;
    }
}

bool TY_KERNEL(conv_half_pointwise)(const conv_shape *s, const uint16_t *x, const uint16_t *weight, bool turned,
                                    const float *bias, uint16_t *y) {
  job j = { .s = s, .x = x, .bias = bias, .y = y, .area = s->oh * s->ow, .pairs = (s->c + 1) / 2 };
  j.blocks = (s->o + MR - 1) / MR;
  j.bytes = 2 * sizeof(__m512i) * (size_t)j.pairs;
  size_t bytes = sizeof(uint32_t) * (size_t)(j.blocks * j.pairs * MR);
  uint32_t *packed = ty_scratch_alloc(bytes);
  if (!packed) return false;
  pack_weight(s, weight, turned, j.pairs, packed);
  j.weight = packed;
  int64_t strips = (j.area + LANES - 1) / LANES;
  ty_parallel_for(s->n * strips, 1 + 65536 / (LANES * s->o * s->c), positions, &j);
  ty_scratch_free(packed, bytes);
  return !j.failed;
}

#pragma GCC pop_options
#else
bool TY_KERNEL(conv_half_pointwise)(const conv_shape *s, const uint16_t *x, const uint16_t *weight, bool turned,
                                    const float *bias, uint16_t *y) {
  return false; /* not called: gemm_has_bf16() says no */
}
#endif
