/* The threads of the CPU backend: one pool for the process, whose workers start when first needed, look out for work for
 * a moment after each job and then sleep. The thread that asks takes part. A job has one owner: somebody who finds the
 * pool taken (another Lua state, a thread of the host program) computes alone, which keeps as many threads busy as were
 * allowed, where a pool for each would fight over the cores. */
#define _GNU_SOURCE
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum { MOST_THREADS = 1024, LOOKOUT_NS = 100000, LOOKS = 64 };

static _Thread_local int allowed;   /* threads this thread may use; 0: the default */
static _Thread_local bool in_piece; /* a piece that asks again computes alone */

/* The pieces of one participant. He takes them in order, which keeps the same memory with the same core from one op to
 * the next; whoever is done early takes from the others. */
typedef struct share {
  _Alignas(64) atomic_llong next;
  int64_t end;
} share;

static struct {
  ty_range_fn *fn;
  void *context;
  int64_t n, step;
  bool polls;
  share share[MOST_THREADS];
} job;

/* generation << 32 | participants << 16 | open << 15 | workers inside. A worker enters an open job by counting itself
 * in; the owner closes the job when no piece is left, so nobody waits for a worker that is still waking up. */
static atomic_ullong state;
enum { OPEN = 1 << 15, INSIDE = OPEN - 1 };

static atomic_flag taken = ATOMIC_FLAG_INIT;
static int workers; /* started; belongs to whoever has taken the pool */
static atomic_int sleepers;
static pthread_mutex_t bed_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bed = PTHREAD_COND_INITIALIZER;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

static bool stopped(void) { return job.polls && ty_interrupted; }

static void take_part(int self, int participants) {
  in_piece = true;
  for (int i = 0; i < participants; i++) {
    share *s = &job.share[(self + i) % participants];
    int64_t piece;
    while (!stopped() && (piece = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed)) < s->end) {
      int64_t begin = piece * job.step, end = begin + job.step;
      job.fn(job.context, begin, end < job.n ? end : job.n);
    }
  }
  in_piece = false;
}

/* ---- workers ---- */

/* Until the state is of another generation than `seen`. */
static unsigned long long await(unsigned seen) {
  unsigned long long s;
  int64_t start = now_ns();
  do {
    for (int i = 0; i < LOOKS; i++) {
      s = atomic_load_explicit(&state, memory_order_acquire);
      if ((unsigned)(s >> 32) != seen) return s;
      relax();
    }
  } while (now_ns() - start < LOOKOUT_NS);
  pthread_mutex_lock(&bed_lock);
  atomic_fetch_add(&sleepers, 1);
  while (s = atomic_load(&state), (unsigned)(s >> 32) == seen) pthread_cond_wait(&bed, &bed_lock);
  atomic_fetch_sub(&sleepers, 1);
  pthread_mutex_unlock(&bed_lock);
  return s;
}

static void *work(void *number) {
  int self = (int)(intptr_t)number;
  unsigned seen = 0;
  for (;;) {
    unsigned long long s = await(seen);
    seen = (unsigned)(s >> 32);
    int participants = (int)(s >> 16 & 0xffff);
    while ((s & OPEN) && (unsigned)(s >> 32) == seen && self < participants) {
      if (!atomic_compare_exchange_weak(&state, &s, s + 1)) continue;
      take_part(self, participants);
      atomic_fetch_sub(&state, 1);
      break;
    }
  }
  return NULL;
}

/* A process made by fork() has none of the workers. */
static void after_fork(void) {
  workers = 0;
  atomic_store(&sleepers, 0);
  atomic_flag_clear(&taken);
  pthread_mutex_init(&bed_lock, NULL);
  pthread_cond_init(&bed, NULL);
}

static void start_workers(int wanted) {
  static bool prepared;
  if (!prepared) pthread_atfork(NULL, NULL, after_fork);
  prepared = true;
  sigset_t all, before; /* signals are for the host program's own threads */
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  while (workers < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, (void *)(intptr_t)(workers + 1)) != 0) break;
    pthread_detach(thread);
    workers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- jobs ---- */

static void publish(int participants, int64_t pieces) {
  for (int i = 0; i < participants; i++) {
    atomic_store_explicit(&job.share[i].next, pieces * i / participants, memory_order_relaxed);
    job.share[i].end = pieces * (i + 1) / participants;
  }
  unsigned long long generation = (atomic_load(&state) >> 32) + 1;
  atomic_store(&state, (generation & 0xffffffff) << 32 | (unsigned long long)participants << 16 | OPEN);
  if (atomic_load(&sleepers) > 0) {
    pthread_mutex_lock(&bed_lock);
    pthread_cond_broadcast(&bed);
    pthread_mutex_unlock(&bed_lock);
  }
}

static void close_job(void) {
  atomic_fetch_and(&state, ~(unsigned long long)OPEN);
  for (int looks = 0; atomic_load_explicit(&state, memory_order_acquire) & INSIDE; looks++) {
    if (looks < 1000) relax();
    else sched_yield(); /* the worker has lost its core to another program */
  }
}

static void split(int64_t n, int64_t grain, ty_range_fn *fn, void *context, bool polls) {
  if (n <= 0) return;
  if (grain < 1) grain = 1;
  int64_t pieces = (n + grain - 1) / grain;
  if (pieces == 1) {
    fn(context, 0, n);
    return;
  }
  /* A few pieces per thread: enough to balance and to notice Ctrl-C, few enough to stay cheap. */
  int threads = ty_parallel_threads();
  int64_t most = (int64_t)threads * 16, step = grain * ((pieces + most - 1) / most);
  pieces = (n + step - 1) / step;
  if (threads > pieces) threads = (int)pieces;
  if (threads > 1 && !atomic_flag_test_and_set(&taken)) {
    if (workers < threads - 1) start_workers(threads - 1);
    if (threads > workers + 1) threads = workers + 1;
    job.fn = fn;
    job.context = context;
    job.n = n;
    job.step = step;
    job.polls = polls;
    publish(threads, pieces);
    take_part(0, threads);
    close_job();
    atomic_flag_clear(&taken);
    return;
  }
  for (int64_t i = 0; i < n && !(polls && ty_interrupted); i += step) fn(context, i, i + step < n ? i + step : n);
}

void ty_parallel_for(int64_t n, int64_t grain, ty_range_fn *fn, void *context) { split(n, grain, fn, context, true); }
void ty_parallel_for_all(int64_t n, int64_t grain, ty_range_fn *fn, void *context) {
  split(n, grain, fn, context, false);
}

/* ---- how many ---- */

static int default_threads;

static void count_threads(void) {
  const char *wish = getenv("OMP_NUM_THREADS"); /* what people set, and what the peers obey; may be a list by level */
  long n = wish ? strtol(wish, NULL, 10) : 0;
  cpu_set_t set;
  if (n < 1) n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  default_threads = n < MOST_THREADS ? (int)n : MOST_THREADS;
}

int ty_parallel_threads(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (in_piece) return 1;
  if (allowed) return allowed;
  pthread_once(&once, count_threads);
  return default_threads;
}

void ty_parallel_set_threads(int n) { allowed = n < 1 ? 0 : n < MOST_THREADS ? n : MOST_THREADS; }
