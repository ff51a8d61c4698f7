/* What a micro-kernel asks memory for while it computes: the sources of the panels that are packed next, too far apart
 * for the hardware to foresee, come in without a wait. */
#ifndef TY_KERNELS_CPU_GEMM_AHEAD_H
#define TY_KERNELS_CPU_GEMM_AHEAD_H

#include "../../base.h"

enum { TY_AHEAD_STEP = 16, TY_AHEAD_FAR = 4, TY_AHEAD_MOST = 64 }; /* steps of k; far lines with them, and per call */

typedef struct ty_ahead {
  const void *far_lines[TY_AHEAD_MOST]; /* to the second cache */
  const char *a;                        /* to the first: eight lines of A per request, `a_row` apart, */
  int64_t a_row, a_next;                /* then `a_next` further; or NULL */
} ty_ahead;

/* A region of memory as lines to come: `rows` rows of `bytes`, `stride` bytes apart. */
typedef struct ty_region {
  const char *row;
  int64_t stride, rows, bytes, at;
} ty_region;

static inline int64_t ty_region_lines(const ty_region *r) { return r->rows * ((r->bytes + 63) / 64); }

/* Sets the far lines of `ahead` that `k` steps ask for: up to `count` of the region, then some line that is there
 * already. */
static inline void ty_ahead_far(ty_ahead *ahead, ty_region *r, int64_t count, int64_t k, const void *there) {
  const int64_t asked = k / TY_AHEAD_STEP * TY_AHEAD_FAR;
  int n = 0;
  for (; n < count && n < asked && r->rows > 0; n++) {
    ahead->far_lines[n] = r->row + r->at;
    r->at += 64;
    if (r->at >= r->bytes) {
      r->at = 0;
      r->row += r->stride;
      r->rows--;
    }
  }
  for (; n < asked; n++) ahead->far_lines[n] = there;
}

#endif
