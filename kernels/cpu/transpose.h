/* Transposed tiles of elements of any width: to[i * out + j] = from[j * in + i], strides in elements. Small squares are
 * turned in registers, so that both sides are read and written in runs. */
#ifndef TY_KERNELS_CPU_TRANSPOSE_H
#define TY_KERNELS_CPU_TRANSPOSE_H

#include <stdint.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* A square of side x side elements fills `side` registers; interleaving the first half of them with the second half,
 * log2(side) times, transposes it. */
#if defined(__SSE2__)
#define TY_TRANSPOSE_SQUARE(type, side, bits, rounds)                                                                  \
  static inline void ty_transpose_square_##type(type *to, int64_t out, const type *from, int64_t in) {                 \
    __m128i r[side], s[side];                                                                                          \
    _Pragma("GCC unroll 16") for (int k = 0; k < side; k++)                                                            \
        r[k] = _mm_loadu_si128((const __m128i *)(const void *)(from + k * in));                                        \
    _Pragma("GCC unroll 4") for (int t = 0; t < rounds; t++) {                                                         \
      _Pragma("GCC unroll 8") for (int k = 0; k < side / 2; k++) {                                                     \
        s[2 * k] = _mm_unpacklo_epi##bits(r[k], r[k + side / 2]);                                                      \
        s[2 * k + 1] = _mm_unpackhi_epi##bits(r[k], r[k + side / 2]);                                                  \
      }                                                                                                                \
      _Pragma("GCC unroll 16") for (int k = 0; k < side; k++) r[k] = s[k];                                             \
    }                                                                                                                  \
    _Pragma("GCC unroll 16") for (int k = 0; k < side; k++) _mm_storeu_si128((__m128i *)(void *)(to + k * out), r[k]); \
  }
#else
#define TY_TRANSPOSE_SQUARE(type, side, bits, rounds)                                                  \
  static inline void ty_transpose_square_##type(type *to, int64_t out, const type *from, int64_t in) { \
    for (int i = 0; i < side; i++)                                                                     \
      for (int j = 0; j < side; j++) to[i * out + j] = from[j * in + i];                               \
  }
#endif

#define TY_TRANSPOSE(type, side, bits, rounds)                                                                        \
  TY_TRANSPOSE_SQUARE(type, side, bits, rounds)                                                                       \
  static __attribute__((unused)) void ty_transpose_##type(type *to, int64_t out, const type *from, int64_t in,        \
                                                          int64_t rows, int64_t columns) {                            \
    int64_t r = rows - rows % side, c = columns - columns % side;                                                     \
    for (int64_t j = 0; j < c; j += side)                                                                             \
      for (int64_t i = 0; i < r; i += side) ty_transpose_square_##type(to + i * out + j, out, from + j * in + i, in); \
    for (int64_t i = 0; i < rows; i++)                                                                                \
      for (int64_t j = i < r ? c : 0; j < columns; j++) to[i * out + j] = from[j * in + i];                           \
  }

TY_TRANSPOSE(uint8_t, 16, 8, 4)
TY_TRANSPOSE(uint16_t, 8, 16, 3)
TY_TRANSPOSE(uint32_t, 4, 32, 2)
TY_TRANSPOSE(uint64_t, 2, 64, 1)

#undef TY_TRANSPOSE
#undef TY_TRANSPOSE_SQUARE
#endif
