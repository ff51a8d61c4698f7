/* Gradients from Lua: backward, grad, hooks on gradients, hooks on saved tensors, ops defined in Lua. */
#include <stdlib.h>
#include <string.h>

#include "../program/recording.h"
#include "handle.h"

bool ty_lua_call(lua_State *L, int nargs, int nresults) {
  int status = lua_pcall(L, nargs, nresults, 0);
  ty_lua_current = L;
  if (status == LUA_OK) return true;
  const char *text = luaL_tolstring(L, -1, NULL);
  ty_fail(ty_interrupted ? TY_EINTR : TY_EINVAL, "%s", text);
  lua_pop(L, 2);
  return false;
}

/* A Lua value that C holds. Released on any thread of its universe; the registry is shared by all coroutines. */
typedef struct anchor {
  lua_State *main;
  int refs, ref;
} anchor;

static anchor *anchor_new(lua_State *L, int index) {
  anchor *a = malloc(sizeof *a);
  if (!a) luaL_error(L, "out of memory");
  lua_pushvalue(L, index);
  *a = (anchor){ ty_lua_state_of(L)->main, 1, LUA_NOREF };
  a->ref = luaL_ref(L, LUA_REGISTRYINDEX);
  return a;
}

static void anchor_retain(void *owner) { ((anchor *)owner)->refs++; }

static void anchor_release(void *owner) {
  anchor *a = owner;
  if (!a || --a->refs) return;
  luaL_unref(a->main, LUA_REGISTRYINDEX, a->ref);
  free(a);
}

static lua_State *begin_callback(const anchor *a) {
  lua_State *L = ty_lua_current ? ty_lua_current : a->main;
  if (!lua_checkstack(L, 24)) {
    ty_fail(TY_ENOMEM, "the Lua stack is full");
    return NULL;
  }
  lua_rawgeti(L, LUA_REGISTRYINDEX, a->ref);
  return L;
}

/* The tensor that a callback returned, borrowed. Never raises, since the core is running below: NULL after ty_fail(). */
static ty_tensor *returned_tensor(lua_State *L, int index, const char *what) {
  ty_handle *h = lua_touserdata(L, index);
  bool handle = lua_type(L, index) == LUA_TUSERDATA && lua_rawlen(L, index) == sizeof *h &&
                h->magic == &ty_handle_magic;
  if (handle && h->t) return h->t;
  ty_fail(TY_EINVAL, "%s, got %s", what, handle ? "a tensor that was released" : luaL_typename(L, index));
  return NULL;
}

/* ---- options ---- */

static bool flag(lua_State *L, int index, const char *name) {
  if (!lua_istable(L, index)) return false;
  lua_getfield(L, index, name);
  bool on = lua_toboolean(L, -1);
  lua_pop(L, 1);
  return on;
}

static ty_backward_options options(lua_State *L, int index, const char *function) {
  if (!lua_isnoneornil(L, index) && !lua_istable(L, index))
    luaL_error(L, "%s: expected a table of options (keep_graph, create_graph, allow_unused), got %s", function,
               ty_lua_typename(L, index));
  return (ty_backward_options){ flag(L, index, "keep_graph"), flag(L, index, "create_graph"),
                                flag(L, index, "allow_unused") };
}

/* ---- backward ---- */

/* x:backward([gradient] [, options]) */
static int backward(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1), *g = ty_lua_to(L, 2);
  ty_backward_options o = options(L, g || lua_isnil(L, 2) ? 3 : 2, "backward");
  ty_lua_current = L;
  ty_lua_tidy(L);
  return ty_run_backward(&t, &g, 1, NULL, NULL, 0, o) ? 0 : ty_lua_error(L);
}

/* A tensor or a table of tensors as an array on the Lua stack. */
static ty_tensor **list_of(lua_State *L, int index, int *n, const char *what, bool holes) {
  if (ty_lua_to(L, index)) {
    ty_tensor **one = lua_newuserdatauv(L, sizeof *one, 0);
    one[0] = ty_lua_to(L, index);
    *n = 1;
    return one;
  }
  if (!lua_istable(L, index))
    luaL_error(L, "grad: %s: expected a tensor or a table of tensors, got %s", what, ty_lua_typename(L, index));
  int count = holes ? *n : (int)lua_rawlen(L, index);
  ty_tensor **list = lua_newuserdatauv(L, sizeof *list * (size_t)(count + 1), 0);
  for (int i = 0; i < count; i++) {
    lua_rawgeti(L, index, i + 1);
    list[i] = holes && !lua_toboolean(L, -1) ? NULL : ty_lua_to(L, -1);
    if (!list[i] && !(holes && !lua_toboolean(L, -1)))
      luaL_error(L, "grad: %s[%d]: expected a tensor, got %s", what, i + 1, ty_lua_typename(L, -1));
    lua_pop(L, 1);
  }
  *n = count;
  return list;
}

/* grad(outputs, inputs [, {grad_outputs =, create_graph =, keep_graph =, allow_unused =}]) */
static int grad(lua_State *L) {
  int nout, nin, ng;
  if (lua_isfunction(L, 1)) { /* of a function: lua/tycho/functional.lua */
    lua_settop(L, 2);
    ty_lua_push_methods(L);
    lua_pushstring(L, "__grad");
    lua_rawget(L, -2);
    lua_pushvalue(L, 1);
    lua_pushvalue(L, 2);
    lua_call(L, 2, 1);
    return 1;
  }
  bool single = ty_lua_to(L, 2) != NULL;
  ty_backward_options o = options(L, 3, "grad");
  ty_tensor **outputs = list_of(L, 1, &nout, "outputs", false), **inputs = list_of(L, 2, &nin, "inputs", false),
            **grads = NULL;
  if (lua_istable(L, 3)) {
    lua_getfield(L, 3, "grad_outputs");
    ng = nout;
    if (!lua_isnil(L, -1)) grads = list_of(L, lua_gettop(L), &ng, "grad_outputs", true);
    if (grads && ng != nout) return luaL_error(L, "grad: grad_outputs: expected %d, got %d", nout, ng);
  }
  ty_tensor **results = lua_newuserdatauv(L, sizeof *results * (size_t)(nin + 1), 0);
  ty_handle **h = lua_newuserdatauv(L, sizeof *h * (size_t)(nin + 1), 0);
  lua_createtable(L, nin, 0);
  for (int i = 0; i < nin; i++) {
    h[i] = ty_lua_push_empty(L);
    lua_rawseti(L, -2, i + 1);
  }
  ty_lua_current = L;
  if (!ty_run_backward(outputs, grads, nout, inputs, results, nin, o)) return ty_lua_error(L);
  for (int i = 0; i < nin; i++) {
    h[i]->t = results[i];
    if (results[i]) continue;
    lua_pushboolean(L, 0); /* unused: false keeps the list without holes */
    lua_rawseti(L, -2, i + 1);
  }
  if (single) lua_rawgeti(L, -1, 1);
  return 1;
}

/* ---- leaves ---- */

static int requires_grad_(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  bool on = lua_isnoneornil(L, 2) || lua_toboolean(L, 2);
  if (on && !ty_is_float(ty_dtype_of(t)))
    return luaL_error(L, "requires_grad_: only float tensors have gradients, got %s", ty_describe(t));
  if (!on && t->node)
    return luaL_error(L, "requires_grad_: only leaves can stop requiring a gradient; use :detach() on %s",
                      ty_describe(t));
  ty_set_requires_grad(t, on);
  lua_settop(L, 1);
  return 1;
}

static int retain_grad(lua_State *L) {
  if (!ty_retain_grad(ty_lua_check(L, 1))) return ty_lua_error(L);
  lua_settop(L, 1);
  return 1;
}

/* set_grad(g): g a tensor of the same shape, or nil */
static int set_grad(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1), *g = lua_isnoneornil(L, 2) ? NULL : ty_lua_check(L, 2);
  if (g && (!ty_same_shape(&g->v, &t->v) || ty_dtype_of(g) != ty_dtype_of(t)))
    return luaL_error(L, "set_grad: expected a gradient like %s, got %s", ty_describe(t), ty_describe(g));
  if (t->node) return luaL_error(L, "set_grad: expected a leaf, got %s", ty_describe(t));
  if (ty_is_recording()) ty_recorded_grad(t, false);
  ty_retain(g);
  ty_release(t->grad);
  t->grad = g;
  return 0;
}

/* ---- the gradients of lists of leaves, for optimizers ---- */

static ty_tensor *leaf_at(lua_State *L, int list, lua_Integer i) {
  lua_rawgeti(L, list, i);
  ty_handle *h = ty_lua_handle_at(L, -1);
  if (!h || !h->t)
    luaL_error(L, "parameter %d: expected a tensor, got %s", (int)i,
               h ? "one that was released (by its scope, <close> or :free())" : luaL_typename(L, -1));
  return h->t;
}

/* clear_grads(list): drops them all. */
static int clear_grads(lua_State *L) {
  ty_lua_check_type(L, 1, LUA_TTABLE);
  lua_Integer n = (lua_Integer)lua_rawlen(L, 1);
  for (lua_Integer i = 1; i <= n; i++) {
    ty_clear_grad(leaf_at(L, 1, i));
    lua_pop(L, 1);
  }
  return 0;
}

/* gather_grads(list, known, grads): grads[i], a handle kept from call to call, gets the gradient of list[i]. False when
 * the list is not what it was, or when other leaves have gradients than those with a handle (the others: false). */
static int gather_grads(lua_State *L) {
  for (int i = 1; i <= 3; i++) ty_lua_check_type(L, i, LUA_TTABLE);
  lua_Integer n = (lua_Integer)lua_rawlen(L, 1);
  bool same = (lua_Integer)lua_rawlen(L, 2) == n;
  for (lua_Integer i = 1; i <= n && same; i++) {
    ty_tensor *t = leaf_at(L, 1, i);
    lua_rawgeti(L, 2, i);
    lua_rawgeti(L, 3, i);
    if (ty_is_recording()) ty_recorded_grad(t, true);
    ty_handle *h = ty_lua_handle_at(L, -1);
    ty_tensor *g = ty_grad_of(t);
    same = lua_rawequal(L, -2, -3) && !h == !g;
    if (same && h) {
      ty_release(h->t);
      h->t = ty_retain(g);
    }
    lua_pop(L, 3);
  }
  lua_pushboolean(L, same);
  return 1;
}

/* drop_grads(grads): empties the handles. */
static int drop_grads(lua_State *L) {
  ty_lua_check_type(L, 1, LUA_TTABLE);
  lua_Integer n = (lua_Integer)lua_rawlen(L, 1);
  for (lua_Integer i = 1; i <= n; i++) {
    lua_rawgeti(L, 1, i);
    ty_handle *h = ty_lua_handle_at(L, -1);
    if (h) {
      ty_release(h->t);
      h->t = NULL;
    }
    lua_pop(L, 1);
  }
  return 0;
}

/* ---- hooks on gradients ---- */

static ty_tensor *call_hook(void *owner, ty_tensor *g, bool *failed) {
  lua_State *L = begin_callback(owner);
  *failed = true;
  if (!L) return NULL;
  ty_lua_push(L, ty_retain(g));
  if (!ty_lua_call(L, 1, 1)) return NULL;
  bool nothing = lua_isnil(L, -1);
  ty_tensor *r = nothing ? NULL
                         : ty_retain(returned_tensor(L, -1, "register_hook: the hook must return a tensor or nothing"));
  *failed = !r && !nothing;
  lua_pop(L, 1);
  return r;
}

/* upvalues: the tensor's handle, the id */
static int hook_remove(lua_State *L) {
  ty_tensor *t = ty_lua_to(L, lua_upvalueindex(1));
  if (t) ty_remove_hook(t, (uint64_t)lua_tointeger(L, lua_upvalueindex(2)));
  return 0;
}

/* register_hook(fn) -> {remove = function} */
static int register_hook(lua_State *L) {
  ty_tensor *t = ty_lua_check(L, 1);
  ty_lua_check_callable(L, 2);
  ty_hook *h = malloc(sizeof *h);
  if (!h) return luaL_error(L, "out of memory");
  *h = (ty_hook){ .call = call_hook, .release = anchor_release, .owner = anchor_new(L, 2) };
  if (!ty_add_hook(t, h)) return ty_lua_error(L);
  lua_createtable(L, 0, 1);
  lua_pushvalue(L, 1);
  lua_pushinteger(L, (lua_Integer)h->id);
  lua_pushcclosure(L, hook_remove, 2);
  lua_setfield(L, -2, "remove");
  return 1;
}

/* ---- hooks on saved tensors: the anchor holds {pack, unpack}. pack(tensor, op, argument or "output") ---- */

static bool push_hook(lua_State *L, int which) {
  lua_rawgeti(L, -1, which);
  lua_remove(L, -2);
  return true;
}

static void *pack(void *owner, ty_tensor *t, const char *op, const char *what) {
  lua_State *L = begin_callback(owner);
  if (!L) return NULL;
  const ty_saved_hooks *hooks = ty_set_saved_hooks(NULL); /* what pack computes is not packed itself */
  bool was = ty_set_grad_enabled(false);
  push_hook(L, 1);
  ty_lua_push(L, ty_retain(t));
  lua_pushstring(L, op);
  lua_pushstring(L, what);
  void *packed = NULL;
  if (ty_lua_call(L, 3, 1))
    packed = (void *)((intptr_t)luaL_ref(L, LUA_REGISTRYINDEX) + 4); /* LUA_REFNIL is -1: never NULL */
  ty_set_grad_enabled(was);
  ty_set_saved_hooks(hooks);
  return packed;
}

static int ref_of(void *packed) { return (int)((intptr_t)packed - 4); }

static ty_tensor *unpack(void *owner, void *packed) {
  lua_State *L = begin_callback(owner);
  if (!L) return NULL;
  const ty_saved_hooks *hooks = ty_set_saved_hooks(NULL);
  push_hook(L, 2);
  lua_rawgeti(L, LUA_REGISTRYINDEX, ref_of(packed));
  ty_tensor *t = NULL;
  if (ty_lua_call(L, 1, 1)) {
    ty_tensor *r = returned_tensor(L, -1, "saved_tensor_hooks: unpack must return a tensor");
    t = r ? ty_tensor_alias(r) : NULL;
    lua_pop(L, 1);
  }
  ty_set_saved_hooks(hooks);
  return t;
}

static void drop(void *owner, void *packed) { luaL_unref(((anchor *)owner)->main, LUA_REGISTRYINDEX, ref_of(packed)); }

typedef struct hooks_box {
  ty_saved_hooks hooks;
  const ty_saved_hooks *before;
  bool open;
} hooks_box;

static int hooks_close(lua_State *L) {
  hooks_box *b = lua_touserdata(L, 1);
  if (!b || !b->open) return 0;
  b->open = false;
  ty_set_saved_hooks(b->before);
  anchor_release(b->hooks.owner);
  return 0;
}

static int hooks_results(lua_State *L, int status, lua_KContext context) { return lua_gettop(L) - 1; }

/* saved_tensor_hooks(pack, unpack, fn, ...) -> what fn returns */
static int saved_tensor_hooks(lua_State *L) {
  for (int i = 1; i <= 2; i++) ty_lua_check_callable(L, i);
  ty_lua_check_callable(L, 3);
  hooks_box *b = lua_newuserdatauv(L, sizeof *b, 0);
  b->open = false;
  if (luaL_newmetatable(L, "tycho.saved_tensor_hooks")) {
    lua_pushcfunction(L, hooks_close), lua_setfield(L, -2, "__close");
    lua_pushcfunction(L, hooks_close), lua_setfield(L, -2, "__gc");
  }
  lua_setmetatable(L, -2);
  lua_createtable(L, 2, 0);
  lua_pushvalue(L, 1), lua_rawseti(L, -2, 1);
  lua_pushvalue(L, 2), lua_rawseti(L, -2, 2);
  b->hooks = (ty_saved_hooks){ pack, unpack, drop, anchor_retain, anchor_release, anchor_new(L, lua_gettop(L)) };
  lua_pop(L, 1);
  lua_replace(L, 1); /* the box takes pack's place */
  lua_remove(L, 2);
  lua_toclose(L, 1);
  b->open = true;
  b->before = ty_set_saved_hooks(&b->hooks);
  lua_callk(L, lua_gettop(L) - 2, LUA_MULTRET, 0, hooks_results);
  return hooks_results(L, LUA_OK, 0);
}

/* ---- ops defined in Lua ---- */

static bool call_backward(void *owner, ty_tensor *const *g, int nout, ty_tensor **dx, int nin) {
  lua_State *L = begin_callback(owner);
  if (!L) return false;
  if (!lua_checkstack(L, nout + nin + 8)) return ty_fail(TY_ENOMEM, "the Lua stack is full");
  for (int i = 0; i < nout; i++) {
    if (g[i]) ty_lua_push(L, ty_retain(g[i]));
    else lua_pushnil(L);
  }
  int base = lua_gettop(L) - nout - 1;
  if (!ty_lua_call(L, nout, nin)) return false;
  bool ok = true;
  for (int i = 0; i < nin; i++) {
    int at = base + 1 + i;
    dx[i] = lua_isnil(L, at)
                ? NULL
                : ty_retain(returned_tensor(L, at, "custom op: backward must return a tensor or nil for each input"));
    ok = ok && (dx[i] || lua_isnil(L, at));
  }
  lua_settop(L, base);
  return ok;
}

typedef struct named {
  anchor *backward;
  char name[64];
} named;

static bool custom_backward(void *owner, ty_tensor *const *g, int nout, ty_tensor **dx, int nin) {
  return call_backward(((named *)owner)->backward, g, nout, dx, nin);
}

static void custom_release(void *owner) {
  anchor_release(((named *)owner)->backward);
  free(owner);
}

/* record(name, inputs, outputs, backward): outputs[i] get a node whose gradients backward(g1, g2 ...) computes. */
static int record(lua_State *L) {
  int nin, nout;
  const char *name = ty_lua_check_string(L, 1);
  ty_tensor **in = list_of(L, 2, &nin, "inputs", false), **out = list_of(L, 3, &nout, "outputs", false);
  ty_lua_check_callable(L, 4);
  bool wanted = false;
  for (int i = 0; i < nin; i++) wanted |= in[i]->requires_grad;
  if (!wanted || !ty_grad_enabled()) return 0;
  for (int i = 0; i < nout; i++)
    if (out[i]->requires_grad)
      return luaL_error(L, "%s: forward must return new tensors computed under no_grad, output %d has a history", name,
                        i + 1);
  named *owner = malloc(sizeof *owner);
  if (!owner) return luaL_error(L, "out of memory");
  strncpy(owner->name, name, sizeof owner->name - 1);
  owner->name[sizeof owner->name - 1] = '\0';
  owner->backward = anchor_new(L, 4);
  ty_custom custom = { owner->name, custom_backward, custom_release, owner };
  return ty_record_custom(custom, in, nin, out, nout) ? 0 : ty_lua_error(L);
}

void ty_lua_open_autograd(lua_State *L, int table) {
  lua_pushvalue(L, table);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "grad", grad },
                                    { "saved_tensor_hooks", saved_tensor_hooks },
                                    { "record", record },
                                    { "clear_grads", clear_grads },
                                    { "gather_grads", gather_grads },
                                    { "drop_grads", drop_grads },
                                    { NULL, NULL } },
                0);
  lua_pop(L, 1);
  ty_lua_push_methods(L);
  luaL_setfuncs(L,
                (const luaL_Reg[]){ { "backward", backward },
                                    { "requires_grad_", requires_grad_ },
                                    { "retain_grad", retain_grad },
                                    { "set_grad", set_grad },
                                    { "register_hook", register_hook },
                                    { NULL, NULL } },
                0);
  lua_pop(L, 1);
}
