/* Blocks of matmul_trit with AVX2: the digits of 32 bytes, 0 to 2, are found in tables of 16 bytes and multiplied with
 * the bytes of two neighbours in x. Included by trit_blocks.h. */
#include <immintrin.h>

enum { PAIRS = 125 /* of columns in a group; of more the sums would not fit into 16 bits */ };

/* Two bytes are five pairs of numbers, the first in the lower half; a trit is its digit less 1: `sum` is taken away. */
typedef struct paired {
  int16_t sum[PARTS];
  int32_t pair[PAIRS][PARTS]; /* twice each */
} paired;

static void pairs_of(const int32_t *q, int64_t bytes, void *to) {
  paired *t = to;
  memset(t->sum, 0, sizeof t->sum);
  for (int64_t i = 0; i < (bytes + 1) / 2 * TRITS; i++) {
    int32_t a = q[2 * i], b = q[2 * i + 1];
    for (int part = 0; part < PARTS; part++) {
      const int8_t low = (int8_t)a, high = (int8_t)b;
      t->pair[i][part] = (int32_t)((uint32_t)(uint8_t)low * 0x10001u + (uint32_t)(uint8_t)high * 0x1000100u);
      t->sum[part] = (int16_t)(t->sum[part] + low + high);
      a = (a - low) >> 8, b = (b - high) >> 8;
    }
  }
}

static inline __m256i table(const int8_t *of) {
  return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(const void *)of));
}

/* The five digits, in base 3, of the trits plus 1 of 32 bytes: two are those of the rest of a division by nine, three of
 * its result, which is below 27. _mm256_shuffle_epi8 gives 0 where an index has its highest bit. */
static inline __attribute__((always_inline)) void digits(__m256i v, __m256i digit[TRITS]) {
  static const int8_t first[16] __attribute__((aligned(16))) = { 0, 1, 2, 0, 1, 2, 0, 1, 2 };
  static const int8_t second[16] __attribute__((aligned(16))) = { 0, 0, 0, 1, 1, 1, 2, 2, 2 };
  static const int8_t low[3][16] __attribute__((aligned(16))) = { { 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0 },
                                                                  { 0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 1, 1, 1, 2 },
                                                                  { 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1 } };
  static const int8_t high[3][16] __attribute__((aligned(16))) = { { 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2 },
                                                                   { 2, 2, 0, 0, 0, 1, 1, 1, 2, 2, 2 },
                                                                   { 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2 } };
  const __m256i size = _mm256_min_epu8(_mm256_and_si256(v, _mm256_set1_epi8(SIGN - 1)), _mm256_set1_epi8(LARGEST));
  v = _mm256_add_epi8(_mm256_sign_epi8(size, _mm256_or_si256(v, _mm256_set1_epi8(1))), _mm256_set1_epi8(LARGEST));
  const __m256i ninth = _mm256_set1_epi16(7282); /* 2^16 / 9, rounded up: exact below 2^8 */
  const __m256i even = _mm256_mulhi_epu16(_mm256_and_si256(v, _mm256_set1_epi16(255)), ninth);
  const __m256i odd = _mm256_mulhi_epu16(_mm256_srli_epi16(v, 8), ninth);
  const __m256i h = _mm256_or_si256(even, _mm256_slli_epi16(odd, 8));
  const __m256i rest = _mm256_sub_epi8(v, _mm256_add_epi8(h, _mm256_slli_epi16(h, 3)));
  const __m256i below = _mm256_add_epi8(h, _mm256_set1_epi8(0x70)), above = _mm256_sub_epi8(h, _mm256_set1_epi8(16));
  digit[0] = _mm256_shuffle_epi8(table(first), rest);
  digit[1] = _mm256_shuffle_epi8(table(second), rest);
#pragma GCC unroll 3
  for (int i = 0; i < 3; i++)
    digit[2 + i] = _mm256_or_si256(_mm256_shuffle_epi8(table(low[i]), below),
                                   _mm256_shuffle_epi8(table(high[i]), above));
}

/* 32 rows of a plane: digits of neighbours beside each other, those of rows 0 to 7 and 16 to 23 and of the rest. */
static void digit_pairs(const uint8_t *code, int64_t bytes, int64_t step, __m256i (*to)[2]) {
  for (int64_t b = 0; b < bytes; b += 2, to += TRITS) {
    __m256i d[2 * TRITS];
    const uint8_t *second = code + (b + 1 < bytes ? b + 1 : b) * step; /* whose numbers are zeros */
    digits(_mm256_loadu_si256((const __m256i *)(const void *)(code + b * step)), d);
    digits(_mm256_loadu_si256((const __m256i *)(const void *)second), d + TRITS);
#pragma GCC unroll 5
    for (int i = 0; i < TRITS; i++) {
      to[i][0] = _mm256_unpacklo_epi8(d[2 * i], d[2 * i + 1]);
      to[i][1] = _mm256_unpackhi_epi8(d[2 * i], d[2 * i + 1]);
    }
  }
}

/* Adds sums of three parts, as words, to y [16 k + 0 ... 7] for k of 0 and 1. */
static inline void add_words(const __m256i part[PARTS], const float *scale, __m256 factor, float *y) {
  const __m256i zero = _mm256_setzero_si256(), place = _mm256_set1_epi32(256 << 16 | 1);
  const __m256i low = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(part[0], part[1]), place),
                                       _mm256_unpacklo_epi16(zero, part[2]));
  const __m256i high = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(part[0], part[1]), place),
                                        _mm256_unpackhi_epi16(zero, part[2]));
  const __m256i row[2] = { _mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31) };
  for (int k = 0; k < 2; k++) {
    const __m256 s = _mm256_mul_ps(_mm256_loadu_ps(scale + 16 * k), factor);
    _mm256_storeu_ps(y + 16 * k, _mm256_fmadd_ps(_mm256_cvtepi32_ps(row[k]), s, _mm256_loadu_ps(y + 16 * k)));
  }
}

/* The digits are found once for all rows of x. */
static void multiply_digits(const block_job *b, int64_t g, int64_t first, int64_t last, const float *scale, float *y) {
  const job *j = b->j;
  const int64_t pairs = (j->bytes + 1) / 2 * TRITS, step = j->planes * BLOCK, y_row = (last - first) * BLOCK;
  __m256i digit[PAIRS][2];
  for (int64_t block = first; block < last; block++, scale += step, y += BLOCK) {
    const uint8_t *code = codes_of(j, g, block), *later = later_codes(b, g, block, first, last);
    for (int64_t at = 0; at < j->bytes * step; at += LINE) __builtin_prefetch(later + at, 0, 2);
    for (int64_t at = 0; at < step; at += BLOCK / 2) {
      digit_pairs(code + at, j->bytes, step, digit);
      for (int64_t l = 0; l < b->lines; l++) {
        const paired *x = (const void *)(b->x + (size_t)(l * j->groups + g) * b->room);
        __m256i sum[2][PARTS];
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; part++)
          sum[0][part] = sum[1][part] = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_set1_epi16(x->sum[part]));
        for (int64_t i = 0; i < pairs; i++)
#pragma GCC unroll 3
          for (int part = 0; part < PARTS; part++) {
            const __m256i q = _mm256_set1_epi32(x->pair[i][part]);
            sum[0][part] = _mm256_add_epi16(sum[0][part], _mm256_maddubs_epi16(digit[i][0], q));
            sum[1][part] = _mm256_add_epi16(sum[1][part], _mm256_maddubs_epi16(digit[i][1], q));
          }
        const __m256 factor = _mm256_set1_ps(b->factor[l * j->groups + g]);
        float *to = y + l * y_row + at % BLOCK;
        add_words(sum[0], scale + at, factor, to);
        add_words(sum[1], scale + at + 8, factor, to + 8);
      }
    }
  }
}

static const method by_digits = { .neighbours = 1,
                                  .most = 2 * (PAIRS / TRITS),
                                  .room = sizeof(int32_t) * (PARTS * TRITS / 2 + 2),
                                  .turn = pairs_of,
                                  .multiply = multiply_digits };
