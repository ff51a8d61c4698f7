/* What the files of comm/ share. */
#ifndef TY_COMM_INTERNAL_H
#define TY_COMM_INTERNAL_H

#include "comm.h"

/* ---- costs (cost.c): rings of n ranks, as NCCL and MPI send large tensors ---- */

/* The slowest of the links between ranks of the world that follow each other in a ring. */
ty_link ty_ring_link(const ty_network *network, const int *members, int n);
ty_link ty_link_between(const ty_network *network, int a, int b);
/* Seconds of a collective over `bytes`, all that a rank has of x or, of an all-gather, gets. */
double ty_collective_seconds(ty_comm_kind kind, ty_link link, int n, int64_t bytes);
/* Bytes that the rank sends of these, and how many of them leave its machine. */
int64_t ty_collective_sent(const ty_network *network, ty_comm_kind kind, const int *members, int n, int rank,
                           int64_t bytes, int64_t *crossed);

/* ---- arithmetic (reduce.c) ---- */

bool ty_can_reduce(ty_dtype dtype, ty_reduction reduction); /* false after ty_fail() */
/* out[i]: the reduction of x[0][i], x[1][i] ... in that order. */
void ty_reduce(void *out, const void *const *x, int n, int64_t count, ty_dtype dtype, ty_reduction reduction);

#endif
