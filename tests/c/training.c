/* Gradients and a training step from C, and the same step with every allocation failing once. */
#include <string.h>

#include "autograd/autograd.h"
#include "check.h"

static ty_tensor *total(ty_tensor *t) { return ty_sum(t, TY_NO_INTS, false, TY_DTYPE_DEFAULT); }

void test_gradients(void) {
  ty_tensor *x = vector(3, (double[]){ 1, 2, 3 }), *y = vector(3, (double[]){ 4, 5, 6 });
  ty_set_requires_grad(x, true);
  ty_tensor *loss = total(ty_mul(ty_square(x), y));
  CHECK(loss && loss->requires_grad && !y->requires_grad);
  CHECK(ty_grad_of(x) == NULL);
  CHECK(ty_backward(loss));
  for (int i = 0; i < 3; i++) CHECK_NEAR(value_at(ty_grad_of(x), i), 2 * (i + 1) * (i + 4), 1e-12);
  CHECK(ty_backward(total(ty_mul(x, 10)))); /* adds to what is there */
  CHECK_NEAR(value_at(ty_grad_of(x), 0), 18, 1e-12);
  CHECK(ty_grad_of(y) == NULL);

  bool was = ty_set_grad_enabled(false);
  CHECK(was && !ty_grad_enabled());
  CHECK(!ty_mul(x, x)->requires_grad);
  ty_set_grad_enabled(true);
  CHECK_FAILS(ty_backward(ty_mul(x, x)), TY_EINVAL, "backward|[3]");
  CHECK_FAILS(ty_backward(total(y)), TY_EINVAL, "backward|grad");
  ty_release(x->grad);
  x->grad = NULL;
}

void test_second_gradients(void) {
  ty_tensor *x = vector(2, (double[]){ 0.5, -1.5 });
  ty_set_requires_grad(x, true);
  ty_tensor *y = total(ty_mul(ty_exp(x), ty_square(x))), *g = NULL, *h = NULL;
  CHECK(ty_run_backward(&y, NULL, 1, &x, &g, 1, (ty_backward_options){ .create_graph = true, .keep_graph = true }));
  ty_scope_add(g);
  ty_tensor *sum = g ? total(g) : NULL;
  CHECK(sum && ty_run_backward(&sum, NULL, 1, &x, &h, 1, (ty_backward_options){ 0 }));
  ty_scope_add(h);
  for (int i = 0; i < 2; i++) {
    double v = i ? -1.5 : 0.5;
    CHECK_NEAR(value_at(g, i), exp(v) * (v * v + 2 * v), 1e-12);
    CHECK_NEAR(value_at(h, i), exp(v) * (v * v + 4 * v + 2), 1e-12);
  }
  CHECK(ty_grad_of(x) == NULL);
}

/* ---- a two-layer regression ---- */

enum { POINTS = 32, WIDTH = 16 };

typedef struct model {
  ty_tensor *x, *y;
  ty_tensor *param[4], *first[4], *second[4]; /* owned */
} model;

static ty_tensor *make(int64_t rows, int64_t columns, double scale) {
  int64_t size[] = { rows, columns };
  ty_tensor *t = ty_tensor_new(TY_CPU, TY_F32, 2, size);
  for (int64_t i = 0; t && i < t->v.count; i++)
    ((float *)t->v.data)[i] = (float)(scale * sin(12.9898 * (double)(i + rows)));
  return t;
}

static void model_init(model *m) {
  m->x = make(POINTS, 1, 2);
  m->y = make(POINTS, 1, 0);
  for (int i = 0; i < POINTS; i++) ((float *)m->y->v.data)[i] = sinf(((float *)m->x->v.data)[i]);
  int64_t size[4][2] = { { 1, WIDTH }, { 1, WIDTH }, { WIDTH, 1 }, { 1, 1 } };
  for (int i = 0; i < 4; i++) {
    m->param[i] = make(size[i][0], size[i][1], i == 3 ? 0 : 0.7);
    m->first[i] = make(size[i][0], size[i][1], 0);
    m->second[i] = make(size[i][0], size[i][1], 0);
    ty_set_requires_grad(m->param[i], true);
  }
}

static void model_clear_grads(model *m) {
  for (int i = 0; i < 4; i++) {
    ty_release(m->param[i]->grad);
    m->param[i]->grad = NULL;
  }
}

static void model_free(model *m) {
  model_clear_grads(m);
  ty_release(m->x);
  ty_release(m->y);
  for (int i = 0; i < 4; i++) {
    ty_release(m->param[i]);
    ty_release(m->first[i]);
    ty_release(m->second[i]);
  }
}

/* One AdamW step; false after a failure. */
static bool train_step(model *m, int64_t step, double *loss_value) {
  ty_scope scope;
  ty_scope_open(&scope);
  ty_tensor *hidden = ty_tanh(ty_add(ty_matmul(m->x, m->param[0]), m->param[1]));
  ty_tensor *out = ty_add(ty_matmul(hidden, m->param[2]), m->param[3]);
  ty_tensor *loss = ty_mean(ty_square(ty_sub(out, m->y)), TY_NO_INTS, false);
  bool ok = loss && ty_backward(loss);
  if (ok) {
    ty_tensor *grads[4];
    for (int i = 0; i < 4; i++) grads[i] = ty_grad_of(m->param[i]);
    *loss_value = ty_item(loss, &ok);
    ok = ok && ty_adam_((ty_tensors){ m->param, 4 }, (ty_tensors){ grads, 4 }, (ty_tensors){ m->first, 4 },
                        (ty_tensors){ m->second, 4 }, (ty_tensors){ NULL, 0 }, 0.02, 0.9, 0.999, 1e-8, 0.01, true, 1,
                        INFINITY, 0, step, false, NULL);
  }
  ty_scope_close(&scope);
  model_clear_grads(m);
  return ok;
}

void test_training(void) {
  model m;
  model_init(&m);
  double first = 0, loss = 0;
  int64_t before = 0;
  for (int step = 1; step <= 400; step++) {
    CHECK_THAT(train_step(&m, step, &loss), "%s", ty_error());
    if (step == 1) {
      first = loss;
      before = live_bytes();
    }
  }
  CHECK_THAT(loss < first / 50, "loss went from %g to %g", first, loss);
  CHECK_INT(live_bytes(), before); /* nothing piles up */
  model_free(&m);
}

static void snapshot(const model *m, float *to) {
  for (int i = 0; i < 4; i++) {
    memcpy(to, m->param[i]->v.data, m->param[i]->storage->nbytes);
    to += m->param[i]->v.count;
  }
}

/* Each allocation fails in turn: the step reports it, changes no parameter, and leaves no bytes behind. */
void test_allocation_failures(void) {
  model m;
  model_init(&m);
  double loss;
  CHECK(train_step(&m, 1, &loss));
  ty_memory_fail_at(0, false);
  CHECK(train_step(&m, 2, &loss));
  int64_t allocations = ty_memory_allocation_count();
  CHECK_THAT(allocations > 50, "%lld allocations in a step", (long long)allocations);
  int64_t before = live_bytes();
  float params[3 * WIDTH + 1], now[3 * WIDTH + 1];
  snapshot(&m, params);
  for (int repeat = 0; repeat < 2; repeat++) {
    for (int64_t n = 1; n <= allocations; n++) {
      ty_error_clear();
      ty_memory_fail_at(n, repeat);
      bool ok = train_step(&m, 3, &loss);
      ty_memory_fail_at(0, false);
      CHECK_THAT(!ok, "the step did not notice that allocation %lld failed", (long long)n);
      CHECK_THAT(ty_error_code() == TY_ENOMEM, "allocation %lld: code %d: %s", (long long)n, (int)ty_error_code(),
                 ty_error());
      CHECK_THAT(live_bytes() == before, "allocation %lld: %lld bytes left", (long long)n,
                 (long long)(live_bytes() - before));
      snapshot(&m, now);
      CHECK_THAT(memcmp(params, now, sizeof now) == 0, "allocation %lld: a failed step changed the parameters",
                 (long long)n);
      if (ok) snapshot(&m, params);
    }
  }
  CHECK_THAT(train_step(&m, 3, &loss), "%s", ty_error());
  model_free(&m);
}
