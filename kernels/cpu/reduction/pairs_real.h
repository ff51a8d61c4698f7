/* Rows [begin, end) of all points of x, for one type: REAL, BITS (an integer of its size), FN(name) and MATH(name). */

/* ---- many pairs, p = 1 or 2: points of y in lanes ---- */

typedef REAL FN(lanes) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef BITS FN(bits) __attribute__((vector_size(TY_VECTOR_BYTES)));

/* What `rows` (a constant) points of x add to distances before the root or, at the end, the distances. Coordinates are
 * added one after the other, whatever is done together, so that no result hangs on the threads. */
static inline __attribute__((always_inline)) void FN(tile)(const REAL *x, const FN(lanes) * y, int64_t depth,
                                                           const pairs_ctx *c, REAL *out, int64_t left, bool first,
                                                           bool last, const int rows, const bool squares) {
  enum { WIDTH = 2 * TY_VECTOR_BYTES / sizeof(REAL) };
  const FN(bits) magnitude = (FN(bits)){ 0 } +
                             (BITS)(((BITS)1 << (8 * sizeof(BITS) - 2)) - 1 + ((BITS)1 << (8 * sizeof(BITS) - 2)));
  FN(lanes) sum[8];
  REAL edge[WIDTH];
  _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
    const REAL *from = out + r * c->m;
    if (first) {
      sum[2 * r] = sum[2 * r + 1] = (FN(lanes)){ 0 };
      continue;
    }
    if (left < WIDTH) from = memcpy(edge, from, sizeof(REAL) * (size_t)left);
    sum[2 * r] = ((const FN(lanes) *)from)[0], sum[2 * r + 1] = ((const FN(lanes) *)from)[1];
  }
  for (int64_t t = 0; t < depth; t++) {
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
      const FN(lanes) a = x[r * c->d + t] - y[2 * t], b = x[r * c->d + t] - y[2 * t + 1];
      if (squares) sum[2 * r] += a * a, sum[2 * r + 1] += b * b;
      else sum[2 * r] += (FN(lanes))((FN(bits))a & magnitude), sum[2 * r + 1] += (FN(lanes))((FN(bits))b & magnitude);
    }
  }
  _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
    REAL *to = left < WIDTH ? edge : out + r * c->m;
    ((FN(lanes) *)to)[0] = sum[2 * r], ((FN(lanes) *)to)[1] = sum[2 * r + 1];
    if (last && squares) _Pragma("omp simd") for (int l = 0; l < (int)WIDTH; l++) to[l] = MATH(sqrt)(to[l]);
    if (left < WIDTH) memcpy(out + r * c->m, edge, sizeof(REAL) * (size_t)left);
  }
}

static inline __attribute__((always_inline)) void FN(all_pairs)(const pairs_ctx *c, const REAL *xs, const REAL *ys,
                                                                REAL *outs, int64_t n, const bool squares) {
  enum { LANES = TY_VECTOR_BYTES / sizeof(REAL), WIDTH = 2 * LANES, DEPTH = 128 };
  REAL packed[DEPTH * WIDTH] __attribute__((aligned(TY_VECTOR_BYTES)));
  for (int64_t j = 0; j < c->m; j += WIDTH) {
    const int64_t left = c->m - j < WIDTH ? c->m - j : WIDTH;
    for (int64_t t = 0; t < c->d; t += DEPTH) {
      const int64_t depth = c->d - t < DEPTH ? c->d - t : DEPTH;
      for (int64_t l = 0; l < WIDTH; l++)
        for (int64_t u = 0; u < depth; u++) packed[u * WIDTH + l] = l < left ? ys[(j + l) * c->d + t + u] : 0;
      const FN(lanes) *y = (const FN(lanes) *)packed;
      const bool first = t == 0, last = t + depth == c->d;
      int64_t i = 0;
      for (; i + 4 <= n; i += 4)
        FN(tile)(xs + i * c->d + t, y, depth, c, outs + i * c->m + j, left, first, last, 4, squares);
      for (; i < n; i++) FN(tile)(xs + i * c->d + t, y, depth, c, outs + i * c->m + j, left, first, last, 1, squares);
    }
  }
}

/* Pieces of a batch each. */
static void FN(many)(void *context, int64_t begin, int64_t end) {
  const pairs_ctx *c = context;
  for (int64_t i = begin, stop; i < end; i = stop) {
    stop = (i / c->n + 1) * c->n < end ? (i / c->n + 1) * c->n : end;
    const REAL *x = (const REAL *)c->x + i * c->d, *y = (const REAL *)c->y + i / c->n * c->m * c->d;
    REAL *out = (REAL *)c->out + i * c->m;
    if (c->p == 2) FN(all_pairs)(c, x, y, out, stop - i, true);
    else FN(all_pairs)(c, x, y, out, stop - i, false);
  }
}

/* ---- any p ---- */

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
