/* matmul_trit: x times a weight of trit-planes, without multiplications inside of a group. A byte is five trits t, the
 * magnitude of t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4 in its low seven bits and the sign in the highest: bytes of 64 rows lie
 * beside each other, so that one vector of them needs one table. The signed sums of five neighbours in x are made by
 * additions; a byte is the place of its sum, and what is left to do for five columns is one addition. Xiao et al. 2025,
 * "PTQTP"; tables of sums as in Wei et al. 2024, "T-MAC". trit_blocks.h does it with integers, by vectors. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "../../half.h"
#include "../cpu.h"

/* BLOCK: rows whose bytes lie beside each other; TALL: blocks for which the sums are made once; a magnitude above
 * LARGEST counts as that. */
enum { TRITS = 5, CODES = 243, LARGEST = CODES / 2, SIGN = 128, SUMS = 256, BLOCK = 64, TALL = 16 };

typedef struct job {
  const ty_kernel_args *k;
  const void *scales;
  int64_t columns, group, groups, rows, blocks, bytes, planes, tiles;
  bool failed;
} job;

static inline int64_t at_most(int64_t n, int64_t most) { return n < most ? n : most; }

/* The bytes of a block in a group: [bytes][planes][BLOCK]. */
static inline const uint8_t *codes_of(const job *j, int64_t g, int64_t block) {
  return (const uint8_t *)j->k->in[1]->data + (g * j->blocks + block) * j->bytes * j->planes * BLOCK;
}

#define REAL float
#define FN(name) name##_f32
#include "trit_real.h"
#undef REAL
#undef FN

#define REAL double
#define FN(name) name##_f64
#include "trit_real.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "trit_blocks.h"
#define BY_BLOCKS
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
  j->tiles = (j->blocks + TALL - 1) / TALL;
  ty_parallel_for(x->count / j->columns * j->tiles, 1, x->dtype == TY_F64 ? tiles_f64 : tiles_f32, j);
  if (scales->dtype == TY_F16) ty_scratch_free((void *)(uintptr_t)j->scales, bytes);
  return !j->failed || ty_fail(TY_ENOMEM, "matmul_trit: out of memory");
}

/* in: x [..., columns], trits u8 [groups, blocks, bytes, planes, BLOCK], scales [groups, rows, planes]. */
bool TY_KERNEL(matmul_trit)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *trits = k->in[1];
  if (!k->out[0]->count) return true;
  job j = { .k = k,
            .columns = x->size[x->ndim - 1],
            .group = ((const ty_p_dim *)k->params)->k,
            .groups = trits->size[0],
            .rows = k->in[2]->size[1],
            .blocks = trits->size[1],
            .bytes = trits->size[2],
            .planes = trits->size[3] };
#ifdef BY_BLOCKS
  bool ok;
  if (by_blocks(&j, &ok)) return ok;
#endif
  return by_tables(&j);
}
