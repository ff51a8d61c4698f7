/* Text files, gzipped or plain, by line or whole. zlib's gz functions read both. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include "formats.h"

enum { CHUNK = 1 << 16 };

struct ty_text {
  gzFile gz;
  char *path;
  size_t from; /* where the unread part of `buffer` begins */
  ty_bytes buffer;
  size_t file_size;
  int64_t line_most;
  bool ended;
};

ty_text *ty_text_open(const char *path) {
  ty_text *t = calloc(1, sizeof *t);
  int fd;
  do fd = open(path, O_RDONLY | O_CLOEXEC);
  while (fd < 0 && errno == EINTR && !ty_interrupted);
  if (fd < 0) ty_fail(TY_EIO, "cannot open %s: %s", ty_quote_text(path), strerror(errno));
  if (t && fd >= 0) {
    t->path = strdup(path);
    t->gz = t->path ? gzdopen(fd, "rb") : NULL;
    if (t->gz) {
      struct stat info;
      if (fstat(fd, &info) == 0 && info.st_size > 0) t->file_size = (size_t)info.st_size;
      t->line_most = -1;
      gzbuffer(t->gz, CHUNK);
      return t;
    }
    ty_fail(TY_ENOMEM, "no memory to read %s", ty_quote_text(path));
  }
  if (!t) ty_fail(TY_ENOMEM, "no memory to read %s", ty_quote_text(path));
  if (fd >= 0) close(fd);
  if (t) free(t->path);
  free(t);
  return NULL;
}

void ty_text_close(ty_text *t) {
  if (!t) return;
  gzclose(t->gz);
  ty_bytes_free(&t->buffer);
  free(t->path);
  free(t);
}

/* More into the buffer, or `ended`. */
static bool more(ty_text *t) {
  if (ty_interrupted) return ty_fail(TY_EINTR, "interrupted while reading %s", ty_quote_text(t->path));
  if (!ty_bytes_reserve(&t->buffer, CHUNK)) return false;
  errno = 0;
  int n = gzread(t->gz, t->buffer.data + t->buffer.size, CHUNK), code;
  if (n > 0) t->buffer.size += (size_t)n;
  t->ended = n == 0;
  const char *message = gzerror(t->gz, &code);
  if (n > 0 || (n == 0 && code == Z_OK)) return true;
  if (n < 0 && errno == EINTR && !ty_interrupted) {
    gzclearerr(t->gz);
    return true;
  }
  return ty_fail(errno == EINTR ? TY_EINTR : TY_EIO, "cannot read %s: %s", ty_quote_text(t->path),
                 code == Z_ERRNO       ? strerror(errno)
                 : code == Z_BUF_ERROR ? "the gzip data is cut short"
                                       : message);
}

static bool within(const ty_text *t, size_t size, int64_t most, size_t floor, const char *what) {
  uint64_t allowed = most >= 0         ? (uint64_t)most
                     : gzdirect(t->gz) ? (uint64_t)1 << 32
                                       : ty_inflated_most(t->file_size, floor);
  return size <= allowed || ty_fail(TY_EIO, "%s %s more than the %llu bytes allowed; the option max allows more",
                                    ty_quote_text(t->path), what, (unsigned long long)allowed);
}

void ty_text_limit_lines(ty_text *t, int64_t most) { t->line_most = most; }

bool ty_text_line(ty_text *t, const char **line, size_t *size) {
  ty_bytes *b = &t->buffer;
  size_t seen = t->from;
  for (;;) {
    uint8_t *end = b->size > seen ? memchr(b->data + seen, '\n', b->size - seen) : NULL;
    if (end || (t->ended && b->size > t->from)) {
      const uint8_t *start = b->data + t->from;
      size_t n = end ? (size_t)(end - start) : b->size - t->from;
      t->from += n + (end != NULL);
      *line = (const char *)start;
      *size = n && start[n - 1] == '\r' ? n - 1 : n;
      return true;
    }
    if (t->ended) {
      *line = NULL;
      *size = 0;
      return true;
    }
    if (t->from) { /* what was given out makes room */
      memmove(b->data, b->data + t->from, b->size - t->from);
      b->size -= t->from;
      t->from = 0;
    }
    seen = b->size;
    if (!within(t, seen, t->line_most, TY_TEXT_FLOOR, "has a line of") || !more(t)) return false;
  }
}

bool ty_text_rest(ty_text *t, int64_t most, size_t floor, ty_bytes *out) {
  while (!t->ended) {
    if (!more(t)) return false;
    if (!within(t, t->buffer.size - t->from, most, floor, "has")) return false;
  }
  if (t->from) {
    memmove(t->buffer.data, t->buffer.data + t->from, t->buffer.size - t->from);
    t->buffer.size -= t->from;
    t->from = 0;
  }
  *out = t->buffer;
  t->buffer = (ty_bytes){ 0 };
  return true;
}
