/* Resizing for one element type; included by resample.c with REAL and NAME(x) set. */

/* y = the sum of n rows of x, `stride` apart, by their weights. */
static void NAME(blend)(const REAL *x, int64_t stride, const REAL *w, int64_t n, REAL *restrict y, int64_t width) {
  const REAL *restrict a = x, *restrict b = x + stride, *restrict c = b + stride, *restrict d = c + stride;
  if (n == 1) {
    const REAL u = w[0];
    if (u == 1)
      for (int64_t j = 0; j < width; j++) y[j] = a[j];
    else
      for (int64_t j = 0; j < width; j++) y[j] = u * a[j];
    return;
  }
  if (n < 4) {
    const REAL u = w[0], v = w[1];
    for (int64_t j = 0; j < width; j++) y[j] = u * a[j] + v * b[j];
    if (n == 3)
      for (int64_t j = 0; j < width; j++) y[j] += w[2] * c[j];
    return;
  }
  const REAL u = w[0], v = w[1], s = w[2], t = w[3];
  for (int64_t j = 0; j < width; j++) y[j] = u * a[j] + v * b[j] + s * c[j] + t * d[j];
  for (int64_t k = 4; k < n; k++) {
    const REAL *restrict more = x + k * stride;
    const REAL weight = w[k];
    for (int64_t j = 0; j < width; j++) y[j] += weight * more[j];
  }
}

static void NAME(rows)(void *context, int64_t begin, int64_t end) {
  const resizing *r = context;
  for (int64_t i = begin; i < end; i++) {
    const int64_t plane = i / r->out, row = i - plane * r->out;
    const ty_resample_span s = r->spans[row];
    const REAL *x = (const REAL *)r->from + (plane * r->in + s.first) * r->inner;
    REAL *y = (REAL *)r->to + i * r->inner;
    const REAL *w = (const REAL *)r->weights + row * r->taps;
    for (int64_t j = 0; j < r->inner; j += BLOCK) {
      const int64_t width = r->inner - j < BLOCK ? r->inner - j : BLOCK;
      NAME(blend)(x + j, r->inner, w, s.count, y + j, width);
    }
  }
}

/* The last dimension. */
static void NAME(lines)(void *context, int64_t begin, int64_t end) {
  const resizing *r = context;
  const int64_t taps = r->taps, out = r->out;
  for (int64_t line = begin; line < end; line++) {
    const REAL *restrict x = (const REAL *)r->from + line * r->in;
    REAL *restrict y = (REAL *)r->to + line * out;
    const REAL *restrict w = r->weights;
    for (int64_t i = 0; i < out; i++, w += taps) {
      const ty_resample_span s = r->spans[i];
      const REAL *restrict a = x + s.first;
      if (s.count == 4) {
        y[i] = (w[0] * a[0] + w[1] * a[1]) + (w[2] * a[2] + w[3] * a[3]);
        continue;
      }
      REAL sum = w[0] * a[0];
      for (int64_t t = 1; t < s.count; t++) sum += w[t] * a[t];
      y[i] = sum;
    }
  }
}

static void NAME(back_blocks)(void *context, int64_t begin, int64_t end) {
  const resizing *r = context;
  const int64_t blocks = (r->inner + BLOCK - 1) / BLOCK;
  for (int64_t i = begin; i < end; i++) {
    const int64_t plane = i / blocks, at = (i - plane * blocks) * BLOCK;
    const int64_t width = r->inner - at < BLOCK ? r->inner - at : BLOCK;
    const REAL *g = (const REAL *)r->from + plane * r->out * r->inner + at;
    REAL *x = (REAL *)r->to + plane * r->in * r->inner + at;
    for (int64_t row = 0; row < r->in; row++)
      for (int64_t j = 0; j < width; j++) x[row * r->inner + j] = 0;
    for (int64_t row = 0; row < r->out; row++) {
      const ty_resample_span s = r->spans[row];
      const REAL *restrict from = g + row * r->inner;
      for (int64_t t = 0; t < s.count; t++) {
        const REAL w = ((const REAL *)r->weights)[row * r->taps + t];
        REAL *restrict to = x + (s.first + t) * r->inner;
        for (int64_t j = 0; j < width; j++) to[j] += w * from[j];
      }
    }
  }
}

static void NAME(back_lines)(void *context, int64_t begin, int64_t end) {
  const resizing *r = context;
  for (int64_t line = begin; line < end; line++) {
    const REAL *restrict g = (const REAL *)r->from + line * r->out;
    REAL *restrict x = (REAL *)r->to + line * r->in;
    const REAL *restrict w = r->weights;
    for (int64_t j = 0; j < r->in; j++) x[j] = 0;
    for (int64_t i = 0; i < r->out; i++, w += r->taps) {
      const ty_resample_span s = r->spans[i];
      for (int64_t t = 0; t < s.count; t++) x[s.first + t] += w[t] * g[i];
    }
  }
}
