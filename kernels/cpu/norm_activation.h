/* Template of norm.c: REAL is the element, FN(x) and F(x) give names their suffix. What follows a norm: its activation
 * while the normalised values are in the first cache, and the gradient through it, which computes them again. */

#define ACTIVATIONS(LOOP)                                     \
  switch (c->activation) {                                    \
    case TY_RELU: LOOP(F(relu), F(relu_slope))                \
    case TY_GELU: LOOP(F(gelu), F(gelu_slope))                \
    case TY_GELU_TANH: LOOP(F(gelu_tanh), F(gelu_tanh_slope)) \
    case TY_SILU: LOOP(F(silu), F(silu_slope))                \
    case TY_NO_ACTIVATION: break;                             \
  }

static inline REAL F(relu)(REAL v) { return v < 0 ? 0 : v; }
static inline REAL F(relu_slope)(REAL v) { return v > 0 ? 1 : v == v ? 0 : v; }

/* In place. */
static void FN(activate)(const job *c, REAL *restrict y, int64_t n) {
#define APPLY(f, slope)                                               \
  _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = f(y[i]); \
  break;
  ACTIVATIONS(APPLY)
#undef APPLY
}

/* The gradient of (x - mean) scale + shift from g, that of its activation. */
static void FN(through)(const job *c, REAL *restrict to, const REAL *restrict g, const REAL *restrict x, REAL mean,
                        REAL scale, REAL shift, int64_t n) {
#define APPLY(f, slope)                                                                                    \
  _Pragma("omp simd") for (int64_t i = 0; i < n; i++) to[i] = g[i] * slope((x[i] - mean) * scale + shift); \
  break;
  ACTIVATIONS(APPLY)
#undef APPLY
}
#undef ACTIVATIONS
