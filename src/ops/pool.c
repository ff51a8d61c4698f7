/* Pooling over windows of [n, c, h, w]. */
#include <string.h>

#include "pool.h"

/* Where the last window may reach beyond the padding, it begins in the image or in the padding before it. */
static int64_t count_windows(const ty_windows *w, int d, int64_t size) {
  int64_t room = size + 2 * w->padding[d] - w->dilation[d] * (w->kernel[d] - 1) - 1;
  if (room < 0) return 0;
  if (!w->ceil_mode) return room / w->stride[d] + 1;
  int64_t n = (room + w->stride[d] - 1) / w->stride[d] + 1;
  return (n - 1) * w->stride[d] >= size + w->padding[d] ? n - 1 : n;
}

static bool fit(ty_call *c, int n, const int64_t *in, ty_windows *w) {
  for (int d = 0; d < n; d++) {
    if (w->padding[d] > w->kernel[d] / 2)
      return ty_op_fail(c, TY_EINVAL, "padding: expected at most half of the kernel %s, got %s",
                        ty_ints_text(n, w->kernel), ty_ints_text(n, w->padding));
    w->out[d] = count_windows(w, d, in[d]);
    if (w->out[d] < 1)
      return ty_op_fail(c, TY_EINVAL, "kernel: %s with padding %s and dilation %s does not fit into %s",
                        ty_ints_text(n, w->kernel), ty_ints_text(n, w->padding), ty_ints_text(n, w->dilation),
                        ty_shape_text(n, in));
  }
  return true;
}

static bool read_steps(ty_call *c, int first, int n, ty_windows *w) {
  if (!ty_check_each(c, first, n, 1, w->kernel)) return false;
  memcpy(w->stride, w->kernel, sizeof w->stride);
  return c->arg[first + 1].is.n == 0 || ty_check_each(c, first + 1, n, 1, w->stride);
}

bool ty_read_windows(ty_call *c, int first, int n, const int64_t *in, ty_windows *w) {
  return read_steps(c, first, n, w) && ty_check_each(c, first + 2, n, 0, w->padding) && fit(c, n, in, w);
}

bool ty_read_kernel(ty_call *c, int first, int n, const int64_t *in, ty_windows *w) {
  return read_steps(c, first, n, w) && fit(c, n, in, w);
}

bool ty_windows_see_something(ty_call *c, int n, const int64_t *in, const ty_windows *w) {
  for (int d = 0; d < n; d++) {
    if (w->dilation[d] == 1 || w->padding[d] == 0) continue;
    for (int64_t i = 0; i < w->out[d]; i++) {
      bool sees = false;
      for (int64_t k = 0; k < w->kernel[d] && !sees; k++) {
        int64_t at = i * w->stride[d] - w->padding[d] + k * w->dilation[d];
        sees = at >= 0 && at < in[d];
      }
      if (!sees)
        return ty_op_fail(c, TY_EINVAL, "padding: a window of %s with dilation %s sees only padding of x %s",
                          ty_ints_text(n, w->kernel), ty_ints_text(n, w->dilation), ty_describe(c->arg[0].t));
    }
  }
  return true;
}

/* What the kernels of two dimensions take. */
static ty_p_pool parameters(const ty_windows *w) {
  ty_p_pool p = { .count_include_pad = true };
  for (int d = 0; d < 2; d++) {
    p.kernel[d] = w->kernel[d], p.stride[d] = w->stride[d];
    p.padding[d] = w->padding[d], p.dilation[d] = w->dilation[d];
  }
  return p;
}

/* The `size` argument of the adaptive pools. */
static bool read_adaptive(ty_call *c, ty_p_pool *p, int64_t *out) {
  const ty_tensor *x = c->arg[0].t;
  *p = (ty_p_pool){ .adaptive = true, .count_include_pad = true };
  if (!ty_check_pair(c, 1, 1, out)) return false;
  if (x->v.size[2] > 0 && x->v.size[3] > 0) return true;
  return ty_op_fail(c, TY_EINVAL, "x: nothing to pool in %s", ty_describe(x));
}

static bool pool(ty_call *c, const ty_p_pool *p, const int64_t *out, bool positions) {
  ty_tensor *x = c->arg[0].t;
  int64_t size[] = { x->v.size[0], x->v.size[1], out[0], out[1] };
  if (!ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), 4, size)) return false;
  if (positions && !ty_out(c, 1, ty_device_of(x), TY_I64, 4, size)) return false;
  return ty_launch(c, &x, 1, p);
}

bool fwd_max_pool2d(ty_call *c) {
  ty_windows w = { .ceil_mode = TY_ARGS(max_pool2d, c)->ceil_mode.i };
  if (!ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") || !ty_check_pair(c, 4, 1, w.dilation)) return false;
  const int64_t *in = c->arg[0].t->v.size + 2;
  if (!ty_read_windows(c, 1, 2, in, &w) || !ty_windows_see_something(c, 2, in, &w)) return false;
  ty_p_pool p = parameters(&w);
  return pool(c, &p, w.out, true);
}

bool fwd_adaptive_max_pool2d(ty_call *c) {
  ty_p_pool p;
  int64_t out[2];
  return ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") && read_adaptive(c, &p, out) && pool(c, &p, out, true);
}

/* Height and width of the rule's input. */
static ty_ints image_size(const ty_vjp *c) { return (ty_ints){ ty_vjp_size(c, 0).v + 2, 2 }; }

/* Every window's gradient goes to the position it chose. */
bool vjp_max_pool2d(ty_vjp *c) {
  const ty_max_pool2d_args *a = TY_ARGS(max_pool2d, c);
  if (c->g[0])
    c->dx[0] = ty_max_pool2d_backward(c->g[0], c->out[1], image_size(c), a->kernel.is, a->stride.is, a->padding.is,
                                      a->dilation.is, false, a->ceil_mode.i);
  return true;
}

bool vjp_adaptive_max_pool2d(ty_vjp *c) {
  if (c->g[0])
    c->dx[0] = ty_max_pool2d_backward(c->g[0], c->out[1], image_size(c), TY_NO_INTS, TY_NO_INTS, TY_INTS(0), TY_INTS(1),
                                      true, false);
  return true;
}

/* Zero or more; zero: windows are divided by what they see. */
bool ty_check_divisor(ty_call *c, int arg) {
  int64_t divisor = c->arg[arg].i;
  return (divisor >= 0 && divisor <= INT32_MAX) ||
         ty_op_fail(c, TY_EINVAL, "divisor: expected a positive integer, got %lld", (long long)divisor);
}

bool fwd_avg_pool2d(ty_call *c) {
  const ty_avg_pool2d_args *a = TY_ARGS(avg_pool2d, c);
  ty_windows w = { .dilation = { 1, 1, 1 }, .ceil_mode = a->ceil_mode.i };
  if (!ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") || !ty_read_windows(c, 1, 2, a->x.t->v.size + 2, &w) ||
      !ty_check_divisor(c, 6))
    return false;
  ty_p_pool p = parameters(&w);
  p.count_include_pad = a->count_include_pad.i;
  p.divisor = a->divisor.i;
  return pool(c, &p, w.out, false);
}

bool fwd_adaptive_avg_pool2d(ty_call *c) {
  ty_p_pool p;
  int64_t out[2];
  return ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") && read_adaptive(c, &p, out) && pool(c, &p, out, false);
}

bool vjp_avg_pool2d(ty_vjp *c) {
  const ty_avg_pool2d_args *a = TY_ARGS(avg_pool2d, c);
  c->dx[0] = ty_avg_pool2d_backward(c->g[0], image_size(c), a->kernel.is, a->stride.is, a->padding.is,
                                    a->count_include_pad.i, false, a->ceil_mode.i, a->divisor.i);
  return true;
}

bool vjp_adaptive_avg_pool2d(ty_vjp *c) {
  c->dx[0] = ty_avg_pool2d_backward(c->g[0], image_size(c), TY_NO_INTS, TY_NO_INTS, TY_INTS(0), true, true, false, 0);
  return true;
}

/* g against the size of the input at position `first`, behind which are kernel, stride and padding. */
static bool check_gradient(ty_call *c, int first, bool adaptive, ty_windows *w, int64_t *in) {
  const ty_tensor *g = c->arg[0].t;
  if (!ty_check_ndim(c, 0, 4, 4, "[n, c, oh, ow]") || !ty_check_pair(c, first, 1, in)) return false;
  if (adaptive) return true;
  if (!ty_read_windows(c, first + 1, 2, in, w)) return false;
  return (w->out[0] == g->v.size[2] && w->out[1] == g->v.size[3]) ||
         ty_op_fail(c, TY_EINVAL, "g: expected [n, c, %lld, %lld], got %s", (long long)w->out[0], (long long)w->out[1],
                    ty_describe(g));
}

bool fwd_avg_pool2d_backward(ty_call *c) {
  const ty_avg_pool2d_backward_args *a = TY_ARGS(avg_pool2d_backward, c);
  ty_tensor *g = a->g.t;
  int64_t in[2];
  ty_windows w = { .dilation = { 1, 1, 1 }, .ceil_mode = a->ceil_mode.i };
  if (!check_gradient(c, 1, a->adaptive.i, &w, in) || !ty_check_divisor(c, 8)) return false;
  ty_p_pool p = parameters(&w);
  p.count_include_pad = a->count_include_pad.i;
  p.adaptive = a->adaptive.i;
  p.divisor = a->divisor.i;
  int64_t size[] = { g->v.size[0], g->v.size[1], in[0], in[1] };
  return ty_out(c, 0, ty_device_of(g), ty_dtype_of(g), 4, size) && ty_launch(c, &g, 1, &p);
}

/* Linear in g: its gradient is the pool itself. */
bool vjp_avg_pool2d_backward(ty_vjp *c) {
  const ty_avg_pool2d_backward_args *a = TY_ARGS(avg_pool2d_backward, c);
  c->dx[0] = a->adaptive.i ? ty_adaptive_avg_pool2d(c->g[0], image_size(c))
                           : ty_avg_pool2d(c->g[0], a->kernel.is, a->stride.is, a->padding.is, a->count_include_pad.i,
                                           a->ceil_mode.i, a->divisor.i);
  return true;
}

bool fwd_max_pool2d_backward(ty_call *c) {
  const ty_max_pool2d_backward_args *a = TY_ARGS(max_pool2d_backward, c);
  ty_tensor *g = a->g.t, *position = a->position.t;
  int64_t in[2];
  ty_windows w = { .ceil_mode = a->ceil_mode.i };
  if (!ty_check_pair(c, 6, 1, w.dilation) || !check_gradient(c, 2, a->adaptive.i, &w, in)) return false;
  if (!ty_same_shape(&g->v, &position->v) || ty_dtype_of(position) != TY_I64)
    return ty_op_fail(c, TY_EINVAL, "position: expected the shape of g, i64, for %s, got %s", ty_describe(g),
                      ty_describe(position));
  ty_p_pool p = parameters(&w);
  p.adaptive = a->adaptive.i;
  int64_t size[] = { g->v.size[0], g->v.size[1], in[0], in[1] };
  return ty_out(c, 0, ty_device_of(g), ty_dtype_of(g), 4, size) && ty_launch(c, (ty_tensor *[]){ g, position }, 2, &p);
}

/* Linear in g: what was added at a position is taken from there. */
bool vjp_max_pool2d_backward(ty_vjp *c) {
  ty_tensor *position = TY_ARGS(max_pool2d_backward, c)->position.t, *gg = c->g[0];
  const int64_t *x = gg->v.size, *y = position->v.size;
  ty_tensor *at = ty_reshape(position, TY_INTS(y[0], y[1], y[2] * y[3]));
  gg = ty_reshape(gg, TY_INTS(x[0], x[1], x[2] * x[3]));
  if (at && gg) c->dx[0] = ty_reshape(ty_gather(gg, 2, at), (ty_ints){ y, 4 });
  return true;
}
