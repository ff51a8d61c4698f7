/* One dimension of a tensor resized: every position of the result is a weighted sum of neighbours in the input. Where
 * these begin and what they weigh, for every backend. Pixel centres lie at half positions, except with align_corners;
 * cubic: Keys 1981, "Cubic convolution interpolation for digital image processing", with a = -3/4, and -1/2 where the
 * kernel is stretched over all pixels that one of the result covers (antialias). */
#ifndef TY_KERNELS_RESAMPLE_H
#define TY_KERNELS_RESAMPLE_H

#include "base.h"
#include "scalar.h"

typedef enum ty_resampling { TY_NEAREST, TY_NEAREST_EXACT, TY_LINEAR, TY_CUBIC } ty_resampling;

typedef struct ty_p_resample {
  int dim;
  ty_resampling mode;
  bool align_corners, antialias;
  double scale; /* in / out, 0: from sizes */
} ty_p_resample;

/* The neighbours of one position of the result; their weights stand in a row of ty_resample_taps(). */
typedef struct ty_resample_span {
  int32_t first, count;
} ty_resample_span;

/* Positions of the input from one of the result to the next. */
TY_INLINE double ty_resample_step(const ty_p_resample *p, int64_t in, int64_t out) {
  if (p->align_corners) return out > 1 ? (double)(in - 1) / (double)(out - 1) : 0;
  return p->scale > 0 ? p->scale : (double)in / (double)out;
}

/* How far the stretched kernel reaches. */
TY_INLINE double ty_resample_reach(const ty_p_resample *p, double step) {
  const double size = p->mode == TY_LINEAR ? 1 : 2;
  return step > 1 ? size * step : size;
}

/* How many neighbours a position has at most. */
TY_INLINE int64_t ty_resample_taps(const ty_p_resample *p, int64_t in, int64_t out) {
  int64_t taps = p->mode == TY_LINEAR ? 2 : p->mode == TY_CUBIC ? 4 : 1;
  if (p->antialias) {
    const double most = 2 * ceil(ty_resample_reach(p, ty_resample_step(p, in, out))) + 1;
    taps = most < (double)in ? (int64_t)most : in;
  }
  return taps;
}

/* The cubic kernel at distance t >= 0. */
TY_INLINE double ty_resample_cubic(double t, double a) {
  if (t < 1) return ((a + 2) * t - (a + 3)) * t * t + 1;
  if (t < 2) return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a;
  return 0;
}

TY_INLINE ty_resample_span ty_resample_stretched(const ty_p_resample *p, int64_t i, double step, int64_t in,
                                                 int64_t taps, double *weights) {
  const double reach = ty_resample_reach(p, step), centre = step * ((double)i + 0.5), shrink = step > 1 ? 1 / step : 1;
  const double low = centre - reach + 0.5, high = centre + reach + 0.5;
  int64_t first = low > 0 ? (int64_t)low : 0, last = high < (double)in ? (int64_t)high : in;
  if (first > in - 1) first = in - 1;
  if (last <= first) last = first + 1;
  if (last > first + taps) last = first + taps;
  double sum = 0;
  for (int64_t j = first; j < last; j++) {
    const double t = fabs(((double)j - centre + 0.5) * shrink);
    const double weight = p->mode == TY_CUBIC ? ty_resample_cubic(t, -0.5) : t < 1 ? 1 - t : 0;
    weights[j - first] = weight;
    sum += weight;
  }
  if (sum != 0)
    for (int64_t j = 0; j < last - first; j++) weights[j] /= sum;
  ty_resample_span s = { (int32_t)first, (int32_t)(last - first) };
  return s;
}

/* The neighbours of position i, and their weights. */
TY_INLINE ty_resample_span ty_resample_span_of(const ty_p_resample *p, int64_t i, double step, int64_t in, int64_t out,
                                               int64_t taps, double *weights) {
  ty_resample_span s = { 0, 1 };
  if (p->antialias) return ty_resample_stretched(p, i, step, in, taps, weights);
  if (p->mode == TY_NEAREST || p->mode == TY_NEAREST_EXACT) {
    /* A scale in f32, as PyTorch has it: 39 / 1.3 is then 30 and not just below. */
    int64_t at;
    if (p->mode == TY_NEAREST) at = p->scale > 0 ? (int64_t)floorf((float)i * (float)step) : i * in / out;
    else if (p->scale > 0) at = (int64_t)floorf((float)(((double)i + 0.5) * (double)(float)step));
    else at = (2 * i + 1) * in / (2 * out);
    s.first = (int32_t)(at < in - 1 ? at : in - 1);
    weights[0] = 1;
    return s;
  }
  double at = p->align_corners ? (double)i * step : ((double)i + 0.5) * step - 0.5;
  if (p->mode == TY_LINEAR) {
    if (at < 0) at = 0;
    const int64_t first = at < (double)(in - 1) ? (int64_t)at : in - 1;
    s.first = (int32_t)first;
    s.count = first + 1 < in ? 2 : 1;
    const double t = s.count == 2 ? at - (double)first : 0;
    weights[0] = 1 - t;
    if (s.count == 2) weights[1] = t;
    return s;
  }
  /* Four neighbours; those beyond the edge are the edge. */
  const double most = (double)(in + 1);
  if (at > most) at = most;
  const double before = floor(at), t = at - before;
  const int64_t base = (int64_t)before - 1;
  const int64_t first = base < 0 ? 0 : base < in ? base : in - 1, end = base + 3 < in ? base + 3 : in - 1;
  const int64_t last = end > first ? end : first;
  for (int64_t j = 0; j <= last - first; j++) weights[j] = 0;
  for (int k = 0; k < 4; k++) {
    int64_t j = base + k;
    j = j < first ? first : j > last ? last : j;
    weights[j - first] += ty_resample_cubic(fabs((double)(k - 1) - t), -0.75);
  }
  s.first = (int32_t)first;
  s.count = (int32_t)(last - first + 1);
  return s;
}

#endif
