/* safetensors: u64 length, JSON header, one buffer. Reads by mapping; every rule of the format's reference reader is
 * checked, so that a file has one meaning: no gaps, no overlaps, nothing after the last tensor, no key twice. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../tier/tier.h"
#include "formats.h"
#include "json.h"

enum { HEADER_MOST = 100000000 };

static const char *const dtype_names[TY_DTYPES] = {
  [TY_BOOL] = "BOOL", [TY_U8] = "U8",   [TY_I8] = "I8",     [TY_I16] = "I16", [TY_I32] = "I32",
  [TY_I64] = "I64",   [TY_F16] = "F16", [TY_BF16] = "BF16", [TY_F32] = "F32", [TY_F64] = "F64",
};
static const char *const foreign_names[] = {
  /* of the format, not ours */
  "U16", "U32", "U64", "C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
};

/* Text in the pool, by position because the pool moves while it grows. */
typedef struct text {
  size_t at, size;
} text;
typedef struct item {
  text name;
  ty_dtype dtype;
  int ndim;
  int64_t shape[TY_MAX_DIMS];
  int64_t begin, end; /* in the buffer */
} item;
typedef struct note {
  text key, value;
} note;

typedef struct header {
  const char *file;
  ty_json json;
  ty_bytes pool, items, notes;
  bool has_notes;
} header;

static const char *pool_at(const header *h, text t) { return (const char *)h->pool.data + t.at; }

static bool put_text(header *h, const char *s, size_t size, text *out) {
  *out = (text){ h->pool.size, size };
  return ty_bytes_put(&h->pool, s, size);
}

static bool __attribute__((format(printf, 2, 3))) fail(const header *h, const char *format, ...) {
  char what[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return ty_fail(TY_EIO, "safetensors %s: %s", ty_quote_text(h->file), what);
}

static const char *item_name(const header *h, const item *it) { return ty_quote(pool_at(h, it->name), it->name.size); }

/* ---- the header ---- */

static bool read_dtype(header *h, item *it) {
  const char *s;
  size_t n;
  if (!ty_json_string(&h->json, &s, &n)) return false;
  for (int d = 0; d < TY_DTYPES; d++)
    if (dtype_names[d] && strlen(dtype_names[d]) == n && memcmp(dtype_names[d], s, n) == 0) {
      it->dtype = (ty_dtype)d;
      return true;
    }
  for (size_t i = 0; i < sizeof foreign_names / sizeof *foreign_names; i++)
    if (strlen(foreign_names[i]) == n && memcmp(foreign_names[i], s, n) == 0)
      return fail(h,
                  "tensor %s has dtype %s, which Tycho does not have; it reads BOOL U8 I8 I16 I32 I64 F16 BF16 F32 F64",
                  item_name(h, it), foreign_names[i]);
  return fail(h, "tensor %s has the unknown dtype %s", item_name(h, it), ty_quote(s, n));
}

/* A list of at most `most` counts. */
static bool read_counts(header *h, const item *it, const char *field, int64_t *out, int most, int *count) {
  bool more;
  int n = 0;
  if (!ty_json_enter(&h->json, '[')) return false;
  while (ty_json_next(&h->json, &more)) {
    if (!more) {
      *count = n;
      return true;
    }
    ty_json_value v;
    if (!ty_json_number(&h->json, &v)) return false;
    if (!v.is_integer || v.integer < 0)
      return fail(h, "tensor %s: %s: expected a count from 0 to 2^63-1, got %.17g", item_name(h, it), field, v.number);
    if (n == most) return fail(h, "tensor %s: %s has more than %d entries", item_name(h, it), field, most);
    out[n++] = v.integer;
  }
  return false;
}

static bool read_item(header *h, text name) {
  static const char *const fields[] = { "dtype", "shape", "data_offsets" };
  item it = { .name = name };
  unsigned seen = 0;
  bool more, ok = true;
  const char *s;
  size_t n;
  if (!ty_json_enter(&h->json, '{')) return false;
  while ((ok = ty_json_next(&h->json, &more)) && more) {
    if (!ty_json_key(&h->json, &s, &n)) return false;
    int field = -1;
    for (int i = 0; i < 3; i++)
      if (strlen(fields[i]) == n && memcmp(fields[i], s, n) == 0) field = i;
    if (field >= 0 && (seen & 1u << field)) return fail(h, "tensor %s has %s twice", item_name(h, &it), fields[field]);
    if (field >= 0) seen |= 1u << field;
    int64_t offsets[2];
    int count = 0;
    switch (field) {
      case 0: ok = read_dtype(h, &it); break;
      case 1: ok = read_counts(h, &it, "shape", it.shape, TY_MAX_DIMS, &it.ndim); break;
      case 2:
        ok = read_counts(h, &it, "data_offsets", offsets, 2, &count);
        if (ok && count != 2)
          ok = fail(h, "tensor %s: data_offsets: expected 2 entries, got %d", item_name(h, &it), count);
        if (ok) it.begin = offsets[0], it.end = offsets[1];
        break;
      default: ok = ty_json_skip(&h->json); /* newer writers may say more */
    }
    if (!ok) return false;
  }
  for (int i = 0; ok && i < 3; i++)
    if (!(seen & 1u << i)) ok = fail(h, "tensor %s has no %s", item_name(h, &it), fields[i]);
  return ok && ty_bytes_put(&h->items, &it, sizeof it);
}

static bool read_notes(header *h) {
  bool more, ok;
  const char *s;
  size_t n;
  h->has_notes = true;
  if (!ty_json_enter(&h->json, '{')) return false;
  while ((ok = ty_json_next(&h->json, &more)) && more) {
    note one;
    if (!ty_json_key(&h->json, &s, &n) || !put_text(h, s, n, &one.key)) return false;
    if (ty_json_peek(&h->json) != TY_JSON_STRING)
      return fail(h, "__metadata__ entry %s is not a string; the format allows only strings",
                  ty_quote(pool_at(h, one.key), one.key.size));
    if (!ty_json_string(&h->json, &s, &n) || !put_text(h, s, n, &one.value) ||
        !ty_bytes_put(&h->notes, &one, sizeof one))
      return false;
  }
  return ok;
}

static bool read_header(header *h) {
  bool more, ok;
  const char *s;
  size_t n;
  if (!ty_json_enter(&h->json, '{')) return false;
  while ((ok = ty_json_next(&h->json, &more)) && more) {
    text name;
    if (!ty_json_key(&h->json, &s, &n)) return false;
    if (n == 12 && memcmp(s, "__metadata__", 12) == 0) {
      if (h->has_notes) return fail(h, "__metadata__ is there twice");
      ok = read_notes(h);
    } else {
      ok = put_text(h, s, n, &name) && read_item(h, name);
    }
    if (!ok) return false;
  }
  return ok && ty_json_finish(&h->json);
}

/* ---- checks ---- */

static _Thread_local const char *sort_pool; /* qsort has no context argument everywhere */

static int compare_text(text a, text b) {
  int c = memcmp(sort_pool + a.at, sort_pool + b.at, a.size < b.size ? a.size : b.size);
  return c ? c : (a.size > b.size) - (a.size < b.size);
}
static int by_name(const void *a, const void *b) {
  return compare_text(((const item *)a)->name, ((const item *)b)->name);
}
static int by_key(const void *a, const void *b) { return compare_text(((const note *)a)->key, ((const note *)b)->key); }
static int by_offset(const void *pa, const void *pb) {
  const item *a = pa, *b = pb;
  if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
  if (a->end != b->end) return a->end < b->end ? -1 : 1;
  return by_name(a, b);
}

static bool check(header *h, uint64_t buffer) {
  item *items = (item *)(void *)h->items.data;
  note *notes = (note *)(void *)h->notes.data;
  size_t count = h->items.size / sizeof *items, note_count = h->notes.size / sizeof *notes;
  sort_pool = (const char *)h->pool.data;
  if (note_count) qsort(notes, note_count, sizeof *notes, by_key);
  for (size_t i = 1; i < note_count; i++)
    if (by_key(&notes[i - 1], &notes[i]) == 0)
      return fail(h, "__metadata__ has %s twice", ty_quote(pool_at(h, notes[i].key), notes[i].key.size));
  if (count) qsort(items, count, sizeof *items, by_name);
  for (size_t i = 1; i < count; i++)
    if (by_name(&items[i - 1], &items[i]) == 0) return fail(h, "tensor %s is there twice", item_name(h, &items[i]));
  if (count) qsort(items, count, sizeof *items, by_offset);
  int64_t end = 0;
  for (size_t i = 0; i < count; i++) {
    item *it = &items[i];
    uint64_t bytes;
    if (it->end < it->begin)
      return fail(h, "tensor %s: data_offsets [%lld, %lld] run backwards", item_name(h, it), (long long)it->begin,
                  (long long)it->end);
    if (it->begin != end)
      return fail(h,
                  "tensor %s begins at byte %lld of the buffer, expected %lld: tensors may not overlap or leave gaps",
                  item_name(h, it), (long long)it->begin, (long long)end);
    if (!ty_count_bytes(it->dtype, it->ndim, it->shape, &bytes))
      return fail(h, "tensor %s: the sizes of shape %s multiply to more than memory can hold", item_name(h, it),
                  ty_shape_text(it->ndim, it->shape));
    if ((uint64_t)(it->end - it->begin) != bytes)
      return fail(h, "tensor %s: data_offsets span %lld bytes, but %s %s needs %llu", item_name(h, it),
                  (long long)(it->end - it->begin), ty_shape_text(it->ndim, it->shape), dtype_names[it->dtype],
                  (unsigned long long)bytes);
    end = it->end;
  }
  if ((uint64_t)end != buffer)
    return fail(h, "the tensors take %lld bytes, but %llu follow the header: the file is %s", (long long)end,
                (unsigned long long)buffer, (uint64_t)end > buffer ? "cut short" : "longer than it says");
  return true;
}

static bool fill(header *h, ty_mapping *m, size_t base, bool copy, ty_bundle *out) {
  const item *items = (const item *)(void *)h->items.data;
  const note *notes = (const note *)(void *)h->notes.data;
  size_t count = h->items.size / sizeof *items, note_count = h->notes.size / sizeof *notes;
  out->tensors = calloc(count + 1, sizeof *out->tensors);
  out->notes = calloc(note_count + 1, sizeof *out->notes);
  out->has_notes = h->has_notes;
  if (!out->tensors || !out->notes)
    return ty_fail(TY_ENOMEM, "safetensors: no memory for the names of %zu tensors", count);
  for (size_t i = 0; i < note_count; i++)
    out->notes[out->note_count++] = (ty_note){ pool_at(h, notes[i].key), pool_at(h, notes[i].value), notes[i].key.size,
                                               notes[i].value.size };
  for (size_t i = 0; i < count; i++) {
    const item *it = &items[i];
    ty_tensor *t = ty_mapping_tensor(m, base + (size_t)it->begin, it->dtype, it->ndim, it->shape, copy);
    if (!t) return false;
    out->tensors[out->count++] = (ty_named){ pool_at(h, it->name), it->name.size, t };
  }
  out->pool = (char *)h->pool.data; /* the names live on in the bundle */
  h->pool = (ty_bytes){ 0 };
  return true;
}

bool ty_safetensors_read(ty_mapping *m, const char *name, bool copy, ty_bundle *out) {
  *out = (ty_bundle){ 0 };
  header h = { .file = name };
  if (m->size < 8) return fail(&h, "the file has %zu bytes, too few for the length of a header", m->size);
  uint64_t length = 0;
  for (int i = 7; i >= 0; i--) length = length << 8 | m->data[i];
  if (length > HEADER_MOST)
    return fail(&h, "the header claims %llu bytes, more than the %d allowed", (unsigned long long)length, HEADER_MOST);
  if (length > m->size - 8)
    return fail(&h, "the header claims %llu bytes, but only %zu follow: the file is cut short or no safetensors file",
                (unsigned long long)length, m->size - 8);
  char *label = NULL;
  if (asprintf(&label, "safetensors %s header", name) < 0) return ty_fail(TY_ENOMEM, "safetensors: no memory");
  ty_json_open(&h.json, label, m->data + 8, (size_t)length);
  size_t base = 8 + (size_t)length;
  bool ok = ty_bytes_reserve(&h.pool, 1) && read_header(&h) && check(&h, m->size - base) &&
            fill(&h, m, base, copy, out);
  ty_json_close(&h.json);
  free(label);
  ty_bytes_free(&h.pool);
  ty_bytes_free(&h.items);
  ty_bytes_free(&h.notes);
  if (!ok) ty_bundle_free(out);
  return ok;
}

/* ---- writing ---- */

/* Wide types first, so that every tensor is aligned to its own width; then by name, so that the same tensors give
 * the same file. */
static int by_width(const void *pa, const void *pb) {
  const ty_named *a = pa, *b = pb;
  int wa = ty_dtype_size[ty_dtype_of(a->tensor)], wb = ty_dtype_size[ty_dtype_of(b->tensor)];
  return wa != wb ? wb - wa : ty_named_order(a, b);
}

/* A name, or a text of the metadata. */
static bool put_string(ty_bytes *out, const char *what, const char *s, size_t size) {
  if (!ty_valid_utf8(s, size))
    return ty_fail(TY_EINVAL, "safetensors: the %s %s is not valid UTF-8", what, ty_quote(s, size));
  return ty_json_put_string(out, s, size);
}

static bool put_item(ty_bytes *out, const ty_named *t, uint64_t *end) {
  const ty_view *v = &t->tensor->v;
  uint64_t bytes = (uint64_t)v->count * ty_dtype_size[v->dtype], begin = *end;
  *end += bytes;
  bool ok = put_string(out, "name", t->name, t->name_size) &&
            ty_bytes_printf(out, ":{\"dtype\":\"%s\",\"shape\":[", dtype_names[v->dtype]);
  for (int i = 0; ok && i < v->ndim; i++) ok = ty_bytes_printf(out, "%s%lld", i ? "," : "", (long long)v->size[i]);
  return ok &&
         ty_bytes_printf(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin, (unsigned long long)*end);
}

static bool make_header(ty_bytes *out, const ty_named *tensors, size_t count, const ty_bundle *b) {
  uint64_t end = 0;
  bool ok = ty_bytes_put(out, "\0\0\0\0\0\0\0\0{", 9), comma = false;
  if (b->note_count) {
    ok = ok && ty_bytes_put(out, "\"__metadata__\":{", 16);
    for (size_t i = 0; ok && i < b->note_count; i++)
      ok = (i == 0 || ty_bytes_put(out, ",", 1)) &&
           put_string(out, "key of the metadata", b->notes[i].key, b->notes[i].key_size) && ty_bytes_put(out, ":", 1) &&
           put_string(out, "text of the metadata", b->notes[i].value, b->notes[i].value_size);
    ok = ok && ty_bytes_put(out, "}", 1);
    comma = true;
  }
  for (size_t i = 0; ok && i < count; i++, comma = true) {
    if (tensors[i].name_size == 12 && memcmp(tensors[i].name, "__metadata__", 12) == 0)
      return ty_fail(TY_EINVAL, "safetensors: a tensor may not be named \"__metadata__\"");
    if (!dtype_names[tensors[i].tensor->v.dtype])
      return ty_fail(TY_EINVAL, "safetensors: the format has no %s of tensor %s; convert to f32 or f16%s",
                     ty_dtype_name[tensors[i].tensor->v.dtype], ty_quote(tensors[i].name, tensors[i].name_size),
                     ty_elsewhere(ty_dtype_of(tensors[i].tensor)));
    ok = (!comma || ty_bytes_put(out, ",", 1)) && put_item(out, &tensors[i], &end);
  }
  ok = ok && ty_bytes_put(out, "}", 1);
  while (ok && out->size % 8) ok = ty_bytes_put(out, " ", 1);
  if (!ok) return false;
  uint64_t length = out->size - 8;
  if (length > HEADER_MOST)
    return ty_fail(TY_EINVAL, "safetensors: the header would have %llu bytes, at most %d are allowed",
                   (unsigned long long)length, HEADER_MOST);
  for (int i = 0; i < 8; i++) out->data[i] = (uint8_t)(length >> 8 * i);
  return true;
}

static bool put_tensor(ty_writer *w, const ty_named *n, ty_place *place) {
  if (ty_device_of(n->tensor) == TY_META && ty_bring_back && !ty_bring_back(n->tensor))
    return false; /* what is away comes when it is its turn, one by one */
  ty_tensor *t = ty_host_tensor(n->tensor);
  uint64_t bytes = t ? ty_view_bytes(&t->v) : 0;
  if (place) *place = (ty_place){ n->name, n->name_size, w->total, bytes, 0 };
  bool ok = t && ty_writer_put(w, t->v.data, (size_t)bytes);
  ty_release(t);
  return ok;
}

bool ty_safetensors_write(const char *path, const ty_bundle *b, double rate, uint32_t *crc, ty_place *places) {
  ty_named *sorted = malloc((b->count + 1) * sizeof *sorted);
  if (!sorted) return ty_fail(TY_ENOMEM, "safetensors: no memory for %zu tensors", b->count);
  if (b->count) memcpy(sorted, b->tensors, b->count * sizeof *sorted);
  qsort(sorted, b->count, sizeof *sorted, ty_named_order);
  bool ok = true;
  for (size_t i = 1; ok && i < b->count; i++)
    if (ty_named_order(&sorted[i - 1], &sorted[i]) == 0)
      ok = ty_fail(TY_EINVAL, "safetensors: two tensors are named %s", ty_quote(sorted[i].name, sorted[i].name_size));
  qsort(sorted, b->count, sizeof *sorted, by_width);
  ty_bytes head = { 0 };
  ty_writer w;
  ok = ok && make_header(&head, sorted, b->count, b);
  if (ok) {
    uint32_t sum = 0; /* of what is being put: sums of a whole file are made of those of its tensors */
    ok = ty_writer_open(&w, path);
    w.rate = rate;
    w.crc = crc || places ? &sum : NULL;
    ok = ok && ty_writer_put(&w, head.data, head.size);
    if (crc) *crc = sum;
    for (size_t i = 0; ok && i < b->count; i++) {
      uint64_t before = w.total;
      sum = 0;
      ok = put_tensor(&w, &sorted[i], places ? &places[i] : NULL);
      if (places) places[i].crc = sum;
      if (crc) *crc = ty_crc32_join(*crc, sum, w.total - before);
    }
    ok = ty_writer_close(&w, ok);
  }
  ty_bytes_free(&head);
  free(sorted);
  return ok;
}
