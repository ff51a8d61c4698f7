/* The transforms of Winograd's convolution F(4x4, 3x3): 36 products instead of 144 for every 4x4 results. Lavin and
 * Gray 2016. Interpolation points are 0, +-sqrt(1/2), +-sqrt(2) and infinity: the usual 0, +-1, +-2 lose twice as much
 * of a float's precision. Tiles are transformed with channels in the lanes of a vector. */
#ifndef TY_KERNELS_CPU_CONV_WINOGRAD_H
#define TY_KERNELS_CPU_CONV_WINOGRAD_H

#include "conv_lanes.h"

enum { OUT = 4, TILE = 6, POINTS = TILE * TILE }; /* a tile of results, of what they are made from, its products */

#define P 0.70710678118654752f  /* the points, */
#define P3 0.35355339059327376f /* and their third powers */
#define Q 1.41421356237309505f
#define Q3 2.82842712474619010f

#define AT(p) (*(lanes *)(p))
#define GET(p) (*(const lanes *)(p))

/* The values at six points: at 0 and infinity, and at the pairs +-sqrt(1/2) and +-sqrt(2) the even part of the polynomial
 * plus and minus the odd one. */
static inline void put_points(float *restrict dst, int64_t to, lanes zero, lanes even_p, lanes odd_p, lanes even_q,
                              lanes odd_q, lanes infinity) {
  AT(dst) = zero;
  AT(dst + to) = even_p + odd_p;
  AT(dst + 2 * to) = even_p - odd_p;
  AT(dst + 3 * to) = even_q + odd_q;
  AT(dst + 4 * to) = even_q - odd_q;
  AT(dst + 5 * to) = infinity;
}

/* Six values of the input to six points: src[i * from] to dst[i * to]. */
static inline void points_of_input(const float *restrict src, int64_t from, float *restrict dst, int64_t to) {
  lanes d0 = GET(src), d1 = GET(src + from), d2 = GET(src + 2 * from), d3 = GET(src + 3 * from),
        d4 = GET(src + 4 * from), d5 = GET(src + 5 * from);
  put_points(dst, to, d0 - 2.5f * d2 + d4, d4 - 2.0f * d2, P * (d3 - 2.0f * d1), d4 - 0.5f * d2, Q * (d3 - 0.5f * d1),
             d1 - 2.5f * d3 + d5);
}

/* Three taps of a kernel to six points. */
static inline void points_of_kernel(const float *restrict src, int64_t from, float *restrict dst, int64_t to) {
  lanes w0 = GET(src), w1 = GET(src + from), w2 = GET(src + 2 * from);
  put_points(dst, to, w0, -2.0f / 3 * w0 - 1.0f / 3 * w2, -2.0f / 3 * P * w1, 1.0f / 6 * w0 + 1.0f / 3 * w2, Q / 6 * w1,
             w2);
}

/* Four values of the gradient to six points. */
static inline void points_of_gradient(const float *restrict src, int64_t from, float *restrict dst, int64_t to) {
  lanes g0 = GET(src), g1 = GET(src + from), g2 = GET(src + 2 * from), g3 = GET(src + 3 * from);
  put_points(dst, to, g0, -2.0f / 3 * g0 - 1.0f / 3 * g2, -2.0f / 3 * P * g1 - 2.0f / 3 * P3 * g3,
             1.0f / 6 * g0 + 1.0f / 3 * g2, Q / 6 * g1 + Q3 / 6 * g3, g3);
}

/* Six points to four results. */
static inline void results_of_points(const float *restrict src, int64_t from, float *restrict dst, int64_t to) {
  lanes m0 = GET(src), m1 = GET(src + from), m2 = GET(src + 2 * from), m3 = GET(src + 3 * from),
        m4 = GET(src + 4 * from), m5 = GET(src + 5 * from);
  lanes s = m1 + m2, d = m1 - m2, t = m3 + m4, c = m3 - m4;
  AT(dst) = m0 + s + t;
  AT(dst + to) = P * d + Q * c;
  AT(dst + 2 * to) = 0.5f * s + 2.0f * t;
  AT(dst + 3 * to) = P3 * d + Q3 * c + m5;
}

/* Six points to the gradients of three taps. */
static inline void taps_of_points(const float *restrict src, int64_t from, float *restrict dst, int64_t to) {
  lanes m0 = GET(src), m1 = GET(src + from), m2 = GET(src + 2 * from), m3 = GET(src + 3 * from),
        m4 = GET(src + 4 * from), m5 = GET(src + 5 * from);
  lanes s = m1 + m2, d = m1 - m2, t = m3 + m4, c = m3 - m4;
  AT(dst) = m0 + s + t;
  AT(dst + to) = P * d + Q * c;
  AT(dst + 2 * to) = 0.5f * s + 2.0f * t + m5;
}

/* ---- both directions ---- */

/* A row of `tiles` input tiles, src[6][columns][LANES] with columns = 4 tiles + 2, to dst[point * point_step + tile *
 * tile_step]. Neighbours share two columns, so the first direction is done once for the whole row. */
static void transform_input(const float *restrict src, int64_t tiles, float *restrict half, float *restrict dst,
                            int64_t tile_step, int64_t point_step) {
  int64_t columns = OUT * tiles + 2, row = columns * LANES;
  for (int64_t j = 0; j < columns; j++) points_of_input(src + j * LANES, row, half + j * LANES, row);
  for (int64_t t = 0; t < tiles; t++)
    for (int i = 0; i < TILE; i++)
      points_of_input(half + i * row + t * OUT * LANES, LANES, dst + t * tile_step + i * TILE * point_step, point_step);
}

/* A row of gradient tiles, src[4][4 tiles][LANES]. */
static void transform_gradient(const float *restrict src, int64_t tiles, float *restrict dst, int64_t tile_step,
                               int64_t point_step) {
  float half[TILE * OUT * LANES] __attribute__((aligned(64)));
  int64_t row = OUT * tiles * LANES;
  for (int64_t t = 0; t < tiles; t++) {
    for (int j = 0; j < OUT; j++) points_of_gradient(src + (t * OUT + j) * LANES, row, half + j * LANES, OUT * LANES);
    for (int i = 0; i < TILE; i++)
      points_of_gradient(half + i * OUT * LANES, LANES, dst + t * tile_step + i * TILE * point_step, point_step);
  }
}

/* Nine taps, src[9][LANES]. */
static inline void transform_kernel(const float *restrict src, float *restrict dst, int64_t point_step) {
  float half[TILE * 3 * LANES] __attribute__((aligned(64)));
  for (int j = 0; j < 3; j++) points_of_kernel(src + j * LANES, 3 * LANES, half + j * LANES, 3 * LANES);
  for (int i = 0; i < TILE; i++) points_of_kernel(half + i * 3 * LANES, LANES, dst + i * TILE * point_step, point_step);
}

/* One tile of results from src[point * point_step] to dst[4][4][LANES]. */
static inline void transform_results(const float *restrict src, int64_t point_step, float *restrict dst) {
  float half[OUT * TILE * LANES] __attribute__((aligned(64)));
  for (int j = 0; j < TILE; j++)
    results_of_points(src + j * point_step, TILE * point_step, half + j * LANES, TILE * LANES);
  for (int i = 0; i < OUT; i++) results_of_points(half + i * TILE * LANES, LANES, dst + i * OUT * LANES, LANES);
}

/* The gradients of nine taps, dst[tap * tap_step]. */
static inline void transform_taps(const float *restrict src, int64_t point_step, float *restrict dst,
                                  int64_t tap_step) {
  float half[3 * TILE * LANES] __attribute__((aligned(64)));
  for (int j = 0; j < TILE; j++)
    taps_of_points(src + j * point_step, TILE * point_step, half + j * LANES, TILE * LANES);
  for (int i = 0; i < 3; i++) taps_of_points(half + i * TILE * LANES, LANES, dst + i * 3 * tap_step, tap_step);
}

#undef P
#undef P3
#undef Q
#undef Q3
#undef AT
#undef GET

#endif
