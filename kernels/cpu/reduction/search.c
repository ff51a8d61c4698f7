/* Places in sorted lines, and counts between edges. */
#include <math.h>

#include "../cpu.h"

#define GRAIN 4096

typedef struct search_ctx {
  const void *sorted, *values;
  int64_t *at;
  int64_t n, m; /* of a line of each */
  bool right, shared;
} search_ctx;

/* How many elements of `s` come before v; NaN is largest. right: those equal to v do as well. Without branches: every
 * second guess would be wrong. largest: of the numbers. */
#define PLACE(name, T, largest)                                                  \
  static inline int64_t place_##name(const T *s, int64_t n, T v, bool right) {   \
    const T *base = s;                                                           \
    if (n == 0) return 0;                                                        \
    if (v != v) { /* before NaN come all numbers, and equal to it is the rest */ \
      if (right) return n;                                                       \
      right = true, v = (largest);                                               \
    }                                                                            \
    while (n > 1) {                                                              \
      const int64_t half = n / 2;                                                \
      const bool before = right ? base[half - 1] <= v : base[half - 1] < v;      \
      base += half & -(int64_t)before;                                           \
      n -= half;                                                                 \
    }                                                                            \
    return base - s + (right ? *base <= v : *base < v);                          \
  }                                                                              \
  static void search_##name(void *context, int64_t begin, int64_t end) {         \
    const search_ctx *c = context;                                               \
    for (int64_t i = begin; i < end; i++) {                                      \
      const T *s = (const T *)c->sorted + (c->shared ? 0 : i / c->m * c->n);     \
      c->at[i] = place_##name(s, c->n, ((const T *)c->values)[i], c->right);     \
    }                                                                            \
  }
PLACE(f32, float, INFINITY)
PLACE(f64, double, INFINITY)
PLACE(i64, int64_t, INT64_MAX)

/* in: sorted, values of its dtype (f32, f64, i64); flag: right; flag2: one line for all values. */
bool TY_KERNEL(searchsorted)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  const ty_view *s = k->in[0], *v = k->in[1];
  search_ctx c = { .sorted = s->data,
                   .values = v->data,
                   .at = k->out[0]->data,
                   .n = s->size[s->ndim - 1],
                   .m = v->ndim ? v->size[v->ndim - 1] : 1,
                   .right = p->flag,
                   .shared = p->flag2 };
  ty_parallel_for(v->count, GRAIN, s->dtype == TY_F32 ? search_f32 : s->dtype == TY_F64 ? search_f64 : search_i64, &c);
  return true;
}

/* ---- counts between edges ---- */

enum { PIECE = 65536, OWN = 2048 /* counts that a piece keeps to itself */ };

typedef struct count_ctx {
  const void *x, *edges;
  int64_t *counts;
  int64_t n, bins;
  bool even;
} count_ctx;

/* Bin i has its lower edge and not the upper one, which only the last has too. Evenly spaced edges are found by a
 * division, and rounding is made good by a look at both. */
#define COUNT(name, T)                                                                          \
  static inline int64_t bin_##name(const T *e, int64_t bins, T x, bool even, T low, T factor) { \
    if (!(x >= low && x <= e[bins])) return -1;                                                 \
    if (!even) {                                                                                \
      int64_t b = place_##name(e, bins + 1, x, true) - 1;                                       \
      return b < bins ? b : bins - 1;                                                           \
    }                                                                                           \
    int64_t b = (int64_t)((x - low) * factor);                                                  \
    if (b >= bins) b = bins - 1;                                                                \
    while (b > 0 && x < e[b]) b--;                                                              \
    while (b + 1 < bins && x >= e[b + 1]) b++;                                                  \
    return b;                                                                                   \
  }                                                                                             \
  static void count_##name(void *context, int64_t begin, int64_t end) {                         \
    const count_ctx *c = context;                                                               \
    const T *x = c->x, *e = c->edges;                                                           \
    T low = e[0], factor = (T)c->bins / (e[c->bins] - low);                                     \
    bool even = c->even && factor < INFINITY;                                                   \
    int64_t own[OWN] = { 0 };                                                                   \
    bool few = c->bins <= OWN;                                                                  \
    for (int64_t i = begin; i < end; i++) {                                                     \
      int64_t b = bin_##name(e, c->bins, x[i], even, low, factor);                              \
      if (b < 0) continue;                                                                      \
      if (few) own[b]++;                                                                        \
      else __atomic_fetch_add(&c->counts[b], 1, __ATOMIC_RELAXED);                              \
    }                                                                                           \
    for (int64_t b = 0; few && b < c->bins; b++)                                                \
      if (own[b]) __atomic_fetch_add(&c->counts[b], own[b], __ATOMIC_RELAXED);                  \
  }
COUNT(f32, float)
COUNT(f64, double)

/* in: x [n], edges [bins + 1] of one dtype; out: i64 [bins]; flag: evenly spaced. */
bool TY_KERNEL(histogram_counts)(const ty_kernel_args *k) {
  const ty_p_dim *p = k->params;
  count_ctx c = { .x = k->in[0]->data,
                  .edges = k->in[1]->data,
                  .counts = k->out[0]->data,
                  .n = k->in[0]->count,
                  .bins = k->out[0]->count,
                  .even = p->flag };
  for (int64_t b = 0; b < c.bins; b++) c.counts[b] = 0;
  ty_parallel_for(c.n, PIECE, k->in[0]->dtype == TY_F32 ? count_f32 : count_f64, &c);
  return true;
}
