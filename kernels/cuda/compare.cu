/* Elementwise kernels with results of bool: comparisons, logic, and tests of one input. */
#include "elementwise.cuh"

#define COMPARE(name, mirrored, e)                                                    \
  struct name##_any {                                                                 \
    template <class X> TY_DEVICE_MEMBER bool operator()(X x, X y) const { return e; } \
  };
#define LOGICAL(name, e)                                                  \
  struct name##_any {                                                     \
    template <class X> TY_DEVICE_MEMBER bool operator()(X p, X q) const { \
      bool x = p != 0, y = q != 0;                                        \
      return e;                                                           \
    }                                                                     \
  };
#include "../elementwise.def"

#define F(f) ty_##f##_f32
#define TEST(name, f, i)                                                         \
  struct name##_any {                                                            \
    TY_DEVICE_MEMBER bool operator()(float x) const { return f; }                \
    TY_DEVICE_MEMBER bool operator()(double x) const;                            \
    template <class X> TY_DEVICE_MEMBER bool operator()(X x) const { return i; } \
  };
#include "../elementwise.def"
#undef F
#define F(f) ty_##f##_f64
#define TEST(name, f, i) \
  TY_DEVICE_MEMBER bool name##_any::operator()(double x) const { return f; }
#include "../elementwise.def"
#undef F

/* ---- entries ---- */

#define ENTRY(name, n)                                                                            \
  TY_CUDA_KERNEL(name) {                                                                          \
    if (k->in[0]->dtype == TY_BOOL) return ew_run<n, bool, bool>(k, name##_any{});                \
    return ty_for_numbers(k->in[0]->dtype, #name,                                                 \
                          [&](auto x) { return ew_run<n, bool, decltype(x)>(k, name##_any{}); }); \
  }
#define COMPARE(name, mirrored, e) ENTRY(name, 2)
#define LOGICAL(name, e) ENTRY(name, 2)
#define TEST(name, f, i) ENTRY(name, 1)
#include "../elementwise.def"
