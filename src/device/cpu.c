/* The CPU device: picks the kernels for its instruction set when the program starts. TYCHO_ISA=baseline|avx2|avx512 picks
 * another (never one the CPU lacks). */
#include <stdlib.h>
#include <string.h>

#include "../../kernels/cpu/parallel.h"
#include "device.h"

extern ty_kernel *const ty_cpu_baseline_kernels[TY_OP_COUNT];
#if TY_ISA_COUNT > 1
extern ty_kernel *const ty_cpu_avx2_kernels[TY_OP_COUNT];
extern ty_kernel *const ty_cpu_avx512_kernels[TY_OP_COUNT];
#endif

static ty_kernel *const *kernels = ty_cpu_baseline_kernels;
static const char *isa = "baseline";

__attribute__((constructor)) static void choose(void) {
#if TY_ISA_COUNT > 1
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512cd");
  const char *wish = getenv("TYCHO_ISA");
  if (wish && strcmp(wish, "avx512") != 0) avx512 = false;
  if (wish && strcmp(wish, "baseline") == 0) avx2 = false;
  if (avx512) {
    kernels = ty_cpu_avx512_kernels;
    isa = "avx512";
  } else if (avx2) {
    kernels = ty_cpu_avx2_kernels;
    isa = "avx2";
  }
#endif
}

const char *ty_cpu_isa(void) { return isa; }

int ty_cpu_features(const char **names, int most) {
  int n = 0;
#if defined(__x86_64__)
#define FEATURE(name) \
  if (__builtin_cpu_supports(name) && n < most) names[n++] = name
  FEATURE("sse4.2");
  FEATURE("avx2");
  FEATURE("fma");
  FEATURE("avx512f");
  FEATURE("avx512bw");
  FEATURE("avx512vl");
  FEATURE("avx512vnni");
  FEATURE("avx512bf16");
#undef FEATURE
#endif
  return n;
}

ty_kernel *ty_cpu_kernel(ty_op_id id) { return kernels[id]; }

/* ---- threads ---- */

int ty_num_threads(void) { return ty_parallel_threads(); }

void ty_set_num_threads(int n) { ty_parallel_set_threads(n); }
