/* What collectives would take and send between machines of their own: rings, in which every rank sends to the next. */
#include <math.h>

#include "internal.h"

ty_link ty_link_between(const ty_network *network, int a, int b) {
  return a / network->per_node == b / network->per_node ? network->within : network->between;
}

ty_link ty_ring_link(const ty_network *network, const int *members, int n) {
  ty_link slowest = network->within;
  for (int i = 0; i < n; i++)
    if (members[i] / network->per_node != members[0] / network->per_node) slowest = network->between;
  return slowest;
}

/* Of the bytes, the share that a rank sends. */
static double share(ty_comm_kind kind, int n) {
  double part = (n - 1) / (double)n;
  switch (kind) {
    case TY_ALL_REDUCE: return 2 * part;
    case TY_REDUCE_SCATTER:
    case TY_ALL_GATHER:
    case TY_ALL_TO_ALL:
    case TY_BROADCAST: return part; /* a broadcast: all but the last, on average */
    default: return 0;
  }
}

double ty_collective_seconds(ty_comm_kind kind, ty_link link, int n, int64_t bytes) {
  if (n == 1) return 0;
  double seconds = share(kind, n) * (double)bytes / link.bandwidth;
  switch (kind) {
    case TY_ALL_REDUCE: return seconds + 2 * (n - 1) * link.latency;
    case TY_BARRIER:
    case TY_SPLIT: return ceil(log2(n)) * link.latency;
    case TY_BROADCAST:
      return (double)bytes / link.bandwidth + (n - 1) * link.latency; /* in pieces, one after the other */
    default: return seconds + (n - 1) * link.latency;
  }
}

int64_t ty_collective_sent(const ty_network *network, ty_comm_kind kind, const int *members, int n, int rank,
                           int64_t bytes, int64_t *crossed) {
  int64_t sent = (int64_t)(share(kind, n) * (double)bytes);
  int node = members[rank] / network->per_node, away = 0;
  if (kind == TY_ALL_TO_ALL) { /* to each of the others its own */
    for (int i = 0; i < n; i++) away += members[i] / network->per_node != node;
    *crossed = bytes / n * away;
  } else {
    *crossed = members[(rank + 1) % n] / network->per_node != node ? sent : 0;
  }
  return sent;
}
