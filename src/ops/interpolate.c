/* Images resized, with PyTorch's conventions: pixel centres at half positions, except with align_corners. One kernel
 * resizes images by nearest neighbour and bilinearly; all else goes dimension by dimension, see resample.c. */
#include "resample.h"

static const char *const modes[] = { "nearest",  "nearest-exact", "area",      "linear",
                                     "bilinear", "bicubic",       "trilinear", NULL };
static const int dimensions[] = { 0, 0, 0, 1, 2, 2, 3 }; /* 0: any */

static bool check_scale(ty_call *c, double scale) {
  return (scale >= 0 && !isinf(scale)) || ty_op_fail(c, TY_EINVAL, "scale: expected a positive number, got %g", scale);
}

/* A scale that leaves a size as it is moves nothing, and nearest neighbours of a doubled size come in pairs: PyTorch then
 * goes by the sizes, whatever the scale. */
static void go_by_sizes(ty_p_interpolate *p, const int64_t *in, const int64_t *out) {
  for (int d = 0; d < 2; d++)
    if (out[d] == in[d] || (p->mode == 0 && out[d] == 2 * in[d])) p->scale[d] = 0;
}

static ty_p_interpolate parameters(bool linear, bool align_corners, double scale, const int64_t *in,
                                   const int64_t *out) {
  ty_p_interpolate p = { .mode = linear, .align_corners = align_corners };
  p.scale[0] = p.scale[1] = scale > 0 ? 1 / scale : 0;
  go_by_sizes(&p, in, out);
  return p;
}

/* Whether the kernel for images knows the mode. */
static bool of_images(int n, ty_resize_mode mode, bool antialias) {
  return n == 2 && !antialias && (mode == TY_RESIZE_NEAREST || mode == TY_RESIZE_BILINEAR);
}

/* The size of the result's n dimensions, from `size` or `scale`. */
static bool read_size(ty_call *c, int n, int64_t *out) {
  const ty_interpolate_args *a = TY_ARGS(interpolate, c);
  const ty_tensor *x = a->x.t;
  if (a->size.is.n) return ty_check_each(c, 1, n, 1, out);
  if (a->scale.f == 0) return ty_op_fail(c, TY_EINVAL, "size: expected a size or a scale, got neither");
  for (int d = 0; d < n; d++) {
    double size = floor((double)x->v.size[2 + d] * a->scale.f);
    if (!(size >= 1 && size <= INT32_MAX))
      return ty_op_fail(c, TY_EINVAL, "scale: %g gives no possible size for x %s", a->scale.f, ty_describe(x));
    out[d] = (int64_t)size;
  }
  return true;
}

static bool read_mode(ty_call *c, int n, ty_resize_mode *mode) {
  const ty_interpolate_args *a = TY_ARGS(interpolate, c);
  int k = ty_check_choice(c, 3, modes);
  if (k < 0) return false;
  *mode = (ty_resize_mode)k;
  if (dimensions[k] && dimensions[k] != n)
    return ty_op_fail(c, TY_EINVAL, "mode: \"%s\" is for x of %d dimensions, got %s", modes[k], dimensions[k] + 2,
                      ty_describe(a->x.t));
  if (a->align_corners.i && *mode < TY_RESIZE_LINEAR)
    return ty_op_fail(c, TY_EINVAL, "align_corners: not for mode \"%s\"", modes[k]);
  if (a->antialias.i && *mode != TY_RESIZE_BILINEAR && *mode != TY_RESIZE_BICUBIC)
    return ty_op_fail(c, TY_EINVAL, "antialias: only for modes \"bilinear\" and \"bicubic\"");
  return true;
}

bool fwd_interpolate(ty_call *c) {
  const ty_interpolate_args *a = TY_ARGS(interpolate, c);
  ty_tensor *x = a->x.t;
  int64_t out[3];
  ty_resize_mode mode;
  int n = x->v.ndim - 2;
  if (!ty_check_ndim(c, 0, 3, 5, "[n, c, w], [n, c, h, w] or [n, c, d, h, w]") || !read_mode(c, n, &mode) ||
      !check_scale(c, a->scale.f))
    return false;
  for (int d = 0; d < n; d++)
    if (x->v.size[2 + d] < 1) return ty_op_fail(c, TY_EINVAL, "x: nothing to resize in %s", ty_describe(x));
  if (!read_size(c, n, out)) return false;
  if (of_images(n, mode, a->antialias.i)) {
    ty_p_interpolate p = parameters(mode == TY_RESIZE_BILINEAR, a->align_corners.i, a->scale.f, x->v.size + 2, out);
    int64_t size[] = { x->v.size[0], x->v.size[1], out[0], out[1] };
    return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), 4, size) && ty_launch(c, &x, 1, &p);
  }
  bool was = ty_set_grad_enabled(c->record);
  c->record = false; /* the ops below record themselves */
  ty_tensor *y = ty_resize(x, n, out, mode, a->align_corners.i, a->scale.f, a->antialias.i);
  ty_set_grad_enabled(was);
  return ty_out_set(c, 0, y);
}

/* Height and width of the rule's input. */
static ty_ints image_size(const ty_vjp *c) { return (ty_ints){ ty_vjp_size(c, 0).v + 2, 2 }; }

bool vjp_interpolate(ty_vjp *c) {
  const ty_interpolate_args *a = TY_ARGS(interpolate, c);
  c->dx[0] = ty_interpolate_backward(c->g[0], image_size(c), a->scale.f, a->mode.s, a->align_corners.i);
  return true;
}

bool fwd_interpolate_backward(ty_call *c) {
  ty_tensor *g = c->arg[0].t;
  static const char *const known[] = { "nearest", "bilinear", NULL };
  int64_t in[2];
  int mode = ty_check_choice(c, 3, known);
  if (mode < 0 || !ty_check_ndim(c, 0, 4, 4, "[n, c, oh, ow]") || !ty_check_pair(c, 1, 1, in) ||
      !check_scale(c, c->arg[2].f))
    return false;
  if (mode == 0 && c->arg[4].i) return ty_op_fail(c, TY_EINVAL, "align_corners: only for mode \"bilinear\"");
  ty_p_interpolate p = parameters(mode == 1, c->arg[4].i, c->arg[2].f, in, g->v.size + 2);
  int64_t size[] = { g->v.size[0], g->v.size[1], in[0], in[1] };
  return ty_out(c, 0, ty_device_of(g), ty_dtype_of(g), 4, size) && ty_launch(c, &g, 1, &p);
}

/* Linear in g: its gradient is the interpolation itself, to g's size. */
bool vjp_interpolate_backward(ty_vjp *c) {
  const ty_interpolate_backward_args *a = TY_ARGS(interpolate_backward, c);
  c->dx[0] = ty_interpolate(c->g[0], image_size(c), a->scale.f, a->mode.s, a->align_corners.i, false);
  return true;
}
