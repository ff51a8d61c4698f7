/* A symmetric matrix to a tridiagonal one by Householder's reflections, for one type (see reflections_real.h). In
 * panels of rows: a row sees the reflections of its panel before it is reflected itself, the rest of the matrix sees
 * them all at once, as a product (Dongarra, Sorensen and Hammarling 1989, "Block reduction of matrices to condensed
 * forms"). Half of the work is the product of the rest with each vector. */

/* Rows 0 .. count - 1 of v and w, `step` apart, two at a time, since one would read and write x for little: x loses
 * v[k][0] w[k] + w[k][0] v[k]. */
static void FN(lose_outer)(REAL *restrict x, int64_t n, const REAL *v, const REAL *w, int64_t step, int64_t count) {
  for (int64_t k = 0; k < count; k += 2) {
    const int64_t l = k + 1 < count ? k + 1 : k;
    const REAL *restrict v0 = v + k * step, *restrict w0 = w + k * step, *restrict v1 = v + l * step;
    const REAL *restrict w1 = w + l * step, a0 = v0[0], b0 = w0[0], a1 = l > k ? v1[0] : 0, b1 = l > k ? w1[0] : 0;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] -= (a0 * w0[i] + b0 * v0[i]) + (a1 * w1[i] + b1 * v1[i]);
  }
}

/* p loses (v w' + w v') x. */
static void FN(lose_products)(REAL *restrict p, const REAL *restrict x, int64_t n, const REAL *v, const REAL *w,
                              int64_t step, int64_t count) {
  for (int64_t k = 0; k < count; k += 2) {
    const int64_t l = k + 1 < count ? k + 1 : k;
    const REAL *restrict v0 = v + k * step, *restrict w0 = w + k * step, *restrict v1 = v + l * step;
    const REAL *restrict w1 = w + l * step;
    REAL a0 = 0, b0 = 0, a1 = 0, b1 = 0;
#pragma omp simd reduction(+ : a0, b0, a1, b1)
    for (int64_t i = 0; i < n; i++) {
      a0 += w0[i] * x[i];
      b0 += v0[i] * x[i];
      a1 += w1[i] * x[i];
      b1 += v1[i] * x[i];
    }
    if (l == k) a1 = b1 = 0;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) p[i] -= (a0 * v0[i] + b0 * w0[i]) + (a1 * v1[i] + b1 * w1[i]);
  }
}

/* Of the upper triangle of a [n, n], rows `row` apart, times x: rows [begin, end) and what is below them by symmetry,
 * added to y. */
static void FN(symmetric_rows)(const REAL *a, int64_t row, int64_t n, const REAL *restrict x, int64_t begin,
                               int64_t end, REAL *restrict y) {
  int64_t i = begin;
  for (; i + 4 <= end; i += 4) {
    const REAL *restrict a0 = a + i * row, *restrict a1 = a0 + row, *restrict a2 = a1 + row, *restrict a3 = a2 + row;
    const REAL x0 = x[i], x1 = x[i + 1], x2 = x[i + 2], x3 = x[i + 3];
    REAL s0 = a0[i] * x0 + a0[i + 1] * x1 + a0[i + 2] * x2 + a0[i + 3] * x3;
    REAL s1 = a0[i + 1] * x0 + a1[i + 1] * x1 + a1[i + 2] * x2 + a1[i + 3] * x3;
    REAL s2 = a0[i + 2] * x0 + a1[i + 2] * x1 + a2[i + 2] * x2 + a2[i + 3] * x3;
    REAL s3 = a0[i + 3] * x0 + a1[i + 3] * x1 + a2[i + 3] * x2 + a3[i + 3] * x3;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t k = i + 4; k < n; k++) {
      s0 += a0[k] * x[k];
      s1 += a1[k] * x[k];
      s2 += a2[k] * x[k];
      s3 += a3[k] * x[k];
      y[k] += (a0[k] * x0 + a1[k] * x1) + (a2[k] * x2 + a3[k] * x3);
    }
    y[i] += s0, y[i + 1] += s1, y[i + 2] += s2, y[i + 3] += s3;
  }
  for (; i < end; i++) {
    const REAL *restrict a0 = a + i * row, x0 = x[i];
    REAL s0 = a0[i] * x0;
#pragma omp simd reduction(+ : s0)
    for (int64_t k = i + 1; k < n; k++) {
      s0 += a0[k] * x[k];
      y[k] += a0[k] * x0;
    }
    y[i] += s0;
  }
}

typedef struct FN(symmetric) {
  const REAL *a, *x;
  int64_t row, n, pieces;
  REAL *sums; /* [pieces, n] */
} FN(symmetric);

/* Where a piece begins: all have about as many elements of the triangle. */
static int64_t FN(piece_row)(const FN(symmetric) * s, int64_t piece) {
  if (piece == s->pieces) return s->n;
  return (int64_t)((double)s->n * (1 - sqrt(1 - (double)piece / (double)s->pieces))) / 4 * 4;
}

static void FN(symmetric_pieces)(void *context, int64_t begin, int64_t end) {
  const FN(symmetric) *s = context;
  for (int64_t piece = begin; piece < end; piece++) {
    const int64_t first = FN(piece_row)(s, piece);
    REAL *y = s->sums + piece * s->n;
    memset(y + first, 0, sizeof *y * (size_t)(s->n - first));
    FN(symmetric_rows)(s->a, s->row, s->n, s->x, first, FN(piece_row)(s, piece + 1), y);
  }
}

/* y = a x; sums: room [PIECES * n]. The pieces depend on n alone, so the result does not depend on the threads. */
static void FN(symmetric_times)(const REAL *a, int64_t row, int64_t n, const REAL *x, REAL *y, REAL *sums) {
  FN(symmetric) s = { a, x, row, n, n < 192 ? 1 : PIECES, n < 192 ? y : sums };
  if (s.pieces == 1) {
    FN(symmetric_pieces)(&s, 0, 1);
    return;
  }
  ty_parallel_for_all(s.pieces, 1, FN(symmetric_pieces), &s);
  memcpy(y, sums, sizeof *y * (size_t)n);
  for (int64_t piece = 1; piece < s.pieces; piece++) {
    const int64_t first = FN(piece_row)(&s, piece);
    FN(add)(y + first, 1, sums + piece * n + first, n - first);
  }
}

/* The upper triangle of a [n, n] loses v' w + w' v of `count` rows each, from column `at` on, which come first in
 * `left`, v then w, and in `right`, -w then -v; both have rows of n. */
typedef struct FN(update) {
  REAL *a;
  const REAL *left, *right;
  int64_t n, at, count;
  bool out_of_memory;
} FN(update);

static void FN(update_strips)(void *context, int64_t begin, int64_t end) {
  FN(update) *u = context;
  const int64_t n = u->n;
  for (int64_t strip = begin; strip < end; strip++) {
    const int64_t i = u->at + strip * STRIP;
    ty_gemm g = { .m = n - i < STRIP ? n - i : STRIP,
                  .n = n - i,
                  .k = 2 * u->count,
                  .a = u->left + i,
                  .a_row = 1,
                  .a_col = n,
                  .b = u->right + i,
                  .b_row = n,
                  .b_col = 1,
                  .c = u->a + i * n + i,
                  .c_row = n,
                  .add = true };
    if (!ty_gemm_run(TYPE, &g)) __atomic_store_n(&u->out_of_memory, true, __ATOMIC_RELAXED);
  }
}

/* a [n, n], of which the upper triangle counts, to d [n] and e [n - 1]. Row c of a keeps from its element c + 1 on the
 * vector of a reflection, tau [n - 1] its factor. room [TRIDIAGONAL_ROOM(n)] */
static bool FN(tridiagonal)(REAL *a, int64_t n, REAL *d, REAL *e, REAL *tau, REAL *room) {
  REAL *left = room, *right = left + 2 * PANEL * n, *p = right + 2 * PANEL * n, *sums = p + n;
  const int64_t panel = n < 128 ? PANEL / 2 : PANEL;
  for (int64_t at = 0; at < n && !ty_interrupted; at += panel) {
    const int64_t count = n - at < panel ? n - at : panel;
    REAL *v = left, *w = left + count * n; /* rows of n, whose elements have the numbers of a's columns */
    for (int64_t j = 0; j < count; j++) {
      const int64_t c = at + j, rest = n - c - 1;
      REAL *x = a + c * n + c;
      FN(lose_outer)(x, rest + 1, v + c, w + c, n, j);
      d[c] = x[0];
      if (rest == 0) break;
      e[c] = FN(reflector)(++x, rest, &tau[c]);
      REAL *to = w + j * n + c + 1;
      memcpy(v + j * n + c + 1, x, sizeof *x * (size_t)rest);
      if (tau[c] == 0) {
        memset(to, 0, sizeof *to * (size_t)rest);
        continue;
      }
      FN(symmetric_times)(a + (c + 1) * n + c + 1, n, rest, x, p, sums);
      FN(lose_products)(p, x, rest, v + c + 1, w + c + 1, n, j);
      const REAL half = -tau[c] / 2 * tau[c] * FN(dot)(p, x, rest);
      for (int64_t i = 0; i < rest; i++) to[i] = tau[c] * p[i] + half * x[i];
    }
    const int64_t next = at + count;
    if (next >= n) break;
    for (int64_t k = 0; k < count; k++)
      for (int64_t i = next; i < n; i++) right[k * n + i] = -w[k * n + i], right[(count + k) * n + i] = -v[k * n + i];
    FN(update) u = { a, left, right, n, next, count, false };
    ty_parallel_for_all((n - next + STRIP - 1) / STRIP, 1, FN(update_strips), &u);
    if (u.out_of_memory) return false;
  }
  return true;
}
