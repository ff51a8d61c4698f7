/* Images resized by nearest neighbour or bilinearly, and the gradient. */
#include <math.h>
#include <string.h>

#include "../../sample.h"
#include "../cpu.h"

ty_kernel TY_KERNEL(interpolate);
ty_kernel TY_KERNEL(interpolate_backward);

#define REAL float
#define NAME(x) x##_f32
#include "interpolate_real.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_f64
#include "interpolate_real.h"

static void sample_dimension(const ty_p_interpolate *p, int d, int64_t in, int64_t out, ty_sample *s) {
  double step = ty_sample_step(p, d, in, out);
  for (int64_t i = 0; i < out; i++) s[i] = ty_sample_of(p, d, i, step, in, out);
}

/* Whether the columns are twice those of the image, and lie where they most often do then. */
static bool twice_as_many(const ty_sample *s, bool linear, int64_t in, int64_t out) {
  if (out != 2 * in) return false;
  for (int64_t j = 0; j < out; j++) {
    const bool between = linear && j > 0 && j < out - 1;
    if (s[j].first != (between ? (j - 1) / 2 : j / 2) || s[j].weight != (!between ? 0 : j % 2 ? 0.25 : 0.75))
      return false;
  }
  return true;
}

static bool run(const ty_kernel_args *k, const ty_view *image, const ty_view *result, ty_range_fn *f32,
                ty_range_fn *f64) {
  const ty_p_interpolate *p = k->params;
  int64_t h = image->size[2], w = image->size[3], oh = result->size[2], ow = result->size[3];
  if (k->out[0]->count == 0) return true;
  size_t bytes = sizeof(ty_sample) * (size_t)(oh + ow);
  ty_sample *samples = ty_scratch_alloc(bytes);
  if (!samples) return false;
  sample_dimension(p, 0, h, oh, samples);
  sample_dimension(p, 1, w, ow, samples + oh);
  const void *from = k->in[0]->data;
  void *to = k->out[0]->data;
  int64_t planes = image->size[0] * image->size[1], grain = 1 + 16384 / (h * w + oh * ow + 1);
  const bool linear = p->mode == 1;
  const bool twice = twice_as_many(samples + oh, linear, w, ow);
  bool failed = false;
  if (image->dtype == TY_F64) {
    resize_f64 r = {
      from, to, h, w, oh, ow, samples, samples + oh, linear, twice && !linear, twice && linear, &failed
    };
    ty_parallel_for(planes, grain, f64, &r);
  } else {
    resize_f32 r = {
      from, to, h, w, oh, ow, samples, samples + oh, linear, twice && !linear, twice && linear, &failed
    };
    ty_parallel_for(planes, grain, f32, &r);
  }
  ty_scratch_free(samples, bytes);
  return !failed || ty_fail(TY_ENOMEM, "interpolate: out of memory for a row of %lld elements", (long long)ow);
}

bool TY_KERNEL(interpolate)(const ty_kernel_args *k) { return run(k, k->in[0], k->out[0], planes_f32, planes_f64); }

bool TY_KERNEL(interpolate_backward)(const ty_kernel_args *k) {
  return run(k, k->out[0], k->in[0], backward_planes_f32, backward_planes_f64);
}
