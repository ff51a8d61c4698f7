/* Every op of the table as a Lua function: arguments by position, then by name from a last table. One C function serves
 * all; the op is its upvalue. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../device/device.h"
#include "handle.h"

enum { MAX_INTS = 96, UP_BOUND = 1, UP_METATABLE = 2 };

/* What a closure is about. */
typedef struct bound {
  ty_lua_state *state;
  const ty_op *op;
  ty_value *defaults; /* of each argument */
  int shown;          /* outputs that the call returns: of some ops the others serve backward rules alone */
} bound;

typedef struct parse {
  lua_State *L;
  const ty_op *op;
  ty_value *value;
  int64_t ints[MAX_INTS];
  int nints;
  uint32_t given;  /* arguments that have come */
  char named[256]; /* the text of a TY_ARG_NAMED_INTS whose integers came one by one */
} parse;

/* ---- errors ---- */

static int fail(parse *p, int arg, const char *wanted, int index) {
  return luaL_error(p->L, "%s: %s: expected %s, got %s", p->op->name, p->op->args[arg].name, wanted,
                    index ? ty_lua_typename(p->L, index) : "nothing");
}

static const char *wanted_text(const ty_arg *a) {
  switch (a->kind) {
    case TY_ARG_TENSOR: return "a tensor";
    case TY_ARG_OPTIONAL: return "a tensor or nil";
    case TY_ARG_OPERAND: return a->required ? "a tensor or a number" : "a tensor, a number or nil";
    case TY_ARG_LIST: return "a table of tensors";
    case TY_ARG_INT: return "an integer";
    case TY_ARG_FLOAT: return "a number";
    case TY_ARG_BOOL: return "a boolean";
    case TY_ARG_STRING: return "a string";
    case TY_ARG_DTYPE: return "a dtype name";
    case TY_ARG_DEVICE: return "a device name";
    case TY_ARG_NUMBER: return "a number";
    case TY_ARG_NAMED_INTS: return "a text like \"h=4 d=8\"";
    default: return "integers";
  }
}

/* "add(x, y)" with options, for arity errors */
static const char *signature(lua_State *L, const ty_op *op) {
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  luaL_addstring(&b, op->name);
  luaL_addchar(&b, '(');
  for (int i = 0; i < op->nargs; i++) {
    if (i) luaL_addstring(&b, ", ");
    luaL_addstring(&b, op->args[i].name);
    if (!op->args[i].required) luaL_addchar(&b, '?');
  }
  luaL_addchar(&b, ')');
  luaL_pushresult(&b);
  return lua_tostring(L, -1);
}

/* ---- single arguments ---- */

/* The tensor at `index` for argument `arg`, or NULL when something else is there; raises for one that was released. */
static inline ty_tensor *tensor_at(parse *p, int arg, int index) {
  ty_handle *h = ty_lua_handle_at(p->L, index);
  if (!h) return NULL;
  if (__builtin_expect(!h->t, 0))
    luaL_error(p->L,
               "%s: %s: this tensor was released (by its scope, <close> or :free()); ty.keep() takes a tensor out of "
               "its scope",
               p->op->name, p->op->args[arg].name);
  return h->t;
}

static void add_int(parse *p, int arg, int index) {
  int exact;
  lua_Integer i = lua_tointegerx(p->L, index, &exact);
  if (!exact || lua_type(p->L, index) != LUA_TNUMBER) fail(p, arg, "integers", index);
  if (p->nints == MAX_INTS)
    luaL_error(p->L, "%s: %s: at most %d integers", p->op->name, p->op->args[arg].name, MAX_INTS);
  p->ints[p->nints++] = i;
}

/* A table's list part as integers. */
static ty_ints ints_of_table(parse *p, int arg, int index) {
  int start = p->nints;
  lua_Integer n = (lua_Integer)lua_rawlen(p->L, index);
  for (lua_Integer i = 1; i <= n; i++) {
    lua_rawgeti(p->L, index, i);
    add_int(p, arg, lua_gettop(p->L));
    lua_pop(p->L, 1);
  }
  return (ty_ints){ p->ints + start, p->nints - start };
}

/* A table's list part as tensors; the array of pointers is a userdata left on the stack. */
static ty_tensors tensors_of_table(parse *p, int arg, int index) {
  lua_State *L = p->L;
  lua_Integer n = (lua_Integer)lua_rawlen(L, index);
  ty_tensor **list = lua_newuserdatauv(L, sizeof *list * (size_t)(n + 1), 0);
  for (lua_Integer i = 1; i <= n; i++) {
    lua_rawgeti(L, index, i);
    list[i - 1] = tensor_at(p, arg, -1);
    if (!list[i - 1])
      luaL_error(L, "%s: %s[%d]: expected a tensor, got %s", p->op->name, p->op->args[arg].name, (int)i,
                 ty_lua_typename(L, -1));
    lua_pop(L, 1);
  }
  return (ty_tensors){ list, (int)n };
}

/* The number in a tensor without dimensions at `index`, where an argument takes numbers; false when something else is
 * there. */
static bool number_of_tensor(parse *p, int arg, int index, ty_value *v) {
  ty_tensor *t = tensor_at(p, arg, index);
  if (!t || t->v.ndim) return false;
  if (t->requires_grad && ty_grad_enabled())
    luaL_error(p->L,
               "%s: %s: expected %s, got a tensor that requires a gradient, which would be lost; :item() gives "
               "its number",
               p->op->name, p->op->args[arg].name, wanted_text(&p->op->args[arg]));
  ty_lua_need_values(p->L, t, p->op->name);
  if (!ty_read_value(t, v)) ty_lua_error(p->L);
  return true;
}

/* The value at `index` for argument `arg`; raises when it does not fit. */
static void read(parse *p, int arg, int index) {
  lua_State *L = p->L;
  const ty_arg *a = &p->op->args[arg];
  ty_value *v = &p->value[arg];
  ty_value held;
  int exact, type = lua_type(L, index);
  if (type == LUA_TNIL) {
    if (a->required) fail(p, arg, wanted_text(a), index);
    return; /* keeps the default */
  }
  p->given |= 1u << arg;
  switch (a->kind) {
    case TY_ARG_TENSOR:
    case TY_ARG_OPTIONAL:
      v->t = tensor_at(p, arg, index);
      if (!v->t) fail(p, arg, wanted_text(a), index);
      v->kind = TY_TENSOR;
      return;
    case TY_ARG_OPERAND:
      v->t = tensor_at(p, arg, index);
      if (v->t) {
        v->kind = TY_TENSOR;
        return;
      }
      /* fall through */
    case TY_ARG_NUMBER:
      if (type == LUA_TBOOLEAN) *v = ty_value_of_int(lua_toboolean(L, index));
      else if (type != LUA_TNUMBER && number_of_tensor(p, arg, index, v)) return;
      else if (type != LUA_TNUMBER) fail(p, arg, wanted_text(a), index);
      else if (lua_isinteger(L, index)) *v = ty_value_of_int(lua_tointeger(L, index));
      else *v = ty_value_of_float(lua_tonumber(L, index));
      return;
    case TY_ARG_LIST:
      if (type != LUA_TTABLE) fail(p, arg, wanted_text(a), index);
      v->ts = tensors_of_table(p, arg, index);
      return;
    case TY_ARG_INT:
      if (type == LUA_TUSERDATA && number_of_tensor(p, arg, index, &held)) {
        if (held.kind != TY_INT) fail(p, arg, wanted_text(a), index);
        v->i = held.i;
        return;
      }
      v->i = lua_tointegerx(L, index, &exact);
      if (!exact || type != LUA_TNUMBER) fail(p, arg, wanted_text(a), index);
      return;
    case TY_ARG_FLOAT:
      if (type == LUA_TUSERDATA && number_of_tensor(p, arg, index, &held)) {
        v->f = ty_number_of(held).f;
        return;
      }
      if (type != LUA_TNUMBER) fail(p, arg, wanted_text(a), index);
      v->f = lua_tonumber(L, index);
      return;
    case TY_ARG_BOOL:
      if (type != LUA_TBOOLEAN) fail(p, arg, wanted_text(a), index);
      v->i = lua_toboolean(L, index);
      return;
    case TY_ARG_STRING:
    case TY_ARG_NAMED_INTS:
      if (type != LUA_TSTRING) fail(p, arg, wanted_text(a), index);
      v->s = lua_tostring(L, index);
      return;
    case TY_ARG_DTYPE: {
      ty_dtype d;
      if (type != LUA_TSTRING) fail(p, arg, wanted_text(a), index);
      if (!ty_dtype_parse(lua_tostring(L, index), &d)) luaL_error(L, "%s: %s: %s", p->op->name, a->name, ty_error());
      v->i = d;
      return;
    }
    case TY_ARG_DEVICE: {
      int device;
      if (type != LUA_TSTRING) fail(p, arg, wanted_text(a), index);
      if (!ty_device_parse(lua_tostring(L, index), &device))
        luaL_error(L, "%s: %s: %s", p->op->name, a->name, ty_error());
      v->i = device;
      return;
    }
    default:
      if (type == LUA_TTABLE) {
        v->is = ints_of_table(p, arg, index);
      } else {
        int start = p->nints;
        add_int(p, arg, index);
        v->is = (ty_ints){ p->ints + start, 1 };
      }
  }
}

/* ---- options by name ---- */

static void unknown_option(parse *p, const char *key) {
  lua_State *L = p->L;
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  for (int i = 0; i < p->op->nargs; i++) {
    luaL_addstring(&b, " ");
    luaL_addstring(&b, p->op->args[i].name);
  }
  luaL_pushresult(&b);
  luaL_error(L, "%s: unknown option \"%s\"; its arguments are%s", p->op->name, key, lua_tostring(L, -1));
}

/* The argument that takes integers by names of the caller's choice, or -1. */
static int find_named_ints(const ty_op *op) {
  for (int i = 0; i < op->nargs; i++)
    if (op->args[i].kind == TY_ARG_NAMED_INTS) return i;
  return -1;
}

/* Adds the integer at `index` under its name to that argument's text. */
static void add_named_int(parse *p, int arg, const char *name, int index) {
  lua_State *L = p->L;
  const ty_op *op = p->op;
  int exact;
  lua_Integer i = lua_tointegerx(L, index, &exact);
  if (!exact || lua_type(L, index) != LUA_TNUMBER)
    luaL_error(L, "%s: %s: expected an integer, got %s", op->name, name, ty_lua_typename(L, index));
  if (p->value[arg].s != p->named && (p->given & (1u << arg)))
    luaL_error(L, "%s: %s: given twice, as a text and by name", op->name, op->args[arg].name);
  size_t n = strlen(p->named), room = sizeof p->named - n;
  int length = snprintf(p->named + n, room, "%s%s=%lld", n ? " " : "", name, (long long)i);
  if (length < 0 || (size_t)length >= room)
    luaL_error(L, "%s: %s: expected names and integers of at most %d characters together", op->name, op->args[arg].name,
               (int)sizeof p->named - 1);
  p->value[arg].s = p->named;
  p->given |= 1u << arg;
}

/* The argument of a name, or nargs. Where there is none of it, one that PyTorch calls so. */
static int find_argument(const ty_op *op, const char *key) {
  static const char *const also[][2] = { { "dim", "dims" },
                                         { "dims", "dim" },
                                         { "scale_factor", "scale" },
                                         { "padding_idx", "padding_index" },
                                         { "num_classes", "classes" } };
  const char *other = NULL;
  for (size_t i = 0; i < sizeof also / sizeof *also; i++)
    if (strcmp(key, also[i][0]) == 0) other = also[i][1];
  int found = op->nargs;
  for (int i = 0; i < op->nargs; i++) {
    if (strcmp(op->args[i].name, key) == 0) return i;
    if (other && strcmp(op->args[i].name, other) == 0) found = i;
  }
  return found;
}

/* The string keys of the table; `list_used`: its list part was an argument already. */
static void read_options(parse *p, int index, bool list_used) {
  lua_State *L = p->L;
  const ty_op *op = p->op;
  lua_pushnil(L);
  while (lua_next(L, index)) {
    int at = lua_gettop(L);
    if (lua_type(L, at - 1) != LUA_TSTRING) {
      if (!list_used)
        luaL_error(L, "%s: expected options by name in the last table, got a list; its arguments are %s", op->name,
                   signature(L, op));
      lua_pop(L, 1);
      continue;
    }
    const char *key = lua_tostring(L, at - 1);
    int i = find_argument(op, key);
    if (i == op->nargs) {
      int named = find_named_ints(op);
      if (named < 0) unknown_option(p, key);
      add_named_int(p, named, key, at);
      lua_pop(L, 1);
      continue;
    }
    if (p->given & (1u << i)) luaL_error(L, "%s: %s: given twice, by position and by name", op->name, key);
    if (op->args[i].kind == TY_ARG_LIST) { /* leaves the array on the stack: below the key, so that lua_next goes on */
      read(p, i, at);
      lua_insert(L, at - 1);
      lua_pop(L, 1);
    } else {
      read(p, i, at);
      lua_pop(L, 1); /* a string stays in the options table */
    }
  }
}

static bool has_named(lua_State *L, int index) {
  lua_pushnil(L);
  while (lua_next(L, index)) {
    lua_pop(L, 1);
    if (lua_type(L, -1) == LUA_TSTRING) {
      lua_pop(L, 1);
      return true;
    }
  }
  return false;
}

/* ---- the whole call ---- */

/* What the arguments are that nobody gives; `ints` has room for an integer of each. */
static void set_defaults(const bound *b, int64_t *ints) {
  for (int i = 0; i < b->op->nargs; i++) {
    const ty_arg *a = &b->op->args[i];
    ty_value *v = &b->defaults[i];
    switch (a->kind) {
      case TY_ARG_TENSOR:
      case TY_ARG_OPTIONAL:
      case TY_ARG_OPERAND:
      case TY_ARG_NUMBER:
        v->t = NULL;
        v->kind = TY_NONE;
        break;
      case TY_ARG_LIST:
        v->ts = (ty_tensors){ NULL, 0 };
        v->kind = TY_TENSORS;
        break;
      case TY_ARG_FLOAT: *v = ty_value_of_float(a->number); break;
      case TY_ARG_STRING:
      case TY_ARG_NAMED_INTS:
        v->s = a->text;
        v->kind = TY_STRING;
        break;
      case TY_ARG_INTS:
      case TY_ARG_VARINTS:
        ints[i] = a->text ? atoll(a->text) : 0;
        v->is = (ty_ints){ &ints[i], a->text && a->text[0] };
        v->kind = TY_INTS;
        break;
      default: *v = ty_value_of_int(a->integer);
    }
  }
}

static void read_all(parse *p) {
  lua_State *L = p->L;
  const ty_op *op = p->op;
  int top = lua_gettop(L), at = 1, i = 0;
  for (; i < op->nargs && at <= top; i++) {
    const ty_arg *a = &op->args[i];
    int type = lua_type(L, at);
    bool takes_list = a->kind == TY_ARG_INTS || a->kind == TY_ARG_VARINTS || a->kind == TY_ARG_LIST;
    if (type == LUA_TTABLE && at == top) {
      /* {} is the empty list where that can be meant, else no options. */
      bool empty = a->kind != TY_ARG_INTS || !a->text[0];
      bool list = takes_list && (lua_rawlen(L, at) > 0 || (empty && !has_named(L, at)));
      if (list) read(p, i, at);
      if (!list || has_named(L, at)) read_options(p, at, list);
      at++;
      break;
    }
    if (a->kind == TY_ARG_VARINTS && type == LUA_TNUMBER) {
      int start = p->nints;
      while (at <= top && lua_type(L, at) == LUA_TNUMBER) add_int(p, i, at++);
      p->value[i].is = (ty_ints){ p->ints + start, p->nints - start };
      p->given |= 1u << i;
      continue;
    }
    if (a->kind == TY_ARG_LIST && ty_lua_handle_at(L, at)) { /* tensors in a row */
      int n = 0;
      while (at + n <= top && ty_lua_handle_at(L, at + n)) n++;
      ty_tensor **list = lua_newuserdatauv(L, sizeof *list * (size_t)n, 0);
      for (int j = 0; j < n; j++) list[j] = tensor_at(p, i, at + j);
      p->value[i].ts = (ty_tensors){ list, n };
      p->given |= 1u << i;
      at += n;
      continue;
    }
    read(p, i, at++);
  }
  if (at == top && lua_type(L, at) == LUA_TTABLE && has_named(L, at)) read_options(p, at++, false);
  if (at <= top) {
    const char *form = signature(L, op);
    luaL_error(L, "%s: too many arguments: expected %s, got %d", op->name, form, top);
  }
  for (i = 0; i < op->nargs; i++)
    if (op->args[i].required && !(p->given & (1u << i))) fail(p, i, wanted_text(&op->args[i]), 0);
}

static inline ty_handle *push_empty(lua_State *L, ty_lua_state *s) {
  ty_handle *h = lua_newuserdatauv(L, sizeof *h, 0);
  h->magic = &ty_handle_magic;
  h->t = NULL;
  h->link = NULL;
  s->handles++;
  lua_pushvalue(L, lua_upvalueindex(UP_METATABLE));
  lua_setmetatable(L, -2);
  if (s->scope) ty_lua_enter_scope(L, s, h);
  return h;
}

static inline void begin(lua_State *L, ty_lua_state *s) {
  ty_lua_current = L;
  if (__builtin_expect(ty_memory_live_everywhere() > s->growth_limit || s->handles > s->young_limit, 0)) ty_lua_poll(L);
}

static int call_op(lua_State *L) {
  const bound *b = lua_touserdata(L, lua_upvalueindex(UP_BOUND));
  ty_lua_state *s = b->state;
  const ty_op *op = b->op;
  ty_value value[TY_MAX_ARGS];
  parse p;
  p.L = L;
  p.op = op;
  p.value = value;
  p.nints = 0;
  p.given = 0;
  p.named[0] = '\0';
  memcpy(value, b->defaults, sizeof *value * op->nargs);
  read_all(&p);
  begin(L, s);
  int nout = op->nout, shown = b->shown;
  ty_tensor *out[TY_MAX_OUTPUTS];
  if (op->flags & WRITES) {
    if (!ty_call_op((ty_op_id)op->id, value, out)) return ty_lua_error(L);
    for (int i = 0; i < nout; i++) ty_release(out[i]); /* the argument itself */
    if (!nout) return 0;
    lua_settop(L, 1);
    return 1;
  }
  ty_handle *h[TY_MAX_OUTPUTS];
  for (int i = 0; i < shown; i++) h[i] = push_empty(L, s);
  if (!ty_call_op((ty_op_id)op->id, value, out)) return ty_lua_error(L);
  for (int i = 0; i < nout; i++) {
    if (i < shown) h[i]->t = out[i];
    else ty_release(out[i]);
  }
  return shown;
}

static int call_inplace(lua_State *L) {
  const bound *b = lua_touserdata(L, lua_upvalueindex(UP_BOUND));
  ty_value value[TY_MAX_ARGS];
  parse p = { .L = L, .op = b->op, .value = value };
  memcpy(value, b->defaults, sizeof *value * p.op->nargs);
  read_all(&p);
  begin(L, b->state);
  if (!ty_call_inplace((ty_op_id)p.op->id, value)) return ty_lua_error(L);
  lua_settop(L, 1);
  return 1;
}

/* Two operands or one, by position: what operators and most calls are. Everything else goes through call_op. */
static int call_simple(lua_State *L) {
  const bound *b = lua_touserdata(L, lua_upvalueindex(UP_BOUND));
  const ty_op *op = b->op;
  int n = op->nargs;
  if (lua_gettop(L) != n) return call_op(L);
  ty_value value[2];
  bool any = false;
  for (int i = 0; i < n; i++) {
    ty_handle *h = ty_lua_handle_at(L, i + 1);
    if (h) {
      if (!h->t) return call_op(L);
      value[i].t = h->t;
      value[i].kind = TY_TENSOR;
      any = true;
    } else if (lua_type(L, i + 1) == LUA_TNUMBER && op->args[i].kind == TY_ARG_OPERAND) {
      value[i] = lua_isinteger(L, i + 1) ? ty_value_of_int(lua_tointeger(L, i + 1))
                                         : ty_value_of_float(lua_tonumber(L, i + 1));
    } else {
      return call_op(L);
    }
  }
  if (!any) return call_op(L);
  begin(L, b->state);
  ty_handle *h = push_empty(L, b->state);
  if (!ty_call_op((ty_op_id)op->id, value, &h->t)) {
    h->t = NULL;
    return ty_lua_error(L);
  }
  return 1;
}

/* Lua passes the operand of -x and ~x twice. */
static int call_unary_operator(lua_State *L) {
  lua_settop(L, 1);
  return call_simple(L);
}

static bool is_simple(const ty_op *op) {
  if (op->nout != 1 || op->nargs > 2 || (op->flags & WRITES)) return false;
  for (int i = 0; i < op->nargs; i++)
    if (op->args[i].kind != TY_ARG_TENSOR && op->args[i].kind != TY_ARG_OPERAND) return false;
  return true;
}

/* ---- opening ---- */

static void push_closure(lua_State *L, bound *b, lua_CFunction f) {
  lua_pushlightuserdata(L, b);
  lua_getfield(L, 1, "Tensor");
  lua_pushcclosure(L, f, 2);
}

static bool is_method(const ty_op *op) {
  uint8_t k = op->nargs ? op->args[0].kind : TY_ARG_INT;
  return (k == TY_ARG_TENSOR || k == TY_ARG_OPERAND) && !(op->flags & INTERNAL);
}

void ty_lua_open_ops(lua_State *L, int table) {
  static const struct {
    const char *event, *op;
  } operators[] = { { "__add", "add" },
                    { "__sub", "sub" },
                    { "__mul", "mul" },
                    { "__div", "div" },
                    { "__pow", "pow" },
                    { "__idiv", "floor_div" },
                    { "__mod", "remainder" },
                    { "__band", "bitwise_and" },
                    { "__bor", "bitwise_or" },
                    { "__bxor", "bitwise_xor" },
                    { "__shl", "bitwise_left_shift" },
                    { "__shr", "bitwise_right_shift" } },
    unary_operators[] = { { "__unm", "neg" }, { "__bnot", "bitwise_not" } };
  static const char key;
  size_t nargs = 0;
  int count = TY_OP_COUNT; /* and those of which all outputs are wanted once more */
  for (int i = 0; i < TY_OP_COUNT; i++) {
    nargs += ty_ops[i].nargs;
    count += ty_ops[i].flags & FIRST ? 1 : 0;
  }
  bound *all = lua_newuserdatauv(L, sizeof *all * (size_t)count + (sizeof(ty_value) + sizeof(int64_t)) * nargs, 0);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &key);
  ty_value *value = (ty_value *)(all + count);
  int64_t *ints = (int64_t *)(value + nargs);
  for (int i = 0; i < TY_OP_COUNT; i++) {
    all[i] = (bound){ ty_lua_state_of(L), &ty_ops[i], value, ty_ops[i].flags & FIRST ? 1 : ty_ops[i].nout };
    set_defaults(&all[i], ints);
    value += ty_ops[i].nargs;
    ints += ty_ops[i].nargs;
  }
  ty_lua_push_methods(L);
  int methods = lua_gettop(L);
  for (int i = 0; i < TY_OP_COUNT; i++) {
    const ty_op *op = &ty_ops[i];
    push_closure(L, &all[i], is_simple(op) ? call_simple : call_op);
    if (is_method(op)) lua_pushvalue(L, -1), lua_setfield(L, methods, op->name);
    lua_setfield(L, table, op->name);
    if (!(op->flags & INPLACE)) continue;
    lua_pushfstring(L, "%s_", op->name);
    push_closure(L, &all[i], call_inplace);
    lua_pushvalue(L, -2), lua_pushvalue(L, -2), lua_settable(L, methods);
    lua_settable(L, table);
  }
  lua_getfield(L, table, "Tensor");
  for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
    push_closure(L, &all[ty_op_find(operators[i].op)->id], call_simple);
    lua_setfield(L, -2, operators[i].event);
  }
  for (size_t i = 0; i < sizeof unary_operators / sizeof *unary_operators; i++) {
    push_closure(L, &all[ty_op_find(unary_operators[i].op)->id], call_unary_operator);
    lua_setfield(L, -2, unary_operators[i].event);
  }
  lua_pop(L, 2);
  lua_pushcfunction(L, ty_lua_list_ops);
  lua_setfield(L, table, "ops");
  /* Ops with all of their outputs, for backward rules in Lua: the hidden ones have no gradient. */
  lua_newtable(L);
  for (int i = 0, at = TY_OP_COUNT; i < TY_OP_COUNT; i++) {
    if (!(ty_ops[i].flags & FIRST)) continue;
    all[at] = all[i];
    all[at].shown = ty_ops[i].nout;
    push_closure(L, &all[at++], call_op);
    lua_setfield(L, -2, ty_ops[i].name);
  }
  lua_setfield(L, table, "outputs_core");
}
