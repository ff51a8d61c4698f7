/* Special functions: their gradients, in differentiable ops. The expressions are in kernels/special.h and
 * kernels/bessel.h; what the formulas are taken from is DLMF, the NIST Digital Library of Mathematical Functions. */
#include "../autograd/autograd.h"

#define X(c) ((c)->arg[0].t)
#define G(c) ((c)->g[0])
#define Y(c) ((c)->out[0])

#define RULE(name, ...)        \
  bool vjp_##name(ty_vjp *c) { \
    c->dx[0] = __VA_ARGS__;    \
    return true;               \
  }

static const double sqrt_pi = 1.77245385090551602730, inverse_sqrt_2pi = 0.39894228040143267794;

RULE(erfinv, ty_mul(G(c), ty_mul(ty_exp(ty_square(Y(c))), 0.5 * sqrt_pi)))
RULE(erfcx, ty_mul(G(c), ty_sub(ty_mul(ty_mul(X(c), Y(c)), 2.0), M_2_SQRTPI)))
RULE(ndtr, ty_mul(G(c), ty_mul(ty_exp(ty_mul(ty_square(X(c)), -0.5)), inverse_sqrt_2pi)))
RULE(log_ndtr, ty_mul(G(c), ty_mul(ty_exp(ty_sub(ty_mul(ty_square(X(c)), -0.5), Y(c))), inverse_sqrt_2pi)))
RULE(ndtri, ty_mul(G(c), ty_mul(ty_exp(ty_mul(ty_square(Y(c)), 0.5)), 1.0 / inverse_sqrt_2pi)))
RULE(entr, ty_neg(ty_mul(G(c), ty_add(ty_log(X(c)), 1.0))))
RULE(lgamma, ty_mul(G(c), ty_digamma(X(c))))
RULE(digamma, ty_mul(G(c), ty_polygamma(1, X(c))))

/* (cos(pi x) - y) / x, in f32 at least; its Taylor series where these are nearly equal */
bool vjp_sinc(ty_vjp *c) {
  ty_tensor *x = X(c), *y = Y(c);
  if (ty_is_half(ty_dtype_of(x))) x = ty_to(x, TY_F32), y = ty_sinc(x);
  ty_tensor *near = ty_lt(ty_abs(x), 0.1), *safe = ty_where(near, 1.0, x);
  ty_tensor *far = ty_div(ty_sub(ty_cos(ty_mul(safe, M_PI)), ty_where(near, 0.0, y)), safe);
  ty_tensor *low = ty_where(near, x, 0.0), *z = ty_square(ty_mul(low, M_PI));
  static const double c_of_z[] = { 1.0 / 3991680, -1.0 / 45360, 1.0 / 840, -1.0 / 30, 1.0 / 3 };
  ty_tensor *sum = ty_mul(z, c_of_z[0]);
  for (int i = 1; i < 5; i++) sum = i < 4 ? ty_mul(ty_add(sum, c_of_z[i]), z) : ty_add(sum, c_of_z[i]);
  c->dx[0] = ty_mul(G(c), ty_where(near, ty_mul(ty_mul(low, -M_PI * M_PI), sum), far));
  return true;
}

bool vjp_logit(ty_vjp *c) {
  ty_tensor *x = X(c), *slope = ty_reciprocal(ty_mul(x, ty_sub(1.0, x)));
  double eps = TY_ARGS(logit, c)->eps.f;
  if (eps >= 0) {
    ty_tensor *cut = ty_logical_or(ty_operand(ty_lt(x, eps)), ty_operand(ty_gt(x, 1 - eps)));
    slope = ty_where(cut, 0.0, slope);
  }
  c->dx[0] = ty_mul(G(c), slope);
  return true;
}

/* ---- the gamma function and its relatives ---- */

bool fwd_polygamma(ty_call *c) {
  const ty_polygamma_args *a = TY_ARGS(polygamma, c);
  ty_tensor *x = a->x.t;
  if (a->n.i < 0 || a->n.i > 150)
    return ty_op_fail(c, TY_EINVAL, "n: expected an order from 0 to 150, got %lld", (long long)a->n.i);
  ty_p_scalars p = { (double)a->n.i, 0 };
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, &p);
}

bool vjp_polygamma(ty_vjp *c) {
  const ty_polygamma_args *a = TY_ARGS(polygamma, c);
  c->dx[0] = ty_mul(G(c), ty_polygamma(a->n.i + 1, a->x.t));
  return true;
}

/* DLMF 25.11.17 */
bool vjp_zeta(ty_vjp *c) {
  const ty_zeta_args *a = TY_ARGS(zeta, c);
  ty_value x = a->x.kind == TY_TENSOR ? ty_operand(ty_detach(a->x.t)) : a->x;
  ty_value next = a->x.kind == TY_TENSOR ? ty_operand(ty_add(x, 1.0))
                                         : ty_value_of_float((x.kind == TY_INT ? (double)x.i : x.f) + 1);
  if (c->need[1]) c->dx[1] = ty_neg(ty_mul(G(c), ty_mul(x, ty_zeta(next, a->q))));
  return true;
}

/* x^(a - 1) exp(-x) / gamma(a), with its sign */
static bool gamma_weight(ty_vjp *c, double sign) {
  const ty_gammainc_args *p = TY_ARGS(gammainc, c); /* gammaincc has the same */
  if (!c->need[1]) return true;
  ty_tensor *x = p->x.t, *power, *log_gamma;
  if (p->a.kind == TY_TENSOR) {
    ty_tensor *a = ty_detach(p->a.t);
    power = ty_mul(ty_log(x), ty_sub(a, 1.0));
    log_gamma = ty_lgamma(a);
    power = ty_sub(ty_sub(power, x), log_gamma);
  } else {
    double a = p->a.kind == TY_INT ? (double)p->a.i : p->a.f;
    int sign_of_gamma;
    power = ty_sub(ty_sub(ty_mul(ty_log(x), a - 1), x), lgamma_r(a, &sign_of_gamma));
  }
  c->dx[1] = ty_mul(ty_mul(G(c), sign), ty_exp(power));
  return true;
}
bool vjp_gammainc(ty_vjp *c) { return gamma_weight(c, 1); }
bool vjp_gammaincc(ty_vjp *c) { return gamma_weight(c, -1); }

bool fwd_betaln(ty_call *c) {
  const ty_betaln_args *p = TY_ARGS(betaln, c);
  ty_tensor *a = p->a.t, *b = p->b.t;
  int64_t size[TY_MAX_DIMS];
  int ndim;
  if (!ty_check_floats(c, 1) || !ty_broadcast(c->op, &a->v, &b->v, &ndim, size)) return false;
  return ty_out_set(c, 0, ty_sub(ty_add(ty_lgamma(a), ty_lgamma(b)), ty_lgamma(ty_add(a, b))));
}

/* ---- modified Bessel functions ---- */

/* y / x, and its limit 1/2 at 0 */
static ty_tensor *over_x(ty_tensor *y, ty_tensor *x) {
  ty_tensor *zero = ty_eq(x, 0);
  return ty_where(zero, 0.5, ty_div(y, ty_where(zero, 1.0, x)));
}

RULE(i0, ty_mul(G(c), ty_i1(X(c))))
RULE(i0e, ty_mul(G(c), ty_sub(ty_i1e(X(c)), ty_mul(ty_sign(X(c)), Y(c)))))
RULE(i1, ty_mul(G(c), ty_sub(ty_i0(X(c)), over_x(Y(c), X(c)))))
RULE(i1e, ty_mul(G(c), ty_sub(ty_sub(ty_i0e(X(c)), over_x(Y(c), X(c))), ty_mul(ty_sign(X(c)), Y(c)))))

static ty_value detached(ty_value v) { return v.kind == TY_TENSOR ? ty_operand(ty_detach(v.t)) : v; }
static ty_value shifted(ty_value v, double by) {
  if (v.kind == TY_TENSOR) return ty_operand(ty_abs(ty_add(v, by)));
  return ty_value_of_float(fabs((v.kind == TY_INT ? (double)v.i : v.f) + by));
}

/* v / x + I[v+1] / I[v], DLMF 10.29.2 */
bool vjp_log_bessel_i(ty_vjp *c) {
  ty_value v = detached(c->arg[0]), x = c->arg[1];
  if (!c->need[1]) return true;
  ty_tensor *ratio = ty_exp(ty_sub(ty_log_bessel_i(shifted(v, 1), x), Y(c)));
  c->dx[1] = ty_mul(G(c), ty_add(ty_div(v, x), ratio));
  return true;
}

/* -v / x - K[v-1] / K[v], where K of -v is that of v */
bool vjp_log_bessel_k(ty_vjp *c) {
  ty_value v = detached(c->arg[0]), x = c->arg[1];
  if (!c->need[1]) return true;
  ty_tensor *ratio = ty_exp(ty_sub(ty_log_bessel_k(shifted(v, -1), x), Y(c)));
  c->dx[1] = ty_neg(ty_mul(G(c), ty_add(ty_div(v, x), ratio)));
  return true;
}
