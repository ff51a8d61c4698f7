/* Recurrent layers: all steps of LSTM, GRU and sLSTM in one call, and their gradients. The weights are packed once, so
 * that a panel of them serves all rows of a thread from the cache; a product of a few rows stays in registers and goes
 * through the gates while it is in the first-level cache. A thread takes some rows of the batch, or heads, through all
 * steps alone; where these are too few, or the weights too large for its cache, threads share the columns of each step.
 * Every sum is taken in the same order in both ways. */
#include <string.h>

#include "../../recurrence.h"
#include "../../scalar.h"
#include "../cpu.h"
#if defined(__AVX512F__)
#include "../exp_rows.h"
#include "recurrence_gates.h"
#endif

#if defined(__AVX512F__)
#define VEC_BYTES 64
#define LANES_F32 16
#define LANES_F64 8
#elif defined(__AVX__)
#define VEC_BYTES 32
#define LANES_F32 8
#define LANES_F64 4
#else
#define VEC_BYTES 16
#define LANES_F32 4
#define LANES_F64 2
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 6 /* of a product: times four vectors, its sums fill the registers */
#elif defined(__AVX__)
#define ROWS 3
#else
#define ROWS 2
#endif

enum {
  WIDE = 4,             /* vectors of a panel of the way back */
  PRIVATE = 768 << 10,  /* bytes of weights that a thread's own cache holds */
  SHARED_WORK = 1 << 20 /* multiply-adds of a step that are worth two meetings of the threads */
};

typedef struct job {
  ty_cell cell;
  int gates, states; /* states: besides h */
  int64_t steps, batch, heads, d, width;
  int64_t blocks;                              /* of rows */
  const void *x, *w, *bias, *state;            /* forward; bias: never NULL */
  void *y, *last, *kept, *saved;               /* kept, saved: NULL when not wanted */
  const void *g, *at_y, *at_states, *at_gates; /* backward; g: NULL or as y */
  void *dx, *du, *dstate;                      /* du: dx itself but for GRU */
  void *pack;
  int64_t head_pack; /* elements of a head in it */
  int64_t step;      /* where threads share one */
} job;

static inline int64_t row_of(const job *j, int64_t block) { return block * j->batch / j->blocks; }

/* Whether threads share every step. If not, the rows of each head are cut so that all threads get as many blocks. */
static bool cut(job *j, size_t element) {
  int64_t threads = ty_parallel_threads(), weights = j->gates * j->d * j->d;
  int64_t least = (j->batch + ROWS - 1) / ROWS;
  j->blocks = least;
  if (threads <= 1) return false;
  bool few = j->heads * j->batch<threads, large = weights * (int64_t)element> PRIVATE;
  if ((few || large) && j->heads * j->batch * weights >= SHARED_WORK) return true;
  while (j->heads * j->blocks % threads != 0 && j->blocks < j->batch && j->blocks < least + threads) j->blocks++;
  return false;
}

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

#define REAL float
#define LANES LANES_F32
#define FN(name) PASTE(name, _f32)
#define NAME FN
#if defined(__AVX512F__)
#define GATE_VECTORS
#endif
#include "../transpose_real.h"
#include "recurrence_cells.h"
#include "recurrence_real.h"
#undef GATE_VECTORS
#undef NAME
#undef REAL
#undef LANES
#undef FN

#define REAL double
#define LANES LANES_F64
#define FN(name) PASTE(name, _f64)
#define NAME FN
#include "../transpose_real.h"
#include "recurrence_cells.h"
#include "recurrence_real.h"
#undef NAME

static job job_of(ty_cell cell, const ty_view *y, const ty_view *w) {
  job j = { .cell = cell, .gates = ty_cell_gates(cell), .states = ty_cell_states(cell) - 1 };
  j.steps = y->size[0], j.batch = y->size[1], j.width = y->size[2];
  j.heads = w->size[0], j.d = w->size[2];
  return j;
}

/* in: x, weight, bias, state; out: y, last, states, gates, the last two empty where they are not kept. */
bool TY_KERNEL(recurrence_steps)(const ty_kernel_args *k) {
  const ty_p_recurrence *p = k->params;
  const ty_view *y = k->out[0], *state = k->in[3];
  bool wide = y->dtype == TY_F64;
  size_t size = wide ? sizeof(double) : sizeof(float);
  job j = job_of(p->cell, y, k->in[1]);
  if (state->count) memcpy(k->out[1]->data, state->data, (size_t)state->count * size);
  if (y->count == 0) return true;
  j.x = k->in[0]->data, j.w = k->in[1]->data, j.state = state->data;
  j.y = y->data, j.last = k->out[1]->data;
  j.saved = k->out[3]->count ? k->out[3]->data : NULL;
  j.kept = k->out[2]->count ? k->out[2]->data : NULL;
  return wide ? forward_f64(&j, k->in[2]) : forward_f32(&j, k->in[2]);
}

/* in: weight, state, y, states, gates, g, g_last; out: dx, du, dstate. */
bool TY_KERNEL(recurrence_backward)(const ty_kernel_args *k) {
  const ty_p_recurrence *p = k->params;
  const ty_view *y = k->in[2], *last = k->in[6], *dstate = k->out[2];
  bool wide = y->dtype == TY_F64;
  size_t bytes = (size_t)dstate->count * (wide ? sizeof(double) : sizeof(float));
  job j = job_of(p->cell, y, k->in[0]);
  if (bytes && last) memcpy(dstate->data, last->data, bytes);
  else if (bytes) memset(dstate->data, 0, bytes);
  if (y->count == 0) return true;
  j.w = k->in[0]->data, j.state = k->in[1]->data, j.at_y = y->data;
  j.at_states = k->in[3]->data, j.at_gates = k->in[4]->data, j.g = k->in[5] ? k->in[5]->data : NULL;
  j.dx = k->out[0]->data, j.du = p->cell == TY_GRU ? k->out[1]->data : k->out[0]->data, j.dstate = dstate->data;
  return wide ? backward_f64(&j) : backward_f32(&j);
}
