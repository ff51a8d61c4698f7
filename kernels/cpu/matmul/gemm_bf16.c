/* Matrix products of bf16 by the CPU's instruction for them (AVX512_BF16): two neighbours in k at a time, sums of f32. */
#include <stdlib.h>

#include "../activation.h"
#include "gemm.h"

#include "../../half.h"

#if defined(__AVX512F__) && (__GNUC__ >= 10)
#pragma GCC push_options
#pragma GCC target("avx512bf16")

#define REAL float
#define NAME(x) x##_bf16
#define SCALAR(x) ty_##x##_f32
#define HALVES
#define UNIT uint32_t
#define GROUP 2
#define STARTS 0
#define STRIDED
#define PIECE uint16_t
#define FLIP_A(g) 0
#define ELEMENT(g) ((int64_t)sizeof(uint16_t))
#define MULTIPLY_ADD(c, a, b) c = (V)_mm512_dpbf16_ps((__m512)(c), (__m512bh)_mm512_set1_epi32((int)(a)), (__m512bh)(b))
/* 32 sums; the instruction takes what is less than a normal number for 0, as that of the products does. */
#define ROUND_ROW(to, sums) \
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps((sums) + 16), _mm512_loadu_ps(sums)))
#define KC 256
#define MIN2(a, b) ((a) < (b) ? (a) : (b))

#include "gemm_micro.h"
#include "../transpose_real.h"
#include "gemm_pairs.h"
#include "gemm_finish.h"
#include "gemm_blocked.h"

/* Whether A is better read where it lies, pair by pair: it is used too few times to pay for packing. */
static bool reads_a(const ty_gemm *g) {
  if (g->a_col != 1 || g->a_row % 2 || g->k % 2 || (uintptr_t)g->a % 4 || ty_tiling_asked().pack > 0) return false;
  return g->n <= 4 * NR;
}

bool TY_KERNEL(gemm_bf16)(const ty_gemm *g) { return NAME(tiled)(g, !reads_a(g)); }

/* Intel's cores take two cycles for the instruction, half the rate of f32 with conversions (Sapphire Rapids: 85 against
 * 160 GFLOP/s); AMD's take one or less. TYCHO_BF16=0 or 1 decides otherwise. */
bool TY_KERNEL(gemm_has_bf16)(void) {
  static int choice; /* 1: no, 2: yes; every thread finds the same */
  int now = __atomic_load_n(&choice, __ATOMIC_RELAXED);
  if (!now) {
    const char *wish = getenv("TYCHO_BF16");
    bool good = wish ? *wish == '1' : __builtin_cpu_is("amd") != 0;
    now = good && __builtin_cpu_supports("avx512bf16") ? 2 : 1;
    __atomic_store_n(&choice, now, __ATOMIC_RELAXED);
  }
  return now == 2;
}

#pragma GCC pop_options
#else
bool TY_KERNEL(gemm_bf16)(const ty_gemm *g) { return TY_KERNEL(gemm_f32)(g); }
bool TY_KERNEL(gemm_has_bf16)(void) { return false; }
#endif
