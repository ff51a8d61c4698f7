/* Names of CPU kernels. Each kernel file is compiled once per instruction set (TY_ISA: baseline, avx2, avx512); the
 * fitting set is chosen when the program starts (src/device/cpu.c). */
#ifndef TY_KERNELS_CPU_H
#define TY_KERNELS_CPU_H

#include "../base.h"
#include "../params.h"
#include "parallel.h"

#ifndef TY_ISA
#define TY_ISA baseline
#endif
#define TY_PASTE_(isa, name) ty_cpu_##isa##_##name
#define TY_PASTE(isa, name) TY_PASTE_(isa, name)
#define TY_KERNEL(name) TY_PASTE(TY_ISA, name)

#if defined(__AVX512F__)
#define TY_VECTOR_BYTES 64
#elif defined(__AVX__)
#define TY_VECTOR_BYTES 32
#else
#define TY_VECTOR_BYTES 16
#endif

#endif
