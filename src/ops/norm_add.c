/* Residual sum and norm in one: what a transformer's block does between its layers. */
#include <string.h>

#include "op.h"

static ty_dtype wide(ty_dtype d) { return ty_is_half(d) ? TY_F32 : d; }

/* x and residual alike, parameters (at positions `from` up to `to`) as wide as the last dimension. */
static bool check(ty_call *c, int from, int to) {
  const ty_tensor *x = c->arg[0].t, *residual = c->arg[1].t;
  if (!ty_same_shape(&x->v, &residual->v) || ty_dtype_of(x) != ty_dtype_of(residual))
    return ty_op_fail(c, TY_EINVAL, "residual: expected the shape and dtype of x %s, got %s", ty_describe(x),
                      ty_describe(residual));
  if (x->v.ndim == 0) return ty_op_fail(c, TY_EINVAL, "x: expected at least one dimension, got %s", ty_describe(x));
  int64_t width = x->v.size[x->v.ndim - 1];
  for (int i = from; i < to; i++) {
    const ty_tensor *t = c->arg[i].t;
    if (t && (!ty_is_float(ty_dtype_of(t)) || t->v.ndim != 1 || t->v.size[0] != width))
      return ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor [%lld] for x %s, got %s", c->op->args[i].name,
                        (long long)width, ty_describe(x), ty_describe(t));
  }
  return true;
}

static bool check_p(ty_call *c, double p) {
  return (p >= 0 && p < 1) || ty_op_fail(c, TY_EINVAL, "p: expected a probability in [0, 1), got %g", p);
}

static bool add_norm(ty_call *c, ty_tensor *weight, ty_tensor *bias, double eps, double p, bool centred) {
  ty_tensor *x = c->arg[0].t, *out[4] = { NULL };
  if (!check(c, 2, centred ? 4 : 3) || !check_p(c, p)) return false;
  ty_p_random r = p > 0 ? ty_draw(x->v.count, p, 0) : (ty_p_random){ 0 };
  if (!ty_add_norm(x, c->arg[1].t, weight, bias, eps, p, (int64_t)r.seed, (int64_t)r.offset, centred, out))
    return false;
  return ty_out_set(c, 0, out[0]) && ty_out_set(c, 1, out[1]);
}

bool fwd_add_layer_norm(ty_call *c) {
  const ty_add_layer_norm_args *a = TY_ARGS(add_layer_norm, c);
  return add_norm(c, a->weight.t, a->bias.t, a->eps.f, a->training.i ? a->p.f : 0, true);
}

bool fwd_add_rms_norm(ty_call *c) {
  const ty_add_rms_norm_args *a = TY_ARGS(add_rms_norm, c);
  return add_norm(c, a->weight.t, NULL, a->eps.f, a->training.i ? a->p.f : 0, false);
}

static ty_p_add_norm params(double p, int64_t seed, int64_t offset, double eps, bool centred) {
  return (ty_p_add_norm){ .random = { .seed = (uint64_t)seed, .offset = (uint64_t)offset, .a = p },
                          .eps = eps,
                          .centred = centred };
}

bool fwd_add_norm(ty_call *c) {
  const ty_add_norm_args *a = TY_ARGS(add_norm, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t, *bias = a->bias.t;
  ty_dtype dtype = wide(ty_dtype_of(x));
  if (!check(c, 2, 4) || !check_p(c, a->p.f)) return false;
  int64_t rows[TY_MAX_DIMS];
  for (int d = 0; d < x->v.ndim; d++) rows[d] = d < x->v.ndim - 1 ? x->v.size[d] : 1;
  for (int i = 0; i < 2; i++)
    if (!ty_out_like(c, i, x, ty_dtype_of(x)) || !ty_out(c, i + 2, ty_device_of(x), dtype, x->v.ndim, rows))
      return false;
  if ((weight && !(weight = ty_to(weight, dtype))) || (bias && !(bias = ty_to(bias, dtype)))) return false;
  ty_p_add_norm p = params(a->p.f, a->seed.i, a->offset.i, a->eps.f, a->centred.i);
  return ty_launch(c, (ty_tensor *[]){ x, a->residual.t, weight, bias }, 4, &p);
}

/* Gradients for the residual, x (empty where it is the same: p is 0), weight and bias (empty without a weight). */
bool fwd_add_norm_backward(ty_call *c) {
  const ty_add_norm_backward_args *a = TY_ARGS(add_norm_backward, c);
  ty_tensor *total = a->total.t, *weight = a->weight.t, *in[6] = { a->g.t, a->g_sum.t, total, a->mean.t, a->rstd.t };
  ty_dtype dtype = wide(ty_dtype_of(total));
  int64_t none[] = { 0 }, last = total->v.ndim ? total->v.size[total->v.ndim - 1] : 1;
  int64_t rows = last ? total->v.count / last : in[4]->v.count;
  if (!ty_check_floats(c, 1) || !ty_check_floats(c, 2) || !check_p(c, a->p.f)) return false;
  for (int i = 0; i < 2; i++)
    if (in[i] && !ty_same_shape(&in[i]->v, &total->v))
      return ty_op_fail(c, TY_EINVAL, "%s: expected the shape of total %s, got %s", c->op->args[i].name,
                        ty_describe(total), ty_describe(in[i]));
  for (int i = 3; i < 5; i++)
    if (in[i]->v.count != rows || !ty_is_float(ty_dtype_of(in[i])))
      return ty_op_fail(c, TY_EINVAL, "%s: expected %lld floats for total %s, got %s", c->op->args[i].name,
                        (long long)rows, ty_describe(total), ty_describe(in[i]));
  if (weight && (weight->v.count != last || !ty_is_float(ty_dtype_of(weight))))
    return ty_op_fail(c, TY_EINVAL, "weight: expected %lld floats for total %s, got %s", (long long)last,
                      ty_describe(total), ty_describe(weight));
  int64_t wide_as[] = { last };
  bool masked = a->p.f > 0;
  int device = ty_device_of(total);
  if (!ty_out_like(c, 0, total, ty_dtype_of(total)) ||
      !ty_out(c, 1, device, ty_dtype_of(total), masked ? total->v.ndim : 1, masked ? total->v.size : none) ||
      !ty_out(c, 2, device, dtype, 1, weight ? wide_as : none) ||
      !ty_out(c, 3, device, dtype, 1, weight && a->centred.i ? wide_as : none))
    return false;
  in[5] = weight;
  for (int i = 0; i < 6; i++)
    if (i != 2 && in[i] && !(in[i] = ty_to(in[i], i < 2 ? ty_dtype_of(total) : dtype))) return false;
  ty_p_add_norm p = params(a->p.f, a->seed.i, a->offset.i, 0, a->centred.i);
  return ty_launch(c, in, 6, &p);
}

bool vjp_add_norm(ty_vjp *c) {
  const ty_add_norm_args *a = TY_ARGS(add_norm, c);
  ty_tensor *weight = a->weight.t, *g_sum = c->g[0], *g = c->g[1], *total = c->out[0], *d[4] = { NULL };
  ty_dtype dtype = wide(ty_vjp_dtype(c, 0));
  double p = a->p.f;
  if (c->g[2] || c->g[3]) return ty_op_fail(c, TY_EUNSUPPORTED, "mean and rstd have no gradient");
  if (!g) { /* the norm was not used */
    d[0] = g_sum;
    if (p > 0) d[1] = ty_dropout_apply(g_sum, p, a->seed.i, a->offset.i);
  } else if (ty_vjp_plain()) {
    ty_add_norm_backward(g, g_sum, total, c->out[2], c->out[3], weight, p, a->seed.i, a->offset.i, a->centred.i, d);
  } else {
    ty_tensor *rstd, *wide_g = ty_to(g, dtype);
    ty_tensor *h = ty_normalized(ty_to(total, dtype), TY_INTS(-1), a->centred.i, a->eps.f, &rstd);
    ty_tensor *gh = weight ? ty_mul(wide_g, ty_to(weight, dtype)) : wide_g;
    d[0] = ty_normalized_gradient(gh, h, rstd, TY_INTS(-1), a->centred.i);
    if (g_sum) d[0] = ty_add(d[0], ty_to(g_sum, dtype));
    if (p > 0) d[1] = ty_dropout_apply(d[0], p, a->seed.i, a->offset.i);
    if (c->need[2]) d[2] = ty_sum_to(ty_mul(wide_g, h), ty_vjp_size(c, 2));
  }
  c->dx[0] = p > 0 ? d[1] : d[0], c->dx[1] = d[0];
  if (g && weight) c->dx[2] = d[2];
  if (g && weight && a->centred.i && d[3]) c->dx[3] = d[3];
  if (g && c->need[3] && !c->dx[3]) c->dx[3] = ty_sum_to(ty_to(g, dtype), ty_vjp_size(c, 3));
  return true;
}
