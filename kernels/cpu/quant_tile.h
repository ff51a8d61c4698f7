/* y = x W' for many rows of x: 32 rows of W at a time are decoded to bytes, 256 elements of k of each, turned so that a
 * vector has four elements of sixteen rows, and multiplied with eight rows of x at a time. Sums of a group are exact
 * integers, which scales bring to f32. Included by quant_linear.c where VNNI is set. */

enum {
  TILE_K = 256,
  TILE_COLUMNS = 32,
  TILE_ROWS = 8,
  TILE_MOST = 512 /* rows of x; their sums stay in the second cache */
};

typedef struct panel {
  uint32_t code[TILE_K / 4][TILE_COLUMNS];
  float scale[TILE_K / 16][TILE_COLUMNS];
  float min[TILE_K / 32][TILE_COLUMNS];
} panel;

/* Rows [j, j + columns) of W, elements [k0, k0 + kc). */
static void pack_panel(const product *p, int64_t j, int64_t columns, int64_t k0, int64_t kc, panel *to) {
  uint32_t code[TILE_COLUMNS][TILE_K / 4] __attribute__((aligned(64)));
  float scale[TILE_COLUMNS][TILE_K / 16], min[TILE_COLUMNS][TILE_K / 32];
  for (int64_t i = 0; i < TILE_COLUMNS; i++) {
    const char *row = p->w + (j + i) * p->w_row;
    if (i < columns)
      row_codes(p->dtype, row, k0, kc, (uint8_t *)code[i]), row_scales(p->dtype, row, k0, kc, scale[i], min[i]);
    else memset(code[i], 0, sizeof *code), memset(scale[i], 0, sizeof *scale), memset(min[i], 0, sizeof *min);
  }
  ty_transpose_uint32_t(to->code[0], TILE_COLUMNS, code[0], TILE_K / 4, kc / 4, TILE_COLUMNS);
  for (int64_t g = 0; g < kc / p->x->group; g++)
    for (int i = 0; i < TILE_COLUMNS; i++) to->scale[g][i] = scale[i][g];
  if (p->dtype == TY_Q4_K)
    for (int64_t g = 0; g < kc / 32; g++)
      for (int i = 0; i < TILE_COLUMNS; i++) to->min[g][i] = min[i][g];
}

/* Adds the products of kc elements to the 8 x 32 sums at c. The rows of q lie `block` apart, what belongs to their
 * groups likewise. The integer sums of a group fill the registers: those at c stay in the first cache. */
static inline __attribute__((always_inline)) void tile_product(int64_t kc, const panel *b, const int group,
                                                               const bool mins, const int8_t *q, const float *scale,
                                                               const float *sum, const int32_t *start, float *c) {
  for (int64_t g = 0; g < kc / group; g++) {
    __m512i s[TILE_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++) s[r][0] = s[r][1] = _mm512_set1_epi32(start[r * (TILE_K / group) + g]);
#pragma GCC unroll 8
    for (int u = 0; u < group / 4; u++) {
      const uint32_t *w = b->code[g * group / 4 + u];
      __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 16);
#pragma GCC unroll 8
      for (int r = 0; r < TILE_ROWS; r++) {
        int32_t four;
        memcpy(&four, q + r * TILE_K + g * group + 4 * u, sizeof four);
        __m512i a = _mm512_set1_epi32(four);
        s[r][0] = _mm512_dpbusd_epi32(s[r][0], w0, a);
        s[r][1] = _mm512_dpbusd_epi32(s[r][1], w1, a);
      }
    }
    __m512 scale0 = _mm512_loadu_ps(b->scale[g]), scale1 = _mm512_loadu_ps(b->scale[g] + 16);
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++) {
      float *to = c + TILE_COLUMNS * r;
      __m512 x = _mm512_set1_ps(scale[r * (TILE_K / 32) + g * group / 32]);
      __m512 c0 = _mm512_fmadd_ps(_mm512_mul_ps(scale0, x), _mm512_cvtepi32_ps(s[r][0]), _mm512_loadu_ps(to));
      __m512 c1 = _mm512_fmadd_ps(_mm512_mul_ps(scale1, x), _mm512_cvtepi32_ps(s[r][1]), _mm512_loadu_ps(to + 16));
      if (mins) {
        __m512 total = _mm512_set1_ps(sum[r * (TILE_K / 32) + g]);
        c0 = _mm512_fnmadd_ps(_mm512_loadu_ps(b->min[g]), total, c0);
        c1 = _mm512_fnmadd_ps(_mm512_loadu_ps(b->min[g] + 16), total, c1);
      }
      _mm512_storeu_ps(to, c0);
      _mm512_storeu_ps(to + 16, c1);
    }
  }
}

/* Asks for rows [i0, i1) of the 32 rows of W from j on, TILE_K elements from k0. */
static inline void fetch_panel(const product *p, int64_t j, int64_t k0, int64_t i0, int64_t i1) {
  int64_t block = ty_dtype_block[p->dtype], size = ty_dtype_size[p->dtype], bytes = TILE_K / block * size;
  if (i1 > p->n - j) i1 = p->n - j;
  if (i1 > TILE_COLUMNS) i1 = TILE_COLUMNS;
  for (int64_t i = i0; i < i1; i++) {
    const char *at = p->w + (j + i) * p->w_row + k0 / block * size;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 2);
  }
}

/* Panels [begin, end) of 32 rows of W, with all rows of x. */
static void tile_panels(void *context, int64_t begin, int64_t end) {
  product *p = context;
  const coded *x = p->x;
  size_t bytes = sizeof(float) * TILE_COLUMNS * (size_t)(x->rows < TILE_MOST ? x->rows : TILE_MOST);
  float *sums = ty_scratch_alloc(bytes);
  if (!sums) {
    p->failed = true;
    return;
  }
  panel b;
  for (int64_t at = begin; at < end && !ty_interrupted; at++) {
    int64_t j = at * TILE_COLUMNS, columns = p->n - j < TILE_COLUMNS ? p->n - j : TILE_COLUMNS;
    for (int64_t r0 = 0; r0 < p->rows; r0 += TILE_MOST) {
      int64_t r1 = r0 + TILE_MOST < x->rows ? r0 + TILE_MOST : x->rows;
      memset(sums, 0, bytes);
      for (int64_t k0 = 0; k0 < x->k; k0 += TILE_K) {
        int64_t kc = x->k - k0 < TILE_K ? x->k - k0 : TILE_K;
        pack_panel(p, j, columns, k0, kc, &b);
        bool last = k0 + kc == x->k;
        int64_t next_j = last ? j + TILE_COLUMNS : j, next_k = last ? 0 : k0 + kc, step = 0;
        int64_t share = (TILE_COLUMNS * TILE_ROWS + r1 - r0 - 1) / (r1 - r0), first = coded_at(x, r0, k0);
        for (int64_t r = r0; r < r1; r += TILE_ROWS, step += share, first += TILE_ROWS * TILE_K) {
          fetch_panel(p, next_j, next_k, step, step + share);
          const int8_t *q = x->q + first;
          const float *scale = x->scale + first / 32, *sum = x->sum + first / 32;
          const int32_t *start = x->start + first / x->group;
          float *c = sums + (r - r0) * TILE_COLUMNS;
          if (p->dtype == TY_Q6_K) tile_product(kc, &b, 16, false, q, scale, sum, start, c);
          else if (p->dtype == TY_Q4_K) tile_product(kc, &b, 32, true, q, scale, sum, start, c);
          else tile_product(kc, &b, 32, false, q, scale, sum, start, c);
        }
      }
      int64_t stop = r1 < p->rows ? r1 : p->rows;
      for (int64_t r = r0; r < stop; r++)
        for (int64_t i = 0; i < columns; i++)
          p->y[r * p->n + j + i] = sums[(r - r0) * TILE_COLUMNS + i] + (p->bias ? p->bias[j + i] : 0);
    }
  }
  ty_scratch_free(sums, bytes);
}
