/* Random numbers by a seed and a position: seeded_noise. */
#include "../../seeded.h"
#include "../cpu.h"

typedef struct seeded_ctx {
  const ty_view *x, *y;
  const ty_p_seeded_noise *p;
} seeded_ctx;

static void fill(void *context, int64_t begin, int64_t end) {
  const seeded_ctx *c = context;
  const bool wide = c->x->dtype == TY_F64;
  for (int64_t i = begin; i < end; i++) {
    double y;
    if (c->p->kind == 0) {
      y = (double)ty_seeded_normal(c->p->seed, (uint64_t)i);
    } else if (c->p->kind == 1) {
      y = (double)ty_uniform_f32(ty_seeded_words(c->p->seed, (uint64_t)i, 0).w[0]);
    } else {
      y = ty_seeded_poisson(c->p->seed, (uint64_t)i,
                            wide ? ((const double *)c->x->data)[i] : (double)((const float *)c->x->data)[i]);
    }
    if (wide) ((double *)c->y->data)[i] = y;
    else ((float *)c->y->data)[i] = (float)y;
  }
}

bool TY_KERNEL(seeded_noise)(const ty_kernel_args *k) {
  seeded_ctx c = { k->in[0], k->out[0], k->params };
  ty_parallel_for(c.y->count, 1024, fill, &c);
  return true;
}
