/* Elements as numbers of bf16 for products on tiles, for one type of elements; included by conv_tiles.c with PLANES
 * (numbers of bf16 that add up to an element), PIECE (its type) and NAME(x) set. */

#if PLANES == 1
#define UPPER(x) _mm512_slli_epi32(x, 16)
#else
#define UPPER(x) (x)
#endif

/* Up to 16 elements, in lanes of 32 bits: bf16 in the upper half, f32 as it is. */
TILE_INLINE __m512i NAME(pick)(const PIECE *p, int64_t step, int64_t n) {
  if (n <= 0) return _mm512_setzero_si512();
#if PLANES == 1
  if (step == 1 && n >= 16) return UPPER(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)));
#endif
  __mmask16 mask = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
#if PLANES == 1
  if (step == 1) return UPPER(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)));
  if (step == 2) return UPPER(_mm512_maskz_loadu_epi16(n >= 16 ? 0x7fffffffu : (1u << (2 * n - 1)) - 1, p));
#else
  if (step == 1) return _mm512_maskz_loadu_epi32(mask, p);
#endif
  uint32_t gathered[16] = { 0 };
  for (int64_t i = 0; i < n && i < 16; i++) {
#if PLANES == 1
    gathered[i] = (uint32_t)p[i * step] << 16;
#else
    memcpy(gathered + i, p + i * step, sizeof *gathered);
#endif
  }
  return _mm512_loadu_si512(gathered);
}

/* What sizes were met, times two: the largest, and of f32 the smallest that is not 0, less one. */
typedef struct NAME(sizes) {
  __m512i most, least;
} NAME(sizes);

TILE_INLINE void NAME(note)(__m512i x, NAME(sizes) * s) {
#if PLANES == 1
  s->most = _mm512_max_epu16(s->most, _mm512_add_epi16(x, x));
#else
  __m512i twice = _mm512_add_epi32(x, x);
  s->most = _mm512_max_epu32(s->most, twice);
  s->least = _mm512_min_epu32(s->least, _mm512_sub_epi32(twice, _mm512_set1_epi32(1)));
#endif
}

/* Whether there were infinities or NaN, or of f32 numbers that have no parts (gemm_tiles_pack.h). */
static bool NAME(odd)(const NAME(sizes) * s) {
#if PLANES == 1
  return _mm512_cmpge_epu16_mask(s->most, _mm512_set1_epi16((short)0xff00)) != 0;
#else
  return _mm512_cmpge_epu32_mask(s->most, _mm512_set1_epi32((int)TY_PARTS_LARGE)) != 0 ||
         _mm512_cmplt_epu32_mask(s->least, _mm512_set1_epi32(TY_PARTS_TINY - 1)) != 0;
#endif
}

static NAME(sizes) NAME(no_sizes)(void) { return (NAME(sizes)){ _mm512_setzero_si512(), _mm512_set1_epi32(-1) }; }

/* The units of two vectors, one for each plane: x0 in the lower halves. */
TILE_INLINE void NAME(units)(__m512i x0, __m512i x1, __m512i *units) {
  for (int p = 0; p < PLANES; p++) {
    __m512i a = p < PLANES - 1 ? ty_bf16_part(&x0) : x0, b = p < PLANES - 1 ? ty_bf16_part(&x1) : x1;
    units[p] = _mm512_or_si512(_mm512_srli_epi32(a, 16), b);
  }
}

/* 32 neighbours from two vectors of 16. */
TILE_INLINE void NAME(split_32)(__m512i x0, __m512i x1, __m512i *planes) {
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  for (int p = 0; p < PLANES; p++) {
    __m512i a = p < PLANES - 1 ? ty_bf16_part(&x0) : x0, b = p < PLANES - 1 ? ty_bf16_part(&x1) : x1;
    __m512i packed = _mm512_packus_epi32(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
    planes[p] = _mm512_permutexvar_epi64(order, packed);
  }
}

/* Up to 32 elements, as one number of bf16 for each plane. */
TILE_INLINE void NAME(pick_32)(const PIECE *p, int64_t step, int64_t n, __m512i *planes, NAME(sizes) * sizes) {
#if PLANES == 1
  if (step == 1) {
    planes[0] = n >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((1u << n) - 1, p);
    NAME(note)(planes[0], sizes);
    return;
  }
#endif
  __m512i a = NAME(pick)(p, step, n), b = NAME(pick)(p + 16 * step, step, n - 16);
  NAME(note)(a, sizes), NAME(note)(b, sizes);
  NAME(split_32)(a, b, planes);
}

#undef UPPER
