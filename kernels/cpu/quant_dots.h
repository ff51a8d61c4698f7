/* y = x W' for few rows of x: each row of W is read once and multiplied with all rows of x. The product of a group is
 * (scale of w) (scale of x) (sum of code q - zero sum of q), and where there are mins less min (scale of x) (sum of q).
 * Included by quant_linear.c; VNNI: with the integer dot products of AVX-512, codes decoded in registers. */

#ifdef VNNI
/* The codes of 64 elements of a row, from a multiple of 64. */
static inline __attribute__((always_inline)) __m512i pair_codes(const ty_dtype dtype, const char *row, int64_t pair) {
  const __m512i low4 = _mm512_set1_epi8(15), high2 = _mm512_set1_epi8(48);
  if (dtype == TY_Q8_0) {
    const ty_q8_0 *b = (const ty_q8_0 *)(const void *)row + 2 * pair;
    __m512i q = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)b->q));
    q = _mm512_inserti64x4(q, _mm256_loadu_si256((const __m256i *)(const void *)(b + 1)->q), 1);
    return _mm512_xor_si512(q, _mm512_set1_epi8((char)0x80));
  }
  if (dtype == TY_Q4_0) { /* low and high nibbles of the first block, then of the second */
    const ty_q4_0 *b = (const ty_q4_0 *)(const void *)row + 2 * pair;
    __m128i q0 = _mm_loadu_si128((const __m128i *)b->q), q1 = _mm_loadu_si128((const __m128i *)(b + 1)->q);
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(q0), q1, 1);
    __m512i q = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
    return _mm512_and_si512(_mm512_shuffle_i64x2(q, q, _MM_SHUFFLE(3, 1, 2, 0)), low4);
  }
  if (dtype == TY_Q4_K) {
    const ty_q4_k *b = (const ty_q4_k *)(const void *)row + pair / 4;
    __m256i q = _mm256_loadu_si256((const __m256i *)(const void *)(b->q + pair % 4 * 32));
    return _mm512_and_si512(_mm512_inserti64x4(_mm512_castsi256_si512(q), _mm256_srli_epi16(q, 4), 1), low4);
  }
  const ty_q6_k *b = (const ty_q6_k *)(const void *)row + pair / 4;
  __m512i low = _mm512_loadu_si512(b->low + pair % 4 / 2 * 64);
  __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(b->high + pair % 4 / 2 * 32));
  __m512i high;
  if (pair % 2 == 0) {
    high = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_slli_epi16(half, 4)), _mm256_slli_epi16(half, 2), 1);
  } else {
    low = _mm512_srli_epi16(low, 4);
    high = _mm512_inserti64x4(_mm512_castsi256_si512(half), _mm256_srli_epi16(half, 2), 1);
  }
  return _mm512_or_si512(_mm512_and_si512(low, low4), _mm512_and_si512(high, high2));
}

/* Of 512 elements: what their groups are multiplied with. */
typedef struct dots_line {
  __m512 w0, w1;      /* scales of W: 16 of 32 elements, or 32 of 16 */
  const int8_t *q[4]; /* rows of x */
  __m512 x[4];        /* their scales, times w0 where that has as many */
} dots_line;

static inline __attribute__((always_inline)) __m512 dot_pair(const dots_line *l, const int r, const int group,
                                                             __m512i zero, const int64_t p, __mmask16 whole, __m512i c,
                                                             __m512 sum) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i a = _mm512_maskz_loadu_epi32(whole, l->q[r] + 64 * p);
  __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), c, a);
  __m512i pair = _mm512_add_epi32(_mm512_srli_epi32(lane, 3), _mm512_set1_epi32((int)(2 * p)));
  __m512 scale = _mm512_permutexvar_ps(pair, l->x[r]);
  if (group == 16) {
    __m512i four = _mm512_add_epi32(_mm512_srli_epi32(lane, 2), _mm512_set1_epi32((int)(4 * p)));
    dot = _mm512_sub_epi32(dot, _mm512_dpbusd_epi32(_mm512_setzero_si512(), zero, a));
    scale = _mm512_mul_ps(scale, _mm512_permutex2var_ps(l->w0, four, l->w1));
  }
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum);
}

/* out[r] = the product of a row of W, whose scales are given, with row r0 + r of x, r < rows. */
static inline __attribute__((always_inline)) void dots_of(const ty_dtype dtype, const coded *x, int64_t r0,
                                                          const int rows, const char *row, const float *scale,
                                                          const float *min, float *out) {
  const int group = dtype == TY_Q6_K ? 16 : 32;
  const int64_t block = dtype == TY_Q8_0 ? 34 * 16 : dtype == TY_Q4_0 ? 18 * 16 : dtype == TY_Q4_K ? 288 : 420;
  const __m512i zero = _mm512_set1_epi8((char)x->zero);
  const __m512 zero_f = _mm512_set1_ps((float)x->zero);
  __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
  int64_t at = 0, k = x->k;
  dots_line l;
#define ROW(r, s)                                                                         \
  if (rows > r) {                                                                         \
    int64_t first = (r0 + r) * k + at;                                                    \
    l.q[r] = x->q + first;                                                                \
    l.x[r] = _mm512_maskz_loadu_ps(groups, x->scale + first / 32);                        \
    if (group == 32) {                                                                    \
      s = _mm512_fnmadd_ps(shift, _mm512_maskz_loadu_ps(groups, x->sum + first / 32), s); \
      l.x[r] = _mm512_mul_ps(l.x[r], l.w0);                                               \
    }                                                                                     \
  }
#define LINE(groups_of, all)                                                      \
  const __mmask16 groups = (groups_of);                                           \
  __m512 shift = _mm512_setzero_ps();                                             \
  if (group == 32) {                                                              \
    l.w0 = l.w1 = _mm512_maskz_loadu_ps(groups, scale + at / 32);                 \
    if (dtype == TY_Q4_K) shift = _mm512_maskz_loadu_ps(groups, min + at / 32);   \
    else shift = _mm512_mul_ps(l.w0, zero_f);                                     \
  } else {                                                                        \
    l.w0 = _mm512_maskz_loadu_ps((__mmask16)(all), scale + at / 16);              \
    l.w1 = _mm512_maskz_loadu_ps((__mmask16)((all) >> 16), scale + at / 16 + 16); \
  }                                                                               \
  ROW(0, s0) ROW(1, s1) ROW(2, s2) ROW(3, s3)
#define PAIR(p, whole, codes)                                         \
  {                                                                   \
    __m512i c = codes;                                                \
    s0 = dot_pair(&l, 0, group, zero, p, whole, c, s0);               \
    if (rows > 1) s1 = dot_pair(&l, 1, group, zero, p, whole, c, s1); \
    if (rows > 2) s2 = dot_pair(&l, 2, group, zero, p, whole, c, s2); \
    if (rows > 3) s3 = dot_pair(&l, 3, group, zero, p, whole, c, s3); \
  }
#define WHOLE(p) PAIR(p, 0xffff, pair_codes(dtype, row, p))
  for (; at + 512 <= k; at += 512, row += block) {
    for (int64_t b = 0; b < block; b += 64) __builtin_prefetch(row + b + AHEAD);
    LINE(0xffff, ~0u)
    WHOLE(0) WHOLE(1) WHOLE(2) WHOLE(3) WHOLE(4) WHOLE(5) WHOLE(6) WHOLE(7)
  }
  if (at < k) {
    int64_t left = k - at;
    LINE((__mmask16)((1u << left / 32) - 1), (1u << left / 16) - 1)
    uint8_t code[512] __attribute__((aligned(64)));
    row_codes(dtype, row, 0, left, code);
    for (int64_t p = 0; 64 * p < left; p++) {
      __mmask16 whole = left - 64 * p >= 64 ? 0xffff : 0x00ff;
      PAIR(p, whole, _mm512_maskz_loadu_epi32(whole, code + 64 * p))
    }
  }
#undef WHOLE
#undef PAIR
#undef LINE
#undef ROW
  out[0] = _mm512_reduce_add_ps(s0);
  if (rows > 1) out[1] = _mm512_reduce_add_ps(s1);
  if (rows > 2) out[2] = _mm512_reduce_add_ps(s2);
  if (rows > 3) out[3] = _mm512_reduce_add_ps(s3);
}

#define DOTS(name, dtype)                                                                                             \
  static void name(const coded *x, int64_t rows, const char *row, const float *scale, const float *min, float *out) { \
    for (int64_t r = 0; r < rows; r += 4, out += 4) {                                                                 \
      switch (rows - r) {                                                                                             \
        case 1: dots_of(dtype, x, r, 1, row, scale, min, out); break;                                                 \
        case 2: dots_of(dtype, x, r, 2, row, scale, min, out); break;                                                 \
        case 3: dots_of(dtype, x, r, 3, row, scale, min, out); break;                                                 \
        default: dots_of(dtype, x, r, 4, row, scale, min, out);                                                       \
      }                                                                                                               \
    }                                                                                                                 \
  }
DOTS(dots_q8_0, TY_Q8_0)
DOTS(dots_q4_0, TY_Q4_0)
DOTS(dots_q4_k, TY_Q4_K)
DOTS(dots_q6_k, TY_Q6_K)
#undef DOTS

/* out[r] for the rows of x, at most FEW. */
static void row_dots(ty_dtype dtype, const coded *x, int64_t rows, const char *row, const float *scale,
                     const float *min, float *out) {
  switch (dtype) {
    case TY_Q8_0: dots_q8_0(x, rows, row, scale, min, out); break;
    case TY_Q4_0: dots_q4_0(x, rows, row, scale, min, out); break;
    case TY_Q4_K: dots_q4_k(x, rows, row, scale, min, out); break;
    default: dots_q6_k(x, rows, row, scale, min, out);
  }
}
#else
static void row_dots(ty_dtype dtype, const coded *x, int64_t rows, const char *row, const float *scale,
                     const float *min, float *out) {
  enum { PART = 256, LANES = 16 };
  uint8_t code[PART] __attribute__((aligned(64)));
  float sums[FEW][LANES] = { { 0 } };
  for (int64_t k0 = 0; k0 < x->k; k0 += PART) {
    int64_t n = x->k - k0 < PART ? x->k - k0 : PART;
    row_codes(dtype, row, k0, n, code);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t at = 0; at < n; at += 32) {
        int64_t first = r * x->k + k0 + at;
        const int8_t *restrict q = x->q + first;
        const uint8_t *restrict c = code + at;
        int32_t dot[2] = { 0, 0 };
        for (int i = 0; i < 16; i++) dot[0] += c[i] * q[i];
        for (int i = 16; i < 32; i++) dot[1] += c[i] * q[i];
        const int32_t *start = x->start + first / x->group;
        const float *w = scale + (k0 + at) / x->group;
        float total = (float)(dot[0] + start[0]) * w[0] + (x->group == 16 ? (float)(dot[1] + start[1]) * w[1] : 0);
        if (x->group == 32) total = (float)(dot[0] + dot[1] + start[0]) * w[0];
        float *sum = &sums[r][at / 32 % LANES];
        *sum += total * x->scale[first / 32];
        if (dtype == TY_Q4_K) *sum -= min[(k0 + at) / 32] * x->sum[first / 32];
      }
  }
  for (int64_t r = 0; r < rows; r++) {
    out[r] = 0;
    for (int i = 0; i < LANES; i++) out[r] += sums[r][i];
  }
}
#endif

/* Rows [begin, end) of W. */
static void dots_rows(void *context, int64_t begin, int64_t end) {
  product *p = context;
  const coded *x = p->x;
  size_t bytes = sizeof(float) * (size_t)(x->k / x->group + x->k / 32);
  float *scale = ty_scratch_alloc(bytes), *min = scale ? scale + x->k / x->group : NULL;
  if (!scale) {
    p->failed = true;
    return;
  }
  for (int64_t j = begin; j < end && !ty_interrupted; j++) {
    const char *row = p->w + j * p->w_row;
    row_scales(p->dtype, row, 0, x->k, scale, min);
    for (int64_t r0 = 0; r0 < p->rows; r0 += FEW) {
      int64_t rows = p->rows - r0 < FEW ? p->rows - r0 : FEW;
      coded part = *x;
      part.q += r0 * x->k, part.scale += r0 * x->k / 32, part.sum += r0 * x->k / 32;
      part.start += r0 * x->k / x->group;
      float y[FEW];
      row_dots(p->dtype, &part, rows, row, scale, min, y);
      for (int64_t r = 0; r < rows; r++) p->y[(r0 + r) * p->n + j] = y[r] + (p->bias ? p->bias[j] : 0);
    }
  }
  ty_scratch_free(scale, bytes);
}
