/* Products of sparse matrices in compressed rows with dense ones, and the products of dense rows where a sparse matrix
 * has elements. Each is the other's gradient: that of the elements is a sampled product, that of the dense matrix a product
 * with the transposed one. A matrix is `offsets` [m + 1], `columns` [k] and elements [k], of which entry j is the one
 * at order[j] where there is an order; `turned_` is the same of the transposed matrix, with the same elements. */
#include <string.h>

#include "op.h"

typedef struct structure {
  ty_tensor *offsets, *columns, *order;
} structure;

/* Both structures begin at argument `first`; the matrix has m rows (-1: whatever it has) and n columns. */
typedef struct given {
  structure own, turned;
  int64_t m, n, k;
} given;

static bool take_list(ty_call *c, int arg, int64_t size, const char *what, ty_tensor **t) {
  if (!ty_check_index_dtype(c, arg)) return false;
  if (c->arg[arg].t->v.ndim != 1 || c->arg[arg].t->v.size[0] != size)
    return ty_op_fail(c, TY_EINVAL, "%s: expected [%lld], %s, got %s", c->op->args[arg].name, (long long)size, what,
                      ty_describe(c->arg[arg].t));
  return (*t = ty_to(c->arg[arg].t, TY_I64)) != NULL;
}

static bool take(ty_call *c, int first, given *x) {
  const ty_value *a = c->arg + first;
  if (!ty_check_ndim(c, first + 1, 1, 1, "[elements]") || !ty_check_ndim(c, first, 1, 1, "[rows + 1]")) return false;
  x->k = a[1].t->v.size[0];
  if (x->m < 0) x->m = a[0].t->v.size[0] - 1;
  if (x->m < 0) return ty_op_fail(c, TY_EINVAL, "offsets: expected [rows + 1], got %s", ty_describe(a[0].t));
  if (!take_list(c, first, x->m + 1, "one more than rows", &x->own.offsets) ||
      !take_list(c, first + 1, x->k, "one for each element", &x->own.columns) ||
      (a[2].t && !take_list(c, first + 2, x->k, "one for each element", &x->own.order)))
    return false;
  if (!a[3].t != !a[4].t || (a[5].t && !a[3].t))
    return ty_op_fail(c, TY_EINVAL,
                      "turned_offsets: expected it with turned_columns, and turned_order with both, or none of them");
  return !a[3].t || (take_list(c, first + 3, x->n + 1, "one more than columns", &x->turned.offsets) &&
                     take_list(c, first + 4, x->k, "one for each element", &x->turned.columns) &&
                     (!a[5].t || take_list(c, first + 5, x->k, "one for each element", &x->turned.order)));
}

/* The transposed matrix: elements in the order of their columns, those of a column as they stand. */
static bool turn(structure s, int64_t n, structure *to) {
  ty_tensor *sorted[2];
  const int64_t m = s.offsets->v.size[0] - 1, k = s.columns->v.size[0];
  if (!ty_segments_of(s.columns, n, sorted)) return false;
  ty_tensor *rows = ty_segment_spread(ty_arange(0, m, 1, TY_I64, ty_device_of(s.offsets)), s.offsets, NULL, 0, k);
  *to = (structure){ sorted[1], rows ? ty_index_select(rows, 0, sorted[0]) : NULL,
                     s.order ? ty_index_select(s.order, 0, sorted[0]) : sorted[0] };
  return to->columns && to->order;
}

static ty_tensor *times(ty_tensor *values, ty_tensor *x, structure s, structure turned) {
  return ty_sparse_mm(values, x, s.offsets, s.columns, s.order, turned.offsets, turned.columns, turned.order);
}

static ty_tensor *sampled(ty_tensor *a, ty_tensor *b, structure s, structure turned) {
  return ty_sddmm(a, b, s.offsets, s.columns, s.order, turned.offsets, turned.columns, turned.order);
}

bool fwd_sparse_mm(ty_call *c) {
  const ty_sparse_mm_args *a = TY_ARGS(sparse_mm, c);
  ty_tensor *values = a->values.t, *x = a->x.t;
  if (!ty_check_ndim(c, 0, 1, 1, "[elements]") || !ty_check_floats(c, 1) || !ty_check_ndim(c, 1, 2, 2, "[n, d]"))
    return false;
  given s = { .m = -1, .n = x->v.size[0] };
  if (!take(c, 2, &s)) return false;
  if (values->v.size[0] != s.k)
    return ty_op_fail(c, TY_EINVAL, "values: expected [%lld], one for each of columns %s, got %s", (long long)s.k,
                      ty_describe(a->columns.t), ty_describe(values));
  const ty_dtype dtype = ty_promote(ty_dtype_of(values), ty_dtype_of(x));
  if (!(values = ty_to(values, dtype)) || !(x = ty_to(x, dtype))) return false;
  return ty_out(c, 0, ty_device_of(x), dtype, 2, (int64_t[]){ s.m, x->v.size[1] }) &&
         ty_launch(c, (ty_tensor *[]){ values, x, s.own.offsets, s.own.columns, s.own.order }, 5, NULL);
}

static bool structure_of(const ty_value *a, structure *s) {
  *s = (structure){ ty_to(a[0].t, TY_I64), ty_to(a[1].t, TY_I64), a[2].t ? ty_to(a[2].t, TY_I64) : NULL };
  return s->offsets && s->columns && (!a[2].t || s->order);
}

/* What a rule finds in its call. `turned` is made where it is wanted and was not given. */
static bool structures(const ty_value *a, int64_t n, bool wanted, structure *own, structure *turned) {
  *turned = (structure){ NULL, NULL, NULL };
  if (!structure_of(a, own)) return false;
  return a[3].t ? structure_of(a + 3, turned) : !wanted || turn(*own, n, turned);
}

bool vjp_sparse_mm(ty_vjp *c) {
  const ty_sparse_mm_args *a = TY_ARGS(sparse_mm, c);
  structure own, turned;
  if (!structures(&a->offsets, ty_vjp_size(c, 1).v[0], c->need[1], &own, &turned)) return false;
  if (c->need[0]) c->dx[0] = sampled(c->g[0], a->x.t, own, turned);
  if (c->need[1]) c->dx[1] = times(a->values.t, c->g[0], turned, own);
  return true;
}

bool fwd_sddmm(ty_call *c) {
  const ty_sddmm_args *p = TY_ARGS(sddmm, c);
  ty_tensor *a = p->a.t, *b = p->b.t;
  if (!ty_check_ndim(c, 0, 2, 2, "[m, d]") || !ty_check_floats(c, 1) || !ty_check_ndim(c, 1, 2, 2, "[n, d]"))
    return false;
  if (a->v.size[1] != b->v.size[1])
    return ty_op_fail(c, TY_EINVAL, "b: expected rows of %lld elements, as a %s has, got %s", (long long)a->v.size[1],
                      ty_describe(a), ty_describe(b));
  given s = { .m = a->v.size[0], .n = b->v.size[0] };
  if (!take(c, 2, &s)) return false;
  const ty_dtype dtype = ty_promote(ty_dtype_of(a), ty_dtype_of(b));
  if (!(a = ty_to(a, dtype)) || !(b = ty_to(b, dtype))) return false;
  return ty_out(c, 0, ty_device_of(a), dtype, 1, &s.k) &&
         ty_launch(c, (ty_tensor *[]){ a, b, s.own.offsets, s.own.columns, s.own.order }, 5, NULL);
}

bool vjp_sddmm(ty_vjp *c) {
  const ty_sddmm_args *p = TY_ARGS(sddmm, c);
  structure own, turned;
  if (!structures(&p->offsets, ty_vjp_size(c, 1).v[0], c->need[1], &own, &turned)) return false;
  if (c->need[0]) c->dx[0] = times(c->g[0], p->b.t, own, turned);
  if (c->need[1]) c->dx[1] = times(c->g[0], p->a.t, turned, own);
  return true;
}
