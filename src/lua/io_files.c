/* ty.io: text, lines, directories, and the writer of TensorBoard events. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "io.h"

static void release_bytes(void *p) { ty_bytes_free(p); }

/* read(path [, { max = by size }]) -> string; gzip is unpacked */
static int read_text(lua_State *L) {
  static const char *const options[] = { "max", NULL };
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 2, options);
  int64_t most = ty_io_count(L, 2, "max", -1, PTRDIFF_MAX);
  ty_bytes *bytes = ty_io_box(L, sizeof *bytes, release_bytes);
  ty_text *file = ty_text_open(path);
  bool ok = file && ty_text_rest(file, most, TY_TEXT_FLOOR, bytes);
  ty_text_close(file);
  if (!ok) return ty_lua_error(L);
  lua_pushlstring(L, bytes->size ? (const char *)bytes->data : "", bytes->size);
  ty_io_unbox(bytes);
  return 1;
}

/* write_atomic(path, text): written beside and renamed */
static int write_atomic(lua_State *L) {
  size_t size;
  const char *path = ty_io_path(L, 1), *text = ty_lua_check_lstring(L, 2, &size);
  return ty_file_write(path, text, size) ? 0 : ty_lua_error(L);
}

/* ---- lines ---- */

static const char reader_key;

static int next_line(lua_State *L) {
  ty_text **file = lua_touserdata(L, lua_upvalueindex(1));
  const char *line;
  size_t size;
  if (!*file) return luaL_error(L, "lines: the file is closed");
  if (!ty_text_line(*file, &line, &size)) return ty_lua_error(L);
  if (!line) return 0;
  lua_pushlstring(L, line, size);
  return 1;
}

static int close_lines(lua_State *L) {
  ty_text **file = lua_touserdata(L, 1);
  ty_text_close(*file);
  *file = NULL;
  return 0;
}

/* for line in lines(path [, { max = bytes of the longest }]) do: gzip is unpacked; the file closes when the loop ends, however it ends */
static int lines(lua_State *L) {
  static const char *const options[] = { "max", NULL };
  const char *path = ty_io_path(L, 1);
  ty_io_options(L, 2, options);
  int64_t most = ty_io_count(L, 2, "max", -1, PTRDIFF_MAX);
  ty_text **file = lua_newuserdatauv(L, sizeof *file, 0);
  *file = NULL;
  lua_rawgetp(L, LUA_REGISTRYINDEX, &reader_key);
  lua_setmetatable(L, -2);
  *file = ty_text_open(path);
  if (!*file) return ty_lua_error(L);
  ty_text_limit_lines(*file, most);
  lua_pushvalue(L, -1);
  lua_pushcclosure(L, next_line, 1);
  lua_insert(L, -2);
  lua_pushnil(L);
  lua_pushnil(L);
  lua_rotate(L, -3, 2); /* function, nil, nil, the file: closed by the loop */
  return 4;
}

/* ---- directories ---- */

/* stat(path) -> { kind = "file" | "directory" | "other", size = bytes, mtime = seconds }, or nil when there is
 * nothing */
static int stat_path(lua_State *L) {
  ty_file_info info;
  if (!ty_file_stat(ty_io_path(L, 1), &info)) return ty_lua_error(L);
  if (!info.kind) return 0;
  lua_createtable(L, 0, 3);
  lua_pushstring(L, info.kind == 'f' ? "file" : info.kind == 'd' ? "directory" : "other"), lua_setfield(L, -2, "kind");
  lua_pushinteger(L, info.size), lua_setfield(L, -2, "size");
  lua_pushnumber(L, info.mtime), lua_setfield(L, -2, "mtime");
  return 1;
}

/* exists(path) -> boolean */
static int exists(lua_State *L) {
  ty_file_info info;
  if (!ty_file_stat(ty_io_path(L, 1), &info)) return ty_lua_error(L);
  lua_pushboolean(L, info.kind != 0);
  return 1;
}

/* listdir(path) -> names in byte order */
static int listdir(lua_State *L) {
  const char *path = ty_lua_opt_string(L, 1, ".");
  ty_bytes *names = ty_io_box(L, sizeof *names, release_bytes);
  if (!ty_list_dir(path, names)) return ty_lua_error(L);
  lua_newtable(L);
  const char *p = (const char *)names->data, *end = p + names->size;
  for (int i = 1; p < end; i++, p += strlen(p) + 1) {
    lua_pushstring(L, p);
    lua_rawseti(L, -2, i);
  }
  ty_io_unbox(names);
  return 1;
}

/* mkdir(path): with its parents; nothing to do when it exists */
static int make_dirs(lua_State *L) { return ty_make_dirs(ty_io_path(L, 1)) ? 0 : ty_lua_error(L); }

/* remove(path): a file or an empty directory */
static int remove_path(lua_State *L) { return ty_file_remove(ty_io_path(L, 1)) ? 0 : ty_lua_error(L); }

static void release_tensor(void *p) { ty_release(*(ty_tensor **)p); }

/* crc32(path or tensor) -> integer: of the file's bytes, or of the tensor's in C order, as gzip and zip have it */
static int crc32_of(lua_State *L) {
  uint32_t crc;
  ty_tensor *t = ty_lua_to(L, 1);
  if (t) {
    ty_tensor **host = ty_io_box(L, sizeof *host, release_tensor);
    *host = ty_host_tensor(t);
    if (!*host) return ty_lua_error(L);
    lua_pushinteger(L, ty_crc32(0, (*host)->v.data, (size_t)ty_view_bytes(&(*host)->v)));
    ty_io_unbox(host);
    return 1;
  }
  if (!ty_file_crc32(ty_io_path(L, 1), &crc)) return ty_lua_error(L);
  lua_pushinteger(L, crc);
  return 1;
}

/* ---- TensorBoard ---- */

static const char events_key;

static double now(void) {
  struct timeval t;
  gettimeofday(&t, NULL);
  return (double)t.tv_sec + (double)t.tv_usec * 1e-6;
}

static ty_events **check_events(lua_State *L) {
  ty_events **e = lua_touserdata(L, 1);
  bool right = e && lua_getmetatable(L, 1);
  if (right) {
    lua_rawgetp(L, LUA_REGISTRYINDEX, &events_key);
    right = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
  }
  if (!right) luaL_typeerror(L, 1, "event writer");
  return e;
}

/* writer:scalar(tag, value, step [, wall_time]) -> writer */
static int events_scalar(lua_State *L) {
  size_t size;
  ty_events **e = check_events(L);
  const char *tag = ty_lua_check_lstring(L, 2, &size);
  lua_Number value = ty_lua_check_number(L, 3);
  lua_Integer step = ty_lua_check_integer(L, 4);
  lua_Number wall = lua_isnoneornil(L, 5) ? now() : ty_lua_check_number(L, 5);
  if (!*e) return luaL_error(L, "event_writer: it is closed");
  if (!ty_events_scalar(*e, tag, size, step, wall, (float)value)) return ty_lua_error(L);
  lua_settop(L, 1);
  return 1;
}

static int events_flush(lua_State *L) {
  ty_events **e = check_events(L);
  if (*e && !ty_events_flush(*e)) return ty_lua_error(L);
  return 0;
}

static int events_close(lua_State *L) {
  ty_events **e = check_events(L), *old = *e;
  *e = NULL;
  return ty_events_close(old) ? 0 : ty_lua_error(L);
}

static int events_gc(lua_State *L) {
  ty_events **e = lua_touserdata(L, 1);
  ty_events_close(*e);
  *e = NULL;
  return 0;
}

/* event_writer(folder) -> writer, path: makes the folder and in it a file of a new name, as TensorBoard looks for it */
static int event_writer(lua_State *L) {
  static atomic_uint serial;
  char host[128] = "";
  const char *folder = ty_io_path(L, 1);
  gethostname(host, sizeof host - 1);
  lua_pushfstring(L, "%s/events.out.tfevents.%I.%s.%d.%d", folder, (LUAI_UACINT)now(), host[0] ? host : "localhost",
                  (int)getpid(), (int)atomic_fetch_add(&serial, 1));
  ty_events **e = lua_newuserdatauv(L, sizeof *e, 0);
  *e = NULL;
  lua_rawgetp(L, LUA_REGISTRYINDEX, &events_key);
  lua_setmetatable(L, -2);
  if (!ty_make_dirs(folder) || !(*e = ty_events_open(lua_tostring(L, -2)))) return ty_lua_error(L);
  lua_insert(L, -2);
  return 2;
}

void ty_io_add_files(lua_State *L) {
  lua_createtable(L, 0, 2);
  lua_pushcfunction(L, close_lines), lua_setfield(L, -2, "__gc");
  lua_pushcfunction(L, close_lines), lua_setfield(L, -2, "__close");
  lua_rawsetp(L, LUA_REGISTRYINDEX, &reader_key);
  lua_createtable(L, 0, 4);
  lua_pushstring(L, "event writer"), lua_setfield(L, -2, "__name");
  lua_pushcfunction(L, events_gc), lua_setfield(L, -2, "__gc");
  lua_pushcfunction(L, events_close), lua_setfield(L, -2, "__close");
  luaL_newlib(L,
              ((const luaL_Reg[]){
                  { "scalar", events_scalar }, { "flush", events_flush }, { "close", events_close }, { NULL, NULL } }));
  lua_setfield(L, -2, "__index");
  lua_rawsetp(L, LUA_REGISTRYINDEX, &events_key);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "read", read_text },
                                    { "write_atomic", write_atomic },
                                    { "lines", lines },
                                    { "stat", stat_path },
                                    { "exists", exists },
                                    { "listdir", listdir },
                                    { "mkdir", make_dirs },
                                    { "remove", remove_path },
                                    { "crc32", crc32_of },
                                    { "event_writer", event_writer },
                                    { NULL, NULL } },
                0);
}
