/* A server of HTTP whose answers a Lua function makes, on libmicrohttpd: what `tycho watch` and `tycho serve` are made of.
 * Not for users. Everything runs on the thread that calls serve() or poll(). libmicrohttpd is loaded when the first
 * server starts: it brings libraries for TLS with it, which no other program should wait for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "http.h"
#include "io.h"

#ifdef TY_HAVE_MICROHTTPD

enum {
  CONNECTIONS = 100,
  IDLE_SECONDS = 60,
  BODY = 8 << 20,
  WAITING = 1 << 20,
  PATIENCE = 120,
  BODIES_HELD = 8,
  SKIPPED = 8
};

ty_http_library ty_mhd;
static bool mhd_found;

static void find_library(void) {
  void *handle = dlopen("libmicrohttpd.so.12", RTLD_NOW | RTLD_LOCAL);
  if (!handle) return;
  mhd_found = true;
#define FIND(name) mhd_found &= (*(void **)(void *)&ty_mhd.name##_ = dlsym(handle, #name)) != NULL;
  MHD_FUNCTIONS(FIND)
}

static const char server_name[] = "http server";

static ty_server *check_server(lua_State *L) {
  ty_server *s = luaL_testudata(L, 1, server_name);
  if (!s) ty_lua_refuse(L, 1, "a server");
  return s;
}

double ty_http_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A listening socket at an address of the host, or -1 after ty_fail(). who: as errors begin. */
static int listen_at(const char *who, const char *host, int port) {
  char service[16];
  snprintf(service, sizeof service, "%d", port);
  struct addrinfo *list, hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
  int problem = getaddrinfo(host, service, &hints, &list), fd = -1, why = 0;
  if (problem) {
    ty_fail(TY_EINVAL, "%s: host: expected a name or address of this machine, got %s (%s)", who, ty_quote_text(host),
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
    ty_fail(TY_EIO, "%s: port %d of %s is in use; --port takes another, --port 0 any that is free", who, port, host);
  else ty_fail(TY_EIO, "%s: cannot listen at port %d of %s: %s", who, port, ty_quote_text(host), strerror(why));
  return -1;
}

/* ---- connections ---- */

static ty_client *client_of(struct MHD_Connection *connection) {
  const union MHD_ConnectionInfo *info = ty_mhd.MHD_get_connection_info_(connection,
                                                                         MHD_CONNECTION_INFO_SOCKET_CONTEXT);
  return info ? info->socket_context : NULL;
}

/* The request is over: what was held for it goes. */
static void forget(ty_client *c) {
  if (c->answer) c->answer->client = NULL; /* the client has left */
  if (c->response) ty_mhd.MHD_destroy_response_(c->response);
  if (!c->problem) c->server->held -= c->body.size;
  ty_bytes_free(&c->body);
  ty_bytes_free(&c->waiting);
  *c = (ty_client){ .server = c->server, .connection = c->connection, .next = c->next, .link = c->link, .fd = c->fd };
  c->deadline = ty_http_now() + c->server->patience;
}

static void on_connection(void *server_of, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code) {
  ty_server *s = server_of;
  s->has_moved = true;
  if (code == MHD_CONNECTION_NOTIFY_STARTED) {
    ty_client *c = *context = calloc(1, sizeof *c);
    if (!c) return; /* its requests are refused */
    *c = (ty_client){ .server = s, .connection = connection, .next = s->clients, .link = &s->clients };
    c->fd = ty_mhd.MHD_get_connection_info_(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    c->deadline = ty_http_now() + c->server->patience;
    if (c->next) c->next->link = &c->next;
    s->clients = c;
  } else if (*context) {
    ty_client *c = *context;
    forget(c);
    *c->link = c->next;
    if (c->next) c->next->link = c->link;
    free(c);
    *context = NULL;
  }
}

static void on_completed(void *server_of, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode code) {
  ty_client *c = *state;
  (void)server_of;
  (void)connection;
  (void)code;
  if (c) forget(c);
  *state = NULL;
}

/* ---- requests ---- */

/* A piece of a body; false: enough of it. Of a body that is not taken the rest is read over, so that the answer reaches a
 * client who sends first and listens then. */
static bool take(ty_client *c, const char *bytes, size_t size) {
  ty_server *s = c->server;
  s->has_moved = true;
  c->received += size;
  if (c->problem) return c->received / SKIPPED <= s->body_most + (1 << 17);
  if (c->received > s->body_most) c->problem = "too large";
  else if (s->held + size > BODIES_HELD * s->body_most || !ty_bytes_put(&c->body, bytes, size)) c->problem = "no room";
  if (c->problem) {
    s->held -= c->body.size;
    ty_bytes_free(&c->body);
  } else {
    s->held += size;
    c->deadline += (double)size / SLOWEST;
  }
  return true;
}

static enum MHD_Result add_value(void *to, enum MHD_ValueKind kind, const char *key, const char *value) {
  lua_State *L = to;
  if (kind == MHD_HEADER_KIND) { /* their names in small letters */
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    for (const char *c = key; *c; c++) luaL_addchar(&b, (char)(*c >= 'A' && *c <= 'Z' ? *c + 32 : *c));
    luaL_pushresult(&b);
  } else {
    lua_pushstring(L, key);
  }
  lua_pushstring(L, value ? value : "");
  lua_rawset(L, -3);
  return MHD_YES;
}

typedef struct request {
  ty_client *client;
  const char *path, *method;
} request;

/* handler(method, path, query, host, headers, body, problem) -> status, headers, body, or an answer for later. Without a
 * body, problem says why: "too large" or "no room". Protected, since Lua's errors may not jump over the library's
 * frames. */
static int ask(lua_State *L) {
  request *r = lua_touserdata(L, 2);
  ty_client *c = r->client;
  lua_settop(L, 1);
  lua_pushstring(L, r->method);
  lua_pushstring(L, r->path);
  lua_newtable(L);
  ty_mhd.MHD_get_connection_values_(c->connection, MHD_GET_ARGUMENT_KIND, add_value, L);
  lua_pushstring(L, ty_mhd.MHD_lookup_connection_value_(c->connection, MHD_HEADER_KIND, "Host"));
  lua_newtable(L);
  ty_mhd.MHD_get_connection_values_(c->connection, MHD_HEADER_KIND, add_value, L);
  if (c->problem) lua_pushnil(L);
  else lua_pushlstring(L, c->body.size ? (const char *)c->body.data : "", c->body.size);
  lua_pushstring(L, c->problem);
  if (!c->problem) c->server->held -= c->body.size;
  ty_bytes_free(&c->body); /* is Lua's now */
  lua_call(L, 7, 3);
  ty_answer *a = ty_http_answer_at(L, 1);
  if (c->dropped) return 0;
  bool fits = c->answer ? a == c->answer : a ? a->finished && c->response : !c->response;
  if (!fits) return luaL_error(L, "the handler has to return the answer that it made, or a status, headers and a body");
  if (!a) ty_http_respond(L, c, 1, false);
  return 0;
}

/* Hands the response over, where there is one, and waits where there will be one. */
static enum MHD_Result reply(ty_client *c) {
  if (c->dropped || (!c->response && !c->answer)) return MHD_NO;
  if (!c->response) {
    c->suspended = true;
    ty_mhd.MHD_suspend_connection_(c->connection);
    return MHD_YES;
  }
  struct MHD_Response *response = c->response;
  c->response = NULL;
  enum MHD_Result ok = ty_mhd.MHD_queue_response_(c->connection, c->status, response);
  ty_mhd.MHD_destroy_response_(response);
  return ok;
}

static enum MHD_Result on_request(void *server_of, struct MHD_Connection *connection, const char *path,
                                  const char *method, const char *version, const char *upload, size_t *upload_size,
                                  void **state) {
  ty_server *s = server_of;
  ty_client *c = client_of(connection);
  (void)version;
  if (!c) return MHD_NO;
  c->is_leaving = false;
  if (!*state) { /* the head has come; an answer is due when all of the request has */
    *state = c;
    return MHD_YES;
  }
  if (*upload_size) {
    bool more = take(c, upload, *upload_size);
    *upload_size = 0;
    return more ? MHD_YES : MHD_NO;
  }
  s->has_moved = true;
  if (c->asked) return reply(c);
  lua_State *L = s->L;
  if (!L || s->has_failed || !lua_checkstack(L, 8)) return MHD_NO;
  request r = { c, path, method };
  c->asked = true;
  c->deadline = 0;
  s->asking = c;
  lua_pushcfunction(L, ask);
  lua_pushvalue(L, s->handler);
  lua_pushlightuserdata(L, &r);
  s->has_failed = lua_pcall(L, 2, 0, 0) != LUA_OK; /* the error stays where it is until the caller raises it */
  s->asking = NULL;
  if (s->has_failed) return MHD_NO;
  return reply(c);
}

/* server:answer() -> the answer, for later, of the request that the handler is called with */
static int later(lua_State *L) {
  ty_server *s = check_server(L);
  if (!s->asking) return luaL_error(L, "answer: expected a handler that was called with a request");
  if (s->asking->answer) return luaL_error(L, "answer: the request has an answer already");
  return ty_http_new_answer(L, s->asking);
}

/* ---- running ---- */

/* listen(host, port [, options]) -> server, its port; port 0: any that is free. options: name (as errors begin), body
 * (bytes of a request's at most), waiting (bytes that may wait to be fetched by one client), connections, patience
 * (seconds that a request may take to be there, an answer to be fetched). */
static int http_listen(lua_State *L) {
  static const char *const names[] = { "name", "body", "waiting", "connections", "patience", NULL };
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  const char *host = ty_lua_check_string(L, 1);
  lua_Integer port = ty_lua_check_integer(L, 2);
  if (port < 0 || port > 65535) return ty_lua_refuse(L, 2, "a port from 0 to 65535");
  ty_io_options(L, 3, names);
  const char *who = ty_io_choice(L, 3, "name", "watch");
  size_t body = (size_t)ty_io_count(L, 3, "body", BODY, 1 << 30);
  size_t waiting = (size_t)ty_io_count(L, 3, "waiting", WAITING, 1 << 30);
  size_t connections = (size_t)ty_io_count(L, 3, "connections", CONNECTIONS, 1 << 16);
  double patience = (double)ty_io_count(L, 3, "patience", PATIENCE, 1 << 20);
  pthread_once(&once, find_library);
  if (!mhd_found) return luaL_error(L, "%s: libmicrohttpd.so.12 is not found (Debian's package libmicrohttpd12)", who);
  ty_server *s = lua_newuserdatauv(L, sizeof *s, 0);
  *s = (ty_server){ .body_most = body, .waiting_most = waiting, .patience = patience };
  s->connections_most = connections ? connections : 1;
  luaL_setmetatable(L, server_name);
  s->polled = calloc(s->connections_most, sizeof *s->polled);
  if (!s->polled) return luaL_error(L, "%s: no memory for %I connections", who, (LUAI_UACINT)connections);
  int fd = listen_at(who, host, (int)port);
  if (fd < 0) return ty_lua_error(L);
  s->daemon = ty_mhd.MHD_start_daemon_(
      MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, on_request, s, MHD_OPTION_LISTEN_SOCKET, fd,
      MHD_OPTION_CONNECTION_LIMIT, (unsigned)s->connections_most, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_SECONDS,
      MHD_OPTION_NOTIFY_CONNECTION, on_connection, s, MHD_OPTION_NOTIFY_COMPLETED, on_completed, s, MHD_OPTION_END);
  if (!s->daemon) {
    close(fd);
    return luaL_error(L, "%s: the server at port %d of %s does not start", who, (int)port, host);
  }
  struct sockaddr_storage at;
  socklen_t size = sizeof at;
  char text[16] = "0";
  if (getsockname(fd, (struct sockaddr *)&at, &size) == 0)
    getnameinfo((struct sockaddr *)&at, size, NULL, 0, text, sizeof text, NI_NUMERICSERV);
  lua_pushinteger(L, atoi(text));
  return 2;
}

/* Whether a client who has said that nothing more comes from it has been read to its end. */
static bool is_read(int fd) {
  char byte;
  ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

/* Clients who have left, whom the library does not see: not while they are suspended, and not when the end came together
 * with the last bytes, which it takes for all that there is. One who says that nothing more will come from it has left,
 * if it has not said all or if it has to wait. And those who take too long. */
static void look_after(ty_server *s) {
  double time = ty_http_now();
  nfds_t count = 0;
  for (ty_client *c = s->clients; c; c = c->next) {
    if (c->deadline && c->deadline < time) {
      shutdown(c->fd, SHUT_RDWR); /* which the library sees */
      c->deadline = 0;
    } else if ((c->answer || !c->asked) && count < s->connections_most) {
      s->polled[count++] = (struct pollfd){ .fd = c->fd, .events = POLLRDHUP };
    }
  }
  if (!count || poll(s->polled, count, 0) <= 0) return;
  nfds_t i = 0;
  for (ty_client *c = s->clients; c && i < count; c = c->next) {
    if (c->fd != s->polled[i].fd || !s->polled[i++].revents) continue;
    if (c->answer) ty_http_drop(c);
    else if (c->is_leaving && is_read(c->fd)) shutdown(c->fd, SHUT_RDWR);
    else c->is_leaving = true; /* what it said last may not be done yet: at the next look */
  }
}

/* Waits for at most so long and does what is ready; an upload of many pieces is not left to the next call, as long as it
 * does not take the time of others. */
static void run(ty_server *s, double seconds) {
  look_after(s);
  s->has_moved = false;
  ty_mhd.MHD_run_wait_(s->daemon, seconds <= 0 ? 0 : (int32_t)(seconds < 0.1 ? seconds * 1e3 + 1 : 100));
  for (double end = ty_http_now() + 0.005; s->has_moved && !s->has_failed && ty_http_now() < end;) {
    s->has_moved = false;
    ty_mhd.MHD_run_wait_(s->daemon, 0);
  }
}

static ty_server *begin(lua_State *L, const char *method) {
  ty_server *s = check_server(L);
  ty_lua_check_callable(L, 2);
  if (!s->daemon) luaL_error(L, "%s: the server is closed", method);
  if (s->L) luaL_error(L, "%s: the server is serving", method);
  lua_settop(L, 3);
  s->L = L;
  s->handler = 2;
  s->has_failed = false;
  return s;
}

static int end(lua_State *L, ty_server *s) {
  s->L = NULL;
  if (s->has_failed) return lua_error(L);
  if (!ty_interrupted) return 0;
  ty_fail(TY_EINTR, "interrupted");
  return ty_lua_error(L);
}

/* server:serve(handler, seconds): answers what comes until then, or Ctrl-C */
static int serve(lua_State *L) {
  double until = ty_http_now() + ty_lua_check_number(L, 3);
  ty_server *s = begin(L, "serve");
  for (double left = until - ty_http_now(); left > 0 && !ty_interrupted && !s->has_failed; left = until - ty_http_now())
    run(s, left);
  return end(L, s);
}

/* server:poll(handler, milliseconds): answers what is there, and returns as soon as something was; waits no longer than
 * that, nor than 100 */
static int poll_once(lua_State *L) {
  double milliseconds = ty_lua_check_number(L, 3);
  ty_server *s = begin(L, "poll");
  if (!ty_interrupted) run(s, milliseconds * 1e-3);
  return end(L, s);
}

static int close_server(lua_State *L) {
  ty_server *s = check_server(L);
  if (s->L) return luaL_error(L, "close: the server is serving");
  if (s->daemon) {
    for (ty_client *c = s->clients; c; c = c->next) ty_http_drop(c); /* may not be suspended when the library stops */
    ty_mhd.MHD_stop_daemon_(s->daemon);
  }
  s->daemon = NULL;
  free(s->polled);
  s->polled = NULL;
  return 0;
}

static void open_servers(lua_State *L) {
  luaL_newmetatable(L, server_name);
  luaL_setfuncs(L, (const luaL_Reg[]){ { "__gc", close_server }, { "__close", close_server }, { NULL, NULL } }, 0);
  luaL_newlib(
      L,
      ((const luaL_Reg[]){
          { "serve", serve }, { "poll", poll_once }, { "answer", later }, { "close", close_server }, { NULL, NULL } }));
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
  ty_http_open_answers(L);
}

#else

static int http_listen(lua_State *L) {
  const char *who = ty_io_choice(L, 3, "name", "watch");
  return luaL_error(L,
                    "%s: this build has no server of HTTP: install libmicrohttpd-dev (Debian's name) and build "
                    "Tycho again",
                    who);
}

static void open_servers(lua_State *L) { (void)L; }

#endif

int ty_lua_open_http(lua_State *L) {
  open_servers(L);
  luaL_newlib(L, ((const luaL_Reg[]){
                     { "listen", http_listen }, { "real", ty_http_real }, { "read", ty_http_read }, { NULL, NULL } }));
  return 1;
}
