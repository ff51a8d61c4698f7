/* Block-quantized tensors: encoding, decoding, and products and lookups with weights that stay encoded. Gradients never
 * flow into codes. */
#include <string.h>

#include "op.h"

bool fwd_quantize(ty_call *c) {
  const ty_quantize_args *a = TY_ARGS(quantize, c);
  ty_tensor *x = a->x.t;
  if (!ty_check_floats(c, 0)) return false;
  if (a->dtype.i == TY_DTYPE_DEFAULT || !ty_is_quantized((ty_dtype)a->dtype.i))
    return ty_op_fail(c, TY_EINVAL, "dtype: expected q8_0, q4_0, q4_k, q6_k or nf4, got %s",
                      a->dtype.i == TY_DTYPE_DEFAULT ? "none" : ty_dtype_name[a->dtype.i]);
  if (!ty_out_like(c, 0, x, (ty_dtype)a->dtype.i) || !(x = ty_to(x, TY_F32))) return false;
  return ty_launch(c, &x, 1, NULL);
}

bool fwd_dequantize(ty_call *c) {
  const ty_dequantize_args *a = TY_ARGS(dequantize, c);
  ty_tensor *x = a->x.t;
  if (!ty_is_quantized(ty_dtype_of(x)))
    return ty_op_fail(c, TY_EINVAL, "x: expected a block-quantized tensor (q8_0 q4_0 q4_k q6_k nf4), got %s",
                      ty_describe(x));
  ty_dtype dtype = a->dtype.i == TY_DTYPE_DEFAULT ? TY_F32 : (ty_dtype)a->dtype.i;
  if (!ty_is_float(dtype))
    return ty_op_fail(c, TY_EINVAL, "dtype: expected f32, f64, f16 or bf16, got %s", ty_dtype_name[dtype]);
  if (dtype != TY_F32) return ty_out_set(c, 0, ty_to(ty_dequantize(x, TY_F32), dtype));
  return ty_out_like(c, 0, x, TY_F32) && ty_launch(c, &x, 1, NULL);
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
