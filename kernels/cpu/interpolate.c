/* Images resized by nearest neighbour or bilinearly, and the gradient. */
#include <math.h>

#include "cpu.h"

ty_kernel TY_KERNEL(interpolate);
ty_kernel TY_KERNEL(interpolate_backward);

/* A position of the result along one dimension: between two of the image, `weight` of the way. */
typedef struct sample {
  int32_t first, second;
  double weight;
} sample;

#define REAL float
#define NAME(x) x##_f32
#include "interpolate_real.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_f64
#include "interpolate_real.h"

static void sample_dimension(const ty_p_interpolate *p, int d, int64_t in, int64_t out, sample *s) {
  double step = p->scale[d] > 0 ? p->scale[d] : (double)in / (double)out;
  if (p->align_corners) step = out > 1 ? (double)(in - 1) / (double)(out - 1) : 0;
  for (int64_t i = 0; i < out; i++) {
    double at;
    if (p->mode == 0) {
      at = p->scale[d] > 0 ? floor((double)i * step) : (double)(i * in / out);
    } else {
      at = p->align_corners ? (double)i * step : ((double)i + 0.5) * step - 0.5;
      if (at < 0) at = 0;
    }
    int64_t first = at < (double)(in - 1) ? (int64_t)at : in - 1;
    s[i].first = (int32_t)first;
    s[i].second = (int32_t)(first + 1 < in ? first + 1 : first);
    s[i].weight = p->mode == 0 || first == in - 1 ? 0 : at - (double)first;
  }
}

static bool run(const ty_kernel_args *k, const ty_view *image, const ty_view *result, ty_range_fn *f32,
                ty_range_fn *f64) {
  const ty_p_interpolate *p = k->params;
  int64_t h = image->size[2], w = image->size[3], oh = result->size[2], ow = result->size[3];
  if (k->out[0]->count == 0) return true;
  size_t bytes = sizeof(sample) * (size_t)(oh + ow);
  sample *samples = ty_scratch_alloc(bytes);
  if (!samples) return false;
  sample_dimension(p, 0, h, oh, samples);
  sample_dimension(p, 1, w, ow, samples + oh);
  const void *from = k->in[0]->data;
  void *to = k->out[0]->data;
  int64_t planes = image->size[0] * image->size[1], grain = 1 + 16384 / (h * w + oh * ow + 1);
  if (image->dtype == TY_F64) {
    resize_f64 r = { from, to, h, w, oh, ow, samples, samples + oh, p->mode == 1 };
    ty_parallel_for(planes, grain, f64, &r);
  } else {
    resize_f32 r = { from, to, h, w, oh, ow, samples, samples + oh, p->mode == 1 };
    ty_parallel_for(planes, grain, f32, &r);
  }
  ty_scratch_free(samples, bytes);
  return true;
}

bool TY_KERNEL(interpolate)(const ty_kernel_args *k) { return run(k, k->in[0], k->out[0], planes_f32, planes_f64); }

bool TY_KERNEL(interpolate_backward)(const ty_kernel_args *k) {
  return run(k, k->out[0], k->in[0], backward_planes_f32, backward_planes_f64);
}
