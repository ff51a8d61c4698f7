/* f32 convolutions by sums over taps, for any kernel, stride, padding, dilation and groups. A band of the input is
 * copied channels last, so that the taps of a kernel row, which are neighbours, are one run of kw * c values; kernels
 * are packed in the same order, and a row of results is a product of overlapping runs with them. Gradients for the
 * input are the same with kernels turned; with strides they fall apart into phases, one for every position modulo the
 * stride, each of which sees its own taps only. */
#include "conv_taps.h"

#define BAND_FLOATS (96 << 10) /* of the input of a band: they stay in the L2 cache */
#define WEIGHT_PIXELS 160      /* results in a band of the gradient for the weight: they stay in the L1 cache */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

/* ---- taps ---- */

/* Where one tap reads, from the position of the result (divided by `every`, times `stride`). */
typedef struct tap {
  int64_t dy, dx, index; /* index: in the kernel */
} tap;

/* Results y = every * j + first in both directions, and the taps that they see: `runs` runs of `length` taps side by
 * side. */
typedef struct phase {
  int64_t y0, x0, runs, length, packed; /* packed: of its kernels in a chunk, in rows of PAIR */
  const tap *taps;
} phase;

typedef struct plan {
  int64_t n, c, h, w, o, oh, ow, groups; /* channels of one group */
  int64_t stride[2], every[2];
  int64_t top, bottom, left, right; /* least and greatest dy and dx */
  int64_t phases, taps, rows;       /* rows: of PAIR in the kernels of one chunk */
  phase *phase;
  const float *x, *weight;
  int64_t from_out, from_in; /* elements between kernels of output and of input channels */
  const conv_epilogue *e;
  float *y, *packed;
  int64_t band, bands, slices, slice; /* output rows; chunks of output channels */
  bool failed;
} plan;

/* Taps per row side by side, 1 when they are apart. */
static void join(phase *p, int64_t across) {
  bool together = across > 1;
  for (int64_t i = 1; i < across; i++) together = together && p->taps[i].dx == p->taps[i - 1].dx + 1;
  p->length = together ? across : 1;
  p->runs = together ? p->runs / across : p->runs;
}

static void measure(plan *p) {
  p->rows = 0;
  p->top = p->left = INT64_MAX;
  p->bottom = p->right = INT64_MIN;
  for (int64_t i = 0; i < p->phases; i++) {
    const phase *f = &p->phase[i];
    p->phase[i].packed = p->rows;
    p->rows += f->runs * f->length * p->c;
    for (int64_t t = 0; t < f->runs * f->length; t++) {
      p->top = least(p->top, f->taps[t].dy), p->bottom = most(p->bottom, f->taps[t].dy);
      p->left = least(p->left, f->taps[t].dx), p->right = most(p->right, f->taps[t].dx);
    }
  }
}

/* The phases and taps of the convolution itself, or (`turned`) of its gradient for the input. `taps` has room for all
 * of the kernel. */
static void find_taps(plan *p, const conv_shape *s, bool turned, tap *taps) {
  for (int64_t i = 0; i < p->phases; i++) {
    phase *f = &p->phase[i];
    int64_t across = 0;
    f->y0 = i / p->every[1], f->x0 = i % p->every[1];
    f->taps = taps;
    f->runs = 0;
    for (int64_t a = 0; a < s->kh; a++) {
      int64_t ky = turned ? s->kh - 1 - a : a, dy = turned ? f->y0 + s->ph - ky * s->dh : ky * s->dh - s->ph, seen = 0;
      if (turned && dy % s->sh) continue;
      for (int64_t b = 0; b < s->kw; b++) {
        int64_t kx = turned ? s->kw - 1 - b : b, dx = turned ? f->x0 + s->pw - kx * s->dw : kx * s->dw - s->pw;
        if (turned && dx % s->sw) continue;
        *taps++ = (tap){ turned ? dy / s->sh : dy, turned ? dx / s->sw : dx, ky * s->kw + kx };
        f->runs++, seen++;
      }
      across = seen;
    }
    join(f, across);
  }
  measure(p);
}

/* ---- packing the kernels ---- */

static void pack_units(void *context, int64_t begin, int64_t end) {
  plan *p = context;
  int64_t at_once = most(1, least(p->c, 256 / p->taps)), chunks = chunks_of(p->o);
  if (p->from_in != p->taps) at_once = 1;
  size_t bytes = sizeof(float) * (size_t)(at_once * p->taps * LANES);
  float *kernels = ty_scratch_alloc(bytes);
  if (!kernels) {
    p->failed = true;
    return;
  }
  for (int64_t u = begin; u < end; u++) {
    int64_t group = u / chunks, chunk = u % chunks, width = vectors_of(p->o, chunk) * LANES;
    float *to = p->packed + u * p->rows * PAIR;
    for (int64_t half = 0; half < width; half += LANES) {
      int64_t o = chunk * PAIR + half, count = least(LANES, p->o - o);
      for (int64_t c0 = 0; c0 < p->c; c0 += at_once) {
        int64_t n = least(at_once, p->c - c0);
        const float *from = p->weight + group * p->c * p->o * p->taps + o * p->from_out + c0 * p->from_in;
        interleave(from, p->from_out, count, n * p->taps, kernels, LANES, LANES);
        for (int64_t i = 0; i < p->phases; i++) {
          const phase *f = &p->phase[i];
          for (int64_t t = 0; t < f->runs * f->length; t++)
            for (int64_t c = 0; c < n; c++)
              *(lanes *)(to + (f->packed + t * p->c + c0 + c) * width +
                         half) = *(const lanes *)(kernels + (c * p->taps + f->taps[t].index) * LANES);
        }
      }
    }
  }
  ty_scratch_free(kernels, bytes);
}

/* ---- bands of results ---- */

static int64_t input_rows(const plan *p) {
  return (up(p->band, p->every[0]) - 1) * p->stride[0] + 1 + p->bottom - p->top;
}
static int64_t input_columns(const plan *p) {
  return (up(p->ow, p->every[1]) - 1) * p->stride[1] + 1 + p->right - p->left;
}

/* `rows` rows of all `channels`, channels last without gaps (or with `pitch`). */
static void gather_channels(const float *x, int64_t h, int64_t w, int64_t channels, int64_t y0, int64_t rows,
                            int64_t x0, int64_t columns, float *dst, int64_t pitch) {
  for (int64_t c = 0; c < channels; c += LANES) {
    int64_t count = least(LANES, channels - c);
    gather_planes(x + c * h * w, h, w, count, least(LANES, pitch - c), y0, rows, x0, columns, dst + c, pitch);
  }
}

/* One chunk of output channels of a band whose input is at `in`: rows of PAIR or LANES to `out`. */
static void multiply_band(const plan *p, int64_t rows, const float *in, const float *packed, int64_t *offset,
                          int64_t vectors, float *out) {
  int64_t columns = input_columns(p), width = vectors * LANES;
  for (int64_t i = 0; i < p->phases; i++) {
    const phase *f = &p->phase[i];
    int64_t across = f->x0 < p->ow ? up(p->ow - f->x0, p->every[1]) : 0;
    for (int64_t r = 0; r < f->runs; r++) {
      const tap *t = &f->taps[r * f->length];
      offset[r] = ((t->dy - p->top) * columns + t->dx - p->left) * p->c;
    }
    micro product = { .segments = f->runs, .k = f->length * p->c, .offset = offset, .step = p->stride[1] * p->c };
    product.b = packed + f->packed * width;
    product.c_row = p->every[1] * width;
    for (int64_t j = 0; j * p->every[0] + f->y0 < rows; j++) {
      product.a = in + j * p->stride[0] * columns * p->c;
      product.c = out + ((j * p->every[0] + f->y0) * p->ow + f->x0) * width;
      multiply_along(&product, across, vectors);
    }
  }
}

static void band_units(void *context, int64_t begin, int64_t end) {
  plan *p = context;
  int64_t columns = input_columns(p), in_rows = input_rows(p), area = p->oh * p->ow;
  int64_t for_in = up(in_rows * columns * p->c, LANES) * LANES, for_out = p->band * p->ow * PAIR;
  size_t bytes = sizeof(float) * (size_t)(for_in + for_out) + sizeof(int64_t) * (size_t)p->taps;
  float *in = ty_scratch_alloc(bytes), *out = in + for_in;
  if (!in) {
    p->failed = true;
    return;
  }
  int64_t *offset = (int64_t *)(void *)(out + for_out), chunks = chunks_of(p->o), loaded = -1;
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t slice = u % p->slices, place = u / p->slices, row0 = place % p->bands * p->band;
    int64_t group = place / p->bands % p->groups, image = place / p->bands / p->groups;
    int64_t rows = least(p->band, p->oh - row0);
    if (place != loaded)
      gather_channels(p->x + (image * p->groups + group) * p->c * p->h * p->w, p->h, p->w, p->c,
                      row0 / p->every[0] * p->stride[0] + p->top, in_rows, p->left, columns, in, p->c);
    loaded = place;
    for (int64_t chunk = slice * p->slice; chunk < least(chunks, (slice + 1) * p->slice); chunk++) {
      int64_t vectors = vectors_of(p->o, chunk);
      multiply_band(p, rows, in, p->packed + (group * chunks + chunk) * p->rows * PAIR, offset, vectors, out);
      for (int64_t half = 0; half < vectors * LANES; half += LANES) {
        int64_t o = group * p->o + chunk * PAIR + half;
        finish_planes(p->e, out + half, vectors * LANES, rows * p->ow, least(LANES, (group + 1) * p->o - o), p->y,
                      (image * p->groups * p->o + o) * area + row0 * p->ow, area, o);
      }
    }
  }
  ty_scratch_free(in, bytes);
}

static bool run(plan *p, const conv_shape *s) {
  int64_t chunks = chunks_of(p->o);
  int threads = ty_parallel_threads();
  p->band = p->oh;
  while (p->band > p->every[0] && input_rows(p) * input_columns(p) * p->c > BAND_FLOATS) p->band = up(p->band, 2);
  p->bands = up(p->oh, p->band);
  while (p->n * p->groups * p->bands < 4 * threads && p->band > 4 * p->every[0]) {
    p->band = up(p->band, 2);
    p->bands = up(p->oh, p->band);
  }
  p->band = up(up(p->oh, p->bands), p->every[0]) * p->every[0];
  p->bands = up(p->oh, p->band);
  int64_t places = p->n * p->groups * p->bands;
  p->slices = least(chunks, up(2 * threads, places));
  p->slice = up(chunks, p->slices);
  p->slices = up(chunks, p->slice);
  size_t bytes = sizeof(float) * (size_t)(p->groups * chunks * p->rows * PAIR);
  static const char maker;
  ty_kept packed = conv_kept(s, p->weight, &maker, 0, bytes, true);
  p->packed = packed.data;
  if (!p->packed) return false;
  double work = (double)p->slice * PAIR * (double)p->rows * (double)(p->band * p->ow);
  if (!packed.filled) ty_parallel_for_all(p->groups * chunks, 1 + 16384 / (PAIR * p->rows), pack_units, p);
  if (!p->failed) ty_parallel_for(places * p->slices, 1 + (int64_t)(1e5 / (work + 1)), band_units, p);
  ty_kept_close(&packed, !p->failed);
  return !p->failed;
}

static bool run_with_taps(plan *p, const conv_shape *s, bool turned) {
  p->taps = s->kh * s->kw;
  p->phases = p->every[0] * p->every[1];
  size_t bytes = sizeof(tap) * (size_t)p->taps + sizeof(phase) * (size_t)p->phases;
  p->phase = ty_scratch_alloc(bytes);
  if (!p->phase) return false;
  find_taps(p, s, turned, (tap *)(void *)(p->phase + p->phases));
  bool ok = run(p, s);
  ty_scratch_free(p->phase, bytes);
  return ok;
}

bool TY_KERNEL(conv_direct)(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e,
                            float *y) {
  plan p = { .n = s->n, .c = s->cg, .h = s->h, .w = s->w, .o = s->og, .oh = s->oh, .ow = s->ow, .groups = s->groups };
  p.stride[0] = s->sh, p.stride[1] = s->sw, p.every[0] = p.every[1] = 1;
  p.x = x, p.weight = weight, p.e = e, p.y = y;
  p.from_out = s->cg * s->kh * s->kw, p.from_in = s->kh * s->kw;
  return run_with_taps(&p, s, false);
}

bool TY_KERNEL(conv_direct_input)(const conv_shape *s, const float *g, const float *weight, float *dx) {
  const conv_epilogue none = { NULL, NULL, TY_NO_ACTIVATION };
  plan p = { .n = s->n, .c = s->og, .h = s->oh, .w = s->ow, .o = s->cg, .oh = s->h, .ow = s->w, .groups = s->groups };
  p.stride[0] = p.stride[1] = 1, p.every[0] = s->sh, p.every[1] = s->sw;
  p.x = g, p.weight = weight, p.e = &none, p.y = dx;
  p.from_out = s->kh * s->kw, p.from_in = s->cg * s->kh * s->kw;
  return run_with_taps(&p, s, true);
}

/* ---- the gradient of the weight ---- */

/* Sums over bands of results, in parts that do not depend on the number of threads: ranges of bands, and slices of the
 * output channels where the weight is too large for many partial sums. */
typedef struct weight_plan {
  const conv_shape *s;
  const float *g, *x;
  float *sums; /* [part][chunk][tap][channel][PAIR] */
  int64_t group, band, bands, parts, slices, slice, length;
  bool failed;
} weight_plan;

static void weight_units(void *context, int64_t begin, int64_t end) {
  weight_plan *w = context;
  const conv_shape *s = w->s;
  int64_t columns = (s->ow - 1) * s->sw + 1 + (s->kw - 1) * s->dw, taps = s->kh * s->kw, chunks = chunks_of(s->og);
  int64_t in_rows = (w->band - 1) * s->sh + 1 + (s->kh - 1) * s->dh;
  int64_t for_in = up(in_rows * columns * s->cg, LANES) * LANES,
          pitch = up(least(s->og, w->slice * PAIR), LANES) * LANES;
  size_t bytes = sizeof(float) * (size_t)(for_in + w->band * s->ow * pitch);
  float *in = ty_scratch_alloc(bytes), *out = in + for_in;
  if (!in) {
    w->failed = true;
    return;
  }
  for (int64_t u = begin; u < end; u++) {
    int64_t part = u / w->slices, chunk0 = u % w->slices * w->slice, chunk1 = least(chunk0 + w->slice, chunks);
    int64_t all = s->n * w->bands, first = all * part / w->parts, last = all * (part + 1) / w->parts;
    for (int64_t place = first; place < last && !ty_interrupted; place++) {
      int64_t image = place / w->bands, row0 = place % w->bands * w->band, rows = least(w->band, s->oh - row0);
      gather_channels(s->h * s->w * (image * s->c + w->group * s->cg) + w->x, s->h, s->w, s->cg, row0 * s->sh - s->ph,
                      (rows - 1) * s->sh + 1 + (s->kh - 1) * s->dh, -s->pw, columns, in, s->cg);
      gather_channels(s->oh * s->ow * (image * s->o + w->group * s->og + chunk0 * PAIR) + w->g, s->oh, s->ow,
                      least(s->og - chunk0 * PAIR, w->slice * PAIR), row0, rows, 0, s->ow, out, pitch);
      for (int64_t chunk = chunk0; chunk < chunk1; chunk++) {
        int64_t vectors = vectors_of(s->og, chunk), width = vectors * LANES;
        micro product = { .segments = rows, .k = s->ow, .step = s->sw * s->cg, .a_part = s->sh * columns * s->cg };
        product.b = out + (chunk - chunk0) * PAIR;
        product.b_row = pitch, product.b_part = s->ow * pitch;
        product.c_row = width, product.add = place > first;
        for (int64_t t = 0; t < taps; t += w->length) {
          product.a = in + (t / s->kw * s->dh * columns + t % s->kw * s->dw) * s->cg;
          product.c = w->sums + ((part * chunks + chunk) * taps * PAIR + t * width) * s->cg;
          multiply_across(&product, w->length * s->cg, vectors);
        }
      }
    }
  }
  ty_scratch_free(in, bytes);
}

bool TY_KERNEL(conv_direct_weight)(const conv_shape *s, const float *g, const float *x, float *dw) {
  weight_plan w = { .s = s, .g = g, .x = x, .length = s->dw == 1 ? s->kw : 1 };
  int64_t taps = s->kh * s->kw, chunks = chunks_of(s->og), count = chunks * PAIR * s->cg * taps;
  w.band = least(s->oh, most(1, WEIGHT_PIXELS / s->ow));
  w.bands = up(s->oh, w.band);
  w.band = up(s->oh, w.bands);
  w.parts = most(1, least(8, least(s->n * w.bands, (1 << 22) / count)));
  w.slices = least(chunks, up(8, w.parts));
  w.slice = up(chunks, w.slices);
  w.slices = up(chunks, w.slice);
  size_t bytes = sizeof(float) * (size_t)(w.parts * count);
  w.sums = ty_scratch_alloc(bytes);
  if (!w.sums) return false;
  double work = (double)count / (double)w.slices * (double)(s->n * s->oh * s->ow) / (double)w.parts;
  for (w.group = 0; w.group < s->groups && !w.failed; w.group++) {
    ty_parallel_for(w.parts * w.slices, 1 + (int64_t)(1e5 / (work + 1)), weight_units, &w);
    if (!w.failed) combine_taps(w.sums, w.parts, s->og, s->cg, taps, dw + w.group * s->og * s->cg * taps);
  }
  ty_scratch_free(w.sums, bytes);
  return !w.failed;
}
