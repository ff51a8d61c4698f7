/* Elements of A and B as blocks for products on tiles (tiles.h), for one type of elements; included by gemm_tiles_real.h.
 *
 * A number is taken apart into PLANES numbers of bf16 that add up to it, to the last bit: 3 for f32, 2 for f16, 1 for
 * bf16. Each half up of what is left is rounded off, so that parts have either sign. Numbers beyond 2^127, infinities and
 * NaN have no such parts, and of those near the smallest normal number the unit takes the small parts for 0. So the
 * largest size in each line is noted, and blocks with a line of either kind are multiplied otherwise. */

/* The elements of a vector, in the upper half of each lane for bf16 and as f32 otherwise. */
#if PLANES == 1
#define LOAD_16(mask, p) _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16)
#elif PLANES == 2
#define LOAD_16(mask, p) _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p)))
#else
#define LOAD_16(mask, p) _mm512_maskz_loadu_epi32(mask, p)
#endif

/* The largest size that was met, times two: of each line in the lanes of its own vector, or of all in those of the first. */
typedef struct NAME(sizes) {
  __m512i line[TY_TILE];
} NAME(sizes);

TILE_INLINE void NAME(note)(__m512i x, __m512i *most) {
  if (PLANES > 1) *most = _mm512_max_epu32(*most, _mm512_add_epi32(x, x));
}

static bool NAME(odd)(const NAME(sizes) * s, bool by_lines) {
  if (PLANES == 1) return false;
  __m512i most = s->line[0];
  if (by_lines) {
    uint32_t turned[TY_TILE][TY_TILE];
    ty_tile_turn(s->line, turned[0], TY_TILE);
    most = _mm512_setzero_si512();
    for (int i = 0; i < TY_TILE; i++) most = _mm512_max_epu32(most, _mm512_loadu_si512(turned[i]));
  }
  __mmask16 tiny = _mm512_cmplt_epu32_mask(most, _mm512_set1_epi32(TY_PARTS_TINY)) & _mm512_test_epi32_mask(most, most);
  return _mm512_cmpge_epu32_mask(most, _mm512_set1_epi32((int)TY_PARTS_LARGE)) | tiny;
}

/* Units of 16 columns from two rows of elements. */
TILE_INLINE void NAME(across)(const PIECE *p0, const PIECE *p1, __mmask16 m0, __mmask16 m1, __m512i *units,
                              __m512i *most) {
  __m512i x0 = LOAD_16(m0, p0), x1 = LOAD_16(m1, p1);
  NAME(note)(x0, most), NAME(note)(x1, most);
  for (int p = 0; p < PLANES; p++) {
    __m512i a = p < PLANES - 1 ? ty_bf16_part(&x0) : x0, b = p < PLANES - 1 ? ty_bf16_part(&x1) : x1;
    if (PLANES == 3 && p == PLANES - 1)
      b = _mm512_and_si512(b, _mm512_set1_epi32((int)0xffff0000)); /* a denormal one */
    units[p] = _mm512_or_si512(_mm512_srli_epi32(a, 16), b);
  }
}

/* 16 units from 32 neighbours in k. */
TILE_INLINE void NAME(along)(const PIECE *from, __mmask32 mask, __m512i *units, __m512i *most) {
#if PLANES == 1
  units[0] = _mm512_maskz_loadu_epi16(mask, from);
#else
  const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  __m512i x0 = LOAD_16((__mmask16)mask, from), x1 = LOAD_16((__mmask16)(mask >> 16), from + 16);
  NAME(note)(x0, most), NAME(note)(x1, most);
  for (int p = 0; p < PLANES; p++) {
    __m512i a = p < PLANES - 1 ? ty_bf16_part(&x0) : x0, b = p < PLANES - 1 ? ty_bf16_part(&x1) : x1;
    units[p] = _mm512_permutex2var_epi16(a, upper, b);
  }
#endif
}

static inline __mmask32 NAME(first)(int64_t n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1; }

/* A block of 16 lines (rows of A, columns of B) by 32 elements of k. Plane p goes to `to` + p * plane, whose rows are
 * `row` units apart: a row for each line, or, turned, for each unit. */
typedef struct NAME(target) {
  uint32_t *to;
  int64_t row, plane;
} NAME(target);

TILE_INLINE void NAME(put)(const NAME(target) * t, const bool turns, __m512i (*v)[TY_TILE], int64_t i,
                           const __m512i *units) {
  for (int p = 0; p < PLANES; p++) {
    if (turns) v[p][i] = units[p];
    else _mm512_storeu_si512(t->to + p * t->plane + i * t->row, units[p]);
  }
}

/* From lines whose elements are neighbours in k. This and the next ask for the same place of the next panel: it is too
 * far away for the hardware to foresee, and most products lie between. */
TILE_INLINE void NAME(block_of_lines)(const PIECE *src, int64_t stride, int64_t lines, __mmask32 in_k,
                                      const bool turned, const NAME(target) * t, NAME(sizes) * sizes) {
  __m512i v[PLANES][TY_TILE], units[PLANES];
  for (int64_t i = 0; i < TY_TILE; i++) {
    const char *ahead = (const char *)(src + (i + NR) * stride);
    if (PLANES == 3) __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + 64, 0, 2);
    NAME(along)(src + i * stride, i < lines ? in_k : 0, units, &sizes->line[i]);
    NAME(put)(t, turned, v, i, units);
  }
  for (int p = 0; turned && p < PLANES; p++) ty_tile_turn(v[p], t->to + p * t->plane, t->row);
}

/* From rows of elements that are neighbours across the lines. */
TILE_INLINE void NAME(block_of_rows)(const PIECE *src, int64_t stride, __mmask16 in, int64_t k, const bool turned,
                                     const NAME(target) * t, NAME(sizes) * sizes) {
  __m512i v[PLANES][TY_TILE], units[PLANES], largest = sizes->line[0];
  for (int64_t i = 0; i < TY_TILE; i++) {
    const PIECE *p = src + 2 * i * stride;
    if (PLANES == 3) __builtin_prefetch(p + NR, 0, 2), __builtin_prefetch(p + NR + stride, 0, 2);
    NAME(across)(p, p + stride, 2 * i < k ? in : 0, 2 * i + 1 < k ? in : 0, units, &largest);
    NAME(put)(t, !turned, v, i, units);
  }
  sizes->line[0] = largest;
  for (int p = 0; !turned && p < PLANES; p++) ty_tile_turn(v[p], t->to + p * t->plane, t->row);
}

static bool NAME(by_lines)(int64_t line_stride, int64_t k_stride) { return line_stride != 1 || k_stride == 1; }

/* A block of which `lines` and `k` exist; the others are 0. */
TILE_INLINE void NAME(block)(const PIECE *src, int64_t line_stride, int64_t k_stride, int64_t lines, int64_t k,
                             const bool turned, NAME(target) t, NAME(sizes) * sizes) {
  PIECE gathered[TY_TILE * 32];
  if (!NAME(by_lines)(line_stride, k_stride)) {
    NAME(block_of_rows)(src, k_stride, (__mmask16)NAME(first)(lines), k, turned, &t, sizes);
    return;
  }
  if (k_stride != 1) {
    for (int64_t i = 0; i < TY_TILE && i < lines; i++)
      for (int64_t q = 0; q < 32 && q < k; q++) gathered[i * 32 + q] = src[i * line_stride + q * k_stride];
    src = gathered, line_stride = 32;
  }
  NAME(block_of_lines)(src, line_stride, lines, NAME(first)(k), turned, &t, sizes);
}

enum {
  NAME(step) = TY_TILE * 2 * TY_TILE, /* units of a plane of a step, of A as of B */
  NAME(whole_step) = PLANES * NAME(step)
};

/* Columns j0 .. j0+nc of B, units k0 .. k0+kc, as [steps][planes][16 units][NR], and before it whether they are odd. */
static void NAME(pack_b)(const ty_gemm *g, int64_t k0, int64_t kc, int64_t j0, int64_t nc, UNIT *panel) {
  NAME(sizes) sizes[2] = { 0 };
  const PIECE *b = (const PIECE *)g->b + 2 * k0 * g->b_row + j0 * g->b_col;
  int64_t row = g->b_row, column = g->b_col;
  uint32_t *to = panel->plane;
#if PLANES == 3
  float filled[2 * KC * NR];
  if (g->pack) {
    g->pack(g->b, g->k0 + 2 * k0, MIN2(2 * kc, g->k - 2 * k0), j0, nc, filled, NR);
    b = filled, row = NR, column = 1;
  }
#endif
  for (int64_t k = 0; k < 2 * kc; k += 32, to += NAME(whole_step))
    for (int64_t half = 0, j = 0; half < 2; half++, j += TY_TILE) NAME(block)
  (b + k * row + j * column, column, row, nc - j, g->k - 2 * k0 - k, true, (NAME(target)){ to + j, NR, NAME(step) },
   &sizes[half]);
  bool by_lines = NAME(by_lines)(column, row);
  (panel - NR)->plane[0] = NAME(odd)(&sizes[0], by_lines) || NAME(odd)(&sizes[1], by_lines);
}

/* Rows i .. i+mr of A, units k0 .. k0+kc, as [steps][planes][2][16 rows][16 units]. Returns whether they are odd. */
static bool NAME(pack_rows)(const ty_gemm *g, int64_t i, int64_t mr, int64_t k0, int64_t kc, uint32_t *to) {
  NAME(sizes) sizes[2] = { 0 };
  const PIECE *a = (const PIECE *)g->a + i * g->a_row + 2 * k0 * g->a_col;
  for (int64_t k = 0; k < 2 * kc; k += 32, to += NAME(whole_step))
    for (int64_t half = 0, r = 0; half < 2; half++, r += TY_TILE) NAME(block)
  (a + r * g->a_row + k * g->a_col, g->a_row, g->a_col, mr - r, g->k - 2 * k0 - k, false,
   (NAME(target)){ to + r * TY_TILE, TY_TILE, NAME(step) }, &sizes[half]);
  bool by_lines = NAME(by_lines)(g->a_row, g->a_col);
  return NAME(odd)(&sizes[0], by_lines) || NAME(odd)(&sizes[1], by_lines);
}
