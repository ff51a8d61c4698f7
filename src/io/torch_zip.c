/* PyTorch's zip checkpoints (.pt, .pth, .bin, .ckpt; torch.save since 1.6): data.pkl says which tensors there are, the
 * entries data/KEY hold the bytes of their storages, stored and aligned, so that tensors are views on the mapping.
 * Dictionaries in dictionaries become names with dots; numbers and text become notes. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "pickle.h"
#include "zip.h"

enum { PICKLE_MOST = 64 << 20, DEPTH_MOST = 32, VISITS_MOST = 1 << 22, NAME_MOST = 1000, POOL_MOST = 256 << 20 };

/* Where a storage lies: its entry, and the tensor over all of it once one was asked for. */
typedef struct place {
  const char *key;
  size_t key_size;
  const ty_zip_entry *entry;
  ty_tensor *whole;
} place;

typedef struct reader {
  const char *file;
  bool copy;
  ty_zip zip;
  ty_bytes text; /* data.pkl */
  ty_pickle pickle;
  place *places;
  size_t place_count, visits;
  ty_bytes name;           /* of what is being visited */
  ty_bytes tensors, notes; /* found and note entries, by position in the pool */
  ty_bytes pool;
} reader;

typedef struct found {
  size_t name, name_size, value, value_size;
  ty_tensor *tensor;
} found;

static bool __attribute__((format(printf, 2, 3))) fail(const reader *r, const char *format, ...) {
  char what[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return ty_fail(TY_EIO, "torch %s: %s", ty_quote_text(r->file), what);
}

/* ---- the archive ---- */

static bool is_named(const ty_zip_entry *e, size_t folder, const char *name) {
  size_t size = strlen(name);
  return e->name_size == folder + size && memcmp(e->name + folder, name, size) == 0;
}

static int by_key(const void *pa, const void *pb) {
  const place *a = pa, *b = pb;
  int c = memcmp(a->key, b->key, a->key_size < b->key_size ? a->key_size : b->key_size);
  return c ? c : (a->key_size > b->key_size) - (a->key_size < b->key_size);
}

static bool read_text(reader *r, const ty_zip_entry *e, size_t most, ty_bytes *out) {
  ty_zip_source s = { 0 };
  if (e->size > most)
    return fail(r, "entry %s has %llu bytes, more than the %zu allowed", ty_quote(e->name, e->name_size),
                (unsigned long long)e->size, most);
  if (!ty_bytes_reserve(out, (size_t)e->size + 1)) return false;
  bool ok = ty_zip_source_open(&s, &r->zip, e) && s.source.read(&s.source, out->data, (size_t)e->size) &&
            ty_zip_source_finish(&s);
  ty_zip_source_close(&s);
  if (ok) out->size = (size_t)e->size;
  return ok;
}

/* Finds data.pkl and the storages, all in one folder. */
static bool open_archive(reader *r) {
  const ty_zip *z = &r->zip;
  const ty_zip_entry *list = NULL;
  size_t folder = 0;
  for (size_t i = 0; i < z->count && !list; i++) {
    const ty_zip_entry *e = &z->entries[i];
    const char *slash = memchr(e->name, '/', e->name_size);
    if (slash && is_named(e, (size_t)(slash - e->name) + 1, "data.pkl"))
      list = e, folder = (size_t)(slash - e->name) + 1;
  }
  if (!list) return fail(r, "a zip archive without data.pkl; no file of torch.save, or one of TorchScript");
  r->places = calloc(z->count + 1, sizeof *r->places);
  if (!r->places) return ty_fail(TY_ENOMEM, "torch: no memory for %zu storages", z->count);
  for (size_t i = 0; i < z->count; i++) {
    const ty_zip_entry *e = &z->entries[i];
    if (e->name_size <= folder || memcmp(e->name, list->name, folder) != 0) continue;
    if (is_named(e, folder, "constants.pkl")) return fail(r, "TorchScript archives hold code and are not read");
    if (is_named(e, folder, "byteorder")) {
      ty_bytes order = { 0 };
      bool ok = read_text(r, e, 16, &order);
      if (ok && (order.size != 6 || memcmp(order.data, "little", 6) != 0))
        ok = fail(r, "its byte order is %s, only little is read", ty_quote(order.data, order.size));
      ty_bytes_free(&order);
      if (!ok) return false;
    }
    if (e->name_size > folder + 5 && memcmp(e->name + folder, "data/", 5) == 0)
      r->places[r->place_count++] = (place){ e->name + folder + 5, e->name_size - folder - 5, e, NULL };
  }
  qsort(r->places, r->place_count, sizeof *r->places, by_key);
  for (size_t i = 1; i < r->place_count; i++)
    if (by_key(&r->places[i - 1], &r->places[i]) == 0)
      return fail(r, "storage %s is there twice", ty_quote(r->places[i].key, r->places[i].key_size));
  return read_text(r, list, PICKLE_MOST, &r->text) && ty_pickle_read(&r->pickle, r->text.data, r->text.size, r->file);
}

/* ---- tensors ---- */

static ty_tensor *storage(reader *r, const ty_pickle_value *v) {
  place wanted = { v->text, v->count, NULL, NULL };
  place *p = bsearch(&wanted, r->places, r->place_count, sizeof *r->places, by_key);
  const char *key = ty_quote(v->text, v->count);
  ty_dtype dtype = (ty_dtype)v->dtype;
  if (!p) return fail(r, "storage %s is not in the archive", key), NULL;
  if (p->whole) { /* one storage has one type */
    if (ty_dtype_of(p->whole) == dtype && p->whole->v.count == v->i) return p->whole;
    return fail(r, "storage %s is described in two ways", key), NULL;
  }
  if (p->entry->method != 0) return fail(r, "storage %s is compressed, which torch.save never does", key), NULL;
  uint64_t bytes;
  if (!ty_count_bytes(dtype, 1, &v->i, &bytes) || bytes > p->entry->size)
    return fail(r, "storage %s has %llu bytes, expected those of %lld elements of %s", key,
                (unsigned long long)p->entry->size, (long long)v->i, ty_dtype_name[dtype]),
           NULL;
  return p->whole = ty_mapping_tensor(r->zip.map, p->entry->data, dtype, 1, &v->i, r->copy);
}

/* A tuple of `count` numbers from 0 up. */
static bool counts(reader *r, uint32_t tuple, int64_t *out, int *count) {
  const ty_pickle_value *v = ty_pickle_at(&r->pickle, tuple);
  if (v->count > TY_MAX_DIMS) return fail(r, "a tensor of %u dimensions; %d are the most", v->count, TY_MAX_DIMS);
  for (uint32_t i = 0; i < v->count; i++) {
    const ty_pickle_value *n = ty_pickle_at(&r->pickle, ty_pickle_item(&r->pickle, v, i));
    if (n->kind != TY_PICKLE_INT || n->i < 0) return fail(r, "a size or stride that is no count");
    out[i] = n->i;
  }
  *count = (int)v->count;
  return true;
}

static ty_tensor *tensor(reader *r, const ty_pickle_value *v) {
  uint32_t part[4];
  for (uint32_t i = 0; i < 4; i++) part[i] = ty_pickle_item(&r->pickle, v, i);
  int64_t size[TY_MAX_DIMS], stride[TY_MAX_DIMS], offset = ty_pickle_at(&r->pickle, part[1])->i;
  int ndim, strides;
  if (!counts(r, part[2], size, &ndim) || !counts(r, part[3], stride, &strides)) return NULL;
  if (ndim != strides) return fail(r, "a tensor of %d sizes with %d strides", ndim, strides), NULL;
  const ty_pickle_value *s = ty_pickle_at(&r->pickle, part[0]);
  uint64_t bytes;
  if (!ty_count_bytes((ty_dtype)s->dtype, ndim, size, &bytes))
    return fail(r, "a tensor %s is larger than memory can be", ty_shape_text(ndim, size)), NULL;
  ty_tensor *base = storage(r, s);
  if (!base) return NULL;
  if (bytes == 0) return ty_tensor_new(TY_CPU, (ty_dtype)s->dtype, ndim, size);
  int64_t last = offset, span;
  bool fits = offset >= 0;
  for (int i = 0; fits && i < ndim; i++)
    fits = !__builtin_mul_overflow(size[i] - 1, stride[i], &span) && !__builtin_add_overflow(last, span, &last);
  if (!fits || last >= base->v.count)
    return fail(r, "a tensor %s from element %lld on reaches beyond its storage of %lld elements",
                ty_shape_text(ndim, size), (long long)offset, (long long)base->v.count),
           NULL;
  return ty_tensor_view(base, ndim, size, stride, offset);
}

/* ---- names ---- */

static bool keep_text(reader *r, const void *text, size_t size, size_t *at) {
  *at = r->pool.size;
  if (size > POOL_MOST - r->pool.size) /* one text can be there under many names */
    return fail(r, "names and texts of more than %d bytes", POOL_MOST);
  return ty_bytes_put(&r->pool, text, size);
}

static bool keep_note(reader *r, const char *text, size_t size) {
  found f = { .name_size = r->name.size, .value_size = size };
  return keep_text(r, r->name.data, r->name.size, &f.name) && keep_text(r, text, size, &f.value) &&
         ty_bytes_put(&r->notes, &f, sizeof f);
}

static bool keep_tensor(reader *r, const ty_pickle_value *v) {
  found f = { .name_size = r->name.size };
  if (!keep_text(r, r->name.data, r->name.size, &f.name) || !(f.tensor = tensor(r, v))) return false;
  if (ty_bytes_put(&r->tensors, &f, sizeof f)) return true;
  ty_release(f.tensor);
  return false;
}

static bool visit(reader *r, uint32_t index, int depth);

/* Visits `value` under the name so far, a dot and `part`. */
static bool visit_part(reader *r, const char *part, size_t size, uint32_t value, int depth) {
  size_t before = r->name.size;
  if (before + size + 1 > NAME_MOST) return fail(r, "a name of more than %d bytes", NAME_MOST);
  if (before && !ty_bytes_put(&r->name, ".", 1)) return false;
  if (!ty_bytes_put(&r->name, part, size) || !visit(r, value, depth + 1)) return false;
  r->name.size = before;
  return true;
}

static bool visit_entries(reader *r, const ty_pickle_value *v, int depth) {
  char number[24];
  uint32_t position = 0;
  for (const ty_pickle_entry *e = v->count ? ty_pickle_entry_at(&r->pickle, v->first) : NULL; e;
       e = ty_pickle_entry_at(&r->pickle, e->next), position++) {
    const ty_pickle_value *key = ty_pickle_at(&r->pickle, e->key);
    if (v->kind == TY_PICKLE_DICT && key->kind == TY_PICKLE_TEXT) {
      if (!visit_part(r, key->text, key->count, e->value, depth)) return false;
      continue;
    }
    if (v->kind == TY_PICKLE_DICT && key->kind != TY_PICKLE_INT)
      return fail(r, "a dictionary whose keys are neither text nor integers");
    int n = snprintf(number, sizeof number, "%lld",
                     v->kind == TY_PICKLE_DICT ? (long long)key->i : (long long)position);
    if (!visit_part(r, number, (size_t)n, e->value, depth)) return false;
  }
  return true;
}

static bool visit(reader *r, uint32_t index, int depth) {
  const ty_pickle_value *v = ty_pickle_at(&r->pickle, index);
  char number[40];
  int n;
  if (depth > DEPTH_MOST) return fail(r, "values are nested more than %d deep", DEPTH_MOST);
  if (++r->visits > VISITS_MOST) return fail(r, "more than %d values", VISITS_MOST);
  switch ((ty_pickle_kind)v->kind) {
    case TY_PICKLE_TENSOR_VALUE: return keep_tensor(r, v);
    case TY_PICKLE_DICT:
    case TY_PICKLE_LIST: return visit_entries(r, v, depth);
    case TY_PICKLE_TUPLE:
      for (uint32_t i = 0; i < v->count; i++) {
        n = snprintf(number, sizeof number, "%u", i);
        if (!visit_part(r, number, (size_t)n, ty_pickle_item(&r->pickle, v, i), depth)) return false;
      }
      return true;
    case TY_PICKLE_TEXT: return keep_note(r, v->text, v->count);
    case TY_PICKLE_BOOL: return v->i ? keep_note(r, "true", 4) : keep_note(r, "false", 5);
    case TY_PICKLE_INT:
      n = snprintf(number, sizeof number, "%lld", (long long)v->i);
      return keep_note(r, number, (size_t)n);
    case TY_PICKLE_FLOAT: n = snprintf(number, sizeof number, "%.17g", v->f); return keep_note(r, number, (size_t)n);
    case TY_PICKLE_NONE: return true;
    case TY_PICKLE_GLOBAL:
    case TY_PICKLE_STORAGE:
    case TY_PICKLE_MARK: break;
  }
  return fail(r, "a value that is neither a tensor nor a number, text, list or dictionary");
}

static bool fill(reader *r, ty_bundle *out) {
  const found *tensors = (const found *)(const void *)r->tensors.data,
              *notes = (const found *)(const void *)r->notes.data;
  size_t count = r->tensors.size / sizeof *tensors, note_count = r->notes.size / sizeof *notes;
  out->tensors = calloc(count + 1, sizeof *out->tensors);
  out->notes = calloc(note_count + 1, sizeof *out->notes);
  ty_named *sorted = calloc(count + 1, sizeof *sorted);
  bool ok = out->tensors && out->notes && sorted;
  if (!ok) ty_fail(TY_ENOMEM, "torch: no memory for the names of %zu tensors", count);
  const char *pool = (const char *)r->pool.data;
  for (size_t i = 0; ok && i < count; i++)
    out->tensors[out->count++] = (ty_named){ pool + tensors[i].name, tensors[i].name_size,
                                             ty_retain(tensors[i].tensor) };
  for (size_t i = 0; ok && i < note_count; i++)
    out->notes[out->note_count++] = (ty_note){ pool + notes[i].name, pool + notes[i].value, notes[i].name_size,
                                               notes[i].value_size };
  if (ok && count) memcpy(sorted, out->tensors, count * sizeof *sorted);
  if (ok) qsort(sorted, count, sizeof *sorted, ty_named_order);
  for (size_t i = 1; ok && i < count; i++)
    if (ty_named_order(&sorted[i - 1], &sorted[i]) == 0)
      ok = fail(r, "tensor %s is there twice", ty_quote(sorted[i].name, sorted[i].name_size));
  free(sorted);
  out->has_notes = true;
  out->pool = (char *)r->pool.data; /* the names live on in the bundle */
  r->pool = (ty_bytes){ 0 };
  return ok;
}

bool ty_torch_read(ty_mapping *m, const char *name, bool copy, ty_bundle *out) {
  static const uint8_t legacy[] = { 0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46 };
  *out = (ty_bundle){ 0 };
  reader r = { .file = name, .copy = copy };
  if (m->size >= sizeof legacy && memcmp(m->data, legacy, sizeof legacy) == 0)
    return fail(&r, "it is in PyTorch's format before 1.6; load and save it again with a newer torch.save");
  bool ok = ty_bytes_reserve(&r.pool, 1) && ty_zip_open(&r.zip, m, name) && open_archive(&r) &&
            visit(&r, r.pickle.result, 0) && fill(&r, out);
  for (size_t i = 0; i < r.tensors.size / sizeof(found); i++) ty_release(((found *)(void *)r.tensors.data)[i].tensor);
  for (size_t i = 0; i < r.place_count; i++) ty_release(r.places[i].whole);
  free(r.places);
  ty_zip_close(&r.zip);
  ty_pickle_free(&r.pickle);
  ty_bytes_free(&r.text);
  ty_bytes_free(&r.name);
  ty_bytes_free(&r.tensors);
  ty_bytes_free(&r.notes);
  ty_bytes_free(&r.pool);
  if (!ok) ty_bundle_free(out);
  return ok;
}
