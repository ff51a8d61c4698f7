/* Template of softmax.c: REAL is the element, FN(x) gives names their suffix. A line without any finite element
 * comes out as NaN, because -infinity minus itself does. */

static void FN(lines)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->n;
  for (int64_t line = begin; line < end; line++) {
    const REAL *restrict x = (const REAL *)c->x + line * n;
    REAL *restrict y = (REAL *)c->out + line * n;
    REAL top = (REAL)-INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    if (c->log) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; i++) sum += FN(ty_exp_weight)(x[i] - top);
      REAL shift = FN(ty_log)(sum);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) y[i] = (x[i] - top) - shift;
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; i++) {
        REAL e = FN(ty_exp_weight)(x[i] - top);
        y[i] = e;
        sum += e;
      }
      REAL scale = 1 / sum;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) y[i] *= scale;
    }
  }
}

static void FN(lines_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->n;
  for (int64_t line = begin; line < end; line++) {
    const REAL *restrict y = (const REAL *)c->x + line * n, *restrict g = (const REAL *)c->g + line * n;
    REAL *restrict dx = (REAL *)c->out + line * n;
    REAL sum = 0;
    if (c->log) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; i++) sum += g[i];
#pragma omp simd
      for (int64_t i = 0; i < n; i++) dx[i] = g[i] - FN(ty_exp_weight)(y[i]) * sum;
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; i++) sum += g[i] * y[i];
#pragma omp simd
      for (int64_t i = 0; i < n; i++) dx[i] = y[i] * (g[i] - sum);
    }
  }
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
