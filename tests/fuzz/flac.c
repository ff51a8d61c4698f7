#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  int64_t rate = 0, most = 1 << 22; /* a frame of silence is a few bytes */
  int bits = 0;
  ty_tensor *t = ty_flac_decode(data, size, "fuzz", 0, -1, most, &rate, &bits);
  if (t && (rate < 1 || bits < 1 || t->v.count > most)) abort();
  touch(t);
  ty_release(t);
  if (size < 4) return 0;
  const uint8_t *p = data + size - 4; /* a part, by the last bytes */
  t = ty_flac_decode(data, size, "fuzz", p[0] << 4 | p[1], p[2] << 2, most, &rate, &bits);
  if (t && t->v.size[1] > p[2] << 2) abort();
  touch(t);
  ty_release(t);
  return 0;
}
