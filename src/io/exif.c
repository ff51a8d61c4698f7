/* How a picture is to be turned before it is looked at: the tag Orientation (0x0112) of the Exif data of a JPEG, PNG or
 * WebP file. CIPA DC-008, "Exchangeable image file format for digital still cameras: Exif Version 2.32"; where each
 * format keeps the data, its own specification says. Whatever is damaged counts as not there: the picture is read
 * as it stands. */
#include <string.h>
#include "../ops/op.h"
#include "formats.h"

typedef struct span {
  const uint8_t *p;
  size_t size;
} span;

static uint32_t number(const uint8_t *p, int bytes, bool big) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; i++) value = value << 8 | p[big ? i : bytes - 1 - i];
  return value;
}

/* Without the mark that JPEG puts before it, and some programs in the other formats too. */
static span unmarked(const uint8_t *p, size_t size) {
  bool marked = size >= 6 && memcmp(p, "Exif\0", 5) == 0;
  return marked ? (span){ p + 6, size - 6 } : (span){ p, size };
}

static span of_jpeg(const uint8_t *p, size_t size) {
  size_t at = 2;
  while (at + 4 <= size && p[at] == 0xff) {
    uint8_t kind = p[at + 1];
    if (kind == 0xff) { /* a byte that fills up */
      at++;
      continue;
    }
    if (kind == 0xda || kind == 0xd9) break;              /* the pixels, the end */
    if (kind == 0x01 || (kind >= 0xd0 && kind <= 0xd8)) { /* without a length */
      at += 2;
      continue;
    }
    size_t length = number(p + at + 2, 2, true);
    if (length < 2 || length > size - at - 2) break;
    if (kind == 0xe1 && length >= 8 && memcmp(p + at + 4, "Exif\0", 5) == 0) return unmarked(p + at + 4, length - 2);
    at += 2 + length;
  }
  return (span){ 0 };
}

static span of_png(const uint8_t *p, size_t size) {
  for (size_t at = 8; at < size && size - at >= 12;) {
    size_t length = number(p + at, 4, true);
    if (length > size - at - 12) break;
    if (memcmp(p + at + 4, "eXIf", 4) == 0) return unmarked(p + at + 8, length);
    at += 12 + length;
  }
  return (span){ 0 };
}

static span of_webp(const uint8_t *p, size_t size) {
  for (size_t at = 12; at < size && size - at >= 8;) {
    size_t length = number(p + at + 4, 4, false);
    if (length > size - at - 8) break;
    if (memcmp(p + at, "EXIF", 4) == 0) return unmarked(p + at + 8, length);
    at += 8 + length + (length & 1);
  }
  return (span){ 0 };
}

int ty_exif_orientation(const uint8_t *data, size_t size) {
  span s = { 0 };
  if (size >= 8 && memcmp(data, "\x89PNG", 4) == 0) s = of_png(data, size);
  else if (size >= 3 && memcmp(data, "\xff\xd8\xff", 3) == 0) s = of_jpeg(data, size);
  else if (size >= 12 && memcmp(data, "RIFF", 4) == 0) s = of_webp(data, size);
  if (s.size < 14) return 1;
  bool big = s.p[0] == 'M';
  if (memcmp(s.p, big ? "MM\0*" : "II*\0", 4) != 0) return 1;
  size_t at = number(s.p + 4, 4, big);
  if (at > s.size - 2) return 1;
  size_t count = number(s.p + at, 2, big), room = (s.size - at - 2) / 12;
  for (size_t i = 0; i < count && i < room; i++) {
    const uint8_t *entry = s.p + at + 2 + 12 * i;
    if (number(entry, 2, big) != 0x0112) continue;
    uint32_t type = number(entry + 2, 2, big), value = type == 3   ? number(entry + 8, 2, big)
                                                       : type == 4 ? number(entry + 8, 4, big)
                                                                   : 0;
    return value >= 1 && value <= 8 ? (int)value : 1;
  }
  return 1;
}
