/* A few rows of x with a row of the weight, or two, whose values are spread out by SPREAD(p, mask); EACH(x) makes names.
 * Included by packed.c. */

#if STEP == 16
/* A row of the weight with 1 or 2 rows of x. It is two streams of memory, one after the other: those of two or four rows
 * at once, which would save loads of x, came at half of the rate. Where x fills the first cache, values have to be in the
 * second by then. */

/* False where something is not as it should be, or the values end: FUSED looks at it. */
#define ROW(name, N, A, ONE)                                                                      \
  static bool EACH(name##_whole)(const task *t, int64_t r) {                                      \
    const int64_t *starts = t->starts + r;                                                        \
    if (starts[0] < 0 || starts[0] > starts[1] || starts[1] > t->count) return false;             \
    const uint8_t *bits = t->bits + r * (t->columns / 8);                                         \
    const uint16_t *p = t->values + starts[0], *last = t->values + t->count;                      \
    const float *x[N];                                                                            \
    for (int b = 0; b < N; b++) x[b] = t->x + (t->at + b) * t->padded;                            \
    const bool far = N * t->columns > MUCH;                                                       \
    vector sums[N][A];                                                                            \
    for (int b = 0; b < N; b++)                                                                   \
      for (int i = 0; i < A; i++) sums[b][i] = ZERO();                                            \
    for (int64_t c = 0; c < t->columns; c += GROUP, bits += GROUP / 8) {                          \
      if (last - p < GROUP) return false;                                                         \
      if (far) __builtin_prefetch(p + 4 * AHEAD, 0, 2);                                           \
      __builtin_prefetch(p + AHEAD);                                                              \
      _Pragma("GCC unroll 4") for (int i = 0; i < GROUP / STEP; i++) {                            \
        uint16_t mask;                                                                            \
        memcpy(&mask, bits + i * STEP / 8, sizeof mask);                                          \
        const vector w = SPREAD(p, mask);                                                         \
        uint32_t wide = mask;                                                                     \
        __asm__("" : "+r"(wide)); /* a count of 16 bits waits for the register that it goes to */ \
        p += __builtin_popcount(wide);                                                            \
        for (int b = 0; b < N; b++) sums[b][i % A] = FMA(w, x[b] + c + i * STEP, sums[b][i % A]); \
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
#undef ROW
#endif

/* Two rows of the weight and N of x, which are read once for both. False where something is not as it should be, or the
 * values end: FUSED looks at it. */
#define PAIRS(name, N, A, ONE)                                                                                      \
  static bool EACH(name##_two)(const task *t, int64_t r) {                                                          \
    const int64_t bytes = t->columns / 8, *starts = t->starts + r;                                                  \
    if (starts[0] < 0 || starts[0] > starts[1] || starts[1] > starts[2] || starts[2] > t->count) return false;      \
    const uint8_t *bits[2] = { t->bits + r * bytes, t->bits + (r + 1) * bytes };                                    \
    const uint16_t *p[2] = { t->values + starts[0], t->values + starts[1] }, *last = t->values + t->count;          \
    vector sums[2][N][A];                                                                                           \
    for (int k = 0; k < 2; k++)                                                                                     \
      for (int b = 0; b < N; b++)                                                                                   \
        for (int i = 0; i < A; i++) sums[k][b][i] = ZERO();                                                         \
    for (int64_t c = 0; c < t->columns; c += GROUP) {                                                               \
      if (last - p[0] < GROUP || last - p[1] < GROUP) return false;                                                 \
      uint64_t mask[2];                                                                                             \
      for (int k = 0; k < 2; k++) {                                                                                 \
        memcpy(mask + k, bits[k] + c / 8, sizeof *mask);                                                            \
        __builtin_prefetch(p[k] + AHEAD);                                                                           \
      }                                                                                                             \
      for (int i = 0; i < GROUP / STEP; i++) {                                                                      \
        vector w[2];                                                                                                \
        for (int k = 0; k < 2; k++) {                                                                               \
          const uint32_t part = (uint32_t)(mask[k] >> i * STEP) & ((1u << STEP) - 1);                               \
          w[k] = SPREAD(p[k], part);                                                                                \
          p[k] += __builtin_popcount(part);                                                                         \
        }                                                                                                           \
        for (int b = 0; b < N; b++) {                                                                               \
          const float *x = t->x + (t->at + b) * t->padded + c + i * STEP;                                           \
          for (int k = 0; k < 2; k++) sums[k][b][i % A] = FMA(w[k], x, sums[k][b][i % A]);                          \
        }                                                                                                           \
      }                                                                                                             \
    }                                                                                                               \
    for (int k = 0; k < 2; k++) {                                                                                   \
      if (p[k] - t->values != starts[k + 1]) return false;                                                          \
      for (int b = 0; b < N; b++) ((float *)t->y)[(t->at + b) * t->rows + r + k] = summed(sums[k][b], A);           \
    }                                                                                                               \
    return true;                                                                                                    \
  }                                                                                                                 \
  static void EACH(name)(void *context, int64_t begin, int64_t end) {                                               \
    const task *t = context;                                                                                        \
    for (int64_t r = begin; r < end; r += 2)                                                                        \
      if (t->columns % GROUP || r + 2 > end || !EACH(name##_two)(t, r)) ONE(context, r, r + 2 < end ? r + 2 : end); \
  }
#if STEP == 8
PAIRS(pairs_2, 2, 2, fused_2)
#endif
PAIRS(pairs_4, 4, 1, fused_4)

#undef PAIRS
#undef EACH
#undef SPREAD
