/* The roots of the secular equation 1 / rho + sum of weight_i / (pole_i - x) = 0, for one type: REAL, FN(name),
 * EPSILON. There is one between every two poles and one behind the last. A vector of roots is sought at a time, by
 * what a sum of two fractions with the poles beside a root gives (Li 1993, "Solving secular equations stably and
 * efficiently", LAPACK working note 89), within bounds that close in on it. Each root is kept as its distance from
 * the nearer pole, so that the gaps from all poles have all their digits. */

typedef REAL FN(lanes) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef __typeof__((FN(lanes)){ 0 } > (FN(lanes)){ 0 }) FN(lane_mask);
enum { FN(LANES) = TY_VECTOR_BYTES / sizeof(REAL) };

typedef struct FN(secular) {
  int64_t count, step;       /* poles and roots; between rows of gaps, a multiple of LANES */
  const REAL *pole, *weight; /* [count], poles ascending, weights above 0 */
  REAL rho;                  /* above 0; the weights' sum times it is at most `last` */
  REAL last;                 /* what the last root is at most behind the last pole */
  const int *place;          /* [count]: which row of gaps is a pole's */
  REAL *root;                /* [count] */
  REAL *gaps;                /* [count, step]: pole - root */
} FN(secular);

/* Of a vector of roots at origin + tau: the sums over the poles up to `split` and over those behind it, of the
 * fractions and of their slopes, and what the sums' parts add up to, for what rounding may be. */
typedef struct FN(secular_sums) {
  REAL low[FN(LANES)], low_slope[FN(LANES)], high[FN(LANES)], high_slope[FN(LANES)], parts[FN(LANES)];
} FN(secular_sums);

static void FN(secular_sum)(const FN(secular) * s, int64_t first, const REAL *at, const REAL *from, const REAL *split,
                            FN(secular_sums) * sums) {
  const FN(lanes) tau = *(const FN(lanes) *)at, origin = *(const FN(lanes) *)from;
  const FN(lanes) border = *(const FN(lanes) *)split;
  FN(lanes) low = { 0 }, low_slope = { 0 }, high = { 0 }, high_slope = { 0 }, low_parts = { 0 }, high_parts = { 0 };
  const int64_t begin = (int64_t)split[0], end = (int64_t)split[FN(LANES) - 1];
  for (int64_t i = 0; i <= end; i++) { /* towards the root, as the terms grow */
    const FN(lanes) gap = (s->pole[i] - origin) - tau;
    FN(lanes) term = s->weight[i] / gap, slope = term / gap;
    if (i > begin) {
      const FN(lane_mask) taken = border >= (REAL)i;
      term = (FN(lanes))((FN(lane_mask))term & taken);
      slope = (FN(lanes))((FN(lane_mask))slope & taken);
    }
    low += term;
    low_slope += slope;
    low_parts += low;
  }
  for (int64_t i = s->count - 1; i > begin; i--) {
    const FN(lanes) gap = (s->pole[i] - origin) - tau;
    FN(lanes) term = s->weight[i] / gap, slope = term / gap;
    if (i <= end) {
      const FN(lane_mask) taken = border < (REAL)i;
      term = (FN(lanes))((FN(lane_mask))term & taken);
      slope = (FN(lanes))((FN(lane_mask))slope & taken);
    }
    high += term;
    high_slope += slope;
    high_parts += high;
  }
  *(FN(lanes) *)sums->low = low, *(FN(lanes) *)sums->low_slope = low_slope;
  *(FN(lanes) *)sums->high = high, *(FN(lanes) *)sums->high_slope = high_slope;
#pragma omp simd
  for (int l = 0; l < FN(LANES); l++)
    sums->parts[l] = FN(absolute)(((REAL *)&low_parts)[l]) + FN(absolute)(((REAL *)&high_parts)[l]);
}

/* Of c x^2 - a x + b, where c may vanish, the root between the two poles that it was made of, or behind both of them. */
static inline REAL FN(quadratic)(REAL a, REAL b, REAL c, bool behind) {
  const REAL inner = a * a - 4 * b * c, root = FN(square_root)(inner > 0 ? inner : 0);
  const bool divides = behind ? a >= 0 : a <= 0;
  const REAL sum = behind == divides ? a + root : a - root; /* does not cancel */
  const REAL upper = divides ? sum : 2 * b, lower = divides ? 2 * c : sum;
  return upper / lower;
}

/* Roots [first, first + LANES), of which those from `count` on repeat the last. */
static void FN(secular_lanes)(const FN(secular) * s, int64_t first) {
  enum { L = FN(LANES) };
  const int64_t count = s->count;
  const REAL *pole = s->pole, *weight = s->weight, inverse = 1 / s->rho;
  REAL tau[L], origin[L], split[L], low[L], high[L], near[L], far[L];
  REAL outer[L]; /* 1: behind the last pole */
  FN(secular_sums) sums;
  /* Halfway: the sign there tells the nearer pole. */
  for (int l = 0; l < L; l++) {
    const int64_t j = first + l < count ? first + l : count - 1, left = j < count - 1 ? j : count - 2;
    split[l] = (REAL)left;
    outer[l] = j == count - 1;
    near[l] = pole[left + 1] - pole[left];
    origin[l] = pole[j];
    tau[l] = j < count - 1 ? near[l] / 2 : s->last / 2;
  }
  FN(secular_sum)(s, first, tau, origin, split, &sums);
  for (int l = 0; l < L; l++) {
    const int64_t left = (int64_t)split[l];
    const REAL w0 = weight[left], w1 = weight[left + 1], between = near[l], half = tau[l];
    const REAL value = inverse + (sums.low[l] + sums.high[l]);
    const bool before = value > 0; /* the root lies in the first half */
    /* the other poles' sum counts as constant */
    REAL c = value - w0 / ((pole[left] - origin[l]) - half) - w1 / ((pole[left + 1] - origin[l]) - half), guess;
    if (outer[l] > 0) {
      low[l] = before ? 0 : half, high[l] = before ? half : s->last;
      guess = FN(quadratic)(-c * between + w0 + w1, -w1 * between, c, true);
    } else if (before) {
      low[l] = 0, high[l] = half;
      guess = FN(quadratic)(c * between + w0 + w1, w0 * between, c, false);
    } else {
      origin[l] = pole[left + 1];
      low[l] = -half, high[l] = 0;
      guess = FN(quadratic)(-c * between + w0 + w1, -w1 * between, c, false);
    }
    tau[l] = guess > low[l] && guess < high[l] ? guess : (low[l] + high[l]) / 2;
    near[l] = pole[left] - origin[l], far[l] = pole[left + 1] - origin[l];
  }
  for (int step = 0; step < MOST_STEPS; step++) {
    FN(secular_sum)(s, first, tau, origin, split, &sums);
    int moving = 0;
#pragma omp simd reduction(+ : moving)
    for (int l = 0; l < L; l++) {
      const REAL a0 = near[l] - tau[l], a1 = far[l] - tau[l], slope = sums.low_slope[l] + sums.high_slope[l];
      const REAL value = inverse + sums.low[l] + sums.high[l];
      const REAL rounding = 8 * (FN(absolute)(sums.low[l]) + FN(absolute)(sums.high[l])) + sums.parts[l] + inverse +
                            FN(absolute)(tau[l]) * slope;
      low[l] = value <= 0 && tau[l] > low[l] ? tau[l] : low[l];
      high[l] = value > 0 && tau[l] < high[l] ? tau[l] : high[l];
      const REAL c = value - a0 * sums.low_slope[l] - a1 * sums.high_slope[l];
      const REAL b = a0 * a1 * value, a = (a0 + a1) * value - a0 * a1 * slope;
      REAL change = FN(quadratic)(a, b, c, outer[l] > 0);
      change = value * change < 0 ? change : -value / slope; /* Newton's */
      REAL next = tau[l] + change;
      next = next > low[l] && next < high[l] ? next : (low[l] + high[l]) / 2;
      const bool there = FN(absolute)(value) <= EPSILON * rounding || next == tau[l];
      tau[l] = there ? tau[l] : next;
      moving += !there;
    }
    if (!moving) break;
  }
  for (int l = 0; l < L && first + l < count; l++) s->root[first + l] = origin[l] + tau[l];
  const FN(lanes) from = *(FN(lanes) *)origin, at = *(FN(lanes) *)tau;
  for (int64_t i = 0; i < count; i++) *(FN(lanes) *)(s->gaps + s->place[i] * s->step + first) = (pole[i] - from) - at;
}
