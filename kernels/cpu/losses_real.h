/* Template of losses.c: REAL is the element, FN(x) gives names their suffix. */

static void FN(rows)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->classes;
  const REAL *restrict w = c->weight;
  const REAL smooth = (REAL)(c->p.label_smoothing / (double)n);
  for (int64_t row = begin; row < end; row++) {
    const REAL *restrict x = (const REAL *)c->x + row * n;
    REAL lse = 0, loss = 0, of_row = 0;
    if (!c->p.log_probs) {
      REAL top = (REAL)-INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
      for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; i++) sum += FN(ty_exp_weight)(x[i] - top);
      lse = top + FN(ty_log)(sum);
    }
    int64_t y = target_at(c, row);
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
}

static void FN(rows_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->classes;
  const REAL *restrict w = c->weight;
  for (int64_t row = begin; row < end; row++) {
    const REAL *restrict x = (const REAL *)c->x + row * n;
    REAL *restrict dx = (REAL *)c->dx + row * n;
    const REAL g = ((const REAL *)c->g)[row], lse = ((const REAL *)c->lse)[row];
    int64_t y = target_at(c, row);
    if (y == c->p.ignore_index) {
      for (int64_t i = 0; i < n; i++) dx[i] = 0;
      continue;
    }
    double hard = (1 - c->p.label_smoothing) * (w ? (double)w[y] : 1);
    const REAL smooth = (REAL)(c->p.label_smoothing / (double)n) * g;
    const REAL all = (REAL)(hard + c->p.label_smoothing / (double)n * c->weight_sum) * g;
    if (c->p.log_probs)
      for (int64_t i = 0; i < n; i++) dx[i] = 0;
    else
#pragma omp simd
      for (int64_t i = 0; i < n; i++) dx[i] = all * FN(ty_exp_weight)(x[i] - lse);
    if (smooth != 0) {
      if (w)
        for (int64_t i = 0; i < n; i++) dx[i] -= smooth * w[i];
      else
        for (int64_t i = 0; i < n; i++) dx[i] -= smooth;
    }
    dx[y] -= (REAL)hard * g;
  }
}
