/* What tile.h needs: how wide vectors are, its names, to which FN(x) gives the suffix of the element type, and where
 * the elements of a view lie. */
#ifndef TY_KERNELS_CPU_TILE_NAMES_H
#define TY_KERNELS_CPU_TILE_NAMES_H

#include "../../base.h"

#if defined(__AVX512F__)
#define VEC_BYTES 64
#define LANES_F32 16
#define LANES_F64 8
#define GROUP 8 /* rows of a product: their sums fill the vector registers */
#elif defined(__AVX__)
#define VEC_BYTES 32
#define LANES_F32 8
#define LANES_F64 4
#define GROUP 4
#else
#define VEC_BYTES 16
#define LANES_F32 4
#define LANES_F64 2
#ifdef __aarch64__
#define GROUP 8
#else
#define GROUP 4
#endif
#endif

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

enum { SET, ADD, RESCALE }; /* what a product does with what is there */

#define pack_row FN(pack_row)
#define padded FN(padded)
#define product FN(product)
#define transpose FN(transpose)
#define INDEX FN(index)
#define VEC FN(vec)
#define WHOLE FN(whole)

static inline const char *element(const ty_view *v, int64_t a, int64_t b, int64_t c, int64_t d) {
  int64_t offset = a * v->stride[0] + b * v->stride[1] + c * v->stride[2] + d * v->stride[3];
  return (const char *)v->data + offset * ty_dtype_size[v->dtype];
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
