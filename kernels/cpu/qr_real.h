/* QR of the matrices [begin, end) of a job, for one type: REAL, FN(name), TYPE, and SAFE(sum of squares). */

#include "turn_real.h"

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

/* Reflects `count` columns p, each of n elements and `step` apart, so that what is below the diagonal vanishes; each keeps
 * there the vector that its reflection is made of, whose first element is 1, and tau its factor. */
static void FN(reflect_panel)(REAL *p, int64_t count, int64_t n, int64_t step, REAL *tau) {
  for (int64_t c = 0; c < count; c++) {
    REAL *x = p + c * step + c;
    const int64_t rest = n - c - 1;
    REAL below = rest > 0 ? FN(length)(x + 1, rest) : 0;
    tau[c] = 0;
    if (below == 0) continue;
    REAL both[2] = { x[0], below }, size = FN(length)(both, 2), beta = x[0] < 0 ? size : -size;
    tau[c] = (beta - x[0]) / beta;
    REAL scale = 1 / (x[0] - beta);
    if (isfinite(scale)) {
      for (int64_t i = 1; i <= rest; i++) x[i] *= scale;
    } else {
      for (int64_t i = 1; i <= rest; i++) x[i] /= x[0] - beta;
    }
    x[0] = beta;
    FN(reflect)(x, tau[c], x + step, count - c - 1, step, n - c);
  }
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

/* Without products, for what is too small for them: the columns of x, and of q, one after the other. */
static void FN(qr_small)(const job *j, const REAL *x, REAL *q, REAL *r, REAL *room) {
  const int64_t m = j->m, n = j->n, k = m < n ? m : n, columns = j->columns;
  REAL *a = room, *u = a + m * n, *tau = u + m * columns, *signs = tau + k;
  for (int64_t i = 0; i < m; i++)
    for (int64_t c = 0; c < n; c++) a[c * m + i] = x[i * n + c];
  FN(reflect_panel)(a, k, m, m, tau);
  for (int64_t c = 0; c < k; c++) {
    if (n > k) FN(reflect)(a + c * m + c, tau[c], a + k * m + c, n - k, m, m - c);
    signs[c] = a[c * m + c] < 0 ? -1 : 1;
  }
  for (int64_t i = 0; i < j->rows; i++)
    for (int64_t c = 0; c < n; c++) r[i * n + c] = c >= i && i < k ? signs[i] * a[c * m + i] : 0;
  for (int64_t c = 0; c < columns; c++)
    for (int64_t i = 0; i < m; i++) u[c * m + i] = i != c ? 0 : c < k ? signs[c] : 1;
  for (int64_t c = k - 1; c >= 0 && columns > 0; c--)
    FN(reflect)(a + c * m + c, tau[c], u + c * m + c, columns - c, m, m - c);
  for (int64_t i = 0; i < m; i++)
    for (int64_t c = 0; c < columns; c++) q[i * columns + c] = u[c * m + i];
}

/* room: a copy of x, the vectors [k, m], triangles of PANEL rows [k, PANEL], tau, signs, and for products. */
static bool FN(qr_one)(const job *j, const REAL *x, REAL *q, REAL *r, REAL *room) {
  const int64_t m = j->m, n = j->n, k = m < n ? m : n;
  REAL *a = room, *vectors = a + m * n, *triangles = vectors + k * m, *tau = triangles + k * PANEL, *signs = tau + k;
  REAL *products = signs + k;
  if (m <= PANEL && n <= PANEL) {
    FN(qr_small)(j, x, q, r, room);
    return true;
  }
  if (m && n) memcpy(a, x, sizeof *a * (size_t)m * (size_t)n);
  for (int64_t at = 0; at < k; at += PANEL) {
    const int64_t count = k - at < PANEL ? k - at : PANEL, left = m - at;
    REAL *v = vectors + at * m + at, *t = triangles + at * PANEL;
    FN(transpose)(a + at * n + at, n, left, count, v, m);
    FN(reflect_panel)(v, count, left, m, tau + at);
    for (int64_t c = 0; c < count; c++) {
      for (int64_t i = 0; i <= c; i++) {
        a[(at + i) * n + at + c] = v[c * m + i];
        v[c * m + i] = i == c;
      }
    }
    FN(panel_triangle)(v, count, left, m, tau + at, t);
    const int64_t width = n - at - count;
    if (width > 0 && !FN(apply_panel)(v, count, left, m, t, true, a + at * n + at + count, n, width, products))
      return false;
  }
  for (int64_t i = 0; i < j->rows; i++) { /* the one that has no negative diagonal */
    const REAL sign = i < k && a[i * n + i] < 0 ? -1 : 1;
    if (i < k) signs[i] = sign;
    for (int64_t c = 0; c < n; c++) r[i * n + c] = c >= i && i < k ? sign * a[i * n + c] : 0;
  }
  const int64_t columns = j->columns;
  if (columns == 0) return true;
  if (m) memset(q, 0, sizeof *q * (size_t)m * (size_t)columns);
  for (int64_t i = 0; i < columns; i++) q[i * columns + i] = i < k ? signs[i] : 1;
  for (int64_t at = (k - 1) / PANEL * PANEL; at >= 0 && k > 0; at -= PANEL) {
    const int64_t count = k - at < PANEL ? k - at : PANEL;
    if (!FN(apply_panel)(vectors + at * m + at, count, m - at, m, triangles + at * PANEL, false, q + at * columns + at,
                         columns, columns - at, products))
      return false;
  }
  return true;
}

static void FN(qr)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const int64_t m = j->m, n = j->n, k = m < n ? m : n, widest = n > j->columns ? n : j->columns;
  const size_t bytes = sizeof(REAL) * (size_t)(m * n + k * m + k * PANEL + 2 * k + 2 * PANEL * widest + m * j->columns);
  REAL *room = ty_scratch_alloc(bytes ? bytes : 1);
  if (!room) {
    j->failed = true;
    return;
  }
  for (int64_t i = begin; i < end && !ty_interrupted; i++)
    if (!FN(qr_one)(j, (const REAL *)j->k->in[0]->data + i * m * n, (REAL *)j->k->out[0]->data + i * m * j->columns,
                    (REAL *)j->k->out[1]->data + i * j->rows * n, room))
      j->failed = true;
  ty_scratch_free(room, bytes ? bytes : 1);
}
