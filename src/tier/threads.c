/* Transfers by threads with pread and pwrite, where there is no io_uring. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "../tycho.h"
#include "internal.h"

enum { THREADS = 4 };

typedef struct ty_tier_threads {
  ty_tier *tier;
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  piece *first, *last;
  pthread_t thread[THREADS];
  int n;
  bool stop;
} workers;

static piece *take(workers *w) {
  pthread_mutex_lock(&w->lock);
  while (!w->first && !w->stop) pthread_cond_wait(&w->work, &w->lock);
  piece *p = w->first;
  if (p && !(w->first = p->next)) w->last = NULL;
  pthread_mutex_unlock(&w->lock);
  return p;
}

static int move(ty_tier *t, piece *p) {
  int error = 0;
  for (bool over = false; !over;) {
    ssize_t n = p->of->write ? pwrite(t->fd, p->bytes, p->length, p->at) : pread(t->fd, p->bytes, p->length, p->at);
    over = ty_tier_advance(t, p, ty_tier_result(t, p, n < 0 ? -errno : n), &error);
  }
  return error;
}

static void *run(void *given) {
  workers *w = given;
  for (piece *p; (p = take(w));) {
    int error = move(w->tier, p);
    transfer *r = p->of;
    pthread_mutex_lock(&w->lock);
    if (error && !r->error) r->error = error;
    if (--r->left == 0) {
      r->end = ty_tier_clock();
      pthread_cond_broadcast(&w->done);
    }
    pthread_mutex_unlock(&w->lock);
  }
  return NULL;
}

struct ty_tier_threads *ty_tier_threads_open(ty_tier *t) {
  workers *w = calloc(1, sizeof *w);
  if (!w) return ty_fail(TY_ENOMEM, "tier: out of memory"), NULL;
  w->tier = t;
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->work, NULL);
  pthread_cond_init(&w->done, NULL);
  sigset_t all, before; /* signals are the program's */
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  while (w->n < THREADS && pthread_create(&w->thread[w->n], NULL, run, w) == 0) w->n++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!w->n) {
    ty_fail(TY_ENOMEM, "tier: no thread could be started");
    ty_tier_threads_close(w);
    return NULL;
  }
  return w;
}

void ty_tier_threads_close(workers *w) {
  pthread_mutex_lock(&w->lock);
  w->stop = true;
  pthread_cond_broadcast(&w->work);
  pthread_mutex_unlock(&w->lock);
  for (int i = 0; i < w->n; i++) pthread_join(w->thread[i], NULL);
  pthread_mutex_destroy(&w->lock);
  pthread_cond_destroy(&w->work);
  pthread_cond_destroy(&w->done);
  free(w);
}

void ty_tier_threads_give(workers *w, transfer *r, int n) {
  pthread_mutex_lock(&w->lock);
  for (int i = 0; i < n; i++) {
    piece *p = &r->pieces[i];
    if (w->last) w->last->next = p;
    else w->first = p;
    w->last = p;
  }
  pthread_cond_broadcast(&w->work);
  pthread_mutex_unlock(&w->lock);
}

bool ty_tier_threads_done(workers *w, transfer *r, bool wait) {
  pthread_mutex_lock(&w->lock);
  while (wait && r->left) pthread_cond_wait(&w->done, &w->lock);
  bool done = r->left == 0;
  pthread_mutex_unlock(&w->lock);
  return done;
}
