/* The products of a panel of quant_tile.h with rows of x, by AVX-512 with VNNI. */

/* Takes the bits of 1 from those of the scales, if these are such that exponents can be added. */
static void less_one(panel *b, int64_t groups) {
  const __m512i one = _mm512_set1_epi32(0x3f800000);
  __mmask16 all = 0xffff;
  for (int64_t i = 0; i < groups * TILE_COLUMNS; i += 16) {
    __m512 size = _mm512_abs_ps(_mm512_loadu_ps(b->scale[0] + i));
    all &= _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-40f), _CMP_GT_OQ);
    all &= _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p40f), _CMP_LT_OQ);
  }
  b->exponents = all == 0xffff;
  for (int64_t i = 0; b->exponents && i < groups * TILE_COLUMNS; i += 16) {
    __m512i *at = (__m512i *)(void *)(b->scale[0] + i);
    _mm512_storeu_si512(at, _mm512_sub_epi32(_mm512_loadu_si512(at), one));
  }
}

/* What four rows of x make with a group of W: exact sums [4][2], and what brings them to f32 and into the sums at c. */
typedef struct group_sums {
  const float *scale, *min;     /* of W [TILE_COLUMNS] */
  const float *x_scale, *x_sum; /* of x, TILE_K / 32 and TILE_K / group apart */
  float *c;                     /* [4][TILE_COLUMNS] */
} group_sums;

/* Adds sums i of 8 to c. */
INLINE void add_sums(const group_sums *d, const int group, const bool mins, const bool exponents, __m512i sums,
                     const int i) {
  const int r = i / 2, v = i % 2 * 16;
  float *c = d->c + r * TILE_COLUMNS + v;
  __m512 x_scale = _mm512_set1_ps(d->x_scale[r * (TILE_K / 32)]), scale = _mm512_loadu_ps(d->scale + v);
  if (exponents)
    scale = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(scale), _mm512_castps_si512(x_scale)));
  else scale = _mm512_mul_ps(scale, x_scale);
  __m512 y = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums), _mm512_loadu_ps(c));
  if (mins) y = _mm512_fnmadd_ps(_mm512_loadu_ps(d->min + v), _mm512_set1_ps(d->x_sum[r * (TILE_K / group)]), y);
  _mm512_storeu_ps(c, y);
}

/* Multiplies a group of four rows at q, and adds what `done` holds to its c meanwhile: products of bytes and of floats
 * take the same units, which a run of floats alone would leave half idle. */
INLINE void multiply_group(const int group, const bool mins, const bool exponents, const uint32_t *w, const int8_t *q,
                           const int32_t *start, __m512i s[8], const group_sums *d, const __m512i done[8]) {
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) s[2 * r] = s[2 * r + 1] = _mm512_set1_epi32(start[r * (TILE_K / group)]);
#pragma GCC unroll 8
  for (int u = 0; u < group / 4; u++, w += TILE_COLUMNS) {
    __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 16);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      int32_t four;
      memcpy(&four, q + r * TILE_K + 4 * u, sizeof four);
      __m512i a = _mm512_set1_epi32(four);
      s[2 * r] = _mm512_dpbusd_epi32(s[2 * r], w0, a);
      s[2 * r + 1] = _mm512_dpbusd_epi32(s[2 * r + 1], w1, a);
    }
#pragma GCC unroll 2
    for (int i = 32 / group * u; i < 32 / group * (u + 1); i++) add_sums(d, group, mins, exponents, done[i], i);
  }
}

/* Adds the products of kc elements of `rows` rows of x, whose parts begin at `first`, to the sums at c, and asks
 * meanwhile for the rows of W from next_j on and, unless y is NULL, for the rows there, which get the sums then. */
INLINE void multiply_panel(const product *p, const panel *b, int64_t kc, const int group, const bool mins,
                           const bool exponents, int64_t first, int64_t rows, float *c, int64_t next_j, int64_t next_k,
                           const float *y) {
  enum { HALF = TILE_ROWS / 2, GROUPS = TILE_K / 32 };
  const int starts = TILE_K / group;
  float none[HALF * TILE_COLUMNS] = { 0 };
  __m512i upper[8], lower[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) lower[i] = _mm512_setzero_si512();
  group_sums done = { b->scale[0], b->min[0], p->x->scale + first / 32, p->x->sum + first / group, none };
  int64_t share = (TILE_COLUMNS * TILE_ROWS + rows - 1) / rows;
  for (int64_t r = 0; r < rows; r += TILE_ROWS, first += TILE_ROWS * TILE_K, c += TILE_ROWS * TILE_COLUMNS) {
    fetch_rows(p, next_j, next_k, r / TILE_ROWS * share, (r / TILE_ROWS + 1) * share, 2);
    if (y)
      for (int64_t i = r; i < r + TILE_ROWS; i++) {
        __builtin_prefetch(y + i * p->n, 1, 2);
        __builtin_prefetch(y + i * p->n + 16, 1, 2);
      }
    const int8_t *q = p->x->q + first;
    const float *scale = p->x->scale + first / 32, *sum = p->x->sum + first / group;
    const int32_t *start = p->x->start + first / group;
    for (int64_t g = 0; g < kc / group; g++) {
      const uint32_t *w = b->code[g * group / 4];
      int64_t at = g * group / 32;
      multiply_group(group, mins, exponents, w, q + g * group, start + g, upper, &done, lower);
      done = (group_sums){ b->scale[g], b->min[g], scale + at, sum + g, c };
      multiply_group(group, mins, exponents, w, q + HALF * TILE_K + g * group, start + HALF * starts + g, lower, &done,
                     upper);
      done.x_scale += HALF * GROUPS, done.x_sum += HALF * starts, done.c += HALF * TILE_COLUMNS;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) add_sums(&done, group, mins, exponents, lower[i], i);
}

/* y[r][j] from the sums of rows [r0, r1), and the bias. */
static void put_sums(const product *p, int64_t j, int64_t r0, int64_t r1, const float *sums) {
  int64_t columns = columns_at(p, j);
  const __mmask16 in[2] = { columns < 16 ? (__mmask16)((1 << columns) - 1) : 0xffff,
                            columns > 16 ? (__mmask16)((1 << (columns - 16)) - 1) : 0 };
  __m512 bias[2] = { _mm512_setzero_ps(), _mm512_setzero_ps() };
  for (int v = 0; p->bias && v < 2; v++) bias[v] = _mm512_maskz_loadu_ps(in[v], p->bias + j + 16 * v);
  for (int64_t r = r0; r < r1; r++, sums += TILE_COLUMNS)
    for (int v = 0; v < 2; v++)
      _mm512_mask_storeu_ps(p->y + r * p->n + j + 16 * v, in[v],
                            _mm512_add_ps(_mm512_loadu_ps(sums + 16 * v), bias[v]));
}

INLINE void multiply_tile(const product *p, panel *b, int64_t kc, int64_t first, int64_t rows, float *sums,
                          int64_t next_j, int64_t next_k, const float *y) {
  b->exponents = p->x->power && !p->x->wide;
  if (b->exponents) less_one(b, kc / p->x->group);
#define MULTIPLY(...) multiply_panel(p, b, kc, __VA_ARGS__, first, rows, sums, next_j, next_k, y)
  if (p->dtype == TY_Q2_K) MULTIPLY(16, true, false);
  else if (p->x->group == 16) MULTIPLY(16, false, false);
  else if (p->dtype == TY_Q4_K && b->exponents) MULTIPLY(32, true, true);
  else if (p->dtype == TY_Q4_K) MULTIPLY(32, true, false);
  else if (b->exponents) MULTIPLY(32, false, true);
  else MULTIPLY(32, false, false);
#undef MULTIPLY
}
