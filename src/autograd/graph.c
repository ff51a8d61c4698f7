/* Nodes: recording, keeping and giving back tensors, freeing without recursion. */
#include <stdlib.h>
#include <string.h>

#include "../ops/profile.h"
#include "../ops/vmap.h"
#include "autograd.h"

static _Thread_local const ty_saved_hooks *current_hooks;
static atomic_uint_fast64_t sequence;

const ty_saved_hooks *ty_set_saved_hooks(const ty_saved_hooks *hooks) {
  const ty_saved_hooks *was = current_hooks;
  current_hooks = hooks;
  return was;
}

const char *ty_node_name(const ty_node *n) { return n->op ? n->op->name : n->custom.name; }

bool ty_inputs_want_grad(const ty_op *op, const ty_value *arg) {
  for (int i = 0; i < op->nargs; i++) {
    if (arg[i].kind == TY_TENSOR) {
      if (arg[i].t->requires_grad) return true;
    } else if (arg[i].kind == TY_TENSORS) {
      for (int j = 0; j < arg[i].ts.n; j++)
        if (arg[i].ts.v[j]->requires_grad) return true;
    }
  }
  return false;
}

/* ---- keeping ---- */

static bool save(ty_node *n, ty_saved *s, ty_tensor *t, const char *what) {
  if (n->hooks) {
    ty_tensor *alias = ty_tensor_alias(t);
    if (!alias) return false;
    s->packed = n->hooks->pack(n->hooks->owner, alias, ty_node_name(n), what);
    ty_release(alias);
    return s->packed != NULL;
  }
  s->storage = t->storage;
  s->data = t->v.data;
  s->version = t->storage->version;
  memcpy(s->stride, t->v.stride, sizeof *s->stride * (size_t)t->v.ndim);
  ty_storage_retain(t->storage);
  if ((s->batch = t->batch)) ty_batch_retain(t->batch);
  return true;
}

static void describe(ty_saved *s, const ty_tensor *t) {
  s->dtype = (int8_t)t->v.dtype;
  s->ndim = (int8_t)t->v.ndim;
  memcpy(s->size, t->v.size, sizeof *s->size * (size_t)t->v.ndim);
}

static void drop(ty_node *n, ty_saved *s) {
  if (s->storage) {
    ty_storage_release(s->storage);
    if (s->batch) ty_batch_release(s->batch);
  }
  if (s->packed) n->hooks->drop(n->hooks->owner, s->packed);
  s->storage = NULL;
  s->packed = NULL;
}

/* The kept tensor without history. */
static ty_tensor *restore(ty_node *n, const ty_saved *s) {
  if (n->hooks) {
    ty_tensor *t = n->hooks->unpack(n->hooks->owner, s->packed);
    bool fits = t && t->v.ndim == s->ndim && ty_dtype_of(t) == (ty_dtype)s->dtype &&
                memcmp(t->v.size, s->size, sizeof *s->size * (size_t)s->ndim) == 0;
    if (!t || fits) return t;
    ty_fail(TY_EINVAL, "%s: the unpack hook returned %s for a saved tensor %s %s", ty_node_name(n), ty_describe(t),
            ty_shape_text(s->ndim, s->size), ty_dtype_name[s->dtype]);
    ty_release(t);
    return NULL;
  }
  if (s->version != s->storage->version) {
    ty_fail(TY_EINVAL,
            "%s: a tensor it needs for its gradient, %s %s, was changed in place since (version %u, now %u); use an op "
            "that makes a new "
            "tensor",
            ty_node_name(n), ty_shape_text(s->ndim, s->size), ty_dtype_name[s->dtype], s->version, s->storage->version);
    return NULL;
  }
  ty_tensor *t = ty_small_alloc(sizeof *t);
  if (!t) return NULL;
  *t = (ty_tensor){ .refs = 1, .storage = s->storage, .is_view = true };
  t->v.data = s->data;
  t->v.dtype = s->dtype;
  t->v.ndim = s->ndim;
  memcpy(t->v.size, s->size, sizeof *s->size * (size_t)s->ndim);
  memcpy(t->v.stride, s->stride, sizeof *s->stride * (size_t)s->ndim);
  ty_view_update(&t->v);
  ty_storage_retain(s->storage);
  if ((t->batch = s->batch)) ty_batch_retain(t->batch);
  return t;
}

/* Gives t back its place in the graph. */
static ty_tensor *attach(ty_tensor *t, ty_node *node, int output) {
  if (!t || !node || t->node) return t;
  t->node = node;
  node->refs++;
  t->node_output = (uint16_t)output;
  t->version = t->storage->version;
  t->requires_grad = true;
  return t;
}

ty_tensor *ty_node_input(ty_node *n, int i) {
  ty_edge *e = &n->in[i];
  if (!e->saved.storage && !e->saved.packed) return NULL;
  if (e->leaf && e->leaf->v.data == e->saved.data && e->leaf->storage == e->saved.storage) {
    if (e->saved.version == e->saved.storage->version) return ty_retain(e->leaf);
  }
  ty_tensor *t = restore(n, &e->saved);
  if (t && e->leaf && ty_grad_enabled()) { /* packed leaf: gradients of the gradient must find the leaf itself */
    ty_release(t);
    return ty_retain(e->leaf);
  }
  return attach(t, e->node, e->output);
}

ty_tensor *ty_node_output(ty_node *n, int i) { return attach(restore(n, &n->out[i]), n, i); }

/* ---- making ---- */

static ty_node *node_new(const ty_op *op, int nin, int nout, int narg, size_t extra, bool keep_out) {
  size_t at_in = sizeof(ty_node), at_arg = at_in + sizeof(ty_edge) * (size_t)nin,
         at_grad = at_arg + sizeof(ty_value) * (size_t)narg;
  size_t at_out = at_grad + sizeof(ty_tensor *) * (size_t)nout,
         at_extra = at_out + (keep_out ? sizeof(ty_saved) * (size_t)nout : 0);
  size_t bytes = at_extra + extra;
  char *p = ty_small_alloc(bytes);
  if (!p) return NULL;
  ty_node *n = (ty_node *)p;
  *n = (ty_node){ .refs = 1, .nin = (uint16_t)nin, .nout = (uint16_t)nout, .op = op, .bytes = bytes };
  if (ty_profiling) n->scope = ty_profiling->scope;
  n->seq = atomic_fetch_add_explicit(&sequence, 1, memory_order_relaxed);
  n->in = (ty_edge *)(p + at_in);
  n->arg = (ty_value *)(p + at_arg);
  n->grad = (ty_tensor **)(p + at_grad);
  n->out = keep_out ? (ty_saved *)(p + at_out) : NULL;
  for (int i = 0; i < nin; i++) {
    ty_edge *e = &n->in[i];
    e->node = NULL;
    e->leaf = NULL;
    e->present = false;
    e->saved.storage = NULL;
    e->saved.packed = NULL;
    e->size = e->saved.size;
    e->dtype = e->ndim = e->device = 0;
  }
  for (int i = 0; i < nout; i++) {
    n->grad[i] = NULL;
    if (keep_out) n->out[i].storage = NULL, n->out[i].packed = NULL;
  }
  if (current_hooks) {
    n->hooks = malloc(sizeof *n->hooks);
    if (!n->hooks) {
      ty_small_free(p, bytes);
      ty_fail(TY_ENOMEM, "out of memory while recording %s", op ? op->name : "a custom op");
      return NULL;
    }
    *n->hooks = *current_hooks;
    n->hooks->retain(n->hooks->owner);
  }
  return n;
}

/* kept: the name of the argument when the rule needs it, else NULL */
static bool set_edge(ty_node *n, ty_edge *e, ty_tensor *t, const char *kept) {
  e->present = true;
  describe(&e->saved, t);
  e->dtype = e->saved.dtype;
  e->ndim = e->saved.ndim;
  e->device = (int8_t)ty_device_of(t);
  if (t->requires_grad) {
    if (t->node) {
      if (t->version != t->storage->version)
        return ty_fail(TY_EINVAL,
                       "%s: %s was changed in place through another view of its memory after it was computed by %s; "
                       "its gradient would be wrong",
                       ty_node_name(n), ty_describe(t), ty_node_name(t->node));
      e->node = t->node;
      e->output = t->node_output;
      t->node->refs++;
    } else {
      e->leaf = ty_retain(t);
    }
  }
  return !kept || save(n, &e->saved, t, kept);
}

static void set_outputs(ty_node *n, ty_tensor *const *out) {
  for (int i = 0; i < n->nout; i++) {
    ty_tensor *t = out[i];
    if (!ty_is_float(ty_dtype_of(t))) continue;
    if (t->node) ty_node_release(t->node); /* overwritten in place: the old history is now behind n */
    t->node = n;
    n->refs++;
    t->node_output = (uint16_t)i;
    t->version = t->storage->version;
    t->requires_grad = true;
  }
}

/* Whether kept operand i of this call serves a gradient that will be asked for. */
static bool serves(const ty_op *op, const ty_value *arg, int i) {
  if (!(op->flags & (i == 0 ? X_FOR_Y : Y_FOR_X)) || i > 1) return true;
  const ty_value *other = &arg[1 - i];
  return other->kind == TY_TENSOR && other->t->requires_grad;
}

/* The inputs in the order of the node's. */
static bool note_levels(ty_node *n, const ty_op *op, const ty_value *arg, ty_tensor *const *out) {
  ty_tensor **in = calloc((size_t)n->nin + 1, sizeof *in);
  if (!in) return ty_fail(TY_ENOMEM, "out of memory while recording %s", op->name);
  for (int i = 0, k = 0; i < op->nargs; i++) {
    switch (op->args[i].kind) {
      case TY_ARG_TENSOR:
      case TY_ARG_OPTIONAL:
      case TY_ARG_OPERAND: in[k++] = arg[i].kind == TY_TENSOR ? arg[i].t : NULL; break;
      case TY_ARG_LIST:
        for (int j = 0; j < arg[i].ts.n; j++) in[k++] = arg[i].ts.v[j];
        break;
      default: break;
    }
  }
  bool ok = ty_node_note_levels(n, in, out, op->nout);
  free(in);
  return ok;
}

bool ty_record(const ty_op *op, const ty_value *arg, ty_tensor *const *out) {
  int nin = 0;
  size_t extra = 0;
  for (int i = 0; i < op->nargs; i++) {
    switch (op->args[i].kind) {
      case TY_ARG_TENSOR:
      case TY_ARG_OPTIONAL:
      case TY_ARG_OPERAND: nin++; break;
      case TY_ARG_LIST:
        nin += arg[i].ts.n;
        extra += sizeof(ty_tensor *) * (size_t)arg[i].ts.n;
        break;
      case TY_ARG_INTS:
      case TY_ARG_VARINTS: extra += sizeof(int64_t) * (size_t)arg[i].is.n; break;
      case TY_ARG_STRING: extra += arg[i].s ? (strlen(arg[i].s) + 8) / 8 * 8 : 0; break;
      default: break;
    }
  }
  ty_node *n = node_new(op, nin, op->nout, op->nargs, extra, op->flags & SAVE_OUT);
  if (!n) return false;
  char *room = (char *)n + n->bytes - extra;
  bool ok = true;
  int k = 0;
  for (int i = 0; i < op->nargs && ok; i++) {
    const ty_arg *a = &op->args[i];
    n->arg[i] = arg[i];
    switch (a->kind) {
      case TY_ARG_TENSOR:
      case TY_ARG_OPTIONAL:
      case TY_ARG_OPERAND:
        if (arg[i].kind == TY_TENSOR && arg[i].t) {
          ok = set_edge(n, &n->in[k], arg[i].t, a->kept && serves(op, arg, i) ? a->name : NULL);
          n->arg[i].t = NULL;
        }
        k++;
        break;
      case TY_ARG_LIST:
        n->arg[i].ts.v = (ty_tensor *const *)(void *)room;
        for (int j = 0; j < arg[i].ts.n && ok; j++)
          ok = set_edge(n, &n->in[k++], arg[i].ts.v[j], a->kept ? a->name : NULL);
        room += sizeof(ty_tensor *) * (size_t)arg[i].ts.n;
        break;
      case TY_ARG_INTS:
      case TY_ARG_VARINTS: {
        size_t bytes = sizeof(int64_t) * (size_t)arg[i].is.n;
        if (bytes) memcpy(room, arg[i].is.v, bytes);
        n->arg[i].is.v = (const int64_t *)(void *)room;
        room += bytes;
        break;
      }
      case TY_ARG_STRING:
        if (arg[i].s) {
          strcpy(room, arg[i].s);
          n->arg[i].s = room;
          room += (strlen(arg[i].s) + 8) / 8 * 8;
        }
        break;
      default: break;
    }
  }
  for (int i = 0; i < op->nout && ok && n->out; i++) {
    describe(&n->out[i], out[i]);
    if (i < 2 && op->flags & (i ? NOT_OUT_1 : NOT_OUT_0)) continue;
    ok = save(n, &n->out[i], out[i], "output");
  }
  if (ok && __builtin_expect(atomic_load_explicit(&ty_mapped_tensors, memory_order_relaxed) != 0, 0))
    ok = note_levels(n, op, arg, out);
  if (ok) set_outputs(n, out);
  ty_node_release(n); /* the outputs hold it now */
  return ok;
}

bool ty_record_custom(ty_custom custom, ty_tensor *const *in, int nin, ty_tensor *const *out, int nout) {
  ty_node *n = node_new(NULL, nin, nout, 0, 0, false);
  if (!n) {
    custom.release(custom.owner);
    return false;
  }
  n->custom = custom;
  bool ok = true;
  for (int i = 0; i < nin && ok; i++)
    if (in[i]) ok = set_edge(n, &n->in[i], in[i], NULL);
  if (ok && custom.release != ty_map_release_level) ok = ty_node_note_levels(n, in, out, nout);
  if (ok) set_outputs(n, out);
  ty_node_release(n);
  return ok;
}

/* ---- freeing ---- */

void ty_node_spend(ty_node *n) {
  for (int i = 0; i < n->nin; i++) drop(n, &n->in[i].saved);
  for (int i = 0; n->out && i < n->nout; i++) drop(n, &n->out[i]);
  if (n->custom.owner) n->custom.release(n->custom.owner);
  n->custom.owner = NULL;
  n->spent = true;
}

static void free_node(ty_node *n) {
  ty_node_spend(n);
  for (int i = 0; i < n->nin; i++) {
    if (n->in[i].leaf) ty_release(n->in[i].leaf);
    if (n->in[i].node) ty_node_release(n->in[i].node);
  }
  for (int i = 0; i < n->nout; i++) {
    ty_release(n->grad[i]);
    if (n->retained) ty_release(n->retained[i]);
  }
  free(n->retained);
  ty_node_forget_levels(n->levels);
  while (n->grad_hooks) {
    ty_hook *h = n->grad_hooks;
    n->grad_hooks = h->next;
    h->release(h->owner);
    free(h);
  }
  if (n->hooks) {
    n->hooks->release(n->hooks->owner);
    free(n->hooks);
  }
  ty_small_free(n, n->bytes);
}

void ty_node_release(ty_node *n) {
  static _Thread_local ty_node *list;
  static _Thread_local bool draining;
  if (--n->refs) return;
  n->next = list;
  list = n;
  if (draining) return; /* called from free_node() below: a chain of any length takes no stack */
  draining = true;
  while (list) {
    ty_node *first = list;
    list = first->next;
    free_node(first);
  }
  draining = false;
}
