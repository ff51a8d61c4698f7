/* Sizes that the caching allocator gives out: what memory.c does, and what meta.c says it would do. */
#ifndef TY_CLASSES_H
#define TY_CLASSES_H

#include <stddef.h>
#include <stdint.h>

enum {
  TY_SMALL = 4096, /* on the CPU up to this many bytes lie in one small block with their header */
  TY_LEAST = 512,
  TY_STEPS = 8, /* classes per power of two */
  TY_CLASSES = 40 * TY_STEPS,
  /* A cached block may be so many classes larger than what is asked for. On the CPU, where cached blocks are given back
   * for others when they take too much, more: most of what is so large is scratch memory of a size of its own. */
  TY_LARGER = 8,
  TY_LARGER_ON_GPU = 3,
  TY_CACHE_SLACK = 64 << 20, /* on the CPU cached blocks may always take so much beside what is live, */
  TY_MISSED = 2              /* and where they come again up to this part of it */
};

static inline size_t ty_small_bytes(size_t bytes) { return (bytes + 63) / 64 * 64; }

static inline int ty_size_class(size_t bytes, size_t *rounded) {
  if (bytes < TY_LEAST) bytes = TY_LEAST; /* a GPU gives no less */
  int log = 63 - __builtin_clzll(bytes);
  size_t base = (size_t)1 << log, step = base / TY_STEPS;
  size_t k = (bytes - base + step - 1) / step;
  *rounded = base + k * step;
  return log * TY_STEPS + (int)k;
}

static inline size_t ty_class_bytes(int class) {
  size_t base = (size_t)1 << (class / TY_STEPS);
  return base + base / TY_STEPS * (size_t)(class % TY_STEPS);
}

#endif
