/* What the image formats share: recognition, limits, planes and channels. */
#include <stdlib.h>
#include <string.h>
#include "../ops/op.h"
#include "formats.h"

enum { SIDE_MOST = 65535 };
static const uint64_t PIXELS_MOST = 1u << 28;

bool ty_image_fits(const char *name, uint64_t width, uint64_t height) {
  if (!width || !height)
    return ty_fail(TY_EIO, "image %s has no pixels (%llu x %llu)", ty_quote_text(name), (unsigned long long)width,
                   (unsigned long long)height);
  if (width <= SIDE_MOST && height <= SIDE_MOST && width * height <= PIXELS_MOST) return true;
  return ty_fail(TY_EIO, "image %s claims %llu x %llu pixels; at most %d on a side and 2^28 in all are read",
                 ty_quote_text(name), (unsigned long long)width, (unsigned long long)height, SIDE_MOST);
}

ty_tensor *ty_image_planes(const uint8_t *pixels, int64_t width, int64_t height, int channels) {
  ty_tensor *t = ty_tensor_new(TY_CPU, TY_U8, 3, (const int64_t[]){ channels, height, width });
  if (!t) return NULL;
  int64_t count = width * height;
  for (int c = 0; c < channels; c++) {
    uint8_t *plane = (uint8_t *)t->v.data + c * count;
    for (int64_t i = 0; i < count; i++) plane[i] = pixels[i * channels + c];
  }
  return t;
}

/* Gray to colour by repetition, colour to gray by the luma of ITU-R BT.601, alpha dropped or opaque. */
static ty_tensor *convert(ty_tensor *t, int channels) {
  int have = (int)t->v.size[0];
  int64_t count = t->v.size[1] * t->v.size[2];
  ty_tensor *out = ty_tensor_new(TY_CPU, TY_U8, 3, (const int64_t[]){ channels, t->v.size[1], t->v.size[2] });
  if (!out) return NULL;
  const uint8_t *in = t->v.data;
  uint8_t *p = out->v.data;
  if (channels == 1 && have >= 3) {
    const uint8_t *r = in, *g = in + count, *b = in + 2 * count;
    for (int64_t i = 0; i < count; i++) p[i] = (uint8_t)((r[i] * 19595u + g[i] * 38470u + b[i] * 7471u + 32768u) >> 16);
    return out;
  }
  int colours = channels == 1 ? 1 : 3;
  for (int c = 0; c < colours; c++) memcpy(p + c * count, in + (have >= 3 ? c * count : 0), (size_t)count);
  if (channels == 4) {
    if (have == 2) memcpy(p + 3 * count, in + count, (size_t)count);
    else memset(p + 3 * count, 255, (size_t)count);
  }
  return out;
}

ty_tensor *ty_image_decode(const void *data, size_t size, const char *name, int channels) {
  const uint8_t *p = data;
  ty_tensor *t;
  if (channels != 0 && channels != 1 && channels != 3 && channels != 4) {
    ty_fail(TY_EINVAL, "image: channels: expected 1, 3 or 4, or 0 for those of the file, got %d", channels);
    return NULL;
  }
  if (size >= 8 && memcmp(p, "\x89PNG\r\n\x1a\n", 8) == 0) t = ty_png_decode(p, size, name);
  else if (size >= 3 && memcmp(p, "\xff\xd8\xff", 3) == 0) t = ty_jpeg_decode(p, size, name);
  else {
    ty_fail(TY_EIO, "image %s is neither PNG nor JPEG (%zu bytes, beginning with %s)", ty_quote_text(name), size,
            ty_quote(p, size < 8 ? size : 8));
    return NULL;
  }
  if (!t || !channels || t->v.size[0] == channels) return t;
  ty_tensor *converted = convert(t, channels);
  ty_release(t);
  return converted;
}
