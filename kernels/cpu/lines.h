/* A contiguous tensor seen around one of its dimensions: [outer, size, inner]. A line is what a fixed (outer, inner)
 * leaves: `size` elements, `inner` apart. */
#ifndef TY_KERNELS_CPU_LINES_H
#define TY_KERNELS_CPU_LINES_H

#include "../base.h"

typedef struct ty_lines {
  int64_t outer, size, inner;
} ty_lines;

static inline ty_lines ty_lines_of(const ty_view *v, int dim) {
  ty_lines l = { 1, 1, 1 };
  for (int d = 0; d < v->ndim; d++) *(d < dim ? &l.outer : d == dim ? &l.size : &l.inner) *= v->size[d];
  return l;
}

#endif
