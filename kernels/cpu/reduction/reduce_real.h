/* The inner loops of the reductions for one compute type. Included by reduce.c with REAL (float, double, int64_t),
 * SUFFIX, EXP and TOO_NARROW (whether a sum of squares has left the range of REAL) defined. A block is a short contiguous run of values in the compute type. */

#define NAME_(f, s) f##_##s
#define NAME__(f, s) NAME_(f, s)
#define NAME(f) NAME__(f, SUFFIX)

/* WRAP: integers go around at overflow, so they are added as unsigned. */
static inline WRAP(REAL) NAME(short_sum)(const REAL *restrict x, int64_t n) {
  WRAP(REAL) s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t i = 0; i < n; i++) s += (WRAP(REAL))x[i];
  return s;
}

typedef WRAP(REAL) NAME(sums) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

/* In the order of memory, since no prefetcher follows four runs of a short block side by side, which takes five times
 * as long where they come from memory; in four vectors, since one would wait for itself. */
static WIDE NAME(sum)(const REAL *restrict x, int64_t n) {
  enum { LANES = TY_VECTOR_BYTES / (int)sizeof(REAL), STEP = 4 * LANES };
  if (n < STEP) return (WIDE)NAME(short_sum)(x, n);
  NAME(sums) s[4] = { { 0 }, { 0 }, { 0 }, { 0 } };
  int64_t i = 0;
  for (; i + STEP <= n; i += STEP)
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) s[k] += *(const NAME(sums) *)(x + i + k * LANES);
  s[0] = (s[0] + s[1]) + (s[2] + s[3]);
  REAL lanes[LANES];
  memcpy(lanes, s, sizeof lanes);
  return (WIDE)(NAME(short_sum)(lanes, LANES) + NAME(short_sum)(x + i, n - i));
}

#if !INTEGER
static double NAME(squares)(const REAL *restrict x, int64_t n) {
  double s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t i = 0; i < n; i++) s += (double)x[i] * (double)x[i];
  return s;
}
#endif

static WIDE NAME(prod)(const REAL *restrict x, int64_t n) {
  WRAP(WIDE) s = 1;
#pragma omp simd reduction(* : s)
  for (int64_t i = 0; i < n; i++) s *= (WRAP(WIDE))x[i];
  return (WIDE)s;
}

/* Whether x is to replace `best`: a NaN does, and is not replaced. */
#define ABOVE(x, best) (((x) > (best)) | IS_NAN(x))
#define BELOW(x, best) (((x) < (best)) | IS_NAN(x))

/* Largest or smallest value; any NaN wins. */
static REAL NAME(short_extreme)(const REAL *restrict x, int64_t n, bool largest) {
  REAL a = x[0], b = x[0]; /* two side by side: one would wait for itself */
  int nan = IS_NAN(x[n - 1]);
  const int64_t half = n / 2;
  if (largest) {
#pragma omp simd reduction(max : a, b) reduction(| : nan)
    for (int64_t i = 0; i < half; i++) {
      REAL u = x[i], v = x[i + half];
      a = u > a ? u : a, b = v > b ? v : b;
      nan |= IS_NAN(u) | IS_NAN(v);
    }
    a = a > b ? a : b;
    a = x[n - 1] > a ? x[n - 1] : a;
  } else {
#pragma omp simd reduction(min : a, b) reduction(| : nan)
    for (int64_t i = 0; i < half; i++) {
      REAL u = x[i], v = x[i + half];
      a = u < a ? u : a, b = v < b ? v : b;
      nan |= IS_NAN(u) | IS_NAN(v);
    }
    a = a < b ? a : b;
    a = x[n - 1] < a ? x[n - 1] : a;
  }
  return nan ? NOT_A_NUMBER : a;
}

/* In the order of memory, as sum(), in the lanes of four vectors. */
static REAL NAME(extreme)(const REAL *restrict x, int64_t n, bool largest) {
  enum { STEP = 4 * TY_VECTOR_BYTES / (int)sizeof(REAL) };
  if (n < 8 * STEP || TY_VECTOR_BYTES < 32) return NAME(short_extreme)(x, n, largest); /* gcc spills SSE's */
  REAL best[STEP];
  MASK nan[STEP], any = 0;
  for (int l = 0; l < STEP; l++) best[l] = x[l], nan[l] = IS_NAN(x[l]);
  int64_t i = STEP;
  if (largest) {
    for (; i + STEP <= n; i += STEP)
      for (int l = 0; l < STEP; l++) best[l] = x[i + l] > best[l] ? x[i + l] : best[l], nan[l] |= IS_NAN(x[i + l]);
  } else {
    for (; i + STEP <= n; i += STEP)
      for (int l = 0; l < STEP; l++) best[l] = x[i + l] < best[l] ? x[i + l] : best[l], nan[l] |= IS_NAN(x[i + l]);
  }
  for (int l = 0; l < STEP; l++) any |= nan[l];
  const REAL a = NAME(short_extreme)(best, STEP, largest);
  const REAL b = NAME(short_extreme)(x + n - STEP, STEP, largest); /* with some once more */
  if (any || IS_NAN(b)) return NOT_A_NUMBER;
  return largest == (a > b) ? a : b;
}

static bool NAME(any)(const REAL *restrict x, int64_t n) {
  int hit = 0;
#pragma omp simd reduction(| : hit)
  for (int64_t i = 0; i < n; i++) hit |= x[i] != 0;
  return hit;
}

static bool NAME(all)(const REAL *restrict x, int64_t n) {
  int miss = 0;
#pragma omp simd reduction(| : miss)
  for (int64_t i = 0; i < n; i++) miss |= x[i] == 0;
  return !miss;
}

static void NAME(merge_block)(kind k, const REAL *restrict x, int64_t n, int64_t first, state *s) {
  switch (k) {
    case SUM:
    case MEAN: s->WIDE_FIELD = (WIDE)((WRAP(WIDE))s->WIDE_FIELD + (WRAP(WIDE))NAME(sum)(x, n)); return;
    case PROD: s->WIDE_FIELD = (WIDE)((WRAP(WIDE))s->WIDE_FIELD * (WRAP(WIDE))NAME(prod)(x, n)); return;
    case SQUARES:
#if !INTEGER
      s->a += NAME(squares)(x, n);
#endif
      return;
    case ANY: s->i |= NAME(any)(x, n); return;
    case ALL: s->i &= NAME(all)(x, n); return;
    case MAX:
    case MIN:
    case ARGMAX:
    case ARGMIN: {
      REAL best = NAME(extreme)(x, n, k == MAX || k == ARGMAX);
      state t = { .n = 1 };
      t.WIDE_FIELD = (WIDE)best;
      if (!replaces(k, WIDE_IS_INT, s, &t)) return;
      if (k == ARGMAX || k == ARGMIN) {
        int64_t i = 0;
        while (x[i] != best && !IS_NAN(x[i])) i++; /* a NaN among them is the extreme */
        t.at = first + i;
      }
      *s = t;
      return;
    }
    case LOGSUMEXP: {
#if !INTEGER
      REAL m = NAME(extreme)(x, n, true), sum = 0;
      if (m == -(REAL)INFINITY || m != m || m == (REAL)INFINITY) {
        state t = { .n = 1, .a = (double)m, .b = m == -(REAL)INFINITY ? 0 : 1 };
        merge(k, false, s, &t);
        return;
      }
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; i++) sum += EXP(x[i] - m);
      state t = { .n = 1, .a = (double)m, .b = (double)sum };
      merge(k, false, s, &t);
#endif
      return;
    }
    case VAR: {
#if !INTEGER
      REAL mean = (REAL)(NAME(sum)(x, n) / (WIDE)n), m2 = 0, rest = 0;
#pragma omp simd reduction(+ : m2, rest)
      for (int64_t i = 0; i < n; i++) {
        REAL d = x[i] - mean;
        m2 += d * d;
        rest += d; /* what rounding left in the mean */
      }
      double r = (double)rest / (double)n;
      state t = { .n = n, .a = (double)mean + r, .b = (double)m2 - r * r * (double)n };
      if (TOO_NARROW(m2)) t = wide_deviations((const float *)x, n);
      merge(k, false, s, &t);
#endif
      return;
    }
  }
}

/* ---- columns: `rows` rows of `width` columns, a state per column ---- */

/* a[j] for every column j: `first`, then for each row one step `e` with its element x. */
#define EACH_COLUMN(type, first_value, e)                     \
  type a[COLUMNS];                                            \
  for (int64_t j = 0; j < width; j++) a[j] = (first_value);   \
  for (int64_t i = 0; i < rows; i++) {                        \
    const REAL *restrict r = row[i];                          \
    _Pragma("omp simd") for (int64_t j = 0; j < width; j++) { \
      REAL x = r[j];                                          \
      a[j] = (e);                                             \
    }                                                         \
  }

static void NAME(columns_sum)(const REAL *const *row, int64_t rows, int64_t width, state *s) {
  EACH_COLUMN(REAL, 0, (REAL)((WRAP(REAL))a[j] + (WRAP(REAL))x))
  for (int64_t j = 0; j < width; j++) s[j].WIDE_FIELD = (WIDE)((WRAP(WIDE))s[j].WIDE_FIELD + (WRAP(WIDE))a[j]);
}

static void NAME(columns_prod)(const REAL *const *row, int64_t rows, int64_t width, state *s) {
  EACH_COLUMN(WIDE, 1, (WIDE)((WRAP(WIDE))a[j] * (WRAP(WIDE))x))
  for (int64_t j = 0; j < width; j++) s[j].WIDE_FIELD = (WIDE)((WRAP(WIDE))s[j].WIDE_FIELD * (WRAP(WIDE))a[j]);
}

static void NAME(columns_any)(const REAL *const *row, int64_t rows, int64_t width, state *s) {
  EACH_COLUMN(REAL, 0, x != 0 ? 1 : a[j])
  for (int64_t j = 0; j < width; j++) s[j].i |= a[j] != 0;
}

static void NAME(columns_all)(const REAL *const *row, int64_t rows, int64_t width, state *s) {
  EACH_COLUMN(REAL, 1, x != 0 ? a[j] : 0)
  for (int64_t j = 0; j < width; j++) s[j].i &= a[j] != 0;
}

static void NAME(columns_extreme)(bool largest, const REAL *const *row, int64_t rows, int64_t width, int64_t first,
                                  state *s) {
  REAL best[COLUMNS], at[COLUMNS]; /* positions are below ROWS, which REAL holds */
  for (int64_t j = 0; j < width; j++) best[j] = row[0][j], at[j] = 0;
  for (int64_t i = 1; i < rows; i++) {
    const REAL *restrict r = row[i];
    if (largest)
#pragma omp simd
      for (int64_t j = 0; j < width; j++) {
        bool better = ABOVE(r[j], best[j]) & !IS_NAN(best[j]);
        best[j] = better ? r[j] : best[j];
        at[j] = better ? (REAL)i : at[j];
      }
    else
#pragma omp simd
      for (int64_t j = 0; j < width; j++) {
        bool better = BELOW(r[j], best[j]) & !IS_NAN(best[j]);
        best[j] = better ? r[j] : best[j];
        at[j] = better ? (REAL)i : at[j];
      }
  }
  for (int64_t j = 0; j < width; j++) {
    WIDE old = s[j].WIDE_FIELD;
    if (s[j].n && (IS_NAN(old) || !(largest ? ABOVE(best[j], old) : BELOW(best[j], old)))) continue;
    s[j].n = 1;
    s[j].WIDE_FIELD = (WIDE)best[j];
    s[j].at = first + (int64_t)at[j];
  }
}

#if !INTEGER
static void NAME(columns_squares)(const REAL *const *row, int64_t rows, int64_t width, state *s) {
  EACH_COLUMN(double, 0, a[j] + (double)x * (double)x)
  for (int64_t j = 0; j < width; j++) s[j].a += a[j];
}

static void NAME(columns_var)(const REAL *const *row, int64_t rows, int64_t width, state *s) {
  EACH_COLUMN(REAL, 0, a[j] + x)
  REAL m2[COLUMNS], rest[COLUMNS];
  for (int64_t j = 0; j < width; j++) a[j] /= (REAL)rows, m2[j] = rest[j] = 0;
  for (int64_t i = 0; i < rows; i++) {
    const REAL *restrict r = row[i];
#pragma omp simd
    for (int64_t j = 0; j < width; j++) {
      REAL d = r[j] - a[j];
      m2[j] += d * d;
      rest[j] += d;
    }
  }
  for (int64_t j = 0; j < width; j++) {
    double r = (double)rest[j] / (double)rows;
    state t = { .n = rows, .a = (double)a[j] + r, .b = (double)m2[j] - r * r * (double)rows };
    if (TOO_NARROW(m2[j])) {
      float column[ROWS];
      for (int64_t i = 0; i < rows; i++) column[i] = (float)row[i][j];
      t = wide_deviations(column, rows);
    }
    merge(VAR, false, &s[j], &t);
  }
}

static void NAME(columns_logsumexp)(const REAL *const *row, int64_t rows, int64_t width, state *s) {
  EACH_COLUMN(REAL, row[0][j], ABOVE(x, a[j]) & !IS_NAN(a[j]) ? x : a[j])
  REAL sum[COLUMNS], shift[COLUMNS];
  for (int64_t j = 0; j < width; j++) shift[j] = isfinite(a[j]) ? a[j] : 0, sum[j] = 0;
  for (int64_t i = 0; i < rows; i++) {
    const REAL *restrict r = row[i];
#pragma omp simd
    for (int64_t j = 0; j < width; j++) sum[j] += EXP(r[j] - shift[j]);
  }
  for (int64_t j = 0; j < width; j++) {
    state t = { .n = 1, .a = (double)a[j], .b = isfinite(a[j]) ? (double)sum[j] : 0 };
    merge(LOGSUMEXP, false, &s[j], &t);
  }
}
#endif

static void NAME(merge_columns)(kind k, const void *const *from, int64_t rows, int64_t width, int64_t first, state *s) {
  const REAL *row[ROWS];
  for (int64_t i = 0; i < rows; i++) row[i] = from[i];
  switch (k) {
    case SUM:
    case MEAN: NAME(columns_sum)(row, rows, width, s); return;
    case PROD: NAME(columns_prod)(row, rows, width, s); return;
    case ANY: NAME(columns_any)(row, rows, width, s); return;
    case ALL: NAME(columns_all)(row, rows, width, s); return;
#if !INTEGER
    case SQUARES: NAME(columns_squares)(row, rows, width, s); return;
    case VAR: NAME(columns_var)(row, rows, width, s); return;
    case LOGSUMEXP: NAME(columns_logsumexp)(row, rows, width, s); return;
#endif
    default: NAME(columns_extreme)(k == MAX || k == ARGMAX, row, rows, width, first, s); return;
  }
}

#undef EACH_COLUMN
#undef ABOVE
#undef BELOW
#undef NAME
#undef NAME__
#undef NAME_
