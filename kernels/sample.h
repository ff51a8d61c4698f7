/* Where a position of a resized image lies in the image, along one dimension, for every backend. */
#ifndef TY_KERNELS_SAMPLE_H
#define TY_KERNELS_SAMPLE_H

#include "params.h"
#include "scalar.h"

/* Between two positions, `weight` of the way. */
typedef struct ty_sample {
  int32_t first, second;
  double weight;
} ty_sample;

/* Positions of the image from one of the result to the next. */
TY_INLINE double ty_sample_step(const ty_p_interpolate *p, int d, int64_t in, int64_t out) {
  if (p->align_corners) return out > 1 ? (double)(in - 1) / (double)(out - 1) : 0;
  return p->scale[d] > 0 ? p->scale[d] : (double)in / (double)out;
}

TY_INLINE ty_sample ty_sample_of(const ty_p_interpolate *p, int d, int64_t i, double step, int64_t in, int64_t out) {
  ty_sample s;
  double at;
  if (p->mode == 0) {
    /* A scale in f32, as PyTorch has it: 39 / 1.3 is then 30 and not just below. */
    at = p->scale[d] > 0 ? (double)floorf((float)i * (float)step) : (double)(i * in / out);
  } else {
    at = p->align_corners ? (double)i * step : ((double)i + 0.5) * step - 0.5;
    if (at < 0) at = 0;
  }
  int64_t first = at < (double)(in - 1) ? (int64_t)at : in - 1;
  s.first = (int32_t)first;
  s.second = (int32_t)(first + 1 < in ? first + 1 : first);
  s.weight = p->mode == 0 || first == in - 1 ? 0 : at - (double)first;
  return s;
}

#endif
