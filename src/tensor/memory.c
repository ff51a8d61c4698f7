/* The caching allocator for storages, one pool for each device. Small ones on the CPU live in one small block with their
 * header. The others come from free lists by size class (eight per power of two, so at most an eighth is wasted) behind
 * a lock; what is freed stays cached until the budget or the user wants it back. */
#include "memory.h"

#include "../device/device.h"
#include "../program/recording.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SMALL = 4096, LEAST = 512, STEPS = 8, CLASSES = 40 * STEPS, HUGE = 2 << 20, REPORTED = 8 };

struct ty_live { /* a large live storage, for the out-of-memory report */
  struct ty_live *next, *prev;
  size_t nbytes;
  int dtype, ndim;
  int64_t size[TY_MAX_DIMS];
};

typedef struct cached { /* a free block; on the CPU it lies in the block itself */
  struct cached *next;
  void *block;
} cached;

typedef struct ty_pool {
  int device;
  struct ty_pool *parent; /* where one user's pool gets its blocks */
  pthread_mutex_t lock;
  cached *lists[CLASSES];
  ty_live live_list; /* sentinel of a ring */
  int64_t live, cached, peak, budget;
  uint64_t allocations;
  bool exact; /* blocks are as large as asked for, and never kept */
} pool;

static _Thread_local pool *in_use; /* for scratch memory of its GPU */

#define POOL(p, number)                                                 \
  {                                                                     \
    .device = number, .lock = PTHREAD_MUTEX_INITIALIZER, .live_list = { \
      .next = &(p).live_list,                                           \
      .prev = &(p).live_list                                            \
    }                                                                   \
  }
static pool cpu = POOL(cpu, TY_CPU);
static pool gpus[TY_MAX_GPUS];
static pthread_once_t gpus_once = PTHREAD_ONCE_INIT;

static void make_gpu_pools(void) {
  for (int i = 0; i < TY_MAX_GPUS; i++) {
    gpus[i] = (pool)POOL(gpus[i], TY_CUDA + i);
    gpus[i].exact = !ty_device_caches(TY_CUDA + i);
  }
}

/* NULL for the meta device. */
static pool *pool_of(int device) {
  if (device == TY_CPU) return &cpu;
  if (device < TY_CUDA) return NULL;
  pthread_once(&gpus_once, make_gpu_pools);
  return &gpus[device - TY_CUDA];
}

/* Bytes of small storages of this thread not yet added to cpu.live: they come and go too often for a shared counter. */
static _Thread_local int64_t pending, pending_allocations;
static _Thread_local int64_t meta_live;
static int64_t gpu_live; /* of all GPUs together */
enum { PENDING_MOST = 64 * 1024 };

_Thread_local bool (*ty_memory_reclaim)(void *context);
_Thread_local void *ty_memory_reclaim_context;

static int64_t default_budget(const pool *p) {
  if (p->device != TY_CPU) return ty_device_memory(p->device) / 20 * 19;
  int64_t bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  FILE *f = fopen("/sys/fs/cgroup/memory.max", "r");
  long long limit;
  if (f) {
    if (fscanf(f, "%lld", &limit) == 1 && limit < bytes) bytes = limit;
    fclose(f);
  }
  return bytes / 10 * 9;
}

static int64_t budget_of(pool *p) {
  if (!p->budget) p->budget = default_budget(p);
  return p->budget;
}

static int size_class(size_t bytes, size_t *rounded) {
  if (bytes < LEAST) bytes = LEAST; /* a GPU gives no less */
  int log = 63 - __builtin_clzll(bytes);
  size_t base = (size_t)1 << log, step = base / STEPS;
  size_t k = (bytes - base + step - 1) / step;
  *rounded = base + k * step;
  return log * STEPS + (int)k;
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
}

static void count_live(pool *p, int64_t bytes) {
  p->live += bytes;
  if (p->live > p->peak) p->peak = p->live;
  if (p->device >= TY_CUDA && !p->parent) __atomic_fetch_add(&gpu_live, bytes, __ATOMIC_RELAXED);
}

static void *scratch_of(pool *p, size_t bytes);
static void free_scratch(pool *p, void *block, size_t bytes);

static void *take_from_system(const pool *p, size_t bytes) {
  if (p->parent) return scratch_of(p->parent, bytes);
  if (p->device != TY_CPU) return ty_device_alloc(p->device, bytes);
  if (bytes < 2 * HUGE) return aligned_alloc(64, (bytes + 63) / 64 * 64);
  /* Huge pages: page faults on fresh activations cost more than many kernels. */
  void *block = aligned_alloc(HUGE, (bytes + HUGE - 1) / HUGE * HUGE);
  if (block) madvise(block, bytes, MADV_HUGEPAGE);
  return block;
}

static void give_to_system(const pool *p, void *block, size_t capacity) {
  if (p->parent) free_scratch(p->parent, block, capacity);
  else if (p->device == TY_CPU) free(block);
  else ty_device_free(p->device, block);
}

static cached *new_node(const pool *p, void *block) {
  cached *node = p->device == TY_CPU ? block : malloc(sizeof *node);
  if (node) node->block = block;
  return node;
}

static size_t capacity_of(int class) {
  size_t base = (size_t)1 << (class / STEPS);
  return base + base / STEPS * (size_t)(class % STEPS);
}

/* The first block of a list that has one. */
static void *pop(pool *p, int class) {
  cached *node = p->lists[class];
  void *block = node->block;
  p->lists[class] = node->next;
  if (p->device != TY_CPU) free(node);
  return block;
}

static void empty_cache_locked(pool *p) {
  for (int c = 0; c < CLASSES; c++)
    while (p->lists[c]) give_to_system(p, pop(p, c), capacity_of(c));
  p->cached = 0;
}

/* The class of a block, and how large it becomes. */
static int class_of(const pool *p, size_t bytes, size_t *rounded) {
  int class = size_class(bytes, rounded);
  if (p->exact) *rounded = bytes ? bytes : 1;
  return class;
}

/* A block of the class (or up to three classes more, if one lies cached); NULL when the budget forbids it. */
static void *take(pool *p, int class, size_t bytes, size_t *capacity) {
  pthread_mutex_lock(&p->lock);
  flush_pending(p);
  void *block = NULL;
  for (int c = class; c <= class + 3 && c < CLASSES && !block; c++) {
    if (!p->lists[c]) continue;
    block = pop(p, c);
    *capacity = capacity_of(c);
    p->cached -= (int64_t)*capacity;
  }
  if (!block) {
    *capacity = bytes;
    if (p->live + p->cached + (int64_t)bytes > budget_of(p)) empty_cache_locked(p);
    if (p->live + (int64_t)bytes <= p->budget) block = take_from_system(p, bytes);
    if (!block && p->cached) { /* somebody else has the device's memory */
      empty_cache_locked(p);
      block = take_from_system(p, bytes);
    }
  }
  if (block) {
    count_live(p, (int64_t)*capacity);
    p->allocations++;
  }
  pthread_mutex_unlock(&p->lock);
  return block;
}

static void give_back(pool *p, void *block, size_t capacity) {
  size_t rounded;
  int class = size_class(capacity, &rounded);
  pthread_mutex_lock(&p->lock);
  cached *node = p->exact ? NULL : new_node(p, block);
  count_live(p, -(int64_t)capacity);
  if (node) {
    node->next = p->lists[class];
    p->lists[class] = node;
    p->cached += (int64_t)capacity;
  } else {
    give_to_system(p, block, capacity);
  }
  pthread_mutex_unlock(&p->lock);
}

static const char *bytes_text(char *buffer, size_t n, double bytes) {
  const char *units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
  int u = 0;
  while (bytes >= 1024 && u < 6) bytes /= 1024, u++;
  snprintf(buffer, n, u ? "%.1f %s" : "%.0f %s", bytes, units[u]);
  return buffer;
}

static bool fail_out_of_memory(pool *p, size_t bytes, ty_dtype dtype, int ndim, const int64_t *size) {
  char text[1500], a[32], b[32], c[32], d[32];
  const ty_live *largest[REPORTED] = { NULL };
  pthread_mutex_lock(&p->lock);
  int count = 0;
  for (const ty_live *l = p->live_list.next; l != &p->live_list; l = l->next, count++) {
    for (int i = 0; i < REPORTED; i++) {
      if (!largest[i] || l->nbytes > largest[i]->nbytes) {
        memmove(largest + i + 1, largest + i, sizeof *largest * (size_t)(REPORTED - 1 - i));
        largest[i] = l;
        break;
      }
    }
  }
  int n = snprintf(text, sizeof text, "out of memory on %s: wanted %s for %s %s; live %s, cached %s, budget %s",
                   ty_device_name(p->device), bytes_text(a, sizeof a, (double)bytes), ty_shape_text(ndim, size),
                   ty_dtype_name[dtype], bytes_text(b, sizeof b, (double)p->live),
                   bytes_text(c, sizeof c, (double)p->cached), bytes_text(d, sizeof d, (double)budget_of(p)));
  if (count) n += snprintf(text + n, sizeof text - (size_t)n, "\nlargest of %d live tensors:", count);
  for (int i = 0; i < REPORTED && largest[i]; i++)
    n += snprintf(text + n, sizeof text - (size_t)n, "\n  %10s  %s %s",
                  bytes_text(a, sizeof a, (double)largest[i]->nbytes),
                  ty_shape_text(largest[i]->ndim, largest[i]->size), ty_dtype_name[largest[i]->dtype]);
  pthread_mutex_unlock(&p->lock);
  return ty_fail(TY_ENOMEM, "%s", text);
}

/* The same, after asking for memory back when there is none. */
static void *take_or_reclaim(pool *p, int class, size_t bytes, size_t *capacity) {
  if (class >= CLASSES) return NULL;
  void *block = take(p, class, bytes, capacity);
  if (block || !ty_memory_reclaim || !ty_memory_reclaim(ty_memory_reclaim_context)) return block;
  ty_memory_empty_cache(p->device);
  return take(p, class, bytes, capacity);
}

static ty_storage *new_large(pool *p, size_t nbytes, ty_dtype dtype, int ndim, const int64_t *size) {
  ty_storage *s = ty_small_alloc(sizeof *s);
  if (!s) return NULL;
  ty_live *l = ty_small_alloc(sizeof *l);
  if (!l) {
    ty_small_free(s, sizeof *s);
    return NULL;
  }
  size_t rounded, capacity;
  int class = class_of(p, nbytes, &rounded);
  void *block = take_or_reclaim(p, class, rounded, &capacity);
  if (!block) {
    ty_small_free(s, sizeof *s);
    ty_small_free(l, sizeof *l);
    fail_out_of_memory(p, nbytes, dtype, ndim, size);
    return NULL;
  }
  *l = (ty_live){ .nbytes = nbytes, .dtype = dtype, .ndim = ndim };
  if (ndim) memcpy(l->size, size, sizeof *size * (size_t)ndim);
  pthread_mutex_lock(&p->lock);
  l->next = p->live_list.next;
  l->prev = &p->live_list;
  l->next->prev = l->prev->next = l;
  pthread_mutex_unlock(&p->lock);
  *s = (ty_storage){
    .refs = 1, .device = p->device, .bytes = block, .nbytes = nbytes, .capacity = capacity, .live = l
  };
  return s;
}

static ty_storage *storage_new(int device, size_t nbytes, ty_dtype dtype, int ndim, const int64_t *size) {
  if (device == TY_CPU ? nbytes > SMALL : device != TY_META && nbytes > 0)
    return new_large(pool_of(device), nbytes, dtype, ndim, size);
  size_t inside = device == TY_CPU ? (nbytes + 63) / 64 * 64 : 0;
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
    meta_live += (int64_t)nbytes;
  }
  return s;
}

ty_storage *ty_storage_new(int device, size_t nbytes, ty_dtype dtype, int ndim, const int64_t *size) {
  ty_storage *s = storage_new(device, nbytes, dtype, ndim, size);
  if (ty_is_recording() && s) ty_recorded_new(s);
  return s;
}

_Static_assert(sizeof(ty_storage) == 64, "the bytes of a small storage follow its header, 64-byte aligned");

void ty_storage_free(ty_storage *s) {
  if (ty_is_recording()) ty_recorded_free(s);
  if (s->release) {
    s->release(s);
    ty_small_free(s, sizeof *s);
  } else if (s->live) {
    pool *p = pool_of(s->device);
    ty_live *l = s->live;
    pthread_mutex_lock(&p->lock);
    l->next->prev = l->prev;
    l->prev->next = l->next;
    pthread_mutex_unlock(&p->lock);
    ty_small_free(l, sizeof *l);
    give_back(p, s->bytes, s->capacity);
    ty_small_free(s, sizeof *s);
  } else {
    if (s->device == TY_META) meta_live -= (int64_t)s->nbytes;
    pending -= (int64_t)s->capacity;
    if (__builtin_expect(pending < -PENDING_MOST, 0)) {
      pthread_mutex_lock(&cpu.lock);
      flush_pending(&cpu);
      pthread_mutex_unlock(&cpu.lock);
    }
    ty_small_free(s, sizeof *s + s->capacity);
  }
}

/* A block that is given back by its asked-for size. */
static void *scratch_of(pool *p, size_t bytes) {
  size_t rounded, capacity;
  int class = class_of(p, bytes, &rounded);
  void *block = ty_memory_injected() ? NULL : take_or_reclaim(p, class, rounded, &capacity);
  if (!block) {
    int64_t size[] = { (int64_t)bytes };
    fail_out_of_memory(p, bytes, TY_U8, 1, size);
    return NULL;
  }
  if (capacity != rounded) { /* take() may hand out a larger cached block, which then counts as what was asked for */
    pthread_mutex_lock(&p->lock);
    count_live(p, (int64_t)rounded - (int64_t)capacity);
    pthread_mutex_unlock(&p->lock);
  }
  return block;
}

static void free_scratch(pool *p, void *block, size_t bytes) {
  if (!block) return;
  size_t rounded;
  class_of(p, bytes, &rounded);
  give_back(p, block, rounded);
}

void *ty_scratch_alloc(size_t bytes) { return scratch_of(&cpu, bytes); }
void ty_scratch_free(void *p, size_t bytes) { free_scratch(&cpu, p, bytes); }
static pool *scratch_pool(int device) { return in_use && in_use->device == device ? in_use : pool_of(device); }
void *ty_gpu_scratch_alloc(int gpu, size_t bytes) { return scratch_of(scratch_pool(TY_CUDA + gpu), bytes); }
void ty_gpu_scratch_free(int gpu, void *p, size_t bytes) { free_scratch(scratch_pool(TY_CUDA + gpu), p, bytes); }

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
  free(p);
}

ty_memory_stats ty_memory_stats_of(int device) {
  pool *p = pool_of(device);
  if (!p) return (ty_memory_stats){ .live = meta_live };
  pthread_mutex_lock(&p->lock);
  flush_pending(p);
  ty_memory_stats s = { p->live, p->cached, p->peak, budget_of(p), p->allocations };
  pthread_mutex_unlock(&p->lock);
  return s;
}

void ty_memory_reset_peak(int device) {
  pool *p = pool_of(device);
  if (!p) return;
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
  pthread_mutex_unlock(&p->lock);
}

void ty_memory_empty_cache(int device) {
  pool *p = pool_of(device);
  if (!p) return;
  pthread_mutex_lock(&p->lock);
  empty_cache_locked(p);
  pthread_mutex_unlock(&p->lock);
}

int64_t ty_memory_live(int device) {
  const pool *p = pool_of(device);
  return !p ? 0 : __atomic_load_n(&p->live, __ATOMIC_RELAXED) + (p == &cpu ? pending : 0);
}

int64_t ty_memory_live_everywhere(void) {
  return ty_memory_live(TY_CPU) + __atomic_load_n(&gpu_live, __ATOMIC_RELAXED);
}
