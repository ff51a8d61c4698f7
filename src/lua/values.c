/* Values between Lua and tensors: ty.tensor{...}, item, tolist, properties, to, printing; the generator; threads. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../device/device.h"
#include "../io/file.h"
#include "../program/recording.h"
#include "handle.h"
#include "../ops/vmap.h"

/* ---- from Lua tables ---- */

typedef struct build {
  lua_State *L;
  int ndim;
  int64_t size[TY_MAX_DIMS];
  ty_dtype dtype;
  char *at;
} build;

/* Follows the first elements down to learn the shape. */
static void find_shape(build *b, int index) {
  lua_State *L = b->L;
  lua_pushvalue(L, index);
  while (lua_istable(L, -1)) {
    if (b->ndim == TY_MAX_DIMS) luaL_error(L, "tensor: more than %d levels of tables", TY_MAX_DIMS);
    int64_t n = (int64_t)lua_rawlen(L, -1);
    b->size[b->ndim++] = n;
    if (n == 0) break;
    lua_rawgeti(L, -1, 1);
    lua_remove(L, -2);
  }
  lua_pop(L, 1);
}

/* Checks that every table has its level's length and joins the classes of the values: bool < integer < float. */
static int check_level(build *b, int index, int level) {
  lua_State *L = b->L;
  if (level == b->ndim) {
    switch (lua_type(L, index)) {
      case LUA_TBOOLEAN: return 0;
      case LUA_TNUMBER: return lua_isinteger(L, index) ? 1 : 2;
      default:
        return luaL_error(L, "tensor: expected numbers or booleans %d tables deep, got %s", level,
                          ty_lua_typename(L, index));
    }
  }
  if (!lua_istable(L, index) || (int64_t)lua_rawlen(L, index) != b->size[level])
    return luaL_error(
        L, "tensor: expected %d elements in every table of level %d, got %s", (int)b->size[level], level + 1,
        lua_istable(L, index) ? lua_pushfstring(L, "%d", (int)lua_rawlen(L, index)) : ty_lua_typename(L, index));
  luaL_checkstack(L, 4, "tensor");
  int class = 0;
  for (int64_t i = 1; i <= b->size[level]; i++) {
    lua_rawgeti(L, index, i);
    int c = check_level(b, lua_gettop(L), level + 1);
    class = c > class ? c : class;
    lua_pop(L, 1);
  }
  return class;
}

static void fill_level(build *b, int index, int level) {
  lua_State *L = b->L;
  if (level == b->ndim) {
    ty_value v = lua_isboolean(L, index)   ? ty_value_of_int(lua_toboolean(L, index))
                 : lua_isinteger(L, index) ? ty_value_of_int(lua_tointeger(L, index))
                                           : ty_value_of_float(lua_tonumber(L, index));
    ty_store_scalar(b->at, b->dtype, v);
    b->at += ty_dtype_size[b->dtype];
    return;
  }
  if (!lua_istable(L, index)) luaL_error(L, "tensor: the values changed while they were read"); /* by a finalizer */
  for (int64_t i = 1; i <= b->size[level]; i++) {
    lua_rawgeti(L, index, i);
    fill_level(b, lua_gettop(L), level + 1);
    lua_pop(L, 1);
  }
}

static bool option(lua_State *L, int index, const char *name) {
  if (!lua_istable(L, index)) return false;
  lua_getfield(L, index, name);
  if (!lua_isnil(L, -1)) return true;
  lua_pop(L, 1);
  return false;
}

/* Only the named options may be there. */
static void check_options(lua_State *L, int index, const char *function, const char *const *names) {
  if (!lua_istable(L, index)) return;
  lua_pushnil(L);
  while (lua_next(L, index)) {
    lua_pop(L, 1);
    const char *key = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "(a list)";
    int i = 0;
    while (names[i] && strcmp(names[i], key) != 0) i++;
    if (!names[i]) luaL_error(L, "%s: unknown option \"%s\"", function, key);
  }
}

static ty_dtype check_dtype(lua_State *L, int index, const char *function) {
  ty_dtype d;
  if (lua_type(L, index) != LUA_TSTRING)
    luaL_error(L, "%s: dtype: expected a name, got %s", function, ty_lua_typename(L, index));
  if (!ty_dtype_parse(lua_tostring(L, index), &d)) luaL_error(L, "%s: dtype: %s", function, ty_error());
  return d;
}

/* tensor(values, {dtype =, device =, requires_grad =}) */
static int tensor(lua_State *L) {
  build b = { .L = L };
  if (lua_isnoneornil(L, 1)) return ty_lua_refuse(L, 1, "a number or nested tables");
  if (ty_lua_to(L, 1))
    return luaL_error(L, "tensor: expected a number or nested tables, got a tensor; use :clone() or :to()");
  if (!lua_isnoneornil(L, 2)) ty_lua_check_type(L, 2, LUA_TTABLE);
  check_options(L, 2, "tensor", (const char *const[]){ "dtype", "device", "requires_grad", NULL });
  find_shape(&b, 1);
  int class = check_level(&b, 1, 0);
  bool empty = b.ndim && b.size[b.ndim - 1] == 0;
  b.dtype = class == 0 && !empty ? TY_BOOL : class == 1 ? TY_I64 : TY_F32;
  if (option(L, 2, "dtype")) b.dtype = check_dtype(L, -1, "tensor");
  if (ty_is_quantized(b.dtype))
    return luaL_error(L, "tensor: dtype: numbers are not %s; make a float tensor and call :to \"%s\"",
                      ty_dtype_name[b.dtype], ty_dtype_name[b.dtype]);
  int device = TY_CPU;
  if (option(L, 2, "device") && !ty_device_parse(ty_lua_check_string(L, -1), &device))
    return luaL_error(L, "tensor: device: %s", ty_error());
  bool grad = option(L, 2, "requires_grad") && lua_toboolean(L, -1);
  if (grad && !ty_is_float(b.dtype))
    return luaL_error(L, "tensor: requires_grad: only float tensors have gradients, this is %s",
                      ty_dtype_name[b.dtype]);
  ty_lua_poll(L);
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_tensor_new(device == TY_META ? TY_META : TY_CPU, b.dtype, b.ndim, b.size);
  if (!h->t) return ty_lua_error(L);
  b.at = h->t->v.data;
  if (b.at) fill_level(&b, 1, 0);
  if (device >= TY_CUDA) {
    ty_handle *host = h;
    h = ty_lua_push_empty(L);
    h->t = ty_tensor_new(device, b.dtype, b.ndim, b.size);
    if (!h->t || !ty_copy_into(h->t, host->t)) return ty_lua_error(L);
  }
  if (ty_is_recording()) ty_recorded_host_write(h->t);
  h->t->requires_grad = grad;
  return 1;
}

/* ---- to Lua ---- */

static void push_element(lua_State *L, const ty_tensor *t, int64_t offset) {
  const char *p = (const char *)t->v.data + offset * ty_dtype_size[t->v.dtype];
  switch (ty_dtype_of(t)) {
    case TY_BOOL: lua_pushboolean(L, *(const uint8_t *)p); break;
    case TY_I64: lua_pushinteger(L, *(const int64_t *)(const void *)p); break;
    case TY_U8:
    case TY_I8:
    case TY_I16:
    case TY_I32: lua_pushinteger(L, (lua_Integer)ty_load_scalar(t, offset)); break;
    default: lua_pushnumber(L, ty_load_scalar(t, offset));
  }
}

void ty_lua_need_values(lua_State *L, const ty_tensor *t, const char *function) {
  if (t->batch && !ty_map_check_value(t, function)) ty_lua_error(L);
  if (ty_device_of(t) == TY_META) luaL_error(L, "%s: a meta tensor has no values: %s", function, ty_describe(t));
  if (ty_is_recording() && !ty_recorded_host_read(t, function)) ty_lua_error(L);
}

/* t where the host can read it: itself, or a copy of what is on a GPU or block-quantized, which is pushed. */
static const ty_tensor *readable(lua_State *L, ty_tensor *t) {
  bool blocks = ty_is_quantized(ty_dtype_of(t)) && ty_device_of(t) != TY_META;
  if (ty_device_of(t) < TY_CUDA && !blocks) return t;
  ty_handle *h = ty_lua_push_empty(L);
  ty_scope scope;
  ty_scope_open(&scope);
  ty_tensor *values = blocks ? ty_dequantize(t, TY_F32) : t;
  h->t = values ? ty_host_tensor(values) : NULL;
  ty_scope_close(&scope);
  if (!h->t) ty_lua_error(L);
  return h->t;
}

static int item(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  ty_lua_need_values(L, t, "item");
  if (t->v.count != 1) return luaL_error(L, "item: expected a tensor with one element, got %s", ty_describe(t));
  ty_value v;
  if (!ty_read_value(t, &v)) return ty_lua_error(L);
  if (t->v.dtype == TY_BOOL) lua_pushboolean(L, v.i != 0);
  else if (v.kind == TY_INT) lua_pushinteger(L, v.i);
  else lua_pushnumber(L, v.f);
  return 1;
}

static void push_list(lua_State *L, const ty_tensor *t, int dim, int64_t offset) {
  if (dim == t->v.ndim) {
    push_element(L, t, offset);
    return;
  }
  luaL_checkstack(L, 2, "tolist");
  lua_createtable(L, (int)(t->v.size[dim] < INT32_MAX ? t->v.size[dim] : 0), 0);
  for (int64_t i = 0; i < t->v.size[dim]; i++) {
    push_list(L, t, dim + 1, offset + i * t->v.stride[dim]);
    lua_rawseti(L, -2, i + 1);
  }
}

static int tolist(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  ty_lua_need_values(L, t, "tolist");
  push_list(L, readable(L, t), 0, 0);
  return 1;
}

/* ---- printing ---- */

enum { EDGE = 3, ALL = 1000 };

/* One number format for all shown values, so that columns line up. */
typedef struct print {
  luaL_Buffer b;
  const ty_tensor *t;
  int width, decimals;
  bool scientific, integer;
  bool shorten;
} print;

static void format_element(const print *p, char *text, size_t n, int64_t offset) {
  const ty_tensor *t = p->t;
  if (t->v.dtype == TY_BOOL) snprintf(text, n, "%s", ty_load_scalar(t, offset) != 0 ? "true" : "false");
  else if (t->v.dtype == TY_I64) snprintf(text, n, "%lld", (long long)((const int64_t *)t->v.data)[offset]);
  else if (!ty_is_float(ty_dtype_of(t))) snprintf(text, n, "%lld", (long long)ty_load_scalar(t, offset));
  else if (p->integer && isfinite(ty_load_scalar(t, offset))) snprintf(text, n, "%.0f.", ty_load_scalar(t, offset));
  else snprintf(text, n, p->scientific ? "%.*e" : "%.*f", p->decimals, ty_load_scalar(t, offset));
}

typedef void visit(print *p, int64_t offset, void *context);

static void each_shown(print *p, int dim, int64_t offset, visit *f, void *context) {
  const ty_view *v = &p->t->v;
  if (dim == v->ndim) {
    f(p, offset, context);
    return;
  }
  for (int64_t i = 0; i < v->size[dim]; i++) {
    if (p->shorten && v->size[dim] > 2 * EDGE && i == EDGE) i = v->size[dim] - EDGE;
    each_shown(p, dim + 1, offset + i * v->stride[dim], f, context);
  }
}

static void find_range(print *p, int64_t offset, void *context) {
  double *range = context, x = fabs(ty_load_scalar(p->t, offset));
  if (!isfinite(x)) return;
  if (x != floor(x)) range[2] = 1;
  if (x > range[1]) range[1] = x;
  if (x != 0 && x < range[0]) range[0] = x;
}

static void find_width(print *p, int64_t offset, void *context) {
  char text[64];
  format_element(p, text, sizeof text, offset);
  int n = (int)strlen(text);
  if (n > p->width) p->width = n;
}

static void print_level(lua_State *L, print *p, int dim, int64_t offset) {
  const ty_view *v = &p->t->v;
  char text[64];
  if (dim == v->ndim) {
    format_element(p, text, sizeof text, offset);
    for (int pad = p->width - (int)strlen(text); pad > 0; pad--) luaL_addchar(&p->b, ' ');
    luaL_addstring(&p->b, text);
    return;
  }
  luaL_addchar(&p->b, '{');
  bool rows = dim < v->ndim - 1;
  for (int64_t i = 0; i < v->size[dim]; i++) {
    if (i) {
      luaL_addstring(&p->b, rows ? "," : ", ");
      for (int k = 0; rows && k < (v->ndim - 1 - dim); k++) luaL_addchar(&p->b, '\n');
      for (int k = 0; rows && k <= dim; k++) luaL_addchar(&p->b, ' ');
    }
    if (p->shorten && v->size[dim] > 2 * EDGE && i == EDGE) {
      luaL_addstring(&p->b, "...");
      i = v->size[dim] - EDGE - 1;
      continue;
    }
    print_level(L, p, dim + 1, offset + i * v->stride[dim]);
  }
  luaL_addchar(&p->b, '}');
}

static int tostring(lua_State *L) {
  ty_handle *h = lua_touserdata(L, 1);
  if (!h->t) {
    lua_pushliteral(L, "tensor (released)");
    return 1;
  }
  if (ty_is_recording() && !ty_recorded_host_read(h->t, "tostring")) return ty_lua_error(L);
  const ty_tensor *t = h->t;
  if (t->batch) { /* values are those of many */
    lua_pushfstring(L, "tensor %s of each sample of ty.vmap", ty_describe(t));
    return 1;
  }
  print p = { .t = readable(L, h->t), .decimals = 4, .shorten = t->v.count > ALL };
  char tail[256];
  snprintf(tail, sizeof tail, "%s%s%s", ty_describe(t), t->requires_grad ? " requires_grad" : "", "");
  luaL_buffinit(L, &p.b);
  luaL_addstring(&p.b, "tensor ");
  luaL_addstring(&p.b, tail);
  if (t->node) {
    luaL_addstring(&p.b, " from ");
    luaL_addstring(&p.b, ty_node_name(t->node));
  }
  if (ty_device_of(t) != TY_META) {
    if (ty_is_float(ty_dtype_of(p.t))) {
      double range[3] = { INFINITY, 0, 0 };
      each_shown(&p, 0, 0, find_range, range);
      p.integer = range[2] == 0 && range[1] < 1e6;
      p.scientific = !p.integer &&
                     (range[1] >= 1e5 || (range[0] < 1e-4 && range[1] < 1e-1) || range[1] / range[0] > 1e8);
    }
    each_shown(&p, 0, 0, find_width, NULL);
    luaL_addstring(&p.b, t->v.ndim ? "\n" : " ");
    print_level(L, &p, 0, 0);
  }
  luaL_pushresult(&p.b);
  return 1;
}

/* ---- shape, dtype, device ---- */

static int numel(lua_State *L) {
  lua_pushinteger(L, ty_lua_check(L, 1)->v.count);
  return 1;
}

static int nbytes(lua_State *L) {
  lua_pushinteger(L, ty_view_bytes(&ty_lua_check(L, 1)->v));
  return 1;
}

static int length(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  if (t->v.ndim == 0) return luaL_error(L, "#: a 0-d tensor has no length");
  lua_pushinteger(L, t->v.size[0]);
  return 1;
}

static void push_ints(lua_State *L, int n, const int64_t *v) {
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    lua_pushinteger(L, v[i]);
    lua_rawseti(L, -2, i + 1);
  }
}

static int size(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  if (lua_isnoneornil(L, 2)) {
    ty_lua_push_shape(L, t);
    return 1;
  }
  lua_Integer d = ty_lua_check_integer(L, 2), n = t->v.ndim;
  if (d < -n || d >= n)
    return luaL_error(L, "size: dim: expected a dimension in [%d, %d], got %d for %s", (int)-n, (int)n - 1, (int)d,
                      ty_describe(t));
  lua_pushinteger(L, t->v.size[d < 0 ? d + n : d]);
  return 1;
}

static int stride(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  push_ints(L, t->v.ndim, t->v.stride);
  return 1;
}

static int is_contiguous(lua_State *L) {
  lua_pushboolean(L, ty_lua_check(L, 1)->v.contiguous);
  return 1;
}

/* to("f16"), to("cpu"), to(other), to{dtype =, device =}; before options: {non_blocking =} */
static int to(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  ty_dtype dtype = ty_dtype_of(t);
  int device = ty_device_of(t), options = lua_gettop(L) >= 3 ? 3 : 2;
  if (options == 3) {
    ty_lua_check_type(L, 3, LUA_TTABLE);
    check_options(L, 3, "to", (const char *const[]){ "non_blocking", NULL });
  }
  bool non_blocking = option(L, options, "non_blocking") && lua_toboolean(L, -1);
  if (lua_type(L, 2) == LUA_TSTRING) {
    const char *name = lua_tostring(L, 2);
    if (!ty_dtype_parse(name, &dtype) && !ty_device_parse(name, &device)) {
      if (strncmp(name, "cuda", 4) == 0) return luaL_error(L, "to: %s", ty_error());
      return luaL_error(
          L,
          "to: \"%s\" is neither a dtype (f64 f32 f16 bf16 i64 i32 i16 i8 u8 bool q8_0 q4_0 q2_k q3_k q4_k q6_k nf4 "
          "mxfp4 nvfp4) "
          "nor a device (cpu meta cuda)",
          name);
    }
  } else if (lua_istable(L, 2)) {
    check_options(L, 2, "to", (const char *const[]){ "dtype", "device", "non_blocking", NULL });
    if (option(L, 2, "dtype")) dtype = check_dtype(L, -1, "to");
    if (option(L, 2, "device") && !ty_device_parse(ty_lua_check_string(L, -1), &device))
      return luaL_error(L, "to: %s", ty_error());
  } else {
    ty_tensor *other = ty_lua_to(L, 2);
    if (!other)
      return luaL_error(L, "to: expected a dtype, a device, a tensor or a table of both, got %s", luaL_typename(L, 2));
    dtype = ty_dtype_of(other);
    device = ty_device_of(other);
  }
  if (dtype == ty_dtype_of(t) && device == ty_device_of(t)) {
    lua_settop(L, 1);
    return 1;
  }
  ty_lua_poll(L);
  ty_handle *h = ty_lua_push_empty(L);
  ty_scope scope; /* converted first where that makes it smaller */
  ty_scope_open(&scope);
  bool blocks = ty_is_quantized(ty_dtype_of(t));
  bool first = ty_is_quantized(dtype) || (!blocks && ty_dtype_size[dtype] <= ty_dtype_size[ty_dtype_of(t)]);
  t = first ? ty_to(t, dtype) : t;
  if (t && device != ty_device_of(t)) t = ty_to_device(t, device, non_blocking);
  h->t = ty_retain(ty_to(t, dtype));
  ty_scope_close(&scope);
  return h->t ? 1 : ty_lua_error(L);
}

/* ---- the generator and the threads ---- */

static int manual_seed(lua_State *L) {
  ty_generator state = { .seed = (uint64_t)ty_lua_check_integer(L, 1) };
  if (ty_is_recording() && !ty_recorded_seed(NULL)) return ty_lua_error(L);
  *ty_default_generator() = state;
  return 0;
}

/* rng_state() -> {seed, offset}; rng_state(state) sets it */
static int rng_state(lua_State *L) {
  ty_generator *g = ty_default_generator();
  if (!lua_isnoneornil(L, 1)) {
    ty_lua_check_type(L, 1, LUA_TTABLE);
    int seed_is, offset_is;
    lua_rawgeti(L, 1, 1);
    lua_rawgeti(L, 1, 2);
    ty_generator state = { (uint64_t)lua_tointegerx(L, -2, &seed_is), (uint64_t)lua_tointegerx(L, -1, &offset_is) };
    if (!seed_is || !offset_is) return ty_lua_refuse(L, 1, "a list of two integers, as rng_state() returns it");
    if (ty_is_recording() && !ty_recorded_seed(&state)) return ty_lua_error(L);
    *g = state;
    return 0;
  }
  push_ints(L, 2, (const int64_t[]){ (int64_t)g->seed, (int64_t)g->offset });
  return 1;
}

static int set_threads(lua_State *L) {
  lua_Integer n = ty_lua_opt_integer(L, 1, 0);
  if (n < 0 || n > 1024) return ty_lua_refuse(L, 1, "a number of threads in [0, 1024], 0 for the default");
  ty_set_num_threads((int)n);
  return 0;
}

static int threads(lua_State *L) {
  lua_pushinteger(L, ty_num_threads());
  return 1;
}

static int cpu(lua_State *L) {
  const char *names[32];
  int n = ty_cpu_features(names, 32);
  lua_createtable(L, 0, 3);
  lua_pushstring(L, ty_cpu_isa()), lua_setfield(L, -2, "isa");
  lua_pushinteger(L, ty_num_threads()), lua_setfield(L, -2, "threads");
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) lua_pushstring(L, names[i]), lua_rawseti(L, -2, i + 1);
  lua_setfield(L, -2, "features");
  return 1;
}

/* device_available(name) -> true, or false and why tensors cannot be there */
static int device_available(lua_State *L) {
  int device;
  bool there = ty_device_parse(ty_lua_check_string(L, 1), &device);
  lua_pushboolean(L, there);
  if (there) return 1;
  lua_pushstring(L, ty_error());
  return 2;
}

static int is_tensor(lua_State *L) {
  lua_pushboolean(L, strcmp(ty_lua_typename(L, 1), "tensor") == 0);
  return 1;
}

void ty_lua_open_values(lua_State *L, int table) {
  lua_pushvalue(L, table);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "tensor", tensor },
                                    { "manual_seed", manual_seed },
                                    { "rng_state", rng_state },
                                    { "set_threads", set_threads },
                                    { "threads", threads },
                                    { "cpu", cpu },
                                    { "device_available", device_available },
                                    { "is_tensor", is_tensor },
                                    { NULL, NULL } },
                0);
  lua_pop(L, 1);
  ty_lua_push_methods(L);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "item", item },
                                    { "tolist", tolist },
                                    { "numel", numel },
                                    { "nbytes", nbytes },
                                    { "size", size },
                                    { "stride", stride },
                                    { "is_contiguous", is_contiguous },
                                    { "to", to },
                                    { NULL, NULL } },
                0);
  lua_pop(L, 1);
  lua_getfield(L, table, "Tensor");
  luaL_setfuncs(L, (const luaL_Reg[]){ { "__tostring", tostring }, { "__len", length }, { NULL, NULL } }, 0);
  lua_pop(L, 1);
}
