/* Reading and writing whole files, mappings, directories. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "file.h"

enum { PIECE = 16 << 20, BUFFER = 1 << 18 }; /* bytes per system call, so that Ctrl-C is seen; the writer's buffer */
enum { SUMMED = 4 << 20 };                   /* bytes that are summed before they are written */

static bool fail_errno(const char *verb, const char *path) {
  return ty_fail(errno == EINTR    ? TY_EINTR
                 : errno == ENOMEM ? TY_ENOMEM
                                   : TY_EIO,
                 "cannot %s %s: %s", verb, ty_quote_text(path), strerror(errno));
}

/* A system call broken off by a signal goes on, unless the signal was the user's Ctrl-C. */
static bool again(void) { return errno == EINTR && !ty_interrupted; }

static int open_again(const char *path, int flags, mode_t mode) {
  int fd;
  do fd = open(path, flags | O_CLOEXEC, mode);
  while (fd < 0 && again());
  return fd;
}

static bool read_rest(int fd, const char *path, size_t cap, ty_bytes *out) {
  for (;;) {
    if (ty_interrupted) return ty_fail(TY_EINTR, "interrupted while reading %s", ty_quote_text(path));
    if (out->capacity == out->size && !ty_bytes_reserve(out, 1 << 16)) return false;
    size_t room = out->capacity - out->size;
    ssize_t n = read(fd, out->data + out->size, room < PIECE ? room : PIECE);
    if (n < 0 && again()) continue;
    if (n < 0) return fail_errno("read", path);
    if (n == 0) return true;
    out->size += (size_t)n;
    if (out->size > cap) return ty_fail(TY_EIO, "%s is larger than the %zu bytes allowed", ty_quote_text(path), cap);
  }
}

bool ty_file_read(const char *path, size_t cap, ty_bytes *out) {
  int fd = open_again(path, O_RDONLY, 0);
  if (fd < 0) return fail_errno("open", path);
  struct stat s;
  bool ok = fstat(fd, &s) == 0 || fail_errno("stat", path);
  if (ok && S_ISREG(s.st_mode)) {
    if ((uint64_t)s.st_size > cap)
      ok = ty_fail(TY_EIO, "%s has %lld bytes, more than the %zu allowed", ty_quote_text(path), (long long)s.st_size,
                   cap);
    else ok = ty_bytes_reserve(out, (size_t)s.st_size + 1); /* + 1: the end is seen without growing */
  }
  ok = ok && read_rest(fd, path, cap, out);
  close(fd);
  return ok;
}

bool ty_file_peek(const char *path, void *out, size_t size, size_t *got) {
  struct stat s;
  *got = 0;
  if (stat(path, &s) != 0) return fail_errno("open", path);
  if (!S_ISREG(s.st_mode)) return true; /* reading from a pipe would take the bytes away */
  int fd = open_again(path, O_RDONLY, 0);
  ssize_t n = fd >= 0 ? pread(fd, out, size, 0) : -1;
  if (n < 0) fail_errno("read", path);
  if (fd >= 0) close(fd);
  *got = n < 0 ? 0 : (size_t)n;
  return n >= 0;
}

static ty_mapping *mapping_of(uint8_t *data, size_t size, bool mapped) {
  ty_mapping *m = malloc(sizeof *m);
  if (!m) {
    ty_fail(TY_ENOMEM, "no memory to map a file");
    return NULL;
  }
  atomic_init(&m->refs, 1);
  m->data = data;
  m->size = size;
  m->mapped = mapped;
  return m;
}

ty_mapping *ty_mapping_open(const char *path) {
  int fd = open_again(path, O_RDONLY, 0);
  struct stat s;
  if (fd < 0 || fstat(fd, &s) != 0) {
    fail_errno("open", path);
    if (fd >= 0) close(fd);
    return NULL;
  }
  uint8_t *data = NULL;
  size_t size = 0;
  bool mapped = S_ISREG(s.st_mode) && s.st_size > 0, ok = true;
  if (mapped) {
    size = (size_t)s.st_size; /* NORESERVE: pages that are never written cost no memory */
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    ok = p != MAP_FAILED || fail_errno("map", path);
    data = p;
  } else {
    ty_bytes bytes = { 0 };
    ok = read_rest(fd, path, PTRDIFF_MAX, &bytes);
    if (!ok) ty_bytes_free(&bytes);
    data = bytes.data;
    size = bytes.size;
  }
  close(fd);
  ty_mapping *m = ok ? mapping_of(data, size, mapped) : NULL;
  if (ok && !m) {
    if (mapped) munmap(data, size);
    else free(data);
  }
  return m;
}

ty_mapping *ty_mapping_copy(const void *data, size_t size) {
  ty_bytes bytes = { 0 };
  if (!ty_bytes_put(&bytes, data, size)) return NULL;
  ty_mapping *m = mapping_of(bytes.data, size, false);
  if (!m) ty_bytes_free(&bytes);
  return m;
}

void ty_mapping_release(void *mapping) {
  ty_mapping *m = mapping;
  if (!m || atomic_fetch_sub_explicit(&m->refs, 1, memory_order_acq_rel) != 1) return;
  if (m->mapped) munmap(m->data, m->size);
  else free(m->data);
  free(m);
}

/* ---- writing ---- */

bool ty_write_all(int fd, const char *path, const void *data, size_t size) {
  const uint8_t *p = data;
  while (size) {
    if (ty_interrupted) return ty_fail(TY_EINTR, "interrupted while writing %s", ty_quote_text(path));
    ssize_t n = write(fd, p, size < PIECE ? size : PIECE);
    if (n < 0 && again()) continue;
    if (n < 0) return fail_errno("write", path);
    p += n;
    size -= (size_t)n;
  }
  return true;
}

static char *folder_of(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
}

bool ty_writer_open(ty_writer *w, const char *path) {
  *w = (ty_writer){ .fd = -1, .path = path };
  struct stat s;
  bool exists = stat(path, &s) == 0;
  if (exists && S_ISDIR(s.st_mode)) return ty_fail(TY_EIO, "cannot write %s: it is a directory", ty_quote_text(path));
  w->buffer = malloc(BUFFER);
  if (!w->buffer) return ty_fail(TY_ENOMEM, "no memory to write %s", ty_quote_text(path));
  if (exists && !S_ISREG(s.st_mode)) {
    w->direct = true;
    w->fd = open_again(path, O_WRONLY, 0);
    return w->fd >= 0 || fail_errno("open", path);
  }
  w->target = exists ? realpath(path, NULL) : strdup(path); /* the file that a link names is replaced, not the link */
  char *folder = w->target ? folder_of(w->target) : NULL;
  if (!folder) return fail_errno("write", path);
  static atomic_uint serial;
  for (int attempt = 0; attempt < 100; attempt++) { /* a number is taken only when a killed process left its file */
    free(w->temp);
    if (asprintf(&w->temp, "%s/.tycho-%ld-%u.tmp", folder, (long)getpid(), atomic_fetch_add(&serial, 1)) < 0) {
      w->temp = NULL;
      break;
    }
    w->fd = open_again(w->temp, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (w->fd >= 0 || errno != EEXIST) break;
  }
  free(folder);
  if (w->fd < 0) {
    fail_errno("write", path);
    free(w->temp); /* not ours to remove */
    w->temp = NULL;
    return false;
  }
  if (exists && fchmod(w->fd, s.st_mode & 07777) != 0) return fail_errno("keep the mode of", path);
  return true;
}

/* Stands still for as long as the bytes take at the writer's rate. */
static void pace(ty_writer *w, size_t size) {
  if (!(w->rate > 0)) return;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  double at = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
  if (w->since == 0) w->since = at;
  w->since += (double)size / w->rate;
  if (w->since <= at) return;
  double left = w->since - at;
  now = (struct timespec){ .tv_sec = (time_t)left, .tv_nsec = (long)(1e9 * (left - (double)(time_t)left)) };
  while (nanosleep(&now, &now) != 0 && errno == EINTR && !ty_interrupted) {}
}

static bool write_out(ty_writer *w, const void *data, size_t size) {
  pace(w, size);
  return ty_write_all(w->fd, w->path, data, size);
}

static bool flush(ty_writer *w) {
  size_t n = w->used;
  w->used = 0;
  return write_out(w, w->buffer, n);
}

bool ty_writer_put(ty_writer *w, const void *data, size_t size) {
  if ((w->crc || w->rate > 0) && size > SUMMED) { /* what is written next is in the cache then */
    for (const char *p = data; size; p += SUMMED) {
      size_t n = size < SUMMED ? size : SUMMED;
      if (!ty_writer_put(w, p, n)) return false;
      size -= n;
    }
    return true;
  }
  if (w->crc) *w->crc = ty_crc32(*w->crc, data, size);
  if (size > BUFFER - w->used && !flush(w)) return false;
  w->total += size;
  if (size > BUFFER) return write_out(w, data, size);
  if (size) memcpy(w->buffer + w->used, data, size);
  w->used += size;
  return true;
}

bool ty_writer_pad(ty_writer *w, int byte, size_t size) {
  uint8_t pad[64];
  memset(pad, byte, sizeof pad);
  for (; size > sizeof pad; size -= sizeof pad)
    if (!ty_writer_put(w, pad, sizeof pad)) return false;
  return ty_writer_put(w, pad, size);
}

/* Makes the new name durable; file systems that cannot sync a folder do not need it. */
static bool sync_folder(const char *file, const char *path) {
  char *folder = folder_of(file);
  int fd = folder ? open_again(folder, O_RDONLY | O_DIRECTORY, 0) : -1;
  bool ok = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL || errno == EROFS || errno == ENOTSUP);
  if (!ok && errno == EACCES) ok = true; /* a folder one may write in but not read */
  if (!ok) fail_errno("sync the folder of", path);
  if (fd >= 0) close(fd);
  free(folder);
  return ok;
}

bool ty_writer_close(ty_writer *w, bool ok) {
  ok = ok && flush(w);
  if (ok && !w->direct && fsync(w->fd) != 0) ok = fail_errno("sync", w->path);
  if (w->fd >= 0 && close(w->fd) != 0 && ok) ok = fail_errno("close", w->path);
  if (ok && !w->direct) {
    ok = rename(w->temp, w->target) == 0 || fail_errno("replace", w->path);
    if (ok) {
      free(w->temp);
      w->temp = NULL;
      ok = sync_folder(w->target, w->path);
    }
  }
  if (w->temp) unlink(w->temp);
  free(w->temp);
  free(w->target);
  free(w->buffer);
  *w = (ty_writer){ .fd = -1 };
  return ok;
}

bool ty_file_write(const char *path, const void *data, size_t size) {
  ty_writer w;
  bool ok = ty_writer_open(&w, path) && ty_writer_put(&w, data, size);
  return ty_writer_close(&w, ok);
}

/* ---- directories ---- */

bool ty_file_stat(const char *path, ty_file_info *out) {
  struct stat s;
  *out = (ty_file_info){ 0 };
  if (stat(path, &s) != 0) return errno == ENOENT || errno == ENOTDIR || fail_errno("stat", path);
  out->kind = S_ISREG(s.st_mode) ? 'f' : S_ISDIR(s.st_mode) ? 'd' : 'o';
  out->size = s.st_size;
  out->mtime = (double)s.st_mtim.tv_sec + (double)s.st_mtim.tv_nsec * 1e-9;
  return true;
}

bool ty_make_dirs(const char *path) {
  char *copy = strdup(path);
  if (!copy) return ty_fail(TY_ENOMEM, "no memory for a path");
  bool ok = *copy || ty_fail(TY_EINVAL, "mkdir: the path is empty");
  for (char *p = copy; ok && *p; p++) {
    while (*p == '/') p++;
    while (*p && *p != '/') p++;
    char kept = *p;
    *p = 0;
    if (mkdir(copy, 0777) != 0) {
      int why = errno;
      struct stat s;
      if (stat(copy, &s) != 0 || !S_ISDIR(s.st_mode)) {
        errno = why;
        ok = fail_errno("make the directory", copy);
      }
    }
    *p = kept;
    if (!kept) break;
  }
  free(copy);
  return ok;
}

static int by_bytes(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

bool ty_list_dir(const char *path, ty_bytes *out) {
  DIR *dir = opendir(path);
  if (!dir) return fail_errno("list", path);
  ty_bytes raw = { 0 };
  size_t count = 0;
  bool ok = true;
  for (;;) {
    errno = 0;
    struct dirent *e = readdir(dir);
    if (!e) {
      if (errno) ok = fail_errno("list", path);
      break;
    }
    if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
    ok = ty_bytes_put(&raw, e->d_name, strlen(e->d_name) + 1);
    if (!ok) break;
    count++;
  }
  closedir(dir);
  char **names = ok ? malloc((count + 1) * sizeof *names) : NULL;
  if (ok && !names) ok = ty_fail(TY_ENOMEM, "no memory to list %s", ty_quote_text(path));
  if (ok) {
    char *p = (char *)raw.data;
    for (size_t i = 0; i < count; i++, p += strlen(p) + 1) names[i] = p;
    qsort(names, count, sizeof *names, by_bytes);
    for (size_t i = 0; ok && i < count; i++) ok = ty_bytes_put(out, names[i], strlen(names[i]) + 1);
  }
  free(names);
  ty_bytes_free(&raw);
  return ok;
}

bool ty_file_remove(const char *path) { return remove(path) == 0 || fail_errno("remove", path); }
