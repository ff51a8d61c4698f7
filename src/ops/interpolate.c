/* Images resized, with PyTorch's conventions: pixel centres at half positions, except with align_corners. */
#include "op.h"

static const char *const modes[] = { "nearest", "bilinear", NULL };

/* scale, mode and align_corners at positions 2 to 4. */
static bool read_options(ty_call *c, ty_p_interpolate *p) {
  double scale = c->arg[2].f;
  p->mode = ty_check_choice(c, 3, modes);
  p->align_corners = c->arg[4].i;
  if (p->mode < 0) return false;
  if (p->mode == 0 && p->align_corners) return ty_op_fail(c, TY_EINVAL, "align_corners: only for mode \"bilinear\"");
  if (!(scale >= 0) || isinf(scale))
    return ty_op_fail(c, TY_EINVAL, "scale: expected a positive number, got %g", scale);
  p->scale[0] = p->scale[1] = scale > 0 ? 1 / scale : 0;
  return true;
}

/* A scale that leaves a size as it is moves nothing, and nearest neighbours of a doubled size come in pairs: PyTorch then
 * goes by the sizes, whatever the scale. */
static void go_by_sizes(ty_p_interpolate *p, const int64_t *in, const int64_t *out) {
  for (int d = 0; d < 2; d++)
    if (out[d] == in[d] || (p->mode == 0 && out[d] == 2 * in[d])) p->scale[d] = 0;
}

bool fwd_interpolate(ty_call *c) {
  const ty_interpolate_args *a = TY_ARGS(interpolate, c);
  ty_tensor *x = a->x.t;
  ty_p_interpolate p;
  int64_t out[2];
  if (!ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") || !read_options(c, &p)) return false;
  if (x->v.size[2] < 1 || x->v.size[3] < 1)
    return ty_op_fail(c, TY_EINVAL, "x: nothing to resize in %s", ty_describe(x));
  if (a->size.is.n) {
    if (!ty_check_pair(c, 1, 1, out)) return false;
  } else {
    if (a->scale.f == 0) return ty_op_fail(c, TY_EINVAL, "size: expected a size or a scale, got neither");
    for (int d = 0; d < 2; d++) {
      double size = floor((double)x->v.size[2 + d] * a->scale.f);
      if (!(size >= 1 && size <= INT32_MAX))
        return ty_op_fail(c, TY_EINVAL, "scale: %g gives no possible size for x %s", a->scale.f, ty_describe(x));
      out[d] = (int64_t)size;
    }
  }
  go_by_sizes(&p, x->v.size + 2, out);
  int64_t size[] = { x->v.size[0], x->v.size[1], out[0], out[1] };
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), 4, size) && ty_launch(c, &x, 1, &p);
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
  ty_p_interpolate p;
  int64_t in[2];
  if (!ty_check_ndim(c, 0, 4, 4, "[n, c, oh, ow]") || !ty_check_pair(c, 1, 1, in) || !read_options(c, &p)) return false;
  go_by_sizes(&p, in, g->v.size + 2);
  int64_t size[] = { g->v.size[0], g->v.size[1], in[0], in[1] };
  return ty_out(c, 0, ty_device_of(g), ty_dtype_of(g), 4, size) && ty_launch(c, &g, 1, &p);
}

/* Linear in g: its gradient is the interpolation itself, to g's size. */
bool vjp_interpolate_backward(ty_vjp *c) {
  const ty_interpolate_backward_args *a = TY_ARGS(interpolate_backward, c);
  c->dx[0] = ty_interpolate(c->g[0], image_size(c), a->scale.f, a->mode.s, a->align_corners.i);
  return true;
}
