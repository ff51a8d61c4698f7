/* Where the program finds its Lua files and data, and the Lua module tycho.program that tells Lua code about it.
 * Nothing is compiled in: the places follow from the executable's own, so that an installed tree can be moved.
 *
 *   PREFIX/bin/tycho        PREFIX/share/lua/5.4/tycho/...      installed (also what LuaRocks makes of it)
 *   ROOT/build/NAME/tycho   ROOT/lua/tycho/... ROOT/modules/... built in the source tree
 *   anywhere/tycho          the same, ROOT being the line in anywhere/source-tree.txt, which CMake writes */
#define _GNU_SOURCE /* asprintf */
#include "../../kernels/lapack.h"
#include "cli.h"

#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <jpeglib.h>
#include <pcre2.h>
#include <png.h>
#include <utf8proc.h>
#include <zlib.h>
#ifdef TY_HAVE_WEBP
#include <webp/decode.h>
#endif
#ifdef TY_HAVE_FLAC
#include <FLAC/format.h>
#endif
#ifdef TY_HAVE_ONNX
#include <protobuf-c/protobuf-c.h>
#endif

#include "../tycho.h"

static struct {
  char executable[PATH_MAX];
  char lua[PATH_MAX];  /* the folder that holds tycho/init.lua; "" when there is none */
  char home[PATH_MAX]; /* the folder that holds recipes/ and datasets/ */
  bool source_tree;
} place;

/* The real path of base/more if base/more/probe is a file. */
static bool find_folder(const char *base, const char *more, const char *probe, char out[PATH_MAX]) {
  char path[PATH_MAX];
  if ((size_t)snprintf(path, sizeof path, "%s/%s/%s", base, more, probe) >= sizeof path) return false;
  if (access(path, R_OK) != 0) return false;
  path[strlen(path) - strlen(probe) - 1] = '\0';
  return realpath(path, out) != NULL;
}

static bool find_source_tree(const char *base, const char *more) {
  if (!find_folder(base, more, "lua/tycho/init.lua", place.home)) return false;
  place.source_tree = true;
  return find_folder(place.home, "lua", "tycho/init.lua", place.lua);
}

/* The first line of a small file, without its newline. */
static bool read_line(const char *folder, const char *name, char out[PATH_MAX]) {
  char path[PATH_MAX];
  if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path) return false;
  FILE *f = fopen(path, "r");
  if (!f) return false;
  bool ok = fgets(out, PATH_MAX, f) != NULL;
  fclose(f);
  if (ok) out[strcspn(out, "\n")] = '\0';
  return ok;
}

static void find_place(void) {
  ssize_t n = readlink("/proc/self/exe", place.executable, sizeof place.executable - 1);
  if (n <= 0) return;
  place.executable[n] = '\0';
  char folder[PATH_MAX], root[PATH_MAX];
  strcpy(folder, place.executable);
  char *slash = strrchr(folder, '/');
  if (!slash) return;
  *slash = '\0';
  if (find_folder(folder, "../share/lua/5.4", "tycho/init.lua", place.lua)) {
    if (!find_folder(folder, "../share/tycho", "recipes/.", place.home) &&
        !find_folder(place.lua, "tycho", "recipes/.", place.home))
      strcpy(place.home, place.lua);
    return;
  }
  if (find_source_tree(folder, "../..")) return;
  if (read_line(folder, "source-tree.txt", root)) find_source_tree(root, ".");
}

const char *ty_cli_find_script(lua_State *L, const char *name) {
  if (access(name, F_OK) != 0 && name[0] != '/' && place.home[0]) {
    const char *path = lua_pushfstring(L, "%s/%s", place.home, name);
    if (access(path, R_OK) == 0) return path;
    lua_pop(L, 1);
  }
  return lua_pushstring(L, name);
}

/* ---- the module tycho.program ---- */

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static bool is_folder(const char *folder, const struct dirent *e) {
  if (e->d_type != DT_UNKNOWN && e->d_type != DT_LNK) return e->d_type == DT_DIR;
  char path[PATH_MAX];
  struct stat st;
  if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, e->d_name) >= sizeof path) return false;
  return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* list(folder): its names in order, those of folders with a slash at the end; or nil and why not. */
static int l_list(lua_State *L) {
  const char *folder = luaL_checkstring(L, 1);
  DIR *d = opendir(folder);
  if (!d) return luaL_fileresult(L, 0, folder);
  char **names = NULL;
  size_t count = 0, room = 0;
  bool ok = true;
  for (struct dirent *e; ok && (e = readdir(d)) != NULL;) {
    if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
    if (count == room) {
      size_t more = room ? 2 * room : 64;
      char **grown = realloc(names, more * sizeof *names);
      if (!grown) {
        ok = false;
        break;
      }
      names = grown;
      room = more;
    }
    ok = asprintf(&names[count], "%s%s", e->d_name, is_folder(folder, e) ? "/" : "") >= 0;
    if (ok) count++;
  }
  closedir(d);
  if (ok && count) qsort(names, count, sizeof *names, by_name);
  lua_createtable(L, ok ? (int)count : 0, 0); /* an error of Lua's own here would leak a list of names, once */
  for (size_t i = 0; i < count; i++) {
    if (ok) {
      lua_pushstring(L, names[i]);
      lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    free(names[i]);
  }
  free(names);
  return ok ? 1 : luaL_error(L, "list: not enough memory");
}

static void add_library(lua_State *L, const char *name, const char *version) {
  lua_createtable(L, 0, 2);
  lua_pushstring(L, name);
  lua_setfield(L, -2, "name");
  if (version) {
    lua_pushstring(L, version);
    lua_setfield(L, -2, "version");
  }
  lua_rawseti(L, -2, (lua_Integer)lua_rawlen(L, -2) + 1);
}

static bool loads(const char *library) {
  void *handle = dlopen(library, RTLD_LAZY | RTLD_LOCAL);
  if (handle) dlclose(handle);
  return handle != NULL;
}

/* libraries(): { { name =, version = nil when it is missing } ... } */
static int l_libraries(lua_State *L) {
  lua_settop(L, 0);
  lua_newtable(L);
  add_library(L, "zlib", zlibVersion());
  add_library(L, "libpng", png_get_libpng_ver(NULL));
#ifdef LIBJPEG_TURBO_VERSION
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
  add_library(L, "libjpeg", "turbo " TEXT(LIBJPEG_TURBO_VERSION));
#else
  char jpeg[16];
  snprintf(jpeg, sizeof jpeg, "%d", JPEG_LIB_VERSION);
  add_library(L, "libjpeg", jpeg);
#endif
#ifdef TY_HAVE_WEBP
  const int webp = WebPGetDecoderVersion();
  char numbers[32];
  snprintf(numbers, sizeof numbers, "%d.%d.%d", webp >> 16, webp >> 8 & 255, webp & 255);
  add_library(L, "libwebp", numbers);
#else
  add_library(L, "libwebp", NULL);
#endif
#ifdef TY_HAVE_FLAC
  add_library(L, "libFLAC", FLAC__VERSION_STRING);
#else
  add_library(L, "libFLAC", NULL);
#endif
  char version[64] = "";
  pcre2_config(PCRE2_CONFIG_VERSION, version);
  version[strcspn(version, " ")] = 0; /* the date */
  add_library(L, "pcre2", version);
  add_library(L, "utf8proc", utf8proc_version());
  const ty_lapack *lapack = ty_lapack_open();
  add_library(L, "LAPACK", lapack ? lapack->name : NULL);
#ifdef TY_HAVE_ONNX
  add_library(L, "libprotobuf-c", protobuf_c_version());
#else
  add_library(L, "libprotobuf-c", NULL);
#endif
  add_library(L, "libedit", loads("libedit.so.2") || loads("libedit.so.0") ? "" : NULL);
#ifdef TY_HAVE_MICROHTTPD
  add_library(L, "libmicrohttpd", loads("libmicrohttpd.so.12") ? "" : NULL);
#else
  add_library(L, "libmicrohttpd", NULL);
#endif
  return 1;
}

static int open_program(lua_State *L) {
  static const luaL_Reg functions[] = { { "list", l_list }, { "libraries", l_libraries }, { NULL, NULL } };
  luaL_newlib(L, functions);
  lua_pushstring(L, TY_VERSION);
  lua_setfield(L, -2, "version");
  lua_pushstring(L, place.executable);
  lua_setfield(L, -2, "executable");
  lua_pushstring(L, place.home);
  lua_setfield(L, -2, "home");
  lua_pushstring(L, place.lua);
  lua_setfield(L, -2, "lua");
  lua_pushboolean(L, place.source_tree);
  lua_setfield(L, -2, "source_tree");
  return 1;
}

void ty_cli_program_open(lua_State *L) {
  find_place();
  lua_getglobal(L, "package");
  lua_getfield(L, -1, "preload");
  lua_pushcfunction(L, luaopen_tycho_core);
  lua_setfield(L, -2, "tycho.core");
  lua_pushcfunction(L, open_program);
  lua_setfield(L, -2, "tycho.program");
  lua_pop(L, 1);
  if (place.lua[0]) { /* first, so that the library found is the one that belongs to the core linked in */
    lua_getfield(L, -1, "path");
    lua_pushfstring(L, "%s/?.lua;%s/?/init.lua;%s", place.lua, place.lua, lua_tostring(L, -1));
    lua_setfield(L, -3, "path");
    lua_pop(L, 1);
    if (place.source_tree) { /* there the modules are not yet where they will be installed */
      lua_pushfstring(L, "%s/tycho/searcher.lua", place.lua);
      if (luaL_loadfile(L, lua_tostring(L, -1)) != LUA_OK || lua_pcall(L, 0, 0, 0) != LUA_OK) lua_error(L);
      lua_pop(L, 1);
    }
  }
  lua_pop(L, 1);
}
