/* Stands in for the tensors under src/io: every one gets its own malloc, so that the sanitizer sees one byte too
 * many, which the pools of the real allocator would hide. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/ops/op.h"
#include "../../src/program/recording.h"

enum { MOST = 1 << 30 };

static ty_tensor *tensor_on(ty_storage *s, void *data, ty_dtype dtype, int ndim, const int64_t *size,
                            const int64_t *stride) {
  ty_tensor *t = calloc(1, sizeof *t);
  t->refs = 1;
  t->storage = s;
  t->v.data = data;
  t->v.dtype = (int16_t)dtype;
  t->v.ndim = (int16_t)ndim;
  t->v.count = 1;
  for (int i = ndim - 1; i >= 0; i--) {
    t->v.size[i] = size[i];
    t->v.stride[i] = stride ? stride[i] : t->v.count;
    t->v.count *= size[i];
  }
  t->v.contiguous = !stride;
  return t;
}

ty_tensor *ty_tensor_new(int device, ty_dtype dtype, int ndim, const int64_t *size) {
  size_t bytes = ty_dtype_size[dtype];
  if (ty_is_quantized(dtype)) bytes = (size_t)ty_row_bytes(dtype, size[ndim - 1]);
  for (int i = 0; i < ndim - ty_is_quantized(dtype); i++)
    if (__builtin_mul_overflow(bytes, (size_t)size[i], &bytes) || bytes > MOST) {
      ty_fail(TY_ENOMEM, "too many bytes here");
      return NULL;
    }
  ty_storage *s = calloc(1, sizeof *s);
  *s = (ty_storage){ .refs = 1, .device = device, .bytes = bytes ? malloc(bytes) : NULL, .nbytes = bytes };
  return tensor_on(s, s->bytes, dtype, ndim, size, NULL);
}

ty_tensor *ty_tensor_wrap(void *bytes, ty_dtype dtype, int ndim, const int64_t *size, void (*release)(void *),
                          void *owner) {
  ty_storage *s = calloc(1, sizeof *s);
  s->foreign = malloc(sizeof *s->foreign);
  *s->foreign = (ty_foreign){ release, owner };
  s->refs = 1;
  s->bytes = bytes;
  return tensor_on(s, bytes, dtype, ndim, size, NULL);
}

ty_tensor *ty_tensor_view(ty_tensor *base, int ndim, const int64_t *size, const int64_t *stride, int64_t offset) {
  base->storage->refs++;
  /* a tensor without bytes has no address, as in src/tensor/tensor.c */
  char *data = base->v.data ? (char *)base->v.data + offset * ty_dtype_size[base->v.dtype] : NULL;
  return tensor_on(base->storage, data, ty_dtype_of(base), ndim, size, stride);
}

void ty_tensor_free(ty_tensor *t) {
  ty_storage *s = t->storage;
  free(t);
  if (--s->refs) return;
  if (s->foreign) s->foreign->release(s->foreign->owner);
  else free(s->bytes);
  free(s->foreign);
  free(s);
}

const char *ty_shape_text(int ndim, const int64_t *size) {
  static char text[256];
  int n = 0;
  for (int i = 0; i < ndim; i++) n += snprintf(text + n, sizeof text - (size_t)n, "%lld ", (long long)size[i]);
  text[n] = 0;
  return text;
}

const char *ty_describe(const ty_tensor *t) { return ty_shape_text(t->v.ndim, t->v.size); }

bool ty_copy_into(ty_tensor *dst, ty_tensor *src) {
  (void)dst, (void)src;
  return ty_fail(TY_EUNSUPPORTED, "no copies here");
}

/* Nothing is on disk here, nothing mapped, and nothing recorded. */
_Thread_local bool (*ty_bring_back)(ty_tensor *t);

bool ty_map_check_value(const ty_tensor *t, const char *who) {
  (void)t;
  (void)who;
  return true;
}

/* Nothing is ever recorded here. */
_Thread_local struct ty_recorder *ty_recording;
atomic_int ty_recordings;
bool ty_recorded_host_read(const ty_tensor *t, const char *who) {
  (void)t, (void)who;
  return true;
}

/* ---- what cuts a box out of a picture ---- */

/* One scope at a time. */
static ty_tensor *held[8];
static int held_count;

bool ty_scope_open(ty_scope *scope) {
  (void)scope;
  return true;
}

ty_tensor *ty_scope_add(ty_tensor *t) {
  if (held_count == sizeof held / sizeof *held) abort();
  if (t) held[held_count++] = t;
  return t;
}

void ty_scope_close(ty_scope *scope) {
  (void)scope;
  while (held_count) ty_release(held[--held_count]);
}

ty_tensor *ty_unsqueeze(ty_tensor *x, int64_t dim) {
  int64_t size[TY_MAX_DIMS] = { 1 }, stride[TY_MAX_DIMS] = { 0 };
  if (!x || dim != 0) abort();
  for (int i = 0; i < x->v.ndim; i++) size[i + 1] = x->v.size[i], stride[i + 1] = x->v.stride[i];
  return ty_scope_add(ty_tensor_view(x, x->v.ndim + 1, size, stride, 0));
}

ty_tensor *ty_select(ty_tensor *x, int64_t dim, int64_t index) {
  if (!x) return NULL;
  if (dim != 0 || index != 0) abort();
  return ty_scope_add(ty_tensor_view(x, x->v.ndim - 1, x->v.size + 1, x->v.stride + 1, 0));
}

/* The nearest elements. The box must lie within the picture. */
ty_tensor *ty_crop_resize(ty_tensor *x, ty_tensor *boxes, ty_ints size, const char *mode) {
  if (!x || x->v.ndim != 4 || size.n != 2) abort();
  (void)mode;
  const double *box = boxes->v.data;
  const int64_t h = x->v.size[2], w = x->v.size[3], rows = size.v[0], columns = size.v[1];
  /* What libjpeg left out to be faster may be a row or a column at the edge. */
  if (!(box[0] >= 0 && box[1] >= 0 && box[0] + box[2] < (double)h + 2 && box[1] + box[3] < (double)w + 2)) abort();
  ty_tensor *y = ty_tensor_new(TY_CPU, TY_U8, 4, (const int64_t[]){ 1, x->v.size[1], rows, columns });
  uint8_t *out = y ? y->v.data : NULL;
  for (int64_t c = 0; y && c < x->v.size[1]; c++)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        int64_t row = (int64_t)(box[0] + ((double)i + 0.5) * box[2] / (double)rows);
        int64_t column = (int64_t)(box[1] + ((double)j + 0.5) * box[3] / (double)columns);
        row = row < h ? row : h - 1;
        column = column < w ? column : w - 1;
        *out++ = ((const uint8_t *)x->v.data)[c * x->v.stride[1] + row * x->v.stride[2] + column * x->v.stride[3]];
      }
  return ty_scope_add(y);
}
