/* What every file of CUDA kernels begins with: element types, launches, shared memory, scratch memory, and the way an
 * index out of range becomes an error. The same sources are compiled by nvcc for GPUs and, with TY_CUDA_EMULATED, by a
 * C++ compiler for the emulated device of tests/cuda_emu; what differs between the two is in this file.
 *
 * Rules for kernels that both can run:
 *   - launches through TY_LAUNCH, which gives false after ty_fail(); entries are defined with TY_CUDA_KERNEL(name)
 *   - shared memory through TY_SHARED and TY_SHARED_DYNAMIC, passed on as ty_shared_ptr<T>. Elements are read and written
 *     by [] as whole values: the emulator watches each for races, bounds and reads of what nobody wrote
 *   - warp functions are the _sync ones, with a mask of threads that all arrive
 *   - __launch_bounds__(threads, 1), where nvcc would otherwise spill some registers so that one more block fits
 *   - what only a GPU has (tensor cores, asynchronous copies) stands behind TY_ON_GPU and has a portable twin */
#ifndef TY_KERNELS_CUDA_CUH
#define TY_KERNELS_CUDA_CUH

#include <limits>
#include <type_traits>

#include "../half.h"
#include "../params.h"
#include "../scalar.h"

#ifdef TY_CUDA_EMULATED
#include "emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#ifdef __CUDA_ARCH__
#define TY_ON_GPU 1 /* in device code, compiled for a GPU */
#endif

#define TY_DEVICE static __device__ __forceinline__
#define TY_DEVICE_MEMBER __device__ __forceinline__

/* The entry of a kernel, as the table of ops knows it. */
#define TY_CUDA_KERNEL(name)                               \
  extern "C" bool ty_cuda_##name(const ty_kernel_args *k); \
  extern "C" bool ty_cuda_##name(const ty_kernel_args *k)

/* ---- services of runtime.cu ---- */

enum { TY_WARP = 32 };

cudaStream_t ty_cuda_stream(void);                 /* where this thread's kernels run */
int ty_cuda_gpu(void);                             /* on which GPU that is */
int ty_cuda_processors(void);                      /* its multiprocessors */
bool ty_cuda_tf32(void);                           /* whether products of f32 may round their factors to TF32 */
bool ty_cuda_no_kernel(const char *op, int dtype); /* false after ty_fail(): not for this dtype */
bool ty_cuda_launched(const char *name);           /* whether the launch before was accepted: false after ty_fail() */
bool ty_cuda_zero(void *p, size_t bytes);          /* fills with zero bytes, in order with the kernels */

/* Device memory for the time of an entry; given back in the order of the stream. data is NULL after ty_fail(). */
class ty_cuda_scratch {
public:
  explicit ty_cuda_scratch(size_t bytes) : data(ty_gpu_scratch_alloc(ty_cuda_gpu(), bytes)), bytes_(bytes) {}
  ~ty_cuda_scratch() { ty_gpu_scratch_free(ty_cuda_gpu(), data, bytes_); }
  ty_cuda_scratch(const ty_cuda_scratch &) = delete;
  ty_cuda_scratch &operator=(const ty_cuda_scratch &) = delete;
  template <class T> T *as() const { return static_cast<T *>(data); }
  void *const data;

private:
  size_t bytes_;
};

/* ---- launches ---- */

/* TY_LAUNCH(kernel, grid, block, bytes of dynamic shared memory, arguments...); kernel in parentheses if it has commas. */
#ifdef TY_CUDA_EMULATED
#define TY_LAUNCH(kernel, grid, block, shared, ...) \
  ty_emu::launch(ty_cuda_stream(), #kernel, dim3(grid), dim3(block), shared, [=] { (kernel)(__VA_ARGS__); })
#else
#define TY_LAUNCH(kernel, grid, block, shared, ...)                                                          \
  ([&]() -> bool {                                                                                           \
    if ((shared) > 48 << 10) /* more than that is had on request */                                          \
      cudaFuncSetAttribute((kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)); \
    (kernel)<<<dim3(grid), dim3(block), (shared), ty_cuda_stream()>>>(__VA_ARGS__);                          \
    return ty_cuda_launched(#kernel);                                                                        \
  }())
#endif

/* Blocks for n items of which each block takes `each`, at most `waves` times what the GPU runs at once (blocks of 256
 * threads): kernels go through the rest in steps of the whole grid. */
static inline unsigned ty_cuda_blocks(int64_t n, int64_t each, int waves = 4) {
  int64_t blocks = (n + each - 1) / each, most = (int64_t)ty_cuda_processors() * 8 * waves;
  return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

/* ---- shared memory ---- */

#ifdef TY_CUDA_EMULATED
template <class T> using ty_shared_ptr = ty_emu::pointer<T>;
#define TY_SHARED(type, name, count) \
  static char name##_key;            \
  ty_shared_ptr<type> name = ty_emu::shared<type>(&name##_key, #name, count)
#define TY_SHARED_DYNAMIC(type, name) ty_shared_ptr<type> name = ty_emu::dynamic<type>(#name)
#else
template <class T> using ty_shared_ptr = T *;
#define TY_SHARED(type, name, count) __shared__ type name[count]
#define TY_SHARED_DYNAMIC(type, name)                              \
  extern __shared__ __align__(16) unsigned char ty_shared_bytes[]; \
  type *name = reinterpret_cast<type *>(ty_shared_bytes)
#endif

/* ---- element types ---- */

struct ty_f16 {
  uint16_t bits;
};
struct ty_bf16 {
  uint16_t bits;
};

#define TY_ELEMENT static __host__ __device__ __forceinline__
/* What an element is computed with, and the way there and back. */
template <class T> struct ty_element {
  typedef T compute;
  TY_ELEMENT T widen(T x) { return x; }
  TY_ELEMENT T narrow(T x) { return x; }
};
template <> struct ty_element<ty_f16> {
  typedef float compute;
  TY_ELEMENT float widen(ty_f16 x) {
#ifdef TY_ON_GPU
    return __half2float(__ushort_as_half(x.bits));
#else
    return ty_f16_to_f32(x.bits);
#endif
  }
  TY_ELEMENT ty_f16 narrow(float x) {
#ifdef TY_ON_GPU
    return ty_f16{ __half_as_ushort(__float2half_rn(x)) };
#else
    return ty_f16{ ty_f32_to_f16(x) };
#endif
  }
};
template <> struct ty_element<ty_bf16> {
  typedef float compute;
  TY_ELEMENT float widen(ty_bf16 x) { return ty_bf16_to_f32(x.bits); }
  TY_ELEMENT ty_bf16 narrow(float x) {
#ifdef TY_ON_GPU
    return ty_bf16{ __bfloat16_as_ushort(__float2bfloat16_rn(x)) };
#else
    return ty_bf16{ ty_f32_to_bf16(x) };
#endif
  }
};
template <class T> using ty_compute = typename ty_element<T>::compute;

template <class T> TY_DEVICE ty_compute<T> ty_widen(T x) { return ty_element<T>::widen(x); }
template <class T> TY_DEVICE T ty_narrow(ty_compute<T> x) { return ty_element<T>::narrow(x); }

/* N elements that are moved at once. */
template <class T, int N> struct alignas(sizeof(T) * N) ty_pack { T v[N]; };

/* N neighbours at once (16 bytes of them, where they are more), to what they are computed with and back. */
template <int N, class T> TY_DEVICE void ty_load(const T *from, ty_compute<T> *x) {
  constexpr int AT_ONCE = N * sizeof(T) > 16 ? static_cast<int>(16 / sizeof(T)) : N;
#pragma unroll
  for (int i = 0; i < N; i += AT_ONCE) {
    const ty_pack<T, AT_ONCE> pack = *reinterpret_cast<const ty_pack<T, AT_ONCE> *>(from + i);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) x[i + j] = ty_widen(pack.v[j]);
  }
}
template <int N, class T> TY_DEVICE void ty_store(T *to, const ty_compute<T> *x) {
  constexpr int AT_ONCE = N * sizeof(T) > 16 ? static_cast<int>(16 / sizeof(T)) : N;
#pragma unroll
  for (int i = 0; i < N; i += AT_ONCE) {
    ty_pack<T, AT_ONCE> pack;
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) pack.v[j] = ty_narrow<T>(x[i + j]);
#ifdef TY_ON_GPU
    if constexpr (sizeof pack % 4 == 0 && sizeof(T) < 4) { /* as words, which nvcc does not take apart again */
      ty_pack<uint32_t, sizeof pack / 4> words;
      memcpy(&words, &pack, sizeof words);
      *reinterpret_cast<ty_pack<uint32_t, sizeof pack / 4> *>(to + i) = words;
      continue;
    }
#endif
    *reinterpret_cast<ty_pack<T, AT_ONCE> *>(to + i) = pack;
  }
}

/* Whether a pack of so many bytes can be at p; at NULL it can. */
static inline bool ty_aligned(const void *p, size_t bytes = 16) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

/* The elements of a view; NULL where it is absent or empty. */
template <class T> static inline T *ty_data_of(const ty_view *v) {
  return v && v->count ? static_cast<T *>(v->data) : nullptr;
}

/* fn(T{}) for the dtype; false after ty_fail() for others. */
template <class Fn> static inline bool ty_for_floats(int dtype, const char *op, Fn fn) {
  switch (dtype) {
    case TY_F32: return fn(float{});
    case TY_F64: return fn(double{});
    case TY_F16: return fn(ty_f16{});
    case TY_BF16: return fn(ty_bf16{});
    default: return ty_cuda_no_kernel(op, dtype);
  }
}
template <class Fn>
static inline bool ty_for_reals(int dtype, const char *op, Fn fn) { /* kernels that know no halves */
  switch (dtype) {
    case TY_F32: return fn(float{});
    case TY_F64: return fn(double{});
    default: return ty_cuda_no_kernel(op, dtype);
  }
}
template <class Fn> static inline bool ty_for_integers(int dtype, const char *op, Fn fn) {
  switch (dtype) {
    case TY_U8: return fn(uint8_t{});
    case TY_I8: return fn(int8_t{});
    case TY_I16: return fn(int16_t{});
    case TY_I32: return fn(int32_t{});
    case TY_I64: return fn(int64_t{});
    default: return ty_cuda_no_kernel(op, dtype);
  }
}
template <class Fn> static inline bool ty_for_numbers(int dtype, const char *op, Fn fn) {
  return ty_is_float((ty_dtype)dtype) ? ty_for_floats(dtype, op, fn) : ty_for_integers(dtype, op, fn);
}
/* By size alone, for what only moves elements. */
template <class Fn> static inline bool ty_for_sizes(int dtype, Fn fn) {
  switch (ty_dtype_size[dtype]) {
    case 1: return fn(uint8_t{});
    case 2: return fn(uint16_t{});
    case 4: return fn(uint32_t{});
    default: return fn(uint64_t{});
  }
}

/* ---- errors in the data ---- */

/* The first thing that kernels met in their data since the last synchronisation, in memory that host and GPU see. A
 * kernel that meets one leaves the access out and goes on; the error is raised when the GPU is waited for. */
enum ty_cuda_kind {
  TY_NO_TROUBLE,
  TY_INDEX_OUT_OF_RANGE,
  TY_DIVISION_BY_ZERO,
  TY_NOT_RISING,     /* index: an offset; size: up to what offsets rise from 0; more: where it stands */
  TY_NO_PROBABILITY, /* index: of the row; size: the bits of the double that it holds */
  /* index: of the matrix; size: where the library stopped */
  TY_NOT_POSITIVE,
  TY_SINGULAR,
  TY_NOT_CONVERGED,
  TY_NOT_FINITE,
  TY_FEW_PROBABILITIES /* index: of the row; size: how many are positive; more: of how many that are needed, or 0 */
};
struct ty_cuda_trouble {
  int kind;       /* ty_cuda_kind; set when the rest is there */
  int claimed;    /* by the thread that reports: kernels of several streams may meet */
  const char *op; /* the host's */
  int64_t index, size, more;
};
/* What a kernel needs to report: passed to it as it is. */
struct ty_cuda_watch {
  ty_cuda_trouble *trouble;
  const char *op;
};
ty_cuda_watch ty_cuda_watched(void); /* for the running op, on this thread's GPU */

TY_DEVICE void ty_report(const ty_cuda_watch &watch, ty_cuda_kind kind, int64_t index, int64_t size, int64_t more = 0) {
  ty_cuda_trouble *t = watch.trouble;
  if (atomicCAS(&t->claimed, 0, 1) != 0) return;
  t->op = watch.op;
  t->index = index;
  t->size = size;
  t->more = more;
  __threadfence_system();
  *static_cast<volatile int *>(&t->kind) = kind;
}

TY_DEVICE bool ty_in_range(const ty_cuda_watch &watch, int64_t index, int64_t size) {
  if (index >= 0 && index < size) return true;
  ty_report(watch, TY_INDEX_OUT_OF_RANGE, index, size);
  return false;
}

/* ---- sums over threads ---- */

template <class T> struct ty_plus {
  TY_DEVICE_MEMBER T operator()(T a, T b) const { return a + b; }
};
template <class T> struct ty_larger { /* of NaN and a number, NaN */
  TY_DEVICE_MEMBER T operator()(T a, T b) const { return (a > b) | (a != a) ? a : b; }
};
template <class T> struct ty_smaller {
  TY_DEVICE_MEMBER T operator()(T a, T b) const { return (a < b) | (a != a) ? a : b; }
};

/* Of all 32 threads of a warp, in each of them. */
template <class T, class Join> TY_DEVICE T ty_warp_reduce(T x, Join join) {
  for (int step = TY_WARP / 2; step > 0; step /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

/* Of all threads of a block (a multiple of 32, at most 1024, in one dimension), in each of them. `room` has 32 elements;
 * the block has passed a barrier when it returns, so that it can be used again at once. */
template <class T, class Join> TY_DEVICE T ty_block_reduce(T x, Join join, ty_shared_ptr<T> room) {
  int warps = blockDim.x / TY_WARP, warp = threadIdx.x / TY_WARP, lane = threadIdx.x % TY_WARP;
  x = ty_warp_reduce(x, join);
  if (warps == 1) return x;
  if (lane == 0) room[warp] = x;
  __syncthreads();
  T sum = room[0];
  for (int w = 1; w < warps; w++) sum = join(sum, room[w]);
  __syncthreads();
  return sum;
}

#endif
