/* The table of CUDA kernels, part of the backend's library: what is not written is NULL, and an error when it is wanted. */
#include "../ops/op.h"

#define OP(name, outs, args, fwd, bwd, kernel, ...) extern ty_kernel ty_cuda_##kernel __attribute__((weak));
#include "../ops/ops.def"
#undef OP

extern ty_kernel *const ty_cuda_kernels[TY_OP_COUNT];
ty_kernel *const ty_cuda_kernels[TY_OP_COUNT] = {
#define OP(name, outs, args, fwd, bwd, kernel, ...) ty_cuda_##kernel,
#include "../ops/ops.def"
#undef OP
};

extern const int ty_cuda_kernel_count;
const int ty_cuda_kernel_count = TY_OP_COUNT;
