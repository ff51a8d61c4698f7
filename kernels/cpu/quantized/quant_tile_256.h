/* The products of a panel of quant_tile.h with rows of x, by AVX2: products of two bytes without a sign and two with
 * one are added up as a word. How many of these a word holds is what formats differ in:
 *   EIGHTS  codes of at most 15, or groups of 16 with codes of at most 24: all of a group, 16 15 127 < 2^15;
 *   PAIRS   codes of at most 63: two, 4 63 127 < 2^15;
 *   SIGNED  Q8_0: none but the first, and that of |w|, whose sign goes to x: 2 128 127 < 2^15.
 * As products of words, with both sides widened, Q8_0 takes as long: half the instructions for half the elements. */

typedef enum tile_way { EIGHTS, PAIRS, SIGNED } tile_way;

#define LOAD_256(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
/* Else gcc takes products of many steps together before it adds them, more than there are registers. */
#define KEEP(v) __asm__ volatile("" : "+x"(v))

enum { WIDE = TILE_COLUMNS / 8, HIGH = TILE_ROWS };

/* Codes of Q8_0 to |w|, and to w. */
static void part_signs(panel *b, int64_t kc) {
  for (int64_t i = 0; i < kc / 4 * TILE_COLUMNS; i += 8) {
    const __m256i w = _mm256_xor_si256(LOAD_256(b->code[0] + i), _mm256_set1_epi8((char)0x80));
    _mm256_storeu_si256((__m256i *)(void *)(b->code[0] + i), _mm256_abs_epi8(w));
    _mm256_storeu_si256((__m256i *)(void *)(b->sign[0] + i), w);
  }
}

INLINE __m256i four_of(const int8_t *q) {
  int32_t four;
  memcpy(&four, q, sizeof four);
  return _mm256_set1_epi32(four);
}

/* Products of a group, or half of one, of W from code w on with rows of x: exact sums of four codes each. */
INLINE void multiply_group(const tile_way way, const int group, const uint32_t *w, const uint32_t *sign,
                           const int8_t *q, const int32_t *start, __m256i s[HIGH][WIDE]) {
  const __m256i ones = _mm256_set1_epi16(1);
  const int steps = way == PAIRS ? 2 : 1;
  if (way != EIGHTS)
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; r++)
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; v++)
        s[r][v] = way == SIGNED ? _mm256_setzero_si256() : _mm256_set1_epi32(start[r * (TILE_K / group)]);
#pragma GCC unroll 8
  for (int u = 0; u < group / 4; u += steps, w += steps * TILE_COLUMNS, sign += TILE_COLUMNS, q += 4 * steps) {
    __m256i b[WIDE], more[WIDE];
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; v++) {
      b[v] = LOAD_256(w + 8 * v);
      if (way == PAIRS) more[v] = LOAD_256(w + TILE_COLUMNS + 8 * v);
      if (way == SIGNED) more[v] = LOAD_256(sign + 8 * v);
    }
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; r++) {
      const __m256i a = four_of(q + r * TILE_K), next = way == PAIRS ? four_of(q + r * TILE_K + 4) : a;
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; v++) {
        __m256i two = _mm256_maddubs_epi16(b[v], way == SIGNED ? _mm256_sign_epi8(a, more[v]) : a);
        if (way == EIGHTS) {
          s[r][v] = u ? _mm256_add_epi16(s[r][v], two) : two;
        } else {
          if (way == PAIRS) two = _mm256_add_epi16(two, _mm256_maddubs_epi16(more[v], next));
          s[r][v] = _mm256_add_epi32(s[r][v], _mm256_madd_epi16(two, ones));
        }
        KEEP(s[r][v]);
      }
    }
  }
  if (way == EIGHTS)
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; r++)
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; v++) s[r][v] = _mm256_madd_epi16(s[r][v], ones);
}

/* Adds the products of kc elements of `rows` rows of x, whose parts begin at `first`, to the sums at c, and asks
 * meanwhile for the rows of W from next_j on. */
INLINE void multiply_panel(const product *p, const panel *b, int64_t kc, const tile_way way, const int group,
                           const bool mins, int64_t first, int64_t rows, float *c, int64_t next_j, int64_t next_k) {
  const int starts = TILE_K / group;
  const bool zero = way != SIGNED && !mins;
  const int64_t share = (TILE_COLUMNS * TILE_ROWS + rows - 1) / rows;
  for (int64_t r0 = 0; r0 < rows; r0 += TILE_ROWS, first += TILE_ROWS * TILE_K, c += TILE_ROWS * TILE_COLUMNS) {
    fetch_rows(p, next_j, next_k, r0 / TILE_ROWS * share, (r0 / TILE_ROWS + 1) * share, 2);
    const float *x_scale = p->x->scale + first / 32, *x_sum = p->x->sum + first / group;
    const int32_t *start = p->x->start + first / group;
    for (int64_t g = 0; g < kc / group; g++) {
      __m256i s[HIGH][WIDE];
      const int64_t at = g * group / 4;
      multiply_group(way, group, b->code[at], b->sign[at], p->x->q + first + g * group, start + g, s);
#pragma GCC unroll 4
      for (int v = 0; v < WIDE; v++) {
        const __m256 scale = _mm256_loadu_ps(b->scale[g] + 8 * v), min = _mm256_loadu_ps(b->min[g] + 8 * v);
#pragma GCC unroll 8
        for (int r = 0; r < HIGH; r++) {
          float *to = c + r * TILE_COLUMNS + 8 * v;
          if (zero && way == EIGHTS) s[r][v] = _mm256_add_epi32(s[r][v], _mm256_set1_epi32(start[r * starts + g]));
          const __m256 factor = _mm256_mul_ps(scale, _mm256_broadcast_ss(x_scale + r * (TILE_K / 32) + g * group / 32));
          __m256 y = _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(s[r][v]), _mm256_loadu_ps(to));
          if (mins) y = _mm256_fnmadd_ps(min, _mm256_broadcast_ss(x_sum + r * starts + g), y);
          _mm256_storeu_ps(to, y);
        }
      }
    }
  }
}

INLINE void multiply_tile(const product *p, panel *b, int64_t kc, int64_t first, int64_t rows, float *sums,
                          int64_t next_j, int64_t next_k, const float *y) {
  (void)y;
  if (p->dtype == TY_Q8_0) part_signs(b, kc);
#define MULTIPLY(...) multiply_panel(p, b, kc, __VA_ARGS__, first, rows, sums, next_j, next_k)
  switch (p->dtype) {
    case TY_Q8_0: MULTIPLY(SIGNED, 32, false); break;
    case TY_MXFP4: MULTIPLY(PAIRS, 32, false); break;
    case TY_Q6_K: MULTIPLY(PAIRS, 16, false); break;
    case TY_Q2_K: MULTIPLY(EIGHTS, 16, true); break;
    case TY_Q4_0: MULTIPLY(EIGHTS, 32, false); break;
    case TY_Q4_K: MULTIPLY(EIGHTS, 32, true); break;
    default: MULTIPLY(EIGHTS, 16, false); /* Q3_K, NVFP4 */
  }
#undef MULTIPLY
}

/* y[r][j] from the sums of rows [r0, r1), and the bias. */
static void put_sums(const product *p, int64_t j, int64_t r0, int64_t r1, const float *sums) {
  const int64_t columns = columns_at(p, j);
  float bias[TILE_COLUMNS] = { 0 };
  if (p->bias) memcpy(bias, p->bias + j, sizeof *bias * (size_t)columns);
  for (int64_t r = r0; r < r1; r++, sums += TILE_COLUMNS) {
    float y[TILE_COLUMNS];
    for (int i = 0; i < TILE_COLUMNS; i++) y[i] = sums[i] + bias[i];
    if (columns == TILE_COLUMNS) memcpy(p->y + r * p->n + j, y, sizeof y);
    else memcpy(p->y + r * p->n + j, y, sizeof *y * (size_t)columns);
  }
}
#undef KEEP
#undef LOAD_256
