/* What autocast makes of arguments, and the casts of weights that it keeps. */
#include "autocast.h"

#include <stdlib.h>
#include <string.h>

_Thread_local int ty_autocast_dtype = TY_DTYPE_DEFAULT;

/* ---- casts of weights: a hash table by address, open addressing ---- */

typedef struct entry {
  ty_tensor *weight, *cast; /* counted; NULL: free */
  const void *data;
  uint32_t version;
  bool recorded; /* with a way back for gradients */
} entry;

static _Thread_local entry *entries;
static _Thread_local int used, room; /* room is a power of two */

void ty_autocast_forget(void) {
  for (int i = 0; i < room; i++) {
    ty_release(entries[i].weight);
    ty_release(entries[i].cast);
  }
  free(entries);
  entries = NULL;
  used = room = 0;
}

/* Where the weight is, or would be. */
static entry *find(entry *table, int size, const ty_tensor *weight) {
  size_t at = ((uintptr_t)weight >> 4) * 0x9e3779b97f4a7c15u >> 32;
  while (table[at & (size_t)(size - 1)].weight && table[at & (size_t)(size - 1)].weight != weight) at++;
  return &table[at & (size_t)(size - 1)];
}

/* Makes room for one more; false: go on without. */
static bool grow(void) {
  if (2 * (used + 1) <= room) return true;
  int size = room ? 2 * room : 256;
  entry *table = calloc((size_t)size, sizeof *table);
  if (!table) return false;
  for (int i = 0; i < room; i++)
    if (entries[i].weight) *find(table, size, entries[i].weight) = entries[i];
  free(entries);
  entries = table;
  room = size;
  return true;
}

/* A matrix that lies transposed, as weights [in, out] do that a layer takes as [out, in], is cast in the order of memory
 * and stays transposed, and so do its gradients: products take it as it is, turning it would take longer. */
static ty_tensor *cast_plain(ty_tensor *t, ty_dtype dtype) {
  const ty_view *v = &t->v;
  bool turned = v->ndim == 2 && v->stride[0] == 1 && v->stride[1] == v->size[0] && !v->contiguous && !t->batch;
  return turned ? ty_transpose(ty_cast(ty_transpose(t, 0, 1), dtype), 0, 1) : ty_cast(t, dtype);
}

static ty_tensor *cast_weight(ty_tensor *t, ty_dtype dtype) {
  if (!grow()) return ty_cast(t, dtype);
  entry *e = find(entries, room, t);
  bool known = e->weight && e->cast->v.dtype == (int16_t)dtype && e->data == t->v.data &&
               e->version == t->storage->version && e->recorded == ty_grad_enabled();
  if (!known) {
    ty_tensor *cast = ty_cast(t, dtype);
    if (!cast) return NULL;
    if (e->weight) ty_release(e->cast);
    else used++, e->weight = ty_retain(t);
    *e = (entry){ e->weight, ty_retain(cast), t->v.data, t->storage->version, ty_grad_enabled() };
  }
  return ty_scope_add(ty_retain(e->cast));
}

/* ---- arguments ---- */

static bool is_input(const ty_op *op, const ty_value *arg, int i) {
  return arg[i].kind == TY_TENSOR && op->args[i].kind != TY_ARG_OPTIONAL;
}

bool ty_autocast(const ty_op *op, ty_value *arg) {
  ty_dtype dtype = op->flags & AUTO_HALF ? (ty_dtype)ty_autocast_dtype : TY_F32;
  for (int i = 0; i < op->nargs; i++)
    if (is_input(op, arg, i) && ty_dtype_of(arg[i].t) == TY_F64) return true;
  for (int i = 0; i < op->nargs; i++) {
    if (!is_input(op, arg, i)) continue;
    ty_tensor *t = arg[i].t;
    ty_dtype has = ty_dtype_of(t);
    if (has == dtype || !(ty_is_half(has) || has == TY_F32)) continue;
    bool weight = t->requires_grad && !t->node && !t->is_view;
    if (!(arg[i].t = weight ? cast_weight(t, dtype) : cast_plain(t, dtype))) return false;
  }
  return true;
}
