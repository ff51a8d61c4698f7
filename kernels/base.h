/* What every kernel knows: element types, strided views, the calling convention, and the few services
 * (error text, scratch memory, interruption) that the host of the kernels provides. The lowest floor of the
 * house: nothing here knows of tensors, graphs or Lua. */
#ifndef TY_KERNELS_BASE_H
#define TY_KERNELS_BASE_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TY_MAX_DIMS 8
#define TY_MAX_GPUS 16
#define TY_MAX_STREAMS 32 /* of each GPU; number 0 is where work goes when nobody says otherwise */

/* Order is the order of promotion within a class; ORDER DTYPE: dtype.c */
typedef enum ty_dtype {
  TY_BOOL,
  TY_U8,
  TY_I8,
  TY_I16,
  TY_I32,
  TY_I64,
  TY_F16,
  TY_BF16,
  TY_F32,
  TY_F64,
  TY_DTYPES,
  TY_DTYPE_DEFAULT = -1 /* in arguments: the op decides */
} ty_dtype;

extern const uint8_t ty_dtype_size[TY_DTYPES];     /* bytes */
extern const char *const ty_dtype_name[TY_DTYPES]; /* "f32" ... */
static inline bool ty_is_float(ty_dtype d) { return d >= TY_F16; }
static inline bool ty_is_half(ty_dtype d) { return d == TY_F16 || d == TY_BF16; }

/* A strided window on memory. Strides count elements, not bytes, and may be 0 (broadcast), never negative. */
typedef struct ty_view {
  void *data;
  int16_t dtype; /* ty_dtype */
  int16_t ndim;
  bool contiguous; /* C order without gaps; derived, kept up to date by whoever sets the strides */
  bool number;     /* data is one number on the host, whatever the device, and all strides are 0 */
  int64_t count;   /* product of size */
  int64_t size[TY_MAX_DIMS];
  int64_t stride[TY_MAX_DIMS];
} ty_view;

/* One launch. Absent optional inputs are NULL. `params` is the op's struct of params.h, or NULL. */
typedef struct ty_kernel_args {
  int nout, nin;
  const ty_view *const *out;
  const ty_view *const *in;
  const void *params;
} ty_kernel_args;

/* Every kernel has this form and returns true, or false after ty_fail(). A kernel trusts shapes and dtypes (the
 * op's shape rule has checked them) but never index *values*, which it checks before it reads or writes. */
typedef bool ty_kernel(const ty_kernel_args *k);

/* ---- services of the host ---- */

typedef enum ty_code { TY_OK, TY_EINVAL, TY_ENOMEM, TY_EINTR, TY_EIO, TY_EINDEX, TY_EUNSUPPORTED } ty_code;

/* Records the error of this thread (fixed buffer, no allocation) and returns false. */
bool ty_fail(ty_code code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Scratch memory on the host, 64-byte aligned, counted like tensors; NULL after ty_fail(). */
void *ty_scratch_alloc(size_t bytes);
void ty_scratch_free(void *p, size_t bytes);

/* The same on a GPU, given back in the order of its work. */
void *ty_gpu_scratch_alloc(int gpu, size_t bytes);
void ty_gpu_scratch_free(int gpu, void *p, size_t bytes);

/* Set by Ctrl-C (any thread); kernels with long loops look at it between chunks (parallel.h does so for them). */
extern volatile sig_atomic_t ty_interrupted;

#ifdef __cplusplus
}
#endif
#endif
