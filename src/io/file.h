/* Bytes on disk: whole-file reading, mappings that tensors can stand on, writing by rename, directories. What every
 * format of this folder is built from. Functions return false or NULL after ty_fail() with a text that names the
 * file. */
#ifndef TY_IO_FILE_H
#define TY_IO_FILE_H

#include "../tensor/tensor.h"

/* A growing buffer. Zeroed is empty; contents are freed by ty_bytes_free() in every case. */
typedef struct ty_bytes {
  uint8_t *data;
  size_t size, capacity;
} ty_bytes;
bool ty_bytes_reserve(ty_bytes *b, size_t more);
bool ty_bytes_put(ty_bytes *b, const void *data, size_t size);
bool ty_bytes_printf(ty_bytes *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void ty_bytes_free(ty_bytes *b);

/* Text from a file (a name, a key) made fit for an error message: quoted, control characters escaped, cut when long.
 * In a rotating buffer of this thread. */
const char *ty_quote(const void *text, size_t size);
const char *ty_quote_text(const char *text);
bool ty_valid_utf8(const void *text, size_t size);

/* A file in memory, counted by the tensors that stand on it. Mapped privately: writing changes the memory, never the
 * file. A pipe or device is read to its end instead. As with every mapping, a file that somebody cuts short while it
 * is in use kills the reader; Tycho's own writers rename and never do that. */
typedef struct ty_mapping {
  atomic_uint refs;
  uint8_t *data;
  size_t size;
  bool mapped; /* else from malloc */
} ty_mapping;
ty_mapping *ty_mapping_open(const char *path);
ty_mapping *ty_mapping_copy(const void *data, size_t size);
static inline void ty_mapping_retain(ty_mapping *m) { atomic_fetch_add_explicit(&m->refs, 1, memory_order_relaxed); }
void ty_mapping_release(void *mapping); /* void *: is the release function of wrapped tensors */
/* A tensor at `offset` of the mapping (the caller has checked the bounds): a view, or a copy when `copy` or when the
 * address does not suit the type. */
ty_tensor *ty_mapping_tensor(ty_mapping *m, size_t offset, ty_dtype dtype, int ndim, const int64_t *size, bool copy);

/* The whole file; fails past `cap` bytes. */
bool ty_file_read(const char *path, size_t cap, ty_bytes *out);
/* Up to `size` first bytes of a plain file; *got is 0 for what is not one. */
bool ty_file_peek(const char *path, void *out, size_t size, size_t *got);

/* The CRC-32 of gzip and zip: of more bytes after those whose sum is `crc` (of none: 0), and of a whole file. */
uint32_t ty_crc32(uint32_t crc, const void *data, size_t size);
uint32_t ty_crc32_join(uint32_t first, uint32_t second, uint64_t size); /* of bytes and of `size` that follow them */
bool ty_file_crc32(const char *path, uint32_t *out);

/* Writes beside and renames on success, so that a kill at any moment leaves the old file or the new one. What is not
 * a plain file (a pipe, /dev/stdout) is written directly.
 *   bool ok = ty_writer_open(&w, path) && ty_writer_put(&w, ...);
 *   return ty_writer_close(&w, ok); */
typedef struct ty_writer {
  int fd;
  bool direct;
  const char *path;    /* as the caller named it; borrowed */
  char *target, *temp; /* where links lead, and the file beside it */
  uint8_t *buffer;
  size_t used;
  uint64_t total; /* bytes put so far */
  uint32_t *crc;  /* of them, kept up to date where the caller points it at a 0; NULL: not wanted */
  double rate;    /* bytes a second at most, so that others have the disk as well; 0: as fast as it can */
  double since;   /* seconds of the clock at which writing would have begun at this rate */
} ty_writer;
bool ty_writer_open(ty_writer *w, const char *path);
bool ty_writer_put(ty_writer *w, const void *data, size_t size);
bool ty_writer_pad(ty_writer *w, int byte, size_t size);
bool ty_writer_close(ty_writer *w, bool ok); /* also when open failed; returns whether everything is on disk */
bool ty_file_write(const char *path, const void *data, size_t size);

/* Writes all bytes to a descriptor; `path` for the error text. */
bool ty_write_all(int fd, const char *path, const void *data, size_t size);

/* ---- directories ---- */
typedef struct ty_file_info {
  char kind; /* 'f' file, 'd' directory, 'o' other, 0: there is none */
  int64_t size;
  double mtime;
} ty_file_info;
bool ty_file_stat(const char *path, ty_file_info *out);
bool ty_make_dirs(const char *path);               /* with parents; fine when it exists */
bool ty_list_dir(const char *path, ty_bytes *out); /* names, each ended by NUL, in byte order, without . and .. */
bool ty_file_remove(const char *path);             /* a file or an empty directory */

/* Contiguous bytes of a tensor in host memory: the tensor itself with a reference more, or a copy. */
ty_tensor *ty_host_tensor(ty_tensor *t);

/* Bytes of a tensor; false when the sizes other than 0 multiply to more than memory can hold, so that strides fit
 * too, and when the rows of a block-quantized one are not whole blocks. */
bool ty_count_bytes(ty_dtype dtype, int ndim, const int64_t *size, uint64_t *bytes);

#endif
