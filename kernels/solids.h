/* Solids in integers: what the CPU and the GPU share of draw_solids, so that every device, instruction set and number
 * of threads gives the same numbers. A voxel is crossed by 4 x 4 lines along x; on each, a solid is one span, whose
 * ends are known to a 1024th of a voxel. */
#ifndef TY_KERNELS_SOLIDS_H
#define TY_KERNELS_SOLIDS_H

#include "draw.h"

enum {
  TY_SOLID_FIELDS = 27,
  TY_SOLID_SIDE = 512,        /* voxels of a side, at most */
  TY_SOLID_LINES = 4,         /* lines across a voxel, in y and in z */
  TY_SOLID_VOXEL = 1024,      /* a voxel's length along x */
  TY_SOLID_WHOLE = 16 * 1024, /* what covers all of a voxel */
  TY_SOLID_BITS = 4           /* of a value, after the point, while it is drawn */
};
#define TY_SOLID_ONE ((int64_t)1 << 20)   /* 1 of the four functions */
#define TY_SOLID_STEEP ((int64_t)1 << 21) /* of a function, by voxel: half a voxel is the least radius */
#define TY_SOLID_FAR ((int64_t)1 << 23)   /* along x, beyond every volume */
#define TY_SOLID_LEAST ((int64_t)1 << 20) /* of the square of the steps along x: below, a line is along a tube */

/* One row of the list. */
typedef struct ty_solid {
  int32_t label, value, amplitude, period;
  uint32_t seed;
  int32_t box[6];
  int32_t f[4][4]; /* of x, y, z, and 1 */
} ty_solid;

/* A row, its numbers brought into their ranges; the volume is [size[2], size[1], size[0]]. */
TY_INLINE ty_solid ty_solid_read(const int32_t *row, const int64_t *size) {
  ty_solid s;
  memcpy(&s, row, sizeof s);
  s.value = ty_draw_clamp(s.value, 0, INT16_MAX);
  s.amplitude = ty_draw_clamp(s.amplitude, 0, INT16_MAX);
  s.period = ty_draw_clamp(s.period, TY_DRAW_ONE, 1 << 30);
  for (int i = 0; i < 6; i++) s.box[i] = ty_draw_clamp(s.box[i], 0, (int32_t)size[i / 2]);
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 3; j++) s.f[i][j] = ty_draw_clamp(s.f[i][j], -(1 << 21), 1 << 21);
  return s;
}

TY_INLINE int64_t ty_solid_divide(int64_t x, int64_t y) { /* rounded down */
  int64_t quotient = x / y;
  return quotient - (x % y != 0 && (x < 0) != (y < 0));
}

/* Where the line y, z (in eighths of a voxel) runs inside, from *from to *to in 1024ths of a voxel; false: nowhere. */
TY_INLINE bool ty_solid_span(const ty_solid *s, int64_t y, int64_t z, int64_t *from, int64_t *to) {
  int64_t q[4], low = (int64_t)s->box[0] * TY_SOLID_VOXEL, high = (int64_t)s->box[1] * TY_SOLID_VOXEL;
  for (int i = 0; i < 4; i++) q[i] = ((s->f[i][1] * y + s->f[i][2] * z) >> 3) + s->f[i][3];

  const int64_t slope = s->f[3][0];
  if (slope == 0) {
    if (q[3] < -TY_SOLID_ONE || q[3] > TY_SOLID_ONE) return false;
  } else {
    const int64_t edge = slope > 0 ? TY_SOLID_ONE : -TY_SOLID_ONE;
    const int64_t begin = ty_solid_divide((-edge - q[3]) * TY_SOLID_VOXEL, slope);
    const int64_t end = ty_solid_divide((edge - q[3]) * TY_SOLID_VOXEL, slope);
    if (begin > low) low = begin;
    if (end < high) high = end;
  }
  if (low >= high) return false;

  int64_t a = 0, b = 0, middle;
  for (int i = 0; i < 3; i++) a += (int64_t)s->f[i][0] * s->f[i][0], b += s->f[i][0] * q[i];
  if (a < TY_SOLID_LEAST) {
    middle = (low + high) >> 1;
  } else { /* where the line comes closest to the axis: -b / a, in two steps that 64 bits hold */
    const int64_t whole = ty_solid_divide(-b, a);
    if (whole < -4096 || whole > 4096) return false;
    middle = whole * TY_SOLID_VOXEL + (-b - whole * a) * TY_SOLID_VOXEL / a;
  }
  int64_t rest = TY_SOLID_ONE * TY_SOLID_ONE;
  for (int i = 0; i < 3; i++) {
    const int64_t p = q[i] + ((s->f[i][0] * middle) >> 10);
    if (p < -TY_SOLID_ONE || p > TY_SOLID_ONE) return false;
    rest -= p * p;
  }
  if (rest < 0) return false;
  if (a >= TY_SOLID_LEAST) {
    const int64_t half = ty_draw_root(rest * (TY_SOLID_VOXEL * TY_SOLID_VOXEL) / a);
    if (middle - half > low) low = middle - half;
    if (middle + half < high) high = middle + half;
  }
  *from = low;
  *to = high;
  return low < high;
}

/* ---- texture: value noise of two octaves, 3-D ---- */

/* A position along one side, in periods: the lattice point before it and how far beyond it, eased. */
typedef struct ty_solid_step {
  int64_t at, share;
} ty_solid_step;

TY_INLINE int64_t ty_solid_ease(int64_t rest, int64_t inverse) {
  int64_t s = ty_draw_share((rest * inverse) >> 16);
  return (((s * s) >> 16) * (3 * TY_DRAW_ONE - 2 * s)) >> 16;
}

/* Of the middle of voxel `i`; octave 1 has half the period. */
TY_INLINE ty_solid_step ty_solid_step_of(const ty_solid *s, int64_t i, int octave) {
  const int64_t x = ((2 * i + 1) * (TY_DRAW_ONE / 2)) << octave, inverse = ((int64_t)1 << 32) / s->period;
  ty_solid_step step;
  step.at = x / s->period;
  step.share = ty_solid_ease(x - step.at * s->period, inverse);
  return step;
}

/* At lattice point `x` along x, between those of y and z. */
TY_INLINE int64_t ty_solid_lattice(uint32_t seed, int64_t x, ty_solid_step y, ty_solid_step z) {
  int64_t side[2];
  for (int i = 0; i < 2; i++) {
    const uint32_t layer = seed ^ (uint32_t)(z.at + i) * 0x27D4EB2Fu;
    side[i] = (ty_draw_lattice(layer, x, y.at) * (TY_DRAW_ONE - y.share) +
               ty_draw_lattice(layer, x, y.at + 1) * y.share) >>
              16;
  }
  return (side[0] * (TY_DRAW_ONE - z.share) + side[1] * z.share) >> 16;
}

TY_INLINE int64_t ty_solid_between(int64_t first, int64_t second, int64_t share) {
  return (first * (TY_DRAW_ONE - share) + second * share) >> 16;
}

/* The value where the two octaves of the texture are these. */
TY_INLINE int32_t ty_solid_shade(const ty_solid *s, int64_t coarse, int64_t fine) {
  const int64_t value = s->value + ((s->amplitude * (2 * coarse + fine - 3 * (TY_DRAW_ONE / 2))) >> 16);
  return (int32_t)(value < 0 ? 0 : value > INT16_MAX ? INT16_MAX : value) << TY_SOLID_BITS;
}

/* A value under a solid that covers a part of the voxel. */
TY_INLINE int32_t ty_solid_over(int32_t below, int32_t value, int32_t cover) {
  return below + (int32_t)(((int64_t)(value - below) * cover + TY_SOLID_WHOLE / 2) >> 14);
}
TY_INLINE int16_t ty_solid_value(int32_t value) {
  return (int16_t)((value + (1 << TY_SOLID_BITS >> 1)) >> TY_SOLID_BITS);
}

#endif
