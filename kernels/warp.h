/* Pictures at other sizes and places: what the CPU and the GPU share of crop_resize and warp. Positions and weights are
 * integers, so that every device, instruction set and number of threads gives the same bytes. */
#ifndef TY_KERNELS_WARP_H
#define TY_KERNELS_WARP_H

#include "scalar.h"

typedef enum ty_taps_mode { TY_TAPS_NEAREST, TY_TAPS_BILINEAR, TY_TAPS_BICUBIC } ty_taps_mode;

typedef struct ty_p_warp {
  int mode;    /* ty_taps_mode */
  double fill; /* warp: what lies beyond the picture */
} ty_p_warp;

#define TY_TAPS_ONE 65536 /* a pixel */
#define TY_TAPS_SIDE 65535
enum { TY_WEIGHT_BITS = 14, TY_WEIGHT_ONE = 1 << TY_WEIGHT_BITS };

/* One side of a box, in 16.16: it is cut into `count` pixels. */
typedef struct ty_taps_side {
  int64_t start, length, step, radius; /* of the filter: a pixel of the result or of the picture, whichever is wider */
  int64_t lo, hi;                      /* pixels that may be looked at: those of the box that the picture has */
  int mode;
} ty_taps_side;

/* Pixels to 16.16; of data that nobody checked, so a million pixels at most, and none for NaN. */
TY_INLINE int64_t ty_taps_fixed(double x) {
  x = x < -1e6 ? -1e6 : x > 1e6 ? 1e6 : x == x ? x : 0;
  x = x * TY_TAPS_ONE;
  return (int64_t)(x < 0 ? x - 0.5 : x + 0.5);
}

TY_INLINE ty_taps_side ty_taps_side_of(double start, double length, int64_t size, int64_t count, int mode) {
  ty_taps_side s;
  s.start = ty_taps_fixed(start);
  s.length = ty_taps_fixed(length > 0 ? length : 0);
  s.step = s.length / count;
  s.mode = mode;
  const int64_t wide = s.step > TY_TAPS_ONE ? s.step : TY_TAPS_ONE;
  s.radius = mode == TY_TAPS_BICUBIC ? 2 * wide : wide;
  s.lo = s.start >> 16;
  s.hi = (s.start + s.length + TY_TAPS_ONE - 1) >> 16;
  s.lo = s.lo < 0 ? 0 : s.lo > size - 1 ? size - 1 : s.lo;
  s.hi = s.hi > size ? size : s.hi < s.lo + 1 ? s.lo + 1 : s.hi;
  return s;
}

/* The pixels that pixel i of the result is made of: [*first, *first + returned). */
TY_INLINE int64_t ty_taps_of(const ty_taps_side *s, int64_t i, int64_t count, int64_t *first) {
  const int64_t centre = s->start + (2 * i + 1) * s->length / (2 * count);
  int64_t lo, hi;
  if (s->mode == TY_TAPS_NEAREST) {
    lo = centre >> 16;
    hi = lo + 1;
  } else { /* centres of pixels within the radius */
    lo = (centre - s->radius + TY_TAPS_ONE / 2) >> 16;
    hi = (centre + s->radius + TY_TAPS_ONE / 2) >> 16;
  }
  lo = lo < s->lo ? s->lo : lo > s->hi - 1 ? s->hi - 1 : lo;
  hi = hi > s->hi ? s->hi : hi < lo + 1 ? lo + 1 : hi;
  *first = lo;
  return hi - lo;
}

/* The filter at the distance of a pixel's centre; 0 beyond its radius. */
TY_INLINE int64_t ty_taps_filter(const ty_taps_side *s, int64_t centre, int64_t pixel) {
  int64_t d = pixel * TY_TAPS_ONE + TY_TAPS_ONE / 2 - centre;
  if (d < 0) d = -d;
  if (s->mode == TY_TAPS_NEAREST) return 1;
  if (d >= s->radius) return 0;
  if (s->mode == TY_TAPS_BILINEAR) return s->radius - d;
  /* Keys 1981 with a = -1/2, t in 16.16 */
  const int64_t wide = s->radius / 2, t = (d << 16) / wide, t2 = t * t >> 16, t3 = t2 * t >> 16;
  return t < TY_TAPS_ONE ? (3 * t3 - 5 * t2 + 2 * TY_TAPS_ONE) / 2 : (-t3 + 5 * t2 - 8 * t + 4 * TY_TAPS_ONE) / 2;
}

/* The weights of the taps, which sum to TY_WEIGHT_ONE: what rounding leaves over goes to the tap nearest to the centre. */
TY_INLINE void ty_taps_weights(const ty_taps_side *s, int64_t i, int64_t count, int64_t first, int64_t n,
                               int32_t *weight) {
  const int64_t centre = s->start + (2 * i + 1) * s->length / (2 * count);
  int64_t total = 0, rest = TY_WEIGHT_ONE, best = 0;
  for (int64_t k = 0; k < n; k++) total += ty_taps_filter(s, centre, first + k);
  for (int64_t k = 0; k < n; k++) {
    const int64_t raw = ty_taps_filter(s, centre, first + k);
    const int64_t w = total > 0 ? (raw * 2 * TY_WEIGHT_ONE + total) / (2 * total) : 0;
    if (raw > ty_taps_filter(s, centre, first + best)) best = k;
    weight[k] = (int32_t)w;
    rest -= w;
  }
  weight[best] += (int32_t)rest;
}

/* Columns are summed up first, and then rows of these sums; of bytes they keep six more bits. */
TY_INLINE int32_t ty_taps_between(int32_t sum) { return (sum + (1 << 7)) >> 8; }
TY_INLINE uint8_t ty_taps_byte(int64_t sum) {
  const int64_t v = (sum + (1 << 19)) >> 20;
  return (uint8_t)(v < 0 ? 0 : v > 255 ? 255 : v);
}

/* ---- warp ---- */

/* The four pixels around the place that pixel (x, y) of the result shows: the first one's column and row, and the place
 * between them in 65536ths. What lies far off, or behind the eye, is between pixels that no picture has. */
typedef struct ty_warp_place {
  int64_t column, row;
  int32_t across, down;
} ty_warp_place;

TY_INLINE ty_warp_place ty_warp_place_of(const double *m, int64_t x, int64_t y, int mode) {
  const double far = 4.0 * TY_TAPS_ONE;
  const double w = m[6] * (double)x + m[7] * (double)y + m[8];
  const double a = (m[0] * (double)x + m[1] * (double)y + m[2]) / w;
  const double b = (m[3] * (double)x + m[4] * (double)y + m[5]) / w;
  const bool seen = w > 0 && a > -far && a < far && b > -far && b < far;
  int64_t u = seen ? ty_taps_fixed(a) : -4 * TY_TAPS_ONE, v = seen ? ty_taps_fixed(b) : 0;
  ty_warp_place p;
  if (mode == TY_TAPS_NEAREST) {
    u = (u + TY_TAPS_ONE / 2) & ~(int64_t)65535;
    v = (v + TY_TAPS_ONE / 2) & ~(int64_t)65535;
  }
  p.column = u >> 16;
  p.row = v >> 16;
  p.across = (int32_t)(u & 65535);
  p.down = (int32_t)(v & 65535);
  return p;
}

/* Which of the four the picture has: bits for the first and second of the upper row, and of the lower one. */
TY_INLINE int ty_warp_has(const ty_warp_place *p, int64_t h, int64_t w) {
  const int first = p->column >= 0 && p->column < w, second = p->column >= -1 && p->column < w - 1;
  const int upper = p->row >= 0 && p->row < h, lower = p->row >= -1 && p->row < h - 1;
  return (first & upper) | (second & upper) << 1 | (first & lower) << 2 | (second & lower) << 3;
}

/* Four bytes, each row mixed with 16 bits of the place, and then the two rows. */
TY_INLINE uint8_t ty_warp_byte(int64_t a, int64_t b, int64_t c, int64_t d, const ty_warp_place *p) {
  const int64_t upper = a * (TY_TAPS_ONE - p->across) + b * p->across;
  const int64_t lower = c * (TY_TAPS_ONE - p->across) + d * p->across;
  return (uint8_t)((upper * (TY_TAPS_ONE - p->down) + lower * p->down + ((int64_t)1 << 31)) >> 32);
}
TY_INLINE float ty_warp_real_f32(float a, float b, float c, float d, const ty_warp_place *p) {
  const float s = (float)p->across * 0x1p-16f, t = (float)p->down * 0x1p-16f;
  const float upper = a + (b - a) * s, lower = c + (d - c) * s;
  return upper + (lower - upper) * t;
}
TY_INLINE double ty_warp_real_f64(double a, double b, double c, double d, const ty_warp_place *p) {
  const double s = p->across * 0x1p-16, t = p->down * 0x1p-16;
  const double upper = a + (b - a) * s, lower = c + (d - c) * s;
  return upper + (lower - upper) * t;
}

/* `fill` among bytes */
TY_INLINE double ty_warp_fill_byte(double fill) { return fill > 0 ? fill < 255 ? (double)(int)(fill + 0.5) : 255 : 0; }

#endif
