/* WebP to and from u8 planes, by libwebp where the build has it. */
#include <stdlib.h>
#include <string.h>
#include "../ops/op.h"
#include "formats.h"

#ifdef TY_HAVE_WEBP
#include <webp/decode.h>
#include <webp/encode.h>

/* One picture that libwebp can decode: what it is, checked. */
static bool read_features(const uint8_t *data, size_t size, const char *name, WebPBitstreamFeatures *f) {
  VP8StatusCode status = WebPGetFeatures(data, size, f);
  if (status == VP8_STATUS_NOT_ENOUGH_DATA)
    return ty_fail(TY_EIO, "webp %s: the file is cut short", ty_quote_text(name));
  if (status != VP8_STATUS_OK) return ty_fail(TY_EIO, "webp %s: the header is damaged", ty_quote_text(name));
  if (f->has_animation)
    return ty_fail(TY_EIO, "webp %s: it is animated; only files of one picture are read", ty_quote_text(name));
  return ty_image_fits(name, (uint64_t)f->width, (uint64_t)f->height);
}

static const char *reason(VP8StatusCode status) {
  switch (status) {
    case VP8_STATUS_OUT_OF_MEMORY: return "no memory for the pixels";
    case VP8_STATUS_NOT_ENOUGH_DATA:
    case VP8_STATUS_SUSPENDED: return "the file is cut short";
    case VP8_STATUS_UNSUPPORTED_FEATURE: return "a kind of file that libwebp does not read";
    default: return "the file is damaged";
  }
}

ty_tensor *ty_webp_decode(const uint8_t *data, size_t size, const char *name) {
  WebPDecoderConfig config;
  if (!WebPInitDecoderConfig(&config)) {
    ty_fail(TY_EIO, "webp: libwebp is of another version than its headers were");
    return NULL;
  }
  if (!read_features(data, size, name, &config.input)) return NULL;
  int channels = config.input.has_alpha ? 4 : 3, width = config.input.width, height = config.input.height;
  size_t row = (size_t)width * (size_t)channels, bytes = row * (size_t)height;
  uint8_t *pixels = malloc(bytes);
  if (!pixels) {
    ty_fail(TY_ENOMEM, "webp %s: no memory for the pixels", ty_quote_text(name));
    return NULL;
  }
  config.output.colorspace = channels == 4 ? MODE_RGBA : MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA = (WebPRGBABuffer){ pixels, (int)row, bytes };
  VP8StatusCode status = WebPDecode(data, size, &config);
  ty_tensor *t = NULL;
  if (status == VP8_STATUS_OK) t = ty_image_planes(pixels, width, height, channels);
  else ty_fail(TY_EIO, "webp %s: %s", ty_quote_text(name), reason(status));
  WebPFreeDecBuffer(&config.output);
  free(pixels);
  return t;
}

bool ty_webp_size(const uint8_t *data, size_t size, const char *name, int64_t out[3]) {
  WebPBitstreamFeatures f;
  if (!read_features(data, size, name, &f)) return false;
  out[0] = f.has_alpha ? 4 : 3;
  out[1] = f.height;
  out[2] = f.width;
  return true;
}

static int put(const uint8_t *data, size_t size, const WebPPicture *picture) {
  return ty_bytes_put(picture->custom_ptr, data, size);
}

static int go_on(int percent, const WebPPicture *picture) {
  (void)percent;
  (void)picture;
  return !ty_interrupted;
}

/* Rows of red, green, blue and alpha of planes that may be gray. */
static uint8_t *interleave(const uint8_t *planes, int channels, int64_t width, int64_t height) {
  int64_t count = width * height;
  uint8_t *rgba = malloc((size_t)count * 4);
  for (int64_t i = 0; rgba && i < count; i++) {
    for (int c = 0; c < 3; c++) rgba[4 * i + c] = planes[(channels >= 3 ? c * count : 0) + i];
    rgba[4 * i + 3] = channels % 2 ? 255 : planes[(channels - 1) * count + i];
  }
  return rgba;
}

static bool encode(WebPPicture *picture, const WebPConfig *config, const uint8_t *rgba) {
  if (!WebPPictureImportRGBA(picture, rgba, picture->width * 4)) return ty_fail(TY_ENOMEM, "webp: no memory to write");
  if (WebPEncode(config, picture)) return true;
  if (ty_interrupted) return ty_fail(TY_EINTR, "webp: interrupted");
  return ty_fail(TY_EIO, "webp: the picture cannot be written (libwebp's error %d)", (int)picture->error_code);
}

bool ty_webp_encode(ty_tensor *image, int quality, int level, ty_bytes *out) {
  const ty_view *v = &image->v;
  int channels = v->ndim == 3 ? (int)(v->size[0] <= 4 ? v->size[0] : 5) : 1;
  int64_t height = v->ndim >= 2 ? v->size[v->ndim - 2] : 0, width = v->ndim >= 2 ? v->size[v->ndim - 1] : 0;
  if (v->dtype != TY_U8 || v->ndim < 2 || v->ndim > 3 || channels < 1 || channels > 4 || width < 1 || height < 1 ||
      width > WEBP_MAX_DIMENSION || height > WEBP_MAX_DIMENSION)
    return ty_fail(TY_EINVAL,
                   "webp: expected a u8 image [height, width] or [1 to 4 channels, height, width] of at most %d pixels "
                   "on a side, got %s",
                   WEBP_MAX_DIMENSION, ty_describe(image));
  if (quality > 100) return ty_fail(TY_EINVAL, "webp: quality: expected 0 to 100, got %d", quality);
  if (level < 0 || level > 9) return ty_fail(TY_EINVAL, "webp: level: expected 0 (fast) to 9 (small), got %d", level);
  WebPConfig config;
  WebPPicture picture;
  if (!WebPConfigInit(&config) || !WebPPictureInit(&picture))
    return ty_fail(TY_EIO, "webp: libwebp is of another version than its headers were");
  if (quality < 0) {
    WebPConfigLosslessPreset(&config, level);
    config.exact = 1; /* colours under what is transparent, too */
  } else {
    config.quality = (float)quality;
    config.method = level < 6 ? level : 6;
  }
  picture.use_argb = 1;
  picture.width = (int)width;
  picture.height = (int)height;
  picture.writer = put;
  picture.custom_ptr = out;
  picture.progress_hook = go_on;
  ty_tensor *host = ty_host_tensor(image);
  uint8_t *rgba = host ? interleave(host->v.data, channels, width, height) : NULL;
  bool ok = rgba ? encode(&picture, &config, rgba) : host && ty_fail(TY_ENOMEM, "webp: no memory to write");
  WebPPictureFree(&picture);
  free(rgba);
  ty_release(host);
  return ok;
}

#else

static bool missing(void) {
  return ty_fail(TY_EIO, "webp: this build has no WebP: install libwebp-dev (Debian's name) and build Tycho again");
}

ty_tensor *ty_webp_decode(const uint8_t *data, size_t size, const char *name) {
  missing();
  return NULL;
}

bool ty_webp_size(const uint8_t *data, size_t size, const char *name, int64_t out[3]) { return missing(); }

bool ty_webp_encode(ty_tensor *image, int quality, int level, ty_bytes *out) { return missing(); }

#endif
