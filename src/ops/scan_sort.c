/* Along one dimension: cumsum, cumprod, logcumsumexp, cummax, cummin, linear_scan, sort, argsort, topk. */
#include <string.h>

#include "../autograd/autograd.h"

static ty_dtype scan_dtype(const ty_tensor *x) { return ty_is_float(ty_dtype_of(x)) ? ty_dtype_of(x) : TY_I64; }

/* ---- running sum ---- */

bool fwd_cumsum(ty_call *c) {
  const ty_cumsum_args *a = TY_ARGS(cumsum, c);
  int dim;
  if (!ty_check_dim(c, 1, a->x.t->v.ndim, &dim)) return false;
  ty_tensor *x = ty_to(a->x.t, scan_dtype(a->x.t));
  return x && ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_launch(c, &x, 1, &(ty_p_dim){ .dim = dim, .flag = a->reverse.i });
}

bool vjp_cumsum(ty_vjp *c) {
  const ty_cumsum_args *a = TY_ARGS(cumsum, c);
  c->dx[0] = ty_cumsum(c->g[0], a->dim.i, !a->reverse.i);
  return true;
}

/* ---- running product ---- */

bool fwd_cumprod(ty_call *c) {
  const ty_cumprod_args *a = TY_ARGS(cumprod, c);
  int dim;
  if (!ty_check_dim(c, 1, a->x.t->v.ndim, &dim)) return false;
  ty_tensor *x = ty_to(a->x.t, scan_dtype(a->x.t));
  return x && ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, &(ty_p_dim){ .dim = dim });
}

ty_tensor *ty_shifted(ty_tensor *t, int dim, bool backwards, double value) {
  if (!t) return NULL;
  int64_t n = t->v.size[dim], size[TY_MAX_DIMS];
  memcpy(size, t->v.size, sizeof size);
  size[dim] = 1;
  ty_tensor *edge = ty_full(((ty_ints){ size, t->v.ndim }), value, ty_dtype_of(t), ty_device_of(t));
  ty_tensor *rest = backwards ? ty_slice(t, dim, 1, n, 1) : ty_slice(t, dim, 0, n - 1, 1);
  return !edge || !rest ? NULL : backwards ? ty_concat(TY_LIST(rest, edge), dim) : ty_concat(TY_LIST(edge, rest), dim);
}

/* dx[k] = y[k-1] s[k] with s[k] = g[k] + x[k+1] s[k+1]: no division, so zeros in x are like any number. */
bool vjp_cumprod(ty_vjp *c) {
  const ty_cumprod_args *a = TY_ARGS(cumprod, c);
  ty_tensor *x = a->x.t, *g = c->g[0];
  int dim = (int)a->dim.i + (a->dim.i < 0 ? x->v.ndim : 0);
  if (x->v.ndim == 0 || x->v.size[dim] < 2) {
    c->dx[0] = g;
    return true;
  }
  c->dx[0] = ty_mul(ty_shifted(c->out[0], dim, false, 1), ty_linear_scan(ty_shifted(x, dim, true, 0), g, dim, true));
  return true;
}

/* ---- running log-sum-exp ---- */

bool fwd_logcumsumexp(ty_call *c) {
  ty_tensor *x = TY_ARGS(logcumsumexp, c)->x.t;
  int dim;
  return ty_check_dim(c, 1, x->v.ndim, &dim) && ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_launch(c, &x, 1, &(ty_p_dim){ .dim = dim });
}

/* dx[k] = exp(x[k] - y[k]) s[k] with s[k] = g[k] + exp(y[k] - y[k+1]) s[k+1]: no exponent is positive. */
bool vjp_logcumsumexp(ty_vjp *c) {
  const ty_logcumsumexp_args *a = TY_ARGS(logcumsumexp, c);
  ty_tensor *x = a->x.t, *y = c->out[0];
  int dim = (int)a->dim.i + (a->dim.i < 0 ? x->v.ndim : 0);
  if (x->v.ndim == 0 || x->v.size[dim] == 0) {
    c->dx[0] = c->g[0];
    return true;
  }
  ty_tensor *none = ty_eq(y, -(double)INFINITY), *share = ty_exp(ty_where(none, -(double)INFINITY, ty_sub(x, y)));
  ty_tensor *next = ty_shifted(y, dim, true, INFINITY);
  ty_tensor *factor = ty_exp(ty_where(none, -(double)INFINITY, ty_sub(y, next)));
  c->dx[0] = ty_mul(share, ty_linear_scan(factor, c->g[0], dim, true));
  return true;
}

/* ---- running extremes ---- */

bool fwd_running_extreme(ty_call *c) {
  const ty_cummax_args *a = TY_ARGS(cummax, c); /* cummin has the same */
  ty_tensor *x = a->x.t;
  int dim;
  return ty_check_dim(c, 1, x->v.ndim, &dim) && ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_out_like(c, 1, x, TY_I64) &&
         ty_launch(c, &x, 1, &(ty_p_dim){ .dim = dim });
}

bool vjp_running_extreme(ty_vjp *c) {
  c->dx[0] = ty_gather_backward(c->g[0], TY_ARGS(cummax, c)->dim.i, c->out[1], ty_vjp_size(c, 0));
  return true;
}

/* ---- linear recurrence ---- */

bool fwd_linear_scan(ty_call *c) {
  const ty_linear_scan_args *a = TY_ARGS(linear_scan, c);
  int64_t size[TY_MAX_DIMS];
  int ndim, dim;
  if (!ty_check_floats(c, 1) || !ty_broadcast(c->op, &a->a.t->v, &a->b.t->v, &ndim, size) ||
      !ty_check_dim(c, 2, ndim, &dim))
    return false;
  ty_dtype dtype = ty_promote(ty_dtype_of(a->a.t), ty_dtype_of(a->b.t));
  ty_tensor *p = ty_expand(ty_to(a->a.t, dtype), (ty_ints){ size, ndim }),
            *q = ty_expand(ty_to(a->b.t, dtype), (ty_ints){ size, ndim });
  return p && q && ty_out(c, 0, ty_device_of(p), dtype, ndim, size) &&
         ty_launch(c, (ty_tensor *[]){ p, q }, 2, &(ty_p_dim){ .dim = dim, .flag = a->reverse.i });
}

bool vjp_linear_scan(ty_vjp *c) {
  const ty_linear_scan_args *a = TY_ARGS(linear_scan, c);
  ty_tensor *g = c->g[0], *h = c->out[0];
  ty_tensor *p = ty_expand(ty_to(a->a.t, ty_dtype_of(h)), (ty_ints){ h->v.size, h->v.ndim });
  int dim = (int)a->dim.i + (a->dim.i < 0 ? h->v.ndim : 0);
  bool reverse = a->reverse.i;
  if (ty_vjp_plain()) {
    ty_tensor *grads[2];
    if (!ty_linear_scan_backward(g, p, h, dim, reverse, grads)) return false;
    c->dx[0] = grads[0];
    c->dx[1] = grads[1];
    return true;
  }
  if (h->v.ndim == 0 || h->v.size[dim] == 0) {
    c->dx[0] = ty_mul(g, 0.0);
    c->dx[1] = g;
    return true;
  }
  ty_tensor *s = ty_linear_scan(ty_shifted(p, dim, !reverse, 0), g, dim, !reverse);
  c->dx[1] = s;
  if (c->need[0]) c->dx[0] = ty_mul(s, ty_shifted(h, dim, reverse, 0));
  return true;
}

bool fwd_linear_scan_backward(ty_call *c) {
  const ty_linear_scan_backward_args *a = TY_ARGS(linear_scan_backward, c);
  ty_tensor *in[3] = { a->g.t, a->a.t, a->h.t };
  int dim;
  if (!ty_check_dim(c, 3, in[0]->v.ndim, &dim)) return false;
  for (int i = 1; i < 3; i++)
    if (!ty_same_shape(&in[i]->v, &in[0]->v))
      return ty_op_fail(c, TY_EINVAL, "%s: expected the shape of g %s, got %s", c->op->args[i].name, ty_describe(in[0]),
                        ty_describe(in[i]));
  for (int i = 0; i < 3; i++)
    if (!(in[i] = ty_to(in[i], ty_dtype_of(a->h.t)))) return false;
  return ty_out_like(c, 0, in[0], ty_dtype_of(in[0])) && ty_out_like(c, 1, in[0], ty_dtype_of(in[0])) &&
         ty_launch(c, in, 3, &(ty_p_dim){ .dim = dim, .flag = a->reverse.i });
}

/* ---- order ---- */

bool fwd_sort(ty_call *c) {
  const ty_sort_args *a = TY_ARGS(sort, c);
  ty_tensor *x = a->x.t;
  int dim;
  return ty_check_dim(c, 1, x->v.ndim, &dim) && ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_out_like(c, 1, x, TY_I64) &&
         ty_launch(c, &x, 1, &(ty_p_dim){ .dim = dim, .flag = a->descending.i });
}

bool vjp_sort(ty_vjp *c) {
  const ty_sort_args *a = TY_ARGS(sort, c);
  c->dx[0] = ty_gather_backward(c->g[0], a->dim.i, c->out[1], ty_vjp_size(c, 0));
  return true;
}

bool fwd_argsort(ty_call *c) {
  const ty_argsort_args *a = TY_ARGS(argsort, c);
  ty_tensor *x = a->x.t;
  int dim;
  return ty_check_dim(c, 1, x->v.ndim, &dim) && ty_out_like(c, 0, x, TY_I64) &&
         ty_launch_kernel(TY_OP_sort, c->out, 1, &x, 1, &(ty_p_dim){ .dim = dim, .flag = a->descending.i });
}

bool fwd_topk(ty_call *c) {
  const ty_topk_args *a = TY_ARGS(topk, c);
  ty_tensor *x = a->x.t;
  int dim;
  if (!ty_check_dim(c, 2, x->v.ndim, &dim)) return false;
  int64_t n = x->v.ndim ? x->v.size[dim] : 1, k = a->k.i, size[TY_MAX_DIMS];
  if (k < (x->v.ndim ? 0 : 1) || k > n)
    return ty_op_fail(c, TY_EINVAL, "k: expected at most the %lld positions of dim %d, got %lld for %s", (long long)n,
                      dim, (long long)k, ty_describe(x));
  memcpy(size, x->v.size, sizeof *size * (size_t)x->v.ndim);
  if (x->v.ndim) size[dim] = k;
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), x->v.ndim, size) &&
         ty_out(c, 1, ty_device_of(x), TY_I64, x->v.ndim, size) &&
         ty_launch(c, &x, 1, &(ty_p_dim){ .dim = dim, .k = k, .flag = a->largest.i });
}

bool vjp_topk(ty_vjp *c) {
  const ty_topk_args *a = TY_ARGS(topk, c);
  c->dx[0] = ty_gather_backward(c->g[0], a->dim.i, c->out[1], ty_vjp_size(c, 0));
  return true;
}
