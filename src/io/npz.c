/* NumPy's npz: a zip archive of npy files. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "zip.h"

static bool read_entry(const ty_zip *z, const ty_zip_entry *e, bool copy, ty_tensor **out) {
  char *label = NULL;
  ty_zip_source s = { 0 };
  if (asprintf(&label, "%s, entry %.*s", z->file, (int)e->name_size, e->name) < 0)
    return ty_fail(TY_ENOMEM, "npz: no memory");
  *out = ty_zip_source_open(&s, z, e) ? ty_npy_read_source(&s.source, label, copy) : NULL;
  if (*out && !ty_zip_source_finish(&s)) {
    ty_release(*out);
    *out = NULL;
  }
  ty_zip_source_close(&s);
  free(label);
  return *out != NULL;
}

static bool read_all(const ty_zip *z, bool copy, ty_bundle *out) {
  size_t names = 0;
  for (size_t i = 0; i < z->count; i++) names += z->entries[i].name_size;
  out->tensors = calloc(z->count + 1, sizeof *out->tensors);
  char *pool = out->pool = malloc(names + 1);
  if (!out->tensors || !pool) return ty_fail(TY_ENOMEM, "npz: no memory for %zu names", z->count);
  for (size_t i = 0; i < z->count; i++) {
    const ty_zip_entry *e = &z->entries[i];
    if (e->name_size && e->name[e->name_size - 1] == '/' && e->size == 0) continue; /* a folder */
    ty_tensor *t = NULL;
    if (e->name_size < 5 || memcmp(e->name + e->name_size - 4, ".npy", 4) != 0)
      return ty_fail(TY_EIO, "npz %s: entry %s is no .npy file", ty_quote_text(z->file),
                     ty_quote(e->name, e->name_size));
    if (!read_entry(z, e, copy, &t)) return false;
    size_t size = e->name_size - 4;
    memcpy(pool, e->name, size);
    out->tensors[out->count++] = (ty_named){ pool, size, t };
    pool += size;
  }
  /* A name that is there twice: look at neighbours in a sorted copy, the bundle keeps the order of the file. */
  ty_named *sorted = malloc((out->count + 1) * sizeof *sorted);
  if (!sorted) return ty_fail(TY_ENOMEM, "npz: no memory for %zu names", out->count);
  if (out->count) memcpy(sorted, out->tensors, out->count * sizeof *sorted);
  qsort(sorted, out->count, sizeof *sorted, ty_named_order);
  bool ok = true;
  for (size_t i = 1; ok && i < out->count; i++)
    if (ty_named_order(&sorted[i - 1], &sorted[i]) == 0)
      ok = ty_fail(TY_EIO, "npz %s: array %s is there twice", ty_quote_text(z->file),
                   ty_quote(sorted[i].name, sorted[i].name_size));
  free(sorted);
  return ok;
}

static bool within(const ty_zip *z, uint64_t most) {
  uint64_t total = 0;
  for (size_t i = 0; i < z->count; i++)
    if (z->entries[i].method != 0 && __builtin_add_overflow(total, z->entries[i].size, &total)) total = UINT64_MAX;
  return total <= most || ty_fail(TY_EIO,
                                  "npz %s unpacks to %llu bytes, more than the %llu allowed; the option max "
                                  "allows more",
                                  ty_quote_text(z->file), (unsigned long long)total, (unsigned long long)most);
}

bool ty_npz_read(ty_mapping *m, const char *name, bool copy, int64_t most, ty_bundle *out) {
  *out = (ty_bundle){ 0 };
  ty_zip zip;
  uint64_t allowed = most >= 0 ? (uint64_t)most : ty_inflated_most(m->size, TY_NPZ_FLOOR);
  bool ok = ty_zip_open(&zip, m, name) && within(&zip, allowed) && read_all(&zip, copy, out);
  ty_zip_close(&zip);
  if (!ok) ty_bundle_free(out);
  return ok;
}

static bool add(ty_zip_writer *zip, const ty_named *t, bool compress) {
  ty_bytes head = { 0 }, name = { 0 };
  ty_tensor *host = NULL;
  bool ok = ty_bytes_put(&name, t->name, t->name_size) && ty_bytes_put(&name, ".npy", 4) &&
            ty_npy_header(t->tensor, &head) && (host = ty_host_tensor(t->tensor)) &&
            ty_zip_add(zip, (const char *)name.data, name.size, head.data, head.size, host->v.data,
                       (size_t)host->v.count * ty_dtype_size[host->v.dtype], compress);
  ty_release(host);
  ty_bytes_free(&head);
  ty_bytes_free(&name);
  return ok;
}

bool ty_npz_write(const char *path, const ty_bundle *b, bool compress) {
  ty_named *sorted = malloc((b->count + 1) * sizeof *sorted);
  if (!sorted) return ty_fail(TY_ENOMEM, "npz: no memory for %zu names", b->count);
  if (b->count) memcpy(sorted, b->tensors, b->count * sizeof *sorted);
  qsort(sorted, b->count, sizeof *sorted, ty_named_order); /* the same tensors give the same file */
  ty_writer w;
  ty_zip_writer zip = { .out = &w };
  bool ok = ty_writer_open(&w, path);
  for (size_t i = 0; ok && i < b->count; i++) {
    ok = ty_valid_utf8(sorted[i].name, sorted[i].name_size) && !memchr(sorted[i].name, 0, sorted[i].name_size);
    if (!ok) ty_fail(TY_EINVAL, "npz: the name %s is not UTF-8 text", ty_quote(sorted[i].name, sorted[i].name_size));
    ok = ok && add(&zip, &sorted[i], compress);
  }
  ok = ok && ty_zip_end(&zip);
  ok = ty_writer_close(&w, ok);
  ty_zip_writer_free(&zip);
  free(sorted);
  return ok;
}
