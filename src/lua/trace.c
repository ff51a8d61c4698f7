/* trace(function, ...): the ops that a function calls, for writers of models. */
#include "../ops/trace.h"
#include "handle.h"

static int free_trace(lua_State *L) {
  ty_trace **t = lua_touserdata(L, 1);
  ty_trace_free(*t);
  *t = NULL;
  return 0;
}

/* The handle of a tensor: the same for all its occurrences, from the table at index `seen`. */
static void push_tensor(lua_State *L, int seen, ty_tensor *t) {
  if (!t) {
    lua_pushboolean(L, 0);
    return;
  }
  if (lua_rawgetp(L, seen, t) != LUA_TNIL) return;
  lua_pop(L, 1);
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_retain(t);
  lua_pushvalue(L, -1);
  lua_rawsetp(L, seen, t);
}

static void push_value(lua_State *L, int seen, const ty_arg *arg, const ty_value *v) {
  switch (v->kind) {
    case TY_TENSOR: push_tensor(L, seen, v->t); break;
    case TY_FLOAT: lua_pushnumber(L, v->f); break;
    case TY_STRING: lua_pushstring(L, v->s ? v->s : ""); break;
    case TY_INTS:
      lua_createtable(L, v->is.n, 0);
      for (int i = 0; i < v->is.n; i++) {
        lua_pushinteger(L, v->is.v[i]);
        lua_rawseti(L, -2, i + 1);
      }
      break;
    case TY_TENSORS:
      lua_createtable(L, v->ts.n, 0);
      for (int i = 0; i < v->ts.n; i++) {
        push_tensor(L, seen, v->ts.v[i]);
        lua_rawseti(L, -2, i + 1);
      }
      break;
    case TY_INT:
      if (arg->kind == TY_ARG_BOOL) lua_pushboolean(L, v->i != 0);
      else if (arg->kind == TY_ARG_DTYPE && v->i >= 0 && v->i < TY_DTYPES) lua_pushstring(L, ty_dtype_name[v->i]);
      else if (arg->kind == TY_ARG_DTYPE) lua_pushnil(L);
      else lua_pushinteger(L, v->i);
      break;
    default: lua_pushnil(L);
  }
}

static void push_event(lua_State *L, int seen, const ty_trace_event *e) {
  const ty_op *op = &ty_ops[e->id];
  lua_createtable(L, 0, 5);
  lua_pushstring(L, op->name), lua_setfield(L, -2, "op");
  lua_pushinteger(L, e->depth), lua_setfield(L, -2, "depth");
  lua_pushboolean(L, e->inplace), lua_setfield(L, -2, "inplace");
  lua_pushboolean(L, op->composed), lua_setfield(L, -2, "composed");
  lua_createtable(L, 0, op->nargs);
  for (int i = 0; i < op->nargs; i++) {
    push_value(L, seen, &op->args[i], &e->arg[i]);
    lua_setfield(L, -2, op->args[i].name);
  }
  lua_setfield(L, -2, "args");
  lua_createtable(L, op->nout, 0);
  for (int i = 0; i < op->nout; i++) {
    push_tensor(L, seen, e->out[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "out");
}

/* trace(function, ...) -> events, inputs, results: the calls { op, depth, inplace, composed, args = { by name }, out },
 * the arguments and the results of the function, in which the same tensor is the same value everywhere. */
int ty_lua_trace(lua_State *L) {
  ty_lua_check_callable(L, 1);
  int nargs = lua_gettop(L) - 1;
  luaL_checkstack(L, nargs + 16, "trace");
  ty_trace **t = lua_newuserdatauv(L, sizeof *t, 0);
  *t = NULL;
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, free_trace), lua_setfield(L, -2, "__gc");
  lua_setmetatable(L, -2);
  for (int i = 1; i <= nargs + 1; i++) lua_pushvalue(L, i);
  if (!ty_trace_start()) return ty_lua_error(L);
  int status = lua_pcall(L, nargs, LUA_MULTRET, 0);
  *t = ty_trace_stop();
  if (status != LUA_OK) return lua_error(L);
  int first = nargs + 3, last = lua_gettop(L);
  lua_newtable(L);
  int seen = lua_gettop(L);
  lua_createtable(L, (int)(*t)->count, 0);
  for (int64_t i = 0; i < (*t)->count; i++) {
    push_event(L, seen, (*t)->event[i]);
    lua_rawseti(L, -2, i + 1);
  }
  for (int list = 0; list < 2; list++) {
    lua_newtable(L);
    int from = list ? first : 2, to = list ? last : nargs + 1;
    for (int i = from; i <= to; i++) {
      ty_tensor *tensor = ty_lua_to(L, i);
      if (tensor) push_tensor(L, seen, tensor);
      else lua_pushvalue(L, i);
      lua_rawseti(L, -2, i - from + 1);
    }
  }
  return 3;
}
