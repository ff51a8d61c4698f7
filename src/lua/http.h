/* Shared by the files of the server of HTTP: http.c has connections and requests, http_answer.c answers that come later,
 * http_files.c what `tycho watch` reads. One thread of Lua runs it all. */
#ifndef TY_LUA_HTTP_H
#define TY_LUA_HTTP_H

#include "../io/formats.h"
#include "handle.h"

int ty_http_real(lua_State *L);
int ty_http_read(lua_State *L);

#ifdef TY_HAVE_MICROHTTPD
#include <microhttpd.h>

/* clang-format off */
#define MHD_FUNCTIONS(X) \
  X(MHD_start_daemon) X(MHD_stop_daemon) X(MHD_run_wait) X(MHD_create_response_from_buffer) \
  X(MHD_create_response_from_callback) X(MHD_add_response_header) X(MHD_queue_response) X(MHD_destroy_response) \
  X(MHD_lookup_connection_value) X(MHD_get_connection_values) X(MHD_get_connection_info) X(MHD_suspend_connection) \
  X(MHD_resume_connection)
/* clang-format on */

#define MHD_DECLARE(name) __typeof__(name) *name##_;
typedef struct ty_http_library {
  MHD_FUNCTIONS(MHD_DECLARE)
} ty_http_library;
extern ty_http_library ty_mhd;

/* Bytes in a second: a client that is slower may take the server's patience in addition, for a request to be there and
 * for an answer to be fetched. */
enum { SLOWEST = 1 << 14 };

typedef struct ty_answer ty_answer;
typedef struct ty_server ty_server;

/* A connection, and the request on it: one at a time. */
typedef struct ty_client {
  ty_server *server;
  struct MHD_Connection *connection;
  struct ty_client *next, **link;
  int fd;
  double deadline; /* 0: none, it is we who are slow */
  bool is_leaving; /* nothing more comes from it */

  /* the request */
  ty_bytes body;
  size_t received;
  const char *problem; /* why the body is not there */
  bool asked;          /* the handler was called */

  /* what it gets */
  ty_answer *answer;             /* later, while somebody has it to answer with */
  struct MHD_Response *response; /* not yet handed over */
  unsigned status;
  bool streams, ended; /* in pieces; there will be no more */
  bool dropped;        /* the connection is to go, without an end */
  bool suspended;
  ty_bytes waiting; /* pieces, of which the first `sent` bytes are gone */
  size_t sent;
} ty_client;

/* The object of Lua. Client NULL: it is over, or the client is gone. */
struct ty_answer {
  ty_client *client;
  bool finished; /* by us */
};

struct ty_server {
  struct MHD_Daemon *daemon;
  ty_client *clients;
  struct pollfd *polled; /* room for every connection */
  size_t body_most, waiting_most, connections_most;
  double patience;   /* seconds */
  size_t held;       /* by bodies that are coming in, of all clients */
  bool has_moved;    /* something came or went: there may be more */
  lua_State *L;      /* the thread that it runs on, while it does */
  int handler;       /* its index there */
  ty_client *asking; /* whose request the handler has */
  bool has_failed;   /* the handler raised: the error is at the top of L */
};

double ty_http_now(void);
/* The response of `status` at `index`, headers after it and the body, or where `client` is given the pieces that it will
 * get: in the client or new. Raises. */
void ty_http_respond(lua_State *L, ty_client *c, int index, bool streams);
void ty_http_wake(ty_client *c);
/* Its connection is closed as soon as the server runs. */
void ty_http_drop(ty_client *c);

void ty_http_open_answers(lua_State *L);
ty_answer *ty_http_answer_at(lua_State *L, int index); /* or NULL */
int ty_http_new_answer(lua_State *L, ty_client *c);

#endif
#endif
