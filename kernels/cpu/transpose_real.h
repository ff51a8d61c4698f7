/* Transposed copies for one element type; included with REAL and NAME(x) set. Sources may lie at any address. */

typedef REAL NAME(quad) __attribute__((vector_size(4 * sizeof(REAL)), aligned(1), may_alias));
typedef REAL NAME(loose) __attribute__((aligned(1), may_alias));

#ifndef SHUFFLE
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else /* gcc 11, Ubuntu 22.04 */
#define SHUFFLE(x, y, ...)                                           \
  __builtin_shuffle(x, y,                                            \
                    _Generic((x)[0], double                          \
                             : (shuffle_f64){ __VA_ARGS__ }, default \
                             : (shuffle_f32){ __VA_ARGS__ }))
typedef int32_t shuffle_f32 __attribute__((vector_size(16)));
typedef int64_t shuffle_f64 __attribute__((vector_size(32)));
#endif
#endif

/* dst[i * stride + r] = row r, element i, for i < n. */
static inline void NAME(transpose_4)(const NAME(loose) *restrict r0, const NAME(loose) *restrict r1,
                                     const NAME(loose) *restrict r2, const NAME(loose) *restrict r3, int64_t n,
                                     NAME(loose) *restrict dst, int64_t stride) {
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

#if defined(__AVX__) && (defined(__clang__) || __GNUC__ >= 12)
#define TRANSPOSE_8
typedef REAL NAME(eight) __attribute__((vector_size(8 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

/* The same of eight rows, `row` bytes apart, of four bytes an element: rows i and i + 4 share a vector. */
static inline void NAME(transpose_8)(const char *restrict src, int64_t row, int64_t n, NAME(loose) *restrict dst,
                                     int64_t stride) {
#define ROW(i) (src + (i)*row)
#define ROWS_OF(i) \
  __builtin_shufflevector(*(const NAME(quad) *)ROW(i), *(const NAME(quad) *)ROW((i) + 4), 0, 1, 2, 3, 4, 5, 6, 7)
  int64_t i = 0;
  for (; i + 4 <= n; i += 4, src += 4 * sizeof(REAL), dst += 4 * stride) {
    NAME(eight) x0 = ROWS_OF(0), x1 = ROWS_OF(1), x2 = ROWS_OF(2), x3 = ROWS_OF(3);
    NAME(eight) a = SHUFFLE(x0, x1, 0, 8, 1, 9, 4, 12, 5, 13), b = SHUFFLE(x2, x3, 0, 8, 1, 9, 4, 12, 5, 13);
    NAME(eight) c = SHUFFLE(x0, x1, 2, 10, 3, 11, 6, 14, 7, 15), d = SHUFFLE(x2, x3, 2, 10, 3, 11, 6, 14, 7, 15);
    *(NAME(eight) *)dst = SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    *(NAME(eight) *)(dst + stride) = SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    *(NAME(eight) *)(dst + 2 * stride) = SHUFFLE(c, d, 0, 1, 8, 9, 4, 5, 12, 13);
    *(NAME(eight) *)(dst + 3 * stride) = SHUFFLE(c, d, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (; i < n; i++, src += sizeof(REAL), dst += stride)
    for (int r = 0; r < 8; r++) dst[r] = *(const NAME(loose) *)ROW(r);
#undef ROWS_OF
#undef ROW
}
#endif

/* dst[c * stride + r] = element c of row r, for r < rows, c < columns; rows are `row` bytes apart. */
static void NAME(transpose_rows)(const void *restrict src, int64_t row, int64_t rows, int64_t columns,
                                 NAME(loose) *restrict dst, int64_t stride) {
  const int64_t line = 64 / sizeof(REAL), size = sizeof(REAL);
  int64_t whole = rows / 4 * 4;
#define ROW(r, c) ((const NAME(loose) *)((const char *)src + (r)*row + (c)*size))
  for (int64_t c = 0; c < columns; c += line) {
    int64_t n = columns - c < line ? columns - c : line;
    int64_t r = 0;
#ifdef TRANSPOSE_8
    for (; size == 4 && r + 8 <= rows; r += 8)
      NAME(transpose_8)((const char *)ROW(r, c), row, n, dst + c * stride + r, stride);
#endif
    for (; r < whole; r += 4) NAME(transpose_4)
    (ROW(r, c), ROW(r + 1, c), ROW(r + 2, c), ROW(r + 3, c), n, dst + c * stride + r, stride);
  }
  for (int64_t r = whole; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) dst[c * stride + r] = *ROW(r, c);
#undef ROW
}

/* dst[c * stride + r] = src[r * row + c] for r < rows, c < columns. */
static inline void NAME(transpose)(const REAL *restrict src, int64_t row, int64_t rows, int64_t columns,
                                   REAL *restrict dst, int64_t stride) {
  NAME(transpose_rows)(src, row * (int64_t)sizeof(REAL), rows, columns, dst, stride);
}
