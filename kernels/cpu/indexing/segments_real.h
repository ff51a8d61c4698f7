/* Template of segments.c: softmax over segments, for one REAL. A task has the segments that begin in its piece. */

typedef REAL FN(lanes) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef REAL FN(few) __attribute__((vector_size(FEW * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
enum { FN(LANES) = TY_VECTOR_BYTES / sizeof(REAL) };

/* `count` vectors V (a constant) of columns from i on of segment [a, b): softmax, and its gradient. */
#define WEIGH(V, weigh, gradient)                                                                                  \
  static inline __attribute__((always_inline)) void weigh(const job *c, const REAL *x, REAL *out, int64_t a,       \
                                                          int64_t b, int64_t i, const int count) {                 \
    enum { N = sizeof(V) / sizeof(REAL) };                                                                         \
    V top[4], sum[4];                                                                                              \
    _Pragma("GCC unroll 4") for (int k = 0; k < count; k++) top[k] = (V){ 0 } - (REAL)INFINITY, sum[k] = (V){ 0 }; \
    for (int64_t j = a; j < b; j++) {                                                                              \
      const V *row = (const V *)(x + position(c, j) * c->inner + i);                                               \
      _Pragma("GCC unroll 4") for (int k = 0; k < count; k++) LARGER_ALL(top[k], row[k]);                          \
    }                                                                                                              \
    for (int64_t j = a; j < b; j++) {                                                                              \
      const int64_t at = position(c, j) * c->inner + i;                                                            \
      const V *row = (const V *)(x + at);                                                                          \
      REAL *to = out + at;                                                                                         \
      _Pragma("GCC unroll 4") for (int k = 0; k < count; k++)((V *)to)[k] = row[k] - top[k];                       \
      _Pragma("omp simd") for (int k = 0; k < count * N; k++) to[k] = FN(ty_exp_weight)(to[k]);                    \
      _Pragma("GCC unroll 4") for (int k = 0; k < count; k++) sum[k] += ((const V *)to)[k];                        \
    }                                                                                                              \
    _Pragma("GCC unroll 4") for (int k = 0; k < count; k++) sum[k] = 1 / sum[k];                                   \
    for (int64_t j = a; j < b; j++) {                                                                              \
      V *to = (V *)(out + position(c, j) * c->inner + i);                                                          \
      _Pragma("GCC unroll 4") for (int k = 0; k < count; k++) to[k] *= sum[k];                                     \
    }                                                                                                              \
  }                                                                                                                \
  static inline __attribute__((always_inline)) void gradient(const job *c, const REAL *g, const REAL *y, REAL *dx, \
                                                             int64_t a, int64_t b, int64_t i, const int count) {   \
    V sum[4];                                                                                                      \
    _Pragma("GCC unroll 4") for (int k = 0; k < count; k++) sum[k] = (V){ 0 };                                     \
    for (int64_t j = a; j < b; j++) {                                                                              \
      const int64_t at = position(c, j) * c->inner + i;                                                            \
      const V *p = (const V *)(g + at), *q = (const V *)(y + at);                                                  \
      _Pragma("GCC unroll 4") for (int k = 0; k < count; k++) sum[k] += p[k] * q[k];                               \
    }                                                                                                              \
    for (int64_t j = a; j < b; j++) {                                                                              \
      const int64_t at = position(c, j) * c->inner + i;                                                            \
      const V *p = (const V *)(g + at), *q = (const V *)(y + at);                                                  \
      _Pragma("GCC unroll 4") for (int k = 0; k < count; k++)((V *)(dx + at))[k] = q[k] * (p[k] - sum[k]);         \
    }                                                                                                              \
  }
WEIGH(FN(lanes), FN(weigh_lanes), FN(gradient_lanes))
WEIGH(FN(few), FN(weigh_eight), FN(gradient_eight))
#undef WEIGH

/* Few columns: what goes into the exponentials, and what is made of them when they have all been taken in one go. */
static inline __attribute__((always_inline)) void FN(weigh_few)(const job *c, const REAL *x, REAL *out, REAL *work,
                                                                int64_t s0, int64_t s1, const int64_t inner) {
  for (int64_t s = s0; s < s1; s++) {
    const int64_t a = c->offsets[s], b = c->offsets[s + 1];
    for (int64_t i = 0; i < inner; i++) {
      REAL top = (REAL)-INFINITY;
      for (int64_t j = a; j < b; j++) {
        const REAL v = x[position(c, j) * inner + i];
        top = v > top ? v : top;
      }
      for (int64_t j = a; j < b; j++) work[j * inner + i] = x[position(c, j) * inner + i] - top;
    }
  }
#pragma omp simd
  for (int64_t i = c->offsets[s0] * inner; i < c->offsets[s1] * inner; i++) work[i] = FN(ty_exp_weight)(work[i]);
  for (int64_t s = s0; s < s1; s++) {
    const int64_t a = c->offsets[s], b = c->offsets[s + 1];
    for (int64_t i = 0; i < inner; i++) {
      REAL sum = 0;
      for (int64_t j = a; j < b; j++) sum += work[j * inner + i];
      sum = 1 / sum;
      for (int64_t j = a; j < b; j++) out[position(c, j) * inner + i] = work[j * inner + i] * sum;
    }
  }
}

/* Long segments of one column, in vectors. */
static void FN(weigh_run)(const REAL *x, REAL *y, int64_t n) {
  REAL top = (REAL)-INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < n; j++) top = x[j] > top ? x[j] : top;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; j++) {
    y[j] = FN(ty_exp_weight)(x[j] - top);
    sum += y[j];
  }
  sum = 1 / sum;
#pragma omp simd
  for (int64_t j = 0; j < n; j++) y[j] *= sum;
}

static void FN(weights)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t inner = c->inner;
  for (int64_t t = begin; t < end; t++) {
    const piece p = piece_of(c, t);
    const int64_t s0 = ty_segment_from(c->offsets, c->m, p.begin, 0), s1 = ty_segment_from(c->offsets, c->m, p.end, 0);
    const int64_t before = p.outer * c->n * inner;
    const REAL *x = (const REAL *)c->x + before;
    REAL *out = (REAL *)c->out + before, *work = (REAL *)c->partial + before;
    if (inner == 1 && !c->order && c->offsets[s1] - c->offsets[s0] >= 64 * (s1 - s0)) {
      for (int64_t s = s0; s < s1; s++)
        FN(weigh_run)(x + c->offsets[s], out + c->offsets[s], c->offsets[s + 1] - c->offsets[s]);
      continue;
    }
    if (inner < FEW) {
      switch (inner) {
        case 1: FN(weigh_few)(c, x, out, work, s0, s1, 1); break;
        case 2: FN(weigh_few)(c, x, out, work, s0, s1, 2); break;
        case 4: FN(weigh_few)(c, x, out, work, s0, s1, 4); break;
        default: FN(weigh_few)(c, x, out, work, s0, s1, inner);
      }
      continue;
    }
    for (int64_t s = s0; s < s1; s++) {
      const int64_t a = c->offsets[s], b = c->offsets[s + 1];
      int64_t i = 0;
      for (; i + 4 * FN(LANES) <= inner; i += 4 * FN(LANES)) FN(weigh_lanes)(c, x, out, a, b, i, 4);
      for (; i + FN(LANES) <= inner; i += FN(LANES)) FN(weigh_lanes)(c, x, out, a, b, i, 1);
      for (; i + FEW <= inner; i += FEW) FN(weigh_eight)(c, x, out, a, b, i, 1);
      if (i < inner) FN(weigh_eight)(c, x, out, a, b, inner - FEW, 1); /* some of them again */
    }
  }
}

static inline __attribute__((always_inline)) void FN(gradient_few)(const job *c, const REAL *g, const REAL *y, REAL *dx,
                                                                   int64_t a, int64_t b, const int64_t inner) {
  for (int64_t i = 0; i < inner; i++) {
    REAL sum = 0;
    for (int64_t j = a; j < b; j++) sum += g[position(c, j) * inner + i] * y[position(c, j) * inner + i];
    for (int64_t j = a; j < b; j++) {
      const int64_t at = position(c, j) * inner + i;
      dx[at] = y[at] * (g[at] - sum);
    }
  }
}

static void FN(weights_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t inner = c->inner;
  for (int64_t t = begin; t < end; t++) {
    const piece p = piece_of(c, t);
    const int64_t s0 = ty_segment_from(c->offsets, c->m, p.begin, 0), s1 = ty_segment_from(c->offsets, c->m, p.end, 0);
    const int64_t before = p.outer * c->n * inner;
    const REAL *g = (const REAL *)c->x + before, *y = (const REAL *)c->y + before;
    REAL *dx = (REAL *)c->out + before;
    for (int64_t s = s0; s < s1; s++) {
      const int64_t a = c->offsets[s], b = c->offsets[s + 1];
      if (inner == 1) FN(gradient_few)(c, g, y, dx, a, b, 1);
      else if (inner < FEW) FN(gradient_few)(c, g, y, dx, a, b, inner);
      if (inner < FEW) continue;
      int64_t i = 0;
      for (; i + 4 * FN(LANES) <= inner; i += 4 * FN(LANES)) FN(gradient_lanes)(c, g, y, dx, a, b, i, 4);
      for (; i + FN(LANES) <= inner; i += FN(LANES)) FN(gradient_lanes)(c, g, y, dx, a, b, i, 1);
      for (; i + FEW <= inner; i += FEW) FN(gradient_eight)(c, g, y, dx, a, b, i, 1);
      if (i < inner) FN(gradient_eight)(c, g, y, dx, a, b, inner - FEW, 1); /* some of them again */
    }
  }
}
