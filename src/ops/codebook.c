/* linear_codebook: products with weights whose rows are entries of a codebook and stay codes. */
#include <string.h>

#include "op.h"

enum { FEW = 8 /* rows of x for which codes are looked up anew */ };

/* The weight [n, k]. */
static ty_tensor *decoded(ty_tensor *codes, ty_tensor *codebook, ty_dtype dtype) {
  ty_tensor *entries = ty_embedding(ty_to(codebook, dtype), ty_to(codes, TY_I64), -1);
  return entries ? ty_reshape(entries, TY_INTS(codes->v.size[0], codes->v.size[1] * codebook->v.size[1])) : NULL;
}

bool fwd_linear_codebook(ty_call *c) {
  const ty_linear_codebook_args *a = TY_ARGS(linear_codebook, c);
  ty_tensor *x = a->x.t, *codes = a->codes.t, *codebook = a->codebook.t;
  if (!ty_check_floats(c, 0) || !ty_check_floats(c, 2) || !ty_check_ndim(c, 0, 1, TY_MAX_DIMS, "[..., k]") ||
      !ty_check_ndim(c, 2, 2, 2, "[entries, d]"))
    return false;
  const int64_t entries = codebook->v.size[0], d = codebook->v.size[1], k = x->v.size[x->v.ndim - 1];
  if (entries < 1 || entries > 256 || d < 1)
    return ty_op_fail(c, TY_EINVAL, "codebook: expected [entries, d] with 1 to 256 entries and d above 0, got %s",
                      ty_describe(codebook));
  if (ty_dtype_of(codes) != TY_U8 || codes->v.ndim != 2)
    return ty_op_fail(c, TY_EINVAL, "codes: expected u8 [n, k / d], got %s", ty_describe(codes));
  if (codes->v.size[1] * d != k)
    return ty_op_fail(c, TY_EINVAL, "x: expected [..., %lld] for codes %s and codebook %s, got %s",
                      (long long)(codes->v.size[1] * d), ty_describe(codes), ty_describe(codebook), ty_describe(x));
  ty_dtype dtype = ty_dtype_of(x);
  if (dtype == TY_F64 || (k && x->v.count / k > FEW)) {
    bool was = ty_set_grad_enabled(c->record);
    c->record = false;
    ty_tensor *w = decoded(codes, codebook, dtype), *y = w ? ty_linear(x, w, NULL, NULL, "none") : NULL;
    ty_set_grad_enabled(was);
    return ty_out_set(c, 0, y);
  }
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  size[x->v.ndim - 1] = codes->v.size[0];
  ty_tensor *in[] = { ty_to(x, TY_F32), codes, ty_to(codebook, TY_F32) };
  return in[0] && in[2] && ty_out(c, 0, ty_device_of(x), dtype, x->v.ndim, size) && ty_launch(c, in, 3, NULL);
}

bool vjp_linear_codebook(ty_vjp *c) {
  const ty_linear_codebook_args *a = TY_ARGS(linear_codebook, c);
  ty_tensor *x = a->x.t, *codes = a->codes.t, *codebook = a->codebook.t, *g = c->g[0];
  const int64_t n = codes->v.size[0], k = x->v.size[x->v.ndim - 1], d = codebook->v.size[1];
  ty_dtype dtype = ty_dtype_of(g);
  if (c->need[0]) c->dx[0] = ty_matmul(g, decoded(codes, codebook, dtype));
  if (c->need[2]) {
    int64_t rows = 1;
    for (int i = 0; i < x->v.ndim - 1; i++) rows *= x->v.size[i];
    ty_tensor *tall = ty_transpose(ty_reshape(g, TY_INTS(rows, n)), 0, 1);
    ty_tensor *dw = ty_reshape(ty_matmul(tall, ty_reshape(x, TY_INTS(rows, k))), TY_INTS(n * codes->v.size[1], d));
    ty_tensor *index = ty_reshape(ty_to(codes, TY_I64), TY_INTS(-1));
    c->dx[2] = ty_index_add(ty_zeros_like(ty_to(codebook, dtype), TY_DTYPE_DEFAULT), 0, index, dw);
  }
  return true;
}
