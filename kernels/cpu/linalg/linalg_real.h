/* Factorizations of the matrices [begin, end) of a job, for one type: REAL, FN(name) and CALL(name), LAPACK's function
 * of it. What is written here as a matrix of LAPACK's is the transpose of ours. */

#include "finite_real.h"
#include "triangle_real.h"
#include "turn_real.h"
#include "cholesky_real.h"

static void FN(cholesky)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const int n = j->n;
  const int64_t square = (int64_t)n * n;
  const bool averaged = ((const ty_p_dim *)j->k->params)->flag;
  const size_t bytes = sizeof(REAL) * (size_t)(square + square / 4);
  REAL *room = ty_scratch_alloc(bytes);
  for (int64_t i = begin; i < end && room; i++) {
    const REAL *x = (const REAL *)j->k->in[0]->data + i * square;
    const int info = FN(cholesky_of)(x, (REAL *)j->k->out[0]->data + i * square, n, averaged, room);
    if (info < 0) j->out_of_memory = true;
    else if (info) note(j, i, info);
  }
  if (room) ty_scratch_free(room, bytes);
  else j->out_of_memory = true;
}

static void FN(solve_triangular)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  int n = j->n, m = j->m;
  const ty_p_triangular *p = j->k->params;
  const bool few = n <= TY_FEW_UNKNOWNS || m < TY_MANY_SIDES;
  const FN(triangle) s = { .step = n, .side_step = m, .upper = p->upper, .unit = p->unit };
  REAL one = 1;
  for (int64_t i = begin; i < end; i++) {
    REAL *a = (REAL *)j->k->in[0]->data + i * n * n;
    const REAL *b = (const REAL *)j->k->in[1]->data + i * n * m;
    REAL *x = (REAL *)j->k->out[0]->data + i * n * m;
    memcpy(x, b, sizeof *x * (size_t)n * (size_t)m);
    if (few) CALL(trsm)("R", p->upper ? "L" : "U", "N", p->unit ? "U" : "N", &m, &n, &one, a, &n, x, &m, 1, 1, 1, 1);
    else if (!FN(solve_sides)(&s, NULL, a, x, n, m)) j->out_of_memory = true;
  }
}

/* The sign that makes the largest element of a column (`step` apart) positive. */
static REAL FN(sign_of)(const REAL *x, int64_t n, int64_t step) {
  REAL most = 0, sign = 1;
  for (int64_t i = 0; i < n; i++) {
    REAL v = x[i * step], size = v < 0 ? -v : v;
    if (size <= most) continue;
    most = size;
    sign = v < 0 ? -1 : 1;
  }
  return sign;
}

static void FN(svd)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  int m = j->m, n = j->n, k = m < n ? m : n, info, least = -1, none;
  REAL want;
  CALL(gesdd)("S", &n, &m, &want, &n, &want, &want, &n, &want, &k, &want, &least, &none, &info, 1);
  int lwork = room_of(want);
  size_t whole = sizeof(REAL) * (size_t)m * (size_t)n, pivots = sizeof(int) * 8 * (size_t)k;
  size_t bytes = whole + sizeof(REAL) * (size_t)lwork + pivots;
  REAL *a = ty_scratch_alloc(bytes);
  if (!a) {
    j->out_of_memory = true;
    return;
  }
  REAL *work = a + (int64_t)m * n;
  int *iwork = (int *)(void *)(work + lwork);
  for (int64_t i = begin; i < end; i++) {
    REAL *u = (REAL *)j->k->out[0]->data + i * m * k, *s = (REAL *)j->k->out[1]->data + i * k;
    REAL *vh = (REAL *)j->k->out[2]->data + i * k * n;
    memcpy(a, (const REAL *)j->k->in[0]->data + i * m * n, whole);
    if (!FN(finite)(a, (int64_t)m * n)) {
      note(j, i, NOT_FINITE);
      continue;
    }
    CALL(gesdd)("S", &n, &m, a, &n, s, vh, &n, u, &k, work, &lwork, iwork, &info, 1);
    if (info) note(j, i, info);
    for (int64_t c = 0; c < k; c++) {
      if (FN(sign_of)(u + c, m, k) > 0) continue;
      for (int64_t r = 0; r < m; r++) u[r * k + c] = -u[r * k + c];
      for (int64_t r = 0; r < n; r++) vh[c * n + r] = -vh[c * n + r];
    }
  }
  ty_scratch_free(a, bytes);
}
