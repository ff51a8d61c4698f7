/* Programs: the kernel launches of one call of a function, recorded and replayed without the work around them.
 *
 * A recorder listens on its thread: ty_run_kernel() tells it every launch, the allocator every storage that comes and
 * goes, the engine every gradient that it puts on a leaf. From this a program knows for each storage it meets a *slot*:
 *
 *   TEMPORARY   made and freed during the recording: gets a place in the program's arena
 *   RESULT      made during the recording and returned: fresh memory at each replay
 *   HELD        was there before, or outlives the recording elsewhere (gradients on leaves): the program holds it and
 *               replays read and write it where it is
 *   ARGUMENT    the memory of an argument: bound anew at each replay
 *   GRADIENT    the .grad that a leaf had at the beginning: bound anew as well
 *   INNER       a temporary that lives only inside one fused step: no memory of its own
 *
 * finish() drops launches whose results nobody reads, puts runs of elementwise launches into fused steps (fuse.c) and
 * packs the temporaries into the arena by their lifetimes (plan.c). What depends on the call besides memory is patched:
 * random offsets count from where the generator stands, and a *hook* is a function of the recorder's owner that is called
 * at its place among the launches and may give new numbers to the optimizer step after it. */
#ifndef TY_PROGRAM_H
#define TY_PROGRAM_H

#include "../ops/op.h"
#include "recording.h"

typedef struct ty_program ty_program;

/* One argument tensor: what a call must match to be replayed. */
typedef struct ty_argument {
  ty_view view;
  int same_as; /* an earlier argument that is the same memory, or -1 */
  bool wants_grad;
  int device;
} ty_argument;

/* Called for hook number `hook`; *n numbers for the launch after it: lr, step and average_weight of an optimizer's, the
 * weight of lerp_list_. False after ty_fail(). */
enum { TY_HOOK_NUMBERS = 3 };
typedef bool ty_program_hook(void *owner, int hook, double *number, int *n);

/* ---- recording ---- */

/* Starts to listen; NULL after ty_fail(). Arguments are borrowed until the recording ends. */
ty_program *ty_program_record(ty_tensor *const *argument, int narguments);
/* Ends the recording without a program. */
void ty_program_abandon(ty_program *p);
/* Ends it with these results. The caller has given up every other reference to what the function left behind, so that
 * the storages still alive are those that somebody else holds. False after ty_fail(), and p is gone. */
bool ty_program_finish(ty_program *p, ty_tensor *const *result, int nresults);
/* Before it is finished. early: an optimizer steps on each tensor as soon as its gradient is there. arena: the most bytes
 * of temporaries; finish() fails where they need more. 0: any number. */
void ty_program_options(ty_program *p, bool early, int64_t arena);

/* At the place reached replays call a hook. Returns its number, -1 after ty_fail(). */
int ty_program_add_hook(void);
/* The optimizer launch before takes its gradients times min(1, limit / (norm + 1e-6)), norm a recorded f64 scalar. */
bool ty_program_clip(const ty_tensor *norm, double limit);
/* Fills t with the number; replays fill it with what a hook gives at this place. */
bool ty_program_number(ty_tensor *t, double number);
/* What runs in between is no part of the recording. */
void *ty_program_pause(void);
void ty_program_resume(void *paused);
/* The first launch that does not work element by element, by name; NULL: there is none. */
const char *ty_program_not_elementwise(const ty_program *p);

/* ---- replaying ---- */

bool ty_program_fits(const ty_program *p, ty_tensor *const *argument, int narguments);
/* result: slots for new references. */
bool ty_program_replay(ty_program *p, ty_tensor *const *argument, ty_tensor **result, ty_program_hook *hook,
                       void *owner);
void ty_program_free(ty_program *p);
int ty_program_hooks(const ty_program *p);

typedef struct ty_program_stats {
  int recorded, dropped, steps, fused; /* launches as recorded, found dead; steps that run, of which fused */
  int runs, hastened;                  /* launches of a replay; updates that run earlier than they were recorded */
  int64_t arena, temporaries;          /* bytes; of all temporaries added up */
} ty_program_stats;
ty_program_stats ty_program_stats_of(const ty_program *p);

/* Where temporary `i` lies in the arena, and between which steps it is needed; false: there are no more. */
typedef struct ty_program_place {
  int64_t offset, bytes;
  int first, last;
} ty_program_place;
bool ty_program_place_of(const ty_program *p, int i, ty_program_place *place);

/* Optimizers' steps on these tensors are left out from now on, and what only they needed. False after ty_fail(), when
 * there is no step on one of them; then p can only be freed. */
bool ty_program_restrict(ty_program *p, ty_tensor *const *frozen, int n);
/* What that would make of p, which stays as it is. */
bool ty_program_foresee(ty_program *p, ty_tensor *const *frozen, int n, ty_program_stats *stats);

/* ---- hooks of call.c; see recording.h for the others ---- */

bool ty_recorded_inputs(const ty_op *op, const ty_value *arg);
bool ty_recorded_launch(ty_op_id id, int device, ty_kernel *kernel, const ty_kernel_args *k);

#endif
