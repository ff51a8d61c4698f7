/* Neighbourhood attention: kernels/neighbourhood.h. The softmax is carried along the rows of a window, so that nothing
 * but the rows of q, k, v and the result is in use at a time. */
#include <string.h>

#include "../../neighbourhood.h"
#include "../cpu.h"
#include "../exp_weight.h"

enum { KEYS = 32 }; /* keys whose scores are kept at a time */

typedef struct neighbourhood {
  const ty_view *q, *k, *v;
  int64_t heads, rows, columns, d, dv; /* heads: of all samples */
  int64_t window[2];
  double scale;
} neighbourhood;

static neighbourhood neighbourhood_of(const ty_view *q, const ty_view *k, const ty_view *v,
                                      const ty_p_neighbourhood *p) {
  return (neighbourhood){ .q = q,
                          .k = k,
                          .v = v,
                          .heads = q->size[0] * q->size[1],
                          .rows = q->size[2],
                          .columns = q->size[3],
                          .d = q->size[4],
                          .dv = v->size[4],
                          .window = { p->window[0], p->window[1] },
                          .scale = p->scale };
}

#define REAL float
#define NAME(x) x##_f32
#include "neighbourhood_real.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_f64
#include "neighbourhood_real.h"

/* in: q, k, v; out: the result and the rows' log-sum-exp. */
bool TY_KERNEL(neighbourhood_attention)(const ty_kernel_args *k) {
  const neighbourhood n = neighbourhood_of(k->in[0], k->in[1], k->in[2], k->params);
  if (k->in[0]->dtype == TY_F64) attend_f64(&n, k->out[0]->data, k->out[1]->data);
  else attend_f32(&n, k->out[0]->data, k->out[1]->data);
  return true;
}

/* in: g, q, k, v, y, lse; out: dq, dk, dv. */
bool TY_KERNEL(neighbourhood_attention_backward)(const ty_kernel_args *k) {
  const neighbourhood n = neighbourhood_of(k->in[1], k->in[2], k->in[3], k->params);
  const void *in[] = { k->in[0]->data, k->in[4]->data, k->in[5]->data };
  void *out[] = { k->out[0]->data, k->out[1]->data, k->out[2]->data };
  if (k->in[1]->dtype == TY_F64) gradients_f64(&n, in, out);
  else gradients_f32(&n, in, out);
  return true;
}
