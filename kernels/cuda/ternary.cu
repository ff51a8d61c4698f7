/* Elementwise kernels of three inputs of one dtype, with a result of the same. */
#include "elementwise.cuh"

#define FUNCTOR(name, type, e)                                                       \
  struct name##_##type {                                                             \
    TY_DEVICE_MEMBER X operator()(X x, X y, X z) const { return static_cast<X>(e); } \
  };
#define FUNCTOR_SCALARS(name, type, e)                                               \
  struct name##_##type {                                                             \
    X a, b;                                                                          \
    TY_DEVICE_MEMBER X operator()(X x, X y, X z) const { return static_cast<X>(e); } \
  };

#define X float
#define TERNARY_FLOAT(name, f) FUNCTOR(name, f32, f)
#define TERNARY_SCALARS(name, f) FUNCTOR_SCALARS(name, f32, f)
#include "../elementwise.def"
#undef X

#define X double
#define TERNARY_FLOAT(name, f) FUNCTOR(name, f64, f)
#define TERNARY_SCALARS(name, f) FUNCTOR_SCALARS(name, f64, f)
#include "../elementwise.def"
#undef X

#define EW_RUN(functor, element, compute) ew_run<3, element, element>(k, functor{})
#define TERNARY_FLOAT(name, f) EW_ENTRY(name, EW_FLOATS_OF(name))
#include "../elementwise.def"

#undef EW_RUN
#define EW_RUN(functor, element, compute) ew_run<3, element, element>(k, with_scalars<functor>(k, compute{}))
#define TERNARY_SCALARS(name, f) EW_ENTRY(name, EW_FLOATS_OF(name))
#include "../elementwise.def"
