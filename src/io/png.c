/* PNG to and from u8 planes, by libpng. Its errors jump; everything that must be released lives in a struct outside
 * the frame that is jumped over. */
#include <png.h>
#include <stdlib.h>
#include <string.h>
#include "../ops/op.h"
#include "formats.h"

typedef struct reader {
  png_structp png;
  png_infop info;
  const uint8_t *p, *end;
  const char *name;
  uint8_t *pixels, **rows;
  int64_t width, height;
  int channels;
} reader;

static void on_error(png_structp png, png_const_charp message) {
  const char *name = png_get_error_ptr(png);
  ty_fail(ty_interrupted ? TY_EINTR : TY_EIO, "png %s: %s", ty_quote_text(name), message);
  png_longjmp(png, 1);
}

static void on_warning(png_structp png, png_const_charp message) {
  (void)png;
  (void)message;
}

static void read_bytes(png_structp png, png_bytep out, size_t size) {
  reader *r = png_get_io_ptr(png);
  if (ty_interrupted) png_error(png, "interrupted");
  if (size > (size_t)(r->end - r->p)) png_error(png, "the file is cut short");
  memcpy(out, r->p, size);
  r->p += size;
}

static bool decode(reader *r, size_t size) {
  if (setjmp(png_jmpbuf(r->png))) return false;
  png_set_read_fn(r->png, r, read_bytes);
  png_set_user_limits(r->png, 1 << 30, 1 << 30); /* ty_image_fits() says it better */
  png_set_chunk_malloc_max(r->png, 8 << 20);
  png_read_info(r->png, r->info);
  r->width = png_get_image_width(r->png, r->info);
  r->height = png_get_image_height(r->png, r->info);
  if (!ty_image_fits(r->name, (uint64_t)r->width, (uint64_t)r->height)) return false;
  /* deflate makes at most 1032 bytes of one, so this much memory is asked for only by a file of matching size */
  if (png_get_rowbytes(r->png, r->info) * (uint64_t)r->height / 1032 > size) png_error(r->png, "the file is cut short");
  png_set_expand(r->png);
  png_set_scale_16(r->png);
  png_set_interlace_handling(r->png);
  png_read_update_info(r->png, r->info);
  r->channels = png_get_channels(r->png, r->info);
  size_t row = png_get_rowbytes(r->png, r->info);
  if (row != (size_t)r->width * (size_t)r->channels) png_error(r->png, "an unknown pixel format");
  r->pixels = malloc(row * (size_t)r->height);
  r->rows = malloc((size_t)r->height * sizeof *r->rows);
  if (!r->pixels || !r->rows) png_error(r->png, "no memory for the pixels");
  for (int64_t y = 0; y < r->height; y++) r->rows[y] = r->pixels + (size_t)y * row;
  png_read_image(r->png, r->rows);
  png_read_end(r->png, r->info);
  return true;
}

/* Runs `use` on a file that was read whole. */
static bool with_reader(const uint8_t *data, size_t size, const char *name, bool (*use)(reader *r, void *out),
                        void *out) {
  reader r = { .p = data, .end = data + size, .name = name };
  r.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, (void *)(uintptr_t)name, on_error, on_warning);
  r.info = r.png ? png_create_info_struct(r.png) : NULL;
  bool ok = false;
  if (!r.info) ty_fail(TY_ENOMEM, "png: no memory to read %s", ty_quote_text(name));
  else ok = decode(&r, size) && use(&r, out);
  png_destroy_read_struct(&r.png, &r.info, NULL);
  free(r.pixels);
  free(r.rows);
  return ok;
}

static bool planes_of(reader *r, void *out) {
  *(ty_tensor **)out = ty_image_planes(r->pixels, r->width, r->height, r->channels);
  return *(ty_tensor **)out != NULL;
}

ty_tensor *ty_png_decode(const uint8_t *data, size_t size, const char *name) {
  ty_tensor *t = NULL;
  with_reader(data, size, name, planes_of, &t);
  return t;
}

/* Text without an encoding of its own is Latin-1. */
static bool put_latin(ty_bytes *out, const char *text, size_t size) {
  for (size_t i = 0; i < size; i++) {
    uint8_t c = (uint8_t)text[i], two[2] = { (uint8_t)(0xc0 | c >> 6), (uint8_t)(0x80 | (c & 0x3f)) };
    if (!(c < 0x80 ? ty_bytes_put(out, &c, 1) : ty_bytes_put(out, two, 2))) return false;
  }
  return true;
}

static bool texts_of(reader *r, void *bytes) {
  ty_bytes *out = bytes;
  png_textp texts = NULL;
  int count = 0;
  png_get_text(r->png, r->info, &texts, &count);
  for (int i = 0; i < count; i++) {
    const png_text *t = &texts[i];
    bool utf8 = t->compression >= PNG_ITXT_COMPRESSION_NONE;
    size_t size = t->text ? strlen(t->text) : 0;
    bool ok = ty_bytes_put(out, t->key, strlen(t->key) + 1) &&
              (utf8 ? size == 0 || ty_bytes_put(out, t->text, size) : put_latin(out, t->text, size)) &&
              ty_bytes_put(out, "", 1);
    if (!ok) return false;
  }
  return true;
}

bool ty_png_texts(const uint8_t *data, size_t size, const char *name, ty_bytes *out) {
  static const uint8_t magic[] = { 0x89, 'P', 'N', 'G' };
  if (size < sizeof magic || memcmp(data, magic, sizeof magic) != 0)
    return ty_fail(TY_EIO, "png %s: expected a PNG, got something else", ty_quote_text(name));
  return with_reader(data, size, name, texts_of, out);
}

typedef struct writer {
  png_structp png;
  png_infop info;
  ty_bytes *out;
  uint8_t *row;
} writer;

static void write_bytes(png_structp png, png_bytep data, size_t size) {
  if (!ty_bytes_put(png_get_io_ptr(png), data, size)) png_error(png, "no memory");
}

static void flush_nothing(png_structp png) { (void)png; }

static void set_text(writer *w, const ty_png_text *t) {
  bool ascii = true;
  for (const char *c = t->value; *c; c++) ascii &= (uint8_t)*c < 0x80;
  png_text text = { .compression = ascii ? PNG_TEXT_COMPRESSION_NONE : PNG_ITXT_COMPRESSION_NONE,
                    .key = (char *)(uintptr_t)t->key,
                    .text = (char *)(uintptr_t)t->value,
                    .text_length = strlen(t->value) };
  png_set_text(w->png, w->info, &text, 1);
}

static bool encode(writer *w, const uint8_t *planes, int channels, int64_t width, int64_t height, int level,
                   const ty_png_text *texts, int count) {
  static const int colour[] = { 0, PNG_COLOR_TYPE_GRAY, PNG_COLOR_TYPE_GRAY_ALPHA, PNG_COLOR_TYPE_RGB,
                                PNG_COLOR_TYPE_RGB_ALPHA };
  if (setjmp(png_jmpbuf(w->png))) return false;
  png_set_write_fn(w->png, w->out, write_bytes, flush_nothing);
  png_set_compression_level(w->png, level);
  png_set_IHDR(w->png, w->info, (png_uint_32)width, (png_uint_32)height, 8, colour[channels], PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  for (int i = 0; i < count; i++) set_text(w, &texts[i]);
  png_write_info(w->png, w->info);
  for (int64_t y = 0; y < height; y++) {
    for (int c = 0; c < channels; c++) {
      const uint8_t *line = planes + (c * height + y) * width;
      for (int64_t x = 0; x < width; x++) w->row[x * channels + c] = line[x];
    }
    png_write_row(w->png, w->row);
  }
  png_write_end(w->png, NULL);
  return true;
}

/* A key as the format has it: 1 to 79 characters, no space at its ends. */
static bool check_key(const char *key) {
  size_t size = strlen(key);
  bool ok = size >= 1 && size <= 79 && key[0] != ' ' && key[size - 1] != ' ';
  for (const char *c = key; *c; c++) ok &= *c >= ' ' && *c <= '~';
  return ok || ty_fail(TY_EINVAL,
                       "png: text: expected keys of 1 to 79 characters of ASCII, without spaces at the ends, "
                       "got %s",
                       ty_quote_text(key));
}

bool ty_png_encode(ty_tensor *image, int level, const ty_png_text *texts, int count, ty_bytes *out) {
  const ty_view *v = &image->v;
  int channels = v->ndim == 3 ? (int)(v->size[0] <= 4 ? v->size[0] : 5) : 1;
  int64_t height = v->ndim >= 2 ? v->size[v->ndim - 2] : 0, width = v->ndim >= 2 ? v->size[v->ndim - 1] : 0;
  if (v->dtype != TY_U8 || v->ndim < 2 || v->ndim > 3 || channels < 1 || channels > 4 || width < 1 || height < 1)
    return ty_fail(TY_EINVAL, "png: expected a u8 image [height, width] or [1 to 4 channels, height, width], got %s",
                   ty_describe(image));
  if (level < 0 || level > 9) return ty_fail(TY_EINVAL, "png: level: expected 0 (fast) to 9 (small), got %d", level);
  for (int i = 0; i < count; i++)
    if (!check_key(texts[i].key)) return false;
  if (!ty_image_fits("to write", (uint64_t)width, (uint64_t)height)) return false;
  ty_tensor *host = ty_host_tensor(image);
  writer w = { .out = out };
  w.png = host ? png_create_write_struct(PNG_LIBPNG_VER_STRING, (void *)(uintptr_t) "to write", on_error, on_warning)
               : NULL;
  w.info = w.png ? png_create_info_struct(w.png) : NULL;
  w.row = malloc((size_t)(width * channels));
  bool ok = w.info && w.row ? encode(&w, host->v.data, channels, width, height, level, texts, count)
                            : host && ty_fail(TY_ENOMEM, "png: no memory to write");
  png_destroy_write_struct(&w.png, &w.info);
  free(w.row);
  ty_release(host);
  return ok;
}

/* The first chunk, IHDR, has them at fixed places. */
bool ty_png_size(const uint8_t *data, size_t size, const char *name, int64_t out[3]) {
  static const uint8_t channels[] = { 1, 0, 3, 3, 2, 0, 4 }; /* by colour type */
  if (size < 26 || memcmp(data + 12, "IHDR", 4) != 0 || data[25] > 6 || !channels[data[25]])
    return ty_fail(TY_EIO, "png %s: the file has no header", ty_quote_text(name));
  out[0] = channels[data[25]];
  for (int i = 0; i < 2; i++) {
    const uint8_t *p = data + 16 + 4 * i;
    out[2 - i] = (int64_t)p[0] << 24 | (int64_t)p[1] << 16 | (int64_t)p[2] << 8 | p[3];
  }
  return true;
}
