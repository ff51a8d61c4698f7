/* Pooling over windows: maximum with its position, mean and its gradient. */
#include <math.h>

#include "../window.h"
#include "cpu.h"

ty_kernel TY_KERNEL(max_pool2d);
ty_kernel TY_KERNEL(avg_pool2d);
ty_kernel TY_KERNEL(avg_pool2d_backward);

#define BLOCK 64 /* windows of a row whose maxima are sought together */

#define REAL float
#define INTEGER int32_t
#define NAME(x) x##_f32
#include "pool_real.h"
#undef REAL
#undef INTEGER
#undef NAME

#define REAL double
#define INTEGER int64_t
#define NAME(x) x##_f64
#include "pool_real.h"

/* Planes [h, w] of `image` against planes [oh, ow] of `result`. */
static bool run(const ty_view *image, const ty_view *result, const ty_kernel_args *k, ty_range_fn *f32,
                ty_range_fn *f64) {
  int64_t h = image->size[2], w = image->size[3], oh = result->size[2], ow = result->size[3];
  const void *from = k->in[0]->data;
  void *to = k->out[0]->data;
  int64_t *position = k->nout > 1 ? k->out[1]->data : NULL, planes = image->size[0] * image->size[1];
  if (k->out[0]->count == 0) return true;
  int64_t grain = 1 + 16384 / (h * w + oh * ow + 1);
  if (image->dtype == TY_F64) {
    pool_f64 q = { from, to, position, h, w, oh, ow, k->params };
    ty_parallel_for(planes, grain, f64, &q);
  } else {
    pool_f32 q = { from, to, position, h, w, oh, ow, k->params };
    ty_parallel_for(planes, grain, f32, &q);
  }
  return true;
}

bool TY_KERNEL(max_pool2d)(const ty_kernel_args *k) {
  const ty_p_pool *p = k->params;
  double reach = (double)(p->kernel[0] * p->dilation[0]) * (double)k->in[0]->size[3];
  if (reach > INT32_MAX)
    return ty_fail(TY_EUNSUPPORTED, "max_pool2d: windows that reach over 2^31 positions are not supported");
  return p->adaptive ? run(k->in[0], k->out[0], k, adaptive_max_planes_f32, adaptive_max_planes_f64)
                     : run(k->in[0], k->out[0], k, max_planes_f32, max_planes_f64);
}

bool TY_KERNEL(avg_pool2d)(const ty_kernel_args *k) {
  const ty_p_pool *p = k->params;
  return p->adaptive ? run(k->in[0], k->out[0], k, adaptive_mean_planes_f32, adaptive_mean_planes_f64)
                     : run(k->in[0], k->out[0], k, mean_planes_f32, mean_planes_f64);
}

bool TY_KERNEL(avg_pool2d_backward)(const ty_kernel_args *k) {
  return run(k->out[0], k->in[0], k, spread_planes_f32, spread_planes_f64);
}
