/* Elementwise kernels of one input: arithmetic, activations, and tests with bool results. */
#include "elementwise.cuh"
#include "../special.h"

#ifdef __CUDACC__
#pragma nv_diag_suppress 186 /* x < 0 is always false for u8 */
#else
#pragma GCC diagnostic ignored "-Wtype-limits"
#endif

/* A functor for each row of elementwise.def and type that it is computed in. `a` and `b`: the row's numbers. */
#define FUNCTOR(name, type, e)                                  \
  struct name##_##type {                                        \
    X a, b;                                                     \
    TY_DEVICE_MEMBER X operator()(X x) const { return (X)(e); } \
  };

#define F(f) ty_##f##_f32
#define X float
#define UNARY_FLOAT(name, f) FUNCTOR(name, f32, f)
#define UNARY_SCALARS(name, f) FUNCTOR(name, f32, f)
#define UNARY_EITHER(name, f, other) FUNCTOR(name, f32, a == 1 ? (other) : (f))
#define UNARY_TRIG(name) FUNCTOR(name, f32, F(fabs)(x) > TY_TRIG_LIMIT ? name##f(x) : F(name)(x))
#define UNARY_PARTED(name, usual) FUNCTOR(name, f32, F(name)(x))
#define UNARY_NUMBER(name, f, i) FUNCTOR(name, f32, f)
#define UNARY_NUMBER_SCALARS(name, f, i) FUNCTOR(name, f32, f)
#include "../elementwise.def"
#undef F
#undef X

#define F(f) ty_##f##_f64
#define X double
#define UNARY_FLOAT(name, f) FUNCTOR(name, f64, f)
#define UNARY_SCALARS(name, f) FUNCTOR(name, f64, f)
#define UNARY_EITHER(name, f, other) FUNCTOR(name, f64, a == 1 ? (other) : (f))
#define UNARY_TRIG(name) FUNCTOR(name, f64, F(name)(x))
#define UNARY_PARTED(name, usual) FUNCTOR(name, f64, F(name)(x))
#define UNARY_NUMBER(name, f, i) FUNCTOR(name, f64, f)
#define UNARY_NUMBER_SCALARS(name, f, i) FUNCTOR(name, f64, f)
#include "../elementwise.def"
#undef F
#undef X

#define X uint8_t
#define U uint32_t
#define UNARY_NUMBER(name, f, i) FUNCTOR(name, u8, i)
#define UNARY_NUMBER_SCALARS(name, f, i) FUNCTOR(name, u8, i)
#define UNARY_INTEGER(name, i, b_) FUNCTOR(name, u8, i) FUNCTOR(name, bool, b_)
#include "../elementwise.def"
#undef X
#define X int8_t
#define UNARY_NUMBER(name, f, i) FUNCTOR(name, i8, i)
#define UNARY_NUMBER_SCALARS(name, f, i) FUNCTOR(name, i8, i)
#define UNARY_INTEGER(name, i, b_) FUNCTOR(name, i8, i)
#include "../elementwise.def"
#undef X
#define X int16_t
#define UNARY_NUMBER(name, f, i) FUNCTOR(name, i16, i)
#define UNARY_NUMBER_SCALARS(name, f, i) FUNCTOR(name, i16, i)
#define UNARY_INTEGER(name, i, b_) FUNCTOR(name, i16, i)
#include "../elementwise.def"
#undef X
#define X int32_t
#define UNARY_NUMBER(name, f, i) FUNCTOR(name, i32, i)
#define UNARY_NUMBER_SCALARS(name, f, i) FUNCTOR(name, i32, i)
#define UNARY_INTEGER(name, i, b_) FUNCTOR(name, i32, i)
#include "../elementwise.def"
#undef X
#undef U
#define X int64_t
#define U uint64_t
#define UNARY_NUMBER(name, f, i) FUNCTOR(name, i64, i)
#define UNARY_NUMBER_SCALARS(name, f, i) FUNCTOR(name, i64, i)
#define UNARY_INTEGER(name, i, b_) FUNCTOR(name, i64, i)
#include "../elementwise.def"
#undef X
#undef U

/* ---- entries ---- */

/* The numbers of a row that integers have too, as its type. */
template <class X> static X number(ty_number x) {
  typedef std::numeric_limits<X> limits;
  if constexpr (std::is_floating_point<X>::value) return static_cast<X>(x.f);
  else return x.i < limits::min() ? limits::min() : x.i > limits::max() ? limits::max() : static_cast<X>(x.i);
}
template <class F, class X> static F with_numbers(const ty_kernel_args *k, X) {
  const ty_p_numbers *s = static_cast<const ty_p_numbers *>(k->params);
  return F{ number<X>(s->a), number<X>(s->b) };
}

#define EW_RUN(functor, element, compute) ew_run<1, element, element>(k, with_scalars<functor>(k, compute{}))
#define UNARY_FLOAT(name, f) EW_ENTRY(name, EW_FLOATS_OF(name))
#define UNARY_SCALARS(name, f) EW_ENTRY(name, EW_FLOATS_OF(name))
#define UNARY_EITHER(name, f, other) EW_ENTRY(name, EW_FLOATS_OF(name))
#define UNARY_TRIG(name) EW_ENTRY(name, EW_FLOATS_OF(name))
#define UNARY_PARTED(name, usual) EW_ENTRY(name, EW_FLOATS_OF(name))
#define UNARY_NUMBER(name, f, i) EW_ENTRY(name, EW_FLOATS_OF(name) EW_INTEGERS_OF(name))
#define UNARY_INTEGER(name, i, b) EW_ENTRY(name, EW_BOOL_OF(name) EW_INTEGERS_OF(name))
#include "../elementwise.def"

#undef EW_RUN
#define EW_RUN(functor, element, compute) ew_run<1, element, element>(k, with_numbers<functor>(k, compute{}))
#define UNARY_NUMBER_SCALARS(name, f, i) EW_ENTRY(name, EW_FLOATS_OF(name) EW_INTEGERS_OF(name))
#include "../elementwise.def"
