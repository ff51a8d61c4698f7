/* Attention of each place of a grid to the window of places around it. */
#include <string.h>

#include "op.h"

/* What both ops have in common. */
typedef struct given {
  ty_tensor *q, *k, *v;
  ty_dtype wide;
  ty_p_neighbourhood p;
} given;

/* q, k and v are the arguments from `first` on, window and scale those from `window` on. */
static bool take(ty_call *c, int first, int window, given *x) {
  const ty_value *a = c->arg + first;
  *x = (given){ .q = a[0].t, .k = a[1].t, .v = a[2].t };
  if (!ty_check_ndim(c, first, 5, 5, "[b, h, rows, columns, d]") ||
      !ty_check_ndim(c, first + 1, 5, 5, "[b, h, rows, columns, d]") ||
      !ty_check_ndim(c, first + 2, 5, 5, "[b, h, rows, columns, dv]"))
    return false;
  const int64_t *q = x->q->v.size, *k = x->k->v.size, *v = x->v->v.size;
  if (ty_dtype_of(x->k) != ty_dtype_of(x->q) || ty_dtype_of(x->v) != ty_dtype_of(x->q))
    return ty_op_fail(c, TY_EINVAL, "q, k and v: expected one dtype, got %s, %s and %s", ty_describe(x->q),
                      ty_describe(x->k), ty_describe(x->v));
  if (memcmp(q, k, 5 * sizeof *q) != 0)
    return ty_op_fail(c, TY_EINVAL, "k: expected the shape of q %s, got %s", ty_describe(x->q), ty_describe(x->k));
  if (memcmp(k, v, 4 * sizeof *k) != 0)
    return ty_op_fail(c, TY_EINVAL, "v: expected the batch size, heads and grid of k %s, got %s", ty_describe(x->k),
                      ty_describe(x->v));
  if (!ty_check_pair(c, window, 1, x->p.window)) return false;
  for (int i = 0; i < 2; i++)
    if (x->p.window[i] > q[2 + i]) x->p.window[i] = q[2 + i];
  x->p.scale = ty_attention_scale(c->arg[window + 1].f, q[4]);
  x->wide = ty_is_half(ty_dtype_of(x->q)) ? TY_F32 : ty_dtype_of(x->q);
  return true;
}

bool fwd_neighbourhood_attention(ty_call *c) {
  given x;
  if (!take(c, 0, 3, &x)) return false;
  return ty_out_like(c, 0, x.v, ty_dtype_of(x.q)) && ty_out(c, 1, ty_device_of(x.q), x.wide, 4, x.q->v.size) &&
         ty_launch(c, (ty_tensor *[]){ x.q, x.k, x.v }, 3, &x.p);
}

/* Argument `arg`, which must have this shape, as `dtype`; NULL after an error. */
static ty_tensor *saved(ty_call *c, int arg, int ndim, const int64_t *size, ty_dtype dtype) {
  ty_tensor *t = c->arg[arg].t;
  if (ty_is_float(ty_dtype_of(t)) && t->v.ndim == ndim && memcmp(t->v.size, size, sizeof *size * (size_t)ndim) == 0)
    return ty_to(t, dtype);
  ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor %s, got %s", c->op->args[arg].name, ty_shape_text(ndim, size),
             ty_describe(t));
  return NULL;
}

bool fwd_neighbourhood_attention_backward(ty_call *c) {
  given x;
  if (!take(c, 1, 6, &x)) return false;
  ty_tensor *g = saved(c, 0, 5, x.v->v.size, ty_dtype_of(x.q)), *y = saved(c, 4, 5, x.v->v.size, ty_dtype_of(x.q));
  ty_tensor *lse = saved(c, 5, 4, x.q->v.size, x.wide);
  return g && y && lse && ty_out_like(c, 0, x.q, ty_dtype_of(x.q)) && ty_out_like(c, 1, x.k, ty_dtype_of(x.k)) &&
         ty_out_like(c, 2, x.v, ty_dtype_of(x.v)) && ty_launch(c, (ty_tensor *[]){ g, x.q, x.k, x.v, y, lse }, 6, &x.p);
}

/* ---- in differentiable ops ---- */

static ty_tensor *both(ty_tensor *a, ty_tensor *b) {
  return a && b ? ty_logical_and(ty_operand(a), ty_operand(b)) : NULL;
}

/* Which of n places along a side each of them sees through a window, bool [n, n]. */
static ty_tensor *side(int64_t n, int64_t window, int device) {
  ty_tensor *at = ty_arange(0, n, 1, TY_I64, device);
  ty_tensor *begin = ty_unsqueeze(ty_clamp(ty_sub(at, window / 2), 0, n - window), 1);
  return both(ty_ge(at, begin), ty_lt(at, ty_add(begin, window)));
}

/* The gradients with the matrix of all pairs of places. Scores outside of the window are a large negative number. */
static bool composed(ty_vjp *c, const given *x) {
  const int64_t *n = x->q->v.size, places = n[2] * n[3];
  const int device = ty_device_of(x->q);
  ty_tensor *rows = side(n[2], x->p.window[0], device), *columns = side(n[3], x->p.window[1], device);
  if (!rows || !columns) return false;
  ty_tensor *seen = ty_reshape(
      both(ty_reshape(rows, TY_INTS(n[2], 1, n[2], 1)), ty_reshape(columns, TY_INTS(1, n[3], 1, n[3]))),
      TY_INTS(places, places));
  ty_tensor *q = ty_reshape(ty_to(x->q, x->wide), TY_INTS(n[0], n[1], places, n[4]));
  ty_tensor *k = ty_reshape(ty_to(x->k, x->wide), TY_INTS(n[0], n[1], places, n[4]));
  ty_tensor *v = ty_reshape(ty_to(x->v, x->wide), TY_INTS(n[0], n[1], places, x->v->v.size[4]));
  ty_tensor *g = ty_reshape(ty_to(c->g[0], x->wide), TY_INTS(n[0], n[1], places, x->v->v.size[4]));
  if (!seen || !q || !k || !v || !g) return false;
  ty_tensor *scores = ty_mul(ty_matmul(q, ty_transpose(k, -2, -1)), x->p.scale);
  ty_tensor *p = ty_softmax(ty_where(seen, scores, -1e30), -1);
  ty_tensor *dp = ty_matmul(g, ty_transpose(v, -2, -1));
  ty_tensor *ds = ty_mul(ty_mul(p, ty_sub(dp, ty_sum(ty_mul(dp, p), TY_INTS(-1), true, TY_DTYPE_DEFAULT))), x->p.scale);
  if (c->need[0]) c->dx[0] = ty_reshape(ty_matmul(ds, k), ty_vjp_size(c, 0));
  if (c->need[1]) c->dx[1] = ty_reshape(ty_matmul(ty_transpose(ds, -2, -1), q), ty_vjp_size(c, 1));
  if (c->need[2]) c->dx[2] = ty_reshape(ty_matmul(ty_transpose(p, -2, -1), g), ty_vjp_size(c, 2));
  return true;
}

bool vjp_neighbourhood_attention(ty_vjp *c) {
  const ty_neighbourhood_attention_args *a = TY_ARGS(neighbourhood_attention, c);
  if (!c->g[0]) return true;
  if (ty_vjp_plain()) {
    ty_tensor *d[3] = { NULL };
    ty_neighbourhood_attention_backward(c->g[0], a->q.t, a->k.t, a->v.t, c->out[0], c->out[1], a->window.is, a->scale.f,
                                        d);
    for (int i = 0; i < 3; i++) c->dx[i] = d[i];
    return true;
  }
  const int64_t *q = a->q.t->v.size, *window = a->window.is.v;
  given x = { .q = a->q.t,
              .k = a->k.t,
              .v = a->v.t,
              .wide = ty_is_half(ty_vjp_dtype(c, 0)) ? TY_F32 : ty_vjp_dtype(c, 0),
              .p = { .scale = ty_attention_scale(a->scale.f, q[4]) } };
  for (int i = 0; i < 2; i++) {
    int64_t size = window[a->window.is.n == 2 ? i : 0];
    x.p.window[i] = size < q[2 + i] ? size : q[2 + i];
  }
  return composed(c, &x);
}
