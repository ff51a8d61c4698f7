/* Pictures drawn in integers: what the CPU and the GPU share of draw_sprites, draw_background and pixel_noise, so that every
 * device, instruction set and number of threads gives the same bytes.
 *
 * Lengths are 16.16: 65536 is a pixel of the picture, or a texel of the atlas. Colours are sRGB and are mixed as they
 * are. A texel of a sprite's pyramid is red, green, blue times alpha, and 255 times alpha: 0 to 65025 each. */
#ifndef TY_KERNELS_DRAW_H
#define TY_KERNELS_DRAW_H

#include "philox.h"

#define TY_DRAW_ONE 65536      /* a pixel, or the whole share of a mixture */
#define TY_DRAW_OPAQUE 65025u  /* 255 * 255 */
#define TY_DRAW_COVERED 32513u /* the least alpha of a pixel that counts as covered */
#define TY_DRAW_SIDE 4096      /* pixels of a side, at most: sums of squares fit 64 bits */
#define TY_DRAW_NOBODY (-1)

/* ---- sprites ---- */

enum { TY_SPRITE_FIELDS = 12, TY_SPRITE_MOST = 64, TY_SPRITE_LEVELS = 12, TY_SPRITE_SIDE = 1 << 11 };

/* One row of the list. u = a x + b y + c and v = d x + e y + f lead from the picture to the atlas, both measured from
 * the upper left corner, pixel centres at halves. */
typedef struct ty_sprite {
  int32_t index, a, b, c, d, e, f, red, green, blue, strength, opacity;
} ty_sprite;

TY_INLINE int32_t ty_draw_clamp(int32_t x, int32_t lo, int32_t hi) { return x < lo ? lo : x > hi ? hi : x; }

TY_INLINE ty_sprite ty_sprite_read(const int32_t *row) {
  ty_sprite s;
  memcpy(&s, row, sizeof s);
  s.red = ty_draw_clamp(s.red, 0, 255);
  s.green = ty_draw_clamp(s.green, 0, 255);
  s.blue = ty_draw_clamp(s.blue, 0, 255);
  s.strength = ty_draw_clamp(s.strength, 0, 256);
  s.opacity = ty_draw_clamp(s.opacity, 0, 256);
  return s;
}

/* The levels of a pyramid, each half as wide as the one before, rounded up, with a rim of one empty texel. */
TY_INLINE int64_t ty_pyramid_level(int64_t side, int level) { /* texels before it; of all levels: TY_SPRITE_LEVELS */
  int64_t before = 0;
  for (int i = 0; i < level && side > 0; i++) {
    before += (side + 2) * (side + 2);
    side = side > 1 ? (side + 1) / 2 : 0;
  }
  return before;
}

/* The level where a step of one pixel is at most two texels, so that the four samples of a pixel miss none. */
TY_INLINE int ty_sprite_level(const ty_sprite *s, int64_t side) {
  uint64_t across = (uint64_t)((int64_t)s->a * s->a) + (uint64_t)((int64_t)s->d * s->d);
  uint64_t down = (uint64_t)((int64_t)s->b * s->b) + (uint64_t)((int64_t)s->e * s->e);
  uint64_t step = across > down ? across : down;
  int level = 0;
  while (step >> (2 * level) > (uint64_t)4 * TY_DRAW_ONE * TY_DRAW_ONE && side > 1) {
    level++;
    side = (side + 1) / 2;
  }
  return level;
}

/* What recolours the texels of a sprite: its mean luminance takes the tint itself, darker ones go down to a third of
 * it and brighter ones up to three fifths of the way to white, which keeps the shading. */
typedef struct ty_tint {
  int32_t mean, dark, light; /* the mean, 1 to 254; slopes below and above it, 8 bits after the point */
} ty_tint;

TY_INLINE ty_tint ty_tint_of(int32_t mean) {
  ty_tint t;
  t.mean = ty_draw_clamp(mean, 1, 254);
  t.dark = (166 << 8) / t.mean;
  t.light = (153 << 8) / (255 - t.mean);
  return t;
}

TY_INLINE void ty_tint_apply(const ty_sprite *s, const ty_tint *t, uint32_t *rgba) {
  int32_t alpha = (int32_t)rgba[3];
  int32_t luminance = (int32_t)((77 * rgba[0] + 150 * rgba[1] + 29 * rgba[2]) >> 8);
  int32_t beyond = luminance - (t->mean * alpha + 127) / 255;
  int32_t shade = alpha, shine = 0;
  if (beyond < 0) {
    shade -= (-beyond * t->dark) >> 8;
  } else {
    shine = (beyond * t->light) >> 8;
  }
  int32_t tint[3] = { s->red, s->green, s->blue };
  for (int i = 0; i < 3; i++) {
    int32_t to = (tint[i] * shade + (255 - tint[i]) * shine + 127) / 255;
    rgba[i] = (uint32_t)(((int32_t)rgba[i] * (256 - s->strength) + to * s->strength) >> 8);
  }
}

TY_INLINE uint8_t ty_draw_over(uint32_t below, uint32_t colour, uint32_t alpha) {
  return (uint8_t)((colour * 255 + below * (TY_DRAW_OPAQUE - alpha) + TY_DRAW_OPAQUE / 2) / TY_DRAW_OPAQUE);
}

/* ---- backgrounds ---- */

enum { TY_BACKGROUND_FIELDS = 12 };
enum {
  TY_BACKGROUND_PLAIN,
  TY_BACKGROUND_GRADIENT,
  TY_BACKGROUND_RADIAL,
  TY_BACKGROUND_STRIPES,
  TY_BACKGROUND_CHECKS,
  TY_BACKGROUND_DOTS,
  TY_BACKGROUND_NOISE,
  TY_BACKGROUND_KINDS
};

/* One row of the list. The share of the second colour follows from where a pixel is, measured from the middle of the
 * picture and turned by the angle of (cos, sin), in periods. */
typedef struct ty_background {
  int32_t kind, first[3], second[3], cos, sin, period, phase, seed;
} ty_background;

typedef struct ty_background_job {
  ty_background b;
  int64_t inverse; /* 2^32 / period */
} ty_background_job;

TY_INLINE ty_background_job ty_background_read(const int32_t *row) {
  ty_background_job j;
  memcpy(&j.b, row, sizeof j.b);
  for (int i = 0; i < 3; i++) {
    j.b.first[i] = ty_draw_clamp(j.b.first[i], 0, 255);
    j.b.second[i] = ty_draw_clamp(j.b.second[i], 0, 255);
  }
  j.b.cos = ty_draw_clamp(j.b.cos, -TY_DRAW_ONE, TY_DRAW_ONE);
  j.b.sin = ty_draw_clamp(j.b.sin, -TY_DRAW_ONE, TY_DRAW_ONE);
  j.b.period = ty_draw_clamp(j.b.period, TY_DRAW_ONE, 1 << 30);
  j.b.phase = ty_draw_clamp(j.b.phase, -(1 << 30), 1 << 30);
  j.inverse = ((int64_t)1 << 32) / j.b.period;
  return j;
}

TY_INLINE int64_t ty_draw_share(int64_t x) { return x < 0 ? 0 : x > TY_DRAW_ONE ? TY_DRAW_ONE : x; }

/* floor(sqrt(x)), x < 2^62; exact, whatever the device's rounding. */
TY_INLINE int64_t ty_draw_root(int64_t x) {
  int64_t root = (int64_t)sqrt((double)x);
  while (root * root > x) root--;
  while ((root + 1) * (root + 1) <= x) root++;
  return root;
}

/* x as whole periods and the rest, 0 to period - 1. */
TY_INLINE int64_t ty_draw_rest(const ty_background_job *j, int64_t x, int64_t *periods) {
  int64_t times = (x * j->inverse) >> 32, rest = x - times * j->b.period;
  while (rest < 0) rest += j->b.period, times--;
  while (rest >= j->b.period) rest -= j->b.period, times++;
  *periods = times;
  return rest;
}

/* How far x lies inside the half of its period that has the second colour: negative outside; slope 1, so that the edge
 * is as wide as a pixel. */
TY_INLINE int64_t ty_draw_wave(const ty_background_job *j, int64_t x) {
  int64_t periods, rest = ty_draw_rest(j, x, &periods), half = j->b.period / 2;
  int64_t away = rest > half ? rest - half : half - rest;
  return away - j->b.period / 4;
}

TY_INLINE int64_t ty_draw_lattice(uint32_t seed, int64_t x, int64_t y) { /* 0 to 65535 */
  uint32_t h = seed ^ (uint32_t)x * 0x9E3779B1u ^ (uint32_t)y * 0x85EBCA77u;
  h = (h ^ h >> 15) * 0x2C1B3C6Du;
  h = (h ^ h >> 12) * 0x297A2D39u;
  return (h ^ h >> 15) >> 16;
}

/* Value noise: random numbers at whole periods, smoothly joined. */
TY_INLINE int64_t ty_draw_noise(const ty_background_job *j, uint32_t seed, int64_t x, int64_t y) {
  int64_t column, row, s = ty_draw_rest(j, x, &column), t = ty_draw_rest(j, y, &row);
  s = ty_draw_share((s * j->inverse) >> 16);
  t = ty_draw_share((t * j->inverse) >> 16);
  s = (((s * s) >> 16) * (3 * TY_DRAW_ONE - 2 * s)) >> 16;
  t = (((t * t) >> 16) * (3 * TY_DRAW_ONE - 2 * t)) >> 16;
  int64_t top = ty_draw_lattice(seed, column, row) * (TY_DRAW_ONE - s) + ty_draw_lattice(seed, column + 1, row) * s;
  int64_t low = ty_draw_lattice(seed, column, row + 1) * (TY_DRAW_ONE - s) +
                ty_draw_lattice(seed, column + 1, row + 1) * s;
  return ((top >> 16) * (TY_DRAW_ONE - t) + (low >> 16) * t) >> 16;
}

/* The share of the second colour, 0 to TY_DRAW_ONE, of the pixel whose centre is at (x, y) from the middle. */
TY_INLINE int64_t ty_background_share(const ty_background_job *j, int64_t x, int64_t y) {
  const int64_t half = TY_DRAW_ONE / 2;
  int64_t u = (x * j->b.cos + y * j->b.sin) >> 16, v = (y * j->b.cos - x * j->b.sin) >> 16, none;
  switch (j->b.kind) {
    case TY_BACKGROUND_GRADIENT: return ty_draw_share(half + (((u + j->b.phase) * j->inverse) >> 16));
    case TY_BACKGROUND_RADIAL: {
      int64_t right = x - j->b.phase;
      return ty_draw_share((ty_draw_root(right * right + y * y) * j->inverse) >> 16);
    }
    case TY_BACKGROUND_STRIPES: return ty_draw_share(half + ty_draw_wave(j, u + j->b.phase));
    case TY_BACKGROUND_CHECKS: {
      int64_t across = 2 * ty_draw_share(half + ty_draw_wave(j, u + j->b.phase)) - TY_DRAW_ONE;
      int64_t down = 2 * ty_draw_share(half + ty_draw_wave(j, v + j->b.phase)) - TY_DRAW_ONE;
      return half + across * down / (2 * TY_DRAW_ONE);
    }
    case TY_BACKGROUND_DOTS: {
      int64_t across = ty_draw_rest(j, u + j->b.phase, &none) - j->b.period / 2;
      int64_t down = ty_draw_rest(j, v + j->b.phase, &none) - j->b.period / 2;
      return ty_draw_share(half + j->b.period / 4 - ty_draw_root(across * across + down * down));
    }
    case TY_BACKGROUND_NOISE: {
      uint32_t seed = (uint32_t)j->b.seed;
      int64_t coarse = ty_draw_noise(j, seed, u + j->b.phase, v);
      int64_t fine = ty_draw_noise(j, seed + 1, 2 * (u + j->b.phase), 2 * v);
      return ty_draw_share(half + (2 * coarse + fine - 3 * half)); /* a third more contrast than the mean of the two */
    }
    default: return 0;
  }
}

TY_INLINE uint8_t ty_background_mix(const ty_background *b, int channel, int64_t share) {
  return (uint8_t)((b->first[channel] * (TY_DRAW_ONE - share) + b->second[channel] * share + TY_DRAW_ONE / 2) >> 16);
}

/* ---- noise ---- */

enum { TY_NOISE_FIELDS = 3 };

/* A byte with noise: the sum of the four bytes of a random word is bell-shaped, of deviation 147.8 around 510, and comes
 * out with deviation sigma / 256. */
TY_INLINE uint8_t ty_noisy(uint8_t x, uint32_t word, int64_t sigma) {
  int64_t z = (int64_t)((word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24)) - 510;
  int64_t y = x + ((z * sigma * 443 + (1 << 23)) >> 24); /* 443 / 2^24 is 1 / (147.8 * 256) */
  return (uint8_t)(y < 0 ? 0 : y > 255 ? 255 : y);
}

TY_INLINE uint64_t ty_noise_seed(const int32_t *row) { return (uint32_t)row[0] | (uint64_t)(uint32_t)row[1] << 32; }
TY_INLINE int64_t ty_noise_sigma(const int32_t *row) { return ty_draw_clamp(row[2], 0, 1 << 20); }

#endif
