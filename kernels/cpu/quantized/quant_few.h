/* y = x W' for few rows of x with the integer dot products of AVX-512: codes are decoded in registers, in the order in
 * which W lies in memory, and each vector of them meets all rows of x. Where a group has 32 elements, the two halves of
 * four groups make two vectors whose products add up in the same lanes, four to a group; rows of x lie in that order.
 * Included by quant_linear.c. */

#define INLINE static inline __attribute__((always_inline))
#define LOAD_512(p) _mm512_loadu_si512((const void *)(p))
#define LOAD_256(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define LOAD_128(p) _mm_loadu_si128((const __m128i *)(const void *)(p))

/* The order of the scales of W, and of the factors of x, of four groups that are multiplied together. */
enum { PLAIN, CROSSED, TURNED };

/* Lane l: number 4 i + l / 4 of v; crossed: the second and third of the four change places; turned: number i + 4 (l /
 * 4). */
INLINE __m512 spread(__m512 v, const int i, const int order) {
  const int b = order == CROSSED ? 2 : 1, c = 3 - b;
  const __m512i of_four = _mm512_set_epi32(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0);
  if (order == TURNED) return _mm512_permutexvar_ps(_mm512_add_epi32(of_four, _mm512_set1_epi32(i)), v);
  const __m512i four = _mm512_set_epi32(3, 3, 3, 3, c, c, c, c, b, b, b, b, 0, 0, 0, 0);
  return _mm512_permutexvar_ps(_mm512_add_epi32(four, _mm512_set1_epi32(4 * i)), v);
}

/* Sixteen f16 numbers that lie `step` words apart. Words are loaded 32 at a time, and the place of a number in them is
 * the same whichever they are. */
INLINE __m512 apart_f16(const char *at, const int step) {
  const __m512i lane = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 15, 14, 13, 12, 11, 10, 9, 8, 7,
                                        6, 5, 4, 3, 2, 1, 0);
  const __m512i place = _mm512_mullo_epi16(lane, _mm512_set1_epi16((short)step));
  const int last = 15 * step / 32;
  __m512i v = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i <= last; i++) {
    int begin = (32 * i + step - 1) / step, end = (32 * i + 32 + step - 1) / step;
    __mmask32 wanted = i < last ? ~0u : ~0u >> (31 - 15 * step % 32),
              here = (1u << (i < last ? end : 16)) - (1u << begin);
    v = _mm512_mask_permutexvar_epi16(v, here, place, _mm512_maskz_loadu_epi16(wanted, at + 64 * i));
  }
  return _mm512_cvtph_ps(_mm512_castsi512_si256(v));
}

/* 32 bytes of each of two blocks. */
INLINE __m512i two_blocks(const char *at, const int64_t block) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(LOAD_256(at)), LOAD_256(at + block), 1);
}

/* Sixteen bytes of each of four blocks. */
INLINE __m512i four_blocks(const char *at, const int64_t block) {
  __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(LOAD_128(at)), LOAD_128(at + block), 1);
  __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(LOAD_128(at + 2 * block)), LOAD_128(at + 3 * block), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* Each adds the products of LINE elements of a row of W, whose blocks begin at w, with `rows` rows of x: their codes
 * and factors (code_line) follow each other. */

/* Four groups: two vectors of codes, part i of the line. */
INLINE void add_groups(const int rows, const int8_t *q, const int i, const int order, __m512i first, __m512i second,
                       const __m512 *scale, __m512 *sum) {
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const int8_t *at = q + LINE * r + 128 * i;
    __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, LOAD_512(at));
    dot = _mm512_dpbusd_epi32(dot, second, LOAD_512(at + 64));
    sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), spread(scale[r], i, order), sum[r]);
  }
}

INLINE void line_32(const bool nibbles, const int rows, const char *w, const int8_t *q, const float *x, __m512 *sum) {
  const __m512i low4 = _mm512_set1_epi8(15), sign = _mm512_set1_epi8((char)0x80);
  const int64_t block = nibbles ? 18 : 34;
  __m512 d = apart_f16(w, (int)block / 2), scale[FEW];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    scale[r] = _mm512_mul_ps(d, _mm512_loadu_ps(x + 32 * r));
    sum[r] = _mm512_fnmadd_ps(d, _mm512_loadu_ps(x + 32 * r + 16), sum[r]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const char *at = w + 4 * i * block + 2;
    __m512i v = four_blocks(at, block), first, second;
    if (nibbles) {
      first = _mm512_and_si512(v, low4);
      second = _mm512_and_si512(_mm512_srli_epi16(v, 4), low4);
    } else {
      first = _mm512_xor_si512(v, sign);
      second = _mm512_xor_si512(four_blocks(at + 16, block), sign);
    }
    add_groups(rows, q, i, PLAIN, first, second, scale, sum);
  }
}

INLINE void line_q4_k(const int rows, const char *w, const int8_t *q, const float *x, __m512 *sum) {
  const __m512i low4 = _mm512_set1_epi8(15);
#pragma GCC unroll 2
  for (int b = 0; b < 2; b++, w += 144) {
    /* d, dmin and twelve bytes make eight scales and eight mins of six bits: words 0 and 2 have the low six bits of
     * the first four of each, word 3 the low four bits of the others, and their upper two are those of words 0, 2. */
    __m128i head = LOAD_128(w), s = _mm_shuffle_epi32(head, _MM_SHUFFLE(2, 2, 1, 1));
    __m128i tail = _mm_shuffle_epi32(head, _MM_SHUFFLE(3, 3, 3, 3));
    __m128i six = _mm_and_si128(s, _mm_set1_epi8(63));
    __m128i more = _mm_or_si128(_mm_and_si128(_mm_srlv_epi32(tail, _mm_set_epi32(4, 0, 0, 0)), _mm_set1_epi8(15)),
                                _mm_and_si128(_mm_srli_epi32(s, 2), _mm_set1_epi8(48)));
    __m512 code = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_blend_epi32(six, more, 10)));
    __m512 d = _mm512_broadcast_f32x4(_mm_cvtph_ps(head)), scale[FEW];
    d = _mm512_permutexvar_ps(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), d);
    d = _mm512_mul_ps(d, code);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      scale[r] = _mm512_mul_ps(d, _mm512_loadu_ps(x + 32 * r + 16 * b));
      sum[r] = _mm512_mask_sub_ps(sum[r], 0xff00, sum[r], scale[r]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      __m512i v = LOAD_512(w + 16 + 64 * i), low = _mm512_and_si512(v, low4);
      __m512i high = _mm512_and_si512(_mm512_srli_epi16(v, 4), low4);
      __m512i first = _mm512_shuffle_i64x2(low, high, _MM_SHUFFLE(2, 0, 2, 0));
      __m512i second = _mm512_shuffle_i64x2(low, high, _MM_SHUFFLE(3, 1, 3, 1));
      add_groups(rows, q + 256 * b, i, CROSSED, first, second, scale, sum);
    }
  }
}

/* Scales d of W's groups of 16 in a block times those of x; what W's zero stands for is taken off the sums. */
INLINE void scale_groups(const int rows, __m512 d, const float *x, __m512 *scale, __m512 *sum) {
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const float *at = x + 64 * r;
    scale[r] = _mm512_mul_ps(d, _mm512_loadu_ps(at));
    sum[r] = _mm512_fnmadd_ps(d, _mm512_loadu_ps(at + 16), sum[r]);
  }
}

INLINE void line_q6_k(const int rows, const char *w, const int8_t *q, const float *x, __m512 *sum) {
  const __m512i low4 = _mm512_set1_epi8(15), high2 = _mm512_set1_epi8(48);
  const __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
  const __m512i right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
#pragma GCC unroll 2
  for (int b = 0; b < 2; b++, w += 210) {
    __m512 d = _mm512_set1_ps(ty_block_f16((const uint8_t *)w + 208)), scale[FEW];
    d = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(LOAD_128(w + 192))));
    scale_groups(rows, d, x + 32 * b, scale, sum);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      __m512i low = LOAD_512(w + i / 2 * 64);
      __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)(w + 128 + i / 2 * 32)));
      if (i % 2) low = _mm512_srli_epi16(low, 4), high = _mm512_srlv_epi16(high, right);
      else high = _mm512_sllv_epi16(high, left);
      __m512i code = _mm512_or_si512(_mm512_and_si512(low, low4), _mm512_and_si512(high, high2));
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        __m512i a = LOAD_512(q + LINE * r + 256 * b + 64 * i);
        __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), code, a);
        sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), spread(scale[r], i, PLAIN), sum[r]);
      }
    }
  }
}

#include "quant_few_e2m1.h"
#include "quant_few_low.h"

/* Bytes of a line of W; a constant, which the tables of dtypes would not be. */
INLINE int64_t line_bytes(const ty_dtype dtype) {
  switch (dtype) {
    case TY_Q8_0: return LINE / 32 * sizeof(ty_q8_0);
    case TY_Q4_0: return LINE / 32 * sizeof(ty_q4_0);
    case TY_Q4_K: return LINE / 256 * sizeof(ty_q4_k);
    case TY_MXFP4: return LINE / 32 * sizeof(ty_mxfp4);
    case TY_NVFP4: return LINE / 64 * sizeof(ty_nvfp4);
    case TY_Q2_K: return LINE / 256 * sizeof(ty_q2_k);
    case TY_Q3_K: return LINE / 256 * sizeof(ty_q3_k);
    default: return LINE / 256 * sizeof(ty_q6_k);
  }
}

/* A part of k: lines from `line` on, `length` elements; `ahead`: where W is read from next, in bytes. */
typedef struct few_part {
  int64_t line, length, ahead;
} few_part;

/* sum[r]: the product of (a part of) a row of W, which begins at w, with row r of x. */
INLINE void row_product(const ty_dtype dtype, const int rows, const coded *x, const char *w, const few_part *part,
                        __m512 *sum) {
  const int64_t bytes = line_bytes(dtype), factors = line_factors(dtype);
  const int8_t *q = x->q + part->line * LINE * rows;
  const float *factor = x->scale + part->line * factors * rows;
  char rest[LINE * 34 / 32];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_ps();
  const float row_factor = dtype == TY_NVFP4 ? ty_nvfp4_factor(w) : 1;
  w += part->line * bytes + (dtype == TY_NVFP4 ? TY_NVFP4_HEAD : 0);
  for (int64_t left = part->length; left > 0; left -= LINE, w += bytes, q += LINE * rows, factor += factors * rows) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(w + b + part->ahead);
    if (left < LINE) {
      memset(rest, 0, sizeof rest);
      w = memcpy(rest, w, (size_t)(bytes * left / LINE));
    }
    switch (dtype) {
      case TY_Q8_0: line_32(false, rows, w, q, factor, sum); break;
      case TY_Q4_0: line_32(true, rows, w, q, factor, sum); break;
      case TY_Q4_K: line_q4_k(rows, w, q, factor, sum); break;
      case TY_MXFP4: line_mxfp4(rows, w, q, factor, sum); break;
      case TY_NVFP4: line_nvfp4(rows, w, row_factor, q, factor, sum); break;
      case TY_Q2_K:
      case TY_Q3_K: line_low(dtype, rows, w, q, factor, sum); break;
      default: line_q6_k(rows, w, q, factor, sum);
    }
  }
}

/* Rows [j0, j1) of W. What is the same for all of them stays in registers. */
INLINE void few_products(const ty_dtype dtype, const int rows, const product *p, const few_part *part, int64_t j0,
                         int64_t j1) {
  for (int64_t j = j0; j < j1; j += PUT) {
    __m512 sums[FEW][PUT];
    const int64_t n = j1 - j < PUT ? j1 - j : PUT;
    for (int64_t i = 0; i < n; i++) {
      __m512 sum[FEW];
      row_product(dtype, rows, p->x, p->w + (j + i) * p->w_row, part, sum);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) sums[r][i] = sum[r];
    }
    put(p, rows, j, n, part->line == 0, sums);
  }
}

typedef void few_products_fn(const product *p, const few_part *part, int64_t j0, int64_t j1);
#define PRODUCT(dtype, rows)                                                                              \
  static void products_##dtype##_##rows(const product *p, const few_part *part, int64_t j0, int64_t j1) { \
    few_products(TY_##dtype, rows, p, part, j0, j1);                                                      \
  }
#define PRODUCTS(dtype)                                                                               \
  PRODUCT(dtype, 1)                                                                                   \
  PRODUCT(dtype, 2)                                                                                   \
  PRODUCT(dtype, 3)                                                                                   \
  PRODUCT(dtype, 4)                                                                                   \
  PRODUCT(dtype, 5)                                                                                   \
  PRODUCT(dtype, 6)                                                                                   \
  PRODUCT(dtype, 7)                                                                                   \
  PRODUCT(dtype, 8)                                                                                   \
  static few_products_fn *const products_##dtype[FEW] = { products_##dtype##_1, products_##dtype##_2, \
                                                          products_##dtype##_3, products_##dtype##_4, \
                                                          products_##dtype##_5, products_##dtype##_6, \
                                                          products_##dtype##_7, products_##dtype##_8 };
PRODUCTS(Q8_0)
PRODUCTS(Q4_0)
PRODUCTS(Q4_K)
PRODUCTS(Q6_K)
PRODUCTS(MXFP4)
PRODUCTS(NVFP4)
PRODUCTS(Q2_K)
PRODUCTS(Q3_K)
#undef PRODUCTS
#undef PRODUCT

static few_products_fn *few_products_of(ty_dtype dtype, int64_t rows) {
  switch (dtype) {
    case TY_Q8_0: return products_Q8_0[rows - 1];
    case TY_Q4_0: return products_Q4_0[rows - 1];
    case TY_Q4_K: return products_Q4_K[rows - 1];
    case TY_MXFP4: return products_MXFP4[rows - 1];
    case TY_NVFP4: return products_NVFP4[rows - 1];
    case TY_Q2_K: return products_Q2_K[rows - 1];
    case TY_Q3_K: return products_Q3_K[rows - 1];
    default: return products_Q6_K[rows - 1];
  }
}

/* Rows [begin, end) of W. Of x, what stays in the first cache meets a group of them before the next part. */
static void few_rows(void *context, int64_t begin, int64_t end) {
  const product *p = context;
  few_products_fn *products = few_products_of(p->dtype, p->rows);
  int64_t k = p->columns, length = part_of(p, sizeof(int8_t)), ahead = length < k ? p->w_row : AHEAD;
  for (int64_t j0 = begin; j0 < end && !ty_interrupted; j0 += GROUP) {
    int64_t j1 = j0 + GROUP < end ? j0 + GROUP : end;
    for (int64_t k0 = 0; k0 < k; k0 += length)
      products(p, &(few_part){ k0 / LINE, k - k0 < length ? k - k0 : length, ahead }, j0, j1);
  }
}
#undef LOAD_128
#undef LOAD_256
#undef LOAD_512
#undef INLINE
