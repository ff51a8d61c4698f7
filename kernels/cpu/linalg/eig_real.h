/* Eigenvalues of the matrices [begin, end) of a job, for one type: REAL, FN(name) and CALL(name), LAPACK's function of
 * it. */

#include "finite_real.h"

/* The order of values. */
static void FN(sort_values)(int n, const REAL *re, const REAL *im, int *order) {
  for (int i = 0; i < n; i++) {
    int at = i;
    for (; at > 0; at--) {
      int before = order[at - 1];
      if (re[before] < re[i] || (re[before] == re[i] && im[before] <= im[i])) break;
      order[at] = before;
    }
    order[at] = i;
  }
}

/* The vector re + sign i im to column j of `to` [n, n, 2], turned so that the element that is returned is real. */
static int FN(put_vector)(const REAL *re, const REAL *im, REAL sign, int n, REAL *to, int j) {
  REAL most = 0, length = 0;
  for (int i = 0; i < n; i++) {
    REAL size = re[i] * re[i] + (im ? im[i] * im[i] : 0);
    length += size;
    if (size > most) most = size;
  }
  int real = 0;
  while (real < n - 1 && re[real] * re[real] + (im ? im[real] * im[real] : 0) < (REAL)0.998 * most) real++;
  /* times conj(the element) / |the element|, over the length */
  REAL a = re[real], b = im ? -sign * im[real] : 0,
       scale = 1 / ((REAL)sqrt((double)(a * a + b * b)) * (REAL)sqrt((double)length));
  a *= scale;
  b *= scale;
  for (int i = 0; i < n; i++) {
    REAL x = re[i], y = im ? sign * im[i] : 0, *z = to + 2 * ((int64_t)i * n + j);
    z[0] = a * x - b * y;
    z[1] = i == real ? 0 : a * y + b * x;
  }
  return real;
}

static void FN(eig)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const bool vectors = j->k->nout > 1;
  int n = j->n, info, least = -1, one = 1;
  REAL want;
  const char *left = vectors ? "V" : "N";
  CALL(geev)(left, "N", &n, &want, &n, &want, &want, &want, &n, &want, &one, &want, &least, &info, 1, 1);
  int lwork = room_of((double)want);
  size_t square = (size_t)n * (size_t)n, reals = square * (vectors ? 2 : 1) + 2 * (size_t)n + (size_t)lwork;
  size_t bytes = sizeof(REAL) * reals + sizeof(int) * (size_t)n;
  REAL *a = ty_scratch_alloc(bytes);
  if (!a) {
    j->out_of_memory = true;
    return;
  }
  REAL *re = a + square, *im = re + n, *work = im + n, *v = vectors ? work + lwork : NULL;
  int *order = (int *)(void *)(a + reals);
  for (int64_t i = begin; i < end; i++) {
    REAL *values = (REAL *)j->k->out[0]->data + 2 * i * n;
    if (n) memcpy(a, (const REAL *)j->k->in[0]->data + i * n * n, sizeof *a * square);
    if (!FN(finite)(a, (int64_t)square)) {
      note(j, i, NOT_FINITE);
      continue;
    }
    CALL(geev)(left, "N", &n, a, &n, re, im, v ? v : &want, &n, &want, &one, work, &lwork, &info, 1, 1);
    if (info) {
      note(j, i, info);
      continue;
    }
    FN(sort_values)(n, re, im, order);
    for (int to = 0; to < n; to++) {
      int from = order[to];
      values[2 * to] = re[from];
      values[2 * to + 1] = im[from];
      if (!vectors) continue;
      /* What LAPACK sees is the transpose: the conjugates of its left vectors are our right ones. Of a pair it gives
       * the parts of the first, whose value has the positive imaginary part. */
      const int first = im[from] < 0 ? from - 1 : from;
      const REAL *x = v + (int64_t)first * n, *y = im[from] == 0 ? NULL : x + n;
      int real = FN(put_vector)(x, y, im[from] < 0 ? 1 : -1, n, (REAL *)j->k->out[1]->data + 2 * i * n * n, to);
      ((int64_t *)j->k->out[2]->data)[i * n + to] = real;
    }
  }
  ty_scratch_free(a, bytes);
}
