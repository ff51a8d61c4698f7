/* x[i, j, mask] with tensors as indices, reading and writing: index, index_put, index_copy, masked_scatter; and writing
 * through slices. Several indices become one, counted over all of their dimensions, which index_select, index_add and
 * index_copy understand. */
#include <string.h>

#include "../../kernels/indexing.h"
#include "../autograd/autograd.h"

/* ---- several index tensors as one ---- */

bool fwd_ravel_index(ty_call *c) {
  const ty_ravel_index_args *a = TY_ARGS(ravel_index, c);
  ty_tensors indices = a->indices.ts;
  ty_p_sizes p = { .n = a->size.is.n };
  int64_t size[TY_MAX_DIMS], all = 1;
  ty_view shape;
  int ndim = 0;
  if (indices.n < 1 || indices.n > TY_MAX_DIMS || indices.n != p.n)
    return ty_op_fail(c, TY_EINVAL, "size: expected one size for each of 1 to %d index tensors, got %d for %d",
                      TY_MAX_DIMS, p.n, indices.n);
  ty_tensor *in[TY_MAX_DIMS];
  for (int i = 0; i < p.n; i++) {
    if (ty_dtype_of(indices.v[i]) != TY_I64 && ty_dtype_of(indices.v[i]) != TY_I32)
      return ty_op_fail(c, TY_EINVAL, "indices: expected indices of dtype i64 or i32, got %s",
                        ty_describe(indices.v[i]));
    p.size[i] = a->size.is.v[i];
    if (p.size[i] < 0 || __builtin_mul_overflow(all, p.size[i] ? p.size[i] : 1, &all))
      return ty_op_fail(c, TY_EINVAL, "size: expected sizes whose product is an integer, got %lld",
                        (long long)p.size[i]);
    if (i == 0) ndim = indices.v[0]->v.ndim, memcpy(size, indices.v[0]->v.size, sizeof size);
    else if (!ty_broadcast(c->op, &shape, &indices.v[i]->v, &ndim, size)) return false;
    shape = indices.v[i]->v;
    ty_view_set_contiguous(&shape, ndim, size);
  }
  for (int i = 0; i < p.n; i++)
    if (!(in[i] = ty_expand(ty_to(indices.v[i], TY_I64), (ty_ints){ size, ndim }))) return false;
  return ty_out(c, 0, ty_device_of(in[0]), TY_I64, ndim, size) && ty_launch(c, in, p.n, &p);
}

/* How a tensor is read and written by index tensors: its dimensions in `order`, of which those from `before` to before
 * `after` become one of size `merged`, whose positions are `linear` [count]; `size` is that of what is selected. */
typedef struct plan {
  bool in_order;
  int ndim, before, after;
  int64_t order[TY_MAX_DIMS], merged, sizes[TY_MAX_DIMS];
  ty_tensor *linear;
  int result_ndim, index_at, index_ndim;
  int64_t result[TY_MAX_DIMS], rows[TY_MAX_DIMS]; /* rows: the result with the index flat */
} plan;

typedef struct entry {
  ty_tensor *index; /* i64 or i32 */
  int dim, ndims;   /* the dimensions it stands for: a mask has several */
  int64_t size;
  bool checked;
} entry;

/* A mask as the positions at which it is true. */
static bool set_mask(const ty_op *op, entry *e, ty_tensor *mask, ty_ints size) {
  int n = mask->v.ndim;
  bool fits = n > 0 && e->dim + n <= size.n;
  for (int d = 0; fits && d < n; d++) fits = mask->v.size[d] == size.v[e->dim + d];
  if (!fits)
    return ty_op_fail_(op, TY_EINVAL, "indices: expected a mask with the sizes of x %s from dimension %d on, got %s",
                       ty_shape_text(size.n, size.v), e->dim, ty_describe(mask));
  if (ty_device_of(mask) == TY_META)
    return ty_op_fail_(op, TY_EUNSUPPORTED,
                       "the number of selected elements depends on the values, which %s does not "
                       "have",
                       ty_describe(mask));
  e->ndims = n;
  e->size = mask->v.count;
  e->checked = true;
  ty_tensor *at = ty_nonzero(ty_reshape(mask, TY_INTS(mask->v.count)));
  return at && (e->index = ty_reshape(at, TY_INTS(at->v.size[0])));
}

/* The entries in the order of their dimensions. False after an error. */
static bool read_entries(const ty_op *op, ty_ints size, ty_tensors indices, ty_ints dims, entry *list) {
  if (indices.n < 1 || (dims.n && dims.n != indices.n))
    return ty_op_fail_(op, TY_EINVAL,
                       "indices: expected at least one index tensor, and a dim for each in dims, got %d "
                       "and %d",
                       indices.n, dims.n);
  for (int i = 0, next = 0; i < indices.n; i++) {
    ty_tensor *t = indices.v[i];
    int64_t dim = dims.n ? dims.v[i] : next;
    if (dim < 0) dim += size.n;
    if (dim < 0 || dim >= size.n || i == TY_MAX_DIMS)
      return ty_op_fail_(op, TY_EINVAL,
                         "indices: expected index tensors for the %d dimensions of x %s, got one for "
                         "dimension %lld",
                         size.n, ty_shape_text(size.n, size.v), (long long)dim);
    entry e = { t, (int)dim, 1, size.v[dim], false };
    if (ty_dtype_of(t) == TY_BOOL) {
      if (!set_mask(op, &e, t, size)) return false;
    } else if (ty_dtype_of(t) != TY_I64 && ty_dtype_of(t) != TY_I32) {
      return ty_op_fail_(op, TY_EINVAL, "indices: expected tensors of dtype i64, i32 or bool, got %s", ty_describe(t));
    }
    next = e.dim + e.ndims;
    int at = i;
    for (; at > 0 && list[at - 1].dim > e.dim; at--) list[at] = list[at - 1];
    list[at] = e;
  }
  for (int i = 1; i < indices.n; i++)
    if (list[i].dim < list[i - 1].dim + list[i - 1].ndims)
      return ty_op_fail_(op, TY_EINVAL, "dims: expected one index for a dimension, got two for dimension %d",
                         list[i].dim);
  return true;
}

static bool make_plan(const ty_op *op, ty_ints size, ty_tensors indices, ty_ints dims, plan *p) {
  entry list[TY_MAX_DIMS];
  int n = indices.n, at = 0;
  if (!read_entries(op, size, indices, dims, list)) return false;
  *p = (plan){ .ndim = size.n, .merged = 1 };
  bool adjacent = true, indexed[TY_MAX_DIMS] = { false };
  ty_tensor *index[TY_MAX_DIMS];
  int64_t sizes[TY_MAX_DIMS];
  for (int i = 0; i < n; i++) {
    adjacent &= i == 0 || list[i].dim == list[i - 1].dim + list[i - 1].ndims;
    for (int d = 0; d < list[i].ndims; d++) indexed[list[i].dim + d] = true;
    p->merged *= list[i].size;
    index[i] = list[i].index;
    sizes[i] = list[i].size;
  }
  p->before = adjacent ? list[0].dim : 0; /* else the indexed dimensions come first, and so does what they select */
  for (int pass = 0; pass < 3; pass++) {  /* before, indexed, after */
    for (int d = 0; d < size.n; d++) {
      int where = indexed[d] ? 1 : d < p->before ? 0 : 2;
      if (where == pass) p->order[at++] = d;
    }
    if (pass == 1) p->after = at;
  }
  p->in_order = true;
  for (int d = 0; d < size.n; d++) {
    p->in_order &= p->order[d] == d;
    p->sizes[d] = size.v[p->order[d]];
  }
  if (n == 1 && list[0].checked) p->linear = index[0];
  else p->linear = ty_ravel_index((ty_tensors){ index, n }, (ty_ints){ sizes, n });
  if (!p->linear) return false;
  const ty_view *l = &p->linear->v;
  p->index_at = p->before;
  p->index_ndim = l->ndim;
  if (p->before + l->ndim + size.n - p->after > TY_MAX_DIMS)
    return ty_op_fail_(op, TY_EINVAL, "indices: %s of x %s have more than %d dimensions", ty_describe(p->linear),
                       ty_shape_text(size.n, size.v), TY_MAX_DIMS);
  for (int d = 0; d < p->before; d++) p->result[p->result_ndim++] = p->sizes[d];
  for (int d = 0; d < l->ndim; d++) p->result[p->result_ndim++] = l->size[d];
  for (int d = p->after; d < size.n; d++) p->result[p->result_ndim++] = p->sizes[d];
  p->linear = ty_reshape(p->linear, TY_INTS(l->count));
  return p->linear != NULL;
}

/* Sizes with the indexed dimensions as one, of `n` positions. */
static ty_ints merged_size(const plan *p, int64_t n, int64_t *size) {
  int k = 0;
  for (int d = 0; d < p->before; d++) size[k++] = p->sizes[d];
  size[k++] = n;
  for (int d = p->after; d < p->ndim; d++) size[k++] = p->sizes[d];
  return (ty_ints){ size, k };
}

static ty_tensor *merged(const plan *p, ty_tensor *x) {
  int64_t size[TY_MAX_DIMS + 1];
  if (!p->in_order) x = ty_permute(x, (ty_ints){ p->order, p->ndim });
  return p->after - p->before == 1 ? x : ty_reshape(x, merged_size(p, p->merged, size));
}

static ty_tensor *read_by(const plan *p, ty_tensor *x) {
  ty_tensor *rows = ty_index_select(merged(p, x), p->before, p->linear);
  return p->index_ndim == 1 ? rows : ty_reshape(rows, (ty_ints){ p->result, p->result_ndim });
}

bool fwd_index(ty_call *c) {
  const ty_index_args *a = TY_ARGS(index, c);
  ty_tensor *x = a->x.t;
  plan p;
  return make_plan(c->op, (ty_ints){ x->v.size, x->v.ndim }, a->indices.ts, a->dims.is, &p) &&
         ty_out_set(c, 0, read_by(&p, x));
}

/* ---- writing ---- */

/* `values` in the dtype of x with the size of the rows that are written, contiguous and nothing that the write changes;
 * a number as one element, or repeated where it is added. Scoped. */
static ty_tensor *rows_of(ty_call *c, const plan *p, ty_tensor *x, ty_value values, bool accumulate) {
  int64_t size[TY_MAX_DIMS + 1];
  ty_ints rows = merged_size(p, p->linear->v.count, size), result = { p->result, p->result_ndim };
  if (values.kind != TY_TENSOR) {
    ty_tensor *one = ty_scalar_of(values, ty_dtype_of(x), ty_device_of(x));
    return accumulate ? ty_contiguous(ty_expand(one, rows)) : one;
  }
  ty_tensor *v = values.t;
  int extra = v->v.ndim - result.n;
  bool fits = true;
  for (int d = 0; fits && d < v->v.ndim; d++)
    fits = v->v.size[d] == 1 || (d >= extra && v->v.size[d] == result.v[d - extra]);
  if (!fits) {
    ty_op_fail(c, TY_EINVAL, "values: expected what broadcasts to the %s that is written, got %s",
               ty_shape_text(result.n, result.v), ty_describe(v));
    return NULL;
  }
  if (extra > 0) v = ty_reshape(v, (ty_ints){ v->v.size + extra, result.n });
  v = ty_contiguous(ty_expand(ty_to(v, ty_dtype_of(x)), result));
  if (v && v->storage == x->storage) v = ty_clone(v);
  return ty_reshape(v, rows);
}

bool fwd_index_put_(ty_call *c) {
  const ty_index_put__args *a = TY_ARGS(index_put_, c);
  ty_tensor *x = a->x.t;
  bool add = a->accumulate.i;
  plan p;
  if (add && ty_dtype_of(x) == TY_BOOL)
    return ty_op_fail(c, TY_EINVAL, "x: expected numbers to add to, got %s", ty_describe(x));
  if (!make_plan(c->op, (ty_ints){ x->v.size, x->v.ndim }, a->indices.ts, a->dims.is, &p)) return false;
  ty_tensor *rows = rows_of(c, &p, x, a->values, add), *target = merged(&p, x);
  if (!rows || !target) return false;
  ty_tensor *whole = target->storage == x->storage ? NULL : target; /* a copy, to be put back */
  if (!ty_launch_kernel(add ? TY_OP_index_add : TY_OP_index_copy, &target, 1, (ty_tensor *[]){ target, p.linear, rows },
                        3, &(ty_p_dim){ .dim = p.before, .k = -1 }))
    return false;
  if (whole) {
    ty_tensor *view = p.in_order ? x : ty_permute(x, (ty_ints){ p.order, p.ndim });
    if (!view || !ty_copy_into(view, ty_reshape(whole, (ty_ints){ p.sizes, p.ndim }))) return false;
  }
  c->out[0] = ty_retain(x);
  return true;
}

/* Which of the n positions was the last one to write its row: bool [n]. */
static ty_tensor *last_writers(ty_tensor *linear, int64_t size) {
  ty_tensor *own = ty_arange(0, linear->v.count, 1, TY_I64, ty_device_of(linear));
  ty_tensor *last = ty_zeros(TY_INTS(size), TY_I64, ty_device_of(linear));
  last = own && last ? ty_index_copy(last, 0, linear, ty_value_of_tensor(own)) : NULL;
  return ty_eq(ty_index_select(last, 0, linear), own);
}

bool vjp_index_put_(ty_vjp *c) {
  const ty_index_put__args *a = TY_ARGS(index_put_, c);
  ty_tensors indices = a->indices.ts;
  ty_tensor *g = c->g[0];
  bool add = a->accumulate.i;
  int at = 1 + indices.n; /* of the values among the inputs */
  if (c->need[0]) c->dx[0] = add ? g : ty_index_put(g, indices, ty_value_of_int(0), false, a->dims.is);
  if (!c->need[at]) return true;
  plan p;
  if (!make_plan(c->op, ty_vjp_size(c, 0), indices, a->dims.is, &p)) return false;
  ty_tensor *dv = read_by(&p, g);
  if (!add && dv) { /* of repeated positions only the last has a gradient */
    int64_t size[TY_MAX_DIMS];
    for (int d = 0; d < p.result_ndim; d++)
      size[d] = d >= p.index_at && d < p.index_at + p.index_ndim ? p.result[d] : 1;
    ty_tensor *own = ty_reshape(last_writers(p.linear, p.merged), (ty_ints){ size, p.result_ndim });
    dv = own ? ty_where(own, dv, 0.0) : NULL;
  }
  int extra = c->in[at].ndim - p.result_ndim;
  if (extra > 0) { /* values with more dimensions, of size 1 */
    int64_t size[TY_MAX_DIMS];
    for (int d = 0; d < c->in[at].ndim; d++) size[d] = d < extra ? 1 : p.result[d - extra];
    dv = ty_reshape(dv, (ty_ints){ size, c->in[at].ndim });
  }
  c->dx[at] = dv;
  return true;
}

bool fwd_index_put(ty_call *c) {
  const ty_index_put_args *a = TY_ARGS(index_put, c);
  ty_tensor *x = ty_clone(a->x.t);
  return x && ty_out_set(c, 0, ty_index_put_(x, a->indices.ts, a->values, a->accumulate.i, a->dims.is));
}

/* ---- index_copy, index_fill ---- */

bool fwd_index_copy(ty_call *c) {
  const ty_index_copy_args *a = TY_ARGS(index_copy, c);
  ty_tensor *x = a->x.t, *index = a->index.t, *src;
  int dim;
  if (!ty_check_dim(c, 1, x->v.ndim, &dim) || !ty_check_index_dtype(c, 2) || !ty_check_ndim(c, 2, 0, 1, "[n]"))
    return false;
  if (a->src.kind == TY_TENSOR) {
    src = a->src.t;
    bool fits = src->v.ndim == x->v.ndim && (x->v.ndim || index->v.count == 1);
    for (int d = 0; fits && d < x->v.ndim; d++) fits = src->v.size[d] == (d == dim ? index->v.count : x->v.size[d]);
    if (!fits)
      return ty_op_fail(c, TY_EINVAL,
                        "src: expected a number or the shape of x %s with %lld positions along dim %d, one for each "
                        "index, got %s",
                        ty_describe(x), (long long)index->v.count, dim, ty_describe(src));
    if (ty_is_float(ty_dtype_of(src)) && !ty_is_float(ty_dtype_of(x)))
      return ty_op_fail(c, TY_EINVAL, "src: expected a dtype that fits into x (%s), got %s",
                        ty_dtype_name[ty_dtype_of(x)], ty_describe(src));
    src = ty_to(src, ty_dtype_of(x));
  } else {
    src = ty_scalar_of(a->src, ty_dtype_of(x), ty_device_of(x));
  }
  return src && ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_launch(c, (ty_tensor *[]){ x, index, src }, 3, &(ty_p_dim){ .dim = dim });
}

bool vjp_index_copy(ty_vjp *c) {
  const ty_index_copy_args *a = TY_ARGS(index_copy, c);
  ty_tensor *index = a->index.t;
  int64_t ndim = c->in[0].ndim, dim = a->dim.i + (a->dim.i < 0 ? ndim : 0);
  if (c->need[0]) c->dx[0] = ty_index_copy(c->g[0], dim, index, ty_value_of_int(0));
  if (!c->need[2]) return true;
  ty_tensor *flat = ty_reshape(index, TY_INTS(index->v.count)), *ds = ty_index_select(c->g[0], dim, index);
  if (flat && ds && index->v.count > 1) {
    int64_t size[TY_MAX_DIMS];
    for (int d = 0; d < ndim; d++) size[d] = d == dim ? index->v.count : 1;
    ty_tensor *own = ty_reshape(last_writers(flat, c->in[0].size[dim]), (ty_ints){ size, (int)ndim });
    ds = own ? ty_where(own, ds, 0.0) : NULL;
  }
  c->dx[2] = ds;
  return true;
}

bool fwd_index_fill(ty_call *c) {
  const ty_index_fill_args *a = TY_ARGS(index_fill, c);
  ty_dtype d = ty_dtype_of(a->x.t);
  if (a->value.kind == TY_TENSOR) {
    const ty_tensor *x = a->x.t, *index = a->index.t;
    ty_tensor *value = a->value.t;
    if (value->v.ndim)
      return ty_op_fail(c, TY_EINVAL, "value: expected a number or a tensor without dimensions, got %s",
                        ty_describe(value));
    int dim;
    if (!ty_check_dim(c, 1, x->v.ndim, &dim)) return false;
    int64_t size[TY_MAX_DIMS];
    memcpy(size, x->v.size, sizeof *size * (size_t)x->v.ndim);
    if (x->v.ndim && index->v.ndim == 1) size[dim] = index->v.count;
    ty_tensor *src = ty_expand(ty_to(value, d), (ty_ints){ size, x->v.ndim });
    return ty_out_set(c, 0, src ? ty_index_copy(a->x.t, a->dim.i, a->index.t, ty_operand(src)) : NULL);
  }
  if (a->value.kind == TY_FLOAT && !ty_is_float(d) && a->value.f != floor(a->value.f))
    return ty_op_fail(c, TY_EINVAL, "value: expected an integer for x %s, got %g", ty_describe(a->x.t), a->value.f);
  return ty_out_set(c, 0, ty_index_copy(a->x.t, a->dim.i, a->index.t, a->value));
}

/* ---- masks, broadcast gathers ---- */

bool fwd_masked_scatter(ty_call *c) {
  const ty_masked_scatter_args *a = TY_ARGS(masked_scatter, c);
  ty_tensor *x = a->x.t, *mask = a->mask.t, *source = a->source.t;
  int64_t size[TY_MAX_DIMS];
  int ndim;
  if (ty_dtype_of(mask) != TY_BOOL)
    return ty_op_fail(c, TY_EINVAL, "mask: expected dtype bool, got %s", ty_describe(mask));
  if (ty_dtype_of(source) != ty_dtype_of(x))
    return ty_op_fail(c, TY_EINVAL, "source: expected the dtype of x (%s), got %s", ty_dtype_name[ty_dtype_of(x)],
                      ty_describe(source));
  if (!ty_broadcast(c->op, &x->v, &mask->v, &ndim, size)) return false;
  if (ndim != x->v.ndim || memcmp(size, x->v.size, sizeof *size * (size_t)ndim) != 0)
    return ty_op_fail(c, TY_EINVAL, "mask: %s does not broadcast to x %s", ty_describe(mask), ty_describe(x));
  if (ty_device_of(x) == TY_META)
    return ty_op_fail(c, TY_EUNSUPPORTED,
                      "the number of elements written depends on the values, which %s does not have", ty_describe(x));
  ty_ints shape = { size, ndim };
  ty_tensor *at = ty_nonzero(ty_reshape(ty_expand(mask, shape), TY_INTS(x->v.count)));
  if (!at) return false;
  int64_t n = at->v.size[0];
  if (source->v.count < n)
    return ty_op_fail(c, TY_EINVAL, "source: expected at least the %lld elements at which the mask is true, got %s",
                      (long long)n, ty_describe(source));
  ty_tensor *values = ty_slice(ty_reshape(source, TY_INTS(source->v.count)), 0, 0, n, 1);
  ty_tensor *flat = ty_reshape(x, TY_INTS(x->v.count));
  if (!values || !flat) return false;
  flat = ty_index_copy(flat, 0, ty_reshape(at, TY_INTS(n)), ty_value_of_tensor(values));
  return ty_out_set(c, 0, ty_reshape(flat, shape));
}

/* What comes without a dim is taken flat. */
bool fwd_take_along_dim(ty_call *c) {
  const ty_take_along_dim_args *a = TY_ARGS(take_along_dim, c);
  ty_tensor *x = a->x.t, *index = a->index.t;
  if (!ty_check_index_dtype(c, 1)) return false;
  if (a->dim.kind == TY_NONE)
    return ty_out_set(c, 0,
                      ty_gather(ty_reshape(x, TY_INTS(x->v.count)), 0, ty_reshape(index, TY_INTS(index->v.count))));
  int64_t n = x->v.ndim, dim = ty_number_of(a->dim).i, size[TY_MAX_DIMS], own;
  if (a->dim.kind != TY_INT || dim < -n || dim >= n)
    return ty_op_fail(c, TY_EINVAL, "dim: expected a dimension in [%lld, %lld] of x %s, got %s", (long long)-n,
                      (long long)n - 1, ty_describe(x), a->dim.kind == TY_INT ? "another" : "a fraction");
  if (dim < 0) dim += n;
  if (index->v.ndim != n)
    return ty_op_fail(c, TY_EINVAL, "index: expected the %d dimensions of x %s, got %s", (int)n, ty_describe(x),
                      ty_describe(index));
  for (int d = 0; d < n; d++) {
    int64_t p = x->v.size[d], q = index->v.size[d];
    if (d != dim && p != q && p != 1 && q != 1)
      return ty_op_fail(c, TY_EINVAL, "index: expected sizes that broadcast to x %s except along dim %lld, got %s",
                        ty_describe(x), (long long)dim, ty_describe(index));
    size[d] = d == dim ? p : p == 1 ? q : p;
  }
  x = ty_expand(x, (ty_ints){ size, (int)n });
  own = index->v.size[dim];
  size[dim] = own;
  return ty_out_set(c, 0, ty_gather(x, dim, ty_expand(index, (ty_ints){ size, (int)n })));
}

/* ---- writing through slices ---- */

ty_tensor *ty_apply_slices(ty_tensor *x, ty_ints items) {
  int at = 0;
  for (int i = 0; i + 4 <= items.n && x; i += 4) {
    const int64_t *it = items.v + i;
    switch (it[0]) {
      case TY_SLICE_SKIP: at += (int)it[1]; break;
      case TY_SLICE_NEW_DIM: x = ty_unsqueeze(x, at++); break;
      case TY_SLICE_POSITION: x = ty_select(x, at, it[1]); break;
      case TY_SLICE_RANGE: x = ty_slice(x, at++, it[1], it[2], it[3]); break;
      default: ty_fail(TY_EINVAL, "items: expected kinds from 0 to 3, got %lld", (long long)it[0]); return NULL;
    }
  }
  return x;
}

bool fwd_slice_put_(ty_call *c) {
  const ty_slice_put__args *a = TY_ARGS(slice_put_, c);
  ty_tensor *part = ty_apply_slices(a->x.t, a->items.is);
  bool ok = part && (a->source.kind == TY_TENSOR ? ty_copy_(part, a->source.t, false) : ty_fill_(part, a->source));
  if (ok) c->out[0] = ty_retain(a->x.t);
  return ok;
}

bool vjp_slice_put_(ty_vjp *c) {
  const ty_slice_put__args *a = TY_ARGS(slice_put_, c);
  ty_ints items = a->items.is;
  if (c->need[0]) {
    ty_tensor *g = ty_clone(c->g[0]);
    c->dx[0] = g ? ty_slice_put_(g, ty_value_of_int(0), items) : NULL;
  }
  if (c->need[1]) c->dx[1] = ty_apply_slices(c->g[0], items);
  return true;
}
