/* LU of the matrices [begin, end) of a job, for one type: REAL, FN(name), GEMM, its product, and CALL(name), LAPACK's
 * function of it, which solves for few right-hand sides. */

#include "triangle_real.h"
#include "turn_real.h"

/* x / pivot; the inverse of a pivot near 0 may be infinite. */
static inline REAL FN(over_pivot)(REAL x, REAL pivot, REAL inverse) {
  return isfinite(inverse) ? x * inverse : x / pivot;
}

static inline void FN(swap_rows)(REAL *restrict x, REAL *restrict y, int64_t n) {
#pragma omp simd
  for (int64_t c = 0; c < n; c++) {
    const REAL v = x[c];
    x[c] = y[c];
    y[c] = v;
  }
}

/* Of rows [from, m) of a, `step` apart, the one whose first number is the largest, as NaN is: beside it 0 would pass
 * for the pivot of a singular matrix. */
static inline int FN(largest)(const REAL *a, int64_t step, int from, int m) {
  REAL most = -1;
  int best = from;
  for (int i = from; i < m; i++) {
    const REAL v = a[i * step], size = v < 0 ? -v : v;
    if (size > most || size != size) most = size, best = i;
  }
  return best;
}

/* Of a [m, n] in place, by rows; pivots count from 1, as LAPACK's. The number of the first pivot that is zero, or 0. */
static int FN(lu_small)(REAL *restrict a, int m, int n, int *pivots) {
  int k = m < n ? m : n, info = 0;
  for (int p = 0; p < k; p++) {
    REAL *row = a + (int64_t)p * n;
    const int best = FN(largest)(a + p, n, p, m);
    pivots[p] = best + 1;
    if (best != p) FN(swap_rows)(row, a + (int64_t)best * n, n);
    if (row[p] == 0) {
      if (!info) info = p + 1;
      continue;
    }
    REAL inverse = 1 / row[p];
    for (int i = p + 1; i < m; i++) {
      REAL *restrict below = a + (int64_t)i * n, factor = below[p] = FN(over_pivot)(below[p], row[p], inverse);
      for (int c = p + 1; c < n; c++) below[c] -= factor * row[c];
    }
  }
  return info;
}

/* Rows of a matrix [m, n] to be factored in place, and scratch memory for as many numbers. */
typedef struct FN(factors) {
  REAL *a, *room;
  int m, n, *pivots;
  int zero; /* the first pivot that is zero, counted from 1, or 0 */
} FN(factors);

/* Row `below` of n columns loses the factor, which takes the place of its part of column p, times the pivot's row,
 * which is 0 up to column p: whole vectors where there are AT_ONCE columns, unless what is not finite would spoil
 * the factors before. */
static inline void FN(lose_pivot)(REAL *restrict below, const REAL *restrict pivot, int p, int n, REAL factor) {
  if (n == FN(AT_ONCE) && isfinite(factor)) {
    for (int c = 0; c < FN(AT_ONCE); c++) below[c] -= factor * pivot[c];
  } else {
    for (int c = p + 1; c < n; c++) below[c] -= factor * pivot[c];
  }
  below[p] = factor;
}

/* Columns [first, end) of the rows below p lose what column p's pivot explains; the row of the next column's pivot. It
 * is looked for on the way. */
static int FN(lose_column)(const FN(factors) * f, int p, int first, int end) {
  const int64_t step = f->n;
  const REAL *row = f->a + p * step, inverse = 1 / row[p];
  const int next = p + 1 < end ? p + 1 : p;
  REAL pivot[FN(AT_ONCE)] = { 0 }, most = -1;
  for (int c = p + 1; c < end; c++) pivot[c - first] = row[c];
  int best = p + 1;
  for (int i = p + 1; i < f->m; i++) {
    REAL *below = f->a + i * step;
    const REAL factor = FN(over_pivot)(below[p], row[p], inverse);
    FN(lose_pivot)(below + first, pivot, p - first, end - first, factor);
    const REAL v = below[next], size = v < 0 ? -v : v;
    if (size > most || size != size) most = size, best = i;
  }
  return best;
}

/* Columns [first, end), at most AT_ONCE of them, of the rows from `first` on. Swaps take whole rows. */
static void FN(lu_columns)(FN(factors) * f, int first, int end) {
  const int64_t step = f->n;
  int best = FN(largest)(f->a + first, step, first, f->m);
  for (int p = first; p < end && p < f->m; p++) {
    REAL *row = f->a + p * step;
    f->pivots[p] = best + 1;
    if (best != p) FN(swap_rows)(row, f->a + best * step, step);
    if (row[p] != 0) {
      best = FN(lose_column)(f, p, first, end);
    } else {
      if (!f->zero) f->zero = p + 1;
      if (p + 1 < end) best = FN(largest)(f->a + p + 1, step, p + 1, f->m);
    }
  }
}

/* The same of any number of columns, by halves (Toledo 1997, "Locality of reference in LU decomposition with partial
 * pivoting"): the right half loses the product of the left half's rows below with its own upper rows. */
static bool FN(lu_halves)(FN(factors) * f, int first, int end) {
  if (end - first <= FN(AT_ONCE)) {
    FN(lu_columns)(f, first, end);
    return true;
  }
  const int half = (end - first + 2 * FN(AT_ONCE) - 1) / (2 * FN(AT_ONCE)) * FN(AT_ONCE), cut = first + half;
  const int64_t step = f->n, rest = end - cut;
  const int rows = cut < f->m ? half : f->m - first; /* wide: columns from `cut` on have no pivots */
  const FN(triangle) l = { .step = step, .side_step = step, .unit = true, .room = f->room };
  REAL *left = f->a + first * (step + 1), *upper = left + half;
  if (!FN(lu_halves)(f, first, cut) || !FN(solve_sides)(&l, NULL, left, upper, rows, rest)) return false;
  return cut >= f->m || (FN(subtract)(&l, left + half * step, f->m - cut, half, upper, upper + half * step, rest) &&
                         FN(lu_halves)(f, cut, end));
}

/* The same of x [m, n] to lu; -1 when there is no memory. room: [m * n] numbers. */
static int FN(lu)(const REAL *x, REAL *lu, int m, int n, int *pivots, REAL *room) {
  if (m && n) memcpy(lu, x, sizeof *x * (size_t)m * (size_t)n);
  if (m <= SMALL && n <= SMALL) return FN(lu_small)(lu, m, n, pivots);
  FN(factors) f = { lu, room, m, n, pivots, 0 };
  return FN(lu_halves)(&f, 0, n) ? f.zero : -1;
}

/* What swaps of the first k of m rows come to: the row that each one is. */
static inline void FN(rows_of)(const int *pivots, int k, int m, int64_t *rows) {
  for (int i = 0; i < m; i++) rows[i] = i;
  for (int i = 0; i < k; i++) {
    int64_t row = rows[i];
    rows[i] = rows[pivots[i] - 1];
    rows[pivots[i] - 1] = row;
  }
}

/* Room for a matrix and its pivots; NULL after the job has noted that there is none. */
static REAL *FN(lu_room)(job *j, int m, int n, size_t *bytes) {
  *bytes = (sizeof(REAL) * (size_t)n + sizeof(int)) * (size_t)m;
  REAL *room = ty_scratch_alloc(*bytes);
  if (!room) j->out_of_memory = true;
  return room;
}

static void FN(lu_factor)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  int m = j->m, n = j->n, k = m < n ? m : n;
  size_t bytes;
  REAL *room = FN(lu_room)(j, m, n, &bytes);
  if (!room) return;
  int *pivots = (int *)(void *)(room + (int64_t)m * n);
  for (int64_t i = begin; i < end; i++) {
    int64_t at = i * m * n;
    if (FN(lu)((const REAL *)j->k->in[0]->data + at, (REAL *)j->k->out[0]->data + at, m, n, pivots, room) < 0) {
      j->out_of_memory = true;
      break;
    }
    FN(rows_of)(pivots, k, m, (int64_t *)j->k->out[1]->data + i * m);
  }
  ty_scratch_free(room, bytes);
}

/* x [n, m] = (l u)^-1 x, by rows. */
static void FN(substitute)(job *j, REAL *lu, REAL *restrict x, int n, int m) {
  REAL one = 1;
  if (n > SMALL && m >= TY_MANY_SIDES) {
    const FN(triangle) l = { .step = n, .side_step = m, .unit = true },
                       u = { .step = n, .side_step = m, .upper = true };
    if (!FN(solve_sides)(&l, &u, lu, x, n, m)) j->out_of_memory = true;
    return;
  }
  if (n > SMALL || m > 4 * SMALL) {
    CALL(trsm)("R", "U", "N", "U", &m, &n, &one, lu, &n, x, &m, 1, 1, 1, 1);
    CALL(trsm)("R", "L", "N", "N", &m, &n, &one, lu, &n, x, &m, 1, 1, 1, 1);
    return;
  }
  for (int r = 1; r < n; r++)
    for (int p = 0; p < r; p++) {
      REAL factor = lu[(int64_t)r * n + p];
      for (int c = 0; c < m; c++) x[(int64_t)r * m + c] -= factor * x[(int64_t)p * m + c];
    }
  for (int r = n - 1; r >= 0; r--) {
    for (int p = r + 1; p < n; p++) {
      REAL factor = lu[(int64_t)r * n + p];
      for (int c = 0; c < m; c++) x[(int64_t)r * m + c] -= factor * x[(int64_t)p * m + c];
    }
    REAL inverse = 1 / lu[(int64_t)r * n + r];
    for (int c = 0; c < m; c++) x[(int64_t)r * m + c] *= inverse;
  }
}

static void FN(lu_system)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  int n = j->m, m = j->n; /* unknowns, right-hand sides */
  size_t bytes;
  REAL *room = FN(lu_room)(j, n, n, &bytes);
  if (!room) return;
  int *pivots = (int *)(void *)(room + (int64_t)n * n);
  for (int64_t i = begin; i < end; i++) {
    REAL *lu = (REAL *)j->k->out[1]->data + i * n * n, *x = (REAL *)j->k->out[0]->data + i * n * m;
    const REAL *b = (const REAL *)j->k->in[1]->data + i * n * m;
    int64_t *rows = (int64_t *)j->k->out[2]->data + i * n;
    int info = FN(lu)((const REAL *)j->k->in[0]->data + i * n * n, lu, n, n, pivots, room);
    if (info < 0) {
      j->out_of_memory = true;
      break;
    }
    if (info) {
      note(j, i, info);
      continue;
    }
    FN(rows_of)(pivots, n, n, rows);
    if (m == 0) continue;
    for (int r = 0; r < n; r++) memcpy(x + (int64_t)r * m, b + rows[r] * m, sizeof *x * (size_t)m);
    FN(substitute)(j, lu, x, n, m);
  }
  ty_scratch_free(room, bytes);
}

static void FN(slogdet)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  int n = j->n;
  size_t bytes;
  REAL *lu = FN(lu_room)(j, 2 * n, n, &bytes);
  if (!lu) return;
  int *pivots = (int *)(void *)(lu + 2 * (int64_t)n * n);
  for (int64_t i = begin; i < end; i++) {
    if (FN(lu)((const REAL *)j->k->in[0]->data + i * n * n, lu, n, n, pivots, lu + (int64_t)n * n) < 0) {
      j->out_of_memory = true;
      break;
    }
    double sign = 1, sum = 0; /* of nothing the determinant is 1 */
    for (int r = 0; r < n; r++) {
      double d = (double)lu[(int64_t)r * n + r];
      if ((d < 0) != (pivots[r] != r + 1)) sign = -sign;
      if (d == 0) sign = 0;
      sum += log(fabs(d));
    }
    ((REAL *)j->k->out[0]->data)[i] = (REAL)sign;
    ((REAL *)j->k->out[1]->data)[i] = (REAL)sum;
  }
  ty_scratch_free(lu, bytes);
}
