/* Small blocks: tensors, graph nodes, small storages. Free lists per thread by multiples of 64 bytes; a thread that ends
 * leaves its lists to the others. */
#include <pthread.h>
#include <stdlib.h>

#include "memory.h"

/* Up to the storages of 4 KiB that memory.c keeps with their header. */
enum { UNIT = 64, CLASSES = 65, CHUNK = 64 * 1024 };

static _Thread_local int64_t fail_at, allocations;
static _Thread_local bool fail_repeat;

void ty_memory_fail_at(int64_t nth, bool repeat) {
  fail_at = nth;
  fail_repeat = repeat;
  allocations = 0;
}

int64_t ty_memory_allocation_count(void) { return allocations; }

bool ty_memory_injected(void) {
  allocations++;
  if (__builtin_expect(fail_at == 0, 1)) return false;
  return allocations == fail_at || (fail_repeat && allocations > fail_at);
}

/* ---- the end of a thread ---- */

static pthread_key_t exit_key;
static pthread_once_t exit_once = PTHREAD_ONCE_INIT;
static _Thread_local bool exit_armed;
static void give_to_orphans(void);

static void thread_exit(void *unused) {
  ty_scope_thread_exit();
  ty_memory_thread_exit();
  give_to_orphans();
  exit_armed = false;
}

static void make_exit_key(void) { pthread_key_create(&exit_key, thread_exit); }

void ty_memory_arm_thread_exit(void) {
  if (exit_armed) return;
  pthread_once(&exit_once, make_exit_key);
  pthread_setspecific(exit_key, &exit_armed); /* any non-NULL value arms the destructor */
  exit_armed = true;
}

/* ---- blocks ---- */

#if defined(__SANITIZE_ADDRESS__)

/* The sanitizer wants to see every block by itself. */
void *ty_small_alloc(size_t bytes) {
  ty_memory_arm_thread_exit();
  void *p = ty_memory_injected() ? NULL : aligned_alloc(UNIT, (bytes + UNIT - 1) / UNIT * UNIT);
  if (!p) ty_fail(TY_ENOMEM, "out of memory: %zu bytes for internal bookkeeping", bytes);
  return p;
}

void ty_small_free(void *p, size_t bytes) { free(p); }

static void give_to_orphans(void) {}

#else

typedef struct block {
  struct block *next;
} block;

static _Thread_local block *lists[CLASSES + 1];
static block *orphans[CLASSES + 1];
static pthread_mutex_t orphans_lock = PTHREAD_MUTEX_INITIALIZER;

static void give_to_orphans(void) {
  pthread_mutex_lock(&orphans_lock);
  for (int c = 1; c <= CLASSES; c++) {
    while (lists[c]) {
      block *b = lists[c];
      lists[c] = b->next;
      b->next = orphans[c];
      orphans[c] = b;
    }
  }
  pthread_mutex_unlock(&orphans_lock);
}

static void *refill(size_t c) {
  ty_memory_arm_thread_exit();
  pthread_mutex_lock(&orphans_lock);
  block *b = orphans[c];
  orphans[c] = NULL;
  pthread_mutex_unlock(&orphans_lock);
  if (b) {
    lists[c] = b->next;
    return b;
  }
  char *chunk = aligned_alloc(UNIT, CHUNK);
  if (!chunk) return NULL;
  size_t size = c * UNIT, n = CHUNK / size;
  for (size_t i = 1; i < n; i++) {
    b = (block *)(chunk + i * size);
    b->next = lists[c];
    lists[c] = b;
  }
  return chunk;
}

void *ty_small_alloc(size_t bytes) {
  void *p = NULL;
  if (!ty_memory_injected()) {
    size_t c = (bytes + UNIT - 1) / UNIT;
    if (__builtin_expect(c > CLASSES, 0)) {
      p = aligned_alloc(UNIT, c * UNIT);
    } else if (lists[c]) {
      p = lists[c];
      lists[c] = lists[c]->next;
    } else {
      p = refill(c);
    }
  }
  if (__builtin_expect(!p, 0)) ty_fail(TY_ENOMEM, "out of memory: %zu bytes for internal bookkeeping", bytes);
  return p;
}

void ty_small_free(void *p, size_t bytes) {
  if (!p) return;
  size_t c = (bytes + UNIT - 1) / UNIT;
  if (c > CLASSES) {
    free(p);
    return;
  }
  block *b = p;
  b->next = lists[c];
  lists[c] = b;
}

#endif
