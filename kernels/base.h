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

/* Order is the order of promotion within a class; ORDER DTYPE: dtype.c. From TY_Q8_0 on: block-quantized, see
 * quant_blocks.h. Tensors of these are contiguous, and their rows (the last dimension) are whole blocks. */
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
  TY_Q8_0,
  TY_Q4_0,
  TY_Q2_K,
  TY_Q3_K,
  TY_Q4_K,
  TY_Q6_K,
  TY_NF4,
  TY_MXFP4,
  TY_NVFP4,
  TY_DTYPES,
  TY_DTYPE_DEFAULT = -1 /* in arguments: the op decides */
} ty_dtype;

extern const uint8_t ty_dtype_size[TY_DTYPES];     /* bytes of an element, or of a block */
extern const uint16_t ty_dtype_block[TY_DTYPES];   /* elements of a block; 1: not quantized */
extern const char *const ty_dtype_name[TY_DTYPES]; /* "f32" ... */
static inline bool ty_is_float(ty_dtype d) { return d >= TY_F16 && d <= TY_F64; }
static inline bool ty_is_quantized(ty_dtype d) { return d > TY_F64; }
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

enum { TY_NF4_GROUP = 256 }; /* blocks that share one f32 scale */

/* Bytes of a row of `columns` elements, a multiple of the block. */
static inline int64_t ty_row_bytes(ty_dtype d, int64_t columns) {
  int64_t blocks = ty_is_quantized(d) ? columns / ty_dtype_block[d] : columns;
  int64_t scales = d == TY_NF4 ? (blocks + TY_NF4_GROUP - 1) / TY_NF4_GROUP : d == TY_NVFP4 && blocks ? 1 : 0;
  return blocks * ty_dtype_size[d] + scales * (int64_t)sizeof(float);
}

/* Bytes of the elements of a view, without what lies between them. */
static inline int64_t ty_view_bytes(const ty_view *v) {
  if (!ty_is_quantized((ty_dtype)v->dtype)) return v->count * ty_dtype_size[v->dtype];
  return v->count ? v->count / v->size[v->ndim - 1] * ty_row_bytes((ty_dtype)v->dtype, v->size[v->ndim - 1]) : 0;
}

/* One launch. Absent optional inputs are NULL. `params` is the op's struct of params.h, or NULL. */
typedef struct ty_kernel_args {
  int nout, nin;
  const ty_view *const *out;
  const ty_view *const *in;
  const void *params;
  struct ty_storage *weights; /* of in[1], when that is likely to be the same in later calls (kept.h); else NULL */
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
