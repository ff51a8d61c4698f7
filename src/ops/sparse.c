/* Rows with few elements that are not zero: choosing those that stay, and the product that skips the others. */
#include <string.h>

#include "op.h"

bool fwd_sparsify(ty_call *c) {
  const ty_sparsify_args *a = TY_ARGS(sparsify, c);
  ty_tensor *x = a->x.t, *scale = a->scale.t;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., n]") || (scale && !ty_check_floats(c, 1))) return false;
  if (scale && (scale->v.ndim != 1 || scale->v.size[0] != x->v.size[x->v.ndim - 1]))
    return ty_op_fail(c, TY_EINVAL, "scale: expected [%lld] for x %s, got %s", (long long)x->v.size[x->v.ndim - 1],
                      ty_describe(x), ty_describe(scale));
  if (a->count.i < 0) return ty_op_fail(c, TY_EINVAL, "count: expected 0 or more, got %lld", (long long)a->count.i);
  ty_dtype wide = ty_is_half(ty_dtype_of(x)) ? TY_F32 : ty_dtype_of(x);
  if (scale && !(scale = ty_contiguous(ty_to(scale, wide)))) return false;
  return ty_out_like(c, 0, x, ty_dtype_of(x)) &&
         ty_launch(c, (ty_tensor *[]){ x, scale }, 2,
                   &(ty_p_sparsify){ .count = a->count.i, .threshold = a->threshold.f });
}

bool vjp_sparsify(ty_vjp *c) {
  if (c->need[0]) c->dx[0] = ty_where(ty_ne(c->out[0], 0), c->g[0], 0);
  return true;
}

/* Many rows are one product with the whole weight. */
static bool linear_of_rows(ty_call *c) {
  const ty_sparse_linear_args *a = TY_ARGS(sparse_linear, c);
  bool was = ty_set_grad_enabled(c->record);
  c->record = false;
  ty_tensor *y = ty_linear(a->x.t, ty_transpose(a->weight.t, 0, 1), a->bias.t, NULL, "none");
  ty_set_grad_enabled(was);
  return ty_out_set(c, 0, y);
}

bool fwd_sparse_linear(ty_call *c) {
  const ty_sparse_linear_args *a = TY_ARGS(sparse_linear, c);
  ty_tensor *x = a->x.t, *weight = a->weight.t, *bias = a->bias.t;
  if (!ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., in]") || !ty_check_floats(c, 1) ||
      !ty_check_ndim(c, 1, 2, 2, "[in, out]") || (bias && !ty_check_floats(c, 2)))
    return false;
  int n = x->v.ndim;
  if (x->v.size[n - 1] != weight->v.size[0])
    return ty_op_fail(c, TY_EINVAL, "x: expected [..., %lld] for weight %s, got %s", (long long)weight->v.size[0],
                      ty_describe(weight), ty_describe(x));
  if (bias && (bias->v.ndim != 1 || bias->v.size[0] != weight->v.size[1]))
    return ty_op_fail(c, TY_EINVAL, "bias: expected [%lld] for weight %s, got %s", (long long)weight->v.size[1],
                      ty_describe(weight), ty_describe(bias));
  int64_t rows = 1, size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  for (int d = 0; d < n - 1; d++) rows *= size[d];
  if (rows != 1 || !weight->v.contiguous) return linear_of_rows(c);
  ty_dtype dtype = ty_promote(ty_dtype_of(x), ty_dtype_of(weight)), wide = ty_is_half(dtype) ? TY_F32 : dtype;
  size[n - 1] = weight->v.size[1];
  if (!(x = ty_to(x, dtype)) || !(weight = ty_to(weight, dtype))) return false;
  if (bias && !(bias = ty_to(bias, wide))) return false;
  return ty_out(c, 0, ty_device_of(x), dtype, n, size) && ty_launch(c, (ty_tensor *[]){ x, weight, bias }, 3, NULL);
}

bool vjp_sparse_linear(ty_vjp *c) {
  const ty_sparse_linear_args *a = TY_ARGS(sparse_linear, c);
  ty_tensor *w = a->weight.t, *g = ty_reshape(c->g[0], TY_INTS(1, w->v.size[1]));
  if (c->need[0]) c->dx[0] = ty_reshape(ty_matmul(g, ty_transpose(w, 0, 1)), ty_vjp_size(c, 0));
  if (c->need[1]) c->dx[1] = ty_matmul(ty_reshape(a->x.t, TY_INTS(w->v.size[0], 1)), g);
  if (c->need[2]) c->dx[2] = ty_reshape(g, ty_vjp_size(c, 2));
  return true;
}
