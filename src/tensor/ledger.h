/* What one thread has of memory: the bytes of storages and scratch memory that it has taken and not given back, on every
 * device together. Ranks that are threads of one process have a limit each. Nothing is counted before a program has ranks:
 * this is on the path of every op. */
#ifndef TY_LEDGER_H
#define TY_LEDGER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ty_ledger {
  int64_t live, peak, limit; /* limit 0: none */
} ty_ledger;
extern _Thread_local ty_ledger ty_thread_ledger;
extern atomic_bool ty_ledgers; /* they are kept, from now on */

bool ty_ledger_enter(size_t bytes); /* false after ty_fail() when the thread's limit forbids it */

static inline bool ty_ledger_kept(void) {
  return __builtin_expect(atomic_load_explicit(&ty_ledgers, memory_order_relaxed), 0);
}

/* False after ty_fail() when the thread's limit forbids it. */
static inline bool ty_ledger_take(size_t bytes) { return !ty_ledger_kept() || ty_ledger_enter(bytes); }
/* Takes them whatever the limit says. */
static inline void ty_ledger_lend(size_t bytes) {
  if (ty_ledger_kept()) ty_thread_ledger.live += (int64_t)bytes;
}
static inline void ty_ledger_give(size_t bytes) {
  if (ty_ledger_kept()) ty_thread_ledger.live -= (int64_t)bytes;
}

#endif
