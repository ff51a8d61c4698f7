/* The element types' sizes and names. */
#include "base.h"

const uint8_t ty_dtype_size[TY_DTYPES] = {
  [TY_BOOL] = 1, [TY_U8] = 1,  [TY_I8] = 1,   [TY_I16] = 2, [TY_I32] = 4,
  [TY_I64] = 8,  [TY_F16] = 2, [TY_BF16] = 2, [TY_F32] = 4, [TY_F64] = 8,
};

const char *const ty_dtype_name[TY_DTYPES] = {
  [TY_BOOL] = "bool", [TY_U8] = "u8",   [TY_I8] = "i8",     [TY_I16] = "i16", [TY_I32] = "i32",
  [TY_I64] = "i64",   [TY_F16] = "f16", [TY_BF16] = "bf16", [TY_F32] = "f32", [TY_F64] = "f64",
};
