/* The input of convolutions whose vectors run along rows of pixels: bands of rows of the channels of a group, padded
 * and split by position modulo the stride, which makes what every tap reads neighbours. */
#ifndef TY_KERNELS_CPU_CONV_PLANES_H
#define TY_KERNELS_CPU_CONV_PLANES_H

#include "conv_lanes.h"

enum { BAND = 16 }; /* rows of results: their input stays in the L2 cache */

typedef struct split_input {
  const conv_shape *s;
  const float *x;
  int64_t *offset; /* [k], of what a channel and tap reads */
  int64_t k, band, bands;
  int64_t rows, columns; /* of a plane */
} split_input;

static split_input split_input_of(const conv_shape *s, const float *x) {
  split_input p = { .s = s, .x = x, .k = s->cg * s->kh * s->kw };
  p.bands = (s->oh + BAND - 1) / BAND;
  p.band = (s->oh + p.bands - 1) / p.bands;
  p.bands = (s->oh + p.band - 1) / p.band;
  p.rows = p.band + (s->kh - 1) * s->dh / s->sh;
  p.columns = s->ow + (s->kw - 1) * s->dw / s->sw;
  return p;
}

static inline int64_t split_floats(const split_input *p) {
  return p->s->cg * p->s->sh * p->s->sw * p->rows * p->columns + 2 * LANES;
}

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

/* [channel][y modulo stride][x modulo stride][row][column], for the results of row0 and following of a group. */
static void split(const split_input *p, int64_t group, int64_t row0, float *to) {
  const conv_shape *s = p->s;
  for (int64_t c = 0; c < s->cg; c++) {
    const float *x = p->x + (group * s->cg + c) * s->h * s->w;
    for (int64_t py = 0; py < s->sh; py++)
      for (int64_t px = 0; px < s->sw; px++)
        for (int64_t r = 0; r < p->rows; r++, to += p->columns) {
          int64_t y = (row0 + r) * s->sh + py - s->ph;
          bool inside = y >= 0 && y < s->h;
          split_row(inside ? x + y * s->w : x, inside ? s->w : 0, px - s->pw, s->sw, p->columns, to);
        }
  }
  memset(to, 0, sizeof(float) * 2 * LANES); /* read with the last positions, and dropped */
}

static void find_offsets(split_input *p) {
  const conv_shape *s = p->s;
  int64_t *to = p->offset;
  for (int64_t c = 0; c < s->cg; c++)
    for (int64_t ky = 0; ky < s->kh; ky++)
      for (int64_t kx = 0; kx < s->kw; kx++) {
        int64_t y = ky * s->dh, x = kx * s->dw;
        *to++ = (((c * s->sh + y % s->sh) * s->sw + x % s->sw) * p->rows + y / s->sh) * p->columns + x / s->sw;
      }
}

/* n values; a call of memcpy costs more than short rows are worth. */
static inline void copy_row(const float *from, int64_t n, float *to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) *(lanes *)(to + i) = *(const lanes *)(from + i);
  for (; i + 4 <= n; i += 4) *(quad *)(to + i) = *(const quad *)(from + i);
  for (; i < n; i++) to[i] = from[i];
}

#endif
