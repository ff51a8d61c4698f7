/* y = x W' for few rows of x with AVX2, for Q4_0, Q4_K and Q6_K, 256 elements at a time.
 *
 * Of 4 bits, each vector holds halves of two groups of 32, i and i + 4: rows of x lie in that order (code_eight). The
 * sums of products are added up as words until there is one number for each group, in the order in which eight scales
 * lie, so that a conversion and a multiplication serve all eight. Of Q6_K, whose scales are bytes, one for 16 elements,
 * sums of two products are multiplied with them as words. Included by quant_linear.c. */

#define INLINE static inline __attribute__((always_inline))
#define LOAD_128(p) _mm_loadu_si128((const __m128i *)(const void *)(p))
#define LOAD_256(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))

INLINE __m256i two_halves(const char *low, const char *high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(LOAD_128(low)), LOAD_128(high), 1);
}

INLINE __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
INLINE __m256i high_nibbles(__m256i v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }

/* Codes of eight groups: of groups i and i + 4 the first halves are code[2 i], the second ones code[2 i + 1]. */
INLINE void eight_codes(const ty_dtype dtype, const char *w, __m256i code[8]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    if (dtype == TY_Q4_0) {
      const char *q = w + i * sizeof(ty_q4_0) + 2;
      const __m256i v = two_halves(q, q + 4 * sizeof(ty_q4_0));
      code[2 * i] = low_nibbles(v), code[2 * i + 1] = high_nibbles(v);
    } else {
      const char *q = w + 16 + i / 2 * 32 +
                      i % 2 * 16; /* of groups 4 (i / 2), beside whose nibbles lie those of the next */
      const __m256i v = two_halves(q, q + 64);
      code[i / 2 * 4 + i % 2] = low_nibbles(v), code[i / 2 * 4 + i % 2 + 2] = high_nibbles(v);
    }
  }
}

/* In each half four sums of words, of a and of b. */
INLINE __m256i folded(__m256i a, __m256i b) {
  return _mm256_add_epi16(_mm256_blend_epi32(a, b, 0xcc), _mm256_alignr_epi8(b, a, 8));
}

/* The sums of products of eight groups with those of a row of x. A word holds 16 of 32 at most: 16 15 127 < 2^15. */
INLINE __m256 eight_dots(const __m256i code[8], const int8_t *q) {
  __m256i pair[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    pair[i] = _mm256_add_epi16(_mm256_maddubs_epi16(code[2 * i], LOAD_256(q + 64 * i)),
                               _mm256_maddubs_epi16(code[2 * i + 1], LOAD_256(q + 64 * i + 32)));
  const __m256 a = _mm256_castsi256_ps(folded(pair[0], pair[1])), b = _mm256_castsi256_ps(folded(pair[2], pair[3]));
  const __m256i two = _mm256_add_epi16(_mm256_castps_si256(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0))),
                                       _mm256_castps_si256(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1))));
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(two, _mm256_set1_epi16(1)));
}

/* The scales of eight blocks of Q4_0. They lie nine words apart: what begins eight words after what was loaded before
 * has the next one a word further on. */
INLINE __m256 eight_scales(const char *w) {
  __m128i low = _mm_blend_epi16(LOAD_128(w), LOAD_128(w + 16), 1 << 1);
  __m128i mid = _mm_blend_epi16(LOAD_128(w + 32), LOAD_128(w + 48), 1 << 3);
  __m128i next = _mm_blend_epi16(LOAD_128(w + 64), LOAD_128(w + 80), 1 << 5);
  __m128i high = _mm_blend_epi16(LOAD_128(w + 96), LOAD_128(w + 112), 1 << 7);
  low = _mm_blend_epi16(low, mid, 3 << 2), high = _mm_blend_epi16(next, high, 3 << 6);
  return _mm256_cvtph_ps(_mm_blend_epi16(low, high, 15 << 4));
}

/* The scales and mins of a block of Q4_K. d, dmin and twelve bytes make eight of each of six bits: words 0 and 2 have
 * the low six bits of the first four of each, word 3 the low four bits of the others, whose upper two are those of
 * words 0 and 2. */
INLINE __m256 block_scales(const char *w, __m256 *min) {
  const __m128i head = LOAD_128(w), s = _mm_shuffle_epi32(head, _MM_SHUFFLE(2, 2, 1, 1));
  const __m128i tail = _mm_srlv_epi32(_mm_shuffle_epi32(head, _MM_SHUFFLE(3, 3, 3, 3)), _mm_set_epi32(4, 0, 0, 0));
  const __m128i six = _mm_and_si128(s, _mm_set1_epi8(63));
  const __m128i more = _mm_or_si128(_mm_and_si128(tail, _mm_set1_epi8(15)),
                                    _mm_and_si128(_mm_srli_epi32(s, 2), _mm_set1_epi8(48)));
  const __m128i code = _mm_blend_epi32(six, more, 10);
  const __m128 d = _mm_cvtph_ps(head);
  *min = _mm256_mul_ps(_mm256_broadcastss_ps(_mm_movehdup_ps(d)),
                       _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(code, 8))));
  return _mm256_mul_ps(_mm256_broadcastss_ps(d), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(code)));
}

/* Adds the products of a block of Q6_K with 256 elements of `rows` rows of x. */
INLINE void add_q6_k(const int rows, const char *w, const int8_t *q, const float *factor, __m256 *sum) {
  const __m256i low4 = _mm256_set1_epi8(15), high2 = _mm256_set1_epi8(48);
  const __m256i places = _mm256_set_m128i(_mm_set1_epi16(0x0302), _mm_set1_epi16(0x0100));
  const __m128i scales = LOAD_128(w + 192);
  const __m256 d = broadcast_f16(w + 208);
  const __m256 first = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(scales));
  const __m256 second = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(scales, 8)));
  const __m256i wide = _mm256_cvtepi8_epi16(scales);
  __m256 block[FEW];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const float *f = factor + r * EIGHT_FACTORS;
    block[r] = _mm256_mul_ps(first, _mm256_loadu_ps(f + 8));
    block[r] = _mm256_fmadd_ps(second, _mm256_loadu_ps(f + 16), block[r]);
    block[r] = _mm256_sub_ps(_mm256_setzero_ps(), block[r]);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const __m256i a = LOAD_256(w + half * 64), b = LOAD_256(w + half * 64 + 32), high = LOAD_256(w + 128 + half * 32);
    const __m256i code[4] = {
      _mm256_or_si256(_mm256_and_si256(a, low4), _mm256_and_si256(_mm256_slli_epi16(high, 4), high2)),
      _mm256_or_si256(_mm256_and_si256(b, low4), _mm256_and_si256(_mm256_slli_epi16(high, 2), high2)),
      _mm256_or_si256(high_nibbles(a), _mm256_and_si256(high, high2)),
      _mm256_or_si256(high_nibbles(b), _mm256_and_si256(_mm256_srli_epi16(high, 2), high2)),
    };
    /* Of group i, the scale of its first half in all words of the lower half, that of the second in the upper one. */
    const __m256i eight = _mm256_permute4x64_epi64(wide, half ? 0xee : 0x44);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m256i at = _mm256_add_epi8(places, _mm256_set1_epi8((char)(4 * i)));
      const __m256i scale = _mm256_shuffle_epi8(eight, at);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        const int8_t *group = q + r * EIGHT + half * 128 + 32 * i;
        const __m256i dot = _mm256_madd_epi16(_mm256_maddubs_epi16(code[i], LOAD_256(group)), scale);
        const __m256 of = _mm256_broadcast_ss(factor + r * EIGHT_FACTORS + 4 * half + i);
        block[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), of, block[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm256_fmadd_ps(d, block[r], sum[r]);
}

/* Adds the products of 256 elements of W with those of `rows` rows of x. */
INLINE void add_eight(const ty_dtype dtype, const int rows, const char *w, const int8_t *q, const float *factor,
                      __m256 *sum) {
  if (dtype == TY_Q6_K) {
    add_q6_k(rows, w, q, factor, sum);
    return;
  }
  __m256i code[8];
  __m256 min, scale = dtype == TY_Q4_0 ? eight_scales(w) : block_scales(w, &min);
  eight_codes(dtype, w, code);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const float *f = factor + r * EIGHT_FACTORS;
    const __m256 dot = eight_dots(code, q + r * EIGHT), of = _mm256_loadu_ps(f), zero = _mm256_loadu_ps(f + 8);
    if (dtype == TY_Q4_0) {
      sum[r] = _mm256_fmadd_ps(_mm256_fmsub_ps(dot, of, zero), scale, sum[r]);
    } else {
      sum[r] = _mm256_fmadd_ps(_mm256_mul_ps(dot, of), scale, sum[r]);
      sum[r] = _mm256_fnmadd_ps(min, zero, sum[r]);
    }
  }
}

/* out[streams][rows]: the products of rows of W, `apart` bytes apart, with rows of x, from row r0 on. */
INLINE void eights_of(const ty_dtype dtype, const int rows, const int streams, const coded *x, int64_t r0,
                      const char *w, int64_t apart, float *out) {
  enum { AHEAD_BYTES = 2048, MOST = 210 };
  const int bytes = dtype == TY_Q6_K ? 210 : 144; /* of a block, or of eight of Q4_0 */
  const int8_t *q = x->q + r0 * EIGHT;
  const float *factor = x->scale + r0 * EIGHT_FACTORS;
  __m256 sum[FEW];
  int64_t left = x->k;
#pragma GCC unroll 8
  for (int i = 0; i < streams * rows; i++) sum[i] = _mm256_setzero_ps();
  for (; left >= EIGHT; left -= EIGHT, w += bytes) {
#pragma GCC unroll 2
    for (int s = 0; s < streams; s++) {
      const char *at = w + s * apart;
      for (int b = 0; b < bytes; b += 64) __builtin_prefetch(at + b + AHEAD_BYTES);
      add_eight(dtype, rows, at, q, factor, sum + s * rows);
    }
    q += x->rows * EIGHT, factor += x->rows * EIGHT_FACTORS;
  }
  if (left)
    for (int s = 0; s < streams; s++) {
      char rest[MOST] = { 0 };
      memcpy(rest, w + s * apart, (size_t)(bytes * left / EIGHT));
      add_eight(dtype, rows, rest, q, factor, sum + s * rows);
    }
#pragma GCC unroll 8
  for (int i = 0; i < streams * rows; i++) out[i] = sum_of_eight(sum[i]);
}

typedef void eights_fn(const coded *x, int64_t r0, const char *w, int64_t apart, float *out);
#define OF(dtype, rows, streams)                                                                            \
  static void eights_##dtype##_##rows##_##streams(const coded *x, int64_t r0, const char *w, int64_t apart, \
                                                  float *out) {                                             \
    eights_of(TY_##dtype, rows, streams, x, r0, w, apart, out);                                             \
  }
#define EIGHTS(dtype)                                                                                             \
  OF(dtype, 1, 1)                                                                                                 \
  OF(dtype, 1, 2)                                                                                                 \
  OF(dtype, 2, 1)                                                                                                 \
  OF(dtype, 3, 1)                                                                                                 \
  OF(dtype, 4, 1)                                                                                                 \
  OF(dtype, 5, 1)                                                                                                 \
  OF(dtype, 6, 1)                                                                                                 \
  OF(dtype, 7, 1)                                                                                                 \
  OF(dtype, 8, 1)                                                                                                 \
  /* [0]: two rows of W with one of x. */                                                                         \
  static eights_fn *const eights_##dtype[FEW + 1] = {                                                             \
    eights_##dtype##_1_2, eights_##dtype##_1_1, eights_##dtype##_2_1, eights_##dtype##_3_1, eights_##dtype##_4_1, \
    eights_##dtype##_5_1, eights_##dtype##_6_1, eights_##dtype##_7_1, eights_##dtype##_8_1                        \
  };
EIGHTS(Q4_0)
EIGHTS(Q4_K)
EIGHTS(Q6_K)
#undef EIGHTS
#undef OF

static inline void put_row(const product *p, int64_t r, int64_t j, float y) {
  p->y[r * p->n + j] = y + (p->bias ? p->bias[j] : 0);
}

/* Rows [begin, end) of W. */
static void eights_rows(void *context, int64_t begin, int64_t end) {
  const product *p = context;
  eights_fn *const *fn = p->dtype == TY_Q4_0 ? eights_Q4_0 : p->dtype == TY_Q4_K ? eights_Q4_K : eights_Q6_K;
  float y[FEW];
  if (p->rows == 1) { /* memory gives more to who reads in two places */
    const int64_t count = (end - begin) / 2;
    for (const int64_t stop = begin + count; begin < stop && !ty_interrupted; begin++) {
      fn[0](p->x, 0, p->w + begin * p->w_row, count * p->w_row, y);
      put_row(p, 0, begin, y[0]);
      put_row(p, 0, begin + count, y[1]);
    }
    begin += count; /* there may be one more */
  }
  for (int64_t j0 = begin; j0 < end && !ty_interrupted; j0 += GROUP) {
    const int64_t j1 = j0 + GROUP < end ? j0 + GROUP : end;
    for (int64_t r0 = 0; r0 < p->rows; r0 += FEW) { /* which stay in the first cache for the group */
      const int64_t rows = p->rows - r0 < FEW ? p->rows - r0 : FEW;
      for (int64_t j = j0; j < j1; j++) {
        fn[rows](p->x, r0, p->w + j * p->w_row, 0, y);
        for (int64_t r = 0; r < rows; r++) put_row(p, r0 + r, j, y[r]);
      }
    }
  }
}
#undef LOAD_256
#undef LOAD_128
#undef INLINE
