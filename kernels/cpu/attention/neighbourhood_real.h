/* Neighbourhood attention for one element type; included by neighbourhood.c with REAL and NAME(x) set. */

typedef struct NAME(attend_context) {
  const neighbourhood *n;
  const REAL *q, *k, *v, *g, *y, *lse; /* the last three: of the backward pass */
  REAL *out, *out_lse, *dq, *dk, *dv;
} NAME(attend_context);

static inline REAL NAME(dot)(const REAL *restrict a, const REAL *restrict b, int64_t n) {
  REAL sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

static inline void NAME(add_scaled)(REAL *restrict to, const REAL *restrict from, REAL by, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) to[i] += by * from[i];
}

/* A task is a row of the grid of a head. */
static void NAME(attend_rows)(void *context, int64_t begin, int64_t end) {
  const NAME(attend_context) *c = context;
  const neighbourhood *n = c->n;
  const REAL scale = (REAL)n->scale;
  for (int64_t task = begin; task < end; task++) {
    const int64_t head = task / n->rows * n->rows * n->columns, row = task % n->rows;
    const int64_t top = ty_neighbours_begin(row, n->rows, n->window[0]);
    for (int64_t column = 0; column < n->columns; column++) {
      const int64_t at = task * n->columns + column, left = ty_neighbours_begin(column, n->columns, n->window[1]);
      const REAL *q = c->q + at * n->d;
      REAL *out = c->out + at * n->dv, most = -(REAL)INFINITY, sum = 0, score[KEYS];
      for (int64_t e = 0; e < n->dv; e++) out[e] = 0;
      for (int64_t i = top; i < top + n->window[0]; i++)
        for (int64_t first = 0; first < n->window[1]; first += KEYS) {
          const int64_t keys = n->window[1] - first < KEYS ? n->window[1] - first : KEYS;
          const int64_t key = head + i * n->columns + left + first;
          REAL larger = most;
          for (int64_t j = 0; j < keys; j++) {
            score[j] = scale * NAME(dot)(q, c->k + (key + j) * n->d, n->d);
            larger = score[j] > larger ? score[j] : larger;
          }
          if (larger > most) { /* what has been summed so far counts less */
            const REAL less = most == -(REAL)INFINITY ? 0 : NAME(ty_exp_weight)(most - larger);
            for (int64_t e = 0; e < n->dv; e++) out[e] *= less;
            sum *= less, most = larger;
          }
          for (int64_t j = 0; j < keys; j++) score[j] = NAME(ty_exp_weight)(score[j] - most);
          for (int64_t j = 0; j < keys; j++) {
            sum += score[j];
            NAME(add_scaled)(out, c->v + (key + j) * n->dv, score[j], n->dv);
          }
        }
      const REAL share = 1 / sum;
      for (int64_t e = 0; e < n->dv; e++) out[e] *= share;
      c->out_lse[at] = most + (REAL)log((double)sum);
    }
  }
}

static void NAME(attend)(const neighbourhood *n, void *out, void *lse) {
  NAME(attend_context) c = { .n = n, .q = n->q->data, .k = n->k->data, .v = n->v->data };
  c.out = out, c.out_lse = lse;
  if (n->columns == 0) return;
  ty_parallel_for(n->heads * n->rows, 1 + 16384 / (n->columns * n->window[0] * n->window[1] * (n->d + n->dv) + 1),
                  NAME(attend_rows), &c);
}

/* A task is a head: its keys get from all of its queries, in their order. */
static void NAME(gradient_heads)(void *context, int64_t begin, int64_t end) {
  const NAME(attend_context) *c = context;
  const neighbourhood *n = c->n;
  const int64_t places = n->rows * n->columns;
  const REAL scale = (REAL)n->scale;
  for (int64_t task = begin; task < end; task++) {
    memset(c->dq + task * places * n->d, 0, (size_t)(places * n->d) * sizeof(REAL));
    memset(c->dk + task * places * n->d, 0, (size_t)(places * n->d) * sizeof(REAL));
    memset(c->dv + task * places * n->dv, 0, (size_t)(places * n->dv) * sizeof(REAL));
    for (int64_t place = 0; place < places; place++) {
      const int64_t at = task * places + place;
      const int64_t top = ty_neighbours_begin(place / n->columns, n->rows, n->window[0]);
      const int64_t left = ty_neighbours_begin(place % n->columns, n->columns, n->window[1]);
      const REAL *q = c->q + at * n->d, *g = c->g + at * n->dv;
      REAL *dq = c->dq + at * n->d;
      const REAL delta = NAME(dot)(g, c->y + at * n->dv, n->dv), lse = c->lse[at];
      for (int64_t i = top; i < top + n->window[0]; i++)
        for (int64_t key = task * places + i * n->columns + left, last = key + n->window[1]; key < last; key++) {
          const REAL *k = c->k + key * n->d;
          const REAL weight = NAME(ty_exp_weight)(scale * NAME(dot)(q, k, n->d) - lse);
          const REAL slope = weight * scale * (NAME(dot)(g, c->v + key * n->dv, n->dv) - delta);
          NAME(add_scaled)(dq, k, slope, n->d);
          NAME(add_scaled)(c->dk + key * n->d, q, slope, n->d);
          NAME(add_scaled)(c->dv + key * n->dv, g, weight, n->dv);
        }
    }
  }
}

/* in: g, y, lse; out: dq, dk, dv. */
static void NAME(gradients)(const neighbourhood *n, const void *const *in, void *const *out) {
  NAME(attend_context)
  c = { n, n->q->data, n->k->data, n->v->data, in[0], in[1], in[2], NULL, NULL, out[0], out[1], out[2] };
  ty_parallel_for(n->heads, 1, NAME(gradient_heads), &c);
}
