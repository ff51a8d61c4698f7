/* Sums of integers of 24 bits that are looked up by a byte, 64 rows at a time, in tables of each of their three bytes:
 * for AVX-512 with VBMI, whose permutations of bytes these are. Included where "avx512vbmi" is the target. */

enum { BYTE_PARTS = 3, BYTE_ROWS = 64 };

static inline __m512i load(const void *p) { return _mm512_loadu_si512(p); }

/* The bytes of 64 integers, those of a part together, `row` bytes apart. */
static inline __attribute__((always_inline)) void split_integers(const __m512i u[4], uint8_t *to, int64_t row) {
#define FOURTH(i) 4 * (i), 4 * (i) + 4, 4 * (i) + 8, 4 * (i) + 12
#define FOURTHS FOURTH(0), FOURTH(4), FOURTH(8), FOURTH(12), FOURTH(16), FOURTH(20), FOURTH(24), FOURTH(28)
  static const uint8_t fourth[64] __attribute__((aligned(64))) = { FOURTHS, FOURTHS };
#undef FOURTHS
#undef FOURTH
  for (int part = 0; part < BYTE_PARTS; part++) {
    const __m512i at = _mm512_add_epi8(load(fourth), _mm512_set1_epi8((char)part));
    const __m512i low = _mm512_permutex2var_epi8(u[0], at, u[1]), high = _mm512_permutex2var_epi8(u[2], at, u[3]);
    _mm512_storeu_si512(to + part * row, _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1));
  }
}

/* Sums of bytes of 64 rows: `both` of pairs of rows as words, `odd` of the second of each. */
typedef struct byte_sums {
  __m512i both[BYTE_PARTS], odd[BYTE_PARTS];
} byte_sums;

static inline __attribute__((always_inline)) void add_part(byte_sums *s, int part, __m512i v) {
  s->both[part] = _mm512_add_epi16(s->both[part], v);
  s->odd[part] = _mm512_add_epi16(s->odd[part], _mm512_maddubs_epi16(v, _mm512_set1_epi16(1 << 8)));
}

/* The sums of 64 rows less `middle`, in their order. Sums of bytes have to be below 2^15. */
static inline __attribute__((always_inline)) void in_order(const byte_sums *s, int32_t middle, __m512 sum[4]) {
  const __m512i zero = _mm512_setzero_si512(), place = _mm512_set1_epi32(256 << 16 | 1);
  __m512i even[BYTE_PARTS], v[2][2]; /* v: of each sixteen rows 0, 2, 4, 6; 8, 10 ...; 1, 3 ...; 9, 11 ... */
  for (int part = 0; part < BYTE_PARTS; part++)
    even[part] = _mm512_sub_epi16(s->both[part], _mm512_slli_epi16(s->odd[part], 8));
  for (int k = 0; k < 2; k++) {
    const __m512i *w = k ? s->odd : even;
    v[k][0] = _mm512_add_epi32(_mm512_madd_epi16(_mm512_unpacklo_epi16(w[0], w[1]), place),
                               _mm512_unpacklo_epi16(zero, w[2]));
    v[k][1] = _mm512_add_epi32(_mm512_madd_epi16(_mm512_unpackhi_epi16(w[0], w[1]), place),
                               _mm512_unpackhi_epi16(zero, w[2]));
    for (int i = 0; i < 2; i++) v[k][i] = _mm512_sub_epi32(v[k][i], _mm512_set1_epi32(middle));
  }
  const __m512i a = _mm512_unpacklo_epi32(v[0][0], v[1][0]), b = _mm512_unpackhi_epi32(v[0][0], v[1][0]);
  const __m512i c = _mm512_unpacklo_epi32(v[0][1], v[1][1]), d = _mm512_unpackhi_epi32(v[0][1], v[1][1]);
  const __m512i e = _mm512_shuffle_i32x4(a, b, 0x44), f = _mm512_shuffle_i32x4(c, d, 0x44);
  const __m512i g = _mm512_shuffle_i32x4(a, b, 0xee), h = _mm512_shuffle_i32x4(c, d, 0xee);
  sum[0] = _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(e, f, 0x88));
  sum[1] = _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(e, f, 0xdd));
  sum[2] = _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(g, h, 0x88));
  sum[3] = _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(g, h, 0xdd));
}
