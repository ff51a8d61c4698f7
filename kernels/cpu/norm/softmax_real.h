/* Template of softmax.c: REAL is the element, FN(x) gives names their suffix. A line without any finite element
 * comes out as NaN, because -infinity minus itself does. */

enum { FN(block) = STREAM_BLOCK / sizeof(REAL) };

static void FN(lines)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->n, step = FN(block), ahead = stream_ahead(n * (int64_t)sizeof(REAL));
  REAL block[FN(block)], room[ROOM], *scratch = NULL;
  const size_t bytes = (size_t)n * sizeof(REAL);
  if (c->stream && !c->log && n > ROOM && n <= LONG) scratch = ty_scratch_alloc(bytes);
  for (int64_t line = begin; line < end; line++) {
    const REAL *x = (const REAL *)c->x + line * n;
    REAL *y = (REAL *)c->out + line * n, *e = n <= ROOM ? room : scratch ? scratch : y, sum = 0;
    /* Of the longest lines the exponentials are taken twice rather than stored by way of memory. */
    const bool again = c->log || (c->stream && n > ROOM && !scratch);
    const REAL top = FN(row_max)(x, n);
    for (int64_t i = 0; i < n; i += step) {
      stream_expect(x + i, ahead);
      sum += FN(row_exp_sum)(again ? NULL : e + i, x + i, n - i < step ? n - i : step, top);
    }
    const REAL scale = 1 / sum, shift = FN(ty_log)(sum);
    for (int64_t i = 0; i < n; i += step) {
      const int64_t k = n - i < step ? n - i : step;
      const REAL *restrict from = again ? x + i : e + i;
      REAL *restrict to = c->stream ? block : y + i;
      if (c->log)
#pragma omp simd
        for (int64_t j = 0; j < k; j++) to[j] = (from[j] - top) - shift;
      else if (again) FN(row_exp_scale)(to, from, k, top, scale);
      else if (from == to)
#pragma omp simd
        for (int64_t j = 0; j < k; j++) to[j] *= scale;
      else
#pragma omp simd
        for (int64_t j = 0; j < k; j++) to[j] = from[j] * scale;
      if (c->stream) stream_copy(y + i, block, (size_t)k * sizeof(REAL));
    }
  }
  if (scratch) ty_scratch_free(scratch, bytes);
  if (c->stream) stream_end();
}

static void FN(lines_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->n, step = FN(block), ahead = stream_ahead(n * (int64_t)sizeof(REAL));
  REAL block[FN(block)], p[FN(block)];
  for (int64_t line = begin; line < end; line++) {
    const REAL *restrict y = (const REAL *)c->x + line * n, *restrict g = (const REAL *)c->g + line * n;
    REAL sum = 0;
    for (int64_t i = 0; i < n; i += step) { /* in parts: a sum of many small numbers is no place for the next one */
      const int64_t end_of_part = n - i < step ? n : i + step;
      REAL part = 0;
      if (c->log)
#pragma omp simd reduction(+ : part)
        for (int64_t j = i; j < end_of_part; j++) part += g[j];
      else
#pragma omp simd reduction(+ : part)
        for (int64_t j = i; j < end_of_part; j++) part += g[j] * y[j];
      sum += part;
    }
    for (int64_t i = 0; i < n; i += step) {
      const int64_t k = n - i < step ? n - i : step;
      REAL *restrict dx = c->stream ? block : (REAL *)c->out + line * n + i;
      stream_expect(g + i, ahead);
      if (!c->log) stream_expect(y + i, ahead);
      if (c->log) {
        FN(row_exp_scale)(p, y + i, k, 0, sum);
#pragma omp simd
        for (int64_t j = 0; j < k; j++) dx[j] = g[i + j] - p[j];
      } else
#pragma omp simd
        for (int64_t j = 0; j < k; j++) dx[j] = y[i + j] * (g[i + j] - sum);
      if (c->stream) stream_copy((REAL *)c->out + line * n + i, block, (size_t)k * sizeof(REAL));
    }
  }
  if (c->stream) stream_end();
}

/* Lines whose elements are `inner` apart: `width` neighbours at once. */
static void FN(columns)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->n, inner = c->inner;
  for (int64_t block = begin; block < end; block++) {
    int64_t first = block % c->blocks * COLUMNS, at = block / c->blocks * n * inner + first;
    const int64_t width = inner - first < COLUMNS ? inner - first : COLUMNS;
    const REAL *restrict x = (const REAL *)c->x + at;
    REAL *restrict y = (REAL *)c->out + at;
    REAL top[COLUMNS], sum[COLUMNS];
    for (int64_t j = 0; j < width; j++) top[j] = (REAL)-INFINITY, sum[j] = 0;
    for (int64_t i = 0; i < n; i++)
#pragma omp simd
      for (int64_t j = 0; j < width; j++) top[j] = x[i * inner + j] > top[j] ? x[i * inner + j] : top[j];
    for (int64_t i = 0; i < n; i++)
#pragma omp simd
      for (int64_t j = 0; j < width; j++) {
        REAL e = FN(ty_exp_weight)(x[i * inner + j] - top[j]);
        y[i * inner + j] = e;
        sum[j] += e;
      }
    if (c->log) {
#pragma omp simd
      for (int64_t j = 0; j < width; j++) sum[j] = FN(ty_log)(sum[j]);
      for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int64_t j = 0; j < width; j++) y[i * inner + j] = (x[i * inner + j] - top[j]) - sum[j];
    } else {
#pragma omp simd
      for (int64_t j = 0; j < width; j++) sum[j] = 1 / sum[j];
      for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int64_t j = 0; j < width; j++) y[i * inner + j] *= sum[j];
    }
  }
}

static void FN(columns_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->n, inner = c->inner;
  for (int64_t block = begin; block < end; block++) {
    int64_t first = block % c->blocks * COLUMNS, at = block / c->blocks * n * inner + first;
    const int64_t width = inner - first < COLUMNS ? inner - first : COLUMNS;
    const REAL *restrict y = (const REAL *)c->x + at, *restrict g = (const REAL *)c->g + at;
    REAL *restrict dx = (REAL *)c->out + at;
    REAL sum[COLUMNS];
    for (int64_t j = 0; j < width; j++) sum[j] = 0;
    if (c->log) {
      for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int64_t j = 0; j < width; j++) sum[j] += g[i * inner + j];
      for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int64_t j = 0; j < width; j++) {
          int64_t e = i * inner + j;
          dx[e] = g[e] - FN(ty_exp_weight)(y[e]) * sum[j];
        }
    } else {
      for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int64_t j = 0; j < width; j++) sum[j] += g[i * inner + j] * y[i * inner + j];
      for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int64_t j = 0; j < width; j++) {
          int64_t e = i * inner + j;
          dx[e] = y[e] * (g[e] - sum[j]);
        }
    }
  }
}
