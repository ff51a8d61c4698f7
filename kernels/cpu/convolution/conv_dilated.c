/* f32 convolutions with dilated 3x3 kernels: positions that are alike modulo the dilation see only each other, so that
 * a picture falls apart into `dh` by `dw` small ones, the phases, with a plain kernel each, which Winograd's transforms
 * serve. Where rows do not go up evenly, the phases that lack one have zeros there. */
#include "conv_lanes.h"

/* One array on both sides: planes [n, c, h, w], and its phases [n, dh, dw, c, (h + dh - 1) / dh, (w + dw - 1) / dw]. */
typedef struct phases {
  int64_t c, h, w, dh, dw;
  int64_t rows, columns; /* of a phase */
  const float *from;
  float *to;
  const conv_epilogue *e; /* of merge: what is done to the results besides the bias; or NULL */
} phases;

static phases phases_of(const conv_shape *s, int64_t c, int64_t h, int64_t w) {
  return (phases){ c, h, w, s->dh, s->dw, (h + s->dh - 1) / s->dh, (w + s->dw - 1) / s->dw, NULL, NULL, NULL };
}

static size_t phases_bytes(const phases *p, int64_t n) {
  return sizeof(float) * (size_t)(n * p->c * p->dh * p->dw * p->rows * p->columns);
}

/* Where row `y` of a plane begins in the phase of its first column, and how far it is to that of the next. */
static int64_t row_in_phases(const phases *p, int64_t plane, int64_t y) {
  int64_t phase = (plane / p->c * p->dh + y % p->dh) * p->dw;
  return ((phase * p->c + plane % p->c) * p->rows + y / p->dh) * p->columns;
}
static int64_t next_phase(const phases *p) { return p->c * p->rows * p->columns; }

/* How many of the columns that are `first` modulo dw there are. */
static int64_t columns_of(const phases *p, int64_t first) {
  return first < p->w ? (p->w - first + p->dw - 1) / p->dw : 0;
}

static void split_planes(void *context, int64_t begin, int64_t end) {
  const phases *p = context;
  for (int64_t plane = begin; plane < end; plane++)
    for (int64_t y = 0; y < p->rows * p->dh; y++) {
      float *to = p->to + row_in_phases(p, plane, y);
      for (int64_t j = 0; j < p->dw; j++, to += next_phase(p)) {
        int64_t count = y < p->h ? columns_of(p, j) : 0;
        if (count) pick_run(p->from + (plane * p->h + y) * p->w + j, p->dw, count, to);
        for (int64_t i = count; i < p->columns; i++) to[i] = 0;
      }
    }
}

static void merge_planes(void *context, int64_t begin, int64_t end) {
  const phases *p = context;
  for (int64_t plane = begin; plane < end; plane++)
    for (int64_t y = 0; y < p->h; y++) {
      const float *from = p->from + row_in_phases(p, plane, y);
      int64_t at = (plane * p->h + y) * p->w;
      float *restrict to = p->to + at;
      for (int64_t j = 0; j < p->dw; j++, from += next_phase(p)) {
        int64_t count = columns_of(p, j);
        for (int64_t i = 0; i < count; i++) to[j + i * p->dw] = from[i];
      }
      if (p->e) finish_run(to, 0, p->e->residual ? p->e->residual + at : NULL, p->e->activation, to, p->w);
    }
}

static void share_planes(phases *p, int64_t n, ty_range_fn *fn, const float *from, float *to) {
  p->from = from, p->to = to;
  ty_parallel_for(n * p->c, 1 + 16384 / (p->h * p->w), fn, p);
}

static conv_shape shape_of_phases(const conv_shape *s) {
  conv_shape t = *s;
  phases in = phases_of(s, s->c, s->h, s->w), out = phases_of(s, s->o, s->oh, s->ow);
  t.n = s->n * s->dh * s->dw;
  t.h = in.rows, t.w = in.columns, t.oh = out.rows, t.ow = out.columns;
  t.ph = s->ph / s->dh, t.pw = s->pw / s->dw, t.dh = t.dw = 1;
  return t;
}

bool TY_KERNEL(conv_dilated_shape)(const conv_shape *s, conv_shape *phase) {
  if (s->sh != 1 || s->sw != 1 || s->dh * s->dw == 1 || s->ph % s->dh || s->pw % s->dw) return false;
  *phase = shape_of_phases(s);
  return true;
}

/* From x to y, or `back` from the gradient of y to that of x, by way of the phases of both. */
static bool through_phases(const conv_shape *s, bool back, const float *from, const float *weight,
                           const conv_epilogue *e, float *to) {
  const conv_shape t = shape_of_phases(s);
  phases x = phases_of(s, s->c, s->h, s->w), y = phases_of(s, s->o, s->oh, s->ow);
  phases in = back ? y : x, out = back ? x : y;
  size_t for_in = phases_bytes(&in, s->n), bytes = for_in + phases_bytes(&out, s->n);
  float *split = ty_scratch_alloc(bytes), *results = split + for_in / sizeof(float);
  if (!split) return false;
  share_planes(&in, s->n, split_planes, from, split);
  const conv_epilogue bias = { e ? e->bias : NULL, NULL, TY_NO_ACTIVATION };
  bool ok = back ? TY_KERNEL(conv_winograd_input)(&t, split, weight, results)
                 : TY_KERNEL(conv_winograd)(&t, split, weight, &bias, results);
  out.e = e && (e->residual || e->activation) ? e : NULL;
  if (ok) share_planes(&out, s->n, merge_planes, results, to);
  ty_scratch_free(split, bytes);
  return ok;
}

bool TY_KERNEL(conv_dilated)(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e,
                             float *y) {
  return through_phases(s, false, x, weight, e, y);
}

bool TY_KERNEL(conv_dilated_input)(const conv_shape *s, const float *g, const float *weight, float *dx) {
  return through_phases(s, true, g, weight, NULL, dx);
}

bool TY_KERNEL(conv_dilated_weight)(const conv_shape *s, const float *g, const float *x, float *dw) {
  const conv_shape t = shape_of_phases(s);
  phases in = phases_of(s, s->c, s->h, s->w), out = phases_of(s, s->o, s->oh, s->ow);
  size_t for_in = phases_bytes(&in, s->n), bytes = for_in + phases_bytes(&out, s->n);
  float *split_x = ty_scratch_alloc(bytes), *split_g = split_x + for_in / sizeof(float);
  if (!split_x) return false;
  share_planes(&in, s->n, split_planes, x, split_x);
  share_planes(&out, s->n, split_planes, g, split_g);
  bool ok = TY_KERNEL(conv_winograd_weight)(&t, split_g, split_x, dw);
  ty_scratch_free(split_x, bytes);
  return ok;
}
