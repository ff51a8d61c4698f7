/* The gradient of the weight for f32 convolutions of many small groups of channels, with vectors along rows of pixels,
 * as conv_planes.c has the convolution: dot products of the gradient's planes with runs of the split input, a few of
 * the one by a few of the other held in registers while they run over a band. */
#include "conv_planes.h"

enum { DOWN = 4, ACROSS = TY_VECTOR_BYTES == 64 ? 6 : 2 }; /* with what they multiply, the sums fill the registers */

typedef struct weight_planes {
  split_input in;
  const float *g;
  float *sums;       /* [group][part][og][k] */
  int64_t parts, og; /* shares of the bands of all images */
  bool failed;
} weight_planes;

/* Adds to sums[i][t] the products of row i of g with the run at offset[t], n positions of both in whole vectors. */
static inline __attribute__((always_inline)) void dots(const int down, const int across, int64_t n, const float *g,
                                                       int64_t g_row, const float *x, const int64_t *offset,
                                                       lanes *sums, int64_t sums_row) {
  lanes sum[DOWN][ACROSS];
#pragma GCC unroll 4
  for (int i = 0; i < down; i++)
#pragma GCC unroll 6
    for (int t = 0; t < across; t++) sum[i][t] = sums[i * sums_row + t];
  const float *from[ACROSS];
#pragma GCC unroll 6
  for (int t = 0; t < across; t++) from[t] = x + offset[t];
  for (int64_t q = 0; q < n; q += LANES) {
    lanes v[DOWN];
#pragma GCC unroll 4
    for (int i = 0; i < down; i++) v[i] = *(const lanes *)(g + i * g_row + q);
#pragma GCC unroll 6
    for (int t = 0; t < across; t++) {
      const lanes b = *(const lanes *)(from[t] + q);
#pragma GCC unroll 4
      for (int i = 0; i < down; i++) sum[i][t] += v[i] * b;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < down; i++)
#pragma GCC unroll 6
    for (int t = 0; t < across; t++) sums[i * sums_row + t] = sum[i][t];
}

/* All taps of all channels for `down` rows of g. */
#define DOTS(down)                                                                                             \
  static void dots_##down(const split_input *p, int64_t n, const float *g, int64_t g_row, const float *x,      \
                          lanes *sums) {                                                                       \
    int64_t t = 0;                                                                                             \
    for (; t + ACROSS <= p->k; t += ACROSS) dots(down, ACROSS, n, g, g_row, x, p->offset + t, sums + t, p->k); \
    for (; t < p->k; t++) dots(down, 1, n, g, g_row, x, p->offset + t, sums + t, p->k);                        \
  }
DOTS(1)
DOTS(2)
DOTS(3)
DOTS(4)

static void add_dots(const weight_planes *w, int64_t n, const float *g, int64_t g_row, const float *x, lanes *sums) {
  for (int64_t o = 0; o < w->og; o += DOWN, g += DOWN * g_row, sums += DOWN * w->in.k) {
    int64_t left = w->og - o;
    if (left >= 4) dots_4(&w->in, n, g, g_row, x, sums);
    else if (left == 3) dots_3(&w->in, n, g, g_row, x, sums);
    else if (left == 2) dots_2(&w->in, n, g, g_row, x, sums);
    else dots_1(&w->in, n, g, g_row, x, sums);
  }
}

static float total(lanes v) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}

/* Rows row0 .. of the gradient of a group, as far apart as those of the input, with zeros between and after them. */
static void spread_gradient(const weight_planes *w, int64_t group, int64_t row0, int64_t rows, int64_t g_row,
                            float *to) {
  const conv_shape *s = w->in.s;
  for (int64_t o = 0; o < s->og; o++, to += g_row) {
    const float *from = w->g + ((group * s->og + o) * s->oh + row0) * s->ow;
    for (int64_t r = 0; r < rows; r++) {
      copy_row(from + r * s->ow, s->ow, to + r * w->in.columns);
      for (int64_t j = s->ow; j < w->in.columns; j++) to[r * w->in.columns + j] = 0;
    }
    for (int64_t j = rows * w->in.columns; j < g_row; j++) to[j] = 0;
  }
}

static void part_units(void *context, int64_t begin, int64_t end) {
  weight_planes *w = context;
  const split_input *p = &w->in;
  const conv_shape *s = p->s;
  int64_t g_row = (p->band * p->columns + LANES - 1) / LANES * LANES, all = s->n * p->bands, count = s->og * p->k;
  int64_t for_in = split_floats(p), for_g = s->og * g_row;
  size_t bytes = sizeof(float) * (size_t)(for_in + for_g + count * LANES);
  float *in = ty_scratch_alloc(bytes), *g = in + for_in;
  if (!in) {
    w->failed = true;
    return;
  }
  lanes *sums = (lanes *)(g + for_g);
  for (int64_t u = begin; u < end; u++) {
    int64_t group = u / w->parts, part = u % w->parts;
    memset((void *)sums, 0, sizeof(float) * (size_t)(count * LANES));
    for (int64_t i = all * part / w->parts; i < all * (part + 1) / w->parts && !ty_interrupted; i++) {
      int64_t at = i / p->bands * s->groups + group, row0 = i % p->bands * p->band;
      int64_t rows = s->oh - row0 < p->band ? s->oh - row0 : p->band;
      split(p, at, row0, in);
      spread_gradient(w, at, row0, rows, g_row, g);
      add_dots(w, (rows * p->columns + LANES - 1) / LANES * LANES, g, g_row, in, sums);
    }
    for (int64_t i = 0; i < count; i++) w->sums[u * count + i] = total(sums[i]);
  }
  ty_scratch_free(in, bytes);
}

bool TY_KERNEL(conv_planes_weight)(const conv_shape *s, const float *g, const float *x, float *dw) {
  weight_planes w = { .in = split_input_of(s, x), .g = g, .og = s->og };
  int64_t all = s->n * w.in.bands, count = s->og * w.in.k;
  w.parts = s->groups >= 16 ? 1 : (16 + s->groups - 1) / s->groups;
  if (w.parts > all) w.parts = all;
  size_t for_sums = w.parts > 1 ? sizeof(float) * (size_t)(s->groups * w.parts * count) : 0;
  size_t bytes = sizeof(int64_t) * (size_t)w.in.k + for_sums;
  w.in.offset = ty_scratch_alloc(bytes);
  if (!w.in.offset) return false;
  find_offsets(&w.in);
  w.sums = for_sums ? (float *)(void *)(w.in.offset + w.in.k) : dw;
  ty_parallel_for(s->groups * w.parts, 1, part_units, &w);
  for (int64_t group = 0; for_sums && group < s->groups; group++)
    for (int64_t i = 0; i < count; i++) {
      const float *from = w.sums + group * w.parts * count + i;
      float sum = *from;
      for (int64_t p = 1; p < w.parts; p++) sum += from[p * count];
      dw[group * count + i] = sum;
    }
  ty_scratch_free(w.in.offset, bytes);
  return !w.failed;
}
