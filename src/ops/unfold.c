/* Windows as columns and back, each the other's gradient; pixels as channels and back. */
#include <string.h>

#include "op.h"

/* ---- windows ---- */

/* kernel, dilation, padding and stride from position `first`, and how many windows images of sizes `in` have. */
static bool read_windows(ty_call *c, int first, const int64_t *in, ty_p_pool *p, int64_t *out) {
  *p = (ty_p_pool){ .count_include_pad = true };
  if (!ty_check_pair(c, first, 1, p->kernel) || !ty_check_pair(c, first + 1, 1, p->dilation) ||
      !ty_check_pair(c, first + 2, 0, p->padding) || !ty_check_pair(c, first + 3, 1, p->stride))
    return false;
  for (int d = 0; d < 2; d++) {
    int64_t room = in[d] + 2 * p->padding[d] - p->dilation[d] * (p->kernel[d] - 1) - 1;
    if (room < 0)
      return ty_op_fail(c, TY_EINVAL, "kernel: %s with padding %s and dilation %s does not fit into %s",
                        ty_ints_text(2, p->kernel), ty_ints_text(2, p->padding), ty_ints_text(2, p->dilation),
                        ty_shape_text(2, in));
    out[d] = room / p->stride[d] + 1;
  }
  return true;
}

bool fwd_unfold(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  ty_p_pool p;
  int64_t out[2], columns, size[3];
  if (!ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") || !read_windows(c, 1, x->v.size + 2, &p, out)) return false;
  size[0] = x->v.size[0];
  if (__builtin_mul_overflow(p.kernel[0] * p.kernel[1], x->v.size[1], size + 1) ||
      __builtin_mul_overflow(out[0], out[1], &columns))
    return ty_op_fail(c, TY_EINVAL, "kernel: %s gives too many columns", ty_ints_text(2, p.kernel));
  size[2] = columns;
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), 3, size) && ty_launch(c, &x, 1, &p);
}

bool vjp_unfold(ty_vjp *c) {
  const ty_unfold_args *a = TY_ARGS(unfold, c);
  ty_ints size = ty_vjp_size(c, 0);
  c->dx[0] = ty_fold(c->g[0], (ty_ints){ size.v + 2, 2 }, a->kernel.is, a->dilation.is, a->padding.is, a->stride.is);
  return true;
}

bool fwd_fold(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  ty_p_pool p;
  int64_t in[2], out[2];
  if (!ty_check_ndim(c, 0, 3, 3, "[n, c*kh*kw, windows]") || !ty_check_pair(c, 1, 1, in) ||
      !read_windows(c, 2, in, &p, out))
    return false;
  int64_t taps = p.kernel[0] * p.kernel[1];
  if (x->v.size[1] % taps || x->v.size[2] != out[0] * out[1])
    return ty_op_fail(c, TY_EINVAL, "x: expected [n, c * %lld, %lld], for %lld x %lld windows of %s, got %s",
                      (long long)taps, (long long)(out[0] * out[1]), (long long)out[0], (long long)out[1],
                      ty_ints_text(2, p.kernel), ty_describe(x));
  int64_t size[] = { x->v.size[0], x->v.size[1] / taps, in[0], in[1] };
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), 4, size) && ty_launch(c, &x, 1, &p);
}

bool vjp_fold(ty_vjp *c) {
  const ty_fold_args *a = TY_ARGS(fold, c);
  c->dx[0] = ty_unfold(c->g[0], a->kernel.is, a->dilation.is, a->padding.is, a->stride.is);
  return true;
}

/* ---- pixels and channels: windows side by side, or, of what is no float, dimensions in another order ---- */

/* x as [before, ...] with dimensions of `sizes` for the last three, permuted, and seen as the result's last three. */
static bool rearranged(ty_call *c, ty_tensor *x, const int64_t *inner, const int64_t *order, const int64_t *last) {
  int n = x->v.ndim - 3;
  int64_t before = 1, dims[] = { 0, 1 + order[0], 1 + order[1], 1 + order[2], 1 + order[3], 1 + order[4] };
  int64_t size[TY_MAX_DIMS];
  for (int d = 0; d < n; d++) before *= size[d] = x->v.size[d];
  memcpy(size + n, last, 3 * sizeof *last);
  ty_tensor *y = ty_reshape(x, TY_INTS(before, inner[0], inner[1], inner[2], inner[3], inner[4]));
  y = y ? ty_contiguous(ty_permute(y, (ty_ints){ dims, 6 })) : NULL;
  return ty_out_set(c, 0, y ? ty_reshape(y, (ty_ints){ size, n + 3 }) : NULL);
}

/* x [..., sizes], the sizes a, b and, unless it is 0, d, with one dimension before them. */
static ty_tensor *columns_of(ty_tensor *x, int64_t a, int64_t b, int64_t d) {
  int64_t before = 1;
  for (int i = 0; i < x->v.ndim - 3; i++) before *= x->v.size[i];
  return ty_reshape(x, (ty_ints){ (int64_t[]){ before, a, b, d }, d ? 4 : 3 });
}

/* The result y with the dimensions of x before its last three, which are a, b and d. */
static bool seen_as(ty_call *c, const ty_tensor *x, ty_tensor *y, int64_t a, int64_t b, int64_t d) {
  int64_t size[TY_MAX_DIMS];
  int n = x->v.ndim;
  memcpy(size, x->v.size, sizeof size);
  size[n - 3] = a, size[n - 2] = b, size[n - 1] = d;
  return ty_out_set(c, 0, y ? ty_reshape(y, (ty_ints){ size, n }) : NULL);
}

static bool check_factor(ty_call *c, int64_t *factor) {
  *factor = c->arg[1].i;
  return (*factor >= 1 && *factor <= 1 << 15) ||
         ty_op_fail(c, TY_EINVAL, "%s: expected a positive integer, got %lld", c->op->args[1].name, (long long)*factor);
}

bool fwd_pixel_shuffle(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  int64_t r;
  if (!ty_check_ndim(c, 0, 3, TY_MAX_DIMS, "[..., c*factor^2, h, w]") || !check_factor(c, &r)) return false;
  const int64_t *s = x->v.size + x->v.ndim - 3;
  if (s[0] % (r * r))
    return ty_op_fail(c, TY_EINVAL, "x: expected a multiple of %lld channels, got %s", (long long)(r * r),
                      ty_describe(x));
  int64_t depth = s[0] / (r * r);
  if (ty_is_float(ty_dtype_of(x)) && s[1] > 0 && s[2] > 0) {
    ty_tensor *y = columns_of(x, s[0], s[1] * s[2], 0);
    y = y ? ty_fold(y, TY_INTS(s[1] * r, s[2] * r), TY_INTS(r), TY_INTS(1), TY_INTS(0), TY_INTS(r)) : NULL;
    return seen_as(c, x, y, depth, s[1] * r, s[2] * r);
  }
  return rearranged(c, x, (int64_t[]){ depth, r, r, s[1], s[2] }, (int64_t[]){ 0, 3, 1, 4, 2 },
                    (int64_t[]){ depth, s[1] * r, s[2] * r });
}

bool fwd_pixel_unshuffle(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  int64_t r;
  if (!ty_check_ndim(c, 0, 3, TY_MAX_DIMS, "[..., c, h*factor, w*factor]") || !check_factor(c, &r)) return false;
  const int64_t *s = x->v.size + x->v.ndim - 3;
  if (s[1] % r || s[2] % r)
    return ty_op_fail(c, TY_EINVAL, "x: expected height and width that %lld divides, got %s", (long long)r,
                      ty_describe(x));
  if (ty_is_float(ty_dtype_of(x)) && s[1] > 0 && s[2] > 0) {
    ty_tensor *y = columns_of(x, s[0], s[1], s[2]);
    y = y ? ty_unfold(y, TY_INTS(r), TY_INTS(1), TY_INTS(0), TY_INTS(r)) : NULL;
    return seen_as(c, x, y, s[0] * r * r, s[1] / r, s[2] / r);
  }
  return rearranged(c, x, (int64_t[]){ s[0], s[1] / r, r, s[2] / r, r }, (int64_t[]){ 0, 2, 4, 1, 3 },
                    (int64_t[]){ s[0] * r * r, s[1] / r, s[2] / r });
}

bool fwd_channel_shuffle(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  int64_t groups, rest = 1;
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[n, c, ...]") || !check_factor(c, &groups)) return false;
  const int64_t *s = x->v.size;
  if (s[1] % groups)
    return ty_op_fail(c, TY_EINVAL, "groups: expected a divisor of the channels of x %s, got %lld", ty_describe(x),
                      (long long)groups);
  for (int d = 2; d < x->v.ndim; d++) rest *= s[d];
  ty_tensor *y = ty_transpose(ty_reshape(x, TY_INTS(s[0], groups, s[1] / groups, rest)), 1, 2);
  y = y ? ty_contiguous(y) : NULL;
  return ty_out_set(c, 0, y ? ty_reshape(y, (ty_ints){ x->v.size, x->v.ndim }) : NULL);
}
