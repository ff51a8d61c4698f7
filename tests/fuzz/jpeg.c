#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  ty_tensor *t = ty_jpeg_decode(data, size, "fuzz");
  touch(t);
  ty_release(t);
  return 0;
}
