/* Checks of the arguments of native functions: what lauxlib has, with errors that read as those of ops do, "FUNCTION:
 * argument N: expected X, got Y". Functions are known by where they stand in the table of the core, however they are
 * called: lauxlib takes the name from the calling instruction, and pcall has none. */
#include <string.h>

#include "handle.h"

static const char core_key;

enum { DEEPEST = 2 };

void ty_lua_remember_core(lua_State *L, int table) {
  lua_pushvalue(L, table);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &core_key);
}

/* What stands before the names in an inner table: "io.", and "tokenizer:" for the methods in tokenizer_core. */
static const char *inner_prefix(lua_State *L, const char *prefix, const char *key) {
  size_t n = strlen(prefix);
  if (n > 0 && strcmp(key, "methods") == 0) {
    lua_pushlstring(L, prefix, n - 1);
    lua_pushfstring(L, "%s:", lua_tostring(L, -1));
    lua_remove(L, -2);
  } else {
    size_t length = strlen(key), core = length > 5 && strcmp(key + length - 5, "_core") == 0 ? 5 : 0;
    lua_pushlstring(L, key, length - core);
    lua_pushfstring(L, "%s%s.", prefix, lua_tostring(L, -1));
    lua_remove(L, -2);
  }
  return lua_tostring(L, -1);
}

/* Looks for the function at `wanted` in the table on the stack's top and in tables in it; pushes its name, prefix and
 * key, when it is there. */
static bool find_name(lua_State *L, int wanted, const char *prefix, int depth) {
  int table = lua_gettop(L);
  luaL_checkstack(L, 8, "the name of a function");
  lua_pushnil(L);
  while (lua_next(L, table)) {
    bool named = lua_type(L, -2) == LUA_TSTRING;
    if (named && lua_rawequal(L, -1, wanted)) {
      lua_pushfstring(L, "%s%s", prefix, lua_tostring(L, -2));
      return true;
    }
    if (named && lua_istable(L, -1) && depth < DEEPEST) {
      const char *inner = inner_prefix(L, prefix, lua_tostring(L, -2));
      lua_pushvalue(L, -2);
      if (find_name(L, wanted, inner, depth + 1)) return true;
      lua_pop(L, 2);
    }
    lua_pop(L, 1);
  }
  return false;
}

const char *ty_lua_function_name(lua_State *L) {
  lua_Debug ar;
  if (!lua_getstack(L, 0, &ar)) return "?";
  lua_getinfo(L, "nf", &ar);
  int wanted = lua_gettop(L);
  ty_lua_push_methods(L);
  if (find_name(L, wanted, "", 0)) return lua_tostring(L, -1);
  if (lua_rawgetp(L, LUA_REGISTRYINDEX, &core_key) == LUA_TTABLE && find_name(L, wanted, "", 0)) {
    const char *name = lua_tostring(L, -1); /* Tensor is a metatable: "Tensor.__index" is nobody's word */
    return strncmp(name, "Tensor.__", 9) == 0 ? "tensor" : name;
  }
  return ar.name ? ar.name : "?";
}

const char *ty_lua_typename(lua_State *L, int index) {
  return ty_lua_handle_at(L, index) ? "tensor" : luaL_typename(L, index);
}

/* What came, as an error shows it: numbers and short texts themselves, of others the type; pushes it. */
static const char *shown(lua_State *L, int index) {
  switch (lua_type(L, index)) {
    case LUA_TNONE: return "nothing";
    case LUA_TNUMBER:
    case LUA_TBOOLEAN: return luaL_tolstring(L, index, NULL);
    case LUA_TSTRING: {
      size_t n;
      const char *text = lua_tolstring(L, index, &n);
      return n <= 40 && strlen(text) == n ? lua_pushfstring(L, "\"%s\"", text) : "a string";
    }
    case LUA_TNIL: return "nil";
    default: break;
  }
  ty_handle *h = ty_lua_handle_at(L, index);
  if (h && h->t) return lua_pushfstring(L, "a tensor %s", ty_describe(h->t));
  return lua_pushfstring(L, "a %s", ty_lua_typename(L, index));
}

int ty_lua_refuse(lua_State *L, int index, const char *expected) {
  const char *got = shown(L, index); /* before the name, which leaves something where an absent argument would be */
  return luaL_error(L, "%s: argument %d: expected %s, got %s", ty_lua_function_name(L), index, expected, got);
}

ty_tensor *ty_lua_to(lua_State *L, int index) {
  ty_handle *h = ty_lua_handle_at(L, index);
  if (h && !h->t)
    luaL_error(L,
               "%s: argument %d: this tensor was released (by its scope, <close> or :free()); ty.keep() takes a tensor "
               "out of its scope",
               ty_lua_function_name(L), index);
  return h ? h->t : NULL;
}

ty_tensor *ty_lua_check(lua_State *L, int index) {
  ty_tensor *t = ty_lua_to(L, index);
  if (!t) ty_lua_refuse(L, index, "a tensor");
  return t;
}

lua_Integer ty_lua_check_integer(lua_State *L, int index) {
  int exact;
  lua_Integer i = lua_tointegerx(L, index, &exact);
  if (!exact || lua_type(L, index) != LUA_TNUMBER) ty_lua_refuse(L, index, "an integer");
  return i;
}

lua_Integer ty_lua_opt_integer(lua_State *L, int index, lua_Integer otherwise) {
  return lua_isnoneornil(L, index) ? otherwise : ty_lua_check_integer(L, index);
}

lua_Number ty_lua_check_number(lua_State *L, int index) {
  if (lua_type(L, index) != LUA_TNUMBER) ty_lua_refuse(L, index, "a number");
  return lua_tonumber(L, index);
}

const char *ty_lua_check_lstring(lua_State *L, int index, size_t *size) {
  if (lua_type(L, index) != LUA_TSTRING) ty_lua_refuse(L, index, "a string");
  return lua_tolstring(L, index, size);
}

const char *ty_lua_check_string(lua_State *L, int index) { return ty_lua_check_lstring(L, index, NULL); }

const char *ty_lua_opt_string(lua_State *L, int index, const char *otherwise) {
  return lua_isnoneornil(L, index) ? otherwise : ty_lua_check_string(L, index);
}

void ty_lua_check_type(lua_State *L, int index, int type) {
  if (lua_type(L, index) == type) return;
  ty_lua_refuse(L, index, lua_pushfstring(L, "a %s", lua_typename(L, type)));
}

/* What can be called. */
void ty_lua_check_callable(lua_State *L, int index) {
  if (lua_isfunction(L, index)) return;
  if (luaL_getmetafield(L, index, "__call") == LUA_TNIL) ty_lua_refuse(L, index, "a function");
  lua_pop(L, 1);
}
