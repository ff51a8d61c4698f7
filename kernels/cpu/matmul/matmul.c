/* Batched matrix products [batch..., m, k] x [batch..., k, n], and what linear layers do to them. */
#include "gemm.h"

ty_kernel TY_KERNEL(matmul);

typedef struct batch {
  const ty_view *a, *b, *out;
  const void *bias, *residual;
  ty_activation activation;
  struct ty_storage *weights; /* of one b for all */
  bool failed;
} batch;

/* Where matrix `index` of the batch begins, in bytes from the first. */
static int64_t matrix_offset(const ty_view *v, const ty_view *shape, int64_t index) {
  int64_t at = 0;
  for (int d = shape->ndim - 3; d >= 0; d--) {
    at += index % shape->size[d] * v->stride[d];
    index /= shape->size[d];
  }
  return at * ty_dtype_size[v->dtype];
}

static ty_gemm product(const batch *p, int64_t index) {
  const ty_view *a = p->a, *b = p->b, *out = p->out;
  int d = out->ndim;
  int64_t at = index * out->size[d - 2] * out->size[d - 1] * ty_dtype_size[out->dtype];
  ty_dtype half = ty_is_half((ty_dtype)out->dtype) ? (ty_dtype)out->dtype : 0;
  return (ty_gemm){
    .m = out->size[d - 2],
    .n = out->size[d - 1],
    .k = a->size[d - 1],
    .a = (const char *)a->data + matrix_offset(a, out, index),
    .a_row = a->stride[d - 2],
    .a_col = a->stride[d - 1],
    .b = (const char *)b->data + matrix_offset(b, out, index),
    .b_row = b->stride[d - 2],
    .b_col = b->stride[d - 1],
    .c = (char *)out->data + at,
    .c_row = out->size[d - 1],
    .bias = p->bias,
    .activation = p->activation,
    .residual = p->residual ? (const char *)p->residual + at : NULL,
    .residual_row = out->size[d - 1],
    .half = half,
    .c_half = half,
    .weights = p->weights,
  };
}

static void float_batch(void *context, int64_t begin, int64_t end) {
  batch *p = context;
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    ty_gemm g = product(p, i);
    if (!ty_gemm_run((ty_dtype)p->out->dtype, &g)) p->failed = true;
  }
}

/* Integers wrap around, so they are multiplied as unsigned numbers. */
#define INTEGER_ROWS(name, type, unsigned_type)                                                                     \
  static void name(void *context, int64_t begin, int64_t end) {                                                     \
    const batch *p = context;                                                                                       \
    int64_t m = p->out->size[p->out->ndim - 2];                                                                     \
    for (int64_t r = begin; r < end && !ty_interrupted; r++) {                                                      \
      ty_gemm g = product(p, r / m);                                                                                \
      type *restrict c = (type *)g.c + r % m * g.n;                                                                 \
      for (int64_t j = 0; j < g.n; j++) c[j] = 0;                                                                   \
      for (int64_t k = 0; k < g.k; k++) {                                                                           \
        unsigned_type x = (unsigned_type)((const type *)g.a)[r % m * g.a_row + k * g.a_col];                        \
        const type *restrict b = (const type *)g.b + k * g.b_row;                                                   \
        if (g.b_col == 1) {                                                                                         \
          for (int64_t j = 0; j < g.n; j++) c[j] = (type)((unsigned_type)c[j] + x * (unsigned_type)b[j]);           \
        } else {                                                                                                    \
          for (int64_t j = 0; j < g.n; j++) c[j] = (type)((unsigned_type)c[j] + x * (unsigned_type)b[j * g.b_col]); \
        }                                                                                                           \
      }                                                                                                             \
    }                                                                                                               \
  }
INTEGER_ROWS(rows_u8, uint8_t, unsigned)
INTEGER_ROWS(rows_i8, int8_t, unsigned)
INTEGER_ROWS(rows_i16, int16_t, unsigned)
INTEGER_ROWS(rows_i32, int32_t, unsigned)
INTEGER_ROWS(rows_i64, int64_t, uint64_t)

bool TY_KERNEL(matmul)(const ty_kernel_args *k) {
  const ty_view *out = k->out[0];
  const ty_p_activation *params = k->params;
  batch p = { .a = k->in[0],
              .b = k->in[1],
              .out = out,
              .bias = k->nin > 2 && k->in[2] ? k->in[2]->data : NULL,
              .residual = k->nin > 3 && k->in[3] ? k->in[3]->data : NULL,
              .activation = params ? params->activation : TY_NO_ACTIVATION,
              .weights = out->ndim == 2 ? k->weights : NULL };
  if (out->count == 0) return true;
  int d = out->ndim;
  int64_t m = out->size[d - 2], n = out->size[d - 1], depth = p.a->size[d - 1], count = out->count / (m * n);
  if (!ty_is_float((ty_dtype)out->dtype)) {
    int64_t grain = 1 + 65536 / (n * depth + 1);
    switch (out->dtype) {
      case TY_U8: ty_parallel_for(count * m, grain, rows_u8, &p); break;
      case TY_I8: ty_parallel_for(count * m, grain, rows_i8, &p); break;
      case TY_I16: ty_parallel_for(count * m, grain, rows_i16, &p); break;
      case TY_I32: ty_parallel_for(count * m, grain, rows_i32, &p); break;
      case TY_I64: ty_parallel_for(count * m, grain, rows_i64, &p); break;
      default: return ty_fail(TY_EUNSUPPORTED, "matmul: no kernel for %s", ty_dtype_name[out->dtype]);
    }
    return true;
  }
  /* Several products are shared out whole, unless there are few and each is large enough to be split itself. */
  double work = (double)m * (double)n * (double)depth;
  if (count > 1 && (work < 4e6 || count >= 4 * ty_parallel_threads())) {
    ty_parallel_for(count, 1 + (int64_t)(2e5 / (work + 1)), float_batch, &p);
  } else {
    float_batch(&p, 0, count);
  }
  return p.failed ? ty_fail(TY_ENOMEM, "matmul: out of memory") : true;
}
