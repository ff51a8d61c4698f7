/* dropout: element i stays, scaled by 1/(1-p), when its random word (params.h says which) is at least p 2^32.
 * Nothing is kept for the backward pass, which makes the same words again. */
#include <string.h>

#include "../philox.h"
#include "cpu.h"

enum { WORDS = 1024 }; /* made at once, so that the rounds vectorise */

typedef struct job {
  const void *x;
  void *y;
  ty_p_random p;
} job;

/* The words of elements `at` to at + WORDS; at is a multiple of 4. */
static void words(const ty_p_random *p, int64_t at, uint32_t *restrict word) {
  const uint64_t seed = p->seed, first = p->offset + (uint64_t)at / 4;
#pragma omp simd
  for (int b = 0; b < WORDS / 4; b++) {
    ty_philox r = ty_philox_block(seed, first + (uint64_t)b);
    word[4 * b] = r.w[0], word[4 * b + 1] = r.w[1], word[4 * b + 2] = r.w[2], word[4 * b + 3] = r.w[3];
  }
}

#define PIECE(suffix, type)                                                              \
  static void piece_##suffix(void *context, int64_t begin, int64_t end) {                \
    const job *c = context;                                                              \
    const uint32_t least = (uint32_t)(c->p.a * 0x1p32);                                  \
    const type scale = (type)(1 / (1 - c->p.a));                                         \
    uint32_t word[WORDS];                                                                \
    for (int64_t at = begin; at < end; at += WORDS) { /* begin is a multiple of WORDS */ \
      const type *restrict x = (const type *)c->x + at;                                  \
      type *restrict y = (type *)c->y + at;                                              \
      int64_t n = end - at < WORDS ? end - at : WORDS;                                   \
      words(&c->p, at, word);                                                            \
      for (int64_t i = 0; i < n; i++) y[i] = word[i] >= least ? x[i] * scale : 0;        \
    }                                                                                    \
  }
PIECE(f32, float)
PIECE(f64, double)

bool TY_KERNEL(dropout_apply)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *y = k->out[0];
  job j = { .x = x->data, .y = y->data, .p = *(const ty_p_random *)k->params };
  if (j.p.a * 0x1p32 > (double)UINT32_MAX) { /* p is 1 or as good as that */
    if (y->count) memset(j.y, 0, (size_t)y->count * ty_dtype_size[y->dtype]);
    return true;
  }
  ty_parallel_for(x->count, 8 * WORDS, x->dtype == TY_F64 ? piece_f64 : piece_f32, &j);
  return true;
}
