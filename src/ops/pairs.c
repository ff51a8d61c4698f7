/* Pairs and combinations: distances between points, products of sets, triangles, diagonals of blocks. */
#include <stdlib.h>
#include <string.h>

#include "../autograd/autograd.h"

/* ---- distances ---- */

/* x [..., n, d] and y [..., m, d] with one batch shape and dtype; [..., n, m] in `size`. */
static bool pair_up(ty_call *c, int first, ty_tensor **x, ty_tensor **y, int *ndim, int64_t *size) {
  if (!ty_check_ndim(c, first, 2, TY_MAX_DIMS, "[..., n, d]") ||
      !ty_check_ndim(c, first + 1, 2, TY_MAX_DIMS, "[..., m, d]") || !ty_check_floats(c, first + 1))
    return false;
  ty_dtype d = ty_promote(ty_dtype_of(*x), ty_dtype_of(*y));
  ty_tensor *both[] = { ty_to(*x, d), ty_to(*y, d) };
  if (!both[0] || !both[1]) return false;
  ty_view head[] = { both[0]->v, both[1]->v };
  int64_t width[] = { head[0].size[head[0].ndim - 1], head[1].size[head[1].ndim - 1] };
  if (width[0] != width[1])
    return ty_op_fail(c, TY_EINVAL, "%s: expected points of %lld coordinates, as those of %s, got %s",
                      c->op->args[first + 1].name, (long long)width[0], ty_describe(*x), ty_describe(*y));
  for (int i = 0; i < 2; i++) head[i].ndim = (int16_t)(head[i].ndim - 2);
  if (!ty_broadcast(c->op, &head[0], &head[1], ndim, size)) return false;
  int64_t points[2];
  for (int i = 0; i < 2; i++) {
    points[i] = both[i]->v.size[head[i].ndim];
    size[*ndim] = points[i];
    size[*ndim + 1] = width[0];
    if (!(both[i] = ty_expand(both[i], (ty_ints){ size, *ndim + 2 }))) return false;
  }
  *x = both[0];
  *y = both[1];
  size[*ndim] = points[0];
  size[*ndim + 1] = points[1];
  *ndim += 2;
  return true;
}

bool fwd_cdist(ty_call *c) {
  const ty_cdist_args *a = TY_ARGS(cdist, c);
  ty_tensor *in[] = { a->x.t, a->y.t };
  int64_t size[TY_MAX_DIMS + 2];
  int ndim;
  if (!pair_up(c, 0, &in[0], &in[1], &ndim, size)) return false;
  if (!(a->p.f >= 0)) return ty_op_fail(c, TY_EINVAL, "p: expected a number of at least 0, got %g", a->p.f);
  return ty_out(c, 0, ty_device_of(in[0]), ty_dtype_of(in[0]), ndim, size) &&
         ty_launch(c, in, 2, &(ty_p_scalars){ a->p.f, 0 });
}

/* The gradient for x of distances r with the gradient g, all contiguous and of one batch. */
bool fwd_cdist_backward(ty_call *c) {
  const ty_cdist_backward_args *a = TY_ARGS(cdist_backward, c);
  ty_tensor *x = a->x.t, *y = a->y.t, *in[] = { a->g.t, a->r.t, NULL, NULL };
  int64_t size[TY_MAX_DIMS + 2];
  int ndim;
  if (!pair_up(c, 2, &x, &y, &ndim, size)) return false;
  in[2] = x;
  in[3] = y;
  for (int i = 0; i < 2; i++) {
    bool same = in[i]->v.ndim == ndim && memcmp(in[i]->v.size, size, sizeof *size * (size_t)ndim) == 0;
    if (!same)
      return ty_op_fail(c, TY_EINVAL, "%s: expected distances %s, got %s", c->op->args[i].name,
                        ty_shape_text(ndim, size), ty_describe(in[i]));
    if (!(in[i] = ty_to(in[i], ty_dtype_of(x)))) return false;
  }
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_launch(c, in, 4, &(ty_p_scalars){ a->p.f, 0 });
}

/* sign(x - y) (|x - y| / r)^(p - 1), of which each pair gives g to x and takes it from y; 0 where r is. */
bool vjp_cdist(ty_vjp *c) {
  const ty_cdist_args *a = TY_ARGS(cdist, c);
  ty_tensor *x = a->x.t, *y = a->y.t, *g = c->g[0], *r = c->out[0];
  double p = a->p.f;
  if (ty_vjp_plain()) {
    if (c->need[0]) c->dx[0] = ty_cdist_backward(g, r, x, y, p);
    if (c->need[1]) c->dx[1] = ty_cdist_backward(ty_transpose(g, -1, -2), ty_transpose(r, -1, -2), y, x, p);
    return true;
  }
  ty_tensor *gap = ty_sub(ty_unsqueeze(x, -2), ty_unsqueeze(y, -3)), *size = ty_unsqueeze(r, -1);
  ty_tensor *zero = ty_eq(size, 0), *slope;
  if (p == 0) {
    slope = ty_mul(gap, 0.0);
  } else if (p == 1) {
    slope = ty_sign(gap);
  } else if (isinf(p)) {
    ty_tensor *reach = ty_detach(ty_abs(gap)), *reached = NULL;
    if (y->v.size[y->v.ndim - 1]) reached = ty_to(ty_eq(reach, ty_max(reach, TY_INTS(-1), true)), ty_dtype_of(r));
    else reached = reach;
    slope = ty_div(ty_mul(ty_sign(gap), reached), ty_sum(reached, TY_INTS(-1), true, TY_DTYPE_DEFAULT));
  } else {
    ty_tensor *kink = p < 1 ? ty_logical_or(ty_operand(zero), ty_operand(ty_eq(gap, 0))) : zero;
    ty_tensor *ratio = ty_div(gap, ty_where(kink, 1.0, size));
    slope = p == 2 ? ratio : ty_mul(ty_sign(gap), ty_pow(ty_where(kink, 1.0, ty_abs(ratio)), p - 1));
    slope = ty_where(kink, 0.0, slope);
  }
  ty_tensor *each = ty_mul(ty_where(zero, 0.0, slope), ty_unsqueeze(g, -1)); /* [..., n, m, d] */
  if (c->need[0]) c->dx[0] = ty_sum(each, TY_INTS(-2), false, TY_DTYPE_DEFAULT);
  if (c->need[1]) c->dx[1] = ty_neg(ty_sum(each, TY_INTS(-3), false, TY_DTYPE_DEFAULT));
  return true;
}

/* ---- positions ---- */

/* Item i of `count` [k] i64 is followed by count[i] others, first[i] and those after it; `total` of them in all. For
 * each of these the item that it follows, and the other. */
static bool followers(ty_tensor *count, ty_tensor *first, int64_t total, ty_tensor **item, ty_tensor **other) {
  ty_tensor *ends = ty_cumsum(count, 0, false);
  if (!ends) return false;
  ty_tensor *at = ty_arange(0, total, 1, TY_I64, ty_device_of(count));
  *item = ty_searchsorted(ends, at, true);
  ty_tensor *begin = ty_sub(ends, count);
  *other = ty_add(ty_sub(at, ty_index_select(begin, 0, *item)), ty_index_select(first, 0, *item));
  return *item && *other;
}

static bool triangle(ty_call *c, bool upper) {
  const ty_tril_indices_args *a = TY_ARGS(tril_indices, c); /* triu_indices has the same */
  int64_t rows = a->rows.i, columns = a->columns.i < 0 ? rows : a->columns.i, offset = a->offset.i, total = 0;
  int device = a->device.i == TY_DEVICE_DEFAULT ? TY_CPU : (int)a->device.i;
  if (rows < 0 || rows > INT32_MAX || columns > INT32_MAX)
    return ty_op_fail(c, TY_EINVAL, "rows: expected sizes from 0 to 2147483647, got %lld and %lld", (long long)rows,
                      (long long)columns);
  if (offset > INT32_MAX) offset = INT32_MAX;
  if (offset < -(int64_t)INT32_MAX) offset = -(int64_t)INT32_MAX;
  for (int64_t i = 0; i < rows; i++) {
    int64_t reach = i + offset + !upper; /* columns before it are below, or the diagonal */
    reach = reach < 0 ? 0 : reach > columns ? columns : reach;
    total += upper ? columns - reach : reach;
  }
  if (total == 0) return ty_out_set(c, 0, ty_zeros(TY_INTS(2, 0), TY_I64, device));
  ty_tensor *reach = ty_clamp(ty_arange(offset + !upper, offset + !upper + rows, 1, TY_I64, device), 0, columns);
  ty_tensor *count = upper ? ty_sub(columns, reach) : reach, *row, *column;
  ty_tensor *first = upper ? reach : ty_zeros_like(reach, TY_DTYPE_DEFAULT);
  if (!count || !first || !followers(count, first, total, &row, &column)) return false;
  return ty_out_set(c, 0, ty_stack(TY_LIST(row, column), 0));
}

bool fwd_tril_indices(ty_call *c) { return triangle(c, false); }
bool fwd_triu_indices(ty_call *c) { return triangle(c, true); }

/* Of x [..., n, n], what is above the diagonal. */
bool fwd_pdist(ty_call *c) {
  const ty_pdist_args *a = TY_ARGS(pdist, c);
  ty_tensor *x = a->x.t;
  if (!ty_check_ndim(c, 0, 2, 2, "[n, d]")) return false;
  if (!(a->p.f >= 0)) return ty_op_fail(c, TY_EINVAL, "p: expected a number of at least 0, got %g", a->p.f);
  int64_t n = x->v.size[0];
  ty_tensor *at = ty_triu_indices(n, n, 1, ty_device_of(x)), *all = ty_cdist(x, x, a->p.f);
  ty_tensor *flat = ty_add(ty_mul(ty_select(at, 0, 0), n), ty_select(at, 0, 1));
  return ty_out_set(c, 0, ty_index_select(ty_reshape(all, TY_INTS(n * n)), 0, flat));
}

/* ---- sets ---- */

bool fwd_cartesian_prod(ty_call *c) {
  ty_tensors xs = c->arg[0].ts;
  if (xs.n < 1 || xs.n > TY_MAX_DIMS)
    return ty_op_fail(c, TY_EINVAL, "xs: expected 1 to %d tensors, got %d", TY_MAX_DIMS, xs.n);
  int64_t size[TY_MAX_DIMS], count = 1, own[TY_MAX_DIMS];
  ty_dtype d = ty_dtype_of(xs.v[0]);
  for (int i = 0; i < xs.n; i++) {
    if (xs.v[i]->v.ndim != 1) return ty_op_fail(c, TY_EINVAL, "xs: expected tensors [n], got %s", ty_describe(xs.v[i]));
    size[i] = xs.v[i]->v.size[0];
    if (size[i] && count > INT64_MAX / 64 / size[i])
      return ty_op_fail(c, TY_EINVAL, "xs: expected fewer combinations than there are of %d tensors, the last %s",
                        i + 1, ty_describe(xs.v[i]));
    count *= size[i];
    d = ty_promote(d, ty_dtype_of(xs.v[i]));
  }
  ty_tensor *columns[TY_MAX_DIMS];
  for (int i = 0; i < xs.n; i++) {
    for (int k = 0; k < xs.n; k++) own[k] = k == i ? size[i] : 1;
    ty_tensor *x = ty_expand(ty_reshape(ty_to(xs.v[i], d), (ty_ints){ own, xs.n }), (ty_ints){ size, xs.n });
    if (!(columns[i] = ty_reshape(x, TY_INTS(count)))) return false;
  }
  return ty_out_set(c, 0, xs.n == 1 ? ty_clone(columns[0]) : ty_stack((ty_tensors){ columns, xs.n }, 1));
}

/* Prefixes of length 1, 2 ... r, each followed by all that may come after its last element. */
bool fwd_combinations(ty_call *c) {
  const ty_combinations_args *a = TY_ARGS(combinations, c);
  ty_tensor *x = a->x.t;
  if (!ty_check_ndim(c, 0, 1, 1, "[n]")) return false;
  int64_t n = x->v.size[0], r = a->r.i, next = a->replacement.i ? 0 : 1;
  if (r < 0 || r > 64) return ty_op_fail(c, TY_EINVAL, "r: expected a number from 0 to 64, got %lld", (long long)r);
  int device = ty_device_of(x);
  if (r == 0) return ty_out_set(c, 0, ty_zeros(TY_INTS(0), ty_dtype_of(x), device));
  ty_tensor *columns[64], *item, *other;
  int64_t totals[64] = { n }; /* binomials: of n over k + 1, and with repetitions of n + k over k + 1 */
  for (int64_t k = 1; k < r; k++) {
    int64_t more = next ? n - k : n + k;
    totals[k] = more > 0 ? (int64_t)((__int128)totals[k - 1] * more / (k + 1)) : 0;
    if (totals[k] > INT32_MAX)
      return ty_op_fail(c, TY_EINVAL, "r: expected fewer combinations than there are of %lld out of %lld elements",
                        (long long)r, (long long)n);
  }
  columns[0] = ty_arange(0, n, 1, TY_I64, device);
  for (int64_t k = 1; k < r; k++) {
    if (totals[k] == 0) {
      for (int64_t i = 0; i <= k; i++) columns[i] = ty_zeros(TY_INTS(0), TY_I64, device);
      continue;
    }
    ty_tensor *first = ty_add(columns[k - 1], next), *count = first ? ty_sub(n, first) : NULL;
    if (!count || !followers(count, first, totals[k], &item, &other)) return false;
    for (int64_t i = 0; i < k; i++) columns[i] = ty_index_select(columns[i], 0, item);
    columns[k] = other;
  }
  for (int64_t i = 0; i < r; i++)
    if (!(columns[i] = ty_index_select(x, 0, columns[i]))) return false;
  return ty_out_set(c, 0, ty_stack((ty_tensors){ columns, (int)r }, 1));
}

/* ---- blocks ---- */

bool fwd_block_diag(ty_call *c) {
  ty_tensors xs = c->arg[0].ts;
  if (xs.n < 1) return ty_op_fail(c, TY_EINVAL, "xs: expected at least one tensor, got none");
  ty_dtype d = ty_dtype_of(xs.v[0]);
  int64_t columns = 0, before = 0;
  for (int i = 0; i < xs.n; i++) {
    const ty_view *v = &xs.v[i]->v;
    if (v->ndim > 2) return ty_op_fail(c, TY_EINVAL, "xs: expected matrices, got %s", ty_describe(xs.v[i]));
    columns += v->ndim ? v->size[v->ndim - 1] : 1;
    d = ty_promote(d, ty_dtype_of(xs.v[i]));
  }
  ty_tensor **rows = malloc(sizeof *rows * (size_t)xs.n);
  if (!rows) return ty_op_fail(c, TY_ENOMEM, "not enough memory for a list of %d tensors", xs.n);
  bool ok = true;
  for (int i = 0; i < xs.n && ok; i++) {
    ty_tensor *x = ty_to(xs.v[i], d);
    while (x && x->v.ndim < 2) x = ty_unsqueeze(x, 0);
    if ((ok = x != NULL)) {
      int64_t width = x->v.size[1];
      rows[i] = ty_pad(x, TY_INTS(before, columns - before - width), "constant", TY_NO_NUMBER);
      before += width;
      ok = rows[i] != NULL;
    }
  }
  ok = ok && ty_out_set(c, 0, ty_concat((ty_tensors){ rows, xs.n }, 0));
  free(rows);
  return ok;
}
