/* Memory from the system, and back to it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory.h"

enum { PAGE = 4096, WHOLE_PAGES = 32 << 10, HUGE = 2 << 20 };

void *ty_system_alloc(size_t bytes) { return ty_system_alloc_for(bytes, bytes); }

void *ty_system_alloc_for(size_t bytes, size_t used) {
  if (bytes < WHOLE_PAGES) return aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (bytes < 2 * HUGE) return aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE); /* disks take it as it is */
  /* Huge pages: page faults on fresh activations cost more than many kernels. Not where the last of them would be in
   * memory for a part of itself: of a model's weights that is 2 %. */
  void *block = aligned_alloc(HUGE, (bytes + HUGE - 1) / HUGE * HUGE);
  if (block) madvise(block, used / HUGE * HUGE, MADV_HUGEPAGE);
  return block;
}

/* The pages go first: free() keeps those of a block that lies between others for a size that may not come. */
void ty_system_free(void *block, size_t bytes) {
  if (bytes >= WHOLE_PAGES) madvise(block, bytes / PAGE * PAGE, MADV_DONTNEED);
  free(block);
}

int64_t ty_system_memory(void) {
  int64_t bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  FILE *f = fopen("/sys/fs/cgroup/memory.max", "r");
  long long limit;
  if (f) {
    if (fscanf(f, "%lld", &limit) == 1 && limit < bytes) bytes = limit;
    fclose(f);
  }
  return bytes;
}
