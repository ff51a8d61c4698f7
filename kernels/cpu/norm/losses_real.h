/* Template of losses.c: REAL is the element, FN(x) gives names their suffix. */

enum { FN(block) = STREAM_BLOCK / sizeof(REAL) };

/* What is left of a row once its log-sum-exp is known. */
static inline void FN(finish)(const job *c, int64_t row, REAL lse) {
  const int64_t n = c->classes, y = target_at(c, row);
  const REAL *restrict x = (const REAL *)c->x + row * n, *restrict w = c->weight;
  const REAL smooth = (REAL)(c->p.label_smoothing / (double)n);
  REAL loss = 0, of_row = 0;
  if (y != c->p.ignore_index) {
    of_row = w ? w[y] : 1;
    loss = (REAL)(1 - c->p.label_smoothing) * of_row * (lse - x[y]);
    if (smooth != 0) {
      REAL sum = 0;
      if (w) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) sum += w[i] * (lse - x[i]);
      } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) sum += lse - x[i];
      }
      loss += smooth * sum;
    }
  }
  ((REAL *)c->loss)[row] = loss;
  ((REAL *)c->lse_out)[row] = lse;
  ((REAL *)c->row_weight)[row] = of_row;
}

/* The log-sum-exp of a row in one pass over memory: what was summed is scaled when a larger element comes (Milakov and
 * Gimelshein 2018). NaN for a row without a finite element. */
static inline REAL FN(log_sum)(const REAL *x, int64_t n) {
  REAL top = (REAL)-INFINITY, sum = 0;
  for (int64_t at = 0; at < n; at += BLOCK) {
    const int64_t k = n - at < BLOCK ? n - at : BLOCK;
    const REAL m = FN(row_max)(x + at, k);
    if (m > top) {
      sum *= FN(ty_exp_weight)(top - m);
      top = m;
    }
    for (int64_t i = at; i < at + k; i += FN(block)) {
      stream_expect(x + i, STREAM_AHEAD);
      sum += FN(row_exp_sum)(NULL, x + i, at + k - i < FN(block) ? at + k - i : FN(block),
                             top > (REAL)-INFINITY ? top : 0);
    }
  }
  return top > (REAL)-INFINITY ? top + FN(ty_log)(sum) : (REAL)NAN;
}

#if !defined(__AVX512F__)
/* Rows of at most SHORT elements, many at a time: their exponentials are computed as one line, whose vectors are full. */
static void FN(short_rows)(const job *c, int64_t begin, int64_t end) {
  const int64_t n = c->classes;
  REAL line[LINE], top[LINE];
  for (int64_t first = begin, rows; first < end; first += rows) {
    rows = end - first < LINE / n ? end - first : LINE / n;
    const REAL *x = (const REAL *)c->x + first * n;
    for (int64_t r = 0; r < rows; r++) {
      const REAL m = FN(row_max)(x + r * n, n), from = m > (REAL)-INFINITY ? m : 0;
      top[r] = m;
      for (int64_t i = 0; i < n; i++) line[r * n + i] = x[r * n + i] - from;
    }
#pragma omp simd
    for (int64_t i = 0; i < rows * n; i++) line[i] = FN(ty_exp_weight)(line[i]);
    for (int64_t r = 0; r < rows; r++) {
      REAL sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; i++) sum += line[r * n + i];
      FN(finish)(c, first + r, top[r] > (REAL)-INFINITY ? top[r] + FN(ty_log)(sum) : (REAL)NAN);
    }
  }
}

static void FN(short_rows_backward)(const job *c, int64_t begin, int64_t end) {
  const int64_t n = c->classes;
  const REAL *restrict w = c->weight;
  const double of_class = c->p.label_smoothing / (double)n;
  REAL line[LINE];
  for (int64_t first = begin, rows; first < end; first += rows) {
    rows = end - first < LINE / n ? end - first : LINE / n;
    const REAL *x = (const REAL *)c->x + first * n;
    for (int64_t r = 0; r < rows; r++) {
      const REAL lse = ((const REAL *)c->lse)[first + r];
      for (int64_t i = 0; i < n; i++) line[r * n + i] = x[r * n + i] - lse;
    }
#pragma omp simd
    for (int64_t i = 0; i < rows * n; i++) line[i] = FN(ty_exp_weight)(line[i]);
    for (int64_t r = 0; r < rows; r++) {
      const REAL g = ((const REAL *)c->g)[first + r];
      REAL *restrict dx = (REAL *)c->dx + (first + r) * n;
      const int64_t y = target_at(c, first + r);
      if (y == c->p.ignore_index) {
        for (int64_t i = 0; i < n; i++) dx[i] = 0;
        continue;
      }
      const double hard = (1 - c->p.label_smoothing) * (w ? (double)w[y] : 1);
      const REAL smooth = (REAL)of_class * g, all = (REAL)(hard + of_class * c->weight_sum) * g;
      for (int64_t i = 0; i < n; i++) dx[i] = line[r * n + i] * all - (w ? smooth * w[i] : smooth);
      dx[y] -= (REAL)hard * g;
    }
  }
}
#endif

static void FN(rows)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->classes;
#if !defined(__AVX512F__)
  if (n > 0 && n <= SHORT && !c->p.log_probs) {
    FN(short_rows)(c, begin, end);
    return;
  }
#endif
  for (int64_t row = begin; row < end; row++) {
    const REAL *x = (const REAL *)c->x + row * n;
    FN(finish)(c, row, c->p.log_probs ? 0 : FN(log_sum)(x, n));
  }
}

static void FN(rows_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->classes, step = FN(block);
  const REAL *restrict w = c->weight;
#if !defined(__AVX512F__)
  if (n > 0 && n <= SHORT && !c->p.log_probs) {
    FN(short_rows_backward)(c, begin, end);
    return;
  }
#endif
  REAL block[FN(block)];
  for (int64_t row = begin; row < end; row++) {
    const REAL *restrict x = (const REAL *)c->x + row * n;
    const REAL g = ((const REAL *)c->g)[row], lse = ((const REAL *)c->lse)[row];
    const int64_t y = target_at(c, row);
    const bool ignored = y == c->p.ignore_index;
    const double of_class = c->p.label_smoothing / (double)n;
    const double hard = ignored ? 0 : (1 - c->p.label_smoothing) * (w ? (double)w[y] : 1);
    const REAL smooth = (REAL)of_class * g, all = (REAL)(hard + of_class * c->weight_sum) * g;
    for (int64_t at = 0; at < n; at += step) {
      const int64_t k = n - at < step ? n - at : step;
      REAL *to = (REAL *)c->dx + row * n + at, *restrict dx = c->stream ? block : to;
      if (c->stream) stream_expect(x + at, STREAM_AHEAD);
      if (c->p.log_probs || ignored)
        for (int64_t i = 0; i < k; i++) dx[i] = 0;
      else FN(row_exp_scale)(dx, x + at, k, lse, all);
      if (!ignored && smooth != 0) {
        if (w)
          for (int64_t i = 0; i < k; i++) dx[i] -= smooth * w[at + i];
        else
          for (int64_t i = 0; i < k; i++) dx[i] -= smooth;
      }
      if (!ignored && y >= at && y < at + k) dx[y - at] -= (REAL)hard * g;
      if (c->stream) stream_copy(to, block, (size_t)k * sizeof(REAL));
    }
  }
  if (c->stream) stream_end();
}
