/* ty.io: ONNX files as plain tables, { graph =, opset =, ... }, and such tables as files. */
#include <stdlib.h>
#include <string.h>

#include "../io/onnx.h"
#include "io.h"

#ifdef TY_HAVE_ONNX

/* ---- reading ---- */

static void release_onnx(void *p) { ty_onnx_close(p); }

static void set_text(lua_State *L, const char *key, const char *text) {
  if (!text || !*text) return;
  lua_pushstring(L, text);
  lua_setfield(L, -2, key);
}

static void push_texts(lua_State *L, char **text, size_t n) {
  lua_createtable(L, (int)n, 0);
  for (size_t i = 0; i < n; i++) {
    lua_pushstring(L, text[i] ? text[i] : "");
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
}

static void push_tensor(lua_State *L, ty_onnx *o, TyOnnx__Tensor *t) {
  ty_handle *h = ty_lua_push_empty(L);
  h->t = ty_onnx_tensor(o, t);
  if (!h->t) ty_lua_error(L);
}

/* { name =, dtype =, shape = { 3, "batch", false } }: false for a size that is not known; no shape: not even their
 * number. kind: "sequence" ... of values that are no tensors. */
static void push_values(lua_State *L, TyOnnx__Value **v, size_t n) {
  lua_createtable(L, (int)n, 0);
  for (size_t i = 0; i < n; i++) {
    lua_createtable(L, 0, 3);
    set_text(L, "name", v[i]->name);
    const TyOnnx__Type *type = v[i]->type;
    if (type && !type->tensor_type)
      set_text(L, "kind",
               type->has_sequence_type   ? "sequence"
               : type->has_optional_type ? "optional"
               : type->has_map_type      ? "map"
                                         : "sparse tensor");
    if (type && type->tensor_type) {
      ty_dtype dtype;
      int32_t element = type->tensor_type->elem_type;
      set_text(L, "dtype", ty_onnx_dtype(element, &dtype) ? ty_dtype_name[dtype] : ty_onnx_type_name(element));
      const TyOnnx__Shape *shape = type->tensor_type->shape;
      if (shape) {
        lua_createtable(L, (int)shape->n_dim, 0);
        for (size_t d = 0; d < shape->n_dim; d++) {
          const TyOnnx__Dimension *dim = shape->dim[d];
          if (dim->dim_param && *dim->dim_param) lua_pushstring(L, dim->dim_param);
          else if (dim->has_dim_value) lua_pushinteger(L, dim->dim_value);
          else lua_pushboolean(L, 0);
          lua_rawseti(L, -2, (lua_Integer)d + 1);
        }
        lua_setfield(L, -2, "shape");
      }
    }
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
}

static void push_graph(lua_State *L, ty_onnx *o, const TyOnnx__Graph *g);

static int32_t attribute_type(const TyOnnx__Attribute *a) {
  if (a->has_type && a->type) return a->type;
  return a->has_f       ? TY_ONNX_A_FLOAT /* the first files did not say */
         : a->has_i     ? TY_ONNX_A_INT
         : a->has_s     ? TY_ONNX_A_STRING
         : a->t         ? TY_ONNX_A_TENSOR
         : a->g         ? TY_ONNX_A_GRAPH
         : a->n_floats  ? TY_ONNX_A_FLOATS
         : a->n_strings ? TY_ONNX_A_STRINGS
                        : TY_ONNX_A_INTS;
}

static void push_attribute(lua_State *L, ty_onnx *o, const TyOnnx__Node *node, const TyOnnx__Attribute *a) {
  size_t n = 0;
  int32_t type = attribute_type(a);
  switch (type) {
    case TY_ONNX_A_FLOAT: lua_pushnumber(L, (lua_Number)a->f); return;
    case TY_ONNX_A_INT: lua_pushinteger(L, a->i); return;
    case TY_ONNX_A_STRING: lua_pushlstring(L, a->s.len ? (const char *)a->s.data : "", a->s.len); return;
    case TY_ONNX_A_TENSOR:
      if (a->t) push_tensor(L, o, a->t);
      else luaL_error(L, "onnx: attribute %s of a %s has no tensor", a->name, node->op_type);
      return;
    case TY_ONNX_A_GRAPH:
      if (a->g) push_graph(L, o, a->g);
      else luaL_error(L, "onnx: attribute %s of a %s has no graph", a->name, node->op_type);
      return;
    case TY_ONNX_A_FLOATS: n = a->n_floats; break;
    case TY_ONNX_A_INTS: n = a->n_ints; break;
    case TY_ONNX_A_STRINGS: n = a->n_strings; break;
    default:
      luaL_error(L, "onnx: attribute %s of a %s has the type %d, which is not read", ty_quote_text(a->name),
                 node->op_type, (int)type);
  }
  lua_createtable(L, (int)n, 0);
  for (size_t i = 0; i < n; i++) {
    if (type == TY_ONNX_A_FLOATS) lua_pushnumber(L, (lua_Number)a->floats[i]);
    else if (type == TY_ONNX_A_INTS) lua_pushinteger(L, a->ints[i]);
    else lua_pushlstring(L, a->strings[i].len ? (const char *)a->strings[i].data : "", a->strings[i].len);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
}

static void push_node(lua_State *L, ty_onnx *o, const TyOnnx__Node *node) {
  lua_createtable(L, 0, 6);
  set_text(L, "name", node->name);
  set_text(L, "op", node->op_type);
  set_text(L, "domain", node->domain);
  push_texts(L, node->input, node->n_input), lua_setfield(L, -2, "inputs");
  push_texts(L, node->output, node->n_output), lua_setfield(L, -2, "outputs");
  lua_createtable(L, 0, (int)node->n_attribute);
  for (size_t i = 0; i < node->n_attribute; i++) {
    push_attribute(L, o, node, node->attribute[i]);
    lua_setfield(L, -2, node->attribute[i]->name);
  }
  lua_setfield(L, -2, "attributes");
}

static void push_graph(lua_State *L, ty_onnx *o, const TyOnnx__Graph *g) {
  luaL_checkstack(L, 12, "onnx");
  lua_createtable(L, 0, 5);
  set_text(L, "name", g->name);
  push_values(L, g->input, g->n_input), lua_setfield(L, -2, "inputs");
  push_values(L, g->output, g->n_output), lua_setfield(L, -2, "outputs");
  lua_createtable(L, (int)g->n_initializer, 0);
  for (size_t i = 0; i < g->n_initializer; i++) {
    lua_createtable(L, 0, 2);
    set_text(L, "name", g->initializer[i]->name);
    push_tensor(L, o, g->initializer[i]), lua_setfield(L, -2, "tensor");
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  lua_setfield(L, -2, "initializers");
  lua_createtable(L, (int)g->n_node, 0);
  for (size_t i = 0; i < g->n_node; i++) {
    push_node(L, o, g->node[i]);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  lua_setfield(L, -2, "nodes");
}

/* load_onnx(path) -> { graph =, opset = { domain = version }, ir_version =, producer_name =, metadata = { key = text } } */
static int load_onnx(lua_State *L) {
  const char *path = ty_io_path(L, 1);
  ty_onnx *o = ty_io_box(L, sizeof *o, release_onnx);
  ty_lua_current = L;
  ty_lua_poll(L);
  if (!ty_onnx_open(path, o)) return ty_lua_error(L);
  const TyOnnx__Model *m = o->model;
  lua_createtable(L, 0, 8);
  lua_pushinteger(L, m->ir_version), lua_setfield(L, -2, "ir_version");
  lua_pushinteger(L, m->model_version), lua_setfield(L, -2, "model_version");
  set_text(L, "producer_name", m->producer_name);
  set_text(L, "producer_version", m->producer_version);
  set_text(L, "domain", m->domain);
  lua_newtable(L);
  for (size_t i = 0; i < m->n_opset_import; i++) {
    lua_pushinteger(L, m->opset_import[i]->version);
    lua_setfield(L, -2, m->opset_import[i]->domain ? m->opset_import[i]->domain : "");
  }
  lua_setfield(L, -2, "opset");
  lua_newtable(L);
  for (size_t i = 0; i < m->n_metadata_props; i++)
    if (m->metadata_props[i]->key) set_text(L, m->metadata_props[i]->key, m->metadata_props[i]->value);
  lua_setfield(L, -2, "metadata");
  push_graph(L, o, m->graph);
  lua_setfield(L, -2, "graph");
  ty_io_unbox(o);
  return 1;
}

/* ---- writing ---- */

/* All that the messages of a model point to; the texts and tensors stay in the tables that they come from. */
typedef struct piece {
  struct piece *next;
  ty_tensor *tensor;
  max_align_t bytes[];
} piece;

typedef struct arena {
  piece *pieces;
} arena;

static void release_arena(void *p) {
  arena *a = p;
  while (a->pieces) {
    piece *next = a->pieces->next;
    ty_release(a->pieces->tensor);
    free(a->pieces);
    a->pieces = next;
  }
}

static void *make(lua_State *L, arena *a, size_t n, size_t size) {
  piece *p = n < (size_t)PTRDIFF_MAX / (size + 1) ? calloc(1, sizeof *p + n * size) : NULL;
  if (!p) luaL_error(L, "save_onnx: out of memory");
  p->next = a->pieces;
  a->pieces = p;
  return p->bytes;
}

#define MAKE(type) make(L, a, 1, sizeof(type))
#define MAKE_LIST(type, n) make(L, a, (n) + 1, sizeof(type))

static _Noreturn void expected(lua_State *L, const char *what, const char *expects) {
  luaL_error(L, "save_onnx: %s: expected %s, got a %s", what, expects, ty_lua_typename(L, -1));
  abort(); /* luaL_error does not return */
}

/* The text of a field of the table on the top of the stack; the table keeps it. NULL: not there. */
static char *text_field(lua_State *L, const char *key, bool required) {
  int type = lua_getfield(L, -1, key);
  if (type != LUA_TSTRING && (required || type != LUA_TNIL)) expected(L, key, "a string");
  char *text = (char *)(uintptr_t)(type == LUA_TSTRING ? lua_tostring(L, -1) : NULL);
  lua_pop(L, 1);
  return text;
}

/* Pushes the list in a field; its length. A field that is not there is an empty list. */
static size_t list_field(lua_State *L, const char *key) {
  luaL_checkstack(L, 12, "onnx");
  if (lua_getfield(L, -1, key) == LUA_TNIL) {
    lua_pop(L, 1);
    lua_newtable(L);
    return 0;
  }
  if (!lua_istable(L, -1)) expected(L, key, "a list");
  return (size_t)lua_rawlen(L, -1);
}

static char **texts_field(lua_State *L, arena *a, const char *key, size_t *n) {
  *n = list_field(L, key);
  char **text = MAKE_LIST(char *, *n);
  for (size_t i = 0; i < *n; i++) {
    if (lua_rawgeti(L, -1, (lua_Integer)i + 1) != LUA_TSTRING) expected(L, key, "a list of strings");
    text[i] = (char *)(uintptr_t)lua_tostring(L, -1);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  return text;
}

/* The tensor on the top of the stack; pops it. */
static TyOnnx__Tensor *take_tensor(lua_State *L, arena *a, const char *name) {
  TyOnnx__Tensor *to = MAKE(TyOnnx__Tensor);
  piece *holder = a->pieces;
  ty_tensor *t = ty_lua_to(L, -1);
  if (!t) expected(L, name, "a tensor");
  if (!ty_onnx_type_of(ty_dtype_of(t)))
    luaL_error(L, "save_onnx: %s: ONNX has no block-quantized tensors, got %s; dequantize it", name, ty_describe(t));
  ty_onnx__tensor__init(to);
  to->name = (char *)(uintptr_t)name;
  to->has_data_type = true, to->data_type = ty_onnx_type_of(ty_dtype_of(t));
  to->n_dims = (size_t)t->v.ndim, to->dims = MAKE_LIST(int64_t, to->n_dims);
  memcpy(to->dims, t->v.size, to->n_dims * sizeof *to->dims);
  holder->tensor = ty_host_tensor(t);
  if (!holder->tensor) ty_lua_error(L);
  to->has_raw_data = true;
  to->raw_data.data = holder->tensor->v.data;
  to->raw_data.len = (size_t)t->v.count * ty_dtype_size[t->v.dtype];
  lua_pop(L, 1);
  return to;
}

static TyOnnx__Graph *take_graph(lua_State *L, arena *a, int depth);

static void take_list(lua_State *L, arena *a, TyOnnx__Attribute *to) {
  size_t n = (size_t)lua_rawlen(L, -1);
  bool text = n > 0, whole = true;
  for (size_t i = 1; i <= n; i++) {
    int type = lua_rawgeti(L, -1, (lua_Integer)i);
    text = text && type == LUA_TSTRING;
    whole = whole && lua_isinteger(L, -1);
    if (type != LUA_TNUMBER && !text) expected(L, to->name, "a list of numbers or of strings");
    lua_pop(L, 1);
  }
  to->type = text ? TY_ONNX_A_STRINGS : whole ? TY_ONNX_A_INTS : TY_ONNX_A_FLOATS;
  if (text) to->n_strings = n, to->strings = MAKE_LIST(ProtobufCBinaryData, n);
  else if (whole) to->n_ints = n, to->ints = MAKE_LIST(int64_t, n);
  else to->n_floats = n, to->floats = MAKE_LIST(float, n);
  for (size_t i = 0; i < n; i++) {
    lua_rawgeti(L, -1, (lua_Integer)i + 1);
    if (text) to->strings[i].data = (uint8_t *)(uintptr_t)lua_tolstring(L, -1, &to->strings[i].len);
    else if (whole) to->ints[i] = lua_tointeger(L, -1);
    else to->floats[i] = (float)lua_tonumber(L, -1);
    lua_pop(L, 1);
  }
}

/* The value on the top of the stack: its Lua type says what it is written as. */
static TyOnnx__Attribute *take_attribute(lua_State *L, arena *a, const char *name, int depth) {
  TyOnnx__Attribute *to = MAKE(TyOnnx__Attribute);
  ty_onnx__attribute__init(to);
  to->name = (char *)(uintptr_t)name;
  to->has_type = true;
  if (lua_isinteger(L, -1)) {
    to->type = TY_ONNX_A_INT, to->has_i = true, to->i = lua_tointeger(L, -1);
  } else if (lua_type(L, -1) == LUA_TNUMBER) {
    to->type = TY_ONNX_A_FLOAT, to->has_f = true, to->f = (float)lua_tonumber(L, -1);
  } else if (lua_type(L, -1) == LUA_TSTRING) {
    to->type = TY_ONNX_A_STRING, to->has_s = true;
    to->s.data = (uint8_t *)(uintptr_t)lua_tolstring(L, -1, &to->s.len);
  } else if (ty_lua_to(L, -1)) {
    lua_pushvalue(L, -1);
    to->type = TY_ONNX_A_TENSOR, to->t = take_tensor(L, a, name);
  } else if (lua_istable(L, -1)) {
    bool graph = lua_getfield(L, -1, "nodes") != LUA_TNIL;
    lua_pop(L, 1);
    if (graph) to->type = TY_ONNX_A_GRAPH, to->g = take_graph(L, a, depth + 1);
    else take_list(L, a, to);
  } else {
    expected(L, name, "a number, a string, a tensor, a list or a graph");
  }
  return to;
}

static int by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static TyOnnx__Node *take_node(lua_State *L, arena *a, int depth) {
  TyOnnx__Node *to = MAKE(TyOnnx__Node);
  ty_onnx__node__init(to);
  to->op_type = text_field(L, "op", true);
  to->name = text_field(L, "name", false);
  to->domain = text_field(L, "domain", false);
  to->input = texts_field(L, a, "inputs", &to->n_input);
  to->output = texts_field(L, a, "outputs", &to->n_output);
  if (lua_getfield(L, -1, "attributes") != LUA_TNIL) {
    if (!lua_istable(L, -1)) expected(L, "attributes", "a table");
    size_t n = 0;
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) n++;
    const char **names = MAKE_LIST(char *, n);
    n = 0;
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
      if (lua_type(L, -2) != LUA_TSTRING) luaL_error(L, "save_onnx: attributes: expected strings as names");
      names[n++] = lua_tostring(L, -2);
    }
    qsort(names, n, sizeof *names, by_text); /* the same model gives the same file */
    to->attribute = MAKE_LIST(TyOnnx__Attribute *, n);
    for (size_t i = 0; i < n; i++) {
      lua_getfield(L, -1, names[i]);
      to->attribute[to->n_attribute++] = take_attribute(L, a, names[i], depth);
      lua_pop(L, 1);
    }
  }
  lua_pop(L, 1);
  return to;
}

static TyOnnx__Type *take_type(lua_State *L, arena *a) {
  TyOnnx__Type *to = MAKE(TyOnnx__Type);
  TyOnnx__TensorType *tensor = MAKE(TyOnnx__TensorType);
  const char *name = text_field(L, "dtype", true);
  ty_dtype dtype;
  ty_onnx__type__init(to), ty_onnx__tensor_type__init(tensor);
  if (!ty_dtype_parse(name, &dtype) || !ty_onnx_type_of(dtype))
    luaL_error(L, "save_onnx: dtype: expected one that ONNX has, got \"%s\"", name);
  tensor->has_elem_type = true, tensor->elem_type = ty_onnx_type_of(dtype);
  to->tensor_type = tensor;
  if (lua_getfield(L, -1, "shape") != LUA_TNIL) {
    if (!lua_istable(L, -1)) expected(L, "shape", "a list");
    TyOnnx__Shape *shape = tensor->shape = MAKE(TyOnnx__Shape);
    ty_onnx__shape__init(shape);
    shape->n_dim = (size_t)lua_rawlen(L, -1);
    shape->dim = MAKE_LIST(TyOnnx__Dimension *, shape->n_dim);
    for (size_t i = 0; i < shape->n_dim; i++) {
      TyOnnx__Dimension *dim = shape->dim[i] = MAKE(TyOnnx__Dimension);
      ty_onnx__dimension__init(dim);
      lua_rawgeti(L, -1, (lua_Integer)i + 1);
      if (lua_isinteger(L, -1)) dim->has_dim_value = true, dim->dim_value = lua_tointeger(L, -1);
      else if (lua_type(L, -1) == LUA_TSTRING) dim->dim_param = (char *)(uintptr_t)lua_tostring(L, -1);
      else if (!lua_isboolean(L, -1)) expected(L, "shape", "sizes, names and false");
      lua_pop(L, 1);
    }
  }
  lua_pop(L, 1);
  return to;
}

static TyOnnx__Value **take_values(lua_State *L, arena *a, const char *key, size_t *n) {
  *n = list_field(L, key);
  TyOnnx__Value **values = MAKE_LIST(TyOnnx__Value *, *n);
  for (size_t i = 0; i < *n; i++) {
    TyOnnx__Value *v = values[i] = MAKE(TyOnnx__Value);
    ty_onnx__value__init(v);
    if (lua_rawgeti(L, -1, (lua_Integer)i + 1) != LUA_TTABLE) expected(L, key, "a list of tables");
    v->name = text_field(L, "name", true);
    bool typed = lua_getfield(L, -1, "dtype") != LUA_TNIL;
    lua_pop(L, 1);
    if (typed) v->type = take_type(L, a);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  return values;
}

static TyOnnx__Graph *take_graph(lua_State *L, arena *a, int depth) {
  if (depth > TY_ONNX_GRAPHS_DEEP) luaL_error(L, "save_onnx: graphs in graphs, more than %d deep", TY_ONNX_GRAPHS_DEEP);
  TyOnnx__Graph *to = MAKE(TyOnnx__Graph);
  ty_onnx__graph__init(to);
  to->name = text_field(L, "name", false);
  if (!to->name) to->name = (char *)(uintptr_t) "graph";
  to->input = take_values(L, a, "inputs", &to->n_input);
  to->output = take_values(L, a, "outputs", &to->n_output);
  to->n_initializer = list_field(L, "initializers");
  to->initializer = MAKE_LIST(TyOnnx__Tensor *, to->n_initializer);
  for (size_t i = 0; i < to->n_initializer; i++) {
    if (lua_rawgeti(L, -1, (lua_Integer)i + 1) != LUA_TTABLE) expected(L, "initializers", "a list of tables");
    const char *name = text_field(L, "name", true);
    lua_getfield(L, -1, "tensor");
    to->initializer[i] = take_tensor(L, a, name);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  to->n_node = list_field(L, "nodes");
  to->node = MAKE_LIST(TyOnnx__Node *, to->n_node);
  for (size_t i = 0; i < to->n_node; i++) {
    if (lua_rawgeti(L, -1, (lua_Integer)i + 1) != LUA_TTABLE) expected(L, "nodes", "a list of tables");
    to->node[i] = take_node(L, a, depth);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  return to;
}

/* Field `key` of the model: { domain = version } or { key = text }. */
static size_t count_pairs(lua_State *L, const char *key) {
  size_t n = 0;
  if (lua_getfield(L, -1, key) == LUA_TNIL) {
    lua_pop(L, 1);
    lua_newtable(L);
  }
  if (!lua_istable(L, -1)) expected(L, key, "a table");
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) luaL_error(L, "save_onnx: %s: expected strings as names", key);
    n++;
  }
  return n;
}

/* save_onnx(path, model [, { external = false }]): a table as load_onnx makes them; of attributes integers are INT, other
 * numbers FLOAT. external: tensors of 1 KB and more go into the file path.data. */
static int save_onnx(lua_State *L) {
  static const char *const options[] = { "external", NULL };
  const char *path = ty_io_path(L, 1);
  ty_lua_check_type(L, 2, LUA_TTABLE);
  ty_io_options(L, 3, options);
  bool external = ty_io_flag(L, 3, "external", false);
  lua_settop(L, 2);
  const char *data_path = lua_pushfstring(L, "%s.data", path), *slash = strrchr(data_path, '/');
  arena *a = ty_io_box(L, sizeof *a, release_arena);
  ty_lua_current = L;
  ty_lua_poll(L);
  TyOnnx__Model *m = MAKE(TyOnnx__Model);
  ty_onnx__model__init(m);
  lua_pushvalue(L, 2);
  int whole;
  lua_getfield(L, -1, "ir_version");
  m->has_ir_version = true, m->ir_version = lua_tointegerx(L, -1, &whole);
  if (!whole) expected(L, "ir_version", "an integer");
  lua_pop(L, 1);
  m->producer_name = text_field(L, "producer_name", false);
  m->producer_version = text_field(L, "producer_version", false);
  m->domain = text_field(L, "domain", false);
  size_t n = count_pairs(L, "opset");
  m->opset_import = MAKE_LIST(TyOnnx__OperatorSet *, n);
  for (lua_pushnil(L); lua_next(L, -2) && m->n_opset_import < n; lua_pop(L, 1)) {
    TyOnnx__OperatorSet *set = m->opset_import[m->n_opset_import++] = MAKE(TyOnnx__OperatorSet);
    ty_onnx__operator_set__init(set);
    set->domain = (char *)(uintptr_t)lua_tostring(L, -2);
    set->has_version = true, set->version = lua_tointegerx(L, -1, &whole);
    if (!whole) expected(L, "opset", "integers");
  }
  lua_pop(L, 1);
  n = count_pairs(L, "metadata");
  m->metadata_props = MAKE_LIST(TyOnnx__Entry *, n);
  for (lua_pushnil(L); lua_next(L, -2) && m->n_metadata_props < n; lua_pop(L, 1)) {
    TyOnnx__Entry *entry = m->metadata_props[m->n_metadata_props++] = MAKE(TyOnnx__Entry);
    ty_onnx__entry__init(entry);
    if (lua_type(L, -1) != LUA_TSTRING) expected(L, "metadata", "strings");
    entry->key = (char *)(uintptr_t)lua_tostring(L, -2);
    entry->value = (char *)(uintptr_t)lua_tostring(L, -1);
  }
  lua_pop(L, 1);
  if (lua_getfield(L, -1, "graph") != LUA_TTABLE) expected(L, "graph", "a table");
  m->graph = take_graph(L, a, 1);
  if (!ty_onnx_write(path, m, external ? data_path : NULL, slash ? slash + 1 : data_path)) return ty_lua_error(L);
  ty_io_unbox(a);
  return 0;
}

#else

static int load_onnx(lua_State *L) {
  ty_io_path(L, 1);
  ty_onnx_missing();
  return ty_lua_error(L);
}

static int save_onnx(lua_State *L) { return load_onnx(L); }

#endif

void ty_io_add_onnx(lua_State *L) {
  luaL_setfuncs(L, (const luaL_Reg[]){ { "load_onnx", load_onnx }, { "save_onnx", save_onnx }, { NULL, NULL } }, 0);
}
