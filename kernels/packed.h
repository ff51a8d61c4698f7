/* Weights [rows, columns] without their zeros, values in f16, in two forms.
 *
 * Bitmap: of each row (columns + 7) / 8 bytes, column c being bit c % 8 of byte c / 8; the values of a row in the order
 * of its columns; starts [rows + 1], where the values of each row begin and the last ends.
 *
 * Tiled CSL (Xia et al. 2023, "Flash-LLM", section 4): tiles of TALL x WIDE, those of the same rows one after another;
 * for each a list of words of 32 bits, the value in the low half and its place in the tile, column * TALL + row, in the
 * high one; starts [tiles + 1]. A tile at the edge has places beyond the matrix, which nothing may be at. */
#ifndef TY_KERNELS_PACKED_H
#define TY_KERNELS_PACKED_H

#include <stdint.h>

enum { TY_CSL_TALL = 128, TY_CSL_WIDE = 64, TY_CSL_TILE = TY_CSL_TALL * TY_CSL_WIDE };

static inline int64_t ty_csl_count(int64_t n, int64_t tile) { return (n + tile - 1) / tile; }

#endif
