/* Small blocks: tensors, graph nodes, small storages, by multiples of 64 bytes. Each thread has free blocks of its own,
 * in magazines as in Bonwick and Adams 2001, Magazines and Vmem: of each size the one in use and a full one. What is more
 * goes to a depot, from where any thread takes it before the system is asked, a magazine at a time. So memory follows
 * what is live, also when one thread makes what another frees, and when threads come and go. */
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
static void give_to_depot(void);

static void thread_exit(void *unused) {
  ty_scope_thread_exit();
  ty_memory_thread_exit();
  give_to_depot();
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

static void give_to_depot(void) {}

#else

typedef struct block {
  struct block *next;
  size_t depth;                /* how many there are from this one to the end of its magazine */
  struct block *next_magazine; /* of the first block of a magazine in the depot */
} block;

static _Thread_local block *loaded[CLASSES + 1], *full[CLASSES + 1];
static block *depot[CLASSES + 1];
static pthread_mutex_t depot_lock = PTHREAD_MUTEX_INITIALIZER;

/* Whether a magazine of the class has room for one block more: it holds what a chunk from the system is cut into. */
static bool has_room(size_t c, size_t depth) { return (depth + 1) * c <= CHUNK / UNIT; }

static void give_locked(size_t c, block *first) {
  if (!first) return;
  first->next_magazine = depot[c];
  depot[c] = first;
}

static void give_to_depot(void) {
  pthread_mutex_lock(&depot_lock);
  for (size_t c = 1; c <= CLASSES; c++) {
    give_locked(c, loaded[c]);
    give_locked(c, full[c]);
    loaded[c] = full[c] = NULL;
  }
  pthread_mutex_unlock(&depot_lock);
}

static block *take_from_depot(size_t c) {
  pthread_mutex_lock(&depot_lock);
  block *first = depot[c];
  if (first) depot[c] = first->next_magazine;
  pthread_mutex_unlock(&depot_lock);
  return first;
}

static block *put(block *b, block *on) {
  b->next = on;
  b->depth = on ? on->depth + 1 : 1;
  return b;
}

static block *cut_chunk(size_t c) {
  char *chunk = aligned_alloc(UNIT, CHUNK);
  block *first = NULL;
  for (size_t i = CHUNK / (c * UNIT); chunk && i-- > 0;) first = put((block *)(chunk + i * c * UNIT), first);
  return first;
}

/* A block when nothing is loaded: from the full magazine, the depot or a new chunk. */
static void *refill(size_t c) {
  block *first = full[c];
  full[c] = NULL;
  if (!first) {
    ty_memory_arm_thread_exit();
    first = take_from_depot(c);
  }
  if (!first) first = cut_chunk(c);
  loaded[c] = first ? first->next : NULL;
  return first;
}

/* The loaded magazine becomes the full one, which goes to the depot. */
static void unload(size_t c) {
  if (full[c]) {
    pthread_mutex_lock(&depot_lock);
    give_locked(c, full[c]);
    pthread_mutex_unlock(&depot_lock);
  }
  full[c] = loaded[c];
  loaded[c] = NULL;
}

void *ty_small_alloc(size_t bytes) {
  void *p = NULL;
  if (!ty_memory_injected()) {
    size_t c = (bytes + UNIT - 1) / UNIT;
    if (__builtin_expect(c > CLASSES, 0)) {
      p = aligned_alloc(UNIT, c * UNIT);
    } else if (loaded[c]) {
      p = loaded[c];
      loaded[c] = loaded[c]->next;
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
  block *on = loaded[c];
  if (__builtin_expect(!on, 0)) {
    ty_memory_arm_thread_exit();
  } else if (__builtin_expect(!has_room(c, on->depth), 0)) {
    unload(c);
    on = NULL;
  }
  loaded[c] = put(p, on);
}

#endif
