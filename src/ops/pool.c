/* Pooling over windows of [n, c, h, w]. */
#include <string.h>

#include "op.h"

static int64_t windows(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  int64_t room = size + 2 * padding - dilation * (kernel - 1) - 1;
  return room < 0 ? 0 : room / stride + 1;
}

/* kernel, stride (the kernel when empty) and padding at positions 1 to 3, and the size of the result. */
static bool read_windows(ty_call *c, int first, const int64_t *in, ty_p_pool *p, int64_t *out) {
  if (!ty_check_pair(c, first, 1, p->kernel)) return false;
  memcpy(p->stride, p->kernel, sizeof p->stride);
  if (c->arg[first + 1].is.n && !ty_check_pair(c, first + 1, 1, p->stride)) return false;
  if (!ty_check_pair(c, first + 2, 0, p->padding)) return false;
  for (int d = 0; d < 2; d++) {
    if (p->padding[d] > p->kernel[d] / 2)
      return ty_op_fail(c, TY_EINVAL, "padding: expected at most half of the kernel {%lld, %lld}, got {%lld, %lld}",
                        (long long)p->kernel[0], (long long)p->kernel[1], (long long)p->padding[0],
                        (long long)p->padding[1]);
    out[d] = windows(in[d], p->kernel[d], p->stride[d], p->padding[d], p->dilation[d]);
    if (out[d] < 1)
      return ty_op_fail(
          c, TY_EINVAL, "kernel: {%lld, %lld} with padding {%lld, %lld} and dilation {%lld, %lld} does not fit into %s",
          (long long)p->kernel[0], (long long)p->kernel[1], (long long)p->padding[0], (long long)p->padding[1],
          (long long)p->dilation[0], (long long)p->dilation[1], ty_shape_text(2, in));
  }
  return true;
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

/* With dilation a window can lie so that all its positions are padding: there is no largest. */
static bool windows_see_something(ty_call *c, const ty_p_pool *p, const int64_t *in, const int64_t *out) {
  for (int d = 0; d < 2; d++) {
    if (p->dilation[d] == 1 || p->padding[d] == 0) continue;
    for (int64_t i = 0; i < out[d]; i++) {
      bool sees = false;
      for (int64_t k = 0; k < p->kernel[d] && !sees; k++) {
        int64_t at = i * p->stride[d] - p->padding[d] + k * p->dilation[d];
        sees = at >= 0 && at < in[d];
      }
      if (!sees)
        return ty_op_fail(c, TY_EINVAL,
                          "padding: a window of {%lld, %lld} with dilation {%lld, %lld} sees only padding of x %s",
                          (long long)p->kernel[0], (long long)p->kernel[1], (long long)p->dilation[0],
                          (long long)p->dilation[1], ty_describe(c->arg[0].t));
    }
  }
  return true;
}

bool fwd_max_pool2d(ty_call *c) {
  ty_p_pool p = { .count_include_pad = true };
  int64_t out[2];
  if (!ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") || !ty_check_pair(c, 4, 1, p.dilation)) return false;
  const int64_t *in = c->arg[0].t->v.size + 2;
  return read_windows(c, 1, in, &p, out) && windows_see_something(c, &p, in, out) && pool(c, &p, out, true);
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
                                      a->dilation.is, false);
  return true;
}

bool vjp_adaptive_max_pool2d(ty_vjp *c) {
  if (c->g[0])
    c->dx[0] = ty_max_pool2d_backward(c->g[0], c->out[1], image_size(c), TY_NO_INTS, TY_NO_INTS, TY_INTS(0), TY_INTS(1),
                                      true);
  return true;
}

bool fwd_avg_pool2d(ty_call *c) {
  ty_p_pool p = { .dilation = { 1, 1 }, .count_include_pad = TY_ARGS(avg_pool2d, c)->count_include_pad.i };
  int64_t out[2];
  return ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") && read_windows(c, 1, c->arg[0].t->v.size + 2, &p, out) &&
         pool(c, &p, out, false);
}

bool fwd_adaptive_avg_pool2d(ty_call *c) {
  ty_p_pool p;
  int64_t out[2];
  return ty_check_ndim(c, 0, 4, 4, "[n, c, h, w]") && read_adaptive(c, &p, out) && pool(c, &p, out, false);
}

bool vjp_avg_pool2d(ty_vjp *c) {
  const ty_avg_pool2d_args *a = TY_ARGS(avg_pool2d, c);
  c->dx[0] = ty_avg_pool2d_backward(c->g[0], image_size(c), a->kernel.is, a->stride.is, a->padding.is,
                                    a->count_include_pad.i, false);
  return true;
}

bool vjp_adaptive_avg_pool2d(ty_vjp *c) {
  c->dx[0] = ty_avg_pool2d_backward(c->g[0], image_size(c), TY_NO_INTS, TY_NO_INTS, TY_INTS(0), true, true);
  return true;
}

/* g against the size of the input at position `first`, behind which are kernel, stride and padding. */
static bool check_gradient(ty_call *c, int first, ty_p_pool *p, int64_t *in) {
  const ty_tensor *g = c->arg[0].t;
  int64_t out[2];
  if (!ty_check_ndim(c, 0, 4, 4, "[n, c, oh, ow]") || !ty_check_pair(c, first, 1, in)) return false;
  if (p->adaptive) return true;
  if (!read_windows(c, first + 1, in, p, out)) return false;
  return (out[0] == g->v.size[2] && out[1] == g->v.size[3]) ||
         ty_op_fail(c, TY_EINVAL, "g: expected [n, c, %lld, %lld], got %s", (long long)out[0], (long long)out[1],
                    ty_describe(g));
}

bool fwd_avg_pool2d_backward(ty_call *c) {
  const ty_avg_pool2d_backward_args *a = TY_ARGS(avg_pool2d_backward, c);
  ty_tensor *g = a->g.t;
  int64_t in[2];
  ty_p_pool p = { .dilation = { 1, 1 }, .count_include_pad = a->count_include_pad.i, .adaptive = a->adaptive.i };
  if (!check_gradient(c, 1, &p, in)) return false;
  int64_t size[] = { g->v.size[0], g->v.size[1], in[0], in[1] };
  return ty_out(c, 0, ty_device_of(g), ty_dtype_of(g), 4, size) && ty_launch(c, &g, 1, &p);
}

/* Linear in g: its gradient is the pool itself. */
bool vjp_avg_pool2d_backward(ty_vjp *c) {
  const ty_avg_pool2d_backward_args *a = TY_ARGS(avg_pool2d_backward, c);
  c->dx[0] = a->adaptive.i ? ty_adaptive_avg_pool2d(c->g[0], image_size(c))
                           : ty_avg_pool2d(c->g[0], a->kernel.is, a->stride.is, a->padding.is, a->count_include_pad.i);
  return true;
}

bool fwd_max_pool2d_backward(ty_call *c) {
  const ty_max_pool2d_backward_args *a = TY_ARGS(max_pool2d_backward, c);
  ty_tensor *g = a->g.t, *position = a->position.t;
  int64_t in[2];
  ty_p_pool p = { .adaptive = a->adaptive.i };
  if (!ty_check_pair(c, 6, 1, p.dilation) || !check_gradient(c, 2, &p, in)) return false;
  if (!ty_same_shape(&g->v, &position->v) || ty_dtype_of(position) != TY_I64)
    return ty_op_fail(c, TY_EINVAL, "position: expected the shape of g, i64, for %s, got %s", ty_describe(g),
                      ty_describe(position));
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
