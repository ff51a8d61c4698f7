#include "ledger.h"

#include "../ops/op.h"
#include "memory.h"

_Thread_local ty_ledger ty_thread_ledger;

bool ty_ledger_over(size_t bytes) {
  ty_ledger *l = &ty_thread_ledger;
  if (ty_memory_reclaim && ty_memory_reclaim(ty_memory_reclaim_context) && l->live + (int64_t)bytes <= l->limit)
    return true;
  return ty_fail(TY_ENOMEM, "out of memory: %zu bytes more are beyond the %lld that this rank may have; it has %lld",
                 bytes, (long long)l->limit, (long long)l->live);
}
