/* Triangular systems by rows for one type, REAL with FN(name) and GEMM, the product of it: by halves, whose products are
 * our own. LAPACK's take twice the time for a few hundred unknowns. */

enum { FN(AT_ONCE) = 16, FN(STRIP) = 64 }; /* unknowns and right-hand sides that loops solve for together */

/* Rows of a triangle `step` apart; the scratch memory has room for a quarter of it. */
typedef struct FN(triangle) {
  int64_t step;
  bool upper, unit;
  REAL *room;
} FN(triangle);

/* One row of right-hand sides, less the rows before it times their factors; `columns` is a constant in the hot call. */
static inline __attribute__((always_inline)) void FN(solve_row)(const REAL *restrict t, REAL *restrict x, int64_t m,
                                                                int row, int first, int last, REAL scale,
                                                                const int columns) {
  REAL sum[FN(STRIP)];
  for (int c = 0; c < columns; c++) sum[c] = x[row * m + c];
  for (int p = first; p < last; p++)
    for (int c = 0; c < columns; c++) sum[c] -= t[p] * x[p * m + c];
  for (int c = 0; c < columns; c++) x[row * m + c] = sum[c] * scale;
}

static void FN(solve_few)(const FN(triangle) * s, const REAL *t, REAL *x, int n, int64_t m) {
  for (int64_t c = 0; c < m; c += FN(STRIP))
    for (int i = 0; i < n; i++) {
      const int row = s->upper ? n - 1 - i : i, first = s->upper ? row + 1 : 0, last = s->upper ? n : row;
      const REAL *factors = t + row * s->step, scale = s->unit ? 1 : 1 / factors[row];
      if (m - c >= FN(STRIP)) FN(solve_row)(factors, x + c, m, row, first, last, scale, FN(STRIP));
      else FN(solve_row)(factors, x + c, m, row, first, last, scale, (int)(m - c));
    }
}

/* x [to.., m] -= t [rows, columns] x [from.., m] */
static bool FN(subtract)(const FN(triangle) * s, const REAL *t, int rows, int columns, const REAL *from, REAL *to,
                         int64_t m) {
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) s->room[(int64_t)r * columns + c] = -t[r * s->step + c];
  const ty_gemm g = { .m = rows,
                      .n = m,
                      .k = columns,
                      .a = s->room,
                      .a_row = columns,
                      .a_col = 1,
                      .b = from,
                      .b_row = m,
                      .b_col = 1,
                      .c = to,
                      .c_row = m,
                      .add = true };
  return GEMM(&g);
}

/* x [n, m] = t^-1 x; false after ty_fail(). */
static bool FN(solve_halves)(const FN(triangle) * s, const REAL *t, REAL *x, int n, int64_t m) {
  if (n <= FN(AT_ONCE)) {
    FN(solve_few)(s, t, x, n, m);
    return true;
  }
  const int h = (n / 2 + FN(AT_ONCE) - 1) / FN(AT_ONCE) * FN(AT_ONCE);
  const REAL *low = t + h * s->step;
  REAL *rest = x + h * m;
  if (s->upper)
    return FN(solve_halves)(s, low + h, rest, n - h, m) && FN(subtract)(s, t + h, h, n - h, rest, x, m) &&
           FN(solve_halves)(s, t, x, h, m);
  return FN(solve_halves)(s, t, x, h, m) && FN(subtract)(s, low, n - h, h, x, rest, m) &&
         FN(solve_halves)(s, low + h, rest, n - h, m);
}
