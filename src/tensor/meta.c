/* The caching allocator's rules without memory: blocks are numbers in free lists by size class. A thread has its own
 * books, so that what another does is not counted here. */
#include "meta.h"

#include <string.h>

#include "classes.h"

static _Thread_local struct {
  int64_t live, cached, peak;
  uint64_t allocations;
  uint32_t free[TY_CLASSES];
} meta;

_Thread_local bool ty_meta_counts;

int64_t ty_meta_live(void) { return meta.live; }

static void count(int64_t bytes) {
  meta.live += bytes;
  if (meta.live > meta.peak) meta.peak = meta.live;
}

/* A cached block of the class or a few more, else a new one. */
static size_t block(int class, size_t rounded) {
  for (int c = class; c <= class + TY_LARGER && c < TY_CLASSES; c++) {
    if (!meta.free[c]) continue;
    meta.free[c]--;
    meta.cached -= (int64_t)ty_class_bytes(c);
    return ty_class_bytes(c);
  }
  return rounded;
}

static void give_block(size_t bytes) {
  size_t rounded;
  int class = ty_size_class(bytes, &rounded);
  meta.live -= (int64_t)bytes;
  if (class >= TY_CLASSES) return;
  meta.free[class]++;
  meta.cached += (int64_t)bytes;
}

size_t ty_meta_take(size_t bytes) {
  size_t taken = ty_small_bytes(bytes);
  if (bytes > TY_SMALL) {
    int class = ty_size_class(bytes, &taken);
    if (class < TY_CLASSES) taken = block(class, taken);
  }
  meta.allocations++;
  count((int64_t)taken);
  return taken;
}

void ty_meta_give(size_t bytes, size_t taken) {
  if (bytes > TY_SMALL) give_block(taken);
  else meta.live -= (int64_t)taken;
}

ty_memory_stats ty_meta_stats(void) {
  return (
      ty_memory_stats){ .live = meta.live, .cached = meta.cached, .peak = meta.peak, .allocations = meta.allocations };
}

void ty_meta_reset_peak(void) { meta.peak = meta.live; }

void ty_meta_empty_cache(void) {
  memset(meta.free, 0, sizeof meta.free);
  meta.cached = 0;
}
