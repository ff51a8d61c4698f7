/* The CUDA backend as the core sees it: a library of its own, loaded when the first GPU is asked for. */
#ifndef TY_DEVICE_CUDA_H
#define TY_DEVICE_CUDA_H

#include "../../kernels/cuda/backend.h"

const ty_cuda_backend *ty_cuda(void);                        /* only where ty_cuda_count() is not 0 */
bool ty_cuda_found_library(int index, ty_cuda_found *found); /* what doctor says; false after the last */

#endif
