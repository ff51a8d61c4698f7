#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  for (int copy = 0; copy < 2; copy++) {
    ty_bundle b;
    ty_mapping *m = ty_mapping_copy(data, size);
    if (m && ty_safetensors_read(m, "fuzz", copy, &b)) touch_bundle(&b);
    ty_mapping_release(m);
  }
  return 0;
}
