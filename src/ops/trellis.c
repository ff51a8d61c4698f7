/* Losses over all alignments of a sequence with a shorter one: CTC (Graves et al. 2006) and the transducer (Graves 2012).
 * What is there to choose from is gathered into a trellis of log-probabilities first, which the kernels walk through. */
#include <stdio.h>
#include <string.h>

#include "op.h"

#define NEVER (-1e30) /* the logarithm of no probability in compositions: differences of it are numbers */

enum { MEAN, SUM, NONE };
static const char *const reductions[] = { "mean", "sum", "none", NULL };

static ty_dtype wide(const ty_tensor *x) { return ty_is_half(ty_dtype_of(x)) ? TY_F32 : ty_dtype_of(x); }

/* ---- arguments ---- */

static bool fails(ty_call *c, int arg, const char *expected) {
  return ty_op_fail(c, TY_EINVAL, "%s: expected %s, got %s", c->op->args[arg].name, expected,
                    ty_describe(c->arg[arg].t));
}

static bool is_lengths(const ty_tensor *t, int64_t n) {
  return t->v.ndim == 1 && t->v.size[0] == n && (ty_dtype_of(t) == TY_I64 || ty_dtype_of(t) == TY_I32);
}

/* Targets [n, width] and the two lengths [n], arguments 1 to 3. */
static bool check_targets(ty_call *c, int64_t n, int64_t width) {
  const ty_tensor *targets = c->arg[1].t;
  if (!ty_check_index_dtype(c, 1)) return false;
  if (targets->v.ndim != 2 || targets->v.size[0] != n || (width >= 0 && targets->v.size[1] != width)) {
    char text[64];
    if (width < 0) snprintf(text, sizeof text, "[%lld, s]", (long long)n);
    else snprintf(text, sizeof text, "[%lld, %lld]", (long long)n, (long long)width);
    return fails(c, 1, text);
  }
  for (int i = 2; i < 4; i++)
    if (!is_lengths(c->arg[i].t, n)) return fails(c, i, "integers, one for each target");
  return true;
}

/* Of an internal op: a trellis at `arg`, lengths after it. */
static bool check_trellis(ty_call *c, int arg, int lengths) {
  if (!ty_check_ndim(c, arg, 3, 3, "[n, t, states]") || !ty_check_floats(c, arg)) return false;
  for (int i = lengths; i < lengths + 2; i++)
    if (!is_lengths(c->arg[i].t, c->arg[arg].t->v.size[0]) || ty_dtype_of(c->arg[i].t) != TY_I64)
      return fails(c, i, "i64, one for each sequence");
  return true;
}

static bool check_like(ty_call *c, int arg, const ty_tensor *x, int ndim, const char *text) {
  const ty_view *v = &c->arg[arg].t->v;
  return (v->ndim == ndim && memcmp(v->size, x->v.size, sizeof *v->size * (size_t)ndim) == 0 &&
          ty_dtype_of(c->arg[arg].t) == wide(x)) ||
         fails(c, arg, text);
}

/* The kernel's complaint as one of the function that was called. */
static bool launch_as(ty_call *c, ty_op_id user, ty_tensor *const *in, int nin) {
  return ty_launch_kernel(c->op->id, c->out, 2, in, nin, NULL) ||
         ty_op_fail_(&ty_ops[user], ty_error_code(), "%s", ty_error());
}

static ty_tensor *both(ty_tensor *x, ty_tensor *y) { return ty_logical_and(ty_operand(x), ty_operand(y)); }
static ty_tensor *either(ty_tensor *x, ty_tensor *y) { return ty_logaddexp(ty_operand(x), ty_operand(y)); }
static ty_tensor *count(int64_t n, int device) { return ty_arange(0, n, 1, TY_I64, device); }
static ty_tensor *column(ty_tensor *x) { return ty_unsqueeze(x, 1); }

/* Targets behind their lengths as `blank`, which is always in range. */
static ty_tensor *masked_targets(ty_tensor *targets, ty_tensor *lengths, int64_t blank) {
  ty_tensor *at = count(targets->v.size[1], ty_device_of(targets));
  ty_tensor *other = ty_full(TY_NO_INTS, (double)blank, TY_I64, ty_device_of(targets));
  return ty_where(ty_lt(at, column(lengths)), ty_to(targets, TY_I64), other);
}

/* ---- CTC ---- */

static ty_tensor *reduce(ty_tensor *loss, ty_tensor *lengths, int reduction) {
  if (!loss || reduction == NONE) return loss;
  if (reduction == SUM) return ty_sum(loss, TY_NO_INTS, false, TY_DTYPE_DEFAULT);
  if (lengths) loss = ty_div(loss, ty_to(ty_maximum(lengths, 1.0), ty_dtype_of(loss)));
  return ty_mean(loss, TY_NO_INTS, false);
}

bool fwd_ctc_loss(ty_call *c) {
  const ty_ctc_loss_args *a = TY_ARGS(ctc_loss, c);
  ty_tensor *x = a->log_probs.t;
  int reduction = ty_check_choice(c, 5, reductions);
  if (reduction < 0 || !ty_check_ndim(c, 0, 3, 3, "[t, n, classes]")) return false;
  int64_t t = x->v.size[0], n = x->v.size[1], classes = x->v.size[2], blank = a->blank.i;
  if (!check_targets(c, n, -1)) return false;
  if (blank < 0 || blank >= classes)
    return ty_op_fail(c, TY_EINVAL, "blank: expected a class of log_probs %s, got %lld", ty_describe(x),
                      (long long)blank);
  int64_t s = a->targets.t->v.size[1];
  ty_tensor *lengths = ty_to(a->target_lengths.t, TY_I64), *steps = ty_to(a->input_lengths.t, TY_I64);
  ty_tensor *targets = lengths ? masked_targets(a->targets.t, lengths, blank) : NULL;
  if (!targets || !steps) return false;
  /* blank, target, blank, ..., blank */
  int device = ty_device_of(x);
  ty_tensor *blanks = ty_full(TY_INTS(n, s, 1), (double)blank, TY_I64, device);
  ty_tensor *states = ty_reshape(ty_concat(TY_LIST(blanks, ty_unsqueeze(targets, 2)), 2), TY_INTS(n, 2 * s));
  states = ty_concat(TY_LIST(states, ty_full(TY_INTS(n, 1), (double)blank, TY_I64, device)), 1);
  /* a target may follow another one directly where they differ */
  ty_tensor *two = ty_full(TY_INTS(n, s ? 2 : 1), (double)blank, TY_I64, device);
  ty_tensor *before = s ? ty_concat(TY_LIST(two, ty_narrow(states, 1, 0, 2 * s - 1)), 1) : two;
  ty_tensor *skip = both(ty_ne(states, (double)blank), ty_ne(states, before));
  ty_tensor *index = ty_expand(column(states), TY_INTS(n, t, 2 * s + 1));
  ty_tensor *emission = index && skip ? ty_gather(ty_permute(ty_to(x, wide(x)), TY_INTS(1, 0, 2)), 2, index) : NULL;
  if (!emission) return ty_op_fail(c, ty_error_code(), "targets: %s", ty_error());
  ty_tensor *out[2] = { NULL };
  ty_tensor *loss = ty_ctc_trellis(emission, skip, steps, lengths, out);
  if (loss && a->zero_infinity.i) loss = ty_where(ty_isinf(loss), 0.0, loss);
  return ty_out_set(c, 0, ty_to(reduce(loss, lengths, reduction), ty_dtype_of(x)));
}

static bool check_skip(ty_call *c, int arg, const ty_tensor *x) {
  const ty_view *v = &c->arg[arg].t->v;
  return (v->ndim == 2 && v->size[0] == x->v.size[0] && v->size[1] == x->v.size[2] && v->dtype == TY_BOOL &&
          v->size[1] % 2 == 1) ||
         fails(c, arg, "bool [n, states], an odd number of states");
}

bool fwd_ctc_trellis(ty_call *c) {
  const ty_ctc_trellis_args *a = TY_ARGS(ctc_trellis, c);
  ty_tensor *x = a->emission.t;
  if (!check_trellis(c, 0, 2) || !check_skip(c, 1, x)) return false;
  if (!ty_out(c, 0, ty_device_of(x), wide(x), 1, x->v.size) || !ty_out_like(c, 1, x, wide(x))) return false;
  return launch_as(c, TY_OP_ctc_loss, (ty_tensor *[]){ x, a->skip.t, a->input_lengths.t, a->target_lengths.t }, 4);
}

bool fwd_ctc_trellis_backward(ty_call *c) {
  const ty_ctc_trellis_backward_args *a = TY_ARGS(ctc_trellis_backward, c);
  ty_tensor *x = a->emission.t;
  if (!check_trellis(c, 1, 3) || !check_skip(c, 2, x)) return false;
  if (!check_like(c, 5, x, 3, "the shape of emission") || !check_like(c, 6, x, 1, "one for each sequence") ||
      !check_like(c, 0, x, 1, "one for each sequence"))
    return false;
  return ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_launch(
             c, (ty_tensor *[]){ a->g.t, x, a->skip.t, a->input_lengths.t, a->target_lengths.t, a->alpha.t, a->loss.t },
             7, NULL);
}

/* x [n, m] moved by `by` columns to the right (left where it is negative), NEVER where nothing comes from. */
static ty_tensor *moved(ty_tensor *x, int64_t by) {
  if (!x) return NULL;
  int64_t m = x->v.size[1], far = by < 0 ? -by : by, kept = m > far ? m - far : 0;
  ty_tensor *gap = ty_full(TY_INTS(x->v.size[0], m - kept), NEVER, ty_dtype_of(x), ty_device_of(x));
  if (!kept || !gap) return gap;
  return by > 0 ? ty_concat(TY_LIST(gap, ty_narrow(x, 1, 0, kept)), 1)
                : ty_concat(TY_LIST(ty_narrow(x, 1, far, kept), gap), 1);
}

static ty_tensor *sum3(ty_tensor *a, ty_tensor *b, ty_tensor *c) { return either(either(a, b), c); }

/* minus g times the probabilities of the ways through each place, of their logarithms and that of all ways [n]; those of
 * no way at all are 0. */
static ty_tensor *minus_shares(ty_tensor *g, ty_tensor *ways, ty_tensor *all) {
  ty_tensor *none = ty_lt(all, NEVER / 2);
  ty_tensor *by = ty_unsqueeze(column(ty_where(none, 0.0, all)), 1);
  ty_tensor *p = ty_exp(ty_minimum(ty_sub(ways, by), 1.0));
  return ty_mul(ty_neg(ty_unsqueeze(column(ty_where(none, 0.0, g)), 1)), p);
}

/* The gradient in differentiable ops: forward and backward variables, step by step. `room`: 2 t tensors. */
static ty_tensor *ctc_composed(ty_vjp *c, ty_tensor **room) {
  const ty_ctc_trellis_args *a = TY_ARGS(ctc_trellis, c);
  ty_tensor *x = ty_maximum(a->emission.t, NEVER), *lengths = a->target_lengths.t;
  if (!x) return NULL;
  int64_t t = x->v.size[1], m = x->v.size[2];
  int device = ty_device_of(x);
  ty_tensor **alpha = room, **beta = room + t;
  ty_tensor *at = count(m, device), *last = column(ty_mul(lengths, 2.0));
  ty_tensor *there = ty_le(at, last);
  ty_tensor *first = both(there, ty_le(at, 1.0));
  ty_tensor *final = both(there, ty_ge(at, ty_sub(last, 1.0)));
  ty_tensor *ends = ty_where(final, ty_zeros_like(ty_select(x, 1, 0), TY_DTYPE_DEFAULT), NEVER);
  ty_tensor *steps = column(a->input_lengths.t);
  for (int64_t i = 0; i < t; i++) {
    ty_tensor *e = ty_select(x, 1, i);
    if (i) {
      ty_tensor *from = alpha[i - 1];
      e = ty_add(e, sum3(from, moved(from, 1), ty_where(a->skip.t, moved(from, 2), NEVER)));
    }
    alpha[i] = ty_where(i ? there : first, e, NEVER);
    if (!alpha[i]) return NULL;
  }
  for (int64_t i = t - 1; i >= 0; i--) {
    ty_tensor *rest = NULL;
    if (i < t - 1) {
      ty_tensor *next = ty_add(beta[i + 1], ty_select(x, 1, i + 1));
      rest = sum3(next, moved(next, -1), moved(ty_where(a->skip.t, next, NEVER), -2));
      rest = ty_where(ty_gt(steps, (double)(i + 1)), rest, NEVER);
      beta[i] = ty_where(ty_eq(steps, (double)(i + 1)), ends, rest);
    } else {
      beta[i] = ty_where(ty_eq(steps, (double)(i + 1)), ends, NEVER);
    }
    if (!beta[i]) return NULL;
  }
  ty_tensor *all = ty_logsumexp(ty_add(alpha[0], beta[0]), TY_INTS(1), false);
  ty_tensor *ways = ty_add(ty_stack((ty_tensors){ alpha, (int)t }, 1), ty_stack((ty_tensors){ beta, (int)t }, 1));
  return minus_shares(c->g[0], ways, all);
}

bool vjp_ctc_trellis(ty_vjp *c) {
  const ty_ctc_trellis_args *a = TY_ARGS(ctc_trellis, c);
  ty_tensor *x = a->emission.t;
  if (c->g[1]) return ty_op_fail(c, TY_EUNSUPPORTED, "the forward variables have no gradient of their own");
  if (ty_vjp_plain()) {
    c->dx[0] = ty_ctc_trellis_backward(c->g[0], x, a->skip.t, a->input_lengths.t, a->target_lengths.t, c->out[1],
                                       c->out[0]);
    return true;
  }
  int64_t t = x->v.size[1];
  if (!t) {
    c->dx[0] = ty_zeros_like(x, TY_DTYPE_DEFAULT);
    return true;
  }
  size_t bytes = sizeof(ty_tensor *) * (size_t)(2 * t);
  ty_tensor **room = ty_scratch_alloc(bytes);
  if (!room) return false;
  c->dx[0] = ctc_composed(c, room);
  ty_scratch_free(room, bytes);
  return true;
}

/* ---- transducers ---- */

bool fwd_rnnt_loss(ty_call *c) {
  const ty_rnnt_loss_args *a = TY_ARGS(rnnt_loss, c);
  ty_tensor *x = a->logits.t;
  int reduction = ty_check_choice(c, 5, reductions);
  if (reduction < 0 || !ty_check_ndim(c, 0, 4, 4, "[n, t, u + 1, classes]")) return false;
  int64_t n = x->v.size[0], t = x->v.size[1], u = x->v.size[2], classes = x->v.size[3];
  int64_t blank = a->blank.i < 0 ? a->blank.i + classes : a->blank.i;
  if (u < 1) return fails(c, 0, "at least one place in dimension 2");
  if (!check_targets(c, n, u - 1)) return false;
  if (blank < 0 || blank >= classes)
    return ty_op_fail(c, TY_EINVAL, "blank: expected a class of logits %s, got %lld", ty_describe(x),
                      (long long)a->blank.i);
  ty_tensor *lengths = ty_to(a->target_lengths.t, TY_I64), *steps = ty_to(a->input_lengths.t, TY_I64);
  ty_tensor *targets = lengths ? masked_targets(a->targets.t, lengths, blank) : NULL;
  if (!targets || !steps) return false;
  ty_tensor *log_p = ty_log_softmax(ty_to(x, wide(x)), 3);
  /* at the last place there is no target: the blank stands for it, and is not looked at */
  targets = ty_concat(TY_LIST(targets, ty_full(TY_INTS(n, 1), (double)blank, TY_I64, ty_device_of(x))), 1);
  ty_tensor *index = ty_expand(ty_reshape(targets, TY_INTS(n, 1, u, 1)), TY_INTS(n, t, u, 1));
  ty_tensor *label = log_p && index ? ty_gather(log_p, 3, index) : NULL;
  if (!label) return ty_op_fail(c, ty_error_code(), "targets: %s", ty_error());
  ty_tensor *out[2] = { NULL };
  ty_tensor *loss = ty_rnnt_trellis(ty_select(log_p, 3, blank), ty_squeeze(label, TY_INTS(3)), steps, lengths, out);
  return ty_out_set(c, 0, ty_to(reduce(loss, NULL, reduction), ty_dtype_of(x)));
}

bool fwd_rnnt_trellis(ty_call *c) {
  const ty_rnnt_trellis_args *a = TY_ARGS(rnnt_trellis, c);
  ty_tensor *x = a->blank.t;
  if (!check_trellis(c, 0, 2) || !check_like(c, 1, x, 3, "the shape and dtype of blank")) return false;
  if (x->v.size[2] < 1) return fails(c, 0, "at least one state");
  if (!ty_out(c, 0, ty_device_of(x), wide(x), 1, x->v.size) || !ty_out_like(c, 1, x, wide(x))) return false;
  return launch_as(c, TY_OP_rnnt_loss, (ty_tensor *[]){ x, a->label.t, a->input_lengths.t, a->target_lengths.t }, 4);
}

bool fwd_rnnt_trellis_backward(ty_call *c) {
  const ty_rnnt_trellis_backward_args *a = TY_ARGS(rnnt_trellis_backward, c);
  ty_tensor *x = a->blank.t;
  if (!check_trellis(c, 1, 3) || !check_like(c, 2, x, 3, "the shape and dtype of blank")) return false;
  if (!check_like(c, 5, x, 3, "the shape of blank") || !check_like(c, 6, x, 1, "one for each sequence") ||
      !check_like(c, 0, x, 1, "one for each sequence"))
    return false;
  return ty_out_like(c, 0, x, ty_dtype_of(x)) && ty_out_like(c, 1, x, ty_dtype_of(x)) &&
         ty_launch(
             c,
             (ty_tensor *[]){ a->g.t, x, a->label.t, a->input_lengths.t, a->target_lengths.t, a->alpha.t, a->loss.t },
             7, NULL);
}

/* Diagonals of places of the same t + u, along which all can be done at once. `room`: 2 (t + u) tensors. */
static bool rnnt_composed(ty_vjp *c, ty_tensor **room) {
  const ty_rnnt_trellis_args *a = TY_ARGS(rnnt_trellis, c);
  int64_t n = a->blank.t->v.size[0], t = a->blank.t->v.size[1], m = a->blank.t->v.size[2], diagonals = t + m - 1;
  int device = ty_device_of(a->blank.t);
  ty_tensor **alpha = room, **beta = room + diagonals;
  ty_tensor *u = count(m, device), *d = column(count(diagonals, device));
  ty_tensor *step = ty_sub(d, u); /* [diagonals, m]: the t of a place */
  ty_tensor *index = ty_to(ty_minimum(ty_maximum(step, 0.0), (double)(t - 1)), TY_I64);
  ty_tensor *skew = index ? ty_expand(ty_unsqueeze(index, 0), TY_INTS(n, diagonals, m)) : NULL;
  if (!skew) return false;
  ty_tensor *blank = ty_gather(ty_maximum(a->blank.t, NEVER), 1, skew);
  ty_tensor *label = ty_gather(ty_maximum(a->label.t, NEVER), 1, skew);
  ty_tensor *steps = ty_unsqueeze(column(a->input_lengths.t), 1),
            *lengths = ty_unsqueeze(column(a->target_lengths.t), 1);
  ty_tensor *inside = both(ty_ge(step, 0.0), both(ty_lt(step, steps), ty_le(u, lengths)));
  ty_tensor *end = both(inside, both(ty_eq(u, lengths), ty_eq(step, ty_sub(steps, 1.0))));
  label = ty_where(ty_lt(u, lengths), label, NEVER);
  if (!blank || !label || !inside || !end) return false;
  for (int64_t i = 0; i < diagonals; i++) {
    ty_tensor *way = ty_zeros_like(ty_select(blank, 1, 0), TY_DTYPE_DEFAULT);
    if (i) {
      ty_tensor *from = alpha[i - 1];
      way = either(ty_add(from, ty_select(blank, 1, i - 1)), moved(ty_add(from, ty_select(label, 1, i - 1)), 1));
    }
    alpha[i] = ty_where(ty_select(inside, 1, i), way, NEVER);
    if (!alpha[i]) return false;
  }
  ty_tensor *far = ty_full(TY_INTS(n, m), NEVER, ty_dtype_of(blank), device);
  for (int64_t i = diagonals - 1; i >= 0; i--) {
    ty_tensor *next = i < diagonals - 1 ? beta[i + 1] : far, *own = ty_select(blank, 1, i);
    ty_tensor *way = either(ty_add(next, own), ty_add(moved(next, -1), ty_select(label, 1, i)));
    beta[i] = ty_where(ty_select(inside, 1, i), ty_where(ty_select(end, 1, i), own, way), NEVER);
    if (!beta[i]) return false;
  }
  ty_tensor *all = ty_select(beta[0], 1, 0), *a_all = ty_stack((ty_tensors){ alpha, (int)diagonals }, 1);
  for (int64_t i = 0; i + 1 < diagonals; i++) alpha[i] = moved(beta[i + 1], -1);
  alpha[diagonals - 1] = far;
  ty_tensor *above = ty_stack((ty_tensors){ alpha, (int)diagonals }, 1);
  for (int64_t i = 0; i + 1 < diagonals; i++) beta[i] = beta[i + 1];
  beta[diagonals - 1] = far;
  ty_tensor *after = ty_where(end, 0.0, ty_stack((ty_tensors){ beta, (int)diagonals }, 1));
  ty_tensor *back = ty_expand(ty_unsqueeze(ty_add(column(count(t, device)), u), 0), TY_INTS(n, t, m));
  if (!a_all || !above || !after || !back) return false;
  ty_tensor *ways[] = { ty_add(ty_add(a_all, blank), after), ty_add(ty_add(a_all, label), above) };
  for (int i = 0; i < 2; i++)
    if (!ways[i] || !(c->dx[i] = minus_shares(c->g[0], ty_gather(ways[i], 1, back), all))) return false;
  return true;
}

bool vjp_rnnt_trellis(ty_vjp *c) {
  const ty_rnnt_trellis_args *a = TY_ARGS(rnnt_trellis, c);
  if (c->g[1]) return ty_op_fail(c, TY_EUNSUPPORTED, "the forward variables have no gradient of their own");
  if (ty_vjp_plain()) {
    ty_tensor *d[2] = { NULL };
    ty_rnnt_trellis_backward(c->g[0], a->blank.t, a->label.t, a->input_lengths.t, a->target_lengths.t, c->out[1],
                             c->out[0], d);
    c->dx[0] = d[0], c->dx[1] = d[1];
    return d[0] != NULL;
  }
  const int64_t *size = a->blank.t->v.size;
  if (!size[1]) {
    for (int i = 0; i < 2; i++) c->dx[i] = ty_zeros_like(a->blank.t, TY_DTYPE_DEFAULT);
    return true;
  }
  size_t bytes = sizeof(ty_tensor *) * (size_t)(2 * (size[1] + size[2] - 1));
  ty_tensor **room = ty_scratch_alloc(bytes);
  if (!room) return false;
  bool ok = rnnt_composed(c, room);
  ty_scratch_free(room, bytes);
  return ok;
}
