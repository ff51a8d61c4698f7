/* y = x W' for few rows of x: each row of W is read once, decoded to bytes in the first cache and multiplied with all rows
 * of x. The product of a group is (scale of w) (scale of x) (sum of code q - zero sum of q), and where there are mins
 * less min (scale of x) (sum of q). Included by quant_linear.c; VNNI: with the integer dot products of AVX-512. */

#ifdef VNNI
/* 512 elements of rows of x, from element k0, and of W: what their groups are multiplied with. */
typedef struct line {
  __m512 w0, w1; /* scales of W: 16 of 32 elements, or 32 of 16 */
  const int8_t *q[4];
  __m512 x[4]; /* scales of x, times w0 where that has as many */
} line;

static inline __attribute__((always_inline)) __m512 dot_pair(const line *l, const int r, const int group, __m512i zero,
                                                             const int64_t p, __mmask16 whole, __m512i c, __m512 sum) {
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

/* Adds to sum[r] the products of n codes with rows r0 + r of x, r < rows, from x's element k0. */
static inline __attribute__((always_inline)) void dots_of(const coded *x, int64_t r0, const int rows, int64_t k0,
                                                          int64_t n, const int group, const uint8_t *code,
                                                          const float *scale, const float *min, float *sums) {
  const __m512i zero = _mm512_set1_epi8((char)x->zero);
  const __m512 zero_f = _mm512_set1_ps((float)x->zero);
  __m512 s0 = _mm512_loadu_ps(sums), s1 = s0, s2 = s0, s3 = s0;
  if (rows > 1) s1 = _mm512_loadu_ps(sums + 16);
  if (rows > 2) s2 = _mm512_loadu_ps(sums + 32);
  if (rows > 3) s3 = _mm512_loadu_ps(sums + 48);
  for (int64_t at = 0; at < n; at += 512) {
    int64_t left = n - at < 512 ? n - at : 512;
    __mmask16 groups = (__mmask16)((1u << left / 32) - 1);
    line l;
    __m512 shift = _mm512_setzero_ps();
    if (group == 32) {
      l.w0 = l.w1 = _mm512_maskz_loadu_ps(groups, scale + at / 32);
      shift = min ? _mm512_maskz_loadu_ps(groups, min + at / 32) : _mm512_mul_ps(l.w0, zero_f);
    } else {
      uint32_t all = left == 512 ? ~0u : (1u << left / 16) - 1;
      l.w0 = _mm512_maskz_loadu_ps((__mmask16)all, scale + at / 16);
      l.w1 = _mm512_maskz_loadu_ps((__mmask16)(all >> 16), scale + at / 16 + 16);
    }
#define ROW(r, s)                                                                         \
  if (rows > r) {                                                                         \
    int64_t first = (r0 + r) * x->k + k0 + at;                                            \
    l.q[r] = x->q + first;                                                                \
    l.x[r] = _mm512_maskz_loadu_ps(groups, x->scale + first / 32);                        \
    if (group == 32) {                                                                    \
      s = _mm512_fnmadd_ps(shift, _mm512_maskz_loadu_ps(groups, x->sum + first / 32), s); \
      l.x[r] = _mm512_mul_ps(l.x[r], l.w0);                                               \
    }                                                                                     \
  }
    ROW(0, s0)
    ROW(1, s1)
    ROW(2, s2)
    ROW(3, s3)
#undef ROW
#define PAIR(p, whole)                                                 \
  {                                                                    \
    __m512i c = _mm512_maskz_loadu_epi32(whole, code + at + 64 * (p)); \
    s0 = dot_pair(&l, 0, group, zero, p, whole, c, s0);                \
    if (rows > 1) s1 = dot_pair(&l, 1, group, zero, p, whole, c, s1);  \
    if (rows > 2) s2 = dot_pair(&l, 2, group, zero, p, whole, c, s2);  \
    if (rows > 3) s3 = dot_pair(&l, 3, group, zero, p, whole, c, s3);  \
  }
        if (left == 512) {
      PAIR(0, 0xffff)
      PAIR(1, 0xffff) PAIR(2, 0xffff) PAIR(3, 0xffff) PAIR(4, 0xffff) PAIR(5, 0xffff) PAIR(6, 0xffff) PAIR(7, 0xffff)
    }
    else {
      for (int64_t p = 0; 64 * p < left; p++) PAIR(p, (__mmask16)(left - 64 * p >= 64 ? 0xffff : 0x00ff))
    }
#undef PAIR
  }
  _mm512_storeu_ps(sums, s0);
  if (rows > 1) _mm512_storeu_ps(sums + 16, s1);
  if (rows > 2) _mm512_storeu_ps(sums + 32, s2);
  if (rows > 3) _mm512_storeu_ps(sums + 48, s3);
}

#define DOTS(rows)                                                                                                    \
  static void dots_##rows(const coded *x, int64_t r0, int64_t k0, int64_t n, const uint8_t *code, const float *scale, \
                          const float *min, float *sums) {                                                            \
    if (x->group == 16) dots_of(x, r0, rows, k0, n, 16, code, scale, NULL, sums);                                     \
    else dots_of(x, r0, rows, k0, n, 32, code, scale, min, sums);                                                     \
  }
DOTS(1)
DOTS(2)
DOTS(3)
DOTS(4)
#undef DOTS

/* sums[16 r + lane] for the rows of x. */
static void row_dots(const coded *x, int64_t rows, int64_t k0, int64_t n, const uint8_t *code, const float *scale,
                     const float *min, float *sums) {
  for (int64_t r = 0; r < rows; r += 4, sums += 64) {
    switch (rows - r) {
      case 1: dots_1(x, r, k0, n, code, scale, min, sums); break;
      case 2: dots_2(x, r, k0, n, code, scale, min, sums); break;
      case 3: dots_3(x, r, k0, n, code, scale, min, sums); break;
      default: dots_4(x, r, k0, n, code, scale, min, sums);
    }
  }
}
#else
static void row_dots(const coded *x, int64_t rows, int64_t k0, int64_t n, const uint8_t *code, const float *scale,
                     const float *min, float *sums) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t at = 0; at < n; at += 32) {
      int64_t first = r * x->k + k0 + at;
      const int8_t *restrict q = x->q + first;
      const uint8_t *restrict c = code + at;
      int32_t dot[2] = { 0, 0 };
      for (int i = 0; i < 16; i++) dot[0] += c[i] * q[i];
      for (int i = 16; i < 32; i++) dot[1] += c[i] * q[i];
      float *sum = sums + 16 * r + at / 32 % 16;
      const int32_t *start = x->start + first / x->group;
      const float *w = scale + at / x->group;
      if (x->group == 32) *sum += (float)(dot[0] + dot[1] + start[0]) * w[0] * x->scale[first / 32];
      else *sum += ((float)(dot[0] + start[0]) * w[0] + (float)(dot[1] + start[1]) * w[1]) * x->scale[first / 32];
      if (min) *sum -= min[at / 32] * x->sum[first / 32];
    }
}
#endif

/* Rows [begin, end) of W. */
static void dots_rows(void *context, int64_t begin, int64_t end) {
  const product *p = context;
  const coded *x = p->x;
  uint8_t code[CODES_MOST] __attribute__((aligned(64)));
  float scale[CODES_MOST / 16], min[CODES_MOST / 32], sums[16 * FEW];
  for (int64_t j = begin; j < end && !ty_interrupted; j++) {
    const char *row = p->w + j * p->w_row;
    for (int64_t r0 = 0; r0 < p->rows; r0 += FEW) {
      int64_t rows = p->rows - r0 < FEW ? p->rows - r0 : FEW;
      memset(sums, 0, sizeof sums);
      coded part = *x;
      part.q += r0 * x->block, part.scale += r0 * x->block / 32, part.sum += r0 * x->block / 32;
      part.start += r0 * x->block / x->group;
      for (int64_t k = 0; k < x->k; k += CODES_MOST) {
        int64_t n = x->k - k < CODES_MOST ? x->k - k : CODES_MOST;
        row_codes(p->dtype, row, k, n, AHEAD, code, scale, min);
        row_dots(&part, rows, k, n, code, scale, p->dtype == TY_Q4_K ? min : NULL, sums);
      }
      for (int64_t r = 0; r < rows; r++) {
        const float *s = sums + 16 * r;
        float total = 0;
        for (int i = 0; i < 4; i++) total += (s[i] + s[i + 8]) + (s[i + 4] + s[i + 12]);
        p->y[(r0 + r) * p->n + j] = total + (p->bias ? p->bias[j] : 0);
      }
    }
  }
}
