/* Ranks that are processes of MPI, by way of libtycho_mpi.so beside libtycho.so (TYCHO_MPI_LIBRARY names another). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../device/beside.h"
#include "../ops/op.h"
#include "../tensor/ledger.h"
#include "../tensor/memory.h"
#include "internal.h"
#include "mpi/plugin.h"

/* A collective, or a message on its way. */
typedef struct pending {
  struct pending *next;
  int64_t ticket; /* 0: a message */
  ty_collective what;
  void *request;
  void *bytes; /* of a message */
} pending;

typedef struct process {
  ty_comm base;
  void *comm;
  int *ranks; /* what base.members points at */
  int64_t tickets;
  pending *pending;
} process;

static const ty_comm_backend backend;
static const ty_mpi_plugin *mpi;
static double began, ahead;
static bool taken;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- loading ---- */

static bool fail(const char *who, const char *problem) { return ty_fail(TY_EIO, "%s: %s", who, problem); }

static bool load(void) {
  static const char missing[] = "this build has no MPI (libopenmpi-dev or libmpich-dev, and ./run build again)";
  char problem[2048];
  const char *path; /* parts of an MPI look for its symbols: global */
  void *library = ty_open_beside("libtycho_mpi.so", "TYCHO_MPI_LIBRARY", RTLD_NOW | RTLD_GLOBAL, missing,
                                 "MPI cannot be loaded", &path, problem, sizeof problem);
  if (!library) return ty_fail(TY_EUNSUPPORTED, "ranks: %s", problem);
  ty_mpi_open_fn *open = (ty_mpi_open_fn *)(uintptr_t)dlsym(library, "ty_mpi_open");
  mpi = open ? open() : NULL;
  if (mpi && mpi->version == TY_MPI_VERSION) return true;
  mpi = NULL;
  return ty_fail(TY_EUNSUPPORTED, "ranks: %s belongs to another version of Tycho", path);
}

const char *ty_comm_mpi(void) { return mpi || load() ? mpi->library() : NULL; }

/* A rank that ends in an error ends the others, which would wait for it. */
static void finish(int status, void *context) {
  (void)context;
  mpi->finish(status);
}

/* ---- life ---- */

static process *process_new(void *comm, int rank, int size) {
  process *p = calloc(1, sizeof *p);
  int *ranks = calloc((size_t)size, sizeof *ranks);
  if (!p || !ranks) {
    free(p);
    free(ranks);
    ty_fail(TY_ENOMEM, "comm: out of memory");
    return NULL;
  }
  for (int i = 0; i < size; i++) ranks[i] = i;
  p->base = (ty_comm){
    .backend = &backend, .rank = rank, .size = size, .members = ranks, .network = { .per_node = size }
  };
  p->comm = comm;
  p->ranks = ranks;
  return p;
}

static bool started_by_mpi(void) {
  static const char *const names[] = { "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS" };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (getenv(names[i])) return true;
  return false;
}

ty_comm *ty_comm_process(void) {
  if (taken) {
    ty_fail(TY_EINVAL, "ranks: this process is a rank already");
    return NULL;
  }
  if (!started_by_mpi()) {
    int64_t world = ty_world_open(1, &(ty_network){ { 0, HUGE_VAL }, { 0, HUGE_VAL }, 1 });
    ty_comm *c = world ? ty_comm_join(world, 0) : NULL;
    if (world) ty_world_close(world);
    return c;
  }
  void *world;
  int rank, size;
  if (!mpi && !load()) return NULL;
  const char *problem = mpi->init(&world, &rank, &size);
  if (problem) {
    fail("ranks", problem);
    return NULL;
  }
  taken = true;
  atomic_store(&ty_ledgers, true);
  began = seconds();
  on_exit(finish, NULL);
  process *p = process_new(world, rank, size);
  return p ? &p->base : NULL;
}

/* What is still on its way keeps its memory: the other ranks write and read it. */
static void mpi_leave(ty_comm *c) {
  process *p = (process *)c;
  for (pending *next; p->pending; p->pending = next) {
    next = p->pending->next;
    bool done = false;
    mpi->test(p->pending->request, &done);
    if (!done) continue;
    ty_release(p->pending->what.x);
    ty_release(p->pending->what.out);
    free(p->pending->bytes);
    free(p->pending);
  }
  mpi->free(p->comm);
  free(p->ranks);
  free(p);
}

/* ---- waiting ---- */

/* Asks again and again: soon at first, then every twentieth of a millisecond. */
static bool breathe(int *turns) {
  if (ty_interrupted) return ty_fail(TY_EINTR, "interrupted");
  if (++*turns > 200) nanosleep(&(struct timespec){ 0, 50000 }, NULL);
  return true;
}

/* Messages that have gone. */
static void tidy(process *p) {
  for (pending **at = &p->pending, *one; (one = *at);) {
    bool done = false;
    if (one->ticket == 0) mpi->test(one->request, &done);
    if (!done) {
      at = &one->next;
      continue;
    }
    *at = one->next;
    free(one->bytes);
    free(one);
  }
}

/* ---- collectives ---- */

static char type_of(ty_dtype dtype) {
  switch (dtype) {
    case TY_F64: return 'd';
    case TY_F32: return 'f';
    case TY_F16: return 'h';
    case TY_BF16: return 'b';
    case TY_I64: return 'q';
    case TY_I32: return 'i';
    case TY_I16: return 's';
    case TY_I8: return 'c';
    case TY_U8: return 'B';
    default: return 'x';
  }
}

static int64_t mpi_start(ty_comm *c, const ty_collective *what) {
  static const int kinds[] = { [TY_ALL_REDUCE] = TY_MPI_ALL_REDUCE, [TY_REDUCE_SCATTER] = TY_MPI_REDUCE_SCATTER,
                               [TY_ALL_GATHER] = TY_MPI_ALL_GATHER, [TY_BROADCAST] = TY_MPI_BROADCAST,
                               [TY_ALL_TO_ALL] = TY_MPI_ALL_TO_ALL, [TY_BARRIER] = TY_MPI_BARRIER };
  process *p = (process *)c;
  ty_mpi_collective m = { .kind = kinds[what->kind], .reduction = (int)what->reduction, .root = what->root };
  if (what->x) {
    m.x = what->x->v.data;
    m.out = (what->out ? what->out : what->x)->v.data;
    m.type = type_of(ty_dtype_of(what->x));
    m.count = what->x->v.count * (m.type == 'x' ? ty_dtype_size[what->x->v.dtype] : 1);
  }
  pending *one = calloc(1, sizeof *one);
  if (!one) return ty_fail(TY_ENOMEM, "%s: out of memory", ty_comm_names[what->kind]), 0;
  const char *problem = mpi->start(p->comm, &m, &one->request);
  if (problem) {
    free(one);
    return fail(ty_comm_names[what->kind], problem), 0;
  }
  one->what = *what;
  ty_retain(what->x);
  ty_retain(what->out);
  one->ticket = ++p->tickets;
  one->next = p->pending;
  p->pending = one;
  return one->ticket;
}

static void finish_collective(const ty_comm *c, const ty_collective *what) {
  ty_tensor *result = what->out ? what->out : what->x;
  bool reduces = what->kind == TY_ALL_REDUCE || what->kind == TY_REDUCE_SCATTER;
  if (reduces && what->reduction == TY_REDUCE_MEAN)
    ty_reduce_divide(result->v.data, c->size, result->v.count, ty_dtype_of(result));
  if (result) ty_storage_wrote(result->storage);
}

static bool mpi_wait(ty_comm *c, int64_t ticket) {
  process *p = (process *)c;
  pending **at = &p->pending, *one;
  while (*at && ((*at)->ticket != ticket || !ticket)) at = &(*at)->next;
  one = *at;
  if (!one) return ty_fail(TY_EINVAL, "wait: there is no collective %lld, or it was waited for", (long long)ticket);
  const char *who = ty_comm_names[one->what.kind], *problem = NULL;
  bool done = false;
  for (int turns = 0; !done;) {
    problem = mpi->test(one->request, &done);
    if (!done && !breathe(&turns)) return false; /* it is still under way */
  }
  *at = one->next;
  if (!problem) finish_collective(c, &one->what);
  ty_release(one->what.x);
  ty_release(one->what.out);
  free(one);
  return !problem || fail(who, problem);
}

static ty_comm *mpi_split(ty_comm *c, int64_t color, int64_t key, bool *none) {
  process *p = (process *)c;
  void *made;
  int rank, size, place = c->members[c->rank];
  if (color > INT32_MAX || key > INT32_MAX || key < INT32_MIN) {
    ty_fail(TY_EINVAL, "split: colors and keys have 32 bits with MPI");
    return NULL;
  }
  const char *problem = mpi->split(p->comm, color < 0 ? -1 : (int)color, (int)key, &made, &rank, &size);
  if (problem) {
    fail("split", problem);
    return NULL;
  }
  *none = !made;
  process *q = made ? process_new(made, rank, size) : NULL;
  if (!q) return NULL;
  ty_mpi_collective who = { .kind = TY_MPI_ALL_GATHER, .x = &place, .out = q->ranks, .count = 1, .type = 'i' };
  void *request = NULL;
  bool done = false;
  problem = mpi->start(made, &who, &request);
  for (int turns = 0; !problem && !done && breathe(&turns);) problem = mpi->test(request, &done);
  if (done && !problem) return &q->base;
  if (problem) fail("split", problem);
  mpi_leave(&q->base);
  return NULL;
}

/* ---- messages: what is to come, then the values ---- */

typedef struct header {
  int64_t dtype, ndim, size[TY_MAX_DIMS];
} header;

static bool check_tag(const char *who, int64_t tag) {
  if (tag >= 0 && tag <= (mpi->most_tag - 1) / 2) return true;
  return ty_fail(TY_EINVAL, "%s: tag: expected 0 to %d with MPI, got %lld", who, (mpi->most_tag - 1) / 2,
                 (long long)tag);
}

static bool post(process *p, const void *bytes, size_t n, int to, int tag) {
  pending *one = calloc(1, sizeof *one);
  if (one) one->bytes = malloc(n ? n : 1);
  if (!one || !one->bytes) {
    free(one);
    return ty_fail(TY_ENOMEM, "send: out of memory");
  }
  if (n) memcpy(one->bytes, bytes, n);
  const char *problem = mpi->send(p->comm, one->bytes, (int64_t)n, to, tag, &one->request);
  if (problem) {
    free(one->bytes);
    free(one);
    return fail("send", problem);
  }
  one->next = p->pending;
  p->pending = one;
  return true;
}

static bool mpi_send(ty_comm *c, const ty_tensor *x, int to, int64_t tag) {
  process *p = (process *)c;
  if (!check_tag("send", tag)) return false;
  tidy(p);
  header h = { .dtype = x->v.dtype, .ndim = x->v.ndim };
  for (int i = 0; i < x->v.ndim; i++) h.size[i] = x->v.size[i];
  return post(p, &h, sizeof h, to, (int)tag * 2) && post(p, x->v.data, ty_tensor_bytes(x), to, (int)tag * 2 + 1);
}

/* Waits for a message of exactly so many bytes. */
static bool take(process *p, void *bytes, size_t n, int from, int tag) {
  bool there = false;
  int64_t count = 0;
  const char *problem = NULL;
  for (int turns = 0; !there && !problem;) {
    problem = mpi->probe(p->comm, from, tag, &there, &count);
    if (!there && !problem && !breathe(&turns)) return false;
  }
  if (!problem && count != (int64_t)n) problem = "a message of another length came";
  if (!problem) problem = mpi->receive(p->comm, bytes, (int64_t)n, from, tag);
  return !problem || fail("receive", problem);
}

static ty_tensor *mpi_receive(ty_comm *c, int from, int64_t tag) {
  process *p = (process *)c;
  header h;
  if (!check_tag("receive", tag) || !take(p, &h, sizeof h, from, (int)tag * 2)) return NULL;
  if (h.dtype < 0 || h.dtype >= TY_DTYPES || h.ndim < 0 || h.ndim > TY_MAX_DIMS)
    return fail("receive", "what came is no tensor"), NULL;
  ty_tensor *t = ty_tensor_new(TY_CPU, (ty_dtype)h.dtype, (int)h.ndim, h.size);
  if (t && !take(p, t->v.data, ty_tensor_bytes(t), from, (int)tag * 2 + 1)) {
    ty_release(t);
    t = NULL;
  }
  return t;
}

static double mpi_clock(const ty_comm *c) {
  (void)c;
  return seconds() - began + ahead;
}
static void mpi_advance(ty_comm *c, double s) {
  (void)c;
  ahead += s;
}

static const ty_comm_backend backend = { mpi_leave, mpi_start,   mpi_wait,  mpi_split,
                                         mpi_send,  mpi_receive, mpi_clock, mpi_advance };
