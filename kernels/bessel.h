/* Logarithms of modified Bessel functions of any order v >= 0 at x > 0, to about 1e-13 of the result or, where it
 * crosses zero, of 1: Debye's expansions for orders from 30 on, Hankel's for x above 1000, recurrences for the rest.
 * Plain C that is also C++ for CUDA. DLMF is the NIST Digital Library of Mathematical Functions. */
#ifndef TY_KERNELS_BESSEL_H
#define TY_KERNELS_BESSEL_H

#include "special.h"

enum { TY_DEBYE_FROM = 30, TY_HANKEL_FROM = 1000 };

/* Debye's sum: U_k(p) / v^k, DLMF 10.41.9, with alternating signs for K. */
TY_INLINE double ty_debye_sum(double v, double p, double sign) {
  const double c[] = { 0.125,
                       -0.208333333333333333,
                       0.0703125,
                       -0.401041666666666667,
                       0.334201388888888889,
                       0.0732421875,
                       -0.8912109375,
                       1.84646267361111111,
                       -1.02581259645061728,
                       0.112152099609375,
                       -2.3640869140625,
                       8.78912353515625,
                       -11.2070026162229938,
                       4.66958442342624743,
                       0.227108001708984375,
                       -7.3687943594796317,
                       42.5349987453884549,
                       -91.8182415432400174,
                       84.6362176746007346,
                       -28.2120725582002449,
                       0.572501420974731445,
                       -26.4914304869515555,
                       218.19051174421159,
                       -699.579627376132541,
                       1059.99045252799988,
                       -765.252468141181642,
                       212.570130039217123,
                       1.7277275025844574,
                       -108.090919788394656,
                       1200.90291321635246,
                       -5305.64697861340311,
                       11655.3933368645332,
                       -13586.5500064341374,
                       8061.72218173730938,
                       -1919.457662318407,
                       6.07404200127348304,
                       -493.915304773088012,
                       7109.51430248936372,
                       -41192.6549688975513,
                       122200.46498301746,
                       -203400.177280415534,
                       192547.001232531532,
                       -96980.5983886375135,
                       20204.2913309661486,
                       24.3805296995560639,
                       -2499.83048181120962,
                       45218.7689813627263,
                       -331645.172484563578,
                       1268365.27332162478,
                       -2813563.22658653411,
                       3763271.297656404,
                       -2998015.91853810675,
                       1311763.6146629772,
                       -242919.187900551333,
                       110.017140269246738,
                       -13886.0897537170405,
                       308186.404612662398,
                       -2785618.12808645469,
                       13288767.1664218183,
                       -37567176.6607633513,
                       66344512.2747290267,
                       -74105148.2115326577,
                       50952602.4926646422,
                       -19706819.1184322269,
                       3284469.85307203782,
                       551.335896122020586,
                       -84005.4336030240853,
                       2243768.17792244943,
                       -24474062.7257387285,
                       142062907.797533095,
                       -495889784.275030309,
                       1106842816.82301447,
                       -1621080552.10833708,
                       1553596899.57058006,
                       -939462359.681578403,
                       325573074.185765749,
                       -49329253.664509962,
                       3038.09051092238427,
                       -549842.327572288687,
                       17395107.5539781645,
                       -225105661.889415278,
                       1559279864.87925751,
                       -6563293792.61928433,
                       17954213731.1556001,
                       -33026599749.8007231,
                       41280185579.753974,
                       -34632043388.1587779,
                       18688207509.2958249,
                       -5866481492.05184723,
                       814789096.118312115 };
  double sum = 1, factor = sign * p / v, power = factor;
  int at = 0;
  for (int k = 1; k <= 12; k++) {
    double term = power * ty_polynomial(c + at, k + 1, p * p);
    sum += term;
    if (fabs(term) < 1e-17) break;
    at += k + 1;
    power *= factor;
  }
  return sum;
}

/* DLMF 10.41.3 and 10.41.4 for v z = x; sign: 1 of I, -1 of K. */
TY_INLINE double ty_log_bessel_debye(double v, double x, double sign) {
  double z = x / v, root = hypot(1, z), p = 1 / root;
  /* sqrt(1 + z^2) + log(z / (1 + sqrt(1 + z^2))) */
  double eta = root - asinh(1 / z);
  double front = sign > 0 ? -0.5 * log(2 * TY_PI * v) : 0.5 * log(0.5 * TY_PI / v);
  return sign * v * eta + (front - 0.5 * log(root) + log(ty_debye_sum(v, p, sign)));
}

/* DLMF 10.40.1 and 10.40.2, for x large beside v. */
TY_INLINE double ty_log_bessel_hankel(double v, double x, double sign) {
  double sum = 1, term = 1;
  for (int k = 1; k < 200; k++) {
    double odd = 2 * k - 1, factor = (4 * v * v - odd * odd) / (8 * k * x);
    if (fabs(factor) > 1) break;
    term *= -sign * factor;
    sum += term;
    if (fabs(term) < 1e-17) break;
  }
  return sign * x + ((sign > 0 ? -0.5 * log(2 * TY_PI * x) : 0.5 * log(0.5 * TY_PI / x)) + log(sum));
}

/* Small orders from large ones, down the recurrence of r = I[v+1] / I[v]: 1 / r[v-1] = r[v] + 2 v / x. */
TY_INLINE double ty_log_bessel_i_f64(double v, double x) {
  if (!(v >= 0) || !(x >= 0)) return NAN;
  if (x == 0) return v == 0 ? 0 : -INFINITY;
  if (x == INFINITY || v == INFINITY) return v == INFINITY ? (x == INFINITY ? NAN : -INFINITY) : INFINITY;
  if (v >= TY_DEBYE_FROM) return ty_log_bessel_debye(v, x, 1);
  if (x > TY_HANKEL_FROM) return ty_log_bessel_hankel(v, x, 1);
  double steps = ceil(TY_DEBYE_FROM - v), top = v + steps, log_i = ty_log_bessel_debye(top, x, 1);
  double ratio = exp(ty_log_bessel_debye(top + 1, x, 1) - log_i), product = 1;
  for (; top > v + 0.5; top -= 1) {
    double inverse = ratio + 2 * top / x; /* I[top - 1] / I[top] */
    if (product > 1e150 || inverse > 1e150) {
      log_i += log(product);
      product = 1;
    }
    product *= inverse;
    ratio = 1 / inverse;
  }
  return log_i + log(product);
}

/* K[m] and K[m+1] for |m| <= 1/2: by Temme's series for small x (Temme 1975), else by his continued fraction, which
 * Thompson and Barnett 1987 sum. scale: what exp(scale) has been taken out of both. */
TY_INLINE void ty_bessel_k_pair(double m, double x, double *k0, double *k1, double *scale) {
  const double c[] = TY_RECIPROCAL_GAMMA;
  if (x <= 2) {
    double even = 0, odd = 0, m2 = m * m; /* (1/Gamma(1-m) +- 1/Gamma(1+m)) / 2, the odd one over m */
    for (int i = TY_COUNT(c) - 1; i >= 0; i--) {
      if (i % 2) odd = odd * m2 - c[i];
      else even = even * m2 + c[i];
    }
    double t = -log(0.5 * x), e = m * t, pm = TY_PI * m;
    double fact = fabs(pm) < 1e-15 ? 1 : pm / sin(pm), sinhc = fabs(e) < 1e-15 ? 1 : sinh(e) / e;
    double f = fact * (odd * cosh(e) + even * sinhc * t);
    double g = exp(e), p = 0.5 * g / (even - m * odd), q = 0.5 / (g * (even + m * odd));
    double power = 1, square = 0.25 * x * x, sum = f, sum1 = p;
    for (int i = 1; i < 100; i++) {
      f = (i * f + p + q) / (i * i - m2);
      power *= square / i;
      p /= i - m;
      q /= i + m;
      double term = power * f;
      sum += term;
      sum1 += power * (p - i * f);
      if (fabs(term) < fabs(sum) * 1e-17) break;
    }
    *k0 = sum;
    *k1 = sum1 * 2 / x;
    *scale = 0;
    return;
  }
  double b = 2 * (1 + x), d = 1 / b, h = d, step = d, q1 = 0, q2 = 1, a1 = 0.25 - m * m, q = a1, w = a1, a = -a1;
  double s = 1 + q * step;
  for (int i = 2; i < 10000; i++) {
    a -= 2 * (i - 1);
    w = -a * w / i;
    double next = (q1 - b * q2) / a;
    q1 = q2;
    q2 = next;
    q += w * next;
    b += 2;
    d = 1 / (b + a * d);
    step = (b * d - 1) * step;
    h += step;
    double ds = q * step;
    s += ds;
    if (fabs(ds / s) < 1e-17) break;
  }
  h = a1 * h;
  *k0 = sqrt(TY_PI / (2 * x)) / s;
  *k1 = *k0 * (m + x + 0.5 - h) / x;
  *scale = -x;
}

/* Large orders from small ones: K[m+1] = K[m-1] + (2 m / x) K[m]. */
TY_INLINE double ty_log_bessel_k_f64(double v, double x) {
  if (!(v >= 0) || !(x >= 0)) return NAN;
  if (x == 0) return INFINITY;
  if (x == INFINITY || v == INFINITY) return v == INFINITY ? (x == INFINITY ? NAN : INFINITY) : -INFINITY;
  if (v >= TY_DEBYE_FROM) return ty_log_bessel_debye(v, x, -1);
  if (x > TY_HANKEL_FROM) return ty_log_bessel_hankel(v, x, -1);
  double n = floor(v + 0.5), m = v - n, k0, k1, scale;
  ty_bessel_k_pair(m, x, &k0, &k1, &scale);
  if (n == 0) return scale + log(k0);
  double ratio = k1 / k0, product = ratio, sum = scale + log(k0);
  for (double i = 1; i < n; i += 1) {
    ratio = 1 / ratio + 2 * (m + i) / x;
    if (product > 1e150 || ratio > 1e150) {
      sum += log(product);
      product = 1;
    }
    product *= ratio;
  }
  return sum + log(product);
}

TY_INLINE float ty_log_bessel_i_f32(float v, float x) { return (float)ty_log_bessel_i_f64((double)v, (double)x); }
TY_INLINE float ty_log_bessel_k_f32(float v, float x) { return (float)ty_log_bessel_k_f64((double)v, (double)x); }

#endif
