/* ty.cuda: which GPUs there are, and waiting for them. */
#include "../device/cuda.h"
#include "../device/device.h"
#include "../device/nvml.h"
#include "handle.h"

/* count() -> number of GPUs, and when there is none the reason */
static int count(lua_State *L) {
  const char *why;
  int n = ty_cuda_count(&why);
  lua_pushinteger(L, n);
  if (n) return 1;
  lua_pushstring(L, why);
  return 2;
}

/* describe(index) -> "NVIDIA H100, 80 GiB, compute capability 9.0" */
static int describe(lua_State *L) {
  lua_Integer i = ty_lua_opt_integer(L, 1, 0);
  if (i < 0 || i >= ty_cuda_count(NULL)) return ty_lua_refuse(L, 1, "the number of a GPU from 0");
  lua_pushstring(L, ty_cuda_describe((int)i));
  return 1;
}

/* synchronize(device): waits for a GPU ("cuda"); raises what went wrong in what it had been given to do */
static int synchronize(lua_State *L) {
  int device;
  if (!ty_device_parse(ty_lua_opt_string(L, 1, "cuda"), &device)) return luaL_error(L, "synchronize: %s", ty_error());
  return ty_device_synchronize(device) ? 0 : ty_lua_error(L);
}

/* is_available() -> whether there is a GPU that this build can use */
static int is_available(lua_State *L) {
  lua_pushboolean(L, ty_cuda_count(NULL) > 0);
  return 1;
}

/* energy(index) -> joules that a GPU has taken since its driver was loaded, by NVML, as NVML counts GPUs; nil and the
 * reason where it does not tell */
static int energy(lua_State *L) {
  lua_Integer i = ty_lua_opt_integer(L, 1, 0);
  double joules;
  const char *why;
  if (i < 0 || i > 1023) return ty_lua_refuse(L, 1, "the number of a GPU from 0");
  if (ty_nvml_energy((int)i, &joules, &why)) {
    lua_pushnumber(L, joules);
    return 1;
  }
  lua_pushnil(L);
  lua_pushstring(L, why);
  return 2;
}

/* allow_tf32(on): whether products of f32 on GPUs may round their factors to 10 bits of fraction, which tensor cores
 * multiply; off until it is called */
static int allow_tf32(lua_State *L) {
  ty_lua_check_type(L, 1, LUA_TBOOLEAN);
  ty_cuda_allow_tf32(lua_toboolean(L, 1));
  return 0;
}

/* has_kernel(op, device): whether the op has a kernel there, or none on the CPU either, being made of others */
static int has_kernel(lua_State *L) {
  const char *name = ty_lua_check_string(L, 1);
  const ty_op *op = ty_op_find(name);
  int device;
  if (!op) return ty_lua_refuse(L, 1, "the name of an op");
  if (!ty_device_parse(ty_lua_opt_string(L, 2, "cuda"), &device)) return luaL_error(L, "has_kernel: %s", ty_error());
  ty_kernel *none = ty_device_kernel(TY_CPU, TY_OP_empty); /* that of every row without one */
  lua_pushboolean(L, ty_device_kernel(TY_CPU, (ty_op_id)op->id) == none || ty_device_kernel(device, (ty_op_id)op->id));
  return 1;
}

/* libraries() -> a list of { name, version, path, problem, without }: what was found of NVIDIA's libraries; without a
 * version it is not used, and `without` says what is done instead. Empty where there is no GPU. */
static int libraries(lua_State *L) {
  ty_cuda_found found;
  lua_newtable(L);
  for (int i = 0; ty_cuda_found_library(i, &found); i++) {
    const char *const fields[][2] = { { "name", found.name },
                                      { "version", found.version },
                                      { "path", found.path },
                                      { "problem", found.problem },
                                      { "without", found.without } };
    lua_newtable(L);
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++) {
      lua_pushstring(L, fields[f][1]);
      lua_setfield(L, -2, fields[f][0]);
    }
    lua_seti(L, -2, i + 1);
  }
  return 1;
}

int ty_lua_open_cuda(lua_State *L) {
  luaL_newlib(L, ((luaL_Reg[]){ { "count", count },
                                { "device_count", count },
                                { "is_available", is_available },
                                { "describe", describe },
                                { "energy", energy },
                                { "synchronize", synchronize },
                                { "has_kernel", has_kernel },
                                { "allow_tf32", allow_tf32 },
                                { "libraries", libraries },
                                { NULL, NULL } }));
  ty_lua_open_streams(L, lua_gettop(L));
  return 1;
}
