/* The table of CPU kernels, compiled once per instruction set like the kernels themselves. */
#include "../../kernels/cpu/cpu.h"
#include "../ops/op.h"

#define OP(name, outs, args, fwd, bwd, kernel, ...) ty_kernel TY_KERNEL(kernel);
#include "../ops/ops.def"
#undef OP

/* The entry of rows whose kernel is `none`. */
bool TY_KERNEL(none)(const ty_kernel_args *k) { return ty_fail(TY_EUNSUPPORTED, "no kernel"); }

extern ty_kernel *const TY_KERNEL(kernels)[TY_OP_COUNT];
ty_kernel *const TY_KERNEL(kernels)[TY_OP_COUNT] = {
#define OP(name, outs, args, fwd, bwd, kernel, ...) TY_KERNEL(kernel),
#include "../ops/ops.def"
#undef OP
};
