/* The input as a whole file and, because its checksum would keep changed pickles out, as the data.pkl of an archive
 * made here, which has storages "0" and "1" as well. */
#include <stdio.h>
#include <zlib.h>

#include "fuzz.h"

static void put(ty_bytes *out, uint64_t n, int bytes) {
  for (int i = 0; i < bytes; i++) ty_bytes_put(out, &(uint8_t){ (uint8_t)(n >> 8 * i) }, 1);
}

/* The fields that a local header and the directory share, from the version on. */
static void put_fields(ty_bytes *out, const char *name, const void *data, size_t size) {
  put(out, 20, 2), put(out, 0, 2), put(out, 0, 2), put(out, 0, 4);
  put(out, crc32(0, data, (uInt)size), 4);
  put(out, size, 4), put(out, size, 4), put(out, strlen(name), 2), put(out, 0, 2);
}

static void put_entry(ty_bytes *out, ty_bytes *directory, const char *name, const void *data, size_t size) {
  size_t at = out->size;
  put(out, 0x04034b50, 4);
  put_fields(out, name, data, size);
  ty_bytes_put(out, name, strlen(name));
  ty_bytes_put(out, data, size);
  put(directory, 0x02014b50, 4), put(directory, 20, 2);
  put_fields(directory, name, data, size);
  put(directory, 0, 2), put(directory, 0, 2), put(directory, 0, 2), put(directory, 0, 4), put(directory, at, 4);
  ty_bytes_put(directory, name, strlen(name));
}

static void read_file(const void *data, size_t size) {
  ty_bundle b;
  ty_mapping *m = ty_mapping_copy(data, size);
  if (m && ty_torch_read(m, "fuzz", false, &b)) touch_bundle(&b);
  ty_mapping_release(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  read_file(data, size);
  ty_bytes file = { 0 }, directory = { 0 };
  static const uint8_t bytes[96];
  put_entry(&file, &directory, "a/data.pkl", data, size);
  put_entry(&file, &directory, "a/data/0", bytes, sizeof bytes);
  put_entry(&file, &directory, "a/data/1", bytes, 7);
  size_t at = file.size;
  ty_bytes_put(&file, directory.data, directory.size);
  put(&file, 0x06054b50, 4), put(&file, 0, 4), put(&file, 3, 2), put(&file, 3, 2);
  put(&file, directory.size, 4), put(&file, at, 4), put(&file, 0, 2);
  read_file(file.data, file.size);
  ty_bytes_free(&file);
  ty_bytes_free(&directory);
  return 0;
}
