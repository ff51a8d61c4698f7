/* Answers that come later: whole, or in pieces as they are made. An answer is an object of Lua that belongs to a request;
 * its connection is suspended until there is something to send. */
#include "http.h"

#ifdef TY_HAVE_MICROHTTPD
#include <string.h>

static const char answer_name[] = "http answer";

ty_answer *ty_http_answer_at(lua_State *L, int index) { return luaL_testudata(L, index, answer_name); }

static ty_answer *check_answer(lua_State *L) {
  ty_answer *a = ty_http_answer_at(L, 1);
  if (!a) ty_lua_refuse(L, 1, "an answer");
  return a;
}

int ty_http_new_answer(lua_State *L, ty_client *c) {
  ty_answer *a = lua_newuserdatauv(L, sizeof *a, 0);
  *a = (ty_answer){ 0 };
  luaL_setmetatable(L, answer_name);
  a->client = c;
  c->answer = a;
  return 1;
}

void ty_http_wake(ty_client *c) {
  if (!c->suspended) return;
  c->suspended = false;
  ty_mhd.MHD_resume_connection_(c->connection);
}

static void part(ty_client *c) {
  if (c->answer) c->answer->client = NULL;
  c->answer = NULL;
}

void ty_http_drop(ty_client *c) {
  part(c);
  c->dropped = true;
  ty_http_wake(c);
}

/* From now on it is the client who has to be quick. */
static void expect_quick(ty_client *c, size_t bytes) {
  c->deadline = ty_http_now() + c->server->patience + (double)bytes / SLOWEST;
}

static void end(ty_client *c) {
  c->answer->finished = true;
  part(c);
  c->ended = true;
  ty_http_wake(c);
}

/* ---- the pieces ---- */

static ssize_t next_piece(void *client_of, uint64_t position, char *to, size_t room) {
  ty_client *c = client_of;
  (void)position;
  size_t left = c->waiting.size - c->sent;
  if (c->dropped) return MHD_CONTENT_READER_END_WITH_ERROR;
  if (!left && c->ended) return MHD_CONTENT_READER_END_OF_STREAM;
  if (!left) {
    c->suspended = true;
    ty_mhd.MHD_suspend_connection_(c->connection);
    return 0;
  }
  c->server->has_moved = true;
  if (left > room) left = room;
  memcpy(to, c->waiting.data + c->sent, left);
  c->sent += left;
  if (c->sent == c->waiting.size) c->sent = c->waiting.size = 0;
  return (ssize_t)left;
}

void ty_http_respond(lua_State *L, ty_client *c, int index, bool streams) {
  lua_Integer status = ty_lua_check_integer(L, index);
  if (status < 200 || status > 599) ty_lua_refuse(L, index, "a status from 200 to 599");
  ty_lua_check_type(L, index + 1, LUA_TTABLE);
  size_t size = 0;
  const char *body = streams ? NULL : ty_lua_check_lstring(L, index + 2, &size);
  if (streams) c->response = ty_mhd.MHD_create_response_from_callback_(MHD_SIZE_UNKNOWN, 1 << 14, next_piece, c, NULL);
  else c->response = ty_mhd.MHD_create_response_from_buffer_(size, (void *)(uintptr_t)body, MHD_RESPMEM_MUST_COPY);
  if (!c->response) luaL_error(L, "no memory for an answer of %I bytes", (LUAI_UACINT)size);
  const char *wrong = NULL;
  for (lua_pushnil(L); lua_next(L, index + 1); lua_pop(L, 1)) {
    const char *name = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : NULL;
    const char *value = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : NULL;
    if (!name || !value || ty_mhd.MHD_add_response_header_(c->response, name, value) != MHD_YES) {
      wrong = name ? name : "?";
      break; /* the name stays alive on the stack */
    }
  }
  if (wrong) {
    ty_mhd.MHD_destroy_response_(c->response);
    c->response = NULL;
    luaL_error(L, "headers: '%s' or its value cannot be one", wrong);
  }
  c->status = (unsigned)status;
  c->streams = streams;
  if (!streams) expect_quick(c, size);
}

/* ---- methods ---- */

/* The answer's client, where nothing was answered yet; NULL when it is gone. */
static ty_client *unanswered(lua_State *L, const char *method) {
  ty_answer *a = check_answer(L);
  if (a->finished || (a->client && a->client->streams)) luaL_error(L, "%s: the answer was given already", method);
  return a->client;
}

/* answer:finish(status, headers, body) -> whether the client is still there */
static int answer_finish(lua_State *L) {
  ty_client *c = unanswered(L, "finish");
  if (c) {
    ty_http_respond(L, c, 2, false);
    end(c);
  }
  lua_pushboolean(L, c != NULL);
  return 1;
}

/* answer:stream(status, headers) -> whether the client is still there: pieces follow */
static int answer_stream(lua_State *L) {
  ty_client *c = unanswered(L, "stream");
  if (c) {
    ty_http_respond(L, c, 2, true);
    ty_http_wake(c);
  }
  lua_pushboolean(L, c != NULL);
  return 1;
}

static ty_client *streaming(lua_State *L, const char *method) {
  ty_answer *a = check_answer(L);
  if (a->finished || (a->client && !a->client->streams))
    luaL_error(L, "%s: expected an answer that streams, got one that %s", method,
               a->finished ? "was given already" : "did not begin to");
  return a->client;
}

/* answer:write(bytes) -> how many bytes wait to be fetched; nil when the client is gone. One that lets more wait than
 * the server bears is gone with that. */
static int answer_write(lua_State *L) {
  ty_client *c = streaming(L, "write");
  size_t size;
  const char *bytes = ty_lua_check_lstring(L, 2, &size);
  if (!c) return 0;
  if (c->sent > c->waiting.size / 2) {
    c->waiting.size -= c->sent;
    memmove(c->waiting.data, c->waiting.data + c->sent, c->waiting.size);
    c->sent = 0;
  }
  size_t left = c->waiting.size - c->sent;
  if (size > c->server->waiting_most || left > c->server->waiting_most - size ||
      (size && !ty_bytes_put(&c->waiting, bytes, size))) {
    ty_http_drop(c);
    return 0;
  }
  if (size) ty_http_wake(c);
  lua_pushinteger(L, (lua_Integer)(left + size));
  return 1;
}

/* answer:close() -> whether the client is still there: there are no more pieces */
static int answer_close(lua_State *L) {
  ty_client *c = streaming(L, "close");
  if (c) {
    expect_quick(c, c->waiting.size - c->sent);
    end(c);
  }
  lua_pushboolean(L, c != NULL);
  return 1;
}

/* answer:drop(): the connection is closed without an end, which tells the client that something went wrong */
static int answer_drop(lua_State *L) {
  ty_answer *a = check_answer(L);
  if (a->client) ty_http_drop(a->client);
  return 0;
}

/* answer.gone: the client has left before it was answered; answer.waiting: bytes that were written and not fetched */
static int answer_index(lua_State *L) {
  ty_answer *a = check_answer(L);
  const char *key = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "";
  if (strcmp(key, "gone") == 0) lua_pushboolean(L, !a->client && !a->finished);
  else if (strcmp(key, "waiting") == 0)
    lua_pushinteger(L, a->client ? (lua_Integer)(a->client->waiting.size - a->client->sent) : 0);
  else lua_pushvalue(L, 2), lua_rawget(L, lua_upvalueindex(1));
  return 1;
}

/* Nobody can answer any more: the client is not left to wait. */
static int answer_gc(lua_State *L) {
  ty_answer *a = check_answer(L);
  if (a->client) ty_http_drop(a->client);
  return 0;
}

void ty_http_open_answers(lua_State *L) {
  luaL_newmetatable(L, answer_name);
  luaL_newlib(L, ((const luaL_Reg[]){ { "finish", answer_finish },
                                      { "stream", answer_stream },
                                      { "write", answer_write },
                                      { "close", answer_close },
                                      { "drop", answer_drop },
                                      { NULL, NULL } }));
  lua_pushcclosure(L, answer_index, 1);
  lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, answer_gc);
  lua_setfield(L, -2, "__gc");
  lua_pop(L, 1);
}

#endif
