/* Shared by the fuzz targets: each reads hostile bytes through one reader of src/io and touches every value that
 * comes out. */
#ifndef TY_FUZZ_H
#define TY_FUZZ_H

#include <stdlib.h>
#include <string.h>

#include "../../src/io/formats.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static inline void touch_bytes(const void *data, size_t size) {
  static volatile uint8_t sink;
  const uint8_t *p = data;
  uint8_t sum = 0;
  for (size_t i = 0; i < size; i++) sum ^= p[i];
  sink = sum;
  (void)sink;
}

/* Reads all of a tensor's memory, so that the sanitizer sees a view that is too long. */
static inline void touch(ty_tensor *t) {
  if (!t) return;
  if (!t->v.count) return;
  size_t last = 0;
  if (ty_is_quantized((ty_dtype)t->v.dtype)) {
    touch_bytes(t->v.data, (size_t)ty_view_bytes(&t->v));
    return;
  }
  for (int i = 0; i < t->v.ndim; i++) last += (size_t)((t->v.size[i] - 1) * t->v.stride[i]);
  const uint8_t *p = t->v.data;
  touch_bytes(p, (last + 1) * ty_dtype_size[t->v.dtype]);
  if (t->v.dtype == TY_BOOL)
    for (size_t i = 0; i <= last; i++)
      if (p[i] > 1) abort();
}

static inline void touch_bundle(ty_bundle *b) {
  for (size_t i = 0; i < b->count; i++) {
    touch_bytes(b->tensors[i].name, b->tensors[i].name_size);
    touch(b->tensors[i].tensor);
  }
  for (size_t i = 0; i < b->note_count; i++)
    if (!ty_valid_utf8(b->notes[i].key, b->notes[i].key_size) ||
        !ty_valid_utf8(b->notes[i].value, b->notes[i].value_size))
      abort();
  ty_bundle_free(b);
}

#endif
