/* x.name, x[i], x["0:8, :, -1"], x[tensor], x[{ list }] and writes through them. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "../device/device.h"
#include "../ops/op.h"
#include "../program/recording.h"
#include "handle.h"

/* ---- slice strings ---- */

typedef enum item_kind { RANGE, POSITION, REST, NEW_DIM, TENSOR } item_kind;
typedef struct item {
  item_kind kind;
  int64_t start, stop, step;
  ty_tensor *tensor; /* TENSOR: positions or a mask */
} item;

enum { MAX_ITEMS = 2 * TY_MAX_DIMS + 1 };

static const char *skip(const char *s) {
  while (isspace((unsigned char)*s)) s++;
  return s;
}

/* An integer at *s, if one is there. */
static bool integer(const char **s, int64_t *out) {
  const char *p = skip(*s);
  if (!isdigit((unsigned char)*p) && !((*p == '-' || *p == '+') && isdigit((unsigned char)p[1]))) return false;
  char *end;
  *out = strtoll(p, &end, 10);
  *s = end;
  return true;
}

/* "a:b:c", "i", "...", "None" separated by commas. Returns the count or -1. */
static int parse(const char *text, item *items) {
  const char *s = text;
  int n = 0;
  for (;;) {
    if (n == MAX_ITEMS) return -1;
    item *it = &items[n++];
    *it = (item){ .kind = RANGE, .stop = INT64_MAX, .step = 1 };
    s = skip(s);
    if (strncmp(s, "...", 3) == 0) {
      it->kind = REST;
      s += 3;
    } else if (strncmp(s, "None", 4) == 0) {
      it->kind = NEW_DIM;
      s += 4;
    } else {
      bool number = integer(&s, &it->start);
      s = skip(s);
      if (*s == ':') {
        s++;
        integer(&s, &it->stop);
        s = skip(s);
        if (*s == ':') {
          s++;
          integer(&s, &it->step);
        }
      } else if (number) {
        it->kind = POSITION;
      } else {
        return -1;
      }
    }
    s = skip(s);
    if (*s == '\0') return n;
    if (*s++ != ',') return -1;
  }
}

/* ---- a list of slices and tensors ---- */

/* What is between the brackets: slices, and tensors with the dimension of the slices' result that each begins at. */
typedef struct keys {
  item items[MAX_ITEMS];
  int n;
  ty_tensor *tensors[TY_MAX_DIMS];
  int64_t dims[TY_MAX_DIMS];
  int ntensors;
  int64_t steps[4 * MAX_ITEMS]; /* for ty_apply_slices() */
  int nsteps;
} keys;

static int dims_taken(const item *it) {
  switch (it->kind) {
    case RANGE:
    case POSITION: return 1;
    case TENSOR: return ty_dtype_of(it->tensor) == TY_BOOL ? it->tensor->v.ndim : 1;
    default: return 0;
  }
}

/* A position of dimension `dim` of x. */
static bool check_position(const ty_tensor *x, int dim, int64_t position) {
  if (x->v.ndim == 0)
    return ty_fail(TY_EINVAL, "index: expected a tensor with dimensions, got %s; :item() gives its element",
                   ty_describe(x));
  int64_t n = x->v.size[dim];
  if (position >= -n && position < n) return true;
  if (n == 0)
    return ty_fail(TY_EINDEX, "index: dimension %d of x %s is empty, got position %lld", dim, ty_describe(x),
                   (long long)position);
  return ty_fail(TY_EINDEX, "index: expected a position in [%lld, %lld] of dimension %d, got %lld for x %s",
                 (long long)-n, (long long)n - 1, dim, (long long)position, ty_describe(x));
}

static void add_step(keys *k, int64_t what, int64_t a, int64_t b, int64_t c) {
  int64_t *step = k->steps + k->nsteps;
  step[0] = what, step[1] = a, step[2] = b, step[3] = c;
  k->nsteps += 4;
}

/* Checks the items against x, and makes the steps and the tensors' dimensions of them. text: as the user wrote it. */
static bool plan(keys *k, const ty_tensor *x, const char *text) {
  int taken = 0, rest = 0;
  for (int i = 0; i < k->n; i++) {
    taken += dims_taken(&k->items[i]);
    rest += k->items[i].kind == REST;
  }
  if (k->n == 1 && k->items[0].kind == POSITION && x->v.ndim == 0) return check_position(x, 0, 0);
  if (taken > x->v.ndim || rest > 1)
    return ty_fail(TY_EINVAL,
                   rest > 1 ? "index: \"%s\" has more than one ... for x %s"
                            : "index: \"%s\" names more dimensions than x %s has",
                   text, ty_describe(x));
  int at = 0, dim = 0; /* the next dimension of the result, and of x */
  for (int i = 0; i < k->n; i++) {
    const item *it = &k->items[i];
    int n = it->kind == REST ? x->v.ndim - taken : dims_taken(it);
    switch (it->kind) {
      case NEW_DIM: add_step(k, TY_SLICE_NEW_DIM, 0, 0, 0), at++; break;
      case POSITION:
        if (!check_position(x, dim, it->start)) return false;
        add_step(k, TY_SLICE_POSITION, it->start, 0, 0);
        break;
      case RANGE:
        if (it->start != 0 || it->stop != INT64_MAX || it->step != 1)
          add_step(k, TY_SLICE_RANGE, it->start, it->stop, it->step);
        else add_step(k, TY_SLICE_SKIP, 1, 0, 0);
        at++;
        break;
      case TENSOR:
        if (k->ntensors == TY_MAX_DIMS)
          return ty_fail(TY_EINVAL, "index: expected at most %d tensors, got more", TY_MAX_DIMS);
        k->tensors[k->ntensors] = it->tensor;
        k->dims[k->ntensors++] = at;
        /* fall through */
      case REST: add_step(k, TY_SLICE_SKIP, n, 0, 0); at += n;
    }
    dim += n;
  }
  for (bool trailing = true; trailing && k->nsteps;) { /* steps that lead nowhere */
    trailing = k->steps[k->nsteps - 4] == TY_SLICE_SKIP;
    if (trailing) k->nsteps -= 4;
  }
  return true;
}

static bool plan_text(keys *k, const ty_tensor *x, const char *text) {
  k->n = parse(text, k->items);
  k->ntensors = k->nsteps = 0;
  if (k->n < 0)
    return ty_fail(TY_EINVAL,
                   "index: expected positions, start:stop:step, ... and None, separated by commas, got "
                   "\"%s\"",
                   text);
  return plan(k, x, text);
}

/* x[{...}]: integers, slice strings and tensors, in the order of the dimensions. Raises for anything else. */
static void read_list(lua_State *L, int index, keys *k) {
  lua_Integer n = (lua_Integer)lua_rawlen(L, index);
  k->n = k->ntensors = k->nsteps = 0;
  if (n == 0) luaL_error(L, "index: expected a list of integers, slice strings and tensors, got an empty table");
  for (lua_Integer i = 1; i <= n; i++) {
    item list[MAX_ITEMS];
    int found = 1, exact = 0, type = lua_rawgeti(L, index, i);
    list[0] = (item){ .kind = POSITION };
    if (type == LUA_TUSERDATA) {
      list[0].kind = TENSOR;
      list[0].tensor = ty_lua_check(L, -1);
      if (ty_dtype_of(list[0].tensor) == TY_BOOL && list[0].tensor->v.ndim == 0)
        luaL_error(L, "index: expected masks with at least one dimension in a list, got %s",
                   ty_describe(list[0].tensor));
    } else if (type == LUA_TNUMBER) {
      list[0].start = lua_tointegerx(L, -1, &exact);
      if (!exact) luaL_error(L, "index: expected integers, slice strings and tensors in a list, got a fraction");
    } else if (type == LUA_TSTRING) {
      found = parse(lua_tostring(L, -1), list);
      if (found < 0)
        luaL_error(L, "index: expected positions, start:stop:step, ... and None, separated by commas, got \"%s\"",
                   lua_tostring(L, -1));
    } else {
      luaL_error(L, "index: expected integers, slice strings and tensors in a list, got %s", luaL_typename(L, -1));
    }
    if (k->n + found > MAX_ITEMS) luaL_error(L, "index: expected at most %d entries, got more", MAX_ITEMS);
    memcpy(k->items + k->n, list, sizeof *list * (size_t)found);
    k->n += found;
    lua_pop(L, 1); /* the list keeps what it holds alive */
  }
}

static ty_ints steps_of(const keys *k) { return (ty_ints){ k->steps, k->nsteps }; }
static ty_ints dims_of(const keys *k) { return (ty_ints){ k->dims, k->ntensors }; }
static ty_tensors tensors_of(const keys *k) { return (ty_tensors){ k->tensors, k->ntensors }; }

/* Letters, digits and underscores only: a name, not a slice ("None" alone is a slice). */
static bool is_name(const char *s) {
  if (!isalpha((unsigned char)*s) && *s != '_') return false;
  if (strcmp(s, "None") == 0) return false;
  while (isalnum((unsigned char)*s) || *s == '_') s++;
  return *s == '\0';
}

/* ---- tensors as indices ---- */

/* The sizes of x without its first `taken` dimensions, after those given. */
static ty_ints sizes_after(const ty_tensor *x, int taken, int n, const int64_t *first, int64_t *size) {
  memcpy(size, first, sizeof *size * (size_t)n);
  memcpy(size + n, x->v.size + taken, sizeof *size * (size_t)(x->v.ndim - taken));
  return (ty_ints){ size, n + x->v.ndim - taken };
}

/* A mask stands for the first dimensions of x: all of them, or fewer. */
static bool check_mask(const ty_tensor *x, const ty_tensor *mask) {
  int n = mask->v.ndim;
  if (n <= x->v.ndim && memcmp(mask->v.size, x->v.size, sizeof *x->v.size * (size_t)n) == 0) return true;
  return ty_fail(TY_EINVAL,
                 "index: expected a mask with the sizes of the first dimensions of x %s, got %s; ty.masked_select, "
                 "ty.masked_fill and ty.where broadcast",
                 ty_describe(x), ty_describe(mask));
}

/* The positions [count] where the mask is true, counted over all of its elements. */
static ty_tensor *true_positions(ty_tensor *mask) {
  ty_tensor *at = ty_nonzero(ty_reshape(mask, TY_INTS(mask->v.count)));
  return at ? ty_reshape(at, TY_INTS(at->v.size[0])) : NULL;
}

static ty_tensor *by_mask(ty_tensor *x, ty_tensor *mask) {
  int64_t size[TY_MAX_DIMS + 1];
  if (!check_mask(x, mask)) return NULL;
  ty_tensor *rows = ty_reshape(x, sizes_after(x, mask->v.ndim, 1, &mask->v.count, size));
  return ty_index_select(rows, 0, true_positions(mask));
}

static ty_tensor *by_tensor(ty_tensor *x, ty_tensor *index) {
  if (ty_dtype_of(index) == TY_BOOL) return by_mask(x, index);
  if (x->v.ndim == 0) return check_position(x, 0, 0) ? x : NULL; /* which says no */
  return ty_index(x, TY_LIST(index), TY_NO_INTS);
}

static ty_tensor *by_keys(ty_tensor *x, const keys *k) {
  x = ty_apply_slices(x, steps_of(k));
  return x && k->ntensors ? ty_index(x, tensors_of(k), dims_of(k)) : x;
}

/* ---- shapes ---- */

static const char shape_key;

void ty_lua_push_shape(lua_State *L, const ty_tensor *t) {
  lua_createtable(L, t->v.ndim, 0);
  for (int d = 0; d < t->v.ndim; d++) lua_pushinteger(L, t->v.size[d]), lua_rawseti(L, -2, d + 1);
  lua_rawgetp(L, LUA_REGISTRYINDEX, &shape_key);
  lua_setmetatable(L, -2);
}

/* What a shape does not hold is nil as in any list, but for the positions that only tensors have. */
static int shape_get(lua_State *L) {
  if (lua_isinteger(L, 2) && lua_tointeger(L, 2) < 1)
    return luaL_error(L,
                      "shape: expected a position from 1 up, got %I: a shape is a list of Lua, which counts from 1; "
                      "x:size(%I) counts as tensors do",
                      (LUAI_UACINT)lua_tointeger(L, 2), (LUAI_UACINT)lua_tointeger(L, 2));
  lua_pushnil(L);
  return 1;
}

/* The metatable of shapes has a name in the module, so that threads can send shapes to each other. It is hidden: a shape
 * is meant to look like any list. */
static void open_shapes(lua_State *L, int table) {
  lua_createtable(L, 0, 2);
  lua_pushcfunction(L, shape_get), lua_setfield(L, -2, "__index");
  lua_pushboolean(L, 0), lua_setfield(L, -2, "__metatable");
  lua_pushvalue(L, -1), lua_rawsetp(L, LUA_REGISTRYINDEX, &shape_key);
  lua_setfield(L, table, "Shape");
}

/* ---- reading ---- */

/* What is wrong with an index or a value is said of the index, whichever op found it. */
static int index_error(lua_State *L) {
  if (ty_error_code() != TY_EINTR && strncmp(ty_error(), "index:", 6) != 0)
    ty_fail(ty_error_code(), "index: %s", ty_error());
  return ty_lua_error(L);
}

static const char *const properties[] = { "shape",   "dtype", "device", "ndim", "grad",    "requires_grad",
                                          "is_leaf", "T",     "mT",     "data", "is_cuda", NULL };

/* x.T of a matrix, x.mT of the last two dimensions. */
static int transposed(lua_State *L, ty_tensor *t, const char *name) {
  if (name[0] == 'T' ? t->v.ndim > 2 : t->v.ndim < 2)
    return luaL_error(L, "%s: expected %s, got %s", name,
                      name[0] == 'T' ? "at most 2 dimensions (x.mT swaps the last two of more)"
                                     : "at least 2 dimensions",
                      ty_describe(t));
  ty_lua_current = L;
  ty_handle *h = ty_lua_push_empty(L);
  ty_scope scope;
  ty_scope_open(&scope);
  h->t = ty_retain(t->v.ndim < 2 ? ty_reshape(t, (ty_ints){ t->v.size, t->v.ndim }) : ty_transpose(t, -2, -1));
  ty_scope_close(&scope);
  return h->t ? 1 : ty_lua_error(L);
}

/* x.data: the same memory outside the graph. */
static int data_of(lua_State *L, ty_tensor *t) {
  ty_lua_current = L;
  ty_handle *h = ty_lua_push_empty(L);
  ty_scope scope;
  ty_scope_open(&scope);
  h->t = ty_retain(ty_detach(t));
  ty_scope_close(&scope);
  return h->t ? 1 : ty_lua_error(L);
}

/* What to write in place of a name that tensors do not have: what lua/tycho/pytorch.lua knows of it, or what is spelt
 * nearly so. */
static int no_such_op(lua_State *L, const char *name) {
  ty_lua_push_methods(L);
  lua_pushstring(L, "__instead");
  if (lua_rawget(L, -2) == LUA_TFUNCTION) {
    lua_pushstring(L, name);
    lua_call(L, 1, 1);
    if (lua_isstring(L, -1)) return luaL_error(L, "a tensor has no op '%s'%s", name, lua_tostring(L, -1));
  }
  lua_pop(L, 1);
  ty_lua_push_nearest(L, name, -1, properties);
  return luaL_error(L, "a tensor has no op '%s'%s", name, lua_tostring(L, -1));
}

static int property(lua_State *L, ty_tensor *t, const char *name) {
  if (strcmp(name, "shape") == 0) {
    ty_lua_push_shape(L, t);
  } else if (strcmp(name, "dtype") == 0) {
    lua_pushstring(L, ty_dtype_name[t->v.dtype]);
  } else if (strcmp(name, "device") == 0) {
    lua_pushstring(L, ty_device_name(ty_device_of(t)));
  } else if (strcmp(name, "ndim") == 0) {
    lua_pushinteger(L, t->v.ndim);
  } else if (strcmp(name, "grad") == 0) {
    if (ty_is_recording()) ty_recorded_grad(t, true);
    ty_tensor *g = ty_grad_of(t);
    if (g) ty_lua_push(L, ty_retain(g));
    else lua_pushnil(L);
  } else if (strcmp(name, "requires_grad") == 0) {
    lua_pushboolean(L, t->requires_grad);
  } else if (strcmp(name, "T") == 0 || strcmp(name, "mT") == 0) {
    return transposed(L, t, name);
  } else if (strcmp(name, "is_leaf") == 0) {
    lua_pushboolean(L, !t->node);
  } else if (strcmp(name, "data") == 0) {
    return data_of(L, t);
  } else if (strcmp(name, "is_cuda") == 0) {
    lua_pushboolean(L, ty_device_of(t) >= TY_CUDA);
  } else {
    return no_such_op(L, name);
  }
  return 1;
}

/* upvalue 1: the methods */
static int index_get(lua_State *L) {
  int type = lua_type(L, 2);
  if (type == LUA_TSTRING) {
    lua_pushvalue(L, 2);
    if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL) return 1;
    lua_pop(L, 1);
    const char *key = lua_tostring(L, 2);
    if (is_name(key)) return property(L, ty_lua_check(L, 1), key);
  }
  ty_tensor *x = ty_lua_check(L, 1), *index = type == LUA_TUSERDATA ? ty_lua_check(L, 2) : NULL, *r;
  int exact = 0;
  lua_Integer position = type == LUA_TNUMBER ? lua_tointegerx(L, 2, &exact) : 0;
  if (!index && type != LUA_TSTRING && type != LUA_TTABLE && !exact)
    return luaL_error(L, "index: expected an integer, a slice string, a tensor or a list of these, got %s",
                      luaL_typename(L, 2));
  keys k;
  if (type == LUA_TTABLE) read_list(L, 2, &k);
  ty_lua_current = L;
  ty_lua_poll(L);
  ty_handle *h = ty_lua_push_empty(L);
  ty_scope scope;
  ty_scope_open(&scope);
  if (index) r = by_tensor(x, index);
  else if (exact) r = check_position(x, 0, position) ? ty_select(x, 0, position) : NULL;
  else r = (type == LUA_TSTRING ? plan_text(&k, x, lua_tostring(L, 2)) : plan(&k, x, "{...}")) ? by_keys(x, &k) : NULL;
  if (r == x)
    r = x->v.ndim ? ty_slice(x, 0, 0, INT64_MAX, 1) : ty_reshape(x, TY_NO_INTS); /* x[":"] is a view of its own */
  h->t = ty_retain(r);
  ty_scope_close(&scope);
  return h->t ? 1 : index_error(L);
}

/* ---- writing ---- */

static int refuse_field(lua_State *L, const char *name) {
  static const char *const instead[][2] = {
    { "requires_grad", "x:requires_grad_(false) or x:requires_grad_()" },
    { "grad", "x:set_grad(g), or the optimizer's :zero_grad()" },
    { "data", "x:copy_(y) inside ty.no_grad" },
    { "shape", "x:reshape(...)" },
    { "dtype", "x:to \"f32\"" },
    { "device", "x:to \"cuda\"" },
  };
  for (size_t i = 0; i < sizeof instead / sizeof *instead; i++)
    if (strcmp(name, instead[i][0]) == 0)
      return luaL_error(L, "a tensor has no field \"%s\" to set; use %s", name, instead[i][1]);
  return luaL_error(L, "a tensor has no field \"%s\" to set", name);
}

/* *recorded: the write becomes part of a graph. */
static bool check_write(const ty_tensor *x, const ty_tensor *source, bool *recorded) {
  *recorded = ty_grad_enabled() && (x->requires_grad || (source && source->requires_grad));
  if (ty_view_repeats(&x->v))
    return ty_fail(TY_EINVAL, "index: cannot write into the expanded view %s; call :clone() first", ty_describe(x));
  if (!*recorded) return true;
  if (x->requires_grad && !x->node)
    return ty_fail(TY_EINVAL,
                   "index: %s is a leaf that requires a gradient and cannot be written while gradients are recorded; "
                   "call :clone() first, or use ty.no_grad",
                   ty_describe(x));
  if (x->is_view)
    return ty_fail(TY_EINVAL,
                   "index: a write through the view %s cannot be recorded for gradients; write into the tensor that it "
                   "is a view of, as x[{0, \"2:4\"}] = y, or call :clone() first",
                   ty_describe(x));
  return true;
}

/* May `source` be repeated to this shape? */
static bool check_values(const ty_tensor *source, ty_ints size) {
  bool ok = source->v.ndim <= size.n;
  for (int d = 1; ok && d <= source->v.ndim; d++) {
    int64_t n = source->v.size[source->v.ndim - d];
    ok = n == 1 || n == size.v[size.n - d];
  }
  return ok || ty_fail(TY_EINVAL, "index: expected values that broadcast to the %s written to, got %s",
                       ty_shape_text(size.n, size.v), ty_describe(source));
}

static bool write_part(ty_tensor *part, ty_tensor *source, ty_value number) {
  if (!part) return false;
  if (!source) return ty_fill_(part, number) != NULL;
  return check_values(source, (ty_ints){ part->v.size, part->v.ndim }) && ty_copy_(part, source, false) != NULL;
}

/* x with the same values wherever the mask [..., 1, 1] is true. */
static ty_tensor *with_one_value(ty_tensor *x, ty_tensor *mask, int taken, ty_tensor *source, ty_value number) {
  if (!source) return ty_masked_fill(x, mask, number);
  if (source->v.ndim > x->v.ndim - taken) source = ty_squeeze(source, TY_INTS(0));
  if (!source || !check_values(source, (ty_ints){ x->v.size + taken, x->v.ndim - taken })) return NULL;
  return ty_where(mask, ty_to(source, ty_dtype_of(x)), x);
}

/* x with a value of its own for each position at which the mask is true, in order. */
static ty_tensor *with_values_in_order(ty_tensor *x, ty_tensor *mask, ty_tensor *source) {
  ty_tensor *at = true_positions(mask);
  int64_t size[TY_MAX_DIMS + 1];
  if (!at) return NULL;
  int64_t count = at->v.size[0], width = 1;
  ty_ints shape = sizes_after(x, mask->v.ndim, 1, &count, size);
  for (int d = 1; d < shape.n; d++) width *= size[d];
  if (!check_values(source, shape)) return NULL;
  source = ty_reshape(ty_expand(ty_to(source, ty_dtype_of(x)), shape), TY_INTS(count, width));
  ty_tensor *rows = ty_reshape(x, TY_INTS(mask->v.count, width));
  ty_tensor *index = ty_expand(ty_unsqueeze(at, 1), TY_INTS(count, width));
  rows = source ? ty_scatter(rows, 0, index, ty_value_of_tensor(source)) : NULL;
  return ty_reshape(rows, (ty_ints){ x->v.size, x->v.ndim });
}

static bool write_masked(ty_tensor *x, ty_tensor *mask, ty_tensor *source, ty_value number) {
  if (!check_mask(x, mask)) return false;
  int taken = mask->v.ndim, rest = x->v.ndim - taken;
  ty_tensor *filled;
  if (!source || source->v.ndim <= rest || (source->v.ndim == rest + 1 && source->v.size[0] == 1)) {
    int64_t size[TY_MAX_DIMS];
    for (int d = 0; d < x->v.ndim; d++) size[d] = d < taken ? mask->v.size[d] : 1;
    filled = with_one_value(x, ty_reshape(mask, (ty_ints){ size, x->v.ndim }), taken, source, number);
  } else {
    filled = with_values_in_order(x, mask, source);
  }
  return filled && ty_copy_(x, filled, false) != NULL;
}

/* What slices and tensors name. Recorded, it becomes one node, or those of the part that is read, changed and put back. */
static bool write_keys(ty_tensor *x, const keys *k, ty_tensor *source, ty_value number, bool recorded) {
  ty_value values = source ? ty_value_of_tensor(source) : number;
  if (k->ntensors && !k->nsteps) return ty_index_put_(x, tensors_of(k), values, false, dims_of(k)) != NULL;
  bool was = ty_set_grad_enabled(false);
  ty_tensor *part = ty_apply_slices(x, steps_of(k));
  ty_set_grad_enabled(was);
  if (!part) return false;
  if (!recorded)
    return k->ntensors ? ty_index_put_(part, tensors_of(k), values, false, dims_of(k)) != NULL
                       : write_part(part, source, number);
  if (k->ntensors) {
    part = ty_apply_slices(x, steps_of(k));
    part = part ? ty_index_put(part, tensors_of(k), values, false, dims_of(k)) : NULL;
    if (!part) return false;
    values = ty_value_of_tensor(part);
  } else if (source && !check_values(source, (ty_ints){ part->v.size, part->v.ndim })) {
    return false;
  }
  return ty_slice_put_(x, values, steps_of(k)) != NULL;
}

static int index_set(lua_State *L) {
  ty_tensor *x = ty_lua_check(L, 1), *source = lua_type(L, 3) == LUA_TUSERDATA ? ty_lua_check(L, 3) : NULL;
  int type = lua_type(L, 2), exact = 0;
  if (type == LUA_TSTRING && is_name(lua_tostring(L, 2))) return refuse_field(L, lua_tostring(L, 2));
  ty_value number = TY_NO_NUMBER;
  if (!source) {
    if (lua_isboolean(L, 3)) number = ty_value_of_int(lua_toboolean(L, 3));
    else if (lua_isinteger(L, 3)) number = ty_value_of_int(lua_tointeger(L, 3));
    else if (lua_type(L, 3) == LUA_TNUMBER) number = ty_value_of_float(lua_tonumber(L, 3));
    else return luaL_error(L, "index: expected a number or a tensor to write, got %s", ty_lua_typename(L, 3));
  }
  ty_tensor *index = type == LUA_TUSERDATA ? ty_lua_check(L, 2) : NULL;
  lua_Integer position = type == LUA_TNUMBER ? lua_tointegerx(L, 2, &exact) : 0;
  if (!index && type != LUA_TSTRING && type != LUA_TTABLE && !exact)
    return luaL_error(L, "index: expected an integer, a slice string, a tensor or a list of these, got %s",
                      luaL_typename(L, 2));
  bool mask = index && ty_dtype_of(index) == TY_BOOL, recorded;
  keys k = { .n = 1, .items = { { .kind = index ? TENSOR : POSITION, .start = position, .tensor = index } } };
  if (type == LUA_TTABLE) read_list(L, 2, &k);
  ty_lua_current = L;
  ty_scope scope;
  ty_scope_open(&scope);
  bool ok = check_write(x, source, &recorded);
  if (ok && mask) {
    ok = write_masked(x, index, source, number);
  } else if (ok) {
    ok = type == LUA_TSTRING ? plan_text(&k, x, lua_tostring(L, 2)) : plan(&k, x, "{...}");
    ok = ok && write_keys(x, &k, source, number, recorded);
  }
  ty_scope_close(&scope);
  return ok ? 0 : index_error(L);
}

/* Lua turns the result into a boolean: the same tensor? Elementwise comparison is x:eq(y). */
static int same(lua_State *L) {
  ty_tensor *a = ty_lua_to(L, 1), *b = ty_lua_to(L, 2);
  lua_pushboolean(L, a && a == b);
  return 1;
}

static int no_order(lua_State *L) {
  return luaL_error(L, "tensors are compared elementwise by methods: x:lt(y), x:le(y), x:gt(y), x:ge(y), x:eq(y)");
}

void ty_lua_open_index(lua_State *L, int table) {
  open_shapes(L, table);
  lua_getfield(L, table, "Tensor");
  ty_lua_push_methods(L);
  lua_pushvalue(L, -1), lua_setfield(L, -3, "methods");
  lua_pushcclosure(L, index_get, 1), lua_setfield(L, -2, "__index");
  luaL_setfuncs(
      L,
      (const luaL_Reg[]){
          { "__newindex", index_set }, { "__eq", same }, { "__lt", no_order }, { "__le", no_order }, { NULL, NULL } },
      0);
  lua_pop(L, 1);
}
