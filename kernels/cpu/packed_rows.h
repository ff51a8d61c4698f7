/* A row of the weight at a time with 1, 2 or 4 rows of x, whose values are spread out by SPREAD(p, mask); EACH(x) makes
 * names. Included by packed.c. One row is two streams of memory, one after the other: those of two or four rows at once,
 * which would save loads of x, came at half of the rate. */

/* False where something is not as it should be, or the values end: FUSED looks at it. */
#define ROW(name, N, A, ONE)                                                                      \
  static bool EACH(name##_whole)(const task *t, int64_t r) {                                      \
    const int64_t *starts = t->starts + r;                                                        \
    if (starts[0] < 0 || starts[0] > starts[1] || starts[1] > t->count) return false;             \
    const uint8_t *bits = t->bits + r * (t->columns / 8);                                         \
    const uint16_t *p = t->values + starts[0], *last = t->values + t->count;                      \
    vector sums[N][A];                                                                            \
    for (int b = 0; b < N; b++)                                                                   \
      for (int i = 0; i < A; i++) sums[b][i] = ZERO();                                            \
    for (int64_t c = 0; c < t->columns; c += GROUP, bits += GROUP / 8) {                          \
      if (last - p < GROUP) return false;                                                         \
      __builtin_prefetch(p + AHEAD);                                                              \
      _Pragma("GCC unroll 4") for (int i = 0; i < GROUP / STEP; i++) {                            \
        uint16_t mask;                                                                            \
        memcpy(&mask, bits + i * STEP / 8, sizeof mask);                                          \
        const vector w = SPREAD(p, mask);                                                         \
        p += __builtin_popcount(mask);                                                            \
        for (int b = 0; b < N; b++)                                                               \
          sums[b][i % A] = FMA(w, t->x + (t->at + b) * t->padded + c + i * STEP, sums[b][i % A]); \
      }                                                                                           \
    }                                                                                             \
    if (p - t->values != starts[1]) return false;                                                 \
    for (int b = 0; b < N; b++) ((float *)t->y)[(t->at + b) * t->rows + r] = summed(sums[b], A);  \
    return true;                                                                                  \
  }                                                                                               \
  static void EACH(name)(void *context, int64_t begin, int64_t end) {                             \
    const task *t = context;                                                                      \
    for (int64_t r = begin; r < end; r++)                                                         \
      if (t->columns % GROUP || !EACH(name##_whole)(t, r)) ONE(context, r, r + 1);                \
  }
ROW(rows_1, 1, 4, fused_1)
ROW(rows_2, 2, 2, fused_2)
ROW(rows_4, 4, 1, fused_4)

#undef ROW
#undef EACH
#undef SPREAD
