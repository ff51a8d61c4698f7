/* Parallel projections and their adjoint: kernels/radon.h. */
#include <string.h>

#include "../../radon.h"
#include "../cpu.h"

#define REAL float
#define NAME(x) x##_f32
#include "radon_real.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_f64
#include "radon_real.h"

/* The angles as views; NULL after ty_fail(). */
static ty_radon_view *views_of(const ty_view *angles, size_t *bytes) {
  *bytes = (size_t)angles->count * sizeof(ty_radon_view);
  ty_radon_view *views = ty_scratch_alloc(*bytes);
  for (int64_t i = 0; views && i < angles->count; i++)
    views[i] = ty_radon_view_of(angles->dtype == TY_F64 ? ((const double *)angles->data)[i]
                                                        : (double)((const float *)angles->data)[i]);
  return views;
}

/* in: x [n, h, w], angles; out: projections [n, angles, detectors]. */
bool TY_KERNEL(radon)(const ty_kernel_args *k) {
  const ty_p_radon *p = k->params;
  const ty_view *x = k->in[0], *y = k->out[0];
  if (!y->count) return true;
  size_t bytes;
  ty_radon_view *views = views_of(k->in[1], &bytes);
  if (!views) return false;
  radon_shape s = { x->size[0], x->size[1], x->size[2], y->size[1], y->size[2], p->spacing, views };
  bool ok = x->dtype == TY_F64 ? project_f64(&s, x->data, y->data) : project_f32(&s, x->data, y->data);
  ty_scratch_free(views, bytes);
  return ok;
}

/* in: projections, angles; out: [n, h, w]. */
bool TY_KERNEL(backproject)(const ty_kernel_args *k) {
  const ty_p_radon *p = k->params;
  const ty_view *y = k->in[0], *x = k->out[0];
  if (!x->count) return true;
  size_t bytes;
  ty_radon_view *views = views_of(k->in[1], &bytes);
  if (!views) return false;
  radon_shape s = { x->size[0], x->size[1], x->size[2], y->size[1], y->size[2], p->spacing, views };
  if (x->dtype == TY_F64) backproject_f64(&s, y->data, x->data);
  else backproject_f32(&s, y->data, x->data);
  ty_scratch_free(views, bytes);
  return true;
}
