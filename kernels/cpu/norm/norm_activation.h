/* Template of norm.c: REAL is the element, FN(x) and F(x) give names their suffix. What follows a norm: its activation
 * while the normalised values are in the first cache, and the gradient through it, which computes them again. */

/* The gradient of (x - mean) scale + shift from g, that of its activation. */
static void FN(through)(const job *c, REAL *restrict to, const REAL *restrict g, const REAL *restrict x, REAL mean,
                        REAL scale, REAL shift, int64_t n) {
  switch (c->activation) {
#define CASE(kind, f)                                                                                               \
  case kind:                                                                                                        \
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++) to[i] = g[i] * F(f##_slope)((x[i] - mean) * scale + shift); \
    break;
    TY_EACH_ACTIVATION(CASE)
#undef CASE
    default: break;
  }
}
