/* Attention whose memory is a matrix for each head that decays and is added to. */
#include <string.h>

#include "op.h"

static ty_dtype wide_dtype(const ty_tensor *t) { return ty_is_half(ty_dtype_of(t)) ? TY_F32 : ty_dtype_of(t); }

/* What both ops have in common: arguments 0 to 4 are q, k, v, g and state. The gates and the state become what the
 * kernels take. */
typedef struct given {
  ty_tensor *q, *k, *v, *g, *state, *begins;
  int64_t states[4]; /* their shape */
  ty_dtype wide;
} given;

/* A float tensor of this shape. */
static bool has_shape(ty_call *c, int arg, const ty_tensor *t, const int64_t *size) {
  if (ty_is_float(ty_dtype_of(t)) && t->v.ndim == 4 && memcmp(t->v.size, size, 4 * sizeof *size) == 0) return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor %s, got %s", c->op->args[arg].name,
                    ty_shape_text(4, size), ty_describe(t));
}

static bool take(ty_call *c, int cu_seqlens, given *x) {
  *x = (given){ .q = c->arg[0].t, .k = c->arg[1].t, .v = c->arg[2].t, .g = c->arg[3].t, .state = c->arg[4].t };
  if (!ty_check_ndim(c, 0, 4, 4, "[b, h, t, d]") || !ty_check_ndim(c, 1, 4, 4, "[b, h, t, d]") ||
      !ty_check_ndim(c, 2, 4, 4, "[b, h, t, dv]"))
    return false;
  const int64_t *q = x->q->v.size, *v = x->v->v.size;
  if (ty_dtype_of(x->k) != ty_dtype_of(x->q) || ty_dtype_of(x->v) != ty_dtype_of(x->q))
    return ty_op_fail(c, TY_EINVAL, "q, k and v: expected one dtype, got %s, %s and %s", ty_describe(x->q),
                      ty_describe(x->k), ty_describe(x->v));
  if (!ty_same_shape(&x->k->v, &x->q->v))
    return ty_op_fail(c, TY_EINVAL, "k: expected the shape of q %s, got %s", ty_describe(x->q), ty_describe(x->k));
  if (v[0] != q[0] || v[1] != q[1] || v[2] != q[2])
    return ty_op_fail(c, TY_EINVAL, "v: expected the batch size, heads and length of q %s, got %s", ty_describe(x->q),
                      ty_describe(x->v));
  bool fits = x->g->v.ndim <= 4 && ty_is_float(ty_dtype_of(x->g));
  for (int i = 1; fits && i <= x->g->v.ndim; i++) {
    int64_t size = x->g->v.size[x->g->v.ndim - i];
    fits = size == 1 || size == q[4 - i];
  }
  if (!fits)
    return ty_op_fail(c, TY_EINVAL, "g: expected a float tensor that broadcasts to %s, got %s", ty_shape_text(4, q),
                      ty_describe(x->g));
  int64_t sequences = q[0];
  if ((x->begins = c->arg[cu_seqlens].t)) {
    if (!ty_check_index_dtype(c, cu_seqlens) || !ty_check_ndim(c, cu_seqlens, 1, 1, "[n + 1]")) return false;
    if (x->begins->v.size[0] == 0)
      return ty_op_fail(c, TY_EINVAL, "cu_seqlens: expected at least one position, got none");
    if (q[0] != 1)
      return ty_op_fail(c, TY_EINVAL, "q: with cu_seqlens, expected a batch of 1, got %s", ty_describe(x->q));
    sequences = x->begins->v.size[0] - 1;
    if (!(x->begins = ty_to(x->begins, TY_I64))) return false;
  }
  memcpy(x->states, (int64_t[]){ sequences, q[1], q[3], v[3] }, sizeof x->states);
  x->wide = wide_dtype(x->q);
  if (x->state && (!has_shape(c, 4, x->state, x->states) || !(x->state = ty_to(x->state, x->wide)))) return false;
  x->g = ty_expand(ty_to(x->g, x->wide), (ty_ints){ q, 4 });
  return x->g != NULL;
}

bool fwd_gated_linear_attention(ty_call *c) {
  given x;
  if (!take(c, 6, &x)) return false;
  ty_p_attention p = { .scale = ty_attention_scale(c->arg[5].f, x.states[2]) };
  return ty_out_like(c, 0, x.v, ty_dtype_of(x.v)) && ty_out(c, 1, ty_device_of(x.q), x.wide, 4, x.states) &&
         ty_launch(c, (ty_tensor *[]){ x.q, x.k, x.v, x.g, x.state, x.begins }, 6, &p);
}

bool fwd_gated_linear_attention_backward(ty_call *c) {
  const ty_gated_linear_attention_backward_args *a = TY_ARGS(gated_linear_attention_backward, c);
  given x;
  if (!take(c, 5, &x) || !has_shape(c, 6, a->dy.t, x.v->v.size) ||
      (a->dstate.t && !has_shape(c, 7, a->dstate.t, x.states)))
    return false;
  ty_tensor *dy = ty_to(a->dy.t, ty_dtype_of(x.v)), *dstate = a->dstate.t ? ty_to(a->dstate.t, x.wide) : NULL;
  if (!dy || (a->dstate.t && !dstate)) return false;
  ty_p_attention p = { .scale = ty_attention_scale(a->scale.f, x.states[2]) };
  return ty_out_like(c, 0, x.q, ty_dtype_of(x.q)) && ty_out_like(c, 1, x.k, ty_dtype_of(x.k)) &&
         ty_out_like(c, 2, x.v, ty_dtype_of(x.v)) && ty_out_like(c, 3, x.q, x.wide) &&
         ty_out(c, 4, ty_device_of(x.q), x.wide, 4, x.states) &&
         ty_launch(c, (ty_tensor *[]){ x.q, x.k, x.v, x.g, x.state, x.begins, dy, dstate }, 8, &p);
}

/* ---- in differentiable ops ---- */

/* Where sequences are: bool [t, 1], and the sequence of each token, i64 [t]; NULL where one sequence is one row. */
typedef struct places {
  ty_tensor *inside, *first, *last, *own;
  ty_tensor *begins, *ends; /* i64 [n] */
} places;

static bool find_places(places *at, ty_tensor *cu_seqlens, int64_t t, int device) {
  memset(at, 0, sizeof *at);
  ty_tensor *here = ty_unsqueeze(ty_arange(0, t, 1, TY_I64, device), 1);
  if (!cu_seqlens) {
    at->first = ty_eq(here, 0), at->last = ty_eq(here, t - 1);
    return at->first && at->last;
  }
  ty_tensor *all = ty_to(cu_seqlens, TY_I64);
  int64_t n = cu_seqlens->v.size[0] - 1;
  at->begins = ty_slice(all, 0, 0, n, 1), at->ends = ty_slice(all, 0, 1, n + 1, 1);
  /* The number of beginnings up to a token is that of its sequence, counted from 1. */
  ty_tensor *of = ty_sub(ty_sum(ty_ge(here, all), TY_INTS(1), false, TY_DTYPE_DEFAULT), 1);
  at->own = ty_clamp(of, 0, n - 1);
  at->inside = ty_unsqueeze(ty_logical_and(ty_operand(ty_ge(of, 0)), ty_operand(ty_lt(of, n))), 1);
  ty_tensor *first = ty_any(ty_eq(here, at->begins), TY_INTS(1), true);
  ty_tensor *last = ty_any(ty_eq(ty_add(here, 1), at->ends), TY_INTS(1), true);
  at->first = ty_logical_and(ty_operand(first), ty_operand(at->inside));
  at->last = ty_logical_and(ty_operand(last), ty_operand(at->inside));
  return at->first && at->last && at->own;
}

/* States [n, h, d, dv], each at every token of its sequence: what broadcasts to [b, h, t, d, dv]. */
static ty_tensor *at_tokens(const places *at, ty_tensor *states) {
  if (!at->own) return ty_unsqueeze(states, 2);
  return ty_unsqueeze(ty_transpose(ty_index_select(states, 0, at->own), 0, 1), 0);
}

/* x [b, h, t, d], zero for tokens of no sequence. */
static ty_tensor *only_inside(const places *at, ty_tensor *x) { return at->inside ? ty_where(at->inside, x, 0.0) : x; }

/* The states of all tokens [b, h, t, d, dv] as linear_scan gives them, and from the end their gradients D:
 * dq = S dy', dk = D v', dv = k D, dg = exp(g) times the sum of D and the state before. */
static bool composed(ty_vjp *c) {
  const ty_gated_linear_attention_args *a = TY_ARGS(gated_linear_attention, c);
  ty_dtype dtype = wide_dtype(a->q.t);
  const int64_t *size = a->q.t->v.size;
  int64_t t = size[2];
  int device = ty_device_of(a->q.t);
  ty_tensor *q = ty_to(a->q.t, dtype), *k = ty_to(a->k.t, dtype), *v = ty_to(a->v.t, dtype);
  ty_tensor *state = a->state.t ? ty_to(a->state.t, dtype) : NULL, *ds = c->g[1] ? ty_to(c->g[1], dtype) : NULL;
  ty_tensor *dy = c->g[0] ? ty_to(c->g[0], dtype) : ty_mul(v, 0.0);
  ty_tensor *decay = ty_exp(ty_expand(ty_to(a->g.t, dtype), (ty_ints){ size, 4 }));
  if (!q || !k || !v || !dy || !decay || (a->state.t && !state)) return false;
  double scale = ty_attention_scale(a->scale.f, size[3]);
  if (t == 0 || (a->cu_seqlens.t && a->cu_seqlens.t->v.size[0] == 1)) { /* no token is of a sequence */
    ty_tensor *none[] = { q, k, v, decay };
    for (int i = 0; i < 4; i++) c->dx[i] = ty_mul(none[i], 0.0);
    if (c->need[4]) c->dx[4] = ds ? ds : ty_mul(state, 0.0);
    return true;
  }
  places at;
  if (!find_places(&at, a->cu_seqlens.t, t, device)) return false;
  q = ty_mul(only_inside(&at, q), scale), k = only_inside(&at, k), v = only_inside(&at, v), dy = only_inside(&at, dy);
  ty_tensor *first = ty_unsqueeze(at.first, -1), *cut = ty_where(at.first, 0.0, decay), *before = NULL;
  if (!dy || !first || !cut) return false;
  decay = ty_unsqueeze(decay, -1);
  ty_tensor *rows = ty_unsqueeze(v, -2), *gradients = ty_unsqueeze(dy, -2);
  ty_tensor *added = ty_mul(ty_unsqueeze(k, -1), rows);
  if (state) {
    before = ty_where(first, at_tokens(&at, state), 0.0);
    added = ty_add(added, ty_mul(decay, before));
  }
  ty_tensor *states = ty_linear_scan(ty_unsqueeze(cut, -1), added, 2, false);
  added = ty_mul(ty_unsqueeze(q, -1), gradients);
  if (ds) added = ty_add(added, ty_where(ty_unsqueeze(at.last, -1), at_tokens(&at, ds), 0.0));
  ty_tensor *back = ty_linear_scan(ty_unsqueeze(ty_shifted(cut, 2, true, 0), -1), added, 2, true);
  ty_tensor *previous = ty_where(first, 0.0, ty_shifted(states, 2, false, 0));
  if (before) previous = ty_add(previous, before);
  if (!back || !previous) return false;
#define SUM(x, dim) ty_sum(x, TY_INTS(dim), false, TY_DTYPE_DEFAULT)
  c->dx[0] = ty_mul(only_inside(&at, SUM(ty_mul(states, gradients), -1)), scale);
  c->dx[1] = only_inside(&at, SUM(ty_mul(back, rows), -1));
  c->dx[2] = only_inside(&at, SUM(ty_mul(back, ty_unsqueeze(k, -1)), -2));
  back = ty_mul(back, decay);
  c->dx[3] = only_inside(&at, SUM(ty_mul(back, previous), -1));
#undef SUM
  if (!c->need[4]) return true;
  if (!at.own) {
    c->dx[4] = ty_squeeze(ty_slice(back, 2, 0, 1, 1), TY_INTS(2));
    return true;
  }
  ty_tensor *of = ty_index_select(back, 2, ty_clamp(at.begins, 0, t - 1)); /* [1, h, n, d, dv] */
  of = ty_transpose(ty_squeeze(of, TY_INTS(0)), 0, 1);
  ty_tensor *empty = ty_reshape(ty_eq(at.begins, at.ends), TY_INTS(-1, 1, 1, 1)); /* their state is what it was */
  c->dx[4] = ds ? ty_where(empty, ds, of) : ty_where(empty, 0.0, of);
  return c->dx[4] != NULL;
}

bool vjp_gated_linear_attention(ty_vjp *c) {
  const ty_gated_linear_attention_args *a = TY_ARGS(gated_linear_attention, c);
  if (!c->g[0] && !c->g[1]) return true;
  if (!ty_vjp_plain()) return composed(c);
  ty_tensor *dy = c->g[0] ? c->g[0] : ty_zeros_like(a->v.t, TY_DTYPE_DEFAULT), *d[5];
  if (!dy || !ty_gated_linear_attention_backward(a->q.t, a->k.t, a->v.t, a->g.t, a->state.t, a->cu_seqlens.t, dy,
                                                 c->g[1], a->scale.f, d))
    return false;
  for (int i = 0; i < 5; i++)
    if (c->need[i]) c->dx[i] = d[i];
  return true;
}
