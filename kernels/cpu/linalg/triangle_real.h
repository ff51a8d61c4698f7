/* Triangular systems by rows for one type, REAL with FN(name) and GEMM, the product of it: by halves, whose products are
 * our own. LAPACK's take twice the time for a few hundred unknowns. */

enum { FN(AT_ONCE) = 16, FN(STRIP) = 64 }; /* unknowns and right-hand sides that loops solve for together */

/* Rows of a triangle `step` apart, and those of right-hand sides; the scratch memory has room for a quarter of it. */
typedef struct FN(triangle) {
  int64_t step, side_step;
  bool upper, unit;
  REAL *room;
} FN(triangle);

/* One row of right-hand sides, `step` apart, less the rows before it times their factors; `columns` is a constant in the
 * hot call. */
static inline __attribute__((always_inline)) void FN(solve_row)(const REAL *restrict t, REAL *restrict x, int64_t step,
                                                                int row, int first, int last, REAL scale,
                                                                const int columns) {
  REAL sum[FN(STRIP)];
  for (int c = 0; c < columns; c++) sum[c] = x[row * step + c];
  for (int p = first; p < last; p++)
    for (int c = 0; c < columns; c++) sum[c] -= t[p] * x[p * step + c];
  for (int c = 0; c < columns; c++) x[row * step + c] = sum[c] * scale;
}

static void FN(solve_few)(const FN(triangle) * s, const REAL *t, REAL *x, int n, int64_t m) {
  for (int64_t c = 0; c < m; c += FN(STRIP))
    for (int i = 0; i < n; i++) {
      const int row = s->upper ? n - 1 - i : i, first = s->upper ? row + 1 : 0, last = s->upper ? n : row;
      const REAL *factors = t + row * s->step, scale = s->unit ? 1 : 1 / factors[row];
      if (m - c >= FN(STRIP)) FN(solve_row)(factors, x + c, s->side_step, row, first, last, scale, FN(STRIP));
      else FN(solve_row)(factors, x + c, s->side_step, row, first, last, scale, (int)(m - c));
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
                      .b_row = s->side_step,
                      .b_col = 1,
                      .c = to,
                      .c_row = s->side_step,
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
  REAL *rest = x + h * s->side_step;
  if (s->upper)
    return FN(solve_halves)(s, low + h, rest, n - h, m) && FN(subtract)(s, t + h, h, n - h, rest, x, m) &&
           FN(solve_halves)(s, t, x, h, m);
  return FN(solve_halves)(s, t, x, h, m) && FN(subtract)(s, low, n - h, h, x, rest, m) &&
         FN(solve_halves)(s, low + h, rest, n - h, m);
}

/* Two triangles, of which the second may be missing, one after the other: strips of right-hand sides are independent. */
typedef struct FN(sides) {
  const FN(triangle) * first, *second;
  const REAL *t;
  REAL *x;
  int n;
  int64_t m, width;
  bool out_of_memory;
} FN(sides);

static void FN(solve_strips)(void *context, int64_t begin, int64_t end) {
  FN(sides) *s = context;
  const size_t bytes = sizeof(REAL) * ((size_t)s->n * (size_t)s->n / 4 + (size_t)s->n * FN(AT_ONCE));
  REAL *room = ty_scratch_alloc(bytes);
  bool solved = room;
  for (int64_t strip = begin; strip < end && solved; strip++) {
    const int64_t at = strip * s->width, m = s->m - at < s->width ? s->m - at : s->width;
    for (int k = 0; k < 2 && solved; k++) {
      const FN(triangle) *given = k ? s->second : s->first;
      if (!given) break;
      FN(triangle) triangle = *given;
      triangle.room = room;
      solved = FN(solve_halves)(&triangle, s->t, s->x + at, s->n, m);
    }
  }
  if (room) ty_scratch_free(room, bytes);
  if (!solved) __atomic_store_n(&s->out_of_memory, true, __ATOMIC_RELAXED);
}

/* x [n, m] = t^-1 x of the first, then of the second; false after ty_fail(). The strips depend on m alone, and so do the
 * results. */
static bool FN(solve_sides)(const FN(triangle) * first, const FN(triangle) * second, const REAL *t, REAL *x, int n,
                            int64_t m) {
  int64_t width = m / 8 / 16 * 16;
  width = width < 64 ? 64 : width > 256 ? 256 : width;
  FN(sides) s = { first, second, t, x, n, m, width, false };
  ty_parallel_for((m + width - 1) / width, 1, FN(solve_strips), &s);
  return !s.out_of_memory;
}
