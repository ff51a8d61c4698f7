/* Elementwise kernels of two inputs of one dtype with a bool result. */
#include "elementwise.h"

#define LOOP(name, type, e)                                                                                  \
  static bool name##_##type(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    uint8_t *o = out;                                                                                        \
    const X *p = in[0], *q = in[1];                                                                          \
    if (repeated == 0) {                                                                                     \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                  \
        X x = p[i], y = q[i];                                                                                \
        o[i] = (e);                                                                                          \
      }                                                                                                      \
    } else {                                                                                                 \
      const X y = *q;                                                                                        \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                  \
        X x = p[i];                                                                                          \
        o[i] = (e);                                                                                          \
      }                                                                                                      \
    }                                                                                                        \
    return true;                                                                                             \
  }

#define X float
#define COMPARE(name, mirrored, e) LOOP(name, f32, e)
#include "../../elementwise.def"
#undef X
#define X double
#define COMPARE(name, mirrored, e) LOOP(name, f64, e)
#include "../../elementwise.def"
#undef X
#define X uint8_t
#define COMPARE(name, mirrored, e) LOOP(name, u8, e)
#define LOGICAL(name, e) LOOP(name, bool, e)
#include "../../elementwise.def"
#undef X
#define X int8_t
#define COMPARE(name, mirrored, e) LOOP(name, i8, e)
#include "../../elementwise.def"
#undef X
#define X int16_t
#define COMPARE(name, mirrored, e) LOOP(name, i16, e)
#include "../../elementwise.def"
#undef X
#define X int32_t
#define COMPARE(name, mirrored, e) LOOP(name, i32, e)
#include "../../elementwise.def"
#undef X
#define X int64_t
#define COMPARE(name, mirrored, e) LOOP(name, i64, e)
#include "../../elementwise.def"
#undef X

/* ---- the kernels ---- */

static bool run(ew_loop *const *loops, ew_loop *const *mirrored, const ty_kernel_args *k) {
  ty_dtype dtype = (ty_dtype)k->in[0]->dtype;
  uint8_t half = ty_is_half(dtype) ? EW_HALF : EW_PLAIN, d = (uint8_t)dtype;
  ew_op op = { .loop = loops[half ? TY_F32 : dtype],
               .nin = 2,
               .repeats = 2,
               .how = { EW_PLAIN, half, half },
               .dtype = { TY_BOOL, d, d } };
  if (k->out[0]->count > 1 && ew_repeated(k->in[0])) { /* the loops take a repeated right side only */
    op.loop = mirrored[half ? TY_F32 : dtype];
    ty_kernel_args turned = { 1, 2, k->out, (const ty_view *const[]){ k->in[1], k->in[0] }, NULL, NULL };
    return ew_run(&op, &turned);
  }
  return ew_run(&op, k);
}

static bool run_logical(ew_loop *loop, const ty_kernel_args *k) {
  uint8_t d = (uint8_t)k->in[0]->dtype, how = d == TY_BOOL ? EW_PLAIN : EW_TRUTH;
  ew_op op = { .loop = loop, .nin = 2, .repeats = 2, .how = { EW_PLAIN, how, how }, .dtype = { TY_BOOL, d, d } };
  return ew_run(&op, k);
}

#define COMPARE(name, mirrored, e)                                                              \
  static ew_loop *const name##_loops[TY_DTYPES] = {                                             \
    [TY_BOOL] = name##_u8, [TY_U8] = name##_u8,   [TY_I8] = name##_i8,   [TY_I16] = name##_i16, \
    [TY_I32] = name##_i32, [TY_I64] = name##_i64, [TY_F32] = name##_f32, [TY_F64] = name##_f64, \
  };
#include "../../elementwise.def"

#define COMPARE(name, mirrored, e)               \
  bool TY_KERNEL(name)(const ty_kernel_args *k); \
  bool TY_KERNEL(name)(const ty_kernel_args *k) { return run(name##_loops, mirrored##_loops, k); }
#define LOGICAL(name, e)                         \
  bool TY_KERNEL(name)(const ty_kernel_args *k); \
  bool TY_KERNEL(name)(const ty_kernel_args *k) { return run_logical(name##_bool, k); }
#include "../../elementwise.def"
