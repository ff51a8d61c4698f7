/* Reductions over any set of dimensions. The kernel gets the input with the reduced dimensions moved to the end. */
#include <string.h>

#include "../autograd/autograd.h"

/* ---- shape rule ---- */

/* The dims argument (position 1 or after a number) as a mask over x. */
static bool check_mask(ty_call *c, int arg, uint32_t *mask) { return ty_check_dims(c, arg, c->arg[0].t->v.ndim, mask); }

static int reduced_size(const ty_view *v, uint32_t mask, bool keepdim, int64_t *size) {
  int n = 0;
  for (int d = 0; d < v->ndim; d++) {
    if (!(mask >> d & 1)) size[n++] = v->size[d];
    else if (keepdim) size[n++] = 1;
  }
  return n;
}

static void reduced_last(ty_view *out, const ty_view *v, uint32_t mask) {
  *out = *v;
  int n = 0;
  for (int reduced = 0; reduced < 2; reduced++) {
    for (int d = 0; d < v->ndim; d++) {
      if ((int)(mask >> d & 1) != reduced) continue;
      out->size[n] = v->size[d];
      out->stride[n++] = v->stride[d];
    }
  }
  ty_view_update(out);
}

static bool reduce_as(ty_call *c, uint32_t mask, bool keepdim, ty_dtype dtype, double a) {
  ty_tensor *x = c->arg[0].t;
  int64_t size[TY_MAX_DIMS];
  int n = reduced_size(&x->v, mask, keepdim, size);
  if (!ty_out(c, 0, ty_device_of(x), dtype, n, size)) return false;
  ty_view in;
  reduced_last(&in, &x->v, mask);
  ty_p_reduce p = { __builtin_popcount(mask), a };
  const ty_view *out = &c->out[0]->v, *ins[] = { &in };
  return ty_run_kernel((ty_op_id)c->op->id, ty_device_of(x), &out, 1, ins, 1, &p);
}

static bool reduce(ty_call *c, ty_dtype dtype) {
  uint32_t mask;
  return check_mask(c, 1, &mask) && reduce_as(c, mask, c->arg[2].i, dtype, 0);
}

bool fwd_sum(ty_call *c) {
  const ty_sum_args *a = TY_ARGS(sum, c);
  ty_tensor *x = a->x.t;
  ty_dtype d = a->dtype.i != TY_DTYPE_DEFAULT ? (ty_dtype)a->dtype.i
               : ty_is_float(ty_dtype_of(x))  ? ty_dtype_of(x)
                                              : TY_I64;
  bool native = d == TY_I64 ? !ty_is_float(ty_dtype_of(x)) : d == ty_dtype_of(x);
  if (!native) { /* another dtype asked for: convert first, so that nothing overflows on the way */
    uint32_t mask;
    if (!check_mask(c, 1, &mask)) return false;
    ty_tensor *y = ty_sum(ty_to(x, d), a->dims.is, a->keepdim.i, TY_DTYPE_DEFAULT);
    return ty_out_set(c, 0, ty_to(y, d));
  }
  return reduce(c, d);
}

bool fwd_mean(ty_call *c) { return reduce(c, ty_dtype_of(c->arg[0].t)); }
bool fwd_prod(ty_call *c) {
  return reduce(c, ty_is_float(ty_dtype_of(c->arg[0].t)) ? ty_dtype_of(c->arg[0].t) : TY_I64);
}
bool fwd_logsumexp(ty_call *c) { return reduce(c, ty_dtype_of(c->arg[0].t)); }
bool fwd_any(ty_call *c) { return reduce(c, TY_BOOL); }
bool fwd_all(ty_call *c) { return reduce(c, TY_BOOL); }

bool fwd_var(ty_call *c) {
  const ty_var_args *a = TY_ARGS(var, c);
  uint32_t mask;
  return check_mask(c, 1, &mask) && reduce_as(c, mask, a->keepdim.i, ty_dtype_of(a->x.t), a->correction.f);
}

bool fwd_std(ty_call *c) { return fwd_var(c); }

/* Ops that need at least one element to choose from. */
static bool choose(ty_call *c, ty_dtype dtype) {
  ty_tensor *x = c->arg[0].t;
  uint32_t mask;
  if (!check_mask(c, 1, &mask)) return false;
  for (int d = 0; d < x->v.ndim; d++)
    if ((mask >> d & 1) && x->v.size[d] == 0)
      return ty_op_fail(c, TY_EINVAL, "dims: nothing to choose from in dimension %d of x %s", d, ty_describe(x));
  return reduce_as(c, mask, c->arg[2].i, dtype, 0);
}

bool fwd_max(ty_call *c) { return choose(c, ty_dtype_of(c->arg[0].t)); }
bool fwd_min(ty_call *c) { return choose(c, ty_dtype_of(c->arg[0].t)); }
bool fwd_argmax(ty_call *c) { return choose(c, TY_I64); }
bool fwd_argmin(ty_call *c) { return choose(c, TY_I64); }

/* What halves are computed in where roundings or the range between the steps would show. */
static ty_tensor *widened(ty_tensor *x) { return x && ty_is_half(ty_dtype_of(x)) ? ty_to(x, TY_F32) : x; }

/* (sum(x^p))^(1/p) for x >= 0, which is taken relative to the element that counts most: powers leave the range soon. */
static ty_tensor *power_norm(ty_tensor *x, double p, ty_ints dims, bool keep) {
  if (!x || x->v.count == 0) return ty_pow(ty_sum(x, dims, keep, TY_DTYPE_DEFAULT), 1 / p);
  ty_tensor *top = p > 0 ? ty_max(x, dims, true) : ty_min(x, dims, true);
  ty_tensor *usable = ty_logical_and(ty_operand(ty_gt(top, 0)), ty_operand(ty_isfinite(top)));
  top = ty_where(usable, top, 1.0);
  ty_tensor *y = ty_mul(ty_pow(ty_sum(ty_pow(ty_div(x, top), p), dims, true, TY_DTYPE_DEFAULT), 1 / p), top);
  return keep ? y : ty_squeeze(y, dims);
}

bool fwd_norm(ty_call *c) {
  const ty_norm_args *a = TY_ARGS(norm, c);
  ty_ints dims = a->dims.is;
  bool keep = a->keepdim.i;
  ty_tensor *x = a->x.t, *y;
  double p = a->p.f;
  uint32_t mask;
  if (!check_mask(c, 2, &mask)) return false;
  if (isnan(p)) return ty_op_fail(c, TY_EINVAL, "p: expected a number, got NaN");
  if (p == 2) return reduce_as(c, mask, keep, ty_dtype_of(x), 0);
  if (p == 1) y = ty_sum(ty_abs(x), dims, keep, TY_DTYPE_DEFAULT);
  else if (p == INFINITY) y = ty_max(ty_abs(x), dims, keep);
  else if (p == -INFINITY) y = ty_min(ty_abs(x), dims, keep);
  else if (p == 0) y = ty_sum(ty_to(ty_ne(x, 0), ty_dtype_of(x)), dims, keep, TY_DTYPE_DEFAULT);
  else y = ty_to(power_norm(ty_abs(widened(x)), p, dims, keep), ty_dtype_of(x));
  return ty_out_set(c, 0, y);
}

/* ---- backward ---- */

/* g or y of a reduction over `dims` brought to x's shape with sizes of 1 where it was reduced. */
static ty_tensor *with_ones(const ty_vjp *c, ty_tensor *t, ty_ints dims) {
  int n = c->in[0].ndim;
  int64_t size[TY_MAX_DIMS];
  for (int d = 0; d < n; d++) size[d] = dims.n ? c->in[0].size[d] : 1;
  for (int i = 0; i < dims.n; i++)
    if (n) size[dims.v[i] < 0 ? dims.v[i] + n : dims.v[i]] = 1;
  return ty_reshape(t, (ty_ints){ size, n });
}

static ty_tensor *spread(const ty_vjp *c, ty_tensor *t, ty_ints dims) {
  return ty_expand(with_ones(c, t, dims), ty_vjp_size(c, 0));
}

static double reduced_count(const ty_vjp *c, ty_ints dims) {
  double n = 1;
  if (!dims.n)
    for (int d = 0; d < c->in[0].ndim; d++) n *= (double)c->in[0].size[d];
  for (int i = 0; i < dims.n && c->in[0].ndim; i++)
    n *= (double)c->in[0].size[dims.v[i] < 0 ? dims.v[i] + c->in[0].ndim : dims.v[i]];
  return n;
}

bool vjp_sum(ty_vjp *c) {
  c->dx[0] = spread(c, c->g[0], TY_ARGS(sum, c)->dims.is);
  return true;
}

bool vjp_mean(ty_vjp *c) {
  ty_ints dims = TY_ARGS(mean, c)->dims.is;
  c->dx[0] = spread(c, ty_div(c->g[0], reduced_count(c, dims)), dims);
  return true;
}

/* 2 (x - mean) / (n - correction) */
bool vjp_var(ty_vjp *c) {
  const ty_var_args *a = TY_ARGS(var, c);
  double n = reduced_count(c, a->dims.is) - a->correction.f;
  ty_tensor *centred = ty_sub(a->x.t, ty_mean(a->x.t, a->dims.is, true));
  c->dx[0] = ty_mul(centred, ty_mul(with_ones(c, c->g[0], a->dims.is), 2 / (n > 0 ? n : 0)));
  return true;
}

/* (x - mean) / (y (n - correction)); 0 for equal elements, where the deviation has a kink. */
bool vjp_std(ty_vjp *c) {
  const ty_std_args *a = TY_ARGS(std, c);
  double n = reduced_count(c, a->dims.is) - a->correction.f;
  ty_tensor *x = widened(a->x.t), *y = with_ones(c, widened(c->out[0]), a->dims.is);
  ty_tensor *equal = ty_eq(y, 0), *ratio = ty_div(ty_sub(x, ty_mean(x, a->dims.is, true)), ty_where(equal, 1.0, y));
  ratio = ty_where(equal, 0.0, ratio);
  c->dx[0] = ty_mul(ratio, ty_mul(with_ones(c, widened(c->g[0]), a->dims.is), 1 / (n > 0 ? n : 0)));
  return true;
}

bool vjp_logsumexp(ty_vjp *c) {
  const ty_logsumexp_args *a = TY_ARGS(logsumexp, c);
  ty_tensor *weight = ty_exp(ty_sub(a->x.t, with_ones(c, c->out[0], a->dims.is)));
  c->dx[0] = ty_mul(weight, with_ones(c, c->g[0], a->dims.is));
  return true;
}

/* 1 for the elements of x that equal the extreme y, shared among them. */
static ty_tensor *shares_of(ty_tensor *x, ty_tensor *y, ty_ints dims) {
  ty_tensor *reached = ty_to(ty_eq(x, ty_detach(y)), ty_dtype_of(x));
  return ty_div(reached, ty_sum(reached, dims, true, TY_DTYPE_DEFAULT));
}

/* max and min: shared equally among the elements that reach the extreme. */
bool vjp_extreme(ty_vjp *c) {
  const ty_max_args *a = TY_ARGS(max, c);
  ty_tensor *shares = shares_of(a->x.t, with_ones(c, c->out[0], a->dims.is), a->dims.is);
  c->dx[0] = ty_mul(shares, with_ones(c, c->g[0], a->dims.is));
  return true;
}

/* sign(x) (|x| / y)^(p - 1); 0 where y, and for p < 1 where x is 0: the kinks of the norm. */
bool vjp_norm(ty_vjp *c) {
  const ty_norm_args *a = TY_ARGS(norm, c);
  ty_ints dims = a->dims.is;
  double p = a->p.f;
  ty_tensor *x = widened(a->x.t), *g = with_ones(c, widened(c->g[0]), dims), *y, *slope;
  if (p == 0) {
    c->dx[0] = ty_zeros_like(x, TY_DTYPE_DEFAULT);
    return true;
  }
  if (p == 1) {
    c->dx[0] = ty_mul(ty_sign(x), g);
    return true;
  }
  y = with_ones(c, widened(c->out[0]), dims);
  if (isinf(p)) {
    c->dx[0] = ty_mul(ty_mul(ty_sign(x), shares_of(ty_abs(x), y, dims)), g);
    return true;
  }
  ty_tensor *kink = ty_eq(y, 0);
  if (p < 1) kink = ty_logical_or(ty_operand(kink), ty_operand(ty_eq(x, 0)));
  ty_tensor *ratio = ty_div(x, ty_where(kink, 1.0, y));
  slope = p == 2 ? ratio : ty_mul(ty_sign(x), ty_pow(ty_where(kink, 1.0, ty_abs(ratio)), p - 1));
  c->dx[0] = ty_mul(ty_where(kink, 0.0, slope), g);
  return true;
}

/* The product of all others: exclusive running products from both ends, so that zeros need no special case. */
static ty_tensor *product_of_others(ty_tensor *flat) {
  int64_t n = flat ? flat->v.size[1] : 0;
  if (n < 2) return flat ? ty_ones_like(flat, TY_DTYPE_DEFAULT) : NULL;
  ty_tensor *one = ty_ones_like(ty_slice(flat, 1, 0, 1, 1), TY_DTYPE_DEFAULT);
  ty_tensor *before = ty_concat(TY_LIST(one, ty_cumprod(ty_slice(flat, 1, 0, n - 1, 1), 1)), 1);
  ty_tensor *reversed = ty_cumprod(ty_flip(ty_slice(flat, 1, 1, n, 1), TY_INTS(1)), 1);
  return ty_mul(before, ty_concat(TY_LIST(ty_flip(reversed, TY_INTS(1)), one), 1));
}

bool vjp_prod(ty_vjp *c) {
  const ty_prod_args *a = TY_ARGS(prod, c);
  ty_ints dims = a->dims.is;
  int n = c->in[0].ndim, k = 0;
  int64_t order[TY_MAX_DIMS], inverse[TY_MAX_DIMS], size[TY_MAX_DIMS], rows = 1, width = 1;
  uint32_t mask = 0;
  for (int i = 0; i < dims.n && n; i++) mask |= 1u << (dims.v[i] < 0 ? dims.v[i] + n : dims.v[i]);
  if (!dims.n) mask = (1u << n) - 1;
  for (int reduced = 0; reduced < 2; reduced++)
    for (int d = 0; d < n; d++)
      if ((int)(mask >> d & 1) == reduced) order[k++] = d;
  for (int i = 0; i < n; i++) {
    inverse[order[i]] = i;
    size[i] = c->in[0].size[order[i]];
    if (mask >> order[i] & 1) width *= size[i];
    else rows *= size[i];
  }
  if (rows * width == 0) {
    c->dx[0] = ty_mul(a->x.t, 0.0);
    return true;
  }
  ty_tensor *flat = ty_reshape(ty_permute(a->x.t, (ty_ints){ order, n }), TY_INTS(rows, width));
  ty_tensor *others = ty_permute(ty_reshape(product_of_others(flat), (ty_ints){ size, n }), (ty_ints){ inverse, n });
  c->dx[0] = ty_mul(others, with_ones(c, c->g[0], dims));
  return true;
}

/* ---- back from broadcasting ---- */

bool fwd_sum_to(ty_call *c) {
  const ty_sum_to_args *a = TY_ARGS(sum_to, c);
  ty_tensor *x = a->x.t;
  ty_ints want = a->size.is;
  int shift = x->v.ndim - want.n, n = 0;
  int64_t dims[TY_MAX_DIMS];
  bool fits = shift >= 0;
  for (int d = 0; d < x->v.ndim && fits; d++) {
    int64_t size = d < shift ? 1 : want.v[d - shift];
    if (d < shift || (size == 1 && x->v.size[d] != 1)) dims[n++] = d;
    else fits = size == x->v.size[d];
  }
  if (!fits)
    return ty_op_fail(c, TY_EINVAL, "size: %s does not broadcast to x %s", ty_shape_text(want.n, want.v),
                      ty_describe(x));
  ty_tensor *y = n ? ty_sum(x, (ty_ints){ dims, n }, true, ty_dtype_of(x)) : x;
  y = ty_reshape(y, want);
  return ty_out_set(c, 0, y);
}

bool vjp_sum_to(ty_vjp *c) {
  c->dx[0] = ty_expand(c->g[0], ty_vjp_size(c, 0));
  return true;
}
