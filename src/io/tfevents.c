/* TensorBoard event files: protobuf messages in TFRecord frames. u64 length, its masked CRC-32C, the data, its
 * masked CRC-32C. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>
#include "formats.h"

enum { BUFFER = 1 << 16 };

struct ty_events {
  int fd;
  char *path;
  ty_bytes pending, event, summary, value;
};

/* CRC-32C (Castagnoli, reflected polynomial 0x82f63b78); a scalar is 40 bytes, so a bit at a time is fast enough. */
static uint32_t masked_crc(const uint8_t *p, size_t size) {
  uint32_t crc = 0xffffffff;
  for (size_t i = 0; i < size; i++) {
    crc ^= p[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8;
}

/* ---- protobuf: tag = field << 3 | type; 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes ---- */

static bool put_varint(ty_bytes *b, uint64_t n) {
  uint8_t bytes[10];
  size_t size = 0;
  do bytes[size++] = (uint8_t)((n & 0x7f) | (n > 0x7f ? 0x80 : 0));
  while (n >>= 7);
  return ty_bytes_put(b, bytes, size);
}

static bool put_fixed(ty_bytes *b, int field, int type, const void *data, size_t size) {
  return put_varint(b, (uint64_t)(field << 3 | type)) && ty_bytes_put(b, data, size);
}

static bool put_block(ty_bytes *b, int field, const void *data, size_t size) {
  return put_varint(b, (uint64_t)(field << 3 | 2)) && put_varint(b, size) && ty_bytes_put(b, data, size);
}

static bool put_record(ty_bytes *b, const ty_bytes *data) {
  uint64_t size = data->size; /* little-endian hosts */
  uint32_t size_crc = masked_crc((const uint8_t *)&size, 8), data_crc = masked_crc(data->data, data->size);
  return ty_bytes_put(b, &size, 8) && ty_bytes_put(b, &size_crc, 4) && ty_bytes_put(b, data->data, data->size) &&
         ty_bytes_put(b, &data_crc, 4);
}

bool ty_events_flush(ty_events *e) {
  size_t size = e->pending.size;
  e->pending.size = 0; /* also on failure: a full disk must not make the buffer grow for ever */
  return ty_write_all(e->fd, e->path, e->pending.data, size);
}

static bool begin(ty_events *e) {
  struct timeval now;
  gettimeofday(&now, NULL);
  double wall = (double)now.tv_sec + (double)now.tv_usec * 1e-6;
  return put_fixed(&e->event, 1, 1, &wall, 8) && put_block(&e->event, 3, "brain.Event:2", 13) &&
         put_record(&e->pending, &e->event) && ty_events_flush(e);
}

ty_events *ty_events_open(const char *path) {
  ty_events *e = calloc(1, sizeof *e);
  if (!e || !(e->path = strdup(path))) {
    free(e);
    ty_fail(TY_ENOMEM, "no memory to write %s", ty_quote_text(path));
    return NULL;
  }
  e->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  bool ok = e->fd >= 0 || ty_fail(TY_EIO, "cannot open %s: %s", ty_quote_text(path), strerror(errno));
  off_t end = ok ? lseek(e->fd, 0, SEEK_END) : 0;
  ok = ok && (end > 0 || begin(e)); /* a file that is there is continued */
  if (ok) return e;
  ty_events_close(e);
  return NULL;
}

bool ty_events_scalar(ty_events *e, const char *tag, size_t tag_size, int64_t step, double wall_time, float value) {
  ty_bytes *v = &e->value, *summary = &e->summary, *event = &e->event;
  if (!ty_valid_utf8(tag, tag_size))
    return ty_fail(TY_EINVAL, "event_writer: the tag %s is not valid UTF-8", ty_quote(tag, tag_size));
  v->size = summary->size = event->size = 0;
  /* Event { wall_time, step, Summary { Value { tag, simple_value } } } */
  bool ok = put_block(v, 1, tag, tag_size) && put_fixed(v, 2, 5, &value, 4) &&
            put_block(summary, 1, v->data, v->size) && put_fixed(event, 1, 1, &wall_time, 8) &&
            put_varint(event, 2 << 3) && put_varint(event, (uint64_t)step) &&
            put_block(event, 5, summary->data, summary->size) && put_record(&e->pending, event);
  return ok && (e->pending.size < BUFFER || ty_events_flush(e));
}

bool ty_events_close(ty_events *e) {
  if (!e) return true;
  bool ok = e->fd < 0 || ty_events_flush(e);
  if (e->fd >= 0 && close(e->fd) != 0 && ok)
    ok = ty_fail(TY_EIO, "cannot close %s: %s", ty_quote_text(e->path), strerror(errno));
  ty_bytes_free(&e->pending);
  ty_bytes_free(&e->event);
  ty_bytes_free(&e->summary);
  ty_bytes_free(&e->value);
  free(e->path);
  free(e);
  return ok;
}
