/* matmul_trit: x times a weight of trit-planes, without multiplications inside of a group. All 243 signed sums of five
 * neighbours in x are made by additions; a byte of trits is then the place of its sum, and what is left to do for five
 * columns is one addition. Xiao et al. 2025, "PTQTP"; tables of sums as in Wei et al. 2024, "T-MAC". */
#include "cpu.h"

enum { TRITS = 5, SUMS = 256, TILE = 1024 }; /* TILE: rows of the weight for which the sums are made once */

typedef struct job {
  const ty_kernel_args *k;
  int64_t columns, group, groups, rows, planes, bytes, tiles;
  bool failed;
} job;

#define REAL float
#define FN(name) name##_f32
#include "trit_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "trit_real.h"

bool TY_KERNEL(matmul_trit)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *trits = k->in[1];
  if (!k->out[0]->count) return true;
  job j = { .k = k,
            .columns = x->size[x->ndim - 1],
            .group = ((const ty_p_dim *)k->params)->k,
            .groups = trits->size[0],
            .rows = trits->size[1],
            .planes = trits->size[2],
            .bytes = trits->size[3] };
  j.tiles = (j.rows + TILE - 1) / TILE;
  ty_parallel_for(x->count / j.columns * j.tiles, 1, x->dtype == TY_F64 ? tiles_f64 : tiles_f32, &j);
  return !j.failed || ty_fail(TY_ENOMEM, "matmul_trit: out of memory");
}
