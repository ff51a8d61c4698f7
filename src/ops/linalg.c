/* Linear algebra: cholesky, triangular and general systems, qr, svd, eigh and what is made of them. Gradients: Giles 2008,
 * "Collected Matrix Derivative Results"; for qr Walter and Lehmann 2010. */
#include <string.h>

#include "../autograd/autograd.h"

static const char *const layout = "[..., m, n]";

static ty_tensor *turned(ty_tensor *x) { return ty_transpose(x, -2, -1); }
static ty_tensor *times(ty_tensor *a, ty_tensor *b) { return ty_matmul(a, b); }
/* Of matrices; columns_of() also gives the length of a vector. */
static int64_t rows_of(const ty_tensor *x) { return x->v.size[x->v.ndim - 2]; }
static int64_t columns_of(const ty_tensor *x) { return x->v.size[x->v.ndim - 1]; }

static bool check_matrix(ty_call *c, int arg) { return ty_check_ndim(c, arg, 2, TY_MAX_DIMS, layout); }

static bool check_square(ty_call *c, int arg) {
  const ty_tensor *x = c->arg[arg].t;
  if (!ty_check_ndim(c, arg, 2, TY_MAX_DIMS, "[..., n, n]")) return false;
  return rows_of(x) == columns_of(x) || ty_op_fail(c, TY_EINVAL, "%s: expected square matrices [..., n, n], got %s",
                                                   c->op->args[arg].name, ty_describe(x));
}

/* (x + x') / 2 */
static ty_tensor *symmetric(ty_tensor *x) { return ty_mul(ty_add(x, turned(x)), 0.5); }

/* The lower triangle with half the diagonal. */
static ty_tensor *half_lower(ty_tensor *x) { return ty_mul(ty_add(ty_tril(x, 0), ty_tril(x, -1)), 0.5); }

/* diag(d) for d [..., n] times x [..., n, m], and x [..., m, n] times it. */
static ty_tensor *scaled_rows(ty_tensor *d, ty_tensor *x) { return ty_mul(ty_unsqueeze(d, -1), x); }
static ty_tensor *scaled_columns(ty_tensor *x, ty_tensor *d) { return ty_mul(x, ty_unsqueeze(d, -2)); }

static ty_tensor *identity(int64_t n, const ty_tensor *like) {
  return ty_eye(n, -1, ty_dtype_of(like), ty_device_of(like));
}

static ty_tensor *plus(ty_tensor *a, ty_tensor *b) { return !a ? b : !b ? a : ty_add(a, b); }

/* ---- cholesky ---- */

bool fwd_cholesky(ty_call *c) {
  const ty_cholesky_args *a = TY_ARGS(cholesky, c);
  if (!check_square(c, 0)) return false;
  ty_tensor *l = ty_cholesky_factor(a->x.t, true);
  return ty_out_set(c, 0, a->upper.i ? turned(l) : l);
}

bool fwd_cholesky_factor(ty_call *c) {
  const ty_cholesky_factor_args *a = TY_ARGS(cholesky_factor, c);
  ty_tensor *x = a->x.t;
  return check_square(c, 0) && ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_launch(c, &x, 1, &(ty_p_dim){ .flag = a->averaged.i });
}

/* l^-T half_lower(l' g) l^-1, as the gradient of a symmetric matrix. */
bool vjp_cholesky_factor(ty_vjp *c) {
  ty_tensor *l = c->out[0], *u = turned(l);
  ty_tensor *p = half_lower(times(u, ty_tril(c->g[0], 0)));
  ty_tensor *left = ty_triangular_solve(u, p, true, false);                        /* l^-T p */
  c->dx[0] = symmetric(turned(ty_triangular_solve(u, turned(left), true, false))); /* (l^-T (l^-T p)')' */
  return true;
}

/* ---- systems ---- */

/* a and b of a system with one batch shape and dtype; a vector b becomes a matrix. */
static bool pair_up(ty_call *c, ty_tensor **a, ty_tensor **b) {
  if (!ty_check_floats(c, 1)) return false;
  bool vector = (*b)->v.ndim == 1;
  ty_dtype dtype = ty_promote(ty_dtype_of(*a), ty_dtype_of(*b));
  *a = ty_to(*a, dtype);
  *b = vector ? ty_unsqueeze(ty_to(*b, dtype), -1) : ty_to(*b, dtype);
  if (!*a || !*b) return false;
  if ((*b)->v.ndim < 2 || rows_of(*a) != rows_of(*b))
    return ty_op_fail(c, TY_EINVAL, "b: expected [..., %lld, m] for a %s, got %s", (long long)rows_of(*a),
                      ty_describe(c->arg[0].t), ty_describe(c->arg[1].t));
  ty_view head_a = (*a)->v, head_b = (*b)->v;
  head_a.ndim = (int16_t)(head_a.ndim - 2);
  head_b.ndim = (int16_t)(head_b.ndim - 2);
  int64_t size[TY_MAX_DIMS + 2];
  int ndim;
  if (!ty_broadcast(c->op, &head_a, &head_b, &ndim, size)) return false;
  ty_tensor *both[] = { *a, *b };
  for (int i = 0; i < 2; i++) {
    size[ndim] = rows_of(both[i]);
    size[ndim + 1] = columns_of(both[i]);
    if (!(both[i] = ty_expand(both[i], (ty_ints){ size, ndim + 2 }))) return false;
  }
  *a = both[0];
  *b = both[1];
  return true;
}

static bool launch_system(ty_call *c, ty_tensor *a, ty_tensor *b, const void *params) {
  bool vector = c->arg[1].t->v.ndim == 1;
  return ty_out(c, 0, ty_device_of(b), ty_dtype_of(b), b->v.ndim - vector, b->v.size) &&
         ty_launch(c, (ty_tensor *[]){ a, b }, 2, params);
}

bool fwd_solve_triangular(ty_call *c) {
  const ty_solve_triangular_args *p = TY_ARGS(solve_triangular, c);
  ty_tensor *a = p->a.t, *b = p->b.t;
  if (!check_square(c, 0)) return false;
  bool upper = p->upper.i, unit = p->unitriangular.i, vector = b->v.ndim == 1;
  if (!p->left.i) { /* a' x' = b' */
    if (b->v.ndim < 2)
      return ty_op_fail(c, TY_EINVAL, "b: expected [..., m, n] when a is on the right, got %s", ty_describe(b));
    a = turned(a);
    b = turned(b);
    upper = !upper;
  }
  if (!pair_up(c, &a, &b)) return false;
  ty_tensor *x = ty_triangular_solve(a, b, upper, unit);
  return ty_out_set(c, 0, vector ? ty_squeeze(x, TY_INTS(-1)) : p->left.i ? x : turned(x));
}

bool fwd_triangular_solve(ty_call *c) {
  const ty_triangular_solve_args *p = TY_ARGS(triangular_solve, c);
  ty_tensor *a = p->a.t, *b = p->b.t;
  return check_square(c, 0) && check_matrix(c, 1) && pair_up(c, &a, &b) &&
         launch_system(c, a, b, &(ty_p_triangular){ .upper = p->upper.i, .unit = p->unit.i });
}

bool vjp_triangular_solve(ty_vjp *c) {
  const ty_triangular_solve_args *p = TY_ARGS(triangular_solve, c);
  ty_tensor *db = c->dx[1] = ty_triangular_solve(turned(p->a.t), c->g[0], !p->upper.i, p->unit.i);
  if (!c->need[0]) return true;
  ty_tensor *da = ty_neg(times(db, turned(c->out[0])));
  c->dx[0] = p->upper.i ? ty_triu(da, p->unit.i) : ty_tril(da, -(int64_t)p->unit.i);
  return true;
}

/* ---- LU ---- */

/* The rows `order` [..., n] of x [..., n, m]; the one that lacks dimensions of the batch is expanded. */
static ty_tensor *rows_in_order(ty_tensor *x, ty_tensor *order) {
  if (!x || !order) return NULL;
  if (order->v.ndim == 1) return ty_index_select(x, -2, order);
  int64_t size[TY_MAX_DIMS];
  const int n = order->v.ndim + 1, more = x->v.ndim - n;
  if (more < 0) {
    memcpy(size, order->v.size, sizeof size);
    size[n - 1] = columns_of(x);
    x = ty_expand(x, (ty_ints){ size, n });
  } else if (more > 0) {
    memcpy(size, x->v.size, sizeof size);
    memcpy(size + more, order->v.size, sizeof *size * (size_t)(n - 1));
    order = ty_expand(order, (ty_ints){ size, x->v.ndim - 1 });
  }
  return x && order ? ty_take_along_dim(x, ty_unsqueeze(order, -1), ty_operand(-2)) : NULL;
}

/* y u^-T, u the upper triangle of lu. */
static ty_tensor *over_upper(ty_tensor *lu, ty_tensor *y) {
  return turned(ty_triangular_solve(lu, turned(y), true, false));
}

bool fwd_lu_factor(ty_call *c) {
  ty_tensor *x = TY_ARGS(lu_factor, c)->x.t;
  return check_matrix(c, 0) && ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_out(c, 1, ty_device_of(x), TY_I64, x->v.ndim - 1, x->v.size) && ty_launch(c, &x, 1, NULL);
}

/* Of a square matrix, without the permutation: l^-T (tril(l' g, -1) + triu(g u')) u^-T. */
static ty_tensor *lu_gradient(ty_tensor *lu, ty_tensor *gl, ty_tensor *gu) {
  ty_tensor *inner = NULL;
  if (gl) {
    ty_tensor *l = ty_add(ty_tril(lu, -1), identity(columns_of(lu), lu));
    inner = ty_tril(times(turned(l), ty_tril(gl, -1)), -1);
  }
  if (gu) inner = plus(inner, ty_triu(times(ty_triu(gu, 0), turned(ty_triu(lu, 0))), 0));
  return over_upper(lu, ty_triangular_solve(turned(lu), inner, true, true));
}

bool vjp_lu_factor(ty_vjp *c) {
  ty_tensor *lu = c->out[0], *g = c->g[0], *dx;
  if (!g) return true;
  const int64_t m = rows_of(lu), n = columns_of(lu);
  if (m == n) {
    dx = lu_gradient(lu, g, g);
  } else if (m > n) { /* x = [x1; x2] = [l1; l2] u: l2 = x2 u^-1 */
    ty_tensor *square = ty_narrow(lu, -2, 0, n), *l2 = ty_narrow(lu, -2, n, m - n);
    ty_tensor *g1 = ty_narrow(g, -2, 0, n), *d2 = over_upper(square, ty_narrow(g, -2, n, m - n));
    ty_tensor *d1 = lu_gradient(square, g1, ty_sub(g1, times(turned(l2), d2)));
    dx = d1 && d2 ? ty_concat(TY_LIST(d1, d2), -2) : NULL;
  } else { /* x = [x1 x2] = l [u1 u2]: u2 = l^-1 x2 */
    ty_tensor *square = ty_narrow(lu, -1, 0, m), *u2 = ty_narrow(lu, -1, m, n - m);
    ty_tensor *g1 = ty_narrow(g, -1, 0, m);
    ty_tensor *d2 = ty_triangular_solve(turned(square), ty_narrow(g, -1, m, n - m), true, true);
    ty_tensor *d1 = lu_gradient(square, ty_sub(g1, times(d2, turned(u2))), g1);
    dx = d1 && d2 ? ty_concat(TY_LIST(d1, d2), -1) : NULL;
  }
  c->dx[0] = rows_in_order(dx, ty_argsort(c->out[1], -1, false));
  return true;
}

bool fwd_lu(ty_call *c) {
  ty_tensor *x = TY_ARGS(lu, c)->x.t, *f[2];
  if (!check_matrix(c, 0) || !ty_lu_factor(x, f)) return false;
  const int64_t m = rows_of(x), n = columns_of(x), k = m < n ? m : n;
  ty_tensor *p = m ? turned(ty_to(ty_one_hot(f[1], m), ty_dtype_of(x))) : times(x, turned(x));
  ty_tensor *l = ty_narrow(f[0], -1, 0, k), *u = ty_narrow(f[0], -2, 0, k);
  return ty_out_set(c, 0, p) &&
         ty_out_set(c, 1, ty_add(ty_tril(l, -1), ty_eye(m, k, ty_dtype_of(x), ty_device_of(x)))) &&
         ty_out_set(c, 2, ty_triu(u, 0));
}

bool fwd_lu_solve(ty_call *c) {
  const ty_lu_solve_args *p = TY_ARGS(lu_solve, c);
  ty_tensor *lu = p->lu.t, *order = p->permutation.t, *b = p->b.t;
  if (!check_square(c, 0) || !ty_check_floats(c, 2)) return false;
  if (ty_dtype_of(order) != TY_I64 || order->v.ndim != lu->v.ndim - 1 || columns_of(order) != rows_of(lu))
    return ty_op_fail(c, TY_EINVAL, "permutation: expected lu_factor's, i64 [..., %lld], for an lu %s, got %s",
                      (long long)rows_of(lu), ty_describe(lu), ty_describe(order));
  const bool vector = b->v.ndim == 1;
  ty_dtype dtype = ty_promote(ty_dtype_of(lu), ty_dtype_of(b));
  lu = ty_to(lu, dtype), b = ty_to(b, dtype);
  if (vector) b = ty_unsqueeze(b, -1);
  if (!lu || !b) return false;
  if (b->v.ndim < 2 || rows_of(b) != rows_of(lu))
    return ty_op_fail(c, TY_EINVAL, "b: expected [..., %lld, m] for an lu %s, got %s", (long long)rows_of(lu),
                      ty_describe(p->lu.t), ty_describe(p->b.t));
  ty_tensor *x;
  if (!p->adjoint.i) { /* l u x = b in order */
    x = ty_triangular_solve(lu, ty_triangular_solve(lu, rows_in_order(b, order), false, true), true, false);
  } else { /* u' l' (x in order) = b */
    ty_tensor *t = turned(lu);
    x = ty_triangular_solve(t, ty_triangular_solve(t, b, false, false), true, true);
    x = rows_in_order(x, ty_argsort(order, -1, false));
  }
  return ty_out_set(c, 0, vector ? ty_squeeze(x, TY_INTS(-1)) : x);
}

bool fwd_solve(ty_call *c) {
  const ty_solve_args *p = TY_ARGS(solve, c);
  ty_tensor *a = p->a.t, *b = p->b.t, *f[3];
  bool vector = b->v.ndim == 1;
  if (!check_square(c, 0) || !pair_up(c, &a, &b) || !ty_lu_system(a, b, f)) return false;
  return ty_out_set(c, 0, vector ? ty_squeeze(f[0], TY_INTS(-1)) : f[0]);
}

bool fwd_lu_system(ty_call *c) {
  const ty_lu_system_args *p = TY_ARGS(lu_system, c);
  ty_tensor *a = p->a.t, *b = p->b.t;
  return check_square(c, 0) && check_matrix(c, 1) && pair_up(c, &a, &b) && ty_out_like(c, 1, a, ty_dtype_of(a)) &&
         ty_out(c, 2, ty_device_of(a), TY_I64, a->v.ndim - 1, a->v.size) && launch_system(c, a, b, NULL);
}

/* The factors that are there serve the gradient, unless there will be a gradient of it. */
bool vjp_lu_system(ty_vjp *c) {
  ty_tensor *g = c->g[0];
  if (!g) return true;
  ty_tensor *db = ty_vjp_plain() ? ty_lu_solve(c->out[1], c->out[2], g, true)
                                 : ty_solve(turned(TY_ARGS(lu_system, c)->a.t), g);
  c->dx[1] = db;
  if (c->need[0]) c->dx[0] = ty_neg(times(db, turned(c->out[0])));
  return true;
}

bool fwd_inverse(ty_call *c) {
  ty_tensor *x = TY_ARGS(inverse, c)->x.t;
  return check_square(c, 0) && ty_out_set(c, 0, ty_solve(x, identity(rows_of(x), x)));
}

bool fwd_slogdet(ty_call *c) {
  ty_tensor *x = TY_ARGS(slogdet, c)->x.t;
  if (!check_square(c, 0)) return false;
  for (int i = 0; i < 2; i++)
    if (!ty_out(c, i, ty_device_of(x), ty_dtype_of(x), x->v.ndim - 2, x->v.size)) return false;
  return ty_launch(c, &x, 1, NULL);
}

bool vjp_slogdet(ty_vjp *c) {
  ty_tensor *x = TY_ARGS(slogdet, c)->x.t, *g = c->g[1];
  if (g) c->dx[0] = ty_mul(turned(ty_inverse(x)), ty_unsqueeze(ty_unsqueeze(g, -1), -1));
  return true;
}

/* ---- qr ---- */

/* Makes the outputs [..., m, a] and [..., b, n]. */
static bool two_factors(ty_call *c, ty_tensor *x, int first, int second, int64_t a, int64_t b) {
  int64_t size[TY_MAX_DIMS], n = columns_of(x);
  int ndim = x->v.ndim;
  memcpy(size, x->v.size, sizeof size);
  size[ndim - 1] = a;
  if (!ty_out(c, first, ty_device_of(x), ty_dtype_of(x), ndim, size)) return false;
  size[ndim - 2] = b;
  size[ndim - 1] = n;
  return ty_out(c, second, ty_device_of(x), ty_dtype_of(x), ndim, size);
}

static int64_t least_side(const ty_tensor *x) { return rows_of(x) < columns_of(x) ? rows_of(x) : columns_of(x); }

bool fwd_qr(ty_call *c) {
  const ty_qr_args *p = TY_ARGS(qr, c);
  ty_tensor *x = p->x.t;
  if (!check_matrix(c, 0)) return false;
  const bool complete = !strcmp(p->mode.s, "complete"), r_alone = !strcmp(p->mode.s, "r");
  if (!complete && !r_alone && strcmp(p->mode.s, "reduced"))
    return ty_op_fail(c, TY_EINVAL, "mode: expected \"reduced\", \"complete\" or \"r\", got \"%s\"", p->mode.s);
  const int64_t k = complete ? rows_of(x) : least_side(x);
  return two_factors(c, x, 0, 1, r_alone ? 0 : k, k) && ty_launch(c, &x, 1, NULL);
}

/* For a square r: (gq + q sym(m)) r^-T, m = r gr' - gq' q, where sym() copies the lower triangle to the upper. */
static ty_tensor *qr_gradient(ty_tensor *q, ty_tensor *r, ty_tensor *gq, ty_tensor *gr) {
  ty_tensor *m = plus(gr ? times(r, turned(gr)) : NULL, gq ? ty_neg(times(turned(gq), q)) : NULL);
  ty_tensor *s = ty_add(ty_tril(m, 0), turned(ty_tril(m, -1)));
  return turned(ty_triangular_solve(r, turned(plus(gq, times(q, s))), true, false));
}

bool vjp_qr(ty_vjp *c) {
  ty_tensor *q = c->out[0], *r = c->out[1], *gq = c->g[0], *gr = c->g[1];
  int64_t m = rows_of(q), n = columns_of(r);
  if (!gq && !gr) return true;
  if (columns_of(q) != (m < n ? m : n))
    return ty_op_fail(c, TY_EUNSUPPORTED, "mode \"%s\" has no gradient here: take \"reduced\"", TY_ARGS(qr, c)->mode.s);
  if (m >= n) {
    c->dx[0] = qr_gradient(q, r, gq, gr);
    return true;
  }
  /* x = [x1 x2] = q [u v]: x1 is square, and v = q' x2 */
  ty_tensor *u = ty_narrow(r, -1, 0, m), *v = ty_narrow(r, -1, m, n - m);
  ty_tensor *gu = gr ? ty_narrow(gr, -1, 0, m) : NULL, *gv = gr ? ty_narrow(gr, -1, m, n - m) : NULL;
  ty_tensor *x2 = times(q, v), *d2 = gv ? times(q, gv) : ty_mul(x2, 0.0);
  ty_tensor *d1 = qr_gradient(q, u, plus(gq, gv ? times(x2, turned(gv)) : NULL), gu);
  c->dx[0] = d1 && d2 ? ty_concat(TY_LIST(d1, d2), -1) : NULL;
  return true;
}

bool fwd_lstsq(ty_call *c) {
  const ty_lstsq_args *p = TY_ARGS(lstsq, c);
  ty_tensor *a = p->a.t, *b = p->b.t, *f[2];
  bool vector = b->v.ndim == 1;
  if (!check_matrix(c, 0) || !pair_up(c, &a, &b)) return false;
  ty_tensor *x;
  if (p->rtol.f >= 0) {
    x = times(ty_pinv(a, p->rtol.f), b);
  } else if (rows_of(a) >= columns_of(a)) {
    x = ty_qr(a, "reduced", f) ? ty_triangular_solve(f[1], times(turned(f[0]), b), true, false) : NULL;
  } else { /* a = r' q' */
    x = ty_qr(turned(a), "reduced", f) ? times(f[0], ty_triangular_solve(turned(f[1]), b, false, false)) : NULL;
  }
  return ty_out_set(c, 0, vector ? ty_squeeze(x, TY_INTS(-1)) : x);
}

/* ---- svd ---- */

bool fwd_svd(ty_call *c) {
  ty_tensor *x = TY_ARGS(svd, c)->x.t;
  if (!check_matrix(c, 0) || !two_factors(c, x, 0, 2, least_side(x), least_side(x))) return false;
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  size[x->v.ndim - 2] = least_side(x);
  return ty_out(c, 1, ty_device_of(x), ty_dtype_of(x), x->v.ndim - 1, size) && ty_launch(c, &x, 1, NULL);
}

/* 1 / (d[j] - d[i]) off the diagonal, 0 on it. */
static ty_tensor *inverse_gaps(ty_tensor *d) {
  if (!d) return NULL;
  ty_tensor *one = identity(columns_of(d), d);
  ty_tensor *gaps = ty_add(ty_sub(ty_unsqueeze(d, -2), ty_unsqueeze(d, -1)), one);
  return ty_sub(ty_reciprocal(gaps), one);
}

static ty_tensor *diagonal_matrix(ty_tensor *d) { return ty_mul(ty_unsqueeze(d, -1), identity(columns_of(d), d)); }

/* The part of g outside of the space of the columns of u. */
static ty_tensor *outside(ty_tensor *u, ty_tensor *g) { return ty_sub(g, times(u, times(turned(u), g))); }

bool vjp_svd(ty_vjp *c) {
  ty_tensor *u = c->out[0], *s = c->out[1], *vh = c->out[2], *gu = c->g[0], *gs = c->g[1], *gvh = c->g[2];
  ty_tensor *inner = gs ? diagonal_matrix(gs) : NULL, *dx = NULL;
  if (gu || gvh) {
    ty_tensor *f = inverse_gaps(ty_mul(s, s));
    if (gu) {
      ty_tensor *j = times(turned(u), gu);
      inner = plus(inner, scaled_columns(ty_mul(f, ty_sub(j, turned(j))), s));
    }
    if (gvh) {
      ty_tensor *j = times(vh, turned(gvh));
      inner = plus(inner, scaled_rows(s, ty_mul(f, ty_sub(j, turned(j)))));
    }
  }
  if (!inner) return true;
  dx = times(times(u, inner), vh);
  if (gu && rows_of(u) > columns_of(u)) dx = plus(dx, times(scaled_columns(outside(u, gu), ty_reciprocal(s)), vh));
  if (gvh && columns_of(vh) > rows_of(vh)) {
    ty_tensor *v = turned(vh);
    dx = plus(dx, times(u, scaled_rows(ty_reciprocal(s), turned(outside(v, turned(gvh))))));
  }
  c->dx[0] = dx;
  return true;
}

bool fwd_pinv(ty_call *c) {
  const ty_pinv_args *p = TY_ARGS(pinv, c);
  ty_tensor *x = p->x.t, *f[3];
  if (!check_matrix(c, 0)) return false;
  if (p->rtol.f < 0) return ty_op_fail(c, TY_EINVAL, "rtol: expected a number of at least 0, got %g", p->rtol.f);
  int64_t most = rows_of(x) > columns_of(x) ? rows_of(x) : columns_of(x);
  double precision = ty_dtype_of(x) == TY_F64 ? 0x1p-52 : ty_dtype_of(x) == TY_F32 ? 0x1p-23 : 0x1p-8;
  double rtol = p->rtol.f > 0 ? p->rtol.f : (double)most * precision;
  if (x->v.count == 0) return ty_out_set(c, 0, ty_mul(turned(x), 1.0));
  if (!ty_svd(x, f)) return false;
  ty_tensor *s = f[1], *kept = ty_gt(s, ty_mul(ty_narrow(s, -1, 0, 1), rtol));
  ty_tensor *inverse = ty_where(kept, ty_reciprocal(ty_where(kept, s, 1.0)), 0.0);
  return ty_out_set(c, 0, times(scaled_columns(turned(f[2]), inverse), turned(f[0])));
}

/* ---- eigh ---- */

bool fwd_eigh(ty_call *c) {
  const ty_eigh_args *p = TY_ARGS(eigh, c);
  ty_tensor *f[2], *x = p->x.t;
  const bool lower = !strcmp(p->triangle.s, "lower"), upper = !strcmp(p->triangle.s, "upper");
  if (!check_square(c, 0)) return false;
  if (!lower && !upper && strcmp(p->triangle.s, "both"))
    return ty_op_fail(c, TY_EINVAL, "triangle: expected \"both\", \"lower\" or \"upper\", got \"%s\"", p->triangle.s);
  x = lower   ? ty_add(ty_tril(x, 0), turned(ty_tril(x, -1)))
      : upper ? ty_add(ty_triu(x, 0), turned(ty_triu(x, 1)))
              : symmetric(x);
  return ty_eigh_symmetric(x, f) && ty_out_set(c, 0, f[0]) && ty_out_set(c, 1, f[1]);
}

bool fwd_eigh_symmetric(ty_call *c) {
  ty_tensor *x = TY_ARGS(eigh_symmetric, c)->x.t;
  return check_square(c, 0) && ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), x->v.ndim - 1, x->v.size) &&
         ty_out_like(c, 1, x, ty_dtype_of(x)) && ty_launch(c, &x, 1, NULL);
}

bool vjp_eigh_symmetric(ty_vjp *c) {
  ty_tensor *values = c->out[0], *v = c->out[1];
  ty_tensor *inner = c->g[0] ? diagonal_matrix(c->g[0]) : NULL;
  if (c->g[1]) inner = plus(inner, ty_mul(inverse_gaps(values), times(turned(v), c->g[1])));
  if (inner) c->dx[0] = symmetric(times(times(v, inner), turned(v)));
  return true;
}
