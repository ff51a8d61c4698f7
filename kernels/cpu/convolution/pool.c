/* Pooling over windows: maximum with its position, mean, and the gradients of both. */
#include <math.h>
#include <stdatomic.h>

#include "../../window.h"
#include "../cpu.h"
#include "../indexing/indexing.h"
#include "pool_pairs.h"
#include "../row_sums.h"
#include "../stream.h"

ty_kernel TY_KERNEL(max_pool2d);
ty_kernel TY_KERNEL(avg_pool2d);
ty_kernel TY_KERNEL(avg_pool2d_backward);
ty_kernel TY_KERNEL(max_pool2d_backward);

/* Of a vector. Not 64: rows are seldom multiples of 16, and what pool_pairs.h stores is read soon after. */
#define POOL_BYTES (TY_VECTOR_BYTES > 32 ? 32 : TY_VECTOR_BYTES)

enum {
  BLOCK = 64,                /* windows of a row that are done together */
  FEW_ROOM = BLOCK + 16,     /* what their taps reach over, by the stride */
  MEAN_ROOM = 4 * BLOCK + 80 /* the same of means, strides up to 4 and kernels up to 64 */
};

/* Gradients g of windows and where each goes. */
typedef struct spread {
  const void *g;
  void *dx;
  const int64_t *position;
  int64_t pixels, results;
  atomic_bool bad;
} spread;

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

/* in: g, positions as max_pool2d gave them. */
bool TY_KERNEL(max_pool2d_backward)(const ty_kernel_args *k) {
  const ty_view *g = k->in[0], *dx = k->out[0];
  if (dx->count == 0) return true;
  const int64_t pixels = dx->size[2] * dx->size[3], results = g->size[2] * g->size[3];
  spread s = { g->data, dx->data, k->in[1]->data, pixels, results, false };
  ty_parallel_for(dx->size[0] * dx->size[1], 1 + 16384 / (pixels + results + 1),
                  g->dtype == TY_F64 ? spread_maxima_f64 : spread_maxima_f32, &s);
  return !atomic_load(&s.bad) || ty_index_report(k->in[1], pixels);
}
