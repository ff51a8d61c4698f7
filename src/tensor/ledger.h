/* What one thread has of memory: the bytes of storages and scratch memory that it has taken and not given back, on every
 * device together. Ranks that are threads of one process have a limit each. */
#ifndef TY_LEDGER_H
#define TY_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ty_ledger {
  int64_t live, peak, limit; /* limit 0: none */
} ty_ledger;
extern _Thread_local ty_ledger ty_thread_ledger;

bool ty_ledger_over(size_t bytes); /* asks for memory back; false after ty_fail() when there is still not enough */

/* False after ty_fail() when the thread's limit forbids it. */
static inline bool ty_ledger_take(size_t bytes) {
  ty_ledger *l = &ty_thread_ledger;
  if (__builtin_expect(l->limit && l->live + (int64_t)bytes > l->limit, 0) && !ty_ledger_over(bytes)) return false;
  l->live += (int64_t)bytes;
  if (l->live > l->peak) l->peak = l->live;
  return true;
}
/* Takes them whatever the limit says. */
static inline void ty_ledger_lend(size_t bytes) { ty_thread_ledger.live += (int64_t)bytes; }
static inline void ty_ledger_give(size_t bytes) { ty_thread_ledger.live -= (int64_t)bytes; }

#endif
