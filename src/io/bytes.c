/* Growing buffers, text for error messages, and the steps between tensors and bytes. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../program/recording.h"
#include "../ops/op.h"
#include "../ops/vmap.h"
#include "formats.h"

bool ty_bytes_reserve(ty_bytes *b, size_t more) {
  if (more <= b->capacity - b->size) return true;
  size_t want = b->size + more, grown = b->capacity + b->capacity / 2;
  if (want < more || want > PTRDIFF_MAX)
    return ty_fail(TY_ENOMEM, "a buffer of more than %zu bytes is too large", b->size);
  if (want < grown) want = grown;
  if (want < 64) want = 64;
  uint8_t *data = realloc(b->data, want);
  if (!data) return ty_fail(TY_ENOMEM, "no memory for a buffer of %zu bytes", want);
  b->data = data;
  b->capacity = want;
  return true;
}

bool ty_bytes_put(ty_bytes *b, const void *data, size_t size) {
  if (!ty_bytes_reserve(b, size)) return false;
  if (size) memcpy(b->data + b->size, data, size);
  b->size += size;
  return true;
}

bool ty_bytes_printf(ty_bytes *b, const char *format, ...) {
  va_list arguments;
  char text[512];
  va_start(arguments, format);
  int n = vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (n < 0 || n >= (int)sizeof text) return ty_fail(TY_EINVAL, "a line of text is too long");
  return ty_bytes_put(b, text, (size_t)n);
}

void ty_bytes_free(ty_bytes *b) {
  free(b->data);
  *b = (ty_bytes){ 0 };
}

const char *ty_quote(const void *text, size_t size) {
  enum { LONGEST = 120 };
  static _Thread_local char buffers[4][LONGEST + 16];
  static _Thread_local unsigned turn;
  char *out = buffers[turn++ % 4], *p = out;
  const uint8_t *s = text;
  *p++ = '"';
  for (size_t i = 0; i < size; i++) {
    if (p - out > LONGEST) {
      memcpy(p, "...", 3);
      p += 3;
      break;
    }
    if (s[i] < 0x20 || s[i] == 0x7f || s[i] == '"') p += snprintf(p, 6, "\\x%02x", s[i]);
    else *p++ = (char)s[i];
  }
  *p++ = '"';
  *p = 0;
  return out;
}

const char *ty_quote_text(const char *text) { return ty_quote(text, strlen(text)); }

/* RFC 3629: no overlong forms, no surrogates, nothing past U+10FFFF. */
bool ty_valid_utf8(const void *text, size_t size) {
  const uint8_t *p = text, *end = p + size;
  while (p < end) {
    uint8_t c = *p++;
    if (c < 0x80) continue;
    int more = c >= 0xc2 && c <= 0xdf ? 1 : c >= 0xe0 && c <= 0xef ? 2 : c >= 0xf0 && c <= 0xf4 ? 3 : 0;
    if (!more || end - p < more) return false;
    uint8_t lo = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80, hi = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
    if (*p < lo || *p > hi) return false;
    for (int i = 1; i < more; i++)
      if ((p[i] & 0xc0) != 0x80) return false;
    p += more;
  }
  return true;
}

bool ty_count_bytes(ty_dtype dtype, int ndim, const int64_t *size, uint64_t *bytes) {
  uint64_t n = ty_dtype_size[dtype];
  bool empty = false;
  if (ty_is_quantized(dtype)) { /* rows of whole blocks */
    if (ndim == 0 || size[ndim - 1] < 0 || size[ndim - 1] % ty_dtype_block[dtype]) return false;
    n = (uint64_t)ty_row_bytes(dtype, size[--ndim]);
    empty = n == 0;
    n += empty;
  }
  for (int i = 0; i < ndim; i++) {
    empty |= size[i] == 0;
    if (size[i] < 0 || __builtin_mul_overflow(n, size[i] ? (uint64_t)size[i] : 1, &n)) return false;
  }
  if (n > PTRDIFF_MAX) return false;
  *bytes = empty ? 0 : n;
  return true;
}

ty_tensor *ty_mapping_tensor(ty_mapping *m, size_t offset, ty_dtype dtype, int ndim, const int64_t *size, bool copy) {
  uint64_t bytes;
  if (!ty_count_bytes(dtype, ndim, size, &bytes)) {
    ty_fail(TY_EINVAL, "a tensor %s is too large", ty_shape_text(ndim, size));
    return NULL;
  }
  uint8_t *data = bytes ? m->data + offset : NULL;
  ty_tensor *t;
  if (copy || !bytes || (!ty_is_quantized(dtype) && (uintptr_t)data % ty_dtype_size[dtype])) {
    t = ty_tensor_new(TY_CPU, dtype, ndim, size);
    if (t && bytes) memcpy(t->v.data, data, bytes);
  } else {
    ty_mapping_retain(m);
    t = ty_tensor_wrap(data, dtype, ndim, size, ty_mapping_release, m);
    if (t) t->storage->settled = true;
  }
  if (!t || dtype != TY_BOOL) return t;
  uint8_t *truth = t->v.data; /* kernels count on 0 and 1; files hold anything. Pages are written only where needed. */
  for (uint64_t i = 0; i < bytes; i++)
    if (truth[i] > 1) truth[i] = 1;
  return t;
}

ty_tensor *ty_host_tensor(ty_tensor *t) {
  if (t->batch && !ty_map_check_value(t, "writing")) return NULL;
  if (ty_device_of(t) == TY_META) {
    ty_fail(TY_EINVAL, "a tensor on the meta device (%s) has no values to write", ty_describe(t));
    return NULL;
  }
  if (ty_is_recording() && !ty_recorded_host_read(t, "writing")) return NULL;
  if (ty_device_of(t) == TY_CPU && t->v.contiguous) return ty_retain(t);
  ty_tensor *host = ty_tensor_new(TY_CPU, ty_dtype_of(t), t->v.ndim, t->v.size);
  if (host && !ty_copy_into(host, t)) {
    ty_release(host);
    return NULL;
  }
  return host;
}

void ty_bundle_free(ty_bundle *b) {
  for (size_t i = 0; i < b->count; i++) ty_release(b->tensors[i].tensor);
  free(b->tensors);
  free(b->notes);
  free(b->pool);
  *b = (ty_bundle){ 0 };
}

int ty_named_order(const void *pa, const void *pb) {
  const ty_named *a = pa, *b = pb;
  int c = memcmp(a->name, b->name, a->name_size < b->name_size ? a->name_size : b->name_size);
  return c ? c : (a->name_size > b->name_size) - (a->name_size < b->name_size);
}
