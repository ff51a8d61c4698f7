#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  int64_t shape[3];
  /* A few bytes may be a picture of one colour and of any size, which is no fault of the reader's. */
  if (!ty_webp_size(data, size, "fuzz", shape) || shape[1] * shape[2] > 1 << 22) return 0;
  ty_tensor *t = ty_webp_decode(data, size, "fuzz");
  if (t && (t->v.size[0] != shape[0] || t->v.size[1] != shape[1] || t->v.size[2] != shape[2])) abort();
  touch(t);
  ty_release(t);
  if (size < 8) return 0;
  const uint8_t *p = data + size - 8; /* a box and a size of it, of the last bytes */
  ty_image_part part = { p[0] / 16.0, p[1] / 16.0, p[2] / 4.0, p[3] / 4.0, p[4] % 64, p[5] % 64 };
  t = ty_image_decode(data, size, "fuzz", p[6] % 5, &part, true);
  touch(t);
  ty_release(t);
  return 0;
}
