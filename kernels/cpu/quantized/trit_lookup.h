/* Blocks of matmul_trit with the permutations of bytes of AVX-512 VBMI: a byte of trits is looked up in the sums of its
 * five columns, 64 rows at a time, in each of the three bytes of these. Included by trit_blocks.h. */

#pragma GCC push_options
#pragma GCC target("avx512vbmi")
#include "byte_lookup.h"

/* The place of a magnitude, whose digits in base 3 are its trits plus 1, in parts: three digits and two. */
#define PLACE(m) (LARGEST + ((m) < LARGEST ? (m) : LARGEST))
#define BY_4(f, m) f(m), f((m) + 1), f((m) + 2), f((m) + 3)
#define BY_16(f, m) BY_4(f, m), BY_4(f, (m) + 4), BY_4(f, (m) + 8), BY_4(f, (m) + 12)
#define BY_64(f, m) BY_16(f, m), BY_16(f, (m) + 16), BY_16(f, (m) + 32), BY_16(f, (m) + 48)
#define THREE(m) PLACE(m) % 27
#define TWO(m) PLACE(m) / 27
#define TRIT_0(s) (s) % 3 - 1
#define TRIT_1(s) (s) / 3 % 3 - 1
#define TRIT_2(s) (s) / 9 % 3 - 1
static const int32_t three_of[SIGN] __attribute__((aligned(64))) = { BY_64(THREE, 0), BY_64(THREE, 64) };
static const int32_t two_of[SIGN] __attribute__((aligned(64))) = { BY_64(TWO, 0), BY_64(TWO, 64) };
static const int32_t trit_of[3][32] __attribute__((aligned(64))) = { { BY_16(TRIT_0, 0), BY_16(TRIT_0, 16) },
                                                                     { BY_16(TRIT_1, 0), BY_16(TRIT_1, 16) },
                                                                     { BY_16(TRIT_2, 0), BY_16(TRIT_2, 16) } };
static inline __m512i times_trits(int digit, int from, int32_t q) {
  return _mm512_mullo_epi32(load(trit_of[digit] + from), _mm512_set1_epi32(q));
}

/* For each byte of a group: the sums that magnitudes stand for, plus 2^23, by their parts [PARTS][SIGN]. */
static void sums_of(const int32_t *q, int64_t bytes, void *to) {
  uint8_t *out = to;
  for (int64_t b = 0; b < bytes; b++, q += TRITS) {
    __m512i three[2];
    for (int i = 0; i < 2; i++) {
      const __m512i middle = _mm512_add_epi32(times_trits(0, 16 * i, q[0]), _mm512_set1_epi32(1 << 23));
      three[i] = _mm512_add_epi32(middle, _mm512_add_epi32(times_trits(1, 16 * i, q[1]), times_trits(2, 16 * i, q[2])));
    }
    const __m512i two = _mm512_add_epi32(times_trits(0, 0, q[3]), times_trits(1, 0, q[4]));
    for (int m = 0; m < SIGN; m += BLOCK) {
      __m512i u[4];
      for (int i = 0; i < 4; i++)
        u[i] = _mm512_add_epi32(_mm512_permutex2var_epi32(three[0], load(three_of + m + 16 * i), three[1]),
                                _mm512_permutexvar_epi32(load(two_of + m + 16 * i), two));
      split_integers(u, out + m, SIGN);
    }
    out += PARTS * SIGN;
  }
}

/* negative: how many of the bytes were so, as bytes. */
static inline __attribute__((always_inline)) void add_codes(byte_sums *s, __m512i *negative, __m512i code,
                                                            const __m512i (*sum)[2]) {
  const __m512i ones = _mm512_set1_epi8(-1);
  const __mmask64 sign = _mm512_movepi8_mask(code);
  *negative = _mm512_mask_sub_epi8(*negative, sign, *negative, ones);
#pragma GCC unroll 3
  for (int part = 0; part < PARTS; part++) {
    /* The index of a permutation has seven bits. -u is ~u + 1, and 2^24 is as good as 0. */
    const __m512i v = _mm512_permutex2var_epi8(sum[part][0], code, sum[part][1]);
    add_part(s, part, _mm512_mask_sub_epi8(v, sign, ones, v));
  }
}

/* `planes` planes (1 or 2, a constant) of a block and a row of x. step: to the same of the next byte. */
static inline __attribute__((always_inline)) void planes_of(const uint8_t *code, const uint8_t *later, int64_t bytes,
                                                            int64_t step, const int planes, const uint8_t *sums,
                                                            const float *scale, float factor, float *y) {
  byte_sums s[2];
  __m512i negative[2];
  for (int p = 0; p < planes; p++) {
    negative[p] = _mm512_setzero_si512();
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++) s[p].both[part] = s[p].odd[part] = negative[p];
  }
  for (int64_t b = 0; b < bytes; b++, code += step, later += step, sums += PARTS * SIGN) {
    __m512i sum[PARTS][2];
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++) {
      sum[part][0] = load(sums + part * SIGN), sum[part][1] = load(sums + part * SIGN + BLOCK);
      __asm__("" : "+v"(sum[part][0]), "+v"(sum[part][1])); /* kept for both planes */
    }
#pragma GCC unroll 2
    for (int p = 0; p < planes; p++) {
      __builtin_prefetch(later + p * BLOCK, 0, 2); /* to the second cache: tables and sums fill the first */
      add_codes(s + p, negative + p, load(code + p * BLOCK), (const __m512i(*)[2])sum);
    }
  }
  __m512 part[2][4];
  for (int p = 0; p < planes; p++) {
    s[p].both[0] = _mm512_add_epi16(s[p].both[0], negative[p]);
    s[p].odd[0] = _mm512_add_epi16(s[p].odd[0], _mm512_srli_epi16(negative[p], 8));
    in_order(s + p, (int32_t)bytes << 23, part[p]);
  }
  for (int i = 0; i < 4; i++) {
    __m512 all = _mm512_mul_ps(part[0][i], _mm512_loadu_ps(scale + 16 * i));
    if (planes == 2) all = _mm512_fmadd_ps(part[1][i], _mm512_loadu_ps(scale + BLOCK + 16 * i), all);
    _mm512_storeu_ps(y + 16 * i, _mm512_fmadd_ps(all, _mm512_set1_ps(factor), _mm512_loadu_ps(y + 16 * i)));
  }
}

/* A row of x after the other, whose tables stay in the first cache for all blocks. */
static void multiply_lookup(const block_job *b, int64_t g, int64_t first, int64_t last, const float *scale, float *y) {
  const job *j = b->j;
  const int64_t step = j->planes * BLOCK;
  for (int64_t l = 0; l < b->lines; l++)
    for (int64_t block = first; block < last; block++, y += BLOCK) {
      const int64_t at = l * j->groups + g;
      const uint8_t *sums = (const uint8_t *)b->x + (size_t)at * b->room, *code = codes_of(j, g, block);
      const uint8_t *later = l ? code : later_codes(b, g, block, first, last);
      const float *s = scale + (block - first) * step;
      int64_t p = 0;
      for (; p + 2 <= j->planes; p += 2)
        planes_of(code + p * BLOCK, later + p * BLOCK, j->bytes, step, 2, sums, s + p * BLOCK, b->factor[at], y);
      if (p < j->planes)
        planes_of(code + p * BLOCK, later + p * BLOCK, j->bytes, step, 1, sums, s + p * BLOCK, b->factor[at], y);
    }
}

static const method by_lookup = {
  .neighbours = TRITS, .most = MOST, .room = PARTS * SIGN, .turn = sums_of, .multiply = multiply_lookup
};
#pragma GCC pop_options
