/* f32 convolutions of images with few channels, as they come first in a network: a vector of channels would be mostly
 * empty, so vectors run along rows of pixels, and results need not be turned. The padded input of a band of rows is
 * split by position modulo the stride, which makes what every tap reads neighbours; a few output channels by two vectors
 * of pixels are then a product of broadcast weights with runs of that, one for every channel and tap. */
#include "conv_tile.h"

enum { BAND = 16 }; /* rows of results: their input stays in the L2 cache */

typedef struct planes {
  const conv_shape *s;
  const float *x;
  const conv_epilogue *e;
  float *y, *packed;
  int64_t *offset; /* of what a channel and tap reads, in the split input */
  int64_t k, groups, band, bands;
  int64_t rows, columns; /* of a plane of the split input */
  bool flat, failed;     /* flat: rows of results follow each other without gaps */
} planes;

/* ---- the split input ---- */

/* `to` [column], from every step-th value of the row `from` of `w`, beginning at `first`, with zeros beyond it. */
static void split_row(const float *restrict from, int64_t w, int64_t first, int64_t step, int64_t columns,
                      float *restrict to) {
  int64_t j = 0, last = w > first ? (w - first + step - 1) / step : 0;
  if (last > columns) last = columns;
  for (; j < last && first + j * step < 0; j++) to[j] = 0;
  if (j < last) pick_run(from + first + j * step, step, last - j, to + j);
  if (j < last) j = last;
  for (; j < columns; j++) to[j] = 0;
}

/* [channel][y modulo stride][x modulo stride][row][column], for the results of row0 and following. */
static void split(const planes *p, int64_t image, int64_t row0, float *to) {
  const conv_shape *s = p->s;
  for (int64_t c = 0; c < s->c; c++) {
    const float *x = p->x + (image * s->c + c) * s->h * s->w;
    for (int64_t py = 0; py < s->sh; py++)
      for (int64_t px = 0; px < s->sw; px++)
        for (int64_t r = 0; r < p->rows; r++, to += p->columns) {
          int64_t y = (row0 + r) * s->sh + py - s->ph;
          bool inside = y >= 0 && y < s->h;
          split_row(inside ? x + y * s->w : x, inside ? s->w : 0, px - s->pw, s->sw, p->columns, to);
        }
  }
  memset(to, 0, sizeof(float) * PAIR); /* read with the last positions, and dropped */
}

static void find_offsets(planes *p) {
  const conv_shape *s = p->s;
  int64_t *to = p->offset;
  for (int64_t c = 0; c < s->c; c++)
    for (int64_t ky = 0; ky < s->kh; ky++)
      for (int64_t kx = 0; kx < s->kw; kx++) {
        int64_t y = ky * s->dh, x = kx * s->dw;
        *to++ = (((c * s->sh + y % s->sh) * s->sw + x % s->sw) * p->rows + y / s->sh) * p->columns + x / s->sw;
      }
}

/* ---- bands ---- */

/* Meanwhile what the next band reads comes from memory, a channel after another, as many lines with each tile as it has
 * taps. */
typedef struct ahead {
  const float *x;
  int64_t plane, bytes, channels; /* from channel to channel; left of each, and of them */
  int64_t done;                   /* of this channel, in bytes */
} ahead;

static void ask(ahead *a, tile *t) {
  bool any = a->channels > 0;
  t->ahead = any ? (const char *)a->x + a->done : (const char *)t->a;
  t->ahead_row = any ? 64 : 0;
  if (any && (a->done += 64 * t->k) >= a->bytes) a->x += a->plane, a->channels--, a->done = 0;
}

static ahead next_band(const planes *p, int64_t unit) {
  const conv_shape *s = p->s;
  int64_t image = unit / p->bands, y = unit % p->bands * p->band * s->sh, rows = s->h - y;
  if (rows > p->band * s->sh) rows = p->band * s->sh;
  return (ahead){ .x = p->x + (image * s->c * s->h + y) * s->w,
                  .plane = s->h * s->w,
                  .bytes = rows * s->w * (int64_t)sizeof(float),
                  .channels = image < s->n && rows > 0 ? s->c : 0 };
}

/* `rows` rows of `n` positions, to y + at for every output channel. */
static void multiply_rows(const planes *p, const float *in, int64_t rows, int64_t n, int64_t o_first, int64_t at,
                          ahead *next) {
  const conv_shape *s = p->s;
  const conv_epilogue *e = p->e;
  int64_t plane = s->oh * s->ow;
  float edge[MOST_ROWS * PAIR] __attribute__((aligned(64)));
  for (int64_t g = 0; g < p->groups; g++) {
    int64_t o = g * s->o / p->groups, count = (g + 1) * s->o / p->groups - o;
    tile t = { .k = p->k, .offset = p->offset, .a = p->packed + g * p->k * ABREAST };
    t.bias = e->bias ? e->bias + o : NULL;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t j = 0; j < n; j += PAIR) {
        int64_t left = n - j < PAIR ? n - j : PAIR, vectors = left > LANES ? 2 : 1;
        bool whole = left == vectors * LANES;
        float *to = p->y + at + (o_first + o) * plane + r * n + j;
        t.b = in + r * p->columns + j;
        t.c = whole ? to : edge;
        t.c_row = whole ? plane : PAIR;
        ask(next, &t);
        tiles[vectors - 1][count - 1](&t);
        for (int64_t i = 0; !whole && i < count; i++)
          for (int64_t q = 0; q < left; q++) to[i * plane + q] = edge[i * PAIR + q];
      }
    for (int64_t i = 0; (e->residual || e->activation) && i < count; i++) {
      int64_t first = at + (o_first + o + i) * plane;
      const float *residual = e->residual ? e->residual + first : NULL;
      finish_run(p->y + first, 0, residual, e->activation, p->y + first, rows * n);
    }
  }
}

static void band_units(void *context, int64_t begin, int64_t end) {
  planes *p = context;
  const conv_shape *s = p->s;
  size_t bytes = sizeof(float) * (size_t)(s->c * s->sh * s->sw * p->rows * p->columns + PAIR);
  float *in = ty_scratch_alloc(bytes);
  if (!in) {
    p->failed = true;
    return;
  }
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t image = u / p->bands, row0 = u % p->bands * p->band;
    int64_t rows = s->oh - row0 < p->band ? s->oh - row0 : p->band;
    split(p, image, row0, in);
    ahead next = next_band(p, u + 1);
    if (p->flat) multiply_rows(p, in, 1, rows * s->ow, image * s->o, row0 * s->ow, &next);
    else multiply_rows(p, in, rows, s->ow, image * s->o, row0 * s->ow, &next);
  }
  ty_scratch_free(in, bytes);
}

bool TY_KERNEL(conv_planes)(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e,
                            float *y) {
  planes p = { .s = s, .x = x, .e = e, .y = y, .k = s->c * s->kh * s->kw };
  int64_t beyond = (s->kw - 1) * s->dw / s->sw;
  p.groups = tile_groups(s->o);
  p.bands = (s->oh + BAND - 1) / BAND;
  p.band = (s->oh + p.bands - 1) / p.bands;
  p.bands = (s->oh + p.band - 1) / p.band;
  p.rows = p.band + (s->kh - 1) * s->dh / s->sh;
  p.columns = s->ow + beyond;
  p.flat = beyond == 0;
  size_t bytes = (sizeof(int64_t) + sizeof(float) * (size_t)(p.groups * ABREAST)) * (size_t)p.k;
  p.offset = ty_scratch_alloc(bytes);
  if (!p.offset) return false;
  p.packed = (float *)(void *)(p.offset + p.k);
  find_offsets(&p);
  pack_groups(&(tile_weights){ weight, s->o, p.k, p.k, 1, p.packed }, 0, p.groups);
  double work = (double)s->o * (double)p.k * (double)(p.band * s->ow);
  ty_parallel_for(s->n * p.bands, 1 + (int64_t)(1e5 / (work + 1)), band_units, &p);
  ty_scratch_free(p.offset, bytes);
  return !p.failed;
}
