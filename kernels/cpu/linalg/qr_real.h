/* QR of the matrices [begin, end) of a job, for one type: REAL, FN(name), TYPE, and SAFE(sum of squares). */

#include "reflections_real.h"
#include "turn_real.h"

/* Reflects `count` columns p, each of n elements and `step` apart, so that what is below the diagonal vanishes; each
 * keeps there the vector that its reflection is made of, whose first element is 1, and tau its factor. */
static void FN(reflect_panel)(REAL *p, int64_t count, int64_t n, int64_t step, REAL *tau) {
  for (int64_t c = 0; c < count; c++) {
    REAL *x = p + c * step + c;
    const REAL beta = FN(reflector)(x, n - c, &tau[c]);
    x[0] = beta;
    if (tau[c] == 0) continue;
    FN(reflect)(x, tau[c], x + step, count - c - 1, step, n - c);
  }
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
