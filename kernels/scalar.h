/* One element: the arithmetic that every backend shares. ty_NAME_f32 are branch-free, so that loops over them
 * vectorise, and stay within about 2 ulp (erfc and gelu 5; gelu_tanh 20 at -4), with infinities, NaN, zeros and
 * denormals as in C's <math.h>, except that sigmoid, silu and gelu_tanh are 0 where their exponential is denormal;
 * ty_NAME_f64 are the C library's. Plain C that is also C++ for CUDA. The polynomials are weighted minimax fits made for
 * this file. */
#ifndef TY_KERNELS_SCALAR_H
#define TY_KERNELS_SCALAR_H

#include <math.h>
#include <string.h>
#include "base.h"

#ifdef __CUDACC__
#define TY_INLINE static inline __host__ __device__
#else
#define TY_INLINE static inline __attribute__((unused))
#endif

TY_INLINE uint32_t ty_bits_f32(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
TY_INLINE float ty_from_bits_f32(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}
TY_INLINE uint64_t ty_bits_f64(double x) {
  uint64_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
TY_INLINE double ty_from_bits_f64(uint64_t u) {
  double x;
  memcpy(&x, &u, sizeof x);
  return x;
}
TY_INLINE float ty_copysign_f32(float x, float sign) {
  return ty_from_bits_f32((ty_bits_f32(x) & 0x7fffffffu) | (ty_bits_f32(sign) & 0x80000000u));
}

/* Adding this rounds |x| < 2^22 to an integer, which is then in the low bits. */
#define TY_ROUNDER_F32 12582912.0f

/* ---- exponentials ---- */

/* exp(r) - 1 for |r| <= log(2)/2. */
TY_INLINE float ty_expm1_reduced_f32(float r) {
  float q = 0.000199574206f;
  q = q * r + 0.00139338966f;
  q = q * r + 0.00833319314f;
  q = q * r + 0.0416664779f;
  q = q * r + 0.166666672f;
  q = q * r + 0.5f;
  return r + r * r * q;
}

/* x = n log(2) + r; n comes as an integer. */
TY_INLINE float ty_exp_reduce_f32(float x, int32_t *n) {
  float z = x * 1.44269504f + TY_ROUNDER_F32, nf = z - TY_ROUNDER_F32;
  *n = (int32_t)(ty_bits_f32(z) - ty_bits_f32(TY_ROUNDER_F32));
  return (x - nf * 0.693145752f) - nf * 1.42860677e-06f;
}

TY_INLINE float ty_exp2_int_f32(int32_t n) {
  return ty_from_bits_f32((uint32_t)(n + 127) << 23);
} /* -126 <= n <= 127; 0 for -127 */

/* 2^k exp(x) for k of 0 and -1, without overflow in between. */
TY_INLINE float ty_exp_scaled_f32(float x, int32_t k) {
  int32_t n;
  x = x < -104.5f ? -104.5f : x;
  x = x > 90.0f ? 90.0f : x;
  float p = 1.0f + ty_expm1_reduced_f32(ty_exp_reduce_f32(x, &n));
  n = (int32_t)((uint32_t)n + (uint32_t)k);
  int32_t half = n >> 1; /* in two factors: 2^n alone may be out of range */
  return p * ty_from_bits_f32(((uint32_t)half + 127u) << 23) *
         ty_from_bits_f32(((uint32_t)n - (uint32_t)half + 127u) << 23);
}

TY_INLINE float ty_exp_f32(float x) { return ty_exp_scaled_f32(x, 0); }

/* exp(x) for x < 80, with less work: 0 where the result would be denormal. */
TY_INLINE float ty_exp_flushed_f32(float x) {
  int32_t n;
  float p = 1.0f + ty_expm1_reduced_f32(ty_exp_reduce_f32(x < -88.0f ? -88.0f : x, &n)); /* n >= -127, where 2^n is 0 */
  return p * ty_exp2_int_f32(n);
}

TY_INLINE float ty_exp2_f32(float x) {
  x = x < -151.0f ? -151.0f : x;
  x = x > 129.0f ? 129.0f : x;
  float z = x + TY_ROUNDER_F32, r = x - (z - TY_ROUNDER_F32);
  int32_t n = (int32_t)(ty_bits_f32(z) - ty_bits_f32(TY_ROUNDER_F32)), half = n >> 1;
  return (1.0f + ty_expm1_reduced_f32(r * 0.693147181f)) * ty_from_bits_f32(((uint32_t)half + 127u) << 23) *
         ty_from_bits_f32(((uint32_t)n - (uint32_t)half + 127u) << 23);
}

TY_INLINE float ty_expm1_f32(float x) {
  int32_t n;
  float c = x < -18.0f ? -18.0f : x;
  c = c > 89.0f ? 89.0f : c;
  float p = ty_expm1_reduced_f32(ty_exp_reduce_f32(c, &n));
  float s = ty_from_bits_f32((uint32_t)(n + 126) << 23); /* 2^(n-1) */
  float y = 2.0f * (s * p + (s - 0.5f));
  return x == 0.0f ? x : y;
}

TY_INLINE float ty_sinh_f32(float x) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu), z = a * a;
  float p = ((2.78392645e-06f * z + 0.000198426351f) * z + 0.00833331142f) * z + 0.166666672f;
  float h = ty_exp_scaled_f32(a, -1);
  return ty_copysign_f32(a < 1.0f ? a + a * z * p : h - 0.25f / h, x);
}

TY_INLINE float ty_cosh_f32(float x) {
  float h = ty_exp_scaled_f32(ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu), -1);
  return h + 0.25f / h;
}

TY_INLINE float ty_tanh_f32(float x) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu), z = a * a;
  float p = -0.00565785263f;
  p = p * z + 0.0205990802f;
  p = p * z - 0.0537282154f;
  p = p * z + 0.133313149f;
  p = p * z - 0.333332777f;
  return ty_copysign_f32(a < 0.625f ? a + a * z * p : 1.0f - 2.0f / (ty_exp_f32(2.0f * a) + 1.0f), x);
}

TY_INLINE float ty_sigmoid_f32(float x) {
  float e = ty_exp_flushed_f32(ty_from_bits_f32(ty_bits_f32(x) | 0x80000000u));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* ---- logarithms ---- */

/* x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), for finite x > 0. */
TY_INLINE float ty_log_reduce_f32(float x, float *e) {
  float tiny = x < 0x1p-126f ? 1.0f : 0.0f;
  x = tiny != 0.0f ? x * 0x1p23f : x;
  uint32_t u = ty_bits_f32(x) - 0x3f3504f3u;
  *e = (float)((int32_t)u >> 23) - 23.0f * tiny;
  return ty_from_bits_f32((u & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
}

/* log(1 + f) - f */
TY_INLINE float ty_log_tail_f32(float f) {
  float p = 0.0691416413f;
  p = p * f - 0.117885925f;
  p = p * f + 0.118727922f;
  p = p * f - 0.12384519f;
  p = p * f + 0.142187119f;
  p = p * f - 0.166692451f;
  p = p * f + 0.200022236f;
  p = p * f - 0.249999866f;
  p = p * f + 0.333333105f;
  float z = f * f;
  return z * (f * p) - 0.5f * z;
}

/* `y` where x is positive and finite, else what every logarithm has there. */
TY_INLINE float ty_log_edges_f32(float x, float y) {
  float special = x == 0.0f ? -INFINITY : (x > 0.0f ? x : NAN);
  return (x > 0.0f) & (x < INFINITY) ? y : special;
}

TY_INLINE float ty_log_f32(float x) {
  float e, f = ty_log_reduce_f32(x, &e);
  return ty_log_edges_f32(x, (f + (ty_log_tail_f32(f) + e * 1.42860677e-06f)) + e * 0.693145752f);
}

TY_INLINE float ty_log2_f32(float x) {
  float e, f = ty_log_reduce_f32(x, &e), t = ty_log_tail_f32(f);
  return ty_log_edges_f32(x, ((f * 0.442695041f + t * 1.44269504f) + f) + e);
}

TY_INLINE float ty_log10_f32(float x) {
  float e, f = ty_log_reduce_f32(x, &e), t = ty_log_tail_f32(f);
  return ty_log_edges_f32(x, (t * 0.434294482f + (e * 4.6050390e-06f + f * 0.434294482f)) + e * 0.301025391f);
}

TY_INLINE float ty_log1p_f32(float x) {
  float u = 1.0f + x, e, f = ty_log_reduce_f32(u, &e);
  float b = u - 1.0f, lost = (1.0f - (u - b)) + (x - b); /* what the sum rounded off */
  float y = (f + ((ty_log_tail_f32(f) + lost / u) + e * 1.42860677e-06f)) + e * 0.693145752f;
  y = ty_log_edges_f32(u, y);
  return x == 0.0f ? x : y;
}

TY_INLINE float ty_softplus_f32(float x) { /* log(1 + exp(x)) */
  return (x < 0.0f ? 0.0f : x) + ty_log1p_f32(ty_exp_f32(-ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu)));
}
TY_INLINE float ty_log_sigmoid_f32(float x) { return -ty_softplus_f32(-x); }

/* The inverses of sinh, cosh and tanh. From 10^4 on log(2 |x|) is asinh and acosh, and squares would overflow later. */
TY_INLINE float ty_asinh_f32(float x) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu), z = a * a;
  float t = a > 1.0e4f ? a - 1.0f : a + z / (1.0f + sqrtf(z + 1.0f));
  return ty_copysign_f32(ty_log1p_f32(t) + (a > 1.0e4f ? 0.693147181f : 0.0f), x);
}
TY_INLINE float ty_acosh_f32(float x) {
  float t = x - 1.0f;
  float u = x > 1.0e4f ? t : t + sqrtf(t * (x + 1.0f));
  float y = ty_log1p_f32(u) + (x > 1.0e4f ? 0.693147181f : 0.0f);
  return x < 1.0f ? NAN : y;
}
TY_INLINE float ty_atanh_f32(float x) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu);
  return ty_copysign_f32(0.5f * ty_log1p_f32(2.0f * a / (1.0f - a)), x);
}

/* ---- angles ---- */

/* Above this magnitude the reduction below loses digits; loops call the C library there. */
#define TY_TRIG_LIMIT 1.0e5f

/* a = q pi/2 + r for 0 <= a <= TY_TRIG_LIMIT (Cody and Waite 1980: pi/2 in two parts, the first of 33 bits). */
TY_INLINE float ty_trig_reduce_f32(float a, uint32_t *q) {
  float z = a * 0.636619772f + TY_ROUNDER_F32;
  double n = (double)(z - TY_ROUNDER_F32);
  *q = ty_bits_f32(z);
  return (float)(((double)a - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11);
}

TY_INLINE float ty_sin_reduced_f32(float r) {
  float z = r * r;
  return r + r * z * (((2.82622022e-06f * z - 0.000198525537f) * z + 0.00833337847f) * z - 0.166666672f);
}

TY_INLINE float ty_cos_reduced_f32(float r) {
  float z = r * r;
  return (1.0f - 0.5f * z) +
         z * z * (((-2.88583408e-07f * z + 2.48219058e-05f) * z - 0.001388898f) * z + 0.0416666679f);
}

TY_INLINE float ty_sin_f32(float x) {
  uint32_t q, sign = ty_bits_f32(x) & 0x80000000u;
  float r = ty_trig_reduce_f32(ty_from_bits_f32(ty_bits_f32(x) ^ sign), &q);
  float y = q & 1 ? ty_cos_reduced_f32(r) : ty_sin_reduced_f32(r);
  return ty_from_bits_f32(ty_bits_f32(y) ^ ((q & 2) << 30) ^ sign);
}

TY_INLINE float ty_cos_f32(float x) {
  uint32_t q;
  float r = ty_trig_reduce_f32(ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu), &q);
  float y = q & 1 ? ty_sin_reduced_f32(r) : ty_cos_reduced_f32(r);
  return ty_from_bits_f32(ty_bits_f32(y) ^ (((q + 1) & 2) << 30));
}

TY_INLINE float ty_tan_f32(float x) {
  uint32_t q, sign = ty_bits_f32(x) & 0x80000000u;
  float r = ty_trig_reduce_f32(ty_from_bits_f32(ty_bits_f32(x) ^ sign), &q), z = r * r;
  float p = 0.00452843728f;
  p = p * z - 0.000222364572f;
  p = p * z + 0.0110854656f;
  p = p * z + 0.021183975f;
  p = p * z + 0.0540794469f;
  p = p * z + 0.133324847f;
  p = p * z + 0.333333552f;
  float t = r + r * z * p;
  return ty_from_bits_f32(ty_bits_f32(q & 1 ? -1.0f / t : t) ^ sign);
}

/* atan(y) for 0 <= y <= 1 */
TY_INLINE float ty_atan_reduced_f32(float y) {
  float z = y * y, p = -0.00182407617f;
  p = p * z + 0.0110506993f;
  p = p * z - 0.0314306319f;
  p = p * z + 0.0582098663f;
  p = p * z - 0.0841803774f;
  p = p * z + 0.109570913f;
  p = p * z - 0.142651513f;
  p = p * z + 0.199986294f;
  p = p * z - 0.333333015f;
  return y + y * z * p;
}

#define TY_PI_2_HIGH 1.57079637f
#define TY_PI_2_LOW -4.37113883e-08f

TY_INLINE float ty_atan_f32(float x) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu);
  float p = ty_atan_reduced_f32(a > 1.0f ? 1.0f / a : a);
  return ty_copysign_f32(a > 1.0f ? TY_PI_2_HIGH - (p - TY_PI_2_LOW) : p, x);
}

TY_INLINE float ty_atan2_f32(float y, float x) {
  float ax = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu), ay = ty_from_bits_f32(ty_bits_f32(y) & 0x7fffffffu);
  float high = ax > ay ? ax : ay, low = ax > ay ? ay : ax;
  float t = low / (high == 0.0f ? 1.0f : high);
  t = low == INFINITY ? 1.0f : t;
  float p = ty_atan_reduced_f32(t);
  p = ay > ax ? TY_PI_2_HIGH - (p - TY_PI_2_LOW) : p;
  p = ty_bits_f32(x) >> 31 ? 2.0f * TY_PI_2_HIGH - (p - 2.0f * TY_PI_2_LOW) : p;
  return (x != x) | (y != y) ? x + y : ty_copysign_f32(p, y);
}

/* asin(s) where z = s^2 <= 1/4 */
TY_INLINE float ty_asin_reduced_f32(float s, float z) {
  float p = 0.0375904106f;
  p = p * z + 0.0143808993f;
  p = p * z + 0.0318246856f;
  p = p * z + 0.0445146523f;
  p = p * z + 0.0750051811f;
  p = p * z + 0.166666597f;
  return s + s * z * p;
}

TY_INLINE float ty_asin_f32(float x) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu);
  float z = a > 0.5f ? (1.0f - a) * 0.5f : a * a;
  float p = ty_asin_reduced_f32(a > 0.5f ? sqrtf(z) : a, z);
  return ty_copysign_f32(a > 0.5f ? TY_PI_2_HIGH - (2.0f * p - TY_PI_2_LOW) : p, x);
}

TY_INLINE float ty_acos_f32(float x) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu);
  float z = a > 0.5f ? (1.0f - a) * 0.5f : a * a;
  float p = ty_asin_reduced_f32(a > 0.5f ? sqrtf(z) : a, z);
  float outer = x < 0.0f ? 2.0f * TY_PI_2_HIGH - 2.0f * (p - TY_PI_2_LOW) : 2.0f * p;
  float inner = TY_PI_2_HIGH - (ty_copysign_f32(p, x) - TY_PI_2_LOW);
  return a > 0.5f ? outer : inner;
}

/* ---- the error function ---- */

TY_INLINE float ty_erf_f32(float x) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu), z = a * a;
  float p = -2.45478759e-06f;
  p = p * z - 0.000551528996f;
  p = p * z + 0.00489793532f;
  p = p * z - 0.0266962163f;
  p = p * z + 0.112796456f;
  p = p * z - 0.376122534f;
  float small = a * (p * z) + a * 1.12837911f;
  float c = a > 4.0f ? 4.0f : a;
  float q = -2.17132074e-05f; /* log(erfc(c)) */
  q = q * c + 0.000441669778f;
  q = q * c - 0.00420632446f;
  q = q * c + 0.0252133068f;
  q = q * c - 0.108427055f;
  q = q * c - 0.633211553f;
  q = q * c - 1.12958288f;
  q = q * c + 0.000189039682f;
  return ty_copysign_f32(a < 1.0f ? small : 1.0f - ty_exp_f32(q), x);
}

/* erfc(a) for 0 <= a <= 10.1, with a^2 = h + l: exp(-a^2) times a polynomial in (a - 2)/(a + 2) over 1 + 2a
 * (Shepherd and Laframboise 1981). */
TY_INLINE float ty_erfc_fraction_f32(float a) {      /* what exp(-a^2) is multiplied by */
  float r = 1.0f / ((a + 2.0f) * (1.0f + 2.0f * a)); /* one division for both quotients */
  float s = (a - 2.0f) * ((1.0f + 2.0f * a) * r);
  float p = -0.000400319463f;
  p = p * s - 0.0012306266f;
  p = p * s + 0.00131351012f;
  p = p * s + 0.0086343661f;
  p = p * s - 0.00805914029f;
  p = p * s - 0.0542060286f;
  p = p * s + 0.164054915f;
  p = p * s - 0.166031063f;
  p = p * s - 0.0927639306f;
  p = p * s + 1.27697837f;
  return p * ((a + 2.0f) * r);
}
TY_INLINE float ty_erfc_positive_f32(float a, float h, float l) {
  float p = ty_erfc_fraction_f32(a);
  return ty_exp_f32(-h) * (p - l * p);
}

/* erfc(c x) for c^2 = `square`; the exponent is taken from x itself, so that it has no rounding error of c x. */
TY_INLINE float ty_erfc_scaled_f32(float x, float c, float square) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu);
  a = a > 10.1f / c ? 10.1f / c : a;
  float h = a * a;
#if defined(__FMA__) || defined(__CUDACC__)
  float l = fmaf(a, a, -h);
#else
  float l = (float)((double)a * (double)a - (double)h);
#endif
  float y = ty_erfc_positive_f32(a * c, h * square, l * square);
  return x < 0.0f ? 2.0f - y : y;
}

TY_INLINE float ty_erfc_f32(float x) { return ty_erfc_scaled_f32(x, 1.0f, 1.0f); }

/* ---- activations. The cut at -200 keeps -infinity times 0 from being NaN. ---- */

TY_INLINE float ty_gelu_f32(float x) {
  return 0.5f * (x < -200.0f ? -200.0f : x) * ty_erfc_scaled_f32(-x, 0.707106781f, 0.5f);
}
TY_INLINE float ty_gelu_tanh_f32(float x) { /* (1 + tanh(u)) / 2 is sigmoid(2u) */
  float c = x < -200.0f ? -200.0f : x;
  return c * ty_sigmoid_f32(c * (1.59576912f + 0.0713548163f * c * c));
}
/* Phi(x) + x phi(x), which share their exponential */
TY_INLINE float ty_gelu_slope_f32(float x) {
  float c = x < -14.0f ? -14.0f : x > 14.0f ? 14.0f : x;
  float e = ty_exp_f32(-0.5f * c * c);
  float tail = 0.5f * e * ty_erfc_fraction_f32(0.70710678f * ty_from_bits_f32(ty_bits_f32(c) & 0x7fffffffu));
  return (c < 0.0f ? tail : 1.0f - tail) + c * 0.39894228f * e;
}
TY_INLINE float ty_gelu_tanh_slope_f32(float x) { /* s + x s (1 - s) 2u', s = sigmoid(2u) */
  float c = x < -40.0f ? -40.0f : x > 40.0f ? 40.0f : x, c2 = c * c;
  float s = ty_sigmoid_f32(c * (1.59576912f + 0.0713548163f * c2));
  return s + c * s * (1.0f - s) * (1.59576912f + 0.214064449f * c2);
}
TY_INLINE float ty_silu_slope_f32(float x) { /* s (1 + x (1 - s)) */
  float s = ty_sigmoid_f32(x), c = x < -200.0f ? -200.0f : x;
  return s * (1.0f + c * (1.0f - s));
}
TY_INLINE float ty_sigmoid_slope_f32(float x) {
  float s = ty_sigmoid_f32(x);
  return s * (1.0f - s);
}
TY_INLINE float ty_relu_f32(float x) { return x < 0.0f ? 0.0f : x; } /* NaN stays */
TY_INLINE float ty_relu_slope_f32(float x) { return x > 0.0f ? 1.0f : 0.0f; }
TY_INLINE float ty_silu_f32(float x) { return (x < -200.0f ? -200.0f : x) * ty_sigmoid_f32(x); }
TY_INLINE float ty_mish_f32(float x) { /* tanh(log(1 + e)) = (e^2 + 2e) / (e^2 + 2e + 2) */
  float c = x < -200.0f ? -200.0f : x;
  float e = ty_exp_f32(c > 20.0f ? 20.0f : c), n = e * (e + 2.0f);
  return c * (n / (n + 2.0f));
}

/* r + x r' of the quotient r in mish; that is 1 beyond 20 */
TY_INLINE float ty_mish_slope_f32(float x) {
  float c = x < -200.0f ? -200.0f : x > 20.0f ? 20.0f : x, e = ty_exp_f32(c), n = e * (e + 2.0f), d = n + 2.0f;
  return n / d + c * (4.0f * e * (e + 1.0f) / (d * d));
}

/* ---- powers ---- */

/* exp2(y log2 |x|) in double precision, then the cases of C's pow. */
TY_INLINE float ty_pow_f32(float x, float y) {
  float a = ty_from_bits_f32(ty_bits_f32(x) & 0x7fffffffu), e;
  double f = (double)ty_log_reduce_f32(a, &e), s = f / (2.0 + f), z = s * s;
  double p = 0.24287918177807808;
  p = p * z + 0.26145124046239926;
  p = p * z + 0.3206160029179318;
  p = p * z + 0.4121984111080168;
  p = p * z + 0.57707801714952567;
  p = p * z + 0.96179669392475609;
  double t = (double)y * ((double)e + s * (2.88539008177792681 + z * p));
  double n = t + 6755399441055744.0, r = t - (n - 6755399441055744.0);
  double q = 1.5200721582282174e-05;
  q = q * r + 0.00015470604942796449;
  q = q * r + 0.0013333938130322914;
  q = q * r + 0.009618023152765949;
  q = q * r + 0.055504103209613458;
  q = q * r + 0.24022651228704517;
  q = q * r + 0.69314718074267234;
  q = q * r + 0.99999999995855804;
  float v = (float)(q * ty_from_bits_f64((ty_bits_f64(n) + 1023u) << 52));
  v = t > 200.0 ? INFINITY : v;
  v = t < -200.0 ? 0.0f : v;
  v = (a == 0.0f) | (a == INFINITY) ? ((y < 0.0f) == (a == 0.0f) ? INFINITY : 0.0f) : v;
  v = (a == 1.0f) & (fabsf(y) == INFINITY) ? 1.0f : v;
  /* From 2^24 on every float is an even integer; infinity counts as one. */
  double whole = (double)y + 6755399441055744.0;
  uint32_t large = fabsf(y) >= 16777216.0f, integer = large | (whole - 6755399441055744.0 == (double)y);
  uint32_t odd = integer & ~large & (uint32_t)ty_bits_f64(whole) & 1;
  v = ty_from_bits_f32(ty_bits_f32(v) | (odd << 31 & ty_bits_f32(x)));
  v = (x < 0.0f) & (x > -INFINITY) & !integer ? NAN : v;
  v = (x != x) | (y != y) ? x + y : v;
  return (x == 1.0f) | (y == 0.0f) ? 1.0f : v;
}

/* ---- double: the C library ---- */

#define TY_FROM_LIBM(name) \
  TY_INLINE double ty_##name##_f64(double x) { return name(x); }
TY_FROM_LIBM(exp)
TY_FROM_LIBM(expm1)
TY_FROM_LIBM(log)
TY_FROM_LIBM(log2)
TY_FROM_LIBM(log10)
TY_FROM_LIBM(log1p)
TY_FROM_LIBM(sin)
TY_FROM_LIBM(cos)
TY_FROM_LIBM(tan)
TY_FROM_LIBM(asin)
TY_FROM_LIBM(acos)
TY_FROM_LIBM(atan)
TY_FROM_LIBM(sinh)
TY_FROM_LIBM(cosh)
TY_FROM_LIBM(tanh)
TY_FROM_LIBM(asinh)
TY_FROM_LIBM(acosh)
TY_FROM_LIBM(atanh)
TY_FROM_LIBM(exp2)
TY_FROM_LIBM(erf)
TY_FROM_LIBM(erfc)
TY_FROM_LIBM(sqrt)
TY_FROM_LIBM(fabs)
TY_FROM_LIBM(floor)
TY_FROM_LIBM(ceil)
TY_FROM_LIBM(rint)
TY_FROM_LIBM(trunc)
#undef TY_FROM_LIBM

TY_INLINE double ty_pow_f64(double x, double y) { return pow(x, y); }
TY_INLINE double ty_atan2_f64(double y, double x) { return atan2(y, x); }
TY_INLINE double ty_fmod_f64(double x, double y) { return fmod(x, y); }
TY_INLINE double ty_sigmoid_f64(double x) {
  double e = exp(-fabs(x));
  return (x < 0 ? e : 1.0) / (1.0 + e);
}
TY_INLINE double ty_softplus_f64(double x) { return (x < 0 ? 0.0 : x) + log1p(exp(-fabs(x))); }
TY_INLINE double ty_log_sigmoid_f64(double x) { return -ty_softplus_f64(-x); }
TY_INLINE double ty_gelu_f64(double x) { return 0.5 * (x < -800.0 ? -800.0 : x) * erfc(-x * 0.70710678118654752440); }
TY_INLINE double ty_gelu_tanh_f64(double x) {
  double c = x < -800.0 ? -800.0 : x;
  return c * ty_sigmoid_f64(c * (1.5957691216057307117 + 0.071354816272600248 * c * c));
}
TY_INLINE double ty_gelu_slope_f64(double x) {
  double c = x < -60.0 ? -60.0 : x > 60.0 ? 60.0 : x;
  return 0.5 * erfc(-0.70710678118654752440 * c) + c * 0.39894228040143267794 * exp(-0.5 * c * c);
}
TY_INLINE double ty_gelu_tanh_slope_f64(double x) {
  double c = x < -60.0 ? -60.0 : x > 60.0 ? 60.0 : x, c2 = c * c;
  double s = ty_sigmoid_f64(c * (1.5957691216057307117 + 0.071354816272600248 * c2));
  return s + c * s * (1.0 - s) * (1.5957691216057307117 + 0.214064448817800744 * c2);
}
TY_INLINE double ty_silu_slope_f64(double x) {
  double s = ty_sigmoid_f64(x), c = x < -800.0 ? -800.0 : x;
  return s * (1.0 + c * (1.0 - s));
}
TY_INLINE double ty_sigmoid_slope_f64(double x) {
  double s = ty_sigmoid_f64(x);
  return s * (1.0 - s);
}
TY_INLINE double ty_relu_f64(double x) { return x < 0.0 ? 0.0 : x; }
TY_INLINE double ty_relu_slope_f64(double x) { return x > 0.0 ? 1.0 : 0.0; }
TY_INLINE double ty_silu_f64(double x) { return (x < -800.0 ? -800.0 : x) * ty_sigmoid_f64(x); }
TY_INLINE double ty_mish_f64(double x) {
  double c = x < -800.0 ? -800.0 : x, e = exp(c > 40.0 ? 40.0 : c), n = e * (e + 2.0);
  return c * (n / (n + 2.0));
}
TY_INLINE double ty_mish_slope_f64(double x) {
  double c = x < -800.0 ? -800.0 : x > 40.0 ? 40.0 : x, e = exp(c), n = e * (e + 2.0), d = n + 2.0;
  return n / d + c * (4.0 * e * (e + 1.0) / (d * d));
}

/* float: what the C library does well enough, mostly as one instruction. */
TY_INLINE float ty_fabs_f32(float x) { return fabsf(x); }
TY_INLINE float ty_sqrt_f32(float x) { return sqrtf(x); }
TY_INLINE float ty_floor_f32(float x) { return floorf(x); }
TY_INLINE float ty_ceil_f32(float x) { return ceilf(x); }
TY_INLINE float ty_rint_f32(float x) { return rintf(x); }
TY_INLINE float ty_trunc_f32(float x) { return truncf(x); }
TY_INLINE float ty_fmod_f32(float x, float y) { return fmodf(x, y); }

/* The remainder of Lua's %: the sign of y. */
TY_INLINE float ty_remainder_f32(float x, float y) {
  float m = fmodf(x, y);
  return (m > 0 ? y < 0 : m < 0 && y > 0) ? m + y : m;
}
TY_INLINE double ty_remainder_f64(double x, double y) {
  double m = fmod(x, y);
  return (m > 0 ? y < 0 : m < 0 && y > 0) ? m + y : m;
}

/* ---- integers, for every width: the caller cuts the result down, which wraps. y is not 0 in the divisions. ---- */

TY_INLINE int64_t ty_floor_div_i64(int64_t x, int64_t y) {
  if (y == -1) return (int64_t)(0u - (uint64_t)x); /* the one quotient that overflows */
  int64_t q = x / y;
  return q - (x % y != 0 && (x < 0) != (y < 0));
}
TY_INLINE int64_t ty_fmod_i64(int64_t x, int64_t y) { return y == -1 ? 0 : x % y; }
TY_INLINE int64_t ty_remainder_i64(int64_t x, int64_t y) {
  int64_t m = ty_fmod_i64(x, y);
  return m != 0 && (m < 0) != (y < 0) ? m + y : m;
}
TY_INLINE int64_t ty_pow_i64(int64_t x, int64_t y) {
  if (y < 0) return x == 1 ? 1 : x == -1 ? (y & 1 ? -1 : 1) : 0;
  uint64_t base = (uint64_t)x, power = 1;
  for (; y; y >>= 1, base *= base)
    if (y & 1) power *= base;
  return (int64_t)power;
}

/* To an integer type by truncation; out of range saturates, NaN is 0. */
TY_INLINE int64_t ty_f64_to_i64(double x, int64_t low, int64_t high) {
  if (x != x) return 0;
  if (x <= (double)low) return low;
  if (x >= (double)high) return high;
  return (int64_t)x;
}

#endif
