/* Elementwise ops: shape rules by class, backward rules in elementwise_backward.c. The expressions are in
 * kernels/elementwise.def. */
#include <string.h>

#include "../autograd/autograd.h"

static const ty_p_scalars *scalars(ty_p_scalars *p, double a, double b) {
  *p = (ty_p_scalars){ a, b };
  return p;
}

/* The number parameters of a row, in order. */
static const void *number_params(ty_call *c, ty_p_scalars *p) {
  double v[2] = { 0, 0 };
  int n = 0;
  for (int i = 1; i < c->op->nargs && n < 2; i++)
    if (c->op->args[i].kind == TY_ARG_FLOAT) v[n++] = c->arg[i].f;
  return n ? scalars(p, v[0], v[1]) : NULL;
}

bool fwd_unary(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  ty_p_scalars p;
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, number_params(c, &p));
}

bool fwd_unary_float(ty_call *c) { return fwd_unary(c); }

bool fwd_test(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  return ty_out_like(c, 0, x, TY_BOOL) && ty_launch(c, &x, 1, NULL);
}

bool fwd_gelu(ty_call *c) {
  ty_tensor *x = c->arg[0].t;
  int form = ty_check_choice(c, 1, (const char *const[]){ "none", "tanh", NULL });
  if (form < 0) return false;
  ty_p_scalars p;
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, scalars(&p, form, 0));
}

/* Fused gradients, for when no second derivative is wanted. */
bool fwd_activation_backward(ty_call *c) {
  ty_tensor *in[] = { c->arg[0].t, c->arg[1].t };
  ty_p_scalars p;
  if (!ty_same_shape(&in[0]->v, &in[1]->v) || ty_dtype_of(in[0]) != ty_dtype_of(in[1]))
    return ty_op_fail(c, TY_EINVAL, "g: expected the shape and dtype of x %s, got %s", ty_describe(in[1]),
                      ty_describe(in[0]));
  return ty_out_like(c, 0, in[1], ty_dtype_of(in[1])) && ty_launch(c, in, 2, number_params(c, &p));
}

/* ---- clamp ---- */

static bool is_bound(const ty_value *v) { return v->kind == TY_INT || (v->kind == TY_FLOAT && !isnan(v->f)); }

static ty_number bound_or(const ty_value *v, int64_t none) {
  return is_bound(v) ? ty_number_of(*v) : (ty_number){ NAN, none };
}

/* Integers of this dtype can be what the bound asks for. */
static bool check_reachable(ty_call *c, int arg, ty_dtype dtype) {
  static const int64_t low[] = { [TY_U8] = 0, [TY_I8] = INT8_MIN, [TY_I16] = INT16_MIN, [TY_I32] = INT32_MIN },
                       high[] = { [TY_U8] = UINT8_MAX, [TY_I8] = INT8_MAX, [TY_I16] = INT16_MAX, [TY_I32] = INT32_MAX };
  const ty_value *v = &c->arg[arg];
  if (dtype >= TY_I64 || v->kind != TY_INT || (arg == 1 ? v->i <= high[dtype] : v->i >= low[dtype])) return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected a number that x %s can reach, got %lld", c->op->args[arg].name,
                    ty_describe(c->arg[0].t), (long long)v->i);
}

/* ---- two operands, tensors or numbers ---- */

static int category(ty_dtype d) { return ty_is_float(d) ? 2 : d == TY_BOOL ? 0 : 1; }

/* Numbers and 0-d tensors do not widen a dtype of their own class or a higher one. */
static ty_dtype join(ty_dtype t, int number_category) {
  if (number_category <= category(t)) return t;
  return number_category == 2 ? TY_F32 : TY_I64;
}

static ty_dtype compute_dtype(const ty_value *x, const ty_value *y) {
  if (x->kind == TY_TENSOR && y->kind == TY_TENSOR) {
    ty_dtype a = ty_dtype_of(x->t), b = ty_dtype_of(y->t);
    if (a == b) return a;
    if (!x->t->v.ndim != !y->t->v.ndim) { /* exactly one is 0-d */
      ty_dtype big = x->t->v.ndim ? a : b, small = x->t->v.ndim ? b : a;
      return category(small) <= category(big) ? big : small;
    }
    return ty_promote(a, b);
  }
  const ty_tensor *t = x->kind == TY_TENSOR ? x->t : y->t;
  const ty_value *number = x->kind == TY_TENSOR ? y : x;
  return join(ty_dtype_of(t), number->kind == TY_INT ? 1 : 2);
}

typedef struct operand {
  ty_view view;
  int64_t bits;
} operand;

/* Brings operand `v` to a view of the result's shape in the compute dtype. */
static bool set_operand(operand *o, const ty_value *v, ty_dtype dtype, int ndim, const int64_t *size) {
  if (v->kind == TY_TENSOR) {
    ty_tensor *t = ty_to(v->t, dtype);
    if (!t) return false;
    ty_view_expand(&o->view, &t->v, ndim, size);
    return true;
  }
  ty_store_scalar(&o->bits, dtype, *v);
  ty_view number = { .data = &o->bits, .dtype = (int16_t)dtype, .number = true };
  ty_view_expand(&o->view, &number, ndim, size);
  return true;
}

static bool apply(ty_call *c, int first, ty_dtype dtype, ty_dtype result) {
  const ty_value *x = &c->arg[first], *y = &c->arg[first + 1];
  bool tx = x->kind == TY_TENSOR, tyy = y->kind == TY_TENSOR;
  const ty_tensor *t = tx ? x->t : y->t;
  int device = ty_device_of(t);

  /* The common case first: nothing to convert, nothing to broadcast. */
  if (tx && tyy && ty_dtype_of(x->t) == dtype && ty_dtype_of(y->t) == dtype && ty_same_shape(&x->t->v, &y->t->v)) {
    if (!ty_out(c, 0, device, result, x->t->v.ndim, x->t->v.size)) return false;
    const ty_view *out = &c->out[0]->v, *in[] = { &x->t->v, &y->t->v };
    return ty_run_kernel((ty_op_id)c->op->id, device, &out, 1, in, 2, NULL);
  }
  int ndim = t->v.ndim;
  int64_t size[TY_MAX_DIMS];
  if (tx && tyy) {
    if (!ty_broadcast(c->op, &x->t->v, &y->t->v, &ndim, size)) return false;
  } else {
    memcpy(size, t->v.size, sizeof *size * (size_t)ndim);
  }
  operand a, b;
  if (!set_operand(&a, x, dtype, ndim, size) || !set_operand(&b, y, dtype, ndim, size)) return false;
  if (!ty_out(c, 0, device, result, ndim, size)) return false;
  const ty_view *out = &c->out[0]->v, *in[] = { &a.view, &b.view };
  return ty_run_kernel((ty_op_id)c->op->id, device, &out, 1, in, 2, NULL);
}

bool fwd_binary(ty_call *c) {
  ty_dtype d = compute_dtype(&c->arg[0], &c->arg[1]);
  if ((c->op->flags & INTS) && ty_is_float(d))
    return ty_op_fail(c, TY_EINVAL, "%s: expected integers, got %s", c->op->args[1].name,
                      c->arg[1].kind == TY_TENSOR ? ty_describe(c->arg[1].t) : "a fractional number");
  if ((c->op->flags & NUMBERS) && d == TY_BOOL) d = TY_I64; /* bool with an integer number */
  return apply(c, 0, d, d);
}

/* add and sub, of which alpha may multiply the second operand. */
bool fwd_scaled_sum(ty_call *c) {
  ty_value y = c->arg[1], alpha = c->arg[2];
  if (alpha.kind == TY_NONE) return fwd_binary(c);
  if (alpha.kind == TY_FLOAT && !ty_is_float(compute_dtype(&c->arg[0], &y)))
    return ty_op_fail(c, TY_EINVAL, "alpha: expected an integer for integers, got %g", alpha.f);
  if (y.kind == TY_TENSOR) {
    ty_tensor *scaled = ty_mul(y, alpha);
    if (!scaled) return false;
    y = ty_value_of_tensor(scaled);
  } else if (y.kind == TY_INT && alpha.kind == TY_INT) {
    y = ty_value_of_int((int64_t)((uint64_t)y.i * (uint64_t)alpha.i));
  } else {
    y = ty_value_of_float(ty_number_of(y).f * ty_number_of(alpha).f);
  }
  ty_call inner = *c;
  ty_value arg[] = { c->arg[0], y, TY_NO_NUMBER };
  inner.arg = arg;
  return fwd_binary(&inner);
}

bool fwd_shift(ty_call *c) {
  if (compute_dtype(&c->arg[0], &c->arg[1]) == TY_BOOL)
    return ty_op_fail(c, TY_EINVAL, "x: expected integers, got bool");
  return fwd_binary(c);
}

bool fwd_signbit(ty_call *c) {
  ty_tensor *x = TY_ARGS(signbit, c)->x.t;
  return ty_out_set(c, 0, ty_lt(ty_is_float(ty_dtype_of(x)) ? ty_copysign(ty_operand(1.0), ty_operand(x)) : x, 0));
}

bool fwd_frac(ty_call *c) {
  ty_tensor *x = TY_ARGS(frac, c)->x.t;
  return ty_out_set(c, 0, ty_sub(x, ty_trunc(x)));
}

bool fwd_deg2rad(ty_call *c) { return ty_out_set(c, 0, ty_mul(TY_ARGS(deg2rad, c)->x.t, M_PI / 180)); }
bool fwd_rad2deg(ty_call *c) { return ty_out_set(c, 0, ty_mul(TY_ARGS(rad2deg, c)->x.t, 180 / M_PI)); }

bool fwd_pow(ty_call *c) {
  const ty_value *x = &c->arg[0], *y = &c->arg[1];
  if (y->kind == TY_INT && y->i < 0 && !ty_is_float(compute_dtype(x, y)))
    return ty_op_fail(
        c, TY_EINVAL,
        "y: expected an exponent of at least 0 for the integers x %s, got %lld; the exponent %lld.0 gives "
        "fractions",
        ty_describe(x->t), (long long)y->i, (long long)y->i);
  return fwd_binary(c);
}

bool fwd_binary_float(ty_call *c) {
  ty_dtype d = compute_dtype(&c->arg[0], &c->arg[1]);
  if (!ty_is_float(d)) d = TY_F32;
  return apply(c, 0, d, d);
}

bool fwd_compare(ty_call *c) { return apply(c, 0, compute_dtype(&c->arg[0], &c->arg[1]), TY_BOOL); }

/* Widens a shape, kept as a view without data and as its sizes, to what it and a tensor among the operands give. */
static bool widen(ty_call *c, ty_view *shape, int *n, int64_t *size, const ty_value *v) {
  if (v->kind != TY_TENSOR || ty_same_shape(shape, &v->t->v)) return true;
  if (!ty_broadcast(c->op, shape, &v->t->v, n, size)) return false;
  ty_view_set_contiguous(shape, *n, size);
  return true;
}

bool fwd_where(ty_call *c) {
  const ty_where_args *a = TY_ARGS(where, c);
  ty_tensor *condition = a->condition.t;
  int n = condition->v.ndim;
  int64_t size[TY_MAX_DIMS];
  memcpy(size, condition->v.size, sizeof *size * (size_t)n);
  ty_view shape = condition->v;
  for (int i = 1; i <= 2; i++)
    if (!widen(c, &shape, &n, size, &c->arg[i])) return false;
  bool numbers = a->x.kind != TY_TENSOR && a->y.kind != TY_TENSOR;
  ty_dtype d = !numbers ? compute_dtype(&a->x, &a->y) : a->x.kind == TY_INT && a->y.kind == TY_INT ? TY_I64 : TY_F32;
  operand x, y;
  if (!set_operand(&x, &a->x, d, n, size) || !set_operand(&y, &a->y, d, n, size)) return false;
  if (!ty_out(c, 0, ty_device_of(condition), d, n, size)) return false;
  ty_view cond;
  ty_view_expand(&cond, &condition->v, n, size);
  const ty_view *out = &c->out[0]->v, *in[] = { &cond, &x.view, &y.view };
  return ty_run_kernel(TY_OP_where, ty_device_of(condition), &out, 1, in, 3, NULL);
}

bool fwd_masked_fill(ty_call *c) {
  const ty_masked_fill_args *a = TY_ARGS(masked_fill, c);
  ty_tensor *x = a->x.t;
  ty_value value = a->value;
  if (value.kind == TY_TENSOR) {
    if (value.t->v.ndim)
      return ty_op_fail(c, TY_EINVAL, "value: expected a number or a tensor without dimensions, got %s",
                        ty_describe(value.t));
  } else if (!ty_is_float(ty_dtype_of(x))) {
    value = ty_value_of_int(ty_number_of(value).i);
  }
  ty_tensor *r = ty_where(a->mask.t, value, x);
  if (!r) return false;
  if (!ty_same_shape(&r->v, &x->v))
    return ty_op_fail(c, TY_EINVAL, "mask: %s does not broadcast to x %s", ty_describe(a->mask.t), ty_describe(x));
  return ty_out_set(c, 0, ty_to(r, ty_dtype_of(x)));
}

/* ---- three operands ---- */

/* The result of an op of three operands, of which the third may be a number; all have x's dtype, and x is a tensor. */
static bool apply_three(ty_call *c, ty_op_id id, const ty_value *value, const void *params) {
  const ty_tensor *x = value[0].t;
  int n = x->v.ndim;
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof *size * (size_t)n);
  ty_view shape = x->v;
  for (int i = 1; i < 3; i++)
    if (!widen(c, &shape, &n, size, &value[i])) return false;
  operand o[3];
  for (int i = 0; i < 3; i++)
    if (!set_operand(&o[i], &value[i], ty_dtype_of(x), n, size)) return false;
  if (!ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), n, size)) return false;
  const ty_view *out = &c->out[0]->v, *in[] = { &o[0].view, &o[1].view, &o[2].view };
  return ty_run_kernel(id, ty_device_of(x), &out, 1, in, 3, params);
}

/* Whether three operands are of one dtype, so that nothing is to be promoted. */
static bool of_one_dtype(const ty_value *value) {
  const ty_dtype dtype = ty_dtype_of(value[0].t);
  for (int i = 1; i < 3; i++)
    if (value[i].kind == TY_TENSOR && ty_dtype_of(value[i].t) != dtype) return false;
  return true;
}

/* Bounds of which one at least is a tensor. */
static bool clamp_between_tensors(ty_call *c, const ty_clamp_args *a) {
  ty_tensor *r = a->x.t;
  if (a->min.kind == TY_TENSOR && a->max.kind == TY_TENSOR && ty_is_float(ty_dtype_of(r)) && of_one_dtype(c->arg))
    return apply_three(c, TY_OP_clamp_between, c->arg, NULL);
  if (a->min.kind == TY_TENSOR || is_bound(&a->min)) r = ty_maximum(ty_value_of_tensor(r), a->min);
  if (a->max.kind == TY_TENSOR || is_bound(&a->max)) r = ty_minimum(ty_value_of_tensor(r), a->max);
  return ty_out_set(c, 0, r);
}

bool fwd_clamp(ty_call *c) {
  const ty_clamp_args *a = TY_ARGS(clamp, c);
  ty_tensor *x = a->x.t;
  if (a->min.kind == TY_TENSOR || a->max.kind == TY_TENSOR) return clamp_between_tensors(c, a);
  bool min = is_bound(&a->min), max = is_bound(&a->max);
  if (!min && !max) return ty_op_fail(c, TY_EINVAL, "min: expected min, max or both, got neither");
  bool fractional = (min && a->min.kind == TY_FLOAT) || (max && a->max.kind == TY_FLOAT);
  if (fractional && !ty_is_float(ty_dtype_of(x))) x = ty_to(x, TY_F32); /* as other ops with a fractional number */
  if (!x || !check_reachable(c, 1, ty_dtype_of(x)) || !check_reachable(c, 2, ty_dtype_of(x))) return false;
  ty_p_numbers p = { bound_or(&a->min, INT64_MIN), bound_or(&a->max, INT64_MAX) };
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, &p);
}

bool fwd_clamp_between(ty_call *c) { return apply_three(c, TY_OP_clamp_between, c->arg, NULL); }

bool fwd_lerp(ty_call *c) {
  const ty_lerp_args *a = TY_ARGS(lerp, c);
  if (of_one_dtype(c->arg)) return apply_three(c, TY_OP_lerp, c->arg, NULL);
  return ty_out_set(c, 0, ty_add(a->x.t, ty_mul(ty_sub(a->y.t, a->x.t), a->weight)));
}

bool fwd_addcmul(ty_call *c) {
  const ty_addcmul_args *a = TY_ARGS(addcmul, c);
  const ty_p_scalars p = { a->value.f, 0 };
  if (of_one_dtype(c->arg)) return apply_three(c, TY_OP_addcmul, c->arg, &p);
  return ty_out_set(c, 0, ty_add(a->x.t, ty_mul(ty_mul(a->a.t, a->b.t), a->value.f)));
}

bool fwd_addcdiv(ty_call *c) {
  const ty_addcdiv_args *a = TY_ARGS(addcdiv, c);
  const ty_p_scalars p = { a->value.f, 0 };
  if (of_one_dtype(c->arg)) return apply_three(c, TY_OP_addcdiv, c->arg, &p);
  return ty_out_set(c, 0, ty_add(a->x.t, ty_mul(ty_div(a->a.t, a->b.t), a->value.f)));
}
