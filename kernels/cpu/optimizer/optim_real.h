/* Template (no guard: optim.c includes it once per element type): the arithmetic of one optimizer step on runs of
 * elements, and norms. REAL is the element, NAME() makes names, SQRT and MAGNITUDE are its functions. */

/* Memory is the limit, and the hardware's own prefetchers give up at every page: ask AHEAD bytes before. That is a few
 * lines: asked for earlier they wait in the first cache, which is then too small for those of four tensors. The gradient
 * is read once and should not push the others out of the caches. */
#define WILL_READ(x) __builtin_prefetch((const char *)(x) + AHEAD, 0, 0)
#define WILL_WRITE(x) __builtin_prefetch((const char *)(x) + AHEAD, 0, 3)

/* The gradient of a strip as the step takes it: cut to [-limit, limit], scaled, with the decay of the classic form. */
static inline __attribute__((always_inline)) void NAME(gradients)(REAL *restrict d, const REAL *restrict p,
                                                                  const REAL *restrict g, const step_ctx *c) {
  const REAL limit = (REAL)c->p->grad_limit, scale = (REAL)c->p->grad_scale, l2 = (REAL)c->l2;
  FOR_STRIP {
    REAL x = g[j] > limit ? limit : g[j];
    x = x < -limit ? -limit : x;
    d[j] = x * scale + l2 * p[j];
  }
}

/* Moves the averages of a strip towards the new parameters. */
static inline __attribute__((always_inline)) void NAME(average)(REAL *restrict a, const REAL *restrict p,
                                                                const step_ctx *c) {
  const REAL weight = (REAL)c->p->average_weight;
  FOR_STRIP a[j] += weight * (p[j] - a[j]);
}

/* Each of these takes n elements, a multiple of STRIP: x[P] to x[AVERAGE], NULL for what the step does without. */

static void NAME(sgd)(REAL *const *x, int64_t n, const step_ctx *c) {
  REAL *restrict p = x[P], *restrict b = x[FIRST], *restrict a = x[AVERAGE];
  const REAL *restrict g = x[G];
  const ty_p_optim *o = c->p;
  const REAL lr = (REAL)o->lr, momentum = (REAL)o->momentum;
  /* the first step starts the average with the gradient itself */
  const REAL keep = o->step == 1 ? 0 : momentum, fresh = o->step == 1 ? 1 : (REAL)(1 - o->dampening);
  const REAL direct = o->nesterov ? 1 : 0, averaged = o->nesterov ? momentum : 1;
  for (int64_t i = 0; i < n; i += STRIP) {
    REAL d[STRIP];
    WILL_READ(g + i);
    WILL_WRITE(p + i);
    NAME(gradients)(d, p + i, g + i, c);
    if (b) {
      WILL_WRITE(b + i);
      if (o->step == 1) /* whatever it holds, NaN too */
        FOR_STRIP b[i + j] = 0;
      FOR_STRIP {
        REAL mean = keep * b[i + j] + fresh * d[j];
        b[i + j] = mean;
        p[i + j] -= lr * (direct * d[j] + averaged * mean);
      }
    } else {
      FOR_STRIP p[i + j] -= lr * d[j];
    }
    if (a) {
      WILL_WRITE(a + i);
      NAME(average)(a + i, p + i, c);
    }
  }
}

static void NAME(adam)(REAL *const *x, int64_t n, const step_ctx *c) {
  REAL *restrict p = x[P], *restrict m = x[FIRST], *restrict v = x[SECOND], *restrict a = x[AVERAGE];
  const REAL *restrict g = x[G];
  const ty_p_optim *o = c->p;
  const REAL beta1 = (REAL)o->beta1, fresh1 = (REAL)(1 - o->beta1), beta2 = (REAL)o->beta2;
  const REAL fresh2 = (REAL)(1 - o->beta2), rate = (REAL)c->rate, decay = (REAL)c->decay;
  for (int64_t i = 0; i < n; i += STRIP) {
    REAL d[STRIP], s[STRIP];
    WILL_READ(g + i);
    WILL_WRITE(p + i);
    WILL_WRITE(m + i);
    WILL_WRITE(v + i);
    NAME(gradients)(d, p + i, g + i, c);
    FOR_STRIP {
      REAL second = beta2 * v[i + j] + fresh2 * d[j] * d[j];
      s[j] = v[i + j] = second;
      d[j] = m[i + j] = beta1 * m[i + j] + fresh1 * d[j];
    }
    NAME(by_root)(d, s, (REAL)c->widen, (REAL)o->eps);
    FOR_STRIP p[i + j] -= rate * d[j] + decay * p[i + j];
    if (a) {
      WILL_WRITE(a + i);
      NAME(average)(a + i, p + i, c);
    }
  }
}

static void NAME(lion)(REAL *const *x, int64_t n, const step_ctx *c) {
  REAL *restrict p = x[P], *restrict m = x[FIRST], *restrict a = x[AVERAGE];
  const REAL *restrict g = x[G];
  const ty_p_optim *o = c->p;
  const REAL beta1 = (REAL)o->beta1, fresh1 = (REAL)(1 - o->beta1), beta2 = (REAL)o->beta2;
  const REAL fresh2 = (REAL)(1 - o->beta2), lr = (REAL)o->lr, decay = (REAL)c->decay;
  for (int64_t i = 0; i < n; i += STRIP) {
    REAL d[STRIP];
    WILL_READ(g + i);
    WILL_WRITE(p + i);
    WILL_WRITE(m + i);
    NAME(gradients)(d, p + i, g + i, c);
    FOR_STRIP {
      REAL mean = beta1 * m[i + j] + fresh1 * d[j];
      m[i + j] = beta2 * m[i + j] + fresh2 * d[j];
      REAL sign = mean > 0 ? 1 : mean < 0 ? -1 : mean; /* NaN stays */
      p[i + j] -= lr * sign + decay * p[i + j];
    }
    if (a) {
      WILL_WRITE(a + i);
      NAME(average)(a + i, p + i, c);
    }
  }
}

/* x[AVERAGE] towards x[P], which stays. */
static void NAME(lerp)(REAL *const *x, int64_t n, const step_ctx *c) {
  for (int64_t i = 0; i < n; i += STRIP) {
    WILL_READ(x[P] + i);
    WILL_WRITE(x[AVERAGE] + i);
    NAME(average)(x[AVERAGE] + i, x[P] + i, c);
  }
}

/* Any n: the rest that fills no strip goes through a padded copy, so that each element is computed alike. */
static void NAME(run)(void (*step)(REAL *const *, int64_t, const step_ctx *), REAL *const *x, int64_t n,
                      const step_ctx *c) {
  int64_t whole = n / STRIP * STRIP, rest = n - whole;
  if (whole) step(x, whole, c);
  if (!rest) return;
  REAL strip[ROLES][STRIP] = { { 0 } }, *tail[ROLES];
  for (int r = 0; r < ROLES; r++) {
    tail[r] = x[r] ? strip[r] : NULL;
    if (x[r]) memcpy(strip[r], x[r] + whole, (size_t)rest * sizeof(REAL));
  }
  step(tail, STRIP, c);
  for (int r = 0; r < ROLES; r++)
    if (x[r] && r != G) memcpy(x[r] + whole, strip[r], (size_t)rest * sizeof(REAL));
}

static double NAME(norm)(const REAL *restrict x, int64_t n, double p, double limit) {
  double s = 0;
  if (p == 2 && isinf(limit)) {
    _Pragma("omp simd reduction(+ : s)") for (int64_t i = 0; i < n; i++) s += (double)x[i] * (double)x[i];
    return s;
  }
  double nan = 0;
  if (isinf(p)) s = p > 0 ? 0 : INFINITY;
  for (int64_t i = 0; i < n; i++) {
    double y = (double)MAGNITUDE(x[i]);
    if (y > limit) y = limit;
    if (isinf(p)) {
      if (y != y) nan = y;
      if (p > 0 ? y > s : y < s) s = y;
    } else {
      s += p == 2 ? y * y : p == 1 ? y : p == 0 ? y != 0 : pow(y, p);
    }
  }
  return nan != 0 ? nan : s;
}

#undef WILL_READ
#undef WILL_WRITE
