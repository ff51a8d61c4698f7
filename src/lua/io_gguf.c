/* ty.io: GGUF files and their metadata. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../io/gguf.h"
#include "io.h"

static void release_gguf(void *p) { ty_gguf_close(p); }
static void release_bytes(void *p) { ty_bytes_free(p); }

/* ---- reading ---- */

static void push_value(lua_State *L, const uint8_t **at, const uint8_t *end, ty_gguf_type type) {
  ty_gguf_value v;
  if (!ty_gguf_read_value(at, end, type, &v)) luaL_error(L, "gguf: the file changed while it was read");
  switch (type) {
    case TY_GGUF_F32:
    case TY_GGUF_F64: lua_pushnumber(L, v.f); break;
    case TY_GGUF_BOOL: lua_pushboolean(L, v.i != 0); break;
    case TY_GGUF_STRING: lua_pushlstring(L, v.text, v.size); break;
    case TY_GGUF_U64:
      if (v.u > INT64_MAX) lua_pushnumber(L, (lua_Number)v.u);
      else lua_pushinteger(L, (lua_Integer)v.u);
      break;
    case TY_GGUF_ARRAY:
      luaL_checkstack(L, 4, "gguf");
      lua_createtable(L, v.count < 1 << 20 ? (int)v.count : 1 << 20, 0);
      for (uint64_t i = 0; i < v.count; i++) {
        push_value(L, at, end, v.of);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
      }
      break;
    default: lua_pushinteger(L, v.i);
  }
}

/* "u32", of arrays "u32[]". */
static void push_type(lua_State *L, const ty_gguf *g, const ty_gguf_entry *e) {
  const uint8_t *at = e->value, *end = g->map->data + g->map->size;
  ty_gguf_type type = e->type;
  luaL_Buffer b;
  int depth = 0;
  ty_gguf_value v;
  for (; type == TY_GGUF_ARRAY && depth < TY_GGUF_DEPTH; depth++) {
    if (!ty_gguf_read_value(&at, end, type, &v)) break;
    type = v.of;
    if (v.count == 0) {
      depth++;
      break;
    }
  }
  luaL_buffinit(L, &b);
  luaL_addstring(&b, ty_gguf_type_name[type]);
  while (depth-- > 0) luaL_addstring(&b, "[]");
  luaL_pushresult(&b);
}

/* A tensor of a format that we lack is an error when it is asked for. */
static int missing_tensor(lua_State *L) {
  lua_pushvalue(L, 2);
  if (lua_rawget(L, lua_upvalueindex(1)) == LUA_TNIL) return 1;
  return luaL_error(
      L,
      "gguf: tensor \"%s\" is %s, which Tycho does not have; it reads F32 F16 BF16 F64 I8 I16 I32 I64 Q8_0 "
      "Q4_0 Q2_K Q3_K Q4_K Q6_K MXFP4",
      lua_tostring(L, 2), lua_tostring(L, -1));
}

static void push_tensors(lua_State *L, const ty_gguf *g, bool copy) {
  lua_createtable(L, 0, g->tensor_count < 1 << 20 ? (int)g->tensor_count : 1 << 20);
  lua_newtable(L); /* formats that we lack */
  for (size_t i = 0; i < g->tensor_count; i++) {
    const ty_gguf_tensor *t = &g->tensors[i];
    lua_pushlstring(L, t->name, t->name_size);
    if (t->dtype < 0) {
      lua_pushstring(L, t->format);
      lua_rawset(L, -3);
    } else {
      ty_handle *h = ty_lua_push_empty(L);
      h->t = ty_gguf_get(g, i, copy);
      if (!h->t) ty_lua_error(L);
      lua_rawset(L, -4);
    }
  }
  lua_pushnil(L);
  if (lua_next(L, -2)) {
    lua_pop(L, 2);
    lua_pushcclosure(L, missing_tensor, 1);
    lua_createtable(L, 0, 1);
    lua_insert(L, -2);
    lua_setfield(L, -2, "__index");
    lua_setmetatable(L, -2);
  } else {
    lua_pop(L, 1);
  }
}

static void push_info(lua_State *L, const ty_gguf *g) {
  lua_createtable(L, 0, 4);
  lua_pushinteger(L, g->version), lua_setfield(L, -2, "version");
  lua_pushinteger(L, (lua_Integer)g->alignment), lua_setfield(L, -2, "alignment");
  lua_newtable(L);
  for (size_t i = 0; i < g->entry_count; i++) {
    lua_pushlstring(L, g->entries[i].key, g->entries[i].key_size);
    push_type(L, g, &g->entries[i]);
    lua_rawset(L, -3);
  }
  lua_setfield(L, -2, "types");
  lua_newtable(L);
  for (size_t i = 0; i < g->tensor_count; i++) {
    const ty_gguf_tensor *t = &g->tensors[i];
    lua_createtable(L, 0, 5);
    lua_pushlstring(L, t->name, t->name_size), lua_setfield(L, -2, "name");
    lua_pushstring(L, t->format), lua_setfield(L, -2, "format");
    lua_pushinteger(L, (lua_Integer)t->offset), lua_setfield(L, -2, "offset");
    lua_pushinteger(L, (lua_Integer)t->bytes), lua_setfield(L, -2, "bytes");
    lua_createtable(L, t->ndim, 0);
    for (int d = 0; d < t->ndim; d++) {
      lua_pushinteger(L, t->shape[d]);
      lua_rawseti(L, -2, d + 1);
    }
    lua_setfield(L, -2, "shape");
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  lua_setfield(L, -2, "tensors");
}

/* load_gguf(path [, { mmap = true }]) -> { name = tensor }, { key = value }, { version, alignment, types, tensors } */
int ty_io_load_gguf(lua_State *L) {
  static const char *const options[] = { "mmap", NULL };
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 2, options);
  bool copy = !ty_io_flag(L, 2, "mmap", true);
  ty_gguf *g = ty_io_box(L, sizeof *g, release_gguf);
  ty_lua_current = L;
  ty_lua_poll(L);
  ty_mapping *m = ty_mapping_open(path);
  bool ok = m && ty_gguf_open(m, path, g);
  ty_mapping_release(m);
  if (!ok) return ty_lua_error(L);
  push_tensors(L, g, copy);
  lua_newtable(L);
  for (size_t i = 0; i < g->entry_count; i++) {
    const uint8_t *at = g->entries[i].value;
    lua_pushlstring(L, g->entries[i].key, g->entries[i].key_size);
    push_value(L, &at, g->map->data + g->map->size, g->entries[i].type);
    lua_rawset(L, -3);
  }
  push_info(L, g);
  ty_io_unbox(g);
  return 3;
}

/* ---- writing ---- */

static void put(lua_State *L, bool ok) {
  if (!ok) ty_lua_error(L);
}

static _Noreturn void fail_value(lua_State *L, const char *key, ty_gguf_type type) {
  luaL_error(L, "save_gguf: metadata \"%s\": %s does not fit the type %s", key, luaL_tolstring(L, -1, NULL),
             ty_gguf_type_name[type]);
  abort(); /* luaL_error does not return */
}

/* The value on the top of the stack, no array. */
static void put_scalar(lua_State *L, ty_bytes *b, const char *key, ty_gguf_type type) {
  static const struct {
    int64_t low, high;
    int bytes;
  } integer[TY_GGUF_TYPES] = {
    [TY_GGUF_U8] = { 0, UINT8_MAX, 1 },   [TY_GGUF_I8] = { INT8_MIN, INT8_MAX, 1 },
    [TY_GGUF_U16] = { 0, UINT16_MAX, 2 }, [TY_GGUF_I16] = { INT16_MIN, INT16_MAX, 2 },
    [TY_GGUF_U32] = { 0, UINT32_MAX, 4 }, [TY_GGUF_I32] = { INT32_MIN, INT32_MAX, 4 },
    [TY_GGUF_U64] = { 0, INT64_MAX, 8 },  [TY_GGUF_I64] = { INT64_MIN, INT64_MAX, 8 },
  };
  if (type == TY_GGUF_STRING) {
    size_t size;
    if (lua_type(L, -1) != LUA_TSTRING) fail_value(L, key, type);
    const char *text = lua_tolstring(L, -1, &size);
    put(L, ty_gguf_put_string(b, text, size));
  } else if (type == TY_GGUF_BOOL) {
    if (!lua_isboolean(L, -1)) fail_value(L, key, type);
    put(L, ty_gguf_put(b, (uint64_t)lua_toboolean(L, -1), 1));
  } else if (type == TY_GGUF_F32 || type == TY_GGUF_F64) {
    if (lua_type(L, -1) != LUA_TNUMBER) fail_value(L, key, type);
    double x = lua_tonumber(L, -1);
    float narrow = (float)x;
    put(L, type == TY_GGUF_F64 ? ty_bytes_put(b, &x, sizeof x) : ty_bytes_put(b, &narrow, sizeof narrow));
  } else {
    int whole;
    int64_t i = lua_tointegerx(L, -1, &whole);
    if (!whole || lua_type(L, -1) != LUA_TNUMBER || i < integer[type].low || i > integer[type].high)
      fail_value(L, key, type);
    put(L, ty_gguf_put(b, (uint64_t)i, integer[type].bytes));
  }
}

/* What the value on the top of the stack is written as when nobody says. */
static ty_gguf_type type_of(lua_State *L, const char *key) {
  switch (lua_type(L, -1)) {
    case LUA_TSTRING: return TY_GGUF_STRING;
    case LUA_TBOOLEAN: return TY_GGUF_BOOL;
    case LUA_TTABLE: return TY_GGUF_ARRAY;
    case LUA_TNUMBER: break;
    default:
      luaL_error(L, "save_gguf: metadata \"%s\": expected strings, numbers, booleans and lists of these, got a %s", key,
                 luaL_typename(L, -1));
  }
  if (!lua_isinteger(L, -1)) return TY_GGUF_F32;
  int64_t i = lua_tointeger(L, -1);
  return i >= 0 && i <= UINT32_MAX ? TY_GGUF_U32 : i < 0 && i >= INT32_MIN ? TY_GGUF_I32 : TY_GGUF_I64;
}

/* One type for all elements of the list on the top of the stack: i32 where they are small integers. */
static ty_gguf_type element_type(lua_State *L, const char *key, lua_Integer n) {
  ty_gguf_type all = TY_GGUF_I32;
  for (lua_Integer i = 1; i <= n; i++) {
    lua_rawgeti(L, -1, i);
    ty_gguf_type one = type_of(L, key);
    if (one == TY_GGUF_U32 && lua_tointeger(L, -1) <= INT32_MAX) one = TY_GGUF_I32;
    lua_pop(L, 1);
    bool whole = one == TY_GGUF_I32 || one == TY_GGUF_U32 || one == TY_GGUF_I64;
    bool number = whole || one == TY_GGUF_F32, all_number = all != TY_GGUF_STRING && all != TY_GGUF_BOOL;
    if (i == 1 || one == all) all = one;
    else if (number && all_number) all = one == TY_GGUF_F32 || all == TY_GGUF_F32 ? TY_GGUF_F32 : TY_GGUF_I64;
    else luaL_error(L, "save_gguf: metadata \"%s\": expected a list of one type, element %d differs", key, (int)i);
  }
  if (all == TY_GGUF_ARRAY) luaL_error(L, "save_gguf: metadata \"%s\": lists in lists are not written", key);
  return all;
}

/* "u32" or "u32[]" at the top of the stack; *is_list tells which. */
static ty_gguf_type named_type(lua_State *L, const char *key, bool *is_list) {
  size_t n = 0;
  const char *name = lua_type(L, -1) == LUA_TSTRING ? lua_tolstring(L, -1, &n) : "";
  *is_list = n > 2 && strcmp(name + n - 2, "[]") == 0;
  if (*is_list) n -= 2;
  for (int i = 0; i < TY_GGUF_TYPES; i++)
    if (i != TY_GGUF_ARRAY && strlen(ty_gguf_type_name[i]) == n && memcmp(ty_gguf_type_name[i], name, n) == 0)
      return (ty_gguf_type)i;
  luaL_error(
      L,
      "save_gguf: types[\"%s\"]: expected one of u8 i8 u16 i16 u32 i32 f32 bool string u64 i64 f64, followed by [] "
      "for a list",
      key);
  return TY_GGUF_TYPES;
}

/* The value on the top of the stack with its type, under `key`; `types`: the index of the table of types, or 0. */
static void put_entry(lua_State *L, ty_bytes *b, const char *key, int types) {
  bool is_list = lua_istable(L, -1), named = false;
  ty_gguf_type type = TY_GGUF_TYPES;
  if (types && lua_getfield(L, types, key) != LUA_TNIL) {
    bool list;
    type = named_type(L, key, &list);
    named = true;
    if (list != is_list)
      luaL_error(L, "save_gguf: metadata \"%s\" is %s list, types says otherwise", key, is_list ? "a" : "no");
  }
  if (types) lua_pop(L, 1);
  if (!is_list) {
    if (!named) type = type_of(L, key);
    put(L, ty_gguf_put(b, type, 4));
    put_scalar(L, b, key, type);
    return;
  }
  lua_Integer n = (lua_Integer)lua_rawlen(L, -1);
  if (!named) type = element_type(L, key, n);
  put(L, ty_gguf_put(b, TY_GGUF_ARRAY, 4) && ty_gguf_put(b, type, 4) && ty_gguf_put(b, (uint64_t)n, 8));
  for (lua_Integer i = 1; i <= n; i++) {
    lua_rawgeti(L, -1, i);
    put_scalar(L, b, key, type);
    lua_pop(L, 1);
  }
}

static int by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

/* The metadata at `index`, sorted by key so that the same gives the same file, but for general.alignment. */
static uint64_t put_entries(lua_State *L, int index, int types, ty_bytes *b) {
  size_t count = 0, n = 0;
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) count++;
  const char **keys = lua_newuserdatauv(L, (count + 1) * sizeof *keys, 0);
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    size_t size;
    if (lua_type(L, -2) != LUA_TSTRING || n == count)
      luaL_error(L, "save_gguf: metadata: keys must be strings, got a %s", luaL_typename(L, -2));
    const char *key = lua_tolstring(L, -2, &size);
    if (strlen(key) != size || size > 65535 || !ty_valid_utf8(key, size))
      luaL_error(L, "save_gguf: metadata: the key %s is not UTF-8 of at most 65535 bytes without NUL",
                 ty_quote(key, size));
    if (strcmp(key, "general.alignment") != 0) keys[n++] = key;
  }
  if (n) qsort(keys, n, sizeof *keys, by_text);
  for (size_t i = 0; i < n; i++) {
    put(L, ty_gguf_put_string(b, keys[i], strlen(keys[i])));
    lua_getfield(L, index, keys[i]);
    put_entry(L, b, keys[i], types);
    lua_pop(L, 1);
  }
  return n;
}

/* save_gguf(path, { name = tensor } [, { key = value } [, { alignment = 32, types = { key = "u32" } }]]) */
int ty_io_save_gguf(lua_State *L) {
  static const char *const options[] = { "alignment", "types", NULL };
  ty_bundle tensors;
  const char *path = ty_io_path(L, 1);
  lua_settop(L, 4);
  ty_io_tensors(L, 2, &tensors);
  int types = 0;
  int64_t alignment = TY_GGUF_ALIGNMENT;
  if (!lua_isnil(L, 3)) {
    ty_lua_check_type(L, 3, LUA_TTABLE);
    alignment = ty_io_count(L, 3, "general.alignment", alignment, 1 << 30);
  }
  if (ty_io_options(L, 4, options)) {
    alignment = ty_io_count(L, 4, "alignment", alignment, 1 << 30);
    if (lua_getfield(L, 4, "types") != LUA_TNIL) {
      if (!lua_istable(L, -1)) luaL_error(L, "option types: expected a table, got a %s", luaL_typename(L, -1));
      types = lua_gettop(L);
    }
  }
  if (alignment < 8 || (alignment & (alignment - 1)))
    luaL_error(L, "option alignment: expected a power of two from 8 up, got %I", (LUAI_UACINT)alignment);
  ty_bytes *entries = ty_io_box(L, sizeof *entries, release_bytes);
  uint64_t count = lua_isnil(L, 3) ? 0 : put_entries(L, 3, types, entries);
  ty_lua_current = L;
  ty_lua_poll(L);
  if (!ty_gguf_write(path, &tensors, entries, count, (uint64_t)alignment)) return ty_lua_error(L);
  ty_io_unbox(entries);
  return 0;
}

void ty_io_add_gguf(lua_State *L) {
  luaL_setfuncs(
      L, (const luaL_Reg[]){ { "load_gguf", ty_io_load_gguf }, { "save_gguf", ty_io_save_gguf }, { NULL, NULL } }, 0);
}
