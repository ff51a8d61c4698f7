/* What the two backends of the file tier share: a transfer is cut into pieces, which are done in any order. */
#ifndef TY_TIER_INTERNAL_H
#define TY_TIER_INTERNAL_H

#include <pthread.h>
#include <sys/types.h>

#include "tier.h"

typedef struct piece {
  struct piece *next; /* in a queue of those that wait */
  struct transfer *of;
  char *bytes;
  size_t length;
  off_t at;
  int stalls; /* in a row that moved nothing */
} piece;

typedef struct transfer {
  struct transfer *next;
  int64_t ticket, at, length;
  ty_storage *storage;
  uint32_t version;
  void *target; /* of a read through a buffer */
  size_t nbytes;
  void *buffer;
  bool write, done; /* done: of the owner's thread, when `left` has been seen to be 0 */
  int left, error;  /* pieces to come; the first errno */
  double begin, end;
  piece pieces[];
} transfer;

struct ty_tier {
  int fd;
  bool direct;
  char folder[256];
  int64_t tickets;
  transfer *transfers;
  ty_tier_stats stats;
  struct ty_tier_threads *threads;
  struct ty_tier_ring *ring;
  _Atomic int64_t pieces, fault_from, fault_to;
  _Atomic int fault;
};

double ty_tier_clock(void);
/* The result of a transfer of a piece as tests want it: bytes, or -errno. */
ssize_t ty_tier_result(ty_tier *t, const piece *p, ssize_t n);
/* Takes in what a system call made of a piece. True: it is over, and t->error says how; false: the rest is to be done. */
bool ty_tier_advance(ty_tier *t, piece *p, ssize_t n, int *error);

struct ty_tier_threads *ty_tier_threads_open(ty_tier *t);
void ty_tier_threads_close(struct ty_tier_threads *w);
void ty_tier_threads_give(struct ty_tier_threads *w, transfer *r, int n);
bool ty_tier_threads_done(struct ty_tier_threads *w, transfer *r, bool wait);

struct ty_tier_ring *ty_tier_ring_open(ty_tier *t); /* NULL where the kernel or the build has none, errno says why */
void ty_tier_ring_close(struct ty_tier_ring *ring);
void ty_tier_ring_give(struct ty_tier_ring *ring, transfer *r, int n);
bool ty_tier_ring_done(struct ty_tier_ring *ring, transfer *r, bool wait);

#endif
