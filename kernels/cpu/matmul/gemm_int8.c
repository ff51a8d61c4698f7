/* Exact products of bytes, [m, k] of u8 or i8 times [k, n] of i8, with sums of i32: on the CPU's tiles
 * (gemm_tiles_int8.c), by its instruction for four neighbours in k (AVX512_VNNI), or plainly. Sums wrap around. */
#include "gemm.h"

ty_kernel TY_KERNEL(matmul_int8);

static ty_gemm product(const ty_kernel_args *k, int64_t index) {
  const ty_view *a = k->in[0], *b = k->in[1], *out = k->out[0];
  int d = out->ndim;
  int64_t m = out->size[d - 2], n = out->size[d - 1], at = 0;
  int64_t rest = index;
  for (int i = d - 3; i >= 0; i--) {
    at += rest % a->size[i] * a->stride[i];
    rest /= a->size[i];
  }
  return (ty_gemm){ .m = m,
                    .n = n,
                    .k = a->size[d - 1],
                    .a = (const uint8_t *)a->data + at,
                    .a_row = a->stride[d - 2],
                    .a_col = a->stride[d - 1],
                    .b = b->data,
                    .b_row = b->stride[0],
                    .b_col = b->stride[1],
                    .c = (int32_t *)out->data + index * m * n,
                    .c_row = n,
                    .signed_bytes = a->dtype == TY_I8,
                    .weights = k->weights };
}

/* ---- any CPU ---- */

static void plain_rows(void *context, int64_t begin, int64_t end) {
  const ty_gemm *g = context;
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    uint32_t *restrict c = (uint32_t *)g->c + i * g->c_row;
    const uint8_t *a = (const uint8_t *)g->a + i * g->a_row;
    const int8_t *restrict b = g->b;
    for (int64_t j = 0; j < g->n; j++) c[j] = 0;
    for (int64_t k = 0; k < g->k; k++, b += g->b_row) {
      int32_t x = g->signed_bytes ? (int8_t)a[k * g->a_col] : a[k * g->a_col];
      if (g->b_col == 1) {
        for (int64_t j = 0; j < g->n; j++) c[j] += (uint32_t)(x * b[j]);
      } else {
        for (int64_t j = 0; j < g->n; j++) c[j] += (uint32_t)(x * b[j * g->b_col]);
      }
    }
  }
}

/* ---- AVX512_VNNI ---- */

#if defined(__AVX512F__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512vnni")

#define REAL int32_t
#define NAME(x) x##_int8
#define UNIT uint32_t
#define GROUP 4
#define PIECE uint8_t
#define ELEMENT(g) 1
#define STARTS 1
#define FLIP_A(g) ((g)->signed_bytes ? 0x80808080u : 0u)
#define MULTIPLY_ADD(c, a, b) c = (V)_mm512_dpbusd_epi32((__m512i)(c), _mm512_set1_epi32((int)(a)), (__m512i)(b))
#define KC 256
#define MIN2(a, b) ((a) < (b) ? (a) : (b))

#include "gemm_micro.h"
#include "../transpose_real.h"
#include "gemm_pairs.h"

/* Signed bytes of A become unsigned by adding 128: the sums of a block start with -128 times the column sums of B. */
static void NAME(starts)(const ty_gemm *g, int64_t kc, uint32_t *panel) {
  V sums[2] = { { 0 }, { 0 } };
  for (int64_t i = 0; g->signed_bytes && i < kc; i++)
    for (int v = 0; v < 2; v++) MULTIPLY_ADD(sums[v], 0x80808080u, *(const W *)(panel + i * NR + v * VL));
  for (int v = 0; v < 2; v++) *(W *)(panel - NR + v * VL) = (W) - (W)sums[v];
}

static bool NAME(finishes)(const ty_gemm *g) { return false; }
static void NAME(finish)(const ty_gemm *g, int64_t i, int64_t rows, int64_t j, int64_t columns, const int32_t *sums,
                         int64_t sums_row) {}

#include "gemm_blocked.h"

#pragma GCC pop_options
#endif

bool TY_KERNEL(matmul_int8)(const ty_kernel_args *k) {
  const ty_view *out = k->out[0];
  if (out->count == 0) return true;
  int64_t count = out->count / (out->size[out->ndim - 2] * out->size[out->ndim - 1]);
  for (int64_t i = 0; i < count && !ty_interrupted; i++) {
    ty_gemm g = product(k, i);
    if (TY_KERNEL(gemm_int8_has_tiles)(&g)) {
      if (!TY_KERNEL(gemm_int8_tiles)(&g)) return ty_fail(TY_ENOMEM, "matmul_int8: out of memory");
      continue;
    }
#if defined(__AVX512F__)
    if (g.k > 0 && __builtin_cpu_supports("avx512vnni")) {
      if (!NAME(tiled)(&g, true)) return ty_fail(TY_ENOMEM, "matmul_int8: out of memory");
      continue;
    }
#endif
    ty_parallel_for(g.m, 1 + 65536 / (g.n * g.k + 1), plain_rows, &g);
  }
  return true;
}
