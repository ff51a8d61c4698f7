/* Losses and dropout. */
#include <string.h>

#include "op.h"

enum { MEAN, SUM, NONE, BATCHMEAN };
static const char *const reductions[] = { "mean", "sum", "none", NULL };
static const char *const reductions_kl[] = { "mean", "sum", "none", "batchmean", NULL };

static ty_tensor *reduce(ty_tensor *loss, int reduction) {
  if (!loss || reduction == NONE) return loss;
  if (reduction == MEAN) return ty_mean(loss, TY_NO_INTS, false);
  ty_tensor *sum = ty_sum(loss, TY_NO_INTS, false, TY_DTYPE_DEFAULT);
  return reduction == SUM ? sum : ty_div(sum, loss->v.ndim ? (double)loss->v.size[0] : 1.0);
}

/* Same shape for x (argument 0) and the float target (argument 1): broadcasting one to the other is nearly always a
 * mistake. */
static bool check_target(ty_call *c) {
  const ty_tensor *x = c->arg[0].t, *target = c->arg[1].t;
  if (ty_same_shape(&x->v, &target->v)) return true;
  return ty_op_fail(c, TY_EINVAL, "target: expected the shape of x %s, got %s", ty_describe(x), ty_describe(target));
}

/* ---- classes ---- */

/* x [n, classes, ...] to [n * ..., classes]; a lone row gets its n. */
static ty_tensor *as_rows(ty_tensor *x) {
  if (x->v.ndim == 1) return ty_unsqueeze(x, 0);
  if (x->v.ndim == 2) return x;
  int64_t order[TY_MAX_DIMS], n = x->v.size[0], last = x->v.ndim - 1;
  order[0] = 0, order[last] = 1;
  for (int d = 2; d <= last; d++) order[d - 1] = d, n *= x->v.size[d];
  return ty_reshape(ty_permute(x, (ty_ints){ order, x->v.ndim }), TY_INTS(n, x->v.size[1]));
}

/* Whether vectors along the places of [n, classes, ...] are long enough that nothing has to be moved. */
static bool has_planes(const ty_tensor *x) {
  int64_t places = 1;
  for (int d = 2; d < x->v.ndim; d++) places *= x->v.size[d];
  return x->v.ndim > 2 && x->v.contiguous && places >= 16 && x->v.size[1] <= INT32_MAX;
}

static bool check_classes(ty_call *c) {
  const ty_tensor *x = c->arg[0].t, *target = c->arg[1].t, *weight = c->arg[2].t;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[n, classes, ...]")) return false;
  int64_t classes = x->v.size[x->v.ndim > 1];
  if (!weight || (weight->v.ndim == 1 && weight->v.size[0] == classes && ty_is_float(ty_dtype_of(weight)))) {
    if (ty_is_float(ty_dtype_of(target)))
      return ty_same_shape(&x->v, &target->v) ||
             ty_op_fail(c, TY_EINVAL, "target: expected class positions, or probabilities shaped like %s %s, got %s",
                        c->op->args[0].name, ty_describe(x), ty_describe(target));
    int64_t size[TY_MAX_DIMS] = { x->v.size[0] };
    for (int d = 2; d < x->v.ndim; d++) size[d - 1] = x->v.size[d];
    int ndim = x->v.ndim - 1;
    if (target->v.ndim == ndim && memcmp(target->v.size, size, sizeof *size * (size_t)ndim) == 0)
      return ty_check_index_dtype(c, 1);
    return ty_op_fail(c, TY_EINVAL, "target: expected %s for %s %s, got %s", ty_shape_text(ndim, size),
                      c->op->args[0].name, ty_describe(x), ty_describe(target));
  }
  return ty_op_fail(c, TY_EINVAL, "weight: expected a float tensor [%lld], one for each class, got %s",
                    (long long)classes, ty_describe(weight));
}

/* The loss from class positions. The mean is over the weights of the rows: those of their classes, 0 where ignored. */
static ty_tensor *class_loss(ty_tensor *x, ty_tensor *target, ty_tensor *weight, int64_t ignore, double smoothing,
                             bool log_probs, int reduction) {
  const int ndim = target->v.ndim;
  int64_t size[TY_MAX_DIMS];
  memcpy(size, target->v.size, sizeof size);
  ty_tensor *out[3] = { NULL }, *rows = has_planes(x) ? x : as_rows(x);
  if (!rows) return NULL;
  if (rows != x) target = ty_reshape(target, TY_INTS(rows->v.size[0]));
  ty_tensor *loss = ty_cross_entropy_rows(rows, target, weight, ignore, smoothing, log_probs, out);
  if (reduction == NONE) return ty_reshape(loss, (ty_ints){ size, ndim });
  ty_tensor *sum = ty_sum(loss, TY_NO_INTS, false, TY_DTYPE_DEFAULT);
  return reduction == SUM ? sum : ty_div(sum, ty_sum(out[2], TY_NO_INTS, false, TY_DTYPE_DEFAULT));
}

/* The loss from probabilities, which are not checked to sum to 1. */
static ty_tensor *probability_loss(ty_tensor *x, ty_tensor *target, ty_tensor *weight, double smoothing,
                                   int reduction) {
  int dim = x->v.ndim > 1;
  ty_dtype dtype = ty_is_half(ty_dtype_of(x)) ? TY_F32 : ty_dtype_of(x);
  double rows = 1;
  for (int d = 0; d < x->v.ndim; d++) rows *= d == dim ? 1 : (double)x->v.size[d];
  ty_tensor *log_p = ty_log_softmax(ty_to(x, dtype), dim), *t = ty_to(target, dtype);
  if (smoothing > 0) t = ty_add(ty_mul(t, 1 - smoothing), smoothing / (double)x->v.size[dim]);
  ty_tensor *terms = ty_mul(log_p, t);
  if (weight) {
    int64_t size[TY_MAX_DIMS] = { weight->v.size[0] };
    for (int d = 1; d < x->v.ndim - dim; d++) size[d] = 1;
    terms = ty_mul(terms, ty_reshape(ty_to(weight, dtype), (ty_ints){ size, x->v.ndim - dim }));
  }
  if (reduction == NONE) return ty_neg(ty_sum(terms, TY_INTS(dim), false, TY_DTYPE_DEFAULT));
  ty_tensor *sum = ty_neg(ty_sum(terms, TY_NO_INTS, false, TY_DTYPE_DEFAULT));
  return reduction == SUM ? sum : ty_div(sum, rows);
}

bool fwd_cross_entropy(ty_call *c) {
  const ty_cross_entropy_args *a = TY_ARGS(cross_entropy, c);
  ty_tensor *x = a->logits.t, *target = a->target.t;
  double smoothing = a->label_smoothing.f;
  int reduction = ty_check_choice(c, 5, reductions);
  if (reduction < 0 || !check_classes(c)) return false;
  if (!(smoothing >= 0 && smoothing <= 1))
    return ty_op_fail(c, TY_EINVAL, "label_smoothing: expected a number in [0, 1], got %g", smoothing);
  ty_tensor *loss = ty_is_float(ty_dtype_of(target))
                        ? probability_loss(x, target, a->weight.t, smoothing, reduction)
                        : class_loss(x, target, a->weight.t, a->ignore_index.i, smoothing, false, reduction);
  return ty_out_set(c, 0, ty_to(loss, ty_dtype_of(x)));
}

bool fwd_nll_loss(ty_call *c) {
  const ty_nll_loss_args *a = TY_ARGS(nll_loss, c);
  int reduction = ty_check_choice(c, 4, reductions);
  if (reduction < 0 || !ty_check_index_dtype(c, 1) || !check_classes(c)) return false;
  ty_tensor *loss = class_loss(a->x.t, a->target.t, a->weight.t, a->ignore_index.i, 0, true, reduction);
  return ty_out_set(c, 0, ty_to(loss, ty_dtype_of(a->x.t)));
}

static ty_dtype wide(const ty_tensor *x) { return ty_is_half(ty_dtype_of(x)) ? TY_F32 : ty_dtype_of(x); }

bool fwd_cross_entropy_rows(ty_call *c) {
  const ty_cross_entropy_rows_args *a = TY_ARGS(cross_entropy_rows, c);
  ty_tensor *x = a->logits.t, *weight = a->weight.t;
  if (!ty_check_ndim(c, 0, 2, TY_MAX_DIMS, "[n, classes, ...]") || !check_classes(c) || !ty_check_index_dtype(c, 1))
    return false;
  for (int i = 0; i < 3; i++)
    if (!ty_out(c, i, ty_device_of(x), wide(x), a->target.t->v.ndim, a->target.t->v.size)) return false;
  if (weight && !(weight = ty_to(weight, wide(x)))) return false;
  ty_p_cross_entropy p = { a->ignore_index.i, a->label_smoothing.f, a->log_probs.i };
  if (ty_launch_kernel(TY_OP_cross_entropy_rows, c->out, 3, (ty_tensor *[]){ x, a->target.t, weight }, 3, &p))
    return true;
  return ty_op_fail_(&ty_ops[p.log_probs ? TY_OP_nll_loss : TY_OP_cross_entropy], ty_error_code(), "%s", ty_error());
}

bool fwd_cross_entropy_backward(ty_call *c) {
  const ty_cross_entropy_backward_args *a = TY_ARGS(cross_entropy_backward, c);
  ty_tensor *x = a->logits.t, *target = a->target.t, *weight = a->weight.t, *each[] = { a->g.t, a->lse.t, target };
  if (!ty_check_ndim(c, 1, 2, TY_MAX_DIMS, "[n, classes, ...]") || !ty_check_floats(c, 1) ||
      !ty_check_index_dtype(c, 2))
    return false;
  int64_t size[TY_MAX_DIMS] = { x->v.size[0] };
  for (int d = 2; d < x->v.ndim; d++) size[d - 1] = x->v.size[d];
  const int ndim = x->v.ndim - 1;
  for (int i = 0; i < 3; i++)
    if (each[i]->v.ndim != ndim || memcmp(each[i]->v.size, size, sizeof *size * (size_t)ndim) != 0 ||
        (i < 2 && !ty_is_float(ty_dtype_of(each[i]))))
      return ty_op_fail(c, TY_EINVAL, "g, lse and target: expected %s for logits %s, got %s", ty_shape_text(ndim, size),
                        ty_describe(x), ty_describe(each[i]));
  if (weight && (weight->v.count != x->v.size[1] || !ty_is_float(ty_dtype_of(weight))))
    return ty_op_fail(c, TY_EINVAL, "weight: expected one for each class of logits %s, got %s", ty_describe(x),
                      ty_describe(weight));
  ty_tensor *g = ty_to(a->g.t, wide(x)), *lse = ty_to(a->lse.t, wide(x));
  if (!g || !lse || !ty_out_like(c, 0, x, ty_dtype_of(x))) return false;
  if (weight && !(weight = ty_to(weight, wide(x)))) return false;
  ty_p_cross_entropy p = { a->ignore_index.i, a->label_smoothing.f, a->log_probs.i };
  return ty_launch(c, (ty_tensor *[]){ g, x, target, lse, weight }, 5, &p);
}

/* With t as in kernels/cpu/norm/losses.c: dx = g (sum(t) softmax(x) - t). t is constant and comes from the kernel too: it
 * is what is left of the gradient when the rows count as log-probabilities. */
bool vjp_cross_entropy_rows(ty_vjp *c) {
  const ty_cross_entropy_rows_args *a = TY_ARGS(cross_entropy_rows, c);
  ty_tensor *x = a->logits.t, *target = a->target.t, *weight = a->weight.t, *g = c->g[0], *lse = c->out[1];
  if (c->need[2]) return ty_op_fail(c, TY_EUNSUPPORTED, "weight: has no gradient; pass weight:detach()");
  if (!c->need[0]) return true;
  int64_t ignore = a->ignore_index.i;
  double smoothing = a->label_smoothing.f;
  if (g && ty_vjp_plain()) {
    c->dx[0] = ty_cross_entropy_backward(g, x, target, lse, weight, ignore, smoothing, a->log_probs.i);
  } else if (g) {
    ty_tensor *t = ty_neg(
        ty_cross_entropy_backward(ty_ones_like(g, TY_DTYPE_DEFAULT), x, target, lse, weight, ignore, smoothing, true));
    ty_tensor *d = ty_neg(t);
    if (!a->log_probs.i)
      d = ty_sub(ty_mul(ty_sum(t, TY_INTS(1), true, TY_DTYPE_DEFAULT), ty_softmax(ty_to(x, wide(x)), 1)), t);
    g = ty_where(ty_eq(target, ignore), 0.0, g); /* which is infinite in the mean of no rows */
    c->dx[0] = ty_mul(ty_unsqueeze(g, 1), d);
  }
  if (c->g[1] && !a->log_probs.i) { /* the log-sum-exp was used by itself */
    ty_tensor *d = ty_mul(ty_unsqueeze(c->g[1], 1), ty_softmax(ty_to(x, wide(x)), 1));
    c->dx[0] = g ? ty_add(c->dx[0], d) : d;
  }
  return true;
}

/* ---- numbers ---- */

bool fwd_mse_loss(ty_call *c) {
  const ty_mse_loss_args *a = TY_ARGS(mse_loss, c);
  int reduction = ty_check_choice(c, 2, reductions);
  return reduction >= 0 && check_target(c) &&
         ty_out_set(c, 0, reduce(ty_square(ty_sub(a->x.t, a->target.t)), reduction));
}

bool fwd_l1_loss(ty_call *c) {
  const ty_l1_loss_args *a = TY_ARGS(l1_loss, c);
  int reduction = ty_check_choice(c, 2, reductions);
  return reduction >= 0 && check_target(c) && ty_out_set(c, 0, reduce(ty_abs(ty_sub(a->x.t, a->target.t)), reduction));
}

/* Huber 1964: with r = min(|x - target|, delta), r^2 / 2 + delta (|x - target| - r). */
bool fwd_huber_loss(ty_call *c) {
  const ty_huber_loss_args *a = TY_ARGS(huber_loss, c);
  double delta = a->delta.f;
  int reduction = ty_check_choice(c, 3, reductions);
  if (reduction < 0 || !check_target(c)) return false;
  if (!(delta > 0)) return ty_op_fail(c, TY_EINVAL, "delta: expected a number above 0, got %g", delta);
  ty_tensor *far = ty_abs(ty_sub(a->x.t, a->target.t)), *r = ty_minimum(far, delta);
  return ty_out_set(c, 0, reduce(ty_add(ty_mul(ty_square(r), 0.5), ty_mul(ty_sub(far, r), delta)), reduction));
}

/* -p t log(sigmoid(x)) - (1 - t) log(sigmoid(-x)), p = pos_weight: both terms are exact for large |x|. */
bool fwd_bce_with_logits(ty_call *c) {
  const ty_bce_with_logits_args *a = TY_ARGS(bce_with_logits, c);
  ty_tensor *x = a->x.t, *t = a->target.t, *extra[] = { a->weight.t, a->pos_weight.t };
  int reduction = ty_check_choice(c, 4, reductions);
  if (reduction < 0 || !check_target(c)) return false;
  for (int i = 0; i < 2; i++) {
    int ndim = 0;
    int64_t size[TY_MAX_DIMS];
    if (!extra[i]) continue;
    if (!ty_broadcast(c->op, &extra[i]->v, &x->v, &ndim, size) || ndim != x->v.ndim ||
        memcmp(size, x->v.size, sizeof *size * (size_t)ndim) != 0)
      return ty_op_fail(c, TY_EINVAL, "%s: expected a tensor that broadcasts to x %s, got %s", c->op->args[2 + i].name,
                        ty_describe(x), ty_describe(extra[i]));
  }
  ty_tensor *yes = ty_mul(t, ty_log_sigmoid(x)), *no = ty_mul(ty_sub(1.0, t), ty_log_sigmoid(ty_neg(x)));
  if (extra[1]) yes = ty_mul(yes, extra[1]);
  ty_tensor *loss = ty_neg(ty_add(yes, no));
  if (extra[0]) loss = ty_mul(loss, extra[0]);
  return ty_out_set(c, 0, reduce(loss, reduction));
}

/* Where the target is 0 the term is 0, whatever x is, and so is its gradient. */
bool fwd_kl_div(ty_call *c) {
  const ty_kl_div_args *a = TY_ARGS(kl_div, c);
  ty_tensor *x = a->x.t, *t = a->target.t, *loss;
  int reduction = ty_check_choice(c, 3, reductions_kl);
  if (reduction < 0 || !check_target(c)) return false;
  if (a->log_target.i) {
    ty_tensor *none = ty_eq(t, -INFINITY);
    loss = ty_mul(ty_exp(t), ty_sub(ty_where(none, 0.0, t), ty_where(none, 0.0, x)));
  } else {
    ty_tensor *none = ty_eq(t, 0);
    loss = ty_mul(t, ty_sub(ty_log(ty_where(none, 1.0, t)), ty_where(none, 0.0, x)));
  }
  return ty_out_set(c, 0, reduce(loss, reduction));
}

/* ---- dropout ---- */

bool fwd_dropout(ty_call *c) {
  const ty_dropout_args *a = TY_ARGS(dropout, c);
  ty_tensor *x = a->x.t;
  double p = a->p.f;
  if (!(p >= 0 && p <= 1)) return ty_op_fail(c, TY_EINVAL, "p: expected a probability in [0, 1], got %g", p);
  if (!a->training.i || p == 0) return ty_out_set(c, 0, x);
  ty_p_random r = ty_draw(x->v.count, p, 0);
  return ty_out_set(c, 0, ty_dropout_apply(x, p, (int64_t)r.seed, (int64_t)r.offset));
}

bool fwd_dropout_apply(ty_call *c) {
  const ty_dropout_apply_args *a = TY_ARGS(dropout_apply, c);
  ty_p_random r = { .seed = (uint64_t)a->seed.i, .offset = (uint64_t)a->offset.i, .a = a->p.f };
  if (!(r.a >= 0 && r.a <= 1)) return ty_op_fail(c, TY_EINVAL, "p: expected a probability in [0, 1], got %g", r.a);
  return ty_out_like(c, 0, a->x.t, ty_dtype_of(a->x.t)) && ty_launch(c, &(ty_tensor *){ a->x.t }, 1, &r);
}

/* The same elements again: the random numbers are drawn anew from their place, so nothing is kept. */
bool vjp_dropout_apply(ty_vjp *c) {
  const ty_dropout_apply_args *a = TY_ARGS(dropout_apply, c);
  c->dx[0] = ty_dropout_apply(c->g[0], a->p.f, a->seed.i, a->offset.i);
  return true;
}
