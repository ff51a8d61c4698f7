/* Small services of the system that Lua lacks: clocks, the terminal, the process. */
#define _GNU_SOURCE
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "../../kernels/tiling.h"
#include "handle.h"

static double seconds(clockid_t id) {
  struct timespec t;
  clock_gettime(id, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* clock() -> seconds that only grow, since some moment */
static int system_clock(lua_State *L) {
  lua_pushnumber(L, seconds(CLOCK_MONOTONIC));
  return 1;
}

/* time() -> seconds since 1970 with fractions */
static int system_time(lua_State *L) {
  lua_pushnumber(L, seconds(CLOCK_REALTIME));
  return 1;
}

/* isatty(descriptor) */
static int system_isatty(lua_State *L) {
  lua_pushboolean(L, isatty((int)ty_lua_check_integer(L, 1)));
  return 1;
}

/* columns(descriptor) -> width of the terminal, or nil */
static int system_columns(lua_State *L) {
  struct winsize size;
  if (ioctl((int)ty_lua_check_integer(L, 1), TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    lua_pushinteger(L, size.ws_col);
  else lua_pushnil(L);
  return 1;
}

static int system_pid(lua_State *L) {
  lua_pushinteger(L, getpid());
  return 1;
}

/* sleep(seconds): until then, or Ctrl-C */
static int system_sleep(lua_State *L) {
  double end = seconds(CLOCK_MONOTONIC) + ty_lua_check_number(L, 1), left;
  while ((left = end - seconds(CLOCK_MONOTONIC)) > 0) {
    if (ty_interrupted) {
      ty_fail(TY_EINTR, "interrupted");
      return ty_lua_error(L);
    }
    double part = left < 0.05 ? left : 0.05;
    nanosleep(&(struct timespec){ 0, (long)(part * 1e9) }, NULL);
  }
  return 0;
}

/* product_tiling(rows, columns, pack): kernels/tiling.h; 0 and nothing: by the shape */
static int system_product_tiling(lua_State *L) {
  lua_Integer n[3] = { 0 };
  for (int i = 0; i < 3; i++)
    if (!lua_isnoneornil(L, i + 1)) n[i] = ty_lua_check_integer(L, i + 1);
  if (n[0] < 0 || n[1] < 0) return ty_lua_refuse(L, n[0] < 0 ? 1 : 2, "an integer >= 0");
  if (n[2] < -1 || n[2] > 1) return ty_lua_refuse(L, 3, "-1, 0 or 1");
  ty_tiling_ask((ty_tiling){ .rows = n[0], .columns = n[1], .pack = (int)n[2] });
  return 0;
}

int ty_lua_open_system(lua_State *L) {
  luaL_newlib(L, ((const luaL_Reg[]){ { "clock", system_clock },
                                      { "time", system_time },
                                      { "isatty", system_isatty },
                                      { "columns", system_columns },
                                      { "pid", system_pid },
                                      { "sleep", system_sleep },
                                      { "product_tiling", system_product_tiling },
                                      { NULL, NULL } }));
  return 1;
}
