/* Familiar ops that are a few others: view, isclose, outer, addmm, nan_to_num, xlogy, diff, rot90, hstack ... */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "../autograd/autograd.h"

/* ---- views ---- */

/* Called ty_view_shape in C, where ty_view is the type. */
bool fwd_view_shape(ty_call *c) {
  const ty_view_shape_args *a = TY_ARGS(view_shape, c);
  ty_tensor *y = ty_reshape(a->x.t, a->size.is);
  if (y && y->storage != a->x.t->storage)
    return ty_op_fail(c, TY_EINVAL, "size: x %s has no view of shape %s without a copy; :reshape makes one",
                      ty_describe(a->x.t), ty_shape_text(y->v.ndim, y->v.size));
  return ty_out_set(c, 0, y);
}

/* The same bytes. The last dimension grows or shrinks where elements have another size. */
bool fwd_view_dtype(ty_call *c) {
  const ty_view_dtype_args *a = TY_ARGS(view_dtype, c);
  ty_tensor *x = a->x.t;
  if (a->dtype.i == TY_DTYPE_DEFAULT) return ty_op_fail(c, TY_EINVAL, "dtype: expected a dtype name, got nothing");
  ty_dtype dtype = (ty_dtype)a->dtype.i;
  int n = x->v.ndim;
  int64_t from = (int64_t)ty_dtype_size[ty_dtype_of(x)], to = (int64_t)ty_dtype_size[dtype];
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  memcpy(stride, x->v.stride, sizeof stride);
  if (from != to) {
    bool fits = n > 0 && (stride[n - 1] == 1 || size[n - 1] == 1) && size[n - 1] * from % to == 0 &&
                (uintptr_t)x->v.data % (uintptr_t)to == 0;
    for (int d = 0; fits && d < n - 1; d++) fits = stride[d] * from % to == 0;
    if (!fits)
      return ty_op_fail(c, TY_EINVAL,
                        "dtype: x %s cannot be seen as %s: expected rows without gaps whose %lld bytes, and places in "
                        "memory, are whole elements of %lld bytes",
                        ty_describe(x), ty_dtype_name[dtype], (long long)(n ? size[n - 1] * from : from),
                        (long long)to);
    size[n - 1] = size[n - 1] * from / to;
    for (int d = 0; d < n - 1; d++) stride[d] = stride[d] * from / to;
    stride[n - 1] = 1;
  }
  if (!ty_out_view(c, 0, x, n, size, stride, 0)) return false;
  c->out[0]->v.dtype = (int16_t)dtype;
  ty_view_update(&c->out[0]->v);
  return true;
}

/* ---- products ---- */

bool fwd_outer(ty_call *c) {
  const ty_outer_args *a = TY_ARGS(outer, c);
  if (!ty_check_ndim(c, 0, 1, 1, "[n]") || !ty_check_ndim(c, 1, 1, 1, "[m]")) return false;
  return ty_out_set(c, 0, ty_mul(ty_unsqueeze(a->x.t, 1), a->y.t));
}

/* beta x + alpha y; x is not looked at when beta is 0. */
static bool add_product(ty_call *c, ty_tensor *x, ty_tensor *y, double beta, double alpha) {
  int64_t size[TY_MAX_DIMS];
  int ndim;
  if (!y || !ty_broadcast(c->op, &y->v, &x->v, &ndim, size)) return false;
  if (ndim != y->v.ndim || memcmp(size, y->v.size, sizeof *size * (size_t)ndim) != 0)
    return ty_op_fail(c, TY_EINVAL, "x: expected what broadcasts to the product %s, got %s", ty_describe(y),
                      ty_describe(x));
  if (alpha != 1) y = ty_mul(y, alpha);
  if (beta != 0) y = ty_add(beta != 1 ? ty_mul(x, beta) : x, y);
  return ty_out_set(c, 0, y);
}

bool fwd_addmm(ty_call *c) {
  const ty_addmm_args *a = TY_ARGS(addmm, c);
  return ty_check_ndim(c, 1, 2, 2, "[n, k]") && ty_check_ndim(c, 2, 2, 2, "[k, m]") &&
         add_product(c, a->x.t, ty_matmul(a->a.t, a->b.t), a->beta.f, a->alpha.f);
}

bool fwd_baddbmm(ty_call *c) {
  const ty_baddbmm_args *a = TY_ARGS(baddbmm, c);
  return ty_check_ndim(c, 1, 3, 3, "[batch, n, k]") && ty_check_ndim(c, 2, 3, 3, "[batch, k, m]") &&
         add_product(c, a->x.t, ty_matmul(a->a.t, a->b.t), a->beta.f, a->alpha.f);
}

bool fwd_addmv(ty_call *c) {
  const ty_addmv_args *a = TY_ARGS(addmv, c);
  return ty_check_ndim(c, 1, 2, 2, "[n, k]") && ty_check_ndim(c, 2, 1, 1, "[k]") &&
         add_product(c, a->x.t, ty_matmul(a->a.t, a->b.t), a->beta.f, a->alpha.f);
}

bool fwd_addr(ty_call *c) {
  const ty_addr_args *a = TY_ARGS(addr, c);
  return ty_check_ndim(c, 1, 1, 1, "[n]") && ty_check_ndim(c, 2, 1, 1, "[m]") &&
         add_product(c, a->x.t, ty_outer(a->a.t, a->b.t), a->beta.f, a->alpha.f);
}

bool fwd_cross(ty_call *c) {
  const ty_cross_args *a = TY_ARGS(cross, c);
  ty_tensor *x = a->x.t, *y = a->y.t;
  int64_t size[TY_MAX_DIMS];
  int ndim, dim;
  if (!ty_broadcast(c->op, &x->v, &y->v, &ndim, size) || !ty_check_dim(c, 2, ndim, &dim)) return false;
  int dx = dim - (ndim - x->v.ndim), dy = dim - (ndim - y->v.ndim);
  if (dx < 0 || dy < 0 || x->v.size[dx] != 3 || y->v.size[dy] != 3)
    return ty_op_fail(c, TY_EINVAL, "dim: expected 3 elements along dim %d, got x %s and y %s", dim, ty_describe(x),
                      ty_describe(y));
  ty_tensor *part[3]; /* of views: rows of three elements are too short to be copied one by one */
  for (int i = 0; i < 3; i++) {
    int j = (i + 1) % 3, k = (i + 2) % 3;
    part[i] = ty_sub(ty_mul(ty_select(x, dx, j), ty_select(y, dy, k)),
                     ty_mul(ty_select(x, dx, k), ty_select(y, dy, j)));
  }
  return ty_out_set(c, 0, ty_stack((ty_tensors){ part, 3 }, dim));
}

/* ---- elementwise ---- */

static ty_tensor *both(ty_tensor *a, ty_tensor *b) {
  return a && b ? ty_logical_and(ty_operand(a), ty_operand(b)) : NULL;
}
static ty_tensor *either(ty_tensor *a, ty_tensor *b) {
  return a && b ? ty_logical_or(ty_operand(a), ty_operand(b)) : NULL;
}

/* Halves are compared in f32 and integers in f64, so that the tolerance is not rounded. */
bool fwd_isclose(ty_call *c) {
  const ty_isclose_args *a = TY_ARGS(isclose, c);
  if (!(a->rtol.f >= 0) || !(a->atol.f >= 0))
    return ty_op_fail(c, TY_EINVAL, "rtol: expected tolerances of at least 0, got %g and %g", a->rtol.f, a->atol.f);
  ty_dtype d = ty_promote(ty_dtype_of(a->x.t), ty_dtype_of(a->y.t));
  ty_tensor *equal = ty_eq(a->x.t, a->y.t);
  d = !ty_is_float(d) ? TY_F64 : ty_is_half(d) ? TY_F32 : d;
  ty_tensor *x = ty_to(a->x.t, d), *y = ty_to(a->y.t, d);
  ty_tensor *error = ty_abs(ty_sub(x, y)), *allowed = ty_add(ty_mul(ty_abs(y), a->rtol.f), a->atol.f);
  ty_tensor *close = either(equal, both(ty_isfinite(error), error && allowed ? ty_le(error, allowed) : NULL));
  if (a->equal_nan.i) close = either(close, both(ty_isnan(x), ty_isnan(y)));
  return ty_out_set(c, 0, close);
}

static double largest(ty_dtype d) {
  return d == TY_F64 ? DBL_MAX : d == TY_F32 ? FLT_MAX : d == TY_F16 ? 65504 : 0x1.fep127;
}

static ty_value or_number(const ty_value *v, double otherwise) {
  return v->kind == TY_NONE ? ty_value_of_float(otherwise) : ty_value_of_float(ty_number_of(*v).f);
}

bool fwd_nan_to_num(ty_call *c) {
  const ty_nan_to_num_args *a = TY_ARGS(nan_to_num, c);
  ty_tensor *x = a->x.t;
  ty_dtype d = ty_dtype_of(x);
  if (!ty_is_float(d)) return ty_out_set(c, 0, ty_clone(x));
  ty_tensor *y = ty_masked_fill(x, ty_isnan(x), ty_value_of_float(a->nan.f));
  y = ty_masked_fill(y, ty_eq(x, (double)INFINITY), or_number(&a->posinf, largest(d)));
  return ty_out_set(c, 0, ty_masked_fill(y, ty_eq(x, -(double)INFINITY), or_number(&a->neginf, -largest(d))));
}

/* What log makes infinite counts as 1 where x is 0; a NaN stays one. */
/* An operand as a tensor: a number in the dtype of the other operand, where that is of floats. */
static ty_tensor *operand_like(const ty_value *v, const ty_value *other) {
  if (v->kind == TY_TENSOR) return v->t;
  return ty_full(TY_NO_INTS, *v, ty_dtype_of(other->t), ty_device_of(other->t));
}

bool fwd_xlogy(ty_call *c) {
  const ty_xlogy_args *a = TY_ARGS(xlogy, c);
  ty_tensor *x = operand_like(&a->x, &a->y), *y = operand_like(&a->y, &a->x);
  ty_tensor *none = x && y ? both(ty_eq(x, 0), either(ty_le(y, 0), ty_isinf(y))) : NULL;
  ty_tensor *safe = none ? ty_where(none, 1.0, y) : NULL;
  return ty_out_set(c, 0, safe ? ty_mul(x, ty_log(safe)) : NULL);
}

/* ---- reductions ---- */

bool fwd_count_nonzero(ty_call *c) {
  const ty_count_nonzero_args *a = TY_ARGS(count_nonzero, c);
  return ty_out_set(c, 0, ty_sum(ty_ne(a->x.t, 0), a->dims.is, a->keepdim.i, TY_I64));
}

bool fwd_var_mean(ty_call *c) {
  const ty_var_mean_args *a = TY_ARGS(var_mean, c);
  uint32_t mask;
  if (!ty_check_dims(c, 1, a->x.t->v.ndim, &mask)) return false;
  return ty_out_set(c, 0, ty_var(a->x.t, a->dims.is, a->correction.f, a->keepdim.i)) &&
         ty_out_set(c, 1, ty_mean(a->x.t, a->dims.is, a->keepdim.i));
}

bool fwd_std_mean(ty_call *c) {
  const ty_std_mean_args *a = TY_ARGS(std_mean, c);
  uint32_t mask;
  if (!ty_check_dims(c, 1, a->x.t->v.ndim, &mask)) return false;
  return ty_out_set(c, 0, ty_std(a->x.t, a->dims.is, a->correction.f, a->keepdim.i)) &&
         ty_out_set(c, 1, ty_mean(a->x.t, a->dims.is, a->keepdim.i));
}

/* ---- along a dimension ---- */

static ty_tensor *without_first(ty_tensor *x, int dim) { return ty_slice(x, dim, 1, INT64_MAX, 1); }
static ty_tensor *without_last(ty_tensor *x, int dim) { return x ? ty_slice(x, dim, 0, x->v.size[dim] - 1, 1) : NULL; }

bool fwd_diff(ty_call *c) {
  const ty_diff_args *a = TY_ARGS(diff, c);
  ty_tensor *x = a->x.t;
  int dim;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., n]") || !ty_check_dim(c, 2, x->v.ndim, &dim)) return false;
  if (a->n.i < 0) return ty_op_fail(c, TY_EINVAL, "n: expected a number of at least 0, got %lld", (long long)a->n.i);
  if (a->prepend.kind == TY_TENSOR) x = ty_concat(TY_LIST(a->prepend.t, x), dim);
  if (a->append.kind == TY_TENSOR && x) x = ty_concat(TY_LIST(x, a->append.t), dim);
  if (!x) return false;
  int64_t n = a->n.i < x->v.size[dim] ? a->n.i : x->v.size[dim];
  bool logical = ty_dtype_of(x) == TY_BOOL;
  for (int64_t i = 0; i < n && x; i++) {
    if (x->v.size[dim] == 0) break;
    ty_tensor *next = without_first(x, dim), *before = without_last(x, dim);
    x = !next || !before ? NULL : logical ? ty_ne(next, before) : ty_sub(next, before);
  }
  return ty_out_set(c, 0, x == a->x.t ? ty_clone(x) : x);
}

bool fwd_trapezoid(ty_call *c) {
  const ty_trapezoid_args *a = TY_ARGS(trapezoid, c);
  ty_tensor *y = a->y.t;
  int dim;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., n]") || !ty_check_dim(c, 3, y->v.ndim, &dim)) return false;
  if (y->v.size[dim] == 0) return ty_out_set(c, 0, ty_sum(y, TY_INTS(dim), false, TY_DTYPE_DEFAULT));
  ty_tensor *mean = ty_mul(ty_add(without_first(y, dim), without_last(y, dim)), 0.5);
  if (a->x.kind != TY_TENSOR)
    return ty_out_set(c, 0, ty_mul(ty_sum(mean, TY_INTS(dim), false, TY_DTYPE_DEFAULT), a->dx.f));
  ty_tensor *x = a->x.t;
  bool list = x->v.ndim == 1;
  if (!(list && x->v.size[0] == y->v.size[dim]) && !ty_same_shape(&x->v, &y->v))
    return ty_op_fail(c, TY_EINVAL, "x: expected the shape of y %s or one position for each along dim %d, got %s",
                      ty_describe(y), dim, ty_describe(x));
  int along = list ? 0 : dim;
  ty_tensor *width = ty_sub(without_first(x, along), without_last(x, along));
  if (list && width) {
    int64_t size[TY_MAX_DIMS];
    for (int d = 0; d < y->v.ndim; d++) size[d] = d == dim ? width->v.count : 1;
    width = ty_reshape(width, (ty_ints){ size, y->v.ndim });
  }
  return ty_out_set(c, 0, ty_sum(ty_mul(mean, width), TY_INTS(dim), false, TY_DTYPE_DEFAULT));
}

bool fwd_rot90(ty_call *c) {
  const ty_rot90_args *a = TY_ARGS(rot90, c);
  ty_tensor *x = a->x.t;
  int64_t n = x->v.ndim, d0 = a->dims.is.n ? a->dims.is.v[0] : 0, d1 = a->dims.is.n > 1 ? a->dims.is.v[1] : 1;
  if (d0 < 0) d0 += n;
  if (d1 < 0) d1 += n;
  if ((a->dims.is.n && a->dims.is.n != 2) || d0 < 0 || d1 < 0 || d0 >= n || d1 >= n || d0 == d1)
    return ty_op_fail(c, TY_EINVAL, "dims: expected two different dimensions of x %s, got %s", ty_describe(x),
                      ty_shape_text(a->dims.is.n, a->dims.is.v));
  switch ((a->k.i % 4 + 4) % 4) {
    case 1: x = ty_transpose(ty_flip(x, TY_INTS(d1)), d0, d1); break;
    case 2: x = ty_flip(x, TY_INTS(d0, d1)); break;
    case 3: x = ty_flip(ty_transpose(x, d0, d1), TY_INTS(d1)); break;
    default: x = ty_clone(x);
  }
  return ty_out_set(c, 0, x);
}

/* Each tensor with at least `ndim` dimensions, joined. */
static bool stack_along(ty_call *c, int ndim, int dim_of_wide) {
  ty_tensors xs = c->arg[0].ts;
  if (xs.n < 1) return ty_op_fail(c, TY_EINVAL, "xs: expected at least one tensor, got none");
  ty_tensor **list = malloc(sizeof *list * (size_t)xs.n);
  if (!list) return ty_op_fail(c, TY_ENOMEM, "not enough memory for a list of %d tensors", xs.n);
  bool ok = true;
  for (int i = 0; i < xs.n && ok; i++) {
    ty_tensor *x = xs.v[i];
    while (x && x->v.ndim < ndim) x = ty_unsqueeze(x, 0);
    list[i] = x;
    ok = x != NULL;
  }
  int dim = ok && list[0]->v.ndim > 1 ? dim_of_wide : 0;
  ok = ok && ty_out_set(c, 0, ty_concat((ty_tensors){ list, xs.n }, dim));
  free(list);
  return ok;
}

bool fwd_hstack(ty_call *c) { return stack_along(c, 1, 1); }
bool fwd_vstack(ty_call *c) { return stack_along(c, 2, 0); }

/* For each position of the result the one that it repeats. */
static ty_tensor *repeated_positions(ty_call *c, ty_tensor *repeats, int64_t n) {
  if (ty_dtype_of(repeats) != TY_I64 && ty_dtype_of(repeats) != TY_I32) {
    ty_op_fail(c, TY_EINVAL, "repeats: expected integers (i64 or i32), got %s", ty_describe(repeats));
    return NULL;
  }
  if (repeats->v.ndim > 1 || (repeats->v.count != n && repeats->v.count != 1)) {
    ty_op_fail(c, TY_EINVAL, "repeats: expected one number, or one for each of %lld positions, got %s", (long long)n,
               ty_describe(repeats));
    return NULL;
  }
  if (ty_device_of(repeats) == TY_META) {
    ty_op_fail(c, TY_EUNSUPPORTED, "how often is repeated depends on the values, which %s does not have",
               ty_describe(repeats));
    return NULL;
  }
  if (n == 0) return ty_zeros(TY_INTS(0), TY_I64, ty_device_of(repeats));
  repeats = ty_expand(ty_reshape(ty_to(repeats, TY_I64), TY_INTS(repeats->v.count)), TY_INTS(n));
  ty_tensor *least = ty_min(repeats, TY_NO_INTS, false), *ends = ty_cumsum(repeats, 0, false);
  bool ok = least && ends;
  int64_t low = ok ? (int64_t)ty_item(least, &ok) : 0;
  int64_t total = ok ? (int64_t)ty_item(ty_select(ends, 0, -1), &ok) : 0;
  if (!ok) return NULL;
  if (low < 0) {
    ty_op_fail(c, TY_EINVAL, "repeats: expected numbers of at least 0, got %lld", (long long)low);
    return NULL;
  }
  /* Counts up wherever a position ends; several may end at once. */
  ty_tensor *steps = ty_zeros(TY_INTS(total + 1), TY_I64, ty_device_of(repeats));
  ty_tensor *one = ty_ones(TY_INTS(n), TY_I64, ty_device_of(repeats));
  steps = steps && one ? ty_index_add(steps, 0, ends, one) : NULL;
  return steps ? ty_cumsum(ty_slice(steps, 0, 0, total, 1), 0, false) : NULL;
}

bool fwd_repeat_interleave(ty_call *c) {
  const ty_repeat_interleave_args *a = TY_ARGS(repeat_interleave, c);
  ty_tensor *x = a->x.t;
  int64_t n = x->v.ndim, dim = 0, size[TY_MAX_DIMS + 1];
  if (a->dim.kind == TY_NONE) {
    x = ty_reshape(x, TY_INTS(x->v.count));
    n = 1;
  } else {
    dim = a->dim.kind == TY_INT ? a->dim.i : -n - 1;
    if (dim < -n || dim >= n)
      return ty_op_fail(c, TY_EINVAL, "dim: expected a dimension in [%lld, %lld] of x %s, got %g", (long long)-n,
                        (long long)n - 1, ty_describe(x), ty_number_of(a->dim).f);
    if (dim < 0) dim += n;
  }
  if (!x) return false;
  if (a->repeats.kind == TY_TENSOR) {
    ty_tensor *index = repeated_positions(c, a->repeats.t, x->v.size[dim]);
    return index && ty_out_set(c, 0, ty_index_select(x, dim, index));
  }
  if (a->repeats.kind != TY_INT || a->repeats.i < 0)
    return ty_op_fail(c, TY_EINVAL, "repeats: expected an integer of at least 0, got %g", ty_number_of(a->repeats).f);
  if (n == TY_MAX_DIMS) { /* no room for one more */
    ty_tensor *index = ty_floor_div(ty_operand(ty_arange(0, x->v.size[dim] * a->repeats.i, 1, TY_I64, ty_device_of(x))),
                                    ty_value_of_int(a->repeats.i > 0 ? a->repeats.i : 1));
    return index && ty_out_set(c, 0, ty_index_select(x, dim, index));
  }
  x = ty_unsqueeze(x, dim + 1);
  if (!x) return false;
  memcpy(size, x->v.size, sizeof *size * (size_t)(n + 1));
  size[dim + 1] = a->repeats.i;
  x = ty_expand(x, (ty_ints){ size, (int)n + 1 });
  size[dim] *= a->repeats.i;
  memmove(size + dim + 1, size + dim + 2, sizeof *size * (size_t)(n - dim - 1));
  return ty_out_set(c, 0, ty_contiguous(ty_reshape(x, (ty_ints){ size, (int)n })));
}
