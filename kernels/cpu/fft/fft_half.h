/* Template: between the transform of a packed signal and the spectrum of the real one, and cosine transforms; on
 * elements E of two parts each, which are REALs of a line or vectors of lanes. With FN(x) for REAL and ON(x) for E. */

#define W(k) (E){ 0 } + w[2 * (k)], (E){ 0 } + w[2 * (k) + 1]

/* z, the transform of x[2 j] + i x[2 j + 1], to the h + 1 first of x's; z and y may be the same. w: roots of order 2 h.
 * X[k] = (Z[k] + Z*[h - k]) / 2 - i w^k (Z[k] - Z*[h - k]) / 2. */
INLINED void ON(unpack_pair)(E ar, E ai, E br, E bi, E c, E s, E *y, E *mirror) {
  const E sr = (ar + br) * (REAL)0.5, si = (ai - bi) * (REAL)0.5, dr = (ar - br) * (REAL)0.5,
          di = (ai + bi) * (REAL)0.5;
  const E tr = c * di + s * dr, ti = s * di - c * dr; /* -i (c + i s) (dr + i di) */
  y[0] = sr + tr, y[1] = si + ti;
  mirror[0] = sr - tr, mirror[1] = ti - si;
}

static void ON(unpack)(const E *z, E *y, int64_t h, const REAL *w, int64_t from) {
  for (int64_t k = from; 2 * k < h; k++)
    ON(unpack_pair)(z[2 * k], z[2 * k + 1], z[2 * (h - k)], z[2 * (h - k) + 1], W(k), y + 2 * k, y + 2 * (h - k));
  if (h % 2 == 0) {
    const E re = z[h], im = z[h + 1];
    y[h] = re, y[h + 1] = -im;
  }
  const E re = z[0], im = z[1];
  y[0] = re + im, y[1] = (E){ 0 };
  y[2 * h] = re - im, y[2 * h + 1] = (E){ 0 };
}

/* The converse, twice as large, h at least 1: Z[k] = X[k] + X*[h - k] + i w^-k (X[k] - X*[h - k]). */
INLINED void ON(pack_pair)(E ar, E ai, E br, E bi, E c, E s, E *z, E *mirror) {
  const E sr = ar + br, si = ai - bi, dr = ar - br, di = ai + bi;
  const E tr = s * dr - c * di, ti = c * dr + s * di; /* i (c - i s) (dr + i di) */
  z[0] = sr + tr, z[1] = si + ti;
  mirror[0] = sr - tr, mirror[1] = ti - si;
}

static void ON(pack)(const E *x, E *z, int64_t h, const REAL *w, int64_t from) {
  const E first = x[0], last = x[2 * h];
  for (int64_t k = from; 2 * k < h; k++)
    ON(pack_pair)(x[2 * k], x[2 * k + 1], x[2 * (h - k)], x[2 * (h - k) + 1], W(k), z + 2 * k, z + 2 * (h - k));
  if (h % 2 == 0) {
    const E re = x[h], im = x[h + 1];
    z[h] = re + re, z[h + 1] = -(im + im);
  }
  z[0] = first + last, z[1] = first - last;
}

/* What stands for the other half of n frequencies that is not there: all but k = 0 and n / 2 count `weight`. */
static void ON(weigh)(E *x, int64_t n, REAL weight, bool conjugate) {
  for (int64_t k = 0; k <= n / 2; k++) {
    const REAL f = k == 0 || 2 * k == n ? 1 : weight;
    x[2 * k] *= f;
    x[2 * k + 1] *= conjugate ? -f : f;
  }
}

/* Makhoul: the cosine transform from the spectrum x of the folded signal. q: exp(-i pi k / 2 n). */
static void ON(to_cosines)(const E *x, E *y, int64_t n, const REAL *q, REAL first) {
  for (int64_t k = 1; 2 * k < n; k++) {
    const REAL c = q[2 * k], s = -q[2 * k + 1];
    y[k] = c * x[2 * k] + s * x[2 * k + 1];
    y[n - k] = s * x[2 * k] - c * x[2 * k + 1];
  }
  if (n % 2 == 0) y[n / 2] = q[n] * x[n] - q[n + 1] * x[n + 1];
  y[0] = first * x[0];
}

/* Its transpose: the spectrum of the folded signal from the cosines' coefficients. */
static void ON(from_cosines)(const E *y, E *x, int64_t n, const REAL *q, REAL first) {
  for (int64_t k = 1; 2 * k <= n; k++) {
    const REAL c = q[2 * k] / 2, s = -q[2 * k + 1] / 2;
    const E a = y[k], b = y[n - k];
    x[2 * k] = c * a + s * b; /* (a - i b) (c + i s) */
    x[2 * k + 1] = s * a - c * b;
  }
  x[0] = first * y[0], x[1] = (E){ 0 };
}

#undef W
