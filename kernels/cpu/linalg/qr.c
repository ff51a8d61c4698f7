/* QR by Householder's reflections, in panels of columns. A panel is reflected column by column; what it does to the
 * rest is I - v t v', with a small triangle t (Schreiber and Van Loan 1989, "A Storage-Efficient WY Representation for
 * Products of Householder Transformations"), which makes nearly everything matrix products. */
#include <math.h>
#include <string.h>

#include "reflections.h"

ty_kernel TY_KERNEL(qr);

typedef struct job {
  const ty_kernel_args *k;
  int64_t m, n, columns, rows; /* of x; columns of q, rows of r */
  bool failed;
} job;

#define REAL float
#define FN(name) name##_f32
#define TYPE TY_F32
#define SAFE SAFE_f32
#include "qr_real.h"
#undef REAL
#undef FN
#undef TYPE
#undef SAFE

#define REAL double
#define FN(name) name##_f64
#define TYPE TY_F64
#define SAFE SAFE_f64
#include "qr_real.h"

/* x [..., m, n] to q [..., m, columns], where that may be 0, and r [..., rows, n]. */
bool TY_KERNEL(qr)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *q = k->out[0], *r = k->out[1];
  const int d = x->ndim;
  job j = { .k = k, .m = x->size[d - 2], .n = x->size[d - 1], .columns = q->size[d - 1], .rows = r->size[d - 2] };
  if (q->count == 0 && r->count == 0) return true;
  int64_t batch = 1;
  for (int i = 0; i < d - 2; i++) batch *= x->size[i];
  ty_range_fn *fn = x->dtype == TY_F64 ? qr_f64 : qr_f32;
  if (batch >= ty_parallel_threads()) ty_parallel_for(batch, 1 + 4096 / (j.m * j.n + 1), fn, &j);
  else fn(&j, 0, batch); /* the products have threads */
  return !j.failed || ty_fail(TY_ENOMEM, "out of memory for a factorization");
}
