/* dropout: element i stays, scaled by 1/(1-p), when its random word (params.h says which) is at least p 2^32.
 * Nothing is kept for the backward pass, which makes the same words again. */
#include <string.h>

#include "../random_words.h"

typedef struct job {
  const void *x;
  void *y;
  ty_p_random p;
} job;

#define PIECE(suffix, type)                                                                            \
  static void piece_##suffix(void *context, int64_t begin, int64_t end) {                              \
    const job *c = context;                                                                            \
    const uint32_t least = (uint32_t)(c->p.a * 0x1p32);                                                \
    const type scale = (type)(1 / (1 - c->p.a));                                                       \
    uint32_t word[RANDOM_WORDS];                                                                       \
    for (int64_t at = begin; at < end; at += RANDOM_WORDS) { /* begin is a multiple of RANDOM_WORDS */ \
      const type *restrict x = (const type *)c->x + at;                                                \
      type *restrict y = (type *)c->y + at;                                                            \
      int64_t n = end - at < RANDOM_WORDS ? end - at : RANDOM_WORDS;                                   \
      random_words(&c->p, at, word);                                                                   \
      for (int64_t i = 0; i < n; i++) y[i] = word[i] >= least ? x[i] * scale : 0;                      \
    }                                                                                                  \
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
  ty_parallel_for(x->count, 8 * RANDOM_WORDS, x->dtype == TY_F64 ? piece_f64 : piece_f32, &j);
  return true;
}
