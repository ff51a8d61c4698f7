/* Packing Lua values for another Lua state: nil, booleans, numbers, strings, tables with their metatables (cycles and
 * shared tables stay shared), Lua functions by their code and upvalues, tensors as a new view on the same memory.
 * What a loaded module offers (the module's table, a function or a class in it) goes by name and is found in the other
 * state with require(). Coroutines, C functions outside modules and other userdata are refused. */
#include "message.h"

#include <stdlib.h>
#include <string.h>

enum tag {
  END,
  NIL,
  FALSE,
  TRUE,
  INTEGER,
  FLOAT,
  STRING,
  TABLE,
  SEEN,
  FUNCTION,
  MODULE,
  MEMBER,
  TENSOR,
  SHARED_UPVALUE,
  OWN_UPVALUE
};
enum { DEEPEST = 180 };

static const char box_key;

/* ---- the message and its owner while Lua may raise ---- */

void ty_message_free(ty_message *m) {
  if (!m) return;
  for (int i = 0; i < m->count; i++) ty_release(m->tensors[i]);
  free(m->tensors);
  free(m->data);
  free(m);
}

static int box_close(lua_State *L) {
  ty_message **box = lua_touserdata(L, 1);
  ty_message_free(*box);
  *box = NULL;
  return 0;
}

static ty_message **push_box(lua_State *L, ty_message *m) {
  ty_message **box = lua_newuserdatauv(L, sizeof *box, 0);
  *box = m; /* before anything below can raise */
  if (lua_rawgetp(L, LUA_REGISTRYINDEX, &box_key) == LUA_TNIL) {
    lua_pop(L, 1);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, box_close), lua_setfield(L, -2, "__gc");
    lua_pushvalue(L, -1), lua_rawsetp(L, LUA_REGISTRYINDEX, &box_key);
  }
  lua_setmetatable(L, -2);
  return box;
}

static bool append(ty_message *m, const void *data, size_t n) {
  if (m->length + n > m->capacity) {
    size_t capacity = m->capacity ? m->capacity : 256;
    while (capacity < m->length + n) capacity *= 2;
    char *grown = realloc(m->data, capacity);
    if (!grown) return false;
    m->data = grown;
    m->capacity = capacity;
  }
  memcpy(m->data + m->length, data, n);
  m->length += n;
  return true;
}

/* ---- packing ---- */

typedef struct packer {
  lua_State *L;
  ty_message *m;
  int seen;     /* table of table/function -> number */
  int names;    /* table of value -> "module" or { module, member }; 0: not made yet */
  int upvalues; /* table of upvalue id -> { function number, position } */
  lua_Integer next;
} packer;

static void put(packer *p, const void *data, size_t n) {
  if (!append(p->m, data, n)) luaL_error(p->L, "thread: out of memory for a message");
}

static void put_tag(packer *p, enum tag tag) {
  char c = (char)tag;
  put(p, &c, 1);
}

static void put_integer(packer *p, lua_Integer i) { put(p, &i, sizeof i); }

static void put_text(packer *p, const char *s, size_t n) {
  put_integer(p, (lua_Integer)n);
  put(p, s, n);
}

static int write_code(lua_State *L, const void *data, size_t n, void *context) {
  (void)L;
  return append(context, data, n) ? 0 : 1;
}

/* Remembers under which name a value of a loaded module is found. A name of a module wins over one of a member. */
static void note_name(packer *p, int value, const char *module, const char *member) {
  lua_State *L = p->L;
  lua_pushvalue(L, value);
  bool known = lua_rawget(L, p->names) != LUA_TNIL;
  bool known_module = lua_type(L, -1) == LUA_TSTRING;
  lua_pop(L, 1);
  if (known && (member || known_module)) return;
  lua_pushvalue(L, value);
  if (member) {
    lua_createtable(L, 2, 0);
    lua_pushstring(L, module), lua_rawseti(L, -2, 1);
    lua_pushstring(L, member), lua_rawseti(L, -2, 2);
  } else {
    lua_pushstring(L, module);
  }
  lua_rawset(L, p->names);
}

static bool by_reference(lua_State *L, int index) {
  int type = lua_type(L, index);
  return type == LUA_TTABLE || type == LUA_TFUNCTION;
}

/* Tables and functions of package.loaded, and their direct members. _G's members are those of the standard library and
 * whatever the program put there: the latter are not in the other state, so only C functions count. */
static void collect_names(packer *p) {
  lua_State *L = p->L;
  lua_getfield(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
  int loaded = lua_gettop(L);
  lua_pushnil(L);
  while (lua_next(L, loaded)) {
    int module = lua_gettop(L);
    if (lua_type(L, module - 1) == LUA_TSTRING && by_reference(L, module)) {
      const char *name = lua_tostring(L, module - 1);
      bool global = strcmp(name, "_G") == 0;
      note_name(p, module, name, NULL);
      if (lua_istable(L, module)) {
        lua_pushnil(L);
        while (lua_next(L, module)) {
          if (lua_type(L, -2) == LUA_TSTRING && by_reference(L, -1) && (!global || lua_iscfunction(L, -1)))
            note_name(p, lua_gettop(L), name, lua_tostring(L, -2));
          lua_pop(L, 1);
        }
      }
    }
    lua_settop(L, module - 1);
  }
  lua_settop(L, loaded - 1);
}

/* Writes a reference by name when the value belongs to a module. */
static bool put_name(packer *p, int index) {
  lua_State *L = p->L;
  if (!lua_toboolean(L, p->names)) {
    lua_newtable(L);
    lua_replace(L, p->names);
    collect_names(p);
  }
  lua_pushvalue(L, index);
  int type = lua_rawget(L, p->names);
  if (type == LUA_TSTRING) {
    size_t n;
    const char *s = lua_tolstring(L, -1, &n);
    put_tag(p, MODULE);
    put_text(p, s, n);
  } else if (type == LUA_TTABLE) {
    put_tag(p, MEMBER);
    for (int i = 1; i <= 2; i++) {
      size_t n;
      lua_rawgeti(L, -i, i);
      const char *s = lua_tolstring(L, -1, &n);
      put_text(p, s, n);
    }
    lua_pop(L, 2);
  }
  lua_pop(L, 1);
  return type != LUA_TNIL;
}

static bool put_seen(packer *p, int index) {
  lua_State *L = p->L;
  lua_pushvalue(L, index);
  bool known = lua_rawget(L, p->seen) != LUA_TNIL;
  if (known) {
    put_tag(p, SEEN);
    put_integer(p, lua_tointeger(L, -1));
  }
  lua_pop(L, 1);
  if (!known) {
    lua_pushvalue(L, index);
    lua_pushinteger(L, ++p->next);
    lua_rawset(L, p->seen);
  }
  return known;
}

static void put_value(packer *p, int index, bool named, int depth);

static void put_table(packer *p, int index, bool named, int depth) {
  lua_State *L = p->L;
  bool meta = lua_getmetatable(L, index);
  if (meta) lua_pop(L, 1);
  if ((named || meta) && put_name(p, index)) return;
  if (put_seen(p, index)) return;
  put_tag(p, TABLE);
  lua_pushnil(L);
  while (lua_next(L, index)) {
    int key = lua_gettop(L) - 1;
    put_value(p, key, named, depth + 1);
    put_value(p, key + 1, named, depth + 1);
    lua_settop(L, key);
  }
  put_tag(p, END);
  if (meta) {
    lua_getmetatable(L, index);
    put_value(p, lua_gettop(L), true, depth + 1);
    lua_pop(L, 1);
  } else {
    put_tag(p, NIL);
  }
}

static void put_function(packer *p, int index, int depth) {
  lua_State *L = p->L;
  if (put_name(p, index)) return;
  if (lua_iscfunction(L, index)) luaL_error(L, "thread: a C function that is in no module cannot be sent to a thread");
  if (put_seen(p, index)) return;
  lua_Integer number = p->next;
  put_tag(p, FUNCTION);
  size_t at = p->m->length;
  put_integer(p, 0);
  lua_pushvalue(L, index);
  if (lua_dump(L, write_code, p->m, 0) != 0) luaL_error(L, "thread: out of memory for a message");
  lua_pop(L, 1);
  lua_Integer size = (lua_Integer)(p->m->length - at - sizeof(lua_Integer));
  memcpy(p->m->data + at, &size, sizeof size);
  const char *name;
  for (int i = 1; (name = lua_getupvalue(L, index, i)) != NULL; i++) {
    lua_pushlightuserdata(L, lua_upvalueid(L, index, i));
    if (lua_rawget(L, p->upvalues) != LUA_TNIL) { /* a variable shared with a function that was packed before */
      put_tag(p, SHARED_UPVALUE);
      for (int k = 1; k <= 2; k++) {
        lua_rawgeti(L, -1, k);
        put_integer(p, lua_tointeger(L, -1));
        lua_pop(L, 1);
      }
      lua_pop(L, 2);
      continue;
    }
    lua_pop(L, 1);
    lua_pushlightuserdata(L, lua_upvalueid(L, index, i));
    lua_createtable(L, 2, 0);
    lua_pushinteger(L, number), lua_rawseti(L, -2, 1);
    lua_pushinteger(L, i), lua_rawseti(L, -2, 2);
    lua_rawset(L, p->upvalues);
    put_tag(p, OWN_UPVALUE);
    int type = lua_type(L, -1);
    if (type == LUA_TTHREAD || (type == LUA_TUSERDATA && !ty_lua_to(L, -1)))
      luaL_error(L, "thread: a function cannot be sent: its upvalue '%s' is a %s", name, ty_lua_typename(L, -1));
    put_value(p, lua_gettop(L), true, depth + 1);
    lua_pop(L, 1);
  }
  put_tag(p, END);
}

static void put_tensor(packer *p, ty_tensor *t) {
  ty_message *m = p->m;
  if (m->count == m->room) {
    int room = m->room ? 2 * m->room : 8;
    ty_tensor **grown = realloc(m->tensors, (size_t)room * sizeof *grown);
    if (!grown) luaL_error(p->L, "thread: out of memory for a message");
    m->tensors = grown;
    m->room = room;
  }
  ty_tensor *alias = ty_tensor_alias(t); /* counts of tensors are not atomic: the other thread gets one of its own */
  if (!alias) ty_lua_error(p->L);
  m->tensors[m->count++] = alias;
  put_tag(p, TENSOR);
  put_integer(p, m->count - 1);
}

/* `named`: look for the value in the loaded modules first. Plain data is not looked up: it would cost each message. */
static void put_value(packer *p, int index, bool named, int depth) {
  lua_State *L = p->L;
  if (depth > DEEPEST) luaL_error(L, "thread: a value is nested too deeply to be sent");
  luaL_checkstack(L, 12, "message to a thread");
  switch (lua_type(L, index)) {
    case LUA_TNIL: put_tag(p, NIL); break;
    case LUA_TBOOLEAN: put_tag(p, lua_toboolean(L, index) ? TRUE : FALSE); break;
    case LUA_TNUMBER:
      if (lua_isinteger(L, index)) {
        put_tag(p, INTEGER);
        put_integer(p, lua_tointeger(L, index));
      } else {
        lua_Number x = lua_tonumber(L, index);
        put_tag(p, FLOAT);
        put(p, &x, sizeof x);
      }
      break;
    case LUA_TSTRING: {
      size_t n;
      const char *s = lua_tolstring(L, index, &n);
      put_tag(p, STRING);
      put_text(p, s, n);
      break;
    }
    case LUA_TTABLE: put_table(p, index, named, depth); break;
    case LUA_TFUNCTION: put_function(p, index, depth); break;
    default: {
      ty_tensor *t = ty_lua_to(L, index);
      if (!t) luaL_error(L, "thread: a %s cannot be sent to a thread", luaL_typename(L, index));
      put_tensor(p, t);
    }
  }
}

ty_message *ty_message_pack(lua_State *L, int first, int last) {
  int top = lua_gettop(L);
  luaL_checkstack(L, 12, "message to a thread");
  ty_message **box = push_box(L, NULL);
  lua_newtable(L);
  lua_pushboolean(L, 0);
  lua_newtable(L);
  *box = calloc(1, sizeof **box);
  if (!*box) luaL_error(L, "thread: out of memory for a message");
  packer p = { .L = L, .m = *box, .seen = top + 2, .names = top + 3, .upvalues = top + 4 };
  for (int i = first; i <= last; i++) put_value(&p, i, false, 0);
  put_tag(&p, END);
  ty_message *m = *box;
  *box = NULL;
  lua_settop(L, top);
  return m;
}

ty_message *ty_message_of_text(const char *text) {
  ty_message *m = calloc(1, sizeof *m);
  if (!m) return NULL;
  char tags[2] = { FALSE, STRING }, end = END;
  lua_Integer n = (lua_Integer)strlen(text);
  if (append(m, tags, 2) && append(m, &n, sizeof n) && append(m, text, (size_t)n) && append(m, &end, 1)) return m;
  ty_message_free(m);
  return NULL;
}

/* ---- unpacking ---- */

typedef struct reader {
  lua_State *L;
  ty_message *m;
  size_t at;
  int seen; /* table of number -> table/function */
  lua_Integer next;
} reader;

static enum tag get_tag(reader *r) { return (enum tag)(unsigned char)r->m->data[r->at++]; }

static lua_Integer get_integer(reader *r) {
  lua_Integer i;
  memcpy(&i, r->m->data + r->at, sizeof i);
  r->at += sizeof i;
  return i;
}

static const char *get_text(reader *r, size_t *n) {
  *n = (size_t)get_integer(r);
  const char *s = r->m->data + r->at;
  r->at += *n;
  return s;
}

static void remember(reader *r) { /* the value on top */
  lua_pushvalue(r->L, -1);
  lua_rawseti(r->L, r->seen, ++r->next);
}

static bool get_value(reader *r);

static void get_name(reader *r, bool member) {
  lua_State *L = r->L;
  size_t n;
  lua_getglobal(L, "require");
  const char *module = get_text(r, &n);
  lua_pushlstring(L, module, n);
  lua_call(L, 1, 1);
  if (!member) return;
  const char *name = get_text(r, &n);
  lua_pushlstring(L, name, n);
  lua_gettable(L, -2); /* through __index: modules may load parts on first use */
  lua_remove(L, -2);
}

static void get_function(reader *r) {
  lua_State *L = r->L;
  size_t n;
  const char *code = get_text(r, &n);
  if (luaL_loadbufferx(L, code, n, "=thread", "b") != LUA_OK) lua_error(L);
  remember(r);
  int fn = lua_gettop(L);
  for (int i = 1;; i++) {
    enum tag tag = get_tag(r);
    if (tag == END) break;
    if (tag == SHARED_UPVALUE) {
      lua_rawgeti(L, r->seen, get_integer(r));
      lua_upvaluejoin(L, fn, i, -1, (int)get_integer(r));
      lua_pop(L, 1);
    } else {
      get_value(r);
      lua_setupvalue(L, fn, i);
    }
  }
}

static void get_table(reader *r) {
  lua_State *L = r->L;
  lua_newtable(L);
  remember(r);
  int table = lua_gettop(L);
  while (get_value(r)) {
    get_value(r);
    lua_rawset(L, table);
  }
  get_value(r);
  if (lua_istable(L, -1)) lua_setmetatable(L, table);
  else lua_pop(L, 1);
}

/* Pushes one value; false (and nothing pushed) at an END. */
static bool get_value(reader *r) {
  lua_State *L = r->L;
  size_t n;
  const char *s;
  luaL_checkstack(L, 12, "message from a thread");
  enum tag tag = get_tag(r);
  switch (tag) {
    case END: return false;
    case FALSE:
    case TRUE: lua_pushboolean(L, tag == TRUE); break;
    case INTEGER: lua_pushinteger(L, get_integer(r)); break;
    case FLOAT: {
      lua_Number x;
      memcpy(&x, r->m->data + r->at, sizeof x);
      r->at += sizeof x;
      lua_pushnumber(L, x);
      break;
    }
    case STRING:
      s = get_text(r, &n);
      lua_pushlstring(L, s, n);
      break;
    case TABLE: get_table(r); break;
    case SEEN: lua_rawgeti(L, r->seen, get_integer(r)); break;
    case FUNCTION: get_function(r); break;
    case MODULE: get_name(r, false); break;
    case MEMBER: get_name(r, true); break;
    case TENSOR: {
      int i = (int)get_integer(r);
      ty_handle *h = ty_lua_push_empty(L);
      h->t = r->m->tensors[i];
      r->m->tensors[i] = NULL;
      break;
    }
    default: lua_pushnil(L);
  }
  return true;
}

int ty_message_unpack(lua_State *L, ty_message *m) {
  int top = lua_gettop(L);
  luaL_checkstack(L, 4, "message from a thread");
  ty_message **box = push_box(L, m);
  lua_newtable(L);
  reader r = { .L = L, .m = m, .seen = top + 2 };
  while (get_value(&r)) {}
  ty_message_free(m);
  *box = NULL;
  lua_remove(L, top + 1);
  lua_remove(L, top + 1);
  return lua_gettop(L) - top;
}
