/* Special functions in float that have branch-free forms of their own, within 5 ulp. The polynomials are weighted minimax
 * fits made for this file. */
#ifndef TY_KERNELS_SPECIAL_F32_H
#define TY_KERNELS_SPECIAL_F32_H

#include "scalar.h"

/* ---- the gamma function and its relatives ---- */

/* log Gamma(x) of x >= 0. Below 3 it is that of 1 + u with u in [0, 1), and the logarithm that leads there; above it is
 * Stirling's series (DLMF 5.11.1), with log(x) - 1 in place of log(x), so that nothing large is taken away. */
TY_INLINE float ty_lgamma_usual_f32(float x) {
  float u = x < 1.0f ? x : x < 2.0f ? x - 1.0f : x - 2.0f, c = u - 0.5f;
  float e, f = ty_log_reduce_f32((x >= 1.0f) & (x < 3.0f) ? x < 2.0f ? 1.0f : x - 1.0f : x, &e);
  float low = f + (ty_log_tail_f32(f) + e * 1.42860677e-06f), high = e * 0.693145752f, log_x = low + high;
  float p = -0.00161368353f; /* log Gamma(1 + u) / (u (u - 1)) */
  p = p * c + 0.00288034067f;
  p = p * c - 0.00307763484f;
  p = p * c + 0.00511077372f;
  p = p * c - 0.00944113079f;
  p = p * c + 0.0168414321f;
  p = p * c - 0.031307891f;
  p = p * c + 0.062909402f;
  p = p * c - 0.145959899f;
  p = p * c + 0.483128965f;
  float near = u * (u - 1.0f) * p + (x < 1.0f ? -log_x : log_x);
  float v = 1.0f / x, z = v * v;
  float series = v * ((0.000709266111f * z - 0.00277446047f) * z + 0.0833333135f);
  float far = (x - 0.5f) * (low + (high - 1.0f)) + (0.418938533f + series);
  float y = x < 3.0f ? near : far;
  return x == 0.0f ? INFINITY : y;
}

/* psi(x) of x >= 0. Below 2 it is that of 1 + u with u in [0, 1), and -1/x; above DLMF 5.11.2. */
TY_INLINE float ty_digamma_usual_f32(float x) {
  float u = x < 1.0f ? x : x - 1.0f, c = u - 0.5f, v = 1.0f / x, z = v * v;
  float q = 0.0094268024f; /* psi(1 + u) / (u - root) */
  q = q * c - 0.0161229894f;
  q = q * c + 0.0181222875f;
  q = q * c - 0.0259371027f;
  q = q * c + 0.0406044461f;
  q = q * c - 0.0620254613f;
  q = q * c + 0.0950099304f;
  q = q * c - 0.14840126f;
  q = q * c + 0.240541562f;
  q = q * c - 0.423627436f;
  q = q * c + 0.951055884f;
  float near = ((u - 0.46163213f) - 1.2438150e-08f) * q - (x < 1.0f ? v : 0.0f);
  float s = 0.00247301324f;
  s = s * z - 0.00340438774f;
  s = s * z + 0.00391301746f;
  s = s * z - 0.00833187811f;
  s = s * z + 0.0833333284f;
  return x < 2.0f ? near : ty_log_f32(x) - (0.5f * v + z * s);
}

/* ---- modified Bessel functions of orders 0 and 1 ---- */

/* The power series up to 8, in x^2 / 4; beyond polynomials in 1 / x, times exp(x) / sqrt(x). */
TY_INLINE float ty_i0_near_f32(float y) {
  float p = 1.49200687e-11f;
  p = p * y + 3.85382587e-10f;
  p = p * y + 4.30429843e-08f;
  p = p * y + 1.89546222e-06f;
  p = p * y + 6.9623311e-05f;
  p = p * y + 0.00173556968f;
  p = p * y + 0.0277786348f;
  p = p * y + 0.249999404f;
  p = p * y + 1.00000012f;
  return p * y + 1.0f;
}
TY_INLINE float ty_i0_far_f32(float x) {
  float v = 1.0f / x, p = 0.222022802f;
  p = p * v + 0.0399167277f;
  p = p * v + 0.0276202913f;
  p = p * v + 0.0281923302f;
  p = p * v + 0.0498645455f;
  p = p * v + 0.398942292f;
  return p;
}
TY_INLINE float ty_i1_near_f32(float y) { /* over x */
  float p = 1.41386273e-12f;
  p = p * y + 4.7792461e-11f;
  p = p * y + 5.25083488e-09f;
  p = p * y + 2.72561977e-07f;
  p = p * y + 1.15899729e-05f;
  p = p * y + 0.000347175665f;
  p = p * y + 0.00694451155f;
  p = p * y + 0.0833332986f;
  p = p * y + 0.5f;
  return 0.5f + 0.5f * (p * y);
}
TY_INLINE float ty_i1_far_f32(float x) {
  float v = 1.0f / x, p = -0.510832667f;
  p = p * v + 0.0292170588f;
  p = p * v - 0.0484893285f;
  p = p * v - 0.0464577377f;
  p = p * v - 0.149607673f;
  p = p * v + 0.398942292f;
  return p;
}
/* exp(a) leaves the range before they do: it is taken of a - 4, and exp(4) goes to the root. */
TY_INLINE float ty_i0_f32(float x) {
  float a = fabsf(x), far = ty_exp_f32(a - 4.0f) * (54.5981500f * ty_i0_far_f32(a) / sqrtf(a));
  far = a == INFINITY ? a : far;
  return a <= 8.0f ? ty_i0_near_f32(0.25f * a * a) : far;
}
TY_INLINE float ty_i0e_f32(float x) {
  float a = fabsf(x), near = ty_i0_near_f32(0.25f * a * a) * ty_exp_f32(-a);
  return a <= 8.0f ? near : ty_i0_far_f32(a) / sqrtf(a);
}
TY_INLINE float ty_i1_f32(float x) {
  float a = fabsf(x), far = ty_exp_f32(a - 4.0f) * (54.5981500f * ty_i1_far_f32(a) / sqrtf(a));
  far = a == INFINITY ? a : far;
  return ty_copysign_f32(a <= 8.0f ? a * ty_i1_near_f32(0.25f * a * a) : far, x);
}
TY_INLINE float ty_i1e_f32(float x) {
  float a = fabsf(x), near = a * ty_i1_near_f32(0.25f * a * a) * ty_exp_f32(-a);
  return ty_copysign_f32(a <= 8.0f ? near : ty_i1_far_f32(a) / sqrtf(a), x);
}

#endif
