/* CRC-32, as gzip, zip and PNG have it: by zlib, in pieces on all threads, which are then put together. */
#include <zlib.h>

#include "../../kernels/cpu/parallel.h"
#include "file.h"

enum { PIECE = 1 << 20, ROUND = 256 }; /* bytes of a piece; pieces between looks for Ctrl-C */

typedef struct round {
  const uint8_t *data;
  size_t size;
  uint32_t crc[ROUND];
} round;

static size_t piece_size(const round *r, int64_t i) {
  size_t left = r->size - (size_t)i * PIECE;
  return left < PIECE ? left : PIECE;
}

static void sum_pieces(void *context, int64_t from, int64_t to) {
  round *r = context;
  for (int64_t i = from; i < to; i++)
    r->crc[i] = (uint32_t)crc32(0, r->data + (size_t)i * PIECE, (uInt)piece_size(r, i));
}

uint32_t ty_crc32(uint32_t crc, const void *data, size_t size) {
  for (size_t at = 0; at < size; at += (size_t)ROUND * PIECE) {
    size_t left = size - at, most = (size_t)ROUND * PIECE;
    round r = { .data = (const uint8_t *)data + at, .size = left < most ? left : most };
    int64_t pieces = (int64_t)((r.size + PIECE - 1) / PIECE);
    ty_parallel_for_all(pieces, 1, sum_pieces, &r);
    for (int64_t i = 0; i < pieces; i++) crc = (uint32_t)crc32_combine(crc, r.crc[i], (z_off_t)piece_size(&r, i));
  }
  return crc;
}

uint32_t ty_crc32_join(uint32_t first, uint32_t second, uint64_t size) {
  return (uint32_t)crc32_combine(first, second, (z_off_t)size);
}

bool ty_file_crc32(const char *path, uint32_t *out) {
  ty_mapping *m = ty_mapping_open(path);
  if (!m) return false;
  bool ok = true;
  *out = 0;
  for (size_t at = 0; ok && at < m->size; at += (size_t)ROUND * PIECE) {
    size_t left = m->size - at, most = (size_t)ROUND * PIECE;
    if (ty_interrupted) ok = ty_fail(TY_EINTR, "interrupted while reading %s", ty_quote_text(path));
    else *out = ty_crc32(*out, m->data + at, left < most ? left : most);
  }
  ty_mapping_release(m);
  return ok;
}
