/* Rows of block-quantized tensors to f32, for the other kernels of this folder. Bit-equal to ggml's reference, which is
 * why these files are compiled without fused multiplications (CMakeLists.txt). */
#ifndef TY_KERNELS_CPU_DEQUANTIZE_H
#define TY_KERNELS_CPU_DEQUANTIZE_H

#include "../cpu.h"

/* Elements [begin, end) of a row of `columns`; begin and end are multiples of 32. */
void TY_KERNEL(decode_row)(ty_dtype dtype, const void *row, int64_t columns, int64_t begin, int64_t end, float *out);

#endif
