/* What an analytical model of a processor is made from: the time of functions that were assembled for it, and the
 * instructions that the library runs for one call, one after the other. For x86-64 on Linux; elsewhere an error says so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../ops/op.h"
#include "handle.h"

#if defined(__x86_64__) && defined(__linux__)
#include <ucontext.h>

/* ---- timing what was assembled ---- */

typedef void measured(char *buffer, long rounds);

/* time(path, function, rounds, buffer) -> seconds of one call of a function (char *buffer, long rounds) of a library; the
 * buffer is a tensor's memory. */
static int probe_time(lua_State *L) {
  const char *path = ty_lua_check_string(L, 1), *name = ty_lua_check_string(L, 2);
  lua_Integer rounds = ty_lua_check_integer(L, 3);
  ty_tensor *t = ty_lua_check(L, 4);
  if (rounds < 1) return ty_lua_refuse(L, 3, "an integer >= 1");
  if (ty_device_of(t) != TY_CPU || t->v.count == 0 || !t->v.data)
    return ty_lua_refuse(L, 4, "a tensor with memory of the CPU");
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return luaL_error(L, "probe.time: %s", dlerror());
  void *symbol = dlsym(library, name);
  if (!symbol) {
    dlclose(library);
    return luaL_error(L, "probe.time: %s has no function %s", path, name);
  }
  measured *fn;
  memcpy(&fn, &symbol, sizeof fn);
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  fn(t->v.data, (long)rounds);
  clock_gettime(CLOCK_MONOTONIC, &end);
  dlclose(library);
  lua_pushnumber(L, (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec));
  return 1;
}

/* ---- one instruction after the other: the processor traps after each while its trap flag is set ---- */

#define TRAP_FLAG "0x100"

static struct {
  uintptr_t low, high; /* the library's code: others' instructions are not noted */
  uintptr_t *at;
  int64_t count, most, lost;
} steps;

static void on_trap(int number, siginfo_t *info, void *context) {
  uintptr_t at = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
  if (at < steps.low || at >= steps.high) return;
  if (steps.count < steps.most) steps.at[steps.count++] = at;
  else steps.lost++;
}

static int find_code(struct dl_phdr_info *info, size_t size, void *unused) {
  uintptr_t inside = (uintptr_t)&ty_error; /* any function of the library */
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *p = &info->dlpi_phdr[i];
    uintptr_t low = info->dlpi_addr + p->p_vaddr;
    if (p->p_type != PT_LOAD || !(p->p_flags & PF_X) || inside < low || inside >= low + p->p_memsz) continue;
    steps.low = low;
    steps.high = low + p->p_memsz;
    return 1;
  }
  return 0;
}

/* steps(fn, most) -> the addresses of the library's instructions that fn() runs on this thread, in order; how many more
 * there were */
static int probe_steps(lua_State *L) {
  ty_lua_check_callable(L, 1);
  lua_Integer most = ty_lua_check_integer(L, 2);
  if (most < 1 || most > 100000000) return ty_lua_refuse(L, 2, "an integer from 1 to 100000000");
  lua_settop(L, 1);
  steps.at = lua_newuserdatauv(L, (size_t)most * sizeof *steps.at, 0);
  steps.most = most;
  steps.count = steps.lost = 0;
  if (!dl_iterate_phdr(find_code, NULL)) return luaL_error(L, "probe.steps: found no code of the library");
  struct sigaction ours = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO }, before;
  sigemptyset(&ours.sa_mask);
  if (sigaction(SIGTRAP, &ours, &before)) return luaL_error(L, "probe.steps: no signal for traps");
  lua_pushvalue(L, 1);
  __asm__ volatile("pushfq; orq $" TRAP_FLAG ", (%%rsp); popfq" ::: "memory", "cc");
  int status = lua_pcall(L, 0, 0, 0);
  __asm__ volatile("pushfq; andq $~" TRAP_FLAG ", (%%rsp); popfq" ::: "memory", "cc");
  sigaction(SIGTRAP, &before, NULL);
  if (status != LUA_OK) return lua_error(L);
  lua_createtable(L, (int)steps.count, 0);
  for (int64_t i = 0; i < steps.count; i++) {
    lua_pushinteger(L, (lua_Integer)steps.at[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_pushinteger(L, steps.lost);
  return 2;
}

/* where(address) -> the file that it was loaded from, the address there, the function or nil */
static int probe_where(lua_State *L) {
  uintptr_t at = (uintptr_t)ty_lua_check_integer(L, 1);
  Dl_info info;
  void *address;
  memcpy(&address, &at, sizeof address);
  if (!dladdr(address, &info) || !info.dli_fname) return luaL_error(L, "probe.where: no library has this address");
  lua_pushstring(L, info.dli_fname);
  lua_pushinteger(L, (lua_Integer)(at - (uintptr_t)info.dli_fbase));
  if (info.dli_sname) lua_pushstring(L, info.dli_sname);
  else lua_pushnil(L);
  return 3;
}
#else
static int unavailable(lua_State *L) { return luaL_error(L, "probe: only for x86-64 processors under Linux"); }
#define probe_time unavailable
#define probe_steps unavailable
#define probe_where unavailable
#endif

int ty_lua_open_probe(lua_State *L) {
  luaL_newlib(L, ((const luaL_Reg[]){
                     { "time", probe_time }, { "steps", probe_steps }, { "where", probe_where }, { NULL, NULL } }));
  return 1;
}
