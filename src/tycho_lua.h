/* Functions in C for Lua that take and give tensors, in a module of your own: a shared library with luaopen_NAME, which
 * `require "NAME"` loads. It links to libtycho (-ltycho), not to Lua, and works with the `tycho` program and in plain
 * Lua alike:
 *
 *     static int l_double(lua_State *L) {
 *       ty_tensor *x = ty_lua_tensor(L, 1); // all arguments first: these calls may raise
 *       ty_scope scope;
 *       ty_lua_begin(L, &scope);
 *       return ty_lua_end(L, &scope, ty_mul(x, 2)); // the result, or ty_error() as an error of Lua
 *     }
 *
 * What such a function returns has no history: ty.custom_op gives it a gradient. */
#ifndef TYCHO_LUA_H
#define TYCHO_LUA_H

#include <lauxlib.h>
#include <lua.h>

#include "tycho.h"

#define TY_LUA_API "tycho.api"
#define TY_LUA_API_VERSION 1

/* What `require "tycho"` leaves in the registry of Lua, as a light userdata of the name above. */
typedef struct ty_lua_api {
  int version;
  ty_tensor *(*to)(lua_State *L, int index); /* borrowed; NULL when it is no tensor */
  void (*poll)(lua_State *L);                /* lets the collector run when tensors have become many */
  void (*push)(lua_State *L, ty_tensor *t);  /* takes over the reference; for NULL raises ty_error() */
} ty_lua_api;

static inline const ty_lua_api *ty_lua_api_of(lua_State *L) {
  lua_getfield(L, LUA_REGISTRYINDEX, TY_LUA_API);
  const ty_lua_api *api = (const ty_lua_api *)lua_touserdata(L, -1);
  lua_pop(L, 1);
  if (!api) luaL_error(L, "this module takes tensors of Tycho: require \"tycho\" first");
  if (api->version != TY_LUA_API_VERSION)
    luaL_error(L, "this module was built for version %d of Tycho's C interface, not %d: compile it anew",
               TY_LUA_API_VERSION, api->version);
  return api;
}

/* The tensor of an argument, which belongs to Lua; NULL when it is no tensor. */
static inline ty_tensor *ty_lua_tensor_or_null(lua_State *L, int index) { return ty_lua_api_of(L)->to(L, index); }
/* The same; raises when it is no tensor. */
static inline ty_tensor *ty_lua_tensor(lua_State *L, int index) {
  ty_tensor *t = ty_lua_tensor_or_null(L, index);
  if (!t) luaL_typeerror(L, index, "tensor");
  return t;
}

/* Pushes a tensor, which Lua then holds as well; NULL raises ty_error(). */
static inline void ty_lua_push_tensor(lua_State *L, ty_tensor *t) {
  const ty_lua_api *api = ty_lua_api_of(L);
  api->push(L, t ? ty_keep(t) : NULL);
}

/* Between these two nothing may raise: ty_ functions do not, functions of Lua might. */
static inline void ty_lua_begin(lua_State *L, ty_scope *scope) {
  ty_lua_api_of(L)->poll(L);
  if (!ty_scope_open(scope)) luaL_error(L, "%s", ty_error());
}
/* Closes the scope and pushes `result`, a tensor of it or an argument; NULL raises ty_error(). Returns 1, the number of
 * values on the stack. */
static inline int ty_lua_end(lua_State *L, ty_scope *scope, ty_tensor *result) {
  ty_tensor *kept = result ? ty_keep(result) : NULL;
  ty_scope_close(scope);
  ty_lua_api_of(L)->push(L, kept);
  return 1;
}

#endif
