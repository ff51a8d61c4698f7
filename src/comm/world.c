/* Worlds: their registry, how ranks wait for each other, and what happens when that cannot end. */
#include "world.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../ops/op.h"
#include "../tensor/ledger.h"

enum { MOST_RANKS = 1024 };

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static ty_world *registry;
static int64_t numbers;

double ty_thread_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- life ---- */

group *ty_world_group(ty_world *w, int size) {
  group *g = calloc(1, sizeof *g);
  int *members = calloc((size_t)size, sizeof *members);
  if (!g || !members) {
    free(g);
    free(members);
    return NULL;
  }
  g->size = size;
  g->members = members;
  g->next = w->groups;
  w->groups = g;
  return g;
}

static void world_free(ty_world *w) {
  for (group *g = w->groups, *next; g; g = next) {
    next = g->next;
    for (mail *m = g->mails, *after; m; m = after) {
      after = m->next;
      ty_release(m->t);
      free(m);
    }
    for (meeting *m = g->meetings, *after; m; m = after) {
      after = m->next;
      free(m);
    }
    free(g->members);
    free(g);
  }
  pthread_mutex_destroy(&w->lock);
  pthread_cond_destroy(&w->changed);
  free(w->ranks);
  free(w);
}

int64_t ty_world_open(int size, const ty_network *network) {
  if (size < 1 || size > MOST_RANKS) return ty_fail(TY_EINVAL, "ranks: expected 1 to %d, got %d", MOST_RANKS, size), 0;
  atomic_store(&ty_ledgers, true); /* before its threads begin */
  ty_world *w = calloc(1, sizeof *w);
  if (w) w->ranks = calloc((size_t)size, sizeof *w->ranks);
  group *all = w && w->ranks ? ty_world_group(w, size) : NULL;
  if (!all) {
    if (w) free(w->ranks);
    free(w);
    return ty_fail(TY_ENOMEM, "ranks: out of memory"), 0;
  }
  for (int i = 0; i < size; i++) all->members[i] = i;
  pthread_mutex_init(&w->lock, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&w->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  w->size = size;
  w->network = *network;
  w->refs = 1;
  pthread_mutex_lock(&registry_lock);
  w->number = ++numbers;
  w->next = registry;
  registry = w;
  pthread_mutex_unlock(&registry_lock);
  return w->number;
}

ty_world *ty_world_find(int64_t number) {
  pthread_mutex_lock(&registry_lock);
  ty_world *w = registry;
  while (w && w->number != number) w = w->next;
  if (w) w->refs++;
  pthread_mutex_unlock(&registry_lock);
  return w;
}

void ty_world_retain(ty_world *w) {
  pthread_mutex_lock(&registry_lock);
  w->refs++;
  pthread_mutex_unlock(&registry_lock);
}

void ty_world_release(ty_world *w) {
  pthread_mutex_lock(&registry_lock);
  bool last = --w->refs == 0;
  pthread_mutex_unlock(&registry_lock);
  if (last) world_free(w);
}

void ty_world_close(int64_t number) {
  pthread_mutex_lock(&registry_lock);
  ty_world **at = &registry, *w;
  while (*at && (*at)->number != number) at = &(*at)->next;
  w = *at;
  if (w) *at = w->next;
  pthread_mutex_unlock(&registry_lock);
  if (w) ty_world_release(w);
}

/* ---- failing ---- */

void ty_world_fail_locked(ty_world *w, const char *format, ...) {
  if (w->failed) return;
  va_list args;
  va_start(args, format);
  vsnprintf(w->problem, sizeof w->problem, format, args);
  va_end(args);
  w->failed = true;
  pthread_cond_broadcast(&w->changed);
}

bool ty_world_fail(int64_t number, const char *text) {
  ty_world *w = ty_world_find(number);
  if (!w) return false;
  pthread_mutex_lock(&w->lock);
  bool first = !w->failed;
  ty_world_fail_locked(w, "%s", text);
  pthread_mutex_unlock(&w->lock);
  ty_world_release(w);
  return first;
}

bool ty_world_problem(const ty_world *w, const char *who) { return ty_fail(TY_EINVAL, "%s: %s", who, w->problem); }

/* ---- waiting ---- */

mail **ty_mail_find(const group *g, int from, int to, int64_t tag) {
  mail **at = (mail **)(uintptr_t)&g->mails;
  while (*at && ((*at)->from != from || (*at)->to != to || (*at)->tag != tag)) at = &(*at)->next;
  return at;
}

static bool ready(const waiting *what) {
  return what->meeting ? what->meeting->done : *ty_mail_find(what->of, what->from, what->to, what->tag) != NULL;
}

/* Whether no rank can go on: those that have not ended wait for what is not there. */
static bool stuck(const ty_world *w) {
  for (int i = 0; i < w->size; i++) {
    const member *m = &w->ranks[i];
    if (!m->joined) return false;
    if (!m->left && (!m->waiting || ready(m->waiting))) return false;
  }
  return true;
}

/* "rank 0 waits in all_reduce, rank 1 has ended" of the first ranks */
static void describe(const ty_world *w, char *text, size_t room) {
  size_t used = 0;
  for (int i = 0; i < w->size && i < 8 && used < room; i++) {
    const member *m = &w->ranks[i];
    const char *comma = i ? ", " : "";
    int n;
    if (m->left) n = snprintf(text + used, room - used, "%srank %d has ended", comma, i);
    else if (m->waiting->meeting)
      n = snprintf(text + used, room - used, "%srank %d waits in %s", comma, i, ty_comm_names[m->waiting->kind]);
    else
      n = snprintf(text + used, room - used, "%srank %d waits for a message of rank %d", comma, i,
                   m->waiting->of->members[m->waiting->from]);
    used += n > 0 ? (size_t)n : 0;
  }
}

bool ty_world_wait(ty_world *w, int rank, const waiting *for_what) {
  member *me = &w->ranks[rank];
  me->waiting = for_what;
  while (!ready(for_what) && !w->failed && !ty_interrupted) {
    if (stuck(w)) {
      char text[512];
      describe(w, text, sizeof text);
      ty_world_fail_locked(w, "no rank can go on: %s", text);
      break;
    }
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 50 * 1000 * 1000;
    if (until.tv_nsec >= 1000 * 1000 * 1000) until.tv_sec++, until.tv_nsec -= 1000 * 1000 * 1000;
    pthread_cond_timedwait(&w->changed, &w->lock, &until);
  }
  me->waiting = NULL;
  if (ready(for_what)) return true;
  if (w->failed) return ty_world_problem(w, for_what->meeting ? ty_comm_names[for_what->kind] : "receive");
  return ty_fail(TY_EINTR, "interrupted");
}
