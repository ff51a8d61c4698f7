/* Products with a sparse matrix in compressed rows. Each row, and each sampled element, is one task's, and what is
 * added up for it is added up in one order: nothing depends on the threads. Columns are looked at before they are
 * followed. */
#include <stdatomic.h>
#include <string.h>

#include "../indexing/indexing.h"
#include "../indexing/segments.h"

enum {
  WORK = 1 << 15, /* products that are worth a thread */
  AHEAD = 3,      /* entries */
  NEAR = 1 << 20  /* bytes of a dense matrix that the second cache holds */
};

typedef struct job {
  const int64_t *offsets, *columns, *order;
  const void *a, *b; /* sparse_mm: elements and the dense matrix; sddmm: both dense matrices */
  void *out;
  int64_t m, n, d; /* rows and columns of the sparse matrix, width of the dense ones */
  bool far; /* the rows of the dense matrix that are asked for lie anywhere in memory: they are asked for early */
  atomic_bool bad;
} job;

#define REAL float
#define FN(name) name##_f32
#include "sparse_products_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "sparse_products_real.h"

/* Rows go to tasks by their elements, and one more for each row. */
static bool run(const ty_kernel_args *k, job *c, ty_range_fn *f32, ty_range_fn *f64) {
  const ty_view *offsets = k->in[2], *columns = k->in[3], *order = k->in[4];
  c->offsets = offsets->data, c->columns = columns->data, c->order = order ? order->data : NULL;
  c->a = k->in[0]->data, c->b = k->in[1]->data, c->out = k->out[0]->data;
  c->m = offsets->count - 1, c->n = k->in[1]->size[0], c->d = k->in[1]->size[1];
  c->far = ty_view_bytes(k->in[1]) > NEAR;
  if (!ty_offsets_check(offsets, columns->count) || (order && !ty_index_check(order, columns->count))) return false;
  ty_parallel_for(columns->count + c->m, 1 + WORK / (c->d + 1), k->out[0]->dtype == TY_F64 ? f64 : f32, c);
  return !atomic_load(&c->bad) || ty_index_report(columns, c->n);
}

/* in: values [k], x [n, d], offsets [m + 1], columns [k], order [k] or NULL. */
bool TY_KERNEL(sparse_mm)(const ty_kernel_args *k) {
  job c = { 0 };
  return run(k, &c, k->in[1]->size[1] == 1 ? vector_f32 : rows_f32, k->in[1]->size[1] == 1 ? vector_f64 : rows_f64);
}

/* in: a [m, d], b [n, d], offsets [m + 1], columns [k], order [k] or NULL. Elements that the order leaves out are 0. */
bool TY_KERNEL(sddmm)(const ty_kernel_args *k) {
  job c = { 0 };
  if (k->out[0]->count && k->in[4]) memset(k->out[0]->data, 0, (size_t)ty_view_bytes(k->out[0]));
  return run(k, &c, sampled_f32, sampled_f64);
}
