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

static void FN(rows)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->classes, step = FN(block);
  for (int64_t row = begin; row < end; row++) {
    const REAL *restrict x = (const REAL *)c->x + row * n;
    REAL lse = 0;
    if (!c->p.log_probs) {
      REAL sum = 0;
      const REAL top = FN(row_max)(x, n);
      for (int64_t at = 0; at < n; at += step) { /* the next row comes while this one is computed */
        for (int i = 0; i < STREAM_BLOCK; i += STREAM_LINE) __builtin_prefetch((const char *)(x + n + at) + i, 0, 2);
        sum += FN(row_exp_sum)(NULL, x + at, n - at < step ? n - at : step, top);
      }
      lse = top + FN(ty_log)(sum);
    }
    FN(finish)(c, row, lse);
  }
}

static void FN(rows_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->classes, step = FN(block);
  const REAL *restrict w = c->weight;
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
