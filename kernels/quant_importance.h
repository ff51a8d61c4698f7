/* Encoding of blocks by the importance of columns: of ggml's formats, the codes with which the sum of w (x - x')^2 over a
 * block is small, and never larger than with the codes that are chosen without. w is the importance of the column, the
 * mean square of what it is multiplied by, times the root of x^2 plus the block's mean square, both as llama.cpp has it.
 * Without that root the sum is the expected square of what encoding changes in the product, were inputs independent; but
 * least squares make values smaller, all in one direction, and models suffer from that: large values have to count more.
 *
 * A value is d s q - dmin m, with a code s and m for each part of a block and q for each element. Parts are fitted by
 * weighted least squares over candidates, as without importance; d and dmin are fitted to them the same way, each part
 * weighing what its elements do; then s and m of each part move by one as long as that helps, d and dmin are solved for
 * again, and the best is kept, also of other d beside the fitted one. For every backend. */
#ifndef TY_KERNELS_QUANT_IMPORTANCE_H
#define TY_KERNELS_QUANT_IMPORTANCE_H

#include "quant_encode.h"

/* A format: elements of a block and of a part, the ranges of q, s and m (no m: 0). */
typedef struct ty_block_kind {
  int columns, part, low, high, s_low, s_high, m_high;
} ty_block_kind;

typedef struct ty_block_fit {
  float d, dmin; /* as f16 has them */
  int s[16], m[16];
  float error;
} ty_block_fit;

TY_INLINE float ty_as_f16(float x) { return ty_f16_to_f32(ty_f32_to_f16(x)); }

/* A weight as it counts: what is no number or negative, as 0. */
TY_INLINE float ty_weight_of(float w) { return w > 0 && w < INFINITY ? w : 0; }

/* What a part loses with scale a and minimum b. */
TY_INLINE float ty_part_error(const float *x, const float *w, const ty_block_kind k, float a, float b) {
  float inverse = a != 0 ? 1 / a : 0, sum = 0;
  for (int i = 0; i < k.part; i++) {
    float off = a * (float)ty_nearest((x[i] + b) * inverse, k.low, k.high) - b - x[i];
    sum += w[i] * off * off;
  }
  return sum;
}

/* Scale and minimum (0 where the kind has none) of a part by least squares over candidates, v as weights. */
TY_INLINE void ty_fit_part(const float *x, const float *v, const ty_block_kind k, float *scale, float *min) {
  enum { N = 32 };
  float low = x[0], high = x[0], sum_v = 0, sum_x = 0, least = INFINITY;
  for (int i = 0; i < k.part; i++) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    sum_v += v[i];
    sum_x += v[i] * x[i];
  }
  if (low > 0) low = 0;
  *scale = 0, *min = k.m_high ? -low : 0;
  float extreme = ty_extreme(x, k.part);
  if (k.m_high ? !(high > low) : !(fabsf(extreme) > 1e-15f)) return;
  for (int step = -18; step <= 18; step++) {
    float inverse = k.m_high ? ((float)k.high + 0.05f * (float)step) / (high - low)
                             : ((float)k.low - 0.05f * (float)step) / extreme;
    float from = k.m_high ? low : 0, q[N], sum_q = 0, sum_qq = 0, sum_qx = 0, error = 0, a, c = 0;
    for (int i = 0; i < k.part; i++) {
      q[i] = (float)ty_nearest(inverse * (x[i] - from), k.low, k.high);
      sum_q += v[i] * q[i];
      sum_qq += v[i] * q[i] * q[i];
      sum_qx += v[i] * q[i] * x[i];
    }
    if (!(sum_qq > 0)) continue;
    a = sum_qx / sum_qq;
    if (k.m_high) {
      float determinant = sum_v * sum_qq - sum_q * sum_q;
      if (!(determinant > 0)) continue;
      c = (sum_qq * sum_x - sum_q * sum_qx) / determinant;
      if (c > 0) c = 0;
      else a = (sum_v * sum_qx - sum_x * sum_q) / determinant;
      if (!(a > 0)) continue;
    }
    for (int i = 0; i < k.part; i++) error += v[i] * (a * q[i] + c - x[i]) * (a * q[i] + c - x[i]);
    if (error < least) least = error, *scale = a, *min = -c;
  }
}

/* The unit of `n` numbers by least squares over candidates, times `by`, and their codes in [low, high]. */
TY_INLINE float ty_fit_unit(const float *x, const float *v, int n, int low, int high, float by, int *codes) {
  float extreme = ty_extreme(x, n), best = 0, unit = 0;
  if (!(fabsf(extreme) > 1e-20f)) extreme = 0;
  for (int step = -9; step <= 9 && extreme != 0; step++) {
    float inverse = ((float)(low < 0 ? low : high) + 0.1f * (float)step) / extreme, sum_qx = 0, sum_qq = 0;
    for (int i = 0; i < n; i++) {
      float q = (float)ty_nearest(inverse * x[i], low, high);
      sum_qx += v[i] * q * x[i];
      sum_qq += v[i] * q * q;
    }
    if (sum_qq > 0 && sum_qx * sum_qx > best * sum_qq) unit = sum_qx / sum_qq, best = unit * sum_qx;
  }
  unit = ty_as_f16(unit * by);
  for (int i = 0; i < n; i++) codes[i] = unit != 0 ? ty_nearest(x[i] / unit, low, high) : 0;
  return unit;
}

/* The error of all parts. */
TY_INLINE float ty_fit_error(const float *x, const float *w, const ty_block_kind k, const ty_block_fit *f) {
  float sum = 0;
  for (int j = 0; j < k.columns / k.part; j++)
    sum += ty_part_error(x + j * k.part, w + j * k.part, k, f->d * (float)f->s[j], f->dmin * (float)f->m[j]);
  return sum;
}

/* Moves s and m of each part by one at a time as long as that helps. */
TY_INLINE void ty_fit_codes(const float *x, const float *w, const ty_block_kind k, ty_block_fit *f) {
  f->error = 0;
  for (int j = 0; j < k.columns / k.part; j++) {
    const float *xj = x + j * k.part, *wj = w + j * k.part;
    float least = ty_part_error(xj, wj, k, f->d * (float)f->s[j], f->dmin * (float)f->m[j]);
    for (bool moved = true; moved;) {
      int s = f->s[j], m = f->m[j];
      moved = false;
      for (int i = 0; i < 8; i++) {
        int place = i < 4 ? i : i + 1, ds = place % 3 - 1, dm = place / 3 - 1; /* all neighbours but itself */
        if (s + ds < k.s_low || s + ds > k.s_high || m + dm < 0 || m + dm > k.m_high) continue;
        float error = ty_part_error(xj, wj, k, f->d * (float)(s + ds), f->dmin * (float)(m + dm));
        if (error < least) least = error, f->s[j] = s + ds, f->m[j] = m + dm, moved = true;
      }
    }
    f->error += least;
  }
}

/* d and dmin by least squares for the codes that are there. */
TY_INLINE void ty_fit_units(const float *x, const float *w, const ty_block_kind k, ty_block_fit *f) {
  double pp = 0, pm = 0, mm = 0, px = 0, mx = 0;
  for (int i = 0; i < k.columns; i++) {
    int j = i / k.part;
    float a = f->d * (float)f->s[j], b = f->dmin * (float)f->m[j], inverse = a != 0 ? 1 / a : 0;
    double p = (double)f->s[j] * ty_nearest((x[i] + b) * inverse, k.low, k.high), m = f->m[j], v = w[i];
    pp += v * p * p, pm += v * p * m, mm += v * m * m, px += v * p * x[i], mx += v * m * x[i];
  }
  if (k.m_high && mm > 0) {
    double determinant = pp * mm - pm * pm;
    if (!(determinant > 1e-9 * pp * mm)) return;
    double d = (px * mm - mx * pm) / determinant, dmin = (px * pm - mx * pp) / determinant;
    if (!(d > 0) || dmin < 0) return;
    f->d = ty_as_f16((float)d), f->dmin = ty_as_f16((float)dmin);
  } else if (pp > 0) {
    f->d = ty_as_f16((float)(px / pp));
  }
}

/* Improves on `best`, the codes without importance. Returns whether it could. */
TY_INLINE bool ty_fit_block(const float *x, const float *importance, const ty_block_kind k, ty_block_fit *best) {
  enum { ROUNDS = 3 };
  float w[256], scale[16], min[16], weight[16], square = 0;
  int parts = k.columns / k.part;
  for (int i = 0; i < k.columns; i++) square += x[i] * x[i];
  if (!(square < INFINITY)) return false;
  for (int i = 0; i < k.columns; i++)
    w[i] = ty_weight_of(importance[i]) * sqrtf(square / (float)k.columns + x[i] * x[i]);
  best->error = ty_fit_error(x, w, k, best);
  bool better = false;
  for (int j = 0; j < parts; j++) ty_fit_part(x + j * k.part, w + j * k.part, k, &scale[j], &min[j]);
  for (int j = 0; j < parts; j++) {
    weight[j] = 0;
    for (int i = j * k.part; i < (j + 1) * k.part; i++) weight[j] += w[i];
  }
  /* From the codes that are there; from fits of the parts, with the unit that suits these best and some beside it. */
  for (int way = 0; way < 4; way++) {
    ty_block_fit f = *best;
    if (way && parts > 1) {
      float by = 1 + 0.1f * (float)(way - 2);
      f.d = ty_fit_unit(scale, weight, parts, k.s_low, k.s_high, by, f.s);
      f.dmin = k.m_high ? ty_fit_unit(min, weight, parts, 0, k.m_high, 1, f.m) : 0;
    } else if (way) {
      if (way > 1) break;
      f.d = ty_as_f16(scale[0]), f.s[0] = 1;
    }
    for (int round = 0; round < ROUNDS; round++) {
      ty_fit_codes(x, w, k, &f);
      if (f.error < best->error) *best = f, better = true;
      else if (round) break;
      ty_fit_units(x, w, k, &f);
    }
  }
  return better;
}

/* ---- formats ---- */

TY_INLINE ty_block_fit ty_fit_of(const uint8_t *d, const uint8_t *dmin) {
  ty_block_fit f;
  memset(&f, 0, sizeof f);
  f.d = ty_block_f16(d);
  if (dmin) f.dmin = ty_block_f16(dmin);
  return f;
}

TY_INLINE void ty_improve_q4_0(const float *x, const float *importance, ty_q4_0 *b) {
  const ty_block_kind k = { 32, 32, -8, 7, 1, 1, 0 };
  ty_block_fit f = ty_fit_of(b->d, NULL);
  f.s[0] = 1;
  if (ty_fit_block(x, importance, k, &f)) ty_store_q4_0(x, f.d, b);
}

TY_INLINE void ty_improve_q2_k(const float *x, const float *importance, ty_q2_k *b) {
  const ty_block_kind k = { 256, 16, 0, 3, 0, 15, 15 };
  ty_block_fit f = ty_fit_of(b->d, b->dmin);
  for (int j = 0; j < 16; j++) f.s[j] = b->scale[j] & 15, f.m[j] = b->scale[j] >> 4;
  if (ty_fit_block(x, importance, k, &f)) ty_store_q2_k(x, f.d, f.dmin, f.s, f.m, b);
}

TY_INLINE void ty_improve_q4_k(const float *x, const float *importance, ty_q4_k *b) {
  const ty_block_kind k = { 256, 32, 0, 15, 0, 63, 63 };
  ty_block_fit f = ty_fit_of(b->d, b->dmin);
  for (int j = 0; j < 8; j++) ty_q4_k_part(b->scale, j, &f.s[j], &f.m[j]);
  if (ty_fit_block(x, importance, k, &f)) ty_store_q4_k(x, f.d, f.dmin, f.s, f.m, b);
}

TY_INLINE void ty_improve_q3_k(const float *x, const float *importance, ty_q3_k *b) {
  const ty_block_kind k = { 256, 16, -4, 3, -32, 31, 0 };
  ty_block_fit f = ty_fit_of(b->d, NULL);
  for (int j = 0; j < 16; j++) f.s[j] = ty_q3_k_scale(b->scale, j);
  if (ty_fit_block(x, importance, k, &f)) ty_store_q3_k(x, f.d, f.s, b);
}

TY_INLINE void ty_improve_q6_k(const float *x, const float *importance, ty_q6_k *b) {
  const ty_block_kind k = { 256, 16, -32, 31, -128, 127, 0 };
  ty_block_fit f = ty_fit_of(b->d, NULL);
  for (int j = 0; j < 16; j++) f.s[j] = b->scale[j];
  if (ty_fit_block(x, importance, k, &f)) ty_store_q6_k(x, f.d, f.s, b);
}

/* ---- MXFP4 and NVFP4: a neighbour of the scale where that loses less ---- */

TY_INLINE float ty_weighed_loss(const float *x, const float *importance, const float *y, int n) {
  float sum = 0;
  for (int i = 0; i < n; i++) sum += (importance[i] > 0 ? importance[i] : 0) * (y[i] - x[i]) * (y[i] - x[i]);
  return sum;
}

TY_INLINE void ty_improve_mxfp4(const float *x, const float *importance, ty_mxfp4 *b) {
  const int8_t twice[16] = { TY_E2M1_TWICE };
  ty_mxfp4 best = *b;
  float least = INFINITY;
  if (b->e == 255) return;
  for (int step = 0; step < 3; step++) { /* as it is first: it stays where others are no better */
    int e = (int)b->e + (step == 2 ? -1 : step);
    if (e < 0 || e > 254) continue;
    ty_mxfp4 next;
    float y[32], half = ty_e8m0_half((uint8_t)e);
    ty_store_mxfp4(x, e, &next);
    for (int i = 0; i < 16; i++) {
      y[i] = half * (float)twice[next.q[i] & 15];
      y[i + 16] = half * (float)twice[next.q[i] >> 4];
    }
    float loss = ty_weighed_loss(x, importance, y, 32);
    if (loss < least) least = loss, best = next;
  }
  *b = best;
}

TY_INLINE void ty_improve_nvfp4(const float *x, const float *importance, float factor, ty_nvfp4 *b) {
  enum { REACH = 4 }; /* steps of an eighth or less */
  const int8_t twice[16] = { TY_E2M1_TWICE };
  for (int j = 0; j < 4; j++, x += 16, importance += 16) {
    int was = b->scale[j], best = was;
    float least = INFINITY;
    if (was == 127) continue;
    for (int step = 0; step <= 2 * REACH; step++) {
      int scale = was + (step % 2 ? (step + 1) / 2 : -step / 2);
      if (scale < 0 || scale > 126) continue;
      float y[16];
      ty_store_nvfp4_part(x, factor, j, (uint8_t)scale, b);
      float half = ty_nvfp4_half(factor, b, j);
      for (int i = 0; i < 8; i++) {
        y[i] = half * (float)twice[b->q[8 * j + i] & 15];
        y[i + 8] = half * (float)twice[b->q[8 * j + i] >> 4];
      }
      float loss = ty_weighed_loss(x, importance, y, 16);
      if (loss < least) least = loss, best = scale;
    }
    ty_store_nvfp4_part(x, factor, j, (uint8_t)best, b);
  }
}

#endif
