/* Rows of f16 and bf16: a few at a time are widened to f32 into the first cache, where the function for f32 takes them,
 * and its results are narrowed from there. Whole tensors widened before and narrowed after would go through memory. */
#ifndef TY_KERNELS_CPU_HALVES_H
#define TY_KERNELS_CPU_HALVES_H

#include "../../half.h"
#include "../cpu.h"
#include "../stream.h"

enum { HALVES_ROOM = 4096 }; /* elements of an operand that are widened together, or one row */

static inline bool halves_are(const ty_view *v) { return v->dtype == TY_F16 || v->dtype == TY_BF16; }

/* Rows of `width` that are taken together. */
static inline int64_t halves_rows(int64_t width) { return width < HALVES_ROOM ? HALVES_ROOM / width : 1; }

/* `n` results to `to`; past the caches by way of `room`. */
static inline void halves_put(ty_dtype dtype, uint16_t *to, const float *from, float *room, int64_t n, bool stream) {
  ty_half_store(dtype, stream ? (void *)room : to, from, n);
  if (stream) stream_copy(to, room, (size_t)n * sizeof *to);
}

#endif
