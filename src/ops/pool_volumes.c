/* Pools over one and three dimensions, made of those over two: a row is an image of height 1; windows of a volume are
 * pooled within its frames first, then across them. Where the means of a window's rectangles have the same weights, and
 * the first of equal maxima stays the first, that is the same. Unpooling and the pool by p-norms. */
#include <string.h>

#include "pool.h"

static const char *const layouts[] = { "", "[n, c, w]", "[n, c, h, w]", "[n, c, d, h, w]" };

/* The number of dimensions that the op pools over stands in its name. */
static int dimensions_of(const ty_op *op) { return op->name[strlen(op->name) - 2] - '0'; }

static bool check_layout(ty_call *c, int n) { return ty_check_ndim(c, 0, n + 2, n + 2, layouts[n]); }

static ty_tensor *shaped(ty_tensor *x, int64_t a, int64_t b, int64_t c, int64_t d) {
  return ty_reshape(x, TY_INTS(a, b, c, d));
}

/* x [n, c, d, h, w] as images, for windows within frames. */
static ty_tensor *frames(ty_tensor *x) {
  const int64_t *s = x->v.size;
  return shaped(x, s[0], s[1] * s[2], s[3], s[4]);
}

/* Frames [n, c*d, h, w] as images of d rows, for windows across frames. */
static ty_tensor *across(ty_tensor *y, int64_t channels, int64_t depth) {
  if (!y) return NULL;
  const int64_t *s = y->v.size;
  return shaped(y, s[0], channels, depth, s[2] * s[3]);
}

/* A result [n, c, d, h*w] as a volume. */
static ty_tensor *volume(ty_tensor *y, int64_t h, int64_t w) {
  if (!y) return NULL;
  const int64_t *s = y->v.size;
  return ty_reshape(y, TY_INTS(s[0], s[1], s[2], h, w));
}

static bool row_result(ty_call *c, ty_tensor *const *y) {
  for (int i = 0; i < c->op->nout; i++)
    if (!ty_out_set(c, i, y[i] ? ty_squeeze(y[i], TY_INTS(2)) : NULL)) return false;
  return true;
}

/* Positions in the volume x, from those within its frames, [n, c*d, oh, ow], and those among the frames and places of
 * that, [n, c, od, oh*ow]. */
static ty_tensor *positions(const ty_tensor *x, ty_tensor *within, ty_tensor *among) {
  if (!within || !among) return NULL;
  const int64_t *s = x->v.size;
  int64_t places = within->v.size[2] * within->v.size[3], frame = s[3] * s[4];
  ty_tensor *flat = ty_reshape(among, TY_INTS(s[0], s[1], among->v.size[2] * places));
  ty_tensor *inside = flat ? ty_gather(ty_reshape(within, TY_INTS(s[0], s[1], s[2] * places)), 2, flat) : NULL;
  ty_tensor *depth = flat ? ty_floor_div(ty_value_of_tensor(flat), ty_value_of_int(places)) : NULL;
  ty_tensor *all = inside && depth ? ty_add(inside, ty_mul(depth, ty_value_of_int(frame))) : NULL;
  return all ? ty_reshape(all, (ty_ints){ among->v.size, 4 }) : NULL;
}

static bool max_volume(ty_call *c, ty_tensor *x, ty_tensor *const *inner, ty_tensor *const *outer) {
  if (!inner[0] || !outer[0]) return false;
  const int64_t *s = inner[0]->v.size;
  return ty_out_set(c, 0, volume(outer[0], s[2], s[3])) &&
         ty_out_set(c, 1, volume(positions(x, inner[1], outer[1]), s[2], s[3]));
}

bool fwd_max_pool_nd(ty_call *c) {
  const ty_max_pool3d_args *a = TY_ARGS(max_pool3d, c);
  int n = dimensions_of(c->op);
  ty_tensor *x = a->x.t, *inner[2] = { NULL, NULL }, *outer[2] = { NULL, NULL };
  const int64_t *in = x->v.size + 2;
  bool up = a->ceil_mode.i;
  ty_windows w = { .ceil_mode = up };
  if (!check_layout(c, n) || !ty_check_each(c, 4, n, 1, w.dilation) || !ty_read_windows(c, 1, n, in, &w) ||
      !ty_windows_see_something(c, n, in, &w))
    return false;
  if (n == 1) {
    ty_max_pool2d(ty_unsqueeze(x, 2), TY_INTS(1, w.kernel[0]), TY_INTS(1, w.stride[0]), TY_INTS(0, w.padding[0]),
                  TY_INTS(1, w.dilation[0]), up, inner);
    return row_result(c, inner);
  }
  ty_max_pool2d(frames(x), (ty_ints){ w.kernel + 1, 2 }, (ty_ints){ w.stride + 1, 2 }, (ty_ints){ w.padding + 1, 2 },
                (ty_ints){ w.dilation + 1, 2 }, up, inner);
  ty_max_pool2d(across(inner[0], x->v.size[1], in[0]), TY_INTS(w.kernel[0], 1), TY_INTS(w.stride[0], 1),
                TY_INTS(w.padding[0], 0), TY_INTS(w.dilation[0], 1), up, outer);
  return max_volume(c, x, inner, outer);
}

bool fwd_avg_pool_nd(ty_call *c) {
  const ty_avg_pool3d_args *a = TY_ARGS(avg_pool3d, c);
  int n = dimensions_of(c->op);
  ty_tensor *x = a->x.t, *y;
  bool up = a->ceil_mode.i, padded = a->count_include_pad.i;
  ty_windows w = { .dilation = { 1, 1, 1 }, .ceil_mode = up };
  if (!check_layout(c, n) || !ty_read_windows(c, 1, n, x->v.size + 2, &w) || !ty_check_divisor(c, 6)) return false;
  int64_t divisor = a->divisor.i;
  if (n == 1) {
    y = ty_avg_pool2d(ty_unsqueeze(x, 2), TY_INTS(1, w.kernel[0]), TY_INTS(1, w.stride[0]), TY_INTS(0, w.padding[0]),
                      padded, up, divisor);
    return row_result(c, &y);
  }
  y = ty_avg_pool2d(frames(x), (ty_ints){ w.kernel + 1, 2 }, (ty_ints){ w.stride + 1, 2 },
                    (ty_ints){ w.padding + 1, 2 }, padded, up, divisor ? 1 : 0);
  y = ty_avg_pool2d(across(y, x->v.size[1], x->v.size[2]), TY_INTS(w.kernel[0], 1), TY_INTS(w.stride[0], 1),
                    TY_INTS(w.padding[0], 0), padded, up, divisor);
  return ty_out_set(c, 0, volume(y, w.out[1], w.out[2]));
}

/* `size`, and that x has something to pool. */
static bool read_size(ty_call *c, int n, int64_t *size) {
  if (!check_layout(c, n) || !ty_check_each(c, 1, n, 1, size)) return false;
  const ty_tensor *x = c->arg[0].t;
  for (int d = 0; d < n; d++)
    if (x->v.size[2 + d] < 1) return ty_op_fail(c, TY_EINVAL, "x: nothing to pool in %s", ty_describe(x));
  return true;
}

bool fwd_adaptive_avg_pool_nd(ty_call *c) {
  int n = dimensions_of(c->op);
  ty_tensor *x = c->arg[0].t, *y;
  int64_t size[3];
  if (!read_size(c, n, size)) return false;
  if (n == 1) {
    y = ty_adaptive_avg_pool2d(ty_unsqueeze(x, 2), TY_INTS(1, size[0]));
    return row_result(c, &y);
  }
  y = across(ty_adaptive_avg_pool2d(frames(x), (ty_ints){ size + 1, 2 }), x->v.size[1], x->v.size[2]);
  return ty_out_set(c, 0, volume(ty_adaptive_avg_pool2d(y, TY_INTS(size[0], size[1] * size[2])), size[1], size[2]));
}

bool fwd_adaptive_max_pool_nd(ty_call *c) {
  int n = dimensions_of(c->op);
  ty_tensor *x = c->arg[0].t, *inner[2] = { NULL, NULL }, *outer[2] = { NULL, NULL };
  int64_t size[3];
  if (!read_size(c, n, size)) return false;
  if (n == 1) {
    ty_adaptive_max_pool2d(ty_unsqueeze(x, 2), TY_INTS(1, size[0]), inner);
    return row_result(c, inner);
  }
  ty_adaptive_max_pool2d(frames(x), (ty_ints){ size + 1, 2 }, inner);
  ty_adaptive_max_pool2d(across(inner[0], x->v.size[1], x->v.size[2]), TY_INTS(size[0], size[1] * size[2]), outer);
  return max_volume(c, x, inner, outer);
}

/* ---- what pools left out ---- */

bool fwd_max_unpool(ty_call *c) {
  const ty_max_unpool3d_args *a = TY_ARGS(max_unpool3d, c);
  int n = dimensions_of(c->op);
  ty_tensor *x = a->x.t, *position = a->position.t;
  int64_t kernel[3], stride[3], padding[3], size[5], area = 1, places = 1;
  if (!check_layout(c, n) || !ty_check_each(c, 2, n, 1, kernel)) return false;
  memcpy(stride, kernel, sizeof stride);
  if ((a->stride.is.n && !ty_check_each(c, 3, n, 1, stride)) || !ty_check_each(c, 4, n, 0, padding)) return false;
  if (!ty_same_shape(&x->v, &position->v) || ty_dtype_of(position) != TY_I64)
    return ty_op_fail(c, TY_EINVAL, "position: expected the shape of x, i64, for %s, got %s", ty_describe(x),
                      ty_describe(position));
  if (a->size.is.n && !ty_check_each(c, 5, n, 1, size + 2)) return false;
  size[0] = x->v.size[0], size[1] = x->v.size[1];
  for (int d = 0; d < n; d++) {
    if (!a->size.is.n) size[2 + d] = (x->v.size[2 + d] - 1) * stride[d] - 2 * padding[d] + kernel[d];
    if (size[2 + d] < 1 || __builtin_mul_overflow(area, size[2 + d], &area))
      return ty_op_fail(c, TY_EINVAL, "size: x %s with kernel %s, stride %s and padding %s gives no possible result",
                        ty_describe(x), ty_ints_text(n, kernel), ty_ints_text(n, stride), ty_ints_text(n, padding));
    places *= x->v.size[2 + d];
  }
  ty_tensor *y = ty_zeros(TY_INTS(size[0], size[1], area), ty_dtype_of(x), ty_device_of(x));
  ty_tensor *at = ty_reshape(position, TY_INTS(size[0], size[1], places));
  ty_tensor *values = ty_reshape(x, TY_INTS(size[0], size[1], places));
  y = y && at && values ? ty_scatter(y, 2, at, ty_value_of_tensor(values)) : NULL;
  return ty_out_set(c, 0, y ? ty_reshape(y, (ty_ints){ size, n + 2 }) : NULL);
}

/* ---- p-norms ---- */

bool fwd_lp_pool(ty_call *c) {
  const ty_lp_pool3d_args *a = TY_ARGS(lp_pool3d, c);
  int n = dimensions_of(c->op);
  double p = a->p.f;
  ty_windows w = { .dilation = { 1, 1, 1 }, .ceil_mode = a->ceil_mode.i };
  if (!check_layout(c, n)) return false;
  if (!(p > 0) || isinf(p)) return ty_op_fail(c, TY_EINVAL, "p: expected a positive number, got %g", p);
  if (!ty_read_kernel(c, 2, n, a->x.t->v.size + 2, &w)) return false;
  ty_tensor *powers = p == 1 ? a->x.t : p == 2 ? ty_square(a->x.t) : ty_pow(a->x.t, p), *sum;
  ty_ints kernel = { w.kernel, n }, stride = { w.stride, n };
  /* With ceil_mode the means of windows that are cut off stand for whole ones, as in PyTorch. */
  int64_t divisor = w.ceil_mode ? 0 : 1, whole = 1;
  for (int d = 0; d < n; d++) whole *= w.kernel[d];
  if (n == 1) sum = ty_avg_pool1d(powers, kernel, stride, TY_INTS(0), true, w.ceil_mode, divisor);
  else if (n == 2) sum = ty_avg_pool2d(powers, kernel, stride, TY_INTS(0), true, w.ceil_mode, divisor);
  else sum = ty_avg_pool3d(powers, kernel, stride, TY_INTS(0), true, w.ceil_mode, divisor);
  if (sum && w.ceil_mode) sum = ty_mul(sum, (double)whole);
  if (!sum || p == 1) return ty_out_set(c, 0, sum);
  ty_tensor *none = ty_eq(sum, 0), *safe = none ? ty_masked_fill(sum, none, 1) : NULL;
  ty_tensor *root = !safe ? NULL : p == 2 ? ty_sqrt(safe) : ty_pow(safe, 1 / p);
  return ty_out_set(c, 0, root ? ty_masked_fill(root, none, 0) : NULL);
}
