/* Elementwise kernels of three inputs of one dtype with a result of that dtype; the third may be one number. */
#include "elementwise.h"

#define LOOP_AS(loop, head, e)                                                                      \
  static bool loop(void *out, const void *const *in, int64_t n, int repeated, const void *params) { \
    X *o = out;                                                                                     \
    const X *p = in[0], *q = in[1], *r = in[2];                                                     \
    head if (repeated == 0) {                                                                       \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                         \
        X x = p[i], y = q[i], z = r[i];                                                             \
        o[i] = (X)(e);                                                                              \
      }                                                                                             \
    }                                                                                               \
    else {                                                                                          \
      const X z = *r;                                                                               \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                         \
        X x = p[i], y = q[i];                                                                       \
        o[i] = (X)(e);                                                                              \
      }                                                                                             \
    }                                                                                               \
    return true;                                                                                    \
  }
#define LOOP(name, type, e) LOOP_AS(name##_##type, , e)
#define LOOP_SCALARS(name, type, e) LOOP_AS(name##_##type, SCALARS, e)

#define X float
#define TERNARY_FLOAT(name, f) LOOP(name, f32, f)
#define TERNARY_SCALARS(name, f) LOOP_SCALARS(name, f32, f)
#include "../../elementwise.def"
#undef X

#define X double
#define TERNARY_FLOAT(name, f) LOOP(name, f64, f)
#define TERNARY_SCALARS(name, f) LOOP_SCALARS(name, f64, f)
#include "../../elementwise.def"
#undef X

static bool run(ew_loop *f32, ew_loop *f64, const ty_kernel_args *k) {
  const ty_dtype dtype = (ty_dtype)k->in[0]->dtype;
  const uint8_t half = ty_is_half(dtype) ? EW_HALF : EW_PLAIN, d = (uint8_t)dtype;
  ew_op op = { .loop = dtype == TY_F64 ? f64 : f32,
               .nin = 3,
               .repeats = 4,
               .params = k->params,
               .how = { half, half, half, half },
               .dtype = { d, d, d, d } };
  return ew_run(&op, k);
}

#define TERNARY_FLOAT(name, f)                   \
  bool TY_KERNEL(name)(const ty_kernel_args *k); \
  bool TY_KERNEL(name)(const ty_kernel_args *k) { return run(name##_f32, name##_f64, k); }
#define TERNARY_SCALARS TERNARY_FLOAT
#include "../../elementwise.def"
