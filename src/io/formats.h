/* The file formats: each reads and writes tensors, knows nothing of Lua, and takes every byte of a file for hostile. */
#ifndef TY_IO_FORMATS_H
#define TY_IO_FORMATS_H

#include "file.h"

/* Named tensors and text, read from a file (which then owns the names through `pool` and has a reference on the
 * tensors) or collected for writing (all borrowed). */
typedef struct ty_named {
  const char *name;
  size_t name_size;
  ty_tensor *tensor;
} ty_named;
typedef struct ty_note {
  const char *key, *value;
  size_t key_size, value_size;
} ty_note;
typedef struct ty_bundle {
  ty_named *tensors;
  size_t count;
  ty_note *notes; /* safetensors: __metadata__ */
  size_t note_count;
  bool has_notes;
  char *pool;
} ty_bundle;
void ty_bundle_free(ty_bundle *b);                /* of a bundle that was read; leaves it empty */
int ty_named_order(const void *a, const void *b); /* for qsort: by name */

/* ---- safetensors ---- */
/* Tensors are views on the mapping (unless `copy`), in file order. `name`: the file, for errors. */
bool ty_safetensors_read(ty_mapping *m, const char *name, bool copy, ty_bundle *out);
/* Where a tensor lies in a file, and the sum of its bytes. */
typedef struct ty_place {
  const char *name; /* of the bundle */
  size_t name_size;
  uint64_t at, bytes;
  uint32_t crc;
} ty_place;
/* rate: bytes a second at most, 0: no limit; crc: of the file, NULL: not wanted; places: room for as many as there are
 * tensors, in the order of the file, or NULL. */
bool ty_safetensors_write(const char *path, const ty_bundle *b, double rate, uint32_t *crc, ty_place *places);

/* ---- PyTorch's zip checkpoints ---- */
/* Names of nested dictionaries are joined by dots; numbers and text become notes. */
bool ty_torch_read(ty_mapping *m, const char *name, bool copy, ty_bundle *out);

/* ---- NumPy ---- */
/* Big-endian and unsigned types that we lack become the next type that holds all their values (u16 -> i32, u32 ->
 * i64, u64 -> i64 with a check). Fortran order comes as a transposed view. */
ty_tensor *ty_npy_read(ty_mapping *m, const char *name, bool copy);
bool ty_npy_write(const char *path, ty_tensor *t);
/* most: bytes that compressed arrays may inflate to in all; negative: what ty_inflated_most() says. */
bool ty_npz_read(ty_mapping *m, const char *name, bool copy, int64_t most, ty_bundle *out);
bool ty_npz_write(const char *path, const ty_bundle *b, bool compress);

/* A source of bytes in order: a piece of a file or what inflating it gives. */
typedef struct ty_source {
  bool (*read)(struct ty_source *s, void *out, size_t size); /* all of it or false */
  uint64_t left;                                             /* bytes still to come */
  ty_mapping *map;                                           /* when the bytes lie there as they are, from `offset` */
  size_t offset;
} ty_source;
ty_tensor *ty_npy_read_source(ty_source *s, const char *name, bool copy);
/* The header of a contiguous tensor, padded to 64 bytes. */
bool ty_npy_header(ty_tensor *t, ty_bytes *out);

/* Which other format takes a block-quantized dtype, for error texts: NF4 and NVFP4 have none. */
static inline const char *ty_elsewhere(ty_dtype dtype) {
  return dtype == TY_NF4 || dtype == TY_NVFP4 ? "" : ", or save as .gguf";
}

/* ---- images: u8 tensors [channels, height, width]; 1 gray, 2 gray+alpha, 3 RGB, 4 RGBA ---- */
/* PNG, JPEG or WebP, told apart by their first bytes. channels: 0 as in the file, else 1, 3 or 4 to convert to. upright:
 * turned as the file's Exif data say, boxes and sizes with it. */
/* A box of a picture, in pixels, and how many rows and columns are made of it (0: as many as it has). Height
 * 0 stands for the whole picture. */
typedef struct ty_image_part {
  double top, left, height, width;
  int64_t rows, columns;
} ty_image_part;
/* The box, which is checked, of a picture of such a size. */
bool ty_image_part_of(ty_image_part *part, const char *name, int64_t width, int64_t height);
/* part: NULL for all of it */
ty_tensor *ty_image_decode(const void *data, size_t size, const char *name, int channels, const ty_image_part *part,
                           bool upright);
/* Channels, height and width, which the file claims. */
bool ty_image_size(const void *data, size_t size, const char *name, int64_t out[3], bool upright);
/* Exif's Orientation of a file, 1 to 8; 1, as it stands, where it says nothing. */
int ty_exif_orientation(const uint8_t *data, size_t size);
/* What stands in a PNG beside its pixels, by keys of 1 to 79 characters of ASCII; UTF-8. */
typedef struct ty_png_text {
  const char *key, *value;
} ty_png_text;
bool ty_png_encode(ty_tensor *image, int level, const ty_png_text *texts, int count, ty_bytes *out);
/* All texts of a PNG: key, 0, value, 0, key ... in UTF-8, in the file's order. */
bool ty_png_texts(const uint8_t *data, size_t size, const char *name, ty_bytes *out);
ty_tensor *ty_png_decode(const uint8_t *data, size_t size, const char *name);
/* part: NULL, or what will be made of it: the picture may come smaller and without what is not needed; the box becomes
 * one of what came. */
ty_tensor *ty_jpeg_decode(const uint8_t *data, size_t size, const char *name, ty_image_part *part);
bool ty_jpeg_size(const uint8_t *data, size_t size, const char *name, int64_t out[3]);
bool ty_png_size(const uint8_t *data, size_t size, const char *name, int64_t out[3]);
/* WebP, where the build has it. quality: negative for a lossless file; level: 0 (fast) to 9 (small). */
ty_tensor *ty_webp_decode(const uint8_t *data, size_t size, const char *name);
bool ty_webp_size(const uint8_t *data, size_t size, const char *name, int64_t out[3]);
bool ty_webp_encode(ty_tensor *image, int quality, int level, ty_bytes *out);
/* [h, w, c] bytes to a new tensor [c, h, w], and the checks all image readers share. */
bool ty_image_fits(const char *name, uint64_t width, uint64_t height);
ty_tensor *ty_image_planes(const uint8_t *pixels, int64_t width, int64_t height, int channels);

/* ---- sound: FLAC, where the build has it ---- */
/* f32 [channels, samples] from -1 to 1, of the samples from `from` on `count` at most (negative: all); an error past `most`
 * numbers in all. */
ty_tensor *ty_flac_decode(const uint8_t *data, size_t size, const char *name, int64_t from, int64_t count, int64_t most,
                          int64_t *rate, int *bits);
/* Of i32 samples [samples, channels] that fit into `bits`. */
bool ty_flac_encode(ty_tensor *sound, int64_t rate, int bits, int level, ty_bytes *out);

/* ---- text ---- */
typedef struct ty_text ty_text; /* an open text file, gzip or plain */
ty_text *ty_text_open(const char *path);
void ty_text_close(ty_text *t);
/* The next line without its end (\n or \r\n), valid until the next call; *line NULL at the end. */
bool ty_text_line(ty_text *t, const char **line, size_t *size);
/* What is left, at most `most` bytes or it fails. Negative: the default, 2^32 of a plain file, and of gzip data, which
 * can inflate to a thousand times its size, what ty_inflated_most() says. */
bool ty_text_rest(ty_text *t, int64_t most, size_t floor, ty_bytes *out);
/* The longest line, by the same rule; the default is that with a floor of TY_TEXT_FLOOR. */
void ty_text_limit_lines(ty_text *t, int64_t most);

/* How much `size` bytes of compressed data may inflate to when nobody has said: what files of numbers and text that mean
 * well do, and no less than `floor`. */
enum { TY_TEXT_FLOOR = 256 << 20, TY_JSON_FLOOR = 64 << 20, TY_NPZ_FLOOR = 1 << 30 };
static inline uint64_t ty_inflated_most(uint64_t size, uint64_t floor) { return size > floor / 16 ? size * 16 : floor; }

typedef struct ty_csv_options {
  char delimiter;
  int header;       /* 0 none, 1 the first line, -1 when a cell of the first line is no number */
  int64_t skip;     /* lines before everything else */
  bool missing_nan; /* an empty cell is NaN, else an error */
  ty_dtype dtype;   /* TY_F32 or TY_F64 */
} ty_csv_options;
/* [rows, columns]; *names: column names, each ended by NUL, empty without a header. */
ty_tensor *ty_csv_parse(const char *text, size_t size, const char *name, const ty_csv_options *options,
                        ty_bytes *names);

/* ---- TensorBoard ---- */
typedef struct ty_events ty_events;
ty_events *ty_events_open(const char *path);
bool ty_events_scalar(ty_events *e, const char *tag, size_t tag_size, int64_t step, double wall_time, float value);
bool ty_events_flush(ty_events *e);
bool ty_events_close(ty_events *e); /* frees in any case */

#endif
