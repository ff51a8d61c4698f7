/* Random numbers by a seed and a position, as the CPU and the GPU share them: element i has Philox blocks of its own,
 * { i, round }, whatever else is drawn. */
#ifndef TY_KERNELS_SEEDED_H
#define TY_KERNELS_SEEDED_H

#include "philox.h"

TY_INLINE ty_philox ty_seeded_words(uint64_t seed, uint64_t i, uint32_t round) {
  ty_philox c = { { (uint32_t)i, (uint32_t)(i >> 32), round, 1 } };
  return ty_philox_words(c, (uint32_t)seed, (uint32_t)(seed >> 32));
}

TY_INLINE double ty_seeded_uniform(uint32_t high, uint32_t low) { /* [0, 1) with 53 bits */
  return (double)(((uint64_t)high << 32 | low) >> 11) * 0x1p-53;
}

/* Box and Muller 1958. */
TY_INLINE float ty_seeded_normal(uint64_t seed, uint64_t i) {
  const ty_philox b = ty_seeded_words(seed, i, 0);
  return sqrtf(-2.0f * ty_log_f32(ty_uniform_positive_f32(b.w[0]))) * ty_cos_f32(6.28318531f * ty_uniform_f32(b.w[1]));
}

/* log(k!): a table, then Stirling's series. */
TY_INLINE double ty_log_factorial(double k) {
  const double small[10] = { 0,
                             0,
                             0.69314718055994531,
                             1.7917594692280550,
                             3.1780538303479458,
                             4.7874917427820460,
                             6.5792512120101012,
                             8.5251613610654147,
                             10.604602902745250,
                             12.801827480081469 };
  if (k < 10) return small[(int)k];
  const double r = 1 / k, s = r * r;
  return (k + 0.5) * log(k) - k + 0.91893853320467274 +
         r * (1.0 / 12 - s * (1.0 / 360 - s * (1.0 / 1260 - s * (1.0 / 1680 - s / 1188))));
}

/* Counts of a mean below 10: as many uniform numbers as their product stays above exp(-mean) (Knuth). From 10 on: the
 * transformed rejection of Hoermann 1993, "The transformed rejection method for generating Poisson random variables",
 * PTRS. */
TY_INLINE double ty_seeded_poisson(uint64_t seed, uint64_t i, double mean) {
  if (!(mean >= 0) || mean > 1e15) return mean >= 0 ? mean : NAN; /* beyond: the deviation is below the rounding */
  if (mean < 10) {
    const double least = exp(-mean);
    double product = 1;
    for (uint32_t k = 0;; k++) {
      const ty_philox b = ty_seeded_words(seed, i, k);
      product *= ty_seeded_uniform(b.w[0], b.w[1]);
      if (product <= least) return k;
    }
  }
  const double root = sqrt(mean), b = 0.931 + 2.53 * root, a = -0.059 + 0.02483 * b,
               slope = 1.1239 + 1.1328 / (b - 3.4);
  const double sure = 0.9277 - 3.6224 / (b - 2), log_mean = log(mean);
  for (uint32_t round = 0;; round++) {
    const ty_philox w = ty_seeded_words(seed, i, round);
    const double u = ty_seeded_uniform(w.w[0], w.w[1]) - 0.5, v = 1 - ty_seeded_uniform(w.w[2], w.w[3]);
    const double us = 0.5 - fabs(u);
    const double k = floor((2 * a / us + b) * u + mean + 0.43);
    if (us >= 0.07 && v <= sure) return k;
    if (k < 0 || (us < 0.013 && v > us)) continue;
    if (log(v) + log(slope) - log(a / (us * us) + b) <= k * log_mean - mean - ty_log_factorial(k)) return k;
  }
}

#endif
