/* Interpolation for one element type; included by interpolate.c with REAL and NAME(x) set. */

typedef struct NAME(resize) {
  const REAL *from;
  REAL *to;
  int64_t h, w, oh, ow;
  const ty_sample *rows, *columns; /* where each row and column of the result lies in the image */
  bool linear;
} NAME(resize);

static void NAME(planes)(void *context, int64_t begin, int64_t end) {
  const NAME(resize) *r = context;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict x = r->from + plane * r->h * r->w;
    REAL *restrict y = r->to + plane * r->oh * r->ow;
    for (int64_t i = 0; i < r->oh; i++, y += r->ow) {
      const REAL *restrict top = x + r->rows[i].first * r->w, *restrict bottom = x + r->rows[i].second * r->w;
      if (!r->linear) {
        for (int64_t j = 0; j < r->ow; j++) y[j] = top[r->columns[j].first];
        continue;
      }
      REAL v = (REAL)r->rows[i].weight;
      for (int64_t j = 0; j < r->ow; j++) {
        ty_sample s = r->columns[j];
        REAL u = (REAL)s.weight;
        REAL a = (1 - u) * top[s.first] + u * top[s.second], b = (1 - u) * bottom[s.first] + u * bottom[s.second];
        y[j] = (1 - v) * a + v * b;
      }
    }
  }
}

/* The transpose: from the gradient of the result [oh, ow] to that of the image [h, w]. */
static void NAME(backward_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(resize) *r = context;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict g = r->from + plane * r->oh * r->ow;
    REAL *restrict x = r->to + plane * r->h * r->w;
    for (int64_t i = 0; i < r->h * r->w; i++) x[i] = 0;
    for (int64_t i = 0; i < r->oh; i++, g += r->ow) {
      REAL *top = x + r->rows[i].first * r->w, *bottom = x + r->rows[i].second * r->w;
      if (!r->linear) {
        for (int64_t j = 0; j < r->ow; j++) top[r->columns[j].first] += g[j];
        continue;
      }
      REAL v = (REAL)r->rows[i].weight;
      for (int64_t j = 0; j < r->ow; j++) {
        ty_sample s = r->columns[j];
        REAL u = (REAL)s.weight, a = (1 - v) * g[j], b = v * g[j];
        top[s.first] += (1 - u) * a;
        top[s.second] += u * a;
        bottom[s.first] += (1 - u) * b;
        bottom[s.second] += u * b;
      }
    }
  }
}
