/* What `tycho watch` is made of: a server of HTTP whose answers a Lua function makes, on libmicrohttpd, and reading of files
 * below a folder and nowhere else. Not for users. libmicrohttpd is loaded when the first server starts: it brings libraries
 * for TLS with it, which no other program should wait for. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "io.h"

#ifdef TY_HAVE_MICROHTTPD
#include <microhttpd.h>

enum { CONNECTIONS_MOST = 100, IDLE_SECONDS = 60 };

/* clang-format off */
#define MHD_FUNCTIONS(X) \
  X(MHD_start_daemon) X(MHD_stop_daemon) X(MHD_run_wait) X(MHD_create_response_from_buffer) \
  X(MHD_add_response_header) X(MHD_queue_response) X(MHD_destroy_response) X(MHD_lookup_connection_value) \
  X(MHD_get_connection_values)
/* clang-format on */

#define DECLARE(name) __typeof__(name) *name##_;
static struct { MHD_FUNCTIONS(DECLARE) } mhd;
static bool mhd_found;

static void find_library(void) {
  void *handle = dlopen("libmicrohttpd.so.12", RTLD_NOW | RTLD_LOCAL);
  if (!handle) return;
  mhd_found = true;
#define FIND(name) mhd_found &= (*(void **)(void *)&mhd.name##_ = dlsym(handle, #name)) != NULL;
  MHD_FUNCTIONS(FIND)
}

typedef struct server {
  struct MHD_Daemon *daemon;
  lua_State *L;    /* the thread that serve() runs on */
  int handler;     /* its index there; 0 outside of serve() */
  bool has_failed; /* the handler raised: the error is at the top of L */
} server;

static const char server_name[] = "http server";

static server *check_server(lua_State *L) {
  server *s = luaL_testudata(L, 1, server_name);
  if (!s) ty_lua_refuse(L, 1, "a server");
  return s;
}

/* A listening socket at an address of the host, or -1 after ty_fail(). */
static int listen_at(const char *host, int port) {
  char service[16];
  snprintf(service, sizeof service, "%d", port);
  struct addrinfo *list, hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
  int problem = getaddrinfo(host, service, &hints, &list), fd = -1, why = 0;
  if (problem) {
    ty_fail(TY_EINVAL, "watch: host: expected a name or address of this machine, got %s (%s)", ty_quote_text(host),
            gai_strerror(problem));
    return -1;
  }
  for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
    fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
    if (fd < 0) {
      why = errno;
      continue;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
    if (bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, 64) != 0) {
      why = errno;
      close(fd);
      fd = -1;
    }
  }
  freeaddrinfo(list);
  if (fd >= 0) return fd;
  if (why == EADDRINUSE)
    ty_fail(TY_EIO, "watch: port %d of %s is in use; --port takes another, --port 0 any that is free", port, host);
  else ty_fail(TY_EIO, "watch: cannot listen at port %d of %s: %s", port, ty_quote_text(host), strerror(why));
  return -1;
}

/* ---- answering ---- */

static enum MHD_Result add_argument(void *to, enum MHD_ValueKind kind, const char *key, const char *value) {
  lua_State *L = to;
  (void)kind;
  lua_pushstring(L, value ? value : "");
  lua_setfield(L, -2, key);
  return MHD_YES;
}

typedef struct request {
  server *s;
  struct MHD_Connection *connection;
  const char *path, *method;
  struct MHD_Response *response;
  int status;
} request;

/* handler(method, path, query, host) -> status, headers, body; protected, since Lua's errors may not jump over the
 * library's frames. */
static int answer(lua_State *L) {
  request *r = lua_touserdata(L, 2);
  lua_settop(L, 1);
  lua_pushstring(L, r->method);
  lua_pushstring(L, r->path);
  lua_newtable(L);
  mhd.MHD_get_connection_values_(r->connection, MHD_GET_ARGUMENT_KIND, add_argument, L);
  lua_pushstring(L, mhd.MHD_lookup_connection_value_(r->connection, MHD_HEADER_KIND, "Host"));
  lua_call(L, 4, 3);
  size_t size;
  r->status = (int)luaL_checkinteger(L, 1);
  luaL_checktype(L, 2, LUA_TTABLE);
  const char *body = luaL_checklstring(L, 3, &size);
  r->response = mhd.MHD_create_response_from_buffer_(size, (void *)(uintptr_t)body, MHD_RESPMEM_MUST_COPY);
  if (!r->response) return luaL_error(L, "no memory for an answer of %d bytes", (int)size);
  for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1))
    mhd.MHD_add_response_header_(r->response, luaL_checkstring(L, -2), luaL_checkstring(L, -1));
  return 0;
}

static enum MHD_Result on_request(void *server_of, struct MHD_Connection *connection, const char *path,
                                  const char *method, const char *version, const char *upload, size_t *upload_size,
                                  void **state) {
  static const char seen;
  server *s = server_of;
  (void)version;
  (void)upload;
  if (!*state) { /* the head has come; an answer is due when all of the request has */
    *state = (void *)(uintptr_t)&seen;
    return MHD_YES;
  }
  if (*upload_size) { /* nobody asked for it */
    *upload_size = 0;
    return MHD_YES;
  }
  lua_State *L = s->L;
  if (!L || s->has_failed || !lua_checkstack(L, 8)) return MHD_NO;
  request r = { s, connection, path, method, NULL, 500 };
  lua_pushcfunction(L, answer);
  lua_pushvalue(L, s->handler);
  lua_pushlightuserdata(L, &r);
  if (lua_pcall(L, 2, 0, 0) != LUA_OK) {
    s->has_failed = true; /* the error stays where it is until serve() raises it */
    if (r.response) mhd.MHD_destroy_response_(r.response);
    return MHD_NO;
  }
  enum MHD_Result ok = mhd.MHD_queue_response_(connection, (unsigned)r.status, r.response);
  mhd.MHD_destroy_response_(r.response);
  return ok;
}

/* listen(host, port) -> server; port 0: any that is free */
static int http_listen(lua_State *L) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  const char *host = ty_lua_check_string(L, 1);
  lua_Integer port = ty_lua_check_integer(L, 2);
  if (port < 0 || port > 65535) return ty_lua_refuse(L, 2, "a port from 0 to 65535");
  pthread_once(&once, find_library);
  if (!mhd_found) return luaL_error(L, "watch: libmicrohttpd.so.12 is not found (Debian's package libmicrohttpd12)");
  server *s = lua_newuserdatauv(L, sizeof *s, 0);
  *s = (server){ 0 };
  luaL_setmetatable(L, server_name);
  int fd = listen_at(host, (int)port);
  if (fd < 0) return ty_lua_error(L);
  s->daemon = mhd.MHD_start_daemon_(MHD_USE_EPOLL, 0, NULL, NULL, on_request, s, MHD_OPTION_LISTEN_SOCKET, fd,
                                    MHD_OPTION_CONNECTION_LIMIT, (unsigned)CONNECTIONS_MOST,
                                    MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_SECONDS, MHD_OPTION_END);
  if (!s->daemon) {
    close(fd);
    return luaL_error(L, "watch: the server at port %d of %s does not start", (int)port, host);
  }
  struct sockaddr_storage at;
  socklen_t size = sizeof at;
  char text[16] = "0";
  if (getsockname(fd, (struct sockaddr *)&at, &size) == 0)
    getnameinfo((struct sockaddr *)&at, size, NULL, 0, text, sizeof text, NI_NUMERICSERV);
  lua_pushinteger(L, atoi(text));
  return 2;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* server:serve(handler, seconds): answers what comes until then, or Ctrl-C */
static int serve(lua_State *L) {
  server *s = check_server(L);
  ty_lua_check_callable(L, 2);
  double end = now() + ty_lua_check_number(L, 3);
  if (!s->daemon) return luaL_error(L, "serve: the server is closed");
  if (s->L) return luaL_error(L, "serve: the server is serving");
  lua_settop(L, 3);
  s->L = L;
  s->handler = 2;
  s->has_failed = false;
  for (double left = end - now(); left > 0 && !ty_interrupted && !s->has_failed; left = end - now())
    mhd.MHD_run_wait_(s->daemon, (int32_t)(left < 0.1 ? left * 1e3 + 1 : 100));
  s->L = NULL;
  if (s->has_failed) return lua_error(L);
  if (!ty_interrupted) return 0;
  ty_fail(TY_EINTR, "interrupted");
  return ty_lua_error(L);
}

static int close_server(lua_State *L) {
  server *s = check_server(L);
  if (s->L) return luaL_error(L, "close: the server is serving");
  if (s->daemon) mhd.MHD_stop_daemon_(s->daemon);
  s->daemon = NULL;
  return 0;
}

static void open_servers(lua_State *L) {
  luaL_newmetatable(L, server_name);
  luaL_setfuncs(L, (const luaL_Reg[]){ { "__gc", close_server }, { "__close", close_server }, { NULL, NULL } }, 0);
  luaL_newlib(L, ((const luaL_Reg[]){ { "serve", serve }, { "close", close_server }, { NULL, NULL } }));
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}

#else

static int http_listen(lua_State *L) {
  return luaL_error(L, "watch: this build has no server of HTTP: install libmicrohttpd-dev (Debian's name) and build "
                       "Tycho again");
}

static void open_servers(lua_State *L) { (void)L; }

#endif

/* ---- files ---- */

/* real(path) -> the path without links, or nil */
static int http_real(lua_State *L) {
  char path[PATH_MAX];
  if (realpath(ty_io_path(L, 1), path)) lua_pushstring(L, path);
  else lua_pushnil(L);
  return 1;
}

static void release_bytes(void *p) { ty_bytes_free(p); }

/* read(root, path, from, most) -> bytes, size of the file, time of its last change; nil where there is no plain file below
 * the root, which is a path without links. What links lead out to is not below it. */
static int http_read(lua_State *L) {
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

int ty_lua_open_http(lua_State *L) {
  open_servers(L);
  luaL_newlib(L, ((const luaL_Reg[]){
                     { "listen", http_listen }, { "real", http_real }, { "read", http_read }, { NULL, NULL } }));
  return 1;
}
