/* Shared by the files of the border of src/io. */
#ifndef TY_LUA_IO_H
#define TY_LUA_IO_H

#include "../io/formats.h"
#include "handle.h"

/* Pushes a userdata with `size` zeroed bytes that `release` cleans up when it is collected or ty_io_unbox() is
 * called: what the core gave us is safe there when Lua raises an error. */
void *ty_io_box(lua_State *L, size_t size, void (*release)(void *payload));
void ty_io_unbox(void *payload); /* at once, and never again */

/* A path argument: text without NUL. */
const char *ty_io_path(lua_State *L, int index);
/* The options table at `index`, or none: raises on keys that are not in `names` (ended by NULL). Returns whether it
 * is there. */
bool ty_io_options(lua_State *L, int index, const char *const *names);
bool ty_io_flag(lua_State *L, int index, const char *name, bool otherwise);
int64_t ty_io_count(lua_State *L, int index, const char *name, int64_t otherwise, int64_t most);
const char *ty_io_choice(lua_State *L, int index, const char *name,
                         const char *otherwise); /* the string lives in the table */

/* Collects the table { name = tensor } at `index`; names and tensors are borrowed from it. Leaves a userdata on the
 * stack. */
void ty_io_tensors(lua_State *L, int index, ty_bundle *b);

/* Sets the functions of one file in the table on the top of the stack. */
void ty_io_add_tensors(lua_State *L);
void ty_io_add_files(lua_State *L);
void ty_io_add_media(lua_State *L);
void ty_io_add_json(lua_State *L);
void ty_io_add_gguf(lua_State *L);
void ty_io_add_onnx(lua_State *L);

/* Lua functions that io.load and io.save hand over to, called with their own arguments. */
int ty_io_load_image(lua_State *L);
int ty_io_save_image(lua_State *L);
int ty_io_load_json(lua_State *L);
int ty_io_save_json(lua_State *L);
int ty_io_load_gguf(lua_State *L);
int ty_io_save_gguf(lua_State *L);

#endif
