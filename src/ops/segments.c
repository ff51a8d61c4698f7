/* Segments: runs of positions along a dimension, which are reduced, or made to sum to one, each for itself. They are
 * given by `offsets` [m + 1], where each begins and the last one ends; the positions may be taken in another `order`.
 * What equal elements of an index have in common is a segment too: segments_of() brings them together. */
#include <string.h>

#include "../../kernels/indexing.h"
#include "../autograd/autograd.h"

/* ---- what brings positions together ---- */

bool fwd_segments_of(ty_call *c) {
  const ty_segments_of_args *a = TY_ARGS(segments_of, c);
  ty_tensor *index = a->index.t;
  if (!ty_check_index_dtype(c, 0) || !ty_check_ndim(c, 0, 1, 1, "[n]")) return false;
  if (a->count.i < 0 || a->count.i >= INT32_MAX)
    return ty_op_fail(c, TY_EINVAL, "count: expected a number of segments in [0, %d), got %lld", INT32_MAX,
                      (long long)a->count.i);
  return ty_out_like(c, 0, index, TY_I64) &&
         ty_out(c, 1, ty_device_of(index), TY_I64, 1, &(int64_t){ a->count.i + 1 }) && ty_launch(c, &index, 1, NULL);
}

/* ---- how segments are given ---- */

typedef struct segments {
  ty_tensor *offsets, *order; /* i64; order may be NULL */
  int dim;
  int64_t n, m; /* positions, segments */
} segments;

/* Offsets and order as the ops below take them. */
static bool take(ty_call *c, const ty_tensor *x, int offsets, int order, int dim, segments *s) {
  *s = (segments){ .offsets = c->arg[offsets].t, .order = c->arg[order].t };
  if (!ty_check_dim(c, dim, x->v.ndim, &s->dim)) return false;
  if (!ty_check_index_dtype(c, offsets) || !ty_check_ndim(c, offsets, 1, 1, "[segments + 1]")) return false;
  s->n = x->v.size[s->dim];
  s->m = s->offsets->v.size[0] - 1;
  if (s->m < 0) return ty_op_fail(c, TY_EINVAL, "offsets: expected at least one, got %s", ty_describe(s->offsets));
  if (!(s->offsets = ty_to(s->offsets, TY_I64))) return false;
  if (!s->order) return true;
  return ty_check_index_dtype(c, order) && ty_check_ndim(c, order, 1, 1, "[n]") && (s->order = ty_to(s->order, TY_I64));
}

static bool check_order(ty_call *c, const segments *s) {
  return !s->order || s->order->v.size[0] == s->n ||
         ty_op_fail(c, TY_EINVAL, "order: expected the %lld positions along dim %d, got %s", (long long)s->n, s->dim,
                    ty_describe(s->order));
}

/* Of segment_reduce and segment_softmax, which may be given an index and a count instead. Without `sorted` the index
 * stays as it is, s->offsets NULL. */
static bool take_either(ty_call *c, ty_tensor *x, int first, bool sorted, segments *s) {
  const ty_value *a = c->arg + first; /* offsets, order, index, count, dim */
  ty_tensor *index = a[2].t;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., n, ...]")) return false;
  if ((a[0].t != NULL) == (index != NULL))
    return ty_op_fail(c, TY_EINVAL, "offsets: expected offsets or else an index and a count, got %s",
                      index ? "both" : "neither");
  if (!index) return take(c, x, first, first + 1, first + 4, s) && check_order(c, s);
  if (a[1].t) return ty_op_fail(c, TY_EINVAL, "order: expected none beside an index, got %s", ty_describe(a[1].t));
  *s = (segments){ .m = a[3].i };
  if (!ty_check_dim(c, first + 4, x->v.ndim, &s->dim) || !ty_check_index_dtype(c, first + 2)) return false;
  s->n = x->v.size[s->dim];
  if (index->v.ndim != 1 || index->v.size[0] != s->n)
    return ty_op_fail(c, TY_EINVAL, "index: expected [%lld] for dim %d of x %s, got %s", (long long)s->n, s->dim,
                      ty_describe(x), ty_describe(index));
  if (s->m < 0 || s->m >= INT32_MAX)
    return ty_op_fail(c, TY_EINVAL, "count: expected with an index how many segments there are, in [0, %d), got %lld",
                      INT32_MAX, (long long)s->m);
  ty_tensor *made[2];
  if (!sorted) return true;
  if (!ty_segments_of(index, s->m, made)) return false;
  s->order = made[0], s->offsets = made[1];
  return true;
}

static void size_with(const ty_tensor *x, int dim, int64_t n, int64_t *size) {
  memcpy(size, x->v.size, sizeof *size * (size_t)x->v.ndim);
  size[dim] = n;
}

/* t [m] so that it broadcasts against segments of x. */
static ty_tensor *along(ty_tensor *t, const ty_tensor *x, int dim) {
  int64_t size[TY_MAX_DIMS];
  for (int d = 0; d < x->v.ndim; d++) size[d] = d == dim ? -1 : 1;
  return t ? ty_reshape(t, (ty_ints){ size, x->v.ndim }) : NULL;
}

/* ---- reductions ---- */

static const char *const reductions[] = { "sum", "mean", "max", "min", "prod", NULL };
enum { SUM, MEAN, MAX, MIN, PROD };

/* How many positions each segment has, [m] i64. */
static ty_tensor *lengths(const segments *s, ty_tensor *index) {
  if (index)
    return ty_index_add(ty_zeros(TY_INTS(s->m), TY_I64, ty_device_of(index)), 0, index, ty_ones_like(index, TY_I64));
  return ty_sub(ty_narrow(s->offsets, 0, 1, s->m), ty_narrow(s->offsets, 0, 0, s->m));
}

bool fwd_segment_reduce(ty_call *c) {
  const ty_segment_reduce_args *a = TY_ARGS(segment_reduce, c);
  ty_tensor *x = a->x.t, *index = a->index.t, *y;
  segments s;
  const int k = ty_check_choice(c, 1, reductions);
  if (k < 0 || !take_either(c, x, 2, k > MEAN, &s)) return false;
  const ty_value empty = a->empty;
  if (k > MEAN) return ty_out_set(c, 0, ty_segment_combine(x, s.offsets, s.order, reductions[k], s.dim, empty));
  if (index) {
    int64_t size[TY_MAX_DIMS];
    size_with(x, s.dim, s.m, size);
    y = ty_index_add(ty_zeros((ty_ints){ size, x->v.ndim }, ty_dtype_of(x), ty_device_of(x)), s.dim, index, x);
  } else {
    y = ty_segment_sum(x, s.offsets, s.order, s.dim);
  }
  if (!y || (k == SUM && empty.kind == TY_NONE)) return ty_out_set(c, 0, y);
  ty_tensor *count = along(lengths(&s, index), x, s.dim);
  if (!count) return false;
  if (k == MEAN) {
    ty_tensor *divisor = ty_to(ty_clamp(count, 1, TY_NO_NUMBER), ty_dtype_of(x));
    y = ty_is_float(ty_dtype_of(x)) ? ty_div(y, divisor)
                                    : ty_floor_div(ty_value_of_tensor(y), ty_value_of_tensor(divisor));
  }
  if (y && empty.kind != TY_NONE)
    y = ty_where(ty_eq(count, 0), ty_scalar_of(empty, ty_dtype_of(x), ty_device_of(x)), y);
  return ty_out_set(c, 0, y);
}

static bool launch(ty_call *c, ty_tensor *x, const segments *s, int64_t size_along, int k, ty_value empty) {
  int64_t size[TY_MAX_DIMS];
  size_with(x, s->dim, size_along, size);
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), x->v.ndim, size) &&
         ty_launch(c, (ty_tensor *[]){ x, s->offsets, s->order }, 3,
                   &(ty_p_segments){ .dim = s->dim, .k = k, .empty = ty_number_of(empty) });
}

bool fwd_segment_sum(ty_call *c) {
  ty_tensor *x = TY_ARGS(segment_sum, c)->x.t;
  segments s;
  return take(c, x, 1, 2, 3, &s) && check_order(c, &s) && launch(c, x, &s, s.m, 0, ty_value_of_int(0));
}

bool vjp_segment_sum(ty_vjp *c) {
  const ty_segment_sum_args *a = TY_ARGS(segment_sum, c);
  const ty_ints size = ty_vjp_size(c, 0);
  const int64_t dim = a->dim.i < 0 ? a->dim.i + size.n : a->dim.i;
  c->dx[0] = ty_segment_spread(c->g[0], a->offsets.t, a->order.t, dim, size.v[dim]);
  return true;
}

bool fwd_segment_spread(ty_call *c) {
  const ty_segment_spread_args *a = TY_ARGS(segment_spread, c);
  ty_tensor *g = a->g.t;
  segments s;
  if (!take(c, g, 1, 2, 3, &s)) return false;
  if (s.n != s.m)
    return ty_op_fail(c, TY_EINVAL, "g: expected %lld segments along dim %d, got %s", (long long)s.m, s.dim,
                      ty_describe(g));
  s.n = a->size.i;
  if (s.n < 0) return ty_op_fail(c, TY_EINVAL, "size: expected 0 or more, got %lld", (long long)s.n);
  return check_order(c, &s) && launch(c, g, &s, s.n, 0, ty_value_of_int(0));
}

bool vjp_segment_spread(ty_vjp *c) {
  const ty_segment_spread_args *a = TY_ARGS(segment_spread, c);
  c->dx[0] = ty_segment_sum(c->g[0], a->offsets.t, a->order.t, a->dim.i);
  return true;
}

bool fwd_segment_combine(ty_call *c) {
  const ty_segment_combine_args *a = TY_ARGS(segment_combine, c);
  static const char *const choices[] = { "max", "min", "prod", NULL };
  static const int kinds[] = { TY_COMBINE_MAX, TY_COMBINE_MIN, TY_COMBINE_PRODUCT };
  const int k = ty_check_choice(c, 3, choices);
  segments s;
  if (k < 0 || !take(c, a->x.t, 1, 2, 4, &s) || !check_order(c, &s)) return false;
  ty_value empty = a->empty.kind == TY_NONE ? ty_value_of_int(kinds[k] == TY_COMBINE_PRODUCT) : a->empty;
  return launch(c, a->x.t, &s, s.m, kinds[k], empty);
}

/* max, min: shared equally among all that reach the result. */
static ty_tensor *extreme_gradient(ty_vjp *c, ty_tensor *x, ty_tensor *offsets, ty_tensor *order, int64_t dim) {
  const int64_t n = x->v.size[dim];
  ty_tensor *y = ty_segment_spread(ty_detach(c->out[0]), offsets, order, dim, n);
  ty_tensor *hits = y ? ty_to(ty_eq(x, y), ty_dtype_of(x)) : NULL;
  ty_tensor *count = hits ? ty_segment_sum(hits, offsets, order, dim) : NULL;
  ty_tensor *share = count ? ty_div(c->g[0], ty_clamp(count, 1, TY_NO_NUMBER)) : NULL;
  return share ? ty_mul(hits, ty_segment_spread(share, offsets, order, dim, n)) : NULL;
}

/* prod: y / x, and where x is 0 the product of the others, which is 0 with a second one. */
static ty_tensor *product_gradient(ty_vjp *c, ty_tensor *x, ty_tensor *offsets, ty_tensor *order, int64_t dim) {
  const int64_t n = x->v.size[dim];
  const ty_dtype d = ty_dtype_of(x);
  ty_tensor *zero = ty_eq(x, 0), *filled = zero ? ty_where(zero, 1.0, x) : NULL;
  if (!filled) return NULL;
  ty_tensor *zeros = ty_segment_sum(ty_to(zero, d), offsets, order, dim);
  ty_tensor *rest = ty_segment_combine(filled, offsets, order, "prod", dim, TY_NO_NUMBER);
  if (!zeros || !rest) return NULL;
  ty_tensor *others = ty_eq(ty_sub(ty_segment_spread(zeros, offsets, order, dim, n), ty_to(zero, d)), 0);
  ty_tensor *slope = ty_div(ty_segment_spread(rest, offsets, order, dim, n), filled);
  ty_tensor *g = ty_segment_spread(c->g[0], offsets, order, dim, n);
  return others && slope && g ? ty_mul(g, ty_where(others, slope, 0.0)) : NULL;
}

bool vjp_segment_combine(ty_vjp *c) {
  const ty_segment_combine_args *a = TY_ARGS(segment_combine, c);
  ty_tensor *x = a->x.t;
  const int64_t dim = a->dim.i < 0 ? a->dim.i + x->v.ndim : a->dim.i;
  c->dx[0] = (strcmp(a->reduce.s, "prod") == 0 ? product_gradient : extreme_gradient)(c, x, a->offsets.t, a->order.t,
                                                                                      dim);
  return true;
}

/* ---- softmax ---- */

bool fwd_segment_softmax(ty_call *c) {
  const ty_segment_softmax_args *a = TY_ARGS(segment_softmax, c);
  segments s;
  return take_either(c, a->x.t, 1, true, &s) && ty_out_set(c, 0, ty_segment_weights(a->x.t, s.offsets, s.order, s.dim));
}

bool fwd_segment_weights(ty_call *c) {
  ty_tensor *x = TY_ARGS(segment_weights, c)->x.t;
  segments s;
  return take(c, x, 1, 2, 3, &s) && check_order(c, &s) && launch(c, x, &s, s.n, 0, ty_value_of_int(0));
}

/* y (g - sum of g y over the segment) */
bool vjp_segment_weights(ty_vjp *c) {
  const ty_segment_weights_args *a = TY_ARGS(segment_weights, c);
  ty_tensor *y = c->out[0], *g = c->g[0];
  const int64_t dim = a->dim.i < 0 ? a->dim.i + y->v.ndim : a->dim.i;
  if (ty_vjp_plain()) {
    c->dx[0] = ty_segment_weights_backward(g, y, a->offsets.t, a->order.t, dim);
    return true;
  }
  ty_tensor *sum = ty_segment_sum(ty_mul(g, y), a->offsets.t, a->order.t, dim);
  c->dx[0] = sum ? ty_mul(y, ty_sub(g, ty_segment_spread(sum, a->offsets.t, a->order.t, dim, y->v.size[dim]))) : NULL;
  return true;
}

bool fwd_segment_weights_backward(ty_call *c) {
  const ty_segment_weights_backward_args *a = TY_ARGS(segment_weights_backward, c);
  ty_tensor *g = a->g.t, *y = a->y.t;
  segments s;
  if (!ty_check_floats(c, 1)) return false;
  if (!ty_same_shape(&g->v, &y->v))
    return ty_op_fail(c, TY_EINVAL, "g: expected the shape of y %s, got %s", ty_describe(y), ty_describe(g));
  return take(c, y, 2, 3, 4, &s) && check_order(c, &s) && (g = ty_to(g, ty_dtype_of(y))) &&
         ty_out_like(c, 0, y, ty_dtype_of(y)) &&
         ty_launch(c, (ty_tensor *[]){ g, s.offsets, s.order, y }, 4, &(ty_p_segments){ .dim = s.dim });
}
