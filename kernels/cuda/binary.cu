/* Elementwise kernels of two inputs of one dtype, with a result of the same. */
#include "elementwise.cuh"
#include "../bessel.h"

#define FUNCTOR(name, type, e)                                                  \
  struct name##_##type {                                                        \
    TY_DEVICE_MEMBER X operator()(X x, X y) const { return static_cast<X>(e); } \
  };
#define FUNCTOR_SCALARS(name, type, e)                                          \
  struct name##_##type {                                                        \
    X a, b;                                                                     \
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
#define BINARY_SCALARS(name, f) FUNCTOR_SCALARS(name, f32, f)
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
#define BINARY_SCALARS(name, f) FUNCTOR_SCALARS(name, f64, f)
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

/* Divisions of integers report a zero. */
template <class F> static F with_watch() {
  if constexpr (std::is_empty<F>::value) return F{};
  else return F{ ty_cuda_watched() };
}

#define EW_RUN(functor, element, compute) ew_run<2, element, element>(k, with_watch<functor>())
#define BINARY_FLOAT(name, f) EW_ENTRY(name, EW_FLOATS_OF(name))
#define BINARY_NUMBER(name, f, i) EW_ENTRY(name, EW_FLOATS_OF(name) EW_INTEGERS_OF(name))
#define BINARY_POWER(name, f, i) EW_ENTRY(name, EW_FLOATS_OF(name) EW_INTEGERS_OF(name))
#define BINARY_ANY(name, f, i, b) EW_ENTRY(name, EW_FLOATS_OF(name) EW_INTEGERS_OF(name) EW_BOOL_OF(name))
#define BINARY_DIVISION(name, f, i) EW_ENTRY(name, EW_FLOATS_OF(name) EW_INTEGERS_OF(name))
#define BINARY_INTEGER(name, i, b) EW_ENTRY(name, EW_BOOL_OF(name) EW_INTEGERS_OF(name))
#include "../elementwise.def"

#undef EW_RUN
#define EW_RUN(functor, element, compute) ew_run<2, element, element>(k, with_scalars<functor>(k, compute{}))
#define BINARY_SCALARS(name, f) EW_ENTRY(name, EW_FLOATS_OF(name))
#include "../elementwise.def"
