/* Rows [begin, end) of all points of x, for one type: REAL, FN(name) and MATH(name). */

/* Four points of y at a time, so that a coordinate of x is read once for them. */
#define OVER_FOUR(start, step, finish)                                                          \
  for (int64_t j = 0; j < c->m; j += 4) {                                                       \
    int64_t left = c->m - j;                                                                    \
    const REAL *y0 = y + j * d, *y1 = left > 1 ? y0 + d : y0, *y2 = left > 2 ? y0 + 2 * d : y0, \
               *y3 = left > 3 ? y0 + 3 * d : y0;                                                \
    REAL s0 = start, s1 = start, s2 = start, s3 = start;                                        \
    step REAL four[4] = { s0, s1, s2, s3 };                                                     \
    for (int64_t f = 0; f < 4 && f < left; f++) {                                               \
      REAL s = four[f];                                                                         \
      out[j + f] = finish;                                                                      \
    }                                                                                           \
  }
#define SUM_OF(e0, e1, e2, e3)                                                        \
  _Pragma("omp simd reduction(+ : s0, s1, s2, s3)") for (int64_t t = 0; t < d; t++) { \
    REAL v0 = x[t] - y0[t], v1 = x[t] - y1[t], v2 = x[t] - y2[t], v3 = x[t] - y3[t];  \
    s0 += e0, s1 += e1, s2 += e2, s3 += e3;                                           \
  }
#define MOST_OF                                                                                       \
  for (int64_t t = 0; t < d; t++) {                                                                   \
    REAL v0 = MATH(fabs)(x[t] - y0[t]), v1 = MATH(fabs)(x[t] - y1[t]), v2 = MATH(fabs)(x[t] - y2[t]), \
         v3 = MATH(fabs)(x[t] - y3[t]);                                                               \
    s0 = (v0 > s0) | (v0 != v0) ? v0 : s0, s1 = (v1 > s1) | (v1 != v1) ? v1 : s1;                     \
    s2 = (v2 > s2) | (v2 != v2) ? v2 : s2, s3 = (v3 > s3) | (v3 != v3) ? v3 : s3;                     \
  }
#define POWER(v) MATH(pow)(MATH(fabs)(v), p)

static void FN(distances)(void *context, int64_t begin, int64_t end) {
  const pairs_ctx *c = context;
  const int64_t d = c->d;
  const REAL p = (REAL)c->p;
  for (int64_t i = begin; i < end; i++) {
    const REAL *x = (const REAL *)c->x + i * d, *y = (const REAL *)c->y + i / c->n * c->m * d;
    REAL *out = (REAL *)c->out + i * c->m;
    if (c->p == 2) {
      OVER_FOUR(0, SUM_OF(v0 * v0, v1 * v1, v2 * v2, v3 * v3), MATH(sqrt)(s))
    } else if (c->p == 1) {
      OVER_FOUR(0, SUM_OF(MATH(fabs)(v0), MATH(fabs)(v1), MATH(fabs)(v2), MATH(fabs)(v3)), s)
    } else if (c->p == 0) {
      OVER_FOUR(0, SUM_OF(v0 != 0, v1 != 0, v2 != 0, v3 != 0), s)
    } else if (c->p == (double)INFINITY) {
      OVER_FOUR(0, MOST_OF, s)
    } else {
      OVER_FOUR(0, SUM_OF(POWER(v0), POWER(v1), POWER(v2), POWER(v3)), MATH(pow)(s, 1 / p))
    }
  }
}

/* sign(v) (|v| / r)^(p - 1) g, over all points of y; 0 where r is. */
static void FN(gradients)(void *context, int64_t begin, int64_t end) {
  const pairs_ctx *c = context;
  const int64_t d = c->d;
  const REAL p = (REAL)c->p;
  for (int64_t i = begin; i < end; i++) {
    const REAL *x = (const REAL *)c->x + i * d, *ys = (const REAL *)c->y + i / c->n * c->m * d;
    const REAL *gs = (const REAL *)c->g + i * c->m, *rs = (const REAL *)c->r + i * c->m;
    REAL *restrict out = (REAL *)c->out + i * d;
    for (int64_t t = 0; t < d; t++) out[t] = 0;
    for (int64_t j = 0; j < c->m && c->p != 0; j++) {
      const REAL *y = ys + j * d;
      const REAL g = gs[j], r = rs[j];
      if (r == 0) continue;
      if (c->p == 2) {
        const REAL w = g / r;
        _Pragma("omp simd") for (int64_t t = 0; t < d; t++) out[t] += w * (x[t] - y[t]);
      } else if (c->p == 1) {
        _Pragma("omp simd") for (int64_t t = 0; t < d; t++) {
          REAL v = x[t] - y[t];
          out[t] += v > 0 ? g : v < 0 ? -g : 0;
        }
      } else if (c->p == (double)INFINITY) { /* shared by those that reach it */
        REAL reached = 0, most = 0;
        for (int64_t t = 0; t < d; t++) {
          REAL v = MATH(fabs)(x[t] - y[t]);
          most = v > most ? v : most;
        }
        for (int64_t t = 0; t < d; t++) reached += MATH(fabs)(x[t] - y[t]) == most;
        for (int64_t t = 0; t < d; t++) {
          REAL v = x[t] - y[t];
          if (MATH(fabs)(v) == most) out[t] += (v < 0 ? -g : g) / reached;
        }
      } else {
        for (int64_t t = 0; t < d; t++) {
          REAL v = x[t] - y[t], w = MATH(pow)(MATH(fabs)(v) / r, p - 1) * g;
          out[t] += v > 0 ? w : v < 0 ? -w : 0;
        }
      }
    }
  }
}
#undef OVER_FOUR
#undef SUM_OF
#undef MOST_OF
#undef POWER
