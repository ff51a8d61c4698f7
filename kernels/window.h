/* The positions of one pooling window along one dimension, for every backend. */
#ifndef TY_KERNELS_WINDOW_H
#define TY_KERNELS_WINDOW_H

#include "params.h"
#include "scalar.h"

/* The positions that lie in the image, and by how many the mean is divided. */
typedef struct ty_window {
  int64_t first, last, step, count;
} ty_window;

TY_INLINE ty_window ty_window_of(const ty_p_pool *p, int d, int64_t i, int64_t size, int64_t windows) {
  ty_window w;
  if (p->adaptive) {
    w.first = i * size / windows;
    w.last = ((i + 1) * size + windows - 1) / windows;
    w.step = 1;
    w.count = w.last - w.first;
    return w;
  }
  int64_t start = i * p->stride[d] - p->padding[d], stop = start + (p->kernel[d] - 1) * p->dilation[d] + 1;
  int64_t padded = size + p->padding[d];
  w.step = p->dilation[d];
  w.first = start < 0 ? start + (-start + w.step - 1) / w.step * w.step : start;
  w.last = stop < size ? stop : size;
  w.count = p->count_include_pad ? (stop < padded ? stop : padded) - start : w.last - w.first;
  if (p->divisor) w.count = d == 0 ? p->divisor : 1;
  return w;
}

#endif
