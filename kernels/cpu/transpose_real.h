/* Transposed copies for one element type; included with REAL and NAME(x) set. */

typedef REAL NAME(quad) __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

#ifndef SHUFFLE
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else /* gcc 11, Ubuntu 22.04 */
#define SHUFFLE(x, y, ...)                                           \
  __builtin_shuffle(x, y,                                            \
                    _Generic((x)[0], float                           \
                             : (shuffle_f32){ __VA_ARGS__ }, default \
                             : (shuffle_f64){ __VA_ARGS__ }))
typedef int32_t shuffle_f32 __attribute__((vector_size(16)));
typedef int64_t shuffle_f64 __attribute__((vector_size(32)));
#endif
#endif

/* dst[i * stride + r] = row r, element i, for i < n. */
static inline void NAME(transpose_4)(const REAL *restrict r0, const REAL *restrict r1, const REAL *restrict r2,
                                     const REAL *restrict r3, int64_t n, REAL *restrict dst, int64_t stride) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4, dst += 4 * stride) {
    NAME(quad) x0 = *(const NAME(quad) *)(r0 + i), x1 = *(const NAME(quad) *)(r1 + i);
    NAME(quad) x2 = *(const NAME(quad) *)(r2 + i), x3 = *(const NAME(quad) *)(r3 + i);
    NAME(quad) a = SHUFFLE(x0, x1, 0, 4, 1, 5), b = SHUFFLE(x2, x3, 0, 4, 1, 5);
    NAME(quad) c = SHUFFLE(x0, x1, 2, 6, 3, 7), d = SHUFFLE(x2, x3, 2, 6, 3, 7);
    *(NAME(quad) *)dst = SHUFFLE(a, b, 0, 1, 4, 5);
    *(NAME(quad) *)(dst + stride) = SHUFFLE(a, b, 2, 3, 6, 7);
    *(NAME(quad) *)(dst + 2 * stride) = SHUFFLE(c, d, 0, 1, 4, 5);
    *(NAME(quad) *)(dst + 3 * stride) = SHUFFLE(c, d, 2, 3, 6, 7);
  }
  for (; i < n; i++, dst += stride) {
    dst[0] = r0[i];
    dst[1] = r1[i];
    dst[2] = r2[i];
    dst[3] = r3[i];
  }
}

/* dst[c * stride + r] = src[r * row + c] for r < rows, c < columns. */
static void NAME(transpose)(const REAL *restrict src, int64_t row, int64_t rows, int64_t columns, REAL *restrict dst,
                            int64_t stride) {
  const int64_t line = 64 / sizeof(REAL);
  int64_t whole = rows / 4 * 4;
  for (int64_t c = 0; c < columns; c += line) {
    int64_t n = columns - c < line ? columns - c : line;
    for (int64_t r = 0; r < whole; r += 4) {
      const REAL *s = src + r * row + c;
      NAME(transpose_4)(s, s + row, s + 2 * row, s + 3 * row, n, dst + c * stride + r, stride);
    }
  }
  for (int64_t r = whole; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) dst[c * stride + r] = src[r * row + c];
}
