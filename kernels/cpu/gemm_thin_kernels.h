/* The loops of gemm_thin.h for one element type of the large operand; included with IN (its type), LOAD(p) and ONE(p)
 * (a vector and a single element as REAL), and EACH(x), names. */

/* ---- c[i][j] += sum_k a[i][k] b[j][k], both contiguous in k ---- */

#define DOT_DECLARE(i, j) V s##i##j = { 0 };
#define DOT_STEP(i, j) s##i##j += x##i * y##j;
#define DOT_END(i, j)                                                                   \
  {                                                                                     \
    REAL t = NAME(lanes)(s##i##j);                                                      \
    for (int64_t p = whole; p < k; p++) t += a[i * a_row + p] * ONE(b + j * b_row + p); \
    c[i * c_i + j * c_j] += t;                                                          \
  }
#define DOT_X(i) const V x##i = *(const V *)(a + i * a_row + p);
#define DOT_Y(j) const V y##j = LOAD(b + j * b_row + p);
#define GRID_14(X) X(0, 0) X(0, 1) X(0, 2) X(0, 3)
#define GRID_24(X) GRID_14(X) X(1, 0) X(1, 1) X(1, 2) X(1, 3)
#define GRID_11(X) X(0, 0)
#define DOT(rows, columns)                                                                                        \
  static void EACH(dot_##rows##columns)(int64_t k, const REAL *restrict a, int64_t a_row, const IN *restrict b,   \
                                        int64_t b_row, REAL *restrict c, int64_t c_i, int64_t c_j) {              \
    int64_t whole = k - k % VL;                                                                                   \
    GRID_##rows##columns(DOT_DECLARE) for (int64_t p = 0; p < whole; p += VL){ ROWS_##rows(DOT_X) ROWS_##columns( \
        DOT_Y) GRID_##rows##columns(DOT_STEP) } GRID_##rows##columns(DOT_END)                                     \
  }
DOT(1, 1)
DOT(1, 4)
DOT(2, 4)

static void EACH(dots)(const NAME(thin) * t, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + 4 <= end; j += 4) {
    int64_t i = 0;
    const IN *b = (const IN *)t->b + j * t->b_col;
    REAL *c = t->c + j * t->c_j;
    for (; i + 2 <= t->m; i += 2)
      EACH(dot_24)(t->k, t->a + i * t->a_row, t->a_row, b, t->b_col, c + i * t->c_i, t->c_i, t->c_j);
    if (i < t->m) EACH(dot_14)(t->k, t->a + i * t->a_row, t->a_row, b, t->b_col, c + i * t->c_i, t->c_i, t->c_j);
  }
  for (; j < end; j++)
    for (int64_t i = 0; i < t->m; i++) EACH(dot_11)
  (t->k, t->a + i * t->a_row, t->a_row, (const IN *)t->b + j * t->b_col, t->b_col, t->c + i * t->c_i + j * t->c_j,
   t->c_i, t->c_j);
}

/* ---- c += a b; b and c with contiguous columns. Eight rows of b at a time, which stay cached for the rows of a ---- */

static void EACH(rows)(const NAME(thin) * t, int64_t begin, int64_t end) {
  for (int64_t j0 = begin; j0 < end; j0 += CHUNK) {
    int64_t n = MIN2(CHUNK, end - j0), p = 0, row = t->b_row;
    for (; p + 8 <= t->k; p += 8) {
      const IN *restrict b = (const IN *)t->b + p * row + j0;
      for (int64_t i = 0; i < t->m; i++) {
        const REAL *a = t->a + i * t->a_row + p * t->a_col;
        REAL *restrict c = t->c + i * t->c_i + j0;
        REAL x0 = a[0], x1 = a[t->a_col], x2 = a[2 * t->a_col], x3 = a[3 * t->a_col];
        REAL x4 = a[4 * t->a_col], x5 = a[5 * t->a_col], x6 = a[6 * t->a_col], x7 = a[7 * t->a_col];
#define AT(r) LOAD(b + r * row + j)
        int64_t j = 0;
        for (; j + VL <= n; j += VL) {
          if (i == 0)
            for (int r = 8; r < 16; r++) __builtin_prefetch(b + r * row + j);
          *(V *)(c + j) = *(V *)(c + j) + x0 * AT(0) + x1 * AT(1) + x2 * AT(2) + x3 * AT(3) + x4 * AT(4) + x5 * AT(5) +
                          x6 * AT(6) + x7 * AT(7);
        }
#undef AT
#define AT(r) ONE(b + r * row + j)
        for (; j < n; j++)
          c[j] = c[j] + x0 * AT(0) + x1 * AT(1) + x2 * AT(2) + x3 * AT(3) + x4 * AT(4) + x5 * AT(5) + x6 * AT(6) +
                 x7 * AT(7);
#undef AT
      }
    }
    for (; p < t->k; p++) {
      const IN *restrict b = (const IN *)t->b + p * row + j0;
      for (int64_t i = 0; i < t->m; i++) {
        REAL *restrict c = t->c + i * t->c_i + j0, x = t->a[i * t->a_row + p * t->a_col];
        for (int64_t j = 0; j < n; j++) c[j] += x * ONE(b + j);
      }
    }
  }
}

#undef DOT_DECLARE
#undef DOT_STEP
#undef DOT_END
#undef DOT_X
#undef DOT_Y
#undef GRID_14
#undef GRID_24
#undef GRID_11
#undef DOT
#undef IN
#undef LOAD
#undef ONE
#undef EACH
