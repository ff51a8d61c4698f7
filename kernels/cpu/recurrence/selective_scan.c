/* Selective state spaces (Gu and Dao 2023, "Mamba"): for each channel d and state n, h[t] = exp(delta[t, d] a[d, n])
 * h[t-1] + delta[t, d] u[t, d] b[t, n], and y[t, d] = sum over n of c[t, n] h[t]. Channels lie side by side, so WIDTH of
 * them go along a sequence together, their states in the cache. The backward pass keeps the states of every CHUNK-th
 * token and makes those between anew.
 *
 * Gradients of b and c are sums over channels: GROUPS parts of fixed blocks of channels, each summed by one task, are
 * added in their order, so that the threads' number does not show. */
#include <string.h>

#include "../cpu.h"
#include "../exp_weight.h"

enum { WIDTH = 32, CHUNK = 32, GROUPS = 8 };

typedef struct context {
  const ty_view *const *in, *const *out;
  int64_t batch, length, channels, states, blocks, groups;
  void *
      partial; /* backward: gradients of b, then of c: [groups][batch, length, states] each; then of a: [batch, d, n] */
  bool failed;
} context;

static context context_of(const ty_kernel_args *k) {
  const int64_t *u = k->in[0]->size;
  context c = { .in = k->in, .out = k->out, .batch = u[0], .length = u[1], .channels = u[2] };
  c.states = k->in[2]->size[1];
  c.blocks = (c.channels + WIDTH - 1) / WIDTH;
  c.groups = c.blocks < GROUPS ? c.blocks : GROUPS;
  return c;
}

static void *room(context *c, size_t bytes) {
  void *memory = ty_scratch_alloc(bytes);
  if (!memory) __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
  return memory;
}

#define REAL float
#define FN(name) name##_f32
#include "selective_scan_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "selective_scan_real.h"

static bool done(const context *c) { return !c->failed || ty_fail(TY_ENOMEM, "out of memory for a selective scan"); }

/* in: u, delta, a, b, c, state; out: y, the last state. */
bool TY_KERNEL(selective_scan)(const ty_kernel_args *k) {
  context c = context_of(k);
  int64_t work = c.length * c.states * WIDTH;
  ty_parallel_for(c.batch * c.blocks, 1 + 20000 / (work + 1), k->in[0]->dtype == TY_F64 ? forward_f64 : forward_f32,
                  &c);
  return done(&c);
}

/* in: as above, then the gradients of y and of the last state (or NULL); out: those of u, delta, a, b, c and state. */
bool TY_KERNEL(selective_scan_backward)(const ty_kernel_args *k) {
  context c = context_of(k);
  bool wide = k->in[0]->dtype == TY_F64;
  int64_t rows = c.batch * c.length * c.states;
  size_t bytes = (size_t)(2 * c.groups * rows + c.batch * c.channels * c.states + 1) * (wide ? 8 : 4);
  if (!(c.partial = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(c.batch * c.groups, 1, wide ? backward_f64 : backward_f32, &c);
  if (!c.failed) {
    ty_parallel_for(rows, 4096, wide ? sum_rows_f64 : sum_rows_f32, &c);
    ty_parallel_for(c.channels * c.states, 4096, wide ? sum_a_f64 : sum_a_f32, &c);
  }
  ty_scratch_free(c.partial, bytes);
  return done(&c);
}
