/* The caching allocator's rules without memory: free lists by size class of blocks that are not there. A thread has its
 * own books, so that what another does is not counted here. */
#include "meta.h"

#include <stdlib.h>

#include "cache.h"

static _Thread_local struct {
  int64_t live, cached, peak, most_live, beyond;
  uint64_t allocations;
  ty_cached *free[TY_CLASSES];
  ty_cache cache;
} meta;

_Thread_local bool ty_meta_counts;

int64_t ty_meta_live(void) { return meta.live; }

static void count(int64_t bytes) {
  meta.live += bytes;
  if (meta.live > meta.peak) meta.peak = meta.live;
  if (meta.live > meta.most_live) meta.most_live = meta.live;
}

static void take_cached(ty_cached *node) {
  meta.cached -= (int64_t)ty_class_bytes(node->class);
  ty_cached_remove(node);
  free(node);
}

static void make_room(int class, int64_t bytes) {
  int64_t live = meta.live + bytes,
          most = ty_cache_most(&meta.cache, class, live > meta.most_live ? live : meta.most_live);
  while (meta.cached && live + meta.beyond + meta.cached > most) take_cached(ty_cached_gone(&meta.cache));
}

/* A cached block of the class or a few more, else a new one. */
static size_t block(int class, size_t rounded) {
  for (int c = class; c <= class + TY_LARGER && c < TY_CLASSES; c++) {
    if (!meta.free[c]) continue;
    take_cached(meta.free[c]);
    return ty_class_bytes(c);
  }
  make_room(class, (int64_t)rounded);
  return rounded;
}

static void give_block(size_t bytes) {
  size_t rounded;
  int class = ty_size_class(bytes, &rounded);
  ty_cached *node = class < TY_CLASSES ? malloc(sizeof *node) : NULL;
  if (!node) return;
  *node = (ty_cached){ .class = class };
  if (!meta.cache.newest.newer) ty_cache_begin(&meta.cache);
  ty_cached_add(&meta.cache, &meta.free[class], node);
  meta.cached += (int64_t)bytes;
}

/* What the allocator counts as live for so many bytes. */
static size_t counted(size_t bytes, int *class) {
  size_t rounded = ty_small_bytes(bytes);
  *class = TY_CLASSES;
  if (bytes > TY_SMALL) *class = ty_size_class(bytes, &rounded);
  return rounded;
}

size_t ty_meta_take(size_t bytes) {
  int class;
  size_t live = counted(bytes, &class), taken = class < TY_CLASSES ? block(class, live) : live;
  meta.allocations++;
  meta.beyond += (int64_t)(taken - live);
  count((int64_t)live);
  return taken;
}

void ty_meta_give(size_t bytes, size_t taken) {
  int class;
  size_t live = counted(bytes, &class);
  meta.beyond -= (int64_t)(taken - live);
  count(-(int64_t)live);
  if (bytes > TY_SMALL) give_block(taken);
}

ty_memory_stats ty_meta_stats(void) {
  return (
      ty_memory_stats){ .live = meta.live, .cached = meta.cached, .peak = meta.peak, .allocations = meta.allocations };
}

void ty_meta_reset_peak(void) { meta.peak = meta.live; }

void ty_meta_empty_cache(void) {
  while (meta.cached) take_cached(ty_cached_oldest(&meta.cache));
  meta.most_live = meta.live;
  ty_cache_begin(&meta.cache);
}
