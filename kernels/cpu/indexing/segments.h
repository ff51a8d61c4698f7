/* Segments of positions, by where each begins and the last one ends. */
#ifndef TY_KERNELS_CPU_SEGMENTS_H
#define TY_KERNELS_CPU_SEGMENTS_H

#include "../cpu.h"

/* Fails where offsets [m + 1] do not rise from 0 to n. */
static inline bool ty_offsets_check(const ty_view *offsets, int64_t n) {
  const int64_t *o = offsets->data, last = offsets->count - 1;
  bool fine = o[0] == 0 && o[last] == n;
  for (int64_t i = 0; i < last; i++) fine &= o[i] <= o[i + 1];
  if (fine) return true;
  int64_t i = 0;
  if (o[0] == 0)
    for (i = 1; i <= last && o[i] >= o[i - 1] && o[i] <= n; i++) {}
  if (i > last) i = last;
  return ty_fail(TY_EINDEX, "offsets do not rise from 0 to %lld: %lld stands at %lld", (long long)n, (long long)o[i],
                 (long long)i);
}

/* The first of m segments that begins at `at` or behind it, m when none does; a position counts `each` more for each
 * segment before it. */
static inline int64_t ty_segment_from(const int64_t *offsets, int64_t m, int64_t at, int64_t each) {
  int64_t low = 0, high = m;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (offsets[middle] + middle * each >= at) high = middle;
    else low = middle + 1;
  }
  return low;
}

/* The segment that holds position `at`, which is below the last offset. */
static inline int64_t ty_segment_at(const int64_t *offsets, int64_t m, int64_t at) {
  return ty_segment_from(offsets, m, at + 1, 0) - 1;
}

#endif
