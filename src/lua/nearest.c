/* "did you mean ...?": the names of a table that are nearest to one that is not there. */
#include <ctype.h>
#include <string.h>

#include "../ops/op.h"
#include "handle.h"

enum { LONGEST = 63, MOST = 3 };

static bool same(char a, char b) { return tolower((unsigned char)a) == tolower((unsigned char)b); }

/* Single letters put in, left out, changed or exchanged with their neighbour that make b of a; a and A are the same. */
static int distance(const char *a, const char *b) {
  int m = (int)strlen(a), n = (int)strlen(b), row[3][LONGEST + 2];
  for (int j = 0; j <= n; j++) row[0][j] = j;
  for (int i = 1; i <= m; i++) {
    int *at = row[i % 3], *above = row[(i + 2) % 3], *before = row[(i + 1) % 3];
    at[0] = i;
    for (int j = 1; j <= n; j++) {
      int change = above[j - 1] + !same(a[i - 1], b[j - 1]),
          least = above[j] < at[j - 1] ? above[j] + 1 : at[j - 1] + 1;
      at[j] = change < least ? change : least;
      bool exchanged = i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]);
      if (exchanged && before[j - 2] + 1 < at[j]) at[j] = before[j - 2] + 1;
    }
  }
  return row[m % 3][n];
}

typedef struct nearest {
  const char *wanted;
  const char *name[MOST]; /* in the order of the alphabet */
  int n, distance;
} nearest;

static void consider(nearest *near, const char *name) {
  const ty_op *op = ty_op_find(name);
  if (name[0] == '_' || strlen(name) > LONGEST || (op && (op->flags & INTERNAL))) return;
  int d = distance(near->wanted, name);
  if (d > near->distance) return;
  if (d < near->distance) near->n = 0;
  near->distance = d;
  int at = near->n;
  while (at > 0 && strcmp(name, near->name[at - 1]) < 0) at--;
  if ((at > 0 && strcmp(name, near->name[at - 1]) == 0) || at == MOST) return;
  if (near->n < MOST) near->n++;
  memmove(near->name + at + 1, near->name + at, sizeof *near->name * (size_t)(near->n - at - 1));
  near->name[at] = name;
}

void ty_lua_push_nearest(lua_State *L, const char *wanted, int table, const char *const *more) {
  size_t length = strlen(wanted);
  nearest near = { .wanted = wanted, .distance = length < 3 ? 0 : 1 + (int)(length - 3) / 4 };
  table = lua_absindex(L, table);
  bool comparable = length <= LONGEST;
  for (lua_pushnil(L); lua_next(L, table); lua_pop(L, 1))
    if (comparable && lua_type(L, -2) == LUA_TSTRING) consider(&near, lua_tostring(L, -2)); /* the table holds it */
  for (int i = 0; comparable && more && more[i]; i++) consider(&near, more[i]);
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  for (int i = 0; i < near.n; i++) {
    luaL_addstring(&b, i == 0 ? "; did you mean " : i < near.n - 1 ? ", " : " or ");
    luaL_addstring(&b, near.name[i]);
  }
  if (near.n) luaL_addchar(&b, '?');
  luaL_pushresult(&b);
}

/* nearest(name, table, names): "; did you mean softmax?" of the keys of a table and the names of a list, or "" */
static int nearest_names(lua_State *L) {
  const char *wanted = ty_lua_check_string(L, 1), *more[128];
  ty_lua_check_type(L, 2, LUA_TTABLE);
  int n = 0;
  for (int i = 1; lua_istable(L, 3) && n < 127; i++) {
    lua_settop(L, 3 + n);
    luaL_checkstack(L, 4, "nearest");
    if (lua_rawgeti(L, 3, i) != LUA_TSTRING) break; /* it stays on the stack */
    more[n++] = lua_tostring(L, -1);
  }
  more[n] = NULL;
  ty_lua_push_nearest(L, wanted, 2, more);
  return 1;
}

void ty_lua_open_nearest(lua_State *L, int table) {
  lua_pushcfunction(L, nearest_names);
  lua_setfield(L, table, "nearest");
}
