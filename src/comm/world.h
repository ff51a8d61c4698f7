/* The inside of a world: ranks, groups, and how a rank waits. Everything here is read and written under world->lock, but
 * for what belongs to the thread of one rank. */
#ifndef TY_COMM_WORLD_H
#define TY_COMM_WORLD_H

#include <pthread.h>

#include "internal.h"

typedef struct group group;

/* What a rank has posted to a collective. */
typedef struct slot {
  bool posted;
  double time; /* of the rank's clock */
  ty_collective what;
  group *got; /* of a split */
  int got_rank;
} slot;

/* The nth collective of a group. */
typedef struct meeting {
  struct meeting *next;
  int64_t number;
  int posted, taken;
  bool done;
  double end;
  slot slots[]; /* by rank of the group */
} meeting;

typedef struct mail {
  struct mail *next;
  ty_tensor *t;
  int from, to;
  int64_t tag;
  double arrives;
} mail;

struct group {
  group *next;
  int size;
  int *members; /* ranks of the world */
  meeting *meetings;
  mail *mails;
};

/* What a rank stands still for: a meeting, or a message of `from`. */
typedef struct waiting {
  const group *of;
  const meeting *meeting;
  int from, to;
  int64_t tag;
  ty_comm_kind kind;
} waiting;

typedef struct member {
  bool joined, left;
  double waited; /* seconds of the clock in which the rank did nothing */
  double own;    /* processor seconds of comm/ itself, which are not of the rank's work */
  double busy;   /* until when what the rank has sent takes its link */
  const waiting *waiting;
} member;

struct ty_world {
  struct ty_world *next;
  int64_t number;
  int refs; /* the registry's, and one of each comm */
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int size;
  ty_network network;
  member *ranks;
  group *groups; /* the last one is of all ranks */
  bool failed;
  char problem[768];
};

/* Processor seconds of this thread. */
double ty_thread_seconds(void);
/* A new reference of the world with that number, or NULL. */
ty_world *ty_world_find(int64_t number);
void ty_world_retain(ty_world *w);
void ty_world_release(ty_world *w);
/* A group of `size` ranks, members still to be filled in; NULL without memory. */
group *ty_world_group(ty_world *w, int size);
void ty_world_fail_locked(ty_world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* false, with the world's problem as this thread's error. */
bool ty_world_problem(const ty_world *w, const char *who);
/* Until what is waited for is there; false after ty_fail(): the world has failed, Ctrl-C, or nobody could go on. */
bool ty_world_wait(ty_world *w, int rank, const waiting *for_what);
mail **ty_mail_find(const group *g, int from, int to, int64_t tag);

#endif
