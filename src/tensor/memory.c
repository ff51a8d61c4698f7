/* The caching allocator for storages: one pool for each device, one for page-locked memory of the host and one for the
 * unified memory of all GPUs. Small ones on the CPU live in one small block with their header. The others come from free
 * lists by size class (eight per power of two, so at most an eighth is wasted) behind a lock; what is freed stays cached
 * until the budget or the user wants it back, or, on the CPU, a block of a size that is not there: the oldest go for it
 * where all blocks would take more than what was live at once, and some.
 *
 * On a GPU a block belongs to the stream that was current when it was made: freed, it can be given out there at once,
 * since what comes next is done after what was, and nowhere else. What other streams use as well (ty_storage_used) waits
 * after that for events in them. */
#include "ledger.h"
#include "memory.h"

#include "../device/device.h"
#include "../device/stream.h"
#include "../program/recording.h"
#include "cache.h"
#include "live.h"
#include "meta.h"

#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SMALL = TY_SMALL, CLASSES = TY_CLASSES };

typedef ty_use use;
typedef ty_cached cached; /* a free block; on the CPU it lies in the block itself */

typedef struct larger { /* a block of scratch memory that is larger than what was asked for */
  struct larger *next;
  void *block;
  size_t capacity;
} larger;

typedef struct waiting { /* a freed block that streams may still use */
  struct waiting *next;
  void *block;
  size_t capacity;
  int stream, n;
  struct {
    int device;
    void *event;
  } use[];
} waiting;

typedef struct ty_pool {
  int device;
  struct ty_pool *parent; /* where one user's pool gets its blocks */
  pthread_mutex_t lock;
  cached *first[CLASSES], **lists[TY_MAX_STREAMS]; /* of each stream, NULL until it has any; of stream 0 `first` */
  ty_cache cache;
  waiting *waiting;
  larger *larger;
  ty_live live_list; /* sentinel of a ring */
  int64_t live, cached, peak, budget;
  int64_t beyond;    /* bytes of blocks that are in use beyond what was asked for, which are live */
  int64_t most_live; /* since the cache was empty */
  uint64_t allocations;
  bool exact; /* blocks are as large as asked for, and never kept */
} pool;

static _Thread_local pool *in_use; /* for scratch memory of its GPU */

#define POOL(p, number)                                                                     \
  {                                                                                         \
    .device = number, .lock = PTHREAD_MUTEX_INITIALIZER, .lists = { (p).first },            \
    .cache = { { .older = &(p).cache.newest, .newer = &(p).cache.newest } }, .live_list = { \
      .next = &(p).live_list,                                                               \
      .prev = &(p).live_list                                                                \
    }                                                                                       \
  }
static pool cpu = POOL(cpu, TY_CPU);
static pool gpus[TY_MAX_GPUS], pinned = POOL(pinned, TY_PINNED), paged = POOL(paged, TY_PAGED);
static pthread_once_t gpus_once = PTHREAD_ONCE_INIT;

static void make_gpu_pools(void) {
  for (int i = 0; i < TY_MAX_GPUS; i++) {
    gpus[i] = (pool)POOL(gpus[i], TY_CUDA + i);
    gpus[i].exact = !ty_device_caches(TY_CUDA + i);
  }
  pinned.exact = !ty_device_caches(TY_CUDA);
  paged.exact = true; /* what lies there stays for long, and a kept block would be some GPU's */
}

/* NULL for the meta device. */
static pool *pool_of(int device) {
  if (device == TY_CPU) return &cpu;
  if (device < TY_CUDA) return NULL;
  pthread_once(&gpus_once, make_gpu_pools);
  return device >= TY_PAGED ? &paged : device == TY_PINNED ? &pinned : &gpus[device - TY_CUDA];
}

/* Bytes of small storages of this thread not yet added to cpu.live: they come and go too often for a shared counter. */
static _Thread_local int64_t pending, pending_allocations;
static int64_t gpu_live; /* of all GPUs together, and what is page-locked */
enum { PENDING_MOST = 64 * 1024 };

_Thread_local bool (*ty_memory_reclaim)(void *context);
_Thread_local void *ty_memory_reclaim_context;

static int64_t default_budget(const pool *p) {
  if (p->device == TY_PINNED) return default_budget(&cpu) / 2;
  if (p->device == TY_PAGED) return default_budget(&cpu); /* where all of it may have to go */
  if (p->device != TY_CPU) return ty_device_memory(p->device) / 20 * 19;
  return ty_system_memory() / 10 * 9;
}

static int64_t budget_of(pool *p) {
  if (!p->budget) p->budget = default_budget(p);
  return p->budget;
}

/* Whoever holds the lock of a pool and wants its counts calls this first; only the CPU's has any pending. */
static void flush_pending(const pool *p) {
  if (p != &cpu) return;
  cpu.live += pending;
  cpu.allocations += (uint64_t)pending_allocations;
  pending = pending_allocations = 0;
  if (cpu.live > cpu.peak) cpu.peak = cpu.live;
}

void ty_memory_thread_exit(void) {
  pthread_mutex_lock(&cpu.lock);
  flush_pending(&cpu);
  pthread_mutex_unlock(&cpu.lock);
  ty_meta_empty_cache();
}

static void count_live(pool *p, int64_t bytes) {
  p->live += bytes;
  if (p->live > p->peak) p->peak = p->live;
  if (p->live > p->most_live) p->most_live = p->live;
  if (p->device >= TY_CUDA && !p->parent) __atomic_fetch_add(&gpu_live, bytes, __ATOMIC_RELAXED);
}

static void *scratch_of(pool *p, size_t bytes);
static void free_scratch(pool *p, void *block, size_t bytes, int stream);

static void *take_from_system(const pool *p, size_t bytes, size_t used) {
  if (p->parent) return scratch_of(p->parent, bytes);
  if (p->device == TY_PINNED) return ty_device_host_alloc(bytes);
  if (p->device == TY_PAGED) return ty_device_paged_alloc(bytes);
  return p->device == TY_CPU ? ty_system_alloc_for(bytes, used) : ty_device_alloc(p->device, bytes);
}

static void give_to_system(const pool *p, void *block, size_t capacity, int stream) {
  if (p->parent) free_scratch(p->parent, block, capacity, stream);
  else if (p->device == TY_CPU) ty_system_free(block, capacity);
  else if (p->device == TY_PINNED) ty_device_host_free(block);
  else if (p->device == TY_PAGED) ty_device_paged_free(block);
  else ty_device_free(p->device, block);
}

static cached *new_node(const pool *p, void *block) {
  cached *node = p->device == TY_CPU ? block : malloc(sizeof *node);
  if (node) node->block = block;
  return node;
}

/* A block leaves the cache. */
static void *take_cached(pool *p, cached *node) {
  void *block = node->block;
  p->cached -= (int64_t)ty_class_bytes(node->class);
  ty_cached_remove(node);
  if (p->device != TY_CPU) free(node);
  return block;
}

static void drop_cached(pool *p, cached *node) {
  int class = node->class, stream = node->stream;
  give_to_system(p, take_cached(p, node), ty_class_bytes(class), stream);
}

/* Into the list of its stream; false when it is not kept. */
static bool keep_locked(pool *p, void *block, size_t capacity, int stream) {
  size_t rounded;
  int class = ty_size_class(capacity, &rounded);
  if (p->exact) return false;
  if (!p->lists[stream] && !(p->lists[stream] = calloc(CLASSES, sizeof **p->lists))) return false;
  cached *node = new_node(p, block);
  if (!node) return false;
  node->class = class;
  node->stream = stream;
  ty_cached_add(&p->cache, &p->lists[stream][class], node);
  return true;
}

/* Blocks that streams are done with, after waiting for them or not, join the cached ones. */
static void collect_locked(pool *p, bool wait) {
  for (waiting **at = &p->waiting, *w = *at; w; w = *at) {
    bool done = true;
    for (int i = 0; i < w->n && done; i++) {
      if (wait) ty_event_synchronize(w->use[i].device, w->use[i].event);
      else done = ty_event_done(w->use[i].device, w->use[i].event);
    }
    if (!done) {
      at = &w->next;
      continue;
    }
    *at = w->next;
    for (int i = 0; i < w->n; i++) ty_event_free(w->use[i].device, w->use[i].event);
    if (!keep_locked(p, w->block, w->capacity, w->stream)) {
      p->cached -= (int64_t)w->capacity;
      give_to_system(p, w->block, w->capacity, w->stream);
    }
    free(w);
  }
}

/* What lies ready in vain when memory is short. */
static int64_t spare(const pool *p) { return p->cached + (p == &cpu ? ty_kept_bytes() : 0); }

static void empty_cache_locked(pool *p) {
  if (p == &cpu) ty_kept_drop_all();
  collect_locked(p, true);
  for (cached *node; (node = ty_cached_oldest(&p->cache));) drop_cached(p, node);
  p->cached = 0;
  p->most_live = p->live;
  ty_cache_begin(&p->cache);
}

/* Before a new block; on a GPU, where giving back waits for all that it has been given to do, the budget alone counts. */
static void make_room_locked(pool *p, int class, int64_t bytes) {
  if (p != &cpu) return;
  int64_t live = p->live + bytes, most = ty_cache_most(&p->cache, class, live > p->most_live ? live : p->most_live);
  for (cached *node; live + p->beyond + p->cached > most && (node = ty_cached_gone(&p->cache));) drop_cached(p, node);
}

/* The class of a block, and how large it becomes. */
static int class_of(const pool *p, size_t bytes, size_t *rounded) {
  int class = ty_size_class(bytes, rounded);
  if (p->exact) *rounded = bytes ? bytes : 1;
  return class;
}

/* The smallest cached block of the class or of a few more, or NULL. On the CPU of its class alone once half of the budget
 * is taken: what larger blocks have beyond would be missing in the end. */
static void *take_ready(pool *p, int class, size_t *capacity, int stream) {
  cached **lists = p->lists[stream];
  int last = class + (p != &cpu ? TY_LARGER_ON_GPU : p->live + p->beyond > budget_of(p) / 2 ? 0 : TY_LARGER);
  for (int c = class; lists && c <= last && c < CLASSES; c++) {
    if (!lists[c]) continue;
    *capacity = ty_class_bytes(c);
    return take_cached(p, lists[c]);
  }
  return NULL;
}

/* A block of the class, whose size is `bytes`, for `used` of them; NULL when the budget forbids it. */
static void *take(pool *p, int class, size_t bytes, size_t used, size_t *capacity, int stream) {
  pthread_mutex_lock(&p->lock);
  flush_pending(p);
  if (p->waiting) collect_locked(p, false);
  void *block = take_ready(p, class, capacity, stream);
  if (!block) {
    *capacity = bytes;
    int64_t wanted = p->live + p->beyond + (int64_t)bytes;
    if (wanted + spare(p) > budget_of(p)) empty_cache_locked(p);
    make_room_locked(p, class, (int64_t)bytes);
    if (wanted <= p->budget) block = take_from_system(p, bytes, used);
    if (!block && spare(p)) { /* somebody else has the device's memory */
      empty_cache_locked(p);
      block = take_from_system(p, bytes, used);
    }
  }
  if (block) {
    count_live(p, (int64_t)bytes);
    p->beyond += (int64_t)(*capacity - bytes);
    p->allocations++;
  }
  pthread_mutex_unlock(&p->lock);
  return block;
}

/* A block of `capacity`, of which so many bytes were live, is so no longer. */
static void count_dead(pool *p, size_t capacity, size_t bytes) {
  count_live(p, -(int64_t)bytes);
  p->beyond -= (int64_t)(capacity - bytes);
}

static void give_back(pool *p, void *block, size_t capacity, size_t bytes, int stream) {
  pthread_mutex_lock(&p->lock);
  count_dead(p, capacity, bytes);
  if (keep_locked(p, block, capacity, stream)) p->cached += (int64_t)capacity;
  else give_to_system(p, block, capacity, stream);
  pthread_mutex_unlock(&p->lock);
}

/* Gives a block back when the streams that use it have done what they have been given until now. */
static void give_back_later(pool *p, void *block, size_t capacity, size_t bytes, int stream, const use *uses) {
  int n = 0;
  for (const use *u = uses; u; u = u->next) n++;
  waiting *w = malloc(sizeof *w + sizeof w->use[0] * (size_t)n);
  if (w) *w = (waiting){ .block = block, .capacity = capacity, .stream = stream };
  for (const use *u = uses; u; u = u->next) {
    void *event = w ? ty_event_new(u->device, false) : NULL;
    if (event && ty_event_record(u->device, event, u->stream)) {
      w->use[w->n].device = u->device;
      w->use[w->n++].event = event;
    } else { /* now, then */
      if (event) ty_event_free(u->device, event);
      ty_stream_synchronize(u->device, u->stream);
    }
  }
  if (!w) {
    give_back(p, block, capacity, bytes, stream);
    return;
  }
  pthread_mutex_lock(&p->lock);
  count_dead(p, capacity, bytes);
  p->cached += (int64_t)capacity;
  w->next = p->waiting;
  p->waiting = w;
  pthread_mutex_unlock(&p->lock);
}

static bool fail_out_of_memory(pool *p, size_t bytes, ty_dtype dtype, int ndim, const int64_t *size) {
  pthread_mutex_lock(&p->lock);
  const ty_shortage s = { p->device, bytes, dtype, ndim, size, p->live, p->beyond, p->cached, budget_of(p) };
  bool failed = ty_fail_out_of_memory(&s, &p->live_list);
  pthread_mutex_unlock(&p->lock);
  return failed;
}

/* The same, after asking for memory back when there is none. */
static void *take_or_reclaim(pool *p, int class, size_t bytes, size_t used, size_t *capacity, int stream) {
  if (class >= CLASSES) return NULL;
  void *block = take(p, class, bytes, used, capacity, stream);
  if (block || !ty_memory_reclaim || !ty_memory_reclaim(ty_memory_reclaim_context)) return block;
  ty_memory_empty_cache(p->device);
  return take(p, class, bytes, used, capacity, stream);
}

static ty_storage *new_large(int device, size_t nbytes, ty_dtype dtype, int ndim, const int64_t *size) {
  pool *p = pool_of(device);
  ty_storage *s = ty_small_alloc(sizeof *s);
  if (!s) return NULL;
  ty_live *l = ty_small_alloc(sizeof *l);
  if (!l) {
    ty_small_free(s, sizeof *s);
    return NULL;
  }
  size_t rounded, capacity;
  int class = class_of(p, nbytes, &rounded), stream = ty_stream_current(p->device);
  void *block = take_or_reclaim(p, class, rounded, nbytes, &capacity, stream);
  if (!block) {
    ty_small_free(s, sizeof *s);
    ty_small_free(l, sizeof *l);
    fail_out_of_memory(p, nbytes, dtype, ndim, size);
    return NULL;
  }
  *l = (ty_live){ .nbytes = nbytes, .dtype = dtype, .ndim = ndim, .stream = stream };
  if (ndim) memcpy(l->size, size, sizeof *size * (size_t)ndim);
  pthread_mutex_lock(&p->lock);
  l->next = p->live_list.next;
  l->prev = &p->live_list;
  l->next->prev = l->prev->next = l;
  pthread_mutex_unlock(&p->lock);
  bool locked = p == &pinned, unified = p == &paged;
  *s = (ty_storage){ .refs = 1,
                     .device = locked    ? TY_CPU
                               : unified ? device - TY_PAGED + TY_CUDA
                                         : device,
                     .pinned = locked,
                     .paged = unified,
                     .settled = p == &cpu,
                     .bytes = block,
                     .nbytes = nbytes,
                     .capacity = capacity,
                     .live = l };
  return s;
}

static ty_storage *storage_new(int device, size_t nbytes, ty_dtype dtype, int ndim, const int64_t *size) {
  if (device == TY_CPU ? nbytes > SMALL : device != TY_META && nbytes > 0)
    return new_large(device, nbytes, dtype, ndim, size);
  if (device == TY_PINNED) device = TY_CPU; /* empty */
  if (device >= TY_PAGED) device = device - TY_PAGED + TY_CUDA;
  size_t inside = device == TY_CPU ? ty_small_bytes(nbytes) : 0;
  ty_storage *s = ty_small_alloc(sizeof *s + inside);
  if (!s) return NULL;
  *s = (ty_storage){ .refs = 1, .device = device, .nbytes = nbytes, .capacity = inside };
  if (inside) {
    s->bytes = (char *)s + sizeof *s;
    pending += (int64_t)inside;
    pending_allocations++;
    if (__builtin_expect(pending > PENDING_MOST, 0)) {
      pthread_mutex_lock(&cpu.lock);
      flush_pending(&cpu);
      pthread_mutex_unlock(&cpu.lock);
    }
  } else if (device == TY_META) {
    s->capacity = ty_meta_take(nbytes);
  }
  return s;
}

ty_storage *ty_storage_new(int device, size_t nbytes, ty_dtype dtype, int ndim, const int64_t *size) {
  if (device != TY_META && !ty_ledger_take(nbytes)) return NULL;
  ty_storage *s = storage_new(device, nbytes, dtype, ndim, size);
  if (!s && device != TY_META) ty_ledger_give(nbytes);
  if (ty_is_recording() && s) ty_recorded_new(s);
  return s;
}

_Static_assert(sizeof(ty_storage) == 64, "the bytes of a small storage follow its header, 64-byte aligned");

/* Whose large storage this is. */
static pool *pool_of_storage(const ty_storage *s) {
  return pool_of(s->pinned ? TY_PINNED : s->paged ? TY_PAGED : s->device);
}

void ty_storage_free(ty_storage *s) {
  if (ty_is_recording()) ty_recorded_free(s);
  if (s->kept) ty_kept_drop(s);
  if (s->device != TY_META && !s->foreign) ty_ledger_give(s->nbytes);
  if (s->foreign) {
    s->foreign->release(s->foreign->owner);
    ty_small_free(s->foreign, sizeof *s->foreign);
    ty_small_free(s, sizeof *s);
  } else if (s->live) {
    pool *p = pool_of_storage(s);
    ty_live *l = s->live;
    pthread_mutex_lock(&p->lock);
    l->next->prev = l->prev;
    l->prev->next = l->next;
    pthread_mutex_unlock(&p->lock);
    size_t bytes;
    class_of(p, s->nbytes, &bytes);
    if (l->uses) give_back_later(p, s->bytes, s->capacity, bytes, l->stream, l->uses);
    else give_back(p, s->bytes, s->capacity, bytes, l->stream);
    for (use *u = l->uses, *next; u; u = next) {
      next = u->next;
      ty_small_free(u, sizeof *u);
    }
    ty_small_free(l, sizeof *l);
    ty_small_free(s, sizeof *s);
  } else if (s->device == TY_META) {
    ty_meta_give(s->nbytes, s->capacity);
    ty_small_free(s, sizeof *s);
  } else {
    pending -= (int64_t)s->capacity;
    if (__builtin_expect(pending < -PENDING_MOST, 0)) {
      pthread_mutex_lock(&cpu.lock);
      flush_pending(&cpu);
      pthread_mutex_unlock(&cpu.lock);
    }
    ty_small_free(s, sizeof *s + s->capacity);
  }
}

bool ty_storage_used(ty_storage *s, int device, int stream) {
  ty_live *l = s->live;
  if (!l || (device == s->device && stream == l->stream)) return true;
  pool *p = pool_of_storage(s);
  pthread_mutex_lock(&p->lock);
  use *known = l->uses, *u = NULL;
  while (known && (known->device != device || known->stream != stream)) known = known->next;
  if (!known && (u = ty_small_alloc(sizeof *u))) {
    *u = (use){ l->uses, device, stream };
    l->uses = u;
  }
  pthread_mutex_unlock(&p->lock);
  return known || u;
}

/* Scratch memory is given back by its asked-for size; so the pool notes which blocks are larger. Without memory for the
 * note, a block is as small as that from then on. */
static void note_larger(pool *p, void *block, size_t capacity, size_t bytes) {
  larger *l = malloc(sizeof *l);
  pthread_mutex_lock(&p->lock);
  if (l) {
    *l = (larger){ p->larger, block, capacity };
    p->larger = l;
  } else {
    p->beyond -= (int64_t)(capacity - bytes);
  }
  pthread_mutex_unlock(&p->lock);
}

static size_t capacity_of_scratch(pool *p, const void *block, size_t bytes) {
  pthread_mutex_lock(&p->lock);
  larger **at = &p->larger;
  while (*at && (*at)->block != block) at = &(*at)->next;
  larger *l = *at;
  if (l) {
    bytes = l->capacity;
    *at = l->next;
  }
  pthread_mutex_unlock(&p->lock);
  free(l);
  return bytes;
}

static void *scratch_of(pool *p, size_t bytes) {
  size_t rounded, capacity;
  int class = class_of(p, bytes, &rounded), stream = ty_stream_current(p->device);
  if (!ty_ledger_take(bytes)) return NULL;
  void *block = ty_memory_injected() ? NULL : take_or_reclaim(p, class, rounded, bytes, &capacity, stream);
  if (!block) {
    ty_ledger_give(bytes);
    int64_t size[] = { (int64_t)bytes };
    fail_out_of_memory(p, bytes, TY_U8, 1, size);
    return NULL;
  }
  if (capacity != rounded) note_larger(p, block, capacity, rounded);
  return block;
}

static void free_scratch(pool *p, void *block, size_t bytes, int stream) {
  if (!block) return;
  ty_ledger_give(bytes);
  size_t rounded;
  class_of(p, bytes, &rounded);
  give_back(p, block, capacity_of_scratch(p, block, rounded), rounded, stream);
}

void *ty_scratch_alloc(size_t bytes) { return scratch_of(&cpu, bytes); }
void ty_scratch_free(void *p, size_t bytes) { free_scratch(&cpu, p, bytes, 0); }
static pool *scratch_pool(int device) { return in_use && in_use->device == device ? in_use : pool_of(device); }
void *ty_gpu_scratch_alloc(int gpu, size_t bytes) { return scratch_of(scratch_pool(TY_CUDA + gpu), bytes); }
void ty_gpu_scratch_free(int gpu, void *p, size_t bytes) {
  free_scratch(scratch_pool(TY_CUDA + gpu), p, bytes, ty_stream_current(TY_CUDA + gpu));
}

ty_pool *ty_pool_new(int device) {
  pool *p = malloc(sizeof *p);
  if (!p) return NULL;
  *p = (pool)POOL(*p, device);
  p->parent = pool_of(device);
  p->budget = INT64_MAX; /* the parent's counts */
  return p;
}

void ty_pool_use(ty_pool *p) { in_use = p; }

void ty_pool_free(ty_pool *p) {
  if (!p) return;
  empty_cache_locked(p);
  for (int s = 1; s < TY_MAX_STREAMS; s++) free(p->lists[s]);
  free(p);
}

ty_memory_stats ty_memory_stats_of(int device) {
  pool *p = pool_of(device);
  if (!p) return ty_meta_stats();
  pthread_mutex_lock(&p->lock);
  flush_pending(p);
  ty_memory_stats s = { p->live,  p->cached, p->peak, budget_of(p), p->allocations, p == &cpu ? ty_kept_bytes() : 0,
                        p->beyond };
  pthread_mutex_unlock(&p->lock);
  return s;
}

void ty_memory_reset_peak(int device) {
  pool *p = pool_of(device);
  if (!p) {
    ty_meta_reset_peak();
    return;
  }
  pthread_mutex_lock(&p->lock);
  flush_pending(p);
  p->peak = p->live;
  pthread_mutex_unlock(&p->lock);
}

void ty_memory_set_budget(int device, int64_t bytes) {
  pool *p = pool_of(device);
  if (!p) return;
  pthread_mutex_lock(&p->lock);
  p->budget = bytes > 0 ? bytes : default_budget(p);
  if (p->live + spare(p) > p->budget) empty_cache_locked(p); /* what is cached is given out without a look at it */
  pthread_mutex_unlock(&p->lock);
}

void ty_memory_empty_cache(int device) {
  pool *p = pool_of(device);
  if (!p) {
    ty_meta_empty_cache();
    return;
  }
  pthread_mutex_lock(&p->lock);
  empty_cache_locked(p);
  pthread_mutex_unlock(&p->lock);
#ifdef __GLIBC__
  if (p == &cpu) malloc_trim(0); /* which else keeps what lies between blocks that live on */
#endif
}

int64_t ty_memory_live(int device) {
  const pool *p = pool_of(device);
  return !p ? 0 : __atomic_load_n(&p->live, __ATOMIC_RELAXED) + (p == &cpu ? pending : 0);
}

int64_t ty_memory_live_everywhere(void) {
  int64_t live = ty_memory_live(TY_CPU) + __atomic_load_n(&gpu_live, __ATOMIC_RELAXED);
  return __builtin_expect(ty_meta_counts, 0) ? live + ty_meta_live() : live;
}
