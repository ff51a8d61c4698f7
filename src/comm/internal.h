/* What the files of comm/ share. */
#ifndef TY_COMM_INTERNAL_H
#define TY_COMM_INTERNAL_H

#include "comm.h"

/* What ranks are: threads of a process (local.c) or processes of MPI (mpi.c). */
typedef struct ty_comm_backend {
  void (*leave)(ty_comm *c);
  int64_t (*start)(ty_comm *c, const ty_collective *what);
  bool (*wait)(ty_comm *c, int64_t ticket);
  ty_comm *(*split)(ty_comm *c, int64_t color, int64_t key, bool *none);
  bool (*send)(ty_comm *c, const ty_tensor *x, int to, int64_t tag);
  ty_tensor *(*receive)(ty_comm *c, int from, int64_t tag);
  double (*clock)(const ty_comm *c);
  void (*advance)(ty_comm *c, double seconds);
} ty_comm_backend;

struct ty_comm { /* the backend's own is behind it */
  const ty_comm_backend *backend;
  int rank, size;
  const int *members; /* ranks of the world */
  ty_network network;
  ty_traffic traffic;
};

size_t ty_tensor_bytes(const ty_tensor *t);
/* Bytes that count for the cost of a collective: what a rank has of x or, of an all-gather, gets. */
int64_t ty_collective_bytes(const ty_collective *what);

/* ---- costs (cost.c): rings of n ranks, as NCCL and MPI send large tensors ---- */

/* The slowest of the links between ranks of the world that follow each other in a ring. */
ty_link ty_ring_link(const ty_network *network, const int *members, int n);
ty_link ty_link_between(const ty_network *network, int a, int b);
/* Bytes that the rank sends of these, and how many of them leave its machine. */
int64_t ty_collective_sent(const ty_network *network, ty_comm_kind kind, const int *members, int n, int rank,
                           int64_t bytes, int64_t *crossed);

/* ---- arithmetic (reduce.c) ---- */

bool ty_can_reduce(ty_dtype dtype, ty_reduction reduction); /* false after ty_fail() */
/* out[i]: the reduction of x[0][i], x[1][i] ... in that order. */
void ty_reduce_divide(void *x, int n, int64_t count, ty_dtype dtype); /* of floating point, by n */
void ty_reduce(void *out, const void *const *x, int n, int64_t count, ty_dtype dtype, ty_reduction reduction);

#endif
