/* Backward rules of the elementwise ops, all in differentiable ops. Broadcast inputs get their gradient summed by the engine. */
#include "../autograd/autograd.h"

#define X(c) ((c)->arg[0].t)
#define G(c) ((c)->g[0])
#define Y(c) ((c)->out[0])

#define RULE(name, ...)        \
  bool vjp_##name(ty_vjp *c) { \
    c->dx[0] = __VA_ARGS__;    \
    return true;               \
  }

RULE(neg, ty_neg(G(c)))
RULE(abs, ty_mul(G(c), ty_sign(X(c))))
RULE(square, ty_mul(G(c), ty_mul(X(c), 2.0)))
RULE(exp, ty_mul(G(c), Y(c)))
RULE(exp2, ty_mul(G(c), ty_mul(Y(c), M_LN2)))
RULE(expm1, ty_mul(G(c), ty_add(Y(c), 1.0)))
RULE(log, ty_div(G(c), X(c)))
RULE(log2, ty_div(G(c), ty_mul(X(c), M_LN2)))
RULE(log10, ty_div(G(c), ty_mul(X(c), M_LN10)))
RULE(log1p, ty_div(G(c), ty_add(X(c), 1.0)))
RULE(sqrt, ty_div(G(c), ty_mul(Y(c), 2.0)))
RULE(rsqrt, ty_mul(ty_mul(G(c), -0.5), ty_pow(Y(c), 3.0)))
RULE(reciprocal, ty_neg(ty_mul(G(c), ty_square(Y(c)))))
RULE(sin, ty_mul(G(c), ty_cos(X(c))))
RULE(cos, ty_neg(ty_mul(G(c), ty_sin(X(c)))))
RULE(tan, ty_mul(G(c), ty_add(ty_square(Y(c)), 1.0)))
RULE(asin, ty_mul(G(c), ty_rsqrt(ty_sub(1.0, ty_square(X(c))))))
RULE(acos, ty_neg(ty_mul(G(c), ty_rsqrt(ty_sub(1.0, ty_square(X(c)))))))
RULE(atan, ty_div(G(c), ty_add(ty_square(X(c)), 1.0)))
RULE(sinh, ty_mul(G(c), ty_cosh(X(c))))
RULE(asinh, ty_mul(G(c), ty_rsqrt(ty_add(ty_square(X(c)), 1.0))))
RULE(acosh, ty_mul(G(c), ty_rsqrt(ty_sub(ty_square(X(c)), 1.0))))
RULE(atanh, ty_div(G(c), ty_sub(1.0, ty_square(X(c)))))
RULE(cosh, ty_mul(G(c), ty_sinh(X(c))))
RULE(tanh, ty_vjp_plain() ? ty_tanh_backward(G(c), Y(c)) : ty_mul(G(c), ty_sub(1.0, ty_square(Y(c)))))
RULE(erf, ty_mul(G(c), ty_mul(ty_exp(ty_neg(ty_square(X(c)))), M_2_SQRTPI)))
RULE(erfc, ty_mul(G(c), ty_mul(ty_exp(ty_neg(ty_square(X(c)))), -M_2_SQRTPI)))
RULE(sigmoid, ty_vjp_plain() ? ty_sigmoid_backward(G(c), Y(c)) : ty_mul(G(c), ty_mul(Y(c), ty_sub(1.0, Y(c)))))
RULE(log_sigmoid, ty_vjp_plain() ? ty_log_sigmoid_backward(G(c), X(c)) : ty_mul(G(c), ty_sigmoid(ty_neg(X(c)))))
RULE(relu, ty_vjp_plain() ? ty_relu_backward(G(c), Y(c)) : ty_where(ty_gt(Y(c), 0), G(c), 0.0))

bool vjp_leaky_relu(ty_vjp *c) {
  const double slope = TY_ARGS(leaky_relu, c)->slope.f;
  if (ty_vjp_plain()) c->dx[0] = ty_leaky_relu_backward(G(c), X(c), slope);
  else c->dx[0] = ty_mul(G(c), ty_where(ty_gt(X(c), 0), ty_ones_like(X(c), TY_DTYPE_DEFAULT), slope));
  return true;
}

bool vjp_elu(ty_vjp *c) {
  const double alpha = TY_ARGS(elu, c)->alpha.f;
  if (ty_vjp_plain()) c->dx[0] = ty_elu_backward(G(c), X(c), alpha);
  else c->dx[0] = ty_mul(G(c), ty_where(ty_gt(X(c), 0), 1.0, ty_mul(ty_exp(ty_minimum(X(c), 0.0)), alpha)));
  return true;
}

bool vjp_softplus(ty_vjp *c) {
  const double beta = TY_ARGS(softplus, c)->beta.f, threshold = TY_ARGS(softplus, c)->threshold.f;
  if (ty_vjp_plain()) {
    c->dx[0] = ty_softplus_backward(G(c), X(c), beta, threshold);
  } else {
    ty_tensor *t = ty_mul(X(c), beta);
    c->dx[0] = ty_mul(G(c), ty_where(ty_gt(t, threshold), 1.0, ty_sigmoid(t)));
  }
  return true;
}

/* s (1 + x (1 - s)), s = sigmoid(x) */
ty_tensor *ty_silu_slope(ty_tensor *x) {
  ty_tensor *s = ty_sigmoid(x);
  return ty_mul(s, ty_add(ty_mul(x, ty_sub(1.0, s)), 1.0));
}

bool vjp_silu(ty_vjp *c) {
  c->dx[0] = ty_vjp_plain() ? ty_silu_backward(G(c), X(c)) : ty_mul(G(c), ty_silu_slope(X(c)));
  return true;
}

/* exact: Phi(x) + x phi(x); tanh form: derivative of 0.5 x (1 + tanh(k (x + 0.044715 x^3))) */
ty_tensor *ty_gelu_slope(ty_tensor *x, bool tanh_form) {
  if (tanh_form) {
    const double k = 0.7978845608028654; /* sqrt(2 / pi) */
    ty_tensor *x2 = ty_square(x);
    ty_tensor *t = ty_tanh(ty_mul(ty_mul(x, k), ty_add(ty_mul(x2, 0.044715), 1.0)));
    ty_tensor *inner = ty_mul(ty_add(ty_mul(x2, 3 * 0.044715), 1.0), k);
    return ty_mul(ty_add(ty_add(t, 1.0), ty_mul(ty_mul(x, ty_sub(1.0, ty_square(t))), inner)), 0.5);
  }
  ty_tensor *cdf = ty_mul(ty_add(ty_erf(ty_mul(x, M_SQRT1_2)), 1.0), 0.5);
  ty_tensor *pdf = ty_mul(ty_exp(ty_mul(ty_square(x), -0.5)), 0.3989422804014327); /* 1 / sqrt(2 pi) */
  return ty_add(cdf, ty_mul(x, pdf));
}

bool vjp_gelu(ty_vjp *c) {
  bool tanh_form = TY_ARGS(gelu, c)->approximate.s[0] == 't';
  ty_tensor *x = X(c);
  if (!ty_vjp_plain()) c->dx[0] = ty_mul(G(c), ty_gelu_slope(x, tanh_form));
  else c->dx[0] = tanh_form ? ty_gelu_tanh_backward(G(c), x) : ty_gelu_backward(G(c), x);
  return true;
}

/* mish' = t + x (1 - t^2) s, t = tanh(softplus(x)), s = sigmoid(x) */
bool vjp_mish(ty_vjp *c) {
  if (ty_vjp_plain()) {
    c->dx[0] = ty_mish_backward(G(c), X(c));
    return true;
  }
  ty_tensor *t = ty_tanh(ty_softplus(X(c), 1, 20)), *s = ty_sigmoid(X(c));
  c->dx[0] = ty_mul(G(c), ty_add(t, ty_mul(ty_mul(X(c), s), ty_sub(1.0, ty_square(t)))));
  return true;
}

static double bound(ty_value v) { return v.kind == TY_NONE ? NAN : ty_number_of(v).f; }

/* The gradient where min <= x <= max, else 0; a bound that is NaN is none. */
static ty_tensor *inside(ty_vjp *c, double min, double max) {
  if (ty_vjp_plain())
    return ty_hardtanh_backward(G(c), X(c), isnan(min) ? -INFINITY : min, isnan(max) ? INFINITY : max);
  ty_tensor *above = isnan(min) ? NULL : ty_ge(X(c), min), *below = isnan(max) ? NULL : ty_le(X(c), max);
  if (above && below) above = ty_logical_and(ty_value_of_tensor(above), ty_value_of_tensor(below));
  return ty_where(above ? above : below, G(c), 0.0);
}

RULE(hardtanh, inside(c, TY_ARGS(hardtanh, c)->min.f, TY_ARGS(hardtanh, c)->max.f))

/* Between tensors: x where it was inside, else the bound that it was cut to. */
static bool between_tensors(ty_vjp *c, ty_value x, ty_value min, ty_value max) {
  bool lower = min.kind == TY_TENSOR || !isnan(bound(min)), upper = max.kind == TY_TENSOR || !isnan(bound(max));
  ty_tensor *below = lower ? ty_lt(x, min) : NULL, *above = upper ? ty_gt(x, max) : NULL;
  ty_tensor *outside = below && above ? ty_logical_or(ty_operand(below), ty_operand(above)) : below ? below : above;
  if (c->need[0]) c->dx[0] = ty_where(outside, 0.0, G(c));
  if (c->need[1]) {
    ty_tensor *to_min = upper ? ty_logical_and(ty_operand(below), ty_operand(ty_lt(min, max))) : below;
    c->dx[1] = ty_where(to_min, G(c), 0.0);
  }
  if (c->need[2]) {
    ty_tensor *to_max = lower ? ty_logical_or(ty_operand(above), ty_operand(ty_le(max, min))) : above;
    c->dx[2] = ty_where(to_max, G(c), 0.0);
  }
  return true;
}

bool vjp_clamp(ty_vjp *c) {
  const ty_clamp_args *a = TY_ARGS(clamp, c);
  if (a->min.kind == TY_TENSOR || a->max.kind == TY_TENSOR) return between_tensors(c, a->x, a->min, a->max);
  c->dx[0] = inside(c, bound(a->min), bound(a->max));
  return true;
}

bool vjp_masked_fill(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = ty_where(c->arg[1].t, 0.0, G(c));
  if (c->need[2]) c->dx[2] = ty_where(c->arg[1].t, G(c), 0.0);
  return true;
}

bool vjp_where(ty_vjp *c) {
  if (c->need[1]) c->dx[1] = ty_where(c->arg[0].t, G(c), 0.0);
  if (c->need[2]) c->dx[2] = ty_where(c->arg[0].t, 0.0, G(c));
  return true;
}

/* ---- three operands ---- */

bool vjp_lerp(ty_vjp *c) {
  const ty_lerp_args *a = TY_ARGS(lerp, c);
  ty_tensor *of_y = c->need[0] || c->need[1] ? ty_mul(G(c), a->weight) : NULL;
  if (c->need[0]) c->dx[0] = ty_sub(G(c), of_y);
  if (c->need[1]) c->dx[1] = of_y;
  if (c->need[2]) c->dx[2] = ty_mul(G(c), ty_sub(a->y.t, a->x.t));
  return true;
}

bool vjp_addcmul(ty_vjp *c) {
  const ty_addcmul_args *a = TY_ARGS(addcmul, c);
  ty_tensor *g = a->value.f == 1 ? G(c) : ty_mul(G(c), a->value.f);
  if (c->need[0]) c->dx[0] = G(c);
  if (c->need[1]) c->dx[1] = ty_mul(g, a->b.t);
  if (c->need[2]) c->dx[2] = ty_mul(g, a->a.t);
  return true;
}

bool vjp_addcdiv(ty_vjp *c) {
  const ty_addcdiv_args *a = TY_ARGS(addcdiv, c);
  ty_tensor *of_a = ty_div(a->value.f == 1 ? G(c) : ty_mul(G(c), a->value.f), a->b.t);
  if (c->need[0]) c->dx[0] = G(c);
  if (c->need[1]) c->dx[1] = of_a;
  if (c->need[2]) c->dx[2] = ty_neg(ty_mul(of_a, ty_div(a->a.t, a->b.t)));
  return true;
}

/* ---- two operands; numbers are constants ---- */

/* The gradient of what alpha, where it was given, has multiplied. */
static ty_tensor *scaled(ty_vjp *c) { return c->arg[2].kind == TY_NONE ? G(c) : ty_mul(G(c), c->arg[2]); }

bool vjp_add(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = G(c);
  if (c->need[1]) c->dx[1] = scaled(c);
  return true;
}

bool vjp_sub(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = G(c);
  if (c->need[1]) c->dx[1] = ty_neg(scaled(c));
  return true;
}

bool vjp_mul(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = ty_mul(G(c), c->arg[1]);
  if (c->need[1]) c->dx[1] = ty_mul(G(c), c->arg[0]);
  return true;
}

bool vjp_div(ty_vjp *c) {
  ty_tensor *gx = ty_div(G(c), c->arg[1]);
  if (c->need[0]) c->dx[0] = gx;
  if (c->need[1]) c->dx[1] = ty_neg(ty_mul(gx, ty_div(c->arg[0], c->arg[1])));
  return true;
}

static double number(ty_value v) { return v.kind == TY_INT ? (double)v.i : v.f; }

/* d/dx = y x^(y-1), 0 where y = 0; d/dy = x^y log x, 0 where x = 0 and y >= 0 */
bool vjp_pow(ty_vjp *c) {
  ty_value x = c->arg[0], y = c->arg[1];
  if (c->need[0]) {
    if (y.kind == TY_TENSOR) {
      ty_tensor *zero = ty_eq(y, 0);
      c->dx[0] = ty_where(zero, 0.0, ty_mul(G(c), ty_mul(y, ty_pow(x, ty_sub(y, 1.0)))));
    } else {
      double n = number(y);
      c->dx[0] = n == 0 ? ty_zeros_like(G(c), TY_DTYPE_DEFAULT) : ty_mul(G(c), ty_mul(ty_pow(x, n - 1), n));
    }
  }
  if (c->need[1]) {
    if (x.kind == TY_TENSOR) {
      ty_tensor *zero = ty_logical_and(ty_value_of_tensor(ty_eq(x, 0)), ty_value_of_tensor(ty_ge(y, 0)));
      ty_tensor *safe = ty_where(zero, 1.0, x);
      c->dx[1] = ty_where(zero, 0.0, ty_mul(G(c), ty_mul(Y(c), ty_log(safe))));
    } else {
      double base = number(x);
      c->dx[1] = base == 0 ? ty_zeros_like(G(c), TY_DTYPE_DEFAULT) : ty_mul(G(c), ty_mul(Y(c), log(base)));
    }
  }
  return true;
}

/* The larger (smaller) operand gets the gradient; half each at ties. */
static bool share(ty_vjp *c, bool larger) {
  ty_value x = c->arg[0], y = c->arg[1];
  ty_tensor *half = ty_mul(G(c), 0.5), *tie = ty_eq(x, y);
  ty_tensor *first = larger ? ty_gt(x, y) : ty_lt(x, y), *second = larger ? ty_lt(x, y) : ty_gt(x, y);
  if (c->need[0]) c->dx[0] = ty_where(first, G(c), ty_where(tie, half, 0.0));
  if (c->need[1]) c->dx[1] = ty_where(second, G(c), ty_where(tie, half, 0.0));
  return true;
}

bool vjp_maximum(ty_vjp *c) { return share(c, true); }
bool vjp_minimum(ty_vjp *c) { return share(c, false); }

static ty_value magnitude(ty_value v) {
  return v.kind == TY_TENSOR ? ty_value_of_tensor(ty_abs(v.t)) : ty_value_of_float(fabs(number(v)));
}

/* (y, -x) / (x^2 + y^2), by coordinates relative to the larger, whose squares are in range; 0 at the origin. */
bool vjp_atan2(ty_vjp *c) {
  ty_value x = c->arg[0], y = c->arg[1];
  ty_tensor *reach = ty_detach(ty_maximum(magnitude(x), magnitude(y))), *origin = ty_eq(reach, 0);
  ty_tensor *plain = ty_logical_or(ty_operand(origin), ty_operand(ty_isinf(reach))), *u, *v, *scaled;
  reach = ty_where(plain, 1.0, reach);
  u = ty_div(x, reach), v = ty_div(y, reach);
  scaled = ty_div(ty_div(G(c), ty_where(origin, 1.0, ty_add(ty_square(u), ty_square(v)))), reach);
  if (c->need[0]) c->dx[0] = ty_where(origin, 0.0, ty_mul(scaled, v));
  if (c->need[1]) c->dx[1] = ty_where(origin, 0.0, ty_neg(ty_mul(scaled, u)));
  return true;
}

/* the shares of both in the sum */
bool vjp_logaddexp(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = ty_mul(G(c), ty_exp(ty_sub(c->arg[0], Y(c))));
  if (c->need[1]) c->dx[1] = ty_mul(G(c), ty_exp(ty_sub(c->arg[1], Y(c))));
  return true;
}

bool vjp_logaddexp2(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = ty_mul(G(c), ty_exp(ty_mul(ty_sub(c->arg[0], Y(c)), M_LN2)));
  if (c->need[1]) c->dx[1] = ty_mul(G(c), ty_exp(ty_mul(ty_sub(c->arg[1], Y(c)), M_LN2)));
  return true;
}

/* x / y; 0 at the origin */
bool vjp_hypot(ty_vjp *c) {
  ty_tensor *zero = ty_eq(Y(c), 0), *length = ty_where(zero, 1.0, Y(c));
  for (int i = 0; i < 2; i++)
    if (c->need[i]) c->dx[i] = ty_mul(G(c), ty_div(c->arg[i], length));
  return true;
}

/* 1 or -1 as the sign has changed or not; 0 at 0 */
bool vjp_copysign(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = ty_mul(G(c), ty_detach(ty_mul(ty_sign(Y(c)), ty_sign(X(c)))));
  if (c->need[1]) c->dx[1] = ty_mul(G(c), 0.0);
  return true;
}

/* x - y trunc(x / y): constant quotient between the jumps */
bool vjp_fmod(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = G(c);
  if (c->need[1]) c->dx[1] = ty_neg(ty_mul(G(c), ty_trunc(ty_div(c->arg[0], c->arg[1]))));
  return true;
}

bool vjp_remainder(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = G(c);
  if (c->need[1]) c->dx[1] = ty_neg(ty_mul(G(c), ty_floor(ty_div(c->arg[0], c->arg[1]))));
  return true;
}
