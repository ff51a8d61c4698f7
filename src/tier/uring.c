/* Transfers by io_uring: the kernel works at them while the program goes on, and no thread of ours is needed. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>

#include "../tycho.h"
#include "internal.h"

#ifdef TY_HAVE_URING
#include <liburing.h>

/* Of 4 MiB each: what a layer brings at once. What does not fit waits until the program calls again. */
enum { DEPTH = 256 };

typedef struct ty_tier_ring {
  ty_tier *tier;
  struct io_uring ring;
  piece *first, *last; /* that wait for room */
  int flying;
} ring;

struct ty_tier_ring *ty_tier_ring_open(ty_tier *t) {
  ring *r = calloc(1, sizeof *r);
  if (!r) return errno = ENOMEM, NULL;
  int code = io_uring_queue_init(DEPTH, &r->ring, 0);
  if (code < 0) {
    free(r);
    return errno = -code, NULL;
  }
  r->tier = t;
  return r;
}

static void put(ring *r, piece *p) {
  p->next = NULL;
  if (r->last) r->last->next = p;
  else r->first = p;
  r->last = p;
}

static void end(piece *p, int error) {
  transfer *of = p->of;
  if (error && !of->error) of->error = error;
  if (--of->left == 0) of->end = ty_tier_clock();
}

/* As many of those that wait as there is room for. */
static void start(ring *r) {
  int n = 0;
  while (r->first && r->flying + n < DEPTH) {
    struct io_uring_sqe *e = io_uring_get_sqe(&r->ring);
    if (!e) break;
    piece *p = r->first;
    if (!(r->first = p->next)) r->last = NULL;
    if (p->of->write) io_uring_prep_write(e, r->tier->fd, p->bytes, (unsigned)p->length, (uint64_t)p->at);
    else io_uring_prep_read(e, r->tier->fd, p->bytes, (unsigned)p->length, (uint64_t)p->at);
    io_uring_sqe_set_data(e, p);
    n++;
  }
  r->flying += n;
  while (n && io_uring_submit(&r->ring) == -EINTR) continue;
}

static void land(ring *r, struct io_uring_cqe *e) {
  piece *p = io_uring_cqe_get_data(e);
  ssize_t n = ty_tier_result(r->tier, p, e->res);
  io_uring_cqe_seen(&r->ring, e);
  r->flying--;
  int error = 0;
  if (ty_tier_advance(r->tier, p, n, &error)) end(p, error);
  else put(r, p);
}

/* Takes in what is done; waits until something is when there is nothing. */
static void turn(ring *r, bool wait) {
  struct io_uring_cqe *e;
  start(r);
  if (wait && r->flying) {
    int code;
    do code = io_uring_wait_cqe(&r->ring, &e);
    while (code == -EINTR);
    if (code == 0) land(r, e);
  }
  while (r->flying && io_uring_peek_cqe(&r->ring, &e) == 0) land(r, e);
  start(r);
}

void ty_tier_ring_close(ring *r) {
  while (r->flying) turn(r, true);
  io_uring_queue_exit(&r->ring);
  free(r);
}

void ty_tier_ring_give(ring *r, transfer *of, int n) {
  for (int i = 0; i < n; i++) put(r, &of->pieces[i]);
  turn(r, false);
}

bool ty_tier_ring_done(ring *r, transfer *of, bool wait) {
  if (of->left) turn(r, false);
  while (wait && of->left) turn(r, true);
  return of->left == 0;
}

#else

struct ty_tier_ring *ty_tier_ring_open(ty_tier *t) {
  return errno = ENOSYS, NULL;
}
void ty_tier_ring_close(struct ty_tier_ring *ring) {}
void ty_tier_ring_give(struct ty_tier_ring *ring, transfer *r, int n) {}
bool ty_tier_ring_done(struct ty_tier_ring *ring, transfer *r, bool wait) { return true; }

#endif
