/* Forward and backward variables of CTC and of transducers, in logarithms; a sequence is a task. */
#include "../cpu.h"

#include <math.h>

#include "../../scalar.h"

typedef struct job {
  const void *first, *second, *g, *alpha, *loss; /* ctc: emission; rnnt: blank and label */
  const bool *skip;
  const int64_t *steps, *targets; /* lengths */
  void *out[2];
  int64_t t, m; /* steps, states */
} job;

#define REAL float
#define NAME(name) f32_##name
#define EXP ty_exp_f32
#define LOG ty_log_f32
#include "trellis_real.h"
#undef REAL
#undef NAME
#undef EXP
#undef LOG
#define REAL double
#define NAME(name) f64_##name
#define EXP exp
#define LOG log
#include "trellis_real.h"
#undef REAL
#undef NAME
#undef EXP
#undef LOG

static bool check_lengths(const char *name, const int64_t *length, int64_t n, int64_t most) {
  for (int64_t i = 0; i < n; i++)
    if (length[i] < 0 || length[i] > most)
      return ty_fail(TY_EINDEX, "%s: expected 0 to %lld, got %lld for sequence %lld", name, (long long)most,
                     (long long)length[i], (long long)i);
  return true;
}

/* One task for each sequence of x. most: targets of a sequence that its states have room for. */
static bool run(const ty_view *x, job *j, int64_t most, void (*sequences)(void *, int64_t, int64_t)) {
  j->t = x->size[1];
  j->m = x->size[2];
  if (!check_lengths("input_lengths", j->steps, x->size[0], j->t) ||
      !check_lengths("target_lengths", j->targets, x->size[0], most))
    return false;
  ty_parallel_for(x->size[0], 1, sequences, j);
  return true;
}

/* in: emission [n, t, states], skip [n, states], steps [n], targets [n]; out: loss [n], alpha [n, t, states]. */
bool TY_KERNEL(ctc_trellis)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0];
  job j = { .first = x->data,
            .skip = k->in[1]->data,
            .steps = k->in[2]->data,
            .targets = k->in[3]->data,
            .out = { k->out[0]->data, k->out[1]->data } };
  return run(x, &j, x->size[2] / 2, x->dtype == TY_F64 ? f64_ctc : f32_ctc);
}

/* in: g [n], emission, skip, steps, targets, alpha, loss; out: gradient of the emission. */
bool TY_KERNEL(ctc_trellis_backward)(const ty_kernel_args *k) {
  const ty_view *x = k->in[1];
  job j = { .g = k->in[0]->data,
            .first = x->data,
            .skip = k->in[2]->data,
            .steps = k->in[3]->data,
            .targets = k->in[4]->data,
            .alpha = k->in[5]->data,
            .loss = k->in[6]->data,
            .out = { k->out[0]->data } };
  return run(x, &j, x->size[2] / 2, x->dtype == TY_F64 ? f64_ctc_backward : f32_ctc_backward);
}

/* in: blank, label [n, t, u], steps [n], targets [n]; out: loss [n], alpha [n, t, u]. */
bool TY_KERNEL(rnnt_trellis)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0];
  job j = { .first = x->data,
            .second = k->in[1]->data,
            .steps = k->in[2]->data,
            .targets = k->in[3]->data,
            .out = { k->out[0]->data, k->out[1]->data } };
  return run(x, &j, x->size[2] - 1, x->dtype == TY_F64 ? f64_rnnt : f32_rnnt);
}

/* in: g [n], blank, label, steps, targets, alpha, loss; out: gradients of blank and label. */
bool TY_KERNEL(rnnt_trellis_backward)(const ty_kernel_args *k) {
  const ty_view *x = k->in[1];
  job j = { .g = k->in[0]->data,
            .first = x->data,
            .second = k->in[2]->data,
            .steps = k->in[3]->data,
            .targets = k->in[4]->data,
            .alpha = k->in[5]->data,
            .loss = k->in[6]->data,
            .out = { k->out[0]->data, k->out[1]->data } };
  return run(x, &j, x->size[2] - 1, x->dtype == TY_F64 ? f64_rnnt_backward : f32_rnnt_backward);
}
