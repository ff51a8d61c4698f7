/* What a rank does, whatever the ranks are: arguments are checked and traffic is counted here. */
#include "../ops/op.h"
#include "internal.h"

const char *const ty_comm_names[TY_COMM_KINDS] = { "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                                   "all_to_all", "barrier",        "split",      "send" };

int ty_comm_rank(const ty_comm *c) { return c->rank; }
int ty_comm_size(const ty_comm *c) { return c->size; }
int ty_comm_member(const ty_comm *c, int rank) { return c->members[rank]; }
ty_traffic ty_comm_traffic(const ty_comm *c) { return c->traffic; }
double ty_comm_clock(const ty_comm *c) { return c->backend->clock(c); }
void ty_comm_advance(ty_comm *c, double seconds) { c->backend->advance(c, seconds); }
void ty_comm_leave(ty_comm *c) {
  if (c) c->backend->leave(c);
}

size_t ty_tensor_bytes(const ty_tensor *t) { return (size_t)t->v.count * ty_dtype_size[t->v.dtype]; }

/* Bytes that count for the cost: what a rank has of x or, of an all-gather, gets. */
int64_t ty_collective_bytes(const ty_collective *what) {
  const ty_tensor *t = what->kind == TY_ALL_GATHER ? what->out : what->x;
  return t ? (int64_t)ty_tensor_bytes(t) : 0;
}

/* ---- checks ---- */

static bool check_tensor(const char *who, const char *name, const ty_tensor *t) {
  if (ty_device_of(t) == TY_CPU && t->v.contiguous && !ty_is_quantized(ty_dtype_of(t)) && !t->batch) return true;
  return ty_fail(TY_EINVAL, "%s: %s: expected a contiguous tensor on the CPU, got %s", who, name, ty_describe(t));
}

static bool check(const ty_comm *c, const ty_collective *what) {
  const char *who = ty_comm_names[what->kind];
  int64_t n = c->size;
  if (what->kind == TY_BARRIER || what->kind == TY_SPLIT) return true;
  if (!check_tensor(who, "x", what->x) || (what->out && !check_tensor(who, "out", what->out))) return false;
  if ((what->kind == TY_ALL_REDUCE || what->kind == TY_REDUCE_SCATTER) &&
      !ty_can_reduce(ty_dtype_of(what->x), what->reduction))
    return ty_fail(TY_EINVAL, "%s: %s", who, ty_error());
  if (what->kind == TY_BROADCAST && (what->root < 0 || what->root >= n))
    return ty_fail(TY_EINDEX, "broadcast: root: expected a rank of 0 to %lld, got %d", (long long)n - 1, what->root);
  int64_t count = what->x->v.count;
  if (what->kind == TY_ALL_GATHER) count *= n;
  if (what->kind == TY_REDUCE_SCATTER || what->kind == TY_ALL_TO_ALL) {
    if (count % n)
      return ty_fail(TY_EINVAL, "%s: x: expected a multiple of %lld elements, one part for each rank, got %s", who,
                     (long long)n, ty_describe(what->x));
    if (what->kind == TY_REDUCE_SCATTER) count /= n;
  }
  bool fits = !what->out || (what->out->v.count == count && what->out->v.dtype == what->x->v.dtype);
  return fits || ty_fail(TY_EINVAL, "%s: out: expected %lld elements of %s, got %s", who, (long long)count,
                         ty_dtype_name[what->x->v.dtype], ty_describe(what->out));
}

static bool check_rank(const ty_comm *c, const char *who, int rank) {
  if (rank >= 0 && rank < c->size) return true;
  return ty_fail(TY_EINDEX, "%s: expected a rank of 0 to %d, got %d", who, c->size - 1, rank);
}

/* ---- what ranks do ---- */

int64_t ty_comm_start(ty_comm *c, const ty_collective *what) {
  int64_t crossed = 0, ticket = check(c, what) ? c->backend->start(c, what) : 0;
  if (!ticket) return 0;
  c->traffic.calls[what->kind]++;
  c->traffic.sent[what->kind] += ty_collective_sent(&c->network, what->kind, c->members, c->size, c->rank,
                                                    ty_collective_bytes(what), &crossed);
  c->traffic.crossed += crossed;
  return ticket;
}

bool ty_comm_wait(ty_comm *c, int64_t ticket) { return c->backend->wait(c, ticket); }

ty_comm *ty_comm_split(ty_comm *c, int64_t color, int64_t key, bool *none) {
  *none = false;
  ty_comm *made = c->backend->split(c, color, key, none);
  if (made || *none) c->traffic.calls[TY_SPLIT]++;
  return made;
}

bool ty_comm_send(ty_comm *c, const ty_tensor *x, int to, int64_t tag) {
  if (!check_rank(c, "send", to) || !check_tensor("send", "x", x) || !c->backend->send(c, x, to, tag)) return false;
  int64_t bytes = (int64_t)ty_tensor_bytes(x);
  c->traffic.calls[TY_MESSAGE]++;
  c->traffic.sent[TY_MESSAGE] += bytes;
  if (c->members[to] / c->network.per_node != c->members[c->rank] / c->network.per_node) c->traffic.crossed += bytes;
  return true;
}

ty_tensor *ty_comm_receive(ty_comm *c, int from, int64_t tag) {
  return check_rank(c, "receive", from) ? c->backend->receive(c, from, tag) : NULL;
}
