/* What ty.profile() is made of: starting, numbering scopes, and the events as lists. */
#include "../ops/profile.h"

#include "handle.h"

/* start(most, watch): watch 0 for nothing, 1 for NaN, 2 for NaN and infinities */
static int profile_start(lua_State *L) {
  lua_Integer most = ty_lua_check_integer(L, 1), watch = ty_lua_opt_integer(L, 2, 0);
  if (watch < 0 || watch > 2) return ty_lua_refuse(L, 2, "0, 1 or 2");
  if (!ty_profile_start(most, (ty_profile_watch)watch)) return ty_lua_error(L);
  return 0;
}

/* scope(number) -> the one before; 0 where this thread is not being profiled */
static int profile_scope(lua_State *L) {
  uint32_t number = (uint32_t)ty_lua_check_integer(L, 1);
  lua_pushinteger(L, ty_profiling ? ty_profiling->scope : 0);
  if (ty_profiling) ty_profiling->scope = number;
  return 1;
}

/* count_meta(on): whether the collector minds tensors of the meta device */
static int profile_count_meta(lua_State *L) {
  ty_lua_check_type(L, 1, LUA_TBOOLEAN);
  ty_lua_count_meta(L, lua_toboolean(L, 1));
  return 0;
}

static void set_integer(lua_State *L, const char *name, lua_Integer value) {
  lua_pushinteger(L, value);
  lua_setfield(L, -2, name);
}

static void set_number(lua_State *L, const char *name, lua_Number value) {
  lua_pushnumber(L, value);
  lua_setfield(L, -2, name);
}

static void set_boolean(lua_State *L, const char *name, bool value) {
  lua_pushboolean(L, value);
  lua_setfield(L, -2, name);
}

/* The events of the profile at upvalue 1, a userdata that frees it whatever happens here. */
static int push_events(lua_State *L) {
  const ty_profile *p = *(ty_profile **)lua_touserdata(L, 1);
  lua_createtable(L, (int)p->count, 0);
  for (int64_t i = 0; i < p->count; i++) {
    const ty_profile_event *e = &p->event[i];
    lua_createtable(L, 0, 9);
    lua_pushstring(L, ty_ops[e->id].name);
    lua_setfield(L, -2, "op");
    lua_pushstring(L, e->shapes);
    lua_setfield(L, -2, "shapes");
    set_integer(L, "scope", e->scope);
    set_boolean(L, "backward", e->backward);
    set_boolean(L, "fused", e->fused);
    set_number(L, "begin", 1e-9 * (double)e->begin);
    set_number(L, "seconds", 1e-9 * (double)(e->end - e->begin));
    set_integer(L, "bytes", e->bytes);
    set_number(L, "flops", e->flops);
    if (e->bad) {
      set_boolean(L, "bad", true);
      set_boolean(L, "given", e->given);
    }
    lua_rawseti(L, -2, i + 1);
  }
  lua_pushinteger(L, p->lost);
  return 2;
}

static int free_events(lua_State *L) {
  ty_profile **p = lua_touserdata(L, 1);
  ty_profile_free(*p);
  *p = NULL;
  return 0;
}

/* stop() -> list of events, how many more there were; nil where nothing was being profiled */
static int profile_stop(lua_State *L) {
  ty_profile **held = lua_newuserdatauv(L, sizeof *held, 0);
  *held = NULL;
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, free_events);
  lua_setfield(L, -2, "__gc");
  lua_setmetatable(L, -2);
  *held = ty_profile_stop();
  if (!*held) {
    lua_pushnil(L);
    return 1;
  }
  lua_pushcfunction(L, push_events);
  lua_pushvalue(L, -2);
  lua_call(L, 1, 2);
  ty_profile_free(*held);
  *held = NULL;
  return 2;
}

int ty_lua_open_profile(lua_State *L) {
  luaL_newlib(L, ((const luaL_Reg[]){ { "start", profile_start },
                                      { "scope", profile_scope },
                                      { "count_meta", profile_count_meta },
                                      { "stop", profile_stop },
                                      { NULL, NULL } }));
  return 1;
}
