/* Copies between layouts and dtypes, and constants: copy, fill, arange, flip, tril, triu. */
#include <math.h>
#include <string.h>

#include "../../half.h"
#include "../cpu.h"
#include "../stream.h"
#include "../transpose.h"

enum { BLOCK = 512, TILE = 32, GRAIN = 32768, LINE = 64 };

/* ---- the loop over two strided views ---- */

/* Dimensions of both views, neighbours merged where both are one run, sizes of 1 left out. */
typedef struct walk {
  int n;
  int64_t size[TY_MAX_DIMS], out[TY_MAX_DIMS], in[TY_MAX_DIMS];
  char *to;
  const char *from;
  ty_dtype out_dtype, in_dtype;
  int64_t rows; /* product of all sizes but the last */
  bool stream;  /* the result goes past the caches */
} walk;

static void add_dim(walk *w, int64_t size, int64_t out, int64_t in) {
  if (size == 1) return;
  int last = w->n - 1;
  if (w->n && w->out[last] == out * size && w->in[last] == in * size) {
    w->size[last] *= size;
    w->out[last] = out;
    w->in[last] = in;
    return;
  }
  w->size[w->n] = size;
  w->out[w->n] = out;
  w->in[w->n++] = in;
}

static void plan(walk *w, const ty_view *out, const ty_view *in) {
  *w = (walk){
    .to = out->data, .from = in->data, .out_dtype = (ty_dtype)out->dtype, .in_dtype = (ty_dtype)in->dtype, .rows = 1
  };
  for (int d = 0; d < out->ndim; d++) add_dim(w, out->size[d], out->stride[d], in->stride[d]);
  if (!w->n) w->size[w->n] = 1, w->out[w->n] = 1, w->in[w->n++] = 1;
  for (int d = 0; d < w->n - 1; d++) w->rows *= w->size[d];
  int bytes = ty_dtype_size[out->dtype];
  w->stream = w->out[w->n - 1] == 1 && w->size[w->n - 1] * bytes >= 2 * LINE && stream_pays(out->count * bytes);
}

static void row_offsets(const walk *w, int64_t row, int64_t *out, int64_t *in) {
  *out = *in = 0;
  for (int d = w->n - 2; d >= 0; d--) {
    int64_t i = row % w->size[d];
    row /= w->size[d];
    *out += i * w->out[d];
    *in += i * w->in[d];
  }
}

/* ---- elements of one size, moved ---- */

#define MOVE(type)                                                                                            \
  static void move_##type(type *restrict to, int64_t out, const type *restrict from, int64_t in, int64_t n) { \
    if (out == 1 && in == 1) {                                                                                \
      memcpy(to, from, (size_t)n * sizeof *to);                                                               \
    } else if (out == 1 && in == 0) {                                                                         \
      type x = *from;                                                                                         \
      for (int64_t i = 0; i < n; i++) to[i] = x;                                                              \
    } else if (out == -1 && in == 1) { /* mirrored: forwards in the output, as vectors do it */               \
      type *restrict first = to - (n - 1);                                                                    \
      /* The next row, which begins at its end: the hardware does not foresee that. */                        \
      for (int64_t i = 0; i < n; i += LINE / (int64_t)sizeof *to) __builtin_prefetch(from + n + i);           \
      for (int64_t i = 0; i < n; i++) first[i] = from[n - 1 - i];                                             \
    } else if (out == 1) {                                                                                    \
      for (int64_t i = 0; i < n; i++) to[i] = from[i * in];                                                   \
    } else {                                                                                                  \
      for (int64_t i = 0; i < n; i++) to[i * out] = from[i * in];                                             \
    }                                                                                                         \
  }

/* A tile goes through a buffer, so that neither side's lines are needed twice. Its rows in `from` are too far apart for
 * the hardware to foresee, so the next tile (`ahead` elements on) is asked for. */
#define TURN(type)                                                                                                  \
  static void turn_##type(type *to, int64_t out, const type *from, int64_t in, int64_t rows, int64_t columns,       \
                          int64_t ahead, bool stream) {                                                             \
    type tile[TILE * TILE];                                                                                         \
    for (int64_t j = 0; j < columns && ahead; j++)                                                                  \
      for (int64_t i = 0; i < rows; i += LINE / (int64_t)sizeof *to) __builtin_prefetch(from + ahead + j * in + i); \
    ty_transpose_##type(tile, TILE, from, in, rows, columns);                                                       \
    if (stream)                                                                                                     \
      for (int64_t i = 0; i < rows; i++) stream_copy(to + i * out, tile + i * TILE, (size_t)columns * sizeof *to);  \
    else if (columns == TILE)                                                                                       \
      for (int64_t i = 0; i < rows; i++) memcpy(to + i * out, tile + i * TILE, TILE * sizeof *to);                  \
    else                                                                                                            \
      for (int64_t i = 0; i < rows; i++) memcpy(to + i * out, tile + i * TILE, (size_t)columns * sizeof *to);       \
  }

MOVE(uint8_t)
MOVE(uint16_t)
MOVE(uint32_t)
MOVE(uint64_t)
TURN(uint8_t)
TURN(uint16_t)
TURN(uint32_t)
TURN(uint64_t)

static void move(int size, char *to, int64_t out, const char *from, int64_t in, int64_t n) {
  void *t = to;
  const void *f = from;
  switch (size) {
    case 1: move_uint8_t(t, out, f, in, n); return;
    case 2: move_uint16_t(t, out, f, in, n); return;
    case 4: move_uint32_t(t, out, f, in, n); return;
    default: move_uint64_t(t, out, f, in, n);
  }
}

/* ---- dtypes converted through blocks of f32, f64 or i64 ---- */

typedef enum class { REAL32, REAL64, WHOLE } class;

static class class_of(ty_dtype d) { return d == TY_F64 ? REAL64 : ty_is_float(d) ? REAL32 : WHOLE; }

#define LOAD(type, real, convert)                                        \
  {                                                                      \
    const type *x = (const type *)(const void *)from;                    \
    real *y = block;                                                     \
    for (int64_t i = 0; i < n; i++) y[i] = (real)convert(x[i * stride]); \
    return;                                                              \
  }

static void load(ty_dtype d, const char *from, int64_t stride, int64_t n, void *block) {
  switch (d) {
    case TY_F64: LOAD(double, double, )
    case TY_F32: LOAD(float, float, )
    case TY_F16:
      if (stride == 1) {
        ty_half_load(d, block, from, n);
        return;
      }
      LOAD(uint16_t, float, ty_f16_to_f32)
    case TY_BF16: LOAD(uint16_t, float, ty_bf16_to_f32)
    case TY_I64: LOAD(int64_t, int64_t, )
    case TY_I32: LOAD(int32_t, int64_t, )
    case TY_I16: LOAD(int16_t, int64_t, )
    case TY_I8: LOAD(int8_t, int64_t, )
    default: LOAD(uint8_t, int64_t, )
  }
}

/* Towards zero; beyond the range to its end; NaN to 0. */
static inline int64_t saturate(double x, double low, double high, int64_t lowest, int64_t highest) {
  return x != x ? 0 : x <= low ? lowest : x >= high ? highest : (int64_t)x;
}

#define STORE(type, real, convert)                                       \
  {                                                                      \
    type *y = (type *)(void *)to;                                        \
    const real *x = block;                                               \
    for (int64_t i = 0; i < n; i++) y[i * stride] = (type)convert(x[i]); \
    return;                                                              \
  }
#define TO_INT(type, real, low, high)                                                         \
  {                                                                                           \
    type *y = (type *)(void *)to;                                                             \
    const real *x = block;                                                                    \
    for (int64_t i = 0; i < n; i++)                                                           \
      y[i * stride] = (type)saturate((double)x[i], (double)(low), (double)(high), low, high); \
    return;                                                                                   \
  }
#define STORE_FROM(real)                                     \
  switch (d) {                                               \
    case TY_F64: STORE(double, real, )                       \
    case TY_F32: STORE(float, real, )                        \
    case TY_F16: STORE(uint16_t, real, TO_F16)               \
    case TY_BF16: STORE(uint16_t, real, TO_BF16)             \
    case TY_BOOL: STORE(uint8_t, real, 0 !=)                 \
    case TY_I64: TO_INT(int64_t, real, INT64_MIN, INT64_MAX) \
    case TY_I32: TO_INT(int32_t, real, INT32_MIN, INT32_MAX) \
    case TY_I16: TO_INT(int16_t, real, INT16_MIN, INT16_MAX) \
    case TY_I8: TO_INT(int8_t, real, INT8_MIN, INT8_MAX)     \
    default: TO_INT(uint8_t, real, 0, UINT8_MAX)             \
  }
#define TO_F16(x) ty_f32_to_f16((float)(x))
#define TO_BF16(x) ty_f32_to_bf16((float)(x))

static void store_real32(ty_dtype d, char *to, int64_t stride, int64_t n, const void *block) {
  if (ty_is_half(d) && stride == 1) {
    ty_half_store(d, to, block, n);
    return;
  }
  STORE_FROM(float)
}

static void store_real64(ty_dtype d, char *to, int64_t stride, int64_t n, const void *block) { STORE_FROM(double) }

static void store_whole(ty_dtype d, char *to, int64_t stride, int64_t n, const void *block) {
  switch (d) { /* integers to integers wrap around */
    case TY_F64: STORE(double, int64_t, )
    case TY_F32: STORE(float, int64_t, )
    case TY_F16: STORE(uint16_t, int64_t, TO_F16)
    case TY_BF16: STORE(uint16_t, int64_t, TO_BF16)
    case TY_BOOL: STORE(uint8_t, int64_t, 0 !=)
    case TY_I64: STORE(int64_t, int64_t, )
    case TY_I32: STORE(int32_t, int64_t, )
    case TY_I16: STORE(int16_t, int64_t, )
    case TY_I8: STORE(int8_t, int64_t, )
    default: STORE(uint8_t, int64_t, )
  }
}

static void convert(const walk *w, char *to, int64_t out, const char *from, int64_t in, int64_t n) {
  double block[BLOCK];
  int so = ty_dtype_size[w->out_dtype], si = ty_dtype_size[w->in_dtype];
  if (out == 1 && in == 1 && w->out_dtype == TY_F32 && ty_is_half(w->in_dtype)) {
    ty_half_load(w->in_dtype, (float *)(void *)to, from, n);
    return;
  }
  if (out == 1 && in == 1 && w->in_dtype == TY_F32 && ty_is_half(w->out_dtype)) {
    ty_half_store(w->out_dtype, to, (const float *)(const void *)from, n);
    return;
  }
  for (int64_t i = 0; i < n; i += BLOCK) {
    int64_t k = n - i < BLOCK ? n - i : BLOCK;
    load(w->in_dtype, from + i * in * si, in, k, block);
    char *at = to + i * out * so;
    switch (class_of(w->in_dtype)) {
      case REAL32: store_real32(w->out_dtype, at, out, k, block); break;
      case REAL64: store_real64(w->out_dtype, at, out, k, block); break;
      case WHOLE: store_whole(w->out_dtype, at, out, k, block);
    }
  }
}

/* ---- pieces of the work ---- */

/* n neighbouring elements of the output. */
static void stream_span(const walk *w, char *to, const char *from, int64_t n) {
  char block[STREAM_BLOCK];
  int so = ty_dtype_size[w->out_dtype], si = ty_dtype_size[w->in_dtype];
  int64_t in = w->in[w->n - 1], step = STREAM_BLOCK / so;
  bool same = w->out_dtype == w->in_dtype;
  if (same && in == 1) {
    stream_copy(to, from, (size_t)(n * so));
    return;
  }
  for (int64_t i = 0; i < n; i += step) {
    int64_t k = n - i < step ? n - i : step;
    if (!same) convert(w, block, 1, from + i * in * si, in, k);
    else if (i == 0 || in != 0) move(so, block, 1, from + i * in * si, in, k);
    stream_copy(to + i * so, block, (size_t)(k * so));
  }
}

static void copy_span(const walk *w, int64_t row, int64_t begin, int64_t n) {
  int last = w->n - 1, so = ty_dtype_size[w->out_dtype], si = ty_dtype_size[w->in_dtype];
  int64_t out, in;
  row_offsets(w, row, &out, &in);
  char *to = w->to + (out + begin * w->out[last]) * so;
  const char *from = w->from + (in + begin * w->in[last]) * si;
  bool same = w->out_dtype == w->in_dtype;
  if (w->stream) stream_span(w, to, from, n);
  else if (same) move(so, to, w->out[last], from, w->in[last], n);
  else convert(w, to, w->out[last], from, w->in[last], n);
}

static void copy_rows(void *context, int64_t begin, int64_t end) {
  const walk *w = context;
  for (int64_t row = begin; row < end; row++) copy_span(w, row, 0, w->size[w->n - 1]);
  if (w->stream) stream_end();
}

static void copy_one_row(void *context, int64_t begin, int64_t end) {
  const walk *w = context;
  copy_span(w, 0, begin, end - begin);
  if (w->stream) stream_end();
}

/* The last dimension runs along memory in the output, another one, d, in the input: move by tiles of both. */
typedef struct turned {
  const walk *w;
  int d;
  int64_t others, tiles;
} turned;

static void copy_tiles(void *context, int64_t begin, int64_t end) {
  const turned *t = context;
  const walk *w = t->w;
  const int last = w->n - 1, size = ty_dtype_size[w->out_dtype], width = ty_dtype_size[w->in_dtype];
  const bool same = w->out_dtype == w->in_dtype;
  for (int64_t u = begin; u < end; u++) {
    int64_t i0 = u % t->tiles * TILE, rest = u / t->tiles, out = i0 * w->out[t->d], in = i0 * w->in[t->d];
    for (int d = last - 1; d >= 0; d--) {
      if (d == t->d) continue;
      out += rest % w->size[d] * w->out[d];
      in += rest % w->size[d] * w->in[d];
      rest /= w->size[d];
    }
    int64_t rows = w->size[t->d] - i0 < TILE ? w->size[t->d] - i0 : TILE;
    for (int64_t j = 0; j < w->size[last]; j += TILE) {
      int64_t columns = w->size[last] - j < TILE ? w->size[last] - j : TILE;
      void *to = w->to + (out + j) * size;
      const char *from = w->from + (in + j * w->in[last]) * width;
      int64_t ahead = w->size[last] - j >= 2 * TILE ? TILE * w->in[last] : 0, run = w->in[last];
      double converted[TILE * TILE]; /* of the output's type */
      if (!same) {                   /* run by run of the input first */
        for (int64_t c = 0; c < columns; c++) {
          for (int64_t at = 0; ahead && at < rows * width; at += LINE)
            __builtin_prefetch(from + (ahead + c * run) * width + at);
          convert(w, (char *)converted + c * TILE * size, 1, from + c * run * width, 1, rows);
        }
        from = (const char *)converted, run = TILE, ahead = 0;
      }
      const void *tile = from;
      switch (size) {
        case 1: turn_uint8_t(to, w->out[t->d], tile, run, rows, columns, ahead, w->stream); break;
        case 2: turn_uint16_t(to, w->out[t->d], tile, run, rows, columns, ahead, w->stream); break;
        case 4: turn_uint32_t(to, w->out[t->d], tile, run, rows, columns, ahead, w->stream); break;
        default: turn_uint64_t(to, w->out[t->d], tile, run, rows, columns, ahead, w->stream);
      }
    }
  }
  if (w->stream) stream_end();
}

static bool copy_turned(const walk *w) {
  int last = w->n - 1;
  if (w->out[last] != 1 || w->in[last] < 2 || w->size[last] < 8) return false;
  for (int d = last - 1; d >= 0; d--) {
    if (w->in[d] != 1 || w->size[d] < 8) continue;
    turned t = { w, d, w->rows / w->size[d], (w->size[d] + TILE - 1) / TILE };
    ty_parallel_for(t.others * t.tiles, GRAIN / (TILE * w->size[last]) + 1, copy_tiles, &t);
    return true;
  }
  return false;
}

bool TY_KERNEL(copy)(const ty_kernel_args *k) {
  const ty_view *out = k->out[0];
  if (out->count == 0) return true;
  walk w;
  plan(&w, out, k->in[0]);
  if (copy_turned(&w)) return true;
  int64_t width = w.size[w.n - 1];
  if (w.rows == 1) ty_parallel_for(width, GRAIN, copy_one_row, &w);
  else ty_parallel_for(w.rows, width < GRAIN ? GRAIN / width : 1, copy_rows, &w);
  return true;
}

/* ---- constants ---- */

bool TY_KERNEL(fill)(const ty_kernel_args *k) {
  const ty_p_numbers *p = k->params;
  bool exact = k->out[0]->dtype == TY_I64;
  const void *value = exact ? (const void *)&p->a.i : &p->a.f;
  ty_view number = *k->out[0];
  memset(number.stride, 0, sizeof number.stride);
  char one[8]; /* converted once, then repeated */
  walk w = { .n = 1,
             .size = { 1 },
             .out = { 1 },
             .in = { 1 },
             .to = one,
             .from = value,
             .out_dtype = (ty_dtype)k->out[0]->dtype,
             .in_dtype = exact ? TY_I64 : TY_F64,
             .rows = 1 };
  copy_one_row(&w, 0, 1);
  number.data = one;
  number.dtype = k->out[0]->dtype;
  const ty_view *in = &number;
  return TY_KERNEL(copy)(&(ty_kernel_args){ 1, 1, k->out, &in, NULL, NULL });
}

typedef struct range {
  const ty_view *out;
  const ty_p_range *p;
} range;

static void count_up_whole(void *context, int64_t begin, int64_t end) {
  const range *r = context;
  int64_t *out = r->out->data;
  uint64_t start = (uint64_t)r->p->start.i, step = (uint64_t)r->p->step.i; /* products on the way may wrap around */
  for (int64_t i = begin; i < end; i++) out[i] = (int64_t)(start + (uint64_t)i * step);
}

static void count_up(void *context, int64_t begin, int64_t end) {
  const range *r = context;
  double block[BLOCK];
  int size = ty_dtype_size[r->out->dtype];
  for (int64_t i = begin; i < end; i += BLOCK) {
    int64_t n = end - i < BLOCK ? end - i : BLOCK;
    for (int64_t j = 0; j < n; j++) block[j] = r->p->start.f + (double)(i + j) * r->p->step.f;
    store_real64((ty_dtype)r->out->dtype, (char *)r->out->data + i * size, 1, n, block);
  }
}

bool TY_KERNEL(arange)(const ty_kernel_args *k) {
  range r = { k->out[0], k->params };
  bool whole = r.p->whole && r.out->dtype == TY_I64;
  ty_parallel_for(r.out->count, GRAIN, whole ? count_up_whole : count_up, &r);
  return true;
}

/* ---- order and triangles ---- */

bool TY_KERNEL(flip)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  const ty_view *out = k->out[0];
  if (out->count == 0) return true;
  /* Copying into the mirrored positions of the output: the walk takes negative strides, views do not. */
  ty_view mirrored = *out;
  int64_t shift = 0;
  for (int d = 0; d < out->ndim; d++) {
    if (!(p->k >> d & 1)) continue;
    shift += (out->size[d] - 1) * out->stride[d];
    mirrored.stride[d] = -out->stride[d];
  }
  mirrored.data = (char *)out->data + shift * ty_dtype_size[out->dtype];
  walk w;
  plan(&w, &mirrored, k->in[0]);
  int64_t width = w.size[w.n - 1];
  if (w.rows == 1) ty_parallel_for(width, GRAIN, copy_one_row, &w);
  else ty_parallel_for(w.rows, width < GRAIN ? GRAIN / width : 1, copy_rows, &w);
  return true;
}

/* ---- roll ---- */

typedef struct rolled {
  const char *from;
  char *to;
  int64_t line, head; /* bytes of a line, and those that come from its end */
  bool stream;
} rolled;

static void roll_lines(void *context, int64_t begin, int64_t end) {
  const rolled *r = context;
  for (int64_t i = begin; i < end; i++) {
    const char *from = r->from + i * r->line;
    char *to = r->to + i * r->line;
    const size_t head = (size_t)r->head, rest = (size_t)(r->line - r->head);
    if (r->stream) {
      stream_copy(to, from + rest, head);
      stream_copy(to + head, from, rest);
    } else {
      memcpy(to, from + rest, head);
      memcpy(to + head, from, rest);
    }
  }
  if (r->stream) stream_end();
}

bool TY_KERNEL(roll_line)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  const ty_view *x = k->in[0];
  if (!x->count) return true;
  int64_t inner = ty_dtype_size[x->dtype], outer = 1;
  for (int d = 0; d < p->dim; d++) outer *= x->size[d];
  for (int d = p->dim + 1; d < x->ndim; d++) inner *= x->size[d];
  rolled r = { x->data, k->out[0]->data, x->size[p->dim] * inner, p->k * inner, false };
  r.stream = stream_pays(outer * r.line);
  ty_parallel_for(outer, 4 * GRAIN / r.line + 1, roll_lines, &r);
  return true;
}

typedef struct triangle {
  const ty_view *out, *in;
  int64_t diagonal, n, m;
  bool lower;
} triangle;

static void keep_triangle(void *context, int64_t begin, int64_t end) {
  const triangle *t = context;
  int64_t size = ty_dtype_size[t->out->dtype];
  for (int64_t row = begin; row < end; row++) {
    int64_t edge = row % t->n + t->diagonal + (t->lower ? 1 : 0); /* columns before it, or from it on, are kept */
    edge = edge < 0 ? 0 : edge > t->m ? t->m : edge;
    int64_t first = t->lower ? 0 : edge, last = t->lower ? edge : t->m;
    char *to = (char *)t->out->data + row * t->m * size;
    const char *from = (const char *)t->in->data + row * t->m * size;
    memset(to, 0, (size_t)(first * size));
    memcpy(to + first * size, from + first * size, (size_t)((last - first) * size));
    memset(to + last * size, 0, (size_t)((t->m - last) * size));
  }
}

static bool keep(const ty_kernel_args *k, bool lower) {
  const ty_p_dim *p = k->params;
  const ty_view *v = k->out[0];
  if (v->count == 0) return true;
  int64_t n = v->size[v->ndim - 2], m = v->size[v->ndim - 1];
  int64_t diagonal = p->k > m ? m : p->k < -n ? -n : p->k; /* beyond these all or nothing is kept */
  triangle t = { v, k->in[0], diagonal, n, m, lower };
  ty_parallel_for(v->count / t.m, GRAIN / t.m + 1, keep_triangle, &t);
  return true;
}

bool TY_KERNEL(tril)(const ty_kernel_args *k) { return keep(k, true); }
bool TY_KERNEL(triu)(const ty_kernel_args *k) { return keep(k, false); }
