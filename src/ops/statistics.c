/* Statistics along dimensions: order statistics (kthvalue, median, quantile), mode, nansum, nanmean, aminmax, renorm,
 * cov, corrcoef. */
#include <string.h>

#include "../autograd/autograd.h"

/* ---- order statistics ---- */

/* An optional dim: x itself, or taken flat with dim 0 where there is none. NULL after ty_op_fail(). */
static ty_tensor *along(ty_call *c, int arg, ty_tensor *x, int *dim) {
  const ty_value *v = &c->arg[arg];
  int64_t n = x->v.ndim ? x->v.ndim : 1;
  *dim = 0;
  if (v->kind == TY_NONE) return ty_reshape(x, TY_INTS(x->v.count));
  int64_t d = v->kind == TY_INT ? v->i : -n - 1;
  if (d < -n || d >= n) {
    ty_op_fail(c, TY_EINVAL, "%s: expected a dimension in [%lld, %lld] of x %s, got %g", c->op->args[arg].name,
               (long long)-n, (long long)n - 1, ty_describe(x), ty_number_of(*v).f);
    return NULL;
  }
  *dim = (int)(d < 0 ? d + n : d);
  return x->v.ndim ? x : ty_reshape(x, TY_INTS(1));
}

/* What along() has made of x, reduced, in the shape for the user. */
static ty_tensor *shaped(ty_call *c, int arg, const ty_tensor *x, ty_tensor *y, int dim, bool keep) {
  if (!y) return NULL;
  int64_t size[TY_MAX_DIMS];
  int n = 0;
  bool all = c->arg[arg].kind == TY_NONE;
  for (int d = 0; d < x->v.ndim; d++) {
    if (!all && d != dim) size[n++] = x->v.size[d];
    else if (keep) size[n++] = 1;
  }
  return ty_reshape(y, (ty_ints){ size, n });
}

static bool check_some(ty_call *c, const ty_tensor *x, const ty_tensor *line, int dim) {
  return line->v.size[dim] > 0 ||
         ty_op_fail(c, TY_EINVAL, "x: expected at least one element to choose from, got %s", ty_describe(x));
}

bool fwd_order_statistic(ty_call *c) {
  const ty_order_statistic_args *a = TY_ARGS(order_statistic, c);
  ty_tensor *x = a->x.t;
  int dim, how = ty_check_choice(c, 3, (const char *const[]){ "rank", "median", "nanmedian", NULL });
  if (how < 0 || !ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., n]") || !ty_check_dim(c, 1, x->v.ndim, &dim)) return false;
  int64_t n = x->v.size[dim], size[TY_MAX_DIMS];
  if (a->rank.i < 0 || a->rank.i >= n)
    return ty_op_fail(c, TY_EINVAL, "rank: expected one in [0, %lld), got %lld", (long long)n, (long long)a->rank.i);
  memcpy(size, x->v.size, sizeof size);
  size[dim] = 1;
  for (int i = 0; i < 2; i++)
    if (!ty_out(c, i, ty_device_of(x), i ? TY_I64 : ty_dtype_of(x), x->v.ndim, size)) return false;
  ty_p_dim p = { .dim = dim, .k = a->rank.i, .flag = how == 1, .flag2 = how == 2 };
  return ty_launch(c, &x, 1, &p);
}

bool vjp_order_statistic(ty_vjp *c) {
  c->dx[0] = ty_gather_backward(c->g[0], TY_ARGS(order_statistic, c)->dim.i, c->out[1], ty_vjp_size(c, 0));
  return true;
}

/* Sets value and position; `arg` is the dim, of which x is one line where there is none. */
static bool order_statistic(ty_call *c, int arg, int64_t rank, const char *how, bool keep) {
  ty_tensor *x = c->arg[0].t, *found[2];
  int dim;
  ty_tensor *line = along(c, arg, x, &dim);
  return line && check_some(c, x, line, dim) && ty_order_statistic(line, dim, rank, how, found) &&
         ty_out_set(c, 0, shaped(c, arg, x, found[0], dim, keep)) &&
         ty_out_set(c, 1, shaped(c, arg, x, found[1], dim, keep));
}

bool fwd_kthvalue(ty_call *c) {
  const ty_kthvalue_args *a = TY_ARGS(kthvalue, c);
  ty_tensor *x = a->x.t;
  int dim;
  if (!ty_check_dim(c, 2, x->v.ndim, &dim)) return false;
  int64_t n = x->v.ndim ? x->v.size[dim] : 1;
  if (a->k.i < 1 || a->k.i > n)
    return ty_op_fail(c, TY_EINVAL, "k: expected one of the %lld positions of dim %d, from 1, got %lld for %s",
                      (long long)n, dim, (long long)a->k.i, ty_describe(x));
  return order_statistic(c, 2, a->k.i - 1, "rank", a->keepdim.i);
}

bool fwd_median(ty_call *c) { return order_statistic(c, 1, 0, "median", TY_ARGS(median, c)->keepdim.i); }
bool fwd_nanmedian(ty_call *c) { return order_statistic(c, 1, 0, "nanmedian", TY_ARGS(nanmedian, c)->keepdim.i); }

/* ---- quantiles ---- */

static ty_tensor *both(ty_tensor *a, ty_tensor *b) {
  return a && b ? ty_logical_and(ty_operand(a), ty_operand(b)) : NULL;
}

/* The elements of sorted lines [..., n] at ranks [..., m] that may lie between two. */
static ty_tensor *at_ranks(ty_tensor *lines, ty_tensor *rank, int how) {
  if (!lines || !rank) return NULL;
  ty_tensor *low = ty_floor(rank), *high = ty_ceil(rank), *part = low ? ty_sub(rank, low) : NULL;
  if (how == 3) low = ty_round(rank);
  if (how == 2) low = high;
  ty_tensor *x = ty_gather(lines, -1, ty_to(low, TY_I64));
  if (how >= 1 && how <= 3) return x;
  ty_tensor *y = high ? ty_gather(lines, -1, ty_to(high, TY_I64)) : NULL;
  if (!x || !y || !part) return NULL;
  part = how == 4 ? ty_mul(ty_to(ty_gt(part, 0), ty_dtype_of(x)), 0.5) : ty_to(part, ty_dtype_of(x));
  /* equal ones, infinities among them, need no difference */
  return part ? ty_where(ty_eq(x, y), x, ty_add(x, ty_mul(part, ty_sub(y, x)))) : NULL;
}

static bool quantile(ty_call *c, bool skip) {
  const ty_quantile_args *a = TY_ARGS(quantile, c); /* nanquantile has the same */
  ty_tensor *x = a->x.t, *q, *sorted[2];
  int dim,
      how = ty_check_choice(c, 4, (const char *const[]){ "linear", "lower", "higher", "nearest", "midpoint", NULL });
  if (how < 0) return false;
  int device = ty_device_of(x);
  if (a->q.kind == TY_TENSOR) {
    q = a->q.t;
    if (q->v.ndim > 1 || !ty_is_float(ty_dtype_of(q)))
      return ty_op_fail(c, TY_EINVAL, "q: expected a number or floats [m], got %s", ty_describe(q));
    q = ty_reshape(ty_detach(ty_to(q, TY_F64)), TY_INTS(q->v.count));
  } else {
    double value = ty_number_of(a->q).f;
    if (!(value >= 0 && value <= 1)) return ty_op_fail(c, TY_EINVAL, "q: expected a number in [0, 1], got %g", value);
    q = ty_full(TY_INTS(1), value, TY_F64, device);
  }
  ty_tensor *line = q ? along(c, 2, x, &dim) : NULL;
  if (!line || !check_some(c, x, line, dim)) return false;
  int64_t n = line->v.size[dim], m = q->v.count;
  if (ty_is_half(ty_dtype_of(line))) line = ty_to(line, TY_F32);
  if (!line || !ty_sort(line, dim, false, sorted)) return false;
  ty_tensor *lines = ty_transpose(sorted[0], dim, -1), *rank, *missing = NULL; /* [..., n], NaN at the end */
  if (!lines) return false;
  int64_t size[TY_MAX_DIMS];
  memcpy(size, lines->v.size, sizeof size);
  size[lines->v.ndim - 1] = m;
  ty_ints shape = { size, lines->v.ndim };
  if (skip) {
    ty_tensor *nans = ty_isnan(ty_detach(lines));
    ty_tensor *count = nans ? ty_sub(n - 1, ty_sum(nans, TY_INTS(-1), true, TY_F64)) : NULL;
    rank = count ? ty_mul(ty_clamp(count, 0.0, TY_NO_NUMBER), q) : NULL;
  } else {
    rank = ty_expand(ty_mul(q, (double)(n - 1)), shape);
    missing = ty_isnan(ty_narrow(ty_detach(lines), -1, n - 1, 1));
  }
  ty_tensor *outside = NULL;
  if (a->q.kind == TY_TENSOR && rank) { /* NaN for what is no quantile */
    ty_tensor *inside = both(ty_ge(q, 0.0), ty_le(q, 1.0));
    outside = inside ? ty_logical_not(inside) : NULL;
    rank = outside ? ty_where(outside, 0.0, rank) : NULL;
  }
  ty_tensor *y = at_ranks(lines, rank, how);
  if (y && missing) y = ty_where(missing, (double)NAN, y);
  if (y && outside) y = ty_where(outside, (double)NAN, y);
  if (!y) return false;
  y = ty_to(y, ty_dtype_of(x));
  if (a->q.kind != TY_TENSOR || a->q.t->v.ndim == 0)
    return ty_out_set(c, 0, shaped(c, 2, x, ty_transpose(y, dim, -1), dim, a->keepdim.i));
  /* the quantiles come first, then what is left of x */
  int64_t order[TY_MAX_DIMS] = { dim };
  for (int d = 0, k = 1; d < y->v.ndim; d++)
    if (d != dim) order[k++] = d;
  y = ty_permute(ty_transpose(y, dim, -1), (ty_ints){ order, y->v.ndim });
  size[0] = m;
  int left = 1;
  bool all = a->dim.kind == TY_NONE;
  for (int d = 0; d < x->v.ndim; d++) {
    if (!all && d != dim) size[left++] = x->v.size[d];
    else if (a->keepdim.i) size[left++] = 1;
  }
  if (left > TY_MAX_DIMS) return ty_op_fail(c, TY_EINVAL, "x: expected fewer dimensions, got %s", ty_describe(x));
  return ty_out_set(c, 0, ty_reshape(y, (ty_ints){ size, left }));
}

bool fwd_quantile(ty_call *c) { return quantile(c, false); }
bool fwd_nanquantile(ty_call *c) { return quantile(c, true); }

/* ---- the most frequent ---- */

bool fwd_mode(ty_call *c) {
  const ty_mode_args *a = TY_ARGS(mode, c);
  ty_tensor *x = a->x.t, *sorted[2], *begin[2];
  int dim;
  if (!ty_check_dim(c, 1, x->v.ndim, &dim)) return false;
  ty_tensor *line = x->v.ndim ? x : ty_reshape(x, TY_INTS(1));
  if (!line || !check_some(c, x, line, dim) || !ty_sort(ty_detach(line), dim, false, sorted)) return false;
  int64_t n = line->v.size[dim], size[TY_MAX_DIMS];
  memcpy(size, line->v.size, sizeof size);
  size[dim] = 1;
  ty_tensor *first = ty_ones(((ty_ints){ size, line->v.ndim }), TY_BOOL, ty_device_of(x));
  ty_tensor *other = ty_ne(ty_slice(sorted[0], dim, 1, n, 1), ty_slice(sorted[0], dim, 0, n - 1, 1));
  if (!first || !other) return false;
  for (int d = 0; d < line->v.ndim; d++) size[d] = d == dim ? n : 1;
  ty_tensor *place = ty_reshape(ty_arange(0, n, 1, TY_I64, ty_device_of(x)), (ty_ints){ size, line->v.ndim });
  ty_tensor *begins = ty_where(ty_concat(TY_LIST(first, other), dim), place, 0);
  if (!begins || !ty_cummax(begins, dim, begin)) return false;
  /* where the first of the longest runs has become as long as it is */
  ty_tensor *last = ty_argmax(ty_sub(place, begin[0]), TY_INTS(dim), true);
  ty_tensor *position = ty_gather(sorted[1], dim, last), *value = ty_gather(line, dim, position);
  if (!a->keepdim.i || x->v.ndim == 0) {
    position = ty_squeeze(position, TY_INTS(dim));
    value = ty_squeeze(value, TY_INTS(dim));
  }
  return ty_out_set(c, 0, value) && ty_out_set(c, 1, position);
}

/* ---- without NaN ---- */

bool fwd_nansum(ty_call *c) {
  const ty_nansum_args *a = TY_ARGS(nansum, c);
  ty_tensor *x = a->x.t;
  uint32_t mask;
  if (!ty_check_dims(c, 1, x->v.ndim, &mask)) return false;
  if (ty_is_float(ty_dtype_of(x))) x = ty_masked_fill(x, ty_isnan(x), 0);
  return ty_out_set(c, 0, ty_sum(x, a->dims.is, a->keepdim.i, TY_DTYPE_DEFAULT));
}

bool fwd_nanmean(ty_call *c) {
  const ty_nanmean_args *a = TY_ARGS(nanmean, c);
  ty_tensor *x = a->x.t;
  uint32_t mask;
  if (!ty_check_dims(c, 1, x->v.ndim, &mask)) return false;
  ty_tensor *missing = ty_isnan(x), *wide = ty_is_half(ty_dtype_of(x)) ? ty_to(x, TY_F32) : x;
  ty_tensor *sum = ty_sum(ty_masked_fill(wide, missing, 0), a->dims.is, a->keepdim.i, TY_DTYPE_DEFAULT);
  ty_tensor *count = ty_sum(ty_logical_not(missing), a->dims.is, a->keepdim.i, TY_I64);
  return sum && ty_out_set(c, 0, ty_to(ty_div(sum, ty_to(count, ty_dtype_of(sum))), ty_dtype_of(x)));
}

bool fwd_aminmax(ty_call *c) {
  const ty_aminmax_args *a = TY_ARGS(aminmax, c);
  uint32_t mask;
  return ty_check_dims(c, 1, a->x.t->v.ndim, &mask) && ty_out_set(c, 0, ty_min(a->x.t, a->dims.is, a->keepdim.i)) &&
         ty_out_set(c, 1, ty_max(a->x.t, a->dims.is, a->keepdim.i));
}

/* ---- scale and spread ---- */

bool fwd_renorm(ty_call *c) {
  const ty_renorm_args *a = TY_ARGS(renorm, c);
  ty_tensor *x = a->x.t;
  int dim, n = 0;
  int64_t others[TY_MAX_DIMS];
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[..., n, ...]") || !ty_check_dim(c, 2, x->v.ndim, &dim)) return false;
  if (!(a->p.f > 0)) return ty_op_fail(c, TY_EINVAL, "p: expected a number above 0, got %g", a->p.f);
  if (!(a->limit.f >= 0)) return ty_op_fail(c, TY_EINVAL, "limit: expected a number of at least 0, got %g", a->limit.f);
  for (int d = 0; d < x->v.ndim; d++)
    if (d != dim) others[n++] = d;
  ty_tensor *size = ty_norm(x, a->p.f, (ty_ints){ others, n }, true), *large = ty_gt(size, a->limit.f);
  ty_tensor *factor = ty_where(large, ty_div(a->limit.f, ty_where(large, size, 1.0)), 1.0);
  return ty_out_set(c, 0, ty_mul(x, factor));
}

/* One number for each observation, as f64 or NULL where there are none. */
static bool weights_of(ty_call *c, int arg, int64_t n, ty_dtype d, ty_tensor **w) {
  ty_tensor *t = c->arg[arg].kind == TY_TENSOR ? c->arg[arg].t : NULL;
  if (!t) return true;
  if (t->v.ndim != 1 || t->v.size[0] != n)
    return ty_op_fail(c, TY_EINVAL, "%s: expected a number for each of %lld observations, got %s",
                      c->op->args[arg].name, (long long)n, ty_describe(t));
  *w = *w ? ty_mul(*w, ty_to(t, d)) : ty_to(t, d);
  return *w != NULL;
}

bool fwd_cov(ty_call *c) {
  const ty_cov_args *a = TY_ARGS(cov, c);
  ty_tensor *x = a->x.t, *w = NULL, *total, *spread;
  if (!ty_check_ndim(c, 0, 0, 2, "[variables, observations]")) return false;
  bool one = x->v.ndim < 2;
  ty_dtype d = ty_is_half(ty_dtype_of(x)) ? TY_F32 : ty_dtype_of(x);
  x = ty_to(x, d);
  if (one) x = ty_reshape(x, TY_INTS(1, a->x.t->v.count));
  if (!x) return false;
  int64_t n = x->v.size[1];
  double correction = a->correction.f;
  if (!weights_of(c, 2, n, d, &w)) return false;
  ty_tensor *importance = c->arg[3].kind == TY_TENSOR ? ty_to(c->arg[3].t, d) : NULL;
  if (!weights_of(c, 3, n, d, &w)) return false;
  if (!w) {
    total = ty_full(TY_NO_INTS, (double)n, d, ty_device_of(x));
    spread = ty_sub(x, ty_mean(x, TY_INTS(1), true));
    w = ty_ones(TY_INTS(1), d, ty_device_of(x));
  } else {
    total = ty_sum(w, TY_NO_INTS, false, TY_DTYPE_DEFAULT);
    spread = ty_sub(x, ty_div(ty_sum(ty_mul(x, w), TY_INTS(1), true, TY_DTYPE_DEFAULT), total));
  }
  /* with importances a, what is taken off for the mean is their mean, weighted by themselves */
  ty_tensor *off = importance
                       ? ty_mul(ty_div(ty_sum(ty_mul(w, importance), TY_NO_INTS, false, TY_DTYPE_DEFAULT), total),
                                correction)
                       : ty_full(TY_NO_INTS, correction, d, ty_device_of(x));
  ty_tensor *left = ty_clamp(ty_sub(total, off), 0.0, TY_NO_NUMBER);
  ty_tensor *y = ty_div(ty_matmul(ty_mul(spread, w), ty_transpose(spread, 0, 1)), left);
  return ty_out_set(c, 0, ty_to(one ? ty_reshape(y, TY_NO_INTS) : y, ty_dtype_of(a->x.t)));
}

bool fwd_corrcoef(ty_call *c) {
  ty_tensor *x = TY_ARGS(corrcoef, c)->x.t;
  if (!ty_check_ndim(c, 0, 0, 2, "[variables, observations]")) return false;
  ty_dtype d = ty_is_half(ty_dtype_of(x)) ? TY_F32 : ty_dtype_of(x);
  ty_tensor *y = ty_cov(ty_to(x, d), 1, NULL, NULL);
  if (!y) return false;
  if (y->v.ndim == 0) return ty_out_set(c, 0, ty_to(ty_div(y, y), ty_dtype_of(x)));
  ty_tensor *scale = ty_sqrt(ty_diagonal(y, 0, 0, 1));
  y = ty_div(ty_div(y, ty_unsqueeze(scale, 0)), ty_unsqueeze(scale, 1));
  return ty_out_set(c, 0, ty_to(ty_clamp(y, -1.0, 1.0), ty_dtype_of(x)));
}
