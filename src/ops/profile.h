/* What ty.profile() sees: every kernel that a thread runs, with its time and the work in it, and the part of a model that
 * asked for it. A thread that is not being profiled pays one comparison a kernel. */
#ifndef TY_OPS_PROFILE_H
#define TY_OPS_PROFILE_H

#include "op.h"

enum { TY_PROFILE_SHAPES = 112 }; /* bytes of a kernel's operands as text */

typedef struct ty_profile_event {
  ty_op_id id;
  uint32_t scope;     /* 0: outside of any; else what the caller numbered it */
  bool backward;      /* while gradients are computed: the scope is that of the op whose rule it is */
  bool fused;         /* a loop of several ops of a compiled program, `id` the first */
  int64_t begin, end; /* ns of the monotonic clock */
  int64_t bytes;      /* of all operands, each once: what has to be moved at least */
  double flops;
  char shapes[TY_PROFILE_SHAPES]; /* "f32 [64, 128] [128, 32]" */
  bool bad, given; /* under watch: the first whose output is no number, and whether an input was none already */
} ty_profile_event;

/* What outputs are looked through for, until it is found once. */
typedef enum ty_profile_watch { TY_WATCH_NOTHING, TY_WATCH_NAN, TY_WATCH_NAN_OR_INFINITE } ty_profile_watch;

typedef struct ty_profile {
  ty_profile_event *event;
  int64_t count, room, most; /* at most `most` events are kept ... */
  int64_t lost;              /* ... and these were not */
  uint32_t scope;            /* of what runs now */
  bool backward;
  ty_profile_watch watch;
} ty_profile;

/* The profile of this thread; NULL: none. */
extern _Thread_local ty_profile *ty_profiling;

/* Begins to profile this thread, keeping at most so many events; false after ty_fail() if it is being profiled. */
bool ty_profile_start(int64_t most, ty_profile_watch watch);
/* Ends it and gives what was seen, to be freed with ty_profile_free(); NULL where nothing is being profiled. */
ty_profile *ty_profile_stop(void);
void ty_profile_free(ty_profile *p);

int64_t ty_profile_now(void);
/* Under watch: whether an input of a kernel that is about to run has what is watched for. */
bool ty_profile_given(int device, const ty_kernel_args *k);
/* Adds an event that began at `begin` and ends now; waits for a GPU first. */
void ty_profile_note(ty_op_id id, int device, const ty_kernel_args *k, int64_t begin, bool fused, bool given);

/* Runs a kernel, and notes it where this thread is being profiled. */
static inline bool ty_profile_kernel(ty_op_id id, int device, ty_kernel *kernel, const ty_kernel_args *k) {
  if (__builtin_expect(!ty_profiling, 1)) return kernel(k);
  bool given = ty_profile_given(device, k);
  int64_t begin = ty_profile_now();
  bool ok = kernel(k);
  ty_profile_note(id, device, k, begin, false, given);
  return ok;
}

#endif
