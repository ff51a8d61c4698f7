/* Traces: see trace.h. */
#include "trace.h"

#include <stdlib.h>
#include <string.h>

_Thread_local ty_trace *ty_tracing;

bool ty_trace_start(void) {
  if (ty_tracing) return ty_fail(TY_EINVAL, "trace: this thread is being traced already");
  ty_tracing = calloc(1, sizeof *ty_tracing);
  return ty_tracing || ty_fail(TY_ENOMEM, "trace: out of memory");
}

ty_trace *ty_trace_stop(void) {
  ty_trace *t = ty_tracing;
  ty_tracing = NULL;
  return t;
}

static void free_event(ty_trace_event *e) {
  const ty_op *op = &ty_ops[e->id];
  for (int i = 0; i < op->nargs; i++) {
    ty_value *v = &e->arg[i];
    if (v->kind == TY_TENSOR) ty_release(v->t);
    if (v->kind == TY_STRING) free((void *)(uintptr_t)v->s);
    if (v->kind == TY_INTS) free((void *)(uintptr_t)v->is.v);
    if (v->kind != TY_TENSORS) continue;
    for (int j = 0; j < v->ts.n; j++) ty_release(v->ts.v[j]);
    free((void *)(uintptr_t)v->ts.v);
  }
  for (int i = 0; i < op->nout; i++) ty_release(e->out[i]);
  free(e);
}

void ty_trace_free(ty_trace *t) {
  for (int64_t i = 0; t && i < t->count; i++) free_event(t->event[i]);
  if (t) free(t->event);
  free(t);
}

/* A copy that outlives the call. */
static bool keep(ty_value *to, const ty_value *from) {
  *to = *from;
  if (from->kind == TY_TENSOR) {
    ty_retain(from->t);
  } else if (from->kind == TY_STRING) {
    to->s = from->s ? strdup(from->s) : NULL;
    if (from->s && !to->s) to->kind = TY_NONE;
  } else if (from->kind == TY_INTS) {
    int64_t *v = malloc(sizeof *v * (size_t)(from->is.n + 1));
    if (v && from->is.n) memcpy(v, from->is.v, sizeof *v * (size_t)from->is.n);
    to->is.v = v;
    if (!v) to->kind = TY_NONE;
  } else if (from->kind == TY_TENSORS) {
    ty_tensor **v = malloc(sizeof *v * (size_t)(from->ts.n + 1));
    for (int i = 0; v && i < from->ts.n; i++) v[i] = ty_retain(from->ts.v[i]);
    to->ts.v = v;
    if (!v) to->kind = TY_NONE;
  }
  return to->kind == from->kind;
}

int64_t ty_trace_begin(const ty_op *op, const ty_value *arg, bool inplace) {
  ty_trace *t = ty_tracing;
  if (t->count == t->room) {
    int64_t room = t->room * 2 + 256;
    ty_trace_event **more = realloc(t->event, sizeof *more * (size_t)room);
    if (!more) return ty_fail(TY_ENOMEM, "trace: out of memory"), -1;
    t->event = more, t->room = room;
  }
  ty_trace_event *e = calloc(1, sizeof *e);
  if (!e) return ty_fail(TY_ENOMEM, "trace: out of memory"), -1;
  *e = (ty_trace_event){ .id = (ty_op_id)op->id, .depth = t->depth, .inplace = inplace };
  for (int i = 0; i < op->nargs; i++) {
    if (keep(&e->arg[i], &arg[i])) continue;
    free_event(e);
    return ty_fail(TY_ENOMEM, "trace: out of memory"), -1;
  }
  t->event[t->count] = e;
  t->depth++;
  return t->count++;
}

void ty_trace_end(int64_t event, bool ok, ty_tensor *const *out) {
  ty_trace *t = ty_tracing;
  if (!t) return;
  t->depth--;
  ty_trace_event *e = t->event[event];
  for (int i = 0; ok && i < ty_ops[e->id].nout; i++) e->out[i] = ty_retain(out[i]);
}
