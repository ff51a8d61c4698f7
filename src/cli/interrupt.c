/* Ctrl-C. The signal handler sets the flag that native ops poll and a hook that stops Lua code at its next instruction;
 * whichever sees it first raises the error and clears the flag. Hooks belong to one coroutine, so coroutine.resume and
 * coroutine.wrap are replaced here by twins that keep track of the one that runs. */
#include "cli.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>

#include "../../kernels/base.h"

static lua_State *main_state;
static lua_State *volatile running; /* held by the stack of the resume that runs it */
static pthread_t main_thread;
static volatile sig_atomic_t presses;

static void stop(lua_State *L, lua_Debug *ar) {
  lua_sethook(L, NULL, 0, 0);
  if (!ty_interrupted) return;
  ty_interrupted = 0;
  lua_getinfo(L, "Sl", ar);
  if (ar->currentline > 0) luaL_error(L, "%s:%d: interrupted", ar->short_src, ar->currentline);
  luaL_error(L, "interrupted");
}

static void on_interrupt(int sig) {
  int saved = errno;
  if (!pthread_equal(pthread_self(), main_thread)) {
    pthread_kill(main_thread, sig); /* Lua's state may only be touched from its own thread */
  } else if (++presses >= 3) {
    signal(sig, SIG_DFL); /* nobody listened twice: the third one ends the program */
    raise(sig);
  } else {
    ty_interrupted = 1;
    int all = LUA_MASKCALL | LUA_MASKRET | LUA_MASKLINE | LUA_MASKCOUNT;
    lua_sethook(main_state, stop, all, 1);
    if (running != main_state) lua_sethook(running, stop, all, 1);
  }
  errno = saved;
}

/* Calls the function under `nargs` arguments on the stack's top, which resumes `co`. */
static int call_tracked(lua_State *L, lua_State *co, int nargs) {
  int base = lua_gettop(L) - nargs - 1;
  lua_State *outer = running;
  running = co;
  int status = lua_pcall(L, nargs, LUA_MULTRET, 0);
  running = outer;
  if (status != LUA_OK) return lua_error(L);
  return lua_gettop(L) - base;
}

static int tracked_resume(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTHREAD);
  int nargs = lua_gettop(L);
  luaL_checkstack(L, nargs + 1, "too many arguments to resume");
  lua_pushvalue(L, lua_upvalueindex(1));
  for (int i = 1; i <= nargs; i++) lua_pushvalue(L, i); /* argument 1 stays below: it keeps the coroutine alive */
  return call_tracked(L, lua_tothread(L, 1), nargs);
}

static int tracked_wrapped(lua_State *L) {
  int nargs = lua_gettop(L);
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_insert(L, 1);
  return call_tracked(L, lua_tothread(L, lua_upvalueindex(2)), nargs);
}

static int tracked_wrap(lua_State *L) {
  luaL_checktype(L, 1, LUA_TFUNCTION);
  lua_settop(L, 1);
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_insert(L, 1);
  lua_call(L, 1, 1);
  if (lua_getupvalue(L, -1, 1) && lua_isthread(L, -1)) lua_pushcclosure(L, tracked_wrapped, 2);
  else lua_settop(L, 1);
  return 1;
}

void ty_cli_interrupt_open(lua_State *L) {
  main_state = running = L;
  main_thread = pthread_self();
  lua_getglobal(L, "coroutine");
  lua_getfield(L, -1, "resume");
  lua_pushcclosure(L, tracked_resume, 1);
  lua_setfield(L, -2, "resume");
  lua_getfield(L, -1, "wrap");
  lua_pushcclosure(L, tracked_wrap, 1);
  lua_setfield(L, -2, "wrap");
  lua_pop(L, 1);

  struct sigaction old, action = { .sa_handler = on_interrupt };
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGINT, NULL, &old) == 0 && old.sa_handler != SIG_IGN) sigaction(SIGINT, &action, NULL);
}

bool ty_cli_interrupt_take(lua_State *L) {
  bool pressed = presses > 0;
  presses = 0;
  ty_interrupted = 0;
  lua_sethook(L, NULL, 0, 0);
  return pressed;
}
