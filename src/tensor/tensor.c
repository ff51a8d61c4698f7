/* Making, viewing and releasing tensors; scopes; descriptions for error texts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../device/device.h"
#include "../tycho.h"

/* ---- shapes ---- */

void ty_view_update(ty_view *v) {
  int64_t count = 1;
  bool contiguous = true;
  for (int d = v->ndim - 1; d >= 0; d--) {
    if (v->size[d] != 1 && v->stride[d] != count) contiguous = false;
    count *= v->size[d];
  }
  v->count = count;
  v->contiguous = contiguous || count == 0;
}

void ty_view_set_contiguous(ty_view *v, int ndim, const int64_t *size) {
  int64_t count = 1;
  v->ndim = (int16_t)ndim;
  for (int d = ndim - 1; d >= 0; d--) {
    v->size[d] = size[d];
    v->stride[d] = count;
    count *= size[d];
  }
  v->count = count;
  v->contiguous = true;
}

bool ty_view_repeats(const ty_view *v) {
  for (int d = 0; d < v->ndim; d++)
    if (v->stride[d] == 0 && v->size[d] > 1) return v->count > 0;
  return false;
}

bool ty_same_shape(const ty_view *a, const ty_view *b) {
  if (a->ndim != b->ndim) return false;
  for (int d = 0; d < a->ndim; d++)
    if (a->size[d] != b->size[d]) return false;
  return true;
}

/* Bytes of a shape; fails when they do not fit 62 bits, and when rows are not whole blocks. */
static bool checked_bytes(int ndim, const int64_t *size, ty_dtype dtype, size_t *bytes) {
  int64_t count = 1;
  bool empty = false, possible = ndim <= TY_MAX_DIMS;
  for (int d = 0; d < ndim && possible; d++) {
    possible = size[d] >= 0 && (size[d] == 0 || count <= (INT64_MAX >> 2) / ty_dtype_size[dtype] / size[d]);
    empty |= size[d] == 0;
    if (possible && size[d]) count *= size[d];
  }
  if (!possible) return ty_fail(TY_EINVAL, "%s is not a possible shape", ty_shape_text(ndim, size));
  if (ty_is_quantized(dtype) && (ndim == 0 || size[ndim - 1] % ty_dtype_block[dtype]))
    return ty_fail(TY_EINVAL, "a %s tensor needs a last dimension that is a multiple of %d, got %s",
                   ty_dtype_name[dtype], ty_dtype_block[dtype], ty_shape_text(ndim, size));
  int64_t columns = ndim && !empty ? size[ndim - 1] : 1;
  *bytes = empty                    ? 0
           : ty_is_quantized(dtype) ? (size_t)(count / columns * ty_row_bytes(dtype, columns))
                                    : (size_t)count * ty_dtype_size[dtype];
  return true;
}

/* ---- tensors ---- */

static ty_tensor *blank(ty_storage *s, ty_dtype dtype) {
  ty_tensor *t = ty_small_alloc(sizeof *t);
  if (!t) return NULL;
  t->v.data = s->bytes;
  t->v.dtype = (int16_t)dtype;
  t->v.number = false;
  t->refs = 1;
  t->version = 0;
  t->storage = s;
  t->node = NULL;
  t->grad = NULL;
  t->hooks = NULL;
  t->batch = NULL;
  t->node_output = 0;
  t->requires_grad = t->is_view = t->retains_grad = false;
  return t;
}

ty_tensor *ty_tensor_new(int device, ty_dtype dtype, int ndim, const int64_t *size) {
  if (ndim > TY_MAX_DIMS) {
    ty_fail(TY_EINVAL, "a tensor has at most %d dimensions, got %d", TY_MAX_DIMS, ndim);
    return NULL;
  }
  size_t bytes;
  if (!checked_bytes(ndim, size, dtype, &bytes)) return NULL;
  ty_storage *s = ty_storage_new(device, bytes, dtype, ndim, size);
  if (!s) return NULL;
  ty_tensor *t = blank(s, dtype);
  if (!t) {
    ty_storage_release(s);
    return NULL;
  }
  ty_view_set_contiguous(&t->v, ndim, size);
  return t;
}

/* Of block-quantized tensors there are views of whole rows without gaps; their blocks are not taken apart. */
static bool whole_rows(const ty_tensor *base, const ty_view *v) {
  int64_t columns = base->v.size[base->v.ndim - 1];
  if (v->contiguous && v->ndim && v->size[v->ndim - 1] == columns) return true;
  return ty_fail(
      TY_EINVAL,
      "%s: a block-quantized tensor has views of whole rows only (parts of the first dimension, other leading "
      "dimensions), not %s of it; :to \"f32\" decodes it",
      ty_describe(base), ty_shape_text(v->ndim, v->size));
}

ty_tensor *ty_tensor_view(ty_tensor *base, int ndim, const int64_t *size, const int64_t *stride, int64_t offset) {
  ty_dtype dtype = ty_dtype_of(base);
  ty_tensor *t = blank(base->storage, dtype);
  if (!t) return NULL;
  ty_storage_retain(base->storage);
  t->v.ndim = (int16_t)ndim;
  memcpy(t->v.size, size, sizeof *size * (size_t)ndim);
  memcpy(t->v.stride, stride, sizeof *stride * (size_t)ndim);
  ty_view_update(&t->v);
  t->is_view = true;
  int64_t bytes = offset * ty_dtype_size[dtype];
  if (ty_is_quantized(dtype)) {
    if (!whole_rows(base, &t->v)) {
      ty_release(t);
      return NULL;
    }
    int64_t columns = base->v.size[base->v.ndim - 1];
    bytes = columns ? offset / columns * ty_row_bytes(dtype, columns) : 0;
  }
  t->v.data = base->v.data ? (char *)base->v.data + bytes : NULL;
  return t;
}

ty_tensor *ty_tensor_alias(ty_tensor *t) {
  ty_tensor *a = blank(t->storage, ty_dtype_of(t));
  if (!a) return NULL;
  ty_storage_retain(t->storage);
  a->v = t->v;
  a->is_view = t->is_view;
  if ((a->batch = t->batch)) ty_batch_retain(t->batch);
  return a;
}

ty_tensor *ty_tensor_wrap(void *bytes, ty_dtype dtype, int ndim, const int64_t *size, void (*release)(void *),
                          void *owner) {
  size_t bytes_needed;
  if (!checked_bytes(ndim, size, dtype, &bytes_needed)) {
    release(owner);
    return NULL;
  }
  ty_storage *s = ty_small_alloc(sizeof *s);
  ty_foreign *f = s ? ty_small_alloc(sizeof *f) : NULL;
  if (!f) {
    ty_small_free(s, sizeof *s);
    release(owner);
    return NULL;
  }
  *f = (ty_foreign){ release, owner };
  *s = (ty_storage){ .refs = 1, .device = TY_CPU, .bytes = bytes, .nbytes = bytes_needed, .foreign = f };
  ty_tensor *t = blank(s, dtype);
  if (!t) {
    ty_storage_release(s);
    return NULL;
  }
  ty_view_set_contiguous(&t->v, ndim, size);
  return t;
}

static void free_hooks(ty_hook *h) {
  while (h) {
    ty_hook *next = h->next;
    h->release(h->owner);
    free(h);
    h = next;
  }
}

void ty_tensor_free(ty_tensor *t) {
  ty_storage_release(t->storage);
  if (t->node) ty_node_release(t->node);
  if (t->grad) ty_release(t->grad);
  if (t->hooks) free_hooks(t->hooks);
  if (t->batch) ty_batch_release(t->batch);
  ty_small_free(t, sizeof *t);
}

/* ---- scopes: tensors in order of creation, the innermost scope's last ---- */

static _Thread_local struct {
  ty_tensor **list;
  int count, capacity;
} scoped;

bool ty_scope_open(ty_scope *scope) {
  scope->mark = scoped.count;
  return true;
}

void ty_scope_close(ty_scope *scope) {
  while (scoped.count > scope->mark) ty_release(scoped.list[--scoped.count]);
}

ty_tensor *ty_scope_add(ty_tensor *t) {
  if (!t) return NULL;
  if (scoped.count == scoped.capacity) {
    ty_memory_arm_thread_exit();
    int capacity = scoped.capacity ? 2 * scoped.capacity : 256;
    ty_tensor **list = realloc(scoped.list, sizeof *list * (size_t)capacity);
    if (!list) {
      ty_release(t);
      ty_fail(TY_ENOMEM, "out of memory: %d tensors in scopes", capacity);
      return NULL;
    }
    scoped.list = list;
    scoped.capacity = capacity;
  }
  return scoped.list[scoped.count++] = t;
}

void ty_scope_thread_exit(void) {
  ty_scope all = { 0 };
  ty_scope_close(&all);
  free(scoped.list);
  scoped.list = NULL;
  scoped.capacity = 0;
}

ty_tensor *ty_keep(ty_tensor *t) { return ty_retain(t); }

/* ---- texts ---- */

static char *next_buffer(void) {
  static _Thread_local char buffers[8][192];
  static _Thread_local unsigned turn;
  return buffers[turn++ % 8];
}

static int write_shape(char *b, size_t room, int ndim, const int64_t *size) {
  int n = snprintf(b, room, "[");
  for (int d = 0; d < ndim && n < (int)room - 24; d++)
    n += snprintf(b + n, room - (size_t)n, d ? ", %lld" : "%lld", (long long)size[d]);
  return n + snprintf(b + n, room - (size_t)n, "]");
}

const char *ty_shape_text(int ndim, const int64_t *size) {
  char *b = next_buffer();
  write_shape(b, 192, ndim, size);
  return b;
}

const char *ty_describe(const ty_tensor *t) {
  if (!t) return "nil";
  char *b = next_buffer();
  int n = write_shape(b, 160, t->v.ndim, t->v.size);
  snprintf(b + n, 192 - (size_t)n, " %s %s", ty_dtype_name[t->v.dtype], ty_device_name(ty_device_of(t)));
  return b;
}
