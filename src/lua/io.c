/* ty.io: boxes for what the core holds while Lua may raise, options, and the readers and writers of tensors. */
#include "io.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ---- boxes ---- */

typedef struct box {
  void (*release)(void *payload);
  max_align_t payload[];
} box;

static const char box_key;

void *ty_io_box(lua_State *L, size_t size, void (*release)(void *payload)) {
  box *b = lua_newuserdatauv(L, sizeof *b + size, 0);
  memset(b->payload, 0, size);
  b->release = release;
  lua_rawgetp(L, LUA_REGISTRYINDEX, &box_key);
  lua_setmetatable(L, -2);
  return b->payload;
}

static void empty_box(box *b) {
  void (*release)(void *) = b->release;
  b->release = NULL;
  if (release) release(b->payload);
}

void ty_io_unbox(void *payload) { empty_box((box *)(void *)((char *)payload - offsetof(box, payload))); }

static int box_gc(lua_State *L) {
  empty_box(lua_touserdata(L, 1));
  return 0;
}

static void release_bundle(void *p) { ty_bundle_free(p); }
static void release_bytes(void *p) { ty_bytes_free(p); }
static void release_tensor(void *p) { ty_release(*(ty_tensor **)p); }

/* ---- arguments ---- */

const char *ty_io_path(lua_State *L, int index) {
  size_t size;
  const char *path = ty_lua_check_lstring(L, index, &size);
  if (size == 0 || strlen(path) != size) ty_lua_refuse(L, index, "a path, with characters and no NUL among them");
  return path;
}

bool ty_io_options(lua_State *L, int index, const char *const *names) {
  if (lua_isnoneornil(L, index)) return false;
  ty_lua_check_type(L, index, LUA_TTABLE);
  lua_pushnil(L);
  while (lua_next(L, index)) {
    bool known = false;
    const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : NULL;
    for (int i = 0; key && names[i]; i++) known |= strcmp(names[i], key) == 0;
    if (!known) {
      luaL_Buffer b;
      lua_pop(L, 1);
      key = luaL_tolstring(L, -1, NULL);
      luaL_buffinit(L, &b);
      for (int i = 0; names[i]; i++) {
        luaL_addstring(&b, i ? ", " : "");
        luaL_addstring(&b, names[i]);
      }
      luaL_pushresult(&b);
      const char *known_names = lua_tostring(L, -1);
      luaL_error(L, "%s: unknown option %s; options here: %s", ty_lua_function_name(L), key, known_names);
    }
    lua_pop(L, 1);
  }
  return true;
}

bool ty_io_flag(lua_State *L, int index, const char *name, bool otherwise) {
  if (!lua_istable(L, index)) return otherwise;
  int type = lua_getfield(L, index, name);
  if (type != LUA_TNIL && type != LUA_TBOOLEAN)
    luaL_error(L, "%s: option %s: expected true or false, got a %s", ty_lua_function_name(L), name,
               lua_typename(L, type));
  bool value = type == LUA_TNIL ? otherwise : lua_toboolean(L, -1);
  lua_pop(L, 1);
  return value;
}

int64_t ty_io_count(lua_State *L, int index, const char *name, int64_t otherwise, int64_t most) {
  if (!lua_istable(L, index)) return otherwise;
  int whole, type = lua_getfield(L, index, name);
  int64_t value = lua_tointegerx(L, -1, &whole);
  if (type == LUA_TNIL) value = otherwise;
  else if (!whole || value < 0 || value > most) {
    const char *got = luaL_tolstring(L, -1, NULL);
    luaL_error(L, "%s: option %s: expected an integer in [0, %I], got %s", ty_lua_function_name(L), name,
               (LUAI_UACINT)most, got);
  }
  lua_pop(L, 1);
  return value;
}

const char *ty_io_choice(lua_State *L, int index, const char *name, const char *otherwise) {
  if (!lua_istable(L, index)) return otherwise;
  int type = lua_getfield(L, index, name);
  if (type != LUA_TNIL && type != LUA_TSTRING)
    luaL_error(L, "%s: option %s: expected a string, got a %s", ty_lua_function_name(L), name, lua_typename(L, type));
  const char *value = type == LUA_TNIL ? otherwise : lua_tostring(L, -1);
  lua_pop(L, 1);
  return value;
}

static ty_dtype check_dtype(lua_State *L, const char *name) {
  ty_dtype dtype;
  if (!ty_dtype_parse(name, &dtype)) luaL_error(L, "%s: unknown dtype \"%s\"", ty_lua_function_name(L), name);
  return dtype;
}

/* The list of sizes on the top of the stack; pops it. */
static int check_shape(lua_State *L, int64_t *size) {
  if (!lua_istable(L, -1)) {
    const char *got = ty_lua_typename(L, -1);
    luaL_error(L, "%s: shape: expected a list of sizes, got a %s", ty_lua_function_name(L), got);
  }
  lua_Unsigned n = lua_rawlen(L, -1);
  if (n > TY_MAX_DIMS) luaL_error(L, "shape: at most %d dimensions, got %I", TY_MAX_DIMS, (LUAI_UACINT)n);
  for (int i = 0; i < (int)n; i++) {
    int whole;
    lua_rawgeti(L, -1, i + 1);
    size[i] = lua_tointegerx(L, -1, &whole);
    if (!whole || size[i] < 0)
      luaL_error(L, "shape: entry %d: expected a size from 0 up, got %s", i + 1, luaL_tolstring(L, -1, NULL));
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  return (int)n;
}

/* Before core calls that allocate tensors. */
static void begin(lua_State *L) {
  ty_lua_current = L;
  ty_lua_poll(L);
}

/* ---- bundles: tables of tensors ---- */

void ty_io_tensors(lua_State *L, int index, ty_bundle *b) {
  ty_lua_check_type(L, index, LUA_TTABLE);
  size_t count = 0;
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) count++;
  *b = (ty_bundle){ .tensors = lua_newuserdatauv(L, (count + 1) * sizeof(ty_named), 0) };
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    if (b->count == count)
      luaL_error(L, "argument %d: the table changed while it was read", index); /* by a finalizer */
    ty_named *t = &b->tensors[b->count++];
    if (lua_type(L, -2) != LUA_TSTRING)
      luaL_error(L, "%s: argument %d: expected strings as names, got a key of type %s", ty_lua_function_name(L), index,
                 luaL_typename(L, -2));
    t->name = lua_tolstring(L, -2, &t->name_size);
    t->tensor = ty_lua_to(L, -1);
    if (!t->tensor)
      luaL_error(L, "%s: argument %d: \"%s\": expected a tensor, got a %s%s", ty_lua_function_name(L), index, t->name,
                 ty_lua_typename(L, -1),
                 lua_isuserdata(L, -1) || lua_isstring(L, -1) || lua_istable(L, -1)
                     ? "; train.save_checkpoint keeps modules, optimizers and numbers together"
                     : "");
  }
}

static void check_notes(lua_State *L, int index, ty_bundle *b) {
  if (lua_isnoneornil(L, index)) return;
  ty_lua_check_type(L, index, LUA_TTABLE);
  size_t count = 0;
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) count++;
  b->notes = lua_newuserdatauv(L, (count + 1) * sizeof(ty_note), 0);
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    if (b->note_count == count) luaL_error(L, "argument %d: the table changed while it was read", index);
    ty_note *n = &b->notes[b->note_count++];
    if (lua_type(L, -2) != LUA_TSTRING || lua_type(L, -1) != LUA_TSTRING)
      luaL_error(L, "%s: argument %d: expected metadata { string = string }, got [%s] = %s", ty_lua_function_name(L),
                 index, luaL_typename(L, -2), luaL_typename(L, -1));
    n->key = lua_tolstring(L, -2, &n->key_size);
    n->value = lua_tolstring(L, -1, &n->value_size);
  }
}

/* Notes come in the order of lua_next(), which changes from run to run; files should not. */
static int by_key(const void *pa, const void *pb) {
  const ty_note *a = pa, *b = pb;
  int c = memcmp(a->key, b->key, a->key_size < b->key_size ? a->key_size : b->key_size);
  return c ? c : (a->key_size > b->key_size) - (a->key_size < b->key_size);
}

static int push_bundle(lua_State *L, ty_bundle *b) {
  lua_createtable(L, 0, b->count < 1 << 20 ? (int)b->count : 1 << 20);
  for (size_t i = 0; i < b->count; i++) {
    lua_pushlstring(L, b->tensors[i].name, b->tensors[i].name_size);
    ty_lua_push_empty(L)->t = ty_retain(b->tensors[i].tensor);
    lua_rawset(L, -3);
  }
  lua_newtable(L);
  for (size_t i = 0; i < b->note_count; i++) {
    lua_pushlstring(L, b->notes[i].key, b->notes[i].key_size);
    lua_pushlstring(L, b->notes[i].value, b->notes[i].value_size);
    lua_rawset(L, -3);
  }
  ty_io_unbox(b);
  return 2;
}

static const char *const mmap_options[] = { "mmap", NULL };

static int load_bundle(lua_State *L, bool (*read)(ty_mapping *, const char *, bool, ty_bundle *)) {
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 2, mmap_options);
  bool copy = !ty_io_flag(L, 2, "mmap", true);
  ty_bundle *b = ty_io_box(L, sizeof *b, release_bundle);
  begin(L);
  ty_mapping *m = ty_mapping_open(path);
  bool ok = m && read(m, path, copy, b);
  ty_mapping_release(m);
  return ok ? push_bundle(L, b) : ty_lua_error(L);
}

/* load_safetensors(path [, { mmap = true }]) -> { name = tensor }, { key = text } */
static int load_safetensors(lua_State *L) { return load_bundle(L, ty_safetensors_read); }

/* load_torch(path [, { mmap = true }]) -> { name = tensor }, { key = text } */
static int load_torch(lua_State *L) { return load_bundle(L, ty_torch_read); }

/* save_safetensors(path, { name = tensor } [, { key = text } [, { crc32 = false, places = false, rate = none }]])
 * [-> integer] [-> { name = { at, bytes, crc32 } }]: the file's CRC-32, and where the tensors lie in it, as they are
 * wanted; made while the bytes are written. rate: bytes a second at most. */
static int save_safetensors(lua_State *L) {
  static const char *const options[] = { "crc32", "places", "rate", NULL };
  ty_bundle b;
  uint32_t crc;
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 4, options);
  bool summed = ty_io_flag(L, 4, "crc32", false), placed = ty_io_flag(L, 4, "places", false);
  int64_t rate = ty_io_count(L, 4, "rate", 0, INT64_MAX);
  lua_settop(L, 3);
  ty_io_tensors(L, 2, &b);
  check_notes(L, 3, &b);
  if (b.note_count) qsort(b.notes, b.note_count, sizeof *b.notes, by_key);
  ty_place *places = placed ? lua_newuserdatauv(L, (b.count + 1) * sizeof *places, 0) : NULL;
  begin(L);
  if (!ty_safetensors_write(path, &b, (double)rate, summed ? &crc : NULL, places)) return ty_lua_error(L);
  if (summed) lua_pushinteger(L, crc);
  if (!placed) return summed;
  lua_createtable(L, 0, b.count < 1 << 20 ? (int)b.count : 1 << 20);
  for (size_t i = 0; i < b.count; i++) {
    lua_pushlstring(L, places[i].name, places[i].name_size);
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, (lua_Integer)places[i].at), lua_setfield(L, -2, "at");
    lua_pushinteger(L, (lua_Integer)places[i].bytes), lua_setfield(L, -2, "bytes");
    lua_pushinteger(L, places[i].crc), lua_setfield(L, -2, "crc32");
    lua_rawset(L, -3);
  }
  return summed + 1;
}

/* load_npz(path [, { mmap = true, max = by size }]) -> { name = tensor } */
static int load_npz(lua_State *L) {
  static const char *const options[] = { "mmap", "max", NULL };
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 2, options);
  bool copy = !ty_io_flag(L, 2, "mmap", true);
  int64_t most = ty_io_count(L, 2, "max", -1, INT64_MAX);
  ty_bundle *b = ty_io_box(L, sizeof *b, release_bundle);
  begin(L);
  ty_mapping *m = ty_mapping_open(path);
  bool ok = m && ty_npz_read(m, path, copy, most, b);
  ty_mapping_release(m);
  if (!ok) return ty_lua_error(L);
  push_bundle(L, b);
  lua_pop(L, 1);
  return 1;
}

/* save_npz(path, { name = tensor } [, { compress = false }]) */
static int save_npz(lua_State *L) {
  static const char *const options[] = { "compress", NULL };
  ty_bundle b;
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 3, options);
  bool compress = ty_io_flag(L, 3, "compress", false);
  ty_io_tensors(L, 2, &b);
  begin(L);
  return ty_npz_write(path, &b, compress) ? 0 : ty_lua_error(L);
}

/* load_npy(path [, { mmap = true }]) -> tensor */
static int load_npy(lua_State *L) {
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 2, mmap_options);
  bool copy = !ty_io_flag(L, 2, "mmap", true);
  begin(L);
  ty_handle *h = ty_lua_push_empty(L);
  ty_mapping *m = ty_mapping_open(path);
  h->t = m ? ty_npy_read(m, path, copy) : NULL;
  ty_mapping_release(m);
  return h->t ? 1 : ty_lua_error(L);
}

/* save_npy(path, tensor) */
static int save_npy(lua_State *L) {
  const char *path = ty_io_path(L, 1);
  ty_tensor *t = ty_lua_check(L, 2);
  begin(L);
  return ty_npy_write(path, t) ? 0 : ty_lua_error(L);
}

/* ---- raw bytes ---- */

/* map(path [, { dtype = "u8", shape = {...}, offset = 0 }]) -> tensor: a file of bare numbers, mapped. Without a
 * shape: all that is there, one dimension. */
static int map(lua_State *L) {
  static const char *const options[] = { "dtype", "shape", "offset", NULL };
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 2, options);
  ty_dtype dtype = check_dtype(L, ty_io_choice(L, 2, "dtype", "u8"));
  uint64_t offset = (uint64_t)ty_io_count(L, 2, "offset", 0, INT64_MAX), bytes;
  int64_t size[TY_MAX_DIMS];
  int ndim = -1;
  if (lua_istable(L, 2) && lua_getfield(L, 2, "shape") != LUA_TNIL) ndim = check_shape(L, size);
  begin(L);
  ty_handle *h = ty_lua_push_empty(L);
  ty_mapping *m = ty_mapping_open(path);
  if (!m) return ty_lua_error(L);
  if (offset > m->size)
    ty_fail(TY_EIO, "map: %s has %zu bytes, offset %llu is past its end", ty_quote_text(path), m->size,
            (unsigned long long)offset);
  else {
    uint64_t left = m->size - offset;
    if (ndim < 0) {
      ndim = 1;
      size[0] = (int64_t)(left / ty_dtype_size[dtype]);
      left -= left % ty_dtype_size[dtype];
    }
    if (!ty_count_bytes(dtype, ndim, size, &bytes) || bytes > left)
      ty_fail(TY_EIO, "map: %s has %llu bytes after offset %llu, too few for %s %s", ty_quote_text(path),
              (unsigned long long)left, (unsigned long long)offset, ty_shape_text(ndim, size), ty_dtype_name[dtype]);
    else h->t = ty_mapping_tensor(m, (size_t)offset, dtype, ndim, size, false);
  }
  ty_mapping_release(m);
  return h->t ? 1 : ty_lua_error(L);
}

/* from_bytes(string, dtype [, shape]) -> tensor, little-endian */
static int from_bytes(lua_State *L) {
  size_t have;
  const char *data = ty_lua_check_lstring(L, 1, &have);
  ty_dtype dtype = check_dtype(L, ty_lua_check_string(L, 2));
  int64_t size[TY_MAX_DIMS];
  int ndim = 1;
  uint64_t want = 0;
  size[0] = (int64_t)(have / ty_dtype_size[dtype]);
  lua_settop(L, 3);
  if (!lua_isnil(L, 3)) ndim = check_shape(L, size);
  begin(L);
  ty_handle *h = ty_lua_push_empty(L);
  if (!ty_count_bytes(dtype, ndim, size, &want) || want != have)
    ty_fail(TY_EINVAL, "from_bytes: %zu bytes came, %s %s needs %llu", have, ty_shape_text(ndim, size),
            ty_dtype_name[dtype], (unsigned long long)want);
  else h->t = ty_tensor_new(TY_CPU, dtype, ndim, size);
  if (!h->t) return ty_lua_error(L);
  if (have) memcpy(h->t->v.data, data, have);
  uint8_t *truth = h->t->v.data;
  for (size_t i = 0; dtype == TY_BOOL && i < have; i++) truth[i] = truth[i] != 0;
  return 1;
}

/* to_bytes(tensor) -> string, little-endian, C order */
static int to_bytes(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1), **host = ty_io_box(L, sizeof *host, release_tensor);
  begin(L);
  *host = ty_host_tensor(t);
  if (!*host) return ty_lua_error(L);
  lua_pushlstring(L, (*host)->v.count ? (*host)->v.data : "", (size_t)ty_view_bytes(&(*host)->v));
  ty_io_unbox(host);
  return 1;
}

/* ---- tables of numbers ---- */

/* load_csv(path [, { header = "auto", delimiter = ",", skip = 0, missing = "error", dtype = "f32", max = by size }])
 * -> tensor, names or nil */
static int load_csv(lua_State *L) {
  static const char *const names[] = { "header", "delimiter", "skip", "missing", "dtype", "max", NULL };
  const char *path = ty_io_path(L, 1);
  ty_csv_options o = { .header = -1 };
  ty_io_options(L, 2, names);
  const char *delimiter = ty_io_choice(L, 2, "delimiter", ","), *missing = ty_io_choice(L, 2, "missing", "error");
  if (strlen(delimiter) != 1 || strchr("\"\n\r+-.0123456789eE", delimiter[0]))
    luaL_error(L, "option delimiter: expected one character, got \"%s\"", delimiter);
  if (strcmp(missing, "error") != 0 && strcmp(missing, "nan") != 0)
    luaL_error(L, "option missing: expected \"error\" or \"nan\", got \"%s\"", missing);
  o.delimiter = delimiter[0];
  o.missing_nan = missing[0] == 'n';
  o.skip = ty_io_count(L, 2, "skip", 0, INT64_MAX);
  o.dtype = check_dtype(L, ty_io_choice(L, 2, "dtype", "f32"));
  if (o.dtype != TY_F32 && o.dtype != TY_F64)
    luaL_error(L, "option dtype: expected f32 or f64, got %s", ty_dtype_name[o.dtype]);
  if (lua_istable(L, 2) && lua_getfield(L, 2, "header") != LUA_TNIL) {
    bool automatic = lua_type(L, -1) == LUA_TSTRING && strcmp(lua_tostring(L, -1), "auto") == 0;
    if (!automatic && !lua_isboolean(L, -1))
      luaL_error(L, "option header: expected true, false or \"auto\", got %s", luaL_tolstring(L, -1, NULL));
    o.header = automatic ? -1 : lua_toboolean(L, -1);
  }
  int64_t most = ty_io_count(L, 2, "max", -1, PTRDIFF_MAX);
  ty_bytes *header = ty_io_box(L, sizeof *header, release_bytes);
  begin(L);
  ty_handle *h = ty_lua_push_empty(L);
  ty_bytes text = { 0 };
  ty_text *file = ty_text_open(path);
  if (file && ty_text_rest(file, most, TY_TEXT_FLOOR, &text))
    h->t = ty_csv_parse((const char *)text.data, text.size, path, &o, header);
  ty_text_close(file);
  ty_bytes_free(&text);
  if (!h->t) return ty_lua_error(L);
  if (!header->size) return 1;
  lua_newtable(L);
  const char *p = (const char *)header->data, *end = p + header->size;
  for (int i = 1; p < end; i++, p += strlen(p) + 1) {
    lua_pushstring(L, p);
    lua_rawseti(L, -2, i);
  }
  ty_io_unbox(header);
  return 2;
}

/* ---- by content and by name ---- */

static bool has_ending(const char *path, const char *ending) {
  size_t n = strlen(path), m = strlen(ending);
  return n >= m && strcmp(path + n - m, ending) == 0;
}

/* load(path, ...): by the first bytes, else by the ending. Tensors of .safetensors, .gguf, .npz and PyTorch's .pt, .pth,
 * .bin and .ckpt come as a table (and the metadata), .npy and images as a tensor, .csv as a tensor and names, .json as
 * Lua values. */
static int load(lua_State *L) {
  static const char *const torch_endings[] = { ".pt", ".pth", ".bin", ".ckpt" };
  const char *path = ty_io_path(L, 1);
  if (has_ending(path, ".json") || has_ending(path, ".json.gz")) return ty_io_load_json(L);
  if (has_ending(path, ".csv") || has_ending(path, ".csv.gz")) return load_csv(L);
  if (has_ending(path, ".safetensors")) return load_safetensors(L);
  for (size_t i = 0; i < sizeof torch_endings / sizeof *torch_endings; i++)
    if (has_ending(path, torch_endings[i])) return load_torch(L);
  uint8_t magic[12];
  size_t size;
  if (!ty_file_peek(path, magic, sizeof magic, &size)) return ty_lua_error(L);
  if (size >= 6 && memcmp(magic, "\x93NUMPY", 6) == 0) return load_npy(L);
  if (size >= 4 && (memcmp(magic, "PK\3\4", 4) == 0 || memcmp(magic, "PK\5\6", 4) == 0)) return load_npz(L);
  if (size >= 3 && (memcmp(magic, "\x89PN", 3) == 0 || memcmp(magic, "\xff\xd8\xff", 3) == 0))
    return ty_io_load_image(L);
  if (size >= 12 && memcmp(magic, "RIFF", 4) == 0 && memcmp(magic + 8, "WEBP", 4) == 0) return ty_io_load_image(L);
  if (size >= 4 && memcmp(magic, "GGUF", 4) == 0) return ty_io_load_gguf(L);
  return load_safetensors(L);
}

/* save(path, value, ...), or PyTorch's save(value, path): by the ending: .safetensors, .gguf, .npz, .npy, .png, .webp, .json */
static int save(lua_State *L) {
  static const luaL_Reg writers[] = { { ".safetensors", save_safetensors },
                                      { ".gguf", ty_io_save_gguf },
                                      { ".npz", save_npz },
                                      { ".npy", save_npy },
                                      { ".png", ty_io_save_image },
                                      { ".webp", ty_io_save_image },
                                      { ".json", ty_io_save_json } };
  if (lua_type(L, 2) == LUA_TSTRING && (lua_istable(L, 1) || lua_isuserdata(L, 1))) {
    lua_pushvalue(L, 1);
    lua_copy(L, 2, 1);
    lua_replace(L, 2);
  }
  const char *path = ty_io_path(L, 1);
  for (size_t i = 0; i < sizeof writers / sizeof *writers; i++)
    if (has_ending(path, writers[i].name)) return writers[i].func(L);
  return luaL_error(L, "save: the name \"%s\" must end in .safetensors, .gguf, .npz, .npy, .png, .webp or .json%s",
                    path,
                    has_ending(path, ".pt") || has_ending(path, ".pth") || has_ending(path, ".bin")
                        ? "; files of PyTorch are read only"
                        : "");
}

void ty_io_add_tensors(lua_State *L) {
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "load", load },
                                    { "save", save },
                                    { "load_safetensors", load_safetensors },
                                    { "save_safetensors", save_safetensors },
                                    { "load_torch", load_torch },
                                    { "load_npy", load_npy },
                                    { "save_npy", save_npy },
                                    { "load_npz", load_npz },
                                    { "save_npz", save_npz },
                                    { "load_csv", load_csv },
                                    { "map", map },
                                    { "from_bytes", from_bytes },
                                    { "to_bytes", to_bytes },
                                    { NULL, NULL } },
                0);
}

int ty_lua_open_io(lua_State *L) {
  lua_createtable(L, 0, 2);
  lua_pushcfunction(L, box_gc), lua_setfield(L, -2, "__gc");
  lua_pushcfunction(L, box_gc), lua_setfield(L, -2, "__close");
  lua_rawsetp(L, LUA_REGISTRYINDEX, &box_key);
  lua_newtable(L);
  ty_io_add_tensors(L);
  ty_io_add_files(L);
  ty_io_add_media(L);
  ty_io_add_gguf(L);
  ty_io_add_onnx(L);
  ty_io_add_json(L);
  return 1;
}
