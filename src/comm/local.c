/* Ranks that are threads of one process. The rank that comes last to a collective computes it for all. */
#include <stdlib.h>
#include <string.h>

#include "../ops/op.h"
#include "../tensor/ledger.h"
#include "../tensor/memory.h"
#include "world.h"

typedef struct local {
  ty_comm base;
  ty_world *world;
  group *of;
  int place;       /* in the world */
  bool first;      /* that of joining */
  int64_t tickets; /* collectives that were begun */
} local;

static const ty_comm_backend backend;

static local *of_comm(ty_comm *c) { return (local *)c; }
static member *me(const local *c) { return &c->world->ranks[c->place]; }

static void lock(const local *c) { pthread_mutex_lock(&c->world->lock); }
static void unlock(const local *c) { pthread_mutex_unlock(&c->world->lock); }

/* The processor's time since `began` was that of comm/. */
static void discount(const local *c, double began) { me(c)->own += ty_thread_seconds() - began; }

static void wait_until(const local *c, double began, double until) {
  double at = began - me(c)->own + me(c)->waited;
  if (until > at) me(c)->waited += until - at;
}

/* ---- joining and leaving ---- */

static local *comm_new(ty_world *w, group *of, int rank) {
  local *c = calloc(1, sizeof *c);
  if (!c) {
    ty_fail(TY_ENOMEM, "comm: out of memory");
    return NULL;
  }
  c->base = (ty_comm){
    .backend = &backend, .rank = rank, .size = of->size, .members = of->members, .network = w->network
  };
  c->world = w;
  c->of = of;
  c->place = of->members[rank];
  return c;
}

ty_comm *ty_comm_join(int64_t world, int rank) {
  ty_world *w = ty_world_find(world);
  if (!w) {
    ty_fail(TY_EINVAL, "join: there is no world %lld", (long long)world);
    return NULL;
  }
  pthread_mutex_lock(&w->lock);
  group *all = w->groups;
  while (all->next) all = all->next;
  bool fits = rank >= 0 && rank < w->size, fine = fits && !w->ranks[rank].joined;
  local *c = fine ? comm_new(w, all, rank) : NULL;
  if (c) {
    c->first = true;
    w->ranks[rank].joined = true;
    w->ranks[rank].own = ty_thread_seconds();
  } else if (!fits) {
    ty_fail(TY_EINDEX, "join: expected a rank of 0 to %d, got %d", w->size - 1, rank);
  } else if (!fine) {
    ty_fail(TY_EINVAL, "join: rank %d has joined before", rank);
  }
  pthread_mutex_unlock(&w->lock);
  if (!c) ty_world_release(w);
  return c ? &c->base : NULL;
}

static meeting **find_meeting(group *g, int64_t number) {
  meeting **at = &g->meetings;
  while (*at && (*at)->number != number) at = &(*at)->next;
  return at;
}

/* The rank is through with a meeting. */
static void take_leave(local *c, meeting **at) {
  meeting *m = *at;
  slot *mine = &m->slots[c->base.rank];
  ty_release(mine->what.x);
  ty_release(mine->what.out);
  mine->what.x = mine->what.out = NULL;
  mine->posted = false;
  if (++m->taken < c->of->size) return;
  *at = m->next;
  free(m);
}

static void local_leave(ty_comm *base) {
  local *c = of_comm(base);
  ty_world *w = c->world;
  pthread_mutex_lock(&w->lock);
  for (meeting **at = &c->of->meetings, *m; (m = *at) != NULL; at = m == *at ? &m->next : at) {
    slot *mine = &m->slots[c->base.rank];
    if (!mine->posted) continue;
    if (!m->done)
      ty_world_fail_locked(w, "rank %d left while its %s was not over", c->place, ty_comm_names[mine->what.kind]);
    take_leave(c, at);
  }
  if (c->first) {
    me(c)->left = true;
    pthread_cond_broadcast(&w->changed);
  }
  pthread_mutex_unlock(&w->lock);
  ty_world_release(w);
  free(c);
}

static double local_clock(const ty_comm *base) {
  const local *c = (const local *)base;
  return ty_thread_seconds() - me(c)->own + me(c)->waited;
}
static void local_advance(ty_comm *base, double seconds) { me(of_comm(base))->waited += seconds; }

/* ---- computing a collective ---- */

static void copy(void *to, const void *from, size_t bytes) {
  if (bytes && to != from) memcpy(to, from, bytes);
}

/* Of all ranks together, with the memory of their tensors. */
static bool compute(const group *g, meeting *m) {
  int n = g->size;
  const ty_collective *first = &m->slots[0].what;
  if (first->kind == TY_BARRIER) return true;
  ty_dtype dtype = ty_dtype_of(first->x);
  size_t bytes = ty_tensor_bytes(first->x), part = bytes / (size_t)n;
  const void **x = malloc(sizeof *x * (size_t)n);
  if (!x) return false;
  for (int r = 0; r < n; r++) x[r] = m->slots[r].what.x->v.data;
  switch (first->kind) {
    case TY_ALL_REDUCE:
      ty_reduce(m->slots[0].what.x->v.data, x, n, first->x->v.count, dtype, first->reduction);
      for (int r = 1; r < n; r++) copy(m->slots[r].what.x->v.data, x[0], bytes);
      break;
    case TY_REDUCE_SCATTER:
      for (int r = 0; r < n; r++) {
        ty_reduce(m->slots[r].what.out->v.data, x, n, first->x->v.count / n, dtype, first->reduction);
        for (int s = 0; s < n; s++) x[s] = (const char *)x[s] + part;
      }
      break;
    case TY_ALL_GATHER:
      for (int r = 0; r < n; r++)
        for (int s = 0; s < n; s++) copy((char *)m->slots[r].what.out->v.data + bytes * (size_t)s, x[s], bytes);
      break;
    case TY_BROADCAST:
      for (int r = 0; r < n; r++) copy(m->slots[r].what.x->v.data, x[first->root], bytes);
      break;
    default: /* all to all */
      for (int r = 0; r < n; r++)
        for (int s = 0; s < n; s++)
          copy((char *)m->slots[r].what.out->v.data + part * (size_t)s, (const char *)x[s] + part * (size_t)r, part);
  }
  free(x);
  return true;
}

/* The groups of a split: those of a color in order of keys, then of ranks. */
static bool divide(ty_world *w, const group *g, meeting *m) {
  for (int r = 0; r < g->size; r++) {
    slot *s = &m->slots[r];
    if (s->got || s->what.color < 0) continue;
    int size = 0;
    for (int other = r; other < g->size; other++) size += m->slots[other].what.color == s->what.color;
    group *made = calloc(1, sizeof *made);
    int *members = calloc((size_t)size, sizeof *members);
    if (!made || !members) {
      free(made);
      free(members);
      return false;
    }
    made->size = size;
    made->members = members;
    made->next = w->groups; /* the one of all ranks stays the last */
    w->groups = made;
    for (int place = 0; place < size; place++) {
      int best = -1;
      for (int other = r; other < g->size; other++) {
        const slot *o = &m->slots[other];
        if (!o->got && o->what.color == s->what.color && (best < 0 || o->what.key < m->slots[best].what.key))
          best = other;
      }
      m->slots[best].got = made;
      m->slots[best].got_rank = place;
      members[place] = g->members[best];
    }
  }
  return true;
}

/* All have come: computes, and says when it is over by the clocks. */
static void meet(ty_world *w, const group *g, meeting *m) {
  const ty_collective *what = &m->slots[0].what;
  bool ok = what->kind == TY_SPLIT ? divide(w, g, m) : compute(g, m);
  double start = 0;
  for (int r = 0; r < g->size; r++) {
    const member *of = &w->ranks[g->members[r]];
    if (m->slots[r].time > start) start = m->slots[r].time;
    if (of->busy > start) start = of->busy;
  }
  ty_link link = ty_ring_link(&w->network, g->members, g->size);
  m->end = start + ty_collective_seconds(what->kind, link, g->size, ty_collective_bytes(what));
  for (int r = 0; r < g->size; r++) w->ranks[g->members[r]].busy = m->end;
  m->done = true;
  if (!ok) ty_world_fail_locked(w, "%s: out of memory", ty_comm_names[what->kind]);
  pthread_cond_broadcast(&w->changed);
}

/* ---- beginning one ---- */

/* Whether a rank means the same as the one that came first; fails the world where it does not. */
static bool agrees(local *c, const meeting *m, const ty_collective *what) {
  for (int r = 0; r < c->of->size; r++) {
    const ty_collective *other = &m->slots[r].what;
    if (!m->slots[r].posted) continue;
    bool same = other->kind == what->kind && other->root == what->root && other->reduction == what->reduction;
    if (same && what->x) same = other->x->v.count == what->x->v.count && other->x->v.dtype == what->x->v.dtype;
    if (same) return true;
    ty_world_fail_locked(c->world, "rank %d called %s%s%s where rank %d called %s%s%s%s", c->place,
                         ty_comm_names[what->kind], what->x ? " of " : "", what->x ? ty_describe(what->x) : "",
                         c->of->members[r], ty_comm_names[other->kind], other->x ? " of " : "",
                         other->x ? ty_describe(other->x) : "",
                         other->kind == what->kind && other->root != what->root             ? ", with another root"
                         : other->kind == what->kind && other->reduction != what->reduction ? ", with another reduction"
                                                                                            : "");
    return false;
  }
  return true;
}

static meeting *meeting_of(local *c, int64_t number) {
  meeting **at = find_meeting(c->of, number);
  if (*at) return *at;
  meeting *m = calloc(1, sizeof *m + sizeof *m->slots * (size_t)c->of->size);
  if (!m) {
    ty_world_fail_locked(c->world, "out of memory");
    return NULL;
  }
  m->number = number;
  return *at = m;
}

static int64_t start_locked(local *c, const ty_collective *what, double began) {
  ty_world *w = c->world;
  meeting *m = w->failed ? NULL : meeting_of(c, c->tickets + 1);
  if (!m || !agrees(c, m, what)) return ty_world_problem(w, ty_comm_names[what->kind]), 0;
  m->slots[c->base.rank] = (slot){ .posted = true, .what = *what, .time = began - me(c)->own + me(c)->waited };
  ty_retain(what->x);
  ty_retain(what->out);
  if (++m->posted == c->of->size) meet(w, c->of, m);
  return ++c->tickets;
}

static int64_t local_start(ty_comm *base, const ty_collective *what) {
  local *c = of_comm(base);
  double began = ty_thread_seconds();
  lock(c);
  int64_t ticket = start_locked(c, what, began);
  unlock(c);
  discount(c, began);
  return ticket;
}

/* ---- waiting for one ---- */

/* The slot of the rank, when it is over; NULL after ty_fail(). */
static slot *await(local *c, int64_t ticket, double began, meeting ***at) {
  *at = find_meeting(c->of, ticket);
  slot *mine = **at ? &(**at)->slots[c->base.rank] : NULL;
  if (!mine || !mine->posted || ticket <= 0 || ticket > c->tickets) {
    ty_fail(TY_EINVAL, "wait: there is no collective %lld, or it was waited for", (long long)ticket);
    return NULL;
  }
  const meeting *m = **at;
  waiting what = { .of = c->of, .meeting = m, .kind = mine->what.kind };
  if (!ty_world_wait(c->world, c->place, &what)) return NULL;
  *at = find_meeting(c->of, ticket); /* others may have come and gone */
  if (c->world->failed) return ty_world_problem(c->world, ty_comm_names[mine->what.kind]), NULL;
  wait_until(c, began, m->end);
  return mine;
}

static bool local_wait(ty_comm *base, int64_t ticket) {
  local *c = of_comm(base);
  double began = ty_thread_seconds();
  lock(c);
  meeting **at;
  slot *mine = await(c, ticket, began, &at);
  if (mine) {
    if (mine->what.x && (mine->what.kind == TY_ALL_REDUCE || mine->what.kind == TY_BROADCAST))
      ty_storage_wrote(mine->what.x->storage);
    if (mine->what.out) ty_storage_wrote(mine->what.out->storage);
    take_leave(c, at);
  }
  unlock(c);
  discount(c, began);
  return mine != NULL;
}

static ty_comm *local_split(ty_comm *base, int64_t color, int64_t key, bool *none) {
  local *c = of_comm(base);
  double began = ty_thread_seconds();
  lock(c);
  int64_t ticket = start_locked(c, &(ty_collective){ .kind = TY_SPLIT, .color = color, .key = key }, began);
  meeting **at;
  slot *mine = ticket ? await(c, ticket, began, &at) : NULL;
  local *made = NULL;
  if (mine) {
    *none = !mine->got;
    if (mine->got) made = comm_new(c->world, mine->got, mine->got_rank);
    take_leave(c, at);
  }
  unlock(c);
  if (made) ty_world_retain(c->world);
  discount(c, began);
  return made ? &made->base : NULL;
}

/* ---- messages ---- */

/* Gives it to the group, and says when it arrives. */
static void post(local *c, mail *m, double began) {
  ty_world *w = c->world;
  int to = c->of->members[m->to];
  int64_t bytes = (int64_t)ty_tensor_bytes(m->t);
  double departs = began - me(c)->own + me(c)->waited;
  if (me(c)->busy > departs) departs = me(c)->busy;
  ty_link link = ty_link_between(&w->network, c->place, to);
  me(c)->busy = departs + (double)bytes / link.bandwidth;
  m->arrives = me(c)->busy + link.latency;
  mail **at = &c->of->mails;
  while (*at) at = &(*at)->next;
  *at = m;
  pthread_cond_broadcast(&w->changed);
}

/* Memory is asked for without the lock: the collector may run, and close groups. */
static bool local_send(ty_comm *base, const ty_tensor *x, int to, int64_t tag) {
  local *c = of_comm(base);
  double began = ty_thread_seconds();
  ty_tensor *t = ty_tensor_new(TY_CPU, ty_dtype_of(x), x->v.ndim, x->v.size);
  if (!t) return false;
  mail *m = calloc(1, sizeof *m);
  if (!m) {
    ty_release(t);
    return ty_fail(TY_ENOMEM, "send: out of memory");
  }
  copy(t->v.data, x->v.data, ty_tensor_bytes(x));
  *m = (mail){ .t = t, .from = c->base.rank, .to = to, .tag = tag };
  lock(c);
  bool failed = c->world->failed;
  if (!failed) {
    ty_ledger_give(t->storage->nbytes); /* the receiver's from now on */
    post(c, m, began);
  }
  unlock(c);
  if (failed) {
    ty_release(t);
    free(m);
    ty_world_problem(c->world, "send");
  }
  discount(c, began);
  return !failed;
}

static ty_tensor *local_receive(ty_comm *base, int from, int64_t tag) {
  local *c = of_comm(base);
  double began = ty_thread_seconds();
  waiting what = { .of = c->of, .from = from, .to = c->base.rank, .tag = tag, .kind = TY_MESSAGE };
  mail *m = NULL;
  lock(c);
  if (ty_world_wait(c->world, c->place, &what)) {
    mail **at = ty_mail_find(c->of, from, c->base.rank, tag);
    m = *at;
    *at = m->next;
    wait_until(c, began, m->arrives);
  }
  unlock(c);
  ty_tensor *t = m ? m->t : NULL;
  free(m);
  if (t && !ty_ledger_take(t->storage->nbytes)) {
    ty_ledger_lend(t->storage->nbytes);
    ty_release(t);
    t = NULL;
  }
  discount(c, began);
  return t;
}

static const ty_comm_backend backend = { local_leave, local_start,   local_wait,  local_split,
                                         local_send,  local_receive, local_clock, local_advance };
