/* Elementwise kernels of two inputs of one dtype, with a result of the same. */
#include "elementwise.cuh"

#define FUNCTOR(name, type, e)                                                  \
  struct name##_##type {                                                        \
    TY_DEVICE_MEMBER X operator()(X x, X y) const { return static_cast<X>(e); } \
  };
/* Integer quotients: a divisor of 0 is reported. */
#define FUNCTOR_DIVISION(name, type, e)              \
  struct name##_##type {                             \
    ty_cuda_watch watch;                             \
    TY_DEVICE_MEMBER X operator()(X x, X y) const {  \
      if (y == 0) {                                  \
        ty_report(watch, TY_DIVISION_BY_ZERO, 0, 0); \
        return 0;                                    \
      }                                              \
      return static_cast<X>(e);                      \
    }                                                \
  };

#define F(f) ty_##f##_f32
#define X float
#define BINARY_FLOAT(name, f) FUNCTOR(name, f32, f)
#define BINARY_NUMBER(name, f, i) FUNCTOR(name, f32, f)
#define BINARY_POWER(name, f, i) FUNCTOR(name, f32, y == 2 ? x * x : f)
#define BINARY_ANY(name, f, i, b) FUNCTOR(name, f32, f)
#define BINARY_DIVISION(name, f, i) FUNCTOR(name, f32, f)
#include "../elementwise.def"
#undef F
#undef X

#define F(f) ty_##f##_f64
#define X double
#define BINARY_FLOAT(name, f) FUNCTOR(name, f64, f)
#define BINARY_NUMBER(name, f, i) FUNCTOR(name, f64, f)
#define BINARY_POWER(name, f, i) FUNCTOR(name, f64, f)
#define BINARY_ANY(name, f, i, b) FUNCTOR(name, f64, f)
#define BINARY_DIVISION(name, f, i) FUNCTOR(name, f64, f)
#include "../elementwise.def"
#undef F
#undef X

#define X uint8_t
#define U uint32_t
#define BINARY_NUMBER(name, f, i) FUNCTOR(name, u8, i)
#define BINARY_POWER(name, f, i) FUNCTOR(name, u8, i)
#define BINARY_ANY(name, f, i, b) FUNCTOR(name, u8, i) FUNCTOR(name, bool, b)
#define BINARY_DIVISION(name, f, i) FUNCTOR_DIVISION(name, u8, i)
#define BINARY_INTEGER(name, i, b) FUNCTOR(name, u8, i) FUNCTOR(name, bool, b)
#include "../elementwise.def"
#undef X

#define X int8_t
#define BINARY_NUMBER(name, f, i) FUNCTOR(name, i8, i)
#define BINARY_POWER(name, f, i) FUNCTOR(name, i8, i)
#define BINARY_ANY(name, f, i, b) FUNCTOR(name, i8, i)
#define BINARY_DIVISION(name, f, i) FUNCTOR_DIVISION(name, i8, i)
#define BINARY_INTEGER(name, i, b) FUNCTOR(name, i8, i)
#include "../elementwise.def"
#undef X

#define X int16_t
#define BINARY_NUMBER(name, f, i) FUNCTOR(name, i16, i)
#define BINARY_POWER(name, f, i) FUNCTOR(name, i16, i)
#define BINARY_ANY(name, f, i, b) FUNCTOR(name, i16, i)
#define BINARY_DIVISION(name, f, i) FUNCTOR_DIVISION(name, i16, i)
#define BINARY_INTEGER(name, i, b) FUNCTOR(name, i16, i)
#include "../elementwise.def"
#undef X

#define X int32_t
#define BINARY_NUMBER(name, f, i) FUNCTOR(name, i32, i)
#define BINARY_POWER(name, f, i) FUNCTOR(name, i32, i)
#define BINARY_ANY(name, f, i, b) FUNCTOR(name, i32, i)
#define BINARY_DIVISION(name, f, i) FUNCTOR_DIVISION(name, i32, i)
#define BINARY_INTEGER(name, i, b) FUNCTOR(name, i32, i)
#include "../elementwise.def"
#undef X
#undef U

#define X int64_t
#define U uint64_t
#define BINARY_NUMBER(name, f, i) FUNCTOR(name, i64, i)
#define BINARY_POWER(name, f, i) FUNCTOR(name, i64, i)
#define BINARY_ANY(name, f, i, b) FUNCTOR(name, i64, i)
#define BINARY_DIVISION(name, f, i) FUNCTOR_DIVISION(name, i64, i)
#define BINARY_INTEGER(name, i, b) FUNCTOR(name, i64, i)
#include "../elementwise.def"
#undef X
#undef U

/* ---- entries ---- */

/* clang-format off */
#define FLOATS_OF(name)                                                            \
  case TY_F32: return ew_run<2, float, float>(k, name##_f32{});                    \
  case TY_F64: return ew_run<2, double, double>(k, name##_f64{});                  \
  case TY_F16: return ew_run<2, ty_f16, ty_f16>(k, name##_f32{});                  \
  case TY_BF16: return ew_run<2, ty_bf16, ty_bf16>(k, name##_f32{});
#define INTEGERS_OF(name, ...)                                                     \
  case TY_U8: return ew_run<2, uint8_t, uint8_t>(k, name##_u8{ __VA_ARGS__ });     \
  case TY_I8: return ew_run<2, int8_t, int8_t>(k, name##_i8{ __VA_ARGS__ });       \
  case TY_I16: return ew_run<2, int16_t, int16_t>(k, name##_i16{ __VA_ARGS__ });   \
  case TY_I32: return ew_run<2, int32_t, int32_t>(k, name##_i32{ __VA_ARGS__ });   \
  case TY_I64: return ew_run<2, int64_t, int64_t>(k, name##_i64{ __VA_ARGS__ });
#define BOOL_OF(name) \
  case TY_BOOL: return ew_run<2, uint8_t, uint8_t>(k, name##_bool{});
#define ENTRY(name, cases)                                                         \
  TY_CUDA_KERNEL(name) {                                                           \
    int dtype = k->in[0]->dtype;                                                   \
    switch (dtype) {                                                               \
      cases                                                                        \
      default: return ty_cuda_no_kernel(#name, dtype);                             \
    }                                                                              \
  }
/* clang-format on */
#define BINARY_FLOAT(name, f) ENTRY(name, FLOATS_OF(name))
#define BINARY_NUMBER(name, f, i) ENTRY(name, FLOATS_OF(name) INTEGERS_OF(name))
#define BINARY_POWER(name, f, i) ENTRY(name, FLOATS_OF(name) INTEGERS_OF(name))
#define BINARY_ANY(name, f, i, b) ENTRY(name, FLOATS_OF(name) INTEGERS_OF(name) BOOL_OF(name))
#define BINARY_DIVISION(name, f, i) ENTRY(name, FLOATS_OF(name) INTEGERS_OF(name, ty_cuda_watched()))
#define BINARY_INTEGER(name, i, b) ENTRY(name, BOOL_OF(name) INTEGERS_OF(name))
#include "../elementwise.def"
