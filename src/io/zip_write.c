/* Writing zip archives in one pass: see zip.h. Layout by PKWARE's APPNOTE 6.3. */
#include <stdlib.h>
#include <string.h>
#include "zip.h"

enum { DESCRIPTOR = 1 << 3, UTF8 = 1 << 11, ALIGNMENT = 64, PADDING_ID = 0x5954, PIECE = 16 << 20 };
static const uint64_t SMALL = 0xf0000000; /* sizes below fit 32 bits even when deflate makes them grow */
static const uint32_t FULL = 0xffffffff;

static void put(uint8_t **p, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++) *(*p)++ = (uint8_t)(value >> 8 * i);
}

typedef struct pack {
  ty_zip_writer *zip;
  z_stream stream;
  uint32_t crc;
  uint64_t packed;
} pack;

static bool deflate_piece(pack *k, const uint8_t *data, uint64_t size, bool last) {
  uint8_t out[1 << 15];
  uint64_t left = size;
  int code;
  k->stream.avail_in = 0;
  do {
    if (k->stream.avail_in == 0 && left) {
      uInt n = left < PIECE ? (uInt)left : PIECE;
      k->crc = (uint32_t)crc32(k->crc, data, n);
      k->stream.next_in = (Bytef *)(uintptr_t)data;
      k->stream.avail_in = n;
      data += n;
      left -= n;
    }
    k->stream.next_out = out;
    k->stream.avail_out = sizeof out;
    code = deflate(&k->stream, last && !left ? Z_FINISH : Z_NO_FLUSH);
    size_t got = sizeof out - k->stream.avail_out;
    k->packed += got;
    if (!ty_writer_put(k->zip->out, out, got)) return false;
  } while (last ? code != Z_STREAM_END : k->stream.avail_in || left || k->stream.avail_out == 0);
  return true;
}

static uint32_t checksum(uint32_t crc, const uint8_t *p, size_t size) {
  for (size_t n; size; p += n, size -= n) {
    n = size < PIECE ? size : PIECE;
    crc = (uint32_t)crc32(crc, p, (uInt)n);
  }
  return crc;
}

static bool add_to_directory(ty_zip_writer *z, const char *name, size_t name_size, int flags, int method, uint32_t crc,
                             uint64_t packed, uint64_t size, uint64_t at) {
  uint8_t extra[28], *x = extra + 4, head[46], *p = head;
  if (size >= FULL) put(&x, size, 8);
  if (packed >= FULL) put(&x, packed, 8);
  if (at >= FULL) put(&x, at, 8);
  size_t extra_size = x - extra > 4 ? (size_t)(x - extra) : 0;
  x = extra;
  put(&x, 1, 2);
  put(&x, extra_size ? extra_size - 4 : 0, 2);
  put(&p, 0x02014b50, 4);
  put(&p, 3 << 8 | 45, 2); /* made by: Unix, version 4.5 */
  put(&p, extra_size ? 45 : 20, 2);
  put(&p, (uint64_t)flags, 2);
  put(&p, (uint64_t)method, 2);
  put(&p, 0x00210000, 4); /* 1 January 1980: the same tensors give the same file */
  put(&p, crc, 4);
  put(&p, packed < FULL ? packed : FULL, 4);
  put(&p, size < FULL ? size : FULL, 4);
  put(&p, name_size, 2);
  put(&p, extra_size, 2);
  put(&p, 0, 6); /* comment, disk, kind of contents */
  put(&p, 0100644u << 16, 4);
  put(&p, at < FULL ? at : FULL, 4);
  z->count++;
  return ty_bytes_put(&z->directory, head, sizeof head) && ty_bytes_put(&z->directory, name, name_size) &&
         ty_bytes_put(&z->directory, extra, extra_size);
}

bool ty_zip_add(ty_zip_writer *z, const char *name, size_t name_size, const void *head, size_t head_size,
                const void *data, size_t size, bool compress) {
  if (name_size > 60000) return ty_fail(TY_EINVAL, "zip: a name of %zu bytes is too long", name_size);
  uint64_t at = z->out->total, total = (uint64_t)head_size + size;
  bool large = total >= SMALL, ok;
  int flags = (compress ? DESCRIPTOR : 0), method = compress ? 8 : 0;
  for (size_t i = 0; i < name_size; i++)
    if ((uint8_t)name[i] >= 0x80) flags |= UTF8;
  pack k = { .zip = z };
  if (!compress) {
    k.crc = checksum(checksum(0, head, head_size), data, size);
    k.packed = total;
  }
  size_t extra = large ? 20 : 0, padding = 0;
  if (!compress) { /* an extra field that pads: data of stored entries can then be used where it lies */
    padding = (size_t)(ALIGNMENT - (at + 30 + name_size + extra) % ALIGNMENT) % ALIGNMENT;
    if (padding && padding < 4) padding += ALIGNMENT;
  }
  uint8_t local[30 + 20 + 4 + ALIGNMENT + 4], *p = local;
  put(&p, 0x04034b50, 4);
  put(&p, large ? 45 : 20, 2);
  put(&p, (uint64_t)flags, 2);
  put(&p, (uint64_t)method, 2);
  put(&p, 0x00210000, 4);
  put(&p, k.crc, 4);
  put(&p, large ? FULL : k.packed, 4);
  put(&p, large ? FULL : compress ? 0 : total, 4);
  put(&p, name_size, 2);
  put(&p, extra + padding, 2);
  ok = ty_writer_put(z->out, local, (size_t)(p - local)) && ty_writer_put(z->out, name, name_size);
  p = local;
  if (large) {
    put(&p, 1, 2);
    put(&p, 16, 2);
    put(&p, compress ? 0 : total, 8);
    put(&p, k.packed, 8);
  }
  if (padding) {
    put(&p, PADDING_ID, 2);
    put(&p, padding - 4, 2);
    memset(p, 0, padding - 4);
    p += padding - 4;
  }
  ok = ok && ty_writer_put(z->out, local, (size_t)(p - local));
  if (ok && compress) {
    if (deflateInit2(&k.stream, 6, Z_DEFLATED, -MAX_WBITS, 9, Z_DEFAULT_STRATEGY) != Z_OK)
      return ty_fail(TY_ENOMEM, "zip: no memory to compress");
    ok = deflate_piece(&k, head, head_size, false) && deflate_piece(&k, data, size, true);
    deflateEnd(&k.stream);
    p = local;
    put(&p, 0x08074b50, 4);
    put(&p, k.crc, 4);
    put(&p, k.packed, large ? 8 : 4);
    put(&p, total, large ? 8 : 4);
    ok = ok && ty_writer_put(z->out, local, (size_t)(p - local));
  } else if (ok) {
    ok = ty_writer_put(z->out, head, head_size) && ty_writer_put(z->out, data, size);
  }
  return ok && add_to_directory(z, name, name_size, flags, method, k.crc, k.packed, total, at);
}

bool ty_zip_end(ty_zip_writer *z) {
  uint64_t at = z->out->total, size = z->directory.size;
  bool large = at >= FULL || size >= FULL || z->count >= 0xffff;
  if (!ty_writer_put(z->out, z->directory.data, z->directory.size)) return false;
  uint8_t record[56 + 20 + 22], *p = record;
  if (large) {
    put(&p, 0x06064b50, 4);
    put(&p, 44, 8);
    put(&p, 45, 2);
    put(&p, 45, 2);
    put(&p, 0, 8);
    put(&p, z->count, 8);
    put(&p, z->count, 8);
    put(&p, size, 8);
    put(&p, at, 8);
    put(&p, 0x07064b50, 4);
    put(&p, 0, 4);
    put(&p, at + size, 8);
    put(&p, 1, 4);
  }
  put(&p, 0x06054b50, 4);
  put(&p, 0, 4);
  put(&p, large ? 0xffff : z->count, 2);
  put(&p, large ? 0xffff : z->count, 2);
  put(&p, large ? FULL : size, 4);
  put(&p, large ? FULL : at, 4);
  put(&p, 0, 2);
  return ty_writer_put(z->out, record, (size_t)(p - record));
}

void ty_zip_writer_free(ty_zip_writer *z) { ty_bytes_free(&z->directory); }
