/* Reading of files below a folder and nowhere else, for `tycho watch`. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "http.h"
#include "io.h"

/* real(path) -> the path without links, or nil */
int ty_http_real(lua_State *L) {
  char path[PATH_MAX];
  if (realpath(ty_io_path(L, 1), path)) lua_pushstring(L, path);
  else lua_pushnil(L);
  return 1;
}

static void release_bytes(void *p) { ty_bytes_free(p); }

/* read(root, path, from, most) -> bytes, size of the file, time of its last change; nil where there is no plain file below
 * the root, which is a path without links. What links lead out to is not below it. */
int ty_http_read(lua_State *L) {
  size_t root_size, path_size;
  const char *root = ty_lua_check_lstring(L, 1, &root_size), *path = ty_lua_check_lstring(L, 2, &path_size);
  lua_Integer from = ty_lua_check_integer(L, 3), most = ty_lua_check_integer(L, 4);
  if (from < 0 || most < 0) return ty_lua_refuse(L, from < 0 ? 3 : 4, "a number of bytes from 0");
  char real[PATH_MAX];
  ty_bytes *bytes = ty_io_box(L, sizeof *bytes, release_bytes);
  lua_pushfstring(L, "%s/%s", root, path);
  if (strlen(path) != path_size || !realpath(lua_tostring(L, -1), real)) return 0;
  if (root_size == 1) root_size = 0; /* "/" */
  if (strncmp(real, root, root_size) != 0 || real[root_size] != '/') return 0;
  /* Never waits for the writer of a pipe. */
  int fd = open(real, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  struct stat st;
  if (fd < 0) return 0;
  bool ok = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
  int64_t want = ok && st.st_size > from ? st.st_size - from : 0;
  if (want > most) want = most;
  ok = ok && (!want || ty_bytes_reserve(bytes, (size_t)want));
  while (ok && bytes->size < (size_t)want) {
    ssize_t n = pread(fd, bytes->data + bytes->size, (size_t)want - bytes->size, (off_t)from + (off_t)bytes->size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break; /* it became shorter */
    bytes->size += (size_t)n;
  }
  close(fd);
  if (!ok) return 0;
  lua_pushlstring(L, bytes->size ? (const char *)bytes->data : "", bytes->size);
  lua_pushinteger(L, (lua_Integer)st.st_size);
  lua_pushnumber(L, (double)st.st_mtim.tv_sec + 1e-9 * (double)st.st_mtim.tv_nsec);
  ty_io_unbox(bytes);
  return 3;
}
