/* Encoding of blocks, for every backend. Q8_0 and Q4_0 give the codes of ggml's reference; the others of ggml choose
 * the scales of their parts by least squares over a range of candidates, as that does. A block with a NaN becomes NaN. */
#ifndef TY_KERNELS_QUANT_ENCODE_H
#define TY_KERNELS_QUANT_ENCODE_H

#include "quant_blocks.h"

TY_INLINE void ty_store_f16(uint8_t *to, float x) {
  uint16_t h = ty_f32_to_f16(x);
  memcpy(to, &h, sizeof h);
}

/* Of the largest magnitude, with its sign; NaN when there is one. */
TY_INLINE float ty_extreme(const float *x, int n) {
  float most = 0;
  for (int i = 0; i < n; i++)
    if (most == most && !(fabsf(x[i]) <= fabsf(most))) most = x[i];
  return most;
}

/* To the nearest integer in [low, high]; low for NaN. */
TY_INLINE int ty_nearest(float x, int low, int high) {
  if (!(x > (float)low)) return low;
  return x >= (float)high ? high : (int)lrintf(x);
}

/* ---- Q8_0 and Q4_0 ---- */

TY_INLINE void ty_encode_q8_0(const float *x, ty_q8_0 *b) {
  float d = fabsf(ty_extreme(x, 32)) / 127, inverse = d != 0 ? 1 / d : 0;
  ty_store_f16(b->d, d);
  for (int i = 0; i < 32; i++) {
    float q = x[i] * inverse, whole = truncf(q);
    q = fabsf(q - whole) >= 0.5f ? whole + copysignf(1, q) : whole; /* halves away from zero */
    b->q[i] = (int8_t)(q > -127 ? (q < 127 ? q : 127) : q == q ? -127 : 0);
  }
}

TY_INLINE uint8_t ty_q4_code(float x, double inverse) {
  double q = (double)x * inverse + 8.5;
  return (uint8_t)(q >= 15 ? 15 : q > 0 ? (int)q : 0);
}

TY_INLINE void ty_encode_q4_0(const float *x, ty_q4_0 *b) {
  float d = ty_extreme(x, 32) / -8, inverse = d != 0 ? 1 / d : 0;
  ty_store_f16(b->d, d);
  for (int i = 0; i < 16; i++) b->q[i] = (uint8_t)(ty_q4_code(x[i], inverse) | ty_q4_code(x[i + 16], inverse) << 4);
}

/* The bytes of a block with scale d, as f16 has it. */
TY_INLINE void ty_store_q4_0(const float *x, float d, ty_q4_0 *b) {
  float inverse = d != 0 ? 1 / d : 0;
  ty_store_f16(b->d, d);
  for (int i = 0; i < 16; i++)
    b->q[i] = (uint8_t)((ty_nearest(x[i] * inverse, -8, 7) + 8) | (ty_nearest(x[i + 16] * inverse, -8, 7) + 8) << 4);
}

/* ---- Q2_K and Q4_K ---- */

/* Scale and min (both >= 0) with x ~ scale q - min, q from 0 to `most`, of n elements. Larger elements count more. */
TY_INLINE void ty_fit_with_min(const float *x, const int n, const int most, float *scale, float *min) {
  enum { N = 32, STEPS = 20 }; /* N: at most */
  float square = 0, low = x[0], high = x[0], w[N], sum_w = 0, sum_x = 0;
  for (int i = 0; i < n; i++) square += x[i] * x[i];
  float typical = sqrtf(square / (float)n);
  for (int i = 0; i < n; i++) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    w[i] = typical + fabsf(x[i]);
    sum_w += w[i];
    sum_x += w[i] * x[i];
  }
  if (low > 0) low = 0;
  *scale = 0, *min = -low;
  if (!(high > low)) return;
  float least = INFINITY;
  for (int step = 0; step <= STEPS + 1; step++) { /* the first: from the smallest to the largest, as they are */
    float inverse = ((float)most + (step ? -1.0f + 0.1f * (float)(step - 1) : 0)) / (high - low);
    float q[N], sum_q = 0, sum_qq = 0, sum_qx = 0, error = 0;
    for (int i = 0; i < n; i++) {
      float r = rintf(inverse * (x[i] - low));
      q[i] = r > (float)most ? (float)most : r;
      sum_q += w[i] * q[i];
      sum_qq += w[i] * q[i] * q[i];
      sum_qx += w[i] * q[i] * x[i];
    }
    float a = 1 / inverse, c = low, determinant = sum_w * sum_qq - sum_q * sum_q;
    if (step && !(determinant > 0)) continue;
    if (step) {
      a = (sum_w * sum_qx - sum_x * sum_q) / determinant;
      c = (sum_qq * sum_x - sum_q * sum_qx) / determinant;
      if (c > 0) c = 0, a = sum_qx / sum_qq;
    }
    for (int i = 0; i < n; i++) error += w[i] * (a * q[i] + c - x[i]) * (a * q[i] + c - x[i]);
    if (error < least) least = error, *scale = a, *min = -c;
  }
}

/* Scales and mins of the groups of `n` in a block of 256, the largest of each, and the block's own two numbers, of which
 * those of the groups are codes up to `codes`. What is no number shows in d. */
TY_INLINE void ty_fit_groups(const float *x, int n, int most, int codes, float *scale, float *min, float *most_scale,
                             float *most_min, uint8_t *d, uint8_t *dmin) {
  *most_scale = *most_min = 0;
  for (int j = 0; j < 256 / n; j++) {
    ty_fit_with_min(x + n * j, n, most, &scale[j], &min[j]);
    *most_scale = scale[j] > *most_scale ? scale[j] : *most_scale;
    *most_min = min[j] > *most_min ? min[j] : *most_min;
  }
  float extreme_x = ty_extreme(x, 256);
  ty_store_f16(d, extreme_x == extreme_x ? *most_scale / (float)codes : extreme_x);
  ty_store_f16(dmin, *most_min / (float)codes);
}

/* The codes of n numbers >= 0, of which `most` is the largest. */
TY_INLINE void ty_part_codes(const float *x, float most, int n, int codes, int *to) {
  for (int j = 0; j < n; j++) to[j] = most > 0 ? ty_nearest(x[j] * ((float)codes / most), 0, codes) : 0;
}

/* The bytes of a block whose numbers are chosen. */
TY_INLINE void ty_store_q2_k(const float *x, float d, float dmin, const int *scale, const int *min, ty_q2_k *b) {
  memset(b, 0, sizeof *b);
  ty_store_f16(b->d, d);
  ty_store_f16(b->dmin, dmin);
  for (int j = 0; j < 16; j++) {
    b->scale[j] = (uint8_t)(scale[j] | min[j] << 4);
    if (!(d * (float)scale[j] > 0)) continue;
    float inverse = 1 / (d * (float)scale[j]);
    for (int i = 16 * j; i < 16 * j + 16; i++) {
      int q = ty_nearest((x[i] + dmin * (float)min[j]) * inverse, 0, 3);
      b->q[i / 128 * 32 + i % 32] |= (uint8_t)(q << i % 128 / 32 * 2);
    }
  }
}

TY_INLINE void ty_encode_q2_k(const float *x, ty_q2_k *b) {
  float scale[16], min[16], most_scale, most_min;
  int s[16], m[16];
  ty_fit_groups(x, 16, 3, 15, scale, min, &most_scale, &most_min, b->d, b->dmin);
  ty_part_codes(scale, most_scale, 16, 15, s);
  ty_part_codes(min, most_min, 16, 15, m);
  ty_store_q2_k(x, ty_block_f16(b->d), ty_block_f16(b->dmin), s, m, b);
}

TY_INLINE void ty_store_q4_k(const float *x, float d, float dmin, const int *scale, const int *min, ty_q4_k *b) {
  memset(b, 0, sizeof *b);
  ty_store_f16(b->d, d);
  ty_store_f16(b->dmin, dmin);
  for (int j = 0; j < 8; j++) {
    int s = scale[j], m = min[j];
    if (j < 4) {
      b->scale[j] = (uint8_t)s;
      b->scale[j + 4] = (uint8_t)m;
    } else {
      b->scale[j + 4] = (uint8_t)((s & 15) | (m & 15) << 4);
      b->scale[j - 4] |= (uint8_t)(s >> 4 << 6);
      b->scale[j] |= (uint8_t)(m >> 4 << 6);
    }
    if (!(d * (float)s > 0)) continue;
    float inverse = 1 / (d * (float)s);
    for (int i = 0; i < 32; i++) {
      int q = ty_nearest((x[32 * j + i] + dmin * (float)m) * inverse, 0, 15);
      b->q[j / 2 * 32 + i] |= (uint8_t)(q << (j & 1 ? 4 : 0));
    }
  }
}

TY_INLINE void ty_encode_q4_k(const float *x, ty_q4_k *b) {
  float scale[8], min[8], most_scale, most_min;
  int s[8], m[8];
  ty_fit_groups(x, 32, 15, 63, scale, min, &most_scale, &most_min, b->d, b->dmin);
  ty_part_codes(scale, most_scale, 8, 63, s);
  ty_part_codes(min, most_min, 8, 63, m);
  ty_store_q4_k(x, ty_block_f16(b->d), ty_block_f16(b->dmin), s, m, b);
}

/* ---- Q3_K and Q6_K ---- */

/* The scale with x ~ scale q, q from -half to half - 1, of 16 elements, squares of x as weights. */
TY_INLINE float ty_fit_symmetric(const float *x, const float half) {
  enum { N = 16 };
  float most = ty_extreme(x, N), best = 0, scale = 0;
  if (!(fabsf(most) > 1e-15f)) return 0;
  for (int step = -9; step <= 9; step++) {
    float inverse = -(half + 0.1f * (float)step) / most, sum_qx = 0, sum_qq = 0;
    for (int i = 0; i < N; i++) {
      float q = rintf(inverse * x[i]), w = x[i] * x[i];
      q = q > half - 1 ? half - 1 : q < -half ? -half : q;
      sum_qx += w * x[i] * q;
      sum_qq += w * q * q;
    }
    if (sum_qq > 0 && sum_qx * sum_qx > best * sum_qq) scale = sum_qx / sum_qq, best = scale * sum_qx;
  }
  return scale;
}

TY_INLINE void ty_store_q3_k(const float *x, float d, const int *scale, ty_q3_k *b) {
  memset(b, 0, sizeof *b);
  ty_store_f16(b->d, d);
  for (int j = 0; j < 16; j++) {
    int s = scale[j];
    b->scale[j % 8] |= (uint8_t)(((s + 32) & 15) << (j < 8 ? 0 : 4));
    b->scale[8 + j % 4] |= (uint8_t)((s + 32) >> 4 << 2 * (j / 4));
    float part = d * (float)s, inverse = part != 0 ? 1 / part : 0;
    for (int i = 16 * j; i < 16 * j + 16; i++) {
      int q = ty_nearest(x[i] * inverse, -4, 3) + 4;
      b->q[i / 128 * 32 + i % 32] |= (uint8_t)((q & 3) << i % 128 / 32 * 2);
      b->high[i % 32] |= (uint8_t)(q >> 2 << i / 32);
    }
  }
}

TY_INLINE void ty_store_q6_k(const float *x, float d, const int *scale, ty_q6_k *b) {
  memset(b, 0, sizeof *b);
  ty_store_f16(b->d, d);
  for (int j = 0; j < 16; j++) {
    b->scale[j] = (int8_t)scale[j];
    float part = d * (float)scale[j], inverse = part != 0 ? 1 / part : 0;
    for (int i = 0; i < 16; i++) {
      int q = ty_nearest(x[16 * j + i] * inverse, -32, 31) + 32, at = 16 * j + i;
      int half = at / 128, quarter = at % 128 / 32, l = at % 32;
      b->low[half * 64 + quarter % 2 * 32 + l] |= (uint8_t)((q & 15) << (quarter < 2 ? 0 : 4));
      b->high[half * 32 + l] |= (uint8_t)(q >> 4 << 2 * quarter);
    }
  }
}

/* The scale of a block, as f16 has it, and the codes from -half to half - 1 of its parts' scales. What is no number
 * shows in it. */
TY_INLINE float ty_symmetric_parts(const float *x, float q_half, int half, int *s) {
  float scale[16];
  for (int j = 0; j < 16; j++) scale[j] = ty_fit_symmetric(x + 16 * j, q_half);
  float most = ty_extreme(scale, 16), extreme_x = ty_extreme(x, 256);
  for (int j = 0; j < 16; j++) s[j] = most != 0 ? ty_nearest(scale[j] * ((float)-half / most), -half, half - 1) : 0;
  return ty_f16_to_f32(ty_f32_to_f16(extreme_x == extreme_x ? most / (float)-half : extreme_x));
}

TY_INLINE void ty_encode_q3_k(const float *x, ty_q3_k *b) {
  int s[16];
  float d = ty_symmetric_parts(x, 4, 32, s);
  ty_store_q3_k(x, d, s, b);
}

TY_INLINE void ty_encode_q6_k(const float *x, ty_q6_k *b) {
  int s[16];
  float d = ty_symmetric_parts(x, 32, 128, s);
  ty_store_q6_k(x, d, s, b);
}

/* ---- NF4 ---- */

TY_INLINE int ty_nf4_code(float x) {
  const float level[16] = { TY_NF4_LEVELS };
  int code = 0;
  for (int i = 0; i < 15; i++) code += x > (level[i] + level[i + 1]) / 2;
  return code;
}

/* What a group's largest magnitude makes of its scale. */
TY_INLINE float ty_nf4_unit(float most) { return most / (255.0f * 255.0f); }

TY_INLINE void ty_encode_nf4(const float *x, float unit, ty_nf4 *b) {
  float absmax = fabsf(ty_extreme(x, 64));
  b->absmax = (uint8_t)(unit > 0 ? ty_nearest(sqrtf(absmax / unit), 0, 255) : 0);
  float inverse = unit * (float)(b->absmax * b->absmax);
  inverse = inverse > 0 ? 1 / inverse : 0;
  for (int i = 0; i < 32; i++) b->q[i] = (uint8_t)(ty_nf4_code(x[i] * inverse) | ty_nf4_code(x[i + 32] * inverse) << 4);
}

/* ---- MXFP4 and NVFP4 ---- */

/* The code of the E2M1 number nearest to x / scale, halves to the even code, what is larger to 6. */
TY_INLINE uint8_t ty_e2m1_code(float x, float scale) {
  float q = scale != 0 ? x / scale : 0 * x, a = fabsf(q);
  int code = a < 2 ? (int)rintf(a + a) : a < 4 ? (int)rintf(a) + 2 : a < 8 ? (int)rintf(0.5f * a) + 4 : 7;
  return (uint8_t)((code > 7 ? 7 : code) | (signbit(q) ? 8 : 0));
}

TY_INLINE void ty_store_mxfp4(const float *x, int e, ty_mxfp4 *b) {
  float scale = 2 * ty_e8m0_half((uint8_t)e);
  b->e = (uint8_t)e;
  for (int i = 0; i < 16; i++) b->q[i] = (uint8_t)(ty_e2m1_code(x[i], scale) | ty_e2m1_code(x[i + 16], scale) << 4);
}

/* The power of 2 is that of the largest element less that of the largest number, 4, as section 6.3 of the OCP's
 * specification of microscaling formats (2023) has it. */
TY_INLINE void ty_encode_mxfp4(const float *x, ty_mxfp4 *b) {
  uint32_t bits = ty_bits_f32(fabsf(ty_extreme(x, 32)));
  int e = (int)(bits >> 23);
  ty_store_mxfp4(x, e == 255 ? 255 : e > 2 ? e - 2 : 0, b);
}

/* The nearest number of E4M3 to x >= 0, ties to the even code, at most 448. */
TY_INLINE uint8_t ty_e4m3_code(float x) {
  if (!(x >= 0)) return 127;
  if (x >= 448) return x < INFINITY ? 126 : 127;
  if (x < 0x1p-6f) return (uint8_t)(int)rintf(x * 0x1p9f);
  uint32_t bits = ty_bits_f32(x);
  return (uint8_t)(((bits + (bits >> 20 & 1) + 0x7ffff) >> 20) - (120 << 3));
}

/* The factor of a row with which the largest scale is the largest number of E4M3. */
TY_INLINE float ty_nvfp4_unit(float most) { return most / (6 * 448.0f); }

TY_INLINE void ty_store_nvfp4_part(const float *x, float factor, int j, uint8_t scale, ty_nvfp4 *b) {
  b->scale[j] = scale;
  float d = 2 * ty_nvfp4_half(factor, b, j);
  for (int i = 0; i < 8; i++) b->q[8 * j + i] = (uint8_t)(ty_e2m1_code(x[i], d) | ty_e2m1_code(x[i + 8], d) << 4);
}

/* The scales of 16 elements each are those of the largest. */
TY_INLINE void ty_encode_nvfp4(const float *x, float factor, ty_nvfp4 *b) {
  for (int j = 0; j < 4; j++, x += 16) {
    float most = fabsf(ty_extreme(x, 16));
    ty_store_nvfp4_part(x, factor, j, ty_e4m3_code(factor > 0 ? most / factor / 6 : 0 * most), b);
  }
}

#endif
