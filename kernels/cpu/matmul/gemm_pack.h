/* Panels of A and B for one element type of sums, UNIT being REAL: copies, transposes, or conversions from f16 and bf16.
 * Included by gemm_real.h. */

/* dst[i * stride + j] = src[i * row + j * column] */
static void NAME(pack)(const REAL *restrict src, int64_t row, int64_t column, int64_t rows, int64_t columns,
                       REAL *restrict dst, int64_t stride) {
  if (column == 1) {
    if (columns == NR) {
      for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < NR; j++) dst[i * stride + j] = src[i * row + j];
    } else if (columns == MR) {
      for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < MR; j++) dst[i * stride + j] = src[i * row + j];
    } else {
      for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) dst[i * stride + j] = src[i * row + j];
    }
  } else if (row == 1) {
    NAME(transpose)(src, column, columns, rows, dst, stride);
  } else {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) dst[i * stride + j] = src[i * row + j * column];
  }
}

#ifdef HALVES
/* The same from f16 or bf16; rows <= KC. */
static void NAME(pack_halves)(ty_dtype type, const uint16_t *restrict src, int64_t row, int64_t column, int64_t rows,
                              int64_t columns, REAL *restrict dst, int64_t stride) {
  if (column == 1) {
    for (int64_t i = 0; i < rows; i++) ty_half_load(type, dst + i * stride, src + i * row, columns);
  } else if (row == 1) {
    REAL lines[4 * KC];
    for (int64_t j = 0; j < columns; j += 4) {
      int64_t count = MIN2(4, columns - j);
      for (int64_t q = 0; q < count; q++) ty_half_load(type, lines + q * KC, src + (j + q) * column, rows);
      NAME(transpose)(lines, KC, count, rows, dst + j, stride);
    }
  } else {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) ty_half_load(type, dst + i * stride + j, src + i * row + j * column, 1);
  }
}
#endif

static void NAME(pack_any)(const ty_gemm *g, const void *src, int64_t row, int64_t column, int64_t at, int64_t rows,
                           int64_t columns, REAL *restrict dst, int64_t stride) {
#ifdef HALVES
  if (g->half) {
    NAME(pack_halves)(g->half, (const uint16_t *)src + at, row, column, rows, columns, dst, stride);
    return;
  }
#endif
  NAME(pack)((const REAL *)src + at, row, column, rows, columns, dst, stride);
}

/* Columns j0 .. j0+nc of B, rows k0 .. k0+kc, as a panel [kc][NR] with zeros past nc. */
static void NAME(pack_b)(const ty_gemm *g, int64_t k0, int64_t kc, int64_t j0, int64_t nc, REAL *restrict dst) {
  if (g->pack) g->pack(g->b, g->k0 + k0, kc, j0, nc, dst, NR);
  else NAME(pack_any)(g, g->b, g->b_row, g->b_col, k0 * g->b_row + j0 * g->b_col, kc, nc, dst, NR);
  if (nc < NR)
    for (int64_t i = 0; i < kc; i++)
      for (int64_t j = nc; j < NR; j++) dst[i * NR + j] = 0;
}

/* Rows i .. i+mr of A, columns k0 .. k0+kc, as a panel [kc][mr]. */
static void NAME(pack_a)(const ty_gemm *g, int64_t i, int64_t mr, int64_t k0, int64_t kc, REAL *restrict dst) {
  NAME(pack_any)(g, g->a, g->a_col, g->a_row, i * g->a_row + k0 * g->a_col, kc, mr, dst, mr);
}
