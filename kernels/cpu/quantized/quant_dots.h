/* y = x W' for few rows of x: each row of W is read once and multiplied with all rows of x. The product of a group is
 * (scale of w) (scale of x) (sum of code q - zero sum of q), and where there are mins less min (scale of x) (sum of q).
 * Included by quant_linear.c. */

#if defined(__AVX2__)
/* NVFP4: codes become signed, w = code - zero; then |w| (-w where w < 0 is x's) are products of bytes without a sign
 * and with one, of which the sum of two stays below 2^15: 2 12 127. */
static inline __attribute__((always_inline)) void nvfp4_dots_of(const coded *x, const int rows, const char *row,
                                                                const float *scale, float *out) {
  enum { PART = 256 };
  const __m256i zero = _mm256_set1_epi8((char)code_zero(TY_NVFP4)), ones = _mm256_set1_epi16(1);
  uint8_t code[PART] __attribute__((aligned(64)));
  __m256 sum[FEW];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm256_setzero_ps();
  for (int64_t k0 = 0; k0 < x->k; k0 += PART) {
    int64_t n = x->k - k0 < PART ? x->k - k0 : PART;
    row_codes(TY_NVFP4, row, k0, n, code);
    for (int64_t at = 0; at < n; at += 32) {
      const float *s = scale + (k0 + at) / 16;
      __m256 ws = _mm256_set_m128(_mm_broadcast_ss(s + 1), _mm_broadcast_ss(s));
      __m256i w = _mm256_sub_epi8(_mm256_load_si256((const __m256i *)(const void *)(code + at)), zero);
      __m256i size = _mm256_abs_epi8(w);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        int64_t first = r * x->k + k0 + at;
        __m256i q = _mm256_loadu_si256((const __m256i *)(const void *)(x->q + first));
        __m256i dot = _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(q, w)), ones);
        __m256 factor = _mm256_mul_ps(ws, _mm256_broadcast_ss(x->scale + first / 32));
        sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, sum[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) out[r] = sum_of_eight(sum[r]);
}

static inline __attribute__((always_inline)) void nvfp4_dots(const coded *x, int64_t rows, const char *row,
                                                             const float *scale, float *out) {
#define ROWS(n) \
  case n: nvfp4_dots_of(x, n, row, scale, out); break;
  switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
}

/* The f16 number at `at`, in all lanes. */
static inline __m256 broadcast_f16(const char *at) {
#if defined(__F16C__)
  uint16_t bits;
  memcpy(&bits, at, sizeof bits);
  return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
#else
  return _mm256_set1_ps(ty_block_f16((const uint8_t *)at));
#endif
}

/* q8_0: codes and scales are taken from where they lie in the row. out[streams][rows]: of rows of W that are `apart`
 * bytes apart. */
static inline __attribute__((always_inline)) void byte_dots_of(const coded *x, const int rows, const int streams,
                                                               const char *row, int64_t apart, float *out) {
  enum { BYTES = 34, AHEAD_BYTES = 2048 };
  const int64_t groups = x->k / 32;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 sum[FEW];
#pragma GCC unroll 8
  for (int i = 0; i < streams * rows; i++) sum[i] = _mm256_setzero_ps();
  const char *q = row + BYTES - 32;
  for (int64_t g = 0; g < groups; g++, q += BYTES) {
#pragma GCC unroll 4
    for (int s = 0; s < streams; s++) {
      const char *at = q + s * apart;
      const __m256i w = _mm256_loadu_si256((const __m256i *)(const void *)at), size = _mm256_abs_epi8(w);
      __builtin_prefetch(at + AHEAD_BYTES);
      const __m256 ws = broadcast_f16(at - 2);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(x->q + r * x->k + 32 * g));
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(a, w));
        const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
        const __m256 factor = _mm256_mul_ps(ws, _mm256_broadcast_ss(x->scale + r * groups + g));
        sum[s * rows + r] = _mm256_fmadd_ps(dot, factor, sum[s * rows + r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < streams * rows; i++) out[i] = sum_of_eight(sum[i]);
}

static inline __attribute__((always_inline)) void byte_dots(const coded *x, int64_t rows, const char *row, float *out) {
#define ROWS(n) \
  case n: byte_dots_of(x, n, 1, row, 0, out); break;
  switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
}

/* Rows [begin, end) of W but for the last few, with one row of x: memory gives more to who reads in several places.
 * Returns the first row that is left. */
static int64_t byte_streams(const product *p, int64_t begin, int64_t end) {
  enum { STREAMS = 4 };
  const int64_t count = (end - begin) / STREAMS;
  for (int64_t j = begin; j < begin + count && !ty_interrupted; j++) {
    float y[STREAMS];
    byte_dots_of(p->x, 1, STREAMS, p->w + j * p->w_row, count * p->w_row, y);
    for (int s = 0; s < STREAMS; s++) p->y[j + s * count] = y[s] + (p->bias ? p->bias[j + s * count] : 0);
  }
  return begin + STREAMS * count;
}

/* MXFP4: codes are multiplied without a sign as they are decoded, sums of two stay below 2 24 127, and what stands for
 * 0 is taken away in the end, by the sums of groups. */
static inline __attribute__((always_inline)) void mxfp4_dots_of(const coded *x, const int rows, const char *row,
                                                                const float *scale, float *out) {
  enum { BYTES = 17, AHEAD_BYTES = 1024 };
  const int64_t groups = x->k / 32;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 sum[FEW], more = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm256_setzero_ps();
  const uint8_t *q = (const uint8_t *)row + BYTES - 16;
  for (int64_t g = 0; g < groups; g++, q += BYTES) {
    __m256i w = codes_e2m1(code_nibbles(q));
    __builtin_prefetch(q + AHEAD_BYTES);
    __m256 ws = _mm256_broadcast_ss(scale + g);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(x->q + r * x->k + 32 * g));
      __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_maddubs_epi16(w, a), ones));
      __m256 factor = _mm256_mul_ps(ws, _mm256_broadcast_ss(x->scale + r * groups + g));
      if (rows == 1 && g % 2) more = _mm256_fmadd_ps(dot, factor, more); /* one chain would wait for itself */
      else sum[r] = _mm256_fmadd_ps(dot, factor, sum[r]);
    }
  }
  sum[0] = _mm256_add_ps(sum[0], more);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const float *of = x->sum + r * groups, zero = (float)code_zero(TY_MXFP4);
    __m256 offset = _mm256_setzero_ps();
    int64_t g = 0;
    for (; g + 8 <= groups; g += 8)
      offset = _mm256_fmadd_ps(_mm256_loadu_ps(scale + g), _mm256_loadu_ps(of + g), offset);
    sum[r] = _mm256_fnmadd_ps(_mm256_set1_ps(zero), offset, sum[r]);
    out[r] = sum_of_eight(sum[r]);
    for (; g < groups; g++) out[r] -= zero * scale[g] * of[g];
  }
}

static inline __attribute__((always_inline)) void mxfp4_dots(const coded *x, int64_t rows, const char *row,
                                                             const float *scale, float *out) {
#define ROWS(n) \
  case n: mxfp4_dots_of(x, n, row, scale, out); break;
  switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
}

/* Whether row_dots() wants the scales of a row of W decoded. */
static bool wants_scales(ty_dtype dtype) { return dtype != TY_Q8_0; }

/* out[r] for the rows of x, at most FEW. Other formats are in quant_eights.h. */
static void row_dots(ty_dtype dtype, const coded *x, int64_t rows, const char *row, const float *scale,
                     const float *min, float *out) {
  (void)min;
  switch (dtype) {
    case TY_Q8_0: byte_dots(x, rows, row, out); break;
    case TY_MXFP4: mxfp4_dots(x, rows, row, scale, out); break;
    default: nvfp4_dots(x, rows, row, scale, out);
  }
}
#else
static bool wants_scales(ty_dtype dtype) {
  (void)dtype;
  return true;
}

/* out[r] for the rows of x, at most FEW. */
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
#if defined(__AVX2__)
  if (p->dtype == TY_Q8_0 && p->rows == 1) begin = byte_streams(p, begin, end);
#endif
  for (int64_t j = begin; j < end && !ty_interrupted; j++) {
    const char *row = p->w + j * p->w_row;
    if (wants_scales(p->dtype)) row_scales(p->dtype, row, 0, x->k, scale, min);
    for (int64_t r0 = 0; r0 < p->rows; r0 += FEW) {
      int64_t rows = p->rows - r0 < FEW ? p->rows - r0 : FEW;
      coded part = *x;
      part.q += r0 * x->k, part.scale += r0 * x->k / 32;
      part.sum += r0 * x->k / x->group, part.start += r0 * x->k / x->group;
      float y[FEW];
      row_dots(p->dtype, &part, rows, row, scale, min, y);
      for (int64_t r = 0; r < rows; r++) p->y[(r0 + r) * p->n + j] = y[r] + (p->bias ? p->bias[j] : 0);
    }
  }
  ty_scratch_free(scale, bytes);
}
