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
  return tensor_on(base->storage, (char *)base->v.data + offset * ty_dtype_size[base->v.dtype], ty_dtype_of(base), ndim,
                   size, stride);
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

/* Nothing is ever recorded here. */
_Thread_local struct ty_recorder *ty_recording;
atomic_int ty_recordings;
bool ty_recorded_host_read(const ty_tensor *t, const char *who) {
  (void)t, (void)who;
  return true;
}
