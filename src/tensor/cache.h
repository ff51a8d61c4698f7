/* The free blocks of the caching allocator: by size class, the last freed first, and all of them by age. memory.c has
 * blocks in them, meta.c none. */
#ifndef TY_CACHE_H
#define TY_CACHE_H

#include "classes.h"

typedef struct ty_cached {
  struct ty_cached **top, *below, *above; /* of its class */
  struct ty_cached *older, *newer;
  void *block;
  int class, stream;
} ty_cached;

typedef struct ty_cache {
  ty_cached newest;          /* of a ring: its `older` is the newest, its `newer` the oldest */
  int64_t missed;            /* bytes that were given back and wanted again */
  uint32_t gone[TY_CLASSES]; /* blocks that were given back */
} ty_cache;

static inline ty_cached *ty_cached_oldest(ty_cache *c) {
  return c->newest.newer == &c->newest ? NULL : c->newest.newer;
}

/* block, class and stream are set. */
static inline void ty_cached_add(ty_cache *c, ty_cached **top, ty_cached *node) {
  node->top = top;
  node->below = *top;
  node->above = NULL;
  if (*top) (*top)->above = node;
  *top = node;
  node->newer = &c->newest;
  node->older = c->newest.older;
  node->older->newer = c->newest.older = node;
}

static inline void ty_cached_remove(ty_cached *node) {
  if (node->above) node->above->below = node->below;
  else *node->top = node->below;
  if (node->below) node->below->above = node->above;
  node->newer->older = node->older;
  node->older->newer = node->newer;
}

static inline void ty_cache_begin(ty_cache *c) {
  *c = (ty_cache){ .missed = 0 };
  c->newest.older = c->newest.newer = &c->newest;
}

/* The oldest block, for one that is not there. */
static inline ty_cached *ty_cached_gone(ty_cache *c) {
  ty_cached *node = ty_cached_oldest(c);
  if (node) c->gone[node->class]++;
  return node;
}

/* Bytes that the allocator may hold for a new block of the class, where so many were live at once. Beyond that, blocks
 * whose sizes do not come again are as good as lost. Sizes that recur, as in the steps of training, need all their
 * blocks, which may be more than what is live at once: what was given back and is wanted again is held from then on. */
static inline int64_t ty_cache_most(ty_cache *c, int class, int64_t live) {
  int64_t slack = live / 16 > TY_CACHE_SLACK ? live / 16 : TY_CACHE_SLACK;
  for (int larger = class; larger <= class + TY_LARGER && larger < TY_CLASSES; larger++) {
    if (!c->gone[larger]) continue;
    c->gone[larger]--;
    if (c->missed < live / TY_MISSED) c->missed += (int64_t)ty_class_bytes(larger);
    break;
  }
  return live + slack + c->missed;
}

#endif
