/* y = x W' for few rows of x and W in NF4, in f32: codes are decoded in registers, or in the first cache, and multiplied
 * with all rows of x. Included by quant_linear.c. */

#if defined(__AVX512F__)
/* In which order the elements of two blocks are multiplied: those that the low nibbles of bytes 0, 4, 8 ... of the first
 * block and of the second stand for, those of the high nibbles, then the same for bytes 1, 5, 9 ... and so on: the
 * number that looks a level up is what the 32 bits from there on have in their lowest four. */
static void nf4_order(void *context, int64_t begin, int64_t end) {
  const product *p = context;
  for (int64_t at = begin; at < end; at++) {
    int64_t line = at / p->rows, row = at % p->rows, k0 = line * LINE;
    float *out = p->ordered + at * LINE;
    if (k0 + LINE > p->columns) memset(out, 0, LINE * sizeof *out);
    for (int64_t i = 0; i < LINE / 32 && k0 + 32 * i < p->columns; i++) { /* i: block, low or high */
      const float *from = p->plain + row * p->columns + k0 + 32 * i;
      ty_transpose_uint32_t((uint32_t *)(void *)(out + i / 4 * 128 + i % 2 * 16 + i / 2 % 2 * 8), 32,
                            (const uint32_t *)(const void *)from, 4, 4, 8);
    }
  }
}

/* Adds the products of 8 blocks with `rows` rows of x; past the end of a row of W, x is 0. */
static inline __attribute__((always_inline)) void nf4_line(const int rows, const char *w, float scale, const float *x,
                                                           __m512 *sum) {
  static const float levels[16] = { TY_NF4_LEVELS };
  const __m512 level = _mm512_loadu_ps(levels);
  const __m512i second = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  uint64_t magnitudes = 0;
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) magnitudes |= (uint64_t)(uint8_t)w[33 * i] << 8 * i;
  __m512 magnitude = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_cvtsi64_si128((long long)magnitudes)));
  magnitude = _mm512_mul_ps(_mm512_mul_ps(magnitude, magnitude), _mm512_set1_ps(scale));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512 low[FEW], high[FEW];
#pragma GCC unroll 4
    for (int b = 0; b < 4; b++) {
      const char *q = w + 66 * i + 1 + b;
      __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)q));
      v = _mm512_inserti64x4(v, _mm256_loadu_si256((const __m256i *)(const void *)(q + 33)), 1);
      __m512 a = _mm512_permutexvar_ps(v, level), c = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), level);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        const float *at = x + LINE * r + 128 * i + 32 * b;
        __m512 xa = _mm512_loadu_ps(at), xc = _mm512_loadu_ps(at + 16);
        low[r] = b ? _mm512_fmadd_ps(a, xa, low[r]) : _mm512_mul_ps(a, xa);
        if (rows == 1) high[r] = b ? _mm512_fmadd_ps(c, xc, high[r]) : _mm512_mul_ps(c, xc);
        else low[r] = _mm512_fmadd_ps(c, xc, low[r]);
      }
    }
    __m512 both = _mm512_permutexvar_ps(_mm512_add_epi32(second, _mm512_set1_epi32(2 * i)), magnitude);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      if (rows == 1) low[r] = _mm512_add_ps(low[r], high[r]); /* one chain would wait for itself */
      sum[r] = _mm512_fmadd_ps(low[r], both, sum[r]);
    }
  }
}

/* sum[r]: the product of elements [k0, k0 + length) of row j of W with row r of x. */
static inline __attribute__((always_inline)) void nf4_product(const product *p, int64_t j, int64_t k0, int64_t length,
                                                              int64_t ahead, const int rows, __m512 *sum) {
  const char *row = p->w + j * p->w_row, *end = p->w + p->n * p->w_row;
  const char *w = row + ty_nf4_head(p->columns) + k0 / 64 * 33;
  const int64_t bytes = LINE / 64 * 33;
  const float *x = p->ordered + k0 * rows;
  char rest[LINE / 64 * 33 + 3];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_ps();
  for (int64_t k = k0; k < k0 + length; k += LINE, w += bytes, x += LINE * rows) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(w + b + ahead);
    float scale;
    memcpy(&scale, row + k / (64 * TY_NF4_GROUP) * (int64_t)sizeof scale, sizeof scale);
    if (w + sizeof rest > end) { /* loads reach three bytes past a block */
      memset(rest, 0, sizeof rest);
      w = memcpy(rest, w, (size_t)(end - w < bytes ? end - w : bytes));
    }
    nf4_line(rows, w, scale, x, sum);
  }
}

static inline __attribute__((always_inline)) void nf4_products(const product *p, int64_t j0, int64_t j1, int64_t k0,
                                                               int64_t length, int64_t ahead, const int rows) {
  for (int64_t j = j0; j < j1; j += PUT) {
    __m512 sums[FEW][PUT];
    const int64_t n = j1 - j < PUT ? j1 - j : PUT;
    for (int64_t i = 0; i < n; i++) {
      __m512 sum[FEW];
      nf4_product(p, j + i, k0, length, ahead, rows, sum);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) sums[r][i] = sum[r];
    }
    put(p, rows, j, n, k0 == 0, sums);
  }
}

/* Rows [begin, end) of W, as few_rows. */
static void nf4_rows(void *context, int64_t begin, int64_t end) {
  const product *p = context;
  int64_t k = p->columns, part = part_of(p, sizeof(float)), ahead = part < k ? p->w_row : AHEAD;
  for (int64_t j0 = begin; j0 < end && !ty_interrupted; j0 += GROUP) {
    int64_t j1 = j0 + GROUP < end ? j0 + GROUP : end;
    for (int64_t k0 = 0; k0 < k; k0 += part) {
      const int64_t length = k - k0 < part ? k - k0 : part;
#define ROWS(n) \
  case n: nf4_products(p, j0, j1, k0, length, ahead, n); break;
      switch (p->rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
    }
  }
}

static bool by_nf4(product *p) {
  int64_t lines = p->rows * ((p->columns + LINE - 1) / LINE);
  size_t bytes = (size_t)lines * LINE * sizeof(float);
  float *ordered = ty_scratch_alloc(bytes);
  if (!ordered) return false;
  p->ordered = ordered;
  ty_parallel_for(lines, 32, nf4_order, p);
  ty_parallel_for(p->n, 1 + 65536 / p->columns / p->rows, nf4_rows, p);
  ty_scratch_free(ordered, bytes);
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
