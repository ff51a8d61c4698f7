/* Template (no guard: recurrence.c includes it once per element type): the gates of n units of one row and one step,
 * forward and back. u is the recurrent product, gate by gate in `apart` elements; x, bias and what is saved lie d apart
 * per gate; the planes of the states, of all rows, `plane` apart. The functions are flat: a call that is left in a loop
 * would keep it from becoming vectors. */

#define FLAT static __attribute__((noinline, flatten)) void

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
  REAL *restrict kept, *restrict saved; /* for the way back */
  int64_t d, plane, apart, kept_plane;  /* apart: d, in what is saved */
} forward_unit;

#define GATE(i) (s->u[(i)*LANES + e] + s->x[(i)*s->d + e] + s->bias[(i)*s->d + e])

static inline __attribute__((always_inline)) void FN(lstm)(const forward_unit *s, const int64_t n) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL i = sigmoid(GATE(0)), f = sigmoid(GATE(1)), g = tanh_of(GATE(2)), o = sigmoid(GATE(3));
    REAL c = f * s->state[e] + i * g;
    s->state[e] = c;
    s->y[e] = o * tanh_of(c);
    s->kept[e] = c;
    s->saved[e] = i, s->saved[s->apart + e] = f, s->saved[2 * s->apart + e] = g, s->saved[3 * s->apart + e] = o;
  }
}

static inline __attribute__((always_inline)) void FN(gru)(const forward_unit *s, const int64_t n) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL r = sigmoid(GATE(0)), z = sigmoid(GATE(1)), q = s->u[2 * LANES + e] + s->bias[2 * s->d + e];
    REAL a = tanh_of(s->x[2 * s->d + e] + r * q);
    s->y[e] = a + z * (s->h[e] - a);
    s->saved[e] = r, s->saved[s->apart + e] = z, s->saved[2 * s->apart + e] = a, s->saved[3 * s->apart + e] = q;
  }
}

/* m keeps the exponentials in range; what it is does not change h. */
static inline __attribute__((always_inline)) void FN(slstm)(const forward_unit *s, const int64_t n,
                                                            const bool exponential) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL i = GATE(0), f = GATE(1), z = tanh_of(GATE(2)), o = sigmoid(GATE(3));
    REAL before = (exponential ? f : log_sigmoid(f)) + s->state[2 * s->plane + e];
    REAL m = i > before ? i : before, in = exp_of(i - m), forget = exp_of(before - m);
    REAL c = forget * s->state[e] + in * z, norm = forget * s->state[s->plane + e] + in;
    s->state[e] = c, s->state[s->plane + e] = norm, s->state[2 * s->plane + e] = m;
    s->y[e] = o * (c / norm);
    s->kept[e] = c, s->kept[s->kept_plane + e] = norm, s->kept[2 * s->kept_plane + e] = m;
    s->saved[e] = i, s->saved[s->apart + e] = f, s->saved[2 * s->apart + e] = z, s->saved[3 * s->apart + e] = o;
  }
}

/* Of a whole vector of units, and of fewer. */
#define WHOLE_AND_PART(name, call)               \
  FLAT FN(name##_whole)(const forward_unit *s) { \
    const int64_t n = LANES;                     \
    call;                                        \
  }                                              \
  FLAT FN(name##_part)(const forward_unit *s, int64_t n) { call; }
WHOLE_AND_PART(lstm, FN(lstm)(s, n))
WHOLE_AND_PART(gru, FN(gru)(s, n))
WHOLE_AND_PART(slstm, FN(slstm)(s, n, false))
WHOLE_AND_PART(slstm_exp, FN(slstm)(s, n, true))
#undef WHOLE_AND_PART

static void FN(cell_forward)(ty_cell cell, const forward_unit *s, int64_t n) {
  bool whole = n == LANES;
  switch (cell) {
    case TY_LSTM: whole ? FN(lstm_whole)(s) : FN(lstm_part)(s, n); break;
    case TY_GRU: whole ? FN(gru_whole)(s) : FN(gru_part)(s, n); break;
    case TY_SLSTM: whole ? FN(slstm_whole)(s) : FN(slstm_part)(s, n); break;
    case TY_SLSTM_EXP: whole ? FN(slstm_exp_whole)(s) : FN(slstm_exp_part)(s, n); break;
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

FLAT FN(lstm_back)(const backward_unit *s, const int64_t n) {
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

FLAT FN(gru_back)(const backward_unit *s, const int64_t n) {
  _Pragma("omp simd") for (int64_t e = 0; e < n; e++) {
    REAL r = s->saved[e], z = s->saved[s->d + e], a = s->saved[2 * s->d + e], q = s->saved[3 * s->d + e];
    REAL dh = s->dstate[e] + s->g[e], da = dh * (1 - z) * (1 - a * a);
    REAL dr = da * q * (r * (1 - r)), dz = dh * (s->h[e] - a) * (z * (1 - z));
    s->dx[e] = dr, s->dx[s->d + e] = dz, s->dx[2 * s->d + e] = da;
    s->du[e] = dr, s->du[s->d + e] = dz, s->du[2 * s->d + e] = da * r;
    s->dstate[e] = dh * z;
  }
}

static inline __attribute__((always_inline)) void FN(slstm_back_of)(const backward_unit *s, const int64_t n,
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

FLAT FN(slstm_back)(const backward_unit *s, const int64_t n) { FN(slstm_back_of)(s, n, false); }
FLAT FN(slstm_exp_back)(const backward_unit *s, const int64_t n) { FN(slstm_back_of)(s, n, true); }

static void FN(cell_backward)(ty_cell cell, const backward_unit *s, int64_t n) {
  switch (cell) {
    case TY_LSTM: FN(lstm_back)(s, n); break;
    case TY_GRU: FN(gru_back)(s, n); break;
    case TY_SLSTM: FN(slstm_back)(s, n); break;
    case TY_SLSTM_EXP: FN(slstm_exp_back)(s, n); break;
  }
}

#undef FLAT
#undef GATE
#undef sigmoid
#undef tanh_of
#undef exp_of
#undef log_sigmoid
