/* Template of norm_add.c: REAL is the element, FN(x) gives names their suffix. The formulas are those of norm_real.h. */

/* sum = mask x + residual for one row. */
static inline void FN(add_row)(const job *c, int64_t row) {
  const int64_t n = c->width;
  REAL mask[MASKED];
  for (int64_t at = 0; at < n; at += MASKED) {
    const int64_t k = n - at < MASKED ? n - at : MASKED, first = row * n + at;
    const REAL *restrict x = (const REAL *)c->x + first, *restrict r = (const REAL *)c->residual + first;
    REAL *restrict s = (REAL *)c->sum + first;
    if (c->least == 0) {
      for (int64_t i = 0; i < k; i++) s[i] = x[i] + r[i];
      continue;
    }
    FN(mask)(c, first, k, mask);
    for (int64_t i = 0; i < k; i++) s[i] = x[i] * mask[i] + r[i];
  }
}

static void FN(rows)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->width;
  const REAL *restrict w = c->weight, *restrict b = c->bias;
  for (int64_t row = begin; row < end; row++) {
    FN(add_row)(c, row);
    const REAL *restrict x = (const REAL *)c->sum + row * n;
    REAL *restrict y = (REAL *)c->y + row * n, mean = 0, low = 0;
    double var;
    if (c->p.centred) {
      FN(spread) s = { 0 };
      FN(add)(&s, x, n);
      mean = FN(split)(s.mean, &low), var = s.square / (double)n;
    } else {
      var = FN(squares)(x, n) / (double)n;
    }
    const REAL rstd = (REAL)(1 / sqrt(var + c->p.eps)), off = low * rstd;
    if (w && b)
      for (int64_t i = 0; i < n; i++) y[i] = ((x[i] - mean) * rstd - off) * w[i] + b[i];
    else if (w)
      for (int64_t i = 0; i < n; i++) y[i] = ((x[i] - mean) * rstd - off) * w[i];
    else if (b)
      for (int64_t i = 0; i < n; i++) y[i] = ((x[i] - mean) * rstd - off) + b[i];
    else
      for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd - off;
    ((REAL *)c->mean_out)[row] = mean + low;
    ((REAL *)c->rstd_out)[row] = rstd;
  }
}

/* The two averages of a row, dsum, and dx where dropout makes it differ; adds to the chunk's dw and db where wanted. */
static inline void FN(row_backward)(const job *c, int64_t row, REAL *restrict dw, REAL *restrict db) {
  const int64_t n = c->width, first = row * n;
  const REAL *restrict x = (const REAL *)c->total + first, *restrict g = (const REAL *)c->g + first,
                       *restrict w = c->weight;
  const REAL *restrict g_sum = c->g_sum ? (const REAL *)c->g_sum + first : NULL;
  REAL *restrict ds = (REAL *)c->dsum + first;
  const REAL mean = c->p.centred ? ((const REAL *)c->mean)[row] : 0, rstd = ((const REAL *)c->rstd)[row];
  double sum = 0, sum_h = 0;
  FN(add_products)(x, g, w, mean, n, &sum, &sum_h);
  const REAL a = c->p.centred ? (REAL)(sum / (double)n) : 0, a_h = (REAL)(sum_h * (double)rstd / (double)n);
  if (w)
    for (int64_t i = 0; i < n; i++) ds[i] = rstd * (g[i] * w[i] - a - (x[i] - mean) * rstd * a_h);
  else
    for (int64_t i = 0; i < n; i++) ds[i] = rstd * (g[i] - a - (x[i] - mean) * rstd * a_h);
  if (g_sum)
    for (int64_t i = 0; i < n; i++) ds[i] += g_sum[i];
  if (dw)
    for (int64_t i = 0; i < n; i++) dw[i] += g[i] * ((x[i] - mean) * rstd);
  if (db)
    for (int64_t i = 0; i < n; i++) db[i] += g[i];
  if (!c->dx) return;
  REAL *restrict dx = (REAL *)c->dx + first, mask[MASKED];
  for (int64_t at = 0; at < n; at += MASKED) {
    const int64_t k = n - at < MASKED ? n - at : MASKED;
    FN(mask)(c, first + at, k, mask);
    for (int64_t i = 0; i < k; i++) dx[at + i] = ds[at + i] * mask[i];
  }
}

static void FN(rows_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  for (int64_t chunk = begin; chunk < end; chunk++) {
    REAL *dw = c->dweight ? (REAL *)c->partial + chunk * c->width * 2 : NULL, *db = c->dbias ? dw + c->width : NULL;
    for (int64_t i = 0; dw && i < c->width * 2; i++) dw[i] = 0;
    int64_t stop = (chunk + 1) * c->chunk < c->rows ? (chunk + 1) * c->chunk : c->rows;
    for (int64_t row = chunk * c->chunk; row < stop; row++) FN(row_backward)(c, row, dw, db);
  }
}

/* begin and end count blocks of COLUMNS. */
static void FN(sum_chunks)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  REAL *restrict dw = c->dweight, *restrict db = c->dbias;
  const int64_t from = begin * COLUMNS, to = end * COLUMNS < c->width ? end * COLUMNS : c->width;
  for (int64_t i = from; i < to; i++) dw[i] = 0;
  for (int64_t i = from; db && i < to; i++) db[i] = 0;
  for (int64_t chunk = 0; chunk < c->chunks; chunk++) {
    const REAL *restrict part = (const REAL *)c->partial + chunk * c->width * 2;
    for (int64_t i = from; i < to; i++) dw[i] += part[i];
    for (int64_t i = from; db && i < to; i++) db[i] += part[c->width + i];
  }
}
