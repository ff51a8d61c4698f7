/* Reading GGUF by mapping. What a file claims is checked before it is believed: counts against the bytes that are left,
 * offsets against the running sum that ggml's own reader wants, so that a file has one meaning. */
#include "gguf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const ty_gguf_type_name[TY_GGUF_TYPES] = { "u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                       "bool", "string", "array", "u64", "i64", "f64" };

/* ggml's types by number: name, elements and bytes of a block, ours. */
typedef struct format {
  const char *name;
  int block, bytes, dtype;
} format;
enum { FORMATS = 41 };
static const format formats[FORMATS] = {
  [0] = { "F32", 1, 4, TY_F32 },        [1] = { "F16", 1, 2, TY_F16 },       [2] = { "Q4_0", 32, 18, TY_Q4_0 },
  [3] = { "Q4_1", 32, 20, -1 },         [6] = { "Q5_0", 32, 22, -1 },        [7] = { "Q5_1", 32, 24, -1 },
  [8] = { "Q8_0", 32, 34, TY_Q8_0 },    [10] = { "Q2_K", 256, 84, TY_Q2_K }, [11] = { "Q3_K", 256, 110, TY_Q3_K },
  [12] = { "Q4_K", 256, 144, TY_Q4_K }, [13] = { "Q5_K", 256, 176, -1 },     [14] = { "Q6_K", 256, 210, TY_Q6_K },
  [15] = { "Q8_K", 256, 292, -1 },      [16] = { "IQ2_XXS", 256, 66, -1 },   [17] = { "IQ2_XS", 256, 74, -1 },
  [18] = { "IQ3_XXS", 256, 98, -1 },    [19] = { "IQ1_S", 256, 50, -1 },     [20] = { "IQ4_NL", 32, 18, -1 },
  [21] = { "IQ3_S", 256, 110, -1 },     [22] = { "IQ2_S", 256, 82, -1 },     [23] = { "IQ4_XS", 256, 136, -1 },
  [24] = { "I8", 1, 1, TY_I8 },         [25] = { "I16", 1, 2, TY_I16 },      [26] = { "I32", 1, 4, TY_I32 },
  [27] = { "I64", 1, 8, TY_I64 },       [28] = { "F64", 1, 8, TY_F64 },      [29] = { "IQ1_M", 256, 56, -1 },
  [30] = { "BF16", 1, 2, TY_BF16 },     [34] = { "TQ1_0", 256, 54, -1 },     [35] = { "TQ2_0", 256, 66, -1 },
  [39] = { "MXFP4", 32, 17, TY_MXFP4 }, [40] = { "NVFP4", 64, 36, -1 },
};

typedef struct reader {
  const char *file;
  const uint8_t *at, *end;
} reader;

static bool __attribute__((format(printf, 2, 3))) fail(const reader *r, const char *text, ...) {
  char what[400];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(what, sizeof what, text, arguments);
  va_end(arguments);
  return ty_fail(TY_EIO, "gguf %s: %s", ty_quote_text(r->file), what);
}

static bool cut(const reader *r, const char *where) {
  return fail(r, "the file ends in %s: it is cut short or no GGUF file", where);
}

/* ---- bytes ---- */

static uint64_t little(const uint8_t *p, int bytes) {
  uint64_t n = 0;
  for (int i = bytes - 1; i >= 0; i--) n = n << 8 | p[i];
  return n;
}

static bool take(const uint8_t **at, const uint8_t *end, int bytes, uint64_t *out) {
  if (end - *at < bytes) return false;
  *out = little(*at, bytes);
  *at += bytes;
  return true;
}

static const int8_t value_bytes[TY_GGUF_TYPES] = { 1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8 }; /* at least */

bool ty_gguf_read_value(const uint8_t **at, const uint8_t *end, ty_gguf_type type, ty_gguf_value *out) {
  uint64_t n, of;
  if (type == TY_GGUF_ARRAY) {
    if (!take(at, end, 4, &of) || !take(at, end, 8, &n) || of >= TY_GGUF_TYPES) return false;
    out->of = (ty_gguf_type)of;
    out->count = n;
    return n <= (uint64_t)(end - *at) / (uint64_t)value_bytes[of];
  }
  if (!take(at, end, value_bytes[type], &n)) return false;
  switch (type) {
    case TY_GGUF_I8: out->i = (int8_t)n; break;
    case TY_GGUF_I16: out->i = (int16_t)n; break;
    case TY_GGUF_I32: out->i = (int32_t)n; break;
    case TY_GGUF_I64: out->i = (int64_t)n; break;
    case TY_GGUF_BOOL: out->i = n != 0; break;
    case TY_GGUF_F32: {
      uint32_t bits = (uint32_t)n;
      float f;
      memcpy(&f, &bits, sizeof f);
      out->f = (double)f;
      break;
    }
    case TY_GGUF_F64: memcpy(&out->f, &n, sizeof out->f); break;
    case TY_GGUF_STRING:
      if (n > (uint64_t)(end - *at)) return false;
      out->text = (const char *)*at;
      out->size = (size_t)n;
      *at += n;
      break;
    default: out->u = n; /* the unsigned ones */
  }
  return true;
}

/* Walks over a value and all in it. */
static bool skip_value(reader *r, ty_gguf_type type, int depth) {
  ty_gguf_value v;
  if (!ty_gguf_read_value(&r->at, r->end, type, &v)) return cut(r, "a metadata value, or an array has no known type");
  if (type != TY_GGUF_ARRAY) return true;
  if (depth == TY_GGUF_DEPTH) return fail(r, "arrays lie more than %d deep in each other", TY_GGUF_DEPTH);
  if (v.of != TY_GGUF_STRING && v.of != TY_GGUF_ARRAY) { /* the count was checked against what is left */
    r->at += v.count * (uint64_t)value_bytes[v.of];
    return true;
  }
  for (uint64_t i = 0; i < v.count; i++)
    if (!skip_value(r, v.of, depth + 1)) return false;
  return true;
}

static bool read_name(reader *r, const char *what, const char **name, size_t *size) {
  ty_gguf_value v;
  if (!ty_gguf_read_value(&r->at, r->end, TY_GGUF_STRING, &v)) return cut(r, what);
  if (memchr(v.text, 0, v.size) || !ty_valid_utf8(v.text, v.size))
    return fail(r, "%s is %s, which is no text", what, ty_quote(v.text, v.size));
  *name = v.text;
  *size = v.size;
  return true;
}

/* ---- the parts of a file ---- */

static bool read_entries(reader *r, ty_gguf *g) {
  for (size_t i = 0; i < g->entry_count; i++) {
    ty_gguf_entry *e = &g->entries[i];
    uint64_t type, alignment;
    if (!read_name(r, "a key of the metadata", &e->key, &e->key_size)) return false;
    if (!take(&r->at, r->end, 4, &type)) return cut(r, "a type of the metadata");
    if (type >= TY_GGUF_TYPES)
      return fail(r, "metadata %s has the unknown type %llu", ty_quote(e->key, e->key_size), (unsigned long long)type);
    e->type = (ty_gguf_type)type;
    e->value = r->at;
    if (!skip_value(r, e->type, 0)) return false;
    if (e->key_size != 17 || memcmp(e->key, "general.alignment", 17) != 0) continue;
    alignment = e->type == TY_GGUF_U32 ? little(e->value, 4) : 0;
    if (alignment == 0 || alignment > 1 << 30 || (alignment & (alignment - 1)))
      return fail(r, "general.alignment must be a u32 that is a power of two up to 2^30");
    g->alignment = alignment;
  }
  return true;
}

/* Bytes of a tensor; false when that, or its number of elements, is more than memory can hold. */
static bool count_bytes(const ty_gguf_tensor *t, const format *f, uint64_t *bytes) {
  uint64_t count = 1;
  bool empty = false;
  for (int d = 0; d < t->ndim; d++) {
    empty |= t->shape[d] == 0;
    if (t->shape[d] && __builtin_mul_overflow(count, (uint64_t)t->shape[d], &count)) return false;
  }
  if (count > (uint64_t)INT64_MAX / 16) return false;
  *bytes = empty ? 0 : count / (uint64_t)f->block * (uint64_t)f->bytes;
  return true;
}

static bool read_tensor(reader *r, ty_gguf_tensor *t) {
  uint64_t n, ndim, type;
  if (!read_name(r, "the name of a tensor", &t->name, &t->name_size)) return false;
  const char *quoted = ty_quote(t->name, t->name_size);
  if (!take(&r->at, r->end, 4, &ndim)) return cut(r, "the shape of a tensor");
  if (ndim > TY_GGUF_DIMS)
    return fail(r, "tensor %s has %llu dimensions, at most 4 are allowed", quoted, (unsigned long long)ndim);
  t->ndim = (int)ndim;
  for (int d = t->ndim - 1; d >= 0; d--) { /* the fastest comes first */
    if (!take(&r->at, r->end, 8, &n)) return cut(r, "the shape of a tensor");
    if (n > INT64_MAX) return fail(r, "tensor %s: size %llu is too large", quoted, (unsigned long long)n);
    t->shape[d] = (int64_t)n;
  }
  if (!take(&r->at, r->end, 4, &type) || !take(&r->at, r->end, 8, &t->offset)) return cut(r, "the list of tensors");
  const format *f = type < FORMATS ? &formats[type] : NULL;
  if (!f || !f->name) return fail(r, "tensor %s has the unknown type %llu", quoted, (unsigned long long)type);
  t->format = f->name;
  t->dtype = f->dtype;
  if (f->block > 1 && (t->ndim == 0 || t->shape[t->ndim - 1] % f->block))
    return fail(r, "tensor %s: %s is not made of rows of %s, blocks of %d", quoted, ty_shape_text(t->ndim, t->shape),
                f->name, f->block);
  return count_bytes(t, f, &t->bytes) ||
         fail(r, "tensor %s: the sizes of shape %s multiply to more than memory can hold", quoted,
              ty_shape_text(t->ndim, t->shape));
}

/* Every tensor begins where the one before it ends, padded. */
static bool place_tensors(reader *r, ty_gguf *g) {
  uint64_t head = (uint64_t)(r->at - g->map->data), base = (head + g->alignment - 1) / g->alignment * g->alignment;
  uint64_t next = 0, end = 0, have = g->map->size > base ? g->map->size - base : 0;
  for (size_t i = 0; i < g->tensor_count; i++) {
    ty_gguf_tensor *t = &g->tensors[i];
    if (t->offset != next)
      return fail(r,
                  "tensor %s begins at byte %llu of the data, expected %llu: no gaps, no overlaps, and the "
                  "alignment %llu",
                  ty_quote(t->name, t->name_size), (unsigned long long)t->offset, (unsigned long long)next,
                  (unsigned long long)g->alignment);
    end = next + t->bytes;
    if (end < next || end > have)
      return fail(r, "tensor %s needs %llu bytes, but the file ends before: it is cut short",
                  ty_quote(t->name, t->name_size), (unsigned long long)t->bytes);
    next = (end + g->alignment - 1) / g->alignment * g->alignment;
    t->offset += base;
  }
  return have <= next || fail(r, "the file is longer than it says");
}

/* ---- twice the same name ---- */

typedef struct name {
  const char *text;
  size_t size;
} name;

static int by_text(const void *pa, const void *pb) {
  const name *a = pa, *b = pb;
  int c = memcmp(a->text, b->text, a->size < b->size ? a->size : b->size);
  return c ? c : (a->size > b->size) - (a->size < b->size);
}

static bool unique(const reader *r, const char *what, name *names, size_t n) {
  if (n) qsort(names, n, sizeof *names, by_text);
  for (size_t i = 1; i < n; i++)
    if (by_text(&names[i - 1], &names[i]) == 0)
      return fail(r, "%s %s is there twice", what, ty_quote(names[i].text, names[i].size));
  return true;
}

static bool check_names(const reader *r, const ty_gguf *g) {
  size_t most = g->entry_count > g->tensor_count ? g->entry_count : g->tensor_count;
  name *names = malloc((most + 1) * sizeof *names);
  if (!names) return ty_fail(TY_ENOMEM, "gguf: no memory for %zu names", most);
  for (size_t i = 0; i < g->entry_count; i++) names[i] = (name){ g->entries[i].key, g->entries[i].key_size };
  bool ok = unique(r, "metadata", names, g->entry_count);
  for (size_t i = 0; ok && i < g->tensor_count; i++) names[i] = (name){ g->tensors[i].name, g->tensors[i].name_size };
  ok = ok && unique(r, "tensor", names, g->tensor_count);
  free(names);
  return ok;
}

/* ---- the file ---- */

bool ty_gguf_open(ty_mapping *m, const char *file, ty_gguf *g) {
  enum { ENTRY_LEAST = 13, TENSOR_LEAST = 24 };
  *g = (ty_gguf){ .alignment = TY_GGUF_ALIGNMENT };
  reader r = { .file = file };
  uint64_t version = 0, tensors = 0, entries = 0;
  if (m->size < 24 || memcmp(m->data, "GGUF", 4) != 0)
    return fail(&r, "it does not begin with GGUF and three counts: it is cut short or no GGUF file");
  r.at = m->data + 4;
  r.end = m->data + m->size;
  take(&r.at, r.end, 4, &version), take(&r.at, r.end, 8, &tensors), take(&r.at, r.end, 8, &entries);
  if (version != 2 && version != 3)
    return fail(&r, version & 0xffff ? "its version is %llu, Tycho reads 2 and 3" : "it is big-endian (version %llu)",
                (unsigned long long)version);
  uint64_t left = (uint64_t)(r.end - r.at);
  if (entries > left / ENTRY_LEAST || tensors > left / TENSOR_LEAST)
    return fail(&r, "it claims %llu metadata entries and %llu tensors, more than its %zu bytes can hold",
                (unsigned long long)entries, (unsigned long long)tensors, m->size);
  ty_mapping_retain(m);
  g->map = m;
  g->version = (uint32_t)version;
  g->entries = calloc((size_t)entries + 1, sizeof *g->entries);
  g->tensors = calloc((size_t)tensors + 1, sizeof *g->tensors);
  bool ok = g->entries && g->tensors;
  if (!ok) ty_fail(TY_ENOMEM, "gguf: no memory for the names of %llu tensors", (unsigned long long)tensors);
  g->entry_count = (size_t)entries;
  ok = ok && read_entries(&r, g);
  for (size_t i = 0; ok && i < tensors; i++, g->tensor_count++) ok = read_tensor(&r, &g->tensors[i]);
  ok = ok && check_names(&r, g) && place_tensors(&r, g);
  if (!ok) ty_gguf_close(g);
  return ok;
}

void ty_gguf_close(ty_gguf *g) {
  if (g->map) ty_mapping_release(g->map);
  free(g->entries);
  free(g->tensors);
  *g = (ty_gguf){ 0 };
}

ty_tensor *ty_gguf_get(const ty_gguf *g, size_t i, bool copy) {
  const ty_gguf_tensor *t = &g->tensors[i];
  if (t->dtype < 0) {
    ty_fail(TY_EUNSUPPORTED,
            "gguf: tensor %s is %s, which Tycho does not have; it reads F32 F16 BF16 F64 I8 I16 I32 I64 Q8_0 "
            "Q4_0 Q2_K Q3_K Q4_K Q6_K MXFP4",
            ty_quote(t->name, t->name_size), t->format);
    return NULL;
  }
  return ty_mapping_tensor(g->map, (size_t)t->offset, (ty_dtype)t->dtype, t->ndim, t->shape, copy);
}

/* ---- writing ---- */

bool ty_gguf_put(ty_bytes *b, uint64_t value, int bytes) {
  uint8_t out[8];
  for (int i = 0; i < bytes; i++) out[i] = (uint8_t)(value >> 8 * i);
  return ty_bytes_put(b, out, (size_t)bytes);
}

bool ty_gguf_put_string(ty_bytes *b, const char *text, size_t size) {
  return ty_gguf_put(b, size, 8) && ty_bytes_put(b, text, size);
}

static int format_of(ty_dtype dtype) {
  for (int i = 0; i < FORMATS; i++)
    if (formats[i].name && formats[i].dtype == (int)dtype) return i;
  return -1;
}

static bool put_tensor(ty_bytes *b, const ty_named *t, uint64_t offset) {
  const ty_view *v = &t->tensor->v;
  const char *quoted = ty_quote(t->name, t->name_size);
  int type = format_of((ty_dtype)v->dtype);
  if (type < 0) return ty_fail(TY_EINVAL, "gguf: the format has no %s of tensor %s", ty_dtype_name[v->dtype], quoted);
  if (v->ndim > TY_GGUF_DIMS)
    return ty_fail(TY_EINVAL, "gguf: tensor %s has %d dimensions, at most 4 are allowed", quoted, v->ndim);
  if (t->name_size > TY_GGUF_NAME_MOST || memchr(t->name, 0, t->name_size) || !ty_valid_utf8(t->name, t->name_size))
    return ty_fail(TY_EINVAL, "gguf: the name %s is not UTF-8 of at most %d bytes without NUL", quoted,
                   TY_GGUF_NAME_MOST);
  bool ok = ty_gguf_put_string(b, t->name, t->name_size) && ty_gguf_put(b, (uint64_t)v->ndim, 4);
  for (int d = v->ndim - 1; ok && d >= 0; d--) ok = ty_gguf_put(b, (uint64_t)v->size[d], 8);
  return ok && ty_gguf_put(b, (uint64_t)type, 4) && ty_gguf_put(b, offset, 8);
}

static uint64_t padding(uint64_t size, uint64_t alignment) { return (alignment - size % alignment) % alignment; }

static bool put_head(ty_bytes *head, const ty_named *tensors, size_t count, const ty_bytes *entries,
                     uint64_t entry_count, uint64_t alignment) {
  bool own = alignment != TY_GGUF_ALIGNMENT;
  bool ok = ty_bytes_put(head, "GGUF\3\0\0\0", 8) && ty_gguf_put(head, count, 8) &&
            ty_gguf_put(head, entry_count + own, 8) && ty_bytes_put(head, entries->data, entries->size);
  if (own)
    ok = ok && ty_gguf_put_string(head, "general.alignment", 17) && ty_gguf_put(head, TY_GGUF_U32, 4) &&
         ty_gguf_put(head, alignment, 4);
  uint64_t offset = 0;
  for (size_t i = 0; ok && i < count; i++) {
    ok = put_tensor(head, &tensors[i], offset);
    offset += (uint64_t)ty_view_bytes(&tensors[i].tensor->v);
    offset += padding(offset, alignment);
  }
  return ok;
}

bool ty_gguf_write(const char *path, const ty_bundle *b, const ty_bytes *entries, uint64_t entry_count,
                   uint64_t alignment) {
  ty_named *sorted = malloc((b->count + 1) * sizeof *sorted);
  if (!sorted) return ty_fail(TY_ENOMEM, "gguf: no memory for %zu tensors", b->count);
  if (b->count) memcpy(sorted, b->tensors, b->count * sizeof *sorted);
  qsort(sorted, b->count, sizeof *sorted, ty_named_order);
  ty_bytes head = { 0 };
  bool ok = put_head(&head, sorted, b->count, entries, entry_count, alignment);
  if (ok) {
    ty_writer w;
    ok = ty_writer_open(&w, path) && ty_writer_put(&w, head.data, head.size);
    for (size_t i = 0; ok && i < b->count; i++) {
      ty_tensor *t = ty_host_tensor(sorted[i].tensor);
      ok = t && ty_writer_pad(&w, 0, (size_t)padding(w.total, alignment)) &&
           ty_writer_put(&w, t->v.data, (size_t)ty_view_bytes(&t->v));
      ty_release(t);
    }
    ok = ok && ty_writer_pad(&w, 0, (size_t)padding(w.total, alignment)); /* which ggml counts on */
    ok = ty_writer_close(&w, ok);
  }
  ty_bytes_free(&head);
  free(sorted);
  return ok;
}
