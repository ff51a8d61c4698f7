/* Parameters of the kernels of src/ops/index.c, scatter_reduce.c and segments.c. */
#ifndef TY_KERNELS_INDEXING_H
#define TY_KERNELS_INDEXING_H

#include "params.h"

/* ravel_index: sizes of the dimensions that each index tensor counts in. */
typedef struct ty_p_sizes {
  int n;
  int64_t size[TY_MAX_DIMS];
} ty_p_sizes;

/* scatter_combine: what elements that meet become, ty_p_dim.k. */
typedef enum ty_combination { TY_COMBINE_MAX, TY_COMBINE_MIN, TY_COMBINE_PRODUCT } ty_combination;

/* Segments along a dimension of the tensor that has all positions; what a segment without any becomes. */
typedef struct ty_p_segments {
  int dim;
  int k; /* of segment_combine: a ty_combination */
  ty_number empty;
} ty_p_segments;

#endif
