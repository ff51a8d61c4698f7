/* require "tycho.core": the table that lua/tycho/init.lua builds on. */
#include "../tycho_lua.h"
#include "handle.h"

__attribute__((visibility("default"))) int luaopen_tycho_core(lua_State *L);

/* For modules of others: see tycho_lua.h. */
static const ty_lua_api api = { TY_LUA_API_VERSION, ty_lua_to, ty_lua_poll, ty_lua_push };

int luaopen_tycho_core(lua_State *L) {
  luaL_checkversion(L);
  lua_settop(L, 0);
  lua_pushlightuserdata(L, (void *)&api);
  lua_setfield(L, LUA_REGISTRYINDEX, TY_LUA_API);
  lua_newtable(L);
  ty_lua_open_handles(L, 1);
  ty_lua_open_ops(L, 1);
  ty_lua_open_values(L, 1);
  ty_lua_open_index(L, 1);
  ty_lua_open_nearest(L, 1);
  ty_lua_open_autograd(L, 1);
  ty_lua_open_program(L);
  lua_setfield(L, 1, "program");
  ty_lua_open_io(L);
  lua_setfield(L, 1, "io");
  ty_lua_open_tokenizer(L);
  lua_setfield(L, 1, "tokenizer_core");
  ty_lua_open_thread(L);
  lua_setfield(L, 1, "thread");
  ty_lua_open_system(L);
  lua_setfield(L, 1, "system");
  ty_lua_open_profile(L);
  lua_setfield(L, 1, "profile_core");
  ty_lua_open_http(L);
  lua_setfield(L, 1, "http_core");
  ty_lua_open_vmap(L);
  lua_setfield(L, 1, "vmap_core");
  ty_lua_open_tier(L);
  lua_setfield(L, 1, "tier_core");
  ty_lua_open_comm(L);
  lua_setfield(L, 1, "comm_core");
  ty_lua_open_probe(L);
  lua_setfield(L, 1, "probe");
  ty_lua_open_cuda(L);
  lua_setfield(L, 1, "cuda");
  ty_lua_remember_core(L, 1);
  lua_pushliteral(L, TY_VERSION);
  lua_setfield(L, 1, "version");
  return 1;
}
