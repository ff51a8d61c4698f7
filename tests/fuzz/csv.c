#include "fuzz.h"

/* The first byte chooses the options. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (!size) return 0;
  uint8_t o = *data;
  ty_csv_options options = { .delimiter = ",;\t "[o & 3],
                             .header = (o >> 2) % 3 - 1,
                             .skip = o >> 4 & 1,
                             .missing_nan = o >> 5 & 1,
                             .dtype = o >> 6 & 1 ? TY_F32 : TY_F64 };
  char *text = malloc(size); /* exactly as long as the text: reading past it is seen */
  memcpy(text, data + 1, size - 1);
  ty_bytes names = { 0 };
  ty_tensor *t = ty_csv_parse(text, size - 1, "fuzz", &options, &names);
  touch(t);
  ty_release(t);
  ty_bytes_free(&names);
  free(text);
  return 0;
}
