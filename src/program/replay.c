/* Replaying: bind what differs between calls, run the steps, leave behind what the function would have left. */
#include <stdlib.h>
#include <string.h>

#include "../device/device.h"
#include "../device/stream.h"
#include "../ops/autocast.h"
#include "../ops/profile.h"
#include "internal.h"

/* ---- does a call fit? ---- */

static bool same_form(const ty_view *a, const ty_view *b) {
  if (a->dtype != b->dtype || a->ndim != b->ndim) return false;
  size_t bytes = sizeof *a->size * (size_t)a->ndim;
  return memcmp(a->size, b->size, bytes) == 0 && memcmp(a->stride, b->stride, bytes) == 0;
}

static bool fits_argument(const ty_program *p, int i, ty_tensor *const *argument) {
  const ty_argument *a = &p->arguments[i];
  const ty_tensor *t = argument[i];
  if (!same_form(&t->v, &a->view) || t->requires_grad != a->wants_grad || ty_device_of(t) != a->device) return false;
  if (t->node && p->grad_enabled) return false;
  for (int j = 0; j < i; j++) /* other arguments begin elsewhere */
    if (argument[j]->v.data == t->v.data && t->v.count && p->arguments[j].same_as < 0) return a->same_as == j;
  return a->same_as < 0;
}

static ty_tensor *leaf_of(const leaf *l, ty_tensor *const *argument) {
  return l->tensor ? l->tensor : argument[l->argument];
}

bool ty_program_fits(const ty_program *p, ty_tensor *const *argument, int n) {
  if (n != p->narguments || ty_grad_enabled() != p->grad_enabled || ty_autocast_dtype != p->autocast) return false;
  for (int i = 0; i < n; i++)
    if (!fits_argument(p, i, argument)) return false;
  for (int i = 0; i < p->leaves.n; i++) {
    const leaf *l = &p->leaves.v[i];
    if (!l->read) continue;
    const ty_tensor *grad = leaf_of(l, argument)->grad;
    if (!grad != !l->had) return false;
    if (grad && !(l->slot >= 0 ? same_form(&grad->v, &l->view) : grad->v.data == l->view.data)) return false;
  }
  return true;
}

/* ---- memory ---- */

static bool make_arena(ty_program *p) {
  int64_t bytes = (int64_t)p->arena_bytes;
  if (bytes > ty_memory_live(p->device) / 8) ty_memory_empty_cache(p->device); /* it replaces what other calls took */
  p->arena = ty_storage_new(p->device, p->arena_bytes, TY_U8, 1, &bytes);
  if (!p->arena) return false;
  for (int i = 0; i < p->slots.n; i++)
    if (p->slots.v[i].kind == SLOT_TEMPORARY) p->slots.v[i].base = (char *)p->arena->bytes + p->slots.v[i].offset;
  for (int i = 0; i < p->operands.n; i++) {
    operand *o = &p->operands.v[i];
    if (o->slot >= 0 && p->slots.v[o->slot].kind == SLOT_TEMPORARY) o->view.data = p->slots.v[o->slot].base + o->offset;
  }
  return true;
}

/* Elements of v's type in so many bytes. */
static int64_t elements_in(const ty_view *v, int64_t bytes) {
  if (!ty_is_quantized((ty_dtype)v->dtype)) return bytes / ty_dtype_size[v->dtype];
  int64_t columns = v->size[v->ndim - 1];
  return columns ? bytes / ty_row_bytes((ty_dtype)v->dtype, columns) * columns : 0;
}

/* A result's view of what lies at so many bytes from the start of base, whose dtype may be another one. */
static ty_tensor *view_of(ty_tensor *base, const ty_view *v, int64_t bytes) {
  bool same = v->dtype == base->v.dtype;
  ty_tensor *t = ty_tensor_view(base, v->ndim, v->size, v->stride, same ? elements_in(v, bytes) : 0);
  if (!t || same) return t;
  t->v.data = (char *)base->v.data + bytes;
  t->v.dtype = v->dtype;
  return t;
}

static bool make_results(ty_program *p, ty_tensor *const *argument, ty_tensor **made) {
  for (int i = 0; i < p->nresults; i++) {
    const result *r = &p->results[i];
    const ty_view *v = &r->view;
    slot *s = r->slot >= 0 ? &p->slots.v[r->slot] : NULL;
    if (r->fixed) {
      made[i] = ty_retain(r->fixed);
    } else if (s->kind == SLOT_ARGUMENT) {
      made[i] = view_of(argument[s->number], v, r->offset);
    } else if (s->kind == SLOT_GRADIENT) {
      ty_tensor *grad = leaf_of(&p->leaves.v[s->number], argument)->grad;
      made[i] = view_of(grad, v, r->offset);
    } else if (r->whole) {
      made[i] = ty_tensor_new(p->device, (ty_dtype)v->dtype, v->ndim, v->size);
      if (made[i]) s->base = made[i]->v.data;
    } else {
      int64_t columns = ty_is_quantized((ty_dtype)v->dtype) && v->count ? v->size[v->ndim - 1] : 1;
      int64_t size[] = { elements_in(v, (int64_t)s->bytes) / columns, columns };
      ty_tensor *root = r->root < i ? ty_tensor_alias(made[r->root])
                                    : ty_tensor_new(p->device, (ty_dtype)v->dtype, 2, size);
      if (!root) return false;
      s->base = root->storage->bytes;
      root->v.data = s->base;
      made[i] = view_of(root, v, r->offset);
      ty_release(root);
    }
    if (!made[i]) return false;
  }
  return true;
}

static void bind(ty_program *p, ty_tensor *const *argument) {
  for (int i = 0; i < p->slots.n && p->slots.v[i].kind == SLOT_ARGUMENT; i++) { /* they are the first slots */
    slot *s = &p->slots.v[i];
    s->base = argument[s->number]->v.data;
    s->storage = argument[s->number]->storage;
  }
  for (int i = 0; i < p->leaves.n; i++) {
    const leaf *l = &p->leaves.v[i];
    if (l->slot >= 0) p->slots.v[l->slot].base = leaf_of(l, argument)->grad->v.data;
  }
}

void ty_program_patch(ty_program *p) {
  for (int i = 0; i < p->patches.n; i++) {
    operand *o = &p->operands.v[p->patches.v[i].operand];
    o->view.data = p->slots.v[o->slot].base + o->offset;
  }
}

/* ---- running ---- */

static bool run_hook(ty_program *p, const launch *l, ty_program_hook *hook, void *owner) {
  double number[TY_HOOK_NUMBERS];
  int n = 0;
  if (!hook(owner, l->hook, number, &n)) return false;
  if (!n || l->hooked < 0) return true;
  const launch *to = &p->launches.v[l->hooked];
  void *params = ty_launch_params(p, to);
  if (to->params == PARAMS_OPTIM) {
    ty_p_optim *o = params;
    o->lr = number[0];
    if (n > 1) o->step = (int64_t)number[1];
    if (n > 2) o->average_weight = number[2];
  } else if (to->id == TY_OP_fill_) {
    ((ty_p_numbers *)params)->a = ty_number_of(ty_value_of_float(number[0]));
  } else {
    ((ty_p_scalars *)params)->a = number[0];
  }
  return true;
}

/* The storage of a launch's weight (kept.h), if the program leaves it as it is. */
static ty_storage *weights_of(const ty_program *p, const launch *l) {
  int at = l->rests ? p->operands.v[l->first + l->nout + 1].slot : -1;
  const slot *s = at >= 0 ? &p->slots.v[at] : NULL;
  bool known = s && !s->written && (s->kind == SLOT_HELD || s->kind == SLOT_ARGUMENT);
  return known && s->storage->settled ? s->storage : NULL;
}

static bool run_launch(ty_program *p, const launch *l, const ty_generator *random) {
  if (p->device >= TY_CUDA && !ty_device_enter(p->device, ty_ops[l->id].name)) return false;
  const ty_view **view = p->views + l->first;
  void *params = ty_launch_params(p, l);
  ty_kernel_args k = { l->nout, l->nin, view, view + l->nout, params, weights_of(p, l) };
  if (l->params == PARAMS_RANDOM) {
    _Alignas(8) char drawn[UINT8_MAX];
    ty_p_random *first = memcpy(drawn, params, ty_program_params[l->id].size);
    first->seed = random->seed;
    first->offset += random->offset;
    k.params = drawn;
    return ty_profile_kernel(l->id, p->device, l->kernel, &k);
  }
  if (l->clip >= 0) {
    double norm;
    if (!ty_device_copy(TY_CPU, &norm, p->device, view[l->clip - l->first]->data, sizeof norm)) return false;
    ((ty_p_optim *)params)->grad_scale = fmin(1, l->limit / (norm + 1e-6));
  }
  return ty_profile_kernel(l->id, p->device, l->kernel, &k);
}

/* A loop of several ops: to a profile one event, by the name of the first. */
static bool run_fused(ty_program *p, const step *s, const launch *l) {
  int64_t begin = ty_profiling ? ty_profile_now() : 0;
  bool ok = ty_fused_replay(p, s->fused);
  if (ty_profiling) ty_profile_note(l->id, p->device, NULL, begin, true, false);
  return ok;
}

bool ty_program_run(ty_program *p, int begin, int end, ty_program_hook *hook, void *owner) {
  const ty_generator *random = ty_default_generator();
  for (int i = begin; i < end; i++) {
    const step *s = &p->steps.v[i];
    const launch *l = &p->launches.v[p->order.v[s->begin]];
    bool ok = s->fused ? run_fused(p, s, l) : l->hook >= 0 ? run_hook(p, l, hook, owner) : run_launch(p, l, random);
    if (__builtin_expect(ty_interrupted != 0, 0)) return ty_fail(TY_EINTR, "compile: interrupted");
    if (!ok) return s->fused || l->hook >= 0 ? false : ty_op_fail_(&ty_ops[l->id], ty_error_code(), "%s", ty_error());
  }
  return true;
}

/* On a GPU the first replay runs as it is: what is set up at first use is there when the second is captured. */
static bool run(ty_program *p, ty_program_hook *hook, void *owner) {
  if (p->device >= TY_CUDA && p->replays++ == 1) p->graphs = ty_graphs_new(p);
  if (p->graphs) return ty_graphs_replay(p, p->graphs, hook, owner);
  ty_program_patch(p);
  return ty_program_run(p, 0, p->steps.n, hook, owner);
}

/* Replays share the arena and the graphs: one on another stream than the last begins when that is done. */
static bool follow(ty_program *p) {
  if (p->device < TY_CUDA) return true;
  int stream = ty_stream_current(p->device), last = p->replays ? p->stream : stream;
  p->stream = stream;
  p->wandered |= stream != last;
  return ty_stream_wait(p->device, stream, p->device, last);
}

static void renew_versions(const ty_program *p, ty_tensor *const *argument) {
  for (int i = 0; i < p->written.n; i++) {
    const slot *s = &p->slots.v[p->written.v[i]];
    ty_storage *storage = s->kind == SLOT_ARGUMENT   ? argument[s->number]->storage
                          : s->kind == SLOT_GRADIENT ? leaf_of(&p->leaves.v[s->number], argument)->grad->storage
                                                     : s->storage;
    ty_storage_wrote(storage);
  }
}

static void leave_gradients(ty_program *p, ty_tensor *const *argument) {
  for (int i = 0; i < p->leaves.n; i++) {
    const leaf *l = &p->leaves.v[i];
    ty_tensor *t = leaf_of(l, argument);
    if (l->kept || t->grad == l->after) continue;
    ty_release(t->grad);
    t->grad = ty_retain(l->after);
  }
}

bool ty_program_replay(ty_program *p, ty_tensor *const *argument, ty_tensor **made, ty_program_hook *hook,
                       void *owner) {
  for (int i = 0; i < p->nresults; i++) made[i] = NULL;
  bool ok = follow(p) && (p->arena || !p->arena_bytes || make_arena(p)) && make_results(p, argument, made);
  if (ok) {
    bind(p, argument);
    ok = run(p, hook, owner);
    renew_versions(p, argument);
    ty_default_generator()->offset += p->drawn;
  }
  if (ok) leave_gradients(p, argument);
  for (int i = 0; i < p->nresults && !ok; i++) {
    ty_release(made[i]);
    made[i] = NULL;
  }
  return ok;
}

void ty_program_free(ty_program *p) {
  if (!p) return;
  if (p->wandered)
    ty_stream_settle(p->device, p->stream); /* its memory goes back to streams that know nothing of this one */
  for (int i = 0; i < p->slots.n; i++)
    if (p->slots.v[i].owned) ty_storage_release(p->slots.v[i].storage);
  for (int i = 0; i < p->leaves.n; i++) {
    ty_release(p->leaves.v[i].tensor);
    ty_release(p->leaves.v[i].after);
  }
  for (int i = 0; i < p->nresults; i++) ty_release(p->results[i].fixed);
  for (int i = 0; i < p->steps.n; i++) ty_fused_free(p->steps.v[i].fused);
  ty_graphs_free(p, p->graphs);
  if (p->arena) ty_storage_release(p->arena);
  free(p->slots.v), free(p->operands.v), free(p->launches.v), free(p->params.v), free(p->leaves.v);
  free(p->order.v), free(p->steps.v), free(p->patches.v), free(p->written.v);
  free(p->arguments), free(p->results), free(p->views);
  free(p);
}
