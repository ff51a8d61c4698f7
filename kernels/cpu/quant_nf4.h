/* y = x W' for few rows of x and W in NF4: a row of W is decoded in registers, or in the first cache, and multiplied
 * with all rows of x in f32. Included by quant_linear.c. */

#if defined(__AVX512F__)
static inline __m512 nf4_levels(__m128i q, __m512 level) {
  return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(q), level);
}

/* One row of W with `rows` rows of x, which lie k apart. */
static inline __attribute__((always_inline)) void nf4_dots(const char *row, int64_t k, const float *x, const int rows,
                                                           float *out) {
  static const float levels[16] = { TY_NF4_LEVELS };
  const __m512 level = _mm512_loadu_ps(levels);
  const ty_nf4 *b = (const ty_nf4 *)(const void *)(row + ty_nf4_head(k));
  __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0, t0 = s0, t1 = s0, t2 = s0, t3 = s0;
  for (int64_t i = 0; i < k / 64; i++, b++, x += 64) {
    __builtin_prefetch((const char *)b + AHEAD);
    __m512 absmax = _mm512_set1_ps(ty_nf4_absmax(row, i, b));
    __m128i q0 = _mm_loadu_si128((const __m128i *)b->q), q1 = _mm_loadu_si128((const __m128i *)(b->q + 16));
    /* only the low four bits of an index count */
    __m512 w0 = nf4_levels(q0, level), w1 = nf4_levels(q1, level);
    __m512 w2 = nf4_levels(_mm_srli_epi16(q0, 4), level), w3 = nf4_levels(_mm_srli_epi16(q1, 4), level);
#define ROW(r)                                                                                             \
  if (rows > r) {                                                                                          \
    const float *p = x + r * k;                                                                            \
    __m512 low = _mm512_mul_ps(w0, _mm512_loadu_ps(p)), high = _mm512_mul_ps(w2, _mm512_loadu_ps(p + 32)); \
    low = _mm512_fmadd_ps(w1, _mm512_loadu_ps(p + 16), low);                                               \
    high = _mm512_fmadd_ps(w3, _mm512_loadu_ps(p + 48), high);                                             \
    s##r = _mm512_fmadd_ps(low, absmax, s##r);                                                             \
    t##r = _mm512_fmadd_ps(high, absmax, t##r);                                                            \
  }
    ROW(0) ROW(1) ROW(2) ROW(3)
#undef ROW
  }
  out[0] = _mm512_reduce_add_ps(_mm512_add_ps(s0, t0));
  if (rows > 1) out[1] = _mm512_reduce_add_ps(_mm512_add_ps(s1, t1));
  if (rows > 2) out[2] = _mm512_reduce_add_ps(_mm512_add_ps(s2, t2));
  if (rows > 3) out[3] = _mm512_reduce_add_ps(_mm512_add_ps(s3, t3));
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
#endif

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
