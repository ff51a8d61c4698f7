/* Block-quantized weights as numbers of bf16 for quant_tiles.c. */

/* Where units of a row go: those of step s at to + s * step, its parts STEP units apart. */
typedef struct target {
  uint32_t *to;
  int64_t step;
} target;

INLINE __m512 bytes_to_f32(const void *from, const bool has_sign) {
  __m128i v = _mm_loadu_si128((const __m128i *)from);
  return _mm512_cvtepi32_ps(has_sign ? _mm512_cvtepi8_epi32(v) : _mm512_cvtepu8_epi32(v));
}

/* Formats whose scales are of f16 have no weights that are too far from 1. */

static void put_q6_k(const ty_q6_k *b, int64_t groups, target t) {
  uint8_t code[MOST_K];
  float scale[MOST_K / 16];
  codes_q6_k(b, groups / 8, code);
  scales_q6_k(b, groups / 8, scale);
  const __m512 zero = _mm512_set1_ps(32);
  for (int64_t i = 0; i < groups; i++, t.to += t.step) {
    __m512 x[2];
    for (int h = 0; h < 2; h++)
      x[h] = _mm512_mul_ps(_mm512_sub_ps(bytes_to_f32(code + 32 * i + 16 * h, false), zero),
                           _mm512_set1_ps(scale[2 * i + h]));
    put_units(2, x[0], x[1], t.to, STEP);
  }
}

/* ---- formats of 16 levels: parts of all levels of a group, of which codes choose ---- */

/* Sixteen words: part p of the levels; what is left of them. */
INLINE __m256i level_part(__m512 *level) {
  __m512i h = upper_half(*level);
  *level = _mm512_sub_ps(*level, _mm512_castsi512_ps(_mm512_and_si512(h, _mm512_set1_epi32((int)0xffff0000))));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(h, 16));
}

/* index: words of 0 to 15, of the first elements of units in the low ones. */
INLINE void put_levels(const int parts, __m512 level, __m512i index, uint32_t *to) {
  for (int p = 0; p < parts; p++, to += STEP)
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, _mm512_castsi256_si512(level_part(&level))));
}

/* From sixteen bytes whose low nibbles are the first elements. */
INLINE __m512i nibble_words(const void *from) {
  __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
  return _mm512_and_si512(_mm512_or_si512(v, _mm512_slli_epi32(v, 12)), _mm512_set1_epi32(0x000f000f));
}

INLINE __m512 counting(void) { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

INLINE __m512 e2m1_levels(void) {
  static const float level[TY_TILE] = { TY_E2M1_TWICE };
  return _mm512_loadu_ps(level);
}

static void put_q4_0(const ty_q4_0 *b, int64_t groups, target t) {
  const __m512 code = _mm512_sub_ps(counting(), _mm512_set1_ps(8));
  float d[MOST_K / 32];
  gather_f16(b->d, sizeof *b, groups, d);
  for (int64_t i = 0; i < groups; i++, b++, t.to += t.step)
    put_levels(2, _mm512_mul_ps(code, _mm512_set1_ps(d[i])), nibble_words(b->q), t.to);
}

static void put_q4_k(const ty_q4_k *b, int64_t groups, target t) {
  const __m512 code = counting();
  const __m512i low4 = _mm512_set1_epi32(0x000f000f);
  float scale[MOST_K / 32], min[MOST_K / 32];
  scales_q4_k(b, groups / 8, scale, min);
  for (int64_t i = 0; i < groups; i += 2) {
    const uint8_t *q = b[i / 8].q + i % 8 * 16;
    __m512i first = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)q));
    __m512i second = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(q + 16)));
    __m512i both = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
    for (int h = 0; h < 2; h++, t.to += t.step) {
      __m512 level = _mm512_fmsub_ps(code, _mm512_set1_ps(scale[i + h]), _mm512_set1_ps(min[i + h]));
      put_levels(2, level, _mm512_and_si512(h ? _mm512_srli_epi32(both, 4) : both, low4), t.to);
    }
  }
}

static bool put_mxfp4(const ty_mxfp4 *b, int64_t groups, target t) {
  bool far = false;
  for (int64_t i = 0; i < groups; i++, b++, t.to += t.step) {
    float d = ty_e8m0_half(b->e);
    far |= d > FAR_W;
    put_levels(1, _mm512_mul_ps(e2m1_levels(), _mm512_set1_ps(d)), nibble_words(b->q), t.to);
  }
  return far;
}

/* Without the row's factor. */
static void put_nvfp4(const ty_nvfp4 *b, int64_t groups, target t) {
  float scale[MOST_K / 16];
  scales_nvfp4(b, groups / 2, 1, scale);
  const __m512i second = _mm512_set1_epi32(0x00100000), low4 = _mm512_set1_epi32(0x000f000f);
  for (int64_t i = 0; i < groups; i++, t.to += t.step) {
    const uint8_t *q = b[i / 2].q + i % 2 * 16;
    __m512 a = _mm512_mul_ps(e2m1_levels(), _mm512_set1_ps(scale[2 * i]));
    __m512 c = _mm512_mul_ps(e2m1_levels(), _mm512_set1_ps(scale[2 * i + 1]));
    __m512i level = _mm512_inserti64x4(_mm512_castsi256_si512(level_part(&a)), level_part(&c), 1);
    /* Eight bytes are the low nibbles, then the high ones, of sixteen elements: the second sixteen's in upper words. */
    __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)q));
    __m256i high = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(q + 8)));
    __m256i both = _mm256_or_si256(low, _mm256_slli_epi32(high, 16));
    __m512i index = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi32(both, 4), 1);
    index = _mm512_or_si512(_mm512_and_si512(index, low4), second);
    _mm512_storeu_si512(t.to, _mm512_permutexvar_epi16(index, level));
  }
}

static void put_floats(const ty_quant_product *p, const void *row, int64_t k0, int64_t groups, target t) {
  float x[MOST_K];
  TY_KERNEL(decode_row)(p->dtype, row, p->k, k0, k0 + 32 * groups, x);
  for (int64_t i = 0; i < groups; i++, t.to += t.step)
    put_units(2, _mm512_loadu_ps(x + 32 * i), _mm512_loadu_ps(x + 32 * i + 16), t.to, STEP);
}

/* Elements [k0, k0 + 32 groups) of row j. True: some are too far from 1. */
static bool put_row(const ty_quant_product *p, int64_t j, int64_t k0, int64_t groups, target t) {
  const char *row = p->w + j * p->w_row;
  const void *at = block_at(p->dtype, row, k0);
  switch (p->dtype) {
    case TY_Q4_0: put_q4_0(at, groups, t); return false;
    case TY_Q4_K: put_q4_k(at, groups, t); return false;
    case TY_Q6_K: put_q6_k(at, groups, t); return false;
    case TY_MXFP4: return put_mxfp4(at, groups, t);
    case TY_NVFP4: put_nvfp4(at, groups, t); return false;
    default: put_floats(p, row, k0, groups, t); return false;
  }
}

/* Asks for what put_row is to read. */
static void fetch_row(const ty_quant_product *p, int64_t j, int64_t k0, int64_t groups) {
  const uint8_t *at = block_at(p->dtype, p->w + j * p->w_row, k0);
  int64_t bytes = 32 * groups * ty_dtype_size[p->dtype] / ty_dtype_block[p->dtype];
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 3);
}
