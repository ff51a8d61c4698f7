/* ty.tokenizer: the native part, on which lua/tycho/tokenizer.lua stands. A tokenizer is a userdata with a table of
 * fields that Lua may fill (bos, eos, chat_template ...). */
#include "../tokenizer/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "../tycho.h"
#include "io.h"

static const char tokenizer_key, stream_key, trainer_key;

static void *check_object(lua_State *L, int index, const void *key, const char *name) {
  void *p = lua_touserdata(L, index);
  bool right = p && lua_getmetatable(L, index);
  if (right) {
    lua_rawgetp(L, LUA_REGISTRYINDEX, key);
    right = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
  }
  if (!right) ty_lua_refuse(L, index, lua_pushfstring(L, "a %s", name));
  return p;
}

static ty_tokenizer *check_tokenizer(lua_State *L, int index) {
  ty_tokenizer **t = check_object(L, index, &tokenizer_key, "tokenizer");
  if (!*t) ty_lua_refuse(L, index, "a tokenizer that is not closed");
  return *t;
}

static void release_bytes(void *p) { ty_bytes_free(p); }

/* ---- making ---- */

static int push_tokenizer(lua_State *L, const char *name, const char *text, size_t size) {
  ty_tokenizer **t = lua_newuserdatauv(L, sizeof *t, 1);
  *t = NULL;
  lua_newtable(L);
  lua_setiuservalue(L, -2, 1);
  lua_rawgetp(L, LUA_REGISTRYINDEX, &tokenizer_key);
  lua_setmetatable(L, -2);
  *t = ty_tokenizer_read(name, text, size);
  return *t ? 1 : ty_lua_error(L);
}

/* parse(text [, name]) -> tokenizer */
static int parse(lua_State *L) {
  size_t size;
  const char *text = ty_lua_check_lstring(L, 1, &size), *name = ty_lua_opt_string(L, 2, "tokenizer.json");
  return push_tokenizer(L, name, text, size);
}

/* read(path) -> tokenizer */
static int read_file(lua_State *L) {
  const char *path = ty_io_path(L, 1);
  ty_bytes *bytes = ty_io_box(L, sizeof *bytes, release_bytes);
  if (!ty_file_read(path, (size_t)1 << 30, bytes)) return ty_lua_error(L);
  push_tokenizer(L, path, (const char *)bytes->data, bytes->size);
  ty_io_unbox(bytes);
  return 1;
}

static int tokenizer_gc(lua_State *L) {
  ty_tokenizer **t = lua_touserdata(L, 1);
  ty_tokenizer_free(*t);
  *t = NULL;
  return 0;
}

/* ---- encoding ---- */

static void release_encoding(void *p) { ty_encoding_free(p); }

/* Reads the options at `index`; `also`: what this function takes besides. */
static ty_encode_options encode_options(lua_State *L, int index, const char *const *names) {
  ty_io_options(L, index, names);
  const char *side = ty_io_choice(L, index, "truncate", "right");
  if (strcmp(side, "right") != 0 && strcmp(side, "left") != 0)
    luaL_error(L, "option truncate: expected \"right\" or \"left\", got \"%s\"", side);
  return (ty_encode_options){
    .special = ty_io_flag(L, index, "special", true),
    .plain = ty_io_flag(L, index, "plain", false),
    .spans = ty_io_flag(L, index, "offsets", false),
    .most = (uint32_t)ty_io_count(L, index, "max_length", 0, UINT32_MAX),
    .cut_left = side[0] == 'l',
  };
}

static void push_ids(lua_State *L, const uint32_t *ids, size_t count) {
  const int64_t size = (int64_t)count;
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_tensor_new(TY_CPU, TY_I64, 1, &size);
  if (!h->t) ty_lua_error(L);
  int64_t *p = h->t->v.data;
  for (size_t i = 0; i < count; i++) p[i] = ids[i];
}

static void push_types(lua_State *L, const ty_encoding *e) {
  const int64_t size = (int64_t)e->count;
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_tensor_new(TY_CPU, TY_I64, 1, &size);
  if (!h->t) ty_lua_error(L);
  int64_t *p = h->t->v.data;
  for (size_t i = 0; i < e->count; i++) p[i] = e->types[i];
}

static void push_spans(lua_State *L, const ty_encoding *e) {
  const int64_t size[2] = { (int64_t)e->count, 2 };
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_tensor_new(TY_CPU, TY_I64, 2, size);
  if (!h->t) ty_lua_error(L);
  int64_t *p = h->t->v.data;
  for (size_t i = 0; i < e->count; i++) p[2 * i] = e->spans[i].begin, p[2 * i + 1] = e->spans[i].end;
}

/* tokenizer:encode(text [, options]) -> ids [, { offsets =, types = }] */
static int encode(lua_State *L) {
  static const char *const names[] = { "special", "plain", "offsets", "types", "max_length", "truncate", "pair", NULL };
  size_t size, pair_size = 0;
  ty_tokenizer *t = check_tokenizer(L, 1);
  const char *text = ty_lua_check_lstring(L, 2, &size);
  lua_settop(L, 3);
  ty_encode_options o = encode_options(L, 3, names);
  bool types = ty_io_flag(L, 3, "types", false);
  const char *pair = ty_io_choice(L, 3, "pair", NULL);
  if (pair) { /* again, for its length: it may hold NUL */
    lua_getfield(L, 3, "pair");
    pair = lua_tolstring(L, -1, &pair_size);
  }
  ty_encoding *e = ty_io_box(L, sizeof *e, release_encoding);
  ty_lua_poll(L);
  if (!ty_tokenizer_encode(t, text, size, pair, pair_size, &o, e)) return ty_lua_error(L);
  push_ids(L, e->ids, e->count);
  int results = 1;
  if (o.spans || types) {
    lua_createtable(L, 0, 2);
    if (o.spans) push_spans(L, e), lua_setfield(L, -2, "offsets");
    if (types) push_types(L, e), lua_setfield(L, -2, "types");
    results = 2;
  }
  ty_io_unbox(e);
  return results;
}

typedef struct batch {
  const char **text;
  size_t *size;
  ty_encoding *out;
  size_t count;
} batch;

static void release_batch(void *p) {
  batch *b = p;
  for (size_t i = 0; b->out && i < b->count; i++) ty_encoding_free(&b->out[i]);
  free(b->out);
  free(b->text);
  free(b->size);
}

/* The list of strings at `index`, which stay its own. */
static batch *check_texts(lua_State *L, int index) {
  ty_lua_check_type(L, index, LUA_TTABLE);
  batch *b = ty_io_box(L, sizeof *b, release_batch);
  b->count = lua_rawlen(L, index);
  b->text = malloc((b->count + 1) * sizeof *b->text);
  b->size = malloc((b->count + 1) * sizeof *b->size);
  b->out = calloc(b->count + 1, sizeof *b->out);
  if (!b->text || !b->size || !b->out) luaL_error(L, "no memory for %I texts", (LUAI_UACINT)b->count);
  for (size_t i = 0; i < b->count; i++) {
    if (lua_rawgeti(L, index, (lua_Integer)i + 1) != LUA_TSTRING)
      luaL_error(L, "%s: text %I: expected a string, got a %s", ty_lua_function_name(L), (LUAI_UACINT)i + 1,
                 ty_lua_typename(L, -1));
    b->text[i] = lua_tolstring(L, -1, &b->size[i]);
    lua_pop(L, 1);
  }
  return b;
}

/* encode_texts(tokenizer, texts, options) -> { ids ... }: tensors, each as long as it is */
static int encode_texts(lua_State *L) {
  static const char *const names[] = { "special", "plain", "max_length", "truncate", NULL };
  ty_tokenizer *t = check_tokenizer(L, 1);
  lua_settop(L, 3);
  ty_encode_options o = encode_options(L, 3, names);
  batch *b = check_texts(L, 2);
  ty_lua_poll(L);
  if (!ty_tokenizer_encode_batch(t, b->text, b->size, b->count, &o, b->out)) return ty_lua_error(L);
  lua_createtable(L, (int)b->count, 0);
  for (size_t i = 0; i < b->count; i++) {
    push_ids(L, b->out[i].ids, b->out[i].count);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  ty_io_unbox(b);
  return 1;
}

/* encode_padded(tokenizer, texts, options, pad_id, left, multiple, length) -> ids, mask: [texts, longest], padded to a
 * multiple, or to `length` unless that is 0 */
static int encode_padded(lua_State *L) {
  static const char *const names[] = { "special", "plain", "max_length", "truncate", NULL };
  ty_tokenizer *t = check_tokenizer(L, 1);
  int64_t pad = ty_lua_check_integer(L, 4), multiple = ty_lua_check_integer(L, 6), length = ty_lua_check_integer(L, 7);
  bool left = lua_toboolean(L, 5);
  ty_encode_options o = encode_options(L, 3, names);
  batch *b = check_texts(L, 2);
  ty_lua_poll(L);
  if (!ty_tokenizer_encode_batch(t, b->text, b->size, b->count, &o, b->out)) return ty_lua_error(L);
  size_t longest = 0;
  for (size_t i = 0; i < b->count; i++)
    if (b->out[i].count > longest) longest = b->out[i].count;
  if (length && longest > (size_t)length)
    return luaL_error(L, "encode_batch: a text has %I tokens, which do not fit length = %I; max_length cuts them",
                      (LUAI_UACINT)longest, (LUAI_UACINT)length);
  if (length) longest = (size_t)length;
  longest = (longest + (size_t)multiple - 1) / (size_t)multiple * (size_t)multiple;
  const int64_t size[2] = { (int64_t)b->count, (int64_t)longest };
  ty_handle *ids = ty_lua_push_empty(L), *mask = ty_lua_push_empty(L);
  ids->t = ty_tensor_new(TY_CPU, TY_I64, 2, size);
  mask->t = ids->t ? ty_tensor_new(TY_CPU, TY_BOOL, 2, size) : NULL;
  if (!mask->t) return ty_lua_error(L);
  for (size_t i = 0; i < b->count; i++) {
    int64_t *p = (int64_t *)ids->t->v.data + i * longest;
    uint8_t *m = (uint8_t *)mask->t->v.data + i * longest;
    size_t n = b->out[i].count, begin = left ? longest - n : 0;
    for (size_t k = 0; k < longest; k++) p[k] = pad, m[k] = 0;
    for (size_t k = 0; k < n; k++) p[begin + k] = b->out[i].ids[k], m[begin + k] = 1;
  }
  ty_io_unbox(b);
  return 2;
}

/* ---- decoding ---- */

typedef struct id_list {
  uint32_t *id;
  size_t count;
} id_list;

static void release_ids(void *p) { free(((id_list *)p)->id); }

static uint32_t one_id(lua_State *L, int64_t id) {
  if (id < 0 || id > UINT32_MAX - 1) luaL_error(L, "token id %I is not in the vocabulary", (LUAI_UACINT)id);
  return (uint32_t)id;
}

static int64_t element(const ty_tensor *t, int64_t i) {
  switch (ty_dtype_of(t)) {
    case TY_I64: return ((const int64_t *)t->v.data)[i];
    case TY_I32: return ((const int32_t *)t->v.data)[i];
    case TY_I16: return ((const int16_t *)t->v.data)[i];
    case TY_I8: return ((const int8_t *)t->v.data)[i];
    default: return ((const uint8_t *)t->v.data)[i];
  }
}

static void release_tensor(void *p) { ty_release(*(ty_tensor **)p); }

/* An integer, a list of integers or a tensor of them with one dimension; leaves boxes on the stack. */
static id_list *check_ids(lua_State *L, int index) {
  id_list *l = ty_io_box(L, sizeof *l, release_ids);
  ty_tensor *t = ty_lua_to(L, index);
  bool one = !t && lua_isinteger(L, index);
  if (!t && !one) ty_lua_check_type(L, index, LUA_TTABLE);
  if (t && (ty_is_float(ty_dtype_of(t)) || ty_dtype_of(t) == TY_BOOL || t->v.ndim > 1))
    ty_lua_refuse(L, index, "an integer, a list of integers or a 1-d tensor of integers");
  l->count = one ? 1 : t ? (size_t)t->v.count : lua_rawlen(L, index);
  l->id = malloc((l->count + 1) * sizeof *l->id);
  if (!l->id) luaL_error(L, "no memory for %I ids", (LUAI_UACINT)l->count);
  if (one) l->id[0] = one_id(L, lua_tointeger(L, index));
  if (t) {
    ty_tensor **host = ty_io_box(L, sizeof *host, release_tensor);
    *host = ty_host_tensor(t);
    if (!*host) ty_lua_error(L);
    for (size_t i = 0; i < l->count; i++) l->id[i] = one_id(L, element(*host, (int64_t)i));
    ty_io_unbox(host);
  } else if (!one) {
    for (size_t i = 0; i < l->count; i++) {
      int whole;
      lua_rawgeti(L, index, (lua_Integer)i + 1);
      lua_Integer id = lua_tointegerx(L, -1, &whole);
      if (!whole) luaL_error(L, "id %I: expected an integer, got %s", (LUAI_UACINT)i + 1, ty_lua_typename(L, -1));
      l->id[i] = one_id(L, id);
      lua_pop(L, 1);
    }
  }
  return l;
}

/* tokenizer:decode(ids [, { skip_special = true }]) -> text */
static int decode(lua_State *L) {
  static const char *const names[] = { "skip_special", NULL };
  ty_tokenizer *t = check_tokenizer(L, 1);
  lua_settop(L, 3);
  ty_io_options(L, 3, names);
  bool skip = ty_io_flag(L, 3, "skip_special", true); /* marks such as <|endoftext|> are no text */
  id_list *l = check_ids(L, 2);
  ty_bytes *out = ty_io_box(L, sizeof *out, release_bytes);
  if (!ty_tokenizer_decode(t, l->id, l->count, skip, out)) return ty_lua_error(L);
  lua_pushlstring(L, out->size ? (const char *)out->data : "", out->size);
  ty_io_unbox(out);
  ty_io_unbox(l);
  return 1;
}

/* tokenizer:stream([{ skip_special = true }]) -> stream */
static int stream(lua_State *L) {
  static const char *const names[] = { "skip_special", NULL };
  check_tokenizer(L, 1);
  lua_settop(L, 2);
  ty_io_options(L, 2, names);
  bool skip = ty_io_flag(L, 2, "skip_special", true); /* as decode() has it */
  ty_stream *s = lua_newuserdatauv(L, sizeof *s, 1);
  *s = (ty_stream){ .skip_special = skip };
  lua_pushvalue(L, 1);
  lua_setiuservalue(L, -2, 1);
  lua_rawgetp(L, LUA_REGISTRYINDEX, &stream_key);
  lua_setmetatable(L, -2);
  return 1;
}

static ty_tokenizer *stream_tokenizer(lua_State *L) {
  lua_getiuservalue(L, 1, 1);
  return check_tokenizer(L, -1);
}

/* stream:put(ids) -> text, which may be empty */
static int stream_put(lua_State *L) {
  ty_stream *s = check_object(L, 1, &stream_key, "stream of a tokenizer");
  lua_settop(L, 2);
  id_list *l = check_ids(L, 2);
  ty_bytes *out = ty_io_box(L, sizeof *out, release_bytes);
  if (!ty_stream_put(stream_tokenizer(L), s, l->id, l->count, out)) return ty_lua_error(L);
  lua_pushlstring(L, out->size ? (const char *)out->data : "", out->size);
  ty_io_unbox(out);
  ty_io_unbox(l);
  return 1;
}

/* stream:finish() -> what is left */
static int stream_finish(lua_State *L) {
  ty_stream *s = check_object(L, 1, &stream_key, "stream of a tokenizer");
  ty_bytes *out = ty_io_box(L, sizeof *out, release_bytes);
  if (!ty_stream_finish(stream_tokenizer(L), s, out)) return ty_lua_error(L);
  lua_pushlstring(L, out->size ? (const char *)out->data : "", out->size);
  ty_io_unbox(out);
  return 1;
}

static int stream_gc(lua_State *L) {
  ty_stream_free(lua_touserdata(L, 1));
  return 0;
}

/* ---- what it says of itself ---- */

/* tokenizer:id(token) -> id or nil */
static int id_of(lua_State *L) {
  size_t size;
  uint32_t id;
  ty_tokenizer *t = check_tokenizer(L, 1);
  const char *token = ty_lua_check_lstring(L, 2, &size);
  if (!ty_tokenizer_id(t, token, size, &id)) return 0;
  lua_pushinteger(L, id);
  return 1;
}

/* tokenizer:token(id) -> text, "special", "added" or nil; nil when there is no such id */
static int token_of(lua_State *L) {
  ty_token_info info;
  ty_tokenizer *t = check_tokenizer(L, 1);
  lua_Integer id = ty_lua_check_integer(L, 2);
  if (id < 0 || id >= UINT32_MAX || !ty_tokenizer_token(t, (uint32_t)id, &info)) return 0;
  lua_pushlstring(L, info.text, info.size);
  if (!info.added) return 1;
  lua_pushstring(L, info.special ? "special" : "added");
  return 2;
}

/* tokenizer:save(path): the tokenizer.json */
static int save(lua_State *L) {
  size_t size;
  const char *text = ty_tokenizer_text(check_tokenizer(L, 1), &size);
  return ty_file_write(ty_io_path(L, 2), text, size) ? 0 : ty_lua_error(L);
}

/* tokenizer:json() -> the text of its tokenizer.json */
static int json(lua_State *L) {
  size_t size;
  const char *text = ty_tokenizer_text(check_tokenizer(L, 1), &size);
  lua_pushlstring(L, text, size);
  return 1;
}

/* fields(tokenizer) -> the table of its fields */
static int fields(lua_State *L) {
  check_tokenizer(L, 1);
  lua_getiuservalue(L, 1, 1);
  return 1;
}

/* Upvalue 1: the methods. Then size, model, pad_id and the fields that Lua has set. */
static int tokenizer_index(lua_State *L) {
  ty_tokenizer *t = check_tokenizer(L, 1);
  bool left;
  lua_settop(L, 2);
  lua_pushvalue(L, 2);
  if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL) return 1;
  lua_getiuservalue(L, 1, 1);
  lua_pushvalue(L, 2);
  if (lua_rawget(L, -2) != LUA_TNIL) return 1;
  const char *key = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "";
  if (strcmp(key, "size") == 0) lua_pushinteger(L, ty_tokenizer_size(t));
  else if (strcmp(key, "model") == 0) lua_pushstring(L, ty_tokenizer_model(t));
  else if (strcmp(key, "pad") == 0 && ty_tokenizer_pad_id(t, &left) >= 0)
    lua_pushinteger(L, ty_tokenizer_pad_id(t, &left));
  else if (strcmp(key, "pad_side") == 0) ty_tokenizer_pad_id(t, &left), lua_pushstring(L, left ? "left" : "right");
  else lua_pushnil(L);
  return 1;
}

static int tokenizer_text(lua_State *L) {
  ty_tokenizer *t = check_tokenizer(L, 1);
  lua_pushfstring(L, "tokenizer: %s, %I tokens", ty_tokenizer_model(t), (LUAI_UACINT)ty_tokenizer_size(t));
  return 1;
}

/* ---- training ---- */

static ty_trainer *check_trainer(lua_State *L) {
  ty_trainer **t = check_object(L, 1, &trainer_key, "trainer of a tokenizer");
  if (!*t) luaL_error(L, "the trainer is closed");
  return *t;
}

static int trainer_gc(lua_State *L) {
  ty_trainer **t = lua_touserdata(L, 1);
  ty_trainer_free(*t);
  *t = NULL;
  return 0;
}

/* trainer(vocabulary, pattern, frequency, longest, prefix_space, special) -> trainer */
static int trainer(lua_State *L) {
  ty_train_options o = {
    .vocabulary = (uint32_t)ty_lua_check_integer(L, 1),
    .pattern = ty_lua_check_string(L, 2),
    .frequency = (uint64_t)ty_lua_check_integer(L, 3),
    .longest = (uint32_t)ty_lua_check_integer(L, 4),
    .prefix_space = lua_toboolean(L, 5),
  };
  lua_settop(L, 6);
  batch *special = check_texts(L, 6);
  o.special = special->text, o.special_size = special->size, o.special_count = special->count;
  ty_trainer **t = lua_newuserdatauv(L, sizeof *t, 0);
  *t = NULL;
  lua_rawgetp(L, LUA_REGISTRYINDEX, &trainer_key);
  lua_setmetatable(L, -2);
  *t = ty_trainer_new(&o);
  return *t ? 1 : ty_lua_error(L);
}

/* trainer:add(texts) */
static int trainer_add(lua_State *L) {
  ty_trainer *t = check_trainer(L);
  batch *b = check_texts(L, 2);
  if (!ty_trainer_add(t, b->text, b->size, b->count)) return ty_lua_error(L);
  ty_io_unbox(b);
  return 0;
}

/* trainer:add_file(path) */
static int trainer_add_file(lua_State *L) {
  return ty_trainer_add_file(check_trainer(L), ty_io_path(L, 2)) ? 0 : ty_lua_error(L);
}

/* trainer:finish() -> the text of a tokenizer.json */
static int trainer_finish(lua_State *L) {
  ty_trainer *t = check_trainer(L);
  ty_bytes *out = ty_io_box(L, sizeof *out, release_bytes);
  if (!ty_trainer_finish(t, out)) return ty_lua_error(L);
  lua_pushlstring(L, (const char *)out->data, out->size);
  ty_io_unbox(out);
  return 1;
}

/* ---- opening ---- */

static void add_class(lua_State *L, const void *key, const char *name, lua_CFunction gc, const luaL_Reg *methods) {
  lua_createtable(L, 0, 4);
  lua_pushstring(L, name), lua_setfield(L, -2, "__name");
  lua_pushcfunction(L, gc), lua_setfield(L, -2, "__gc");
  lua_newtable(L);
  luaL_setfuncs(L, methods, 0);
  lua_setfield(L, -2, "__index");
  lua_rawsetp(L, LUA_REGISTRYINDEX, key);
}

int ty_lua_open_tokenizer(lua_State *L) {
  add_class(L, &stream_key, "stream of a tokenizer", stream_gc,
            (const luaL_Reg[]){ { "put", stream_put }, { "finish", stream_finish }, { NULL, NULL } });
  add_class(
      L, &trainer_key, "trainer of a tokenizer", trainer_gc,
      (const luaL_Reg[]){
          { "add", trainer_add }, { "add_file", trainer_add_file }, { "finish", trainer_finish }, { NULL, NULL } });
  add_class(L, &tokenizer_key, "tokenizer", tokenizer_gc,
            (const luaL_Reg[]){ { "encode", encode },
                                { "decode", decode },
                                { "stream", stream },
                                { "id", id_of },
                                { "token", token_of },
                                { "save", save },
                                { "json", json },
                                { NULL, NULL } });
  lua_rawgetp(L, LUA_REGISTRYINDEX, &tokenizer_key);
  lua_getfield(L, -1, "__index");
  lua_pushvalue(L, -1);
  lua_pushcclosure(L, tokenizer_index, 1);
  lua_setfield(L, -3, "__index");
  lua_pushcfunction(L, tokenizer_text);
  lua_setfield(L, -3, "__tostring");
  lua_newtable(L); /* the module */
  lua_insert(L, -2);
  lua_setfield(L, -2, "methods");
  lua_remove(L, -2);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "read", read_file },
                                    { "parse", parse },
                                    { "fields", fields },
                                    { "encode_texts", encode_texts },
                                    { "encode_padded", encode_padded },
                                    { "trainer", trainer },
                                    { NULL, NULL } },
                0);
  return 1;
}
