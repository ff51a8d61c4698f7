#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  ty_bundle b;
  ty_mapping *m = ty_mapping_copy(data, size);
  if (m && ty_npz_read(m, "fuzz", false, -1, &b)) touch_bundle(&b);
  ty_mapping_release(m);
  return 0;
}
