/* The file tier for modules/offload, which is its only user: open, write, read, wait; and what moves the memory of a
 * tensor away from it and back. Not an interface for programs. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../tensor/memory.h"
#include "../tier/tier.h"
#include "handle.h"

static const char class_name[] = "tier";

typedef struct box {
  ty_tier *t;
} box;

static ty_tier *check(lua_State *L) {
  box *b = luaL_testudata(L, 1, class_name);
  if (!b) ty_lua_refuse(L, 1, "a tier");
  else if (!b->t) luaL_error(L, "tier: it was closed");
  return b ? b->t : NULL;
}

/* sweep(): tensors that nobody has any more go now */
static int sweep(lua_State *L) {
  ty_lua_sweep(L);
  return 0;
}

/* open(folder or nil, backend, direct): a tier in the folder, or in memory; backend: auto, uring or threads */
static int tier_open(lua_State *L) {
  static const char *const names[] = { "auto", "uring", "threads" };
  const char *folder = ty_lua_opt_string(L, 1, NULL), *name = ty_lua_opt_string(L, 2, "auto");
  int backend = 0;
  while (backend < 3 && strcmp(name, names[backend]) != 0) backend++;
  if (backend == 3) return ty_lua_refuse(L, 2, "\"auto\" or \"uring\" or \"threads\"");
  bool direct = lua_isnoneornil(L, 3) || lua_toboolean(L, 3);
  box *b = lua_newuserdatauv(L, sizeof *b, 0);
  b->t = NULL;
  luaL_setmetatable(L, class_name);
  b->t = ty_tier_open(folder, (ty_tier_backend)backend, direct);
  return b->t ? 1 : ty_lua_error(L);
}

static int tier_close(lua_State *L) {
  box *b = luaL_testudata(L, 1, class_name);
  if (!b) return ty_lua_refuse(L, 1, "a tier");
  ty_tier_close(b->t);
  b->t = NULL;
  return 0;
}

static int begin(lua_State *L, int64_t (*start)(ty_tier *, ty_tensor *, int64_t)) {
  ty_tier *t = check(L);
  ty_tensor *x = ty_lua_check(L, 2);
  int64_t ticket = start(t, x, ty_lua_check_integer(L, 3));
  if (!ticket) return ty_lua_error(L);
  lua_pushinteger(L, ticket);
  return 1;
}

static int tier_write(lua_State *L) { return begin(L, ty_tier_write); }
static int tier_read(lua_State *L) { return begin(L, ty_tier_read); }

/* wait(ticket) -> begin, end in seconds of system.clock() */
static int tier_wait(lua_State *L) {
  ty_tier *t = check(L);
  double from, to;
  if (!ty_tier_wait(t, ty_lua_check_integer(L, 2), &from, &to)) return ty_lua_error(L);
  lua_pushnumber(L, from);
  lua_pushnumber(L, to);
  return 2;
}

static int tier_done(lua_State *L) {
  ty_tier *t = check(L);
  lua_pushboolean(L, ty_tier_done(t, ty_lua_check_integer(L, 2)));
  return 1;
}

static int tier_stats(lua_State *L) {
  ty_tier_stats s = ty_tier_stats_of(check(L));
  lua_createtable(L, 0, 11);
  lua_pushinteger(L, s.read), lua_setfield(L, -2, "read");
  lua_pushinteger(L, s.written), lua_setfield(L, -2, "written");
  lua_pushinteger(L, s.reads), lua_setfield(L, -2, "reads");
  lua_pushinteger(L, s.writes), lua_setfield(L, -2, "writes");
  lua_pushinteger(L, s.copied), lua_setfield(L, -2, "copied");
  lua_pushinteger(L, s.held), lua_setfield(L, -2, "held");
  lua_pushnumber(L, s.waited), lua_setfield(L, -2, "waited");
  lua_pushboolean(L, s.direct), lua_setfield(L, -2, "direct");
  lua_pushboolean(L, s.uring), lua_setfield(L, -2, "uring");
  lua_pushboolean(L, s.memory), lua_setfield(L, -2, "memory");
  lua_pushinteger(L, s.room), lua_setfield(L, -2, "room");
  return 1;
}

/* cached() -> bytes of the file that the kernel has in memory */
static int tier_cached(lua_State *L) {
  int64_t bytes = ty_tier_cached(check(L));
  if (bytes < 0) return ty_lua_error(L);
  lua_pushinteger(L, bytes);
  return 1;
}

/* inject(fault, nth, count): tests; fault: short, interrupt, error or full */
static int tier_inject(lua_State *L) {
  static const char *const names[] = { "short", "interrupt", "error", "full" };
  ty_tier *t = check(L);
  const char *name = ty_lua_check_string(L, 2);
  int fault = 0;
  while (fault < 4 && strcmp(name, names[fault]) != 0) fault++;
  if (fault == 4) return ty_lua_refuse(L, 2, "\"short\", \"interrupt\", \"error\" or \"full\"");
  ty_tier_inject(t, (ty_tier_fault)fault, ty_lua_check_integer(L, 3), ty_lua_check_integer(L, 4));
  return 0;
}

/* exchange(a, b): the tensors change their memory */
static int exchange(lua_State *L) {
  ty_tensor *a = ty_lua_check(L, 1), *b = ty_lua_check(L, 2);
  return ty_exchange_memory(a, b) ? 0 : ty_lua_error(L);
}

/* memory_of(t) -> which memory it stands on, as a number; the version of that; its bytes; how many tensors have it */
static int memory_of(lua_State *L) {
  const ty_tensor *t = ty_lua_check(L, 1);
  lua_pushinteger(L, (lua_Integer)(uintptr_t)t->storage);
  lua_pushinteger(L, t->storage->version);
  lua_pushinteger(L, (lua_Integer)t->storage->nbytes);
  lua_pushinteger(L, (lua_Integer)atomic_load(&t->storage->refs));
  return 4;
}

/* unfold(t) -> all of the memory it stands on as bytes, and what fold() needs to make it of them again; nil where that
 * cannot be, because the memory is somebody else's or nobody's */
static int unfold(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  ty_storage *s = t->storage;
  if (ty_device_of(t) == TY_META || (s->foreign && !s->capacity) || s->pinned || !s->nbytes || t->batch ||
      ty_is_quantized(ty_dtype_of(t))) {
    lua_pushnil(L);
    return 1;
  }
  ty_view v = t->v;
  v.data = (void *)((uintptr_t)v.data - (uintptr_t)s->bytes); /* an offset, while it is packed */
  ty_handle *h = ty_lua_push_empty(L);
  lua_pushlstring(L, (const char *)&v, sizeof v);
  int64_t size[] = { (int64_t)s->nbytes };
  h->t = ty_tensor_alias(t);
  if (!h->t) return ty_lua_error(L);
  h->t->v.data = s->bytes;
  h->t->v.dtype = TY_U8;
  h->t->is_view = true;
  ty_view_set_contiguous(&h->t->v, 1, size);
  return 2;
}

/* fold(bytes, text) -> the tensor of which unfold() made them, on the memory of `bytes` */
static int fold(lua_State *L) {
  ty_tensor *bytes = ty_lua_check(L, 1);
  size_t n;
  const char *text = ty_lua_check_lstring(L, 2, &n);
  ty_view v;
  if (n != sizeof v) return ty_lua_refuse(L, 2, "what unfold() gave");
  memcpy(&v, text, sizeof v);
  v.data = (char *)bytes->storage->bytes + (uintptr_t)v.data;
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_tensor_alias(bytes);
  if (!h->t) return ty_lua_error(L);
  h->t->v = v;
  h->t->is_view = true;
  return 1;
}

/* host(t) -> a copy in memory that no device's budget counts, where the CPU computes for another device */
static int host(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  if (ty_device_of(t) != TY_CPU || ty_is_quantized(ty_dtype_of(t)))
    return luaL_error(L, "host: expected a tensor on the CPU, got %s", ty_describe(t));
  size_t bytes = (size_t)t->v.count * ty_dtype_size[t->v.dtype];
  ty_handle *h = ty_lua_push_empty(L);
  void *memory = ty_system_alloc(bytes ? bytes : 1);
  if (!memory) return luaL_error(L, "host: out of memory for %d bytes", (int)bytes);
  h->t = ty_tensor_wrap(memory, ty_dtype_of(t), t->v.ndim, t->v.size, free, memory);
  return h->t && ty_copy_into(h->t, t) ? 1 : ty_lua_error(L);
}

/* ---- memory for buffers: its pages are there, and are told by nobody ---- */

typedef struct region {
  void *bytes;
  size_t length;
} region;

static void unmap(void *owner) {
  region *r = owner;
  munmap(r->bytes, r->length);
  free(r);
}

/* pages(nbytes) -> u8 [nbytes] on whole pages that are in memory from now on, and locked there where the system lets us */
static int pages(lua_State *L) {
  int64_t n = ty_lua_check_integer(L, 1), size = sysconf(_SC_PAGESIZE);
  if (n < 1 || n > INT64_MAX / 2) return ty_lua_refuse(L, 1, "an integer >= 1");
  ty_handle *h = ty_lua_push_empty(L);
  region *r = malloc(sizeof *r);
  if (!r) return luaL_error(L, "pages: out of memory");
  r->length = (size_t)((n + size - 1) / size * size);
  r->bytes = mmap(NULL, r->length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (r->bytes == MAP_FAILED) {
    free(r);
    return luaL_error(L, "pages: out of memory for %d bytes", (int)n);
  }
  if (mlock(r->bytes, r->length) != 0) errno = 0;
  size_t length = r->length;
  h->t = ty_tensor_wrap(r->bytes, TY_U8, 1, &n, unmap, r);
  if (!h->t) return ty_lua_error(L);
  h->t->storage->capacity = length;
  return 1;
}

static void release_whole(void *owner) { ty_release(owner); }

/* slice(t, at, nbytes) -> u8 [nbytes], a memory of its own that is a part of what pages() gave and keeps that */
static int slice(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  int64_t at = ty_lua_check_integer(L, 2), n = ty_lua_check_integer(L, 3);
  size_t capacity = t->storage->foreign ? t->storage->capacity : 0;
  if (at < 0 || at % TY_TIER_BLOCK || n < 1 || at > (int64_t)capacity || n > (int64_t)capacity - at)
    return luaL_error(L, "slice: expected whole blocks within %d bytes of pages, got %d at %d", (int)capacity, (int)n,
                      (int)at);
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_tensor_wrap((char *)t->storage->bytes + at, TY_U8, 1, &n, release_whole, ty_retain(t));
  if (!h->t) return ty_lua_error(L);
  size_t whole = (size_t)((n + TY_TIER_BLOCK - 1) / TY_TIER_BLOCK * TY_TIER_BLOCK);
  h->t->storage->capacity = whole < capacity - (size_t)at ? whole : capacity - (size_t)at;
  return 1;
}

/* lay(bytes, like) -> a tensor of the other's shape and dtype on the first of the bytes, which are those of slice() */
static int lay(lua_State *L) {
  ty_tensor *bytes = ty_lua_check(L, 1), *like = ty_lua_check(L, 2);
  int64_t n = like->v.count * ty_dtype_size[like->v.dtype];
  if (ty_is_quantized(ty_dtype_of(like)) || !bytes->storage->foreign || n > bytes->v.count)
    return luaL_error(L, "lay: expected a tensor of at most %d bytes, got %s", (int)bytes->v.count, ty_describe(like));
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_tensor_alias(bytes);
  if (!h->t) return ty_lua_error(L);
  h->t->v.dtype = like->v.dtype;
  ty_view_set_contiguous(&h->t->v, like->v.ndim, like->v.size);
  return 1;
}

/* ---- what brings back memory that an op asks for ---- */

static const char handler_key, sentinel_key;

static bool bring_back(ty_tensor *t) {
  lua_State *L = ty_lua_current;
  if (!L) return true;
  if (!lua_checkstack(L, 8)) return ty_fail(TY_ENOMEM, "the Lua stack is full");
  bool (*was)(ty_tensor *) = ty_bring_back;
  const ty_saved_hooks *hooks = ty_set_saved_hooks(NULL);
  bool grad = ty_set_grad_enabled(false);
  ty_bring_back = NULL; /* not for what the handler itself does */
  lua_rawgetp(L, LUA_REGISTRYINDEX, &handler_key);
  lua_pushinteger(L, (lua_Integer)(uintptr_t)t->storage);
  bool ok = ty_lua_call(L, 1, 0);
  ty_bring_back = was;
  ty_set_grad_enabled(grad);
  ty_set_saved_hooks(hooks);
  return ok;
}

/* With the Lua universe goes its handler. */
static int sentinel_gc(lua_State *L) {
  ty_bring_back = NULL;
  return 0;
}

static void push_sentinel(lua_State *L) {
  lua_newuserdatauv(L, 1, 0);
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, sentinel_gc), lua_setfield(L, -2, "__gc");
  lua_setmetatable(L, -2);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &sentinel_key);
}

/* on_absent(fn or nil) -> the function before: fn(memory) is called when an op meets a tensor on the meta device;
 * memory: the number of memory_of() */
static int on_absent(lua_State *L) {
  lua_settop(L, 1);
  if (!lua_isnil(L, 1)) ty_lua_check_callable(L, 1);
  lua_rawgetp(L, LUA_REGISTRYINDEX, &handler_key);
  lua_pushvalue(L, 1);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &handler_key);
  if (lua_rawgetp(L, LUA_REGISTRYINDEX, &sentinel_key) == LUA_TNIL) push_sentinel(L);
  lua_pop(L, 1);
  ty_bring_back = lua_isnil(L, 1) ? NULL : bring_back;
  ty_lua_current = L;
  return 1;
}

int ty_lua_open_tier(lua_State *L) {
  luaL_newlib(L, ((const luaL_Reg[]){ { "open", tier_open },
                                      { "exchange", exchange },
                                      { "memory_of", memory_of },
                                      { "unfold", unfold },
                                      { "fold", fold },
                                      { "host", host },
                                      { "pages", pages },
                                      { "slice", slice },
                                      { "lay", lay },
                                      { "on_absent", on_absent },
                                      { "sweep", sweep },
                                      { NULL, NULL } }));
  luaL_newlib(L, ((const luaL_Reg[]){ { "write", tier_write },
                                      { "read", tier_read },
                                      { "wait", tier_wait },
                                      { "done", tier_done },
                                      { "stats", tier_stats },
                                      { "cached", tier_cached },
                                      { "inject", tier_inject },
                                      { "close", tier_close },
                                      { NULL, NULL } }));
  luaL_newmetatable(L, class_name);
  lua_pushvalue(L, -2), lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, tier_close), lua_setfield(L, -2, "__gc");
  lua_pushcfunction(L, tier_close), lua_setfield(L, -2, "__close");
  lua_pop(L, 1);
  lua_setfield(L, -2, "methods");
  return 1;
}
