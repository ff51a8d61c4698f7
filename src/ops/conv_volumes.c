/* Convolutions of volumes, as convolutions of frames whose channels are those of all frames that a window reaches over:
 * one convolution of images does all the arithmetic. conv3d and its two gradients are closed under differentiation, as
 * those of conv2d are, and keep x itself, not the frames. Transposed convolutions of rows and of volumes. */
#include <string.h>

#include "op.h"

static const char *const inputs[] = { "", "[n, c, w]", "[n, c, h, w]", "[n, c, d, h, w]" };

/* ---- geometry ---- */

typedef struct geometry {
  int64_t stride[3], padding[3], dilation[3], groups;
} geometry;

static bool check_groups(ty_call *c, int64_t groups) {
  return groups >= 1 || ty_op_fail(c, TY_EINVAL, "groups: expected at least 1, got %lld", (long long)groups);
}

/* Options of conv3d from position `first`: stride, padding, dilation, groups. */
static bool read_options(ty_call *c, int first, geometry *p) {
  p->groups = c->arg[first + 3].i;
  return ty_check_each(c, first, 3, 1, p->stride) && ty_check_each(c, first + 1, 3, 0, p->padding) &&
         ty_check_each(c, first + 2, 3, 1, p->dilation) && check_groups(c, p->groups);
}

static int64_t span(const geometry *p, int d, int64_t taps) { return p->dilation[d] * (taps - 1) + 1; }

/* The size of conv3d's result for an input and a weight of these sizes. */
static bool result_size(ty_call *c, const int64_t *x, const int64_t *weight, const geometry *p, int64_t *size) {
  if (x[1] != weight[1] * p->groups)
    return ty_op_fail(c, TY_EINVAL, "weight: expected [out, %lld / %lld groups, kd, kh, kw] for x %s, got %s",
                      (long long)x[1], (long long)p->groups, ty_shape_text(5, x), ty_shape_text(5, weight));
  if (weight[0] % p->groups)
    return ty_op_fail(c, TY_EINVAL, "weight: expected a multiple of %lld groups of output channels, got %s",
                      (long long)p->groups, ty_shape_text(5, weight));
  size[0] = x[0];
  size[1] = weight[0];
  for (int d = 0; d < 3; d++) {
    int64_t taps = weight[2 + d], have = x[2 + d] + 2 * p->padding[d];
    if (taps < 1 || have < span(p, d, taps))
      return ty_op_fail(c, TY_EINVAL, "weight: a kernel of %s does not fit into x %s with padding %s and dilation %s",
                        ty_shape_text(5, weight), ty_shape_text(5, x), ty_ints_text(3, p->padding),
                        ty_ints_text(3, p->dilation));
    size[2 + d] = (have - span(p, d, taps)) / p->stride[d] + 1;
  }
  return true;
}

/* Arguments 0 and 1 as float tensors of one dtype and five dimensions. */
static bool take_pair(ty_call *c, const char *first, const char *second, ty_tensor **a, ty_tensor **b) {
  if (!ty_check_floats(c, 1) || !ty_check_ndim(c, 0, 5, 5, first) || !ty_check_ndim(c, 1, 5, 5, second)) return false;
  ty_dtype dtype = ty_promote(ty_dtype_of(c->arg[0].t), ty_dtype_of(c->arg[1].t));
  *a = ty_to(c->arg[0].t, dtype);
  *b = ty_to(c->arg[1].t, dtype);
  return *a && *b;
}

static bool check_bias(ty_call *c, int64_t channels) {
  const ty_tensor *bias = c->arg[2].t;
  if (!bias) return true;
  if (!ty_check_floats(c, 2)) return false;
  return (bias->v.ndim == 1 && bias->v.size[0] == channels) ||
         ty_op_fail(c, TY_EINVAL, "bias: expected [%lld], got %s", (long long)channels, ty_describe(bias));
}

/* The `size` argument of a gradient. */
static bool check_size(ty_call *c, int arg) {
  ty_ints size = c->arg[arg].is;
  bool ok = size.n == 5;
  for (int i = 0; ok && i < 5; i++) ok = size.v[i] >= 0;
  return ok ||
         ty_op_fail(c, TY_EINVAL, "size: expected five sizes, got %s", ty_shape_text(size.n < 8 ? size.n : 8, size.v));
}

/* Both gradients check that g is what conv3d would give. */
static bool check_gradient(ty_call *c, const ty_tensor *g, const int64_t *x, const int64_t *weight, const geometry *p) {
  int64_t size[5];
  if (!result_size(c, x, weight, p, size)) return false;
  return memcmp(size, g->v.size, sizeof size) == 0 ||
         ty_op_fail(c, TY_EINVAL, "g: expected %s, got %s", ty_shape_text(5, size), ty_describe(g));
}

/* ---- volumes and frames ---- */

/* x [n, c, d, h, w] as [n*d, c, h, w]. */
static ty_tensor *frames_of(ty_tensor *x) {
  const int64_t *s = x->v.size;
  ty_tensor *y = s[2] == 1 ? x : ty_permute(x, TY_INTS(0, 2, 1, 3, 4));
  return y ? ty_reshape(y, TY_INTS(s[0] * s[2], s[1], s[3], s[4])) : NULL;
}

/* The other way round, for batches of n and depths of d. */
static ty_tensor *volume_of(ty_tensor *y, int64_t n, int64_t d) {
  if (!y) return NULL;
  const int64_t *s = y->v.size;
  y = ty_permute(ty_reshape(y, TY_INTS(n, d, s[1], s[2], s[3])), TY_INTS(0, 2, 1, 3, 4));
  return y ? ty_contiguous(y) : NULL;
}

/* What each of the `out` windows along the depth of x sees, as frames [n*out, c*taps, h, w]. */
static ty_tensor *stacked(ty_tensor *x, const geometry *p, int64_t taps, int64_t out) {
  const int64_t *s = x->v.size, last = (out - 1) * p->stride[0] + span(p, 0, taps);
  if (taps == 1 && p->stride[0] == 1 && p->padding[0] == 0) return frames_of(x);
  int64_t after = last - p->padding[0] - s[2];
  if (p->padding[0] || after > 0)
    x = ty_pad(x, TY_INTS(0, 0, 0, 0, p->padding[0], after > 0 ? after : 0), "constant", 0);
  ty_tensor *list[64], *all = NULL;
  for (int64_t k = 0; k < taps && x; k += 64) { /* of kernels of 64 frames and more, in parts */
    int64_t n = taps - k < 64 ? taps - k : 64;
    for (int64_t i = 0; i < n; i++) {
      int64_t start = (k + i) * p->dilation[0];
      ty_tensor *part = ty_slice(x, 2, start, start + (out - 1) * p->stride[0] + 1, p->stride[0]);
      if (!part || !(list[i] = ty_permute(part, TY_INTS(0, 2, 1, 3, 4)))) return NULL;
    }
    ty_tensor *part = ty_stack((ty_tensors){ list, (int)n }, 3);
    if (!part) return NULL;
    all = all ? ty_concat(TY_LIST(all, part), 3) : part;
  }
  return all ? ty_reshape(all, TY_INTS(s[0] * out, s[1] * taps, s[3], s[4])) : NULL;
}

/* The transpose: frames [n*out, c*taps, h, w] added up to a volume of `size`. */
static ty_tensor *unstacked(ty_tensor *y, const geometry *p, int64_t taps, int64_t out, const int64_t *size) {
  int64_t area = size[3] * size[4];
  if (!y) return NULL;
  if (taps == 1 && p->stride[0] == 1 && p->padding[0] == 0) return volume_of(y, size[0], size[2]);
  y = ty_permute(ty_reshape(y, TY_INTS(size[0], out, size[1] * taps, area)), TY_INTS(0, 2, 1, 3));
  y = y ? ty_reshape(y, TY_INTS(size[0], size[1] * taps, out * area)) : NULL;
  if (!y) return NULL;
  y = ty_fold(y, TY_INTS(size[2], area), TY_INTS(taps, 1), TY_INTS(p->dilation[0], 1), TY_INTS(p->padding[0], 0),
              TY_INTS(p->stride[0], 1));
  return y ? ty_reshape(y, (ty_ints){ size, 5 }) : NULL;
}

/* A weight [out, c, kd, kh, kw] as that of the frames. */
static ty_tensor *flat_weight(ty_tensor *weight) {
  const int64_t *s = weight->v.size;
  return ty_reshape(weight, TY_INTS(s[0], s[1] * s[2], s[3], s[4]));
}

/* A kernel of one position, step by step, is a convolution of the volume seen as one tall image. */
static bool pointwise(const geometry *p, const int64_t *weight) {
  bool one = true;
  for (int d = 0; d < 3; d++) one = one && weight[2 + d] == 1 && p->stride[d] == 1 && p->padding[d] == 0;
  return one;
}

static ty_tensor *tall(ty_tensor *x) {
  const int64_t *s = x->v.size;
  return ty_reshape(x, TY_INTS(s[0], s[1], s[2] * s[3], s[4]));
}

#define IMAGE(list) ((ty_ints){ (list) + 1, 2 })

/* ---- conv3d and its gradients ---- */

bool fwd_conv3d(ty_call *c) {
  ty_tensor *x, *weight, *bias = c->arg[2].t;
  geometry p;
  int64_t size[5];
  if (!take_pair(c, inputs[3], "[out, c/groups, kd, kh, kw]", &x, &weight) || !read_options(c, 3, &p) ||
      !result_size(c, x->v.size, weight->v.size, &p, size) || !check_bias(c, size[1]))
    return false;
  bool one = pointwise(&p, weight->v.size);
  ty_tensor *y = one ? tall(x) : stacked(x, &p, weight->v.size[2], size[2]), *w = flat_weight(weight);
  if (!y || !w) return false;
  y = ty_conv2d(y, w, bias, IMAGE(p.stride), IMAGE(p.padding), IMAGE(p.dilation), p.groups, NULL, "none");
  if (one) return ty_out_set(c, 0, y ? ty_reshape(y, (ty_ints){ size, 5 }) : NULL);
  return ty_out_set(c, 0, volume_of(y, size[0], size[2]));
}

bool vjp_conv3d(ty_vjp *c) {
  const ty_conv3d_args *a = TY_ARGS(conv3d, c);
  ty_tensor *g = c->g[0];
  ty_ints stride = a->stride.is, padding = a->padding.is, dilation = a->dilation.is;
  if (c->need[0])
    c->dx[0] = ty_conv3d_backward_input(g, a->weight.t, ty_vjp_size(c, 0), stride, padding, dilation, a->groups.i);
  if (c->need[1])
    c->dx[1] = ty_conv3d_backward_weight(g, a->x.t, ty_vjp_size(c, 1), stride, padding, dilation, a->groups.i);
  if (c->need[2]) c->dx[2] = ty_sum(g, TY_INTS(0, 2, 3, 4), false, TY_DTYPE_DEFAULT);
  return true;
}

bool fwd_conv3d_backward_input(ty_call *c) {
  ty_tensor *g, *weight;
  geometry p;
  const int64_t *size = c->arg[2].is.v;
  if (!take_pair(c, "[n, out, od, oh, ow]", "[out, c/groups, kd, kh, kw]", &g, &weight) || !check_size(c, 2) ||
      !read_options(c, 3, &p) || !check_gradient(c, g, size, weight->v.size, &p))
    return false;
  int64_t taps = weight->v.size[2], out = g->v.size[2];
  bool one = pointwise(&p, weight->v.size);
  ty_tensor *y = one ? tall(g) : frames_of(g), *w = flat_weight(weight);
  if (!y || !w) return false;
  if (one) {
    y = ty_conv2d_backward_input(y, w, TY_INTS(size[0], size[1], size[2] * size[3], size[4]), IMAGE(p.stride),
                                 IMAGE(p.padding), IMAGE(p.dilation), p.groups);
    return ty_out_set(c, 0, y ? ty_reshape(y, (ty_ints){ size, 5 }) : NULL);
  }
  y = ty_conv2d_backward_input(y, w, TY_INTS(size[0] * out, size[1] * taps, size[3], size[4]), IMAGE(p.stride),
                               IMAGE(p.padding), IMAGE(p.dilation), p.groups);
  return ty_out_set(c, 0, unstacked(y, &p, taps, out, size));
}

static ty_tensor *convolved(ty_tensor *x, ty_tensor *weight, ty_ints stride, ty_ints padding, ty_ints dilation,
                            int64_t groups) {
  return ty_conv3d(x, weight, NULL, stride, padding, dilation, groups);
}

bool vjp_conv3d_backward_input(ty_vjp *c) {
  const ty_conv3d_backward_input_args *a = TY_ARGS(conv3d_backward_input, c);
  ty_ints stride = a->stride.is, padding = a->padding.is, dilation = a->dilation.is;
  if (c->need[0]) c->dx[0] = convolved(c->g[0], a->weight.t, stride, padding, dilation, a->groups.i);
  if (c->need[1])
    c->dx[1] = ty_conv3d_backward_weight(a->g.t, c->g[0], ty_vjp_size(c, 1), stride, padding, dilation, a->groups.i);
  return true;
}

bool fwd_conv3d_backward_weight(ty_call *c) {
  ty_tensor *g, *x;
  geometry p;
  ty_ints size = c->arg[2].is;
  if (!take_pair(c, "[n, out, od, oh, ow]", inputs[3], &g, &x) || !check_size(c, 2) || !read_options(c, 3, &p) ||
      !check_gradient(c, g, x->v.size, size.v, &p))
    return false;
  bool one = pointwise(&p, size.v);
  ty_tensor *y = one ? tall(g) : frames_of(g), *seen = one ? tall(x) : stacked(x, &p, size.v[2], g->v.size[2]);
  if (!y || !seen) return false;
  y = ty_conv2d_backward_weight(y, seen, TY_INTS(size.v[0], size.v[1] * size.v[2], size.v[3], size.v[4]),
                                IMAGE(p.stride), IMAGE(p.padding), IMAGE(p.dilation), p.groups);
  return ty_out_set(c, 0, y ? ty_reshape(y, size) : NULL);
}

bool vjp_conv3d_backward_weight(ty_vjp *c) {
  const ty_conv3d_backward_weight_args *a = TY_ARGS(conv3d_backward_weight, c);
  ty_ints stride = a->stride.is, padding = a->padding.is, dilation = a->dilation.is;
  if (c->need[0]) c->dx[0] = convolved(a->x.t, c->g[0], stride, padding, dilation, a->groups.i);
  if (c->need[1])
    c->dx[1] = ty_conv3d_backward_input(a->g.t, c->g[0], ty_vjp_size(c, 1), stride, padding, dilation, a->groups.i);
  return true;
}

/* ---- transposed ---- */

/* The size of the result over n dimensions, and the checks of all arguments; positions are those of both ops. */
static bool transposed_size(ty_call *c, int n, geometry *p, int64_t *extra, int64_t *size) {
  static const char *const weights[] = { "", "[c, out/groups, kw]", "", "[c, out/groups, kd, kh, kw]" };
  const ty_tensor *x = c->arg[0].t, *weight = c->arg[1].t;
  p->groups = c->arg[6].i;
  if (!ty_check_ndim(c, 0, n + 2, n + 2, inputs[n]) || !ty_check_ndim(c, 1, n + 2, n + 2, weights[n]) ||
      !ty_check_each(c, 3, n, 1, p->stride) || !ty_check_each(c, 4, n, 0, p->padding) ||
      !ty_check_each(c, 5, n, 0, extra) || !ty_check_each(c, 7, n, 1, p->dilation) || !check_groups(c, p->groups))
    return false;
  if (x->v.size[1] != weight->v.size[0] || x->v.size[1] % p->groups)
    return ty_op_fail(c, TY_EINVAL,
                      "weight: expected %s with the %lld channels of x %s divisible by %lld groups, got %s", weights[n],
                      (long long)x->v.size[1], ty_describe(x), (long long)p->groups, ty_describe(weight));
  size[0] = x->v.size[0];
  if (__builtin_mul_overflow(weight->v.size[1], p->groups, &size[1]))
    return ty_op_fail(c, TY_EINVAL, "groups: too many");
  if (!check_bias(c, size[1])) return false;
  for (int d = 0; d < n; d++) {
    if (extra[d] >= p->stride[d] && extra[d] >= p->dilation[d])
      return ty_op_fail(c, TY_EINVAL, "output_padding: expected less than the stride %s or the dilation %s, got %s",
                        ty_ints_text(n, p->stride), ty_ints_text(n, p->dilation), ty_ints_text(n, extra));
    int64_t taps = weight->v.size[2 + d], in = x->v.size[2 + d];
    if (taps < 1 || in < 1 || __builtin_mul_overflow(in - 1, p->stride[d], &size[2 + d]) ||
        (size[2 + d] += span(p, d, taps) + extra[d] - 2 * p->padding[d]) < 1)
      return ty_op_fail(c, TY_EINVAL, "x %s, weight %s, padding %s: the result would be empty", ty_describe(x),
                        ty_describe(weight), ty_ints_text(n, p->padding));
  }
  return true;
}

bool fwd_conv_transpose1d(ty_call *c) {
  const ty_conv_transpose1d_args *a = TY_ARGS(conv_transpose1d, c);
  geometry p;
  int64_t extra[3], size[3];
  if (!transposed_size(c, 1, &p, extra, size)) return false;
  ty_tensor *x = ty_unsqueeze(a->x.t, 2), *weight = ty_unsqueeze(a->weight.t, 2);
  if (!x || !weight) return false;
  ty_tensor *y = ty_conv_transpose2d(x, weight, a->bias.t, TY_INTS(1, p.stride[0]), TY_INTS(0, p.padding[0]),
                                     TY_INTS(0, extra[0]), p.groups, TY_INTS(1, p.dilation[0]));
  return ty_out_set(c, 0, y ? ty_squeeze(y, TY_INTS(2)) : NULL);
}

bool fwd_conv_transpose3d(ty_call *c) {
  const ty_conv_transpose3d_args *a = TY_ARGS(conv_transpose3d, c);
  geometry p;
  int64_t extra[3], size[5];
  if (!transposed_size(c, 3, &p, extra, size)) return false;
  /* A convolution of the result takes steps into its padding, too: to where x has nothing. */
  int64_t more[] = { extra[0] / p.stride[0], extra[1] / p.stride[1], extra[2] / p.stride[2] };
  ty_tensor *x = a->x.t;
  if (more[0] || more[1] || more[2]) x = ty_pad(x, TY_INTS(0, more[2], 0, more[1], 0, more[0]), "constant", 0);
  if (!x) return false;
  ty_tensor *y = ty_conv3d_backward_input(x, a->weight.t, (ty_ints){ size, 5 }, (ty_ints){ p.stride, 3 },
                                          (ty_ints){ p.padding, 3 }, (ty_ints){ p.dilation, 3 }, p.groups);
  if (y && a->bias.t) y = ty_add(y, ty_reshape(a->bias.t, TY_INTS(1, size[1], 1, 1, 1)));
  return ty_out_set(c, 0, y);
}
