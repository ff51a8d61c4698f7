/* What one thread calls, op by op: for writers of models in other formats, which translate ops with their arguments
 * rather than kernels with their views. Calls that ops make themselves are there as well, one deeper than their op, so
 * that a reader who does not know an op can go on with what it is made of. */
#ifndef TY_OPS_TRACE_H
#define TY_OPS_TRACE_H

#include "op.h"

typedef struct ty_trace_event {
  ty_op_id id;
  int depth;                 /* 0: called from outside of all ops */
  bool inplace;              /* its result went into the first argument */
  ty_value arg[TY_MAX_ARGS]; /* copies; tensors are counted */
  ty_tensor *out[TY_MAX_OUTPUTS];
} ty_trace_event;

typedef struct ty_trace {
  ty_trace_event **event; /* in the order in which they began */
  int64_t count, room;
  int depth;
} ty_trace;

/* The trace of this thread; NULL: none. */
extern _Thread_local ty_trace *ty_tracing;

/* Begins one; false after ty_fail(). It keeps every tensor that it sees. */
bool ty_trace_start(void);
/* Ends it; to be freed with ty_trace_free(). NULL where there is none. */
ty_trace *ty_trace_stop(void);
void ty_trace_free(ty_trace *t);

/* Around a call, while ty_tracing: the event that began, or -1 after ty_fail(), and what became of it. */
int64_t ty_trace_begin(const ty_op *op, const ty_value *arg, bool inplace);
void ty_trace_end(int64_t event, bool ok, ty_tensor *const *out);

#endif
