/* Recording: listening to launches, storages and gradients. */
#include <stdlib.h>
#include <string.h>

#include "../device/device.h"
#include "../ops/autocast.h"
#include "internal.h"

_Thread_local struct ty_recorder *ty_recording;
atomic_int ty_recordings;

typedef struct extent { /* memory that is alive now, and whose it is */
  char *lo, *hi;
  int slot;
} extent;

typedef struct ty_recorder {
  ty_program *program;
  ty_tensor *const *argument;
  LIST(extent) live; /* by address, without overlaps */
  int hook;          /* a hook that waits for the launch it gives numbers to, or -1 */
  bool fills;        /* that launch fills a tensor; else it is an optimizer's */
  bool failed;
  ty_code code;
  char problem[512];
} ty_recorder;

bool ty_program_room(void *any, size_t size, int more) {
  LIST(char) *list = any;
  if (list->n + more <= list->room) return true;
  int room = list->n + more > 2 * list->room ? list->n + more + 16 : 2 * list->room;
  void *v = realloc(list->v, size * (size_t)room);
  if (!v) return ty_fail(TY_ENOMEM, "compile: out of memory for a recording");
  list->v = v;
  list->room = room;
  return true;
}

/* Whatever the function does with the error, the recording is lost. */
static bool lost(ty_recorder *r) {
  if (!r->failed) {
    r->failed = true;
    r->code = ty_error_code();
    strncpy(r->problem, ty_error(), sizeof r->problem - 1);
  }
  return false;
}

#define LOST(r, code, ...) (ty_fail(code, __VA_ARGS__), lost(r))

/* ---- memory ---- */

/* Position of the first extent that ends after p. */
static int position(const ty_recorder *r, const char *p) {
  int lo = 0, hi = r->live.n;
  while (lo < hi) {
    int middle = (lo + hi) / 2;
    if (r->live.v[middle].hi <= p) lo = middle + 1;
    else hi = middle;
  }
  return lo;
}

static void remove_at(ty_recorder *r, int at) {
  memmove(r->live.v + at, r->live.v + at + 1, sizeof *r->live.v * (size_t)(r->live.n - at - 1));
  r->live.n--;
}

/* A new slot for [lo, hi); what overlaps it was freed on another thread, unseen. -1 after ty_fail(). */
static int add_slot(ty_recorder *r, slot s, char *lo, char *hi) {
  ty_program *p = r->program;
  if (!ROOM(p->slots, 1) || !ROOM(r->live, 1)) return lost(r), -1;
  int at = position(r, lo);
  while (at < r->live.n && r->live.v[at].lo < hi) {
    p->slots.v[r->live.v[at].slot].gone = true;
    remove_at(r, at);
  }
  memmove(r->live.v + at + 1, r->live.v + at, sizeof *r->live.v * (size_t)(r->live.n - at));
  r->live.n++;
  r->live.v[at] = (extent){ lo, hi, p->slots.n };
  s.base = lo;
  s.bytes = (size_t)(hi - lo);
  p->slots.v[p->slots.n] = s;
  return p->slots.n++;
}

void ty_recorded_new(ty_storage *s) {
  if (!s->bytes || !s->nbytes) return;
  add_slot(ty_recording, (slot){ .kind = SLOT_TEMPORARY, .made = true, .storage = s }, s->bytes,
           (char *)s->bytes + s->nbytes);
}

void ty_recorded_free(ty_storage *s) {
  ty_recorder *r = ty_recording;
  int at = s->bytes ? position(r, s->bytes) : r->live.n;
  if (at == r->live.n || r->live.v[at].lo > (char *)s->bytes) return;
  slot *found = &r->program->slots.v[r->live.v[at].slot];
  if (found->storage != s) return;
  found->gone = true;
  remove_at(r, at);
}

static void span(const ty_view *v, char **lo, char **hi) {
  int64_t last = 0;
  if (ty_is_quantized((ty_dtype)v->dtype)) {
    *lo = v->data;
    *hi = *lo + ty_view_bytes(v);
    return;
  }
  for (int d = 0; d < v->ndim; d++) last += (v->size[d] - 1) * v->stride[d];
  *lo = v->data;
  *hi = *lo + (last + 1) * ty_dtype_size[v->dtype];
}

/* The argument whose memory [lo, hi) lies in, -1: none; -2 after ty_fail() when only a part of it does. */
static int argument_at(ty_recorder *r, const char *lo, const char *hi) {
  ty_program *p = r->program;
  for (int i = 0; i < p->narguments; i++) {
    char *from, *to;
    if (p->arguments[i].view.count == 0) continue;
    span(&p->arguments[i].view, &from, &to);
    if (lo >= to || hi <= from) continue;
    if (lo >= from && hi <= to) return i;
    LOST(r, TY_EINVAL,
         "compile: the function reads memory that argument %d shares, beyond the argument; pass a clone of it", i + 1);
    return -2;
  }
  return -1;
}

/* The slot of [lo, hi), or -1: unknown memory; -2 after ty_fail(). */
static int slot_at(ty_recorder *r, const char *lo, const char *hi) {
  int i = argument_at(r, lo, hi);
  if (i == -2) return -2;
  if (i >= 0) {
    while (r->program->arguments[i].same_as >= 0) i = r->program->arguments[i].same_as;
    for (int s = 0; s < r->program->slots.n; s++)
      if (r->program->slots.v[s].kind == SLOT_ARGUMENT && r->program->slots.v[s].number == i) return s;
  }
  int at = position(r, lo);
  if (at == r->live.n || r->live.v[at].lo > lo || r->live.v[at].hi < hi) return -1;
  return r->live.v[at].slot;
}

/* Memory that was there before the recording. */
static bool note(ty_recorder *r, ty_tensor *t) {
  ty_storage *s = t->storage;
  if (!t->v.count || !s->nbytes || s->device == TY_META) return true;
  char *lo, *hi;
  span(&t->v, &lo, &hi);
  int at = slot_at(r, lo, hi);
  if (at == -2) return false;
  if (at >= 0) return true;
  if (add_slot(r, (slot){ .kind = SLOT_HELD, .storage = s, .owned = true }, s->bytes, (char *)s->bytes + s->nbytes) < 0)
    return false;
  ty_storage_retain(s);
  return true;
}

bool ty_recorded_inputs(const ty_op *op, const ty_value *arg) {
  ty_recorder *r = ty_recording;
  for (int i = 0; i < op->nargs; i++) {
    if (arg[i].kind == TY_TENSOR && !note(r, arg[i].t)) return false;
    for (int j = 0; arg[i].kind == TY_TENSORS && j < arg[i].ts.n; j++)
      if (!note(r, arg[i].ts.v[j])) return false;
  }
  return true;
}

/* ---- the host ---- */

static int slot_of(ty_recorder *r, const ty_tensor *t) {
  char *lo, *hi;
  if (!t->v.count || !t->v.data) return -1;
  span(&t->v, &lo, &hi);
  return slot_at(r, lo, hi);
}

void ty_recorded_host_write(const ty_tensor *t) {
  int i = slot_of(ty_recording, t);
  if (i >= 0) ty_recording->program->slots.v[i].host = true;
}

bool ty_recorded_host_read(const ty_tensor *t, const char *who) {
  ty_recorder *r = ty_recording;
  if (!note(r, (ty_tensor *)(uintptr_t)t)) return false;
  int i = slot_of(r, t);
  if (i < 0) return i == -1;
  slot *s = &r->program->slots.v[i];
  if (s->kind == SLOT_ARGUMENT)
    return LOST(
        r, TY_EINVAL,
        "%s: inside ty.compile the elements of argument %d cannot be looked at: replays get others; compute with "
        "tensors (ty.where), or pass the number as an argument",
        who, s->number + 1);
  if (s->written || s->kind == SLOT_GRADIENT || (s->made && !s->host))
    return LOST(r, TY_EINVAL,
                "%s: inside ty.compile the elements of %s cannot be looked at: replays compute them anew; return the "
                "tensor and look at it outside",
                who, ty_describe(t));
  s->seen = true;
  return true;
}

bool ty_recorded_constant(const ty_tensor *t, double *number) {
  const ty_program *p = ty_recording->program;
  int at = slot_of(ty_recording, t);
  for (int i = p->launches.n - 1; i >= 0 && at >= 0; i--) { /* the last one that wrote it */
    const launch *l = &p->launches.v[i];
    if (l->hook < 0 && i > 0 && p->launches.v[i - 1].hooked == i && l->id == TY_OP_fill_ &&
        p->operands.v[l->first].slot == at)
      return false; /* a number that a hook gives anew */
    int written = l->writes_inputs ? l->nin : l->nout;
    for (int j = 0; j < written && l->hook < 0; j++) {
      const operand *o = &p->operands.v[l->first + j];
      if (o->slot != at) continue;
      if (l->id != TY_OP_fill_ || o->view.count != t->v.count) return false;
      *number = ((const ty_p_numbers *)ty_launch_params(p, l))->a.f;
      return true;
    }
  }
  return false;
}

bool ty_recorded_seed(const ty_generator *back_to) {
  ty_recorder *r = ty_recording;
  const ty_generator *start = &r->program->random;
  if (back_to && back_to->seed == start->seed && back_to->offset >= start->offset) return true;
  return LOST(r, TY_EINVAL, "manual_seed: inside ty.compile the generator cannot be set; seed it outside");
}

/* ---- gradients on leaves ---- */

void ty_recorded_grad(ty_tensor *t, bool read) {
  ty_recorder *r = ty_recording;
  ty_program *p = r->program;
  if (t->node) return;
  for (int i = 0; i < p->leaves.n; i++) {
    const leaf *l = &p->leaves.v[i];
    if (l->tensor == t || (!l->tensor && r->argument[l->argument] == t)) return;
  }
  if (!ROOM(p->leaves, 1)) {
    lost(r);
    return;
  }
  leaf l = { .read = read, .had = t->grad != NULL, .slot = -1, .argument = -1 };
  for (int i = 0; i < p->narguments; i++)
    if (r->argument[i] == t) l.argument = i;
  if (l.argument < 0) l.tensor = ty_retain(t);
  if (t->grad) l.view = t->grad->v;
  if (read && t->grad && t->grad->v.count) {
    char *lo, *hi;
    span(&l.view, &lo, &hi);
    if (slot_at(r, lo, hi) == -1)
      l.slot = add_slot(r, (slot){ .kind = SLOT_GRADIENT, .number = p->leaves.n, .storage = t->grad->storage }, lo, hi);
  }
  p->leaves.v[p->leaves.n++] = l;
}

/* ---- launches ---- */

static bool add_operand(ty_recorder *r, const ty_view *v, bool written) {
  ty_program *p = r->program;
  operand *o = &p->operands.v[p->operands.n++];
  *o = (operand){ .slot = -1, .absent = v == NULL };
  if (!v) return true;
  o->view = *v;
  if (v->count == 0) {
    o->view.data = NULL;
    return true;
  }
  char *lo, *hi;
  span(v, &lo, &hi);
  int i = slot_at(r, lo, hi);
  if (i == -2) return false;
  if (i == -1) {
    if (written || hi - lo > (ptrdiff_t)sizeof o->number)
      return LOST(r, TY_EUNSUPPORTED, "compile: a launch uses memory of no tensor");
    memcpy(&o->number, lo, (size_t)(hi - lo));
    o->is_number = true;
    return true;
  }
  slot *s = &p->slots.v[i];
  o->slot = i;
  o->offset = lo - s->base;
  if (s->made && !s->written && !written) s->host = true;
  if (s->seen && written)
    return LOST(r, TY_EINVAL,
                "compile: a tensor at whose elements the function looked (:item, :tolist, printing) is changed by it");
  if (s->host && written)
    return LOST(r, TY_EUNSUPPORTED,
                "compile: a tensor that was filled from Lua inside the function is changed in place; clone it first");
  if (s->host && !s->owned) { /* its contents are needed whatever becomes of the tensor */
    ty_storage_retain(s->storage);
    s->owned = true;
  }
  s->written |= written;
  return true;
}

bool ty_recorded_launch(ty_op_id id, int device, ty_kernel *kernel, const ty_kernel_args *k) {
  ty_recorder *r = ty_recording;
  ty_program *p = r->program;
  if (p->device == TY_DEVICE_DEFAULT) p->device = device;
  if (device != p->device)
    return LOST(r, TY_EUNSUPPORTED,
                "compile: a function works on one device, this one on %s and %s; move tensors outside of it",
                ty_device_name(p->device), ty_device_name(device));
  size_t size = k->params ? ty_program_params[id].size : 0, rounded = (size + 7) / 8 * 8;
  if (k->params && !size)
    return LOST(r, TY_EUNSUPPORTED, "compile: %s cannot be recorded: the form of its parameters is unknown (params.c)",
                ty_ops[id].name);
  if (!ROOM(p->launches, 1) || !ROOM(p->operands, k->nout + k->nin) || !ROOM(p->params, (int)rounded)) return lost(r);
  launch l = { .id = id,
               .kernel = kernel,
               .nout = k->nout,
               .nin = k->nin,
               .first = p->operands.n,
               .writes_inputs = !k->nout && (ty_ops[id].flags & WRITES),
               .rests = k->weights != NULL,
               .params = k->params ? ty_program_params[id].kind : PARAMS_NONE,
               .params_at = (size_t)p->params.n,
               .hook = -1,
               .hooked = -1,
               .clip = -1 };
  if (size) memcpy(p->params.v + p->params.n, k->params, size);
  p->params.n += (int)rounded;
  /* Inputs first: an output may be the first to write a storage that an input reads. */
  p->operands.n += k->nout;
  for (int i = 0; i < k->nin; i++)
    if (!add_operand(r, k->in[i], l.writes_inputs)) return false;
  p->operands.n = l.first;
  for (int i = 0; i < k->nout; i++)
    if (!add_operand(r, k->out[i], true)) return false;
  p->operands.n = l.first + k->nout + k->nin;
  ty_p_random *random = ty_launch_params(p, &l);
  if (l.params == PARAMS_DROPOUT) l.params = random->a > 0 ? PARAMS_RANDOM : PARAMS_PLAIN;
  if (l.params == PARAMS_RANDOM) {
    if (random->seed == p->random.seed && random->offset >= p->random.offset) random->offset -= p->random.offset;
    else l.params = PARAMS_PLAIN; /* not from the generator: a place that the caller has fixed */
  }
  if (r->hook >= 0 && (r->fills ? id == TY_OP_fill_ : l.params == PARAMS_OPTIM || id == TY_OP_lerp_list_)) {
    p->launches.v[r->hook].hooked = p->launches.n;
    r->hook = -1;
  }
  p->launches.v[p->launches.n++] = l;
  return true;
}

int ty_program_add_hook(void) {
  ty_recorder *r = ty_recording;
  ty_program *p = r->program;
  if (!ROOM(p->launches, 1)) return lost(r), -1;
  r->hook = p->launches.n;
  r->fills = false;
  p->launches.v[p->launches.n++] = (launch){ .hook = p->hooks, .hooked = -1, .clip = -1, .first = p->operands.n };
  return p->hooks++;
}

bool ty_program_number(ty_tensor *t, double number) {
  if (ty_program_add_hook() < 0) return false;
  ty_recording->fills = true;
  return ty_fill_(t, number) != NULL;
}

void *ty_program_pause(void) {
  void *paused = ty_recording;
  ty_recording = NULL;
  return paused;
}

void ty_program_resume(void *paused) { ty_recording = paused; }

bool ty_program_clip(const ty_tensor *norm, double limit) {
  ty_recorder *r = ty_recording;
  ty_program *p = r->program;
  launch *l = p->launches.n ? &p->launches.v[p->launches.n - 1] : NULL;
  if (!l || l->params != PARAMS_OPTIM || ty_dtype_of(norm) != TY_F64 || norm->v.count != 1)
    return LOST(r, TY_EINVAL, "compile: there is no optimizer step to clip for");
  if (!ROOM(p->operands, 1)) return lost(r);
  int at = p->operands.n;
  if (!add_operand(r, &norm->v, false)) return false;
  l = &p->launches.v[p->launches.n - 1];
  l->clip = at;
  l->limit = limit;
  return true;
}

/* ---- begin and end ---- */

static bool add_arguments(ty_recorder *r) {
  ty_program *p = r->program;
  int n = p->narguments;
  p->arguments = calloc((size_t)n + 1, sizeof *p->arguments);
  if (!p->arguments) return ty_fail(TY_ENOMEM, "compile: out of memory for a recording");
  p->narguments = 0;
  for (int i = 0; i < n; i++) {
    ty_tensor *t = r->argument[i];
    ty_argument *a = &p->arguments[i];
    *a = (ty_argument){ .view = t->v, .same_as = -1, .wants_grad = t->requires_grad, .device = ty_device_of(t) };
    char *lo, *hi, *from, *to;
    if (t->v.count) span(&t->v, &lo, &hi);
    for (int j = 0; j < i && t->v.count && a->same_as < 0; j++) {
      if (!p->arguments[j].view.count) continue;
      span(&p->arguments[j].view, &from, &to);
      if (lo >= to || hi <= from) continue;
      if (lo != from || hi != to)
        return ty_fail(TY_EINVAL, "compile: arguments %d and %d overlap in memory; pass a clone of one", j + 1, i + 1);
      a->same_as = j;
    }
    if (t->v.count && a->same_as < 0 &&
        add_slot(r, (slot){ .kind = SLOT_ARGUMENT, .number = i, .storage = NULL }, lo, hi) < 0)
      return false;
    p->narguments = i + 1;
  }
  return true;
}

static void stop(ty_recorder *r) {
  ty_recording = NULL;
  atomic_fetch_sub(&ty_recordings, 1);
  free(r->live.v);
  free(r);
}

ty_program *ty_program_record(ty_tensor *const *argument, int narguments) {
  ty_program *p = calloc(1, sizeof *p);
  ty_recorder *r = calloc(1, sizeof *r);
  if (!p || !r) {
    free(p);
    free(r);
    ty_fail(TY_ENOMEM, "compile: out of memory for a recording");
    return NULL;
  }
  r->program = p;
  r->argument = argument;
  r->hook = -1;
  p->narguments = narguments;
  p->device = TY_DEVICE_DEFAULT;
  p->random = *ty_default_generator();
  p->grad_enabled = ty_grad_enabled();
  p->autocast = ty_autocast_dtype;
  ty_autocast_forget(); /* casts of weights belong into the recording */
  if (!add_arguments(r)) {
    ty_program_free(p);
    free(r->live.v);
    free(r);
    return NULL;
  }
  ty_recording = r;
  atomic_fetch_add(&ty_recordings, 1);
  return p;
}

void ty_program_abandon(ty_program *p) {
  ty_autocast_forget();
  stop(ty_recording);
  ty_program_free(p);
}

/* What is on the leaves now is what replays leave there. Leaves that were made inside and that nobody holds any more
 * are forgotten, and their gradients are temporaries. */
static void note_gradients(ty_recorder *r) {
  ty_program *p = r->program;
  int n = 0;
  for (int i = 0; i < p->leaves.n; i++) {
    if (p->leaves.v[i].tensor && p->leaves.v[i].tensor->refs == 1) {
      if (p->leaves.v[i].slot >= 0) p->slots.v[p->leaves.v[i].slot].kind = SLOT_HELD;
      ty_release(p->leaves.v[i].tensor);
      continue;
    }
    leaf *l = &p->leaves.v[n++];
    *l = p->leaves.v[i];
    if (l->slot >= 0) p->slots.v[l->slot].number = n - 1;
    ty_tensor *t = l->tensor ? l->tensor : r->argument[l->argument];
    l->kept = l->slot >= 0 && t->grad && t->grad->v.data == l->view.data && !p->slots.v[l->slot].gone;
    if (!l->kept) l->after = ty_retain(t->grad);
  }
  p->leaves.n = n;
}

static bool note_results(ty_recorder *r, ty_tensor *const *tensor, int n) {
  ty_program *p = r->program;
  p->results = calloc((size_t)n + 1, sizeof *p->results);
  if (!p->results) return ty_fail(TY_ENOMEM, "compile: out of memory for a recording");
  p->nresults = n;
  for (int i = 0; i < n; i++) {
    result *to = &p->results[i];
    to->view = tensor[i]->v;
    to->slot = slot_of(r, tensor[i]);
    if (to->slot == -2) return false;
    if (to->slot >= 0) to->offset = (char *)tensor[i]->v.data - p->slots.v[to->slot].base;
  }
  return true;
}

/* Who holds what was made: only the results, or somebody else too. */
static void settle(ty_recorder *r, ty_tensor *const *tensor) {
  ty_program *p = r->program;
  for (int i = 0; i < p->slots.n; i++) {
    slot *s = &p->slots.v[i];
    if (s->kind != SLOT_TEMPORARY && s->kind != SLOT_HELD) continue;
    if (s->owned && !s->made && atomic_load(&s->storage->refs) == 1) { /* only we hold it: it is gone */
      ty_storage_release(s->storage);
      s->owned = false;
      s->storage = NULL;
      continue;
    }
    if (s->owned) s->kind = SLOT_HELD;
    if (s->owned || s->gone) continue;
    unsigned returned = 0;
    for (int j = 0; j < p->nresults; j++) returned += p->results[j].slot == i;
    if (s->made && !s->host && returned && atomic_load(&s->storage->refs) == returned) {
      s->kind = SLOT_RESULT;
      continue;
    }
    s->kind = SLOT_HELD;
    ty_storage_retain(s->storage);
    s->owned = true;
  }
  for (int j = 0; j < p->nresults; j++) {
    result *to = &p->results[j];
    if (to->slot < 0 || p->slots.v[to->slot].kind == SLOT_HELD) to->fixed = ty_retain(tensor[j]);
  }
}

bool ty_program_finish(ty_program *p, ty_tensor *const *tensor, int n) {
  ty_recorder *r = ty_recording;
  ty_autocast_forget();
  p->drawn = ty_default_generator()->offset - p->random.offset;
  bool ok = true;
  if (r->failed) ok = ty_fail(r->code, "%s", r->problem);
  ok = ok && note_results(r, tensor, n);
  if (ok) {
    note_gradients(r);
    settle(r, tensor);
  }
  stop(r);
  if (p->device == TY_DEVICE_DEFAULT) p->device = TY_CPU; /* nothing is computed */
  ok = ok && ty_program_plan(p);
  if (!ok) ty_program_free(p);
  return ok;
}
