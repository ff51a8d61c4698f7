/* f32 convolutions with 1x1 kernels, with or without strides: products of the weight with panels of positions, which run
 * on from image to image, so that small images fill whole panels too. */
#include "conv_tile.h"

enum { RUN = 8 }; /* panels that are gathered at once: runs of neighbours in memory */

typedef struct points {
  const conv_shape *s;
  const float *x, *packed;
  const conv_epilogue *e;
  float *y;
  const int64_t *offset;
  int64_t panels, run;
  bool failed;
} points;

/* Where position q of the first channel comes from. */
static const float *source(const points *p, int64_t q) {
  const conv_shape *s = p->s;
  int64_t area = s->oh * s->ow, at = q % area;
  return p->x + q / area * s->c * s->h * s->w + at / s->ow * s->sh * s->w + at % s->ow * s->sw;
}

/* `count` positions from `first` on, as panels [channel][PAIR]. */
static void gather(const points *p, int64_t first, int64_t count, float *to) {
  const conv_shape *s = p->s;
  int64_t area = s->oh * s->ow, plane = s->h * s->w;
  bool dense = s->sh == 1 && s->sw == 1; /* positions run on from row to row */
  for (int64_t q = first; q < first + count;) {
    int64_t at = q % area, end = dense ? area : (at / s->ow + 1) * s->ow, n = end - at, place = q - first;
    if (n > first + count - q) n = first + count - q;
    const float *from = source(p, q);
    for (int64_t c = 0; c < s->c; c++)
      for (int64_t i = 0; i < n;) {
        int64_t in = (place + i) % PAIR, piece = PAIR - in < n - i ? PAIR - in : n - i;
        pick_run(from + c * plane + i * s->sw, s->sw, piece, to + ((place + i) / PAIR * s->c + c) * PAIR + in);
        i += piece;
      }
    q += n;
  }
  int64_t rest = count % PAIR; /* the last panel may be read whole */
  for (int64_t c = 0; rest && c < s->c; c++)
    memset(to + (count / PAIR * s->c + c) * PAIR + rest, 0, sizeof(float) * (size_t)(PAIR - rest));
}

/* A panel of `count` positions from `first` on, for one group of output channels. */
static void multiply_panel(const points *p, tile *t, int64_t o, int64_t rows, int64_t first, int64_t count) {
  const conv_shape *s = p->s;
  const conv_epilogue *e = p->e;
  int64_t area = s->oh * s->ow, at = first % area, vectors = count > LANES ? 2 : 1;
  float edge[MOST_ROWS * PAIR] __attribute__((aligned(64)));
  bool whole = count == vectors * LANES && at + count <= area && !e->residual && !e->activation;
  t->c = whole ? p->y + (first / area * s->o + o) * area + at : edge;
  t->c_row = whole ? area : PAIR;
  tiles[vectors - 1][rows - 1](t);
  for (int64_t i = 0; !whole && i < count;) {
    int64_t q = first + i, n = area - q % area < count - i ? area - q % area : count - i;
    for (int64_t r = 0; r < rows; r++) {
      int64_t place = (q / area * s->o + o + r) * area + q % area;
      finish_run(edge + r * PAIR + i, 0, e->residual ? e->residual + place : NULL, e->activation, p->y + place, n);
    }
    i += n;
  }
}

/* The panels of one run, for all output channels: the weights of a group, which stay in the L1 cache, times one panel
 * after another, which makes results neighbours. Meanwhile the source of the next run comes from memory, a line of every
 * channel with each of the first panels. */
static void multiply_run(const points *p, int64_t first, int64_t count, const float *panels) {
  const conv_shape *s = p->s;
  int64_t groups = tile_groups(s->o), later = first + p->run * PAIR, lines = 0, asked = 0;
  if (later < s->n * s->oh * s->ow) lines = p->run * PAIR * s->sw * (int64_t)sizeof(float) / 64;
  const char *ahead = lines ? (const char *)source(p, later) : NULL;
  for (int64_t g = 0; g < groups; g++) {
    int64_t o = g * s->o / groups, rows = (g + 1) * s->o / groups - o;
    tile t = { .k = s->c, .offset = p->offset, .a = p->packed + g * s->c * ABREAST };
    t.bias = p->e->bias ? p->e->bias + o : NULL;
    for (int64_t i = 0; i < count; i += PAIR, asked++) {
      t.b = panels + i * s->c;
      t.ahead = asked < lines ? ahead + asked * 64 : (const char *)t.b;
      t.ahead_row = asked < lines ? s->h * s->w * (int64_t)sizeof(float) : 0;
      multiply_panel(p, &t, o, rows, first + i, count - i < PAIR ? count - i : PAIR);
    }
  }
}

static void run_units(void *context, int64_t begin, int64_t end) {
  points *p = context;
  const conv_shape *s = p->s;
  int64_t all = s->n * s->oh * s->ow;
  size_t bytes = sizeof(float) * (size_t)(p->run * s->c * PAIR);
  float *panels = ty_scratch_alloc(bytes);
  if (!panels) {
    p->failed = true;
    return;
  }
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t first = u * p->run * PAIR, count = p->run * PAIR < all - first ? p->run * PAIR : all - first;
    gather(p, first, count, panels);
    multiply_run(p, first, count, panels);
  }
  ty_scratch_free(panels, bytes);
}

bool TY_KERNEL(conv_pointwise)(const conv_shape *s, const float *x, const float *weight, bool turned,
                               const conv_epilogue *e, float *y) {
  points p = { .s = s, .x = x, .e = e, .y = y };
  int64_t all = s->n * s->oh * s->ow, groups = tile_groups(s->o);
  p.panels = (all + PAIR - 1) / PAIR;
  p.run = p.panels / (4 * ty_parallel_threads());
  p.run = p.run > RUN ? RUN : p.run < 1 ? 1 : p.run;
  int64_t offset[MOST_CHANNELS];
  for (int64_t k = 0; k < s->c; k++) offset[k] = k * PAIR;
  static const char maker;
  ty_kept packed = conv_kept(s, weight, &maker, turned, sizeof(float) * (size_t)(groups * ABREAST * s->c), true);
  if (!packed.data) return false;
  tile_weights w = { weight, s->o, s->c, turned ? 1 : s->c, turned ? s->o : 1, packed.data };
  p.offset = offset;
  p.packed = w.packed;
  if (!packed.filled) ty_parallel_for_all(groups, 1 + 32768 / (s->c * ABREAST), pack_groups, &w);
  double work = (double)s->o * (double)s->c * (double)(p.run * PAIR);
  ty_parallel_for((p.panels + p.run - 1) / p.run, 1 + (int64_t)(1e5 / (work + 1)), run_units, &p);
  ty_kept_close(&packed, true);
  return !p.failed;
}
