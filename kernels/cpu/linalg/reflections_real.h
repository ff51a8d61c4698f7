/* Householder's reflections I - tau v v' of vectors and of matrices, and panels of them as one product I - v t v', with
 * a small triangle t (Schreiber and Van Loan 1989), for one type: REAL, FN(name), TYPE and SAFE. Vectors lie one after
 * the other. */

static inline REAL FN(dot)(const REAL *restrict x, const REAL *restrict y, int64_t n) {
  REAL sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
  return sum;
}

/* Of x with four vectors, `step` apart: one load of x serves all, and their sums do not wait for each other. */
static inline void FN(dot_4)(const REAL *restrict x, const REAL *restrict y, int64_t step, int64_t n, REAL *sums) {
  REAL a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
  for (int64_t i = 0; i < n; i++) {
    a += x[i] * y[i];
    b += x[i] * y[step + i];
    c += x[i] * y[2 * step + i];
    d += x[i] * y[3 * step + i];
  }
  sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

/* y += a x */
static inline void FN(add)(REAL *restrict y, REAL a, const REAL *restrict x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) y[i] += a * x[i];
}

/* The same of four vectors y. */
static inline void FN(add_4)(REAL *restrict y, int64_t step, const REAL *a, const REAL *restrict x, int64_t n) {
  const REAL a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    y[i] += a0 * x[i];
    y[step + i] += a1 * x[i];
    y[2 * step + i] += a2 * x[i];
    y[3 * step + i] += a3 * x[i];
  }
}

/* y -= tau (v' y) v for `count` vectors y, `step` apart; v[0] counts as 1. */
static inline void FN(reflect)(const REAL *v, REAL tau, REAL *y, int64_t count, int64_t step, int64_t n) {
  int64_t d = 0;
  for (; d + 4 <= count; d += 4) {
    REAL *p = y + d * step, w[4];
    FN(dot_4)(v + 1, p + 1, step, n - 1, w);
    for (int i = 0; i < 4; i++) {
      w[i] = -tau * (w[i] + p[i * step]);
      p[i * step] += w[i];
    }
    FN(add_4)(p + 1, step, w, v + 1, n - 1);
  }
  for (; d < count; d++) {
    REAL *p = y + d * step, w = -tau * (FN(dot)(v + 1, p + 1, n - 1) + p[0]);
    p[0] += w;
    FN(add)(p + 1, w, v + 1, n - 1);
  }
}

/* The length of x, which neither overflows nor vanishes on the way. */
static REAL FN(length)(const REAL *x, int64_t n) {
  REAL sum = FN(dot)(x, x, n);
  if (SAFE(sum)) return (REAL)sqrt((double)sum);
  REAL most = 0;
  for (int64_t i = 0; i < n; i++) {
    REAL size = x[i] < 0 ? -x[i] : x[i];
    if (!(size <= most)) most = size;
  }
  if (most == 0 || !isfinite(most)) return most;
  sum = 0;
  for (int64_t i = 0; i < n; i++) sum += x[i] / most * (x[i] / most);
  return most * (REAL)sqrt((double)sum);
}

/* Turns x, of n elements, into the vector v whose reflection I - tau v v' leaves only the first element of it, which is
 * returned: v begins with 1. */
static REAL FN(reflector)(REAL *x, int64_t n, REAL *tau) {
  const REAL first = x[0], below = n > 1 ? FN(length)(x + 1, n - 1) : 0;
  x[0] = 1;
  *tau = 0;
  if (below == 0) return first;
  REAL both[2] = { first, below }, size = FN(length)(both, 2), beta = first < 0 ? size : -size;
  *tau = (beta - first) / beta;
  const REAL scale = 1 / (first - beta);
  if (isfinite(scale)) {
    for (int64_t i = 1; i < n; i++) x[i] *= scale;
  } else {
    for (int64_t i = 1; i < n; i++) x[i] /= first - beta;
  }
  return beta;
}

/* t [count, count], upper: the product of the reflections of the columns v, whose ones are in place, is I - v t v'. */
static void FN(panel_triangle)(const REAL *v, int64_t count, int64_t n, int64_t step, const REAL *tau, REAL *t) {
  for (int64_t c = 0; c < count; c++) {
    REAL dots[PANEL];
    int64_t d = 0;
    for (; d + 4 <= c; d += 4) FN(dot_4)(v + c * step + c, v + d * step + c, step, n - c, dots + d);
    for (; d < c; d++) dots[d] = FN(dot)(v + c * step + c, v + d * step + c, n - c);
    for (int64_t i = 0; i < count; i++) t[i * count + c] = 0;
    for (int64_t i = 0; i < c; i++) {
      REAL sum = 0;
      for (int64_t l = i; l < c; l++) sum += t[i * count + l] * dots[l];
      t[i * count + c] = -tau[c] * sum;
    }
    t[c * count + c] = tau[c];
  }
}

/* a [n, width] -= v t v' a, or v t' v' a; room [2 * count * width]. */
static bool FN(apply_panel)(const REAL *v, int64_t count, int64_t n, int64_t step, const REAL *t, bool turned, REAL *a,
                            int64_t row, int64_t width, REAL *room) {
  REAL *w = room, *u = room + count * width;
  ty_gemm first = { .m = count,
                    .n = width,
                    .k = n,
                    .a = v,
                    .a_row = step,
                    .a_col = 1,
                    .b = a,
                    .b_row = row,
                    .b_col = 1,
                    .c = w,
                    .c_row = width };
  if (!ty_gemm_run(TYPE, &first)) return false;
  for (int64_t i = 0; i < count; i++) { /* u = -t w */
    memset(u + i * width, 0, sizeof *u * (size_t)width);
    for (int64_t l = turned ? 0 : i; l < (turned ? i + 1 : count); l++)
      FN(add)(u + i * width, -t[turned ? l * count + i : i * count + l], w + l * width, width);
  }
  ty_gemm second = { .m = n,
                     .n = width,
                     .k = count,
                     .a = v,
                     .a_row = 1,
                     .a_col = step,
                     .b = u,
                     .b_row = width,
                     .b_col = 1,
                     .c = a,
                     .c_row = row,
                     .add = true };
  return ty_gemm_run(TYPE, &second);
}
