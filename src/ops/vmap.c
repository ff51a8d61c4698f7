/* Levels of ty.vmap and the tensors that have a batch: see vmap.h. The rules of the ops are in vmap_rules.c. */
#include "vmap.h"

#include <stdlib.h>
#include <string.h>

#include "../autograd/autograd.h"

atomic_int ty_mapped_tensors;
_Thread_local bool ty_vjp_mapped;

static _Thread_local ty_level *running;
static atomic_uint_fast64_t ids;

/* ---- levels ---- */

ty_level *ty_level_open(int64_t size, int randomness) {
  ty_level *level = malloc(sizeof *level);
  if (!level) {
    ty_fail(TY_ENOMEM, "vmap: out of memory");
    return NULL;
  }
  *level = (ty_level){ 1, atomic_fetch_add(&ids, 1) + 1, size, true, randomness, running };
  running = level;
  atomic_fetch_add(&ty_mapped_tensors, 1);
  return level;
}

void ty_level_release(ty_level *level) {
  if (level && --level->refs == 0) free(level);
}

void ty_level_close(ty_level *level) {
  if (level->running) atomic_fetch_sub(&ty_mapped_tensors, 1);
  level->running = false;
  /* An error may have left levels inside of it running; these are over too. */
  while (running && running->id >= level->id) {
    if (running->running) atomic_fetch_sub(&ty_mapped_tensors, 1);
    running->running = false;
    running = running->outer;
  }
  level->outer = NULL;
  ty_level_release(level);
}

ty_level *ty_level_running(void) { return running; }

ty_level *ty_level_set_running(ty_level *level) {
  ty_level *was = running;
  running = level;
  return was;
}

/* ---- tensors with a batch ---- */

void ty_batch_retain(ty_batch *b) { b->refs++; }

void ty_batch_release(ty_batch *b) {
  if (--b->refs) return;
  ty_release(b->full);
  ty_level_release(b->level);
  free(b);
  atomic_fetch_sub(&ty_mapped_tensors, 1);
}

ty_tensor *ty_map_of_full(ty_tensor *full, ty_level *level) {
  if (!full) return NULL;
  const ty_view *v = &full->v;
  if (ty_is_quantized(ty_dtype_of(full))) {
    ty_fail(TY_EUNSUPPORTED, "vmap: block-quantized tensors have no batch dimension, got %s", ty_describe(full));
    return NULL;
  }
  ty_batch *b = malloc(sizeof *b);
  ty_tensor *t = b ? ty_tensor_view(full, v->ndim - 1, v->size + 1, v->stride + 1, 0) : NULL;
  if (!t) {
    free(b);
    ty_fail(TY_ENOMEM, "vmap: out of memory");
    return NULL;
  }
  *b = (ty_batch){ 1, ty_retain(full), level };
  level->refs++;
  atomic_fetch_add(&ty_mapped_tensors, 1);
  t->batch = b;
  t->is_view = full->is_view;
  return t;
}

/* Two leading dimensions the other way round, without a record. */
static ty_tensor *swapped(ty_tensor *x) { return x ? ty_transpose(x, 0, 1) : NULL; }

/* The sample's tensor of x [size, ...], below the levels that x has and that are further in. Scoped. */
static ty_tensor *insert(ty_tensor *x, ty_level *level) {
  if (!x) return NULL;
  if (!x->batch || x->batch->level->id < level->id) return ty_scope_add(ty_map_of_full(x, level));
  ty_tensor *inner = insert(swapped(x->batch->full), level);
  return inner ? ty_scope_add(ty_map_of_full(inner, x->batch->level)) : NULL;
}

static ty_tensor *expanded(ty_tensor *x, int64_t n) {
  int64_t size[TY_MAX_DIMS + 1];
  if (x->v.ndim == TY_MAX_DIMS) {
    ty_fail(TY_EINVAL, "vmap: %s has as many dimensions as a tensor can have", ty_describe(x));
    return NULL;
  }
  size[0] = n;
  memcpy(size + 1, x->v.size, sizeof *size * (size_t)x->v.ndim);
  return ty_expand(x, (ty_ints){ size, x->v.ndim + 1 });
}

/* [size, ...] of x. Scoped. */
static ty_tensor *extract(ty_tensor *x, ty_level *level) {
  if (!x) return NULL;
  if (!x->batch || x->batch->level->id < level->id) return expanded(x, level->size);
  if (x->batch->level == level) return ty_scope_add(ty_tensor_alias(x->batch->full));
  ty_tensor *inner = extract(x->batch->full, level);
  return inner ? ty_scope_add(ty_map_of_full(swapped(inner), x->batch->level)) : NULL;
}

/* ---- entering and leaving, as nodes ---- */

static bool backward_of_enter(void *owner, ty_tensor *const *g, int nout, ty_tensor **dx, int nin) {
  return !g[0] || (dx[0] = ty_retain(ty_map_leave(g[0], owner))) != NULL;
}

static bool backward_of_leave(void *owner, ty_tensor *const *g, int nout, ty_tensor **dx, int nin) {
  return !g[0] || (dx[0] = ty_retain(ty_map_enter(g[0], owner))) != NULL;
}

void ty_map_release_level(void *owner) { ty_level_release(owner); }

static ty_tensor *moved(ty_tensor *x, ty_level *level, bool enter) {
  if (!x) return NULL;
  bool record = ty_grad_enabled() && x->requires_grad, was = ty_set_grad_enabled(false);
  ty_tensor *plain = ty_scope_add(ty_tensor_alias(x));
  ty_tensor *y = !plain ? NULL : enter ? insert(plain, level) : extract(plain, level);
  ty_set_grad_enabled(was);
  if (!y || !record) return y;
  level->refs++;
  ty_custom custom = { "vmap", enter ? backward_of_enter : backward_of_leave, ty_map_release_level, level };
  return ty_record_custom(custom, &x, 1, &y, 1) ? y : NULL;
}

ty_tensor *ty_map_enter(ty_tensor *x, ty_level *level) { return moved(x, level, true); }
ty_tensor *ty_map_leave(ty_tensor *x, ty_level *level) {
  const ty_tensor *t = x;
  while (t && t->batch && t->batch->level != level) t = t->batch->full;
  if (!x || (t && t->batch)) return moved(x, level, false);
  return expanded(x, level->size); /* whose gradient is summed */
}

/* The gradient is that of each sample, which the engine sums where the level is over, as it does for any op. */
static bool backward_of_each(void *owner, ty_tensor *const *g, int nout, ty_tensor **dx, int nin) {
  dx[0] = ty_retain(g[0]);
  return true;
}

static void release_each(void *owner) { ty_level_release(owner); }

ty_tensor *ty_map_each(ty_tensor *x, ty_level *level) {
  if (!x) return NULL;
  bool record = ty_grad_enabled() && x->requires_grad, was = ty_set_grad_enabled(false);
  ty_tensor *plain = ty_scope_add(ty_tensor_alias(x)), *y = plain ? insert(expanded(plain, level->size), level) : NULL;
  ty_set_grad_enabled(was);
  if (!y || !record) return y;
  level->refs++;
  ty_custom custom = { "vmap", backward_of_each, release_each, level };
  return ty_record_custom(custom, &x, 1, &y, 1) ? y : NULL;
}

/* ---- values ---- */

bool ty_map_check_value(const ty_tensor *t, const char *who) {
  return !t->batch || ty_fail(TY_EUNSUPPORTED,
                              "%s: inside ty.vmap the values of %s differ by sample, and what Lua does cannot depend "
                              "on them; use ty.where or another op",
                              who, ty_describe(t));
}

bool ty_map_copy_into(ty_tensor *dst, ty_tensor *src) {
  ty_level *level = dst->batch ? dst->batch->level : src->batch->level;
  if (src->batch && src->batch->level->id > level->id) level = src->batch->level;
  if (!dst->batch || dst->batch->level != level)
    return ty_fail(TY_EUNSUPPORTED,
                   "inside ty.vmap %s, which is the same for all samples, cannot be written with what differs by "
                   "sample, %s; make a new tensor, or one from what differs (x:clone(), ty.zeros_like(x))",
                   ty_describe(dst), ty_describe(src));
  if (!src->batch || src->batch->level != level) return ty_copy_into(dst->batch->full, src);
  ty_tensor *full = src->batch->full;
  int more = dst->v.ndim - src->v.ndim;
  if (more > 0) { /* the batch stays in front of what the sample is broadcast to */
    int64_t size[TY_MAX_DIMS];
    size[0] = full->v.size[0];
    for (int d = 1; d <= dst->v.ndim; d++) size[d] = d <= more ? 1 : full->v.size[d - more];
    full = ty_reshape(full, (ty_ints){ size, dst->v.ndim + 1 });
  }
  return full && ty_copy_into(dst->batch->full, full);
}

/* ---- what a node knows ---- */

bool ty_node_note_levels(ty_node *n, ty_tensor *const *in, ty_tensor *const *out, int nout) {
  ty_node_levels list = { 0 };
  for (int i = 0; i < nout; i++) {
    for (const ty_tensor *t = out[i]; t && t->batch; t = t->batch->full) {
      int k = 0;
      while (k < list.count && list.level[k] != t->batch->level) k++;
      if (k < list.count) continue;
      if (k == TY_MAX_LEVELS) return ty_fail(TY_EUNSUPPORTED, "vmap: at most %d within each other", TY_MAX_LEVELS);
      list.level[list.count++] = t->batch->level;
    }
  }
  if (!list.count) return true;
  ty_node_levels *kept = malloc(sizeof *kept + n->nin);
  if (!kept) return ty_fail(TY_ENOMEM, "vmap: out of memory");
  *kept = list;
  for (int k = 0; k < list.count; k++) list.level[k]->refs++;
  for (int i = 0; i < n->nin; i++) {
    kept->has[i] = 0;
    for (const ty_tensor *t = in[i]; t && t->batch; t = t->batch->full)
      for (int k = 0; k < list.count; k++)
        if (list.level[k] == t->batch->level) kept->has[i] |= (uint8_t)(1 << k);
  }
  n->levels = kept;
  return true;
}

void ty_node_forget_levels(ty_node_levels *levels) {
  if (!levels) return;
  for (int k = 0; k < levels->count; k++) ty_level_release(levels->level[k]);
  free(levels);
}

ty_tensor *ty_map_sum_over(const ty_node_levels *levels, int i, ty_tensor *g) {
  for (int k = 0; k < levels->count && g; k++)
    if (!levels->level[k]->running && !(levels->has[i] >> k & 1))
      g = ty_sum(ty_map_leave(g, levels->level[k]), TY_INTS(0), false, TY_DTYPE_DEFAULT);
  return g;
}

ty_tensor *ty_map_spread(const ty_node_levels *levels, ty_tensor *g) {
  for (int k = 0; k < levels->count && g; k++) g = ty_map_enter(ty_map_leave(g, levels->level[k]), levels->level[k]);
  return g;
}
