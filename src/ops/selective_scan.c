/* State spaces whose rates depend on the token: selective_scan, its gradients, and the same in differentiable ops. */
#include <string.h>

#include "op.h"

static ty_dtype wide_dtype(const ty_tensor *t) { return ty_is_half(ty_dtype_of(t)) ? TY_F32 : ty_dtype_of(t); }

typedef struct given {
  ty_tensor *u, *delta, *a, *b, *c, *state; /* as the kernels take them */
  int64_t states[3];                        /* [b, d, n] */
  ty_dtype wide;
} given;

/* A float tensor of this shape. */
static bool has_shape(ty_call *c, int arg, const ty_tensor *t, int ndim, const int64_t *size) {
  if (ty_is_float(ty_dtype_of(t)) && t->v.ndim == ndim && memcmp(t->v.size, size, (size_t)ndim * sizeof *size) == 0)
    return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor %s, got %s", c->op->args[arg].name,
                    ty_shape_text(ndim, size), ty_describe(t));
}

/* Arguments 0 to 5 are u, delta, a, b, c and state. */
static bool take(ty_call *c, given *x) {
  *x = (given){ .u = c->arg[0].t, .delta = c->arg[1].t, .a = c->arg[2].t, .b = c->arg[3].t, .c = c->arg[4].t };
  x->state = c->arg[5].t;
  if (!ty_check_floats(c, 0) || !ty_check_ndim(c, 0, 3, 3, "[b, t, d]") || !ty_check_ndim(c, 2, 2, 2, "[d, n]"))
    return false;
  const int64_t *u = x->u->v.size, n = x->a->v.size[1];
  memcpy(x->states, (int64_t[]){ u[0], u[2], n }, sizeof x->states);
  if (!has_shape(c, 1, x->delta, 3, u) || !has_shape(c, 2, x->a, 2, (int64_t[]){ u[2], n }) ||
      !has_shape(c, 3, x->b, 3, (int64_t[]){ u[0], u[1], n }) ||
      !has_shape(c, 4, x->c, 3, (int64_t[]){ u[0], u[1], n }) || (x->state && !has_shape(c, 5, x->state, 3, x->states)))
    return false;
  x->wide = wide_dtype(x->u);
  ty_dtype dtype = ty_dtype_of(x->u);
  x->delta = ty_to(x->delta, x->wide), x->a = ty_to(x->a, x->wide);
  x->b = ty_to(x->b, dtype), x->c = ty_to(x->c, dtype);
  if (x->state && !(x->state = ty_to(x->state, x->wide))) return false;
  return x->delta && x->a && x->b && x->c;
}

bool fwd_selective_scan(ty_call *c) {
  given x;
  return take(c, &x) && ty_out_like(c, 0, x.u, ty_dtype_of(x.u)) &&
         ty_out(c, 1, ty_device_of(x.u), x.wide, 3, x.states) &&
         ty_launch(c, (ty_tensor *[]){ x.u, x.delta, x.a, x.b, x.c, x.state }, 6, NULL);
}

bool fwd_selective_scan_backward(ty_call *c) {
  const ty_selective_scan_backward_args *a = TY_ARGS(selective_scan_backward, c);
  given x;
  if (!take(c, &x) || !has_shape(c, 6, a->dy.t, 3, x.u->v.size) ||
      (a->dstate.t && !has_shape(c, 7, a->dstate.t, 3, x.states)))
    return false;
  ty_tensor *dy = ty_to(a->dy.t, ty_dtype_of(x.u)), *dstate = a->dstate.t ? ty_to(a->dstate.t, x.wide) : NULL;
  if (!dy || (a->dstate.t && !dstate)) return false;
  return ty_out_like(c, 0, x.u, ty_dtype_of(x.u)) && ty_out_like(c, 1, x.delta, x.wide) &&
         ty_out_like(c, 2, x.a, x.wide) && ty_out_like(c, 3, x.b, ty_dtype_of(x.b)) &&
         ty_out_like(c, 4, x.c, ty_dtype_of(x.c)) && ty_out(c, 5, ty_device_of(x.u), x.wide, 3, x.states) &&
         ty_launch(c, (ty_tensor *[]){ x.u, x.delta, x.a, x.b, x.c, x.state, dy, dstate }, 8, NULL);
}

/* The states of all tokens [b, t, d, n] as linear_scan gives them, and from the end their gradients G: du = delta S and
 * ddelta = u S + sum of R a, where S = sum of G b over states and R = G exp(delta a) h[t-1]; da = sum of R delta. */
static bool composed(ty_vjp *c) {
  const ty_selective_scan_args *args = TY_ARGS(selective_scan, c);
  ty_dtype dtype = wide_dtype(args->u.t);
  int64_t length = args->u.t->v.size[1];
  ty_tensor *u = ty_to(args->u.t, dtype), *delta = ty_to(args->delta.t, dtype), *a = ty_to(args->a.t, dtype);
  ty_tensor *b = ty_to(args->b.t, dtype), *read = ty_to(args->c.t, dtype);
  ty_tensor *state = args->state.t ? ty_to(args->state.t, dtype) : NULL, *ds = c->g[1] ? ty_to(c->g[1], dtype) : NULL;
  ty_tensor *dy = c->g[0] ? ty_to(c->g[0], dtype) : ty_mul(u, 0.0);
  if (!u || !delta || !a || !b || !read || !dy || (args->state.t && !state)) return false;
  if (length == 0) {
    ty_tensor *none[] = { u, delta, a, b, read };
    for (int i = 0; i < 5; i++) c->dx[i] = ty_mul(none[i], 0.0);
    if (c->need[5]) c->dx[5] = ds ? ds : ty_mul(state, 0.0);
    return true;
  }
  ty_tensor *here = ty_reshape(ty_arange(0, length, 1, TY_I64, ty_device_of(u)), TY_INTS(-1, 1, 1));
  ty_tensor *first = ty_eq(here, 0), *last = ty_eq(here, length - 1);
  ty_tensor *step = ty_unsqueeze(delta, -1), *rows = ty_unsqueeze(b, 2), *above = ty_unsqueeze(dy, -1);
  ty_tensor *decay = ty_exp(ty_mul(step, a)), *value = ty_unsqueeze(ty_mul(delta, u), -1);
  ty_tensor *added = ty_mul(value, rows), *before = state ? ty_where(first, ty_unsqueeze(state, 1), 0.0) : NULL;
  if (!first || !last || !decay || !added || (state && !before)) return false;
  if (before) added = ty_add(added, ty_mul(decay, before));
  ty_tensor *h = ty_linear_scan(decay, added, 1, false);
  ty_tensor *from = ty_mul(ty_unsqueeze(read, 2), above);
  if (ds) from = ty_add(from, ty_where(last, ty_unsqueeze(ds, 1), 0.0));
  ty_tensor *g = ty_linear_scan(ty_shifted(decay, 1, true, 0), from, 1, true);
  ty_tensor *previous = ty_where(first, 0.0, ty_shifted(h, 1, false, 0));
  if (before) previous = ty_add(previous, before);
  if (!h || !g || !previous) return false;
#define SUM(x, ...) ty_sum(x, TY_INTS(__VA_ARGS__), false, TY_DTYPE_DEFAULT)
  ty_tensor *into = SUM(ty_mul(g, rows), -1), *held = ty_mul(g, decay), *rate = ty_mul(held, previous);
  if (!into || !held || !rate) return false;
  c->dx[0] = ty_mul(delta, into);
  c->dx[1] = ty_add(ty_mul(u, into), ty_operand(SUM(ty_mul(rate, a), -1)));
  c->dx[2] = SUM(ty_mul(rate, step), 0, 1);
  c->dx[3] = SUM(ty_mul(g, value), 2);
  c->dx[4] = SUM(ty_mul(h, above), 2);
#undef SUM
  if (c->need[5]) c->dx[5] = ty_squeeze(ty_slice(held, 1, 0, 1, 1), TY_INTS(1));
  return true;
}

bool vjp_selective_scan(ty_vjp *c) {
  const ty_selective_scan_args *a = TY_ARGS(selective_scan, c);
  if (!c->g[0] && !c->g[1]) return true;
  if (!ty_vjp_plain()) return composed(c);
  ty_tensor *dy = c->g[0] ? c->g[0] : ty_zeros_like(a->u.t, TY_DTYPE_DEFAULT), *d[6];
  if (!dy || !ty_selective_scan_backward(a->u.t, a->delta.t, a->a.t, a->b.t, a->c.t, a->state.t, dy, c->g[1], d))
    return false;
  for (int i = 0; i < 6; i++)
    if (c->need[i]) c->dx[i] = d[i];
  return true;
}
