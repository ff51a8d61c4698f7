/* y = x W' for few rows of x and W in NF4. With AVX-512 levels are looked up as words, and x is rounded to words with
 * a scale for each block of 64: an error of at most 2^-15 of the largest |x| of a block, and of the largest |w|.
 * Otherwise in f32, decoded in the first cache. Included by quant_linear.c. */

#if defined(__AVX512F__)
enum {
  NF4_MOST = 16383, /* what stands for the largest magnitude: a sum of 8 products stays below 2^31 */
  NF4_BLOCKS = LINE / 64
};

/* Rows of x in the order in which they are multiplied: of two blocks, those elements that the lowest four bits of the
 * words of W stand for, those of bits 4 to 7, and so on. Lines [begin, end). */
static void nf4_code(void *context, int64_t begin, int64_t end) {
  const product *p = context;
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  for (int64_t at = begin; at < end; at++) {
    int64_t line = at / p->rows, row = at % p->rows;
    for (int64_t i = 0; i < NF4_BLOCKS; i++) {
      const int64_t k = line * LINE + 64 * i;
      int16_t *to = p->words + at * LINE + i / 2 * 128 + i % 2 * 16;
      __m512 x[4];
      for (int j = 0; j < 4; j++)
        x[j] = k < p->columns ? _mm512_loadu_ps(p->plain + row * p->columns + k + 16 * j) : _mm512_setzero_ps();
      __m512i bits = _mm512_setzero_si512(); /* as integers, for which infinity and NaN are larger than all numbers */
      for (int j = 0; j < 4; j++) bits = _mm512_max_epi32(bits, _mm512_and_si512(_mm512_castps_si512(x[j]), no_sign));
      const int32_t largest = _mm512_reduce_max_epi32(bits);
      const float most = ty_from_bits_f32((uint32_t)largest), scale = most <= TOO_SMALL ? 1 : most / NF4_MOST;
      const bool bad = largest >= 0x7f800000;
      p->word_scale[at * NF4_BLOCKS + i] = bad ? NAN : scale;
      const __m512 inverse = _mm512_set1_ps(bad || most <= TOO_SMALL ? 0 : 1 / scale);
      for (int j = 0; j < 4; j += 2) { /* low nibbles, high nibbles */
        const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(x[j], inverse));
        const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(x[j + 1], inverse));
        for (int odd = 0; odd < 2; odd++) {
          const __m512i place = _mm512_add_epi32(even, _mm512_set1_epi32(odd));
          _mm256_storeu_si256((__m256i *)(void *)(to + 64 * odd + 16 * j),
                              _mm512_cvtepi32_epi16(_mm512_permutex2var_epi32(a, place, b)));
        }
      }
    }
  }
}

/* The levels times NF4_MOST, by the lowest four bits of five. */
static inline __m512i nf4_levels(void) {
  static const float levels[16] = { TY_NF4_LEVELS };
  const __m512 of = _mm512_mul_ps(_mm512_loadu_ps(levels), _mm512_set1_ps(NF4_MOST));
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(of));
  return _mm512_inserti64x4(_mm512_castsi256_si512(words), words, 1);
}

#define NF4(name) name##_plain
#define NF4_ADD(dot, a, b) _mm512_add_epi32(dot, _mm512_madd_epi16(a, b))
#include "quant_nf4_words.h"
#pragma GCC push_options
#pragma GCC target("avx512vnni")
#define NF4(name) name##_vnni
#define NF4_ADD(dot, a, b) _mm512_dpwssd_epi32(dot, a, b)
#include "quant_nf4_words.h"
#pragma GCC pop_options

static bool by_nf4(product *p) {
  int64_t lines = p->rows * ((p->columns + LINE - 1) / LINE);
  size_t bytes = (size_t)lines * (LINE * sizeof(int16_t) + NF4_BLOCKS * sizeof(float));
  p->words = ty_scratch_alloc(bytes);
  if (!p->words) return false;
  p->word_scale = (float *)(void *)(p->words + lines * LINE);
  ty_parallel_for(lines, 32, nf4_code, p);
  ty_parallel_for(p->n, 1 + 65536 / p->columns / p->rows, has_vnni() ? nf4_rows_vnni : nf4_rows_plain, p);
  ty_scratch_free(p->words, bytes);
  return true;
}
#else
static inline void nf4_dots(const char *row, int64_t k, const float *x, const int rows, float *out) {
  enum { PART = 512, LANES = 16 };
  float w[PART], sum[4][LANES] = { { 0 } };
  for (int64_t at = 0; at < k; at += PART) {
    int64_t n = k - at < PART ? k - at : PART;
    TY_KERNEL(decode_row)(TY_NF4, row, k, at, at + n, w);
    for (int r = 0; r < rows; r++)
      for (int64_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++) sum[r][l] += w[i + l] * x[r * k + at + i + l];
  }
  for (int r = 0; r < rows; r++) {
    out[r] = 0;
    for (int l = 0; l < LANES; l++) out[r] += sum[r][l];
  }
}

static void nf4_rows(void *context, int64_t begin, int64_t end) {
  const product *p = context;
  int64_t k = p->columns;
  for (int64_t j = begin; j < end && !ty_interrupted; j++) {
    const char *row = p->w + j * p->w_row;
    float y[FEW];
    for (int64_t r = 0; r < p->rows; r += 4) {
      const float *x = p->plain + r * k;
      switch (p->rows - r) {
        case 1: nf4_dots(row, k, x, 1, y + r); break;
        case 2: nf4_dots(row, k, x, 2, y + r); break;
        case 3: nf4_dots(row, k, x, 3, y + r); break;
        default: nf4_dots(row, k, x, 4, y + r);
      }
    }
    for (int64_t r = 0; r < p->rows; r++) p->y[r * p->n + j] = y[r] + (p->bias ? p->bias[j] : 0);
  }
}

static bool by_nf4(product *p) {
  ty_parallel_for(p->n, 1 + 65536 / p->columns / p->rows, nf4_rows, p);
  return true;
}
#endif
