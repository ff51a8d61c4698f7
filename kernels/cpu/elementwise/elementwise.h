/* Drives the loops of elementwise kernels over any views: dimensions are merged, the work is split over the threads,
 * and what a loop cannot read in place (strided, half precision, a truth value of another dtype) is staged in blocks
 * that stay in the first-level cache. A loop therefore knows contiguous elements and repeated single ones only. */
#ifndef TY_KERNELS_CPU_ELEMENTWISE_H
#define TY_KERNELS_CPU_ELEMENTWISE_H

#include <string.h>
#include "../../half.h"
#include "../cpu.h"
#include "../stream.h"
#include "../transpose.h"

enum {
  EW_BLOCK = 1024,  /* elements staged at once */
  EW_GRAIN = 32768, /* elements worth a thread */
  EW_TILE = 16,     /* rows of a transposed tile: a cache line of f32 */
  EW_SHORT = 16,    /* inner dimensions below this are staged across rows */
  EW_OPERANDS = 4   /* the output and up to three inputs */
};

/* Bit i of `repeated`: input i is one element for all n. False: division by zero. */
typedef bool ew_loop(void *out, const void *const *in, int64_t n, int repeated, const void *params);

/* The numbers of a loop that has them, as X. */
#define SCALARS                     \
  const ty_p_scalars *s = params;   \
  const X a = (X)s->a, b = (X)s->b; \
  (void)a, (void)b;

/* How an operand's elements become those the loop computes with. */
enum { EW_PLAIN, EW_HALF, EW_TRUTH };

typedef struct ew_op {
  ew_loop *loop;
  int nin;
  int repeats;              /* inputs that the loop takes repeated */
  uint8_t how[EW_OPERANDS]; /* output first */
  uint8_t dtype[EW_OPERANDS];
  const void *params;
} ew_op;

typedef struct ew_plan {
  const ew_op *op;
  int ndim;
  int64_t size[TY_MAX_DIMS + 2];
  int64_t stride[EW_OPERANDS][TY_MAX_DIMS + 2]; /* bytes */
  char *data[EW_OPERANDS];
  int bytes[EW_OPERANDS]; /* of an element in memory */
  bool flat[EW_OPERANDS]; /* contiguous in the order of iteration */
  bool repeated[EW_OPERANDS];
  bool tiled[EW_OPERANDS]; /* unit stride in the last but one dimension instead of the last */
  int64_t rows, columns;   /* of one unit of work */
  int64_t block;           /* elements staged at once */
  bool stream;             /* the result goes past the caches */
  bool failed;
} ew_plan;

/* ---- staging ---- */

/* Elements `stride` bytes apart, next to each other; the strides of one of the two sides are fixed. */
static __attribute__((unused)) void ew_gather(char *restrict out, const char *restrict in, int64_t stride, int bytes,
                                              int64_t n) {
  switch (bytes) {
    case 1:
      for (int64_t i = 0; i < n; i++) out[i] = in[i * stride];
      break;
    case 2:
      for (int64_t i = 0; i < n; i++) ((uint16_t *)(void *)out)[i] = *(const uint16_t *)(const void *)(in + i * stride);
      break;
    case 4:
      for (int64_t i = 0; i < n; i++) ((uint32_t *)(void *)out)[i] = *(const uint32_t *)(const void *)(in + i * stride);
      break;
    default:
      for (int64_t i = 0; i < n; i++) ((uint64_t *)(void *)out)[i] = *(const uint64_t *)(const void *)(in + i * stride);
      break;
  }
}

static __attribute__((unused)) void ew_scatter(char *restrict out, int64_t stride, const char *restrict in, int bytes,
                                               int64_t n) {
  switch (bytes) {
    case 1:
      for (int64_t i = 0; i < n; i++) out[i * stride] = in[i];
      break;
    case 2:
      for (int64_t i = 0; i < n; i++) *(uint16_t *)(void *)(out + i * stride) = ((const uint16_t *)(const void *)in)[i];
      break;
    case 4:
      for (int64_t i = 0; i < n; i++) *(uint32_t *)(void *)(out + i * stride) = ((const uint32_t *)(const void *)in)[i];
      break;
    default:
      for (int64_t i = 0; i < n; i++) *(uint64_t *)(void *)(out + i * stride) = ((const uint64_t *)(const void *)in)[i];
      break;
  }
}

/* out[r][c] = in[c * stride + r] */
static void ew_transpose(void *out, const void *in, int64_t stride, int bytes, int64_t rows, int64_t columns) {
  switch (bytes) {
    case 1: ty_transpose_uint8_t(out, columns, in, stride, rows, columns); break;
    case 2: ty_transpose_uint16_t(out, columns, in, stride / 2, rows, columns); break;
    case 4: ty_transpose_uint32_t(out, columns, in, stride / 4, rows, columns); break;
    default: ty_transpose_uint64_t(out, columns, in, stride / 8, rows, columns); break;
  }
}

/* Elements as truth values: not equal to zero, which for floats is all bits but the sign. */
static void ew_truth(uint8_t *restrict out, const void *restrict in, ty_dtype dtype, int64_t n) {
#define EW_TRUTH_OF(type, mask) \
  for (int64_t i = 0; i < n; i++) out[i] = (((const type *)in)[i] & (mask)) != 0;
  switch (dtype) {
    case TY_F16:
    case TY_BF16: EW_TRUTH_OF(uint16_t, 0x7fff) break;
    case TY_F32: EW_TRUTH_OF(uint32_t, 0x7fffffffu) break;
    case TY_F64: EW_TRUTH_OF(uint64_t, 0x7fffffffffffffffu) break;
    case TY_I16: EW_TRUTH_OF(uint16_t, 0xffff) break;
    case TY_I32: EW_TRUTH_OF(uint32_t, 0xffffffffu) break;
    case TY_I64: EW_TRUTH_OF(uint64_t, ~(uint64_t)0) break;
    default: EW_TRUTH_OF(uint8_t, 0xff) break;
  }
#undef EW_TRUTH_OF
}

static void ew_fill(char *out, int bytes, int64_t n) { /* repeats the first element */
  switch (bytes) {
    case 1: memset(out, *(uint8_t *)out, (size_t)n); break;
    case 2:
      for (int64_t i = 1; i < n; i++) ((uint16_t *)(void *)out)[i] = *(uint16_t *)(void *)out;
      break;
    case 4:
      for (int64_t i = 1; i < n; i++) ((uint32_t *)(void *)out)[i] = *(uint32_t *)(void *)out;
      break;
    default:
      for (int64_t i = 1; i < n; i++) ((uint64_t *)(void *)out)[i] = *(uint64_t *)(void *)out;
      break;
  }
}

typedef struct ew_buffers {
  _Alignas(64) char value[EW_OPERANDS][EW_BLOCK * 8];
  _Alignas(64) char raw[EW_BLOCK * 8];
  _Alignas(64) char tile[EW_OPERANDS][EW_BLOCK * 8]; /* cold unless an operand is transposed */
} ew_buffers;

static inline int ew_value_bytes(const ew_plan *p, int i) {
  return p->op->how[i] == EW_HALF ? 4 : p->op->how[i] == EW_TRUTH ? 1 : p->bytes[i];
}

/* Contiguous elements in memory to elements for the loop. */
static void ew_convert(const ew_plan *p, int i, char *out, const char *in, int64_t n) {
  ty_dtype dtype = (ty_dtype)p->op->dtype[i];
  if (p->op->how[i] == EW_HALF) ty_half_load(dtype, (float *)(void *)out, in, n);
  else ew_truth((uint8_t *)out, in, dtype, n);
}

static const char *ew_load(const ew_plan *p, int i, ew_buffers *b, const char *in, int64_t stride, int64_t n) {
  bool plain = p->op->how[i] == EW_PLAIN;
  if (stride != p->bytes[i]) {
    char *to = plain ? b->value[i] : b->raw;
    ew_gather(to, in, stride, p->bytes[i], n);
    in = to;
  }
  if (plain) return in;
  ew_convert(p, i, b->value[i], in, n);
  return b->value[i];
}

static void ew_store(const ew_plan *p, ew_buffers *b, char *out, int64_t stride, int64_t n) {
  const char *value = b->value[0];
  bool next = stride == p->bytes[0];
  if (p->op->how[0] == EW_HALF) {
    char *to = next && !p->stream ? out : b->raw;
    ty_half_store((ty_dtype)p->op->dtype[0], to, (const float *)(const void *)value, n);
    value = b->raw;
    if (to == out) return;
  }
  if (next) stream_copy(out, value, (size_t)(n * p->bytes[0]));
  else ew_scatter(out, stride, value, p->bytes[0], n);
}

/* ---- one row ---- */

static bool ew_row(const ew_plan *p, ew_buffers *b, char *const *at, const int64_t *stride, int64_t n) {
  const ew_op *op = p->op;
  const void *in[EW_OPERANDS - 1];
  int staged = 0, repeated = 0, all = (1 << op->nin) - 1;
  for (int i = 0; i < op->nin; i++)
    if (stride[i + 1] == 0 && (op->repeats >> i & 1)) repeated |= 1 << i;
  if (repeated == all && op->nin > 1) repeated &= ~1;
  for (int i = 1; i <= op->nin; i++) {
    in[i - 1] = at[i];
    if (stride[i] == 0 && n > 1) { /* converted once, and repeated in the block unless the loop does that */
      char *value = b->value[i];
      if (op->how[i] == EW_PLAIN) memcpy(value, at[i], (size_t)p->bytes[i]);
      else ew_convert(p, i, value, at[i], 1);
      if (!(repeated >> (i - 1) & 1)) {
        ew_fill(value, ew_value_bytes(p, i), n < p->block ? n : p->block);
        staged |= 1; /* the loop may run over one block only */
      }
      in[i - 1] = value;
    } else if (stride[i] != p->bytes[i] || op->how[i] != EW_PLAIN) {
      staged |= 1 << i;
    }
  }
  bool store = stride[0] != p->bytes[0] || op->how[0] != EW_PLAIN || p->stream;
  if (!staged && !store) return op->loop(at[0], in, n, repeated, op->params);
  /* What goes past the caches does so in whole lines: blocks begin with one, but for the first. */
  int64_t m = p->stream ? p->block - (int64_t)((uintptr_t)at[0] % STREAM_LINE) / p->bytes[0] : p->block;
  for (int64_t done = 0; done < n; done += m, m = p->block) {
    if (m > n - done) m = n - done;
    for (int i = 1; i <= op->nin; i++) {
      if (staged >> i & 1) in[i - 1] = ew_load(p, i, b, at[i] + done * stride[i], stride[i], m);
      else if (stride[i]) in[i - 1] = at[i] + done * stride[i];
    }
    char *out = at[0] + done * stride[0];
    if (!op->loop(store ? b->value[0] : out, in, m, repeated, op->params)) return false;
    if (store) ew_store(p, b, out, stride[0], m);
  }
  return true;
}

/* ---- units of rows x columns of the last two dimensions ---- */

static __attribute__((unused)) void ew_units(void *context, int64_t begin, int64_t end) {
  ew_plan *p = context;
  ew_buffers b;
  int nop = p->op->nin + 1, last = p->ndim - 1;
  int64_t per_row = (p->size[last] + p->columns - 1) / p->columns;
  int64_t per_plane = (p->size[last - 1] + p->rows - 1) / p->rows;
  int64_t c = begin % per_row, r = begin / per_row % per_plane, outer = begin / per_row / per_plane;
  int64_t index[TY_MAX_DIMS + 2] = { 0 };
  int64_t inner[EW_OPERANDS];
  char *base[EW_OPERANDS], *at[EW_OPERANDS];
  for (int i = 0; i < nop; i++) base[i] = p->data[i], inner[i] = p->tiled[i] ? p->bytes[i] : p->stride[i][last];
  for (int d = last - 2; d >= 0; d--) {
    index[d] = outer % p->size[d], outer /= p->size[d];
    for (int i = 0; i < nop; i++) base[i] += index[d] * p->stride[i][d];
  }
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t column = c * p->columns, row = r * p->rows;
    int64_t columns = p->size[last] - column < p->columns ? p->size[last] - column : p->columns;
    int64_t rows = p->size[last - 1] - row < p->rows ? p->size[last - 1] - row : p->rows;
    for (int i = 1; i < nop; i++)
      if (p->tiled[i])
        ew_transpose(b.tile[i], base[i] + row * p->bytes[i] + column * p->stride[i][last], p->stride[i][last],
                     p->bytes[i], rows, columns);
    for (int64_t j = 0; j < rows; j++) {
      for (int i = 0; i < nop; i++)
        at[i] = p->tiled[i] ? b.tile[i] + j * columns * p->bytes[i]
                            : base[i] + (row + j) * p->stride[i][last - 1] + column * p->stride[i][last];
      if (!ew_row(p, &b, at, inner, columns)) {
        __atomic_store_n(&p->failed, true, __ATOMIC_RELAXED);
        return;
      }
    }
    if (++c < per_row) continue;
    c = 0;
    if (++r < per_plane) continue;
    r = 0;
    for (int d = last - 2; d >= 0; d--) {
      for (int i = 0; i < nop; i++) base[i] += p->stride[i][d];
      if (++index[d] < p->size[d]) break;
      for (int i = 0; i < nop; i++) base[i] -= p->size[d] * p->stride[i][d];
      index[d] = 0;
    }
  }
  if (p->stream) stream_end();
}

/* ---- blocks across short rows ---- */

/* Visits elements [begin, begin + n) of operand i row by row, copying to or from the block. */
static void ew_walk(const ew_plan *p, int i, int64_t begin, int64_t n, char *block, bool store) {
  int64_t index[TY_MAX_DIMS + 2], rest = begin;
  int last = p->ndim - 1, bytes = p->bytes[i];
  char *at = p->data[i];
  for (int d = last; d >= 0; d--) {
    index[d] = rest % p->size[d], rest /= p->size[d];
    at += index[d] * p->stride[i][d];
  }
  int64_t stride = p->stride[i][last];
  while (n > 0) {
    int64_t m = p->size[last] - index[last];
    if (m > n) m = n;
    if (store) ew_scatter(at, stride, block, bytes, m);
    else ew_gather(block, at, stride, bytes, m);
    block += m * bytes, n -= m, at -= index[last] * stride, index[last] = 0;
    for (int d = last - 1; d >= 0; d--) {
      at += p->stride[i][d];
      if (++index[d] < p->size[d]) break;
      at -= p->size[d] * p->stride[i][d], index[d] = 0;
    }
  }
}

static __attribute__((unused)) void ew_blocks(void *context, int64_t begin, int64_t end) {
  ew_plan *p = context;
  ew_buffers b;
  int nop = p->op->nin + 1;
  for (; begin < end; begin += EW_BLOCK) {
    int64_t n = end - begin < EW_BLOCK ? end - begin : EW_BLOCK, stride[EW_OPERANDS];
    char *at[EW_OPERANDS];
    for (int i = 0; i < nop; i++) {
      stride[i] = p->repeated[i] ? 0 : p->bytes[i];
      at[i] = p->flat[i] || p->repeated[i] ? p->data[i] + begin * stride[i] : b.tile[i];
      if (i > 0 && at[i] == b.tile[i]) ew_walk(p, i, begin, n, at[i], false);
    }
    if (!ew_row(p, &b, at, stride, n)) {
      __atomic_store_n(&p->failed, true, __ATOMIC_RELAXED);
      return;
    }
    if (at[0] == b.tile[0]) ew_walk(p, 0, begin, n, at[0], true);
  }
  if (p->stream) stream_end();
}

/* ---- planning ---- */

static void ew_merge_dims(ew_plan *p, const ty_view *const *view, int nop) {
  const ty_view *shape = view[0];
  p->ndim = 0;
  for (int d = 0; d < shape->ndim; d++) {
    int64_t size = shape->size[d];
    if (size == 1) continue;
    bool merge = p->ndim > 0;
    for (int i = 0; i < nop && merge; i++) merge = p->stride[i][p->ndim - 1] == view[i]->stride[d] * p->bytes[i] * size;
    int to = merge ? p->ndim - 1 : p->ndim++;
    p->size[to] = merge ? p->size[to] * size : size;
    for (int i = 0; i < nop; i++) p->stride[i][to] = view[i]->stride[d] * p->bytes[i];
  }
  while (p->ndim < 2) { /* the units have two dimensions at least */
    for (int d = p->ndim; d > 0; d--) {
      p->size[d] = p->size[d - 1];
      for (int i = 0; i < nop; i++) p->stride[i][d] = p->stride[i][d - 1];
    }
    p->size[0] = 1, p->ndim++;
    for (int i = 0; i < nop; i++) p->stride[i][0] = p->ndim == 1 ? p->bytes[i] : 0;
  }
}

/* When an input runs along another dimension than the last, that one becomes the last but one. */
static void ew_find_tiles(ew_plan *p, int nop) {
  int last = p->ndim - 1, turned = -1;
  for (int i = 1; i < nop && turned < 0; i++)
    if (p->stride[i][last] != 0 && p->stride[i][last] != p->bytes[i])
      for (int d = 0; d < last; d++)
        if (p->stride[i][d] == p->bytes[i] && p->size[d] >= EW_TILE) turned = d;
  if (turned < 0) return;
  for (int d = turned; d + 1 < last; d++) {
    int64_t size = p->size[d];
    p->size[d] = p->size[d + 1], p->size[d + 1] = size;
    for (int i = 0; i < nop; i++) {
      int64_t stride = p->stride[i][d];
      p->stride[i][d] = p->stride[i][d + 1], p->stride[i][d + 1] = stride;
    }
  }
  for (int i = 1; i < nop; i++)
    p->tiled[i] = p->stride[i][last] != 0 && p->stride[i][last] != p->bytes[i] && p->stride[i][last - 1] == p->bytes[i];
  p->rows = EW_TILE, p->columns = EW_BLOCK / EW_TILE;
}

static __attribute__((noinline, unused)) bool ew_run_any(const ew_op *op, const ty_kernel_args *k) {
  const ty_view *view[EW_OPERANDS];
  ew_plan p = { .op = op, .rows = 1, .columns = EW_GRAIN, .block = EW_BLOCK };
  int nop = op->nin + 1;
  int64_t count = k->out[0]->count;
  if (count == 0) return true;
  for (int i = 0; i < nop; i++) {
    view[i] = i ? k->in[i - 1] : k->out[0];
    p.data[i] = view[i]->data, p.bytes[i] = ty_dtype_size[view[i]->dtype];
    if (i == 0) p.stream = view[0]->contiguous && stream_pays(count * p.bytes[0]);
    else if (p.data[i] == p.data[0]) p.stream = false; /* in place: the lines are in the cache */
  }
  if (p.stream) p.block = STREAM_BLOCK / p.bytes[0];
  ew_merge_dims(&p, view, nop);
  int last = p.ndim - 1;
  if (p.size[last] < EW_SHORT && count > p.size[last]) {
    for (int i = 0; i < nop; i++) {
      p.flat[i] = view[i]->contiguous, p.repeated[i] = true;
      for (int d = 0; d < p.ndim; d++) p.repeated[i] = p.repeated[i] && p.stride[i][d] == 0;
    }
    ty_parallel_for(count, EW_GRAIN, ew_blocks, &p);
  } else {
    ew_find_tiles(&p, nop);
    int64_t units = (p.size[last] + p.columns - 1) / p.columns * ((p.size[last - 1] + p.rows - 1) / p.rows);
    for (int d = 0; d < last - 1; d++) units *= p.size[d];
    int64_t columns = p.size[last] < p.columns ? p.size[last] : p.columns;
    int64_t rows = p.size[last - 1] < p.rows ? p.size[last - 1] : p.rows;
    ty_parallel_for(units, EW_GRAIN / (rows * columns), ew_units, &p);
  }
  return p.failed ? ty_fail(TY_EINVAL, "integer division by zero") : true;
}

static inline bool ew_repeated(const ty_view *v) {
  for (int d = 0; d < v->ndim; d++)
    if (v->stride[d] != 0 && v->size[d] != 1) return false;
  return true;
}

/* Small contiguous operands (or single repeated ones) go straight to the loop. */
static inline bool ew_run(const ew_op *op, const ty_kernel_args *k) {
  const ty_view *out = k->out[0];
  const void *in[EW_OPERANDS - 1];
  int repeated = 0;
  bool direct = out->contiguous && out->count <= EW_GRAIN && op->how[0] == EW_PLAIN;
  for (int i = 0; i < op->nin && direct; i++) {
    const ty_view *v = k->in[i];
    in[i] = v->data;
    direct = op->how[i + 1] == EW_PLAIN;
    if (v->contiguous || !direct) continue;
    repeated |= 1 << i;
    direct = (op->repeats >> i & 1) && ew_repeated(v);
  }
  if (!direct || (repeated && repeated == (1 << op->nin) - 1)) return ew_run_any(op, k);
  return op->loop(out->data, in, out->count, repeated, op->params) || ty_fail(TY_EINVAL, "integer division by zero");
}

#endif
