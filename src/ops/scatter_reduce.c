/* scatter_reduce: what meets at a position, as a sum, product, mean, largest or smallest. */
#include <string.h>

#include "../../kernels/indexing.h"
#include "../autograd/autograd.h"

static const char *const reductions[] = { "sum", "prod", "mean", "amax", "amin", NULL };
enum { SUM, PROD, MEAN, AMAX, AMIN };

/* What x is to begin with where it does not count. */
static ty_value neutral(int reduction, ty_dtype d) {
  static const int64_t
      low[] = { [TY_U8] = 0, [TY_I8] = INT8_MIN, [TY_I16] = INT16_MIN, [TY_I32] = INT32_MIN, [TY_I64] = INT64_MIN },
      high[] = {
        [TY_U8] = UINT8_MAX, [TY_I8] = INT8_MAX, [TY_I16] = INT16_MAX, [TY_I32] = INT32_MAX, [TY_I64] = INT64_MAX
      };
  if (reduction == PROD) return ty_value_of_int(1);
  if (reduction != AMAX && reduction != AMIN) return ty_value_of_int(0);
  if (ty_is_float(d)) return ty_value_of_float(reduction == AMAX ? -INFINITY : INFINITY);
  return ty_value_of_int(reduction == AMAX ? low[d] : high[d]);
}

/* The part of src that the index covers. */
static ty_tensor *covered(ty_tensor *src, const ty_tensor *index) {
  for (int d = 0; src && d < index->v.ndim; d++)
    if (src->v.size[d] != index->v.size[d]) src = ty_slice(src, d, 0, index->v.size[d], 1);
  return src;
}

static ty_tensor *mean_of(ty_call *c, ty_tensor *x, int64_t dim, ty_tensor *index, ty_tensor *src, bool include_self) {
  (void)c;
  ty_tensor *count = ty_ones_like(x, TY_DTYPE_DEFAULT);
  if (!include_self && count) count = ty_scatter(count, dim, index, ty_value_of_int(0));
  count = count ? ty_scatter_add(count, dim, index, ty_ones_like(src, TY_DTYPE_DEFAULT)) : NULL;
  ty_tensor *sum = ty_scatter_add(x, dim, index, src);
  if (!count || !sum) return NULL;
  return ty_is_float(ty_dtype_of(x)) ? ty_div(sum, count)
                                     : ty_floor_div(ty_value_of_tensor(sum), ty_value_of_tensor(count));
}

bool fwd_scatter_reduce(ty_call *c) {
  const ty_scatter_reduce_args *a = TY_ARGS(scatter_reduce, c);
  ty_tensor *x = a->x.t, *index = a->index.t, *src = a->src.t;
  int64_t dim = a->dim.i;
  int reduction = ty_check_choice(c, 4, reductions), d;
  if (reduction < 0 || !ty_check_dim(c, 1, x->v.ndim, &d) || !ty_check_index_dtype(c, 2)) return false;
  bool ok = index->v.ndim == x->v.ndim;
  for (int i = 0; ok && i < x->v.ndim; i++) ok = i == d || index->v.size[i] <= x->v.size[i];
  if (!ok)
    return ty_op_fail(c, TY_EINVAL,
                      "index: expected %d dimensions with sizes up to those of x %s except along dim %d, got %s",
                      x->v.ndim, ty_describe(x), d, ty_describe(index));
  ok = src->v.ndim == index->v.ndim && ty_dtype_of(src) == ty_dtype_of(x);
  for (int i = 0; ok && i < index->v.ndim; i++) ok = index->v.size[i] <= src->v.size[i];
  if (!ok)
    return ty_op_fail(c, TY_EINVAL, "src: expected at least the sizes of index %s and the dtype of x (%s), got %s",
                      ty_describe(index), ty_dtype_name[ty_dtype_of(x)], ty_describe(src));
  src = covered(src, index);
  if (!a->include_self.i) x = ty_scatter(x, dim, index, neutral(reduction, ty_dtype_of(x)));
  if (!x || !src) return false;
  if (reduction == SUM) return ty_out_set(c, 0, ty_scatter_add(x, dim, index, src));
  if (reduction == MEAN) return ty_out_set(c, 0, mean_of(c, x, dim, index, src, a->include_self.i));
  return ty_out_set(c, 0, ty_scatter_combine(x, dim, index, src, reductions[reduction]));
}

bool fwd_scatter_combine(ty_call *c) {
  const ty_scatter_combine_args *a = TY_ARGS(scatter_combine, c);
  ty_tensor *x = a->x.t, *index = a->index.t, *src = a->src.t;
  static const char *const choices[] = { "amax", "amin", "prod", NULL };
  int dim, k = ty_check_choice(c, 4, choices);
  if (k < 0 || !ty_check_dim(c, 1, x->v.ndim, &dim) || !ty_check_index_dtype(c, 2)) return false;
  bool ok = index->v.ndim == x->v.ndim && ty_same_shape(&index->v, &src->v) && ty_dtype_of(src) == ty_dtype_of(x);
  for (int i = 0; ok && i < x->v.ndim; i++) ok = i == dim || index->v.size[i] <= x->v.size[i];
  if (!ok)
    return ty_op_fail(c, TY_EINVAL, "src: expected the shape of index %s, and its sizes within x %s, got %s",
                      ty_describe(index), ty_describe(x), ty_describe(src));
  return ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_launch(c, (ty_tensor *[]){ x, index, src }, 3, &(ty_p_dim){ .dim = dim, .k = k });
}

/* amax, amin: shared equally among all that reach the result. */
static bool extreme_gradient(ty_vjp *c, ty_tensor *x, int64_t dim, ty_tensor *index, ty_tensor *src) {
  ty_tensor *y = ty_detach(c->out[0]);
  ty_dtype d = y ? ty_dtype_of(y) : TY_F32;
  ty_tensor *own = ty_to(ty_eq(x, y), d), *theirs = ty_to(ty_eq(src, ty_gather(y, dim, index)), d);
  ty_tensor *count = own && theirs ? ty_scatter_add(own, dim, index, theirs) : NULL;
  ty_tensor *share = count ? ty_div(c->g[0], ty_clamp(count, 1, TY_NO_NUMBER)) : NULL;
  if (c->need[0]) c->dx[0] = ty_mul(own, share);
  if (c->need[2]) c->dx[2] = ty_mul(theirs, ty_gather(share, dim, index));
  return true;
}

/* prod: y / src, and where src is 0 the product of the others, which is 0 with a second one. */
static bool product_gradient(ty_vjp *c, ty_tensor *x, int64_t dim, ty_tensor *index, ty_tensor *src) {
  ty_tensor *g = c->g[0], *zero = ty_eq(src, 0), *own_zero = ty_eq(x, 0);
  ty_dtype d = ty_dtype_of(x);
  ty_tensor *filled = ty_where(zero, 1.0, src), *own_filled = ty_where(own_zero, 1.0, x);
  if (!filled || !own_filled) return false;
  /* How many zeros met at each position, and the product of all that is not 0. */
  ty_tensor *zeros = ty_scatter_add(ty_to(own_zero, d), dim, index, ty_to(zero, d));
  ty_tensor *rest = ty_scatter_combine(own_filled, dim, index, filled, "prod");
  if (!zeros || !rest) return false;
  if (c->need[0]) {
    ty_tensor *others = ty_eq(ty_sub(zeros, ty_to(own_zero, d)), 0);
    c->dx[0] = ty_mul(g, ty_where(others, ty_div(rest, own_filled), 0.0));
  }
  if (c->need[2]) {
    ty_tensor *others = ty_eq(ty_sub(ty_gather(zeros, dim, index), ty_to(zero, d)), 0);
    ty_tensor *slope = ty_where(others, ty_div(ty_gather(rest, dim, index), filled), 0.0);
    c->dx[2] = ty_mul(ty_gather(g, dim, index), slope);
  }
  return true;
}

bool vjp_scatter_combine(ty_vjp *c) {
  const ty_scatter_combine_args *a = TY_ARGS(scatter_combine, c);
  bool product = strcmp(a->reduce.s, "prod") == 0;
  return (product ? product_gradient : extreme_gradient)(c, a->x.t, a->dim.i, a->index.t, a->src.t);
}
