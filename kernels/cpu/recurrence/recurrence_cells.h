/* Template (no guard: recurrence.c includes it once per element type): the gates of n units of some rows and one step,
 * forward and back. u is the recurrent product, gate by gate LANES apart; x, bias and what is saved lie d apart per gate;
 * the planes of the states, of all rows, `plane` apart; NAME_row is from a row to the next. NUMBER is one element of
 * loops that the compiler makes vectors of, or, with GATE_VECTORS, a vector: the functions are flat, as a call that is
 * left in a loop would keep it from becoming vectors. */

#define FLAT static __attribute__((noinline, flatten)) void
#define EACH_ROW static inline __attribute__((always_inline)) void

#ifdef GATE_VECTORS
#define NUMBER __m512
#define EACH_UNIT for (int64_t e = 0; e < n; e += LANES)
#define LOAD(p) (n % LANES == 0 ? _mm512_loadu_ps((p) + e) : _mm512_maskz_loadu_ps(row_mask(e, n), (p) + e))
#define STORE(p, x) (n % LANES == 0 ? _mm512_storeu_ps((p) + e, x) : _mm512_mask_storeu_ps((p) + e, row_mask(e, n), x))
#define sigmoid gate_sigmoid
#define tanh_of gate_tanh
#define exp_of ty_exp_weights
#define log_sigmoid gate_log_sigmoid
#define max_of(a, b) _mm512_max_ps(a, b)
#define share_of_max gate_share
#else
#define NUMBER REAL
#define EACH_UNIT _Pragma("omp simd") for (int64_t e = 0; e < n; e++)
#define LOAD(p) (p)[e]
#define STORE(p, x) ((p)[e] = (x))
#define sigmoid FN(ty_sigmoid)
#define tanh_of FN(ty_tanh)
#define exp_of FN(ty_exp)
#define log_sigmoid(x, slope) (*(slope) = sigmoid(-(x)), FN(ty_log_sigmoid)(x))
#define max_of(a, b) ((a) > (b) ? (a) : (b))
#define share_of_max(a, b) ((a) > (b) ? (REAL)1 : (a) < (b) ? (REAL)0 : (REAL)0.5) /* at a tie both have half */
#endif

#define forward_unit FN(forward_unit)
#define backward_unit FN(backward_unit)

typedef struct forward_unit {
  REAL *restrict u; /* the product; between the two passes over the rows, what the first leaves for the second */
  const REAL *restrict x, *restrict bias;
  const REAL *restrict h;               /* before the step; GRU's alone */
  REAL *restrict state, *restrict y;    /* state: from c on, before and after the step */
  REAL *restrict kept, *restrict saved; /* for the way back */
  int64_t d, plane, apart, kept_plane;  /* apart: d, in what is saved */
  int64_t rows, u_row, x_row, row, kept_row, saved_row;
} forward_unit;

/* The logarithm of the forget gate, and its slope. */
#define log_forget(f, slope) (exponential ? (*(slope) = (NUMBER){ 0 } + 1, f) : log_sigmoid(f, slope))

#define GATE(i) (LOAD(s.u + (i)*LANES) + LOAD(s.x + (i)*s.d) + LOAD(s.bias + (i)*s.d))
#define SAVE(i, value) STORE(s.saved + (i)*s.apart, value)

/* A cell is two functions, each of which goes over all rows: its chains of dependent steps are short enough for the
 * processor to work on several rows at a time. */
EACH_ROW FN(lstm_gates)(const forward_unit s, const int64_t n) {
  EACH_UNIT {
    NUMBER i = sigmoid(GATE(0)), f = sigmoid(GATE(1)), g = tanh_of(GATE(2)), o = sigmoid(GATE(3));
    NUMBER c = f * LOAD(s.state) + i * g;
    STORE(s.state, c);
    STORE(s.kept, c);
    STORE(s.u + 3 * LANES, o);
    SAVE(0, i), SAVE(1, f), SAVE(2, g), SAVE(3, o);
  }
}

EACH_ROW FN(lstm_rest)(const forward_unit s, const int64_t n) {
  EACH_UNIT STORE(s.y, LOAD(s.u + 3 * LANES) * tanh_of(LOAD(s.state)));
}

EACH_ROW FN(gru_gates)(const forward_unit s, const int64_t n) {
  EACH_UNIT {
    NUMBER r = sigmoid(GATE(0)), z = sigmoid(GATE(1)), q = LOAD(s.u + 2 * LANES) + LOAD(s.bias + 2 * s.d);
    STORE(s.u + LANES, z);
    STORE(s.u + 2 * LANES, LOAD(s.x + 2 * s.d) + r * q);
    SAVE(0, r), SAVE(1, z), SAVE(3, q);
  }
}

EACH_ROW FN(gru_rest)(const forward_unit s, const int64_t n) {
  EACH_UNIT {
    NUMBER a = tanh_of(LOAD(s.u + 2 * LANES));
    STORE(s.y, a + LOAD(s.u + LANES) * (LOAD(s.h) - a));
    SAVE(2, a);
  }
}

EACH_ROW FN(slstm_gates_of)(const forward_unit s, const int64_t n, const bool exponential) {
  EACH_UNIT {
    NUMBER i = GATE(0), f = GATE(1), z = tanh_of(GATE(2)), o = sigmoid(GATE(3)), slope;
    STORE(s.u, i), STORE(s.u + LANES, log_forget(f, &slope)), STORE(s.u + 2 * LANES, z), STORE(s.u + 3 * LANES, o);
    SAVE(0, i), SAVE(1, f), SAVE(2, z), SAVE(3, o);
  }
}

EACH_ROW FN(slstm_gates)(const forward_unit s, const int64_t n) { FN(slstm_gates_of)(s, n, false); }
EACH_ROW FN(slstm_exp_gates)(const forward_unit s, const int64_t n) { FN(slstm_gates_of)(s, n, true); }

/* m keeps the exponentials in range; what it is does not change h. */
EACH_ROW FN(slstm_rest)(const forward_unit s, const int64_t n) {
  EACH_UNIT {
    NUMBER i = LOAD(s.u), before = LOAD(s.u + LANES) + LOAD(s.state + 2 * s.plane), m = max_of(i, before);
    NUMBER in = exp_of(i - m), forget = exp_of(before - m);
    NUMBER c = forget * LOAD(s.state) + in * LOAD(s.u + 2 * LANES), norm = forget * LOAD(s.state + s.plane) + in;
    STORE(s.state, c), STORE(s.state + s.plane, norm), STORE(s.state + 2 * s.plane, m);
    STORE(s.y, LOAD(s.u + 3 * LANES) * (c / norm));
    STORE(s.kept, c), STORE(s.kept + s.kept_plane, norm), STORE(s.kept + 2 * s.kept_plane, m);
  }
}

EACH_ROW FN(forward_next)(forward_unit *s) {
  s->u += s->u_row, s->x += s->x_row, s->h += s->row, s->state += s->row, s->y += s->row;
  s->kept += s->kept_row, s->saved += s->saved_row;
}

/* Of a whole vector of units, and of fewer. */
#define ALL_ROWS(cell, rest)                                                           \
  EACH_ROW FN(cell##_rows)(const forward_unit *first, const int64_t n) {               \
    forward_unit s = *first;                                                           \
    for (int64_t r = 0; r < s.rows; r++, FN(forward_next)(&s)) FN(cell##_gates)(s, n); \
    s = *first;                                                                        \
    for (int64_t r = 0; r < s.rows; r++, FN(forward_next)(&s)) FN(rest)(s, n);         \
  }                                                                                    \
  FLAT FN(cell##_forward)(const forward_unit *s, int64_t n) {                          \
    if (n == LANES) FN(cell##_rows)(s, LANES);                                         \
    else FN(cell##_rows)(s, n);                                                        \
  }
ALL_ROWS(lstm, lstm_rest)
ALL_ROWS(gru, gru_rest)
ALL_ROWS(slstm, slstm_rest)
ALL_ROWS(slstm_exp, slstm_rest)
#undef ALL_ROWS
#undef GATE
#undef SAVE

static void FN(cell_forward)(ty_cell cell, const forward_unit *s, int64_t n) {
  switch (cell) {
    case TY_LSTM: FN(lstm_forward)(s, n); break;
    case TY_GRU: FN(gru_forward)(s, n); break;
    case TY_SLSTM: FN(slstm_forward)(s, n); break;
    case TY_SLSTM_EXP: FN(slstm_exp_forward)(s, n); break;
  }
}

typedef struct backward_unit {
  const REAL *restrict g;                      /* of y at this step */
  const REAL *restrict h, *restrict before;    /* h and, from c on, the states before the step */
  const REAL *restrict after, *restrict saved; /* the states after it */
  REAL *restrict dstate, *restrict dx,
                             *restrict du; /* dstate: of h and the states, after the step and then before it */
  int64_t d, plane;
  int64_t rows, g_row, row, saved_row, dx_row;
} backward_unit;

#define SAVED(i) LOAD(s.saved + (i)*s.d)
#define DX(i, value) STORE(s.dx + (i)*s.d, value)
#define DU(i, value) STORE(s.du + (i)*s.d, value)

EACH_ROW FN(lstm_back)(const backward_unit s, const int64_t n) {
  EACH_UNIT {
    NUMBER i = SAVED(0), f = SAVED(1), g = SAVED(2), o = SAVED(3);
    NUMBER q = tanh_of(LOAD(s.after)), dh = LOAD(s.dstate) + LOAD(s.g);
    NUMBER dc = LOAD(s.dstate + s.plane) + dh * o * (1 - q * q);
    DX(0, dc * g * (i * (1 - i)));
    DX(1, dc * LOAD(s.before) * (f * (1 - f)));
    DX(2, dc * i * (1 - g * g));
    DX(3, dh * q * (o * (1 - o)));
    STORE(s.dstate, (NUMBER){ 0 });
    STORE(s.dstate + s.plane, dc * f);
  }
}

EACH_ROW FN(gru_back)(const backward_unit s, const int64_t n) {
  EACH_UNIT {
    NUMBER r = SAVED(0), z = SAVED(1), a = SAVED(2), q = SAVED(3);
    NUMBER dh = LOAD(s.dstate) + LOAD(s.g), da = dh * (1 - z) * (1 - a * a);
    NUMBER dr = da * q * (r * (1 - r)), dz = dh * (LOAD(s.h) - a) * (z * (1 - z));
    DX(0, dr), DX(1, dz), DX(2, da);
    DU(0, dr), DU(1, dz), DU(2, da * r);
    STORE(s.dstate, dh * z);
  }
}

EACH_ROW FN(slstm_back_of)(const backward_unit s, const int64_t n, const bool exponential) {
  EACH_UNIT {
    NUMBER i = SAVED(0), f = SAVED(1), z = SAVED(2), o = SAVED(3), slope;
    NUMBER c = LOAD(s.after), norm = LOAD(s.after + s.plane), m = LOAD(s.after + 2 * s.plane);
    NUMBER c0 = LOAD(s.before), norm0 = LOAD(s.before + s.plane);
    NUMBER before = log_forget(f, &slope) + LOAD(s.before + 2 * s.plane);
    NUMBER in = exp_of(i - m), forget = exp_of(before - m), ratio = c / norm;
    NUMBER dh = LOAD(s.dstate) + LOAD(s.g), dr = dh * o / norm;
    NUMBER dc = LOAD(s.dstate + s.plane) + dr, dnorm = LOAD(s.dstate + 2 * s.plane) - dr * ratio;
    NUMBER di = (dc * z + dnorm) * in, df = (dc * c0 + dnorm * norm0) * forget;
    NUMBER dm = LOAD(s.dstate + 3 * s.plane) - di - df, share = share_of_max(i, before);
    df += dm * (1 - share);
    DX(0, di + dm * share);
    DX(1, df * slope);
    DX(2, dc * in * (1 - z * z));
    DX(3, dh * ratio * (o * (1 - o)));
    STORE(s.dstate, (NUMBER){ 0 });
    STORE(s.dstate + s.plane, dc * forget), STORE(s.dstate + 2 * s.plane, dnorm * forget);
    STORE(s.dstate + 3 * s.plane, df);
  }
}

EACH_ROW FN(slstm_back)(const backward_unit s, const int64_t n) { FN(slstm_back_of)(s, n, false); }
EACH_ROW FN(slstm_exp_back)(const backward_unit s, const int64_t n) { FN(slstm_back_of)(s, n, true); }

/* Of whole vectors of units, and of others. */
#define ALL_ROWS(cell)                                                                           \
  EACH_ROW FN(cell##_rows)(backward_unit s, const int64_t n) {                                   \
    for (int64_t left = s.rows; left > 0; left--) {                                              \
      FN(cell)(s, n);                                                                            \
      s.g += s.g_row, s.h += s.row, s.before += s.row, s.after += s.row, s.saved += s.saved_row; \
      s.dstate += s.row, s.dx += s.dx_row, s.du += s.dx_row;                                     \
    }                                                                                            \
  }                                                                                              \
  FLAT FN(cell##_all)(const backward_unit *s, int64_t n) {                                       \
    if (n % LANES == 0) FN(cell##_rows)(*s, n / LANES * LANES);                                  \
    else FN(cell##_rows)(*s, n);                                                                 \
  }
ALL_ROWS(lstm_back)
ALL_ROWS(gru_back)
ALL_ROWS(slstm_back)
ALL_ROWS(slstm_exp_back)
#undef ALL_ROWS
#undef SAVED
#undef DX
#undef DU

static void FN(cell_backward)(ty_cell cell, const backward_unit *s, int64_t n) {
  switch (cell) {
    case TY_LSTM: FN(lstm_back_all)(s, n); break;
    case TY_GRU: FN(gru_back_all)(s, n); break;
    case TY_SLSTM: FN(slstm_back_all)(s, n); break;
    case TY_SLSTM_EXP: FN(slstm_exp_back_all)(s, n); break;
  }
}

#undef FLAT
#undef EACH_ROW
#undef NUMBER
#undef EACH_UNIT
#undef LOAD
#undef STORE
#undef sigmoid
#undef tanh_of
#undef exp_of
#undef log_sigmoid
#undef max_of
#undef share_of_max
#undef log_forget
