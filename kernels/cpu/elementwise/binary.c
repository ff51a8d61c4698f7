/* Elementwise kernels of two inputs of one dtype with a result of that dtype. */
#include "elementwise.h"
#include "../../bessel.h"

/* Two arrays, or one of them a single repeated element. */
#define LOOP_AS(loop, head, e)                                                                      \
  static bool loop(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    X *o = out;                                                                                     \
    const X *p = in[0], *q = in[1];                                                                 \
    head if (repeated == 0) {                                                                       \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                         \
        X x = p[i], y = q[i];                                                                       \
        o[i] = (X)(e);                                                                              \
      }                                                                                             \
    }                                                                                               \
    else if (repeated == 1) {                                                                       \
      const X x = *p;                                                                               \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                         \
        X y = q[i];                                                                                 \
        o[i] = (X)(e);                                                                              \
      }                                                                                             \
    }                                                                                               \
    else {                                                                                          \
      const X y = *q;                                                                               \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                         \
        X x = p[i];                                                                                 \
        o[i] = (X)(e);                                                                              \
      }                                                                                             \
    }                                                                                               \
    return true;                                                                                    \
  }
#define LOOP(name, type, e) LOOP_AS(name##_##type, , e)
#define LOOP_SCALARS(name, type, e) LOOP_AS(name##_##type, SCALARS, e)

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
#define BINARY_SCALARS(name, f) LOOP_SCALARS(name, f32, f)
#define BINARY_NUMBER(name, f, i) LOOP(name, f32, f)
#define BINARY_POWER(name, f, i) LOOP_POWER(name, f32, f)
#define BINARY_ANY(name, f, i, b) LOOP(name, f32, f)
#define BINARY_DIVISION(name, f, i) LOOP(name, f32, f)
#include "../../elementwise.def"
#undef F
#undef X

#define F(f) ty_##f##_f64
#define X double
#define BINARY_FLOAT(name, f) LOOP(name, f64, f)
#define BINARY_SCALARS(name, f) LOOP_SCALARS(name, f64, f)
#define BINARY_NUMBER(name, f, i) LOOP(name, f64, f)
#define BINARY_POWER(name, f, i) LOOP_POWER(name, f64, f)
#define BINARY_ANY(name, f, i, b) LOOP(name, f64, f)
#define BINARY_DIVISION(name, f, i) LOOP(name, f64, f)
#include "../../elementwise.def"
#undef F
#undef X

#define X uint8_t
#define U uint32_t
#define BINARY_NUMBER(name, f, i) LOOP(name, u8, i)
#define BINARY_POWER(name, f, i) LOOP(name, u8, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, u8, i) LOOP(name, bool, b)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, u8, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, u8, i) LOOP(name, bool, b)
#include "../../elementwise.def"
#undef X

#define X int8_t
#define BINARY_NUMBER(name, f, i) LOOP(name, i8, i)
#define BINARY_POWER(name, f, i) LOOP(name, i8, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, i8, i)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, i8, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, i8, i)
#include "../../elementwise.def"
#undef X

#define X int16_t
#define BINARY_NUMBER(name, f, i) LOOP(name, i16, i)
#define BINARY_POWER(name, f, i) LOOP(name, i16, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, i16, i)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, i16, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, i16, i)
#include "../../elementwise.def"
#undef X

#define X int32_t
#define BINARY_NUMBER(name, f, i) LOOP(name, i32, i)
#define BINARY_POWER(name, f, i) LOOP(name, i32, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, i32, i)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, i32, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, i32, i)
#include "../../elementwise.def"
#undef X
#undef U

#define X int64_t
#define U uint64_t
#define BINARY_NUMBER(name, f, i) LOOP(name, i64, i)
#define BINARY_POWER(name, f, i) LOOP(name, i64, i)
#define BINARY_ANY(name, f, i, b) LOOP(name, i64, i)
#define BINARY_DIVISION(name, f, i) LOOP_DIVISION(name, i64, i)
#define BINARY_INTEGER(name, i, b) LOOP(name, i64, i)
#include "../../elementwise.def"
#undef X
#undef U

/* ---- halves, without a stage of floats between: what networks add up and scale ---- */

#if defined(__F16C__)
static inline __m256 load_f16(const uint16_t *x) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)x));
}
#define F16_VECTORS(op, first, second)           \
  for (; i + 8 <= n; i += 8)                     \
    _mm_storeu_si128((__m128i *)(void *)(o + i), \
                     _mm256_cvtps_ph(_mm256_##op##_ps(first, second), _MM_FROUND_TO_NEAREST_INT));
#else
#define F16_VECTORS(op, first, second)
#endif

#define LOOP_F16(name, op, e)                                                                             \
  static bool name##_f16(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    uint16_t *o = out;                                                                                    \
    const uint16_t *p = in[0], *q = in[1];                                                                \
    const int64_t sp = !(repeated & 1), sq = !(repeated & 2);                                             \
    const float x0 = n ? ty_f16_to_f32(*p) : 0, y0 = n ? ty_f16_to_f32(*q) : 0;                           \
    int64_t i = 0;                                                                                        \
    (void)x0, (void)y0;                                                                                   \
    if (repeated == 0) {                                                                                  \
      F16_VECTORS(op, load_f16(p + i), load_f16(q + i))                                                   \
    } else if (repeated == 1) {                                                                           \
      F16_VECTORS(op, _mm256_set1_ps(x0), load_f16(q + i))                                                \
    } else if (repeated == 2) {                                                                           \
      F16_VECTORS(op, load_f16(p + i), _mm256_set1_ps(y0))                                                \
    }                                                                                                     \
    for (; i < n; i++) {                                                                                  \
      const float x = ty_f16_to_f32(p[i * sp]), y = ty_f16_to_f32(q[i * sq]);                             \
      o[i] = ty_f32_to_f16(e);                                                                            \
    }                                                                                                     \
    return true;                                                                                          \
  }

#if defined(TY_BF16_VECTORS)
#define BF16_VECTORS(op, x_evens, x_odds, y_evens, y_odds) \
  for (; at + 16 <= n; at += 16)                           \
    ty_bf16_put_pairs(o + at, _mm256_##op##_ps(x_evens, y_evens), _mm256_##op##_ps(x_odds, y_odds));
#else
#define BF16_VECTORS(op, x_evens, x_odds, y_evens, y_odds)
#endif

#define LOOP_BF16_OF(x_, y_, e)                          \
  _Pragma("omp simd") for (int64_t i = at; i < n; i++) { \
    const float x = x_, y = y_;                          \
    o[i] = ty_f32_to_bf16(e);                            \
  }
#define LOOP_BF16(name, op, e)                                                                                   \
  static bool name##_bf16(void *out, const void *const *in, int64_t n, int repeated, const void *params) {       \
    uint16_t *o = out;                                                                                           \
    const uint16_t *p = in[0], *q = in[1];                                                                       \
    const float x0 = n ? ty_bf16_to_f32(*p) : 0, y0 = n ? ty_bf16_to_f32(*q) : 0;                                \
    int64_t at = 0;                                                                                              \
    if (repeated == 0) {                                                                                         \
      BF16_VECTORS(op, ty_bf16_evens(p + at), ty_bf16_odds(p + at), ty_bf16_evens(q + at), ty_bf16_odds(q + at)) \
      LOOP_BF16_OF(ty_bf16_to_f32(p[i]), ty_bf16_to_f32(q[i]), e)                                                \
    } else if (repeated == 1) {                                                                                  \
      BF16_VECTORS(op, _mm256_set1_ps(x0), _mm256_set1_ps(x0), ty_bf16_evens(q + at), ty_bf16_odds(q + at))      \
      LOOP_BF16_OF(x0, ty_bf16_to_f32(q[i]), e)                                                                  \
    } else {                                                                                                     \
      BF16_VECTORS(op, ty_bf16_evens(p + at), ty_bf16_odds(p + at), _mm256_set1_ps(y0), _mm256_set1_ps(y0))      \
      LOOP_BF16_OF(ty_bf16_to_f32(p[i]), y0, e)                                                                  \
    }                                                                                                            \
    return true;                                                                                                 \
  }

#define HALF_LOOPS(name, e) LOOP_F16(name, name, e) LOOP_BF16(name, name, e)
HALF_LOOPS(add, x + y)
HALF_LOOPS(sub, x - y)
HALF_LOOPS(mul, x *y)

static ew_loop *half_loop(ew_loop *float_loop, ty_dtype dtype) {
  if (float_loop == add_f32) return dtype == TY_F16 ? add_f16 : add_bf16;
  if (float_loop == sub_f32) return dtype == TY_F16 ? sub_f16 : sub_bf16;
  if (float_loop == mul_f32) return dtype == TY_F16 ? mul_f16 : mul_bf16;
  return NULL;
}

/* ---- the kernels ---- */

static bool run(ew_loop *const *loops, const ty_kernel_args *k) {
  ty_dtype dtype = (ty_dtype)k->in[0]->dtype;
  const bool is_half = ty_is_half(dtype);
  ew_loop *own = is_half ? half_loop(loops[TY_F32], dtype) : loops[dtype];
  uint8_t half = own ? EW_PLAIN : EW_HALF, d = (uint8_t)dtype;
  ew_op op = { .loop = own ? own : loops[TY_F32],
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
#define BINARY_SCALARS(name, f) ENTRY(name, FLOAT_LOOPS(name))
#define BINARY_NUMBER(name, f, i) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name))
#define BINARY_POWER(name, f, i) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name))
#define BINARY_ANY(name, f, i, b) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name), [TY_BOOL] = name##_bool)
#define BINARY_DIVISION(name, f, i) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name))
#define BINARY_INTEGER(name, i, b) ENTRY(name, [TY_BOOL] = name##_bool, INTEGER_LOOPS(name))
#include "../../elementwise.def"
