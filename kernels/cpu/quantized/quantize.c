/* Encoding into block-quantized formats, piece by piece of rows. */
#include <string.h>

#include "../../quant_importance.h"
#include "../cpu.h"

typedef struct job {
  ty_dtype dtype;
  const float *from, *importance; /* of columns, or NULL */
  char *to;
  int64_t columns, row_bytes, pieces;
} job;

enum { PIECE = 64 * TY_NF4_GROUP }; /* elements encoded at a time */

#define ENCODE(type)                                      \
  do {                                                    \
    ty_encode_##type(x, to);                              \
    if (importance) ty_improve_##type(x, importance, to); \
  } while (0)

static void encode_block(ty_dtype dtype, const float *x, const float *importance, void *to) {
  switch (dtype) {
    case TY_Q8_0: ty_encode_q8_0(x, to); break;
    case TY_Q4_0: ENCODE(q4_0); break;
    case TY_Q2_K: ENCODE(q2_k); break;
    case TY_Q3_K: ENCODE(q3_k); break;
    case TY_MXFP4: ENCODE(mxfp4); break;
    case TY_Q4_K: ENCODE(q4_k); break;
    default: ENCODE(q6_k);
  }
}

/* Rows of NVFP4: their factor is that of the whole row. */
static void encode_nvfp4_rows(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  for (int64_t row = begin; row < end; row++) {
    const float *x = j->from + row * j->columns;
    char *to = j->to + row * j->row_bytes;
    ty_nvfp4 *blocks = (ty_nvfp4 *)(void *)(to + TY_NVFP4_HEAD);
    float most = 0;
    for (int64_t at = 0; at < j->columns; at += 64) {
      float here = fabsf(ty_extreme(x + at, 64));
      if (most == most && !(here <= most)) most = here;
    }
    float factor = ty_nvfp4_unit(most);
    memcpy(to, &factor, sizeof factor);
    for (int64_t b = 0; b < j->columns / 64; b++) {
      ty_encode_nvfp4(x + 64 * b, factor, blocks + b);
      if (j->importance) ty_improve_nvfp4(x + 64 * b, j->importance + 64 * b, factor, blocks + b);
    }
  }
}

static void encode_pieces(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  for (int64_t i = begin; i < end; i++) {
    int64_t row = i / j->pieces, at = i % j->pieces * PIECE, left = j->columns - at, n = left < PIECE ? left : PIECE;
    const float *x = j->from + row * j->columns + at;
    char *to = j->to + row * j->row_bytes;
    if (j->dtype == TY_NF4) {
      ty_nf4 *blocks = (ty_nf4 *)(void *)(to + ty_nf4_head(j->columns));
      float unit = ty_nf4_unit(fabsf(ty_extreme(x, (int)n)));
      memcpy(to + at / PIECE * (int64_t)sizeof unit, &unit, sizeof unit);
      for (int64_t b = 0; b < n / 64; b++) ty_encode_nf4(x + 64 * b, unit, blocks + at / 64 + b);
      continue;
    }
    to += at / ty_dtype_block[j->dtype] * ty_dtype_size[j->dtype];
    const float *importance = j->importance ? j->importance + at : NULL;
    for (; n > 0; n -= ty_dtype_block[j->dtype], x += ty_dtype_block[j->dtype], to += ty_dtype_size[j->dtype]) {
      encode_block(j->dtype, x, importance, to);
      if (importance) importance += ty_dtype_block[j->dtype];
    }
  }
}

bool TY_KERNEL(quantize)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *out = k->out[0];
  if (!out->count) return true;
  int64_t columns = x->size[x->ndim - 1];
  job j = { .dtype = (ty_dtype)out->dtype,
            .from = x->data,
            .importance = k->nin > 1 && k->in[1] ? k->in[1]->data : NULL,
            .to = out->data,
            .columns = columns,
            .row_bytes = ty_row_bytes((ty_dtype)out->dtype, columns),
            .pieces = (columns + PIECE - 1) / PIECE };
  if (j.dtype == TY_NVFP4) return ty_parallel_for(x->count / columns, 1 + 4096 / columns, encode_nvfp4_rows, &j), true;
  ty_parallel_for(x->count / columns * j.pieces, 1 + 4096 / columns, encode_pieces, &j);
  return true;
}
