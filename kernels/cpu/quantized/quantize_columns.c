/* quantize_columns: rows of w rounded to a grid column after column, the error of each taken out of the columns that
 * follow (Frantar et al. 2023, "GPTQ", section 3.3, the steps inside of a block). Rows do not know of each other: a tile
 * of them is turned, so that a vector has one column of several rows. */
#include "../cpu.h"

#include <math.h>

enum { LANES = 16 };

typedef struct job {
  const ty_kernel_args *k;
  int64_t rows, n;
  bool failed;
} job;

#define REAL float
#define FN(name) name##_f32
#define RINT rintf
#include "quantize_columns_real.h"
#undef REAL
#undef FN
#undef RINT

#define REAL double
#define FN(name) name##_f64
#define RINT rint
#include "quantize_columns_real.h"

bool TY_KERNEL(quantize_columns)(const ty_kernel_args *k) {
  const ty_view *w = k->in[0];
  if (!w->count) return true;
  job j = { .k = k, .rows = w->size[0], .n = w->size[1] };
  int64_t tiles = (j.rows + LANES - 1) / LANES;
  ty_parallel_for(tiles, 1 + 4096 / (j.n * j.n), w->dtype == TY_F64 ? tiles_f64 : tiles_f32, &j);
  return !j.failed || ty_fail(TY_ENOMEM, "quantize_columns: out of memory");
}
