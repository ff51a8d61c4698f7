/* Products with block-quantized weights on the CPU's tiles, for quant_linear.c. */
#ifndef TY_KERNELS_CPU_QUANT_TILES_H
#define TY_KERNELS_CPU_QUANT_TILES_H

#include "../cpu.h"

/* y [rows][n] = x [rows][k] W' + bias; bias [n], or NULL. */
typedef struct ty_quant_product {
  ty_dtype dtype;
  const char *w;
  int64_t w_row; /* bytes */
  int64_t rows, n, k;
  const float *x, *bias;
  float *y;
  bool far; /* set: numbers are too large to be multiplied so, and y is not what it should be */
} ty_quant_product;

/* Whether products of this size with this format are faster so. */
bool TY_KERNEL(quant_has_tiles)(ty_dtype dtype, int64_t rows, int64_t n);
/* False after ty_fail() when scratch memory is short. */
bool TY_KERNEL(quant_tiles)(ty_quant_product *p);

#endif
