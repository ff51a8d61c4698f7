/* What the image formats share: recognition, limits, planes, channels and the way that is up. */
#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

#if defined(__x86_64__)
/* The planes of the first 16, 32, ... of count pixels of three bytes; returns how many. */
__attribute__((target("ssse3"))) static int64_t split_vectors(const uint8_t *pixels, int64_t count, uint8_t *planes) {
  uint8_t order[3][3][16]; /* of a plane, from each of the three vectors that 16 pixels are */
  for (int c = 0; c < 3; c++)
    for (int v = 0; v < 3; v++)
      for (int k = 0; k < 16; k++) order[c][v][k] = (uint8_t)((3 * k + c) / 16 == v ? (3 * k + c) % 16 : 0x80);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m128i *from = (const __m128i *)(const void *)(pixels + 3 * i);
    const __m128i part[3] = { _mm_loadu_si128(from), _mm_loadu_si128(from + 1), _mm_loadu_si128(from + 2) };
    for (int c = 0; c < 3; c++) {
      __m128i plane = _mm_setzero_si128();
      for (int v = 0; v < 3; v++) {
        const __m128i places = _mm_loadu_si128((const __m128i *)(const void *)order[c][v]);
        plane = _mm_or_si128(plane, _mm_shuffle_epi8(part[v], places));
      }
      _mm_storeu_si128((__m128i *)(void *)(planes + c * count + i), plane);
    }
  }
  return i;
}
#endif

ty_tensor *ty_image_planes(const uint8_t *pixels, int64_t width, int64_t height, int channels) {
  ty_tensor *t = ty_tensor_new(TY_CPU, TY_U8, 3, (const int64_t[]){ channels, height, width });
  if (!t) return NULL;
  int64_t count = width * height, done = 0;
#if defined(__x86_64__)
  if (channels == 3 && __builtin_cpu_supports("ssse3")) done = split_vectors(pixels, count, t->v.data);
#endif
  for (int c = 0; c < channels; c++) {
    uint8_t *plane = (uint8_t *)t->v.data + c * count;
    for (int64_t i = done; i < count; i++) plane[i] = pixels[i * channels + c];
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

bool ty_image_part_of(ty_image_part *part, const char *name, int64_t width, int64_t height) {
  if (part->height == 0) {
    part->top = part->left = 0;
    part->height = (double)height, part->width = (double)width;
  }
  bool inside = part->top >= 0 && part->left >= 0 && part->height > 0 && part->width > 0 &&
                part->top + part->height <= (double)height && part->left + part->width <= (double)width;
  if (!inside)
    return ty_fail(TY_EINVAL,
                   "image %s: crop: expected { top, left, height, width } inside of %lld x %lld pixels, got "
                   "{ %g, %g, %g, %g }",
                   ty_quote_text(name), (long long)height, (long long)width, part->top, part->left, part->height,
                   part->width);
  if (!part->rows) part->rows = part->height < 1 ? 1 : (int64_t)(part->height + 0.5);
  if (!part->columns) part->columns = part->width < 1 ? 1 : (int64_t)(part->width + 0.5);
  return true;
}

/* The box at its size. */
static ty_tensor *cut(ty_tensor *t, const ty_image_part *part) {
  ty_scope scope;
  ty_scope_open(&scope);
  ty_tensor *box = ty_scope_add(ty_tensor_new(TY_CPU, TY_F64, 2, (const int64_t[]){ 1, 4 }));
  ty_tensor *y = NULL;
  if (box) {
    memcpy(box->v.data, (const double[]){ part->top, part->left, part->height, part->width }, 4 * sizeof(double));
    y = ty_crop_resize(ty_unsqueeze(t, 0), box, TY_INTS(part->rows, part->columns), "bilinear");
    y = y ? ty_retain(ty_select(y, 0, 0)) : NULL;
  }
  ty_scope_close(&scope);
  return y;
}

enum { UNKNOWN, PNG, JPEG, WEBP };
static int kind_of(const uint8_t *p, size_t size, const char *name) {
  if (size >= 8 && memcmp(p, "\x89PNG\r\n\x1a\n", 8) == 0) return PNG;
  if (size >= 3 && memcmp(p, "\xff\xd8\xff", 3) == 0) return JPEG;
  if (size >= 12 && memcmp(p, "RIFF", 4) == 0 && memcmp(p + 8, "WEBP", 4) == 0) return WEBP;
  ty_fail(TY_EIO, "image %s is neither PNG nor JPEG nor WebP (%zu bytes, beginning with %s)", ty_quote_text(name), size,
          ty_quote((const char *)p, size < 8 ? size : 8));
  return UNKNOWN;
}

/* ---- the way that a camera was held: Exif's orientations 2 to 8 ---- */

static bool lies(int orientation) { return orientation >= 5; }

/* The picture t [channels, height, width] as it is to be looked at. */
static ty_tensor *turned(ty_tensor *t, int orientation) {
  int64_t channels = t->v.size[0], height = t->v.size[1], width = t->v.size[2];
  int64_t rows = lies(orientation) ? width : height, columns = lies(orientation) ? height : width;
  ty_tensor *out = ty_tensor_new(TY_CPU, TY_U8, 3, (const int64_t[]){ channels, rows, columns });
  if (!out) return NULL;
  /* Whether rows and columns of the file are walked backwards. */
  bool up = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  bool back = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  int64_t down = up ? -width : width, right = back ? -1 : 1;
  int64_t first = (up ? (height - 1) * width : 0) + (back ? width - 1 : 0);
  int64_t by_row = lies(orientation) ? right : down, by_column = lies(orientation) ? down : right;
  uint8_t *to = out->v.data;
  for (int64_t c = 0; c < channels; c++) {
    const uint8_t *from = (const uint8_t *)t->v.data + c * height * width + first;
    for (int64_t y = 0; y < rows; y++)
      for (int64_t x = 0; x < columns; x++) *to++ = from[y * by_row + x * by_column];
  }
  return out;
}

/* A box of the picture as it is to be looked at becomes one of the file's width x height pixels. */
static bool box_in_file(ty_image_part *part, const char *name, int orientation, int64_t width, int64_t height) {
  if (!ty_image_part_of(part, name, lies(orientation) ? height : width, lies(orientation) ? width : height))
    return false;
  if (lies(orientation)) {
    double top = part->top, tall = part->height;
    int64_t rows = part->rows;
    part->top = part->left, part->height = part->width, part->rows = part->columns;
    part->left = top, part->width = tall, part->columns = rows;
  }
  if (orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7)
    part->top = (double)height - part->top - part->height;
  if (orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8)
    part->left = (double)width - part->left - part->width;
  return true;
}

static bool size_in_file(int kind, const void *data, size_t size, const char *name, int64_t out[3]) {
  return (kind == PNG    ? ty_png_size
          : kind == WEBP ? ty_webp_size
                         : ty_jpeg_size)(data, size, name, out) &&
         ty_image_fits(name, (uint64_t)out[2], (uint64_t)out[1]);
}

ty_tensor *ty_image_decode(const void *data, size_t size, const char *name, int channels, const ty_image_part *wanted,
                           bool upright) {
  ty_image_part part;
  if (wanted) part = *wanted;
  if (channels != 0 && channels != 1 && channels != 3 && channels != 4) {
    ty_fail(TY_EINVAL, "image: channels: expected 1, 3 or 4, or 0 for those of the file, got %d", channels);
    return NULL;
  }
  int kind = kind_of(data, size, name), orientation = upright ? ty_exif_orientation(data, size) : 1;
  if (kind == UNKNOWN) return NULL;
  if (wanted && orientation != 1) {
    int64_t whole[3];
    if (!size_in_file(kind, data, size, name, whole) || !box_in_file(&part, name, orientation, whole[2], whole[1]))
      return NULL;
  }
  ty_tensor *t = kind == PNG    ? ty_png_decode(data, size, name)
                 : kind == WEBP ? ty_webp_decode(data, size, name)
                                : ty_jpeg_decode(data, size, name, wanted ? &part : NULL);
  if (t && channels && t->v.size[0] != channels) {
    ty_tensor *converted = convert(t, channels);
    ty_release(t);
    t = converted;
  }
  if (t && wanted) {
    bool inside = kind == JPEG || ty_image_part_of(&part, name, t->v.size[2], t->v.size[1]);
    ty_tensor *y = inside ? cut(t, &part) : NULL;
    ty_release(t);
    t = y;
  }
  if (!t || orientation == 1) return t;
  ty_tensor *y = turned(t, orientation);
  ty_release(t);
  return y;
}

bool ty_image_size(const void *data, size_t size, const char *name, int64_t out[3], bool upright) {
  int kind = kind_of(data, size, name);
  if (kind == UNKNOWN || !size_in_file(kind, data, size, name, out)) return false;
  if (upright && lies(ty_exif_orientation(data, size))) {
    int64_t height = out[1];
    out[1] = out[2];
    out[2] = height;
  }
  return true;
}
