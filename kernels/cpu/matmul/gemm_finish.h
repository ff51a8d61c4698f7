/* From sums to results, for one element type of sums: biases, residual, activation, rounding to half precision.
 * Included by the products. */

static inline bool NAME(finishes)(const ty_gemm *g) {
  return g->bias || g->row_bias || g->activation || g->residual || g->c_half;
}

static inline void NAME(store)(const ty_gemm *g, int64_t at, const REAL *x, int64_t n) {
#ifdef HALVES
  if (g->c_half) {
    ty_half_store(g->c_half, (uint16_t *)g->c + at, x, n);
    return;
  }
#endif
  for (int64_t i = 0; i < n; i++) ((REAL *)g->c)[at + i] = x[i];
}

#ifdef HALVES
/* Rows of sums rounded to half precision, as most products end. */
static void NAME(round_rows)(const ty_gemm *g, int64_t at, int64_t rows, int64_t columns, const REAL *sums,
                             int64_t sums_row) {
  for (int64_t r = 0; r < rows; r++, at += g->c_row, sums += sums_row) {
    uint16_t *to = (uint16_t *)g->c + at;
#ifdef ROUND_ROW
    if (columns == NR) {
      ROUND_ROW(to, sums);
      continue;
    }
#endif
    ty_half_store(g->c_half, to, sums, columns);
  }
}
#endif

/* Rows i .. i+rows and columns j .. j+columns of C from their sums, which may lie in C. columns <= NR. */
static void NAME(finish)(const ty_gemm *g, int64_t i, int64_t rows, int64_t j, int64_t columns, const REAL *sums,
                         int64_t sums_row) {
  const REAL *bias = g->bias;
#ifdef HALVES
  if (g->c_half && !bias && !g->row_bias && !g->residual && !g->activation) {
    NAME(round_rows)(g, i * g->c_row + j, rows, columns, sums, sums_row);
    return;
  }
#endif
  for (int64_t r = 0; r < rows; r++, sums += sums_row) {
    REAL x[NR], base = g->row_bias ? ((const REAL *)g->row_bias)[i + r] : 0;
    int64_t at = (i + r) * g->c_row + j;
    if (bias) {
      for (int64_t s = 0; s < columns; s++) x[s] = base + bias[j + s] + sums[s];
    } else {
      for (int64_t s = 0; s < columns; s++) x[s] = base + sums[s];
    }
    if (g->residual) {
      int64_t from = (i + r) * g->residual_row + j;
#ifdef HALVES
      if (g->c_half) {
        REAL y[NR];
        ty_half_load(g->c_half, y, (const uint16_t *)g->residual + from, columns);
        for (int64_t s = 0; s < columns; s++) x[s] += y[s];
      } else
#endif
        for (int64_t s = 0; s < columns; s++) x[s] += ((const REAL *)g->residual)[from + s];
    }
    SCALAR(activate)(g->activation, x, columns);
    NAME(store)(g, at, x, columns);
  }
}
