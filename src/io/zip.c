/* Reading zip archives: see zip.h. Layout by PKWARE's APPNOTE 6.3. */
#define _GNU_SOURCE
#include "zip.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { END_SIZE = 22, LOCATOR_SIZE = 20, END64_SIZE = 56, ENTRY_SIZE = 46, LOCAL_SIZE = 30, DEFLATE_MOST = 1032 };

static uint64_t le(const uint8_t *p, int bytes) {
  uint64_t n = 0;
  for (int i = bytes - 1; i >= 0; i--) n = n << 8 | p[i];
  return n;
}

static bool __attribute__((format(printf, 2, 3))) fail(const ty_zip *z, const char *format, ...) {
  char what[320];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return ty_fail(TY_EIO, "zip %s: %s", ty_quote_text(z->file), what);
}

static bool fail_entry(const ty_zip *z, const ty_zip_entry *e, const char *what) {
  return fail(z, "entry %s: %s", ty_quote(e->name, e->name_size), what);
}

typedef struct directory {
  uint64_t at, size, count;
} directory;

static bool find_directory(ty_zip *z, directory *d) {
  const uint8_t *file = z->map->data;
  size_t size = z->map->size;
  if (size < END_SIZE) return fail(z, "%zu bytes are too few for a zip archive", size);
  size_t end = size - END_SIZE, last = end > 65535 ? end - 65535 : 0;
  while (le(file + end, 4) != 0x06054b50 || le(file + end + 20, 2) != size - END_SIZE - end) {
    if (end == last) return fail(z, "no directory at the end: the file is cut short or no zip archive");
    end--;
  }
  const uint8_t *p = file + end;
  if (le(p + 4, 2) || le(p + 6, 2) || le(p + 8, 2) != le(p + 10, 2))
    return fail(z, "archives in several parts are not supported");
  *d = (directory){ .at = le(p + 16, 4), .size = le(p + 12, 4), .count = le(p + 10, 2) };
  if (end >= LOCATOR_SIZE && le(p - LOCATOR_SIZE, 4) == 0x07064b50) {
    uint64_t at = le(p - LOCATOR_SIZE + 8, 8);
    if (end < LOCATOR_SIZE + END64_SIZE || at > end - LOCATOR_SIZE - END64_SIZE || le(file + at, 4) != 0x06064b50)
      return fail(z, "the zip64 record is not where the file says");
    *d = (directory){ .at = le(file + at + 48, 8), .size = le(file + at + 40, 8), .count = le(file + at + 32, 8) };
    end = (size_t)at;
  }
  if (d->at > end || d->size != end - d->at) return fail(z, "the directory does not lie where the file says");
  if (d->count > d->size / ENTRY_SIZE)
    return fail(z, "the directory is too small for %llu entries", (unsigned long long)d->count);
  return true;
}

/* The sizes that did not fit 32 bits, in the extra field with id 1. */
static bool read_zip64(const uint8_t *extra, size_t size, uint64_t *fields[3]) {
  bool wanted = false;
  for (int i = 0; i < 3; i++) wanted |= *fields[i] == 0xffffffff;
  if (!wanted) return true;
  while (size >= 4) {
    size_t n = (size_t)le(extra + 2, 2);
    if (n > size - 4) return false;
    if (le(extra, 2) == 1) {
      const uint8_t *p = extra + 4;
      for (int i = 0; i < 3; i++) {
        if (*fields[i] != 0xffffffff) continue;
        if (n < 8) return false;
        *fields[i] = le(p, 8);
        p += 8;
        n -= 8;
      }
      return true;
    }
    extra += 4 + n;
    size -= 4 + n;
  }
  return true; /* exactly 2^32 - 1 bytes */
}

/* The local header repeats name and method; a file where they differ reads differently with different tools. */
static bool read_local(ty_zip *z, ty_zip_entry *e, uint64_t at, uint64_t end) {
  const uint8_t *p = z->map->data + at;
  if (at > end || end - at < LOCAL_SIZE || le(p, 4) != 0x04034b50)
    return fail_entry(z, e, "its local header is not where the directory says");
  size_t name_size = (size_t)le(p + 26, 2);
  uint64_t skip = LOCAL_SIZE + name_size + le(p + 28, 2);
  if (skip > end - at || e->packed > end - at - skip) return fail_entry(z, e, "its data does not fit the file");
  if (name_size != e->name_size || memcmp(p + LOCAL_SIZE, e->name, name_size) != 0 || le(p + 8, 2) != e->method)
    return fail_entry(z, e, "its local header says something else than the directory");
  e->data = (size_t)(at + skip);
  return true;
}

static bool read_entry(ty_zip *z, const uint8_t **cursor, const uint8_t *end, uint64_t directory_at, ty_zip_entry *e) {
  const uint8_t *p = *cursor;
  if (end - p < ENTRY_SIZE || le(p, 4) != 0x02014b50) return fail(z, "the directory is broken at entry %zu", z->count);
  size_t name_size = (size_t)le(p + 28, 2), extra = (size_t)le(p + 30, 2), comment = (size_t)le(p + 32, 2);
  if (name_size + extra + comment > (size_t)(end - p) - ENTRY_SIZE)
    return fail(z, "the directory is broken at entry %zu", z->count);
  *e = (ty_zip_entry){ .name = (const char *)p + ENTRY_SIZE,
                       .name_size = name_size,
                       .method = (uint16_t)le(p + 10, 2),
                       .crc = (uint32_t)le(p + 16, 4),
                       .packed = le(p + 20, 4),
                       .size = le(p + 24, 4) };
  uint64_t local = le(p + 42, 4);
  if (!read_zip64(p + ENTRY_SIZE + name_size, extra, (uint64_t *[]){ &e->size, &e->packed, &local }))
    return fail_entry(z, e, "its zip64 field is broken");
  if (le(p + 8, 2) & 1) return fail_entry(z, e, "encrypted entries are not supported");
  if (e->method != 0 && e->method != 8) return fail_entry(z, e, "only stored and deflated entries are supported");
  if (!read_local(z, e, local, directory_at)) return false;
  if (e->method == 0 && e->packed != e->size) return fail_entry(z, e, "a stored entry with two different sizes");
  if (e->method == 8 && e->size / DEFLATE_MOST > e->packed)
    return fail_entry(z, e, "it claims more bytes than its data can inflate to");
  *cursor = p + ENTRY_SIZE + name_size + extra + comment;
  return true;
}

bool ty_zip_open(ty_zip *z, ty_mapping *map, const char *file) {
  *z = (ty_zip){ .map = map, .file = file };
  directory d = { 0 };
  if (!find_directory(z, &d)) return false;
  z->entries = calloc((size_t)d.count + 1, sizeof *z->entries);
  if (!z->entries) return ty_fail(TY_ENOMEM, "zip %s: no memory for the directory", ty_quote_text(file));
  const uint8_t *cursor = map->data + d.at, *end = cursor + d.size;
  uint64_t packed = 0;
  for (; z->count < d.count; z->count++) {
    ty_zip_entry *e = &z->entries[z->count];
    if (!read_entry(z, &cursor, end, d.at, e)) return false;
    packed += e->packed; /* no overflow: each is below the file's size, and so is their number */
    if (packed > d.at) return fail(z, "entries overlap");
  }
  return cursor == end || fail(z, "the directory has more bytes than entries");
}

void ty_zip_close(ty_zip *z) {
  free(z->entries);
  z->entries = NULL;
}

/* ---- the bytes of an entry ---- */

static uint32_t checksum(uint32_t crc, const uint8_t *p, uint64_t size) {
  while (size) {
    uInt n = size < 1u << 30 ? (uInt)size : 1u << 30;
    crc = (uint32_t)crc32(crc, p, n);
    p += n;
    size -= n;
  }
  return crc;
}

static bool read_stored(ty_source *source, void *out, size_t size) {
  if (size > source->left)
    return ty_fail(TY_EIO, "expected %zu bytes, got the last %llu", size, (unsigned long long)source->left);
  if (size) memcpy(out, source->map->data + source->offset, size);
  source->offset += size;
  source->left -= size;
  return true;
}

static bool read_deflated(ty_source *source, void *out, size_t size) {
  ty_zip_source *s = (ty_zip_source *)(void *)source;
  z_stream *z = &s->stream;
  if (size > source->left) return fail_entry(s->zip, s->entry, "it ends early");
  source->left -= size;
  uint8_t *p = out;
  while (size) {
    if (ty_interrupted) return ty_fail(TY_EINTR, "interrupted while inflating");
    uInt room = size < 16u << 20 ? (uInt)size : 16u << 20;
    if (z->avail_in == 0) {
      z->avail_in = s->unread < 1u << 30 ? (uInt)s->unread : 1u << 30;
      s->unread -= z->avail_in;
    }
    z->next_out = p;
    z->avail_out = room;
    int code = inflate(z, Z_NO_FLUSH);
    size_t got = room - z->avail_out;
    s->crc = checksum(s->crc, p, got);
    p += got;
    size -= got;
    if (code == Z_MEM_ERROR) return ty_fail(TY_ENOMEM, "no memory to inflate");
    if (code == Z_STREAM_END && size) return fail_entry(s->zip, s->entry, "it inflates to fewer bytes than it says");
    if (code != Z_OK && code != Z_STREAM_END)
      return fail_entry(s->zip, s->entry, z->msg ? z->msg : "its data is cut short");
  }
  return true;
}

bool ty_zip_source_open(ty_zip_source *s, const ty_zip *z, const ty_zip_entry *e) {
  *s = (ty_zip_source){ .zip = z, .entry = e };
  s->source.left = e->size;
  if (e->method == 0) {
    if (checksum(0, z->map->data + e->data, e->size) != e->crc)
      return fail_entry(z, e, "its checksum is wrong: the file is damaged");
    s->source.read = read_stored;
    s->source.map = z->map;
    s->source.offset = e->data;
    return true;
  }
  s->source.read = read_deflated;
  s->stream.next_in = z->map->data + e->data;
  s->unread = e->packed;
  s->inflating = inflateInit2(&s->stream, -MAX_WBITS) == Z_OK;
  return s->inflating || ty_fail(TY_ENOMEM, "no memory to inflate");
}

bool ty_zip_source_finish(ty_zip_source *s) {
  if (s->source.left) return fail_entry(s->zip, s->entry, "it has more bytes than expected");
  if (!s->inflating) return true;
  uint8_t one;
  s->stream.next_out = &one;
  s->stream.avail_out = 1;
  if (s->stream.avail_in == 0) s->stream.avail_in = (uInt)(s->unread < 1024 ? s->unread : 1024);
  int code = inflate(&s->stream, Z_FINISH); /* the end mark may still be unread */
  if (code != Z_STREAM_END || s->stream.avail_out != 1 || s->stream.total_in != s->entry->packed)
    return fail_entry(s->zip, s->entry, "it does not end where it says");
  return s->crc == s->entry->crc || fail_entry(s->zip, s->entry, "its checksum is wrong: the file is damaged");
}

void ty_zip_source_close(ty_zip_source *s) {
  if (s->inflating) inflateEnd(&s->stream);
  s->inflating = false;
}
