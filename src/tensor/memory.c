/* The caching allocator for storages. Small ones live in one small block with their header. Large ones come from free
 * lists by size class (eight per power of two, so at most an eighth is wasted) behind a lock; what is freed stays cached
 * until the budget or the user wants it back. */
#include "memory.h"

#include "../program/recording.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SMALL = 4096, STEPS = 8, CLASSES = 40 * STEPS, DEVICES = 2, HUGE = 2 << 20, REPORTED = 8 };

struct ty_live { /* a large live storage, for the out-of-memory report */
  struct ty_live *next, *prev;
  size_t nbytes;
  int dtype, ndim;
  int64_t size[TY_MAX_DIMS];
};

typedef struct cached {
  struct cached *next;
} cached;

static struct {
  pthread_mutex_t lock;
  cached *lists[CLASSES];
  ty_live live_list; /* sentinel of a ring */
  int64_t live, cached, peak, budget;
  uint64_t allocations;
} cpu = { .lock = PTHREAD_MUTEX_INITIALIZER, .live_list = { .next = &cpu.live_list, .prev = &cpu.live_list } };

/* Bytes of small storages of this thread not yet added to cpu.live: they come and go too often for a shared counter. */
static _Thread_local int64_t pending, pending_allocations;
static _Thread_local int64_t meta_live;
enum { PENDING_MOST = 64 * 1024 };

_Thread_local bool (*ty_memory_reclaim)(void *context);
_Thread_local void *ty_memory_reclaim_context;

static int64_t default_budget(void) {
  int64_t bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  FILE *f = fopen("/sys/fs/cgroup/memory.max", "r");
  long long limit;
  if (f) {
    if (fscanf(f, "%lld", &limit) == 1 && limit < bytes) bytes = limit;
    fclose(f);
  }
  return bytes / 10 * 9;
}

static int size_class(size_t bytes, size_t *rounded) {
  int log = 63 - __builtin_clzll(bytes);
  size_t base = (size_t)1 << log, step = base / STEPS;
  size_t k = (bytes - base + step - 1) / step;
  *rounded = base + k * step;
  return log * STEPS + (int)k;
}

static void flush_pending(void) {
  cpu.live += pending;
  cpu.allocations += (uint64_t)pending_allocations;
  pending = pending_allocations = 0;
  if (cpu.live > cpu.peak) cpu.peak = cpu.live;
}

void ty_memory_thread_exit(void) {
  pthread_mutex_lock(&cpu.lock);
  flush_pending();
  pthread_mutex_unlock(&cpu.lock);
}

static void empty_cache_locked(void) {
  for (int c = 0; c < CLASSES; c++) {
    while (cpu.lists[c]) {
      cached *b = cpu.lists[c];
      cpu.lists[c] = b->next;
      free(b);
    }
  }
  cpu.cached = 0;
}

static void *take_from_system(size_t bytes) {
  if (bytes < 2 * HUGE) return aligned_alloc(64, (bytes + 63) / 64 * 64);
  /* Huge pages: page faults on fresh activations cost more than many kernels. */
  void *p = aligned_alloc(HUGE, (bytes + HUGE - 1) / HUGE * HUGE);
  if (p) madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}

/* A block of the class (or up to three classes more, if one lies cached); NULL when the budget forbids it. */
static void *take(int class, size_t bytes, size_t *capacity) {
  pthread_mutex_lock(&cpu.lock);
  flush_pending();
  if (!cpu.budget) cpu.budget = default_budget();
  void *p = NULL;
  for (int c = class; c <= class + 3 && c < CLASSES && !p; c++) {
    if (!cpu.lists[c]) continue;
    p = cpu.lists[c];
    cpu.lists[c] = cpu.lists[c]->next;
    size_t base = (size_t)1 << (c / STEPS);
    *capacity = base + base / STEPS * (size_t)(c % STEPS);
    cpu.cached -= (int64_t)*capacity;
  }
  if (!p) {
    *capacity = bytes;
    if (cpu.live + cpu.cached + (int64_t)bytes > cpu.budget) empty_cache_locked();
    if (cpu.live + (int64_t)bytes <= cpu.budget) p = take_from_system(bytes);
  }
  if (p) {
    cpu.live += (int64_t)*capacity;
    cpu.allocations++;
    if (cpu.live > cpu.peak) cpu.peak = cpu.live;
  }
  pthread_mutex_unlock(&cpu.lock);
  return p;
}

static void give_back(void *p, size_t capacity) {
  size_t rounded;
  int class = size_class(capacity, &rounded);
  pthread_mutex_lock(&cpu.lock);
  cached *b = p;
  b->next = cpu.lists[class];
  cpu.lists[class] = b;
  cpu.live -= (int64_t)capacity;
  cpu.cached += (int64_t)capacity;
  pthread_mutex_unlock(&cpu.lock);
}

static const char *bytes_text(char *buffer, size_t n, double bytes) {
  const char *units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
  int u = 0;
  while (bytes >= 1024 && u < 6) bytes /= 1024, u++;
  snprintf(buffer, n, u ? "%.1f %s" : "%.0f %s", bytes, units[u]);
  return buffer;
}

static bool fail_out_of_memory(size_t bytes, ty_dtype dtype, int ndim, const int64_t *size) {
  char text[1500], a[32], b[32], c[32], d[32];
  const ty_live *largest[REPORTED] = { NULL };
  pthread_mutex_lock(&cpu.lock);
  if (!cpu.budget) cpu.budget = default_budget();
  int count = 0;
  for (const ty_live *l = cpu.live_list.next; l != &cpu.live_list; l = l->next, count++) {
    for (int i = 0; i < REPORTED; i++) {
      if (!largest[i] || l->nbytes > largest[i]->nbytes) {
        memmove(largest + i + 1, largest + i, sizeof *largest * (size_t)(REPORTED - 1 - i));
        largest[i] = l;
        break;
      }
    }
  }
  int n = snprintf(text, sizeof text, "out of memory on cpu: wanted %s for %s %s; live %s, cached %s, budget %s",
                   bytes_text(a, sizeof a, (double)bytes), ty_shape_text(ndim, size), ty_dtype_name[dtype],
                   bytes_text(b, sizeof b, (double)cpu.live), bytes_text(c, sizeof c, (double)cpu.cached),
                   bytes_text(d, sizeof d, (double)cpu.budget));
  if (count) n += snprintf(text + n, sizeof text - (size_t)n, "\nlargest of %d live tensors:", count);
  for (int i = 0; i < REPORTED && largest[i]; i++)
    n += snprintf(text + n, sizeof text - (size_t)n, "\n  %10s  %s %s",
                  bytes_text(a, sizeof a, (double)largest[i]->nbytes),
                  ty_shape_text(largest[i]->ndim, largest[i]->size), ty_dtype_name[largest[i]->dtype]);
  pthread_mutex_unlock(&cpu.lock);
  return ty_fail(TY_ENOMEM, "%s", text);
}

/* The same, after asking for memory back when there is none. */
static void *take_or_reclaim(int class, size_t bytes, size_t *capacity) {
  if (class >= CLASSES) return NULL;
  void *p = take(class, bytes, capacity);
  if (p || !ty_memory_reclaim || !ty_memory_reclaim(ty_memory_reclaim_context)) return p;
  ty_memory_empty_cache(TY_CPU);
  return take(class, bytes, capacity);
}

static ty_storage *new_large(size_t nbytes, ty_dtype dtype, int ndim, const int64_t *size) {
  ty_storage *s = ty_small_alloc(sizeof *s);
  if (!s) return NULL;
  ty_live *l = ty_small_alloc(sizeof *l);
  if (!l) {
    ty_small_free(s, sizeof *s);
    return NULL;
  }
  size_t rounded, capacity;
  int class = size_class(nbytes, &rounded);
  void *p = take_or_reclaim(class, rounded, &capacity);
  if (!p) {
    ty_small_free(s, sizeof *s);
    ty_small_free(l, sizeof *l);
    fail_out_of_memory(nbytes, dtype, ndim, size);
    return NULL;
  }
  *l = (ty_live){ .nbytes = nbytes, .dtype = dtype, .ndim = ndim };
  memcpy(l->size, size, sizeof *size * (size_t)ndim);
  pthread_mutex_lock(&cpu.lock);
  l->next = cpu.live_list.next;
  l->prev = &cpu.live_list;
  l->next->prev = l->prev->next = l;
  pthread_mutex_unlock(&cpu.lock);
  *s = (ty_storage){ .refs = 1, .device = TY_CPU, .bytes = p, .nbytes = nbytes, .capacity = capacity, .live = l };
  return s;
}

static ty_storage *storage_new(int device, size_t nbytes, ty_dtype dtype, int ndim, const int64_t *size) {
  if (device == TY_CPU && nbytes > SMALL) return new_large(nbytes, dtype, ndim, size);
  if (device != TY_CPU && device != TY_META) {
    ty_fail(TY_EUNSUPPORTED, "device %d is not available in this build", device);
    return NULL;
  }
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
      flush_pending();
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
    ty_live *l = s->live;
    pthread_mutex_lock(&cpu.lock);
    l->next->prev = l->prev;
    l->prev->next = l->next;
    pthread_mutex_unlock(&cpu.lock);
    ty_small_free(l, sizeof *l);
    give_back(s->bytes, s->capacity);
    ty_small_free(s, sizeof *s);
  } else {
    if (s->device == TY_META) meta_live -= (int64_t)s->nbytes;
    pending -= (int64_t)s->capacity;
    if (__builtin_expect(pending < -PENDING_MOST, 0)) {
      pthread_mutex_lock(&cpu.lock);
      flush_pending();
      pthread_mutex_unlock(&cpu.lock);
    }
    ty_small_free(s, sizeof *s + s->capacity);
  }
}

void *ty_scratch_alloc(size_t bytes) {
  size_t rounded, capacity;
  if (bytes < 64) bytes = 64;
  int class = size_class(bytes, &rounded);
  void *p = ty_memory_injected() ? NULL : take_or_reclaim(class, rounded, &capacity);
  if (!p) {
    int64_t size[] = { (int64_t)bytes };
    fail_out_of_memory(bytes, TY_U8, 1, size);
    return NULL;
  }
  /* take() may hand out a larger cached block; scratch is returned by its asked-for size, so count it as that. */
  if (capacity != rounded) {
    pthread_mutex_lock(&cpu.lock);
    cpu.live -= (int64_t)capacity - (int64_t)rounded;
    pthread_mutex_unlock(&cpu.lock);
  }
  return p;
}

void ty_scratch_free(void *p, size_t bytes) {
  if (!p) return;
  size_t rounded;
  if (bytes < 64) bytes = 64;
  size_class(bytes, &rounded);
  give_back(p, rounded);
}

ty_memory_stats ty_memory_stats_of(int device) {
  if (device == TY_META) return (ty_memory_stats){ .live = meta_live };
  if (device != TY_CPU) return (ty_memory_stats){ 0 };
  pthread_mutex_lock(&cpu.lock);
  flush_pending();
  if (!cpu.budget) cpu.budget = default_budget();
  ty_memory_stats s = { cpu.live, cpu.cached, cpu.peak, cpu.budget, cpu.allocations };
  pthread_mutex_unlock(&cpu.lock);
  return s;
}

void ty_memory_reset_peak(int device) {
  if (device != TY_CPU) return;
  pthread_mutex_lock(&cpu.lock);
  flush_pending();
  cpu.peak = cpu.live;
  pthread_mutex_unlock(&cpu.lock);
}

void ty_memory_set_budget(int device, int64_t bytes) {
  if (device != TY_CPU) return;
  pthread_mutex_lock(&cpu.lock);
  cpu.budget = bytes > 0 ? bytes : default_budget();
  pthread_mutex_unlock(&cpu.lock);
}

void ty_memory_empty_cache(int device) {
  if (device != TY_CPU) return;
  pthread_mutex_lock(&cpu.lock);
  empty_cache_locked();
  pthread_mutex_unlock(&cpu.lock);
}

int64_t ty_memory_live(int device) {
  return device == TY_CPU ? __atomic_load_n(&cpu.live, __ATOMIC_RELAXED) + pending : 0;
}
