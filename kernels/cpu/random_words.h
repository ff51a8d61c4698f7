/* The random words of a run of elements, for kernels that draw numbers: element i takes word i % 4 of block offset + i / 4. */
#ifndef TY_KERNELS_CPU_RANDOM_WORDS_H
#define TY_KERNELS_CPU_RANDOM_WORDS_H

#include "../philox.h"
#include "cpu.h"

enum { RANDOM_WORDS = 1024 }; /* made at once, so that the rounds vectorise */

/* The words of elements [begin, begin + RANDOM_WORDS); begin is a multiple of 4. */
static inline void random_words(const ty_p_random *p, int64_t begin, uint32_t *restrict word) {
  const uint64_t seed = p->seed, first = p->offset + (uint64_t)begin / 4;
#pragma omp simd
  for (int i = 0; i < RANDOM_WORDS / 4; i++) {
    ty_philox b = ty_philox_block(seed, first + (uint64_t)i);
    word[4 * i] = b.w[0], word[4 * i + 1] = b.w[1], word[4 * i + 2] = b.w[2], word[4 * i + 3] = b.w[3];
  }
}

#endif
