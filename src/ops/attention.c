/* Scaled dot product attention. */
#include <string.h>

#include "op.h"

/* The mask as the kernels want it: bool, or in the precision of the computation, and expanded to [b, h, t, s]. */
static bool expand_mask(ty_tensor **mask, const ty_tensor *q, const ty_tensor *k) {
  if (!*mask) return true;
  ty_dtype dtype = ty_is_half(ty_dtype_of(q)) ? TY_F32 : ty_dtype_of(q);
  if (ty_dtype_of(*mask) != TY_BOOL) *mask = ty_to(*mask, dtype);
  *mask = ty_expand(*mask, TY_INTS(q->v.size[0], q->v.size[1], q->v.size[2], k->v.size[2]));
  return *mask != NULL;
}

/* q, k and v are the arguments from `first` on. */
static bool check_shapes(ty_call *c, int first, const ty_tensor *mask) {
  const ty_tensor *q = c->arg[first].t, *k = c->arg[first + 1].t, *v = c->arg[first + 2].t;
  if (!ty_check_ndim(c, first, 4, 4, "[b, h, t, d]") || !ty_check_ndim(c, first + 1, 4, 4, "[b, hkv, s, d]") ||
      !ty_check_ndim(c, first + 2, 4, 4, "[b, hkv, s, dv]"))
    return false;
  if (ty_dtype_of(k) != ty_dtype_of(q) || ty_dtype_of(v) != ty_dtype_of(q))
    return ty_op_fail(c, TY_EINVAL, "q, k and v: expected one dtype, got %s, %s and %s", ty_describe(q), ty_describe(k),
                      ty_describe(v));
  if (k->v.size[0] != q->v.size[0] || k->v.size[3] != q->v.size[3])
    return ty_op_fail(c, TY_EINVAL, "k: expected the batch size and the width of q %s, got %s", ty_describe(q),
                      ty_describe(k));
  if (v->v.size[0] != k->v.size[0] || v->v.size[1] != k->v.size[1] || v->v.size[2] != k->v.size[2])
    return ty_op_fail(c, TY_EINVAL, "v: expected the batch size, heads and length of k %s, got %s", ty_describe(k),
                      ty_describe(v));
  if (k->v.size[1] == 0 ? q->v.size[1] != 0 : q->v.size[1] % k->v.size[1] != 0)
    return ty_op_fail(c, TY_EINVAL, "q: expected a multiple of the %lld heads of k %s, got %s", (long long)k->v.size[1],
                      ty_describe(k), ty_describe(q));
  if (!mask) return true;
  int64_t full[] = { q->v.size[0], q->v.size[1], q->v.size[2], k->v.size[2] };
  bool fits = mask->v.ndim <= 4 && (ty_dtype_of(mask) == TY_BOOL || ty_is_float(ty_dtype_of(mask)));
  for (int i = 1; fits && i <= mask->v.ndim; i++) {
    int64_t size = mask->v.size[mask->v.ndim - i];
    fits = size == 1 || size == full[4 - i];
  }
  return fits || ty_op_fail(c, TY_EINVAL, "mask: expected a bool or float tensor that broadcasts to %s, got %s",
                            ty_shape_text(4, full), ty_describe(mask));
}

/* Positions in i64, from what a user may give for them; arguments `sinks` and the next. */
static bool check_reach(ty_call *c, int sinks, ty_tensor **begins) {
  if (c->arg[sinks].i < 0)
    return ty_op_fail(c, TY_EINVAL, "sinks: expected 0 or more, got %lld", (long long)c->arg[sinks].i);
  ty_tensor *x = *begins = c->arg[sinks + 1].t;
  if (!x) return true;
  if (!ty_check_index_dtype(c, sinks + 1) || !ty_check_ndim(c, sinks + 1, 1, 1, "[n + 1]")) return false;
  if (x->v.size[0] == 0) return ty_op_fail(c, TY_EINVAL, "cu_seqlens: expected at least one position, got none");
  return (*begins = ty_to(x, TY_I64)) != NULL;
}

static const char *const corners[] = { "lower_right", "upper_left", NULL };

/* From the arguments at these places; scale and window follow causal, softcap the corner. */
static bool take_params(ty_call *c, int causal, int sinks, int corner, int64_t width, ty_p_attention *p) {
  int at = ty_check_choice(c, corner, corners);
  double softcap = c->arg[corner + 1].f;
  if (!(softcap >= 0 && softcap < (double)INFINITY))
    return ty_op_fail(c, TY_EINVAL, "softcap: expected a positive number or 0 for none, got %g", softcap);
  *p = (ty_p_attention){ .scale = ty_attention_scale(c->arg[causal + 1].f, width),
                         .softcap = softcap,
                         .causal = c->arg[causal].i,
                         .upper_left = at == 1,
                         .window = c->arg[causal + 2].i,
                         .sinks = c->arg[sinks].i };
  return at >= 0;
}

bool fwd_attention(ty_call *c) {
  const ty_scaled_dot_product_attention_args *a = TY_ARGS(scaled_dot_product_attention, c);
  ty_tensor *q = a->q.t, *mask = a->mask.t, *begins;
  if (!check_shapes(c, 0, mask) || !check_reach(c, 7, &begins) || !expand_mask(&mask, q, a->k.t)) return false;
  int64_t size[] = { q->v.size[0], q->v.size[1], q->v.size[2], a->v.t->v.size[3] };
  ty_dtype wide = ty_is_half(ty_dtype_of(q)) ? TY_F32 : ty_dtype_of(q);
  if (!ty_out(c, 0, ty_device_of(q), ty_dtype_of(q), 4, size) || !ty_out(c, 1, ty_device_of(q), wide, 3, size))
    return false;
  ty_p_attention p;
  if (!take_params(c, 4, 7, 9, q->v.size[3], &p)) return false;
  return ty_launch(c, (ty_tensor *[]){ q, a->k.t, a->v.t, mask, begins }, 5, &p);
}

/* Argument `arg`, which must have this shape, as `dtype`. */
static ty_tensor *saved(ty_call *c, int arg, int ndim, const int64_t *size, ty_dtype dtype) {
  ty_tensor *t = c->arg[arg].t;
  if (ty_is_float(ty_dtype_of(t)) && t->v.ndim == ndim && memcmp(t->v.size, size, sizeof *size * (size_t)ndim) == 0)
    return ty_to(t, dtype);
  ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor %s, got %s", c->op->args[arg].name, ty_shape_text(ndim, size),
             ty_describe(t));
  return NULL;
}

bool fwd_attention_backward(ty_call *c) {
  const ty_attention_backward_args *a = TY_ARGS(attention_backward, c);
  ty_tensor *q = a->q.t, *k = a->k.t, *v = a->v.t, *mask = a->mask.t, *begins;
  ty_dtype wide = ty_is_half(ty_dtype_of(q)) ? TY_F32 : ty_dtype_of(q);
  if (!check_shapes(c, 1, mask) || !check_reach(c, 11, &begins)) return false;
  int64_t result[] = { q->v.size[0], q->v.size[1], q->v.size[2], v->v.size[3] };
  ty_tensor *g = saved(c, 0, 4, result, ty_dtype_of(q)), *y = saved(c, 4, 4, result, ty_dtype_of(q));
  ty_tensor *lse = saved(c, 5, 3, result, wide);
  if (!g || !y || !lse) return false;
  if (!ty_out_like(c, 0, q, ty_dtype_of(q)) || !ty_out_like(c, 1, k, ty_dtype_of(k)) ||
      !ty_out_like(c, 2, v, ty_dtype_of(v)))
    return false;
  int64_t size[] = { 0, 1, 1, 1 }; /* no gradient of a mask wanted: empty */
  if (mask && a->mask_grad.i) {
    size[0] = 1;
    for (int i = 1; i <= mask->v.ndim; i++) size[4 - i] = mask->v.size[mask->v.ndim - i];
  }
  if (!ty_out(c, 3, ty_device_of(q), wide, 4, size) || !expand_mask(&mask, q, k)) return false;
  ty_p_attention p;
  if (!take_params(c, 7, 11, 13, q->v.size[3], &p)) return false;
  return ty_launch(c, (ty_tensor *[]){ g, q, k, v, y, lse, mask, begins }, 8, &p);
}

static ty_tensor *both(ty_tensor *a, ty_tensor *b) {
  return a && b ? ty_logical_and(ty_operand(a), ty_operand(b)) : a ? a : b;
}

/* Which keys each query sees, masks aside: [t, s] bool, or NULL for all (*all). */
static ty_tensor *visible(ty_vjp *c, int64_t t, int64_t s, bool *all) {
  const ty_scaled_dot_product_attention_args *a = TY_ARGS(scaled_dot_product_attention, c);
  int device = ty_device_of(a->q.t);
  *all = !a->causal.i && a->window.i < 0 && !a->cu_seqlens.t;
  if (*all) return NULL;
  ty_tensor *keys = ty_arange(0, s, 1, TY_I64, device), *begin = NULL;
  int64_t shift = strcmp(a->corner.s, corners[1]) == 0 ? 0 : s - t;
  ty_tensor *here = ty_unsqueeze(ty_arange(shift, shift + t, 1, TY_I64, device), 1);
  ty_tensor *ahead = ty_sub(keys, here), *see = a->causal.i ? ty_le(ahead, 0) : NULL;
  if (a->cu_seqlens.t) { /* the number of beginnings up to a position is that of its sequence */
    ty_tensor *begins = ty_to(a->cu_seqlens.t, TY_I64);
    ty_tensor *past = ty_ge(ty_unsqueeze(keys, 1), begins), *past_here = ty_ge(here, begins);
    ty_tensor *of_key = ty_sum(past, TY_INTS(1), false, TY_DTYPE_DEFAULT);
    ty_tensor *of_query = ty_sum(past_here, TY_INTS(1), true, TY_DTYPE_DEFAULT);
    see = both(see, ty_eq(of_key, of_query));
    see = both(see, both(ty_gt(of_key, 0), ty_lt(of_key, begins ? begins->v.size[0] : 0)));
    begin = ty_max(ty_where(past, begins, 0), TY_INTS(1), false);
  }
  if (a->window.i >= 0) {
    ty_tensor *near = ty_le(ty_abs(ahead), a->window.i);
    ty_tensor *first = ty_lt(begin ? ty_sub(keys, begin) : keys, a->sinks.i);
    see = both(see, ty_logical_or(ty_operand(near), ty_operand(first)));
  }
  return see;
}

ty_tensor *ty_repeat_heads(ty_tensor *x, int64_t heads) {
  const int64_t *n = x->v.size;
  if (n[1] == heads || n[1] == 0) return x;
  x = ty_expand(ty_unsqueeze(x, 2), TY_INTS(n[0], n[1], heads / n[1], n[2], n[3]));
  return ty_reshape(x, TY_INTS(n[0], heads, n[2], n[3]));
}

ty_tensor *ty_sum_heads(ty_tensor *x, ty_ints size) {
  if (!x || x->v.size[1] == size.v[1] || size.v[1] == 0) return x;
  const int64_t *n = size.v;
  return ty_sum(ty_reshape(x, TY_INTS(n[0], n[1], x->v.size[1] / n[1], n[2], n[3])), TY_INTS(2), false,
                TY_DTYPE_DEFAULT);
}

/* The gradients with the [t, s] matrix, in differentiable ops. A hidden score is a large negative number and its
 * weight is set to 0 afterwards, so that rows that see nothing stay finite. */
static bool composed(ty_vjp *c) {
  const ty_scaled_dot_product_attention_args *a = TY_ARGS(scaled_dot_product_attention, c);
  ty_dtype dtype = ty_is_half(ty_vjp_dtype(c, 0)) ? TY_F32 : ty_vjp_dtype(c, 0);
  ty_tensor *q = ty_to(a->q.t, dtype), *k = ty_to(a->k.t, dtype), *v = ty_to(a->v.t, dtype), *g = ty_to(c->g[0], dtype);
  if (!q || !k || !v) return false;
  double scale = ty_attention_scale(a->scale.f, q->v.size[3]);
  bool all;
  ty_tensor *see = visible(c, q->v.size[2], k->v.size[2], &all);
  if (!see && !all) return false;
  k = ty_repeat_heads(k, q->v.size[1]), v = ty_repeat_heads(v, q->v.size[1]);
  ty_tensor *scores = ty_mul(ty_matmul(q, ty_transpose(k, -2, -1)), scale), *mask = a->mask.t, *bent = NULL;
  if (a->softcap.f > 0) {
    bent = ty_tanh(ty_mul(scores, 1 / a->softcap.f));
    scores = ty_mul(bent, a->softcap.f);
  }
  if (mask) {
    ty_tensor *shown = mask;
    if (ty_dtype_of(mask) != TY_BOOL) {
      shown = ty_gt(mask, -INFINITY);
      scores = ty_add(scores, ty_where(shown, ty_to(mask, dtype), 0.0));
    }
    see = see ? ty_logical_and(ty_operand(see), ty_operand(shown)) : shown;
  }
  if (see) scores = ty_where(see, scores, -1e30);
  ty_tensor *p = ty_softmax(scores, -1);
  if (see) p = ty_where(see, p, 0.0);
  ty_tensor *dp = ty_matmul(g, ty_transpose(v, -2, -1));
  ty_tensor *ds = ty_mul(p, ty_sub(dp, ty_sum(ty_mul(dp, p), TY_INTS(-1), true, TY_DTYPE_DEFAULT)));
  if (c->need[3]) c->dx[3] = ty_sum_to(ds, ty_vjp_size(c, 3)); /* the mask comes after the cap */
  if (bent) ds = ty_mul(ds, ty_sub(1.0, ty_square(bent)));
  if (c->need[0]) c->dx[0] = ty_mul(ty_matmul(ds, k), scale);
  if (c->need[1]) c->dx[1] = ty_sum_heads(ty_mul(ty_matmul(ty_transpose(ds, -2, -1), q), scale), ty_vjp_size(c, 1));
  if (c->need[2]) c->dx[2] = ty_sum_heads(ty_matmul(ty_transpose(p, -2, -1), g), ty_vjp_size(c, 2));
  return true;
}

bool vjp_attention(ty_vjp *c) {
  const ty_scaled_dot_product_attention_args *a = TY_ARGS(scaled_dot_product_attention, c);
  if (!c->g[0]) return true;
  if (!ty_vjp_plain()) return composed(c);
  ty_tensor *d[4] = { NULL };
  ty_attention_backward(c->g[0], a->q.t, a->k.t, a->v.t, c->out[0], c->out[1], a->mask.t, a->causal.i, a->scale.f,
                        a->window.i, c->need[3], a->sinks.i, a->cu_seqlens.t, a->corner.s, a->softcap.f, d);
  for (int i = 0; i < 3; i++) c->dx[i] = d[i];
  if (c->need[3]) c->dx[3] = ty_reshape(d[3], ty_vjp_size(c, 3));
  return true;
}

/* ---- what keys receive ---- */

/* k [b, hkv, s, d] and a block of queries q [b, h, n, d], of which the last sees all of k when causal; see: bool,
 * [b, h, n, s] or NULL. */
static ty_tensor *received_by(ty_tensor *q, ty_tensor *k, ty_tensor *see, bool causal, double scale) {
  if (!q || !k) return NULL;
  int64_t b = q->v.size[0], h = q->v.size[1], n = q->v.size[2], d = q->v.size[3], hkv = k->v.size[1], s = k->v.size[2];
  ty_dtype wide = ty_is_half(ty_dtype_of(q)) ? TY_F32 : ty_dtype_of(q);
  ty_tensor *grouped = ty_reshape(ty_mul(q, scale), TY_INTS(b, hkv, h / hkv * n, d));
  ty_tensor *scores = ty_to(ty_matmul(grouped, ty_transpose(k, -2, -1)), wide);
  if (causal && n > 1) {
    int device = ty_device_of(q);
    ty_tensor *at = ty_unsqueeze(ty_arange(s - n, s, 1, TY_I64, device), 1);
    see = both(see, ty_le(ty_arange(0, s, 1, TY_I64, device), at));
  }
  if (see) { /* a large negative number keeps rows that see nothing finite; they give nothing */
    see = ty_reshape(ty_expand(see, TY_INTS(b, h, n, s)), TY_INTS(b, hkv, h / hkv * n, s));
    scores = ty_where(see, scores, -1e30);
  }
  ty_tensor *weights = ty_softmax(scores, -1);
  if (see) weights = ty_where(see, weights, 0.0);
  return ty_sum(weights, TY_INTS(2), false, TY_DTYPE_DEFAULT);
}

bool fwd_attention_received(ty_call *c) {
  const ty_attention_received_args *a = TY_ARGS(attention_received, c);
  ty_tensor *q = a->q.t, *k = a->k.t, *mask = a->mask.t;
  ty_call shapes = { c->op, (const ty_value[]){ a->q, a->k, a->k }, c->out, c->record };
  if (!check_shapes(&shapes, 0, mask)) return false;
  if (mask && ty_dtype_of(mask) != TY_BOOL)
    return ty_op_fail(c, TY_EINVAL, "mask: expected bool, got %s", ty_describe(mask));
  if (!expand_mask(&mask, q, k)) return false;
  int64_t t = q->v.size[2], s = k->v.size[2], rows = q->v.size[0] * q->v.size[1] * s;
  ty_dtype wide = ty_is_half(ty_dtype_of(q)) ? TY_F32 : ty_dtype_of(q);
  enum { AT_ONCE = 1 << 22 /* weights */ };
  int64_t block = rows ? AT_ONCE / rows : 1;
  if (block < 1) block = 1;
  ty_tensor *sum = NULL;
  for (int64_t i = 0; i < t && rows; i += block) {
    int64_t n = t - i < block ? t - i : block, seen = a->causal.i ? i + n + s - t : s;
    if (seen <= 0) continue; /* more queries than keys: these see none */
    ty_tensor *see = mask ? ty_narrow(ty_narrow(mask, 2, i, n), 3, 0, seen) : NULL;
    if (mask && !see) return false;
    ty_tensor *part = received_by(ty_narrow(q, 2, i, n), ty_narrow(k, 2, 0, seen), see, a->causal.i,
                                  ty_attention_scale(a->scale.f, q->v.size[3]));
    if (part && seen < s) part = ty_pad(part, TY_INTS(0, s - seen), "constant", 0);
    if (!part) return false;
    sum = sum ? ty_add(sum, part) : part;
  }
  if (!sum) sum = ty_zeros(TY_INTS(k->v.size[0], k->v.size[1], s), wide, ty_device_of(q));
  return ty_out_set(c, 0, sum);
}
