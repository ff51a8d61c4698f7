/* Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011): a counter and a key to four random words, the same on every
 * device. Which element of a result takes which word: ty_p_random in params.h. */
#ifndef TY_KERNELS_PHILOX_H
#define TY_KERNELS_PHILOX_H

#include "scalar.h"

typedef struct ty_philox {
  uint32_t w[4];
} ty_philox;

TY_INLINE ty_philox ty_philox_round(ty_philox c, uint32_t k0, uint32_t k1) {
  uint64_t p = (uint64_t)0xD2511F53u * c.w[0], q = (uint64_t)0xCD9E8D57u * c.w[2];
  ty_philox r = { { (uint32_t)(q >> 32) ^ c.w[1] ^ k0, (uint32_t)q, (uint32_t)(p >> 32) ^ c.w[3] ^ k1, (uint32_t)p } };
  return r;
}

/* Ten rounds over any counter and key: what the published test vectors check. */
TY_INLINE ty_philox ty_philox_words(ty_philox c, uint32_t k0, uint32_t k1) {
  for (int i = 0; i < 10; i++) {
    c = ty_philox_round(c, k0, k1);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

/* Block `index` under the 64-bit key `seed`. */
TY_INLINE ty_philox ty_philox_block(uint64_t seed, uint64_t index) {
  ty_philox c = { { (uint32_t)index, (uint32_t)(index >> 32), 0, 0 } };
  return ty_philox_words(c, (uint32_t)seed, (uint32_t)(seed >> 32));
}

/* [0, 1) with 24 bits, exactly representable in f32; and (0, 1], for logarithms. */
TY_INLINE float ty_uniform_f32(uint32_t w) { return (float)(w >> 8) * 0x1p-24f; }
TY_INLINE float ty_uniform_positive_f32(uint32_t w) { return (float)((w >> 8) + 1) * 0x1p-24f; }

#endif
