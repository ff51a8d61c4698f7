/* Reductions over the tensors of several ranks, a piece at a time: halves in f32, whole numbers in i64. */
#include <string.h>

#include "../../kernels/half.h"
#include "../ops/op.h"
#include "internal.h"

enum { PIECE = 1024 };

bool ty_can_reduce(ty_dtype dtype, ty_reduction reduction) {
  bool whole = dtype == TY_I64 || dtype == TY_I32 || dtype == TY_I16 || dtype == TY_I8 || dtype == TY_U8;
  bool real = dtype == TY_F64 || dtype == TY_F32 || ty_is_half(dtype);
  if (!whole && !real)
    return ty_fail(TY_EINVAL, "reductions are of f64, f32, f16, bf16 and whole numbers, got %s", ty_dtype_name[dtype]);
  if (whole && reduction == TY_REDUCE_MEAN)
    return ty_fail(TY_EINVAL, "mean: expected floating point, got %s", ty_dtype_name[dtype]);
  return true;
}

/* What is not a number stays so. */
#define BEFORE_REAL(a, b) ((a) < (b) || (a) != (a))
#define BEFORE_WHOLE(a, b) ((a) < (b))
#define AFTER_REAL(a, b) ((a) > (b) || (a) != (a))
#define AFTER_WHOLE(a, b) ((a) > (b))
#define ACCUMULATE(name, type, wide, KIND)                                                    \
  static void name(type *acc, const type *x, int64_t n, ty_reduction reduction) {             \
    switch (reduction) {                                                                      \
      case TY_REDUCE_MIN:                                                                     \
        for (int64_t i = 0; i < n; i++) acc[i] = BEFORE_##KIND(x[i], acc[i]) ? x[i] : acc[i]; \
        break;                                                                                \
      case TY_REDUCE_MAX:                                                                     \
        for (int64_t i = 0; i < n; i++) acc[i] = AFTER_##KIND(x[i], acc[i]) ? x[i] : acc[i];  \
        break;                                                                                \
      case TY_REDUCE_PROD:                                                                    \
        for (int64_t i = 0; i < n; i++) acc[i] = (type)((wide)acc[i] * (wide)x[i]);           \
        break;                                                                                \
      default:                                                                                \
        for (int64_t i = 0; i < n; i++) acc[i] = (type)((wide)acc[i] + (wide)x[i]);           \
    }                                                                                         \
  }
ACCUMULATE(accumulate_f64, double, double, REAL)
ACCUMULATE(accumulate_f32, float, float, REAL)
ACCUMULATE(accumulate_i64, int64_t, uint64_t, WHOLE) /* sums and products of whole numbers wrap */

#define WIDEN(type) \
  for (int64_t i = 0; i < n; i++) out[i] = ((const type *)x)[i]
#define NARROW(type) \
  for (int64_t i = 0; i < n; i++) ((type *)out)[i] = (type)x[i]

static void load_whole(int64_t *out, const void *x, int64_t n, ty_dtype dtype) {
  switch (dtype) {
    case TY_I64: WIDEN(int64_t); break;
    case TY_I32: WIDEN(int32_t); break;
    case TY_I16: WIDEN(int16_t); break;
    case TY_I8: WIDEN(int8_t); break;
    default: WIDEN(uint8_t);
  }
}

static void store_whole(void *out, const int64_t *x, int64_t n, ty_dtype dtype) {
  switch (dtype) {
    case TY_I64: NARROW(int64_t); break;
    case TY_I32: NARROW(int32_t); break;
    case TY_I16: NARROW(int16_t); break;
    case TY_I8: NARROW(int8_t); break;
    default: NARROW(uint8_t);
  }
}

static void load_float(float *out, const void *x, int64_t n, ty_dtype dtype) {
  if (dtype == TY_F16) ty_f16_load(out, x, n);
  else if (dtype == TY_BF16) ty_bf16_load(out, x, n);
  else WIDEN(float);
}

static void store_float(void *out, const float *x, int64_t n, ty_dtype dtype) {
  if (dtype == TY_F16) ty_f16_store(out, x, n);
  else if (dtype == TY_BF16) ty_bf16_store(out, x, n);
  else NARROW(float);
}

/* One piece: `out` may be one of the x. */
static void reduce_piece(void *out, const void *const *x, int n, int64_t at, int64_t count, ty_dtype dtype,
                         ty_reduction reduction) {
  union {
    double d[PIECE];
    float f[PIECE];
    int64_t i[PIECE];
  } acc, next;
  size_t offset = (size_t)at * ty_dtype_size[dtype];
  bool mean = reduction == TY_REDUCE_MEAN, real = dtype == TY_F32 || ty_is_half(dtype);
  for (int r = 0; r < n; r++) {
    const void *from = (const char *)x[r] + offset;
    if (dtype == TY_F64) memcpy(r ? next.d : acc.d, from, sizeof(double) * (size_t)count);
    else if (real) load_float(r ? next.f : acc.f, from, count, dtype);
    else load_whole(r ? next.i : acc.i, from, count, dtype);
    if (!r) continue;
    if (dtype == TY_F64) accumulate_f64(acc.d, next.d, count, reduction);
    else if (real) accumulate_f32(acc.f, next.f, count, reduction);
    else accumulate_i64(acc.i, next.i, count, reduction);
  }
  for (int64_t i = 0; mean && i < count; i++) {
    if (dtype == TY_F64) acc.d[i] /= n;
    else acc.f[i] /= (float)n;
  }
  void *to = (char *)out + offset;
  if (dtype == TY_F64) memcpy(to, acc.d, sizeof(double) * (size_t)count);
  else if (real) store_float(to, acc.f, count, dtype);
  else store_whole(to, acc.i, count, dtype);
}

void ty_reduce_divide(void *x, int n, int64_t count, ty_dtype dtype) {
  float piece[PIECE];
  if (dtype == TY_F64) {
    for (int64_t i = 0; i < count; i++) ((double *)x)[i] /= n;
    return;
  }
  for (int64_t at = 0; at < count; at += PIECE) {
    int64_t part = count - at < PIECE ? count - at : PIECE;
    char *here = (char *)x + (size_t)at * ty_dtype_size[dtype];
    load_float(piece, here, part, dtype);
    for (int64_t i = 0; i < part; i++) piece[i] /= (float)n;
    store_float(here, piece, part, dtype);
  }
}

void ty_reduce(void *out, const void *const *x, int n, int64_t count, ty_dtype dtype, ty_reduction reduction) {
  for (int64_t at = 0; at < count; at += PIECE)
    reduce_piece(out, x, n, at, count - at < PIECE ? count - at : PIECE, dtype, reduction);
}
