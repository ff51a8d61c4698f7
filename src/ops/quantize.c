/* Block-quantized tensors: encoding, decoding, and products and lookups with weights that stay encoded. Gradients never
 * flow into codes. */
#include <string.h>

#include "op.h"

bool fwd_quantize(ty_call *c) {
  const ty_quantize_args *a = TY_ARGS(quantize, c);
  ty_tensor *x = a->x.t;
  if (!ty_check_floats(c, 0)) return false;
  if (a->dtype.i == TY_DTYPE_DEFAULT || !ty_is_quantized((ty_dtype)a->dtype.i))
    return ty_op_fail(c, TY_EINVAL, "dtype: expected q8_0, q4_0, q2_k, q3_k, q4_k, q6_k, nf4, mxfp4 or nvfp4, got %s",
                      a->dtype.i == TY_DTYPE_DEFAULT ? "none" : ty_dtype_name[a->dtype.i]);
  ty_tensor *importance = a->importance.t;
  if (importance) {
    const int64_t columns = x->v.ndim ? x->v.size[x->v.ndim - 1] : 0;
    if (!ty_check_floats(c, 2)) return false;
    if (importance->v.ndim != 1 || importance->v.size[0] != columns)
      return ty_op_fail(c, TY_EINVAL, "importance: expected [%lld] for x %s, got %s", (long long)columns,
                        ty_describe(x), ty_describe(importance));
    if (a->dtype.i == TY_NF4) return ty_op_fail(c, TY_EINVAL, "importance: nf4 has fixed levels and takes none");
    if (!(importance = ty_to(importance, TY_F32))) return false;
  }
  if (!ty_out_like(c, 0, x, (ty_dtype)a->dtype.i) || !(x = ty_to(x, TY_F32))) return false;
  return ty_launch(c, (ty_tensor *[]){ x, importance }, 2, NULL);
}

bool fwd_dequantize(ty_call *c) {
  const ty_dequantize_args *a = TY_ARGS(dequantize, c);
  ty_tensor *x = a->x.t;
  if (!ty_is_quantized(ty_dtype_of(x)))
    return ty_op_fail(c, TY_EINVAL,
                      "x: expected a block-quantized tensor (q8_0 q4_0 q2_k q3_k q4_k q6_k nf4 mxfp4 nvfp4), got %s",
                      ty_describe(x));
  ty_dtype dtype = a->dtype.i == TY_DTYPE_DEFAULT ? TY_F32 : (ty_dtype)a->dtype.i;
  if (!ty_is_float(dtype))
    return ty_op_fail(c, TY_EINVAL, "dtype: expected f32, f64, f16 or bf16, got %s", ty_dtype_name[dtype]);
  if (dtype != TY_F32) return ty_out_set(c, 0, ty_to(ty_dequantize(x, TY_F32), dtype));
  return ty_out_like(c, 0, x, TY_F32) && ty_launch(c, &x, 1, NULL);
}

bool fwd_quantize_columns(ty_call *c) {
  const ty_quantize_columns_args *a = TY_ARGS(quantize_columns, c);
  ty_tensor *in[] = { a->w.t, a->factor.t, a->scale.t, a->offset.t };
  if (!ty_check_ndim(c, 0, 2, 2, "[rows, n]")) return false;
  const int64_t n = in[0]->v.size[1];
  ty_dtype dtype = ty_dtype_of(in[0]), wide = dtype == TY_F64 ? TY_F64 : TY_F32;
  for (int i = 1; i < 4; i++) {
    if (!ty_check_floats(c, i)) return false;
    int64_t rows = i == 1 ? n : in[0]->v.size[0];
    if (in[i]->v.ndim != 2 || in[i]->v.size[0] != rows || in[i]->v.size[1] != n)
      return ty_op_fail(c, TY_EINVAL, "%s: expected [%lld, %lld] for w %s, got %s", c->op->args[i].name,
                        (long long)rows, (long long)n, ty_describe(in[0]), ty_describe(in[i]));
  }
  if (a->levels.i < 2 || a->levels.i > 256)
    return ty_op_fail(c, TY_EINVAL, "levels: expected 2 to 256, got %lld", (long long)a->levels.i);
  for (int i = 0; i < 4; i++)
    if (!(in[i] = ty_to(in[i], wide))) return false;
  return ty_out_like(c, 0, in[0], TY_U8) && ty_out_like(c, 1, in[0], dtype) &&
         ty_launch(c, in, 4, &(ty_p_dim){ .k = a->levels.i });
}

bool fwd_embedding_quantized(ty_call *c) {
  const ty_embedding_quantized_args *a = TY_ARGS(embedding_quantized, c);
  ty_tensor *w = a->weight.t, *index = a->index.t;
  int64_t size[TY_MAX_DIMS];
  if (!ty_is_quantized(ty_dtype_of(w)))
    return ty_op_fail(c, TY_EINVAL, "weight: expected a block-quantized tensor, got %s", ty_describe(w));
  if (!ty_check_ndim(c, 0, 2, 2, "[n, width]") || !ty_check_index_dtype(c, 1) ||
      !ty_check_ndim(c, 1, 0, TY_MAX_DIMS - 1, "[...]"))
    return false;
  memcpy(size, index->v.size, sizeof *size * (size_t)index->v.ndim);
  size[index->v.ndim] = w->v.size[1];
  return ty_out(c, 0, ty_device_of(w), TY_F32, index->v.ndim + 1, size) &&
         ty_launch(c, (ty_tensor *[]){ w, index }, 2, NULL);
}

/* ---- products ---- */

static bool check_weight(ty_call *c, const ty_tensor *w) {
  if (!ty_is_quantized(ty_dtype_of(w)))
    return ty_op_fail(c, TY_EINVAL, "weight: expected a block-quantized tensor, got %s", ty_describe(w));
  return ty_check_ndim(c, 1, 2, 2, "[out, in]");
}

/* x with its last size, which must be `from`, replaced by `to`. */
static bool out_rows(ty_call *c, const ty_tensor *x, const ty_tensor *w, int64_t from, int64_t to) {
  int n = x->v.ndim;
  if (!ty_check_floats(c, 0)) return false;
  if (n == 0 || x->v.size[n - 1] != from)
    return ty_op_fail(c, TY_EINVAL, "%s: expected [..., %lld] for weight %s, got %s", c->op->args[0].name,
                      (long long)from, ty_describe(w), ty_describe(x));
  int64_t size[TY_MAX_DIMS];
  memcpy(size, x->v.size, sizeof size);
  size[n - 1] = to;
  return ty_out(c, 0, ty_device_of(x), ty_dtype_of(x), n, size);
}

/* The kernels compute in f32. */
static bool launch_f32(ty_call *c, ty_tensor **in, int nin) {
  ty_tensor *y = c->out[0], *wide = y;
  if (ty_dtype_of(in[0]) != TY_F64) return ty_launch(c, in, nin, NULL);
  if (!(in[0] = ty_to(in[0], TY_F32))) return false;
  if (!(wide = ty_scope_add(ty_tensor_new(ty_device_of(y), TY_F32, y->v.ndim, y->v.size)))) return false;
  return ty_launch_kernel((ty_op_id)c->op->id, &wide, 1, in, nin, NULL) && ty_copy_into(y, wide);
}

/* GPUs: few rows read the codes themselves, many are multiplied with a decoded weight. */
static bool decodes(const ty_tensor *x) {
  enum { FEW = 8 };
  int64_t last = x->v.ndim ? x->v.size[x->v.ndim - 1] : 0;
  return ty_device_of(x) >= TY_CUDA && last > 0 && x->v.count / last > FEW;
}

/* In the type of x, in which it is multiplied. */
static ty_tensor *decoded(const ty_tensor *x, ty_tensor *w) { return ty_dequantize(w, ty_dtype_of(x)); }

bool fwd_linear_quantized(ty_call *c) {
  const ty_linear_quantized_args *a = TY_ARGS(linear_quantized, c);
  ty_tensor *w = a->weight.t, *bias = a->bias.t;
  if (!check_weight(c, w) || (bias && !ty_check_floats(c, 2))) return false;
  if (bias && (bias->v.ndim != 1 || bias->v.size[0] != w->v.size[0]))
    return ty_op_fail(c, TY_EINVAL, "bias: expected [%lld] for weight %s, got %s", (long long)w->v.size[0],
                      ty_describe(w), ty_describe(bias));
  if (decodes(a->x.t)) return ty_out_set(c, 0, ty_linear(a->x.t, decoded(a->x.t, w), bias, NULL, "none"));
  if (bias && !(bias = ty_to(bias, TY_F32))) return false;
  return out_rows(c, a->x.t, w, w->v.size[1], w->v.size[0]) && launch_f32(c, (ty_tensor *[]){ a->x.t, w, bias }, 3);
}

bool vjp_linear_quantized(ty_vjp *c) {
  ty_tensor *g = c->g[0];
  if (c->need[0]) c->dx[0] = ty_linear_quantized_backward(g, TY_ARGS(linear_quantized, c)->weight.t);
  if (c->need[2]) {
    ty_tensor *rows = ty_reshape(g, TY_INTS(-1, g->v.size[g->v.ndim - 1]));
    c->dx[2] = ty_sum(rows, TY_INTS(0), false, TY_DTYPE_DEFAULT);
  }
  return true;
}

bool fwd_linear_quantized_backward(ty_call *c) {
  const ty_linear_quantized_backward_args *a = TY_ARGS(linear_quantized_backward, c);
  ty_tensor *w = a->weight.t;
  if (check_weight(c, w) && decodes(a->g.t)) return ty_out_set(c, 0, ty_matmul(a->g.t, decoded(a->g.t, w)));
  return check_weight(c, w) && out_rows(c, a->g.t, w, w->v.size[0], w->v.size[1]) &&
         launch_f32(c, (ty_tensor *[]){ a->g.t, w }, 2);
}

bool vjp_linear_quantized_backward(ty_vjp *c) {
  c->dx[0] = ty_linear_quantized(c->g[0], TY_ARGS(linear_quantized_backward, c)->weight.t, NULL);
  return true;
}
