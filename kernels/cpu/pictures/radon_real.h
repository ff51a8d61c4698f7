/* Projections for one element type; included by radon.c with REAL and NAME(x) set. */

#ifndef TY_RADON_SHAPE
#define TY_RADON_SHAPE
typedef struct radon_shape {
  int64_t n, h, w, angles, detectors;
  double spacing;
  const ty_radon_view *views;
} radon_shape;
#endif

typedef struct NAME(radon_ctx) {
  const radon_shape *s;
  const REAL *from;
  REAL *to;
  REAL *framed; /* of each picture, its rows between empty pixels, one before and two after; then its columns */
  int64_t each;
} NAME(radon_ctx);

static void NAME(frame_pictures)(void *context, int64_t begin, int64_t end) {
  const NAME(radon_ctx) *c = context;
  const int64_t h = c->s->h, w = c->s->w;
  for (int64_t i = begin; i < end; i++) {
    const REAL *x = c->from + i * h * w;
    REAL *rows = c->framed + i * c->each, *columns = rows + h * (w + 3);
    memset(rows, 0, (size_t)c->each * sizeof *rows);
    for (int64_t y = 0; y < h; y++) memcpy(rows + y * (w + 3) + 1, x + y * w, (size_t)w * sizeof *x);
    for (int64_t y = 0; y < h; y++)
      for (int64_t k = 0; k < w; k++) columns[k * (h + 3) + 1 + y] = x[y * w + k];
  }
}

static void NAME(project_views)(void *context, int64_t begin, int64_t end) {
  const NAME(radon_ctx) *c = context;
  const radon_shape *s = c->s;
  for (int64_t i = begin; i < end; i++) {
    const ty_radon_view *v = s->views + i % s->angles;
    const ty_radon_lines l = ty_radon_lines_of(v, s->h, s->w, s->detectors, s->spacing);
    const int64_t lines = v->by_rows ? s->h : s->w, width = v->by_rows ? s->w : s->h;
    const REAL *picture = c->framed + i / s->angles * c->each + (v->by_rows ? 0 : s->h * (s->w + 3));
    REAL *restrict out = c->to + i * s->detectors;
    for (int64_t j = 0; j < s->detectors; j++) out[j] = 0;
    for (int64_t y = 0; y < lines; y++) {
      const REAL *restrict row = picture + y * (width + 3);
      const double first = l.first + (double)y * l.by_line + 1, step = l.by_detector, last = (double)(width + 1);
#pragma omp simd
      for (int64_t j = 0; j < s->detectors; j++) {
        double at = first + (double)j * step;
        at = at > 0 ? at : 0; /* the empty pixels; NaN as well */
        at = at < last ? at : last;
        const int32_t k = (int32_t)at;
        const REAL part = (REAL)(at - (double)k);
        out[j] += row[k] + part * (row[k + 1] - row[k]);
      }
    }
    for (int64_t j = 0; j < s->detectors; j++) out[j] *= (REAL)l.length;
  }
}

static bool NAME(project)(const radon_shape *s, const void *x, void *y) {
  NAME(radon_ctx) c = { s, x, y, NULL, s->h * (s->w + 3) + s->w * (s->h + 3) };
  const size_t bytes = (size_t)(s->n * c.each) * sizeof(REAL);
  if (!(c.framed = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(s->n, 1, NAME(frame_pictures), &c);
  ty_parallel_for(s->n * s->angles, 1 + 65536 / (s->h * s->w + s->detectors + 1), NAME(project_views), &c);
  ty_scratch_free(c.framed, bytes);
  return true;
}

static void NAME(backproject_rows)(void *context, int64_t begin, int64_t end) {
  const NAME(radon_ctx) *c = context;
  const radon_shape *s = c->s;
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = i % s->h;
    const REAL *picture = c->from + i / s->h * s->angles * s->detectors;
    REAL *restrict out = c->to + i * s->w;
    for (int64_t x = 0; x < s->w; x++) out[x] = 0;
    for (int64_t a = 0; a < s->angles; a++) {
      const ty_radon_pixels p = ty_radon_pixels_of(s->views + a, s->h, s->w, s->detectors, s->spacing);
      const REAL *restrict g = picture + a * s->detectors;
      const double first = p.first + (double)row * p.by_row, most = (double)(s->detectors - 1);
      for (int64_t x = 0; x < s->w; x++) {
        const double at = first + (double)x * p.by_column;
        double from = ceil(at - p.reach), to = floor(at + p.reach);
        from = from > 0 ? from : 0;
        to = to < most ? to : most;
        double sum = 0;
        for (double j = from; j <= to; j++) sum += (1 - fabs(j - at) / p.reach) * (double)g[(int64_t)j];
        out[x] += (REAL)(sum * p.length);
      }
    }
  }
}

static void NAME(backproject)(const radon_shape *s, const void *y, void *x) {
  NAME(radon_ctx) c = { s, y, x, NULL, 0 };
  ty_parallel_for(s->n * s->h, 1 + 16384 / (s->w * s->angles + 1), NAME(backproject_rows), &c);
}
