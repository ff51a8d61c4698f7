/* Template: transforms of as many lines as a vector has lanes, by passes over mixed radices that need no reordering
 * (Stockham's, decimation in frequency). Element i of a buffer is two vectors, the real and the imaginary parts. */

/* Where the first pass reads and the last one writes, where that is not a buffer: rows of LANES complex numbers, `step`
 * REALs from one element to the next. NULL: the buffer. */
typedef struct FN(ends) {
  const REAL *from;
  REAL *to;
  int64_t from_step, to_step;
  REAL scale;   /* of what is written to `to` */
  bool inverse; /* parts change places on both sides */
} FN(ends);

enum { FN(BUFFERS), FN(READS), FN(WRITES) };

#define SQRT_HALF ((REAL)0.70710678118654752440)

INLINED void FN(four)(VEC *r, VEC *i, const int a, const int b, const int c, const int d) {
  const VEC sr = r[a] + r[c], si = i[a] + i[c], dr = r[a] - r[c], di = i[a] - i[c];
  const VEC tr = r[b] + r[d], ti = i[b] + i[d], ur = r[b] - r[d], ui = i[b] - i[d];
  r[a] = sr + tr, i[a] = si + ti;
  r[b] = dr + ui, i[b] = di - ur;
  r[c] = sr - tr, i[c] = si - ti;
  r[d] = dr - ui, i[d] = di + ur;
}

INLINED void FN(eight)(VEC *r, VEC *i) {
  FN(four)(r, i, 0, 2, 4, 6);
  FN(four)(r, i, 1, 3, 5, 7);
  const VEC er[4] = { r[0], r[2], r[4], r[6] }, ei[4] = { i[0], i[2], i[4], i[6] };
  const VEC tr[4] = { r[1], r[3] + i[3], i[5], i[7] - r[7] }, ti[4] = { i[1], i[3] - r[3], -r[5], -i[7] - r[7] };
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    if (k % 2 == 0) {
      r[k] = er[k] + tr[k], i[k] = ei[k] + ti[k];
      r[k + 4] = er[k] - tr[k], i[k + 4] = ei[k] - ti[k];
    } else {
      r[k] = er[k] + SQRT_HALF * tr[k], i[k] = ei[k] + SQRT_HALF * ti[k];
      r[k + 4] = er[k] - SQRT_HALF * tr[k], i[k + 4] = ei[k] - SQRT_HALF * ti[k];
    }
  }
}

/* Odd n: sums and differences of the elements k and n - k. circle: cosine and -sine of 2 pi k / n. */
INLINED void FN(odd)(const int n, const REAL *circle, VEC *r, VEC *i) {
  VEC sr[TY_FFT_LARGEST / 2 + 1], si[TY_FFT_LARGEST / 2 + 1], dr[TY_FFT_LARGEST / 2 + 1], di[TY_FFT_LARGEST / 2 + 1];
  VEC zr = r[0], zi = i[0];
#pragma GCC unroll 4
  for (int k = 1; k <= n / 2; k++) {
    sr[k] = r[k] + r[n - k], si[k] = i[k] + i[n - k];
    dr[k] = r[k] - r[n - k], di[k] = i[k] - i[n - k];
    zr += sr[k], zi += si[k];
  }
#pragma GCC unroll 4
  for (int j = 1; j <= n / 2; j++) {
    VEC ar = r[0], ai = i[0], br = (VEC){ 0 }, bi = (VEC){ 0 };
    int at = 0;
#pragma GCC unroll 4
    for (int k = 1; k <= n / 2; k++) {
      at += j;
      at -= at >= n ? n : 0;
      ar += circle[2 * at] * sr[k], ai += circle[2 * at] * si[k];
      br += circle[2 * at + 1] * dr[k], bi += circle[2 * at + 1] * di[k];
    }
    r[j] = ar - bi, i[j] = ai + br;
    r[n - j] = ar + bi, i[n - j] = ai - br;
  }
  r[0] = zr, i[0] = zi;
}

INLINED void FN(butterfly)(const int n, const REAL *circle, VEC *r, VEC *i) {
  static const REAL three[] = { 1,          0,
                                (REAL)-0.5, (REAL)-0.86602540378443864676,
                                (REAL)-0.5, (REAL)0.86602540378443864676 };
  static const REAL five[] = { 1,
                               0,
                               (REAL)0.30901699437494742410,
                               (REAL)-0.95105651629515357212,
                               (REAL)-0.80901699437494742410,
                               (REAL)-0.58778525229247312917,
                               (REAL)-0.80901699437494742410,
                               (REAL)0.58778525229247312917,
                               (REAL)0.30901699437494742410,
                               (REAL)0.95105651629515357212 };
  static const REAL seven[] = { 1,
                                0,
                                (REAL)0.62348980185873353053,
                                (REAL)-0.78183148246802980871,
                                (REAL)-0.22252093395631440429,
                                (REAL)-0.97492791218182360702,
                                (REAL)-0.90096886790241912624,
                                (REAL)-0.43388373911755812048,
                                (REAL)-0.90096886790241912624,
                                (REAL)0.43388373911755812048,
                                (REAL)-0.22252093395631440429,
                                (REAL)0.97492791218182360702,
                                (REAL)0.62348980185873353053,
                                (REAL)0.78183148246802980871 };
  if (n == 2) {
    const VEC br = r[1], bi = i[1];
    r[1] = r[0] - br, i[1] = i[0] - bi;
    r[0] += br, i[0] += bi;
  } else if (n == 4) FN(four)(r, i, 0, 1, 2, 3);
  else if (n == 8) FN(eight)(r, i);
  else FN(odd)(n, n == 3 ? three : n == 5 ? five : n == 7 ? seven : circle, r, i);
}

/* One pass: r is the radix, m what is left of the length after it, s the product of the radices before. */
INLINED void FN(pass)(const int r, const int ends, const bool inverse, const VEC *restrict x, VEC *restrict y,
                      int64_t m, int64_t s, const REAL *twiddle, const REAL *circle, const FN(ends) * e) {
  const REAL *from = e->from;
  REAL *to = e->to;
  const int64_t from_step = e->from_step, to_step = e->to_step;
  const REAL scale = e->scale;
  for (int64_t p = 0; p < m; p++) {
    const REAL *w = twiddle + 2 * p * (r - 1);
    for (int64_t q = 0; q < s; q++) {
      VEC re[TY_FFT_LARGEST], im[TY_FFT_LARGEST];
#pragma GCC unroll 8
      for (int k = 0; k < r; k++) {
        const int64_t at = q + s * (p + m * k);
        if (ends == FN(READS)) FN(load_pairs)(from + at * from_step, inverse, &re[k], &im[k]);
        else re[k] = x[2 * at], im[k] = x[2 * at + 1];
      }
      FN(butterfly)(r, circle, re, im);
#pragma GCC unroll 8
      for (int k = 0; k < r; k++) {
        const int64_t at = q + s * (r * p + k);
        if (ends == FN(WRITES)) { /* the last pass: m is 1 */
          FN(store_pairs)(to + at * to_step, inverse, re[k] * scale, im[k] * scale);
        } else if (k == 0 || m == 1) {
          y[2 * at] = re[k], y[2 * at + 1] = im[k];
        } else {
          const REAL c = w[2 * k - 2], d = w[2 * k - 1];
          y[2 * at] = re[k] * c - im[k] * d, y[2 * at + 1] = re[k] * d + im[k] * c;
        }
      }
    }
  }
}

#define PASS(r)                                                                                                      \
  static void FN(pass_##r)(const VEC *x, VEC *y, int64_t m, int64_t s, const REAL *w, const REAL *circle, int radix, \
                           const FN(ends) * e) {                                                                     \
    (void)radix;                                                                                                     \
    FN(pass)(r, FN(BUFFERS), false, x, y, m, s, w, circle, e);                                                       \
  }
PASS(2)
PASS(3)
PASS(4)
PASS(5)
PASS(7)
PASS(8)
PASS(radix)
#undef PASS

/* Passes with one end that is no buffer. */
#define PASS(r)                                                                     \
  static void FN(read_##r)(VEC * y, int64_t m, const REAL *w, const FN(ends) * e) { \
    if (e->inverse) FN(pass)(r, FN(READS), true, NULL, y, m, 1, w, NULL, e);        \
    else FN(pass)(r, FN(READS), false, NULL, y, m, 1, w, NULL, e);                  \
  }                                                                                 \
  static void FN(write_##r)(const VEC *x, int64_t s, const FN(ends) * e) {          \
    if (e->inverse) FN(pass)(r, FN(WRITES), true, x, NULL, 1, s, NULL, NULL, e);    \
    else FN(pass)(r, FN(WRITES), false, x, NULL, 1, s, NULL, NULL, e);              \
  }
PASS(4)
PASS(8)
#undef PASS

/* The transform of what is in `a`, or at e->from. Returns the buffer with the result, a or b, or NULL when that is at
 * e->to. Both buffers hold plan->room elements. */
static VEC *FN(transform)(const ty_fft_lanes *plan, const FN(ends) * e, VEC *a, VEC *b);

static void FN(read_all)(const FN(ends) * e, int64_t n, VEC *to) {
  for (int64_t k = 0; k < n; k++) FN(load_pairs)(e->from + k * e->from_step, e->inverse, &to[2 * k], &to[2 * k + 1]);
}

static void FN(write_all)(const FN(ends) * e, int64_t n, const VEC *x) {
  for (int64_t k = 0; k < n; k++)
    FN(store_pairs)(e->to + k * e->to_step, e->inverse, x[2 * k] * e->scale, x[2 * k + 1] * e->scale);
}

/* Bluestein: jk = (j^2 + k^2 - (k - j)^2) / 2 makes the transform a convolution with a chirp. */
static VEC *FN(chirp)(const ty_fft_lanes *plan, const FN(ends) * e, VEC *a, VEC *b) {
  static const FN(ends) none = { 0 };
  const REAL *w = plan->chirp, *s = plan->spectrum;
  const int64_t n = plan->n, length = plan->inner->n;
  if (e->from) FN(read_all)(e, n, a);
  for (int64_t k = 0; k < n; k++) {
    const VEC re = a[2 * k], im = a[2 * k + 1];
    a[2 * k] = re * w[2 * k] - im * w[2 * k + 1];
    a[2 * k + 1] = re * w[2 * k + 1] + im * w[2 * k];
  }
  for (int64_t k = 2 * n; k < 2 * length; k++) a[k] = (VEC){ 0 };
  VEC *x = FN(transform)(plan->inner, &none, a, b);
  for (int64_t k = 0; k < length; k++) { /* with the parts exchanged, which makes the next transform an inverse one */
    const VEC re = x[2 * k], im = x[2 * k + 1];
    x[2 * k + 1] = re * s[2 * k] - im * s[2 * k + 1];
    x[2 * k] = re * s[2 * k + 1] + im * s[2 * k];
  }
  x = FN(transform)(plan->inner, &none, x, x == a ? b : a);
  for (int64_t k = 0; k < n; k++) {
    const VEC im = x[2 * k], re = x[2 * k + 1];
    x[2 * k] = re * w[2 * k] - im * w[2 * k + 1];
    x[2 * k + 1] = re * w[2 * k + 1] + im * w[2 * k];
  }
  if (!e->to) return x;
  FN(write_all)(e, n, x);
  return NULL;
}

static VEC *FN(transform)(const ty_fft_lanes *plan, const FN(ends) * e, VEC *a, VEC *b) {
  if (plan->inner) return FN(chirp)(plan, e, a, b);
  const int passes = plan->passes;
  int64_t m = plan->n, s = 1;
  VEC *x = a, *y = b;
  const int first = passes ? plan->radix[0] : 0, last = passes ? plan->radix[passes - 1] : 0;
  const bool reads = e->from && (first == 4 || first == 8);
  const bool writes = e->to && (last == 4 || last == 8) && !(reads && passes == 1);
  if (e->from && !reads) FN(read_all)(e, m, x);
  for (int i = 0; i < passes; i++) {
    const int r = plan->radix[i];
    const REAL *w = plan->twiddle[i], *circle = plan->circle[i];
    m /= r;
    if (i == 0 && reads) {
      if (r == 4) FN(read_4)(y, m, w, e);
      else FN(read_8)(y, m, w, e);
    } else if (i == passes - 1 && writes) {
      if (r == 4) FN(write_4)(x, s, e);
      else FN(write_8)(x, s, e);
      return NULL;
    } else {
      switch (r) {
        case 2: FN(pass_2)(x, y, m, s, w, circle, r, e); break;
        case 3: FN(pass_3)(x, y, m, s, w, circle, r, e); break;
        case 4: FN(pass_4)(x, y, m, s, w, circle, r, e); break;
        case 5: FN(pass_5)(x, y, m, s, w, circle, r, e); break;
        case 7: FN(pass_7)(x, y, m, s, w, circle, r, e); break;
        case 8: FN(pass_8)(x, y, m, s, w, circle, r, e); break;
        default: FN(pass_radix)(x, y, m, s, w, circle, r, e);
      }
    }
    s *= r;
    VEC *t = x;
    x = y;
    y = t;
  }
  if (!e->to) return x;
  FN(write_all)(e, plan->n, x);
  return NULL;
}
