/* The emulated CUDA device: what kernels see of CUDA, for a C++ compiler on the host. A launch runs the blocks one after
 * another; the threads of a block are fibers (fiber.h), so that barriers and warp functions behave. Shared memory is
 * watched as a sanitizer would: bounds, reads of what nobody wrote, and accesses of two threads without a barrier
 * between them. Half of the blocks run their threads in reverse order, so that what depends on the order shows. */
#ifndef TY_CUDA_EMULATOR_H
#define TY_CUDA_EMULATOR_H

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime.h"

#define __global__
#define __device__
#define __host__
/* Not forced: the same loads would be compiled into each of a thousand kernels. */
#define __forceinline__ inline __attribute__((unused))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __constant__ static

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

#define TY_EMU_VECTORS(type, name)                                          \
  struct alignas(2 * sizeof(type)) name##2 {                                \
    type x, y;                                                              \
  };                                                                        \
  struct alignas(16) name##4 {                                              \
    type x, y, z, w;                                                        \
  };                                                                        \
  static inline name##2 make_##name##2(type x, type y) { return { x, y }; } \
  static inline name##4 make_##name##4(type x, type y, type z, type w) { return { x, y, z, w }; }
TY_EMU_VECTORS(float, float)
TY_EMU_VECTORS(double, double)
TY_EMU_VECTORS(int, int)
TY_EMU_VECTORS(unsigned, uint)
#undef TY_EMU_VECTORS

namespace ty_emu {

/* ---- the running thread ---- */

struct place {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
place &here();

/* What a thread runs. It is copied as bytes: std::function would compile its own code for each of a thousand kernels. */
struct closure {
  void (*call)(const void *bytes);
  const void *bytes;
  size_t size;
};
bool launch_closure(cudaStream_t stream, const char *name, dim3 grid, dim3 block, size_t shared_bytes,
                    const closure &body);
template <class F>
bool launch(cudaStream_t stream, const char *name, dim3 grid, dim3 block, size_t shared_bytes, const F &body) {
  static_assert(std::is_trivially_copyable<F>::value && alignof(F) <= alignof(std::max_align_t), "kernels take values");
  return launch_closure(stream, name, grid, block, shared_bytes,
                        { [](const void *f) { (*static_cast<const F *>(f))(); }, &body, sizeof body });
}
/* The kernel has done what it must not: ends the launch. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

void block_barrier();
int lane_number();
/* All threads of the mask meet, and each brings up to MOST_BROUGHT bytes, which the others find until they meet again. */
enum { MOST_BROUGHT = 64 };
void meet(unsigned mask, const void *bytes, size_t size);
const void *brought(int lane);
/* The same with 8 bytes; what the one at `lane` brought. */
uint64_t exchange(unsigned mask, uint64_t value, int lane);
/* The same with a bit each; the bits of all, that of lane 0 the lowest. */
unsigned ballot(unsigned mask, bool vote);

/* ---- shared memory ---- */

struct access { /* who touched an element last, and how many barriers he had passed */
  int16_t thread = -1;
  bool atomic = false;
  uint32_t block_phase = 0, warp_phase = 0;
};
struct shadow {
  access write, read;
  bool written = false;
  int16_t bringer = -1; /* the thread whose asynchronous copy is on its way here */
};
struct region { /* one declaration of shared memory in the running block */
  const void *key;
  const char *name;
  unsigned char *bytes;
  shadow *shadows;
  int64_t count;
};
const region *declare(const void *key, const char *name, size_t element, int64_t count);
const region *declare_dynamic(const char *name, size_t element);
void touch(const region *r, int64_t at, bool writes, bool atomic);

/* Asynchronous copies of 16 bytes, or of zeros where `from` is NULL: made when the thread waits for their group, and
 * not before; until then nobody may touch where they go. */
void copy_async(const region *r, int64_t at, const void *from);
void commit_copies();
void wait_for_copies(int groups_left);

template <class T> class reference {
public:
  reference(const region *r, int64_t at) : region_(r), at_(at) {}
  operator T() const {
    touch(region_, at_, false, false);
    return *place_of();
  }
  const reference &operator=(T x) const {
    touch(region_, at_, true, false);
    *place_of() = x;
    return *this;
  }
  const reference &operator=(const reference &other) const { return *this = T(other); }
  const reference &operator+=(T x) const { return *this = T(T(*this) + x); }
  const reference &operator-=(T x) const { return *this = T(T(*this) - x); }
  const reference &operator*=(T x) const { return *this = T(T(*this) * x); }
  const reference &operator|=(T x) const { return *this = T(T(*this) | x); }
  T *place_of() const { return reinterpret_cast<T *>(region_->bytes) + at_; }

private:
  const region *region_;
  int64_t at_;
};

template <class T> class pointer {
public:
  pointer() = default;
  pointer(const region *r, int64_t at) : region_(r), at_(at) {}
  reference<T> operator[](int64_t i) const { return reference<T>(region_, at_ + i); }
  reference<T> operator*() const { return (*this)[0]; }
  pointer operator+(int64_t i) const { return pointer(region_, at_ + i); }
  pointer operator-(int64_t i) const { return pointer(region_, at_ - i); }
  pointer &operator+=(int64_t i) {
    at_ += i;
    return *this;
  }
  void bring(const void *from) const {
    static_assert(sizeof(T) == 16, "asynchronous copies have 16 bytes");
    copy_async(region_, at_, from);
  }
  T *touched() const { /* for atomics */
    touch(region_, at_, true, true);
    return (*this)[0].place_of();
  }

private:
  const region *region_ = nullptr;
  int64_t at_ = 0;
};
template <class T> pointer<T> shared(const void *key, const char *name, int64_t count) {
  return pointer<T>(declare(key, name, sizeof(T), count), 0);
}
template <class T> pointer<T> dynamic(const char *name) { return pointer<T>(declare_dynamic(name, sizeof(T)), 0); }

template <class T> uint64_t pack(T x) {
  static_assert(sizeof(T) <= 8, "threads exchange at most 8 bytes");
  uint64_t u = 0;
  memcpy(&u, &x, sizeof x);
  return u;
}
template <class T> T unpack(uint64_t u) {
  T x;
  memcpy(&x, &u, sizeof x);
  return x;
}

} // namespace ty_emu

#define threadIdx (ty_emu::here().thread)
#define blockIdx (ty_emu::here().block)
#define blockDim (ty_emu::here().block_size)
#define gridDim (ty_emu::here().grid_size)

/* ---- barriers and warps ---- */

static inline void __syncthreads() { ty_emu::block_barrier(); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { ty_emu::exchange(mask, 0, ty_emu::lane_number()); }

template <class T> T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  int self = ty_emu::lane_number();
  return ty_emu::unpack<T>(ty_emu::exchange(mask, ty_emu::pack(x), self / width * width + (lane & (width - 1))));
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int step, int width = 32) {
  int self = ty_emu::lane_number(), from = self ^ step;
  return ty_emu::unpack<T>(ty_emu::exchange(mask, ty_emu::pack(x), from / width > self / width ? self : from));
}
template <class T> T __shfl_up_sync(unsigned mask, T x, unsigned step, int width = 32) {
  int self = ty_emu::lane_number(), from = self - static_cast<int>(step);
  return ty_emu::unpack<T>(ty_emu::exchange(mask, ty_emu::pack(x), from < self / width * width ? self : from));
}
template <class T> T __shfl_down_sync(unsigned mask, T x, unsigned step, int width = 32) {
  int self = ty_emu::lane_number(), from = self + static_cast<int>(step);
  return ty_emu::unpack<T>(ty_emu::exchange(mask, ty_emu::pack(x), from >= self / width * width + width ? self : from));
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) { return ty_emu::ballot(mask, predicate != 0); }
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

int __syncthreads_count(int predicate);
static inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) > 0; }
static inline int __syncthreads_and(int predicate) {
  return __syncthreads_count(predicate) == static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}

/* ---- atomics: one thread runs at a time ---- */

#define TY_EMU_ATOMIC(name, expression)  \
  template <class T> T name(T *p, T x) { \
    T old = *p;                          \
    *p = (expression);                   \
    return old;                          \
  }                                      \
  template <class T> T name(ty_emu::pointer<T> p, T x) { return name(p.touched(), x); }
TY_EMU_ATOMIC(atomicAdd, T(old + x))
TY_EMU_ATOMIC(atomicSub, T(old - x))
TY_EMU_ATOMIC(atomicMax, old > x ? old : x)
TY_EMU_ATOMIC(atomicMin, old < x ? old : x)
TY_EMU_ATOMIC(atomicOr, T(old | x))
TY_EMU_ATOMIC(atomicAnd, T(old &x))
TY_EMU_ATOMIC(atomicXor, T(old ^ x))
TY_EMU_ATOMIC(atomicExch, x)
#undef TY_EMU_ATOMIC
template <class T> T atomicCAS(T *p, T expected, T x) {
  T old = *p;
  if (old == expected) *p = x;
  return old;
}
template <class T> T atomicCAS(ty_emu::pointer<T> p, T expected, T x) { return atomicCAS(p.touched(), expected, x); }

/* ---- single functions ---- */

template <class T> T __ldg(const T *p) { return *p; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{ a } * b >> 32); }
static inline unsigned __float_as_uint(float x) { return ty_emu::unpack<unsigned>(ty_emu::pack(x)); }
static inline float __uint_as_float(unsigned x) { return ty_emu::unpack<float>(ty_emu::pack(x)); }
static inline int __float_as_int(float x) { return ty_emu::unpack<int>(ty_emu::pack(x)); }
static inline float __int_as_float(int x) { return ty_emu::unpack<float>(ty_emu::pack(x)); }
static inline long long __double_as_longlong(double x) { return ty_emu::unpack<long long>(ty_emu::pack(x)); }
static inline double __longlong_as_double(long long x) { return ty_emu::unpack<double>(ty_emu::pack(x)); }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
static inline float __fdividef(float x, float y) { return x / y; }
using std::max;
using std::min;

#endif
