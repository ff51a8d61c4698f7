/* matmul_trit: x times a weight of trit-planes, without multiplications inside of a group. All 243 signed sums of five
 * neighbours in x are made by additions; a byte of trits is then the place of its sum, and what is left to do for five
 * columns is one addition. Xiao et al. 2025, "PTQTP"; tables of sums as in Wei et al. 2024, "T-MAC". Tables of 26 KB
 * leave no room in the first cache, and a load for each byte is slower than decoding 32 of them: trit_bytes.h. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "../half.h"
#include "cpu.h"
#include "sum_of_eight.h"

enum { TRITS = 5, SUMS = 256, TILE = 1024 }; /* TILE: rows of the weight for which the sums are made once */

typedef struct job {
  const ty_kernel_args *k;
  const void *scales;
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

/* With AVX-512 it has not been timed. */
#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
#include "trit_bytes.h"
#define BY_BYTES
#endif

/* The kernel by its tables of sums, which wants scales in the type of x. */
static bool by_tables(job *j) {
  const ty_view *x = j->k->in[0], *scales = j->k->in[2];
  const size_t bytes = sizeof(float) * (size_t)scales->count;
  j->scales = scales->data;
  if (scales->dtype == TY_F16) {
    float *wide = ty_scratch_alloc(bytes);
    if (!wide) return ty_fail(TY_ENOMEM, "matmul_trit: out of memory");
    ty_f16_load(wide, scales->data, scales->count);
    j->scales = wide;
  }
  j->tiles = (j->rows + TILE - 1) / TILE;
  ty_parallel_for(x->count / j->columns * j->tiles, 1, x->dtype == TY_F64 ? tiles_f64 : tiles_f32, j);
  if (scales->dtype == TY_F16) ty_scratch_free((void *)(uintptr_t)j->scales, bytes);
  return !j->failed || ty_fail(TY_ENOMEM, "matmul_trit: out of memory");
}

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
#ifdef BY_BYTES
  bool ok;
  if (by_bytes(&j, &ok)) return ok;
#endif
  return by_tables(&j);
}
