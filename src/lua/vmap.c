/* What ty.vmap is made of, for lua/tycho/vmap.lua: levels, and tensors that enter and leave them. */
#include <string.h>

#include "../ops/vmap.h"
#include "handle.h"

static const char *const kinds[] = { "error", "different", "same", NULL };
#define LEVEL "tycho.vmap.level"

static ty_level **check_level(lua_State *L, int index) {
  ty_level **level = luaL_testudata(L, index, LEVEL);
  if (!level) ty_lua_refuse(L, index, "a level of ty.vmap");
  return level;
}

static int close_level(lua_State *L) {
  ty_level **level = check_level(L, 1);
  if (*level) ty_level_close(*level);
  *level = NULL;
  return 0;
}

/* open(size, randomness) */
static int open_level(lua_State *L) {
  lua_Integer size = ty_lua_check_integer(L, 1);
  const char *name = ty_lua_check_string(L, 2);
  int kind = 0;
  while (kinds[kind] && strcmp(kinds[kind], name) != 0) kind++;
  if (!kinds[kind] || size < 0) return ty_lua_refuse(L, kinds[kind] ? 1 : 2, "a size, and error, different or same");
  ty_level **level = lua_newuserdatauv(L, sizeof(ty_level *), 0);
  *level = NULL;
  if (luaL_newmetatable(L, LEVEL)) {
    lua_pushcfunction(L, close_level);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "__gc");
    lua_setfield(L, -2, "__close");
  }
  lua_setmetatable(L, -2);
  return (*level = ty_level_open(size, kind)) ? 1 : ty_lua_error(L);
}

static int move(lua_State *L, ty_tensor *(*f)(ty_tensor *, ty_level *)) {
  ty_tensor *x = ty_lua_check(L, 1);
  ty_level *level = *check_level(L, 2);
  if (!level) return ty_lua_refuse(L, 2, "a level that is not over");
  ty_handle *h = ty_lua_push_empty(L);
  ty_scope scope;
  ty_scope_open(&scope);
  h->t = ty_retain(f(x, level));
  ty_scope_close(&scope);
  return h->t ? 1 : ty_lua_error(L);
}

static int enter(lua_State *L) { return move(L, ty_map_enter); }
static int leave(lua_State *L) { return move(L, ty_map_leave); }

/* Whether x differs by sample of any level. */
static int is_mapped(lua_State *L) {
  lua_pushboolean(L, ty_lua_check(L, 1)->batch != NULL);
  return 1;
}

/* Whether op NAME has a rule, and whether it is composed, for the tests. */
static int has_rule(lua_State *L) {
  const ty_op *op = ty_op_find(ty_lua_check_string(L, 1));
  if (!op) return ty_lua_refuse(L, 1, "the name of an op");
  lua_pushboolean(L, ty_has_map_rule(op));
  return 1;
}

int ty_lua_open_vmap(lua_State *L) {
  luaL_newlib(L, ((const luaL_Reg[]){ { "open", open_level },
                                      { "close", close_level },
                                      { "enter", enter },
                                      { "leave", leave },
                                      { "is_mapped", is_mapped },
                                      { "has_rule", has_rule },
                                      { NULL, NULL } }));
  return 1;
}
