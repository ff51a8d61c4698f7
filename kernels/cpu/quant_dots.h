/* y = x W' for few rows of x: each row of W is read once and multiplied with all rows of x. The product of a group is
 * (scale of w) (scale of x) (sum of code q - zero sum of q), and where there are mins less min (scale of x) (sum of q).
 * Included by quant_linear.c. */

#if defined(__AVX2__)
static inline float sum_of_eight(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* Codes become signed, w = code - zero; then |w| (-w where w < 0 is x's) are products of bytes without a sign and with
 * one, of which the sum of two stays below 2^15: 2 128 127. */
static inline __attribute__((always_inline)) void row_dots_of(const ty_dtype dtype, const coded *x, const int rows,
                                                              const char *row, const float *scale, const float *min,
                                                              float *out) {
  enum { PART = 256 };
  const int group = code_group(dtype);
  const __m256i zero = _mm256_set1_epi8((char)code_zero(dtype)), ones = _mm256_set1_epi16(1);
  uint8_t code[PART] __attribute__((aligned(64)));
  __m256 sum[FEW];
  float mins[FEW] = { 0 };
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm256_setzero_ps();
  for (int64_t k0 = 0; k0 < x->k; k0 += PART) {
    int64_t n = x->k - k0 < PART ? x->k - k0 : PART;
    row_codes(dtype, row, k0, n, code);
    for (int64_t at = 0; at < n; at += 32) {
      const float *s = scale + (k0 + at) / group;
      __m256 ws = group == 32 ? _mm256_broadcast_ss(s) : _mm256_set_m128(_mm_broadcast_ss(s + 1), _mm_broadcast_ss(s));
      __m256i w = _mm256_sub_epi8(_mm256_load_si256((const __m256i *)(const void *)(code + at)), zero);
      __m256i size = _mm256_abs_epi8(w);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        int64_t first = r * x->k + k0 + at;
        __m256i q = _mm256_loadu_si256((const __m256i *)(const void *)(x->q + first));
        __m256i dot = _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(q, w)), ones);
        __m256 factor = _mm256_mul_ps(ws, _mm256_broadcast_ss(x->scale + first / 32));
        sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, sum[r]);
        if (dtype == TY_Q4_K) mins[r] += min[(k0 + at) / 32] * x->sum[first / 32];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) out[r] = sum_of_eight(sum[r]) - mins[r];
}

static inline __attribute__((always_inline)) void row_dots_by(const ty_dtype dtype, const coded *x, int64_t rows,
                                                              const char *row, const float *scale, const float *min,
                                                              float *out) {
#define ROWS(n) \
  case n: row_dots_of(dtype, x, n, row, scale, min, out); break;
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

/* q8_0: codes and scales are taken from where they lie in the row. */
static inline __attribute__((always_inline)) void byte_dots_of(const coded *x, const int rows, const char *row,
                                                               float *out) {
  enum { BYTES = 34, AHEAD_BYTES = 2048 };
  const int64_t groups = x->k / 32;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 sum[FEW], more = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm256_setzero_ps();
  const char *q = row + BYTES - 32;
  for (int64_t g = 0; g < groups; g++, q += BYTES) {
    const __m256i w = _mm256_loadu_si256((const __m256i *)(const void *)q), size = _mm256_abs_epi8(w);
    __builtin_prefetch(q + AHEAD_BYTES);
    const __m256 ws = broadcast_f16(q - 2);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      const __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(x->q + r * x->k + 32 * g));
      const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(a, w));
      const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
      const __m256 factor = _mm256_mul_ps(ws, _mm256_broadcast_ss(x->scale + r * groups + g));
      if (rows == 1 && g % 2) more = _mm256_fmadd_ps(dot, factor, more); /* one chain would wait for itself */
      else sum[r] = _mm256_fmadd_ps(dot, factor, sum[r]);
    }
  }
  sum[0] = _mm256_add_ps(sum[0], more);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) out[r] = sum_of_eight(sum[r]);
}

static inline __attribute__((always_inline)) void byte_dots(const coded *x, int64_t rows, const char *row, float *out) {
#define ROWS(n) \
  case n: byte_dots_of(x, n, row, out); break;
  switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
}

/* Formats of 4 bits with a scale for 32 elements: codes are multiplied without a sign as they are decoded, sums of two
 * stay below 2 24 127, and what stands for 0 is taken away in the end, by the sums of groups. */
static inline __attribute__((always_inline)) void nibble_dots_of(const ty_dtype dtype, const coded *x, const int rows,
                                                                 const char *row, const float *scale, float *out) {
  enum { AHEAD_BYTES = 1024 };
  const int bytes = dtype == TY_Q4_0 ? 18 : 17;
  const int64_t groups = x->k / 32;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 sum[FEW], more = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm256_setzero_ps();
  const uint8_t *q = (const uint8_t *)row + bytes - 16;
  for (int64_t g = 0; g < groups; g++, q += bytes) {
    __m256i w = code_nibbles(q);
    if (dtype != TY_Q4_0) w = codes_e2m1(w);
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
    const float *of = x->sum + r * groups, zero = (float)code_zero(dtype);
    __m256 offset = _mm256_setzero_ps();
    int64_t g = 0;
    for (; g + 8 <= groups; g += 8)
      offset = _mm256_fmadd_ps(_mm256_loadu_ps(scale + g), _mm256_loadu_ps(of + g), offset);
    sum[r] = _mm256_fnmadd_ps(_mm256_set1_ps(zero), offset, sum[r]);
    out[r] = sum_of_eight(sum[r]);
    for (; g < groups; g++) out[r] -= zero * scale[g] * of[g];
  }
}

/* The same of q4_0 beside one row of x: scales are taken from where they lie, and what stands for 0 on the way. */
static inline __attribute__((always_inline)) float nibble_dot_q4_0(const coded *x, const char *row) {
  enum { BYTES = 18, AHEAD_BYTES = 1024 };
  const int64_t groups = x->k / 32;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 sum[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() }; /* one chain would wait for itself */
  __m128 offset[2] = { _mm_setzero_ps(), _mm_setzero_ps() };
  const uint8_t *q = (const uint8_t *)row + BYTES - 16;
  for (int64_t g = 0; g < groups; g += 2) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      if (g + i >= groups) break;
      const __m256 ws = broadcast_f16((const char *)q - 2);
      const __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(x->q + 32 * (g + i)));
      const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_maddubs_epi16(code_nibbles(q), a), ones));
      __builtin_prefetch(q + AHEAD_BYTES);
      sum[i] = _mm256_fmadd_ps(dot, _mm256_mul_ps(ws, _mm256_broadcast_ss(x->scale + g + i)), sum[i]);
      offset[i] = _mm_fmadd_ss(_mm256_castps256_ps128(ws), _mm_load_ss(x->sum + g + i), offset[i]);
      q += BYTES;
    }
  }
  return sum_of_eight(_mm256_add_ps(sum[0], sum[1])) -
         (float)code_zero(TY_Q4_0) * _mm_cvtss_f32(_mm_add_ss(offset[0], offset[1]));
}

static inline __attribute__((always_inline)) void nibble_dots_by(const ty_dtype dtype, const coded *x, int64_t rows,
                                                                 const char *row, const float *scale, float *out) {
#define ROWS(n) \
  case n: nibble_dots_of(dtype, x, n, row, scale, out); break;
  switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
}

/* Whether row_dots() wants the scales of a row of W decoded, for so many rows of x in all. */
static bool wants_scales(ty_dtype dtype, int64_t rows) { return dtype != TY_Q8_0 && !(dtype == TY_Q4_0 && rows == 1); }

/* out[r] for the rows of x, at most FEW. */
static void row_dots(ty_dtype dtype, const coded *x, int64_t rows, const char *row, const float *scale,
                     const float *min, float *out) {
  switch (dtype) {
    case TY_Q8_0: byte_dots(x, rows, row, out); break;
    case TY_Q4_0:
      if (rows == 1) out[0] = nibble_dot_q4_0(x, row);
      else nibble_dots_by(TY_Q4_0, x, rows, row, scale, out);
      break;
    case TY_Q4_K: row_dots_by(TY_Q4_K, x, rows, row, scale, min, out); break;
    case TY_MXFP4: nibble_dots_by(TY_MXFP4, x, rows, row, scale, out); break;
    case TY_NVFP4: row_dots_by(TY_NVFP4, x, rows, row, scale, min, out); break;
    default: row_dots_by(TY_Q6_K, x, rows, row, scale, min, out);
  }
}
#else
static bool wants_scales(ty_dtype dtype, int64_t rows) {
  (void)dtype, (void)rows;
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
  for (int64_t j = begin; j < end && !ty_interrupted; j++) {
    const char *row = p->w + j * p->w_row;
    if (wants_scales(p->dtype, p->rows)) row_scales(p->dtype, row, 0, x->k, scale, min);
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
