/* Gated linear units of one tensor in two halves, or of two. */
#include "op.h"

/* x and gate at positions `arg` and arg + 1; *size: of the result. */
static bool check(ty_call *c, int arg, int64_t *size, ty_p_activation *p) {
  const ty_tensor *x = c->arg[arg].t, *gate = c->arg[arg + 1].t;
  int last = x->v.ndim - 1;
  if (!ty_check_activation(c, arg + 2, &p->activation)) return false;
  for (int d = 0; d <= last; d++) size[d] = x->v.size[d];
  if (gate && (!ty_same_shape(&x->v, &gate->v) || ty_dtype_of(x) != ty_dtype_of(gate)))
    return ty_op_fail(c, TY_EINVAL, "gate: expected the shape and dtype of x %s, got %s", ty_describe(x),
                      ty_describe(gate));
  if (gate) return true;
  if (last < 0 || size[last] % 2 != 0)
    return ty_op_fail(c, TY_EINVAL, "x: expected an even last dimension to halve, or a gate, got %s", ty_describe(x));
  size[last] /= 2;
  return true;
}

bool fwd_glu(ty_call *c) {
  ty_tensor *x = c->arg[0].t, *gate = c->arg[1].t;
  int64_t size[TY_MAX_DIMS];
  ty_p_activation p;
  return check(c, 0, size, &p) && ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), x->v.ndim, size) &&
         ty_launch(c, (ty_tensor *[]){ x, gate }, 2, &p);
}

bool fwd_glu_backward(ty_call *c) {
  ty_tensor *g = c->arg[0].t, *x = c->arg[1].t, *gate = c->arg[2].t;
  int64_t size[TY_MAX_DIMS], none[] = { 0 };
  ty_p_activation p;
  if (!ty_check_floats(c, 1) || !check(c, 1, size, &p)) return false;
  bool fits = g->v.ndim == x->v.ndim;
  for (int d = 0; d < g->v.ndim && fits; d++) fits = g->v.size[d] == size[d];
  if (!fits)
    return ty_op_fail(c, TY_EINVAL, "g: expected %s for x %s, got %s", ty_shape_text(x->v.ndim, size), ty_describe(x),
                      ty_describe(g));
  if (!ty_out_like(c, 0, x, ty_dtype_of(x))) return false;
  if (!ty_out(c, 1, ty_device_of(x), ty_dtype_of(x), gate ? gate->v.ndim : 1, gate ? gate->v.size : none)) return false;
  return (g = ty_to(g, ty_dtype_of(x))) && ty_launch(c, (ty_tensor *[]){ g, x, gate }, 3, &p);
}

bool vjp_glu(ty_vjp *c) {
  const ty_glu_args *a = TY_ARGS(glu, c);
  ty_tensor *x = a->x.t, *gate = a->gate.t, *g = c->g[0];
  if (ty_vjp_plain()) {
    ty_tensor *d[2] = { NULL };
    ty_glu_backward(g, x, gate, a->activation.s, d);
    c->dx[0] = d[0];
    if (gate) c->dx[1] = d[1];
    return true;
  }
  ty_activation kind = ty_activation_named(a->activation.s);
  int last = x->v.ndim - 1;
  int64_t half = gate ? 0 : x->v.size[last] / 2; /* with a gate x may have no dimension */
  ty_tensor *p = gate ? x : ty_slice(x, last, 0, half, 1), *v = gate ? gate : ty_slice(x, last, half, 2 * half, 1);
  ty_tensor *dx = ty_mul(g, ty_activate(v, kind)), *dgate = ty_mul(ty_mul(g, p), ty_activation_slope(v, kind));
  c->dx[0] = gate ? dx : ty_concat((ty_tensors){ (ty_tensor *[]){ dx, dgate }, 2 }, last);
  if (gate) c->dx[1] = dgate;
  return true;
}
