/* Elementwise kernels of one input: arithmetic, activations, and tests with bool results. */
#include "elementwise.h"
#include "../../special.h"
#include "gelu_near.h"

#pragma GCC diagnostic ignored "-Wtype-limits" /* x < 0 is always false for u8 */

#define LOOP(name, type, head, e)                                                                            \
  static bool name##_##type(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    X *o = out;                                                                                              \
    const X *p = in[0];                                                                                      \
    head _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                               \
      X x = p[i];                                                                                            \
      o[i] = (X)(e);                                                                                         \
    }                                                                                                        \
    return true;                                                                                             \
  }

#define LOOP_EITHER(name, type, e, other) LOOP(name##_first, type, , e) OR_OTHER(name, type, other)
#define OR_OTHER(name, type, other)                                                                          \
  LOOP(name##_other, type, , other)                                                                          \
  static bool name##_##type(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    const ty_p_scalars *s = params;                                                                          \
    return (s->a == 1 ? name##_other_##type : name##_first_##type)(out, in, n, repeated, params);            \
  }

/* Trigonometric loops over floats: a block with a large element goes to the C library. */
#define LOOP_TRIG(name)                                                                                   \
  static bool name##_f32(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    float *o = out;                                                                                       \
    const float *p = in[0];                                                                               \
    for (int64_t done = 0; done < n; done += 256) {                                                       \
      int64_t m = n - done < 256 ? n - done : 256;                                                        \
      int large = 0;                                                                                      \
      _Pragma("omp simd reduction(| : large)") for (int64_t i = done; i < done + m; i++)                  \
          large |= fabsf(p[i]) > TY_TRIG_LIMIT;                                                           \
      if (large)                                                                                          \
        for (int64_t i = done; i < done + m; i++)                                                         \
          o[i] = fabsf(p[i]) > TY_TRIG_LIMIT ? name##f(p[i]) : ty_##name##_f32(p[i]);                     \
      else _Pragma("omp simd") for (int64_t i = done; i < done + m; i++) o[i] = ty_##name##_f32(p[i]);    \
    }                                                                                                     \
    return true;                                                                                          \
  }

/* Loops over floats of a function that has a shorter form: a block with an unusual element goes to the whole one. */
#define LOOP_PARTED(name, usual)                                                                             \
  static bool name##_f32(void *out, const void *const *in, int64_t n, int repeated, const void *params) {    \
    float *o = out;                                                                                          \
    const float *p = in[0];                                                                                  \
    for (int64_t done = 0; done < n; done += 64) {                                                           \
      int64_t m = n - done < 64 ? n - done : 64;                                                             \
      int rare = 0;                                                                                          \
      _Pragma("omp simd reduction(| : rare)") for (int64_t i = done; i < done + m; i++) {                    \
        const float x = p[i];                                                                                \
        rare |= !(usual);                                                                                    \
      }                                                                                                      \
      if (rare) _Pragma("omp simd") for (int64_t i = done; i < done + m; i++) o[i] = ty_##name##_f32(p[i]);  \
      else _Pragma("omp simd") for (int64_t i = done; i < done + m; i++) o[i] = ty_##name##_usual_f32(p[i]); \
    }                                                                                                        \
    return true;                                                                                             \
  }

#define NUMBERS                   \
  const ty_p_numbers *s = params; \
  const X a = (X)s->a.f, b = (X)s->b.f;

#if defined(TY_HAS_GELU_LANES)
TY_GELU_INLINE bool gelu_first(void *out, const void *in, int64_t n, const bool half) {
  const float *x = in;
  float *y = out;
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i < n; i += GELU_BLOCK) ty_gelu_block(y + i, x + i, n - i < GELU_BLOCK ? (int)(n - i) : GELU_BLOCK, half);
#else
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, ty_gelu_lanes(_mm256_loadu_ps(x + i), half));
  if (i < n) {
    float room[8] = { 0 };
    memcpy(room, x + i, (size_t)(n - i) * sizeof *room);
    _mm256_storeu_ps(room, ty_gelu_lanes(_mm256_loadu_ps(room), half));
    memcpy(y + i, room, (size_t)(n - i) * sizeof *room);
  }
#endif
  return true;
}
static bool gelu_first_f32(void *out, const void *const *in, int64_t n, int repeated, const void *params) {
  return gelu_first(out, in[0], n, false);
}
static bool gelu_other_f32(void *out, const void *const *in, int64_t n, int repeated, const void *params);
static bool gelu_half(void *out, const void *const *in, int64_t n, int repeated, const void *params) {
  const ty_p_scalars *s = params;
  return s->a == 1 ? gelu_other_f32(out, in, n, repeated, params) : gelu_first(out, in[0], n, true);
}
#define GELU_HALVES [TY_F16] = gelu_half, [TY_BF16] = gelu_half,
#define LOOP_GELU(name, f, other) OR_OTHER(name, f32, other)
#else
#define GELU_HALVES
#define LOOP_GELU(name, f, other) LOOP_EITHER(name, f32, f, other)
#endif

#define F(f) ty_##f##_f32
#define X float
#define UNARY_FLOAT(name, f) LOOP(name, f32, , f)
#define UNARY_SCALARS(name, f) LOOP(name, f32, SCALARS, f)
#define UNARY_EITHER(name, f, other) LOOP_GELU(name, f, other)
#define UNARY_TRIG(name) LOOP_TRIG(name)
#define UNARY_PARTED(name, usual) LOOP_PARTED(name, usual)
#define UNARY_NUMBER(name, f, i) LOOP(name, f32, , f)
#define UNARY_NUMBER_SCALARS(name, f, i) LOOP(name, f32, NUMBERS, f)
#include "../../elementwise.def"
#undef F
#undef X

#define F(f) ty_##f##_f64
#define X double
#define UNARY_FLOAT(name, f) LOOP(name, f64, , f)
#define UNARY_SCALARS(name, f) LOOP(name, f64, SCALARS, f)
#define UNARY_EITHER(name, f, other) LOOP_EITHER(name, f64, f, other)
#define UNARY_TRIG(name) LOOP(name, f64, , F(name)(x))
#define UNARY_PARTED(name, usual) LOOP(name, f64, , F(name)(x))
#define UNARY_NUMBER(name, f, i) LOOP(name, f64, , f)
#define UNARY_NUMBER_SCALARS(name, f, i) LOOP(name, f64, NUMBERS, f)
#include "../../elementwise.def"
#undef F
#undef X

#define BOUNDED(i, low, high) ((i) < (low) ? (X)(low) : (i) > (high) ? (X)(high) : (X)(i))
#define BOUNDS(low, high)         \
  const ty_p_numbers *s = params; \
  const X a = BOUNDED(s->a.i, low, high), b = BOUNDED(s->b.i, low, high);

#define X uint8_t
#define U uint32_t
#define UNARY_NUMBER(name, f, i) LOOP(name, u8, , i)
#define UNARY_NUMBER_SCALARS(name, f, i) LOOP(name, u8, BOUNDS(0, UINT8_MAX), i)
#define UNARY_INTEGER(name, i, b) LOOP(name, u8, , i) LOOP(name, bool, , b)
#include "../../elementwise.def"
#undef X

#define X int8_t
#define UNARY_NUMBER(name, f, i) LOOP(name, i8, , i)
#define UNARY_NUMBER_SCALARS(name, f, i) LOOP(name, i8, BOUNDS(INT8_MIN, INT8_MAX), i)
#define UNARY_INTEGER(name, i, b) LOOP(name, i8, , i)
#include "../../elementwise.def"
#undef X

#define X int16_t
#define UNARY_NUMBER(name, f, i) LOOP(name, i16, , i)
#define UNARY_NUMBER_SCALARS(name, f, i) LOOP(name, i16, BOUNDS(INT16_MIN, INT16_MAX), i)
#define UNARY_INTEGER(name, i, b) LOOP(name, i16, , i)
#include "../../elementwise.def"
#undef X

#define X int32_t
#define UNARY_NUMBER(name, f, i) LOOP(name, i32, , i)
#define UNARY_NUMBER_SCALARS(name, f, i) LOOP(name, i32, BOUNDS(INT32_MIN, INT32_MAX), i)
#define UNARY_INTEGER(name, i, b) LOOP(name, i32, , i)
#include "../../elementwise.def"
#undef X
#undef U

#define X int64_t
#define U uint64_t
#define UNARY_NUMBER(name, f, i) LOOP(name, i64, , i)
#define UNARY_NUMBER_SCALARS(name, f, i) LOOP(name, i64, BOUNDS(INT64_MIN, INT64_MAX), i)
#define UNARY_INTEGER(name, i, b) LOOP(name, i64, , i)
#include "../../elementwise.def"
#undef X
#undef U

/* ---- tests ---- */

#define LOOP_TEST(name, type, X_, e)                                                                         \
  static bool name##_##type(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    uint8_t *o = out;                                                                                        \
    const X_ *p = in[0];                                                                                     \
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                    \
      X_ x = p[i];                                                                                           \
      (void)x;                                                                                               \
      o[i] = (e);                                                                                            \
    }                                                                                                        \
    return true;                                                                                             \
  }

#define F(f) ty_##f##_f32
#define TEST(name, f, i)           \
  LOOP_TEST(name, f32, float, f)   \
  LOOP_TEST(name, b1, uint8_t, i)  \
  LOOP_TEST(name, b2, uint16_t, i) \
  LOOP_TEST(name, b4, uint32_t, i) \
  LOOP_TEST(name, b8, uint64_t, i)
#include "../../elementwise.def"
#undef F
#define F(f) ty_##f##_f64
#define TEST(name, f, i) LOOP_TEST(name, f64, double, f)
#include "../../elementwise.def"
#undef F

/* ---- the kernels ---- */

static bool run(ew_loop *const *loops, const ty_kernel_args *k) {
  ty_dtype in = (ty_dtype)k->in[0]->dtype, out = (ty_dtype)k->out[0]->dtype;
  bool half = ty_is_half(in);
  ew_op op = { .loop = loops[half && !loops[in] ? TY_F32 : in], /* few have one of their own for halves */
               .nin = 1,
               .params = k->params,
               .dtype = { (uint8_t)out, (uint8_t)in },
               .how = { half && out == in ? EW_HALF : EW_PLAIN, half ? EW_HALF : EW_PLAIN } };
  return ew_run(&op, k);
}

#define FLOAT_LOOPS(name) [TY_F32] = name##_f32, [TY_F64] = name##_f64
#define INTEGER_LOOPS(name) \
  [TY_U8] = name##_u8, [TY_I8] = name##_i8, [TY_I16] = name##_i16, [TY_I32] = name##_i32, [TY_I64] = name##_i64
#define ENTRY(name, ...)                                      \
  bool TY_KERNEL(name)(const ty_kernel_args *k);              \
  bool TY_KERNEL(name)(const ty_kernel_args *k) {             \
    static ew_loop *const loops[TY_DTYPES] = { __VA_ARGS__ }; \
    return run(loops, k);                                     \
  }

#define UNARY_FLOAT(name, f) ENTRY(name, FLOAT_LOOPS(name))
#define UNARY_SCALARS(name, f) ENTRY(name, FLOAT_LOOPS(name))
#define UNARY_EITHER(name, f, other) ENTRY(name, GELU_HALVES FLOAT_LOOPS(name))
#define UNARY_TRIG(name) ENTRY(name, FLOAT_LOOPS(name))
#define UNARY_PARTED(name, usual) ENTRY(name, FLOAT_LOOPS(name))
#define UNARY_NUMBER(name, f, i) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name))
#define UNARY_NUMBER_SCALARS(name, f, i) ENTRY(name, FLOAT_LOOPS(name), INTEGER_LOOPS(name))
#define UNARY_INTEGER(name, i, b) ENTRY(name, [TY_BOOL] = name##_bool, INTEGER_LOOPS(name))
#define TEST(name, f, i)                                                                          \
  ENTRY(name, FLOAT_LOOPS(name), [TY_BOOL] = name##_b1, [TY_U8] = name##_b1, [TY_I8] = name##_b1, \
        [TY_I16] = name##_b2, [TY_I32] = name##_b4, [TY_I64] = name##_b8)
#include "../../elementwise.def"
