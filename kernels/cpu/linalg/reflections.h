/* What the templates of reflections_real.h need, besides REAL, FN, TYPE and SAFE(sum of squares): whether it is neither
 * rounded away nor infinite. */
#ifndef TY_KERNELS_CPU_REFLECTIONS_H
#define TY_KERNELS_CPU_REFLECTIONS_H

#include <math.h>
#include <string.h>

#include "../matmul/gemm.h"

enum { PANEL = 32 }; /* reflections that are put together */

#define SAFE_f32(sum) ((sum) > 1e-30f && (sum) < 1e30f)
#define SAFE_f64(sum) ((sum) > 1e-280 && (sum) < 1e280)

#endif
