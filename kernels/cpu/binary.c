/* Elementwise kernels of two inputs of one dtype with a result of that dtype. */
#include "elementwise.h"
#include "../bessel.h"

/* Two arrays, or one of them a single repeated element. */
#define LOOP(name, type, e)                                                                                  \
  static bool name##_##type(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    X *o = out;                                                                                              \
    const X *p = in[0], *q = in[1];                                                                          \
    if (repeated == 0) {                                                                                     \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                  \
        X x = p[i], y = q[i];                                                                                \
        o[i] = (X)(e);                                                                                       \
      }                                                                                                      \
    } else if (repeated == 1) {                                                                              \
      const X x = *p;                                                                                        \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                  \
        X y = q[i];                                                                                          \
        o[i] = (X)(e);                                                                                       \
      }                                                                                                      \
    } else {                                                                                                 \
      const X y = *q;                                                                                        \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                  \
        X x = p[i];                                                                                          \
        o[i] = (X)(e);                                                                                       \
      }                                                                                                      \
    }                                                                                                        \
    return true;                                                                                             \
  }

/* Integer quotients: stops at a divisor of 0. */
#define LOOP_DIVISION(name, type, e)                                                                         \
  static bool name##_##type(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    X *o = out;                                                                                              \
    const X *p = in[0], *q = in[1];                                                                          \
    int64_t sx = !(repeated & 1), sy = !(repeated & 2);                                                      \
    for (int64_t i = 0; i < n; i++) {                                                                        \
      X x = p[i * sx], y = q[i * sy];                                                                        \
      if (y == 0) return false;                                                                              \
      o[i] = (e);                                                                                            \
    }                                                                                                        \
    return true;                                                                                             \
  }

/* Powers that are written often have loops of their own when the exponent is one number. */
#define LOOP_POWER(name, type, e)                                                                            \
  LOOP(name##_any, type, e)                                                                                  \
  static bool name##_##type(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    X *o = out;                                                                                              \
    const X *p = in[0];                                                                                      \
    const X y = repeated == 2 ? *(const X *)in[1] : 0;                                                       \
    if (y == 2) _Pragma("omp simd") for (int64_t i = 0; i < n; i++) o[i] = p[i] * p[i];                      \
    else if (y == 3) _Pragma("omp simd") for (int64_t i = 0; i < n; i++) o[i] = p[i] * p[i] * p[i];          \
    else if (y == -1) _Pragma("omp simd") for (int64_t i = 0; i < n; i++) o[i] = 1 / p[i];                   \
    else return name##_any_##type(out, in, n, repeated, params);                                             \
    return true;                                                                                             \
  }

#define F(f) ty_##f##_f32
#define X float
#define BINARY_FLOAT(name, f) LOOP(name, f32, f)
#define BINARY_NUMBER(name, f, i) LOOP(name, f32, f)
#define BINARY_POWER(name, f, i) LOOP_POWER(name, f32, f)
#define BINARY_ANY(name, f, i, b) LOOP(name, f32, f)
#define BINARY_DIVISION(name, f, i) LOOP(name, f32, f)
#include "../elementwise.def"
#undef F
#undef X

#define F(f) ty_##f##_f64
#define X double
#define BINARY_FLOAT(name, f) LOOP(name, f64, f)
#define BINARY_NUMBER(name, f, i) LOOP(name, f64, f)
#define BINARY_POWER(name, f, i) LOOP_POWER(name, f64, f)
#define BINARY_ANY(name, f, i, b) LOOP(name, f64, f)
#define BINARY_DIVISION(name, f, i) LOOP(name, f64, f)
#include "../elementwise.def"
#undef F
#undef X

#define X uint8_t
#define U uint32_t
#define BINARY_NUMBER(name, f, i) LOOP(name, u8, i)
#define BINARY_POWER(name, f, i) LOOP(name, u8, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, u8, i) LOOP(name, bool, b)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, u8, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, u8, i) LOOP(name, bool, b)
#include "../elementwise.def"
#undef X

#define X int8_t
#define BINARY_NUMBER(name, f, i) LOOP(name, i8, i)
#define BINARY_POWER(name, f, i) LOOP(name, i8, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, i8, i)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, i8, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, i8, i)
#include "../elementwise.def"
#undef X

#define X int16_t
#define BINARY_NUMBER(name, f, i) LOOP(name, i16, i)
#define BINARY_POWER(name, f, i) LOOP(name, i16, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, i16, i)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, i16, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, i16, i)
#include "../elementwise.def"
#undef X

#define X int32_t
#define BINARY_NUMBER(name, f, i) LOOP(name, i32, i)
#define BINARY_POWER(name, f, i) LOOP(name, i32, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, i32, i)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, i32, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, i32, i)
#include "../elementwise.def"
#undef X
#undef U

#define X int64_t
#define U uint64_t
#define BINARY_NUMBER(name, f, i) LOOP(name, i64, i)
#define BINARY_POWER(name, f, i) LOOP(name, i64, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, i64, i)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, i64, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, i64, i)
#include "../elementwise.def"
#undef X
#undef U

/* ---- the kernels ---- */

static bool run(ew_loop *const *loops, const ty_kernel_args *k) {
  ty_dtype dtype = (ty_dtype)k->in[0]->dtype;
  uint8_t half = ty_is_half(dtype) ? EW_HALF : EW_PLAIN, d = (uint8_t)dtype;
  ew_op op = { .loop = loops[half ? TY_F32 : dtype],
               .nin = 2,
               .repeats = 3,
               .params = k->params,
               .how = { half, half, half },
               .dtype = { d, d, d } };
  return ew_run(&op, k);
}

#define FLOAT_LOOPS(name) [TY_F32] = name##_f32, [TY_F64] = name##_f64
#define INTEGER_LOOPS(name) \
  [TY_U8] = name##_u8, [TY_I8] = name##_i8, [TY_I16] = name##_i16, [TY_I32] = name##_i32, [TY_I64] = name##_i64
#define ENTRY(name, ...)                                           \
  static ew_loop *const name##_loops[TY_DTYPES] = { __VA_ARGS__ }; \
  bool TY_KERNEL(name)(const ty_kernel_args *k);                   \
  bool TY_KERNEL(name)(const ty_kernel_args *k) { return run(name##_loops, k); }

#define BINARY_FLOAT(name, f) ENTRY(name, FLOAT_LOOPS(name))
#define BINARY_NUMBER(name, f, i) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name))
#define BINARY_POWER(name, f, i) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name))
#define BINARY_ANY(name, f, i, b) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name), [TY_BOOL] = name##_bool)
#define BINARY_DIVISION(name, f, i) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name))
#define BINARY_INTEGER(name, i, b) ENTRY(name, [TY_BOOL] = name##_bool, INTEGER_LOOPS(name))
#include "../elementwise.def"
