/* Parallel projections by Joseph's method (Joseph 1982, "An Improved Algorithm for Reprojecting Rays through Pixel
 * Images"), as the CPU and the GPU share it. A line meets every row of the picture (or every column, if it is closer to
 * level) once, between two pixels, and takes both by their distance: pixel (x, y) has in the line at t the weight
 * (1 - |t - x cos - y sin| / c) / c where that is positive, c = max(|cos|, |sin|). The forward kernel follows lines, the
 * backward one pixels; both have these weights. */
#ifndef TY_KERNELS_RADON_H
#define TY_KERNELS_RADON_H

#include "scalar.h"

typedef struct ty_radon_view {
  double cos, sin;
  bool by_rows; /* whether the line is closer to upright: one sample in each row */
} ty_radon_view;

TY_INLINE ty_radon_view ty_radon_view_of(double angle) {
  ty_radon_view v;
  v.cos = cos(angle);
  v.sin = sin(angle);
  v.by_rows = fabs(v.cos) >= fabs(v.sin);
  return v;
}

/* A view as the forward kernel needs it: the line of detector j meets row (column) i at place first + i by_line + j
 * by_detector, in pixels of the row. h, w: of the picture, exchanged where the view goes by columns. */
typedef struct ty_radon_lines {
  double first, by_line, by_detector, length; /* length: of a line within a row */
} ty_radon_lines;

TY_INLINE ty_radon_lines ty_radon_lines_of(const ty_radon_view *v, int64_t h, int64_t w, int64_t detectors,
                                           double spacing) {
  const double along = v->by_rows ? v->cos : v->sin, across = v->by_rows ? v->sin : v->cos;
  const double rows = (double)(v->by_rows ? h : w), columns = (double)(v->by_rows ? w : h);
  ty_radon_lines l;
  l.by_line = -across / along;
  l.by_detector = spacing / along;
  l.first = (columns - 1) / 2 - l.by_line * (rows - 1) / 2 - l.by_detector * (double)(detectors - 1) / 2;
  l.length = 1 / fabs(along);
  return l;
}

/* The same for the backward kernel: pixel (x, y) is at place first + x by_column + y by_row among the detectors, and
 * those within `reach` of it see it. */
typedef struct ty_radon_pixels {
  double first, by_column, by_row, reach, length;
} ty_radon_pixels;

TY_INLINE ty_radon_pixels ty_radon_pixels_of(const ty_radon_view *v, int64_t h, int64_t w, int64_t detectors,
                                             double spacing) {
  const double c = v->by_rows ? fabs(v->cos) : fabs(v->sin);
  ty_radon_pixels p;
  p.by_column = v->cos / spacing;
  p.by_row = v->sin / spacing;
  p.first = (double)(detectors - 1) / 2 - p.by_column * (double)(w - 1) / 2 - p.by_row * (double)(h - 1) / 2;
  p.reach = c / spacing;
  p.length = 1 / c;
  return p;
}

#endif
