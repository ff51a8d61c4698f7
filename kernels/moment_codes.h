/* The values of 8-bit codes for optimizer moments: block-wise dynamic quantization of Dettmers et al. 2022 ("8-bit
 * Optimizers via Block-wise Quantization", section 2). Each TY_CODED_TOGETHER elements share their largest magnitude;
 * what is left, in [-1, 1] or [0, 1], is one of 256 values: decade k of 10^-7 .. 1 holds 2^k (unsigned: 2^(k+1)) evenly
 * spaced ones, and there are 0 and 1. Codes are in order of value; the signed map has its 0 at code 127. */
#ifndef TY_KERNELS_MOMENT_CODES_H
#define TY_KERNELS_MOMENT_CODES_H

#include <string.h>

#include "base.h"

enum { TY_CODED_TOGETHER = 256, TY_CODE_DECADES = 8 };

typedef struct ty_moment_codes {
  float value[256];
  /* per decade of the positive half, the last for 1 itself: */
  float least[TY_CODE_DECADES];  /* what is nearer to it than to the decade below */
  float factor[TY_CODE_DECADES]; /* code = floor(value * factor + offset), at most `last` */
  float offset[TY_CODE_DECADES];
  float last[TY_CODE_DECADES];
  float zero; /* below: 0 is nearest */
  bool has_sign;
} ty_moment_codes;

static inline void ty_make_moment_codes(ty_moment_codes *c, bool has_sign) {
  memset(c, 0, sizeof *c);
  c->has_sign = has_sign;
  double below = 0, top = 1e-7;
  int code = 1; /* of the positive half */
  for (int k = 0; k < 8; k++, top *= 10) {
    int n = 1 << (k + !has_sign);
    if (k == 7) n = 1;
    for (int j = 0; j < n; j++, code++) {
      double mean = k == 7 ? 1 : top * 10 * (0.1 + 0.9 * (j + 0.5) / n);
      if (j == 0) c->least[k] = (float)((below + mean) / 2);
      below = mean;
      if (has_sign) {
        c->value[127 + code] = (float)mean;
        if (k < 7) c->value[127 - code] = -(float)mean;
      } else {
        c->value[code] = (float)mean;
      }
    }
    c->factor[k] = k == 7 ? 0 : (float)(n / (top * 9));
    c->offset[k] = (float)(k == 7 ? code - 1 : code - n - n / 9.0);
    c->last[k] = (float)(code - 1);
  }
  c->zero = c->least[0];
}

#endif
