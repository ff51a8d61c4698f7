/* Kernels in the layout in which they are multiplied: [chunk][tap][channel][PAIR], a chunk being PAIR output channels.
 * The last chunk is one vector wide where that is enough. */
#ifndef TY_KERNELS_CPU_CONV_TAPS_H
#define TY_KERNELS_CPU_CONV_TAPS_H

#include "conv_micro.h"

static inline int64_t chunks_of(int64_t channels) { return (channels + PAIR - 1) / PAIR; }
static inline int64_t vectors_of(int64_t channels, int64_t chunk) { return channels - chunk * PAIR > LANES ? 2 : 1; }

/* ---- gradients of the weight: parts in that layout are added and brought to [out][channel][tap] ---- */

enum { AT_ONCE = 32 }; /* channels brought back at once, so that their taps stay in the L1 cache */

typedef struct combine_call {
  const float *sums; /* [part][chunk][tap][channel][PAIR] */
  int64_t parts, o, c, taps;
  float *dw;
} combine_call;

static void combine_units(void *context, int64_t begin, int64_t end) {
  const combine_call *w = context;
  const conv_epilogue none = { NULL, NULL, TY_NO_ACTIVATION };
  int64_t blocks = (w->c + AT_ONCE - 1) / AT_ONCE, part = chunks_of(w->o) * w->taps * w->c * PAIR;
  float local[AT_ONCE * 9 * LANES] __attribute__((aligned(64)));
  for (int64_t u = begin; u < end; u++) {
    int64_t o = u / blocks * LANES, chunk = o / PAIR, half = o % PAIR, width = vectors_of(w->o, chunk) * LANES;
    const float *from = w->sums + chunk * w->taps * w->c * PAIR + half;
    int64_t step = w->taps > 9 ? 9 * AT_ONCE / w->taps : AT_ONCE, last = (u % blocks + 1) * AT_ONCE;
    if (step < 1) step = 1;
    if (last > w->c) last = w->c;
    for (int64_t c0 = u % blocks * AT_ONCE; c0 < last; c0 += step) {
      int64_t c1 = c0 + step < last ? c0 + step : last;
      for (int64_t t0 = 0; t0 < w->taps; t0 += 9 * AT_ONCE) { /* one round but for huge kernels */
        int64_t t1 = t0 + 9 * AT_ONCE < w->taps ? t0 + 9 * AT_ONCE : w->taps;
        for (int64_t c = c0; c < c1; c++)
          for (int64_t t = t0; t < t1; t++) {
            const float *at = from + (t * w->c + c) * width;
            lanes sum = *(const lanes *)at;
            for (int64_t p = 1; p < w->parts; p++) sum += *(const lanes *)(at + p * part);
            *(lanes *)(local + ((c - c0) * (t1 - t0) + t - t0) * LANES) = sum;
          }
        finish_planes(&none, local, LANES, (c1 - c0) * (t1 - t0), w->o - o < LANES ? w->o - o : LANES, w->dw,
                      (o * w->c + c0) * w->taps + t0, w->c * w->taps, 0);
      }
    }
  }
}

static inline void combine_taps(const float *sums, int64_t parts, int64_t o, int64_t c, int64_t taps, float *dw) {
  combine_call w = { sums, parts, o, c, taps, dw };
  int64_t units = (o + LANES - 1) / LANES * ((c + AT_ONCE - 1) / AT_ONCE);
  ty_parallel_for(units, 1 + 16384 / (AT_ONCE * LANES * taps * parts), combine_units, &w);
}

#endif
