/* The meta device's books: what its tensors would take on the CPU, followed allocation by allocation. */
#ifndef TY_META_H
#define TY_META_H

#include "memory.h"

size_t ty_meta_take(size_t bytes);             /* the bytes that the allocator would give for so many */
void ty_meta_give(size_t bytes, size_t taken); /* and takes back */
/* While this is on, the collector minds the bytes of the meta device as those of others: what it would free is freed. */
extern _Thread_local bool ty_meta_counts;
int64_t ty_meta_live(void);
ty_memory_stats ty_meta_stats(void); /* of this thread */
void ty_meta_reset_peak(void);
void ty_meta_empty_cache(void);

#endif
