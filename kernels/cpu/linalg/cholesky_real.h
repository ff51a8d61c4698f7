/* Cholesky's factors by halves for one type, REAL with FN(name) and GEMM, the product of it. Worked on are the rows of
 * the upper factor u, with x = u' u, since rows are what vectors run along; LAPACK takes twice the time for a few
 * hundred rows. */

enum { FN(LEAF) = 32 }; /* rows that loops factor; a multiple of the vectors */

/* u [n, n], rows `step` apart; room: a quarter of it. */
typedef struct FN(upper) {
  int64_t step;
  REAL *room;
} FN(upper);

/* 0, or the number of the first row, counted from 1, whose pivot is not positive. */
static int FN(factor_leaf)(REAL *u, int64_t step, int n) {
  REAL a[FN(LEAF)][FN(LEAF)];
  for (int r = 0; r < n; r++)
    for (int c = 0; c < FN(LEAF); c++) a[r][c] = c >= r && c < n ? u[r * step + c] : 0;
  for (int r = 0; r < n; r++) {
    REAL sum[FN(LEAF)], other[FN(LEAF)]; /* two, since each waits for itself */
    for (int c = 0; c < FN(LEAF); c++) sum[c] = a[r][c], other[c] = 0;
    int p = 0;
    for (; p + 2 <= r; p += 2) {
      const REAL f = a[p][r], g = a[p + 1][r];
      for (int c = 0; c < FN(LEAF); c++) sum[c] -= f * a[p][c], other[c] -= g * a[p + 1][c];
    }
    for (; p < r; p++)
      for (int c = 0; c < FN(LEAF); c++) sum[c] -= a[p][r] * a[p][c];
    for (int c = 0; c < FN(LEAF); c++) sum[c] += other[c];
    const REAL pivot = sum[r];
    if (!(pivot > 0)) return r + 1;
    const REAL root = (REAL)sqrt((double)pivot), inverse = 1 / root;
    for (int c = 0; c < FN(LEAF); c++) a[r][c] = sum[c] * inverse;
    a[r][r] = root;
  }
  for (int r = 0; r < n; r++)
    for (int c = r; c < n; c++) u[r * step + c] = a[r][c];
  return 0;
}

/* c [m, n] -= a' b of k rows, all `step` apart. */
static bool FN(lose_product)(const FN(upper) * f, const REAL *a, const REAL *b, REAL *c, int64_t m, int64_t n,
                             int64_t k) {
  for (int64_t r = 0; r < k; r++)
    for (int64_t i = 0; i < m; i++) f->room[r * m + i] = -a[r * f->step + i];
  const ty_gemm g = { .m = m,
                      .n = n,
                      .k = k,
                      .a = f->room,
                      .a_row = 1,
                      .a_col = m,
                      .b = b,
                      .b_row = f->step,
                      .b_col = 1,
                      .c = c,
                      .c_row = f->step,
                      .add = true };
  return GEMM(&g);
}

/* x [n, m] = (u')^-1 x of a leaf. */
static void FN(solve_leaf)(const REAL *u, REAL *x, int64_t step, int n, int64_t m) {
  enum { STRIP = 64 };
  REAL inverse[FN(LEAF)];
  for (int r = 0; r < n; r++) inverse[r] = 1 / u[r * step + r];
  for (int64_t c0 = 0; c0 < m; c0 += STRIP) {
    const int width = m - c0 < STRIP ? (int)(m - c0) : STRIP;
    REAL *at = x + c0;
    for (int r = 0; r < n; r++, at += step) {
      REAL sum[STRIP];
      const REAL *before = x + c0;
      if (width == STRIP) {
        for (int c = 0; c < STRIP; c++) sum[c] = at[c];
        for (int p = 0; p < r; p++, before += step)
          for (int c = 0; c < STRIP; c++) sum[c] -= u[p * step + r] * before[c];
        for (int c = 0; c < STRIP; c++) at[c] = sum[c] * inverse[r];
      } else {
        for (int p = 0; p < r; p++, before += step)
          for (int c = 0; c < width; c++) at[c] -= u[p * step + r] * before[c];
        for (int c = 0; c < width; c++) at[c] *= inverse[r];
      }
    }
  }
}

static int FN(half_of)(int n) { return (n / 2 + FN(LEAF) - 1) / FN(LEAF) * FN(LEAF); }

static bool FN(solve_upper)(const FN(upper) * f, const REAL *u, REAL *x, int n, int64_t m) {
  if (n <= FN(LEAF)) {
    FN(solve_leaf)(u, x, f->step, n, m);
    return true;
  }
  const int h = FN(half_of)(n);
  return FN(solve_upper)(f, u, x, h, m) && FN(lose_product)(f, u + h, x, x + h * f->step, n - h, m, h) &&
         FN(solve_upper)(f, u + h * (f->step + 1), x + h * f->step, n - h, m);
}

/* As factor_leaf(); -1: out of memory. */
static int FN(factor_halves)(const FN(upper) * f, REAL *u, int n) {
  if (n <= FN(LEAF)) return FN(factor_leaf)(u, f->step, n);
  const int h = FN(half_of)(n);
  REAL *right = u + h, *rest = u + h * (f->step + 1);
  const int info = FN(factor_halves)(f, u, h);
  if (info) return info;
  if (ty_interrupted) return 0;
  if (!FN(solve_upper)(f, u, right, h, n - h)) return -1;
  const int strip = n - h <= 4 * FN(LEAF) ? n - h : 4 * FN(LEAF); /* what is left of the diagonal is not read */
  for (int i = 0; i < n - h; i += strip) {
    const int rows = n - h - i < strip ? n - h - i : strip;
    if (!FN(lose_product)(f, right + i, right + i, rest + i * (f->step + 1), rows, n - h - i, h)) return -1;
  }
  const int below = FN(factor_halves)(f, rest, n - h);
  return below > 0 ? below + h : below;
}

/* y [n, n], lower, of the lower triangle of x or, `averaged`, of (x + x') / 2; room [n * n + n * n / 4]. */
static int FN(cholesky_of)(const REAL *x, REAL *y, int n, bool averaged, REAL *room) {
  enum { PANEL = 64 };
  REAL *u = room;
  const FN(upper) f = { .step = n, .room = room + (int64_t)n * n };
  for (int64_t p = 0; p < n; p += PANEL) {
    const int64_t width = n - p < PANEL ? n - p : PANEL;
    FN(transpose)(x + p * n + p, n, n - p, width, u + p * n + p, n);
    for (int64_t r = p; r < p + width && averaged; r++)
      for (int64_t c = p; c < n; c++) u[r * n + c] = (u[r * n + c] + x[r * n + c]) * (REAL)0.5;
  }
  const int info = FN(factor_halves)(&f, u, n);
  if (info) return info;
  for (int64_t p = 0; p < n; p += PANEL) {
    const int64_t width = n - p < PANEL ? n - p : PANEL;
    FN(transpose)(u + p * n + p, n, width, n - p, y + p * n + p, n);
    for (int64_t r = p; r < p + width; r++) memset(y + r * n + r + 1, 0, sizeof *y * (size_t)(n - r - 1));
  }
  return 0;
}
