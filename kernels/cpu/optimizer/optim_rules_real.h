/* Template (no guard: optim.c includes it once per element type): the rules of adaptive_ on runs of elements, as
 * optim_real.h has those of the other steps. */

/* In the body j counts the elements of a strip; d is the gradient, p the parameter; s, t and u are the states first,
 * second and third. */
#define RULE(name, ...)                                                                                      \
  static void NAME(name)(REAL *const *x, int64_t n, const step_ctx *c) {                                     \
    const ty_p_optim *o = c->p;                                                                              \
    const REAL rate = (REAL)c->factors.rate, other = (REAL)c->factors.other, widen = (REAL)c->factors.widen; \
    const REAL beta1 = (REAL)o->beta1, fresh1 = (REAL)(1 - o->beta1), beta2 = (REAL)o->beta2;                \
    const REAL fresh2 = (REAL)(1 - o->beta2), eps = (REAL)o->eps;                                            \
    const REAL low = (REAL)o->low, high = (REAL)o->high, decay = (REAL)c->decay;                             \
    (void)rate, (void)other, (void)widen, (void)beta1, (void)fresh1, (void)beta2, (void)fresh2, (void)eps;   \
    (void)low, (void)high, (void)decay;                                                                      \
    for (int64_t i = 0; i < n; i += STRIP) {                                                                 \
      REAL d[STRIP];                                                                                         \
      REAL *restrict p = x[P] + i, *restrict s = x[FIRST] + i;                                               \
      REAL *restrict t = x[SECOND] ? x[SECOND] + i : NULL, *restrict u = x[THIRD] ? x[THIRD] + i : NULL;     \
      NAME(gradients)(d, p, x[G] + i, c);                                                                    \
      (void)t, (void)u;                                                                                      \
      __VA_ARGS__                                                                                            \
      if (x[AVERAGE]) NAME(average)(x[AVERAGE] + i, p, c);                                                   \
    }                                                                                                        \
  }

/* clang-format off */
/* Tieleman and Hinton 2012; centered: Graves 2013. */
RULE(rmsprop,
  REAL r[STRIP];
  FOR_STRIP r[j] = s[j] = beta2 * s[j] + fresh2 * d[j] * d[j];
  if (u) {
    FOR_STRIP {
      u[j] += fresh2 * (d[j] - u[j]);
      r[j] -= u[j] * u[j];
    }
  }
  NAME(by_root)(d, r, 1, eps);
  if (t) {
    FOR_STRIP d[j] = t[j] = beta1 * t[j] + d[j];
  }
  FOR_STRIP p[j] -= rate * d[j];
)

/* Duchi et al. 2011. */
RULE(adagrad,
  FOR_STRIP s[j] += d[j] * d[j];
  NAME(by_root)(d, s, 1, eps);
  FOR_STRIP p[j] -= rate * d[j];
)

/* Zeiler 2012. */
RULE(adadelta,
  FOR_STRIP {
    s[j] = beta2 * s[j] + fresh2 * d[j] * d[j];
    d[j] *= ROOT(t[j] + eps) / ROOT(s[j] + eps);
    t[j] = beta2 * t[j] + fresh2 * d[j] * d[j];
    p[j] -= rate * d[j];
  }
)

/* Kingma and Ba 2015, algorithm 2; NaN of the gradient stays. */
RULE(adamax,
  FOR_STRIP {
    const REAL old = beta2 * t[j], now = MAGNITUDE(d[j]) + eps;
    s[j] = beta1 * s[j] + fresh1 * d[j];
    t[j] = old > now ? old : now;
    p[j] -= rate * (s[j] / t[j]);
  }
)

RULE(nadam,
  FOR_STRIP {
    s[j] = beta1 * s[j] + fresh1 * d[j];
    t[j] = beta2 * t[j] + fresh2 * d[j] * d[j];
    d[j] = rate * s[j] + other * d[j];
  }
  NAME(by_root)(d, t, widen, eps);
  FOR_STRIP p[j] -= d[j] + decay * p[j];
)

RULE(radam,
  FOR_STRIP {
    s[j] = beta1 * s[j] + fresh1 * d[j];
    t[j] = beta2 * t[j] + fresh2 * d[j] * d[j];
    d[j] = s[j];
  }
  if (c->factors.rooted) NAME(by_root)(d, t, 1, eps);
  FOR_STRIP p[j] -= rate * d[j] + decay * p[j];
)

/* Where the gradient turns, the element waits for a step. Riedmiller and Braun 1993. */
RULE(rprop,
  FOR_STRIP {
    const REAL turn = d[j] * s[j];
    REAL size = t[j] * (turn > 0 ? beta2 : turn < 0 ? beta1 : 1);
    size = size < low ? low : size;
    t[j] = size > high ? high : size;
    s[j] = turn < 0 ? 0 : d[j];
    p[j] -= t[j] * (s[j] > 0 ? 1 : s[j] < 0 ? -1 : s[j]);
  }
)

/* Polyak and Juditsky 1992. */
RULE(asgd,
  FOR_STRIP {
    p[j] -= rate * (d[j] + low * p[j]);
    s[j] = other == 1 ? p[j] : s[j] + other * (p[j] - s[j]);
  }
)
/* clang-format on */

#undef RULE
