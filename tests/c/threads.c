/* Several threads of the host program, each with tensors of its own; storages may be shared. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../kernels/cpu/parallel.h"
#include "check.h"

enum { THREADS = 4, ROUNDS = 200 };

static void start(void *(*run)(void *), void **context) {
  pthread_t thread[THREADS];
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&thread[i], NULL, run, context[i]) == 0);
  for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
}

static void *compute(void *context) {
  int id = *(int *)context;
  for (int round = 0; round < ROUNDS; round++) {
    ty_scope scope;
    ty_scope_open(&scope);
    int64_t n = 10 + (id * 37 + round * 11) % 500;
    ty_tensor *x = ty_full(TY_INTS(n, 4), id + 1, TY_F64, TY_CPU);
    ty_set_requires_grad(x, true);
    ty_tensor *y = ty_sum(ty_mul(ty_square(x), round), TY_NO_INTS, false, TY_DTYPE_DEFAULT);
    bool ok;
    CHECK_NEAR(ty_item(y, &ok), 4.0 * (double)n * (id + 1) * (id + 1) * round, 1e-6);
    CHECK(ok && ty_backward(y));
    CHECK_NEAR(value_at(ty_grad_of(x), n * 4 - 1), 2.0 * (id + 1) * round, 1e-9);
    ty_scope_close(&scope);
  }
  return NULL;
}

void test_threads_compute(void) {
  int id[THREADS];
  void *context[THREADS];
  for (int i = 0; i < THREADS; i++) id[i] = i, context[i] = &id[i];
  start(compute, context);
}

/* All multiply with one weight, of which kernels keep panels: each result is the same whoever makes and uses them. */
typedef struct multiplier {
  ty_tensor *weight, *x, *want;
} multiplier;

static void *multiply_shared(void *context) {
  multiplier *m = context;
  for (int round = 0; round < ROUNDS; round++) {
    ty_scope scope;
    ty_scope_open(&scope);
    ty_tensor *y = ty_linear(m->x, m->weight, NULL, NULL, "none"), *off;
    bool ok;
    off = ty_max(ty_abs(ty_sub(y, m->want)), TY_NO_INTS, false);
    CHECK_NEAR(ty_item(off, &ok), 0, 0);
    CHECK(ok);
    if (round % 16 == 5) ty_kept_drop_all();
    ty_scope_close(&scope);
  }
  ty_release(m->weight);
  return NULL;
}

void test_threads_keep_weights(void) {
  multiplier m[THREADS];
  void *context[THREADS];
  ty_tensor *weight = ty_randn(TY_INTS(160, 300), TY_F32, TY_CPU), *x = ty_randn(TY_INTS(100, 300), TY_F32, TY_CPU);
  ty_tensor *want = ty_linear(x, weight, NULL, NULL, "none");
  for (int i = 0; i < THREADS; i++) {
    m[i] = (multiplier){ ty_keep(ty_detach(weight)), ty_keep(ty_clone(x)), ty_keep(ty_clone(want)) };
    context[i] = &m[i];
  }
  start(multiply_shared, context);
  for (int i = 0; i < THREADS; i++) ty_release(m[i].x), ty_release(m[i].want);
  CHECK(ty_kept_bytes() >= 0);
  ty_kept_drop_all();
  CHECK_INT(ty_kept_bytes(), 0);
}

typedef struct sharer {
  ty_tensor *view;
  int id;
} sharer;

static void *read_shared(void *context) {
  sharer *s = context;
  for (int round = 0; round < ROUNDS; round++) {
    ty_scope scope;
    ty_scope_open(&scope);
    ty_tensor *row = ty_select(s->view, 0, s->id);
    bool ok;
    CHECK_NEAR(ty_item(ty_sum(row, TY_NO_INTS, false, TY_DTYPE_DEFAULT), &ok), 1000.0 * s->id, 0);
    CHECK(ok);
    ty_scope_close(&scope);
  }
  ty_release(s->view); /* the last of them frees the storage, whoever that is */
  return NULL;
}

void test_threads_share_storage(void) {
  int64_t before = live_bytes();
  ty_tensor *x = ty_tensor_new(TY_CPU, TY_F32, 2, (int64_t[]){ THREADS, 1000 });
  for (int i = 0; i < THREADS * 1000; i++) ((float *)x->v.data)[i] = (float)(i / 1000);
  sharer s[THREADS];
  void *context[THREADS];
  for (int i = 0; i < THREADS; i++) {
    s[i] = (sharer){ ty_tensor_alias(x), i };
    context[i] = &s[i];
  }
  ty_release(x);
  start(read_shared, context);
  CHECK_INT(live_bytes(), before);
}

static void *own_state(void *context) {
  int id = *(int *)context;
  CHECK(ty_grad_enabled()); /* whatever the thread that started this one has set */
  ty_set_grad_enabled(id % 2);
  ty_default_generator()->seed = (uint64_t)id;
  for (int round = 0; round < ROUNDS; round++) {
    ty_scope scope;
    ty_scope_open(&scope);
    ty_tensor *x = ty_ones(TY_INTS(2, id + 2), TY_F32, TY_CPU);
    ty_set_requires_grad(x, true);
    CHECK(ty_matmul(x, x) == NULL || id == 0);
    char shape[20];
    snprintf(shape, sizeof shape, "[2, %d]", id + 2);
    CHECK(id == 0 || strstr(ty_error(), shape) != NULL);
    CHECK_INT(ty_mul(x, 2)->requires_grad, id % 2);
    CHECK_INT(ty_default_generator()->seed, id);
    ty_scope_close(&scope);
  }
  return NULL;
}

void test_threads_have_their_own_state(void) {
  int id[THREADS];
  void *context[THREADS];
  for (int i = 0; i < THREADS; i++) id[i] = i, context[i] = &id[i];
  ty_set_grad_enabled(false);
  ty_error_clear();
  uint64_t seed = ty_default_generator()->seed;
  start(own_state, context);
  CHECK(!ty_grad_enabled() && ty_error()[0] == '\0');
  CHECK_INT(ty_default_generator()->seed, seed);
  ty_set_grad_enabled(true);
}

static void *make_small(void *context) {
  ty_tensor **t = context;
  for (int i = 0; i < ROUNDS; i++) {
    t[i] = ty_tensor_new(TY_CPU, TY_F32, 1, (int64_t[]){ 1 + i % 100 });
    *(float *)t[i]->v.data = (float)i;
  }
  return NULL;
}

/* Made by one thread, released by another: the counters must agree in the end. */
void test_threads_hand_over(void) {
  static ty_tensor *made[THREADS][ROUNDS];
  void *context[THREADS];
  int64_t before = live_bytes();
  for (int i = 0; i < THREADS; i++) context[i] = made[i];
  start(make_small, context);
  CHECK_THAT(live_bytes() >= before + 64 * THREADS * ROUNDS, "%lld bytes live of what ended threads made",
             (long long)(live_bytes() - before));
  for (int i = 0; i < THREADS; i++) {
    for (int j = 0; j < ROUNDS; j++) {
      CHECK_NEAR(*(float *)made[i][j]->v.data, j, 0);
      ty_release(made[i][j]);
    }
  }
  CHECK_INT(live_bytes(), before);
}

/* ---- the pool of the kernels ---- */

enum { PIECES = 1000, JOBS = 2000 };

static void count_one(void *context, int64_t begin, int64_t end) {
  int *seen = context;
  for (int64_t i = begin; i < end; i++) seen[i]++;
}

/* The first piece splits its work again. */
static void count_piece(void *context, int64_t begin, int64_t end) {
  if (begin == 0) ty_parallel_for(end, 1, count_one, context);
  else count_one(context, begin, end);
}

static void *run_jobs(void *context) {
  int seen[PIECES] = { 0 };
  ty_set_num_threads(2 + *(int *)context);
  for (int j = 0; j < JOBS; j++) ty_parallel_for(PIECES - j % 7, 1 + j % 50, count_piece, seen);
  int64_t total = 0, expected = 0;
  for (int i = 0; i < PIECES; i++) total += seen[i];
  for (int j = 0; j < JOBS; j++) expected += PIECES - j % 7;
  CHECK_INT(total, expected);
  CHECK_INT(seen[0], JOBS);
  CHECK_INT(ty_num_threads(), 2 + *(int *)context);
  return NULL;
}

/* Several owners at once, with more threads than there are cores: every piece is computed exactly once. */
void test_threads_share_the_pool(void) {
  int id[THREADS];
  void *context[THREADS];
  for (int i = 0; i < THREADS; i++) id[i] = i, context[i] = &id[i];
  int before = ty_num_threads();
  start(run_jobs, context);
  CHECK_INT(ty_num_threads(), before); /* of this thread: nobody else changes it */
}

/* A child process has none of its parent's workers, and starts its own. */
void test_threads_after_fork(void) {
  int seen[PIECES] = { 0 }, status = -1;
  ty_set_num_threads(3);
  ty_parallel_for(PIECES, 1, count_piece, seen);
  pid_t child = fork();
  if (child == 0) {
    ty_parallel_for(PIECES, 1, count_piece, seen);
    int64_t total = 0;
    for (int i = 0; i < PIECES; i++) total += seen[i];
    _exit(total == 2 * PIECES ? 0 : 1);
  }
  CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
  ty_set_num_threads(0);
}
