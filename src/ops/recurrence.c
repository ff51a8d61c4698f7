/* Recurrent layers over all their steps: LSTM (Hochreiter and Schmidhuber 1997), GRU (Cho et al. 2014; the reset gate
 * after the recurrent product, as in cuDNN), and sLSTM (Beck et al. 2024, xLSTM). The hidden units are split into heads
 * that do not see each other within the recurrence (Pöppel et al. 2024, FlashRNN). */
#include <string.h>

#include "recurrence.h"

static const char *const cells[] = { "lstm", "gru", "slstm", "slstm_exp", NULL };

ty_cell ty_cell_named(const char *name) {
  int i = 0;
  while (cells[i] && strcmp(cells[i], name) != 0) i++;
  return (ty_cell)i;
}

static ty_dtype wide(ty_dtype d) { return ty_is_half(d) ? TY_F32 : d; }

/* Argument `arg` is a float tensor of this shape. */
static bool check_shape(ty_call *c, int arg, int ndim, const int64_t *size) {
  const ty_tensor *t = c->arg[arg].t;
  if (!t ||
      (ty_is_float(ty_dtype_of(t)) && t->v.ndim == ndim && memcmp(t->v.size, size, sizeof *size * (size_t)ndim) == 0))
    return true;
  return ty_op_fail(c, TY_EINVAL, "%s: expected a float tensor %s, got %s", c->op->args[arg].name,
                    ty_shape_text(ndim, size), ty_describe(t));
}

static bool check_weight(ty_call *c, int arg, int gates) {
  const ty_tensor *w = c->arg[arg].t;
  return (w->v.ndim == 3 && w->v.size[1] == gates * w->v.size[2]) ||
         ty_op_fail(c, TY_EINVAL, "weight: expected [heads, %d * d, d] for this cell, got %s", gates, ty_describe(w));
}

/* x, weight, bias and state, in this order from argument 0; *cell from `cell_arg`. */
static bool check(ty_call *c, int cell_arg, ty_cell *cell) {
  int choice = ty_check_choice(c, cell_arg, cells);
  if (choice < 0) return false;
  *cell = (ty_cell)choice;
  const ty_tensor *x = c->arg[0].t, *w = c->arg[1].t;
  int64_t gates = ty_cell_gates(*cell), n = w->v.ndim == 3 ? w->v.size[0] * w->v.size[1] : 0;
  if (!check_weight(c, 1, (int)gates)) return false;
  if (x->v.ndim != 3 || x->v.size[2] != n)
    return ty_op_fail(c, TY_EINVAL, "x: expected [t, b, %lld] for weight %s, got %s", (long long)n, ty_describe(w),
                      ty_describe(x));
  if (ty_dtype_of(w) != ty_dtype_of(x))
    return ty_op_fail(c, TY_EINVAL, "x and weight: expected one dtype, got %s and %s", ty_describe(x), ty_describe(w));
  int64_t state[] = { ty_cell_states(*cell), x->v.size[1], w->v.size[0] * w->v.size[2] };
  return check_shape(c, 2, 1, &n) && check_shape(c, 3, 3, state);
}

/* Zeros; of the stabiliser -infinity, so that the first step takes nothing of what was before it. */
static ty_tensor *first_state(ty_cell cell, int64_t batch, int64_t width, ty_dtype dtype, int device) {
  ty_tensor *state = ty_zeros(TY_INTS(ty_cell_states(cell), batch, width), dtype, device);
  if (!state || (ty_cell_is_slstm(cell) && !ty_fill_(ty_select(state, 0, 3), -INFINITY))) return NULL;
  return state;
}

bool fwd_recurrence(ty_call *c) {
  const ty_recurrence_args *a = TY_ARGS(recurrence, c);
  ty_cell cell;
  if (!check(c, 4, &cell)) return false;
  ty_tensor *x = a->x.t, *w = a->weight.t, *bias = a->bias.t, *state = a->state.t, *out[4] = { NULL };
  ty_dtype dtype = wide(ty_dtype_of(x));
  if (bias && !(bias = ty_to(bias, dtype))) return false;
  state = state ? ty_to(state, dtype)
                : first_state(cell, x->v.size[1], w->v.size[0] * w->v.size[2], dtype, ty_device_of(x));
  if (!state) return false;
  bool save = ty_grad_enabled() &&
              (x->requires_grad || w->requires_grad || (bias && bias->requires_grad) || state->requires_grad);
  return ty_recurrence_steps(x, w, bias, state, a->cell.s, save, out) && ty_out_set(c, 0, out[0]) &&
         ty_out_set(c, 1, out[1]);
}

bool fwd_recurrence_steps(ty_call *c) {
  const ty_recurrence_steps_args *a = TY_ARGS(recurrence_steps, c);
  ty_cell cell;
  if (!check(c, 4, &cell)) return false;
  ty_tensor *x = a->x.t, *w = a->weight.t, *bias = a->bias.t, *state = a->state.t;
  ty_dtype dtype = wide(ty_dtype_of(x));
  if ((bias && !(bias = ty_to(bias, dtype))) || !(state = ty_to(state, dtype))) return false;
  int device = ty_device_of(x);
  int64_t t = x->v.size[0], b = x->v.size[1], width = w->v.size[0] * w->v.size[2], kept = a->save.i ? t : 0;
  if (!ty_out(c, 0, device, ty_dtype_of(x), 3, (int64_t[]){ t, b, width }) ||
      !ty_out(c, 1, device, dtype, 3, state->v.size) ||
      !ty_out(c, 2, device, dtype, 4, (int64_t[]){ kept, ty_cell_states(cell) - 1, b, width }) ||
      !ty_out(c, 3, device, dtype, 3, (int64_t[]){ kept, b, TY_SAVED_GATES * width }))
    return false;
  return ty_launch(c, (ty_tensor *[]){ x, w, bias, state }, 4, &(ty_p_recurrence){ .cell = cell });
}

/* Gradients for x, the recurrent part of the gates (of GRU, where it is another) and the state. */
bool fwd_recurrence_backward(ty_call *c) {
  const ty_recurrence_backward_args *a = TY_ARGS(recurrence_backward, c);
  int choice = ty_check_choice(c, 7, cells);
  if (choice < 0) return false;
  ty_cell cell = (ty_cell)choice;
  int gates = ty_cell_gates(cell);
  ty_tensor *w = a->weight.t, *y = a->y.t;
  if (!check_weight(c, 0, gates)) return false;
  int64_t width = w->v.size[0] * w->v.size[2];
  if (y->v.ndim != 3 || y->v.size[2] != width || ty_dtype_of(y) != ty_dtype_of(w))
    return ty_op_fail(c, TY_EINVAL, "y: expected [t, b, %lld] in the dtype of weight %s, got %s", (long long)width,
                      ty_describe(w), ty_describe(y));
  int64_t t = y->v.size[0], b = y->v.size[1], n = ty_cell_states(cell), state[] = { n, b, width };
  int64_t states[] = { t, n - 1, b, width }, saved[] = { t, b, TY_SAVED_GATES * width }, d[] = { t, b, gates * width };
  if (!check_shape(c, 1, 3, state) || !check_shape(c, 3, 4, states) || !check_shape(c, 4, 3, saved) ||
      !check_shape(c, 5, 3, y->v.size) || !check_shape(c, 6, 3, state))
    return false;
  ty_dtype dtype = wide(ty_dtype_of(y));
  ty_tensor *in[] = { w, a->state.t, y, a->states.t, a->gates.t, a->g.t, a->g_last.t };
  for (int i = 1; i < 7; i++)
    if (in[i] && i != 2 && !(in[i] = ty_to(in[i], i == 5 ? ty_dtype_of(y) : dtype))) return false;
  int device = ty_device_of(y);
  if (!ty_out(c, 0, device, ty_dtype_of(y), 3, d)) return false;
  if (cell != TY_GRU) d[0] = 0;
  if (!ty_out(c, 1, device, ty_dtype_of(y), 3, d) || !ty_out(c, 2, device, dtype, 3, state)) return false;
  return ty_launch(c, in, 7, &(ty_p_recurrence){ .cell = cell });
}

/* For each head u [n, b, heads * gates * d] transposed times h [n, b, heads * d]. */
static ty_tensor *outer(ty_tensor *u, ty_tensor *h, const int64_t *weight) {
  u = ty_permute(ty_reshape(u, TY_INTS(-1, weight[0], weight[1])), TY_INTS(1, 2, 0));
  h = ty_permute(ty_reshape(h, TY_INTS(-1, weight[0], weight[2])), TY_INTS(1, 0, 2));
  return ty_matmul(u, h);
}

bool vjp_recurrence_steps(ty_vjp *c) {
  const ty_recurrence_steps_args *a = TY_ARGS(recurrence_steps, c);
  ty_tensor *w = a->weight.t, *y = c->out[0], *d[3] = { NULL };
  if (c->g[2] || c->g[3]) return ty_op_fail(c, TY_EUNSUPPORTED, "states and gates have no gradient of their own");
  if (!c->g[0] && !c->g[1]) return true;
  int64_t t = y->v.size[0];
  if (!a->save.i && t) return ty_op_fail(c, TY_EUNSUPPORTED, "was run with save = false: its gradient is not there");
  if (!ty_vjp_plain()) return ty_recurrence_composed(c);
  ty_recurrence_backward(w, a->state.t, y, c->out[2], c->out[3], c->g[0], c->g[1], a->cell.s, d);
  if (!d[0]) return false;
  c->dx[0] = d[0], c->dx[3] = d[2];
  ty_tensor *u = ty_cell_named(a->cell.s) == TY_GRU ? d[1] : d[0];
  if (c->need[2]) c->dx[2] = ty_sum(u, TY_INTS(0, 1), false, (int)wide(ty_dtype_of(u)));
  if (!c->need[1]) return true;
  if (w->v.count == 0 || u->v.count == 0) {
    c->dx[1] = ty_zeros_like(w, TY_DTYPE_DEFAULT);
    return true;
  }
  ty_tensor *h = ty_to(ty_slice(a->state.t, 0, 0, 1, 1), ty_dtype_of(y));
  ty_tensor *first = outer(ty_slice(u, 0, 0, 1, 1), h, w->v.size);
  c->dx[1] = t == 1 ? first : ty_add(first, outer(ty_slice(u, 0, 1, t, 1), ty_slice(y, 0, 0, t - 1, 1), w->v.size));
  return true;
}
