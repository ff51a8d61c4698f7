/* Matrix products of f32, f16 and bf16 on tiles (tiles.h), with sums of f32. On Sapphire Rapids a core multiplies 3.1
 * TFLOP/s of bf16 so, and f32 at a sixth of that: three times the rate of its vectors. */
#include "../activation.h"
#include "gemm.h"

#include "../../half.h"

#if defined(__AVX512F__)
#include "../tiles.h"
#endif

#if defined(TY_TILES)

typedef float REAL;
#define HALVES
#define MIN2(a, b) ((a) < (b) ? (a) : (b))

#define PLANES 3
#define PIECE float
#define NAME(x) x##_tiles_f32
#define SCALAR(x) ty_##x##_f32
#define TILED tiled_f32
#include "gemm_tiles_real.h"

#define PLANES 2
#define PIECE uint16_t
#define NAME(x) x##_tiles_f16
#define SCALAR(x) ty_##x##_f32
#define TILED tiled_f16
#include "gemm_tiles_real.h"

#define PLANES 1
#define PIECE uint16_t
#define NAME(x) x##_tiles_bf16
#define SCALAR(x) ty_##x##_f32
#define TILED tiled_bf16
#include "gemm_tiles_real.h"

bool TY_KERNEL(gemm_has_tiles)(void) { return ty_tiles() != TY_NO_TILES; }

bool TY_KERNEL(gemm_tiles)(const ty_gemm *g) {
  return g->half == TY_BF16 ? tiled_bf16(g) : g->half == TY_F16 ? tiled_f16(g) : tiled_f32(g);
}

#else
bool TY_KERNEL(gemm_has_tiles)(void) { return false; }
bool TY_KERNEL(gemm_tiles)(const ty_gemm *g) { return TY_KERNEL(gemm_f32)(g); }
#endif
