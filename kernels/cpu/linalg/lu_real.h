/* LU of the matrices [begin, end) of a job, for one type: REAL, FN(name) and CALL(name), LAPACK's function of it. */

#include "triangle_real.h"
#include "turn_real.h"

/* Of a [m, n] in place, by rows; pivots count from 1, as LAPACK's. The number of the first pivot that is zero, or 0. */
static int FN(lu_small)(REAL *restrict a, int m, int n, int *pivots) {
  int k = m < n ? m : n, info = 0;
  for (int p = 0; p < k; p++) {
    REAL *restrict row = a + (int64_t)p * n, most = -1;
    int best = p;
    for (int i = p; i < m; i++) {
      REAL v = a[(int64_t)i * n + p], size = v < 0 ? -v : v;
      if (size > most) most = size, best = i;
    }
    pivots[p] = best + 1;
    if (best != p)
      for (int c = 0; c < n; c++) {
        REAL v = row[c];
        row[c] = a[(int64_t)best * n + c];
        a[(int64_t)best * n + c] = v;
      }
    if (row[p] == 0) {
      if (!info) info = p + 1;
      continue;
    }
    REAL inverse = 1 / row[p];
    for (int i = p + 1; i < m; i++) {
      REAL *restrict below = a + (int64_t)i * n, factor = below[p] *= inverse;
      for (int c = p + 1; c < n; c++) below[c] -= factor * row[c];
    }
  }
  return info;
}

/* The same of x [m, n] to lu. room [m * n] is for what LAPACK works on. */
static int FN(lu)(const job *j, const REAL *x, REAL *lu, int m, int n, int *pivots, REAL *room) {
  if (m <= SMALL && n <= SMALL) {
    if (m && n) memcpy(lu, x, sizeof *x * (size_t)m * (size_t)n);
    return FN(lu_small)(lu, m, n, pivots);
  }
  int info;
  FN(turn)(room, x, m, n);
  CALL(getrf)(&m, &n, room, &m, pivots, &info);
  FN(turn)(lu, room, n, m);
  return info;
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
    FN(lu)(j, (const REAL *)j->k->in[0]->data + at, (REAL *)j->k->out[0]->data + at, m, n, pivots, room);
    FN(rows_of)(pivots, k, m, (int64_t *)j->k->out[1]->data + i * m);
  }
  ty_scratch_free(room, bytes);
}

/* x [n, m] = (l u)^-1 x, by rows; room [n * n] is for whatever is needed. */
static void FN(substitute)(job *j, REAL *lu, REAL *restrict x, int n, int m, REAL *room) {
  REAL one = 1;
  if (n > SMALL && m >= TY_MANY_SIDES) {
    const FN(triangle) l = { .step = n, .unit = true, .room = room }, u = { .step = n, .upper = true, .room = room };
    if (!FN(solve_halves)(&l, lu, x, n, m) || !FN(solve_halves)(&u, lu, x, n, m)) j->out_of_memory = true;
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
    int info = FN(lu)(j, (const REAL *)j->k->in[0]->data + i * n * n, lu, n, n, pivots, room);
    if (info) {
      note(j, i, info);
      continue;
    }
    FN(rows_of)(pivots, n, n, rows);
    if (m == 0) continue;
    for (int r = 0; r < n; r++) memcpy(x + (int64_t)r * m, b + rows[r] * m, sizeof *x * (size_t)m);
    FN(substitute)(j, lu, x, n, m, room);
  }
  ty_scratch_free(room, bytes);
}

static void FN(slogdet)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  int n = j->n, info;
  size_t bytes;
  REAL *lu = FN(lu_room)(j, n, n, &bytes);
  if (!lu) return;
  int *pivots = (int *)(void *)(lu + (int64_t)n * n);
  for (int64_t i = begin; i < end; i++) {
    if (n) memcpy(lu, (const REAL *)j->k->in[0]->data + i * n * n, sizeof *lu * (size_t)n * (size_t)n);
    if (n > SMALL) CALL(getrf)(&n, &n, lu, &n, pivots, &info); /* of the transpose, which has the same determinant */
    else FN(lu_small)(lu, n, n, pivots);
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
