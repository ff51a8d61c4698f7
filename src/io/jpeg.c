/* JPEG to u8 planes, by libjpeg. Its errors jump; everything that must be released lives in a struct outside the
 * frame that is jumped over. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

#include <jerror.h>

#include "../ops/op.h"
#include "formats.h"

enum { SCANS_MOST = 200, PIXELS_PER_BYTE = 512 };

typedef struct reader {
  struct jpeg_decompress_struct jpeg;
  struct jpeg_error_mgr errors;
  struct jpeg_progress_mgr progress;
  jmp_buf jump;
  const char *name;
  ty_image_part *part;
  uint8_t *pixels;
  int64_t height;     /* rows of them */
  bool ended, hungry; /* the end of the file was met; data was missing where it was needed */
} reader;

static void on_error(j_common_ptr jpeg) {
  reader *r = jpeg->client_data;
  char text[JMSG_LENGTH_MAX];
  jpeg->err->format_message(jpeg, text);
  ty_fail(TY_EIO, "jpeg %s: %s", ty_quote_text(r->name), text);
  longjmp(r->jump, 1);
}

static void fail(reader *r, const char *text) {
  ty_fail(ty_interrupted ? TY_EINTR : TY_EIO, "jpeg %s: %s", ty_quote_text(r->name), text);
  longjmp(r->jump, 1);
}

static void on_message(j_common_ptr jpeg, int level) {
  reader *r = jpeg->client_data;
  if (level >= 0) return;
  r->ended |= jpeg->err->msg_code == JWRN_JPEG_EOF;
  r->hungry |= jpeg->err->msg_code == JWRN_HIT_MARKER;
}

/* Every scan of a progressive file walks over the whole image: a small file could keep us busy for hours. */
static void on_progress(j_common_ptr jpeg) {
  reader *r = jpeg->client_data;
  if (r->jpeg.input_scan_number > SCANS_MOST) fail(r, "more scans than any encoder writes");
  if (ty_interrupted) fail(r, "interrupted");
}

/* Adobe's CMYK is stored inverted. Without a colour profile this is what everybody does. */
static void cmyk_to_rgb(uint8_t *pixels, size_t count, bool inverted) {
  for (size_t i = 0; i < count; i++) {
    uint8_t *in = pixels + 4 * i, *out = pixels + 3 * i, flip = inverted ? 0 : 255;
    unsigned k = in[3] ^ flip;
    for (int c = 0; c < 3; c++) out[c] = (uint8_t)(((in[c] ^ flip) * k + 127) / 255);
  }
}

/* The smallest size that libjpeg decodes to as fast as the whole in which the box has all rows and columns wanted. */
static void choose_size(struct jpeg_decompress_struct *j, const ty_image_part *part) {
  unsigned eighths = 1;
  while (eighths < 8 &&
         (part->height * eighths < 8.0 * (double)part->rows || part->width * eighths < 8.0 * (double)part->columns))
    eighths *= 2;
  j->scale_num = eighths;
  j->scale_denom = 8;
}

/* The rows, and the columns as near as blocks allow, that the box has, with one more on each side; the box is measured
 * from there. */
static void cut_to_box(struct jpeg_decompress_struct *j, ty_image_part *part, JDIMENSION *from, JDIMENSION *to) {
  const double down = (double)j->output_height / j->image_height, across = (double)j->output_width / j->image_width;
  part->top *= down, part->height *= down, part->left *= across, part->width *= across;
  const double last = part->top + part->height + 2;
  *from = part->top > 2 ? (JDIMENSION)(part->top - 1) : 0;
  *to = last < j->output_height ? (JDIMENSION)last : j->output_height;
  part->top -= *from;
#ifdef LIBJPEG_TURBO_VERSION
  const double right = part->left + part->width + 2;
  JDIMENSION left = part->left > 2 ? (JDIMENSION)(part->left - 1) : 0;
  JDIMENSION width = (right < j->output_width ? (JDIMENSION)right : j->output_width) - left;
  if (width < j->output_width) {
    jpeg_crop_scanline(j, &left, &width);
    part->left -= left;
  }
  if (*from > 0) jpeg_skip_scanlines(j, *from);
#else
  part->top += *from;
  *from = 0;
#endif
}

static bool decode(reader *r, const uint8_t *data, size_t size) {
  struct jpeg_decompress_struct *j = &r->jpeg;
  if (setjmp(r->jump)) return false;
  jpeg_mem_src(j, data, size);
  jpeg_read_header(j, TRUE);
  if (!ty_image_fits(r->name, j->image_width, j->image_height)) return false;
  /* A block of 64 pixels takes a bit or more, so memory is asked for only by a file of matching size. */
  if ((uint64_t)j->image_width * j->image_height / PIXELS_PER_BYTE > size) fail(r, "the file is cut short");
  switch (j->jpeg_color_space) {
    case JCS_GRAYSCALE: j->out_color_space = JCS_GRAYSCALE; break;
    case JCS_YCbCr:
    case JCS_RGB: j->out_color_space = JCS_RGB; break;
    case JCS_CMYK:
    case JCS_YCCK: j->out_color_space = JCS_CMYK; break;
    default: fail(r, "an unknown colour space");
  }
  if (r->part && !ty_image_part_of(r->part, r->name, j->image_width, j->image_height)) return false;
  if (r->part) choose_size(j, r->part);
  jpeg_start_decompress(j);
  JDIMENSION from = 0, to = j->output_height;
  if (r->part) cut_to_box(j, r->part, &from, &to);
  size_t row = (size_t)j->output_width * (size_t)j->output_components;
  r->height = to - from;
  r->pixels = malloc(row * (size_t)r->height);
  if (!r->pixels) fail(r, "no memory for the pixels");
  while (j->output_scanline < to) {
    JSAMPROW line = r->pixels + row * (j->output_scanline - from);
    jpeg_read_scanlines(j, &line, 1);
    if (ty_interrupted) fail(r, "interrupted");
  }
  if (r->ended && (r->hungry || j->progressive_mode)) fail(r, "the file is cut short");
  return true;
}

static void begin(reader *r) {
  r->jpeg.err = jpeg_std_error(&r->errors);
  r->errors.error_exit = on_error;
  r->errors.emit_message = on_message;
  r->jpeg.client_data = r;
}

ty_tensor *ty_jpeg_decode(const uint8_t *data, size_t size, const char *name, ty_image_part *part) {
  reader r = { .name = name, .part = part };
  begin(&r);
  ty_tensor *t = NULL;
  if (setjmp(r.jump)) return NULL; /* the library could not even begin */
  jpeg_create_decompress(&r.jpeg);
  r.progress.progress_monitor = on_progress;
  r.jpeg.progress = &r.progress;
  if (decode(&r, data, size)) {
    bool cmyk = r.jpeg.out_color_space == JCS_CMYK;
    if (cmyk) cmyk_to_rgb(r.pixels, (size_t)r.jpeg.output_width * (size_t)r.height, r.jpeg.saw_Adobe_marker);
    t = ty_image_planes(r.pixels, r.jpeg.output_width, r.height, cmyk ? 3 : r.jpeg.output_components);
  }
  jpeg_destroy_decompress(&r.jpeg);
  free(r.pixels);
  return t;
}

static bool read_size(reader *r, const uint8_t *data, size_t size, int64_t out[3]) {
  if (setjmp(r->jump)) return false;
  jpeg_mem_src(&r->jpeg, data, size);
  jpeg_read_header(&r->jpeg, TRUE);
  out[0] = r->jpeg.jpeg_color_space == JCS_GRAYSCALE ? 1 : 3;
  out[1] = r->jpeg.image_height;
  out[2] = r->jpeg.image_width;
  return true;
}

bool ty_jpeg_size(const uint8_t *data, size_t size, const char *name, int64_t out[3]) {
  reader r = { .name = name };
  begin(&r);
  if (setjmp(r.jump)) return false;
  jpeg_create_decompress(&r.jpeg);
  bool ok = read_size(&r, data, size, out);
  jpeg_destroy_decompress(&r.jpeg);
  return ok;
}
