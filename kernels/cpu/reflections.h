/* What the templates of reflections_real.h need. */
#ifndef TY_KERNELS_CPU_REFLECTIONS_H
#define TY_KERNELS_CPU_REFLECTIONS_H

#include <string.h>

#include "gemm.h"

enum { PANEL = 32 }; /* reflections that are put together */

#endif
