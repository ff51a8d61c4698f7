/* The element types' sizes and names. */
#include "base.h"

const uint8_t ty_dtype_size[TY_DTYPES] = {
  [TY_BOOL] = 1,   [TY_U8] = 1,     [TY_I8] = 1,   [TY_I16] = 2,    [TY_I32] = 4,    [TY_I64] = 8,   [TY_F16] = 2,
  [TY_BF16] = 2,   [TY_F32] = 4,    [TY_F64] = 8,  [TY_Q8_0] = 34,  [TY_Q4_0] = 18,  [TY_Q2_K] = 84, [TY_Q3_K] = 110,
  [TY_Q4_K] = 144, [TY_Q6_K] = 210, [TY_NF4] = 33, [TY_MXFP4] = 17, [TY_NVFP4] = 36,
};

const uint16_t ty_dtype_block[TY_DTYPES] = {
  [TY_BOOL] = 1,   [TY_U8] = 1,     [TY_I8] = 1,   [TY_I16] = 1,    [TY_I32] = 1,    [TY_I64] = 1,    [TY_F16] = 1,
  [TY_BF16] = 1,   [TY_F32] = 1,    [TY_F64] = 1,  [TY_Q8_0] = 32,  [TY_Q4_0] = 32,  [TY_Q2_K] = 256, [TY_Q3_K] = 256,
  [TY_Q4_K] = 256, [TY_Q6_K] = 256, [TY_NF4] = 64, [TY_MXFP4] = 32, [TY_NVFP4] = 64,
};

const char *const ty_dtype_name[TY_DTYPES] = {
  [TY_BOOL] = "bool", [TY_U8] = "u8",     [TY_I8] = "i8",       [TY_I16] = "i16",     [TY_I32] = "i32",
  [TY_I64] = "i64",   [TY_F16] = "f16",   [TY_BF16] = "bf16",   [TY_F32] = "f32",     [TY_F64] = "f64",
  [TY_Q8_0] = "q8_0", [TY_Q4_0] = "q4_0", [TY_Q2_K] = "q2_k",   [TY_Q3_K] = "q3_k",   [TY_Q4_K] = "q4_k",
  [TY_Q6_K] = "q6_k", [TY_NF4] = "nf4",   [TY_MXFP4] = "mxfp4", [TY_NVFP4] = "nvfp4",
};
