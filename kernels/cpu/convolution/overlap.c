/* Frames that lie `hop` positions apart, added up where they overlap. */
#include "../cpu.h"

typedef struct job {
  const ty_view *x, *y;
  int64_t hop, count, size, length;
} job;

/* Positions of all lines, one after another. Each adds its frames in their order. */
#define OVERLAP(T)                                                                        \
  static void overlap_##T(void *context, int64_t begin, int64_t end) {                    \
    const job *j = context;                                                               \
    while (begin < end) {                                                                 \
      const int64_t line = begin / j->length, from = begin % j->length;                   \
      const int64_t to = from + end - begin < j->length ? from + end - begin : j->length; \
      const T *restrict x = (const T *)j->x->data + line * j->count * j->size;            \
      T *restrict y = (T *)j->y->data + line * j->length;                                 \
      for (int64_t i = from; i < to; i++) y[i] = 0;                                       \
      int64_t k = from < j->size ? 0 : (from - j->size) / j->hop + 1;                     \
      for (; k < j->count && k * j->hop < to; k++) {                                      \
        const T *restrict frame = x + k * j->size;                                        \
        const int64_t at = k * j->hop, first = from > at ? from - at : 0;                 \
        const int64_t last = to - at < j->size ? to - at : j->size;                       \
        for (int64_t i = first; i < last; i++) y[at + i] += frame[i];                     \
      }                                                                                   \
      begin += to - from;                                                                 \
    }                                                                                     \
  }
OVERLAP(float)
OVERLAP(double)

/* in: [lines, count, size]; out: [lines, length]; k: the hop. */
bool TY_KERNEL(overlap_add)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *y = k->out[0];
  if (!y->count) return true;
  const job j = {
    x, y, ((const ty_p_dim *)k->params)->k, x->size[x->ndim - 2], x->size[x->ndim - 1], y->size[y->ndim - 1]
  };
  ty_parallel_for(y->count, 16384, y->dtype == TY_F64 ? overlap_double : overlap_float, (void *)(uintptr_t)&j);
  return true;
}
