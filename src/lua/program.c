/* What ty.compile and ty.fuse are made of: functions that record their calls and replay them. A call is looked up by
 * its arguments: tensors by their form, everything else by value. */
#include <stdlib.h>
#include <string.h>

#include "../ops/autocast.h"
#include "../program/program.h"
#include "handle.h"

enum { MOST_TENSORS = 60, MOST_PROGRAMS = 64 };
enum { ANY_OP, ELEMENTWISE }; /* what the function may do */

/* Everything that Lua code could not see changing: modules that moved or changed their mode, optimizers that took over
 * another state. Programs recorded before are of no use then. */
static atomic_uint_fast64_t epoch;

static _Thread_local int compiling; /* functions of ty.compile that run in Lua: recorded, or the call before it */
static const char hooks_key, compiled_key;

typedef struct entry {
  ty_program *program;
  int nargs, nresults;
  uint64_t tensors;   /* which results are tensors */
  bool has_constants; /* among the arguments */
} entry;

/* uservalue 1: a table with the function at 1, the keys of calls seen, and for entry i at i + 1 a table
 * { arguments that are no tensors by position, n + results that are no tensors, hooks = {...} } */
typedef struct compiled {
  entry *entries;
  int n, most;
  int kind;  /* ANY_OP, ELEMENTWISE */
  bool warm; /* the first call of a kind runs unrecorded */
  bool busy;
  bool early; /* options of ty_program_options() */
  int64_t arena;
  uint64_t epoch;
} compiled;

static void drop_entries(compiled *c) {
  for (int i = 0; i < c->n; i++) ty_program_free(c->entries[i].program);
  c->n = 0;
}

static int compiled_gc(lua_State *L) {
  compiled *c = lua_touserdata(L, 1);
  drop_entries(c);
  free(c->entries);
  c->entries = NULL;
  return 0;
}

/* ---- running the function itself ---- */

static int plain_results(lua_State *L, int status, lua_KContext nargs) { return lua_gettop(L) - (int)nargs; }

/* Calls the function with the nargs arguments of the stack; its results follow them. */
static int run_plain(lua_State *L, int nargs) {
  luaL_checkstack(L, nargs + 8, "ty.compile");
  lua_getiuservalue(L, lua_upvalueindex(1), 1);
  lua_rawgeti(L, -1, 1);
  lua_remove(L, -2);
  for (int i = 1; i <= nargs; i++) lua_pushvalue(L, i);
  lua_callk(L, nargs, LUA_MULTRET, nargs, plain_results);
  return plain_results(L, LUA_OK, nargs);
}

/* ---- recording ---- */

static void check_arguments(lua_State *L, ty_tensor *const *tensor, const int *position, int n) {
  for (int i = 0; i < n; i++)
    if (tensor[i]->node && ty_grad_enabled())
      luaL_error(L,
                 "compile: argument %d has a history (it was computed by %s), and gradients do not flow through a "
                 "compiled function; pass x:detach()",
                 position[i], ty_node_name(tensor[i]->node));
}

/* Tensors among the results at first .. top are replaced by ones without history; they are put into result[]. */
static int take_results(lua_State *L, int first, ty_tensor **result, uint64_t *mask) {
  int n = 0, top = lua_gettop(L);
  if (top - first >= MOST_TENSORS) luaL_error(L, "compile: at most %d results", MOST_TENSORS);
  for (int i = first; i <= top; i++) {
    ty_tensor *t = ty_lua_to(L, i);
    if (t) {
      ty_tensor *alias = ty_tensor_alias(t);
      ty_lua_push(L, alias);
      lua_replace(L, i);
      result[n++] = alias;
      *mask |= (uint64_t)1 << (i - first);
    } else if (lua_istable(L, i) || lua_isuserdata(L, i)) {
      luaL_error(L,
                 "compile: result %d of the function: expected a tensor, a number, a string, a boolean or nil, got %s",
                 i - first + 1, ty_lua_typename(L, i));
    }
  }
  return n;
}

/* Calls the function unrecorded, but otherwise like a recorded one: results without history, optimizers that return
 * tensors. */
static int run_unrecorded(lua_State *L, int nargs) {
  luaL_checkstack(L, nargs + 8, "ty.compile");
  lua_getiuservalue(L, lua_upvalueindex(1), 1);
  lua_rawgeti(L, -1, 1);
  lua_remove(L, -2);
  for (int i = 1; i <= nargs; i++) lua_pushvalue(L, i);
  compiling++;
  int status = lua_pcall(L, nargs, LUA_MULTRET, 0);
  compiling--;
  if (status != LUA_OK) return lua_error(L);
  ty_tensor *result[MOST_TENSORS];
  uint64_t tensors = 0;
  take_results(L, nargs + 1, result, &tensors);
  return lua_gettop(L) - nargs;
}

/* Runs under pcall with the function and its arguments: what it returns, without history. */
typedef struct recording {
  ty_program *program;
  ty_tensor *result[MOST_TENSORS];
  int nresults;
  uint64_t tensors;
} recording;

static int record_protected(lua_State *L) {
  recording *r = lua_touserdata(L, 1);
  lua_call(L, lua_gettop(L) - 2, LUA_MULTRET);
  r->nresults = take_results(L, 2, r->result, &r->tensors);
  return lua_gettop(L) - 1;
}

/* Keeps what replays need besides the program. The results are above `base`, hooks at `hooks`. */
static void add_entry(lua_State *L, compiled *c, const recording *r, int nargs, int base, int hooks) {
  int nresults = lua_gettop(L) - base;
  entry e = { .program = r->program, .nargs = nargs, .nresults = nresults, .tensors = r->tensors };
  lua_getiuservalue(L, lua_upvalueindex(1), 1);
  lua_createtable(L, nargs + nresults, 1);
  for (int i = 1; i <= nargs; i++) {
    if (ty_lua_to(L, i)) continue;
    e.has_constants = true;
    lua_pushvalue(L, i);
    lua_rawseti(L, -2, i);
  }
  for (int i = 1; i <= nresults; i++) {
    if (r->tensors >> (i - 1) & 1) continue;
    lua_pushvalue(L, base + i);
    lua_rawseti(L, -2, nargs + i);
  }
  lua_pushvalue(L, hooks);
  lua_setfield(L, -2, "hooks");
  lua_rawseti(L, -2, c->n + 2);
  lua_pop(L, 1);
  c->entries[c->n++] = e;
}

static int record(lua_State *L, compiled *c, ty_tensor *const *tensor, const int *position, int ntensors, int nargs) {
  luaL_checkstack(L, 2 * nargs + 16, "ty.compile");
  check_arguments(L, tensor, position, ntensors);
  recording *r = lua_newuserdatauv(L, sizeof *r, 0);
  memset(r, 0, sizeof *r);
  lua_newtable(L);
  int hooks = lua_gettop(L);
  lua_pushcfunction(L, record_protected);
  lua_pushvalue(L, hooks - 1);
  lua_getiuservalue(L, lua_upvalueindex(1), 1);
  lua_rawgeti(L, -1, 1);
  lua_remove(L, -2);
  for (int i = 1; i <= nargs; i++) lua_pushvalue(L, i);
  lua_pushvalue(L, hooks), lua_rawsetp(L, LUA_REGISTRYINDEX, &hooks_key);
  r->program = ty_program_record(tensor, ntensors);
  if (!r->program) return ty_lua_error(L);
  ty_program_options(r->program, c->early, c->arena);
  compiling++;
  int status = lua_pcall(L, nargs + 2, LUA_MULTRET, 0);
  compiling--;
  if (status != LUA_OK) {
    ty_program_abandon(r->program);
    return lua_error(L);
  }
  /* What the function left to the collector is temporary. Twice, for what only finalizers let go. */
  for (int i = 0; i < 2; i++) lua_gc(L, LUA_GCCOLLECT);
  if (!ty_program_finish(r->program, r->result, r->nresults)) return ty_lua_error(L);
  const char *op = c->kind == ELEMENTWISE ? ty_program_not_elementwise(r->program) : NULL;
  if (op) {
    ty_program_free(r->program);
    return luaL_error(L, "fuse: %s does not work element by element; leave it out of the fused function", op);
  }
  add_entry(L, c, r, nargs, hooks, hooks);
  return lua_gettop(L) - hooks;
}

/* ---- replaying ---- */

typedef struct hook_owner {
  lua_State *L;
  int hooks; /* index of their table */
} hook_owner;

static bool call_hook(void *owner, int hook, double *number, int *n) {
  const hook_owner *o = owner;
  if (!lua_checkstack(o->L, 8)) return ty_fail(TY_ENOMEM, "the Lua stack is full");
  lua_rawgeti(o->L, o->hooks, hook + 1);
  if (!ty_lua_call(o->L, 0, TY_HOOK_NUMBERS)) return false;
  *n = 0;
  for (int i = -TY_HOOK_NUMBERS; i < 0 && lua_isnumber(o->L, i); i++) number[(*n)++] = lua_tonumber(o->L, i);
  lua_pop(o->L, TY_HOOK_NUMBERS);
  return true;
}

/* Entry at position `at` against the arguments that are no tensors; leaves its table on the stack. */
static bool same_constants(lua_State *L, int at, int nargs) {
  lua_getiuservalue(L, lua_upvalueindex(1), 1);
  lua_rawgeti(L, -1, at + 2);
  lua_remove(L, -2);
  bool same = true;
  for (int i = 1; i <= nargs && same; i++) {
    if (ty_lua_to(L, i)) continue;
    lua_rawgeti(L, -1, i);
    same = lua_rawequal(L, -1, i) && lua_type(L, -1) == lua_type(L, i) &&
           (lua_type(L, i) != LUA_TNUMBER || lua_isinteger(L, i) == lua_isinteger(L, -1));
    lua_pop(L, 1);
  }
  if (!same) lua_pop(L, 1);
  return same;
}

static int replay(lua_State *L, compiled *c, int at, ty_tensor *const *tensor) {
  entry *e = &c->entries[at];
  int table = 0;
  luaL_checkstack(L, e->nresults + 16, "ty.compile");
  if (ty_program_hooks(e->program) || e->tensors != ((uint64_t)1 << e->nresults) - 1) {
    lua_getiuservalue(L, lua_upvalueindex(1), 1);
    lua_rawgeti(L, -1, at + 2);
    table = lua_gettop(L);
    lua_getfield(L, table, "hooks");
  }
  hook_owner owner = { L, table + 1 };
  ty_handle *h[MOST_TENSORS];
  ty_tensor *made[MOST_TENSORS];
  int n = 0;
  ty_lua_poll(L);
  for (int i = 0; i < e->nresults; i++) {
    if (e->tensors >> i & 1) h[n++] = ty_lua_push_empty(L);
    else lua_rawgeti(L, table, e->nargs + i + 1);
  }
  c->busy = true;
  ty_lua_current = L;
  bool ok = ty_program_replay(e->program, tensor, made, call_hook, &owner);
  c->busy = false;
  if (!ok) return ty_lua_error(L);
  for (int i = 0; i < n; i++) h[i]->t = made[i];
  return e->nresults;
}

/* ---- a call ---- */

/* The call as text: form of the tensors, identity or value of the rest. */
static void push_key(lua_State *L, int nargs) {
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  char text[64];
  snprintf(text, sizeof text, "%d,%d", ty_grad_enabled(), ty_autocast_dtype);
  luaL_addstring(&b, text);
  for (int i = 1; i <= nargs; i++) {
    const ty_tensor *t = ty_lua_to(L, i);
    if (t) {
      snprintf(text, sizeof text, ";t%d,%d", t->v.dtype, t->requires_grad);
      luaL_addstring(&b, text);
      luaL_addlstring(&b, (const char *)t->v.size, sizeof *t->v.size * (size_t)t->v.ndim);
      luaL_addlstring(&b, (const char *)t->v.stride, sizeof *t->v.stride * (size_t)t->v.ndim);
    } else if (lua_type(L, i) == LUA_TNUMBER || lua_type(L, i) == LUA_TSTRING) {
      luaL_addstring(&b, lua_type(L, i) == LUA_TSTRING ? ";s" : ";n");
      lua_pushvalue(L, i);
      lua_tostring(L, -1);
      luaL_addvalue(&b);
    } else {
      snprintf(text, sizeof text, ";%d,%p,%d", lua_type(L, i), lua_topointer(L, i), lua_toboolean(L, i));
      luaL_addstring(&b, text);
    }
  }
  luaL_pushresult(&b);
}

/* Was there a call like this one before? */
static bool seen_before(lua_State *L, int nargs) {
  lua_getiuservalue(L, lua_upvalueindex(1), 1);
  push_key(L, nargs);
  lua_pushvalue(L, -1);
  bool seen = lua_rawget(L, -3) != LUA_TNIL;
  lua_pop(L, 1);
  if (seen) {
    lua_pop(L, 2);
    return true;
  }
  lua_pushboolean(L, 1);
  lua_rawset(L, -3);
  lua_pop(L, 1);
  return false;
}

/* What was recorded is void: only the function stays. */
static void start_over(lua_State *L, compiled *c, uint64_t now) {
  drop_entries(c);
  lua_getiuservalue(L, lua_upvalueindex(1), 1);
  lua_createtable(L, 2, 0);
  lua_rawgeti(L, -2, 1);
  lua_rawseti(L, -2, 1);
  lua_setiuservalue(L, lua_upvalueindex(1), 1);
  lua_pop(L, 1);
  c->epoch = now;
}

/* upvalue 1: the compiled function */
static int call(lua_State *L) {
  compiled *c = lua_touserdata(L, lua_upvalueindex(1));
  int nargs = lua_gettop(L), n = 0, position[MOST_TENSORS];
  ty_tensor *tensor[MOST_TENSORS];
  if (ty_is_recording() || c->busy) return run_plain(L, nargs);
  for (int i = 1; i <= nargs; i++) {
    ty_tensor *t = ty_lua_to(L, i);
    if (!t) continue;
    if (n == MOST_TENSORS) return luaL_error(L, "compile: at most %d tensors as arguments", MOST_TENSORS);
    if (ty_device_of(t) == TY_META) return run_plain(L, nargs);
    position[n] = i;
    tensor[n++] = t;
  }
  uint64_t now = atomic_load_explicit(&epoch, memory_order_relaxed);
  if (c->epoch != now) start_over(L, c, now);
  for (int i = 0; i < c->n; i++) {
    const entry *e = &c->entries[i];
    if (e->nargs != nargs || !ty_program_fits(e->program, tensor, n)) continue;
    if ((e->has_constants || n < nargs) && !same_constants(L, i, nargs)) continue;
    return replay(L, c, i, tensor);
  }
  if (c->n == c->most) return run_unrecorded(L, nargs);
  if (c->warm && !seen_before(L, nargs)) return run_unrecorded(L, nargs);
  return record(L, c, tensor, position, n, nargs);
}

/* new(fn, limit, warm, elementwise, early, arena) -> function */
static int new (lua_State *L) {
  ty_lua_check_callable(L, 1);
  lua_Integer most = ty_lua_check_integer(L, 2);
  if (most < 1 || most > MOST_PROGRAMS) return ty_lua_refuse(L, 2, "a number of programs in [1, 64]");
  compiled *c = lua_newuserdatauv(L, sizeof *c, 1);
  *c = (compiled){ .most = (int)most,
                   .warm = lua_toboolean(L, 3),
                   .kind = lua_toboolean(L, 4) ? ELEMENTWISE : ANY_OP,
                   .early = lua_toboolean(L, 5),
                   .arena = luaL_optinteger(L, 6, 0),
                   .epoch = atomic_load(&epoch) };
  c->entries = calloc((size_t)most, sizeof *c->entries);
  if (!c->entries) return luaL_error(L, "compile: out of memory");
  if (lua_rawgetp(L, LUA_REGISTRYINDEX, &compiled_key) == LUA_TNIL) {
    lua_pop(L, 1);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, compiled_gc), lua_setfield(L, -2, "__gc");
    lua_pushvalue(L, -1), lua_rawsetp(L, LUA_REGISTRYINDEX, &compiled_key);
  }
  lua_setmetatable(L, -2);
  lua_createtable(L, 2, 0);
  lua_pushvalue(L, 1), lua_rawseti(L, -2, 1);
  lua_setiuservalue(L, -2, 1);
  lua_pushcclosure(L, call, 1);
  return 1;
}

static compiled *check_compiled(lua_State *L) {
  if (lua_tocfunction(L, 1) != call) ty_lua_refuse(L, 1, "a function that ty.compile returned");
  lua_getupvalue(L, 1, 1);
  return lua_touserdata(L, -1);
}

static void push_stats(lua_State *L, const ty_program_stats *s) {
  lua_createtable(L, 0, 8);
  lua_pushinteger(L, s->recorded), lua_setfield(L, -2, "recorded");
  lua_pushinteger(L, s->dropped), lua_setfield(L, -2, "dropped");
  lua_pushinteger(L, s->steps), lua_setfield(L, -2, "steps");
  lua_pushinteger(L, s->fused), lua_setfield(L, -2, "fused");
  lua_pushinteger(L, s->runs), lua_setfield(L, -2, "runs");
  lua_pushinteger(L, s->hastened), lua_setfield(L, -2, "hastened");
  lua_pushinteger(L, s->arena), lua_setfield(L, -2, "arena");
  lua_pushinteger(L, s->temporaries), lua_setfield(L, -2, "temporaries");
}

/* stats(function) -> a list with a table for each program */
static int stats(lua_State *L) {
  const compiled *c = check_compiled(L);
  lua_createtable(L, c->n, 0);
  for (int i = 0; i < c->n; i++) {
    ty_program_stats s = ty_program_stats_of(c->entries[i].program);
    push_stats(L, &s);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

/* places(function) -> for its first recording a list of { offset, bytes, first, last } */
static int places(lua_State *L) {
  const compiled *c = check_compiled(L);
  ty_program_place place;
  lua_newtable(L);
  for (int i = 0; c->n && ty_program_place_of(c->entries[0].program, i, &place); i++) {
    lua_createtable(L, 0, 4);
    lua_pushinteger(L, place.offset), lua_setfield(L, -2, "offset");
    lua_pushinteger(L, place.bytes), lua_setfield(L, -2, "bytes");
    lua_pushinteger(L, place.first), lua_setfield(L, -2, "first");
    lua_pushinteger(L, place.last), lua_setfield(L, -2, "last");
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

/* The only recording of a compiled function at 1, and the tensors at 2, which stay on the stack. */
static ty_program *check_restriction(lua_State *L, ty_tensor ***frozen, int *n) {
  const compiled *c = check_compiled(L);
  if (c->n != 1 || c->busy) luaL_error(L, "restrict: expected a function with one recording, got one with %d", c->n);
  luaL_checktype(L, 2, LUA_TTABLE);
  *n = (int)luaL_len(L, 2);
  *frozen = lua_newuserdatauv(L, sizeof **frozen * (size_t)(*n + 1), 0);
  for (int i = 0; i < *n; i++) {
    lua_rawgeti(L, 2, i + 1);
    (*frozen)[i] = ty_lua_check(L, -1);
    lua_pop(L, 1); /* the table holds it */
  }
  return c->entries[0].program;
}

/* restrict(function, tensors): its recording changes these no more */
static int restrict_(lua_State *L) {
  ty_tensor **frozen;
  int n;
  ty_program *p = check_restriction(L, &frozen, &n);
  if (ty_program_restrict(p, frozen, n)) return 0;
  lua_getupvalue(L, 1, 1);
  drop_entries(lua_touserdata(L, -1));
  return ty_lua_error(L);
}

/* foresee(function, tensors) -> the statistics that it would have then */
static int foresee(lua_State *L) {
  ty_tensor **frozen;
  int n;
  ty_program *p = check_restriction(L, &frozen, &n);
  ty_program_stats s;
  if (!ty_program_foresee(p, frozen, n, &s)) return ty_lua_error(L);
  push_stats(L, &s);
  return 1;
}

/* ---- for what runs inside ---- */

static int is_compiling(lua_State *L) {
  lua_pushboolean(L, compiling > 0);
  return 1;
}

static int is_recording(lua_State *L) {
  lua_pushboolean(L, ty_is_recording());
  return 1;
}

/* Adds fn, at 1, to the hooks of the recording. */
static void keep_hook(lua_State *L) {
  lua_rawgetp(L, LUA_REGISTRYINDEX, &hooks_key);
  lua_pushvalue(L, 1);
  lua_rawseti(L, -2, luaL_len(L, -2) + 1);
}

/* on_replay(fn): replays call fn here; the numbers it returns (lr, step, weight of averages) go into the optimizer launch
 * that follows. */
static int on_replay(lua_State *L) {
  ty_lua_check_callable(L, 1);
  if (!ty_is_recording()) return 0;
  keep_hook(L);
  return ty_program_add_hook() >= 0 ? 0 : ty_lua_error(L);
}

/* number(fn, t, number): fills t with the number, and in replays with what fn returns then. */
static int number(lua_State *L) {
  ty_lua_check_callable(L, 1);
  ty_tensor *t = ty_lua_check(L, 2);
  double value = ty_lua_check_number(L, 3);
  if (!ty_is_recording()) return luaL_error(L, "number: nothing is being recorded");
  keep_hook(L);
  ty_scope scope;
  ty_scope_open(&scope);
  bool ok = ty_program_number(t, value);
  ty_scope_close(&scope);
  return ok ? 0 : ty_lua_error(L);
}

/* aside(fn): calls fn, which no recording sees. */
static int aside(lua_State *L) {
  ty_lua_check_callable(L, 1);
  void *paused = ty_program_pause();
  lua_settop(L, 1);
  int status = lua_pcall(L, 0, 0, 0);
  ty_program_resume(paused);
  return status == LUA_OK ? 0 : lua_error(L);
}

/* clip(norm, limit): the optimizer launch before takes gradients times min(1, limit / (norm + 1e-6)). */
static int clip(lua_State *L) {
  ty_tensor *norm = ty_lua_check(L, 1);
  double limit = ty_lua_check_number(L, 2);
  if (!ty_is_recording()) return 0;
  return ty_program_clip(norm, limit) ? 0 : ty_lua_error(L);
}

/* peek(t): the number in t, also where a recording would refuse to show it: for what replays compute by themselves. */
static int peek(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  if (t->v.count != 1 || !t->v.data) return luaL_error(L, "peek: expected one element, got %s", ty_describe(t));
  ty_value v;
  if (!ty_read_value(t, &v)) return ty_lua_error(L);
  lua_pushnumber(L, v.kind == TY_INT ? (lua_Number)v.i : v.f);
  return 1;
}

static int renew(lua_State *L) {
  atomic_fetch_add(&epoch, 1);
  return 0;
}

int ty_lua_open_program(lua_State *L) {
  luaL_newlib(L, ((const luaL_Reg[]){ { "new", new },
                                      { "stats", stats },
                                      { "places", places },
                                      { "restrict", restrict_ },
                                      { "foresee", foresee },
                                      { "is_compiling", is_compiling },
                                      { "is_recording", is_recording },
                                      { "on_replay", on_replay },
                                      { "clip", clip },
                                      { "number", number },
                                      { "aside", aside },
                                      { "peek", peek },
                                      { "renew", renew },
                                      { "trace", ty_lua_trace },
                                      { NULL, NULL } }));
  return 1;
}
