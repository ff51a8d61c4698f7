/* Complex numbers as pairs, in a last dimension of 2: made of parts, of angles, their products and parts. */
#include <string.h>

#include "../autograd/autograd.h"

static bool check_pairs(ty_call *c, int arg) {
  const ty_tensor *x = c->arg[arg].t;
  if (x->v.ndim >= 1 && x->v.size[x->v.ndim - 1] == 2) return true;
  return ty_op_fail(c, TY_EINVAL,
                    "%s: expected complex numbers, [..., 2] with the real and imaginary parts last, got %s",
                    c->op->args[arg].name, ty_describe(x));
}

static ty_tensor *part_of(ty_tensor *x, int part) { return ty_select(x, -1, part); }

static ty_tensor *pairs_of(ty_tensor *re, ty_tensor *im) { return re && im ? ty_stack(TY_LIST(re, im), -1) : NULL; }

/* re + i im, which broadcast. */
bool fwd_complex(ty_call *c) {
  const ty_complex_args *a = TY_ARGS(complex, c);
  ty_tensor *re = a->re.t, *im = a->im.t;
  int ndim = re->v.ndim;
  int64_t size[TY_MAX_DIMS];
  if (!im) im = ty_zeros_like(re, TY_DTYPE_DEFAULT);
  if (!im || !ty_check_floats(c, 1) || !ty_broadcast(c->op, &re->v, &im->v, &ndim, size)) return false;
  if (ndim == TY_MAX_DIMS)
    return ty_op_fail(c, TY_EINVAL, "re: expected at most %d dimensions, as the result has one more, got %s",
                      TY_MAX_DIMS - 1, ty_describe(re));
  const ty_dtype dtype = ty_promote(ty_dtype_of(re), ty_dtype_of(im));
  re = ty_expand(ty_to(re, dtype), (ty_ints){ size, ndim });
  im = ty_expand(ty_to(im, dtype), (ty_ints){ size, ndim });
  return ty_out_set(c, 0, pairs_of(re, im));
}

/* Whether the elements of v in order, again and again, are those of v broadcast to the shape. */
static bool repeats(const ty_view *v, int ndim, const int64_t *size) {
  bool ones = false;
  for (int i = 1; i <= v->ndim; i++) {
    const int64_t n = v->size[v->ndim - i];
    ones = ones || n != size[ndim - i];
    if (ones && n != 1) return false;
  }
  return true;
}

bool fwd_complex_mul(ty_call *c) {
  const ty_complex_mul_args *a = TY_ARGS(complex_mul, c);
  ty_tensor *in[] = { a->a.t, a->b.t };
  int ndim;
  int64_t size[TY_MAX_DIMS];
  if (!ty_check_floats(c, 1) || !check_pairs(c, 0) || !check_pairs(c, 1) ||
      !ty_broadcast(c->op, &in[0]->v, &in[1]->v, &ndim, size))
    return false;
  const ty_dtype dtype = ty_promote(ty_dtype_of(in[0]), ty_dtype_of(in[1]));
  for (int i = 0; i < 2; i++) {
    if (!(in[i] = ty_to(in[i], dtype))) return false;
    if (!repeats(&in[i]->v, ndim, size) && !(in[i] = ty_expand(in[i], (ty_ints){ size, ndim }))) return false;
  }
  return ty_out(c, 0, ty_device_of(in[0]), dtype, ndim, size) && ty_launch(c, in, 2, &(ty_p_dim){ .flag = a->conj.i });
}

bool vjp_complex_mul(ty_vjp *c) {
  const ty_complex_mul_args *a = TY_ARGS(complex_mul, c);
  ty_tensor *g = c->g[0];
  if (c->need[0]) c->dx[0] = ty_complex_mul(g, a->b.t, !a->conj.i);
  if (c->need[1]) c->dx[1] = a->conj.i ? ty_complex_mul(a->a.t, g, true) : ty_complex_mul(g, a->a.t, true);
  return true;
}

bool fwd_complex_conj(ty_call *c) {
  ty_tensor *x = TY_ARGS(complex_conj, c)->x.t;
  return check_pairs(c, 0) && ty_out_set(c, 0, pairs_of(part_of(x, 0), ty_neg(part_of(x, 1))));
}

bool fwd_complex_abs(ty_call *c) {
  ty_tensor *x = TY_ARGS(complex_abs, c)->x.t;
  return check_pairs(c, 0) && ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), x->v.ndim - 1, x->v.size) &&
         ty_launch(c, &x, 1, NULL);
}

/* x / |x|, and 0 where there is no direction. */
bool vjp_complex_abs(ty_vjp *c) {
  ty_tensor *y = c->out[0], *x = TY_ARGS(complex_abs, c)->x.t;
  ty_tensor *none = ty_eq(y, 0), *safe = none ? ty_masked_fill(y, none, 1.0) : NULL;
  c->dx[0] = ty_mul(x, ty_unsqueeze(ty_div(c->g[0], safe), -1));
  return true;
}

bool fwd_complex_angle(ty_call *c) {
  ty_tensor *x = TY_ARGS(complex_angle, c)->x.t;
  return check_pairs(c, 0) && ty_out_set(c, 0, ty_atan2(ty_operand(part_of(x, 1)), ty_operand(part_of(x, 0))));
}

bool fwd_polar(ty_call *c) {
  const ty_polar_args *a = TY_ARGS(polar, c);
  int ndim;
  int64_t size[TY_MAX_DIMS];
  if (!ty_check_floats(c, 1) || !ty_broadcast(c->op, &a->abs.t->v, &a->angle.t->v, &ndim, size)) return false;
  if (ndim == TY_MAX_DIMS)
    return ty_op_fail(c, TY_EINVAL, "abs: expected at most %d dimensions, as the result has one more, got %s",
                      TY_MAX_DIMS - 1, ty_describe(a->abs.t));
  return ty_out_set(c, 0, pairs_of(ty_mul(a->abs.t, ty_cos(a->angle.t)), ty_mul(a->abs.t, ty_sin(a->angle.t))));
}

bool fwd_complex_exp(ty_call *c) {
  ty_tensor *x = TY_ARGS(complex_exp, c)->x.t;
  if (!check_pairs(c, 0)) return false;
  ty_tensor *size = ty_exp(part_of(x, 0)), *angle = part_of(x, 1);
  return ty_out_set(c, 0, pairs_of(ty_mul(size, ty_cos(angle)), ty_mul(size, ty_sin(angle))));
}
