/* x.name, x[i], x["0:8, :, -1"], x[tensor] and writes through them. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "../device/device.h"
#include "../program/recording.h"
#include "handle.h"

/* ---- slice strings ---- */

typedef enum item_kind { RANGE, POSITION, REST, NEW_DIM } item_kind;
typedef struct item {
  item_kind kind;
  int64_t start, stop, step;
} item;

enum { MAX_ITEMS = 2 * TY_MAX_DIMS + 1 };

static const char *skip(const char *s) {
  while (isspace((unsigned char)*s)) s++;
  return s;
}

/* An integer at *s, if one is there. */
static bool integer(const char **s, int64_t *out) {
  const char *p = skip(*s);
  if (!isdigit((unsigned char)*p) && !((*p == '-' || *p == '+') && isdigit((unsigned char)p[1]))) return false;
  char *end;
  *out = strtoll(p, &end, 10);
  *s = end;
  return true;
}

/* "a:b:c", "i", "...", "None" separated by commas. Returns the count or -1. */
static int parse(const char *text, item *items) {
  const char *s = text;
  int n = 0;
  for (;;) {
    if (n == MAX_ITEMS) return -1;
    item *it = &items[n++];
    *it = (item){ RANGE, 0, INT64_MAX, 1 };
    s = skip(s);
    if (strncmp(s, "...", 3) == 0) {
      it->kind = REST;
      s += 3;
    } else if (strncmp(s, "None", 4) == 0) {
      it->kind = NEW_DIM;
      s += 4;
    } else {
      bool number = integer(&s, &it->start);
      s = skip(s);
      if (*s == ':') {
        s++;
        integer(&s, &it->stop);
        s = skip(s);
        if (*s == ':') {
          s++;
          integer(&s, &it->step);
        }
      } else if (number) {
        it->kind = POSITION;
      } else {
        return -1;
      }
    }
    s = skip(s);
    if (*s == '\0') return n;
    if (*s++ != ',') return -1;
  }
}

/* The view, in the current C scope. */
static ty_tensor *apply(ty_tensor *x, const char *text) {
  item items[MAX_ITEMS];
  int n = parse(text, items), taken = 0, rest = 0;
  if (n < 0) {
    ty_fail(TY_EINVAL,
            "index: \"%s\" is no slice; expected positions, start:stop:step, ... and None, separated by commas", text);
    return NULL;
  }
  for (int i = 0; i < n; i++) {
    taken += items[i].kind == RANGE || items[i].kind == POSITION;
    rest += items[i].kind == REST;
  }
  if (taken > x->v.ndim || rest > 1) {
    ty_fail(TY_EINVAL,
            rest > 1 ? "index: \"%s\" has more than one ... for x %s"
                     : "index: \"%s\" names more dimensions than x %s has",
            text, ty_describe(x));
    return NULL;
  }
  int dim = 0, ndim = x->v.ndim;
  for (int i = 0; i < n && x; i++) {
    const item *it = &items[i];
    switch (it->kind) {
      case REST: dim += ndim - taken; break;
      case NEW_DIM: x = ty_unsqueeze(x, dim++); break;
      case POSITION: x = ty_select(x, dim, it->start); break;
      case RANGE:
        if (it->start != 0 || it->stop != INT64_MAX || it->step != 1)
          x = ty_slice(x, dim, it->start, it->stop, it->step);
        dim++;
    }
  }
  return x;
}

/* Letters, digits and underscores only: a name, not a slice ("None" alone is a slice). */
static bool is_name(const char *s) {
  if (!isalpha((unsigned char)*s) && *s != '_') return false;
  if (strcmp(s, "None") == 0) return false;
  while (isalnum((unsigned char)*s) || *s == '_') s++;
  return *s == '\0';
}

/* ---- tensors as indices ---- */

static ty_tensor *by_tensor(ty_tensor *x, ty_tensor *index) {
  if (ty_dtype_of(index) == TY_BOOL) return ty_masked_select(x, index);
  if (index->v.ndim == 1) return ty_index_select(x, 0, index);
  ty_tensor *rows = ty_index_select(x, 0, ty_reshape(index, TY_INTS(index->v.count)));
  int64_t size[2 * TY_MAX_DIMS];
  int n = 0;
  if (!rows) return NULL;
  if (index->v.ndim + x->v.ndim - 1 > TY_MAX_DIMS) {
    ty_fail(TY_EINVAL, "index: %s rows of %s have more than %d dimensions", ty_describe(index), ty_describe(x),
            TY_MAX_DIMS);
    return NULL;
  }
  for (int d = 0; d < index->v.ndim; d++) size[n++] = index->v.size[d];
  for (int d = 1; d < x->v.ndim; d++) size[n++] = x->v.size[d];
  return ty_reshape(rows, (ty_ints){ size, n });
}

/* ---- reading ---- */

static int property(lua_State *L, ty_tensor *t, const char *name) {
  if (strcmp(name, "shape") == 0) {
    lua_createtable(L, t->v.ndim, 0);
    for (int d = 0; d < t->v.ndim; d++) lua_pushinteger(L, t->v.size[d]), lua_rawseti(L, -2, d + 1);
  } else if (strcmp(name, "dtype") == 0) {
    lua_pushstring(L, ty_dtype_name[t->v.dtype]);
  } else if (strcmp(name, "device") == 0) {
    lua_pushstring(L, ty_device_name(ty_device_of(t)));
  } else if (strcmp(name, "ndim") == 0) {
    lua_pushinteger(L, t->v.ndim);
  } else if (strcmp(name, "grad") == 0) {
    if (ty_is_recording()) ty_recorded_grad(t, true);
    ty_tensor *g = ty_grad_of(t);
    if (g) ty_lua_push(L, ty_retain(g));
    else lua_pushnil(L);
  } else if (strcmp(name, "requires_grad") == 0) {
    lua_pushboolean(L, t->requires_grad);
  } else if (strcmp(name, "is_leaf") == 0) {
    lua_pushboolean(L, !t->node);
  } else {
    return luaL_error(L, "a tensor has no field or method \"%s\"", name);
  }
  return 1;
}

/* upvalue 1: the methods */
static int index_get(lua_State *L) {
  int type = lua_type(L, 2);
  if (type == LUA_TSTRING) {
    lua_pushvalue(L, 2);
    if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL) return 1;
    lua_pop(L, 1);
    const char *key = lua_tostring(L, 2);
    if (is_name(key)) return property(L, ty_lua_check(L, 1), key);
  }
  ty_tensor *x = ty_lua_check(L, 1), *index = type == LUA_TUSERDATA ? ty_lua_check(L, 2) : NULL, *r;
  int exact = 0;
  lua_Integer position = type == LUA_TNUMBER ? lua_tointegerx(L, 2, &exact) : 0;
  if (!index && type != LUA_TSTRING && !exact)
    return luaL_error(L, "index: expected an integer, a slice string or a tensor, got %s", luaL_typename(L, 2));
  ty_lua_current = L;
  ty_lua_poll(L);
  ty_handle *h = ty_lua_push_empty(L);
  ty_scope scope;
  ty_scope_open(&scope);
  r = index ? by_tensor(x, index) : type == LUA_TSTRING ? apply(x, lua_tostring(L, 2)) : ty_select(x, 0, position);
  if (r == x)
    r = x->v.ndim ? ty_slice(x, 0, 0, INT64_MAX, 1) : ty_reshape(x, TY_NO_INTS); /* x[":"] is a view of its own */
  h->t = ty_retain(r);
  ty_scope_close(&scope);
  return h->t ? 1 : ty_lua_error(L);
}

/* ---- writing ---- */

static bool write(ty_tensor *x, ty_tensor *part, ty_tensor *source, double number) {
  if (!part) return false;
  if (ty_view_repeats(&x->v))
    return ty_fail(TY_EINVAL, "index: cannot write into the expanded view %s; call :clone() first", ty_describe(x));
  if (ty_grad_enabled() && (x->requires_grad || (source && source->requires_grad)))
    return ty_fail(
        TY_EINVAL,
        "index: writing into %s cannot be recorded for gradients; use ty.where, ty.scatter or ty.concat, or ty.no_grad",
        ty_describe(x));
  return source ? ty_copy_(part, source, false) != NULL : ty_fill_(part, number) != NULL;
}

static int index_set(lua_State *L) {
  ty_tensor *x = ty_lua_check(L, 1), *source = lua_type(L, 3) == LUA_TUSERDATA ? ty_lua_check(L, 3) : NULL;
  int type = lua_type(L, 2), exact = 0;
  if (type == LUA_TSTRING && is_name(lua_tostring(L, 2)))
    return luaL_error(L, "a tensor has no field \"%s\" to set; use :requires_grad_() and the like", lua_tostring(L, 2));
  double number = 0;
  if (!source) {
    if (lua_isboolean(L, 3)) number = lua_toboolean(L, 3);
    else if (lua_type(L, 3) == LUA_TNUMBER) number = lua_tonumber(L, 3);
    else return luaL_error(L, "index: expected a number or a tensor to write, got %s", ty_lua_typename(L, 3));
  }
  ty_tensor *mask = type == LUA_TUSERDATA ? ty_lua_check(L, 2) : NULL;
  lua_Integer position = type == LUA_TNUMBER ? lua_tointegerx(L, 2, &exact) : 0;
  if (!mask && type != LUA_TSTRING && !exact)
    return luaL_error(L, "index: expected an integer, a slice string or a bool tensor, got %s", luaL_typename(L, 2));
  if (mask && ty_dtype_of(mask) != TY_BOOL)
    return luaL_error(L, "index: writing by a tensor takes a bool mask, got %s; use :scatter or :index_add",
                      ty_describe(mask));
  ty_lua_current = L;
  ty_scope scope;
  ty_scope_open(&scope);
  bool ok;
  if (mask) {
    ty_tensor *filled = source ? ty_where(mask, source, x) : ty_masked_fill(x, mask, number);
    ok = write(x, filled ? x : NULL, filled, 0);
  } else {
    bool was = ty_set_grad_enabled(false);
    ty_tensor *part = type == LUA_TSTRING ? apply(x, lua_tostring(L, 2)) : ty_select(x, 0, position);
    ty_set_grad_enabled(was);
    ok = write(x, part, source, number);
  }
  ty_scope_close(&scope);
  return ok ? 0 : ty_lua_error(L);
}

/* Lua turns the result into a boolean: the same tensor? Elementwise comparison is x:eq(y). */
static int same(lua_State *L) {
  ty_tensor *a = ty_lua_to(L, 1), *b = ty_lua_to(L, 2);
  lua_pushboolean(L, a && a == b);
  return 1;
}

static int no_order(lua_State *L) {
  return luaL_error(L, "tensors are compared elementwise by methods: x:lt(y), x:le(y), x:gt(y), x:ge(y), x:eq(y)");
}

void ty_lua_open_index(lua_State *L, int table) {
  lua_getfield(L, table, "Tensor");
  ty_lua_push_methods(L);
  lua_pushvalue(L, -1), lua_setfield(L, -3, "methods");
  lua_pushcclosure(L, index_get, 1), lua_setfield(L, -2, "__index");
  luaL_setfuncs(
      L,
      (const luaL_Reg[]){
          { "__newindex", index_set }, { "__eq", same }, { "__lt", no_order }, { "__le", no_order }, { NULL, NULL } },
      0);
  lua_pop(L, 1);
}
