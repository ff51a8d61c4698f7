/* BLEU of token ids. */
#include "../../kernels/bleu.h"
#include "op.h"

static const char *const smoothings[] = { "none", "epsilon", "add_one", "geometric", "length", NULL };

/* Argument `arg`, absent or integers of this shape, as i64. */
static bool lengths_of(ty_call *c, int arg, int ndim, const int64_t *size, ty_tensor **lengths) {
  ty_tensor *t = *lengths = c->arg[arg].t;
  if (!t) return true;
  if (!ty_check_index_dtype(c, arg)) return false;
  bool fits = t->v.ndim == ndim;
  for (int i = 0; fits && i < ndim; i++) fits = t->v.size[i] == size[i];
  if (!fits)
    return ty_op_fail(c, TY_EINVAL, "%s: expected %s, got %s", c->op->args[arg].name, ty_shape_text(ndim, size),
                      ty_describe(t));
  return (*lengths = ty_to(t, TY_I64)) != NULL;
}

bool fwd_bleu(ty_call *c) {
  const ty_bleu_args *a = TY_ARGS(bleu, c);
  ty_tensor *x = a->candidates.t, *y = a->references.t, *weights = a->weights.t, *x_lengths, *y_lengths;
  if (!ty_check_ndim(c, 0, 2, 2, "[n, t]") || !ty_check_ndim(c, 1, 2, 3, "[n, r, s] or [n, s]")) return false;
  if (ty_is_float(ty_dtype_of(y)))
    return ty_op_fail(c, TY_EINVAL, "references: expected an integer tensor, got %s", ty_describe(y));
  if (y->v.size[0] != x->v.size[0])
    return ty_op_fail(c, TY_EINVAL, "references: expected those of the %lld candidates %s, got %s",
                      (long long)x->v.size[0], ty_describe(x), ty_describe(y));
  if (x->v.size[1] > 1 << 29 || y->v.size[y->v.ndim - 1] > 1 << 29)
    return ty_op_fail(c, TY_EINVAL, "candidates, references: expected rows of at most 2^29 ids, got %s and %s",
                      ty_describe(x), ty_describe(y));
  if (!lengths_of(c, 2, 1, x->v.size, &x_lengths) || !lengths_of(c, 3, y->v.ndim - 1, y->v.size, &y_lengths))
    return false;
  if (weights && (weights->v.ndim != 1 || weights->v.size[0] == 0 || !ty_is_float(ty_dtype_of(weights))))
    return ty_op_fail(c, TY_EINVAL, "weights: expected a float tensor [order], got %s", ty_describe(weights));
  if (weights && !(weights = ty_to(weights, TY_F64))) return false;
  int64_t order = weights ? weights->v.size[0] : a->order.i;
  if (order < 1 || order > 1 << 20)
    return ty_op_fail(c, TY_EINVAL, "order: expected 1 to 2^20, got %lld", (long long)order);
  int smoothing = ty_check_choice(c, 6, smoothings);
  if (smoothing < 0) return false;
  if (smoothing == TY_BLEU_LENGTH && !(a->k.f > 0))
    return ty_op_fail(c, TY_EINVAL, "k: expected a positive number, got %g", a->k.f);
  ty_dtype dtype = a->dtype.i == TY_DTYPE_DEFAULT ? TY_F32 : (ty_dtype)a->dtype.i;
  if (dtype != TY_F32 && dtype != TY_F64)
    return ty_op_fail(c, TY_EINVAL, "dtype: expected f32 or f64, got %s", ty_dtype_name[dtype]);
  ty_p_bleu p = { .order = order,
                  .padding = a->padding.i,
                  .smoothing = (ty_bleu_smoothing)smoothing,
                  .corpus = a->corpus.i,
                  .epsilon = a->epsilon.f,
                  .k = a->k.f };
  int64_t size[] = { x->v.size[0], 2 * order + 2 };
  return (x = ty_to(x, TY_I64)) && (y = ty_to(y, TY_I64)) && ty_out(c, 0, ty_device_of(x), dtype, !p.corpus, size) &&
         ty_out(c, 1, ty_device_of(x), TY_I64, 2, size) &&
         ty_launch(c, (ty_tensor *[]){ x, y, x_lengths, y_lengths, weights }, 5, &p);
}
