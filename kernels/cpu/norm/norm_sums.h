/* Template of the norms: sums over rows. REAL is the element, FN(x) gives names their suffix, BLOCK is how many elements
 * are summed in it before the sum goes on in double. */

/* Lanes of a vector. Its sums are vectors to the end: lanes of several sums, added up by the compiler one sum after the
 * other, cost more than the sums. */
#define WIDE (TY_VECTOR_BYTES < 4 * sizeof(REAL) ? 4 : (int)(TY_VECTOR_BYTES / sizeof(REAL)))

/* Mean and sum of squares around it, of what was added so far. */
typedef struct FN(spread) {
  double n, mean, square;
} FN(spread);

/* Adds n elements whose distances from about their mean add up to `rest` and their squares to `square`: Chan, Golub and
 * LeVeque 1979. */
static inline void FN(join)(FN(spread) * s, REAL mean, double rest, double square, int64_t n) {
  const double m = (double)n, low = rest / m, all = s->n + m, away = (double)mean + low - s->mean;
  square -= low * low * m;
  s->square += (square < 0 ? 0 : square) + away * away * s->n * m / all;
  s->mean += away * m / all;
  s->n = all;
}

typedef REAL FN(quad) __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
typedef REAL FN(lanes) __attribute__((vector_size(WIDE * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

static inline REAL FN(total)(FN(lanes) v) {
  FN(quad) q = { 0 };
  for (int i = 0; i < WIDE; i += 4) q += *(const FN(quad) *)((const REAL *)&v + i);
  return (q[0] + q[1]) + (q[2] + q[3]);
}

#define AT(p, i) (*(const FN(lanes) *)((p) + (i)))

/* Adds n elements, at most BLOCK, by their distances from the mean of a few of them: with those of n / k elements their
 * squares are at most k times as large as around the mean of all, and double holds what is taken off again. Four sums
 * side by side: one would wait for itself. */
static inline void FN(add_block)(FN(spread) * s, const REAL *restrict x, int64_t n) {
  const int64_t q = n / (4 * WIDE) * WIDE;
  REAL about = 0, rest = 0, square = 0;
  if (q) about = FN(total)((AT(x, 0) + AT(x, q)) + (AT(x, 2 * q) + AT(x, 3 * q))) / (4 * WIDE);
  else {
    for (int64_t i = 0; i < n; i++) about += x[i];
    about /= (REAL)n;
  }
  FN(lanes) a[4] = { { 0 } }, a2[4] = { { 0 } };
  for (int64_t i = 0; i < q; i += WIDE)
    for (int k = 0; k < 4; k++) {
      const FN(lanes) u = AT(x, i + k * q) - about;
      a[k] += u, a2[k] += u * u;
    }
  for (int64_t i = 4 * q; i < n; i++) {
    const REAL u = x[i] - about;
    rest += u, square += u * u;
  }
  FN(join)
  (s, about, (double)rest + (double)FN(total)((a[0] + a[1]) + (a[2] + a[3])),
   (double)square + (double)FN(total)((a2[0] + a2[1]) + (a2[2] + a2[3])), n);
}

static inline void FN(add)(FN(spread) * s, const REAL *x, int64_t n) {
  for (int64_t at = 0; at < n; at += BLOCK) FN(add_block)(s, x + at, at + BLOCK < n ? BLOCK : n - at);
}

/* A mean in two parts: the second is what the first was rounded by. */
static inline REAL FN(split)(double mean, REAL *low) {
  const REAL high = (REAL)mean;
  *low = (REAL)(mean - (double)high);
  return high;
}

static inline double FN(squares)(const REAL *restrict x, int64_t n) {
  double total = 0;
  for (int64_t at = 0; at < n; at += BLOCK) {
    const int64_t k = at + BLOCK < n ? BLOCK : n - at, q = k / (4 * WIDE) * WIDE;
    FN(lanes) a[4] = { { 0 } };
    REAL rest = 0;
    for (int64_t i = at; i < at + q; i += WIDE)
      for (int v = 0; v < 4; v++) a[v] += AT(x, i + v * q) * AT(x, i + v * q);
    for (int64_t i = at + 4 * q; i < at + k; i++) rest += x[i] * x[i];
    total += (double)rest + (double)FN(total)((a[0] + a[1]) + (a[2] + a[3]));
  }
  return total;
}

/* Adds the sums of w g and of w g (x - mean) over n elements; w NULL counts as ones. */
static inline void FN(add_products)(const REAL *x, const REAL *g, const REAL *w, REAL mean, int64_t n, double *sum,
                                    double *sum_h) {
  for (int64_t at = 0; at < n; at += BLOCK) {
    const int64_t k = at + BLOCK < n ? BLOCK : n - at, q = k / (2 * WIDE) * WIDE;
    FN(lanes) a[2] = { { 0 } }, a_h[2] = { { 0 } };
    REAL rest = 0, rest_h = 0;
    if (w)
      for (int64_t i = at; i < at + q; i += WIDE)
        for (int v = 0; v < 2; v++) {
          const FN(lanes) u = AT(g, i + v * q) * AT(w, i + v * q);
          a[v] += u, a_h[v] += u * (AT(x, i + v * q) - mean);
        }
    else
      for (int64_t i = at; i < at + q; i += WIDE)
        for (int v = 0; v < 2; v++) a[v] += AT(g, i + v * q), a_h[v] += AT(g, i + v * q) * (AT(x, i + v * q) - mean);
    for (int64_t i = at + 2 * q; i < at + k; i++) {
      const REAL u = w ? g[i] * w[i] : g[i];
      rest += u, rest_h += u * (x[i] - mean);
    }
    *sum += (double)rest + (double)FN(total)(a[0] + a[1]);
    *sum_h += (double)rest_h + (double)FN(total)(a_h[0] + a_h[1]);
  }
}

#undef AT
#undef WIDE
