/* Names and promotion of element types; single values in and out of tensors. */
#include <string.h>

#include "../../kernels/half.h"
#include "../../kernels/scalar.h"
#include "../device/device.h"
#include "../ops/op.h"
#include "../program/recording.h"
#include "../ops/vmap.h"

/* What NumPy and PyTorch call them. */
static const struct {
  const char *name;
  ty_dtype dtype;
} long_names[] = { { "float64", TY_F64 },   { "float32", TY_F32 }, { "float16", TY_F16 },
                   { "bfloat16", TY_BF16 }, { "int64", TY_I64 },   { "int32", TY_I32 },
                   { "int16", TY_I16 },     { "int8", TY_I8 },     { "uint8", TY_U8 } };

bool ty_dtype_parse(const char *name, ty_dtype *out) {
  for (size_t i = 0; i < sizeof long_names / sizeof *long_names; i++) {
    if (strcmp(name, long_names[i].name) == 0) {
      *out = long_names[i].dtype;
      return true;
    }
  }
  for (int d = 0; d < TY_DTYPES; d++) {
    if (strcmp(name, ty_dtype_name[d]) == 0) {
      *out = (ty_dtype)d;
      return true;
    }
  }
  return ty_fail(
      TY_EINVAL,
      "unknown dtype \"%s\"; expected f64 f32 f16 bf16 i64 i32 i16 i8 u8 bool, or block-quantized q8_0 q4_0 q2_k "
      "q3_k q4_k q6_k nf4 mxfp4 nvfp4",
      name);
}

ty_dtype ty_promote(ty_dtype a, ty_dtype b) {
  if (a == b) return a;
  ty_dtype low = a < b ? a : b, high = a < b ? b : a;
  if (low == TY_U8 && high == TY_I8) return TY_I16; /* neither holds the other */
  if (low == TY_F16 && high == TY_BF16) return TY_F32;
  return high;
}

static double load(const void *p, ty_dtype dtype) {
  switch (dtype) {
    case TY_BOOL:
    case TY_U8: return *(const uint8_t *)p;
    case TY_I8: return *(const int8_t *)p;
    case TY_I16: return *(const int16_t *)p;
    case TY_I32: return *(const int32_t *)p;
    case TY_I64: return (double)*(const int64_t *)p;
    case TY_F16: return ty_f16_to_f32(*(const uint16_t *)p);
    case TY_BF16: return ty_bf16_to_f32(*(const uint16_t *)p);
    case TY_F32: return *(const float *)p;
    default: return *(const double *)p;
  }
}

ty_number ty_number_of(ty_value value) {
  if (value.kind == TY_INT) return (ty_number){ (double)value.i, value.i };
  return (ty_number){ value.f, ty_f64_to_i64(value.f, INT64_MIN, INT64_MAX) };
}

void ty_store_scalar(void *p, ty_dtype dtype, ty_value value) {
  ty_number number = ty_number_of(value);
  double f = number.f;
  int64_t i = number.i;
  switch (dtype) {
    case TY_BOOL: *(uint8_t *)p = f != 0; break;
    case TY_U8: *(uint8_t *)p = (uint8_t)i; break;
    case TY_I8: *(int8_t *)p = (int8_t)i; break;
    case TY_I16: *(int16_t *)p = (int16_t)i; break;
    case TY_I32: *(int32_t *)p = (int32_t)i; break;
    case TY_I64: *(int64_t *)p = i; break;
    case TY_F16: *(uint16_t *)p = ty_f32_to_f16((float)f); break;
    case TY_BF16: *(uint16_t *)p = ty_f32_to_bf16((float)f); break;
    case TY_F32: *(float *)p = (float)f; break;
    default: *(double *)p = f;
  }
}

double ty_load_scalar(const ty_tensor *t, int64_t offset) {
  return load((const char *)t->v.data + offset * ty_dtype_size[t->v.dtype], ty_dtype_of(t));
}

bool ty_read_value(const ty_tensor *t, ty_value *value) {
  int64_t bits;
  ty_dtype dtype = ty_dtype_of(t);
  if (t->batch && !ty_map_check_value(t, "item")) return false;
  if (!ty_device_copy(TY_CPU, &bits, ty_device_of(t), t->v.data, ty_dtype_size[dtype])) return false;
  if (ty_is_float(dtype)) *value = ty_value_of_float(load(&bits, dtype));
  else *value = ty_value_of_int(dtype == TY_I64 ? bits : (int64_t)load(&bits, dtype));
  return true;
}

double ty_item(ty_tensor *t, bool *ok) {
  bool ignored;
  double none = ok ? 0 : NAN;
  if (!ok) ok = &ignored;
  *ok = false;
  if (!t) return none;
  if (t->v.count != 1) {
    ty_fail(TY_EINVAL, "item: expected a tensor with one element, got %s", ty_describe(t));
    return none;
  }
  if (ty_device_of(t) == TY_META) {
    ty_fail(TY_EINVAL, "item: a meta tensor has no values: %s", ty_describe(t));
    return none;
  }
  if (ty_is_recording() && !ty_recorded_host_read(t, "item")) return none;
  ty_value v;
  *ok = ty_read_value(t, &v);
  return !*ok ? none : v.kind == TY_INT ? (double)v.i : v.f;
}

ty_tensor *ty_from_data(const void *data, ty_dtype dtype, int ndim, const int64_t *size) {
  ty_tensor *t = ty_tensor_new(TY_CPU, dtype, ndim, size);
  if (t && t->v.count) memcpy(t->v.data, data, (size_t)ty_view_bytes(&t->v));
  if (ty_is_recording() && t) ty_recorded_host_write(t);
  return ty_scope_add(t);
}
