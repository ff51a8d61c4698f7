/* Handles and their life: scopes, <close>, the collector. */
#include "handle.h"

#include "../device/device.h"
#include "../ops/autocast.h"
#include "../tensor/meta.h"

#include <string.h>

const char ty_handle_magic = 0;
static const char state_key, metatable_key, methods_key, scope_key, guard_key;
_Thread_local lua_State *ty_lua_current;

enum {
  FLOOR = 64 << 20,     /* below this many live bytes, */
  SHARE = 32,           /* of the CPU's memory that dead tensors may take, */
  PER_BYTE = 32,        /* and for a byte of Lua's heap */
  HANDLES_FLOOR = 4096, /* or this many handles and these more per KiB of Lua's heap, the collector is left to Lua */
  HANDLES_PER_KB = 8,
  GROWTH = 32 << 20, /* of live bytes, after which it is seen whether it is tensors that died young */
  TIDY_BYTES = 16 << 20,
  YOUNG_HANDLES = 256,  /* after so many, */
  YOUNG_BYTES = 1 << 20 /* if they brought no more than this, the dead are swept while they lie in the cache */
};

ty_lua_state *ty_lua_state_of(lua_State *L) {
  lua_rawgetp(L, LUA_REGISTRYINDEX, &state_key);
  ty_lua_state *s = lua_touserdata(L, -1);
  lua_pop(L, 1);
  return s;
}

void ty_lua_push_methods(lua_State *L) { lua_rawgetp(L, LUA_REGISTRYINDEX, &methods_key); }

int ty_lua_error(lua_State *L) {
  if (ty_error_code() == TY_EINTR) ty_interrupted = 0; /* this error is its report; what unwinds may compute again */
  return luaL_error(L, "%s", ty_error());
}

/* ---- handles ---- */

/* Into the list of `scope` or, where that is another coroutine's, of the next one around it that is not. */
static void enter(lua_State *L, ty_lua_scope *scope, ty_handle *h) {
  while (scope && scope->L != L) scope = scope->prev;
  if (!scope) return;
  h->scope = scope;
  h->next = scope->handles;
  if (h->next) h->next->link = &h->next;
  h->link = &scope->handles;
  scope->handles = h;
}

void ty_lua_enter_scope(lua_State *L, ty_lua_state *s, ty_handle *h) { enter(L, s->scope, h); }

static void unlink_handle(ty_handle *h) {
  if (!h->link) return;
  *h->link = h->next;
  if (h->next) h->next->link = h->link;
  h->link = NULL;
}

ty_handle *ty_lua_push_empty(lua_State *L) {
  ty_handle *h = lua_newuserdatauv(L, sizeof *h, 0);
  *h = (ty_handle){ .magic = &ty_handle_magic };
  lua_rawgetp(L, LUA_REGISTRYINDEX, &metatable_key);
  lua_setmetatable(L, -2);
  ty_lua_state *s = ty_lua_state_of(L);
  s->handles++;
  if (s->scope) ty_lua_enter_scope(L, s, h);
  return h;
}

void ty_lua_push(lua_State *L, ty_tensor *t) {
  if (!t) ty_lua_error(L);
  ty_lua_push_empty(L)->t = t;
}

static void release_handle(ty_handle *h) {
  ty_tensor *t = h->t;
  unlink_handle(h);
  h->t = NULL;
  ty_release(t);
}

/* free, __close, __gc: any of them, in any order, any number of times */
static int handle_release(lua_State *L) {
  ty_handle *h = ty_lua_handle_at(L, 1);
  if (h) release_handle(h);
  return 0;
}

static int handle_collect(lua_State *L) {
  ty_lua_state *s = lua_touserdata(L, lua_upvalueindex(1));
  s->handles--;
  return handle_release(L);
}

/* ---- the collector ---- */

/* Whether a GPU has some of them, where the same bytes come and go too fast for collections at the host's pace. */
static bool on_gpu(int64_t live) { return ty_memory_live(TY_CPU) + (ty_meta_counts ? ty_meta_live() : 0) < live; }

/* Bytes of the dead that may lie beside so many of the living before all of Lua's heap is searched for them: as many
 * again, but on the CPU no more than a share of its memory, so that a model of 10 GB does not take 20 in one long step,
 * and no more than make the search, a nanosecond for five to ten bytes of the heap, a few percent of the time in which
 * so many bytes can be written. */
static int64_t room_for_dead(lua_State *L, int64_t live) {
  if (on_gpu(live)) return live;
  int64_t most = ty_memory_stats_of(TY_CPU).budget / SHARE, heap = (int64_t)lua_gc(L, LUA_GCCOUNT) << 10;
  if (most > PER_BYTE * heap) most = PER_BYTE * heap;
  if (most < FLOOR) most = FLOOR;
  return live < most ? live : most;
}

/* After a collection: when the next one is due by bytes. */
static void set_growth_limit(ty_lua_state *s, int64_t live) {
  s->growth_limit = on_gpu(live) || live + GROWTH > s->soft_limit ? s->soft_limit : live + GROWTH;
}

static void sweep_young(lua_State *L, ty_lua_state *s) {
  lua_gc(L, LUA_GCSTEP, 0);
  set_growth_limit(s, ty_memory_live_everywhere());
}

/* When the next look at the young is due by numbers. */
static void count_from_here(ty_lua_state *s) {
  s->young_limit = s->handles + YOUNG_HANDLES;
  s->young_bytes = ty_memory_live_everywhere();
}

/* Bytes matter because Lua does not see those of tensors; numbers because Lua's own pace, set by its own bytes, lets
 * dead tensors spread far beyond the caches (and without bound in incremental mode, which runs few finalizers at a
 * time). A full collection costs by the size of Lua's heap, and so does its share of each handle here. A young one
 * costs by the number of new objects, some microseconds: small tensors are swept early, so that the next ones take
 * memory that is in the cache, and large ones whenever live bytes have grown by so much that they count beside what
 * the model takes. Sweeping large ones more often would make old what a step holds, before the step is over. */
void ty_lua_poll(lua_State *L) {
  ty_lua_state *s = ty_lua_state_of(L);
  int64_t live = ty_memory_live_everywhere();
  if (live > s->soft_limit || s->handles > s->handle_limit) {
    lua_gc(L, LUA_GCCOLLECT);
    live = ty_memory_live_everywhere();
    int64_t soft = live + room_for_dead(L, live);
    s->soft_limit = soft > FLOOR ? soft : FLOOR;
    int64_t least = HANDLES_FLOOR + HANDLES_PER_KB * (int64_t)lua_gc(L, LUA_GCCOUNT);
    s->handle_limit = s->handles * 2 > least ? s->handles * 2 : least;
    set_growth_limit(s, live);
  } else {
    bool grown = live > s->growth_limit;
    if (!grown && s->handles <= s->young_limit) return;
    if ((grown || live - s->young_bytes <= YOUNG_BYTES) && lua_gc(L, LUA_GCISRUNNING)) {
      sweep_young(L, s);
    } else if (grown) {
      s->growth_limit = s->soft_limit;
    }
  }
  count_from_here(s);
}

void ty_lua_sweep(lua_State *L) {
  ty_lua_state *s = ty_lua_state_of(L);
  if (!lua_gc(L, LUA_GCISRUNNING)) return;
  sweep_young(L, s);
  count_from_here(s);
}

/* In incremental mode nothing comes of it. */
void ty_lua_tidy(lua_State *L) {
  ty_lua_state *s = ty_lua_state_of(L);
  if (ty_memory_live_everywhere() - s->tidied > TIDY_BYTES) lua_gc(L, LUA_GCSTEP, 0);
  s->tidied = ty_memory_live_everywhere();
}

/* What comes next finds the collector where the counting found it, as if it had come in its place. */
void ty_lua_count_meta(lua_State *L, bool on) {
  static _Thread_local struct { int64_t soft, growth, tidied, young_bytes, young, handles; } before;
  ty_lua_state *s = ty_lua_state_of(L);
  if (on == ty_meta_counts) return;
  ty_meta_counts = on;
  if (on) {
    before.soft = s->soft_limit, before.tidied = s->tidied, before.young_bytes = s->young_bytes;
    before.young = s->young_limit - s->handles, before.handles = s->handle_limit;
    before.growth = s->growth_limit;
  } else {
    s->soft_limit = before.soft, s->tidied = before.tidied, s->young_bytes = before.young_bytes;
    s->young_limit = s->handles + before.young, s->handle_limit = before.handles;
    s->growth_limit = before.growth;
  }
}

/* The core's last resort before it reports that memory is out. */
static bool reclaim(void *context) {
  lua_State *L = ty_lua_current;
  if (!L || lua_gc(L, LUA_GCCOUNT) < 0) return false; /* inside a finalizer */
  lua_gc(L, LUA_GCCOLLECT);
  return true;
}

/* ---- scopes ---- */

static ty_lua_scope *push_scope(lua_State *L) {
  ty_lua_state *s = ty_lua_state_of(L);
  ty_lua_scope *scope = lua_newuserdatauv(L, sizeof *scope, 0);
  *scope = (ty_lua_scope){ .prev = s->scope, .L = L, .open = true };
  lua_rawgetp(L, LUA_REGISTRYINDEX, &scope_key);
  lua_setmetatable(L, -2);
  s->scope = scope;
  return scope;
}

static int scope_close(lua_State *L) {
  ty_lua_scope *scope = lua_touserdata(L, 1);
  if (!scope || !scope->open) return 0;
  ty_lua_state *s = ty_lua_state_of(L);
  scope->open = false;
  for (ty_lua_scope **at = &s->scope; *at; at = &(*at)->prev) {
    if (*at != scope) continue;
    *at = scope->prev;
    break;
  }
  while (scope->handles) release_handle(scope->handles);
  int64_t live = ty_memory_live_everywhere();
  if (live + GROWTH < s->growth_limit) set_growth_limit(s, live);
  return 0;
}

/* Moves a handle to the scope around `from`, or with NULL out of all. One that is not a member of `from` lives as long
 * as it did: it may be a parameter, or somebody's further out. */
static void move_out(lua_State *L, ty_handle *h, const ty_lua_scope *from) {
  if (from && !(h->link && h->scope == from)) return;
  unlink_handle(h);
  if (from) enter(L, from->prev, h);
}

/* Tensors in a result, also in tables (each table once; `seen` is a table on the stack). */
static void move_results_out(lua_State *L, int index, const ty_lua_scope *from, int seen, int depth) {
  ty_handle *h = ty_lua_handle_at(L, index);
  if (h) {
    if (h->t) move_out(L, h, from);
    return;
  }
  if (!lua_istable(L, index) || depth > 16) return;
  lua_pushvalue(L, index);
  if (lua_rawget(L, seen) != LUA_TNIL) {
    lua_pop(L, 1);
    return;
  }
  lua_pop(L, 1);
  lua_pushvalue(L, index);
  lua_pushboolean(L, 1);
  lua_rawset(L, seen);
  luaL_checkstack(L, 8, "results of a scope");
  lua_pushnil(L);
  while (lua_next(L, index)) {
    move_results_out(L, lua_gettop(L), from, seen, depth + 1);
    lua_pop(L, 1);
  }
}

static int scope_results(lua_State *L, int status, lua_KContext context) {
  ty_lua_scope *scope = lua_touserdata(L, 1);
  int top = lua_gettop(L);
  lua_newtable(L);
  for (int i = 2; i <= top; i++) move_results_out(L, i, scope, top + 1, 0);
  lua_settop(L, top);
  return top - 1; /* the scope in slot 1 closes when this function returns */
}

/* scope(fn, ...) */
static int scope_run(lua_State *L) {
  ty_lua_check_callable(L, 1);
  push_scope(L);
  lua_insert(L, 1);
  lua_toclose(L, 1);
  lua_callk(L, lua_gettop(L) - 2, LUA_MULTRET, 0, scope_results);
  return scope_results(L, LUA_OK, 0);
}

static int scope_open(lua_State *L) {
  push_scope(L);
  return 1;
}

/* keep(...): out of the innermost scope of this coroutine */
static int keep(lua_State *L) {
  int top = lua_gettop(L);
  lua_newtable(L);
  for (int i = 1; i <= top; i++) move_results_out(L, i, NULL, top + 1, 0);
  lua_settop(L, top);
  return top;
}

/* discard(...): what the innermost scope of this coroutine would release at its end, now */
static int discard(lua_State *L) {
  const ty_lua_scope *scope = ty_lua_state_of(L)->scope;
  while (scope && scope->L != L) scope = scope->prev;
  for (int i = 1, top = lua_gettop(L); i <= top; i++) {
    ty_handle *h = ty_lua_handle_at(L, i);
    if (!h) return ty_lua_refuse(L, i, "a tensor");
    if (h->link && h->scope == scope) release_handle(h);
  }
  return 0;
}

/* ---- guards: no_grad and the like, undone however the function ends ---- */

typedef struct guard {
  void (*set)(int64_t value, int64_t of);
  int64_t before, of;
  bool done;
} guard;

static int guard_close(lua_State *L) {
  guard *g = lua_touserdata(L, 1);
  if (g && !g->done) {
    g->done = true;
    g->set(g->before, g->of);
  }
  return 0;
}

static int guard_results(lua_State *L, int status, lua_KContext context) { return lua_gettop(L) - 1; }

int ty_lua_call_guarded(lua_State *L, void (*set)(int64_t value, int64_t of), int64_t value, int64_t before,
                        int64_t of) {
  guard *g = lua_newuserdatauv(L, sizeof *g, 0);
  *g = (guard){ set, before, of, false };
  lua_rawgetp(L, LUA_REGISTRYINDEX, &guard_key);
  lua_setmetatable(L, -2);
  lua_insert(L, 1);
  lua_toclose(L, 1);
  set(value, of);
  lua_callk(L, lua_gettop(L) - 2, LUA_MULTRET, 0, guard_results);
  return guard_results(L, LUA_OK, 0);
}

static void set_grad(int64_t on, int64_t of) { ty_set_grad_enabled(on); }

static int with_grad(lua_State *L, bool on) {
  ty_lua_check_callable(L, 1);
  return ty_lua_call_guarded(L, set_grad, on, ty_grad_enabled(), 0);
}

static int no_grad(lua_State *L) { return with_grad(L, false); }
static int enable_grad(lua_State *L) { return with_grad(L, true); }

static int set_grad_enabled(lua_State *L) {
  ty_lua_check_type(L, 1, LUA_TBOOLEAN);
  lua_pushboolean(L, ty_set_grad_enabled(lua_toboolean(L, 1)));
  return 1;
}

static int is_grad_enabled(lua_State *L) {
  lua_pushboolean(L, ty_grad_enabled());
  return 1;
}

/* At the end of the outermost scope the casts of weights go. */
static void set_autocast(int64_t dtype, int64_t of) {
  if (dtype == TY_DTYPE_DEFAULT && ty_autocast_dtype != TY_DTYPE_DEFAULT && of) ty_autocast_forget();
  ty_autocast_set((int)dtype);
}

/* autocast("bf16" | "f16" | "f32" | false, fn, ...): fn(...) with autocast to that dtype; "f32" and false: without */
static int autocast(lua_State *L) {
  ty_dtype dtype = TY_F32;
  bool off = lua_isboolean(L, 1) && !lua_toboolean(L, 1);
  bool known = off || (lua_type(L, 1) == LUA_TSTRING && ty_dtype_parse(lua_tostring(L, 1), &dtype));
  if (!known || (dtype != TY_F32 && !ty_is_half(dtype)))
    return luaL_error(L, "autocast: expected \"bf16\", \"f16\", \"f32\" or false, got %s",
                      lua_type(L, 1) == LUA_TSTRING ? lua_tostring(L, 1) : ty_lua_typename(L, 1));
  ty_lua_check_callable(L, 2);
  lua_remove(L, 1);
  int before = ty_autocast_dtype, wanted = dtype == TY_F32 ? TY_DTYPE_DEFAULT : (int)dtype;
  return ty_lua_call_guarded(L, set_autocast, wanted, before, before == TY_DTYPE_DEFAULT);
}

static int autocast_dtype(lua_State *L) {
  if (ty_autocast_dtype == TY_DTYPE_DEFAULT) lua_pushboolean(L, 0);
  else lua_pushstring(L, ty_dtype_name[ty_autocast_dtype]);
  return 1;
}

/* ---- memory ---- */

static int check_device(lua_State *L, int index) {
  int device;
  if (!lua_isnoneornil(L, index) && lua_type(L, index) != LUA_TSTRING)
    return ty_lua_refuse(L, index, "a device (cpu, cuda, cuda:1, ..., pinned or paged)");
  if (lua_type(L, index) == LUA_TSTRING && strcmp(lua_tostring(L, index), "pinned") == 0) return TY_PINNED;
  if (lua_type(L, index) == LUA_TSTRING && strcmp(lua_tostring(L, index), "paged") == 0) return TY_PAGED;
  if (!ty_device_parse(ty_lua_opt_string(L, index, "cpu"), &device)) return luaL_error(L, "memory: %s", ty_error());
  return device;
}

static int memory_stats(lua_State *L) {
  ty_memory_stats s = ty_memory_stats_of(check_device(L, 1));
  lua_createtable(L, 0, 7);
  lua_pushinteger(L, s.live), lua_setfield(L, -2, "live");
  lua_pushinteger(L, s.cached), lua_setfield(L, -2, "cached");
  lua_pushinteger(L, s.kept), lua_setfield(L, -2, "kept");
  lua_pushinteger(L, s.beyond), lua_setfield(L, -2, "beyond");
  lua_pushinteger(L, s.peak), lua_setfield(L, -2, "peak");
  lua_pushinteger(L, s.budget), lua_setfield(L, -2, "budget");
  lua_pushinteger(L, (lua_Integer)s.allocations), lua_setfield(L, -2, "allocations");
  return 1;
}

static int memory_reset_peak(lua_State *L) {
  ty_memory_reset_peak(check_device(L, 1));
  return 0;
}

static int memory_empty_cache(lua_State *L) {
  ty_memory_empty_cache(check_device(L, 1));
  return 0;
}

static int memory_set_budget(lua_State *L) {
  int device = check_device(L, 1);
  lua_Integer bytes = ty_lua_opt_integer(L, 2, 0);
  if (bytes < 0) return ty_lua_refuse(L, 2, "bytes, or nothing for the default");
  ty_memory_set_budget(device, bytes);
  return 0;
}

static int memory_keep_weights(lua_State *L) {
  lua_Integer bytes = ty_lua_opt_integer(L, 1, -1);
  if (!lua_isnoneornil(L, 1) && bytes < 0) return ty_lua_refuse(L, 1, "bytes, or nothing for the default");
  ty_kept_set_budget(bytes);
  return 0;
}

static int memory_fail_at(lua_State *L) {
  ty_memory_fail_at(ty_lua_check_integer(L, 1), lua_toboolean(L, 2));
  return 0;
}

static int memory_allocation_count(lua_State *L) {
  lua_pushinteger(L, ty_memory_allocation_count());
  return 1;
}

/* ---- opening ---- */

static void new_metatable(lua_State *L, const void *key, const char *name, lua_CFunction close) {
  lua_newtable(L);
  lua_pushstring(L, name), lua_setfield(L, -2, "__name");
  lua_pushcfunction(L, close), lua_setfield(L, -2, "__close");
  lua_pushcfunction(L, close), lua_setfield(L, -2, "__gc");
  lua_pushvalue(L, -1), lua_rawsetp(L, LUA_REGISTRYINDEX, key);
}

void ty_lua_open_handles(lua_State *L, int table) {
  if (lua_rawgetp(L, LUA_REGISTRYINDEX, &state_key) == LUA_TNIL) {
    ty_lua_state *s = lua_newuserdatauv(L, sizeof *s, 0);
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    *s = (ty_lua_state){
      .main = lua_tothread(L, -1), .soft_limit = FLOOR, .growth_limit = FLOOR, .handle_limit = HANDLES_FLOOR
    };
    lua_pop(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &state_key);
  }
  lua_pop(L, 1);
  ty_memory_reclaim = reclaim;

  new_metatable(L, &metatable_key, "tensor", handle_release);
  lua_pushlightuserdata(L, ty_lua_state_of(L));
  lua_pushcclosure(L, handle_collect, 1), lua_setfield(L, -2, "__gc");
  lua_newtable(L);
  lua_pushvalue(L, -1), lua_rawsetp(L, LUA_REGISTRYINDEX, &methods_key);
  lua_pushcfunction(L, handle_release), lua_setfield(L, -2, "free");
  lua_pop(L, 1);
  lua_setfield(L, table, "Tensor"); /* the metatable, for those who extend tensors */

  new_metatable(L, &scope_key, "scope", scope_close);
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, scope_close), lua_setfield(L, -2, "close");
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
  new_metatable(L, &guard_key, "guard", guard_close);
  lua_pop(L, 1);

  lua_pushvalue(L, table);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "scope", scope_run },
                                    { "open_scope", scope_open },
                                    { "keep", keep },
                                    { "discard", discard },
                                    { "no_grad", no_grad },
                                    { "enable_grad", enable_grad },
                                    { "set_grad_enabled", set_grad_enabled },
                                    { "is_grad_enabled", is_grad_enabled },
                                    { "autocast", autocast },
                                    { "autocast_dtype", autocast_dtype },
                                    { NULL, NULL } },
                0);
  lua_pop(L, 1);
  luaL_newlib(L, ((const luaL_Reg[]){ { "stats", memory_stats },
                                      { "reset_peak", memory_reset_peak },
                                      { "empty_cache", memory_empty_cache },
                                      { "set_budget", memory_set_budget },
                                      { "keep_weights", memory_keep_weights },
                                      { "fail_at", memory_fail_at },
                                      { "allocation_count", memory_allocation_count },
                                      { NULL, NULL } }));
  lua_setfield(L, table, "memory");
}
