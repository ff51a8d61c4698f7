/* Reading and writing by index tensors: embedding, gather, scatter, index_select, index_add, and what depends on
 * values: nonzero, masked_select, one_hot. Index values are checked by the kernels. */
#include <string.h>

#include "../autograd/autograd.h"

/* The sizes of t with one of them replaced. */
static void size_with(const ty_tensor *t, int dim, int64_t n, int64_t *size) {
  memcpy(size, t->v.size, sizeof *size * (size_t)t->v.ndim);
  if (t->v.ndim) size[dim] = n;
}

/* gather, scatter: `index` has the rank of t and, outside of `dim` (-1: everywhere), no larger size. */
static bool check_within(ty_call *c, const char *name, const ty_tensor *index, const ty_tensor *t, int dim) {
  bool ok = index->v.ndim == t->v.ndim;
  for (int d = 0; ok && d < t->v.ndim; d++) ok = d == dim || index->v.size[d] <= t->v.size[d];
  if (ok) return true;
  if (dim < 0)
    return ty_op_fail(c, TY_EINVAL, "src: expected at least the sizes of index %s, got %s", ty_describe(index),
                      ty_describe(t));
  return ty_op_fail(c, TY_EINVAL,
                    "index: expected %d dimensions with sizes up to those of %s %s except along dim %d, got %s",
                    t->v.ndim, name, ty_describe(t), dim, ty_describe(index));
}

/* index_select, index_add: a list of positions. */
static bool check_list(ty_call *c, int arg) {
  return ty_check_index_dtype(c, arg) && ty_check_ndim(c, arg, 0, 1, "[n]");
}

static bool same_but(const ty_tensor *t, int ndim, const int64_t *size) {
  return t->v.ndim == ndim && memcmp(t->v.size, size, sizeof *size * (size_t)ndim) == 0;
}

/* src in the dtype of x; fractions into integers are refused. Scoped. */
static ty_tensor *source_as(ty_call *c, ty_tensor *src, ty_dtype dtype) {
  if (ty_is_float(ty_dtype_of(src)) && !ty_is_float(dtype)) {
    ty_op_fail(c, TY_EINVAL, "src: expected a dtype that fits into x (%s), got %s", ty_dtype_name[dtype],
               ty_describe(src));
    return NULL;
  }
  return ty_to(src, dtype);
}

/* ---- embedding ---- */

bool fwd_embedding(ty_call *c) {
  const ty_embedding_args *a = TY_ARGS(embedding, c);
  ty_tensor *w = a->weight.t, *index = a->index.t;
  if (!ty_check_ndim(c, 0, 2, 2, "[n, width]") || !ty_check_index_dtype(c, 1) ||
      !ty_check_ndim(c, 1, 0, TY_MAX_DIMS - 1, "[...]"))
    return false;
  if (a->padding_index.i < -1 || a->padding_index.i >= w->v.size[0])
    return ty_op_fail(c, TY_EINVAL, "padding_index: expected a row of weight %s or -1 for none, got %lld",
                      ty_describe(w), (long long)a->padding_index.i);
  if (ty_is_quantized(ty_dtype_of(w))) return ty_out_set(c, 0, ty_embedding_quantized(w, index));
  int64_t size[TY_MAX_DIMS];
  memcpy(size, index->v.size, sizeof *size * (size_t)index->v.ndim);
  size[index->v.ndim] = w->v.size[1];
  return ty_out(c, 0, ty_device_of(w), ty_dtype_of(w), index->v.ndim + 1, size) &&
         ty_launch(c, (ty_tensor *[]){ w, index }, 2, &(ty_p_dim){ .dim = 0 });
}

bool vjp_embedding(ty_vjp *c) {
  const ty_embedding_args *a = TY_ARGS(embedding, c);
  int64_t padding = a->padding_index.i;
  /* Tied weights: a head that uses the same matrix has come before, and the rows are few beside it. */
  c->dx[0] = c->sum[0] ? ty_embedding_add_(c->sum[0], c->g[0], a->index.t, padding)
                       : ty_embedding_backward(c->g[0], a->index.t, ty_vjp_size(c, 0).v[0], padding);
  return true;
}

static bool check_rows(ty_call *c, const ty_tensor *g, int at) {
  const ty_tensor *index = c->arg[at].t;
  int n = index->v.ndim;
  if (!ty_check_index_dtype(c, at)) return false;
  if (g->v.ndim == n + 1 && memcmp(g->v.size, index->v.size, sizeof *g->v.size * (size_t)n) == 0) return true;
  return ty_op_fail(c, TY_EINVAL, "g: expected one row for each index of %s, got %s", ty_describe(index),
                    ty_describe(g));
}

bool fwd_embedding_add_(ty_call *c) {
  const ty_embedding_add__args *a = TY_ARGS(embedding_add_, c);
  ty_tensor *x = a->x.t, *g = a->g.t;
  if (!check_rows(c, g, 2) || !ty_check_ndim(c, 0, 2, 2, "[n, width]")) return false;
  if (ty_dtype_of(g) != ty_dtype_of(x) || g->v.size[g->v.ndim - 1] != x->v.size[1])
    return ty_op_fail(c, TY_EINVAL, "g: expected rows like those of x %s, got %s", ty_describe(x), ty_describe(g));
  c->out[0] = ty_retain(x);
  return ty_launch(c, (ty_tensor *[]){ x, a->index.t, g }, 3, &(ty_p_dim){ .dim = 0, .k = a->padding_index.i });
}

bool fwd_embedding_backward(ty_call *c) {
  const ty_embedding_backward_args *a = TY_ARGS(embedding_backward, c);
  ty_tensor *g = a->g.t, *index = a->index.t;
  int n = index->v.ndim;
  if (!check_rows(c, g, 1)) return false;
  return ty_out(c, 0, ty_device_of(g), ty_dtype_of(g), 2, (int64_t[]){ a->rows.i, g->v.size[n] }) &&
         ty_launch(c, (ty_tensor *[]){ NULL, index, g }, 3, &(ty_p_dim){ .dim = 0, .k = a->padding_index.i });
}

bool vjp_embedding_backward(ty_vjp *c) {
  const ty_embedding_backward_args *a = TY_ARGS(embedding_backward, c);
  ty_tensor *dg = ty_embedding(c->g[0], a->index.t, -1);
  if (a->padding_index.i >= 0) dg = ty_masked_fill(dg, ty_unsqueeze(ty_eq(a->index.t, a->padding_index.i), -1), 0);
  c->dx[0] = dg;
  return true;
}

/* ---- gather ---- */

bool fwd_gather(ty_call *c) {
  const ty_gather_args *a = TY_ARGS(gather, c);
  ty_tensor *x = a->x.t, *index = a->index.t;
  int dim;
  return ty_check_dim(c, 1, x->v.ndim, &dim) && ty_check_index_dtype(c, 2) && check_within(c, "x", index, x, dim) &&
         ty_out_like(c, 0, index, ty_dtype_of(x)) &&
         ty_launch(c, (ty_tensor *[]){ x, index }, 2, &(ty_p_dim){ .dim = dim });
}

bool vjp_gather(ty_vjp *c) {
  const ty_gather_args *a = TY_ARGS(gather, c);
  c->dx[0] = ty_gather_backward(c->g[0], a->dim.i, a->index.t, ty_vjp_size(c, 0));
  return true;
}

bool fwd_gather_backward(ty_call *c) {
  const ty_gather_backward_args *a = TY_ARGS(gather_backward, c);
  ty_tensor *g = a->g.t, *index = a->index.t;
  int dim, ndim = a->size.is.n;
  if (!ty_check_dim(c, 1, ndim, &dim) || !ty_check_index_dtype(c, 2)) return false;
  if (!ty_same_shape(&g->v, &index->v))
    return ty_op_fail(c, TY_EINVAL, "g: expected the shape of index %s, got %s", ty_describe(index), ty_describe(g));
  if (!ty_out(c, 0, ty_device_of(g), ty_dtype_of(g), ndim, a->size.is.v)) return false;
  return check_within(c, "size", index, c->out[0], dim) &&
         ty_launch(c, (ty_tensor *[]){ NULL, index, g }, 3, &(ty_p_dim){ .dim = dim });
}

bool vjp_gather_backward(ty_vjp *c) {
  const ty_gather_backward_args *a = TY_ARGS(gather_backward, c);
  c->dx[0] = ty_gather(c->g[0], a->dim.i, a->index.t);
  return true;
}

/* ---- scatter, scatter_add ---- */

/* The part of src that index covers. */
static ty_tensor *covered(ty_tensor *src, const ty_tensor *index) {
  for (int d = 0; src && d < index->v.ndim; d++)
    if (src->v.size[d] != index->v.size[d]) src = ty_slice(src, d, 0, index->v.size[d], 1);
  return src;
}

/* The gradient of covered(): zeros where src had nothing to do. */
static ty_tensor *uncovered(ty_tensor *g, ty_ints size) {
  for (int d = 0; g && d < size.n; d++)
    if (g->v.size[d] != size.v[d]) g = ty_slice_backward(g, size.v[d], d, 0, g->v.size[d], 1);
  return g;
}

static bool scatter(ty_call *c, ty_tensor *x, ty_tensor *index, ty_value src) {
  int dim;
  if (!ty_check_dim(c, 1, x->v.ndim, &dim) || !ty_check_index_dtype(c, 2) || !check_within(c, "x", index, x, dim))
    return false;
  ty_tensor *s;
  if (src.kind == TY_TENSOR) {
    if (!check_within(c, "src", index, src.t, -1)) return false;
    s = covered(source_as(c, src.t, ty_dtype_of(x)), index);
  } else {
    s = ty_scalar(src, ty_dtype_of(x), ty_device_of(x));
  }
  return s && ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_launch(c, (ty_tensor *[]){ x, index, s }, 3, &(ty_p_dim){ .dim = dim });
}

bool fwd_scatter(ty_call *c) {
  const ty_scatter_args *a = TY_ARGS(scatter, c);
  return scatter(c, a->x.t, a->index.t, a->src);
}

bool vjp_scatter(ty_vjp *c) {
  const ty_scatter_args *a = TY_ARGS(scatter, c);
  ty_tensor *g = c->g[0], *index = a->index.t;
  if (c->need[0]) c->dx[0] = ty_scatter(g, a->dim.i, index, ty_value_of_int(0));
  if (!c->need[2]) return true;
  /* Of repeated indices only the last wrote, so only it has a gradient: find which position that was. */
  ty_tensor *dsrc = ty_gather(g, a->dim.i, index);
  int dim = (int)a->dim.i + (a->dim.i < 0 ? index->v.ndim : 0);
  if (index->v.ndim && index->v.size[dim] > 1) {
    int64_t along[TY_MAX_DIMS];
    for (int d = 0; d < index->v.ndim; d++) along[d] = d == dim ? index->v.size[d] : 1;
    ty_tensor *position = ty_reshape(ty_arange(0, along[dim], 1, TY_I64, ty_device_of(index)),
                                     (ty_ints){ along, index->v.ndim });
    position = ty_expand(position, (ty_ints){ index->v.size, index->v.ndim });
    ty_tensor *last = ty_zeros(ty_vjp_size(c, 0), TY_I64, ty_device_of(index));
    last = ty_gather(position ? ty_scatter(last, dim, index, ty_value_of_tensor(position)) : NULL, dim, index);
    dsrc = last && dsrc ? ty_where(ty_eq(last, position), dsrc, 0.0) : NULL;
  }
  c->dx[2] = uncovered(dsrc, ty_vjp_size(c, 2));
  return true;
}

bool fwd_scatter_add(ty_call *c) {
  const ty_scatter_add_args *a = TY_ARGS(scatter_add, c);
  return scatter(c, a->x.t, a->index.t, a->src);
}

bool vjp_scatter_add(ty_vjp *c) {
  const ty_scatter_add_args *a = TY_ARGS(scatter_add, c);
  c->dx[0] = c->g[0];
  if (c->need[2]) c->dx[2] = uncovered(ty_gather(c->g[0], a->dim.i, a->index.t), ty_vjp_size(c, 2));
  return true;
}

/* ---- index_select, index_add ---- */

bool fwd_index_select(ty_call *c) {
  const ty_index_select_args *a = TY_ARGS(index_select, c);
  ty_tensor *x = a->x.t, *index = a->index.t;
  int dim;
  if (!ty_check_dim(c, 1, x->v.ndim, &dim) || !check_list(c, 2)) return false;
  if (x->v.ndim == 0 && index->v.count != 1)
    return ty_op_fail(c, TY_EINVAL, "index: expected one position for a 0-d tensor, got %s", ty_describe(index));
  int64_t size[TY_MAX_DIMS];
  size_with(x, dim, index->v.count, size);
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), x->v.ndim, size) &&
         ty_launch(c, (ty_tensor *[]){ x, index }, 2, &(ty_p_dim){ .dim = dim });
}

bool vjp_index_select(ty_vjp *c) {
  const ty_index_select_args *a = TY_ARGS(index_select, c);
  ty_ints size = ty_vjp_size(c, 0);
  int64_t n = size.n ? size.v[a->dim.i + (a->dim.i < 0 ? size.n : 0)] : 1;
  c->dx[0] = ty_index_select_backward(c->g[0], a->dim.i, a->index.t, n);
  return true;
}

bool fwd_index_select_backward(ty_call *c) {
  const ty_index_select_backward_args *a = TY_ARGS(index_select_backward, c);
  ty_tensor *g = a->g.t, *index = a->index.t;
  int dim;
  if (!ty_check_dim(c, 1, g->v.ndim, &dim) || !check_list(c, 2)) return false;
  if ((g->v.ndim ? g->v.size[dim] : 1) != index->v.count)
    return ty_op_fail(c, TY_EINVAL, "g: expected one position for each index of %s along dim %d, got %s",
                      ty_describe(index), dim, ty_describe(g));
  int64_t size[TY_MAX_DIMS];
  size_with(g, dim, a->size.i, size);
  return ty_out(c, 0, ty_device_of(g), ty_dtype_of(g), g->v.ndim, size) &&
         ty_launch(c, (ty_tensor *[]){ NULL, index, g }, 3, &(ty_p_dim){ .dim = dim, .k = -1 });
}

bool vjp_index_select_backward(ty_vjp *c) {
  const ty_index_select_backward_args *a = TY_ARGS(index_select_backward, c);
  c->dx[0] = ty_index_select(c->g[0], a->dim.i, a->index.t);
  return true;
}

bool fwd_index_add(ty_call *c) {
  const ty_index_add_args *a = TY_ARGS(index_add, c);
  ty_tensor *x = a->x.t, *index = a->index.t, *src = a->src.t;
  int dim;
  if (!ty_check_dim(c, 1, x->v.ndim, &dim) || !check_list(c, 2)) return false;
  int64_t size[TY_MAX_DIMS];
  size_with(x, dim, index->v.count, size);
  if (!same_but(src, x->v.ndim, size) || (x->v.ndim == 0 && index->v.count != 1))
    return ty_op_fail(c, TY_EINVAL,
                      "src: expected the shape of x %s with %lld positions along dim %d, one for each index, got %s",
                      ty_describe(x), (long long)index->v.count, dim, ty_describe(src));
  src = source_as(c, src, ty_dtype_of(x));
  return src && ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_launch(c, (ty_tensor *[]){ x, index, src }, 3, &(ty_p_dim){ .dim = dim, .k = -1 });
}

bool vjp_index_add(ty_vjp *c) {
  const ty_index_add_args *a = TY_ARGS(index_add, c);
  c->dx[0] = c->g[0];
  if (c->need[2]) c->dx[2] = ty_index_select(c->g[0], a->dim.i, a->index.t);
  return true;
}

/* ---- results whose shape depends on values ---- */

static bool fail_meta(ty_call *c, const ty_tensor *t, const char *what) {
  return ty_op_fail(c, TY_EUNSUPPORTED, "%s depends on the values, which %s does not have", what, ty_describe(t));
}

bool fwd_nonzero(ty_call *c) {
  ty_tensor *x = TY_ARGS(nonzero, c)->x.t;
  if (ty_device_of(x) == TY_META) return fail_meta(c, x, "the number of nonzero elements");
  ty_tensor *set = ty_dtype_of(x) == TY_BOOL ? x : ty_ne(x, 0);
  ty_tensor *total = ty_sum(set, TY_NO_INTS, false, TY_I64);
  bool ok = total != NULL;
  double count = ok ? ty_item(total, &ok) : 0;
  return ok && ty_out(c, 0, ty_device_of(x), TY_I64, 2, (int64_t[]){ (int64_t)count, x->v.ndim }) &&
         ty_launch(c, &x, 1, NULL);
}

bool fwd_masked_select(ty_call *c) {
  const ty_masked_select_args *a = TY_ARGS(masked_select, c);
  ty_tensor *x = a->x.t, *mask = a->mask.t;
  if (ty_dtype_of(mask) != TY_BOOL)
    return ty_op_fail(c, TY_EINVAL, "mask: expected dtype bool, got %s", ty_describe(mask));
  if (ty_device_of(x) == TY_META) return fail_meta(c, x, "the number of selected elements");
  int64_t size[TY_MAX_DIMS], count = 1;
  int ndim;
  if (!ty_broadcast(c->op, &x->v, &mask->v, &ndim, size)) return false;
  for (int d = 0; d < ndim; d++) count *= size[d];
  ty_ints shape = { size, ndim };
  ty_tensor *at = ty_nonzero(ty_reshape(ty_expand(mask, shape), TY_INTS(count)));
  ty_tensor *flat = ty_reshape(ty_expand(x, shape), TY_INTS(count));
  return ty_out_set(c, 0, at ? ty_index_select(flat, 0, ty_reshape(at, TY_INTS(at->v.size[0]))) : NULL);
}

bool fwd_one_hot(ty_call *c) {
  const ty_one_hot_args *a = TY_ARGS(one_hot, c);
  ty_tensor *x = a->x.t;
  int64_t classes = a->classes.i;
  if (!ty_check_ndim(c, 0, 0, TY_MAX_DIMS - 1, "[...]")) return false;
  if (classes < -1)
    return ty_op_fail(c, TY_EINVAL, "classes: expected a number of classes, or -1 for max + 1, got %lld",
                      (long long)classes);
  if (classes == -1) {
    if (ty_device_of(x) == TY_META) return fail_meta(c, x, "the number of classes");
    if (x->v.count == 0)
      return ty_op_fail(c, TY_EINVAL, "classes: expected a number for the empty %s, which has no maximum",
                        ty_describe(x));
    ty_tensor *most = ty_max(x, TY_NO_INTS, false);
    bool ok = most != NULL;
    classes = ok ? (int64_t)ty_item(most, &ok) + 1 : 0;
    if (!ok) return false;
    if (classes < 0) classes = 0; /* the kernel names the negative value */
  }
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof *size * (size_t)x->v.ndim);
  size[x->v.ndim] = classes;
  ty_tensor *index = ty_unsqueeze(ty_to(x, TY_I64), -1), *one = ty_scalar(1, TY_I64, ty_device_of(x));
  return index && one && ty_out(c, 0, ty_device_of(x), TY_I64, x->v.ndim + 1, size) &&
         ty_launch(c, (ty_tensor *[]){ NULL, index, one }, 3, &(ty_p_dim){ .dim = x->v.ndim });
}
