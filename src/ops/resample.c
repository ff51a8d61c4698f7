/* One dimension resized, and interpolate in all modes and numbers of dimensions that its own kernel, of images by nearest
 * neighbour and bilinearly, does not know: one dimension after the other. */
#include "resample.h"

static const char *const modes[] = { "nearest", "nearest-exact", "linear", "cubic", NULL };

/* dim, mode, align_corners, scale and antialias, which both ops have in the same places. */
static bool read_options(ty_call *c, int64_t *size, ty_p_resample *p) {
  int mode = ty_check_choice(c, 3, modes);
  double scale = c->arg[5].f;
  if (mode < 0 || !ty_check_dim(c, 1, c->arg[0].t->v.ndim, &p->dim)) return false;
  *size = c->arg[2].i;
  p->mode = (ty_resampling)mode;
  p->align_corners = c->arg[4].i;
  p->antialias = c->arg[6].i;
  if (c->arg[0].t->v.ndim == 0) return ty_op_fail(c, TY_EINVAL, "%s: expected a dimension", c->op->args[0].name);
  if (*size < 1 || *size > INT32_MAX)
    return ty_op_fail(c, TY_EINVAL, "size: expected a positive integer, got %lld", (long long)*size);
  if (!(scale >= 0) || isinf(scale))
    return ty_op_fail(c, TY_EINVAL, "scale: expected a positive number, got %g", scale);
  if ((p->align_corners || p->antialias) && p->mode < TY_LINEAR)
    return ty_op_fail(c, TY_EINVAL, "%s: only for modes \"linear\" and \"cubic\"",
                      p->antialias ? "antialias" : "align_corners");
  p->scale = scale > 0 ? 1 / scale : 0;
  return true;
}

/* A scale that leaves a size as it is moves nothing, and nearest neighbours of a doubled size come in pairs: PyTorch then
 * goes by the sizes, whatever the scale. */
static void go_by_sizes(ty_p_resample *p, int64_t in, int64_t out) {
  if (out == in || (p->mode == TY_NEAREST && out == 2 * in)) p->scale = 0;
}

static bool launched(ty_call *c, int64_t size, const ty_p_resample *p) {
  ty_tensor *x = c->arg[0].t;
  int64_t sizes[TY_MAX_DIMS];
  for (int d = 0; d < x->v.ndim; d++) sizes[d] = d == p->dim ? size : x->v.size[d];
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), x->v.ndim, sizes) && ty_launch(c, &x, 1, p);
}

bool fwd_resample(ty_call *c) {
  ty_p_resample p = { .dim = 0 };
  int64_t size;
  if (!read_options(c, &size, &p)) return false;
  int64_t in = c->arg[0].t->v.size[p.dim];
  if (in < 1) return ty_op_fail(c, TY_EINVAL, "x: nothing to resize in %s", ty_describe(c->arg[0].t));
  go_by_sizes(&p, in, size);
  return launched(c, size, &p);
}

bool fwd_resample_backward(ty_call *c) {
  ty_p_resample p = { .dim = 0 };
  int64_t size;
  if (!read_options(c, &size, &p)) return false;
  go_by_sizes(&p, size, c->arg[0].t->v.size[p.dim]);
  return launched(c, size, &p);
}

bool vjp_resample(ty_vjp *c) {
  const ty_resample_args *a = TY_ARGS(resample, c);
  ty_ints size = ty_vjp_size(c, 0);
  int64_t dim = a->dim.i < 0 ? a->dim.i + size.n : a->dim.i;
  c->dx[0] = ty_resample_backward(c->g[0], dim, size.v[dim], a->mode.s, a->align_corners.i, a->scale.f, a->antialias.i);
  return true;
}

/* Linear in g: its gradient is the resizing itself, to g's size. */
bool vjp_resample_backward(ty_vjp *c) {
  const ty_resample_backward_args *a = TY_ARGS(resample_backward, c);
  ty_ints size = ty_vjp_size(c, 0);
  int64_t dim = a->dim.i < 0 ? a->dim.i + size.n : a->dim.i;
  c->dx[0] = ty_resample(c->g[0], dim, size.v[dim], a->mode.s, a->align_corners.i, a->scale.f, a->antialias.i);
  return true;
}

/* ---- several dimensions ---- */

static ty_tensor *area(ty_tensor *x, int n, const int64_t *out) {
  ty_ints size = { out, n };
  if (n == 1) return ty_adaptive_avg_pool1d(x, size);
  return n == 2 ? ty_adaptive_avg_pool2d(x, size) : ty_adaptive_avg_pool3d(x, size);
}

/* First the dimensions that shrink, then those that grow, the last first: the fewest elements go through the dimension
 * whose neighbours lie side by side. */
ty_tensor *ty_resize(ty_tensor *x, int n, const int64_t *out, ty_resize_mode mode, bool align_corners, double scale,
                     bool antialias) {
  if (mode == TY_RESIZE_AREA) return area(x, n, out);
  const char *each = mode == TY_RESIZE_NEAREST         ? "nearest"
                     : mode == TY_RESIZE_NEAREST_EXACT ? "nearest-exact"
                     : mode == TY_RESIZE_BICUBIC       ? "cubic"
                                                       : "linear";
  ty_dtype dtype = ty_dtype_of(x);
  bool rounded = ty_is_half(dtype) && mode > TY_RESIZE_NEAREST_EXACT; /* once, at the end */
  ty_tensor *y = rounded ? ty_to(x, TY_F32) : x;
  for (int d = 2; y && d < n + 2; d++)
    if (out[d - 2] < x->v.size[d]) y = ty_resample(y, d, out[d - 2], each, align_corners, scale, antialias);
  for (int d = n + 1; y && d >= 2; d--)
    if (out[d - 2] > x->v.size[d]) y = ty_resample(y, d, out[d - 2], each, align_corners, scale, antialias);
  if (y == x) return ty_clone(x);
  return rounded && y ? ty_to(y, dtype) : y;
}
