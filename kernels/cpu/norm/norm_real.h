/* Template of norm.c: REAL is the element, FN(x) gives names their suffix. With h = (x - mean) rstd and w g the
 * gradient of h: dx = rstd (w g - average(w g) - h average(w g h)) (Ioffe and Szegedy 2015); without the middle term
 * for rms norm. */

enum { FN(block) = STREAM_BLOCK / sizeof(REAL) };

static void FN(rows)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->width, step = c->stream ? FN(block) : n, ahead = stream_ahead(n * (int64_t)sizeof(REAL));
  REAL block[FN(block)];
  for (int64_t row = begin; row < end; row++) {
    const REAL *x = (const REAL *)c->x + row * n;
    REAL *y = (REAL *)c->y + row * n, mean = 0, low = 0;
    double var;
    if (c->centred) {
      FN(spread) s = { 0 };
      FN(add)(&s, x, n);
      mean = FN(split)(s.mean, &low), var = s.square / (double)n;
    } else {
      var = FN(squares)(x, n) / (double)n;
    }
    const REAL rstd = (REAL)(1 / sqrt(var + c->eps)), off = low * rstd;
    for (int64_t at = 0; at < n; at += step) {
      const int64_t k = n - at < step ? n - at : step;
      const REAL *restrict from = x + at, *restrict w = c->weight ? (const REAL *)c->weight + at : NULL;
      const REAL *restrict b = c->bias ? (const REAL *)c->bias + at : NULL;
      REAL *restrict to = c->stream ? block : y + at;
      if (c->stream) stream_expect(from, ahead);
      if (w && b)
        for (int64_t i = 0; i < k; i++) to[i] = ((from[i] - mean) * rstd - off) * w[i] + b[i];
      else if (w)
        for (int64_t i = 0; i < k; i++) to[i] = ((from[i] - mean) * rstd - off) * w[i];
      else if (b)
        for (int64_t i = 0; i < k; i++) to[i] = ((from[i] - mean) * rstd - off) + b[i];
      else
        for (int64_t i = 0; i < k; i++) to[i] = (from[i] - mean) * rstd - off;
      if (c->stream) stream_copy(y + at, block, (size_t)k * sizeof(REAL));
    }
    if (c->centred) ((REAL *)c->mean_out)[row] = mean + low;
    ((REAL *)c->rstd_out)[row] = rstd;
  }
  if (c->stream) stream_end();
}

/* The averages of w g and of w g h in a row; w NULL counts as ones. */
static inline void FN(row_averages)(const job *c, int64_t row, REAL *average, REAL *average_h) {
  const int64_t n = c->width;
  const REAL mean = c->centred ? ((const REAL *)c->mean)[row] : 0, rstd = ((const REAL *)c->rstd)[row];
  double sum = 0, sum_h = 0;
  FN(add_products)((const REAL *)c->x + row * n, (const REAL *)c->g + row * n, c->weight, mean, n, &sum, &sum_h);
  *average = c->centred ? (REAL)(sum / (double)n) : 0, *average_h = (REAL)(sum_h * (double)rstd / (double)n);
}

/* dx of a row from its averages; adds to the chunk's dw and db where wanted. */
static inline void FN(row_backward)(const job *c, int64_t row, REAL *dw, REAL *db) {
  const int64_t n = c->width, step = c->stream ? FN(block) : n, ahead = stream_ahead(n * (int64_t)sizeof(REAL));
  const REAL *restrict x = (const REAL *)c->x + row * n, *restrict g = (const REAL *)c->g + row * n,
                       *restrict w = c->weight;
  const REAL mean = c->centred ? ((const REAL *)c->mean)[row] : 0, rstd = ((const REAL *)c->rstd)[row];
  REAL block[FN(block)], a, a_h;
  FN(row_averages)(c, row, &a, &a_h);
  for (int64_t at = 0; at < n; at += step) {
    const int64_t k = n - at < step ? n - at : step;
    const REAL *restrict p = x + at, *restrict q = g + at, *restrict u = w ? w + at : NULL;
    REAL *to = (REAL *)c->dx + row * n + at, *restrict dx = c->stream ? block : to;
    REAL *restrict dw_at = dw ? dw + at : NULL, *restrict db_at = db ? db + at : NULL;
    if (c->stream) stream_expect(p, ahead);
    if (c->stream) stream_expect(q, ahead);
    if (u && db) {
#pragma omp simd
      for (int64_t i = 0; i < k; i++) {
        REAL h = (p[i] - mean) * rstd;
        dx[i] = rstd * (q[i] * u[i] - a - h * a_h);
        dw_at[i] += q[i] * h;
        db_at[i] += q[i];
      }
    } else if (u && dw) {
#pragma omp simd
      for (int64_t i = 0; i < k; i++) {
        REAL h = (p[i] - mean) * rstd;
        dx[i] = rstd * (q[i] * u[i] - a - h * a_h);
        dw_at[i] += q[i] * h;
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < k; i++) dx[i] = rstd * (q[i] - a - (p[i] - mean) * rstd * a_h);
    }
    if (c->stream) stream_copy(to, block, (size_t)k * sizeof(REAL));
  }
}

/* The same for TOGETHER rows, by strips of columns: weights and sums, which with a row do not fit into the first
 * cache, are read and written once for all of them. */
static inline __attribute__((always_inline)) void FN(together_backward)(const job *c, int64_t row, REAL *restrict dw,
                                                                        REAL *restrict db, bool centred) {
  const int64_t n = c->width;
  const REAL *x = (const REAL *)c->x + row * n, *g = (const REAL *)c->g + row * n, *w = c->weight;
  REAL *dx = (REAL *)c->dx + row * n, block[TOGETHER][FN(block)];
  REAL mean[TOGETHER] = { 0 }, rstd[TOGETHER], a[TOGETHER], a_h[TOGETHER];
  for (int r = 0; r < TOGETHER; r++) {
    FN(row_averages)(c, row + r, &a[r], &a_h[r]);
    if (centred) mean[r] = ((const REAL *)c->mean)[row + r];
    rstd[r] = ((const REAL *)c->rstd)[row + r];
  }
  for (int64_t at = 0; at < n; at += FN(block)) {
    const int64_t k = n - at < FN(block) ? n - at : FN(block);
#pragma omp simd
    for (int64_t i = at; i < at + k; i++) {
      REAL sum = 0, sum_h = 0;
      for (int r = 0; r < TOGETHER; r++) {
        const REAL h = (x[r * n + i] - mean[r]) * rstd[r], q = g[r * n + i];
        block[r][i - at] = rstd[r] * (q * w[i] - a[r] - h * a_h[r]);
        sum += q, sum_h += q * h;
      }
      dw[i] += sum_h;
      if (centred) db[i] += sum;
    }
    for (int r = 0; r < TOGETHER; r++) memcpy(dx + r * n + at, block[r], (size_t)k * sizeof(REAL));
  }
}

/* The sums of a chunk, at 0. */
static inline void FN(chunk_sums)(const job *c, int64_t chunk, REAL **dw, REAL **db) {
  *dw = *db = NULL;
  if (!c->dweight) return;
  *dw = (REAL *)c->partial + chunk * c->width * 2;
  for (int64_t i = 0; i < c->width * 2; i++) (*dw)[i] = 0;
  if (c->dbias) *db = *dw + c->width;
}

static void FN(some_backward)(const job *c, int64_t row, int64_t stop, REAL *dw, REAL *db) {
  if (dw && !c->stream && c->width <= WIDEST) /* past the caches, one row after the other loads faster */
    for (; row + TOGETHER <= stop; row += TOGETHER) {
      if (db) FN(together_backward)(c, row, dw, db, true);
      else FN(together_backward)(c, row, dw, NULL, false);
    }
  for (; row < stop; row++) FN(row_backward)(c, row, dw, db);
}

static void FN(rows_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  for (int64_t chunk = begin; chunk < end; chunk++) {
    REAL *dw, *db;
    FN(chunk_sums)(c, chunk, &dw, &db);
    int64_t stop = (chunk + 1) * c->chunk < c->rows ? (chunk + 1) * c->chunk : c->rows;
    FN(some_backward)(c, chunk * c->chunk, stop, dw, db);
  }
  if (c->stream) stream_end();
}

/* begin and end count blocks of COLUMNS. */
static void FN(sum_chunks)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  REAL *restrict dw = c->dweight, *restrict db = c->dbias;
  int64_t from = begin * COLUMNS, to = end * COLUMNS < c->width ? end * COLUMNS : c->width;
  for (int64_t i = from; i < to; i++) dw[i] = 0;
  if (db)
    for (int64_t i = from; i < to; i++) db[i] = 0;
  for (int64_t chunk = 0; chunk < c->chunks; chunk++) {
    const REAL *restrict part = (const REAL *)c->partial + chunk * c->width * 2;
    for (int64_t i = from; i < to; i++) dw[i] += part[i];
    if (db)
      for (int64_t i = from; i < to; i++) db[i] += part[c->width + i];
  }
}

/* Which weight a segment has. */
static inline int64_t FN(channel)(const job *c, int64_t row, int64_t segment) {
  return c->by_row ? row : row % c->groups * c->segments + segment;
}

static void FN(segments)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->spatial, step = c->stream || c->activation ? FN(block) : n;
  const int64_t ahead = stream_ahead(c->row_step * (int64_t)sizeof(REAL));
  const REAL *w = c->weight, *b = c->bias;
  REAL block[FN(block)];
  for (int64_t row = begin; row < end; row++) {
    const REAL *x = (const REAL *)c->x + row * c->row_step;
    REAL *y = (REAL *)c->y + row * c->row_step, low;
    FN(spread) all = { 0 };
    for (int64_t s = 0; s < c->segments; s++) FN(add)(&all, x + s * c->segment_step, n);
    const REAL mean = FN(split)(all.mean, &low);
    const double var = all.square / (double)c->width;
    const REAL rstd = (REAL)(1 / sqrt(var + c->eps));
    for (int64_t s = 0; s < c->segments; s++) {
      int64_t channel = FN(channel)(c, row, s);
      const REAL scale = w ? rstd * w[channel] : rstd, shift = (b ? b[channel] : 0) - low * scale;
      for (int64_t at = 0; at < n; at += step) {
        const int64_t k = n - at < step ? n - at : step, first = s * c->segment_step + at;
        const REAL *restrict from = x + first;
        REAL *restrict to = c->stream ? block : y + first;
        if (c->stream) stream_expect(from, ahead);
        for (int64_t i = 0; i < k; i++) to[i] = (from[i] - mean) * scale + shift;
        F(activate)(c->activation, to, k);
        if (c->stream) stream_copy(y + first, block, (size_t)k * sizeof(REAL));
      }
    }
    ((REAL *)c->mean_out)[row] = mean + low;
    if (c->rstd_out) ((REAL *)c->rstd_out)[row] = rstd;
    if (c->var_out) ((REAL *)c->var_out)[row] = (REAL)var;
  }
  if (c->stream) stream_end();
}

/* partial[row][segment]: the sums of g h and of g over a segment. */
static void FN(segments_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t step = c->stream ? FN(block) : c->spatial;
  const int64_t ahead = stream_ahead(c->row_step * (int64_t)sizeof(REAL));
  const REAL *w = c->weight, *bias = c->bias, *all_g = c->activation ? c->dx : c->g;
  REAL block[FN(block)];
  for (int64_t row = begin; row < end; row++) {
    const REAL mean = ((const REAL *)c->mean)[row], rstd = ((const REAL *)c->rstd)[row];
    REAL *sums = (REAL *)c->partial + row * c->segments * 2;
    double sum = 0, sum_h = 0;
    for (int64_t s = 0; s < c->segments; s++) {
      int64_t at = row * c->row_step + s * c->segment_step;
      const int64_t channel = FN(channel)(c, row, s);
      const REAL *restrict x = (const REAL *)c->x + at, *g = all_g + at;
      const REAL v = w ? rstd * w[channel] : rstd, u = bias ? bias[channel] : 0;
      double of_segment = 0, of_segment_h = 0;
      for (int64_t from = 0; from < c->spatial; from += BLOCK) {
        int64_t stop = from + BLOCK < c->spatial ? from + BLOCK : c->spatial;
        if (c->activation)
          FN(through)(c, (REAL *)c->dx + at + from, (const REAL *)c->g + at + from, x + from, mean, v, u, stop - from);
        FN(add_products)(x + from, g + from, NULL, mean, stop - from, &of_segment, &of_segment_h);
      }
      of_segment_h *= (double)rstd;
      double scale = w ? (double)w[channel] : 1;
      sum += scale * of_segment, sum_h += scale * of_segment_h;
      sums[2 * s] = (REAL)of_segment_h, sums[2 * s + 1] = (REAL)of_segment;
    }
    const REAL a = (REAL)(sum / (double)c->width), a_h = (REAL)(sum_h / (double)c->width);
    for (int64_t s = 0; s < c->segments; s++) {
      const REAL of_g = w ? rstd * w[FN(channel)(c, row, s)] : rstd, of_h = rstd * a_h, off = rstd * a;
      for (int64_t from = 0; from < c->spatial; from += step) {
        const int64_t k = c->spatial - from < step ? c->spatial - from : step;
        const int64_t at = row * c->row_step + s * c->segment_step + from;
        const REAL *x = (const REAL *)c->x + at, *g = all_g + at;
        REAL *dx = c->stream ? block : (REAL *)c->dx + at; /* may be g */
        if (c->stream) stream_expect(x, ahead);
        if (c->stream) stream_expect(g, ahead);
#pragma omp simd
        for (int64_t i = 0; i < k; i++) dx[i] = g[i] * of_g - ((x[i] - mean) * rstd * of_h + off);
        if (c->stream) stream_copy((REAL *)c->dx + at, block, (size_t)k * sizeof(REAL));
      }
    }
  }
  if (c->stream) stream_end();
}

/* begin and end count channels; each sums what belongs to it: all segments of its row, or one of its group's in
 * every image. */
static void FN(sum_segments)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  int64_t n = c->by_row ? c->segments : c->rows / c->groups;
  int64_t step = c->by_row ? 1 : c->groups * c->segments;
  for (int64_t channel = begin; channel < end; channel++) {
    const REAL *sums = (const REAL *)c->partial + (c->by_row ? channel * n : channel) * 2;
    double dw = 0, db = 0;
    for (int64_t i = 0; i < n; i++, sums += step * 2) dw += (double)sums[0], db += (double)sums[1];
    ((REAL *)c->dweight)[channel] = (REAL)dw;
    if (c->dbias) ((REAL *)c->dbias)[channel] = (REAL)db;
  }
}

/* batch_norm of x [segments, rows] with one position: neighbouring channels together. begin and end count blocks of
 * COLUMNS. */
static void FN(columns)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->segments, all = c->rows;
  for (int64_t block = begin; block < end; block++) {
    const int64_t first = block * COLUMNS, width = all - first < COLUMNS ? all - first : COLUMNS;
    const REAL *restrict x = (const REAL *)c->x + first, *restrict w = c->weight, *restrict b = c->bias;
    REAL *restrict y = (REAL *)c->y + first, *restrict average = c->mean_out, *restrict spread = c->var_out;
    REAL part[COLUMNS], part2[COLUMNS], mean[COLUMNS], low[COLUMNS], scale[COLUMNS], shift[COLUMNS];
    FN(spread) all_of[COLUMNS] = { { 0 } };
    for (int64_t from = 0; from < n; from += ROWS) { /* around their own mean, in every column */
      const int64_t rows = from + ROWS < n ? ROWS : n - from;
      const REAL *restrict p = x + from * all;
      for (int64_t j = 0; j < width; j++) mean[j] = part[j] = part2[j] = 0;
      for (int64_t i = 0; i < rows; i++)
#pragma omp simd
        for (int64_t j = 0; j < width; j++) mean[j] += p[i * all + j];
      for (int64_t j = 0; j < width; j++) mean[j] /= (REAL)rows;
      for (int64_t i = 0; i < rows; i++)
#pragma omp simd
        for (int64_t j = 0; j < width; j++) {
          REAL d = p[i * all + j] - mean[j];
          part[j] += d;
          part2[j] += d * d;
        }
      for (int64_t j = 0; j < width; j++) FN(join)(&all_of[j], mean[j], (double)part[j], (double)part2[j], rows);
    }
    for (int64_t j = 0; j < width; j++) {
      const double var = all_of[j].square / (double)n;
      mean[j] = FN(split)(all_of[j].mean, &low[j]);
      scale[j] = (REAL)(1 / sqrt(var + c->eps)), shift[j] = 0;
      average[first + j] = mean[j] + low[j], spread[first + j] = (REAL)var;
    }
    if (w)
      for (int64_t j = 0; j < width; j++) scale[j] *= w[first + j];
    if (b)
      for (int64_t j = 0; j < width; j++) shift[j] = b[first + j];
    for (int64_t i = 0; i < n; i++)
#pragma omp simd
      for (int64_t j = 0; j < width; j++) y[i * all + j] = (x[i * all + j] - mean[j] - low[j]) * scale[j] + shift[j];
  }
}

static void FN(columns_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->segments, all = c->rows;
  for (int64_t block = begin; block < end; block++) {
    const int64_t first = block * COLUMNS, width = all - first < COLUMNS ? all - first : COLUMNS;
    const REAL *restrict x = (const REAL *)c->x + first, *restrict g = (const REAL *)c->g + first;
    const REAL *restrict w = c->weight;
    const REAL *restrict mean = (const REAL *)c->mean + first, *restrict rstd = (const REAL *)c->rstd + first;
    REAL *restrict dx = (REAL *)c->dx + first, *restrict dw = c->dweight, *restrict db = c->dbias;
    REAL part[COLUMNS], part_h[COLUMNS], a[COLUMNS], a_h[COLUMNS], scale[COLUMNS];
    double sum[COLUMNS], sum_h[COLUMNS];
    for (int64_t j = 0; j < width; j++) sum[j] = sum_h[j] = 0;
    for (int64_t from = 0; from < n; from += BLOCK) {
      int64_t stop = from + BLOCK < n ? from + BLOCK : n;
      for (int64_t j = 0; j < width; j++) part[j] = part_h[j] = 0;
      for (int64_t i = from; i < stop; i++)
#pragma omp simd
        for (int64_t j = 0; j < width; j++) {
          part[j] += g[i * all + j];
          part_h[j] += g[i * all + j] * ((x[i * all + j] - mean[j]) * rstd[j]);
        }
      for (int64_t j = 0; j < width; j++) sum[j] += (double)part[j], sum_h[j] += (double)part_h[j];
    }
    for (int64_t j = 0; j < width; j++) a[j] = (REAL)(sum[j] / (double)n), a_h[j] = (REAL)(sum_h[j] / (double)n);
    for (int64_t j = 0; j < width; j++) scale[j] = rstd[j];
    if (w)
      for (int64_t j = 0; j < width; j++) scale[j] *= w[first + j];
    if (dw)
      for (int64_t j = 0; j < width; j++) dw[first + j] = (REAL)sum_h[j];
    if (db)
      for (int64_t j = 0; j < width; j++) db[first + j] = (REAL)sum[j];
    for (int64_t i = 0; i < n; i++)
#pragma omp simd
      for (int64_t j = 0; j < width; j++) {
        int64_t e = i * all + j;
        dx[e] = scale[j] * (g[e] - a[j] - (x[e] - mean[j]) * rstd[j] * a_h[j]);
      }
  }
}
