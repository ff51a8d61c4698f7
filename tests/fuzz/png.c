#include <zlib.h>

#include "fuzz.h"

/* Chunk checksums are set right first: else nearly every mutation would end there. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  uint8_t *file = malloc(size + !size);
  memcpy(file, data, size);
  for (size_t at = 8; at + 12 <= size;) {
    size_t n = (size_t)file[at] << 24 | (size_t)file[at + 1] << 16 | (size_t)file[at + 2] << 8 | file[at + 3];
    if (n > size - at - 12) break;
    uint32_t crc = (uint32_t)crc32(0, file + at + 4, (uInt)n + 4);
    for (int i = 0; i < 4; i++) file[at + 8 + n + i] = (uint8_t)(crc >> (24 - 8 * i));
    at += 12 + n;
  }
  ty_tensor *t = ty_png_decode(file, size, "fuzz");
  touch(t);
  ty_release(t);
  ty_bytes texts = { 0 };
  ty_png_texts(file, size, "fuzz", &texts);
  ty_bytes_free(&texts);
  free(file);
  return 0;
}
