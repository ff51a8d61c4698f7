/* Distances between all pairs of points of two sets, and their gradient. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../scalar.h"
#include "../cpu.h"

enum { MANY = 8 }; /* points of both sets, from which points of y are put side by side */

typedef struct pairs_ctx {
  const void *x, *y, *g, *r;
  void *out;
  int64_t n, m, d; /* points of x and y in each of a batch, coordinates */
  double p;
} pairs_ctx;

#define REAL float
#define BITS int32_t
#define FN(name) name##_f32
#define MATH(name) ty_##name##_f32
#include "pairs_real.h"
#undef REAL
#undef BITS
#undef FN
#undef MATH

#define REAL double
#define BITS int64_t
#define FN(name) name##_f64
#define MATH(name) ty_##name##_f64
#include "pairs_real.h"

/* fewest: rows of x that one task takes at least. */
static bool run(pairs_ctx *c, const ty_kernel_args *k, const ty_view *x, const ty_view *y, int64_t fewest,
                ty_range_fn *f32, ty_range_fn *f64) {
  c->x = x->data;
  c->y = y->data;
  c->out = k->out[0]->data;
  c->n = x->size[x->ndim - 2];
  c->m = y->size[y->ndim - 2];
  c->d = x->size[x->ndim - 1];
  c->p = ((const ty_p_scalars *)k->params)->a;
  int64_t rows = 1, each = c->m * c->d + 1;
  for (int i = 0; i < x->ndim - 1; i++) rows *= x->size[i];
  ty_parallel_for(rows, 16384 / each + fewest, x->dtype == TY_F64 ? f64 : f32, c);
  return true;
}

/* in: x [..., n, d], y [..., m, d]; a: p. */
bool TY_KERNEL(cdist)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *y = k->in[1];
  const double p = ((const ty_p_scalars *)k->params)->a;
  const bool many = (p == 1 || p == 2) && x->size[x->ndim - 2] >= MANY && y->size[y->ndim - 2] >= MANY &&
                    x->size[x->ndim - 1] > 0;
  pairs_ctx c = { 0 };
  return run(&c, k, x, y, many ? 32 : 1, many ? many_f32 : distances_f32, many ? many_f64 : distances_f64);
}

/* in: g, r [..., n, m], x, y; out: the gradient for x. */
bool TY_KERNEL(cdist_backward)(const ty_kernel_args *k) {
  pairs_ctx c = { .g = k->in[0]->data, .r = k->in[1]->data };
  return run(&c, k, k->in[2], k->in[3], 1, gradients_f32, gradients_f64);
}
