/* The geometry of convolutions on tiles of sums (conv_tiles.c): a source whose rows and columns are dealt out to
 * phases by the stride, each in planes in which all that a result sees lies at a fixed distance from its own place.
 * So results run on from row to row, and a step of a product reads 32 channels of the same neighbours wherever it
 * stands.
 *
 * A row of a plane takes `pitch` elements, of which the zeros behind one row are those before the next. A source of
 * few channels is folded: a channel stands for several, one for each column of the kernel, or for each of its taps. */
#ifndef TY_KERNELS_CPU_CONV_LATTICE_H
#define TY_KERNELS_CPU_CONV_LATTICE_H

#include "conv.h"

enum { MOST_TAPS = 64, MOST_PARTS = 4, CHANNELS = 32 };

/* What a result sees: in the phase's planes, this far from its place. `weight`: where in a kernel. */
typedef struct tap {
  int64_t phase, row, col, weight;
} tap;

/* Results that share their taps: all of a convolution, or those of one phase of an input's gradient. */
typedef struct part {
  tap taps[MOST_TAPS];
  int64_t count, rows, cols;
  int64_t row, col; /* where in the image they begin, and go on in steps of the lattice's `spread` */
} part;

typedef struct lattice {
  int64_t channels, h, w;     /* of the source, in a group */
  int64_t row_step, col_step; /* of the source, from result to result; as many phases */
  int64_t row0, col0;         /* what place (0, 0) of phase (0, 0) is of the source */
  int64_t fold, across, down; /* a channel stands for `fold`, of taps (i, j) at rows i `down`, columns j `across` */
  int64_t fold_cols;          /* columns of the kernel that are folded */
  int64_t col_phases, row_phases, blocks;
  int64_t rows, cols, more_rows, more_cols; /* places of results, and what taps add */
  int64_t pitch, spread_rows, spread_cols;
  int64_t parts;
  part part[MOST_PARTS];
} lattice;

static inline int64_t ceil_div(int64_t a, int64_t b) { return a > 0 ? (a + b - 1) / b : -(-a / b); }

/* Columns [*from, *to) of a row of phase b that are columns of the source, for a folded channel that looks `shift`
 * further right. */
static inline void lattice_inside(const lattice *l, int64_t b, int64_t shift, int64_t *from, int64_t *to) {
  int64_t first = b + l->col0 + shift, end = ceil_div(l->w - first, l->col_step);
  *from = first < 0 ? ceil_div(-first, l->col_step) : 0;
  *to = end > l->pitch ? l->pitch : end;
  if (*to < *from) *to = *from;
}

static inline void lattice_pitch(lattice *l) {
  int64_t least = INT64_MAX, most = l->cols;
  l->pitch = INT64_MAX / 4;
  for (int64_t b = 0; b < l->col_phases; b++) {
    int64_t from, to;
    lattice_inside(l, b, 0, &from, &to);
    least = from < least ? from : least;
    most = to > most ? to : most;
  }
  int64_t wide = l->cols + l->more_cols - least;
  l->pitch = l->fold > 1 ? l->cols : wide > most ? wide : most;
  l->blocks = (l->channels * l->fold + CHANNELS - 1) / CHANNELS;
}

/* The lattice of a convolution; false when the kernel has too many taps. */
static inline bool lattice_forward(const conv_shape *s, lattice *l) {
  *l = (lattice){ .channels = s->cg,
                  .h = s->h,
                  .w = s->w,
                  .row_step = s->sh,
                  .col_step = s->sw,
                  .row0 = -s->ph,
                  .col0 = -s->pw,
                  .fold = 1,
                  .across = s->dw,
                  .down = s->dh,
                  .fold_cols = s->kw,
                  .col_phases = s->sw,
                  .row_phases = s->sh,
                  .rows = s->oh,
                  .cols = s->ow,
                  .spread_rows = 1,
                  .spread_cols = 1,
                  .parts = 1 };
  int64_t rows = s->kh, cols = s->kw;
  if (s->cg * s->kw <= CHANNELS && s->kw > 1) l->fold = s->kw, cols = 1, l->col_phases = 1;
  if (s->cg * s->kw * s->kh <= CHANNELS && l->fold > 1) l->fold *= s->kh, rows = 1, l->row_phases = 1;
  if (rows * cols > MOST_TAPS) return false;
  part *p = &l->part[0];
  p->rows = s->oh, p->cols = s->ow;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) {
      tap *t = &p->taps[p->count++];
      int64_t y = i * s->dh, x = j * s->dw;
      *t = (tap){ y % l->row_phases * l->col_phases + x % l->col_phases, y / s->sh, x / s->sw, i * s->kw + j };
      l->more_rows = t->row > l->more_rows ? t->row : l->more_rows;
      l->more_cols = t->col > l->more_cols ? t->col : l->more_cols;
    }
  lattice_pitch(l);
  return true;
}

/* Taps of which a place of an input's phase `at` sees one, and how far from it in the results' gradient, by one
 * dimension. Returns how many. */
static inline int lattice_back(int64_t at, int64_t padding, int64_t taps, int64_t dilation, int64_t stride,
                               int64_t *tap_of, int64_t *distance) {
  int n = 0;
  for (int64_t k = taps - 1; k >= 0; k--) {
    int64_t away = at + padding - k * dilation;
    if (away % stride) continue;
    tap_of[n] = k, distance[n++] = away / stride;
  }
  return n;
}

/* The lattice of the gradient of a convolution's input: as many parts as the stride has phases. */
static inline bool lattice_backward(const conv_shape *s, lattice *l) {
  if (s->sh > 2 || s->sw > 2 || s->kh * s->kw > MOST_TAPS) return false;
  *l = (lattice){ .channels = s->og,
                  .h = s->oh,
                  .w = s->ow,
                  .row_step = 1,
                  .col_step = 1,
                  .row0 = INT64_MAX,
                  .col0 = INT64_MAX,
                  .fold = 1,
                  .fold_cols = 1,
                  .col_phases = 1,
                  .row_phases = 1,
                  .spread_rows = s->sh,
                  .spread_cols = s->sw,
                  .parts = s->sh * s->sw };
  int64_t row[MOST_TAPS], col[MOST_TAPS], y[MOST_TAPS], x[MOST_TAPS];
  for (int64_t q = 0; q < l->parts; q++) {
    part *p = &l->part[q];
    p->row = q / s->sw, p->col = q % s->sw;
    p->rows = (s->h - p->row + s->sh - 1) / s->sh, p->cols = (s->w - p->col + s->sw - 1) / s->sw;
    l->rows = p->rows > l->rows ? p->rows : l->rows, l->cols = p->cols > l->cols ? p->cols : l->cols;
    int rows = lattice_back(p->row, s->ph, s->kh, s->dh, s->sh, row, y);
    int cols = lattice_back(p->col, s->pw, s->kw, s->dw, s->sw, col, x);
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < cols; j++) {
        p->taps[p->count++] = (tap){ 0, y[i], x[j], row[i] * s->kw + col[j] };
        l->row0 = y[i] < l->row0 ? y[i] : l->row0, l->col0 = x[j] < l->col0 ? x[j] : l->col0;
      }
  }
  for (int64_t q = 0; q < l->parts; q++)
    for (int64_t i = 0; i < l->part[q].count; i++) {
      tap *t = &l->part[q].taps[i];
      t->row -= l->row0, t->col -= l->col0;
      l->more_rows = t->row > l->more_rows ? t->row : l->more_rows;
      l->more_cols = t->col > l->more_cols ? t->col : l->more_cols;
    }
  lattice_pitch(l);
  return true;
}

#endif
