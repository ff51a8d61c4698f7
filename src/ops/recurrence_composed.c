/* The gradient of a recurrent layer in differentiable ops, step by step, for second derivatives: the steps are computed
 * again, then walked back. Everything is [heads, b, d] here; gates lie beside each other in [heads, b, gates * d]. */
#include <stdlib.h>

#include "recurrence.h"

/* One step: what it begins with, its gates, and what of its end the way back needs. */
typedef struct step {
  ty_tensor *state[4]; /* h, c, n, m */
  ty_tensor *gate[4];  /* lstm i f g o; gru r z n; slstm i' f' z o */
  ty_tensor *extra;    /* lstm tanh(c); gru the recurrent part of n; slstm the slope of log f */
  ty_tensor *above;    /* slstm: 1 where m came from the input gate, 0 where not, 1/2 at a tie */
} step;

static ty_tensor *part(ty_tensor *gates, int i, int64_t d) { return ty_narrow(gates, -1, i * d, d); }
static ty_tensor *product(ty_tensor *a, ty_tensor *b, ty_tensor *c) { return ty_mul(ty_mul(a, b), c); }
static ty_tensor *sigmoid_slope(ty_tensor *s) { return ty_mul(s, ty_sub(1.0, s)); }
static ty_tensor *tanh_slope(ty_tensor *q) { return ty_sub(1.0, ty_square(q)); }
static ty_tensor *join(ty_tensor *a, ty_tensor *b, ty_tensor *c, ty_tensor *d) {
  ty_tensor *all[] = { a, b, c, d };
  if (!a || !b || !c) return NULL;
  return ty_concat((ty_tensors){ all, d ? 4 : 3 }, -1);
}

/* x and u: the gates' parts from the input and from the recurrence. */
static void lstm_step(step *s, ty_tensor **next, ty_tensor *x, ty_tensor *u, int64_t d) {
  ty_tensor *p = ty_add(x, u);
  for (int i = 0; i < 4; i++) s->gate[i] = i == 2 ? ty_tanh(part(p, i, d)) : ty_sigmoid(part(p, i, d));
  next[1] = ty_add(ty_mul(s->gate[1], s->state[1]), ty_mul(s->gate[0], s->gate[2]));
  s->extra = ty_tanh(next[1]);
  next[0] = ty_mul(s->gate[3], s->extra);
}

/* From the gradients of the state after the step to those before it (of h what does not go through the recurrent
 * product); gives the gradients of x, and in *du those of u. */
static ty_tensor *lstm_back(const step *s, ty_tensor *const *next, ty_tensor **g, ty_tensor **du) {
  ty_tensor *const *a = s->gate;
  ty_tensor *dc = ty_add(g[1], product(g[0], a[3], tanh_slope(s->extra)));
  ty_tensor *di = product(dc, a[2], sigmoid_slope(a[0])), *df = product(dc, s->state[1], sigmoid_slope(a[1]));
  ty_tensor *dg = product(dc, a[0], tanh_slope(a[2])), *o = product(g[0], s->extra, sigmoid_slope(a[3]));
  g[0] = NULL;
  g[1] = ty_mul(dc, a[1]);
  return *du = join(di, df, dg, o);
}

static void gru_step(step *s, ty_tensor **next, ty_tensor *x, ty_tensor *u, int64_t d) {
  for (int i = 0; i < 2; i++) s->gate[i] = ty_sigmoid(ty_add(part(x, i, d), part(u, i, d)));
  s->extra = part(u, 2, d);
  s->gate[2] = ty_tanh(ty_add(part(x, 2, d), ty_mul(s->gate[0], s->extra)));
  next[0] = ty_add(s->gate[2], ty_mul(s->gate[1], ty_sub(s->state[0], s->gate[2])));
}

static ty_tensor *gru_back(const step *s, ty_tensor *const *next, ty_tensor **g, ty_tensor **du) {
  ty_tensor *const *a = s->gate;
  ty_tensor *dn = product(g[0], ty_sub(1.0, a[1]), tanh_slope(a[2]));
  ty_tensor *dz = product(g[0], ty_sub(s->state[0], a[2]), sigmoid_slope(a[1]));
  ty_tensor *dr = product(dn, s->extra, sigmoid_slope(a[0]));
  g[0] = ty_mul(g[0], a[1]);
  *du = join(dr, dz, ty_mul(dn, a[0]), NULL);
  return join(dr, dz, dn, NULL);
}

static void slstm_step(step *s, ty_tensor **next, ty_tensor *x, ty_tensor *u, int64_t d, bool exponential) {
  ty_tensor *p = ty_add(x, u), *i = part(p, 0, d), *f = part(p, 1, d);
  s->extra = exponential ? ty_ones_like(f, TY_DTYPE_DEFAULT) : ty_sigmoid(ty_neg(f));
  ty_tensor *kept = ty_add(exponential ? f : ty_log_sigmoid(f), s->state[3]); /* log of the forget gate, and m */
  if (!i || !kept) return;
  ty_dtype dtype = ty_dtype_of(i);
  s->above = ty_mul(ty_add(ty_to(ty_gt(i, kept), dtype), ty_to(ty_ge(i, kept), dtype)), 0.5);
  next[3] = ty_maximum(i, kept);
  s->gate[0] = ty_exp(ty_sub(i, next[3]));
  s->gate[1] = ty_exp(ty_sub(kept, next[3]));
  s->gate[2] = ty_tanh(part(p, 2, d));
  s->gate[3] = ty_sigmoid(part(p, 3, d));
  next[1] = ty_add(ty_mul(s->gate[1], s->state[1]), ty_mul(s->gate[0], s->gate[2]));
  next[2] = ty_add(ty_mul(s->gate[1], s->state[2]), s->gate[0]);
  next[0] = ty_mul(s->gate[3], ty_div(next[1], next[2]));
}

static ty_tensor *slstm_back(const step *s, ty_tensor *const *next, ty_tensor **g, ty_tensor **du) {
  ty_tensor *const *a = s->gate, *ratio = ty_div(next[1], next[2]);
  ty_tensor *dr = ty_div(ty_mul(g[0], a[3]), next[2]);
  ty_tensor *dc = ty_add(g[1], dr), *dn = ty_sub(g[2], ty_mul(dr, ratio));
  ty_tensor *di = ty_mul(ty_add(ty_mul(dc, a[2]), dn), a[0]);
  ty_tensor *df = ty_mul(ty_add(ty_mul(dc, s->state[1]), ty_mul(dn, s->state[2])), a[1]);
  ty_tensor *dm = ty_sub(ty_sub(g[3], di), df);
  di = ty_add(di, ty_mul(dm, s->above));
  df = ty_add(df, ty_mul(dm, ty_sub(1.0, s->above)));
  ty_tensor *o = product(g[0], ratio, sigmoid_slope(a[3])), *dz = product(dc, a[0], tanh_slope(a[2]));
  g[0] = NULL, g[1] = ty_mul(dc, a[1]), g[2] = ty_mul(dn, a[1]), g[3] = df;
  return *du = join(di, ty_mul(df, s->extra), dz, o);
}

/* [n, b, heads * m] to [n, heads, b, m], and back. */
static ty_tensor *by_head(ty_tensor *x, int64_t heads) {
  if (!x) return NULL;
  const int64_t *n = x->v.size;
  return ty_permute(ty_reshape(x, TY_INTS(n[0], n[1], heads, n[2] / heads)), TY_INTS(0, 2, 1, 3));
}
static ty_tensor *as_before(ty_tensor *x, ty_ints size) { return ty_reshape(ty_permute(x, TY_INTS(0, 2, 1, 3)), size); }

typedef struct work {
  step *steps;
  ty_tensor **dx, **du, **h; /* of each step */
} work;

static bool run(ty_vjp *c, work *k) {
  const ty_recurrence_steps_args *a = TY_ARGS(recurrence_steps, c);
  ty_cell cell = ty_cell_named(a->cell.s);
  bool slstm = ty_cell_is_slstm(cell);
  int states = ty_cell_states(cell), t = (int)ty_vjp_size(c, 0).v[0];
  ty_dtype dtype = ty_is_half(ty_vjp_dtype(c, 0)) ? TY_F32 : ty_vjp_dtype(c, 0);
  ty_tensor *w = ty_to(a->weight.t, dtype);
  if (!w) return false;
  int64_t heads = w->v.size[0], d = w->v.size[2];
  ty_tensor *x = by_head(ty_to(a->x.t, dtype), heads), *state = by_head(ty_to(a->state.t, dtype), heads);
  ty_tensor *across = ty_transpose(w, -2, -1);
  ty_tensor *bias = a->bias.t ? ty_reshape(ty_to(a->bias.t, dtype), TY_INTS(heads, 1, -1)) : NULL;
  ty_tensor *gy = c->g[0] ? by_head(ty_to(c->g[0], dtype), heads) : NULL;
  ty_tensor *last = c->g[1] ? by_head(ty_to(c->g[1], dtype), heads) : ty_zeros_like(state, TY_DTYPE_DEFAULT);
  ty_tensor *g[4] = { NULL };
  for (int i = 0; i < states; i++) {
    k->steps[0].state[i] = ty_select(state, 0, i);
    g[i] = ty_select(last, 0, i);
    if (!g[i] || !k->steps[0].state[i]) return false;
  }
  for (int i = 0; i < t; i++) {
    step *s = k->steps + i;
    k->h[i] = s->state[0];
    ty_tensor *u = ty_matmul(s->state[0], across), *xt = ty_select(x, 0, i);
    if (bias) u = ty_add(u, bias);
    if (cell == TY_LSTM) lstm_step(s, s[1].state, xt, u, d);
    else if (cell == TY_GRU) gru_step(s, s[1].state, xt, u, d);
    else slstm_step(s, s[1].state, xt, u, d, cell == TY_SLSTM_EXP);
    if (!s[1].state[0]) return false;
  }
  for (int i = t - 1; i >= 0; i--) {
    step *s = k->steps + i;
    if (gy) g[0] = ty_add(g[0], ty_select(gy, 0, i));
    k->dx[i] = (slstm ? slstm_back : cell == TY_GRU ? gru_back : lstm_back)(s, s[1].state, g, &k->du[i]);
    ty_tensor *through = ty_matmul(k->du[i], w);
    g[0] = g[0] ? ty_add(g[0], through) : through;
    if (!g[0]) return false;
  }
  ty_tensors dx = { k->dx, t }, du = { k->du, t }, h = { k->h, t };
  if (c->need[0]) c->dx[0] = as_before(ty_stack(dx, 0), ty_vjp_size(c, 0));
  if (c->need[3]) c->dx[3] = as_before(ty_stack((ty_tensors){ g, states }, 0), ty_vjp_size(c, 3));
  ty_tensor *u = c->need[1] || c->need[2] ? ty_stack(du, 0) : NULL;
  if (c->need[1])
    c->dx[1] = ty_sum(ty_matmul(ty_transpose(u, -2, -1), ty_stack(h, 0)), TY_INTS(0), false, TY_DTYPE_DEFAULT);
  if (c->need[2]) c->dx[2] = ty_reshape(ty_sum(u, TY_INTS(0, 2), false, TY_DTYPE_DEFAULT), ty_vjp_size(c, 2));
  return true;
}

bool ty_recurrence_composed(ty_vjp *c) {
  const ty_recurrence_steps_args *a = TY_ARGS(recurrence_steps, c);
  size_t t = (size_t)ty_vjp_size(c, 0).v[0];
  if (t == 0 || a->weight.t->v.count == 0) { /* the state goes through; nothing else takes part */
    for (int i = 0; i < 3; i++)
      if (c->need[i]) c->dx[i] = ty_zeros(ty_vjp_size(c, i), (int)ty_vjp_dtype(c, i), ty_vjp_device(c, i));
    if (c->need[3]) c->dx[3] = c->g[1];
    return true;
  }
  work k = { calloc(t + 1, sizeof(step)), calloc(t, sizeof(ty_tensor *)), calloc(t, sizeof(ty_tensor *)),
             calloc(t, sizeof(ty_tensor *)) };
  bool ok = k.steps && k.dx && k.du && k.h;
  ok = ok ? run(c, &k) : ty_op_fail(c, TY_ENOMEM, "out of memory for %zu steps", t);
  free(k.steps), free(k.dx), free(k.du), free(k.h);
  return ok;
}
