#include "ledger.h"

#include "../ops/op.h"
#include "memory.h"

_Thread_local ty_ledger ty_thread_ledger;
atomic_bool ty_ledgers;

bool ty_ledger_enter(size_t bytes) {
  ty_ledger *l = &ty_thread_ledger;
  for (int round = 0; l->limit && l->live + (int64_t)bytes > l->limit; round++) {
    if (!round && ty_memory_reclaim && ty_memory_reclaim(ty_memory_reclaim_context)) continue;
    return ty_fail(TY_ENOMEM, "out of memory: %zu bytes more are beyond the %lld that this rank may have; it has %lld",
                   bytes, (long long)l->limit, (long long)l->live);
  }
  l->live += (int64_t)bytes;
  if (l->live > l->peak) l->peak = l->live;
  return true;
}
