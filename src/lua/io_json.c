/* ty.io: JSON text to Lua values and back. Integers stay integers (64 bits), null is io.null, an empty list is
 * io.array{}. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../io/json.h"
#include "../io/number.h"
#include "io.h"

static const char null_key, array_key;

/* How many values a text may have unless the caller allows more: a table takes thirty times the two characters that it
 * is written with, so that a limit of bytes is none of memory. */
enum { VALUES_MOST = 4 << 20 };

/* ---- text to values ---- */

typedef struct decoder {
  ty_json json;
  int64_t values, most;
} decoder;

static void release_decoder(void *p) { ty_json_close(&((decoder *)p)->json); }

static bool push_value(lua_State *L, decoder *d);

static bool push_array(lua_State *L, decoder *d) {
  ty_json *j = &d->json;
  bool more;
  lua_newtable(L);
  if (!ty_json_enter(j, '[')) return false;
  for (lua_Integer i = 1; ty_json_next(j, &more); i++) {
    if (!more) {
      if (i == 1) { /* else it would come back as {} */
        lua_rawgetp(L, LUA_REGISTRYINDEX, &array_key);
        lua_setmetatable(L, -2);
      }
      return true;
    }
    if (!push_value(L, d)) return false;
    lua_rawseti(L, -2, i);
  }
  return false;
}

static bool push_object(lua_State *L, decoder *d) {
  ty_json *j = &d->json;
  bool more;
  const char *s;
  size_t n;
  lua_newtable(L);
  if (!ty_json_enter(j, '{')) return false;
  while (ty_json_next(j, &more)) {
    if (!more) return true;
    if (!ty_json_key(j, &s, &n)) return false;
    lua_pushlstring(L, s, n);
    lua_pushvalue(L, -1);
    if (lua_rawget(L, -3) != LUA_TNIL) return ty_json_fail(j, "the key %s is there twice", ty_quote(s, n));
    lua_pop(L, 1);
    if (!push_value(L, d)) return false;
    lua_rawset(L, -3);
  }
  return false;
}

static bool push_value(lua_State *L, decoder *d) {
  ty_json *j = &d->json;
  const char *s;
  size_t n;
  ty_json_value v;
  luaL_checkstack(L, 8, "JSON");
  if (d->values++ == d->most)
    return ty_json_fail(j, "more than the %lld values allowed; the option values allows more", (long long)d->most);
  switch (ty_json_peek(j)) {
    case TY_JSON_ARRAY: return push_array(L, d);
    case TY_JSON_OBJECT: return push_object(L, d);
    case TY_JSON_STRING:
      if (!ty_json_string(j, &s, &n)) return false;
      lua_pushlstring(L, s, n);
      return true;
    case TY_JSON_NUMBER:
      if (!ty_json_number(j, &v)) return false;
      if (v.is_integer) lua_pushinteger(L, v.integer);
      else lua_pushnumber(L, v.number);
      return true;
    case TY_JSON_TRUE: lua_pushboolean(L, true); return ty_json_word(j);
    case TY_JSON_FALSE: lua_pushboolean(L, false); return ty_json_word(j);
    case TY_JSON_NULL: lua_rawgetp(L, LUA_REGISTRYINDEX, &null_key); return ty_json_word(j);
    default: return false;
  }
}

static int decode(lua_State *L, const char *name, const char *text, size_t size, int64_t most) {
  decoder *d = ty_io_box(L, sizeof *d, release_decoder);
  ty_json_open(&d->json, name, text, size);
  d->most = most;
  if (!push_value(L, d) || !ty_json_finish(&d->json)) return ty_lua_error(L);
  ty_io_unbox(d);
  return 1;
}

/* json_decode(text [, { values = 4194304 }]) -> value; values: how many it may have */
static int json_decode(lua_State *L) {
  static const char *const options[] = { "values", NULL };
  size_t size;
  const char *text = ty_lua_check_lstring(L, 1, &size);
  ty_io_options(L, 2, options);
  return decode(L, "JSON", text, size, ty_io_count(L, 2, "values", VALUES_MOST, INT64_MAX));
}

static void release_bytes(void *p) { ty_bytes_free(p); }

/* load_json(path [, { max = by size, values = 4194304 }]) -> value; gzip is unpacked */
int ty_io_load_json(lua_State *L) {
  static const char *const options[] = { "max", "values", NULL };
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 2, options);
  int64_t most = ty_io_count(L, 2, "max", -1, PTRDIFF_MAX),
          values = ty_io_count(L, 2, "values", VALUES_MOST, INT64_MAX);
  ty_bytes *bytes = ty_io_box(L, sizeof *bytes, release_bytes);
  ty_text *file = ty_text_open(path);
  bool ok = file && ty_text_rest(file, most, TY_JSON_FLOOR, bytes);
  ty_text_close(file);
  if (!ok) return ty_lua_error(L);
  decode(L, path, (const char *)bytes->data, bytes->size, values);
  ty_io_unbox(bytes);
  return 1;
}

/* ---- values to text ---- */

typedef struct encoder {
  ty_bytes out;
  int indent, depth; /* indent 0: one line */
  char path[160];    /* where we are, for errors */
  size_t path_size;
} encoder;

static void release_encoder(void *p) { ty_bytes_free(&((encoder *)p)->out); }

static size_t go_into(encoder *e, const char *format, const char *key, long long index) {
  size_t old = e->path_size, room = sizeof e->path - old;
  int n = key ? snprintf(e->path + old, room, format, key) : snprintf(e->path + old, room, format, index);
  e->path_size = (size_t)n < room ? old + (size_t)n : sizeof e->path - 1;
  return old;
}

static void come_back(encoder *e, size_t old) {
  e->path_size = old;
  e->path[old] = 0;
}

static bool fail(encoder *e, const char *what) {
  return ty_fail(TY_EINVAL, "json_encode: %s%s %s", e->path_size ? "the value at " : "the value", e->path, what);
}

static bool new_line(encoder *e) {
  if (!e->indent) return true;
  if (!ty_bytes_put(&e->out, "\n", 1)) return false;
  for (int i = 0; i < e->depth * e->indent; i++)
    if (!ty_bytes_put(&e->out, " ", 1)) return false;
  return true;
}

static bool put_value(lua_State *L, encoder *e);

static bool put_array(lua_State *L, encoder *e, lua_Unsigned count) {
  if (!ty_bytes_put(&e->out, "[", 1)) return false;
  e->depth++;
  for (lua_Unsigned i = 1; i <= count; i++) {
    size_t old = go_into(e, "[%lld]", NULL, (long long)i);
    if (i > 1 && !ty_bytes_put(&e->out, ",", 1)) return false;
    if (!new_line(e)) return false;
    lua_rawgeti(L, -1, (lua_Integer)i);
    if (!put_value(L, e)) return false;
    lua_pop(L, 1);
    come_back(e, old);
  }
  e->depth--;
  return (count == 0 || new_line(e)) && ty_bytes_put(&e->out, "]", 1);
}

typedef struct key {
  const char *text;
  size_t size;
} key;

static int by_bytes(const void *pa, const void *pb) {
  const key *a = pa, *b = pb;
  int c = memcmp(a->text, b->text, a->size < b->size ? a->size : b->size);
  return c ? c : (a->size > b->size) - (a->size < b->size);
}

static bool put_object(lua_State *L, encoder *e, size_t count) {
  int table = lua_gettop(L);
  key *keys = lua_newuserdatauv(L, (count + 1) * sizeof *keys, 0);
  size_t n = 0;
  for (lua_pushnil(L); n < count && lua_next(L, table); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING)
      return fail(e, "is a table that is neither a list (keys 1 to n) nor has only strings for keys");
    keys[n].text = lua_tolstring(L, -2, &keys[n].size);
    n++;
  }
  lua_settop(L, table + 1);
  qsort(keys, n, sizeof *keys, by_bytes);
  if (!ty_bytes_put(&e->out, "{", 1)) return false;
  e->depth++;
  for (size_t i = 0; i < n; i++) {
    size_t old = go_into(e, e->path_size ? ".%s" : "%s", keys[i].text, 0);
    if (i && !ty_bytes_put(&e->out, ",", 1)) return false;
    if (!ty_valid_utf8(keys[i].text, keys[i].size)) return fail(e, "stands under a key that is not valid UTF-8");
    if (!new_line(e) || !ty_json_put_string(&e->out, keys[i].text, keys[i].size) ||
        !ty_bytes_put(&e->out, e->indent ? ": " : ":", e->indent ? 2 : 1))
      return false;
    lua_pushlstring(L, keys[i].text, keys[i].size);
    lua_rawget(L, table);
    if (!put_value(L, e)) return false;
    lua_pop(L, 1);
    come_back(e, old);
  }
  lua_pop(L, 1);
  e->depth--;
  return (n == 0 || new_line(e)) && ty_bytes_put(&e->out, "}", 1);
}

static bool put_table(lua_State *L, encoder *e) {
  if (e->depth == TY_JSON_DEPTH) return fail(e, "is nested too deep, or contains itself");
  lua_Unsigned length = lua_rawlen(L, -1);
  size_t count = 0, places = 0;
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1), count++)
    places += lua_isinteger(L, -2) && (lua_Unsigned)lua_tointeger(L, -2) - 1 < length;
  bool marked = false;
  if (lua_getmetatable(L, -1)) {
    lua_rawgetp(L, LUA_REGISTRYINDEX, &array_key);
    marked = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
  }
  if (places == count && length == count && (count || marked)) return put_array(L, e, length);
  return marked ? fail(e, "is an io.array with holes or keys that are no positions") : put_object(L, e, count);
}

/* The value on the top of the stack. */
static bool put_value(lua_State *L, encoder *e) {
  luaL_checkstack(L, 8, "JSON");
  char text[32];
  size_t size;
  switch (lua_type(L, -1)) {
    case LUA_TNIL: return ty_bytes_put(&e->out, "null", 4);
    case LUA_TBOOLEAN:
      return lua_toboolean(L, -1) ? ty_bytes_put(&e->out, "true", 4) : ty_bytes_put(&e->out, "false", 5);
    case LUA_TSTRING: {
      const char *s = lua_tolstring(L, -1, &size);
      return ty_valid_utf8(s, size) ? ty_json_put_string(&e->out, s, size) : fail(e, "is a string that is not UTF-8");
    }
    case LUA_TNUMBER: {
      if (lua_isinteger(L, -1)) return ty_bytes_printf(&e->out, "%lld", (long long)lua_tointeger(L, -1));
      lua_Number x = lua_tonumber(L, -1);
      if (isnan(x) || isinf(x))
        return fail(e, isnan(x) ? "is nan, which JSON cannot say" : "is infinite, which JSON cannot say");
      return ty_bytes_put(&e->out, text, (size_t)ty_format_number(text, x));
    }
    case LUA_TTABLE: return put_table(L, e);
    default:
      lua_rawgetp(L, LUA_REGISTRYINDEX, &null_key);
      bool null = lua_rawequal(L, -1, -2);
      lua_pop(L, 1);
      if (null) return ty_bytes_put(&e->out, "null", 4);
      snprintf(text, sizeof text, "is a %s", ty_lua_typename(L, -1));
      return fail(e, text);
  }
}

/* Encodes the value at `value` with the options behind it; leaves the box on the stack. */
static encoder *encode(lua_State *L, int value, int indent) {
  static const char *const names[] = { "indent", NULL };
  if (lua_isnone(L, value)) ty_lua_refuse(L, value, "a value");
  lua_settop(L, value + 1);
  ty_io_options(L, value + 1, names);
  indent = (int)ty_io_count(L, value + 1, "indent", indent, 16);
  encoder *e = ty_io_box(L, sizeof *e, release_encoder);
  e->indent = indent;
  lua_pushvalue(L, value);
  if (!put_value(L, e)) ty_lua_error(L);
  lua_pop(L, 1);
  return e;
}

/* json_encode(value [, { indent = 0 }]) -> text, keys in byte order */
static int json_encode(lua_State *L) {
  encoder *e = encode(L, 1, 0);
  lua_pushlstring(L, (const char *)e->out.data, e->out.size);
  ty_io_unbox(e);
  return 1;
}

/* save_json(path, value [, { indent = 2 }]) */
int ty_io_save_json(lua_State *L) {
  const char *path = ty_io_path(L, 1);
  encoder *e = encode(L, 2, 2);
  bool ok = ty_bytes_put(&e->out, "\n", 1) && ty_file_write(path, e->out.data, e->out.size);
  ty_io_unbox(e);
  return ok ? 0 : ty_lua_error(L);
}

/* array(table) -> table, marked as a list: matters when it is empty */
static int array(lua_State *L) {
  if (lua_isnoneornil(L, 1)) {
    lua_settop(L, 0);
    lua_newtable(L);
  }
  ty_lua_check_type(L, 1, LUA_TTABLE);
  lua_settop(L, 1);
  lua_rawgetp(L, LUA_REGISTRYINDEX, &array_key);
  lua_setmetatable(L, 1);
  return 1;
}

static int null_text(lua_State *L) {
  lua_pushliteral(L, "null");
  return 1;
}

void ty_io_add_json(lua_State *L) {
  lua_newuserdatauv(L, 1, 0);
  lua_createtable(L, 0, 2);
  lua_pushcfunction(L, null_text), lua_setfield(L, -2, "__tostring");
  lua_pushliteral(L, "null"), lua_setfield(L, -2, "__name");
  lua_setmetatable(L, -2);
  lua_pushvalue(L, -1), lua_rawsetp(L, LUA_REGISTRYINDEX, &null_key);
  lua_setfield(L, -2, "null");
  lua_newtable(L);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &array_key);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "json_decode", json_decode },
                                    { "json_encode", json_encode },
                                    { "load_json", ty_io_load_json },
                                    { "save_json", ty_io_save_json },
                                    { "array", array },
                                    { NULL, NULL } },
                0);
}
