/* Cross entropy of x times a weight for each class, without ever holding the logits of all rows: they are computed some
 * rows at a time, and while a part is at hand its share of the gradients is taken too (Hsu et al. 2024, Liger Kernel;
 * Wijmans et al. 2024, Cut Your Losses). */
#include <string.h>

#include "autocast.h"
#include "../program/recording.h"

enum { PART = 16 << 20 }; /* logits at once: enough rows for products at full speed */

static ty_dtype wide(ty_dtype d) { return ty_is_half(d) ? TY_F32 : d; }

static bool check(ty_call *c, int target_arg, int class_weight_arg) {
  const ty_tensor *x = c->arg[0].t, *weight = c->arg[1].t, *target = c->arg[target_arg].t;
  const ty_tensor *of_class = c->arg[class_weight_arg].t;
  if (!ty_check_floats(c, 1) || !ty_check_ndim(c, 1, 2, 2, "[classes, d]")) return false;
  int ndim = x->v.ndim - 1;
  if (ndim < 0 || x->v.size[ndim] != weight->v.size[1])
    return ty_op_fail(c, TY_EINVAL, "x: expected [..., %lld] for weight %s, got %s", (long long)weight->v.size[1],
                      ty_describe(weight), ty_describe(x));
  if (target->v.ndim != ndim || memcmp(target->v.size, x->v.size, sizeof *x->v.size * (size_t)ndim) != 0)
    return ty_op_fail(c, TY_EINVAL, "target: expected %s for x %s, got %s", ty_shape_text(ndim, x->v.size),
                      ty_describe(x), ty_describe(target));
  if (of_class &&
      (!ty_is_float(ty_dtype_of(of_class)) || of_class->v.ndim != 1 || of_class->v.size[0] != weight->v.size[0]))
    return ty_op_fail(c, TY_EINVAL, "class_weight: expected a float tensor [%lld], one for each class, got %s",
                      (long long)weight->v.size[0], ty_describe(of_class));
  return ty_check_index_dtype(c, target_arg);
}

bool fwd_linear_cross_entropy(ty_call *c) {
  const ty_linear_cross_entropy_args *a = TY_ARGS(linear_cross_entropy, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t, *out[3] = { NULL };
  double smoothing = a->label_smoothing.f;
  int reduction = ty_check_choice(c, 6, (const char *const[]){ "mean", "sum", NULL });
  if (reduction < 0 || !check(c, 2, 3)) return false;
  if (!(smoothing >= 0 && smoothing <= 1))
    return ty_op_fail(c, TY_EINVAL, "label_smoothing: expected a number in [0, 1], got %g", smoothing);
  int64_t rows = 1;
  for (int d = 0; d < x->v.ndim - 1; d++) rows *= x->v.size[d];
  bool grad = ty_grad_enabled();
  ty_tensor *loss = ty_linear_cross_entropy_fused(ty_reshape(x, TY_INTS(rows, weight->v.size[1])), weight,
                                                  ty_reshape(a->target.t, TY_INTS(rows)), a->class_weight.t,
                                                  a->ignore_index.i, smoothing, reduction == 0,
                                                  grad && x->requires_grad, grad && weight->requires_grad, out);
  bool casting = ty_autocast_dtype != TY_DTYPE_DEFAULT; /* then losses are f32 */
  return ty_out_set(c, 0, ty_to(loss, casting ? wide(ty_dtype_of(x)) : ty_dtype_of(x)));
}

/* ty_copy_into() of what may have failed. */
static bool put(ty_tensor *to, ty_tensor *from) { return to && from && ty_copy_into(to, from); }

/* What the sum of the rows' losses is multiplied by, 0-d: one over the weights of the rows that count, or 1. */
static ty_tensor *share(const ty_linear_cross_entropy_fused_args *a, ty_dtype dtype) {
  ty_tensor *target = a->target.t, *of_class = a->class_weight.t;
  if (!a->mean.i) return ty_scalar(1, dtype, ty_device_of(target));
  ty_tensor *counts = ty_ne(target, a->ignore_index.i), *weights = counts;
  if (of_class)
    weights = ty_where(counts, ty_index_select(ty_to(of_class, dtype), 0, ty_where(counts, target, 0)), 0.0);
  return ty_reciprocal(ty_to(ty_sum(ty_to(weights, dtype), TY_NO_INTS, false, TY_DTYPE_DEFAULT), dtype));
}

/* The gradients of rows [at, at + k) of the logits; adds to dx and dw, where wanted. */
static bool part_backward(const ty_linear_cross_entropy_fused_args *a, ty_tensor *logits, ty_tensor *lse,
                          ty_tensor *scale, int64_t at, int64_t k, ty_tensor *dx, ty_tensor *dw) {
  ty_tensor *x = ty_slice(a->x.t, 0, at, at + k, 1), *target = ty_slice(a->target.t, 0, at, at + k, 1);
  ty_tensor *g = ty_contiguous(ty_expand(scale, TY_INTS(k)));
  ty_tensor *d = ty_cross_entropy_backward(g, logits, target, lse, a->class_weight.t, a->ignore_index.i,
                                           a->label_smoothing.f, false);
  if (dx && !put(ty_slice(dx, 0, at, at + k, 1), ty_matmul(d, a->weight.t))) return false;
  if (!dw) return true;
  ty_tensor *part = ty_matmul(ty_transpose(d, 0, 1), x);
  if (at == 0) return put(dw, part);
  return part &&
         ty_call_inplace(TY_OP_add, (ty_value[]){ ty_value_of_tensor(dw), ty_value_of_tensor(part), TY_NO_NUMBER });
}

/* Loss, and the gradients for x and weight where wanted, else empty. */
bool fwd_linear_cross_entropy_fused(ty_call *c) {
  const ty_linear_cross_entropy_fused_args *a = TY_ARGS(linear_cross_entropy_fused, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t;
  if (!ty_check_ndim(c, 0, 2, 2, "[n, d]") || !check(c, 2, 3)) return false;
  int device = ty_device_of(x);
  int64_t n = x->v.size[0], classes = weight->v.size[0], none[] = { 0 };
  ty_dtype dtype = ty_promote(ty_dtype_of(x), ty_dtype_of(weight)), sums = wide(dtype);
  bool dx = a->grad_x.i, dw = a->grad_weight.i;
  if (!ty_out(c, 0, device, sums, 0, NULL) || !ty_out(c, 1, device, dtype, dx ? 2 : 1, dx ? x->v.size : none) ||
      !ty_out(c, 2, device, sums, dw ? 2 : 1, dw ? weight->v.size : none))
    return false;
  ty_tensor *scale = share(a, sums), *losses = ty_zeros(TY_INTS(n), sums, device);
  if (!scale || !losses || (n == 0 && dw && !put(c->out[2], ty_scalar(0, sums, device)))) return false;
  int64_t parts = (n * classes + PART - 1) / PART, rows = parts ? (n + parts - 1) / parts : n;
  for (int64_t at = 0; at < n; at += rows) {
    ty_scope scope; /* frees the logits before the next part */
    ty_scope_open(&scope);
    int64_t k = n - at < rows ? n - at : rows;
    ty_tensor *out[3] = { NULL }, *logits = ty_linear(ty_slice(x, 0, at, at + k, 1), weight, NULL, NULL, "none");
    ty_tensor *loss = ty_cross_entropy_rows(logits, ty_slice(a->target.t, 0, at, at + k, 1), a->class_weight.t,
                                            a->ignore_index.i, a->label_smoothing.f, false, out);
    bool ok = put(ty_slice(losses, 0, at, at + k, 1), loss);
    if (ok && (dx || dw))
      ok = part_backward(a, logits, out[1], scale, at, k, dx ? c->out[1] : NULL, dw ? c->out[2] : NULL);
    ty_scope_close(&scope);
    if (!ok) return false;
  }
  ty_tensor *sum = ty_mul(ty_sum(losses, TY_NO_INTS, false, TY_DTYPE_DEFAULT), scale);
  return put(c->out[0], sum);
}

/* With g a number, and nearly always 1: the seed of the backward pass. */
static ty_tensor *scaled(ty_tensor *d, ty_tensor *g) {
  double number = 0;
  if (ty_is_recording()) ty_recorded_constant(g, &number);
  else if (ty_device_of(g) == TY_CPU) number = ty_load_scalar(g, 0);
  return number == 1 ? ty_detach(d) : ty_mul(d, g);
}

bool vjp_linear_cross_entropy_fused(ty_vjp *c) {
  const ty_linear_cross_entropy_fused_args *a = TY_ARGS(linear_cross_entropy_fused, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t, *target = a->target.t, *g = c->g[0];
  if (c->need[3]) return ty_op_fail(c, TY_EUNSUPPORTED, "class_weight: has no gradient; pass class_weight:detach()");
  if (c->g[1] || c->g[2]) return ty_op_fail(c, TY_EUNSUPPORTED, "the gradients have no gradient of their own here");
  if (!g) return true;
  if (ty_vjp_plain() && c->need[0] <= a->grad_x.i && c->need[1] <= a->grad_weight.i) {
    if (c->need[0]) c->dx[0] = scaled(c->out[1], g);
    if (c->need[1]) c->dx[1] = scaled(c->out[2], g);
    return true;
  }
  /* As in vjp_cross_entropy_rows(): with targets t, sum(t) softmax(logits) - t. */
  ty_dtype sums = wide(ty_promote(ty_dtype_of(x), ty_dtype_of(weight)));
  ty_tensor *logits = ty_to(ty_linear(x, weight, NULL, NULL, "none"), sums);
  ty_tensor *ones = ty_ones(TY_INTS(x->v.size[0]), sums, ty_device_of(x));
  ty_tensor *t = ty_neg(ty_cross_entropy_backward(ones, ty_detach(logits), target, ones, a->class_weight.t,
                                                  a->ignore_index.i, a->label_smoothing.f, true));
  ty_tensor *d = ty_sub(ty_mul(ty_sum(t, TY_INTS(1), true, TY_DTYPE_DEFAULT), ty_softmax(logits, 1)), t);
  /* The share is infinite in the mean of no rows. */
  ty_tensor *ignored = ty_eq(ty_unsqueeze(target, 1), a->ignore_index.i);
  d = ty_mul(d, ty_where(ignored, 0.0, ty_mul(ty_to(g, sums), share(a, sums))));
  if (c->need[0]) c->dx[0] = ty_matmul(d, ty_to(weight, sums));
  if (c->need[1]) c->dx[1] = ty_matmul(ty_transpose(d, 0, 1), ty_to(x, sums));
  return true;
}
