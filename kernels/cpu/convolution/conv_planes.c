/* f32 convolutions of images with few channels, as they come first in a network, and of many small groups of channels:
 * a vector of channels would be mostly empty, so vectors run along rows of pixels, and results need not be turned. The
 * padded input of a band of rows is split by position modulo the stride, which makes what every tap reads neighbours; a
 * few output channels by two vectors of pixels are then a product of broadcast weights with runs of that, one for every
 * channel and tap. Rows that are no whole number of vectors are one run, and what it computes between is dropped. */
#include "conv_planes.h"
#include "conv_tile.h"

typedef struct planes {
  split_input in;
  const conv_epilogue *e;
  float *y, *packed;
  int64_t tiles; /* of output channels of a group */
  bool apart;    /* every row is a run of its own */
  bool flat;     /* the rows of a run follow each other without gaps */
  bool failed;
} planes;

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
  const conv_shape *s = p->in.s;
  int64_t group = unit / p->in.bands, y = unit % p->in.bands * p->in.band * s->sh, rows = s->h - y;
  if (rows > p->in.band * s->sh) rows = p->in.band * s->sh;
  return (ahead){ .x = p->in.x + (group * s->cg * s->h + y) * s->w,
                  .plane = s->h * s->w,
                  .bytes = rows * s->w * (int64_t)sizeof(float),
                  .channels = group < s->n * s->groups && rows > 0 ? s->cg : 0 };
}

/* Rows of one channel from `sums` to y + at. */
static void finish_rows(const planes *p, const float *sums, int64_t rows, int64_t at) {
  const conv_epilogue *e = p->e;
  int64_t n = p->in.s->ow;
  for (int64_t r = 0; r < rows; r++, sums += p->in.columns, at += n) {
    if (!e->residual && !e->activation) copy_row(sums, n, p->y + at);
    else finish_run(sums, 0, e->residual ? e->residual + at : NULL, e->activation, p->y + at, n);
  }
}

/* A run of n positions, which are `rows` rows of results, for `count` output channels of which the first begins at
 * y + at. Full tiles of what has no gaps go to y at once, others by way of `out`. */
static void multiply_run(const planes *p, tile *t, int64_t count, const float *in, int64_t n, int64_t rows, int64_t at,
                         float *out, ahead *next) {
  int64_t plane = p->in.s->oh * p->in.s->ow, pitch = (n + PAIR - 1) / PAIR * PAIR, there = 0;
  bool direct = p->flat && !p->e->residual && !p->e->activation;
  for (int64_t j = 0; j < n; j += PAIR) {
    bool whole = direct && (n - j >= PAIR || n - j == LANES);
    t->b = in + j;
    t->c = whole ? p->y + at + j : out + j;
    t->c_row = whole ? plane : pitch;
    if (whole) there = j + PAIR;
    ask(next, t);
    tiles[n - j > LANES][count - 1](t);
  }
  for (int64_t i = 0; direct && there < n && i < count; i++)
    copy_row(out + i * pitch + there, n - there, p->y + at + i * plane + there);
  for (int64_t i = 0; !direct && i < count; i++) finish_rows(p, out + i * pitch, rows, at + i * plane);
}

/* `rows` rows of results of a group (counted through all images) from row0 on. */
static void multiply_rows(const planes *p, const float *in, int64_t rows, int64_t group, int64_t row0, float *out,
                          ahead *next) {
  const conv_shape *s = p->in.s;
  int64_t first = group % s->groups; /* of the weights */
  int64_t each = p->apart ? 1 : rows, n = (each - 1) * p->in.columns + s->ow;
  for (int64_t g = 0; g < p->tiles; g++) {
    int64_t o = g * s->og / p->tiles, count = (g + 1) * s->og / p->tiles - o;
    int64_t at = ((group * s->og + o) * s->oh + row0) * s->ow;
    tile t = { .k = p->in.k, .offset = p->in.offset, .a = p->packed + (first * p->tiles + g) * p->in.k * ABREAST };
    t.bias = p->e->bias ? p->e->bias + first * s->og + o : NULL;
    for (int64_t r = 0; r < rows; r += each)
      multiply_run(p, &t, count, in + r * p->in.columns, n, each, at + r * s->ow, out, next);
  }
}

static void band_units(void *context, int64_t begin, int64_t end) {
  planes *p = context;
  const conv_shape *s = p->in.s;
  int64_t for_in = split_floats(&p->in), for_out = MOST_ROWS * (p->in.band * p->in.columns + PAIR);
  size_t bytes = sizeof(float) * (size_t)(for_in + for_out);
  float *in = ty_scratch_alloc(bytes), *out = in + for_in;
  if (!in) {
    p->failed = true;
    return;
  }
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t group = u / p->in.bands, row0 = u % p->in.bands * p->in.band;
    int64_t rows = s->oh - row0 < p->in.band ? s->oh - row0 : p->in.band;
    split(&p->in, group, row0, in);
    ahead next = next_band(p, u + 1);
    multiply_rows(p, in, rows, group, row0, out, &next);
  }
  ty_scratch_free(in, bytes);
}

bool TY_KERNEL(conv_planes)(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e,
                            float *y) {
  planes p = { .in = split_input_of(s, x), .e = e, .y = y, .tiles = tile_groups(s->og) };
  int64_t k = p.in.k;
  p.apart = p.in.columns > s->ow && s->ow % LANES == 0; /* whole vectors need no gaps to be filled */
  p.flat = p.apart || p.in.columns == s->ow;
  size_t bytes = (sizeof(int64_t) + sizeof(float) * (size_t)(s->groups * p.tiles * ABREAST)) * (size_t)k;
  p.in.offset = ty_scratch_alloc(bytes);
  if (!p.in.offset) return false;
  p.packed = (float *)(void *)(p.in.offset + k);
  find_offsets(&p.in);
  for (int64_t g = 0; g < s->groups; g++) {
    const float *from = weight + g * s->og * k;
    pack_groups(&(tile_weights){ from, s->og, k, k, 1, p.packed + g * p.tiles * k * ABREAST }, 0, p.tiles);
  }
  double work = (double)s->og * (double)k * (double)(p.in.band * s->ow);
  ty_parallel_for(s->n * s->groups * p.in.bands, 1 + (int64_t)(1e5 / (work + 1)), band_units, &p);
  ty_scratch_free(p.in.offset, bytes);
  return !p.failed;
}
