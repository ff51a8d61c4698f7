/* Ranks for modules/dist, which is their only user: worlds, what ranks do with tensors, clocks, memory of a thread. Not an
 * interface for programs. */
#include <math.h>
#include <string.h>

#include "../comm/comm.h"
#include "../tensor/ledger.h"
#include "handle.h"

static const char class_name[] = "comm";

typedef struct box {
  ty_comm *c;
} box;

static ty_comm *check(lua_State *L) {
  box *b = luaL_testudata(L, 1, class_name);
  if (!b) ty_lua_refuse(L, 1, "a comm");
  else if (!b->c) luaL_error(L, "comm: the rank has left it");
  return b ? b->c : NULL;
}

static box *push_box(lua_State *L) {
  box *b = lua_newuserdatauv(L, sizeof *b, 0);
  b->c = NULL;
  luaL_setmetatable(L, class_name);
  return b;
}

/* open(size, latency, bandwidth, latency within a machine, bandwidth within, ranks of a machine) -> number */
static int world_open(lua_State *L) {
  lua_Integer size = ty_lua_check_integer(L, 1), per_node = ty_lua_check_integer(L, 6);
  ty_network network = { .between = { ty_lua_check_number(L, 2), ty_lua_check_number(L, 3) },
                         .within = { ty_lua_check_number(L, 4), ty_lua_check_number(L, 5) },
                         .per_node = (int)per_node };
  if (per_node < 1 || per_node > 1 << 20) return ty_lua_refuse(L, 6, "1 to 2^20 ranks of a machine");
  for (int i = 2; i <= 5; i++) {
    lua_Number value = lua_tonumber(L, i);
    if (!(i % 2 ? value > 0 : value >= 0 && value < HUGE_VAL)) return ty_lua_refuse(L, i, "a latency or a bandwidth");
  }
  int64_t number = ty_world_open(size < 1 || size > 1 << 20 ? 0 : (int)size, &network);
  if (!number) return ty_lua_error(L);
  lua_pushinteger(L, number);
  return 1;
}

static int world_close(lua_State *L) {
  ty_world_close(ty_lua_check_integer(L, 1));
  return 0;
}

/* fail(world, text) -> whether it was the first to fail it */
static int world_fail(lua_State *L) {
  lua_pushboolean(L, ty_world_fail(ty_lua_check_integer(L, 1), ty_lua_check_string(L, 2)));
  return 1;
}

/* join(world, rank): the thread becomes that rank */
static int join(lua_State *L) {
  lua_Integer world = ty_lua_check_integer(L, 1), rank = ty_lua_check_integer(L, 2);
  box *b = push_box(L);
  b->c = ty_comm_join(world, rank < 0 || rank > 1 << 20 ? -1 : (int)rank);
  return b->c ? 1 : ty_lua_error(L);
}

/* process() -> the rank that this process is */
static int process(lua_State *L) {
  box *b = push_box(L);
  b->c = ty_comm_process();
  return b->c ? 1 : ty_lua_error(L);
}

/* mpi() -> which MPI there is, or nil and why there is none */
static int mpi(lua_State *L) {
  const char *name = ty_comm_mpi();
  lua_pushstring(L, name);
  if (name) return 1;
  lua_pushstring(L, ty_error());
  return 2;
}

static int comm_leave(lua_State *L) {
  box *b = luaL_testudata(L, 1, class_name);
  if (!b) return ty_lua_refuse(L, 1, "a comm");
  ty_comm_leave(b->c);
  b->c = NULL;
  return 0;
}

static int comm_rank(lua_State *L) {
  lua_pushinteger(L, ty_comm_rank(check(L)));
  return 1;
}

static int comm_size(lua_State *L) {
  lua_pushinteger(L, ty_comm_size(check(L)));
  return 1;
}

/* members() -> ranks of the world, in the group's order */
static int comm_members(lua_State *L) {
  const ty_comm *c = check(L);
  lua_createtable(L, ty_comm_size(c), 0);
  for (int i = 0; i < ty_comm_size(c); i++) {
    lua_pushinteger(L, ty_comm_member(c, i));
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static int find_name(lua_State *L, int index, const char *const *names, int n, const char *expected) {
  const char *name = ty_lua_check_string(L, index);
  for (int i = 0; i < n; i++)
    if (strcmp(names[i], name) == 0) return i;
  return ty_lua_refuse(L, index, expected);
}

/* start(kind, x, out, reduction, root) -> ticket; what a kind has no use for is nil */
static int comm_start(lua_State *L) {
  static const char *const reductions[] = { "sum", "mean", "min", "max", "prod" };
  ty_comm *c = check(L);
  ty_collective what = { .kind = (ty_comm_kind)find_name(L, 2, ty_comm_names, TY_SPLIT, "a collective") };
  if (what.kind != TY_BARRIER) what.x = ty_lua_check(L, 3);
  if (what.kind == TY_REDUCE_SCATTER || what.kind == TY_ALL_GATHER || what.kind == TY_ALL_TO_ALL)
    what.out = ty_lua_check(L, 4);
  if (!lua_isnoneornil(L, 5))
    what.reduction = (ty_reduction)find_name(L, 5, reductions, 5, "sum, mean, min, max or prod");
  lua_Integer root = ty_lua_opt_integer(L, 6, 0);
  what.root = root < 0 || root > 1 << 20 ? -1 : (int)root;
  int64_t ticket = ty_comm_start(c, &what);
  if (!ticket) return ty_lua_error(L);
  lua_pushinteger(L, ticket);
  return 1;
}

static int comm_wait(lua_State *L) { return ty_comm_wait(check(L), ty_lua_check_integer(L, 2)) ? 0 : ty_lua_error(L); }

/* split(color, key) -> comm, or nil for a color below 0 */
static int comm_split(lua_State *L) {
  ty_comm *c = check(L);
  lua_Integer color = ty_lua_check_integer(L, 2), key = ty_lua_check_integer(L, 3);
  box *b = push_box(L);
  bool none;
  b->c = ty_comm_split(c, color, key, &none);
  if (none) lua_pushnil(L);
  return b->c || none ? 1 : ty_lua_error(L);
}

static int opt_rank(lua_State *L, int index) {
  lua_Integer rank = ty_lua_check_integer(L, index);
  return rank < 0 || rank > 1 << 20 ? -1 : (int)rank;
}

/* send(x, to, tag) */
static int comm_send(lua_State *L) {
  ty_comm *c = check(L);
  const ty_tensor *x = ty_lua_check(L, 2);
  return ty_comm_send(c, x, opt_rank(L, 3), ty_lua_check_integer(L, 4)) ? 0 : ty_lua_error(L);
}

/* receive(from, tag) -> tensor */
static int comm_receive(lua_State *L) {
  ty_comm *c = check(L);
  int from = opt_rank(L, 2);
  lua_Integer tag = ty_lua_check_integer(L, 3);
  ty_lua_poll(L);
  ty_lua_push(L, ty_comm_receive(c, from, tag));
  return 1;
}

static int comm_clock(lua_State *L) {
  lua_pushnumber(L, ty_comm_clock(check(L)));
  return 1;
}

static int comm_advance(lua_State *L) {
  ty_comm *c = check(L);
  lua_Number seconds = ty_lua_check_number(L, 2);
  if (!(seconds >= 0 && seconds < HUGE_VAL)) return ty_lua_refuse(L, 2, "seconds >= 0");
  ty_comm_advance(c, seconds);
  return 0;
}

/* traffic() -> { calls = { all_reduce = n ... }, sent = { all_reduce = bytes ... }, crossed = bytes } */
static int comm_traffic(lua_State *L) {
  ty_traffic t = ty_comm_traffic(check(L));
  lua_createtable(L, 0, 3);
  lua_createtable(L, 0, TY_COMM_KINDS);
  lua_createtable(L, 0, TY_COMM_KINDS);
  for (int i = 0; i < TY_COMM_KINDS; i++) {
    lua_pushinteger(L, t.calls[i]), lua_setfield(L, -3, ty_comm_names[i]);
    lua_pushinteger(L, t.sent[i]), lua_setfield(L, -2, ty_comm_names[i]);
  }
  lua_setfield(L, -3, "sent");
  lua_setfield(L, -2, "calls");
  lua_pushinteger(L, t.crossed), lua_setfield(L, -2, "crossed");
  return 1;
}

/* memory() -> bytes that this thread has, and the most at once since reset_memory() */
static int thread_memory(lua_State *L) {
  lua_pushinteger(L, ty_thread_ledger.live);
  lua_pushinteger(L, ty_thread_ledger.peak);
  return 2;
}

static int reset_memory(lua_State *L) {
  (void)L;
  ty_thread_ledger.peak = ty_thread_ledger.live;
  return 0;
}

/* seconds(kind, ranks, bytes, latency, bandwidth): what ranks' clocks say of a collective over links of one kind, or of
 * a message */
static int seconds(lua_State *L) {
  ty_comm_kind kind = (ty_comm_kind)find_name(L, 1, ty_comm_names, TY_COMM_KINDS, "a collective or a message");
  lua_Integer ranks = ty_lua_check_integer(L, 2), bytes = ty_lua_check_integer(L, 3);
  ty_link link = { ty_lua_check_number(L, 4), ty_lua_check_number(L, 5) };
  if (ranks < 1 || ranks > 1 << 20) return ty_lua_refuse(L, 2, "1 to 2^20 ranks");
  lua_pushnumber(L, ty_collective_seconds(kind, link, (int)ranks, bytes));
  return 1;
}

/* limit_memory(bytes): no more than these for this thread; 0: no limit */
static int limit_memory(lua_State *L) {
  lua_Integer bytes = ty_lua_check_integer(L, 1);
  if (bytes < 0) return ty_lua_refuse(L, 1, "bytes >= 0");
  ty_thread_ledger.limit = bytes;
  return 0;
}

int ty_lua_open_comm(lua_State *L) {
  luaL_newlib(L, ((const luaL_Reg[]){ { "open", world_open },
                                      { "close", world_close },
                                      { "fail", world_fail },
                                      { "join", join },
                                      { "process", process },
                                      { "mpi", mpi },
                                      { "memory", thread_memory },
                                      { "reset_memory", reset_memory },
                                      { "limit_memory", limit_memory },
                                      { "seconds", seconds },
                                      { NULL, NULL } }));
  luaL_newlib(L, ((const luaL_Reg[]){ { "rank", comm_rank },
                                      { "size", comm_size },
                                      { "members", comm_members },
                                      { "start", comm_start },
                                      { "wait", comm_wait },
                                      { "split", comm_split },
                                      { "send", comm_send },
                                      { "receive", comm_receive },
                                      { "clock", comm_clock },
                                      { "advance", comm_advance },
                                      { "traffic", comm_traffic },
                                      { "leave", comm_leave },
                                      { NULL, NULL } }));
  luaL_newmetatable(L, class_name);
  lua_pushvalue(L, -2), lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, comm_leave), lua_setfield(L, -2, "__gc");
  lua_pushcfunction(L, comm_leave), lua_setfield(L, -2, "__close");
  lua_pop(L, 1);
  lua_setfield(L, -2, "methods");
  return 1;
}
