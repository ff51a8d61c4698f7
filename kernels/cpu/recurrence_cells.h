/* Template (no guard: recurrence.c includes it once per element type): the gates of n units of one row and one step,
 * forward and back. u is the recurrent product, gate by gate in `apart` elements; x, bias and what is saved lie d apart
 * per gate; the planes of the states, of all rows, `plane` apart. */

#define sigmoid FN(ty_sigmoid)
#define tanh_of FN(ty_tanh)
#define exp_of FN(ty_exp)
#define log_sigmoid FN(ty_log_sigmoid)
#define forward_unit FN(forward_unit)
#define backward_unit FN(backward_unit)

typedef struct forward_unit {
  const REAL *restrict u, *restrict x, *restrict bias;
  const REAL *restrict h;               /* before the step; GRU's alone */
  REAL *restrict state, *restrict y;    /* state: from c on, before and after the step */
  REAL *restrict kept, *restrict saved; /* the same for the way back */
  int64_t d, plane;
} forward_unit;

#define GATE(i) (s->u[(i)*LANES + e] + s->x[(i)*s->d + e] + s->bias[(i)*s->d + e])

static inline __attribute__((always_inline)) void FN(lstm)(const forward_unit *s, const int64_t n, const bool save) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL i = sigmoid(GATE(0)), f = sigmoid(GATE(1)), g = tanh_of(GATE(2)), o = sigmoid(GATE(3));
    REAL c = f * s->state[e] + i * g;
    s->state[e] = c;
    s->y[e] = o * tanh_of(c);
    if (save) {
      s->kept[e] = c;
      s->saved[e] = i, s->saved[s->d + e] = f, s->saved[2 * s->d + e] = g, s->saved[3 * s->d + e] = o;
    }
  }
}

static inline __attribute__((always_inline)) void FN(gru)(const forward_unit *s, const int64_t n, const bool save) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL r = sigmoid(GATE(0)), z = sigmoid(GATE(1)), q = s->u[2 * LANES + e] + s->bias[2 * s->d + e];
    REAL a = tanh_of(s->x[2 * s->d + e] + r * q);
    s->y[e] = a + z * (s->h[e] - a);
    if (save) s->saved[e] = r, s->saved[s->d + e] = z, s->saved[2 * s->d + e] = a, s->saved[3 * s->d + e] = q;
  }
}

/* m keeps the exponentials in range; what it is does not change h. */
static inline __attribute__((always_inline)) void FN(slstm)(const forward_unit *s, const int64_t n, const bool save,
                                                            const bool exponential) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL i = GATE(0), f = GATE(1), z = tanh_of(GATE(2)), o = sigmoid(GATE(3));
    REAL before = (exponential ? f : log_sigmoid(f)) + s->state[2 * s->plane + e];
    REAL m = i > before ? i : before, in = exp_of(i - m), forget = exp_of(before - m);
    REAL c = forget * s->state[e] + in * z, norm = forget * s->state[s->plane + e] + in;
    s->state[e] = c, s->state[s->plane + e] = norm, s->state[2 * s->plane + e] = m;
    s->y[e] = o * (c / norm);
    if (save) {
      s->kept[e] = c, s->kept[s->plane + e] = norm, s->kept[2 * s->plane + e] = m;
      s->saved[e] = i, s->saved[s->d + e] = f, s->saved[2 * s->d + e] = z, s->saved[3 * s->d + e] = o;
    }
  }
}

typedef struct backward_unit {
  const REAL *restrict g;                      /* of y at this step */
  const REAL *restrict h, *restrict before;    /* h and, from c on, the states before the step */
  const REAL *restrict after, *restrict saved; /* the states after it */
  REAL *restrict dstate, *restrict dx,
                             *restrict du; /* dstate: of h and the states, after the step and then before it */
  int64_t d, plane;
} backward_unit;

static inline void FN(lstm_back)(const backward_unit *s, const int64_t n) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL i = s->saved[e], f = s->saved[s->d + e], g = s->saved[2 * s->d + e], o = s->saved[3 * s->d + e];
    REAL q = tanh_of(s->after[e]), dh = s->dstate[e] + s->g[e];
    REAL dc = s->dstate[s->plane + e] + dh * o * (1 - q * q);
    s->dx[e] = dc * g * (i * (1 - i));
    s->dx[s->d + e] = dc * s->before[e] * (f * (1 - f));
    s->dx[2 * s->d + e] = dc * i * (1 - g * g);
    s->dx[3 * s->d + e] = dh * q * (o * (1 - o));
    s->dstate[e] = 0;
    s->dstate[s->plane + e] = dc * f;
  }
}

static inline void FN(gru_back)(const backward_unit *s, const int64_t n) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL r = s->saved[e], z = s->saved[s->d + e], a = s->saved[2 * s->d + e], q = s->saved[3 * s->d + e];
    REAL dh = s->dstate[e] + s->g[e], da = dh * (1 - z) * (1 - a * a);
    REAL dr = da * q * (r * (1 - r)), dz = dh * (s->h[e] - a) * (z * (1 - z));
    s->dx[e] = dr, s->dx[s->d + e] = dz, s->dx[2 * s->d + e] = da;
    s->du[e] = dr, s->du[s->d + e] = dz, s->du[2 * s->d + e] = da * r;
    s->dstate[e] = dh * z;
  }
}

static inline __attribute__((always_inline)) void FN(slstm_back)(const backward_unit *s, const int64_t n,
                                                                 const bool exponential) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL i = s->saved[e], f = s->saved[s->d + e], z = s->saved[2 * s->d + e], o = s->saved[3 * s->d + e];
    REAL c = s->after[e], norm = s->after[s->plane + e], m = s->after[2 * s->plane + e];
    REAL c0 = s->before[e], norm0 = s->before[s->plane + e];
    REAL before = (exponential ? f : log_sigmoid(f)) + s->before[2 * s->plane + e];
    REAL in = exp_of(i - m), forget = exp_of(before - m), ratio = c / norm;
    REAL dh = s->dstate[e] + s->g[e], dr = dh * o / norm;
    REAL dc = s->dstate[s->plane + e] + dr, dnorm = s->dstate[2 * s->plane + e] - dr * ratio;
    REAL di = (dc * z + dnorm) * in, df = (dc * c0 + dnorm * norm0) * forget;
    REAL dm = s->dstate[3 * s->plane + e] - di - df;
    REAL share = i > before ? (REAL)1 : i < before ? (REAL)0 : (REAL)0.5; /* of the maximum; at a tie both have it */
    df += dm * (1 - share);
    s->dx[e] = di + dm * share;
    s->dx[s->d + e] = exponential ? df : df * sigmoid(-f);
    s->dx[2 * s->d + e] = dc * in * (1 - z * z);
    s->dx[3 * s->d + e] = dh * ratio * (o * (1 - o));
    s->dstate[e] = 0;
    s->dstate[s->plane + e] = dc * forget, s->dstate[2 * s->plane + e] = dnorm * forget;
    s->dstate[3 * s->plane + e] = df;
  }
}

#undef GATE
#undef sigmoid
#undef tanh_of
#undef exp_of
#undef log_sigmoid
