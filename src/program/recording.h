/* What the core tells a recording that runs on this thread: see program.h. Every hook is a test of one variable
 * while there is none. */
#ifndef TY_RECORDING_H
#define TY_RECORDING_H

#include "../tensor/tensor.h"

struct ty_recorder;
extern _Thread_local struct ty_recorder *ty_recording; /* NULL: nothing is being recorded */
extern atomic_int ty_recordings; /* of all threads: cheaper to look at than a thread's own variable */
static inline bool ty_is_recording(void) {
  return __builtin_expect(atomic_load_explicit(&ty_recordings, memory_order_relaxed) != 0, 0) && ty_recording != NULL;
}

/* All below: only while ty_is_recording(). */

void ty_recorded_new(ty_storage *s);             /* it was made */
void ty_recorded_free(ty_storage *s);            /* its memory is about to go */
void ty_recorded_host_write(const ty_tensor *t); /* t, just made, was filled by the host: a constant of the program */
/* May the host look at t's elements? Not at what replays will compute or get anew: false after ty_fail(). */
bool ty_recorded_host_read(const ty_tensor *t, const char *who);
/* Is t filled with a number that is the same in every replay? */
bool ty_recorded_constant(const ty_tensor *t, double *number);
/* .grad of a leaf is about to be read (or added to), or to be set whatever it was. */
void ty_recorded_grad(ty_tensor *leaf, bool read);
/* The generator is about to be seeded (NULL) or to be set back: false after ty_fail() where replays could not follow. */
struct ty_generator;
bool ty_recorded_seed(const struct ty_generator *back_to);

#endif
