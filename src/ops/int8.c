/* Convolutions and sums of bytes with scales and zero points, and gradients of them as if they did not round: what a
 * quantized network computes, and is trained by. */
#include <string.h>

#include "../../kernels/int8.h"
#include "op.h"

static bool is_int8(ty_call *c, int arg, int ndim, const char *layout) {
  const ty_tensor *t = c->arg[arg].t;
  return (ty_dtype_of(t) == TY_I8 && (ndim < 0 || t->v.ndim == ndim)) ||
         ty_op_fail(c, TY_EINVAL, "%s: expected i8 %s, got %s", c->op->args[arg].name, layout, ty_describe(t));
}

/* Argument `arg` as f32 [channels]; NULL after ty_fail(). */
static ty_tensor *per_channel(ty_call *c, int arg, int64_t channels) {
  ty_tensor *t = c->arg[arg].t;
  if (ty_is_float(ty_dtype_of(t)) && t->v.ndim == 1 && t->v.size[0] == channels) return ty_to(t, TY_F32);
  ty_op_fail(c, TY_EINVAL, "%s: expected floats [%lld], got %s", c->op->args[arg].name, (long long)channels,
             ty_describe(t));
  return NULL;
}

static bool is_byte(ty_call *c, int arg, int32_t *value) {
  int64_t i = c->arg[arg].i;
  *value = (int32_t)i;
  return (i >= -128 && i <= 127) || ty_op_fail(c, TY_EINVAL, "%s: expected an integer in [-128, 127], got %lld",
                                               c->op->args[arg].name, (long long)i);
}

/* stride, padding and groups from position `first`. */
static bool read_options(ty_call *c, int first, ty_p_conv_int8 *p) {
  if (!ty_check_pair(c, first, 1, p->stride) || !ty_check_pair(c, first + 1, 0, p->padding)) return false;
  p->groups = c->arg[first + 2].i;
  return p->groups >= 1 || ty_op_fail(c, TY_EINVAL, "groups: expected at least 1, got %lld", (long long)p->groups);
}

/* The size of the result for an input and a weight of these sizes. */
static bool result_size(ty_call *c, const int64_t *x, const int64_t *weight, const ty_p_conv_int8 *p, int64_t *size) {
  if (x[1] != weight[1] * p->groups || weight[0] % p->groups)
    return ty_op_fail(c, TY_EINVAL, "weight: expected [out, c / groups, kh, kw] for x %s and %lld groups, got %s",
                      ty_shape_text(4, x), (long long)p->groups, ty_shape_text(4, weight));
  size[0] = x[0];
  size[1] = weight[0];
  for (int d = 0; d < 2; d++) {
    int64_t have = x[2 + d] + 2 * p->padding[d] - weight[2 + d];
    if (weight[2 + d] < 1 || have < 0)
      return ty_op_fail(c, TY_EINVAL, "weight: a kernel of %s does not fit into x %s with padding {%lld, %lld}",
                        ty_shape_text(4, weight), ty_shape_text(4, x), (long long)p->padding[0],
                        (long long)p->padding[1]);
    size[2 + d] = have / p->stride[d] + 1;
  }
  return true;
}

bool fwd_conv2d_int8(ty_call *c) {
  const ty_conv2d_int8_args *a = TY_ARGS(conv2d_int8, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t, *bias, *scale;
  ty_p_conv_int8 p = { .groups = 1 };
  int64_t size[4];
  if (!is_int8(c, 0, 4, "[n, c, h, w]") || !is_int8(c, 1, 4, "[out, c/groups, kh, kw]") || !read_options(c, 4, &p) ||
      !result_size(c, x->v.size, weight->v.size, &p, size) || !is_byte(c, 7, &p.x_zero) || !is_byte(c, 8, &p.y_zero) ||
      !is_byte(c, 9, &p.low) || !(bias = per_channel(c, 2, size[1])) || !(scale = per_channel(c, 3, size[1])))
    return false;
  return ty_out(c, 0, ty_device_of(x), TY_I8, 4, size) &&
         ty_launch(c, (ty_tensor *[]){ x, weight, bias, scale }, 4, &p);
}

/* Argument 4: the size of what the gradient is for; g and y (arguments 0 and 1) are as the result would be. */
static bool check_gradient(ty_call *c, const int64_t *x, const int64_t *weight, const ty_p_conv_int8 *p) {
  int64_t size[4];
  if (!result_size(c, x, weight, p, size)) return false;
  for (int i = 0; i < 2; i++)
    if (memcmp(size, c->arg[i].t->v.size, sizeof size) != 0)
      return ty_op_fail(c, TY_EINVAL, "%s: expected %s, got %s", c->op->args[i].name, ty_shape_text(4, size),
                        ty_describe(c->arg[i].t));
  return true;
}

static bool check_size(ty_call *c) {
  ty_ints size = c->arg[4].is;
  bool ok = size.n == 4;
  for (int i = 0; ok && i < 4; i++) ok = size.v[i] >= 0;
  return ok ||
         ty_op_fail(c, TY_EINVAL, "size: expected four sizes, got %s", ty_shape_text(size.n < 8 ? size.n : 8, size.v));
}

bool fwd_conv2d_int8_backward_input(ty_call *c) {
  const ty_conv2d_int8_backward_input_args *a = TY_ARGS(conv2d_int8_backward_input, c);
  ty_tensor *g = a->g.t, *weight = a->weight.t, *scale;
  ty_p_conv_int8 p = { .groups = 1 };
  if (!ty_check_floats(c, 0) || !ty_check_ndim(c, 0, 4, 4, "[n, out, oh, ow]") || !is_int8(c, 1, 4, "like g") ||
      !is_int8(c, 2, 4, "[out, c/groups, kh, kw]") || !check_size(c) || !read_options(c, 5, &p) ||
      !check_gradient(c, a->size.is.v, weight->v.size, &p) || !is_byte(c, 8, &p.low) ||
      !(scale = per_channel(c, 3, weight->v.size[0])) || !(g = ty_to(g, TY_F32)))
    return false;
  return ty_out(c, 0, ty_device_of(g), TY_F32, 4, a->size.is.v) &&
         ty_launch(c, (ty_tensor *[]){ g, a->y.t, weight, scale }, 4, &p);
}

bool fwd_conv2d_int8_backward_weight(ty_call *c) {
  const ty_conv2d_int8_backward_weight_args *a = TY_ARGS(conv2d_int8_backward_weight, c);
  ty_tensor *g = a->g.t, *x = a->x.t, *scale;
  ty_p_conv_int8 p = { .groups = 1 };
  if (!ty_check_floats(c, 0) || !ty_check_ndim(c, 0, 4, 4, "[n, out, oh, ow]") || !is_int8(c, 1, 4, "like g") ||
      !is_int8(c, 2, 4, "[n, c, h, w]") || !check_size(c) || !read_options(c, 5, &p) ||
      !check_gradient(c, x->v.size, a->size.is.v, &p) || !is_byte(c, 8, &p.x_zero) || !is_byte(c, 9, &p.low) ||
      !(scale = per_channel(c, 3, g->v.size[1])) || !(g = ty_to(g, TY_F32)))
    return false;
  return ty_out(c, 0, ty_device_of(g), TY_F32, 4, a->size.is.v) &&
         ty_out(c, 1, ty_device_of(g), TY_F32, 1, g->v.size + 1) &&
         ty_launch(c, (ty_tensor *[]){ g, a->y.t, x, scale }, 4, &p);
}

bool fwd_add_int8(ty_call *c) {
  const ty_add_int8_args *s = TY_ARGS(add_int8, c);
  ty_tensor *a = s->a.t, *b = s->b.t;
  ty_p_int8 p = { .a_scale = s->a_scale.f, .b_scale = s->b_scale.f };
  if (!is_int8(c, 0, -1, "[...]") || !is_int8(c, 1, -1, "like a") || !is_byte(c, 4, &p.a_zero) ||
      !is_byte(c, 5, &p.b_zero) || !is_byte(c, 6, &p.y_zero) || !is_byte(c, 7, &p.low))
    return false;
  if (!ty_same_shape(&a->v, &b->v))
    return ty_op_fail(c, TY_EINVAL, "b: expected the shape of a %s, got %s", ty_describe(a), ty_describe(b));
  return ty_out_like(c, 0, a, TY_I8) && ty_launch(c, (ty_tensor *[]){ a, b }, 2, &p);
}

bool fwd_inside_int8(ty_call *c) {
  const ty_inside_int8_args *a = TY_ARGS(inside_int8, c);
  ty_tensor *g = a->g.t, *y = a->y.t;
  ty_p_int8 p = { .a_scale = a->scale.f };
  if (!ty_check_floats(c, 0) || !is_int8(c, 1, -1, "like g") || !is_byte(c, 3, &p.low)) return false;
  if (!ty_same_shape(&g->v, &y->v))
    return ty_op_fail(c, TY_EINVAL, "y: expected the shape of g %s, got %s", ty_describe(g), ty_describe(y));
  return (g = ty_to(g, TY_F32)) && ty_out_like(c, 0, g, TY_F32) && ty_launch(c, (ty_tensor *[]){ g, y }, 2, &p);
}
