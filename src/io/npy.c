/* NumPy's npy format, versions 1 to 3: magic, header length, a Python literal with type, order and shape, the data. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "formats.h"
#include "number.h"

enum { HEADER_MOST = 1 << 20, CHUNK = 1 << 16 };

typedef struct npy {
  const char *file;
  const char *p, *end; /* of the header text */
  int seen;
  bool swap, fortran, widen;
  int item;       /* bytes per element in the file */
  ty_dtype dtype; /* of the tensor */
  int ndim;
  int64_t size[TY_MAX_DIMS];
} npy;

static bool __attribute__((format(printf, 2, 3))) fail(const npy *n, const char *format, ...) {
  char what[320];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return ty_fail(TY_EIO, "npy %s: %s", ty_quote_text(n->file), what);
}

/* ---- the header: as much of Python's literals as NumPy writes ---- */

static void blanks(npy *n) {
  while (n->p < n->end && (*n->p == ' ' || *n->p == '\t' || *n->p == '\n' || *n->p == '\r')) n->p++;
}

static bool take(npy *n, char c) {
  blanks(n);
  if (n->p == n->end || *n->p != c) return false;
  n->p++;
  return true;
}

static bool take_word(npy *n, const char *word) {
  size_t size = strlen(word);
  blanks(n);
  if ((size_t)(n->end - n->p) < size || memcmp(n->p, word, size) != 0) return false;
  n->p += size;
  return true;
}

static bool read_string(npy *n, char *out, size_t room) {
  char quote = take(n, '\'') ? '\'' : '"';
  if (quote == '"' && !take(n, '"')) return fail(n, "the header is broken: expected a string");
  const char *start = n->p;
  while (n->p < n->end && *n->p != quote) n->p++;
  size_t size = (size_t)(n->p - start);
  if (n->p == n->end || size >= room || memchr(start, '\\', size))
    return fail(n, "the header is broken: a string is not closed or too long");
  memcpy(out, start, size);
  out[size] = 0;
  n->p++;
  return true;
}

static bool read_descr(npy *n) {
  static const struct {
    const char *code;
    ty_dtype dtype;
  } types[] = {
    { "b1", TY_BOOL }, { "u1", TY_U8 },  { "i1", TY_I8 },  { "i2", TY_I16 }, { "i4", TY_I32 }, { "i8", TY_I64 },
    { "u2", TY_I32 },  { "u4", TY_I64 }, { "u8", TY_I64 }, { "f2", TY_F16 }, { "f4", TY_F32 }, { "f8", TY_F64 },
  };
  char text[32];
  if (take(n, '[')) return fail(n, "structured arrays (with fields) are not supported");
  if (!read_string(n, text, sizeof text)) return false;
  for (size_t i = 0; text[0] && strchr("<>|=", text[0]) && i < sizeof types / sizeof *types; i++)
    if (strcmp(text + 1, types[i].code) == 0) {
      n->dtype = types[i].dtype;
      n->item = text[2] - '0';
      n->swap = text[0] == '>' && n->item > 1;
      n->widen = text[1] == 'u' && n->item > 1;
      return true;
    }
  const char *why = strchr(text, 'O') ? "Python objects need pickle, which runs code from the file"
                    : strchr(text, 'V') || strstr(text, "bfloat16")
                        ? "raw bytes; NumPy has no bf16, so store f32 or use safetensors"
                    : strchr(text, 'c')                      ? "complex numbers are not supported"
                    : strchr(text, 'U') || strchr(text, 'S') ? "text arrays are not supported"
                                                             : "not a type that Tycho has";
  return fail(n, "elements of type %s: %s", ty_quote_text(text), why);
}

static bool read_shape(npy *n) {
  if (!take(n, '(')) return fail(n, "the header is broken: shape must be a tuple");
  while (!take(n, ')')) {
    const char *start = n->p;
    while (n->p < n->end && *n->p >= '0' && *n->p <= '9') n->p++;
    if (n->ndim == TY_MAX_DIMS) return fail(n, "more than %d dimensions", TY_MAX_DIMS);
    if (!ty_parse_integer(start, n->p, &n->size[n->ndim]))
      return fail(n, "the header is broken: the shape holds something that is no size");
    n->ndim++;
    take(n, 'L'); /* Python 2 wrote 3L */
    if (!take(n, ',')) {
      if (take(n, ')')) break;
      return fail(n, "the header is broken: the shape is not closed");
    }
  }
  return true;
}

static bool read_header(npy *n) {
  static const char *const keys[] = { "descr", "fortran_order", "shape" };
  if (!take(n, '{')) return fail(n, "the header is broken: expected a dictionary");
  while (!take(n, '}')) {
    char key[32];
    int which = -1;
    if (!read_string(n, key, sizeof key)) return false;
    for (int i = 0; i < 3; i++)
      if (strcmp(key, keys[i]) == 0) which = i;
    if (which < 0 || (n->seen & 1 << which))
      return fail(n, "the header is broken: key %s is unknown or there twice", ty_quote_text(key));
    n->seen |= 1 << which;
    if (!take(n, ':')) return fail(n, "the header is broken: expected ':'");
    bool ok = which == 0   ? read_descr(n)
              : which == 2 ? read_shape(n)
                           : (n->fortran = take_word(n, "True")) || take_word(n, "False");
    if (!ok) return which == 1 ? fail(n, "the header is broken: fortran_order must be True or False") : false;
    if (!take(n, ',')) {
      if (take(n, '}')) break;
      return fail(n, "the header is broken: expected ',' or '}'");
    }
  }
  for (int i = 0; i < 3; i++)
    if (!(n->seen & 1 << i)) return fail(n, "the header has no %s", keys[i]);
  blanks(n);
  return n->p == n->end || fail(n, "the header is broken: it goes on after the dictionary");
}

/* ---- the data ---- */

static void swap_bytes(uint8_t *p, size_t count, int item) {
  for (size_t i = 0; i < count; i++, p += item)
    for (int a = 0, b = item - 1; a < b; a++, b--) {
      uint8_t t = p[a];
      p[a] = p[b];
      p[b] = t;
    }
}

/* Unsigned types without a tensor dtype, through a buffer. */
static bool read_widened(const npy *n, ty_source *s, ty_tensor *t) {
  uint8_t *buffer = malloc(CHUNK);
  if (!buffer) return ty_fail(TY_ENOMEM, "npy: no memory");
  bool ok = true;
  for (int64_t done = 0; ok && done < t->v.count;) {
    size_t count = CHUNK / (size_t)n->item;
    if ((uint64_t)count > (uint64_t)(t->v.count - done)) count = (size_t)(t->v.count - done);
    ok = s->read(s, buffer, count * (size_t)n->item);
    if (ok && n->swap) swap_bytes(buffer, count, n->item);
    for (size_t i = 0; ok && i < count; i++, done++) {
      uint64_t value = 0;
      memcpy(&value, buffer + i * (size_t)n->item, (size_t)n->item); /* little-endian hosts, as all of Tycho */
      if (n->dtype == TY_I32) ((int32_t *)t->v.data)[done] = (int32_t)value;
      else ((int64_t *)t->v.data)[done] = (int64_t)value;
      if (value > INT64_MAX)
        ok = fail(n, "element %lld is %llu, which does not fit i64", (long long)done, (unsigned long long)value);
    }
  }
  free(buffer);
  return ok;
}

static bool read_plain(const npy *n, ty_source *s, ty_tensor *t) {
  size_t bytes = (size_t)t->v.count * (size_t)n->item;
  if (!s->read(s, t->v.data, bytes)) return false;
  if (n->swap) swap_bytes(t->v.data, (size_t)t->v.count, n->item);
  uint8_t *truth = t->v.data;
  for (size_t i = 0; n->dtype == TY_BOOL && i < bytes; i++) truth[i] = truth[i] != 0;
  return true;
}

static ty_tensor *read_data(npy *n, ty_source *s, bool copy) {
  uint64_t bytes, file_bytes = 1;
  if (!ty_count_bytes(n->dtype, n->ndim, n->size, &bytes)) {
    fail(n, "the sizes of shape %s multiply to more than memory can hold", ty_shape_text(n->ndim, n->size));
    return NULL;
  }
  file_bytes = bytes / ty_dtype_size[n->dtype] * (uint64_t)n->item;
  if (s->left != file_bytes) {
    fail(n, "shape %s with %d bytes per element needs %llu bytes, but %llu follow the header",
         ty_shape_text(n->ndim, n->size), n->item, (unsigned long long)file_bytes, (unsigned long long)s->left);
    return NULL;
  }
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS];
  for (int i = 0; i < n->ndim; i++) size[i] = n->size[n->fortran ? n->ndim - 1 - i : i];
  ty_tensor *t;
  if (s->map && !n->swap && !n->widen) {
    t = ty_mapping_tensor(s->map, s->offset, n->dtype, n->ndim, size, copy);
    s->left = 0;
  } else {
    t = ty_tensor_new(TY_CPU, n->dtype, n->ndim, size);
    if (t && !(n->widen ? read_widened(n, s, t) : read_plain(n, s, t))) {
      ty_release(t);
      return NULL;
    }
  }
  if (!t || !n->fortran || n->ndim < 2) return t;
  for (int i = 0; i < n->ndim; i++) stride[i] = t->v.stride[n->ndim - 1 - i];
  ty_tensor *turned = ty_tensor_view(t, n->ndim, n->size, stride, 0);
  ty_release(t);
  return turned;
}

ty_tensor *ty_npy_read_source(ty_source *s, const char *name, bool copy) {
  npy n = { .file = name };
  uint8_t head[12];
  bool ok = s->left >= 10 ? s->read(s, head, 10) : fail(&n, "%llu bytes are too few", (unsigned long long)s->left);
  if (ok && memcmp(head, "\x93NUMPY", 6) != 0) ok = fail(&n, "it does not begin as a npy file does");
  if (ok && (head[6] < 1 || head[6] > 3)) ok = fail(&n, "version %d.%d is unknown", head[6], head[7]);
  size_t length = 0;
  if (ok) length = head[8] | (size_t)head[9] << 8;
  if (ok && head[6] > 1) {
    ok = s->left >= 2 ? s->read(s, head + 10, 2) : fail(&n, "the file is cut short");
    length |= ok ? (size_t)head[10] << 16 | (size_t)head[11] << 24 : 0;
  }
  if (ok && (length > HEADER_MOST || length > s->left))
    ok = fail(&n, "the header claims %zu bytes: the file is cut short or broken", length);
  char *text = ok ? malloc(length + 1) : NULL;
  if (ok && !text) ok = ty_fail(TY_ENOMEM, "npy: no memory for the header");
  ok = ok && s->read(s, text, length);
  n.p = text;
  n.end = ok ? text + length : text;
  ty_tensor *t = ok && read_header(&n) ? read_data(&n, s, copy) : NULL;
  free(text);
  return t;
}

static bool read_mapping(ty_source *s, void *out, size_t size) {
  if (size) memcpy(out, s->map->data + s->offset, size); /* the callers have looked at `left` */
  s->offset += size;
  s->left -= size;
  return true;
}

ty_tensor *ty_npy_read(ty_mapping *m, const char *name, bool copy) {
  ty_source s = { .read = read_mapping, .left = m->size, .map = m };
  return ty_npy_read_source(&s, name, copy);
}

/* ---- writing ---- */

bool ty_npy_header(ty_tensor *t, ty_bytes *out) {
  static const char *const codes[TY_DTYPES] = {
    [TY_BOOL] = "|b1", [TY_U8] = "|u1",  [TY_I8] = "|i1",  [TY_I16] = "<i2", [TY_I32] = "<i4",
    [TY_I64] = "<i8",  [TY_F16] = "<f2", [TY_F32] = "<f4", [TY_F64] = "<f8",
  };
  const ty_view *v = &t->v;
  if (!codes[v->dtype])
    return ty_fail(TY_EINVAL, "npy: NumPy's format has no %s; convert to f32 first%s", ty_dtype_name[v->dtype],
                   v->dtype == TY_BF16 ? ", or save as safetensors" : ty_elsewhere((ty_dtype)v->dtype));
  size_t start = out->size;
  bool ok = ty_bytes_put(out, "\x93NUMPY\1\0\0\0", 10) &&
            ty_bytes_printf(out, "{'descr': '%s', 'fortran_order': False, 'shape': (", codes[v->dtype]);
  for (int i = 0; ok && i < v->ndim; i++) ok = ty_bytes_printf(out, i ? " %lld," : "%lld,", (long long)v->size[i]);
  if (ok && v->ndim > 1) out->size--; /* (3,) but (3, 4) */
  ok = ok && ty_bytes_put(out, "), }", 4);
  while (ok && (out->size - start + 1) % 64) ok = ty_bytes_put(out, " ", 1);
  if (!ok || !ty_bytes_put(out, "\n", 1)) return false;
  size_t length = out->size - start - 10;
  out->data[start + 8] = (uint8_t)length;
  out->data[start + 9] = (uint8_t)(length >> 8);
  return true;
}

bool ty_npy_write(const char *path, ty_tensor *t) {
  ty_bytes head = { 0 };
  ty_tensor *host = ty_npy_header(t, &head) ? ty_host_tensor(t) : NULL;
  bool ok = host != NULL;
  if (ok) {
    ty_writer w;
    ok = ty_writer_open(&w, path) && ty_writer_put(&w, head.data, head.size) &&
         ty_writer_put(&w, host->v.data, (size_t)host->v.count * ty_dtype_size[host->v.dtype]);
    ok = ty_writer_close(&w, ok);
  }
  ty_release(host);
  ty_bytes_free(&head);
  return ok;
}
