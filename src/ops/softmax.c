/* softmax and log_softmax. */
#include "op.h"

static bool forward(ty_call *c) {
  ty_p_dim p = { 0 };
  ty_tensor *x = c->arg[0].t;
  return ty_check_dim(c, 1, x->v.ndim, &p.dim) && ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, &p);
}

bool fwd_softmax(ty_call *c) { return forward(c); }
bool fwd_log_softmax(ty_call *c) { return forward(c); }

/* For both gradients: g and y have the shape of the result. */
bool fwd_softmax_backward(ty_call *c) {
  ty_p_dim p = { 0 };
  ty_tensor *g = c->arg[0].t, *y = c->arg[1].t;
  if (!ty_same_shape(&g->v, &y->v))
    return ty_op_fail(c, TY_EINVAL, "y: expected the shape of g, got %s for %s", ty_describe(y), ty_describe(g));
  if (!ty_check_floats(c, 1) || !ty_check_dim(c, 2, y->v.ndim, &p.dim) || !ty_out_like(c, 0, y, ty_dtype_of(y)))
    return false;
  return (g = ty_to(g, ty_dtype_of(y))) && ty_launch(c, (ty_tensor *[]){ g, y }, 2, &p);
}

/* y (g - sum(g y)) */
bool vjp_softmax(ty_vjp *c) {
  int64_t dim = TY_ARGS(softmax, c)->dim.i;
  ty_tensor *g = c->g[0], *y = c->out[0];
  if (ty_vjp_plain()) c->dx[0] = ty_softmax_backward(g, y, dim);
  else c->dx[0] = ty_mul(y, ty_sub(g, ty_sum(ty_mul(g, y), TY_INTS(dim), true, TY_DTYPE_DEFAULT)));
  return true;
}

/* g - exp(y) sum(g) */
bool vjp_log_softmax(ty_vjp *c) {
  int64_t dim = TY_ARGS(log_softmax, c)->dim.i;
  ty_tensor *g = c->g[0], *y = c->out[0];
  if (ty_vjp_plain()) c->dx[0] = ty_log_softmax_backward(g, y, dim);
  else c->dx[0] = ty_sub(g, ty_mul(ty_exp(y), ty_sum(g, TY_INTS(dim), true, TY_DTYPE_DEFAULT)));
  return true;
}
