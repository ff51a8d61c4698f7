/* How products of matrices are cut into tiles, where somebody asks for another way than the one their shapes give: a
 * tuner that has learnt what is faster. What is computed does not depend on it, to the last bit. */
#ifndef TY_KERNELS_TILING_H
#define TY_KERNELS_TILING_H

#include "base.h"

typedef struct ty_tiling {
  int64_t rows, columns; /* of a tile of the result, at most; 0: by the shape */
  int pack;              /* A is copied into panels: 1, read where it lies: -1, 0: by the shape */
} ty_tiling;

/* For all threads from the next product on. */
void ty_tiling_ask(ty_tiling wanted);
ty_tiling ty_tiling_asked(void);

#endif
