/* Convolutions. conv2d without an activation and its two gradients are closed under differentiation: each is
 * linear in both its inputs, and the gradients of any of them are the other two. */
#include <string.h>

#include "op.h"

/* ---- geometry ---- */

/* Options of conv2d from position `first`: stride, padding, dilation, groups. */
static bool read_options(ty_call *c, int first, ty_p_conv *p) {
  if (!ty_check_pair(c, first, 1, p->stride) || !ty_check_pair(c, first + 1, 0, p->padding) ||
      !ty_check_pair(c, first + 2, 1, p->dilation))
    return false;
  p->groups = c->arg[first + 3].i;
  return p->groups >= 1 || ty_op_fail(c, TY_EINVAL, "groups: expected at least 1, got %lld", (long long)p->groups);
}

static int64_t span(const ty_p_conv *p, int d, int64_t taps) { return p->dilation[d] * (taps - 1) + 1; }

/* The size of conv2d's result for an input and a weight of these sizes; `x` and `weight` name them in errors. */
static bool result_size(ty_call *c, const int64_t *x, const int64_t *weight, const ty_p_conv *p, int64_t *size) {
  if (x[1] != weight[1] * p->groups)
    return ty_op_fail(c, TY_EINVAL, "weight: expected [out, %lld / %lld groups, kh, kw] for x %s, got %s",
                      (long long)x[1], (long long)p->groups, ty_shape_text(4, x), ty_shape_text(4, weight));
  if (weight[0] % p->groups)
    return ty_op_fail(c, TY_EINVAL, "weight: expected a multiple of %lld groups of output channels, got %s",
                      (long long)p->groups, ty_shape_text(4, weight));
  size[0] = x[0];
  size[1] = weight[0];
  for (int d = 0; d < 2; d++) {
    int64_t taps = weight[2 + d], have = x[2 + d] + 2 * p->padding[d];
    if (taps < 1 || have < span(p, d, taps))
      return ty_op_fail(
          c, TY_EINVAL,
          "weight: a kernel of %s does not fit into x %s with padding {%lld, %lld} and dilation {%lld, %lld}",
          ty_shape_text(4, weight), ty_shape_text(4, x), (long long)p->padding[0], (long long)p->padding[1],
          (long long)p->dilation[0], (long long)p->dilation[1]);
    size[2 + d] = (have - span(p, d, taps)) / p->stride[d] + 1;
  }
  return true;
}

/* Arguments 0 and 1 as float tensors of one dtype and four dimensions. */
static bool take_pair(ty_call *c, const char *first, const char *second, ty_tensor **a, ty_tensor **b,
                      ty_dtype *dtype) {
  if (!ty_check_floats(c, 1) || !ty_check_ndim(c, 0, 4, 4, first) || !ty_check_ndim(c, 1, 4, 4, second)) return false;
  *dtype = ty_promote(ty_dtype_of(c->arg[0].t), ty_dtype_of(c->arg[1].t));
  *a = ty_to(c->arg[0].t, *dtype);
  *b = ty_to(c->arg[1].t, *dtype);
  return *a && *b;
}

static bool check_bias(ty_call *c, int arg, int64_t channels) {
  const ty_tensor *bias = c->arg[arg].t;
  if (!bias) return true;
  if (!ty_check_floats(c, arg)) return false;
  return (bias->v.ndim == 1 && bias->v.size[0] == channels) ||
         ty_op_fail(c, TY_EINVAL, "bias: expected [%lld], got %s", (long long)channels, ty_describe(bias));
}

/* The residual has the result's size. */
static bool check_residual(ty_call *c, int arg, const int64_t *size) {
  const ty_tensor *residual = c->arg[arg].t;
  if (!residual) return true;
  if (!ty_check_floats(c, arg)) return false;
  return (residual->v.ndim == 4 && memcmp(residual->v.size, size, 4 * sizeof *size) == 0) ||
         ty_op_fail(c, TY_EINVAL, "residual: expected %s, got %s", ty_shape_text(4, size), ty_describe(residual));
}

/* The `size` argument of a gradient: that of the tensor it is for. */
static bool check_size(ty_call *c, int arg) {
  ty_ints size = c->arg[arg].is;
  bool ok = size.n == 4;
  for (int i = 0; ok && i < 4; i++) ok = size.v[i] >= 0;
  return ok ||
         ty_op_fail(c, TY_EINVAL, "size: expected four sizes, got %s", ty_shape_text(size.n < 8 ? size.n : 8, size.v));
}

/* ---- conv2d and its gradients ---- */

/* The backward rule needs what the activation is applied to: while gradients are recorded, separate ops keep it. */
static bool conv2d_apart(ty_call *c, ty_activation activation) {
  const ty_conv2d_args *a = TY_ARGS(conv2d, c);
  c->record = false;
  bool was = ty_set_grad_enabled(true);
  ty_tensor *y = ty_activate(ty_conv2d(a->x.t, a->weight.t, a->bias.t, a->stride.is, a->padding.is, a->dilation.is,
                                       a->groups.i, a->residual.t, "none"),
                             activation);
  ty_set_grad_enabled(was);
  return ty_out_set(c, 0, y);
}

bool fwd_conv2d(ty_call *c) {
  const ty_conv2d_args *a = TY_ARGS(conv2d, c);
  ty_p_conv p = { .groups = 1 };
  ty_tensor *x, *weight, *bias = a->bias.t, *residual = a->residual.t;
  ty_dtype dtype;
  int64_t size[4];
  if (!take_pair(c, "[n, c, h, w]", "[out, c/groups, kh, kw]", &x, &weight, &dtype) || !read_options(c, 3, &p) ||
      !result_size(c, x->v.size, weight->v.size, &p, size) || !check_bias(c, 2, weight->v.size[0]) ||
      !check_residual(c, 7, size) || !ty_check_activation(c, 8, &p.activation))
    return false;
  if (p.activation && c->record) return conv2d_apart(c, p.activation);
  if (!ty_out(c, 0, ty_device_of(x), dtype, 4, size)) return false;
  if (bias && !(bias = ty_to(bias, dtype))) return false;
  if (residual && !(residual = ty_to(residual, dtype))) return false;
  return ty_launch(c, (ty_tensor *[]){ x, weight, bias, residual }, 4, &p);
}

/* The gradients of x and weight, by whatever way they were multiplied. */
static void gradients(ty_vjp *c, ty_tensor *x, ty_tensor *weight, ty_ints stride, ty_ints padding, ty_ints dilation,
                      int64_t groups) {
  ty_tensor *g = c->g[0];
  if (c->need[0]) c->dx[0] = ty_conv2d_backward_input(g, weight, ty_vjp_size(c, 0), stride, padding, dilation, groups);
  if (c->need[1]) c->dx[1] = ty_conv2d_backward_weight(g, x, ty_vjp_size(c, 1), stride, padding, dilation, groups);
  if (c->need[2]) c->dx[2] = ty_sum(g, TY_INTS(0, 2, 3), false, TY_DTYPE_DEFAULT);
}

bool vjp_conv2d(ty_vjp *c) {
  const ty_conv2d_args *a = TY_ARGS(conv2d, c);
  gradients(c, a->x.t, a->weight.t, a->stride.is, a->padding.is, a->dilation.is, a->groups.i);
  if (c->need[3]) c->dx[3] = c->g[0];
  return true;
}

bool fwd_conv2d_im2win(ty_call *c) {
  ty_p_conv p = { .groups = 1 };
  ty_tensor *x, *weight, *bias = c->arg[2].t;
  ty_dtype dtype;
  int64_t size[4];
  if (!take_pair(c, "[n, c, h, w]", "[out, c/groups, kh, kw]", &x, &weight, &dtype) || !read_options(c, 3, &p) ||
      !result_size(c, x->v.size, weight->v.size, &p, size) || !check_bias(c, 2, weight->v.size[0]) ||
      !ty_out(c, 0, ty_device_of(x), dtype, 4, size) || (bias && !(bias = ty_to(bias, dtype))))
    return false;
  return ty_launch(c, (ty_tensor *[]){ x, weight, bias }, 3, &p);
}

bool vjp_conv2d_im2win(ty_vjp *c) {
  const ty_conv2d_im2win_args *a = TY_ARGS(conv2d_im2win, c);
  gradients(c, a->x.t, a->weight.t, a->stride.is, a->padding.is, a->dilation.is, a->groups.i);
  return true;
}

/* Both gradients check that `g` is what conv2d would give. */
static bool check_gradient(ty_call *c, const ty_tensor *g, const int64_t *x, const int64_t *weight,
                           const ty_p_conv *p) {
  int64_t size[4];
  if (!result_size(c, x, weight, p, size)) return false;
  return memcmp(size, g->v.size, sizeof size) == 0 ||
         ty_op_fail(c, TY_EINVAL, "g: expected %s, got %s", ty_shape_text(4, size), ty_describe(g));
}

bool fwd_conv2d_backward_input(ty_call *c) {
  ty_p_conv p = { .groups = 1 };
  ty_tensor *g, *weight;
  ty_dtype dtype;
  if (!take_pair(c, "[n, out, oh, ow]", "[out, c/groups, kh, kw]", &g, &weight, &dtype) || !check_size(c, 2) ||
      !read_options(c, 3, &p) || !check_gradient(c, g, c->arg[2].is.v, weight->v.size, &p))
    return false;
  return ty_out(c, 0, ty_device_of(g), dtype, 4, c->arg[2].is.v) && ty_launch(c, (ty_tensor *[]){ g, weight }, 2, &p);
}

static ty_tensor *convolved(ty_tensor *x, ty_tensor *weight, ty_ints stride, ty_ints padding, ty_ints dilation,
                            int64_t groups) {
  return ty_conv2d(x, weight, NULL, stride, padding, dilation, groups, NULL, "none");
}

bool vjp_conv2d_backward_input(ty_vjp *c) {
  const ty_conv2d_backward_input_args *a = TY_ARGS(conv2d_backward_input, c);
  ty_ints stride = a->stride.is, padding = a->padding.is, dilation = a->dilation.is;
  if (c->need[0]) c->dx[0] = convolved(c->g[0], a->weight.t, stride, padding, dilation, a->groups.i);
  if (c->need[1])
    c->dx[1] = ty_conv2d_backward_weight(a->g.t, c->g[0], ty_vjp_size(c, 1), stride, padding, dilation, a->groups.i);
  return true;
}

bool fwd_conv2d_backward_weight(ty_call *c) {
  ty_p_conv p = { .groups = 1 };
  ty_tensor *g, *x;
  ty_dtype dtype;
  if (!take_pair(c, "[n, out, oh, ow]", "[n, c, h, w]", &g, &x, &dtype) || !check_size(c, 2) ||
      !read_options(c, 3, &p) || !check_gradient(c, g, x->v.size, c->arg[2].is.v, &p))
    return false;
  return ty_out(c, 0, ty_device_of(g), dtype, 4, c->arg[2].is.v) && ty_launch(c, (ty_tensor *[]){ g, x }, 2, &p);
}

bool vjp_conv2d_backward_weight(ty_vjp *c) {
  const ty_conv2d_backward_weight_args *a = TY_ARGS(conv2d_backward_weight, c);
  ty_ints stride = a->stride.is, padding = a->padding.is, dilation = a->dilation.is;
  if (c->need[0]) c->dx[0] = convolved(a->x.t, c->g[0], stride, padding, dilation, a->groups.i);
  if (c->need[1])
    c->dx[1] = ty_conv2d_backward_input(a->g.t, c->g[0], ty_vjp_size(c, 1), stride, padding, dilation, a->groups.i);
  return true;
}

/* ---- what is made of them ---- */

/* The only integer of a list argument. */
static bool take_one(ty_call *c, int arg, int64_t *value) {
  ty_ints v = c->arg[arg].is;
  if (v.n != 1) return ty_op_fail(c, TY_EINVAL, "%s: expected one integer, got %d", c->op->args[arg].name, v.n);
  *value = v.v[0];
  return true;
}

bool fwd_conv1d(ty_call *c) {
  const ty_conv1d_args *a = TY_ARGS(conv1d, c);
  int64_t stride = 1, padding = 0, dilation = 1;
  if (!ty_check_ndim(c, 0, 3, 3, "[n, c, w]") || !ty_check_ndim(c, 1, 3, 3, "[out, c/groups, kw]") ||
      !take_one(c, 3, &stride) || !take_one(c, 4, &padding) || !take_one(c, 5, &dilation))
    return false;
  ty_tensor *y = ty_conv2d(ty_unsqueeze(a->x.t, 2), ty_unsqueeze(a->weight.t, 2), a->bias.t, TY_INTS(1, stride),
                           TY_INTS(0, padding), TY_INTS(1, dilation), a->groups.i, NULL, "none");
  return ty_out_set(c, 0, ty_squeeze(y, TY_INTS(2)));
}

bool fwd_conv_transpose2d(ty_call *c) {
  const ty_conv_transpose2d_args *a = TY_ARGS(conv_transpose2d, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t;
  ty_p_conv p = { .groups = a->groups.i };
  int64_t extra[2], size[4];
  if (!ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") || !ty_check_ndim(c, 1, 4, 4, "[c, out/groups, kh, kw]") ||
      !ty_check_pair(c, 3, 1, p.stride) || !ty_check_pair(c, 4, 0, p.padding) || !ty_check_pair(c, 5, 0, extra) ||
      !ty_check_pair(c, 7, 1, p.dilation))
    return false;
  if (p.groups < 1) return ty_op_fail(c, TY_EINVAL, "groups: expected at least 1, got %lld", (long long)p.groups);
  if (x->v.size[1] != weight->v.size[0] || x->v.size[1] % p.groups)
    return ty_op_fail(
        c, TY_EINVAL,
        "weight: expected [%lld, out/groups, kh, kw], the channels of x %s divisible by %lld groups, got %s",
        (long long)x->v.size[1], ty_describe(x), (long long)p.groups, ty_describe(weight));
  size[0] = x->v.size[0];
  if (__builtin_mul_overflow(weight->v.size[1], p.groups, &size[1]))
    return ty_op_fail(c, TY_EINVAL, "groups: too many");
  if (!check_bias(c, 2, size[1])) return false;
  for (int d = 0; d < 2; d++) {
    if (extra[d] >= p.stride[d] && extra[d] >= p.dilation[d])
      return ty_op_fail(
          c, TY_EINVAL,
          "output_padding: expected less than the stride {%lld, %lld} or the dilation {%lld, %lld}, got {%lld, %lld}",
          (long long)p.stride[0], (long long)p.stride[1], (long long)p.dilation[0], (long long)p.dilation[1],
          (long long)extra[0], (long long)extra[1]);
    int64_t taps = weight->v.size[2 + d], in = x->v.size[2 + d];
    if (taps < 1 || in < 1 || __builtin_mul_overflow(in - 1, p.stride[d], &size[2 + d]) ||
        (size[2 + d] += span(&p, d, taps) + extra[d] - 2 * p.padding[d]) < 1)
      return ty_op_fail(c, TY_EINVAL, "x %s, weight %s, padding {%lld, %lld}: the result would be empty",
                        ty_describe(x), ty_describe(weight), (long long)p.padding[0], (long long)p.padding[1]);
  }
  /* A convolution of the result takes steps into its padding, too: to where x has nothing. */
  int64_t more[] = { extra[0] / p.stride[0], extra[1] / p.stride[1] };
  if (more[0] || more[1]) x = ty_pad(x, TY_INTS(0, more[1], 0, more[0]), "constant", 0);
  ty_tensor *y = ty_conv2d_backward_input(x, weight, (ty_ints){ size, 4 }, (ty_ints){ p.stride, 2 },
                                          (ty_ints){ p.padding, 2 }, (ty_ints){ p.dilation, 2 }, p.groups);
  if (y && a->bias.t) y = ty_add(y, ty_reshape(a->bias.t, TY_INTS(1, size[1], 1, 1)));
  return ty_out_set(c, 0, y);
}
