/* The Lua state of the program: as luaL_newstate() makes it, but small objects come from free lists. A tensor's handle
 * lives so briefly that malloc's bookkeeping would cost as much as the object's own work. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { UNIT = 16, SMALLEST_LARGE = 512, CHUNK = 64 * 1024 };

typedef struct block {
  struct block *next;
} block;

static struct {
  block *list[SMALLEST_LARGE / UNIT];
  char *rest, *end; /* of the newest chunk */
} pool;

static size_t class_of(size_t bytes) { return (bytes + UNIT - 1) / UNIT; }

static bool is_small(size_t bytes) { return class_of(bytes) < SMALLEST_LARGE / UNIT; }

static void *take(size_t bytes) {
  if (!is_small(bytes)) return malloc(bytes);
  size_t class = class_of(bytes);
  block *b = pool.list[class];
  if (b) {
    pool.list[class] = b->next;
    return b;
  }
  if ((size_t)(pool.end - pool.rest) < class * UNIT) {
    char *chunk = malloc(CHUNK); /* what is left of the one before is lost: less than a small object */
    if (!chunk) return NULL;
    pool.rest = chunk;
    pool.end = chunk + CHUNK;
  }
  void *p = pool.rest;
  pool.rest += class * UNIT;
  return p;
}

static void give(void *p, size_t bytes) {
  if (!is_small(bytes)) {
    free(p);
    return;
  }
  block *b = p;
  b->next = pool.list[class_of(bytes)];
  pool.list[class_of(bytes)] = b;
}

/* lua_Alloc; for new objects `old` is a kind, not a size. */
static void *allocate(void *unused, void *p, size_t old, size_t bytes) {
  if (!p) return bytes ? take(bytes) : NULL;
  if (bytes == 0) {
    give(p, old);
    return NULL;
  }
  if (is_small(old) && class_of(old) == class_of(bytes)) return p;
  if (!is_small(old) && !is_small(bytes)) return realloc(p, bytes);
  void *q = take(bytes);
  if (!q) return bytes <= old ? p : NULL; /* Lua counts on shrinking; a block may be larger than its list says */
  memcpy(q, p, old < bytes ? old : bytes);
  give(p, old);
  return q;
}

/* ---- what luaL_newstate() also sets ---- */

static int panic(lua_State *L) {
  const char *text = lua_tostring(L, -1);
  fprintf(stderr, "tycho: unprotected error (%s)\n", text ? text : "not a string");
  return 0;
}

/* warn("@on") and warn("@off") are orders, the rest is text in pieces. */
static void warning(void *context, const char *text, int more) {
  static bool on, inside;
  if (!inside && !more && text[0] == '@') {
    if (strcmp(text, "@on") == 0) on = true;
    if (strcmp(text, "@off") == 0) on = false;
    return;
  }
  if (on) fprintf(stderr, "%s%s%s", inside ? "" : "Lua warning: ", text, more ? "" : "\n");
  inside = more;
}

lua_State *ty_cli_new_state(void) {
  lua_State *L = lua_newstate(allocate, NULL);
  if (!L) return NULL;
  lua_atpanic(L, panic);
  lua_setwarnf(L, warning, NULL);
  return L;
}
