/* Zip archives: the directory at the end, entries stored or deflated, zip64. For npz and whatever else comes as a
 * zip. */
#ifndef TY_IO_ZIP_H
#define TY_IO_ZIP_H

#include <zlib.h>
#include "formats.h"

typedef struct ty_zip_entry {
  const char *name; /* in the mapping, not ended by NUL */
  size_t name_size;
  uint16_t method; /* 0 stored, 8 deflated */
  uint32_t crc;
  uint64_t packed, size; /* bytes in the file and inflated */
  size_t data;           /* where they begin */
} ty_zip_entry;

typedef struct ty_zip {
  ty_mapping *map; /* borrowed */
  const char *file;
  ty_zip_entry *entries;
  size_t count;
} ty_zip;

/* Reads the directory and checks it against the local headers. A zipped size is never believed beyond what deflate
 * can reach. */
bool ty_zip_open(ty_zip *z, ty_mapping *map, const char *file);
void ty_zip_close(ty_zip *z);

/* The bytes of one entry in order; `source` first. */
typedef struct ty_zip_source {
  ty_source source;
  const ty_zip *zip;
  const ty_zip_entry *entry;
  z_stream stream;
  bool inflating;
  uint64_t unread; /* packed bytes not yet given to zlib */
  uint32_t crc;
} ty_zip_source;
bool ty_zip_source_open(ty_zip_source *s, const ty_zip *z, const ty_zip_entry *e);
bool ty_zip_source_finish(ty_zip_source *s); /* everything was read and is what the directory says */
void ty_zip_source_close(ty_zip_source *s);

/* ---- writing ---- */
typedef struct ty_zip_writer {
  ty_writer *out;
  ty_bytes directory;
  uint64_t count;
} ty_zip_writer;
/* One entry made of two pieces (a header and the data). Stored data begins at a multiple of 64 bytes. */
bool ty_zip_add(ty_zip_writer *z, const char *name, size_t name_size, const void *head, size_t head_size,
                const void *data, size_t size, bool compress);
bool ty_zip_end(ty_zip_writer *z); /* the directory */
void ty_zip_writer_free(ty_zip_writer *z);

#endif
