/* Ranks that compute together and exchange tensors. A world is all ranks of one run; a comm is the place of one rank in a
 * group of them, at first of all. Ranks are processes of MPI, or threads of one process: a script that is to run on many
 * machines is written, tried and measured on one.
 *
 * Every thread that is a rank has a clock, which says what time it would be on a machine of its own: the processor time of its thread, and
 * what it has waited for others, over links of a given latency and bandwidth. So bubbles, overlap and stragglers can be
 * measured where ranks share a core. A rank computes on one thread.
 *
 * All ranks of a group call its collectives in the same order, with tensors of one size and dtype; where they don't, where
 * one has ended or failed, and where all wait for each other, every rank gets an error that says so, and none hangs. */
#ifndef TY_COMM_H
#define TY_COMM_H

#include "../tensor/tensor.h"

typedef struct ty_world ty_world;
typedef struct ty_comm ty_comm;

typedef enum ty_comm_kind {
  TY_ALL_REDUCE,     /* x: the reduction of all x, in place */
  TY_REDUCE_SCATTER, /* out: of the reduction of all x the rank's part, in their order */
  TY_ALL_GATHER,     /* out: all x one after the other */
  TY_BROADCAST,      /* x: that of the root */
  TY_ALL_TO_ALL,     /* out: of the x of rank 0, 1 ... the part of this rank */
  TY_BARRIER,
  TY_SPLIT,
  TY_MESSAGE, /* from one rank to another; no collective */
  TY_COMM_KINDS
} ty_comm_kind;
extern const char *const ty_comm_names[TY_COMM_KINDS];

typedef enum ty_reduction { TY_REDUCE_SUM, TY_REDUCE_MEAN, TY_REDUCE_MIN, TY_REDUCE_MAX, TY_REDUCE_PROD } ty_reduction;

typedef struct ty_link {
  double latency, bandwidth; /* seconds; bytes a second */
} ty_link;

/* The ranks 0 to per_node - 1 are on one machine, the next as many on another. */
typedef struct ty_network {
  ty_link between, within; /* machines */
  int per_node;
} ty_network;

typedef struct ty_collective {
  ty_comm_kind kind;
  ty_reduction reduction;
  int root;
  ty_tensor *x, *out; /* contiguous, on the CPU */
  int64_t color, key; /* of a split */
} ty_collective;

typedef struct ty_traffic {
  int64_t calls[TY_COMM_KINDS]; /* begun by this rank in this group */
  int64_t sent[TY_COMM_KINDS];  /* bytes, as rings of the ranks send them */
  int64_t crossed;              /* of these, to another machine */
} ty_traffic;

/* ---- worlds: found by number, from any thread ---- */

int64_t ty_world_open(int size, const ty_network *network); /* 0 after ty_fail() */
/* The world ends when its ranks have left it. */
void ty_world_close(int64_t number);
/* Whatever its ranks wait for fails with this text, and what they begin; the first text counts: whether it was this. */
bool ty_world_fail(int64_t number, const char *text);

/* ---- a rank ---- */

/* The rank that this process is, where MPI has started it; else the only one of its world. Once in a process. NULL after
 * ty_fail(): MPI cannot be loaded. Collectives that do not match are MPI's errors, or never end. */
ty_comm *ty_comm_process(void);

/* The calling thread becomes a rank; NULL after ty_fail(). */
ty_comm *ty_comm_join(int64_t world, int rank);
/* Of a world's first comm: the rank has ended. Of others: no more calls. */
void ty_comm_leave(ty_comm *c);
int ty_comm_rank(const ty_comm *c);
int ty_comm_size(const ty_comm *c);
/* The rank in the world of the group's rank. */
int ty_comm_member(const ty_comm *c, int rank);
ty_traffic ty_comm_traffic(const ty_comm *c);
double ty_comm_clock(const ty_comm *c);
/* Lets that clock go on by so many seconds, >= 0, as if the rank had computed or waited. */
void ty_comm_advance(ty_comm *c, double seconds);

/* Which MPI there is: "Open MPI v4.1.4"; NULL after ty_fail(). */
const char *ty_comm_mpi(void);

/* ---- what ranks do ---- */

/* Begins a collective, whose tensors stay as they are until it is waited for. A ticket, 0 after ty_fail(). */
int64_t ty_comm_start(ty_comm *c, const ty_collective *what);
bool ty_comm_wait(ty_comm *c, int64_t ticket);
/* The group of the ranks that gave the same color, in order of keys and ranks; *none says whether color was below 0,
 * which makes none. NULL after ty_fail() or with *none. */
ty_comm *ty_comm_split(ty_comm *c, int64_t color, int64_t key, bool *none);
/* Copies the tensor and goes on; messages with one tag from one rank arrive in their order. */
bool ty_comm_send(ty_comm *c, const ty_tensor *x, int to, int64_t tag);
/* Waits for a message; NULL after ty_fail(). */
ty_tensor *ty_comm_receive(ty_comm *c, int from, int64_t tag);

/* Seconds of a collective over `bytes`, all that a rank has of x or, of an all-gather, gets: by the rings of cost.c. */
double ty_collective_seconds(ty_comm_kind kind, ty_link link, int n, int64_t bytes);

#endif
