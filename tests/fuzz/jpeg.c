#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  ty_tensor *t = ty_jpeg_decode(data, size, "fuzz", NULL);
  touch(t);
  ty_release(t);
  if (size < 8) return 0;
  const uint8_t *p = data + size - 8; /* a box and a size of it, of the last bytes */
  ty_image_part part = { p[0] / 16.0, p[1] / 16.0, p[2] / 4.0, p[3] / 4.0, p[4] % 64, p[5] % 64 };
  t = ty_image_decode(data, size, "fuzz", p[6] % 5,
                      p[7] % 2 ? &part : &(ty_image_part){ .rows = 1 + p[4], .columns = 1 }, true);
  touch(t);
  ty_release(t);
  return 0;
}
