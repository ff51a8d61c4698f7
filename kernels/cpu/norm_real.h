/* Template of norm.c: REAL is the element, FN(x) gives names their suffix. With h = (x - mean) rstd and w g the
 * gradient of h: dx = rstd (w g - average(w g) - h average(w g h)) (Ioffe and Szegedy 2015); without the middle term
 * for rms norm. */

static inline double FN(total)(const REAL *x, int64_t n) {
  double total = 0;
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t stop = at + BLOCK < n ? at + BLOCK : n;
    REAL part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t i = at; i < stop; i++) part += x[i];
    total += (double)part;
  }
  return total;
}

/* Adds the sums of x - mean and of its square. The first is not 0, because mean is rounded: it says by how much. */
static inline void FN(add_spread)(const REAL *x, int64_t n, REAL mean, double *rest, double *square) {
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t stop = at + BLOCK < n ? at + BLOCK : n;
    REAL part = 0, part2 = 0;
#pragma omp simd reduction(+ : part, part2)
    for (int64_t i = at; i < stop; i++) {
      REAL d = x[i] - mean;
      part += d;
      part2 += d * d;
    }
    *rest += (double)part, *square += (double)part2;
  }
}

/* From the sum of squares around a mean that is `off` too small. */
static inline double FN(variance)(double square, double off, int64_t n) {
  double var = square / (double)n - off * off;
  return var < 0 ? 0 : var;
}

static void FN(rows)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->width;
  const REAL *restrict w = c->weight, *restrict b = c->bias;
  for (int64_t row = begin; row < end; row++) {
    const REAL *restrict x = (const REAL *)c->x + row * n;
    REAL *restrict y = (REAL *)c->y + row * n;
    const REAL mean = c->centred ? (REAL)(FN(total)(x, n) / (double)n) : 0;
    double off = 0, square = 0;
    FN(add_spread)(x, n, mean, &off, &square);
    off = c->centred ? off / (double)n : 0;
    const double var = FN(variance)(square, off, n);
    const REAL low = (REAL)off, rstd = (REAL)(1 / sqrt(var + c->eps));
    if (w && b)
      for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean - low) * rstd * w[i] + b[i];
    else if (w)
      for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean - low) * rstd * w[i];
    else if (b)
      for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean - low) * rstd + b[i];
    else
      for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean - low) * rstd;
    if (c->centred) ((REAL *)c->mean_out)[row] = mean + low;
    ((REAL *)c->rstd_out)[row] = rstd;
  }
}

/* The two averages of a row, then dx; adds to the chunk's dw and db where wanted. w NULL counts as ones. */
static inline void FN(row_backward)(const job *c, int64_t row, REAL *restrict dw, REAL *restrict db) {
  const int64_t n = c->width;
  const REAL *restrict x = (const REAL *)c->x + row * n, *restrict g = (const REAL *)c->g + row * n,
                       *restrict w = c->weight;
  REAL *restrict dx = (REAL *)c->dx + row * n;
  const REAL mean = c->centred ? ((const REAL *)c->mean)[row] : 0, rstd = ((const REAL *)c->rstd)[row];
  double sum = 0, sum_h = 0;
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t stop = at + BLOCK < n ? at + BLOCK : n;
    REAL part = 0, part_h = 0;
    if (w) {
#pragma omp simd reduction(+ : part, part_h)
      for (int64_t i = at; i < stop; i++) {
        REAL v = g[i] * w[i];
        part += v;
        part_h += v * ((x[i] - mean) * rstd);
      }
    } else {
#pragma omp simd reduction(+ : part, part_h)
      for (int64_t i = at; i < stop; i++) {
        part += g[i];
        part_h += g[i] * ((x[i] - mean) * rstd);
      }
    }
    sum += (double)part, sum_h += (double)part_h;
  }
  const REAL a = c->centred ? (REAL)(sum / (double)n) : 0, a_h = (REAL)(sum_h / (double)n);
  if (w)
    for (int64_t i = 0; i < n; i++) dx[i] = rstd * (g[i] * w[i] - a - (x[i] - mean) * rstd * a_h);
  else
    for (int64_t i = 0; i < n; i++) dx[i] = rstd * (g[i] - a - (x[i] - mean) * rstd * a_h);
  if (dw)
    for (int64_t i = 0; i < n; i++) dw[i] += g[i] * ((x[i] - mean) * rstd);
  if (db)
    for (int64_t i = 0; i < n; i++) db[i] += g[i];
}

static void FN(rows_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  for (int64_t chunk = begin; chunk < end; chunk++) {
    REAL *dw = NULL, *db = NULL;
    if (c->dweight) {
      dw = (REAL *)c->partial + chunk * c->width * 2;
      for (int64_t i = 0; i < c->width * 2; i++) dw[i] = 0;
      if (c->dbias) db = dw + c->width;
    }
    int64_t stop = (chunk + 1) * c->chunk < c->rows ? (chunk + 1) * c->chunk : c->rows;
    for (int64_t row = chunk * c->chunk; row < stop; row++) FN(row_backward)(c, row, dw, db);
  }
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
  const REAL *w = c->weight, *b = c->bias;
  for (int64_t row = begin; row < end; row++) {
    const REAL *x = (const REAL *)c->x + row * c->row_step;
    REAL *y = (REAL *)c->y + row * c->row_step;
    double total = 0, off = 0, square = 0;
    for (int64_t s = 0; s < c->segments; s++) total += FN(total)(x + s * c->segment_step, c->spatial);
    const REAL mean = (REAL)(total / (double)c->width);
    for (int64_t s = 0; s < c->segments; s++) FN(add_spread)(x + s * c->segment_step, c->spatial, mean, &off, &square);
    off /= (double)c->width;
    const double var = FN(variance)(square, off, c->width);
    const REAL low = (REAL)off;
    const REAL rstd = (REAL)(1 / sqrt(var + c->eps));
    for (int64_t s = 0; s < c->segments; s++) {
      int64_t channel = FN(channel)(c, row, s);
      const REAL scale = w ? rstd * w[channel] : rstd, shift = b ? b[channel] : 0;
      const REAL *restrict from = x + s * c->segment_step;
      REAL *restrict to = y + s * c->segment_step;
      for (int64_t i = 0; i < c->spatial; i++) to[i] = (from[i] - mean - low) * scale + shift;
    }
    ((REAL *)c->mean_out)[row] = mean + low;
    if (c->rstd_out) ((REAL *)c->rstd_out)[row] = rstd;
    if (c->var_out) ((REAL *)c->var_out)[row] = (REAL)var;
  }
}

/* partial[row][segment]: the sums of g h and of g over a segment. */
static void FN(segments_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const REAL *w = c->weight;
  for (int64_t row = begin; row < end; row++) {
    const REAL mean = ((const REAL *)c->mean)[row], rstd = ((const REAL *)c->rstd)[row];
    REAL *sums = (REAL *)c->partial + row * c->segments * 2;
    double sum = 0, sum_h = 0;
    for (int64_t s = 0; s < c->segments; s++) {
      int64_t at = row * c->row_step + s * c->segment_step;
      const REAL *restrict x = (const REAL *)c->x + at, *restrict g = (const REAL *)c->g + at;
      double of_segment = 0, of_segment_h = 0;
      for (int64_t from = 0; from < c->spatial; from += BLOCK) {
        int64_t stop = from + BLOCK < c->spatial ? from + BLOCK : c->spatial;
        REAL part = 0, part_h = 0;
#pragma omp simd reduction(+ : part, part_h)
        for (int64_t i = from; i < stop; i++) {
          part += g[i];
          part_h += g[i] * ((x[i] - mean) * rstd);
        }
        of_segment += (double)part, of_segment_h += (double)part_h;
      }
      double scale = w ? (double)w[FN(channel)(c, row, s)] : 1;
      sum += scale * of_segment, sum_h += scale * of_segment_h;
      sums[2 * s] = (REAL)of_segment_h, sums[2 * s + 1] = (REAL)of_segment;
    }
    const REAL a = (REAL)(sum / (double)c->width), a_h = (REAL)(sum_h / (double)c->width);
    for (int64_t s = 0; s < c->segments; s++) {
      int64_t at = row * c->row_step + s * c->segment_step;
      const REAL *restrict x = (const REAL *)c->x + at, *restrict g = (const REAL *)c->g + at;
      REAL *restrict dx = (REAL *)c->dx + at;
      const REAL scale = w ? w[FN(channel)(c, row, s)] : 1;
      for (int64_t i = 0; i < c->spatial; i++) dx[i] = rstd * (g[i] * scale - a - (x[i] - mean) * rstd * a_h);
    }
  }
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
    double sum[COLUMNS], square[COLUMNS];
    for (int64_t j = 0; j < width; j++) mean[j] = 0;
    for (int pass = 0; pass < 2; pass++) { /* the mean; then what it was rounded by, and the variance */
      for (int64_t j = 0; j < width; j++) sum[j] = square[j] = 0;
      for (int64_t from = 0; from < n; from += BLOCK) {
        int64_t stop = from + BLOCK < n ? from + BLOCK : n;
        for (int64_t j = 0; j < width; j++) part[j] = part2[j] = 0;
        for (int64_t i = from; i < stop; i++)
#pragma omp simd
          for (int64_t j = 0; j < width; j++) {
            REAL d = x[i * all + j] - mean[j];
            part[j] += d;
            part2[j] += d * d;
          }
        for (int64_t j = 0; j < width; j++) sum[j] += (double)part[j], square[j] += (double)part2[j];
      }
      if (pass == 0)
        for (int64_t j = 0; j < width; j++) mean[j] = (REAL)(sum[j] / (double)n);
    }
    for (int64_t j = 0; j < width; j++) {
      double off = sum[j] / (double)n, var = FN(variance)(square[j], off, n);
      low[j] = (REAL)off, scale[j] = (REAL)(1 / sqrt(var + c->eps)), shift[j] = 0;
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
