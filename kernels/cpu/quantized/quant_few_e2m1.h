/* Few rows of x times W in MXFP4 or NVFP4: codes are looked up in registers, as numbers twice as large plus 12, which
 * stands for 0; what that adds is taken away by the sums of x (code_e2m1_line). Included by quant_few.h. */

INLINE __m512i e2m1_numbers(__m512i nibbles) {
  const __m128i number = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(number), _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
}

/* The scales of sixteen blocks. They lie 17 bytes apart: that of block i is byte i of the i-th sixteen bytes. Four
 * bytes become the exponents of lanes 0, 4, 8 and 12, the next four those of lanes 1, 5, 9 and 13. */
INLINE __m512 scales_of_sixteen(const char *w) {
  const uint64_t first = 1ull | 1ull << 17 | 1ull << 34 | 1ull << 51;
  __m512i e = _mm512_maskz_loadu_epi8(first, w);
#pragma GCC unroll 3
  for (int i = 1; i < 4; i++) e = _mm512_mask_loadu_epi8(e, first << 4 * i, w + 64 * i);
  e = _mm512_rolv_epi32(e, _mm512_set_epi32(31, 31, 31, 31, 7, 7, 7, 7, 15, 15, 15, 15, 23, 23, 23, 23));
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(0x7f800000));
  e = _mm512_max_epu32(e, _mm512_set1_epi32(0x00400000)); /* 2^-127 */
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(e, nan, _mm512_set1_epi32(0x7fc00000)));
}

INLINE void line_mxfp4(const int rows, const char *w, const int8_t *q, const float *x, __m512 *sum) {
  enum { BLOCK = 17 };
  __m512 d = scales_of_sixteen(w), scale[FEW];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    scale[r] = _mm512_mul_ps(d, _mm512_loadu_ps(x + 32 * r));
    sum[r] = _mm512_fnmadd_ps(d, _mm512_loadu_ps(x + 32 * r + 16), sum[r]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i v = four_blocks(w + 4 * i * BLOCK + 1, BLOCK);
    add_groups(rows, q, i, TURNED, e2m1_numbers(v), e2m1_numbers(_mm512_srli_epi16(v, 4)), scale, sum);
  }
}

/* Scales of E4M3 in eight blocks, as words. They lie nine words of 32 bits apart: that of block i is word i of the i-th
 * eight. Their bits are those of f16 numbers 2^8 times as small. */
INLINE __m512i scales_of_eight(const char *w) {
  __m512i s = _mm512_maskz_loadu_epi32(0x0201, w);
#pragma GCC unroll 3
  for (int i = 1; i < 4; i++) s = _mm512_mask_loadu_epi32(s, (__mmask16)(0x0201 << 2 * i), w + 64 * i);
  const __m256i bytes = _mm256_or_si256(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
  s = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_and_si256(bytes, _mm256_set1_epi8(127))), 7);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(s, _mm512_set1_epi16(127 << 7));
  return _mm512_mask_mov_epi16(s, nan, _mm512_set1_epi16(0x7e00));
}

/* Of two blocks, the low nibbles are the first halves of eight groups, the high ones the second halves. */
INLINE void line_nvfp4(const int rows, const char *w, float row_factor, const int8_t *q, const float *x, __m512 *sum) {
  enum { BLOCK = 36 };
  const __m512i pairs = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i f16 = scales_of_eight(w);
  const __m512 factor = _mm512_set1_ps(128 * row_factor);
#pragma GCC unroll 2
  for (int b = 0; b < 2; b++) { /* 256 elements */
    const __m256i half = b ? _mm512_extracti64x4_epi64(f16, 1) : _mm512_castsi512_si256(f16);
    __m512 d = _mm512_mul_ps(_mm512_cvtph_ps(half), factor), scale[FEW];
    scale_groups(rows, d, x + 32 * b, scale, sum);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const __m512i v = two_blocks(w + (4 * b + 2 * i) * BLOCK + 4, BLOCK);
      const __m512i first = e2m1_numbers(v), second = e2m1_numbers(_mm512_srli_epi16(v, 4));
      const __m512i place = _mm512_add_epi32(pairs, _mm512_set1_epi32(8 * i));
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        const int8_t *at = q + LINE * r + 256 * b + 128 * i;
        __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, LOAD_512(at));
        dot = _mm512_dpbusd_epi32(dot, second, LOAD_512(at + 64));
        sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(place, scale[r]), sum[r]);
      }
    }
  }
}
