/* ONNX files: the wire format is walked once before libprotobuf-c, which has no limits of its own, unpacks it; tensors
 * are checked against what their shapes ask for. Weights in other files are mapped. */
#define _GNU_SOURCE
#include "onnx.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
  const char *name;
  int dtype; /* what it is read as; -1: not read */
} types[TY_ONNX_TYPES] = {
  [TY_ONNX_FLOAT] = { "f32", TY_F32 },
  [TY_ONNX_UINT8] = { "u8", TY_U8 },
  [TY_ONNX_INT8] = { "i8", TY_I8 },
  [TY_ONNX_UINT16] = { "u16", TY_I32 },
  [TY_ONNX_INT16] = { "i16", TY_I16 },
  [TY_ONNX_INT32] = { "i32", TY_I32 },
  [TY_ONNX_INT64] = { "i64", TY_I64 },
  [TY_ONNX_STRING] = { "string", -1 },
  [TY_ONNX_BOOL] = { "bool", TY_BOOL },
  [TY_ONNX_FLOAT16] = { "f16", TY_F16 },
  [TY_ONNX_DOUBLE] = { "f64", TY_F64 },
  [TY_ONNX_UINT32] = { "u32", TY_I64 },
  [TY_ONNX_UINT64] = { "u64", TY_I64 },
  [TY_ONNX_COMPLEX64] = { "complex64", -1 },
  [TY_ONNX_COMPLEX128] = { "complex128", -1 },
  [TY_ONNX_BFLOAT16] = { "bf16", TY_BF16 },
  [17] = { "f8e4m3fn", -1 },
  [18] = { "f8e4m3fnuz", -1 },
  [19] = { "f8e5m2", -1 },
  [20] = { "f8e5m2fnuz", -1 },
  [TY_ONNX_UINT4] = { "u4", TY_U8 },
  [TY_ONNX_INT4] = { "i4", TY_I8 },
};

const char *ty_onnx_type_name(int32_t type) { return type > 0 && type < TY_ONNX_TYPES ? types[type].name : NULL; }

bool ty_onnx_dtype(int32_t type, ty_dtype *out) {
  if (!ty_onnx_type_name(type) || types[type].dtype < 0) return false;
  *out = (ty_dtype)types[type].dtype;
  return true;
}

int32_t ty_onnx_type_of(ty_dtype dtype) {
  static const int32_t of[TY_DTYPES] = {
    [TY_BOOL] = TY_ONNX_BOOL, [TY_U8] = TY_ONNX_UINT8,   [TY_I8] = TY_ONNX_INT8,     [TY_I16] = TY_ONNX_INT16,
    [TY_I32] = TY_ONNX_INT32, [TY_I64] = TY_ONNX_INT64,  [TY_F16] = TY_ONNX_FLOAT16, [TY_BF16] = TY_ONNX_BFLOAT16,
    [TY_F32] = TY_ONNX_FLOAT, [TY_F64] = TY_ONNX_DOUBLE,
  };
  return of[dtype];
}

#ifndef TY_HAVE_ONNX

bool ty_onnx_missing(void) {
  return ty_fail(TY_EUNSUPPORTED, "onnx: this build has no libprotobuf-c; install libprotobuf-c-dev and "
                                  "protobuf-c-compiler and build again");
}

#else

bool ty_onnx_missing(void) { return true; }

struct ty_onnx_data {
  struct ty_onnx_data *next;
  ty_mapping *map;
  char name[];
};

static bool __attribute__((format(printf, 2, 3))) fail(const char *path, const char *format, ...) {
  char what[500];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return ty_fail(TY_EIO, "onnx %s: %s", ty_quote_text(path), what);
}

/* ---- before unpacking ---- */

typedef enum { OTHER, MODEL, GRAPH, NODE, ATTRIBUTE } message;

typedef struct walk {
  const char *path;
  int64_t messages;
} walk;

/* Where a message leads to graphs again. */
static message inside(message of, uint64_t field) {
  switch (of) {
    case MODEL: return field == 7 ? GRAPH : OTHER;
    case GRAPH: return field == 1 ? NODE : OTHER;
    case NODE: return field == 5 ? ATTRIBUTE : OTHER;
    case ATTRIBUTE: return field == 6 || field == 11 ? GRAPH : OTHER;
    default: return OTHER;
  }
}

static bool varint(const uint8_t **at, const uint8_t *end, uint64_t *out) {
  *out = 0;
  for (int shift = 0; shift < 64 && *at < end; shift += 7) {
    uint8_t byte = *(*at)++;
    *out |= (uint64_t)(byte & 127) << shift;
    if (byte < 128) return true;
  }
  return false;
}

/* Counts what there is and how deep it goes: recursion ends with TY_ONNX_GRAPHS_DEEP. */
static bool look_through(walk *w, const uint8_t *at, const uint8_t *end, message of, int depth) {
  if (of == GRAPH && ++depth > TY_ONNX_GRAPHS_DEEP)
    return fail(w->path, "graphs in graphs, more than %d deep", TY_ONNX_GRAPHS_DEEP);
  while (at < end) {
    uint64_t key, size = 0;
    bool ok = varint(&at, end, &key) && key >> 3 > 0;
    if (ok) switch (key & 7) {
        case 0: ok = varint(&at, end, &size), size = 0; break;
        case 1: size = 8; break;
        case 2: ok = varint(&at, end, &size); break;
        case 5: size = 4; break;
        default: ok = false;
      }
    if (!ok || size > (uint64_t)(end - at)) return fail(w->path, "it is cut short, or no ONNX file");
    if ((key & 7) == 2) {
      message next = inside(of, key >> 3);
      if (++w->messages > TY_ONNX_MESSAGES) return fail(w->path, "it has more than %d parts", TY_ONNX_MESSAGES);
      if (next != OTHER && !look_through(w, at, at + size, next, depth)) return false;
    }
    at += size;
  }
  return true;
}

/* Names of strings are looked at where they matter; here: what everything else takes for granted. */
static bool check_graph(const ty_onnx *o, const TyOnnx__Graph *g);

static bool check_tensor_name(const ty_onnx *o, const TyOnnx__Tensor *t) {
  if (t->segment.len || t->has_segment)
    return fail(o->path, "tensor %s is a segment of one, which is not read", ty_quote_text(t->name ? t->name : ""));
  return true;
}

static bool check_node(const ty_onnx *o, const TyOnnx__Node *n) {
  if (!n->op_type || !*n->op_type)
    return fail(o->path, "node %s has no operator", ty_quote_text(n->name ? n->name : ""));
  for (size_t i = 0; i < n->n_attribute; i++) {
    const TyOnnx__Attribute *a = n->attribute[i];
    if (!a->name || !*a->name) return fail(o->path, "an attribute of a node %s has no name", ty_quote_text(n->op_type));
    if (a->t && !check_tensor_name(o, a->t)) return false;
    if (a->g && !check_graph(o, a->g)) return false;
    for (size_t j = 0; j < a->n_graphs; j++)
      if (!check_graph(o, a->graphs[j])) return false;
  }
  return true;
}

static bool check_graph(const ty_onnx *o, const TyOnnx__Graph *g) {
  if (g->n_sparse_initializer) return fail(o->path, "it has sparse initializers, which are not read");
  for (size_t i = 0; i < g->n_initializer; i++) {
    if (!g->initializer[i]->name || !*g->initializer[i]->name) return fail(o->path, "an initializer has no name");
    if (!check_tensor_name(o, g->initializer[i])) return false;
  }
  for (size_t i = 0; i < g->n_input + g->n_output; i++) {
    const TyOnnx__Value *v = i < g->n_input ? g->input[i] : g->output[i - g->n_input];
    if (!v->name || !*v->name) return fail(o->path, "an %s has no name", i < g->n_input ? "input" : "output");
  }
  for (size_t i = 0; i < g->n_node; i++)
    if (!check_node(o, g->node[i])) return false;
  return true;
}

bool ty_onnx_parse(const void *bytes, size_t size, const char *path, ty_onnx *out) {
  *out = (ty_onnx){ .path = path };
  walk w = { .path = path };
  if (size == 0) return fail(path, "it is empty");
  if (!look_through(&w, bytes, (const uint8_t *)bytes + size, MODEL, 0)) return false;
  out->model = ty_onnx__model__unpack(NULL, size, bytes);
  if (!out->model) return fail(path, "it is no ONNX file");
  if (out->model->n_functions) return fail(path, "it has functions, which are not read: export it with them inlined");
  if (!out->model->graph) return fail(path, "there is no graph in it: it is no ONNX file");
  return check_graph(out, out->model->graph);
}

bool ty_onnx_open(const char *path, ty_onnx *out) {
  *out = (ty_onnx){ .path = path };
  ty_mapping *m = ty_mapping_open(path);
  if (!m) return false;
  bool ok = ty_onnx_parse(m->data, m->size, path, out);
  ty_mapping_release(m);
  return ok;
}

void ty_onnx_close(ty_onnx *o) {
  if (o->model) ty_onnx__model__free_unpacked(o->model, NULL);
  while (o->data) {
    struct ty_onnx_data *next = o->data->next;
    ty_mapping_release(o->data->map);
    free(o->data);
    o->data = next;
  }
  *o = (ty_onnx){ 0 };
}

/* ---- tensors ---- */

static const char *name_of(const TyOnnx__Tensor *t) { return ty_quote_text(t->name ? t->name : ""); }

/* A file beside the model, mapped once. Its name may lead down into folders, never out of the model's own. */
static ty_mapping *external_file(ty_onnx *o, const TyOnnx__Tensor *t, const char *name) {
  for (struct ty_onnx_data *d = o->data; d; d = d->next)
    if (strcmp(d->name, name) == 0) return d->map;
  bool inside_folder = *name && *name != '/' && !strchr(name, '\\');
  for (const char *part = name; part && inside_folder; part = strchr(part, '/')) {
    while (*part == '/') part++;
    if (strncmp(part, "..", 2) == 0 && (!part[2] || part[2] == '/')) inside_folder = false;
  }
  if (!inside_folder) {
    fail(o->path, "tensor %s is in the file %s, which is not in the model's folder", name_of(t), ty_quote_text(name));
    return NULL;
  }
  const char *slash = strrchr(o->path, '/');
  int folder = slash ? (int)(slash - o->path + 1) : 0;
  size_t length = strlen(name);
  struct ty_onnx_data *d = malloc(sizeof *d + length + 1);
  char *path = malloc((size_t)folder + length + 1);
  if (!d || !path) {
    ty_fail(TY_ENOMEM, "no memory to read an ONNX file");
  } else {
    memcpy(path, o->path, (size_t)folder);
    memcpy(path + folder, name, length + 1);
    memcpy(d->name, name, length + 1);
    d->map = ty_mapping_open(path);
    d->next = o->data;
    if (d->map) o->data = d, d = NULL;
  }
  ty_mapping *found = path && !d ? o->data->map : NULL;
  free(d);
  free(path);
  return found;
}

static bool whole_number(const char *text, uint64_t *out) {
  char *end;
  if (*text < '0' || *text > '9' || strlen(text) > 18) return false;
  *out = strtoull(text, &end, 10);
  return !*end;
}

static ty_tensor *external_tensor(ty_onnx *o, TyOnnx__Tensor *t, ty_dtype dtype, uint64_t bytes, const int64_t *size) {
  const char *name = NULL;
  uint64_t offset = 0, length = bytes;
  for (size_t i = 0; i < t->n_external_data; i++) {
    const char *key = t->external_data[i]->key, *value = t->external_data[i]->value;
    if (!key || !value) continue;
    if (strcmp(key, "location") == 0) name = value;
    uint64_t *number = strcmp(key, "offset") == 0 ? &offset : strcmp(key, "length") == 0 ? &length : NULL;
    if (number && !whole_number(value, number)) {
      fail(o->path, "tensor %s: %s: expected a count of bytes, got %s", name_of(t), key, ty_quote_text(value));
      return NULL;
    }
  }
  if (!name) {
    fail(o->path, "tensor %s is in another file, which is not named", name_of(t));
    return NULL;
  }
  ty_mapping *m = external_file(o, t, name);
  if (!m) return NULL;
  if (length != bytes || offset > m->size || bytes > m->size - offset) {
    fail(o->path, "tensor %s needs %llu bytes; the model says %llu from %llu on in %s, which has %zu", name_of(t),
         (unsigned long long)bytes, (unsigned long long)length, (unsigned long long)offset, ty_quote_text(name),
         m->size);
    return NULL;
  }
  return ty_mapping_tensor(m, offset, dtype, (int)t->n_dims, size, false);
}

static size_t bytes_of(int32_t type) {
  switch (type) {
    case TY_ONNX_UINT8:
    case TY_ONNX_INT8:
    case TY_ONNX_BOOL: return 1;
    case TY_ONNX_UINT16:
    case TY_ONNX_INT16:
    case TY_ONNX_FLOAT16:
    case TY_ONNX_BFLOAT16: return 2;
    case TY_ONNX_INT32:
    case TY_ONNX_FLOAT:
    case TY_ONNX_UINT32: return 4;
    default: return 8;
  }
}

/* Elements as the file has them into those of the tensor, where the two differ. */
static bool widen(int32_t type, const uint8_t *from, size_t n, void *to) {
  for (size_t i = 0; i < n; i++) {
    uint16_t u16;
    uint32_t u32;
    uint64_t u64;
    switch (type) {
      case TY_ONNX_UINT16:
        memcpy(&u16, from + i * 2, 2);
        ((int32_t *)to)[i] = u16;
        break;
      case TY_ONNX_UINT32:
        memcpy(&u32, from + i * 4, 4);
        ((int64_t *)to)[i] = u32;
        break;
      case TY_ONNX_UINT64:
        memcpy(&u64, from + i * 8, 8);
        if (u64 > INT64_MAX) return false;
        ((int64_t *)to)[i] = (int64_t)u64;
        break;
      case TY_ONNX_BOOL: ((uint8_t *)to)[i] = from[i] != 0; break;
      default: { /* four bits, the lower first */
        uint8_t nibble = i & 1 ? from[i / 2] >> 4 : from[i / 2] & 15;
        ((uint8_t *)to)[i] = type == TY_ONNX_INT4 && nibble > 7 ? (uint8_t)(nibble | 0xf0) : nibble;
      }
    }
  }
  return true;
}

static bool widens(int32_t type) {
  return type == TY_ONNX_UINT16 || type == TY_ONNX_UINT32 || type == TY_ONNX_UINT64 || type == TY_ONNX_BOOL ||
         type == TY_ONNX_UINT4 || type == TY_ONNX_INT4;
}

/* Elements in the lists of numbers that the type has, when there are no raw bytes: their count, and them. */
static size_t listed(const TyOnnx__Tensor *t, int32_t type) {
  switch (type) {
    case TY_ONNX_FLOAT: return t->n_float_data;
    case TY_ONNX_DOUBLE: return t->n_double_data;
    case TY_ONNX_INT64: return t->n_int64_data;
    case TY_ONNX_UINT32:
    case TY_ONNX_UINT64: return t->n_uint64_data;
    default: return t->n_int32_data;
  }
}

static bool unlist(const TyOnnx__Tensor *t, int32_t type, size_t n, void *to) {
  switch (type) {
    case TY_ONNX_FLOAT: memcpy(to, t->float_data, n * 4); return true;
    case TY_ONNX_DOUBLE: memcpy(to, t->double_data, n * 8); return true;
    case TY_ONNX_INT64: memcpy(to, t->int64_data, n * 8); return true;
    default: break;
  }
  for (size_t i = 0; i < n; i++) {
    switch (type) {
      case TY_ONNX_UINT32: ((int64_t *)to)[i] = (int64_t)(uint32_t)t->uint64_data[i]; break;
      case TY_ONNX_UINT64:
        if (t->uint64_data[i] > INT64_MAX) return false;
        ((int64_t *)to)[i] = (int64_t)t->uint64_data[i];
        break;
      case TY_ONNX_INT32: ((int32_t *)to)[i] = t->int32_data[i]; break;
      case TY_ONNX_UINT16: ((int32_t *)to)[i] = (uint16_t)t->int32_data[i]; break;
      case TY_ONNX_INT16:
      case TY_ONNX_FLOAT16:
      case TY_ONNX_BFLOAT16: ((uint16_t *)to)[i] = (uint16_t)t->int32_data[i]; break;
      case TY_ONNX_BOOL: ((uint8_t *)to)[i] = t->int32_data[i] != 0; break;
      case TY_ONNX_UINT4:
      case TY_ONNX_INT4: { /* two in each number */
        uint8_t pair = (uint8_t)t->int32_data[i / 2];
        uint8_t nibble = i & 1 ? pair >> 4 : pair & 15;
        ((uint8_t *)to)[i] = type == TY_ONNX_INT4 && nibble > 7 ? (uint8_t)(nibble | 0xf0) : nibble;
        break;
      }
      default: ((uint8_t *)to)[i] = (uint8_t)t->int32_data[i];
    }
  }
  return true;
}

static ty_tensor *value_too_large(ty_onnx *o, TyOnnx__Tensor *t, ty_tensor *made) {
  ty_release(made);
  fail(o->path, "tensor %s is of u64 and has an element above 2^63, which Tycho cannot hold", name_of(t));
  return NULL;
}

ty_tensor *ty_onnx_tensor(ty_onnx *o, TyOnnx__Tensor *t) {
  int64_t size[TY_MAX_DIMS];
  uint64_t bytes, elements = 1;
  ty_dtype dtype;
  int32_t type = t->data_type;
  if (!ty_onnx_dtype(type, &dtype)) {
    if (ty_onnx_type_name(type))
      fail(o->path, "tensor %s is of %s, which Tycho does not have", name_of(t), ty_onnx_type_name(type));
    else fail(o->path, "tensor %s is of the unknown type %d", name_of(t), type);
    return NULL;
  }
  if (t->n_dims > TY_MAX_DIMS) {
    fail(o->path, "tensor %s has %zu dimensions, at most %d are read", name_of(t), t->n_dims, TY_MAX_DIMS);
    return NULL;
  }
  for (size_t i = 0; i < t->n_dims; i++) size[i] = t->dims[i];
  bool fits = true;
  for (size_t i = 0; i < t->n_dims; i++) fits = fits && size[i] >= 0;
  fits = fits && ty_count_bytes(dtype, (int)t->n_dims, size, &bytes) && bytes <= PTRDIFF_MAX / 8;
  if (!fits) {
    fail(o->path, "tensor %s has the shape %s, which cannot be", name_of(t), ty_shape_text((int)t->n_dims, size));
    return NULL;
  }
  for (size_t i = 0; i < t->n_dims; i++) elements *= (uint64_t)size[i];
  bool nibbles = type == TY_ONNX_UINT4 || type == TY_ONNX_INT4;
  uint64_t stored = nibbles ? (elements + 1) / 2 : elements * bytes_of(type);

  if (t->data_location == 1) {
    if (!widens(type)) return external_tensor(o, t, dtype, bytes, size);
    int64_t flat[1] = { (int64_t)stored }, dims = (int64_t)t->n_dims;
    t->n_dims = 1;
    ty_tensor *raw = external_tensor(o, t, TY_U8, stored, flat);
    t->n_dims = (size_t)dims;
    ty_tensor *made = raw ? ty_tensor_new(TY_CPU, dtype, (int)dims, size) : NULL;
    if (made && !widen(type, raw->v.data, elements, made->v.data)) made = value_too_large(o, t, made);
    ty_release(raw);
    return made;
  }
  if (t->data_location != 0) {
    fail(o->path, "tensor %s: data_location %d is not known", name_of(t), t->data_location);
    return NULL;
  }

  bool raw = t->has_raw_data && (t->raw_data.len > 0 || listed(t, type) == 0);
  uint64_t there = raw ? t->raw_data.len : listed(t, type);
  uint64_t wanted = raw ? stored : nibbles ? (elements + 1) / 2 : elements;
  if (there != wanted) {
    fail(o->path, "tensor %s has the shape %s of %s, which takes %llu %s, but there are %llu", name_of(t),
         ty_shape_text((int)t->n_dims, size), ty_onnx_type_name(type), (unsigned long long)wanted,
         raw ? "bytes" : "numbers", (unsigned long long)there);
    return NULL;
  }
  if (raw && bytes >= 4096 && !widens(type)) { /* the message's own memory, from malloc */
    void *data = t->raw_data.data;
    t->raw_data = (ProtobufCBinaryData){ 0 };
    return ty_tensor_wrap(data, dtype, (int)t->n_dims, size, free, data);
  }
  ty_tensor *made = ty_tensor_new(TY_CPU, dtype, (int)t->n_dims, size);
  if (!made || elements == 0) return made;
  bool ok = true;
  if (!raw) ok = unlist(t, type, elements, made->v.data);
  else if (widens(type)) ok = widen(type, t->raw_data.data, elements, made->v.data);
  else memcpy(made->v.data, t->raw_data.data, bytes);
  return ok ? made : value_too_large(o, t, made);
}

/* ---- writing ---- */

typedef struct file_buffer {
  ProtobufCBuffer base;
  ty_writer *file;
  bool ok;
} file_buffer;

static void append(ProtobufCBuffer *buffer, size_t size, const uint8_t *data) {
  file_buffer *b = (file_buffer *)buffer;
  b->ok = b->ok && ty_writer_put(b->file, data, size);
}

/* One initializer's bytes into the file of weights; the entries that say so are allocated like unpacked ones. */
static bool put_beside(ty_writer *w, TyOnnx__Tensor *t, TyOnnx__Entry **entries, TyOnnx__Entry *room, char *text,
                       const char *data_name) {
  uint64_t gap = (uint64_t) - (int64_t)w->total & 63;
  if (!ty_writer_pad(w, 0, gap)) return false;
  snprintf(text, 24, "%llu", (unsigned long long)w->total);
  snprintf(text + 24, 24, "%zu", t->raw_data.len);
  const char *pairs[3][2] = { { "location", data_name }, { "offset", text }, { "length", text + 24 } };
  for (int i = 0; i < 3; i++) {
    ty_onnx__entry__init(&room[i]);
    room[i].key = (char *)(uintptr_t)pairs[i][0];
    room[i].value = (char *)(uintptr_t)pairs[i][1];
    entries[i] = &room[i];
  }
  t->n_external_data = 3, t->external_data = entries;
  t->has_data_location = true, t->data_location = 1;
  bool ok = ty_writer_put(w, t->raw_data.data, t->raw_data.len);
  t->has_raw_data = false, t->raw_data = (ProtobufCBinaryData){ 0 };
  return ok;
}

bool ty_onnx_write(const char *path, TyOnnx__Model *model, const char *data_path, const char *data_name) {
  TyOnnx__Graph *g = model->graph;
  struct beside {
    TyOnnx__Entry *list[3], entries[3];
    char text[48];
  } *beside = NULL;
  bool ok = true;
  if (data_path) {
    ty_writer w;
    beside = calloc(g->n_initializer + 1, sizeof *beside);
    if (!beside) return ty_fail(TY_ENOMEM, "no memory to write an ONNX file");
    ok = ty_writer_open(&w, data_path);
    for (size_t i = 0; i < g->n_initializer && ok; i++)
      if (g->initializer[i]->raw_data.len >= TY_ONNX_EXTERNAL_FROM)
        ok = put_beside(&w, g->initializer[i], beside[i].list, beside[i].entries, beside[i].text, data_name);
    ok = ty_writer_close(&w, ok);
  }
  if (ok && ty_onnx__model__get_packed_size(model) > INT32_MAX)
    ok = fail(path, "it would have more than 2^31 bytes, which the format cannot; use option external");
  if (ok) {
    ty_writer w;
    file_buffer buffer = { { append }, &w, ty_writer_open(&w, path) };
    if (buffer.ok) ty_onnx__model__pack_to_buffer(model, &buffer.base);
    ok = ty_writer_close(&w, buffer.ok);
  }
  free(beside);
  return ok;
}

#endif
