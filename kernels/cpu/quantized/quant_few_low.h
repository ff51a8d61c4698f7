/* Few rows of x times W in Q2_K or Q3_K, two blocks at a time. A vector has 16 bytes of each half of each block, the
 * first halves of groups of 32 or the second ones. Of a byte, the codes of groups j and j + 1 (j even) are multiplied
 * as they lie, those of j + 1 four times as large; sums of four products are words, which are multiplied with the
 * scales of 16 elements and added up while they are integers, and then with those of x (code_low_line). Of a block:
 *   d (sum over groups of x's scale (sum of scale q x)) - dmin (the same of min x);
 * Q3_K has no mins, but codes from 0 that stand for -4 on. Included by quant_few.h. */

typedef uint16_t low_words __attribute__((vector_size(64), may_alias));

/* Sixteen bytes of each of two blocks, in two lanes each. */
INLINE __m512i twice_two_blocks(const char *w, int64_t size) {
  return _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(LOAD_128(w)), 0xff00, LOAD_128(w + size));
}

/* The scales of Q3_K less 32, in two lanes each: of 16 bytes of each block, the last but two are the packed ones. */
INLINE __m512i q3_k_scales(__m256i tail) {
  const __m128i four = _mm_set_epi8(9, 8, 7, 6, 5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2), two = _mm_set1_epi32(0x0d0c0b0a);
  __m256i low = _mm256_shuffle_epi8(tail, _mm256_broadcastsi128_si256(four));
  __m256i high = _mm256_shuffle_epi8(tail, _mm256_broadcastsi128_si256(two));
  low = _mm256_srlv_epi64(low, _mm256_set_epi64x(4, 0, 4, 0));
  high = _mm256_rolv_epi32(high, _mm256_set_epi32(30, 0, 2, 4, 30, 0, 2, 4));
  low = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), _mm256_and_si256(high, _mm256_set1_epi8(48)));
  low = _mm256_sub_epi8(low, _mm256_set1_epi8(32));
  return _mm512_permutexvar_epi64(_mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0), _mm512_castsi256_si512(low));
}

/* Codes of group j, four times as large where j is odd, from bytes that have them in their lowest four bits, and from
 * the bytes of third bits, from bit 0 on. */
INLINE __m512i low_code(const ty_dtype dtype, const int j, __m512i q, __m512i high) {
  const char two = j % 2 ? 12 : 3, third = j % 2 ? 16 : 4;
  if (dtype == TY_Q2_K) return _mm512_and_si512(q, _mm512_set1_epi8(two));
  high = (__m512i)((low_words)high << ((j % 2 ? 4 : 2) - j));
  q = _mm512_ternarylogic_epi32(_mm512_set1_epi8(two), q, high, 0xca); /* where two: q, elsewhere high */
  return _mm512_and_si512(q, _mm512_set1_epi8((char)(two | third)));
}

/* Which scales of 16 bytes in each lane the sums of groups j and j + 1, j even, of half `half` are multiplied with: as
 * words, of Q3_K as their upper bytes, four each. */
INLINE __m512i low_places(const ty_dtype dtype, const int j, const int half) {
  const int at = 2 * j + half;
  if (dtype == TY_Q2_K)
    return _mm512_add_epi16(_mm512_set1_epi16((short)at),
                            _mm512_set4_epi64((int64_t)0x800a800a800a800a, (int64_t)0x8008800880088008,
                                              (int64_t)0x8002800280028002, (int64_t)0x8000800080008000));
  return _mm512_add_epi16(
      _mm512_set1_epi16((short)(at << 8)),
      _mm512_set4_epi64(0x0a800a800a800a80, 0x0880088008800880, 0x0280028002800280, 0x0080008000800080));
}

/* The same for eight scales, or mins, in a row. */
INLINE __m512i low_row(const ty_dtype dtype) {
  if (dtype == TY_Q2_K)
    return _mm512_set4_epi64((int64_t)0x800f800e800d800c, (int64_t)0x800b800a80098008, (int64_t)0x8007800680058004,
                             (int64_t)0x8003800280018000);
  return _mm512_set4_epi64(0x0f800e800d800c80, 0x0b800a8009800880, 0x0780068005800480, 0x0380028001800080);
}

/* Number i of four of each of two blocks, each in its half. */
INLINE __m512 low_numbers(__m128 first, __m128 second, const int i) {
  const __m512i half = _mm512_set_epi32(16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_permutex2var_ps(_mm512_castps128_ps512(first), _mm512_add_epi32(half, _mm512_set1_epi32(i)),
                                _mm512_castps128_ps512(second));
}

/* The last four f16 numbers of a block that ends there. */
INLINE __m128 four_numbers(const char *end) {
  return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(const void *)(end - 8)));
}

INLINE void line_low(const ty_dtype dtype, const int rows, const char *w, const int8_t *q, const float *x,
                     __m512 *sum) {
  const bool q2 = dtype == TY_Q2_K;
  const int64_t size = q2 ? sizeof(ty_q2_k) : sizeof(ty_q3_k), codes = q2 ? 16 : 32;
  __m512i scale, min, half[2], high[2] = { _mm512_setzero_si512(), _mm512_setzero_si512() };
  __m512 line[FEW];
  if (q2) {
    scale = twice_two_blocks(w, size);
    min = _mm512_and_si512(_mm512_srli_epi16(scale, 4), _mm512_set1_epi8(15));
    scale = _mm512_and_si512(scale, _mm512_set1_epi8(15));
  } else {
    const __m512i fours = _mm512_set4_epi64(0x0004000400040004, 0x0004000400040004, 0, 0); /* of the second half */
    scale = min = q3_k_scales(
        _mm256_inserti128_si256(_mm256_castsi128_si256(LOAD_128(w + size - 16)), LOAD_128(w + 2 * size - 16), 1));
    for (int e = 0; e < 2; e++) high[e] = _mm512_srlv_epi16(twice_two_blocks(w + 16 * e, size), fours);
  }
  const __m128 first_d = four_numbers(w + size), second_d = four_numbers(w + 2 * size);
  min = _mm512_shuffle_epi8(min, low_row(dtype));
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const float *at = x + 64 * r;
    line[r] = _mm512_cvtepi32_ps(_mm512_madd_epi16(min, LOAD_512(at + 48)));
    line[r] = _mm512_mul_ps(line[r], _mm512_loadu_ps(at + 32));
    if (q2) sum[r] = _mm512_fnmadd_ps(low_numbers(first_d, second_d, 3), line[r], sum[r]);
  }
  const __m512i v0 = LOAD_512(w + codes), v1 = LOAD_512(w + size + codes);
  half[0] = _mm512_shuffle_i64x2(v0, v1, _MM_SHUFFLE(2, 0, 2, 0));
  half[1] = _mm512_shuffle_i64x2(v0, v1, _MM_SHUFFLE(3, 1, 3, 1));
#pragma GCC unroll 2
  for (int j = 0; j < 4; j += 2) {
    __m512i code[2][2], of[2];
#pragma GCC unroll 2
    for (int e = 0; e < 2; e++) {
      const __m512i v = j ? _mm512_srli_epi16(half[e], 4) : half[e];
      of[e] = _mm512_shuffle_epi8(scale, low_places(dtype, j, e));
      code[e][0] = low_code(dtype, j, v, high[e]), code[e][1] = low_code(dtype, j + 1, v, high[e]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      const int8_t *at = q + LINE * r + 128 * j;
      __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 2
      for (int e = 0; e < 2; e++, at += 128) {
        const __m512i a = _mm512_dpbusd_epi32(_mm512_setzero_si512(), code[e][0], LOAD_512(at));
        const __m512i b = _mm512_dpbusd_epi32(_mm512_setzero_si512(), code[e][1], LOAD_512(at + 64));
        dot = _mm512_dpwssd_epi32(dot, _mm512_packs_epi32(a, b), of[e]);
      }
      const __m512 dots = _mm512_cvtepi32_ps(dot), factor = _mm512_loadu_ps(x + 64 * r + 8 * j);
      if (j) line[r] = _mm512_fmadd_ps(dots, factor, line[r]);
      else line[r] = q2 ? _mm512_mul_ps(dots, factor) : _mm512_fmsub_ps(dots, factor, line[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm512_fmadd_ps(low_numbers(first_d, second_d, q2 ? 2 : 3), line[r], sum[r]);
}
