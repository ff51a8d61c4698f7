/* A few output channels by two vectors (or one) of pixels of an f32 convolution: broadcast weights times runs of pixels,
 * which begin anywhere. Results are rows of pixels, as tensors hold them. */
#ifndef TY_KERNELS_CPU_CONV_TILE_H
#define TY_KERNELS_CPU_CONV_TILE_H

#include "conv_micro.h"

#define ABREAST ((MOST_ROWS + LANES - 1) / LANES * LANES) /* from weights to weights of a packed group */

typedef struct tile {
  int64_t k;
  const int64_t *offset;
  const float *a, *b, *bias; /* a [k][ABREAST]; bias or NULL */
  float *c;
  int64_t c_row;
  const char *ahead; /* what is asked for while this is computed: a line for every k, ahead_row bytes apart */
  int64_t ahead_row;
} tile;

typedef void tile_fn(const tile *m);

/* clang-format off */
#define BEGIN_2(i) lanes c##i = (lanes){ 0 } + (m->bias ? m->bias[i] : 0), d##i = c##i;
#define BEGIN_1(i) lanes c##i = (lanes){ 0 } + (m->bias ? m->bias[i] : 0);
#define BEGIN(i, n) BEGIN_##n(i)
#define STORE_2(i) *(lanes *)(to + i * c_row) = c##i; *(lanes *)(to + i * c_row + LANES) = d##i;
#define STORE_1(i) *(lanes *)(to + i * c_row) = c##i;
#define STORE(i, n) STORE_##n(i)

#define TILE(rows, n)                                                                                                  \
  static void tile_##n##_##rows(const tile *m) {                                                                       \
    UPTO_##rows(BEGIN, n)                                                                                              \
    const float *restrict a = m->a;                                                                                    \
    const int64_t *restrict offset = m->offset;                                                                        \
    const char *ahead = m->ahead;                                                                                      \
    const int64_t ahead_row = m->ahead_row;                                                                            \
    _Pragma("GCC unroll 2") for (int64_t k = m->k; k > 0; k--, a += ABREAST) {                                         \
      const float *restrict b = m->b + *offset++;                                                                      \
      __builtin_prefetch(ahead, 0, 2);                                                                                 \
      ahead += ahead_row;                                                                                              \
      LOAD_##n                                                                                                         \
      UPTO_##rows(ACROSS_STEP, n)                                                                                      \
    }                                                                                                                  \
    float *restrict to = m->c;                                                                                         \
    const int64_t c_row = m->c_row;                                                                                    \
    UPTO_##rows(STORE, n)                                                                                              \
  }
#define TILES(n) TILE(1, n) TILE(2, n) TILE(3, n) TILE(4, n) TILE(5, n) TILE(6, n)
#if MOST_ROWS == 14
#define MORE_TILES(n) TILE(7, n) TILE(8, n) TILE(9, n) TILE(10, n) TILE(11, n) TILE(12, n) TILE(13, n) TILE(14, n)
#else
#define MORE_TILES(n)
#endif
TILES(1) MORE_TILES(1) TILES(2) MORE_TILES(2)

static tile_fn *const tiles[2][MOST_ROWS] = { { LIST(tile_1) MORE(tile_1) }, { LIST(tile_2) MORE(tile_2) } };
/* clang-format on */

/* Output channels are taken in even groups of up to MOST_ROWS. */
static inline int64_t tile_groups(int64_t o) { return (o + MOST_ROWS - 1) / MOST_ROWS; }

typedef struct tile_weights {
  const float *weight;
  int64_t o, k, from_out, from_in; /* elements between output channels, and between what they are sums of */
  float *packed;                   /* [group][k][ABREAST] */
} tile_weights;

static void pack_groups(void *context, int64_t begin, int64_t end) {
  const tile_weights *w = context;
  for (int64_t g = begin; g < end; g++) {
    int64_t first = g * w->o / tile_groups(w->o), last = (g + 1) * w->o / tile_groups(w->o);
    float *to = w->packed + g * w->k * ABREAST;
    for (int64_t k = 0; w->from_out == 1 && k < w->k; k++)
      for (int64_t i = first; i < last; i++) to[k * ABREAST + i - first] = w->weight[i + k * w->from_in];
    for (int64_t i = first; w->from_out != 1 && i < last; i += LANES) { /* whole vectors: more than the group has */
      int64_t count = w->o - i < LANES ? w->o - i : LANES;
      interleave(w->weight + i * w->from_out, w->from_out, count, w->k, to + i - first, ABREAST, count);
    }
  }
}

#endif
