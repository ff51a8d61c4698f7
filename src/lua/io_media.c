/* ty.io: pictures and sound. */
#include <stdlib.h>
#include <string.h>

#include "io.h"

static void release_bytes(void *p) { ty_bytes_free(p); }

/* Before core calls that allocate tensors. */
static void begin(lua_State *L) {
  ty_lua_current = L;
  ty_lua_poll(L);
}

/* ---- images ---- */

static const char *const image_options[] = { "channels", "crop", "size", "exif", NULL };
static const char *const size_options[] = { "exif", NULL };

/* The numbers of a list of `count` in the option, if there is one. */
static bool numbers_of(lua_State *L, const char *name, int count, double *out) {
  if (lua_type(L, 2) != LUA_TTABLE || lua_getfield(L, 2, name) == LUA_TNIL) return false;
  bool ok = lua_type(L, -1) == LUA_TTABLE && (int)lua_rawlen(L, -1) == count;
  for (int i = 0; i < count && ok; i++) {
    int number;
    lua_rawgeti(L, -1, i + 1);
    out[i] = lua_tonumberx(L, -1, &number);
    ok = number && lua_type(L, -1) == LUA_TNUMBER;
    lua_pop(L, 1);
  }
  if (!ok) luaL_error(L, "image: %s: expected a list of %d numbers, got %s", name, count, luaL_typename(L, -1));
  lua_pop(L, 1);
  return true;
}

/* What of the picture the options crop and size ask for; NULL: all of it. */
static const ty_image_part *part_of(lua_State *L, ty_image_part *part) {
  double place[4], size[2];
  *part = (ty_image_part){ 0 };
  bool boxed = numbers_of(L, "crop", 4, place), sized = numbers_of(L, "size", 2, size);
  if (boxed) {
    if (!(place[2] > 0 && place[3] > 0))
      luaL_error(L, "image: crop: expected a height and width above 0, got %f and %f", place[2], place[3]);
    part->top = place[0], part->left = place[1], part->height = place[2], part->width = place[3];
  }
  if (sized) {
    for (int i = 0; i < 2; i++)
      if (!(size[i] >= 1 && size[i] <= 65535 && size[i] == (double)(int)size[i]))
        luaL_error(L, "image: size: expected { height, width } of 1 to 65535, got %f", size[i]);
    part->rows = (int64_t)size[0], part->columns = (int64_t)size[1];
  }
  return boxed || sized ? part : NULL;
}

/* load_image(path [, { channels = 0, crop = { top, left, height, width }, size = { height, width }, exif = true }]) -> u8
 * tensor [channels, height, width] */
int ty_io_load_image(lua_State *L) {
  const char *path = ty_io_path(L, 1);
  ty_image_part part;
  ty_io_options(L, 2, image_options);
  int channels = (int)ty_io_count(L, 2, "channels", 0, 4);
  const ty_image_part *wanted = part_of(L, &part);
  bool upright = ty_io_flag(L, 2, "exif", true);
  begin(L);
  ty_handle *h = ty_lua_push_empty(L);
  ty_bytes bytes = { 0 };
  if (ty_file_read(path, (size_t)1 << 31, &bytes))
    h->t = ty_image_decode(bytes.data, bytes.size, path, channels, wanted, upright);
  ty_bytes_free(&bytes);
  return h->t ? 1 : ty_lua_error(L);
}

/* image_size(bytes [, { exif = true }]) -> channels, height, width */
static int image_size(lua_State *L) {
  size_t size;
  const char *bytes = ty_lua_check_lstring(L, 1, &size);
  int64_t out[3];
  ty_io_options(L, 2, size_options);
  bool upright = ty_io_flag(L, 2, "exif", true);
  begin(L);
  if (!ty_image_size(bytes, size, "in memory", out, upright)) return ty_lua_error(L);
  for (int i = 0; i < 3; i++) lua_pushinteger(L, out[i]);
  return 3;
}

/* decode_image(bytes [, options of load_image]) -> u8 tensor [channels, height, width] */
static int decode_image(lua_State *L) {
  size_t size;
  const char *bytes = ty_lua_check_lstring(L, 1, &size);
  ty_image_part part;
  ty_io_options(L, 2, image_options);
  int channels = (int)ty_io_count(L, 2, "channels", 0, 4);
  const ty_image_part *wanted = part_of(L, &part);
  bool upright = ty_io_flag(L, 2, "exif", true);
  begin(L);
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_image_decode(bytes, size, "in memory", channels, wanted, upright);
  return h->t ? 1 : ty_lua_error(L);
}

static bool has_ending(const char *path, const char *ending) {
  size_t n = strlen(path), m = strlen(ending);
  return n >= m && strcmp(path + n - m, ending) == 0;
}

static int by_key(const void *a, const void *b) {
  return strcmp(((const ty_png_text *)a)->key, ((const ty_png_text *)b)->key);
}

/* The option `text` of the table at `index`, sorted by key; its strings stay in that table. The list is a userdata that
 * stays on the stack. */
static const ty_png_text *texts_of(lua_State *L, int index, int *count) {
  *count = 0;
  if (!lua_istable(L, index) || lua_getfield(L, index, "text") == LUA_TNIL) return NULL;
  if (!lua_istable(L, -1)) luaL_error(L, "png: text: expected a table of strings, got a %s", luaL_typename(L, -1));
  int table = lua_gettop(L), most = 0;
  for (lua_pushnil(L); lua_next(L, table); lua_pop(L, 1)) most++;
  ty_png_text *texts = lua_newuserdatauv(L, (size_t)(most + 1) * sizeof *texts, 0);
  for (lua_pushnil(L); lua_next(L, table); lua_pop(L, 1)) {
    bool strings = lua_type(L, -2) == LUA_TSTRING && lua_type(L, -1) == LUA_TSTRING;
    if (!strings || strlen(lua_tostring(L, -2)) != lua_rawlen(L, -2) ||
        strlen(lua_tostring(L, -1)) != lua_rawlen(L, -1))
      luaL_error(L, "png: text: expected a table of strings without NUL, got a %s under a %s", luaL_typename(L, -1),
                 luaL_typename(L, -2));
    texts[(*count)++] = (ty_png_text){ lua_tostring(L, -2), lua_tostring(L, -1) };
  }
  qsort(texts, (size_t)*count, sizeof *texts, by_key);
  return texts;
}

/* How a picture is written. */
typedef struct {
  bool webp;
  int level, quality, count; /* of texts */
  const ty_png_text *texts;
} writing;

/* The options at `index`; lists of texts stay on the stack. */
static writing writing_of(lua_State *L, int index, bool webp) {
  static const char *const of_png[] = { "level", "text", NULL }, *const of_webp[] = { "level", "quality", NULL };
  writing w = { .webp = webp };
  ty_io_options(L, index, webp ? of_webp : of_png);
  w.level = (int)ty_io_count(L, index, "level", 6, 9);
  if (webp) w.quality = (int)ty_io_count(L, index, "quality", -1, 100);
  else w.texts = texts_of(L, index, &w.count);
  return w;
}

static bool encode(lua_State *L, ty_tensor *t, const writing *w, ty_bytes *out) {
  begin(L);
  return w->webp ? ty_webp_encode(t, w->quality, w->level, out) : ty_png_encode(t, w->level, w->texts, w->count, out);
}

static int push_bytes(lua_State *L, ty_bytes *bytes) {
  lua_pushlstring(L, bytes->size ? (const char *)bytes->data : "", bytes->size);
  ty_io_unbox(bytes);
  return 1;
}

static int push_encoded(lua_State *L, bool webp) {
  ty_tensor *t = ty_lua_check(L, 1);
  writing w = writing_of(L, 2, webp);
  ty_bytes *bytes = ty_io_box(L, sizeof *bytes, release_bytes);
  return encode(L, t, &w, bytes) ? push_bytes(L, bytes) : ty_lua_error(L);
}

/* encode_png(image [, { level = 6, text = { key = string } }]) -> bytes */
static int encode_png(lua_State *L) { return push_encoded(L, false); }

/* encode_webp(image [, { level = 6, quality = nil }]) -> bytes */
static int encode_webp(lua_State *L) { return push_encoded(L, true); }

/* save_image(path, image [, options of encode_webp where the path ends in .webp, else of encode_png]) */
int ty_io_save_image(lua_State *L) {
  const char *path = ty_io_path(L, 1);
  ty_tensor *t = ty_lua_check(L, 2);
  writing w = writing_of(L, 3, has_ending(path, ".webp"));
  ty_bytes *bytes = ty_io_box(L, sizeof *bytes, release_bytes);
  if (!encode(L, t, &w, bytes) || !ty_file_write(path, bytes->data, bytes->size)) return ty_lua_error(L);
  ty_io_unbox(bytes);
  return 0;
}

/* png_text(bytes) -> { key = string }; of a key that is there twice, the last */
static int png_text(lua_State *L) {
  size_t size;
  const char *bytes = ty_lua_check_lstring(L, 1, &size);
  ty_bytes *out = ty_io_box(L, sizeof *out, release_bytes);
  begin(L);
  if (!ty_png_texts((const uint8_t *)bytes, size, "in memory", out)) return ty_lua_error(L);
  lua_newtable(L);
  const char *p = (const char *)out->data, *end = p + out->size;
  while (p < end) {
    const char *value = p + strlen(p) + 1;
    lua_pushstring(L, value);
    lua_setfield(L, -2, p);
    p = value + strlen(value) + 1;
  }
  ty_io_unbox(out);
  return 1;
}

/* ---- sound ---- */

/* decode_flac(bytes [, { from = 0, count = all, max = 2^29, name = "in memory" }]) -> f32 [channels, samples], rate,
 * bits */
static int decode_flac(lua_State *L) {
  static const char *const options[] = { "from", "count", "max", "name", NULL };
  size_t size;
  const char *bytes = ty_lua_check_lstring(L, 1, &size);
  ty_io_options(L, 2, options);
  int64_t from = ty_io_count(L, 2, "from", 0, INT64_MAX), count = ty_io_count(L, 2, "count", -1, INT64_MAX), rate;
  int64_t most = ty_io_count(L, 2, "max", 1 << 29, INT64_MAX / 64);
  const char *name = ty_io_choice(L, 2, "name", "in memory");
  int bits;
  begin(L);
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_flac_decode((const uint8_t *)bytes, size, name, from, count, most, &rate, &bits);
  if (!h->t) return ty_lua_error(L);
  lua_pushinteger(L, rate);
  lua_pushinteger(L, bits);
  return 3;
}

/* encode_flac(i32 samples [samples, channels], rate [, { bits = 16, level = 5 }]) -> bytes */
static int encode_flac(lua_State *L) {
  static const char *const options[] = { "bits", "level", NULL };
  ty_tensor *t = ty_lua_check(L, 1);
  lua_Integer rate = ty_lua_check_integer(L, 2);
  ty_io_options(L, 3, options);
  int bits = (int)ty_io_count(L, 3, "bits", 16, 24), level = (int)ty_io_count(L, 3, "level", 5, 8);
  ty_bytes *bytes = ty_io_box(L, sizeof *bytes, release_bytes);
  begin(L);
  return ty_flac_encode(t, rate, bits, level, bytes) ? push_bytes(L, bytes) : ty_lua_error(L);
}

void ty_io_add_media(lua_State *L) {
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "load_image", ty_io_load_image },
                                    { "save_image", ty_io_save_image },
                                    { "decode_image", decode_image },
                                    { "image_size", image_size },
                                    { "encode_png", encode_png },
                                    { "encode_webp", encode_webp },
                                    { "png_text", png_text },
                                    { "decode_flac", decode_flac },
                                    { "encode_flac", encode_flac },
                                    { NULL, NULL } },
                0);
}
