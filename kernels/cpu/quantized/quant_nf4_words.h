/* Few rows of x as words times W in NF4. Included by quant_nf4.h, once with NF4_ADD(dot, a, b) of AVX-512, which adds
 * the products of pairs of words to dot, and once of its integer dot products; NF4(name) names the functions. */

/* Adds the products of 8 blocks with `rows` rows of x; past the end of a row of W, x is 0. */
static inline __attribute__((always_inline)) void NF4(nf4_line)(const int rows, const char *w, __m512i level,
                                                                float scale, const int16_t *x, const float *x_scale,
                                                                __m512 *sum) {
  const __m512i second = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  uint64_t magnitudes = 0;
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) magnitudes |= (uint64_t)(uint8_t)w[33 * i] << 8 * i;
  __m256 magnitude = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)magnitudes)));
  magnitude = _mm256_mul_ps(_mm256_mul_ps(magnitude, magnitude), _mm256_set1_ps(scale * (1.0f / NF4_MOST)));
  __m512 factor[FEW];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
    factor[r] = _mm512_castps256_ps512(_mm256_mul_ps(magnitude, _mm256_loadu_ps(x_scale + NF4_BLOCKS * r)));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m256i *q = (const __m256i *)(const void *)(w + 66 * i + 1);
    const __m256i *next = (const __m256i *)(const void *)(w + 66 * i + 34);
    const __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(q)), _mm256_loadu_si256(next), 1);
    const __m512i number[4] = { _mm512_permutexvar_epi16(v, level),
                                _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), level),
                                _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), level),
                                _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), level) };
    const __m512i both = _mm512_add_epi32(second, _mm512_set1_epi32(2 * i));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      const int16_t *at = x + LINE * r + 128 * i;
      __m512i dot = _mm512_madd_epi16(number[0], _mm512_loadu_si512(at));
#pragma GCC unroll 3
      for (int b = 1; b < 4; b++) dot = NF4_ADD(dot, number[b], _mm512_loadu_si512(at + 32 * b));
      sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(both, factor[r]), sum[r]);
    }
  }
}

/* sum[r]: the product of elements [k0, k0 + length) of row j of W with row r of x. */
static inline __attribute__((always_inline)) void NF4(nf4_product)(const product *p, int64_t j, int64_t k0,
                                                                   int64_t length, int64_t ahead, const int rows,
                                                                   __m512 *sum) {
  const char *row = p->w + j * p->w_row, *end = p->w + p->n * p->w_row;
  const char *w = row + ty_nf4_head(p->columns) + k0 / 64 * 33;
  const int64_t bytes = NF4_BLOCKS * 33;
  const int16_t *x = p->words + k0 * rows;
  const float *x_scale = p->word_scale + k0 / 64 * rows;
  const __m512i level = nf4_levels();
  char rest[NF4_BLOCKS * 33];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_ps();
  for (int64_t k = k0; k < k0 + length; k += LINE, w += bytes, x += LINE * rows, x_scale += NF4_BLOCKS * rows) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(w + b + ahead);
    float scale;
    memcpy(&scale, row + k / (64 * TY_NF4_GROUP) * (int64_t)sizeof scale, sizeof scale);
    if (w + bytes > end) {
      memset(rest, 0, sizeof rest);
      w = memcpy(rest, w, (size_t)(end - w));
    }
    NF4(nf4_line)(rows, w, level, scale, x, x_scale, sum);
  }
}

static inline __attribute__((always_inline)) void NF4(nf4_products)(const product *p, int64_t j0, int64_t j1,
                                                                    int64_t k0, int64_t length, int64_t ahead,
                                                                    const int rows) {
  for (int64_t j = j0; j < j1; j += PUT) {
    __m512 sums[FEW][PUT];
    const int64_t n = j1 - j < PUT ? j1 - j : PUT;
    for (int64_t i = 0; i < n; i++) {
      __m512 sum[FEW];
      NF4(nf4_product)(p, j + i, k0, length, ahead, rows, sum);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) sums[r][i] = sum[r];
    }
    put(p, rows, j, n, k0 == 0, sums);
  }
}

/* Rows [begin, end) of W, as few_rows. */
static void NF4(nf4_rows)(void *context, int64_t begin, int64_t end) {
  const product *p = context;
  int64_t k = p->columns, part = part_of(p, sizeof(int16_t)), ahead = part < k ? p->w_row : AHEAD;
  for (int64_t j0 = begin; j0 < end && !ty_interrupted; j0 += GROUP) {
    int64_t j1 = j0 + GROUP < end ? j0 + GROUP : end;
    for (int64_t k0 = 0; k0 < k; k0 += part) {
      const int64_t length = k - k0 < part ? k - k0 : part;
#define ROWS(n) \
  case n: NF4(nf4_products)(p, j0, j1, k0, length, ahead, n); break;
      switch (p->rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
    }
  }
}
#undef NF4_ADD
#undef NF4
