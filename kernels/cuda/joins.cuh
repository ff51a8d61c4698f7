/* What elements that meet become. */
#ifndef TY_KERNELS_CUDA_JOINS_CUH
#define TY_KERNELS_CUDA_JOINS_CUH

#include "cuda.cuh"

/* How two become one, and what a run of them begins with: the first, or what changes nothing. */
struct join_sum {
  enum { STARTS = true };
  template <class C> static TY_DEVICE_MEMBER C join(C a, C b) { return a + b; }
};
struct join_product {
  enum { STARTS = false };
  template <class C> static TY_DEVICE_MEMBER C join(C a, C b) { return static_cast<C>(a * b); }
};
struct join_larger {
  enum { STARTS = false };
  template <class C> static TY_DEVICE_MEMBER C join(C a, C b) { return b > a || b != b ? b : a; }
};
struct join_smaller {
  enum { STARTS = false };
  template <class C> static TY_DEVICE_MEMBER C join(C a, C b) { return b < a || b != b ? b : a; }
};

#endif
