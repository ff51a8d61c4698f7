#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  ty_mapping *m = ty_mapping_copy(data, size);
  ty_tensor *t = m ? ty_npy_read(m, "fuzz", false) : NULL;
  touch(t);
  ty_release(t);
  ty_mapping_release(m);
  return 0;
}
