/* Where the elements come from that stand around a tensor, for every backend. */
#ifndef TY_KERNELS_PAD_H
#define TY_KERNELS_PAD_H

#include "base.h"
#include "scalar.h"

typedef enum ty_padding { TY_PAD_CONSTANT, TY_PAD_REFLECT, TY_PAD_REPLICATE, TY_PAD_CIRCULAR } ty_padding;

/* pad_edges: how many elements come before x in each of its dimensions. */
typedef struct ty_p_pad {
  ty_padding mode;
  int64_t before[TY_MAX_DIMS];
} ty_p_pad;

/* The position of x, of n, that stands at i, which counts from x's first and is at most n - 1 (reflect) or n (circular)
 * before it or behind its last; -1: the constant. */
TY_INLINE int64_t ty_pad_source(ty_padding mode, int64_t i, int64_t n) {
  if (i >= 0 && i < n) return i;
  switch (mode) {
    case TY_PAD_REFLECT: return i < 0 ? -i : 2 * (n - 1) - i;
    case TY_PAD_REPLICATE: return i < 0 ? 0 : n - 1;
    case TY_PAD_CIRCULAR: return i < 0 ? i + n : i - n;
    default: return -1;
  }
}

#endif
