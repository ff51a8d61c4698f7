/* Kept forms of weights: see kernels/kept.h. An entry belongs to the storage of its weight and goes with it, or when the
 * weight is written, or when memory is short. The first use of a form leaves a mark only: weights that change with every
 * step, as in training, never take memory for this. What is kept does not give way to newer forms, since calls go through
 * the weights of a model in turn: whatever was used longest ago is what comes next. */
#include "kept.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

enum {
  SHARE = 32,        /* of the budget, */
  LARGE = 1 << 30,   /* and where more than this is live, */
  LIVE_SHARE = 64,   /* of what is live, but at least */
  LEAST = 64 << 20,  /* so much, */
  USUAL = 256 << 20, /* else this */
  MOST = 64          /* forms of one storage, of which there may be parts without end */
};

typedef struct ty_kept_entry {
  struct ty_kept_entry *next;           /* of this storage */
  struct ty_kept_entry *before, *after; /* of all */
  ty_storage *storage;                  /* NULL: dropped, to be freed by its last user */
  ty_kept_form form;
  void *data; /* NULL: a mark */
  size_t bytes;
  int users;
  bool filled; /* else its only user is filling it */
} entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows, and of every storage's list */
static entry all = { .before = &all, .after = &all };
static int64_t budget = -1, bytes_kept;

int64_t ty_kept_bytes(void) { return __atomic_load_n(&bytes_kept, __ATOMIC_RELAXED); }

static void count(int64_t bytes) { __atomic_fetch_add(&bytes_kept, bytes, __ATOMIC_RELAXED); }

static void free_entry(entry *e) {
  if (e->data) count(-(int64_t)e->bytes);
  ty_system_free(e->data, e->data ? e->bytes : 0);
  free(e);
}

/* From the list of its storage and that of all. */
static void drop_locked(entry *e) {
  entry **at = &e->storage->kept;
  while (*at != e) at = &(*at)->next;
  *at = e->next;
  e->before->after = e->after;
  e->after->before = e->before;
  e->storage = NULL;
  if (!e->users) free_entry(e);
}

void ty_kept_drop(ty_storage *s) {
  pthread_mutex_lock(&lock);
  while (s->kept) drop_locked(s->kept);
  pthread_mutex_unlock(&lock);
}

void ty_kept_drop_all(void) {
  pthread_mutex_lock(&lock);
  for (entry *e = all.after, *next; e != &all; e = next) {
    next = e->after;
    if (e->data) drop_locked(e);
  }
  pthread_mutex_unlock(&lock);
}

void ty_kept_set_budget(int64_t bytes) {
  __atomic_store_n(&budget, bytes, __ATOMIC_RELAXED);
  if (bytes >= 0 && ty_kept_bytes() > bytes) ty_kept_drop_all();
}

/* Most bytes of all forms together by default. Panels save 18 % of a layer with 64 tokens, less with more of them. Of a
 * model that is several times as large as what may be kept they save so much of a small part only: 1 % of a step of
 * Stable Diffusion's U-Net with 256 MB, as with 64. */
static int64_t usual(const ty_memory_stats *memory) {
  int64_t most = USUAL;
  if (memory->live > LARGE) most = memory->live / LIVE_SHARE > LEAST ? memory->live / LIVE_SHARE : LEAST;
  return most < memory->budget / SHARE ? most : memory->budget / SHARE;
}

/* Whether so much more may be kept, which nothing else wants now. */
static bool affordable(size_t bytes) {
  ty_memory_stats memory = ty_memory_stats_of(TY_CPU);
  int64_t most = __atomic_load_n(&budget, __ATOMIC_RELAXED);
  if (most < 0) most = usual(&memory);
  int64_t kept = memory.kept + (int64_t)bytes;
  return kept <= most && memory.live + memory.cached + kept <= memory.budget;
}

static entry *find_locked(const ty_storage *s, const ty_kept_form *form, size_t bytes) {
  entry *e = s->kept;
  while (e && (e->bytes != bytes || memcmp(&e->form, form, sizeof *form) != 0)) e = e->next;
  return e;
}

/* In the place of the oldest mark when there are too many. */
static void mark_locked(ty_storage *s, const ty_kept_form *form, size_t bytes) {
  int n = 0;
  entry *oldest = NULL;
  for (entry *e = s->kept; e; e = e->next, n++)
    if (!e->data) oldest = e;
  if (n >= MOST && !oldest) return;
  if (n >= MOST) drop_locked(oldest);
  entry *e = malloc(sizeof *e); /* without it nothing is kept, that is all */
  if (!e) return;
  *e = (entry){ .next = s->kept, .before = &all, .after = all.after, .storage = s, .form = *form, .bytes = bytes };
  all.after->before = e;
  all.after = s->kept = e;
}

static void use_locked(ty_kept *k, entry *e) {
  e->users++;
  k->entry = e;
  k->data = e->data;
  k->filled = e->filled;
}

/* Uses what is kept. False when nothing is, and the form has a mark: this is not its first use, and nobody else's. */
static bool find_filled(ty_kept *k, ty_storage *s, const ty_kept_form *form) {
  pthread_mutex_lock(&lock);
  entry *e = find_locked(s, form, k->bytes);
  if (!e) mark_locked(s, form, k->bytes);
  else if (e->filled) use_locked(k, e);
  bool wanted = e && !e->filled && !e->users;
  pthread_mutex_unlock(&lock);
  return !wanted;
}

static void make_room(ty_kept *k, ty_storage *s, const ty_kept_form *form) {
  void *data = ty_system_alloc(k->bytes);
  if (!data) return;
  pthread_mutex_lock(&lock);
  entry *e = find_locked(s, form, k->bytes);
  bool wanted = e && !e->filled && !e->users;
  if (wanted) {
    count((int64_t)k->bytes);
    e->data = data;
    use_locked(k, e);
  }
  pthread_mutex_unlock(&lock);
  if (!wanted) ty_system_free(data, k->bytes);
}

ty_kept ty_kept_open(ty_storage *s, const ty_kept_form *form, size_t bytes, bool anyway) {
  ty_kept k = { .bytes = bytes };
  if (s && !find_filled(&k, s, form) && affordable(bytes)) make_room(&k, s, form);
  if (!k.data && anyway) k.data = ty_scratch_alloc(bytes);
  return k;
}

void ty_kept_close(ty_kept *k, bool good) {
  entry *e = k->entry;
  if (!e) {
    if (k->data) ty_scratch_free(k->data, k->bytes);
    return;
  }
  pthread_mutex_lock(&lock);
  e->users--;
  if (good) e->filled = true;
  if (!e->storage && !e->users) {
    free_entry(e);
  } else if (!e->filled && !e->users) { /* a mark again */
    count(-(int64_t)e->bytes);
    ty_system_free(e->data, e->bytes);
    e->data = NULL;
  }
  pthread_mutex_unlock(&lock);
}
