/* Vectors of channels for the f32 convolutions, and the ways between planes (a channel after another, as tensors lie)
 * and channels last (as they are multiplied). */
#ifndef TY_KERNELS_CPU_CONV_LANES_H
#define TY_KERNELS_CPU_CONV_LANES_H

#include <string.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include "../../scalar.h"
#include "../activation.h"
#include "conv.h"

typedef float lanes __attribute__((vector_size(TY_VECTOR_BYTES), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
#define LANES (TY_VECTOR_BYTES / 4)

#if defined(__clang__) || __GNUC__ >= 12
#define LANES_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else /* gcc 11, Ubuntu 22.04 */
typedef int32_t lane_numbers __attribute__((vector_size(TY_VECTOR_BYTES)));
#define LANES_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (lane_numbers){ __VA_ARGS__ })
#endif

/* Within every four lanes: the first or last two of x and y in turn; the first or last two of x, then of y. */
/* clang-format off */
#if LANES == 16
#define TURNS_LOW(x, y) LANES_SHUFFLE(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define TURNS_HIGH(x, y) LANES_SHUFFLE(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define HALVES_LOW(x, y) LANES_SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HALVES_HIGH(x, y) LANES_SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#elif LANES == 8
#define TURNS_LOW(x, y) LANES_SHUFFLE(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
#define TURNS_HIGH(x, y) LANES_SHUFFLE(x, y, 2, 10, 3, 11, 6, 14, 7, 15)
#define HALVES_LOW(x, y) LANES_SHUFFLE(x, y, 0, 1, 8, 9, 4, 5, 12, 13)
#define HALVES_HIGH(x, y) LANES_SHUFFLE(x, y, 2, 3, 10, 11, 6, 7, 14, 15)
#else
#define TURNS_LOW(x, y) LANES_SHUFFLE(x, y, 0, 4, 1, 5)
#define TURNS_HIGH(x, y) LANES_SHUFFLE(x, y, 2, 6, 3, 7)
#define HALVES_LOW(x, y) LANES_SHUFFLE(x, y, 0, 1, 4, 5)
#define HALVES_HIGH(x, y) LANES_SHUFFLE(x, y, 2, 3, 6, 7)
#endif
/* clang-format on */

/* Four floats from each of LANES/4 places, 4 * plane apart. */
static inline lanes quads(const float *p, int64_t plane) {
#if LANES == 16
  quad x0 = *(const quad *)p, x1 = *(const quad *)(p + 4 * plane), x2 = *(const quad *)(p + 8 * plane),
       x3 = *(const quad *)(p + 12 * plane);
#ifdef __AVX512F__
  __m512 v = _mm512_castps128_ps512((__m128)x0);
  v = _mm512_insertf32x4(v, (__m128)x1, 1);
  v = _mm512_insertf32x4(v, (__m128)x2, 2);
  return (lanes)_mm512_insertf32x4(v, (__m128)x3, 3);
#endif
#elif LANES == 8
  quad x0 = *(const quad *)p, x1 = *(const quad *)(p + 4 * plane);
  return (lanes)_mm256_insertf128_ps(_mm256_castps128_ps256((__m128)x0), (__m128)x1, 1);
#else
  return *(const lanes *)p;
#endif
}

#if LANES == 16
/* interleave() below of three planes, as pictures have them, without gaps; n is at least LANES. */
static inline void interleave_three(const float *restrict src, int64_t plane, int64_t n, float *restrict dst) {
  for (int64_t j = 0; j < n; j += LANES) {
    int64_t i = j + LANES <= n ? j : n - LANES; /* the last overlap those before */
    const float *s = src + i;
    lanes x = *(const lanes *)s, y = *(const lanes *)(s + plane), z = *(const lanes *)(s + 2 * plane);
    lanes a = LANES_SHUFFLE(x, y, 0, 16, 0, 1, 17, 0, 2, 18, 0, 3, 19, 0, 4, 20, 0, 5);
    lanes b = LANES_SHUFFLE(x, y, 21, 0, 6, 22, 0, 7, 23, 0, 8, 24, 0, 9, 25, 0, 10, 26);
    lanes c = LANES_SHUFFLE(x, y, 0, 11, 27, 0, 12, 28, 0, 13, 29, 0, 14, 30, 0, 15, 31, 0);
    lanes *d = (lanes *)(dst + 3 * i);
    d[0] = LANES_SHUFFLE(a, z, 0, 1, 16, 3, 4, 17, 6, 7, 18, 9, 10, 19, 12, 13, 20, 15);
    d[1] = LANES_SHUFFLE(b, z, 0, 21, 2, 3, 22, 5, 6, 23, 8, 9, 24, 11, 12, 25, 14, 15);
    d[2] = LANES_SHUFFLE(c, z, 26, 1, 2, 27, 4, 5, 28, 7, 8, 29, 10, 11, 30, 13, 14, 31);
  }
}
#endif

/* dst[i * pitch + l] = src[l * plane + i] for i < n and l < count, zeros for count <= l < fill; count and fill at most
 * LANES. */
static inline void interleave(const float *restrict src, int64_t plane, int64_t count, int64_t n, float *restrict dst,
                              int64_t pitch, int64_t fill) {
  if (count == LANES && n >= 4) {
    for (int64_t j = 0; j < n; j += 4) {
      int64_t i = j + 4 <= n ? j : n - 4; /* the last four overlap those before */
      const float *s = src + i;
      float *d = dst + i * pitch;
      lanes x0 = quads(s, plane), x1 = quads(s + plane, plane), x2 = quads(s + 2 * plane, plane),
            x3 = quads(s + 3 * plane, plane);
      lanes a = TURNS_LOW(x0, x1), b = TURNS_LOW(x2, x3), e = TURNS_HIGH(x0, x1), f = TURNS_HIGH(x2, x3);
      *(lanes *)d = HALVES_LOW(a, b);
      *(lanes *)(d + pitch) = HALVES_HIGH(a, b);
      *(lanes *)(d + 2 * pitch) = HALVES_LOW(e, f);
      *(lanes *)(d + 3 * pitch) = HALVES_HIGH(e, f);
    }
    return;
  }
#if LANES == 16
  if (count == 3 && fill == 3 && pitch == 3 && n >= LANES) {
    interleave_three(src, plane, n, dst);
    return;
  }
#endif
  for (int64_t l = 0; l < count; l++)
    for (int64_t i = 0; i < n; i++) dst[i * pitch + l] = src[l * plane + i];
  for (int64_t i = 0; count < fill && i < n; i++)
    for (int64_t l = count; l < fill; l++) dst[i * pitch + l] = 0;
}

/* n values, every step-th; the usual steps are constants, for vectors. */
static inline __attribute__((unused)) void pick_run(const float *restrict from, int64_t step, int64_t n,
                                                    float *restrict to) {
  if (step == 1) {
    for (int64_t i = 0; i < n; i++) to[i] = from[i];
  } else if (step == 2) {
    for (int64_t i = 0; i < n; i++) to[i] = from[2 * i];
  } else if (step == 4) {
    for (int64_t i = 0; i < n; i++) to[i] = from[4 * i];
  } else {
    for (int64_t i = 0; i < n; i++) to[i] = from[step * i];
  }
}

/* Rows y0 .. and columns x0 .. of `count` planes [h, w] of x, channels last, with zeros where there is no x:
 * dst[(row * columns + column) * pitch + l] for l < fill. */
static inline void gather_planes(const float *restrict x, int64_t h, int64_t w, int64_t count, int64_t fill, int64_t y0,
                                 int64_t rows, int64_t x0, int64_t columns, float *restrict dst, int64_t pitch) {
  if (x0 == 0 && columns == w && y0 >= 0 && y0 + rows <= h) {
    interleave(x + y0 * w, h * w, count, rows * w, dst, pitch, fill);
    return;
  }
  int64_t first = x0 < 0 ? -x0 : 0, last = w - x0 < columns ? w - x0 : columns; /* the columns that exist */
  if (first > columns) first = columns;
  if (last < first) last = first;
  for (int64_t y = y0; y < y0 + rows; y++, dst += columns * pitch) {
    bool inside = y >= 0 && y < h;
    for (int64_t j = 0; j < columns; j++) {
      if (inside && j == first) j = last;
      if (j < columns) memset(dst + j * pitch, 0, sizeof(float) * (size_t)fill);
    }
    if (inside && last > first)
      interleave(x + y * w + x0 + first, h * w, count, last - first, dst + first * pitch, pitch, fill);
  }
}

/* Rows of four from two vectors: the first or last half of x, then of y; the even or odd rows of x, then of y. */
/* clang-format off */
#if LANES == 16
#define ROWS_LOW(x, y) LANES_SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define ROWS_HIGH(x, y) LANES_SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define ROWS_EVEN(x, y) LANES_SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ROWS_ODD(x, y) LANES_SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#elif LANES == 8
#define ROWS_EVEN(x, y) LANES_SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11)
#define ROWS_ODD(x, y) LANES_SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15)
#endif
/* clang-format on */

/* dst[l * LANES + i] = src[i * pitch + l]: LANES vectors turned, first within fours, then the fours. Whole vectors are
 * written, since reading one back from parts would wait for the cache. */
static inline void turn(const float *restrict src, int64_t pitch, float *restrict dst) {
  float fours[LANES * LANES] __attribute__((aligned(64)));
  lanes *f = (lanes *)fours, *d = (lanes *)dst;
  for (int g = 0; g < LANES / 4; g++) {
    const float *s = src + 4 * g * pitch;
    lanes x0 = *(const lanes *)s, x1 = *(const lanes *)(s + pitch), x2 = *(const lanes *)(s + 2 * pitch),
          x3 = *(const lanes *)(s + 3 * pitch);
    lanes a = TURNS_LOW(x0, x1), b = TURNS_LOW(x2, x3), e = TURNS_HIGH(x0, x1), h = TURNS_HIGH(x2, x3);
    f[g] = HALVES_LOW(a, b);
    f[LANES / 4 + g] = HALVES_HIGH(a, b);
    f[2 * (LANES / 4) + g] = HALVES_LOW(e, h);
    f[3 * (LANES / 4) + g] = HALVES_HIGH(e, h);
  }
  for (int i = 0; i < 4; i++, f += LANES / 4) {
#if LANES == 16
    lanes a = ROWS_LOW(f[0], f[1]), b = ROWS_LOW(f[2], f[3]), e = ROWS_HIGH(f[0], f[1]), h = ROWS_HIGH(f[2], f[3]);
    d[i] = ROWS_EVEN(a, b);
    d[4 + i] = ROWS_ODD(a, b);
    d[8 + i] = ROWS_EVEN(e, h);
    d[12 + i] = ROWS_ODD(e, h);
#elif LANES == 8
    d[i] = ROWS_EVEN(f[0], f[1]);
    d[4 + i] = ROWS_ODD(f[0], f[1]);
#else
    d[i] = f[0];
#endif
  }
}

/* ---- what a convolution does to its results ---- */

/* y[i] = act(x[i] + bias + residual[i]); residual may be NULL, x may be y. */
static inline void finish_run(const float *x, float bias, const float *residual, ty_activation activation, float *y,
                              int64_t n) {
  if (residual) {
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) y[i] = x[i] + bias + residual[i];
  } else if (x != y || bias != 0) {
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) y[i] = x[i] + bias;
  }
  ty_activate_f32(activation, y, n);
}

/* n positions of `count` channels, src[i * pitch + l], to the planes y + l * plane: bias, residual and activation of
 * `e` on the way. `at` is where the positions begin in y and the residual, `channel` the first channel. */
static inline void finish_planes(const conv_epilogue *e, const float *restrict src, int64_t pitch, int64_t n,
                                 int64_t count, float *y, int64_t at, int64_t plane, int64_t channel) {
  float turned[LANES * LANES] __attribute__((aligned(64)));
  for (int64_t j = 0; j < n; j += LANES) {
    int64_t length = LANES, i = j;
    if (n < LANES) {
      length = n;
      for (int64_t p = 0; p < n; p++)
        for (int64_t l = 0; l < count; l++) turned[l * LANES + p] = src[p * pitch + l];
    } else {
      if (i + LANES > n) i = n - LANES; /* the last overlap those before */
      turn(src + i * pitch, pitch, turned);
    }
    for (int64_t l = 0; l < count; l++) {
      int64_t to = at + l * plane + i;
      float bias = e->bias ? e->bias[channel + l] : 0;
      const float *residual = e->residual ? e->residual + to : NULL;
      if (length == LANES && !e->activation) { /* the usual case, a vector at a time */
        lanes v = *(const lanes *)(turned + l * LANES) + bias;
        __builtin_prefetch(y + to + 3 * LANES, 1); /* so many planes at once are not foreseen by the hardware */
        if (residual) v += *(const lanes *)residual;
        *(lanes *)(y + to) = v;
      } else {
        finish_run(turned + l * LANES, bias, residual, e->activation, y + to, length);
      }
    }
  }
}

#endif
