/* The innermost loops of the f32 convolutions: a few rows by two vectors (or one) of a product, held in registers while
 * it runs down k. Everything a convolution multiplies lies channels last, so that its pieces are dense products:
 *
 *   along   c[i][:] (+)= sum_s sum_k a[offset[s] + i * step + k] b[s][k][:]      pixels or tiles times packed weights
 *   across  c[i][:] (+)= sum_s sum_k a[s * a_part + k * step + i] b[s * b_part + k * b_row + :]     sums over pixels
 *
 * Rows are named variables, since gcc keeps arrays of vectors in memory, and there is a function for every row count.
 * AVX-512 has 32 registers: 14 x 2 for the sums, and broadcasts of a, one for two multiplications. */
#ifndef TY_KERNELS_CPU_CONV_MICRO_H
#define TY_KERNELS_CPU_CONV_MICRO_H

#include "conv_lanes.h"

#if TY_VECTOR_BYTES == 64
#define MOST_ROWS 14
#else
#define MOST_ROWS 6
#endif
#define PAIR (2 * LANES) /* columns of a whole piece of b */

typedef struct micro {
  int64_t segments, k;
  const int64_t *offset; /* along; NULL: 0 */
  const float *a;
  int64_t step, a_part;
  const float *b;
  int64_t b_row, b_part;
  float *c;
  int64_t c_row;
  bool add;
} micro;

typedef void micro_fn(const micro *m);

/* clang-format off */
#define UPTO_1(X, n) X(0, n)
#define UPTO_2(X, n) UPTO_1(X, n) X(1, n)
#define UPTO_3(X, n) UPTO_2(X, n) X(2, n)
#define UPTO_4(X, n) UPTO_3(X, n) X(3, n)
#define UPTO_5(X, n) UPTO_4(X, n) X(4, n)
#define UPTO_6(X, n) UPTO_5(X, n) X(5, n)
#define UPTO_7(X, n) UPTO_6(X, n) X(6, n)
#define UPTO_8(X, n) UPTO_7(X, n) X(7, n)
#define UPTO_9(X, n) UPTO_8(X, n) X(8, n)
#define UPTO_10(X, n) UPTO_9(X, n) X(9, n)
#define UPTO_11(X, n) UPTO_10(X, n) X(10, n)
#define UPTO_12(X, n) UPTO_11(X, n) X(11, n)
#define UPTO_13(X, n) UPTO_12(X, n) X(12, n)
#define UPTO_14(X, n) UPTO_13(X, n) X(13, n)

#define START_2(i) lanes c##i = { 0 }, d##i = { 0 };
#define START_1(i) lanes c##i = { 0 };
#define LOAD_2 const lanes b0 = *(const lanes *)b, b1 = *(const lanes *)(b + LANES);
#define LOAD_1 const lanes b0 = *(const lanes *)b;
#define TIMES_2(i, x) { const float t = x; c##i += t * b0; d##i += t * b1; }
#define TIMES_1(i, x) c##i += x * b0;
#define KEEP_2(i)                                                                                                      \
  if (m->add) c##i += *(lanes *)(to + i * m->c_row), d##i += *(lanes *)(to + i * m->c_row + LANES);                    \
  *(lanes *)(to + i * m->c_row) = c##i;                                                                                \
  *(lanes *)(to + i * m->c_row + LANES) = d##i;
#define KEEP_1(i)                                                                                                      \
  if (m->add) c##i += *(lanes *)(to + i * m->c_row);                                                                   \
  *(lanes *)(to + i * m->c_row) = c##i;

/* Rows by fours from one pointer: the addresses are pointer + {0, 1, 2, 3} steps. */
#define ALONG_0 a0[0]
#define ALONG_1 a0[step]
#define ALONG_2 a0[2 * step]
#define ALONG_3 a0[step3]
#define ALONG_4 a4[0]
#define ALONG_5 a4[step]
#define ALONG_6 a4[2 * step]
#define ALONG_7 a4[step3]
#define ALONG_8 a8[0]
#define ALONG_9 a8[step]
#define ALONG_10 a8[2 * step]
#define ALONG_11 a8[step3]
#define ALONG_12 a12[0]
#define ALONG_13 a12[step]
#define ALONG_START(i, n) START_##n(i)
#define ALONG_STEP(i, n) TIMES_##n(i, ALONG_##i)
#define ACROSS_STEP(i, n) TIMES_##n(i, a[i])
#define KEEP(i, n) KEEP_##n(i)

#define MICRO(rows, n)                                                                                                 \
  static void along_##n##_##rows(const micro *m) {                                                                     \
    UPTO_##rows(ALONG_START, n)                                                                                        \
    const float *restrict b = m->b;                                                                                    \
    const int64_t step = m->step;                                                                                      \
    int64_t step3 = 3 * step, step4 = 4 * step;                                                                        \
    for (int64_t s = 0; s < m->segments; s++) {                                                                        \
      const float *restrict a0 = m->a + (m->offset ? m->offset[s] : 0);                                                \
      const float *restrict a4 = a0 + (rows > 4 ? step4 : 0), *restrict a8 = a4 + (rows > 8 ? step4 : 0);              \
      const float *restrict a12 = a8 + (rows > 12 ? step4 : 0);                                                        \
      __asm__("" : "+r"(a4), "+r"(a8), "+r"(a12), "+r"(step3)); /* keep these pointers; no more */                     \
      _Pragma("GCC unroll 4") for (int64_t k = m->k; k > 0; k--) {                                                     \
        LOAD_##n                                                                                                       \
        UPTO_##rows(ALONG_STEP, n)                                                                                     \
        b += n * LANES, a0++, a4++, a8++, a12++;                                                                       \
      }                                                                                                                \
    }                                                                                                                  \
    float *restrict to = m->c;                                                                                         \
    UPTO_##rows(KEEP, n)                                                                                               \
  }                                                                                                                    \
  static void across_##n##_##rows(const micro *m) {                                                                    \
    UPTO_##rows(ALONG_START, n)                                                                                        \
    const int64_t step = m->step, b_row = m->b_row;                                                                    \
    for (int64_t s = 0; s < m->segments; s++) {                                                                        \
      const float *restrict a = m->a + s * m->a_part, *restrict b = m->b + s * m->b_part;                              \
      _Pragma("GCC unroll 2") for (int64_t k = m->k; k > 0; k--, a += step, b += b_row) {                              \
        LOAD_##n                                                                                                       \
        UPTO_##rows(ACROSS_STEP, n)                                                                                    \
      }                                                                                                                \
    }                                                                                                                  \
    float *restrict to = m->c;                                                                                         \
    UPTO_##rows(KEEP, n)                                                                                               \
  }
#define MICROS(n) MICRO(1, n) MICRO(2, n) MICRO(3, n) MICRO(4, n) MICRO(5, n) MICRO(6, n)
#define LIST(form) form##_1, form##_2, form##_3, form##_4, form##_5, form##_6
#if MOST_ROWS == 14
#define MORE_MICROS(n) \
  MICRO(7, n) MICRO(8, n) MICRO(9, n) MICRO(10, n) MICRO(11, n) MICRO(12, n) MICRO(13, n) MICRO(14, n)
#define MORE(form) , form##_7, form##_8, form##_9, form##_10, form##_11, form##_12, form##_13, form##_14
#else
#define MORE_MICROS(n)
#define MORE(form)
#endif
MICROS(1) MORE_MICROS(1) MICROS(2) MORE_MICROS(2)

static micro_fn *const along_micro[2][MOST_ROWS] = { { LIST(along_1) MORE(along_1) }, { LIST(along_2) MORE(along_2) } };
static micro_fn *const across_micro[2][MOST_ROWS] = { { LIST(across_1) MORE(across_1) }, { LIST(across_2) MORE(across_2) } };
/* clang-format on */

/* `rows` of the product in even groups; `vectors`, 1 or 2, is the width of b and c. */
static inline void multiply_along(const micro *first, int64_t rows, int64_t vectors) {
  micro m = *first;
  for (int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS; groups > 0; groups--) {
    int64_t n = (rows + groups - 1) / groups;
    along_micro[vectors - 1][n - 1](&m);
    m.a += n * m.step;
    m.c += n * m.c_row;
    rows -= n;
  }
}

static inline void multiply_across(const micro *first, int64_t rows, int64_t vectors) {
  micro m = *first;
  for (int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS; groups > 0; groups--) {
    int64_t n = (rows + groups - 1) / groups;
    across_micro[vectors - 1][n - 1](&m);
    m.a += n;
    m.c += n * m.c_row;
    rows -= n;
  }
}

#endif
