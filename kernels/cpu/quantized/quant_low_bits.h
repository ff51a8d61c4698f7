/* y = x W' for few rows of x and W in Q2_K or Q3_K: codes are decoded in registers and multiplied with the bytes of x,
 * scales and mins stay integers until a block of 256 elements is summed. Of a block of W and a row of x that is
 *   d (sum over its 8 groups of 32 of x's scale (sum of scale q x)) - dmin (the same of min x);
 * Q3_K has no mins, but codes from 0 that stand for -4 on: its mins are four times its scales. Included by
 * quant_linear.c; rows of x have a scale for each 32 elements and the sum of each 16. */

#if defined(__AVX2__)

/* What a block of W has besides its codes, as 16-bit numbers. */
typedef struct low_scales {
  __m256i scale, min;
  float d, dmin;
} low_scales;

static inline float low_f16(const uint8_t *d) {
  uint16_t h;
  memcpy(&h, d, sizeof h);
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}

static inline __attribute__((always_inline)) low_scales low_scales_of(const ty_dtype dtype, const void *block) {
  if (dtype == TY_Q2_K) {
    const ty_q2_k *b = block;
    __m256i s = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)b->scale));
    return (low_scales){ _mm256_and_si256(s, _mm256_set1_epi16(15)), _mm256_srli_epi16(s, 4), low_f16(b->d),
                         low_f16(b->dmin) };
  }
  const ty_q3_k *b = block;
  int32_t word[3];
  memcpy(word, b->scale, sizeof word);
  __m128i low = _mm_srlv_epi32(_mm_set_epi32(word[1], word[0], word[1], word[0]), _mm_set_epi32(4, 4, 0, 0));
  __m128i high = _mm_srlv_epi32(_mm_set1_epi32(word[2]), _mm_set_epi32(6, 4, 2, 0));
  low = _mm_and_si128(low, _mm_set1_epi8(15));
  high = _mm_slli_epi16(_mm_and_si128(high, _mm_set1_epi8(3)), 4);
  __m256i s = _mm256_cvtepi8_epi16(_mm_sub_epi8(_mm_or_si128(low, high), _mm_set1_epi8(32)));
  float d = low_f16(b->d);
  return (low_scales){ s, _mm256_slli_epi16(s, 2), d, d };
}

/* Codes of elements 32 j .. 32 j + 31, j a constant. */
static inline __attribute__((always_inline)) __m256i low_codes(const ty_dtype dtype, const void *block, const int j) {
  const ty_q2_k *b2 = block;
  const ty_q3_k *b3 = block;
  __m256i q = _mm256_loadu_si256((const __m256i *)(const void *)((dtype == TY_Q2_K ? b2->q : b3->q) + j / 4 * 32));
  q = _mm256_and_si256(_mm256_srli_epi16(q, j % 4 * 2), _mm256_set1_epi8(3));
  if (dtype == TY_Q2_K) return q;
  __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)b3->high);
  high = j < 2 ? _mm256_slli_epi16(high, 2 - j) : _mm256_srli_epi16(high, j - 2);
  return _mm256_or_si256(q, _mm256_and_si256(high, _mm256_set1_epi8(4)));
}

#define LOW_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

/* out[r] = a row of W times row r0 + r of x, r < rows. */
static inline __attribute__((always_inline)) void low_dots_of(const ty_dtype dtype, const coded *x, int64_t r0,
                                                              const int rows, const char *row, float *out) {
  const int64_t size = dtype == TY_Q2_K ? sizeof(ty_q2_k) : sizeof(ty_q3_k);
  /* The two scales of 32 elements, out of eight, to eight places each. */
  const __m256i pair = _mm256_set_epi64x(0x0302030203020302, 0x0302030203020302, 0x0100010001000100,
                                         0x0100010001000100);
  const __m256i next = _mm256_set1_epi8(4);
  __m256 total[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
  for (int64_t at = 0; at < x->k; at += 256, row += size) {
    for (int64_t b = 0; b < size; b += 64) __builtin_prefetch(row + b + AHEAD);
    const low_scales s = low_scales_of(dtype, row);
    const __m256i first = _mm256_permute2x128_si256(s.scale, s.scale, 0x00);
    const __m256i second = _mm256_permute2x128_si256(s.scale, s.scale, 0x11);
    __m256 sum[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
    __m256i places = pair;
#define CHUNK(j)                                                                                            \
  {                                                                                                         \
    if ((j) == 4) places = pair;                                                                            \
    __m256i c = low_codes(dtype, row, j), scale = _mm256_shuffle_epi8((j) < 4 ? first : second, places);    \
    places = _mm256_add_epi8(places, next);                                                                 \
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {                                                \
      int64_t from = (r0 + r) * x->k + at + 32 * (j);                                                       \
      __m256i q = _mm256_loadu_si256((const __m256i *)(const void *)(x->q + from));                         \
      __m256i dot = _mm256_madd_epi16(_mm256_maddubs_epi16(c, q), scale);                                   \
      sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_broadcast_ss(x->scale + from / 32), sum[r]); \
    }                                                                                                       \
  }
    LOW_EACH(CHUNK)
#undef CHUNK
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
      int64_t from = (r0 + r) * x->k + at;
      const __m256i *of16 = (const __m256i *)(const void *)(x->start + from / 16);
      __m256i sums = _mm256_packs_epi32(_mm256_loadu_si256(of16), _mm256_loadu_si256(of16 + 1));
      sums = _mm256_permute4x64_epi64(sums, _MM_SHUFFLE(3, 1, 2, 0));
      __m256 min = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, s.min));
      min = _mm256_mul_ps(min, _mm256_loadu_ps(x->scale + from / 32));
      total[r] = _mm256_fmadd_ps(_mm256_set1_ps(s.d), sum[r], total[r]);
      total[r] = _mm256_fnmadd_ps(_mm256_set1_ps(s.dmin), min, total[r]);
    }
  }
  for (int r = 0; r < rows; r++) out[r] = sum_of_eight(total[r]);
}

#define LOW_DOTS(name, dtype)                                                   \
  static void name(const coded *x, int64_t rows, const char *row, float *out) { \
    for (int64_t r = 0; r < rows; r += 4, out += 4) {                           \
      switch (rows - r) {                                                       \
        case 1: low_dots_of(dtype, x, r, 1, row, out); break;                   \
        case 2: low_dots_of(dtype, x, r, 2, row, out); break;                   \
        case 3: low_dots_of(dtype, x, r, 3, row, out); break;                   \
        default: low_dots_of(dtype, x, r, 4, row, out);                         \
      }                                                                         \
    }                                                                           \
  }
LOW_DOTS(low_dots_q2_k, TY_Q2_K)
LOW_DOTS(low_dots_q3_k, TY_Q3_K)
#undef LOW_DOTS
#undef LOW_EACH

/* Rows [begin, end) of W. */
static void low_rows(void *context, int64_t begin, int64_t end) {
  const product *p = context;
  float y[FEW];
  for (int64_t j = begin; j < end && !ty_interrupted; j++) {
    (p->dtype == TY_Q2_K ? low_dots_q2_k : low_dots_q3_k)(p->x, p->rows, p->w + j * p->w_row, y);
    for (int64_t r = 0; r < p->rows; r++) p->y[r * p->n + j] = y[r] + (p->bias ? p->bias[j] : 0);
  }
}
#endif
