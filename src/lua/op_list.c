/* The table of ops as a Lua table: what help, the tests and the reference walk over. */
#include <stdlib.h>

#include "handle.h"

static const char *kind_name(uint8_t kind) {
  static const char *const names[] = { "tensor", "optional", "operand", "tensors", "int",    "float",  "bool",
                                       "string", "ints",     "varints", "dtype",   "device", "number", "named" };
  return names[kind];
}

static void push_default(lua_State *L, const ty_arg *a) {
  switch (a->kind) {
    case TY_ARG_INT: lua_pushinteger(L, a->integer); break;
    case TY_ARG_FLOAT: lua_pushnumber(L, a->number); break;
    case TY_ARG_BOOL: lua_pushboolean(L, (int)a->integer); break;
    case TY_ARG_STRING:
    case TY_ARG_NAMED_INTS: lua_pushstring(L, a->text); break;
    case TY_ARG_INTS:
    case TY_ARG_VARINTS:
      lua_newtable(L);
      if (a->text && a->text[0]) lua_pushinteger(L, atoll(a->text)), lua_rawseti(L, -2, 1);
      break;
    default: lua_pushnil(L);
  }
}

static void push_op(lua_State *L, const ty_op *op) {
  static const struct {
    uint32_t bit;
    const char *name;
  } flags[] = { { FLOATS, "FLOATS" },     { NUMBERS, "NUMBERS" },     { INTS, "INTS" },
                { ANY, "ANY" },           { SAVE_OUT, "SAVE_OUT" },   { VIEW, "VIEW" },
                { INPLACE, "INPLACE" },   { STRIDED, "STRIDED" },     { HALF, "HALF" },
                { INTERNAL, "INTERNAL" }, { RANDOM, "RANDOM" },       { WRITES, "WRITES" },
                { FIRST, "FIRST" },       { AUTO_HALF, "AUTO_HALF" }, { AUTO_FULL, "AUTO_FULL" },
                { PROMOTED, "PROMOTED" } };
  lua_createtable(L, 0, 8);
  lua_pushstring(L, op->name), lua_setfield(L, -2, "name");
  lua_pushstring(L, op->doc), lua_setfield(L, -2, "doc");
  lua_pushinteger(L, op->nout), lua_setfield(L, -2, "nout");
  lua_pushboolean(L, op->differentiable), lua_setfield(L, -2, "differentiable");
  lua_pushboolean(L, op->composed), lua_setfield(L, -2, "composed");
  lua_newtable(L);
  for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
    if (op->flags & flags[i].bit) lua_pushboolean(L, 1), lua_setfield(L, -2, flags[i].name);
  lua_setfield(L, -2, "flags");
  lua_createtable(L, op->nargs, 0);
  for (int i = 0; i < op->nargs; i++) {
    const ty_arg *a = &op->args[i];
    lua_createtable(L, 0, 4);
    lua_pushstring(L, a->name), lua_setfield(L, -2, "name");
    lua_pushstring(L, kind_name(a->kind)), lua_setfield(L, -2, "kind");
    lua_pushboolean(L, a->required), lua_setfield(L, -2, "required");
    if (!a->required) push_default(L, a), lua_setfield(L, -2, "default");
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "args");
}

int ty_lua_list_ops(lua_State *L) {
  lua_createtable(L, TY_OP_COUNT, 0);
  for (int i = 0; i < TY_OP_COUNT; i++) {
    push_op(L, &ty_ops[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}
