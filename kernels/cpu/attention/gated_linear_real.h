/* Template (no guard: gated_linear_attention.c includes it once per element type, after tile.h): what a chunk is made of,
 * its products, and the forward pass. Matrices of tokens by channels are called rows [CHUNK][room], and panels when they
 * are turned, [room][CHUNK]. Behind the tokens that a chunk has, rows are zero and decays one. */

#define add_weighted FN(add_weighted)
#define add_weighted_back FN(add_weighted_back)
#define exp_weight FN(ty_exp_weight)
#define forward FN(forward)
#define forward_chunk FN(forward_chunk)
#define forward_line FN(forward_line)
#define load_chunk FN(load_chunk)
#define load_rows FN(load_rows)
#define load_state FN(load_state)
#define move_state FN(move_state)
#define panel_of FN(panel_of)
#define panel_times FN(panel_times)
#define rows_of FN(rows_of)
#define state_times FN(state_times)
#define step FN(step)
#define step_columns FN(step_columns)
#define store_rows FN(store_rows)
#define store_state FN(store_state)
#define weights FN(weights)
#define weights_block FN(weights_block)
#define work FN(work)
#define work_alloc FN(work_alloc)

/* What a chunk is computed in. */
typedef struct work {
  REAL *q, *k, *v, *go, *decay; /* rows as they are given, q scaled; exp(g) */
  REAL *since, *until;    /* rows: the decay from the chunk's begin to behind a token, and from there to its end */
  REAL *into, *onto;      /* rows: q * since, k * until */
  const REAL *whole;      /* [room_k]: the decay over the chunk, the last row of since */
  REAL *panels[4];        /* [most room][CHUNK] */
  REAL *weights;          /* [CHUNK][CHUNK]: of token j in the result of token i >= j, zero elsewhere */
  REAL *out;              /* rows [CHUNK][most room] */
  REAL *state;            /* [room_k][room_v] */
  REAL *dstate, *running; /* backward: gradient of the state, and [room_k] of g */
  REAL *spans, *scores;   /* backward: states at the end of spans, [chunks][CHUNK][CHUNK] products of go and v */
} work;

/* `more`: elements besides. NULL with c->failed set. */
static REAL *work_alloc(context *c, int64_t more, work *w, size_t *bytes) {
  const plan *p = c->plan;
  int64_t k = p->room_k, v = p->room_v, most = most_of(k, v);
  *bytes = (size_t)(CHUNK * (7 * k + 2 * v + 5 * most + CHUNK) + k + 2 * k * v + more) * sizeof(REAL);
  REAL *memory = ty_scratch_alloc(*bytes), *at = memory;
  if (!memory) {
    __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
    return NULL;
  }
  REAL **rows_k[] = { &w->q, &w->k, &w->decay, &w->into, &w->onto, &w->since, &w->until };
  for (int i = 0; i < 7; i++, at += CHUNK * k) *rows_k[i] = at;
  for (int i = 0; i < 4; i++, at += CHUNK * most) w->panels[i] = at;
  w->v = at, at += CHUNK * v;
  w->go = at, at += CHUNK * v;
  w->out = at, at += CHUNK * most;
  w->weights = at, at += CHUNK * CHUNK;
  w->running = at, at += k;
  w->state = at, at += k * v;
  w->dstate = at, at += k * v;
  w->spans = at;
  return memory;
}

/* ---- rows, panels, states ---- */

static void load_rows(REAL *dst, const ty_view *x, const line *l, int64_t t, int64_t n, int64_t width, int64_t room,
                      REAL scale) {
  for (int64_t i = 0; i < n; i++)
    pack_row(dst + i * room, (const REAL *)(const void *)element(x, l->row, l->head, t + i, 0), x->stride[3], width,
             room, scale);
  memset(dst + n * room, 0, (size_t)((CHUNK - n) * room) * sizeof(REAL));
}

static void store_rows(const ty_view *y, const line *l, int64_t t, int64_t n, const REAL *src, int64_t room) {
  int64_t width = y->size[3];
  for (int64_t i = 0; i < n && width; i++)
    memcpy((REAL *)y->data + ((l->row * y->size[1] + l->head) * y->size[2] + t + i) * width, src + i * room,
           (size_t)width * sizeof(REAL));
}

/* Rows of the chunk of n tokens from t on, with what decays them. */
static void load_chunk(const plan *p, const line *l, int64_t t, int64_t n, work *w) {
  int64_t room = p->room_k, count = CHUNK * room;
  load_rows(w->q, p->q, l, t, n, p->dk, room, (REAL)p->scale);
  load_rows(w->k, p->k, l, t, n, p->dk, room, 1);
  load_rows(w->v, p->v, l, t, n, p->dv, p->room_v, 1);
  load_rows(w->decay, p->g, l, t, n, p->dk, room, 1);
#pragma omp simd
  for (int64_t i = 0; i < count; i++) w->decay[i] = exp_weight(w->decay[i]);
  for (int64_t d = 0; d < room; d++) {
    w->since[d] = w->decay[d];
    w->until[count - room + d] = 1;
  }
  for (int64_t i = room; i < count; i++) w->since[i] = w->since[i - room] * w->decay[i];
  for (int64_t i = count - room - 1; i >= 0; i--) w->until[i] = w->until[i + room] * w->decay[i + room];
  for (int64_t i = 0; i < count; i++) {
    w->into[i] = w->q[i] * w->since[i];
    w->onto[i] = w->k[i] * w->until[i];
  }
  w->whole = w->since + count - room;
}

static void panel_of(REAL *panel, const REAL *rows, int64_t room) {
  for (int64_t r = 0; r < room; r += LANES)
    for (int64_t t = 0; t < CHUNK; t += LANES) transpose(rows + t * room + r, room, panel + r * CHUNK + t, CHUNK);
}

static void rows_of(REAL *rows, const REAL *panel, int64_t room) {
  for (int64_t r = 0; r < room; r += LANES)
    for (int64_t t = 0; t < CHUNK; t += LANES) transpose(panel + r * CHUNK + t, CHUNK, rows + t * room + r, room);
}

static void load_state(REAL *dst, const plan *p, const ty_view *x, const line *l) {
  if (!x) {
    for (int64_t i = 0; i < p->room_k * p->room_v; i++) dst[i] = 0;
    return;
  }
  for (int64_t d = 0; d < p->dk; d++)
    pack_row(dst + d * p->room_v, (const REAL *)(const void *)element(x, l->sequence, l->head, d, 0), x->stride[3],
             p->dv, p->room_v, 1);
  memset(dst + p->dk * p->room_v, 0, (size_t)((p->room_k - p->dk) * p->room_v) * sizeof(REAL));
}

static void store_state(const ty_view *y, const plan *p, const line *l, const REAL *src) {
  REAL *dst = (REAL *)y->data + (l->sequence * p->heads + l->head) * p->dk * p->dv;
  for (int64_t d = 0; d < p->dk && p->dv && dst != src; d++)
    memcpy(dst + d * p->dv, src + d * p->room_v, (size_t)p->dv * sizeof(REAL));
}

/* ---- products ---- */

#define EACH_GROUP(rows) for (int64_t m = 0; m < (rows); m += GROUP)

/* c [CHUNK][n] = a' b: a is a panel [kn][CHUNK], b [kn][n]. */
static void panel_times(int64_t rows, int64_t n, int64_t kn, const REAL *panel, const REAL *b, REAL *out) {
  const int64_t bk = n, cm = n;
  EACH_GROUP(rows) {
    const REAL *a = panel + m;
    REAL *c = out + m * n;
    COLUMNS(GROUP, 2, SET, 1, CHUNK, NULL);
  }
}

/* c [CHUNK][n] += w b, where row i of w [CHUNK][CHUNK] ends at column i. */
static void add_weighted(int64_t rows, int64_t n, const REAL *w, const REAL *b, REAL *out) {
  const int64_t bk = n, cm = n;
  EACH_GROUP(rows) {
    const REAL *a = w + m * CHUNK;
    REAL *c = out + m * n;
    const int64_t kn = m + GROUP;
    COLUMNS(GROUP, 2, ADD, CHUNK, 1, NULL);
  }
}

/* c [CHUNK][n] += w' b, of the same w. */
static void add_weighted_back(int64_t n, const REAL *w, const REAL *rows, REAL *out) {
  const int64_t bk = n, cm = n;
  EACH_GROUP(CHUNK) {
    const REAL *a = w + m * CHUNK + m, *b = rows + m * n;
    REAL *c = out + m * n;
    const int64_t kn = CHUNK - m;
    COLUMNS(GROUP, 2, ADD, 1, CHUNK, NULL);
  }
}

/* state [room][n] = factor state + onto' b: rows onto [tokens][room], b [tokens][n]. */
static void move_state(int64_t room, int64_t n, int64_t kn, const REAL *onto, const REAL *whole, const REAL *b,
                       REAL *state) {
  const int64_t bk = n, cm = n;
  EACH_GROUP(room) {
    const REAL *a = onto + m, *factor = whole + m;
    REAL *c = state + m * n;
    COLUMNS(GROUP, 2, RESCALE, 1, room, factor);
  }
}

/* out, a panel [room][CHUNK], = state [room][kn] times a panel b [kn][CHUNK]. */
static void state_times(int64_t room, int64_t kn, const REAL *state, const REAL *b, REAL *out) {
  const int64_t n = CHUNK, bk = CHUNK, cm = CHUNK;
  EACH_GROUP(room) {
    const REAL *a = state + m * kn;
    REAL *c = out + m * CHUNK;
    COLUMNS(GROUP, 2, SET, kn, 1, NULL);
  }
}

/* ---- tokens among themselves ---- */

/* Columns [first, first + LANES) of the weights: the keys lie in the lanes, where each token's key appears at its turn
 * and decays from then on. */
static inline __attribute__((always_inline)) void weights_block(const int first, int64_t room, const REAL *q,
                                                                const REAL *k, const REAL *decay, REAL *w) {
  INDEX lane;
  VEC sum[CHUNK];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) lane[i] = i;
#pragma GCC unroll 16
  for (int i = 0; i < CHUNK; i++) sum[i] = (VEC){ 0 };
  for (int64_t d = 0; d < room; d++) {
    const INDEX all = (INDEX)(WHOLE) * (const VEC *)(k + d * CHUNK + first);
    VEC keys = { 0 };
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK; i++) {
      if (i < first) continue;
      keys *= decay[d * CHUNK + i];
      if (i < first + LANES) keys += (VEC)(all & (lane == i - first));
      sum[i] += q[d * CHUNK + i] * keys;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < CHUNK; i++) *(VEC *)(w + i * CHUNK + first) = sum[i];
}

/* w [CHUNK][CHUNK], from panels. */
static void weights(int64_t room, const REAL *q, const REAL *k, const REAL *decay, REAL *w) {
#pragma GCC unroll 8
  for (int first = 0; first < CHUNK; first += LANES) weights_block(first, room, q, k, decay, w);
}

/* ---- forward ---- */

static void forward_chunk(const context *c, const line *l, int64_t t, int64_t n, REAL *state, work *w) {
  const plan *p = c->plan;
  int64_t room = p->room_k, columns = p->room_v, rows = (n + GROUP - 1) / GROUP * GROUP;
  load_chunk(p, l, t, n, w);
  panel_of(w->panels[0], w->q, room);
  panel_of(w->panels[1], w->k, room);
  panel_of(w->panels[2], w->decay, room);
  panel_of(w->panels[3], w->into, room);
  weights(room, w->panels[0], w->panels[1], w->panels[2], w->weights);
  panel_times(rows, columns, room, w->panels[3], state, w->out);
  add_weighted(rows, columns, w->weights, w->v, w->out);
  store_rows(c->out, l, t, n, w->out, columns);
  move_state(room, columns, n, w->onto, w->whole, w->v, state);
}

static inline __attribute__((always_inline)) void step_columns(const int nv, int64_t room, int64_t columns,
                                                               const REAL *q, const REAL *k, const REAL *decay,
                                                               const REAL *v, REAL *state, REAL *out) {
  VEC sum[4], x[4];
#pragma GCC unroll 4
  for (int j = 0; j < nv; j++) sum[j] = (VEC){ 0 }, x[j] = *(const VEC *)(v + j * LANES);
  for (int64_t d = 0; d < room; d++) {
    REAL a = decay[d], key = k[d], query = q[d];
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
      VEC *at = (VEC *)(state + d * columns + j * LANES), s = *at * a + x[j] * key;
      *at = s;
      sum[j] += s * query;
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < nv; j++) *(VEC *)(out + j * LANES) = sum[j];
}

/* One token by the recurrence. */
static void step(const context *c, const line *l, int64_t t, REAL *state, work *w) {
  const plan *p = c->plan;
  int64_t room = p->room_k, columns = p->room_v, j = 0;
  load_rows(w->q, p->q, l, t, 1, p->dk, room, (REAL)p->scale);
  load_rows(w->k, p->k, l, t, 1, p->dk, room, 1);
  load_rows(w->v, p->v, l, t, 1, p->dv, columns, 1);
  load_rows(w->decay, p->g, l, t, 1, p->dk, room, 1);
  for (int64_t d = 0; d < room; d++) w->decay[d] = exp_weight(w->decay[d]);
  for (; j + 4 * LANES <= columns; j += 4 * LANES)
    step_columns(4, room, columns, w->q, w->k, w->decay, w->v + j, state + j, w->out + j);
  for (; j < columns; j += LANES) step_columns(1, room, columns, w->q, w->k, w->decay, w->v + j, state + j, w->out + j);
  store_rows(c->out, l, t, 1, w->out, columns);
}

static void forward_line(const context *c, const line *l, work *w) {
  const plan *p = c->plan;
  REAL *state = w->state;
  if (p->room_k == p->dk && p->room_v == p->dv) /* the state is kept where it goes */
    state = (REAL *)c->last->data + (l->sequence * p->heads + l->head) * p->dk * p->dv;
  load_state(state, p, p->state, l);
  for (int64_t t = l->begin; t < l->end;) {
    int64_t n = least(CHUNK, l->end - t);
    if (n <= FEW) {
      step(c, l, t++, state, w);
    } else {
      forward_chunk(c, l, t, n, state, w);
      t += n;
    }
  }
  store_state(c->last, p, l, state);
}

static void forward(void *given, int64_t begin, int64_t end) {
  context *c = given;
  work w;
  size_t bytes;
  REAL *memory = work_alloc(c, 0, &w, &bytes);
  if (!memory) return;
  for (int64_t task = begin; task < end; task++) {
    line l = line_of(c->plan, task);
    forward_line(c, &l, &w);
  }
  ty_scratch_free(memory, bytes);
}
