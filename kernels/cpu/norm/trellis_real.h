/* Template (no guard: trellis.c includes it once per element type): the variables of sequences [begin, end). */

/* log(exp(a) + exp(b) + exp(c)); -infinity of three. */
static inline REAL NAME(sum3)(REAL a, REAL b, REAL c) {
  REAL top = a > b ? a : b;
  top = top > c ? top : c;
  const REAL by = top == -(REAL)INFINITY ? 0 : top;
  return by + LOG(EXP(a - by) + EXP(b - by) + EXP(c - by));
}
static inline REAL NAME(sum2)(REAL a, REAL b) {
  const REAL top = a > b ? a : b, low = a > b ? b : a;
  return top == -(REAL)INFINITY ? top : top + LOG(1 + EXP(low - top));
}

/* Whatever is behind the lengths is -infinity in alpha and 0 in gradients. */
static void NAME(fill)(REAL *x, int64_t n, REAL value) {
  for (int64_t i = 0; i < n; i++) x[i] = value;
}

static void NAME(ctc)(void *context, int64_t begin, int64_t end) {
  const job *k = context;
  const int64_t m = k->m;
  for (int64_t i = begin; i < end; i++) {
    const REAL *restrict e = (const REAL *)k->first + i * k->t * m;
    const bool *restrict skip = k->skip + i * m;
    REAL *restrict alpha = (REAL *)k->out[1] + i * k->t * m, *loss = (REAL *)k->out[0] + i;
    const int64_t steps = k->steps[i], n = 2 * k->targets[i] + 1;
    NAME(fill)(alpha, k->t * m, -(REAL)INFINITY);
    if (!steps) {
      *loss = n == 1 ? 0 : (REAL)INFINITY;
      continue;
    }
    alpha[0] = e[0];
    if (n > 1) alpha[1] = e[1];
    for (int64_t t = 1; t < steps; t++) {
      const REAL *restrict from = alpha + (t - 1) * m, *restrict et = e + t * m;
      REAL *restrict to = alpha + t * m;
      to[0] = from[0] + et[0];
      if (n > 1) to[1] = NAME(sum2)(from[0], from[1]) + et[1];
      _Pragma("omp simd") for (int64_t j = 2; j < n; j++)
          to[j] = NAME(sum3)(from[j], from[j - 1], skip[j] ? from[j - 2] : -(REAL)INFINITY) + et[j];
    }
    const REAL *last = alpha + (steps - 1) * m;
    *loss = -(n > 1 ? NAME(sum2)(last[n - 1], last[n - 2]) : last[0]);
  }
}

static void NAME(ctc_backward)(void *context, int64_t begin, int64_t end) {
  const job *k = context;
  const int64_t m = k->m;
  for (int64_t i = begin; i < end; i++) {
    const REAL *restrict e = (const REAL *)k->first + i * k->t * m, *restrict alpha = (const REAL *)k->alpha +
                                                                                      i * k->t * m;
    const bool *restrict skip = k->skip + i * m;
    REAL *restrict d = (REAL *)k->out[0] + i * k->t * m; /* the backward variables first */
    const REAL g = ((const REAL *)k->g)[i], loss = ((const REAL *)k->loss)[i];
    const int64_t steps = k->steps[i], n = 2 * k->targets[i] + 1;
    NAME(fill)(d, k->t * m, 0);
    if (!steps || loss == (REAL)INFINITY || g == 0) continue;
    for (int64_t j = 0; j < n; j++) d[(steps - 1) * m + j] = j >= n - 2 ? 0 : -(REAL)INFINITY;
    for (int64_t t = steps - 2; t >= 0; t--) {
      const REAL *restrict next = d + (t + 1) * m, *restrict et = e + (t + 1) * m;
      REAL *restrict to = d + t * m;
      _Pragma("omp simd") for (int64_t j = 0; j < n - 2; j++) to[j] = NAME(sum3)(
          next[j] + et[j], next[j + 1] + et[j + 1], skip[j + 2] ? next[j + 2] + et[j + 2] : -(REAL)INFINITY);
      if (n > 1) to[n - 2] = NAME(sum2)(next[n - 2] + et[n - 2], next[n - 1] + et[n - 1]);
      to[n - 1] = next[n - 1] + et[n - 1];
    }
    for (int64_t t = 0; t < steps; t++)
      _Pragma("omp simd") for (int64_t j = 0; j < n; j++)
          d[t * m + j] = -g * EXP(alpha[t * m + j] + d[t * m + j] + loss);
  }
}

static void NAME(rnnt)(void *context, int64_t begin, int64_t end) {
  const job *k = context;
  const int64_t m = k->m;
  for (int64_t i = begin; i < end; i++) {
    const REAL *restrict blank = (const REAL *)k->first + i * k->t * m;
    const REAL *restrict label = (const REAL *)k->second + i * k->t * m;
    REAL *restrict alpha = (REAL *)k->out[1] + i * k->t * m, *loss = (REAL *)k->out[0] + i;
    const int64_t steps = k->steps[i], n = k->targets[i] + 1;
    NAME(fill)(alpha, k->t * m, -(REAL)INFINITY);
    if (!steps) {
      *loss = (REAL)INFINITY;
      continue;
    }
    for (int64_t t = 0; t < steps; t++) {
      const REAL *from = alpha + (t - 1) * m, *stay = blank + (t - 1) * m, *on = label + t * m;
      REAL *to = alpha + t * m;
      to[0] = t ? from[0] + stay[0] : 0;
      for (int64_t u = 1; u < n; u++) {
        const REAL own = to[u - 1] + on[u - 1];
        to[u] = t ? NAME(sum2)(from[u] + stay[u], own) : own;
      }
    }
    const int64_t last = (steps - 1) * m + n - 1;
    *loss = -(alpha[last] + blank[last]);
  }
}

static void NAME(rnnt_backward)(void *context, int64_t begin, int64_t end) {
  const job *k = context;
  const int64_t m = k->m;
  for (int64_t i = begin; i < end; i++) {
    const REAL *restrict blank = (const REAL *)k->first + i * k->t * m;
    const REAL *restrict label = (const REAL *)k->second + i * k->t * m;
    const REAL *restrict alpha = (const REAL *)k->alpha + i * k->t * m;
    REAL *restrict dblank = (REAL *)k->out[0] + i * k->t * m; /* the backward variables first */
    REAL *restrict dlabel = (REAL *)k->out[1] + i * k->t * m;
    const REAL g = ((const REAL *)k->g)[i], loss = ((const REAL *)k->loss)[i];
    const int64_t steps = k->steps[i], n = k->targets[i] + 1;
    NAME(fill)(dblank, k->t * m, 0);
    NAME(fill)(dlabel, k->t * m, 0);
    if (!steps || loss == (REAL)INFINITY || g == 0) continue;
    for (int64_t t = steps - 1; t >= 0; t--) {
      for (int64_t u = n - 1; u >= 0; u--) {
        const int64_t at = t * m + u;
        const REAL later = (t < steps - 1 ? dblank[at + m] : u == n - 1 ? 0 : -(REAL)INFINITY) + blank[at];
        dblank[at] = u < n - 1 ? NAME(sum2)(later, dblank[at + 1] + label[at]) : later;
      }
    }
    for (int64_t t = 0; t < steps; t++) {
      for (int64_t u = 0; u < n; u++) {
        const int64_t at = t * m + u;
        if (u < n - 1) dlabel[at] = -g * EXP(alpha[at] + label[at] + dblank[at + 1] + loss);
      }
      for (int64_t u = 0; u < n; u++) {
        const int64_t at = t * m + u;
        const REAL after = t < steps - 1 ? dblank[at + m] : u == n - 1 ? 0 : -(REAL)INFINITY;
        dblank[at] = -g * EXP(alpha[at] + blank[at] + after + loss);
      }
    }
  }
}
