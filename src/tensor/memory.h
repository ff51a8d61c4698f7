/* The caching allocator of each device and its counters; pooled small blocks for tensors and graph nodes. */
#ifndef TY_MEMORY_H
#define TY_MEMORY_H

#include "kept.h"
#include "tensor.h"

typedef struct ty_memory_stats {
  int64_t live, cached, peak, budget;
  uint64_t allocations;
  int64_t kept;   /* of what kernels made of weights: kernels/kept.h; on the CPU only */
  int64_t beyond; /* what blocks of live tensors have more than these: the budget counts it */
} ty_memory_stats;

/* Storage of `nbytes`; `ndim`, `size` and `dtype` are only for the out-of-memory report. Count is 1. */
ty_storage *ty_storage_new(int device, size_t nbytes, ty_dtype dtype, int ndim, const int64_t *size);
void ty_storage_free(ty_storage *s);
static inline void ty_storage_retain(ty_storage *s) { atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed); }
static inline void ty_storage_release(ty_storage *s) {
  if (atomic_load_explicit(&s->refs, memory_order_acquire) == 1 ||
      atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) == 1)
    ty_storage_free(s);
}

/* Memory from the system, 64-byte aligned and on huge pages where these pay; for free(). Nothing counts it. */
void *ty_system_alloc(size_t bytes);
void *ty_system_alloc_for(size_t bytes, size_t used); /* the same, where so many of them are wanted at first */
void ty_system_free(void *block, size_t bytes);       /* the same, and its pages with it, of a block so large */
int64_t ty_system_memory(void);                       /* of the machine, or what this process may take of it */

/* After every write: a new version, and nothing made of the former is kept. Ops call it; a program that writes through
 * v.data of a tensor which ops have used calls it itself. */
static inline void ty_storage_wrote(ty_storage *s) {
  s->version++;
  if (__builtin_expect(s->kept != NULL, 0)) ty_kept_drop(s);
}

/* The storage is used by what a stream has been given, or will be until the storage is freed: its memory goes to nobody
 * else before that is done. A GPU's storage needs it for streams other than the one that was current when it was made,
 * page-locked memory for all. False after ty_fail(). */
bool ty_storage_used(ty_storage *s, int device, int stream);

/* A pool of a GPU's memory for one user, such as the scratch memory of a graph's kernels, which must be there whenever it
 * runs. While a pool is in use on a thread, its scratch memory of that GPU comes from there. */
typedef struct ty_pool ty_pool;
ty_pool *ty_pool_new(int device); /* NULL without memory */
void ty_pool_use(ty_pool *p);     /* NULL: no longer */
void ty_pool_free(ty_pool *p);

/* Small blocks (structs), pooled per thread by size; may be freed on another thread. */
void *ty_small_alloc(size_t bytes);
void ty_small_free(void *p, size_t bytes);

ty_memory_stats ty_memory_stats_of(int device);
void ty_memory_reset_peak(int device);
void ty_memory_set_budget(int device, int64_t bytes); /* 0: the default */
void ty_memory_empty_cache(int device);
int64_t ty_memory_live(int device);
int64_t ty_memory_live_everywhere(void); /* cheap; for the collector's poll */

/* Called before an allocation that does not fit is given up; returns true when it may have released something. */
extern _Thread_local bool (*ty_memory_reclaim)(void *context);
extern _Thread_local void *ty_memory_reclaim_context;

/* What a thread holds for itself is given back when it ends; armed by whoever first holds something. */
void ty_memory_arm_thread_exit(void);
void ty_memory_thread_exit(void);
void ty_scope_thread_exit(void);

/* Whether this allocation was chosen to fail by ty_memory_fail_at(). Storages count through their small block. */
bool ty_memory_injected(void);

/* Tests: the nth allocation from now (storage or small block) on this thread fails; 0 disarms. `repeat`: all after it too. */
void ty_memory_fail_at(int64_t nth, bool repeat);
int64_t ty_memory_allocation_count(void); /* allocations of this thread since fail_at() was called last */

#endif
