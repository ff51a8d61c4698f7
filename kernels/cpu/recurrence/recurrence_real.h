/* Template (no guard: recurrence.c includes it once per element type): packing of the weights, the product of a few rows
 * with a panel of them, and the walk over the steps. */

typedef REAL FN(vec) __attribute__((vector_size(VEC_BYTES), aligned(sizeof(REAL)), may_alias));
#define VEC FN(vec)

/* c[mr][nv vectors] = a[mr][kn] times a panel b[kn][nv vectors]. mr and nv are constants where it is inlined, so that
 * the sums stay in registers. */
static inline __attribute__((always_inline)) void FN(product)(const int mr, const int nv, int64_t kn,
                                                              const REAL *restrict a, int64_t a_row,
                                                              const REAL *restrict b, REAL *restrict c) {
  VEC sum[ROWS][WIDE];
#pragma GCC unroll 8
  for (int m = 0; m < mr; m++)
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++) sum[m][v] = (VEC){ 0 };
  for (int64_t k = 0; k < kn; k++) {
    VEC x[WIDE];
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++) x[v] = *(const VEC *)(b + (k * nv + v) * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < mr; m++) {
      REAL w = a[m * a_row + k];
#pragma GCC unroll 4
      for (int v = 0; v < nv; v++) sum[m][v] += w * x[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < mr; m++)
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++) *(VEC *)(c + (m * nv + v) * LANES) = sum[m][v];
}

static inline __attribute__((always_inline)) void FN(product_rows)(int rows, const int nv, int64_t kn, const REAL *a,
                                                                   int64_t a_row, const REAL *b, REAL *c) {
  switch (rows) {
    case 1: FN(product)(1, nv, kn, a, a_row, b, c); break;
    case 2: FN(product)(2, nv, kn, a, a_row, b, c); break;
#if ROWS > 2
    case 3: FN(product)(3, nv, kn, a, a_row, b, c); break;
#endif
#if ROWS > 3
    case 4: FN(product)(4, nv, kn, a, a_row, b, c); break;
    case 5: FN(product)(5, nv, kn, a, a_row, b, c); break;
    case 6: FN(product)(6, nv, kn, a, a_row, b, c); break;
#endif
  }
}

/* One copy of each for all that use it. */
static __attribute__((noinline)) void FN(product_1)(int rows, int64_t kn, const REAL *a, int64_t a_row, const REAL *b,
                                                    REAL *c) {
  FN(product_rows)(rows, 1, kn, a, a_row, b, c);
}
static __attribute__((noinline)) void FN(product_3)(int rows, int64_t kn, const REAL *a, int64_t a_row, const REAL *b,
                                                    REAL *c) {
  FN(product_rows)(rows, 3, kn, a, a_row, b, c);
}
static __attribute__((noinline)) void FN(product_4)(int rows, int64_t kn, const REAL *a, int64_t a_row, const REAL *b,
                                                    REAL *c) {
  FN(product_rows)(rows, WIDE, kn, a, a_row, b, c);
}

/* ---- forward ---- */

/* A panel has the gates of LANES units, which go through them together: [k][gate][unit]. */
static int64_t FN(panels)(const job *j) { return (j->d + LANES - 1) / LANES; }

static void FN(pack_forward)(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  int64_t panels = FN(panels)(j), d = j->d;
  for (int64_t i = begin; i < end; i++) {
    int64_t head = i / panels, first = i % panels * LANES, n = d - first < LANES ? d - first : LANES;
    const int64_t row = j->gates * LANES;
    const REAL *w = (const REAL *)j->w + (head * j->gates * d + first) * d;
    REAL *to = (REAL *)j->pack + i * d * row;
    if (n < LANES) memset(to, 0, (size_t)(d * row) * sizeof(REAL));
    for (int gate = 0; gate < j->gates; gate++) FN(transpose)(w + gate * d * d, d, n, d, to + gate * LANES, row);
  }
}

static void FN(forward_panel)(const job *j, int64_t t, int64_t head, int64_t panel, int64_t first_block,
                              int64_t end_block) {
  const int64_t d = j->d, plane = j->batch * j->width, unit = head * d + panel * LANES, row_gates = j->gates * j->width;
  const int64_t n = d - panel * LANES < LANES ? d - panel * LANES : LANES, at = head * j->gates * d + panel * LANES;
  const REAL *weights = (const REAL *)j->pack + (head * FN(panels)(j) + panel) * d * j->gates * LANES;
  const REAL *h = t ? (const REAL *)j->y + (t - 1) * plane : j->state;
  REAL u[ROWS * WIDE * LANES] __attribute__((aligned(64)));
  REAL nowhere[(3 + TY_SAVED_GATES) * LANES]; /* where what nobody keeps is written */
  for (int64_t block = first_block; block < end_block; block++) {
    int64_t r0 = row_of(j, block), rows = row_of(j, block + 1) - r0;
    (j->gates == 3 ? FN(product_3) : FN(product_4))((int)rows, d, h + r0 * j->width + head * d, j->width, weights, u);
    forward_unit s = { .u = u,
                       .x = (const REAL *)j->x + (t * j->batch + r0) * row_gates + at,
                       .bias = (const REAL *)j->bias + at,
                       .h = h + r0 * j->width + unit,
                       .state = (REAL *)j->last + plane + r0 * j->width + unit,
                       .y = (REAL *)j->y + t * plane + r0 * j->width + unit,
                       .d = d,
                       .plane = plane,
                       .kept = nowhere,
                       .kept_plane = LANES,
                       .saved = nowhere + 3 * LANES,
                       .apart = LANES,
                       .rows = rows,
                       .u_row = j->gates * LANES,
                       .x_row = row_gates,
                       .row = j->width };
    if (j->saved) {
      const int64_t four = TY_SAVED_GATES;
      s.kept = (REAL *)j->kept + t * j->states * plane + r0 * j->width + unit, s.kept_plane = plane;
      s.saved = (REAL *)j->saved + (t * j->batch + r0) * four * j->width + head * four * d + panel * LANES;
      s.apart = d, s.kept_row = j->width, s.saved_row = four * j->width;
    }
    FN(cell_forward)(j->cell, &s, n);
  }
}

/* Blocks of rows, head by head, through all steps. */
static void FN(forward_alone)(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  while (begin < end) {
    int64_t head = begin / j->blocks, first = begin % j->blocks;
    int64_t stop = first + (end - begin) < j->blocks ? first + (end - begin) : j->blocks;
    for (int64_t t = 0; t < j->steps; t++)
      for (int64_t panel = 0; panel < FN(panels)(j); panel++) FN(forward_panel)(j, t, head, panel, first, stop);
    begin += stop - first;
  }
}

/* Panels of one step. */
static void FN(forward_step)(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  int64_t panels = FN(panels)(j);
  for (int64_t i = begin; i < end; i++) FN(forward_panel)(j, j->step, i / panels, i % panels, 0, j->blocks);
}

static int64_t FN(share_of)(int64_t n) {
  int64_t threads = ty_parallel_threads();
  return (n + threads - 1) / threads;
}

static bool FN(forward)(job *j, const ty_view *bias) {
  int64_t panels = j->heads * FN(panels)(j), gates = j->gates * j->width;
  size_t packed = (size_t)(panels * j->d * j->gates * LANES), bytes = (packed + (size_t)gates) * sizeof(REAL);
  REAL *pack = ty_scratch_alloc(bytes);
  if (!pack) return false;
  j->pack = pack;
  j->bias = bias && bias->count ? bias->data : memset(pack + packed, 0, (size_t)gates * sizeof(REAL));
  ty_parallel_for(panels, 1 + (1 << 15) / (j->d * j->gates * LANES), FN(pack_forward), j);
  if (cut(j, sizeof(REAL))) {
    for (j->step = 0; j->step < j->steps; j->step++) ty_parallel_for(panels, FN(share_of)(panels), FN(forward_step), j);
  } else {
    int64_t tasks = j->heads * j->blocks;
    ty_parallel_for(tasks, FN(share_of)(tasks), FN(forward_alone), j);
  }
  size_t plane = (size_t)(j->batch * j->width);
  memcpy(j->last, (const REAL *)j->y + (size_t)(j->steps - 1) * plane, plane * sizeof(REAL));
  ty_scratch_free(pack, bytes);
  return true;
}

/* ---- backward: columns of the weights, in panels [k][WIDE vectors], the rest in panels of one vector ---- */

static int64_t FN(columns)(const job *j) { /* panels of a head */
  return j->d / (WIDE * LANES) + (j->d % (WIDE * LANES) + LANES - 1) / LANES;
}

/* The panel's first column, and how many vectors it has. */
static int64_t FN(column_of)(const job *j, int64_t panel, int *vectors) {
  int64_t wide = j->d / (WIDE * LANES);
  *vectors = panel < wide ? WIDE : 1;
  return panel < wide ? panel * WIDE * LANES : wide * WIDE * LANES + (panel - wide) * LANES;
}

static void FN(pack_backward)(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  int64_t panels = FN(columns)(j), kn = j->gates * j->d;
  for (int64_t i = begin; i < end; i++) {
    int vectors;
    int64_t head = i / panels, first = FN(column_of)(j, i % panels, &vectors), width = vectors * LANES;
    int64_t n = j->d - first < width ? j->d - first : width;
    const REAL *w = (const REAL *)j->w + head * kn * j->d + first;
    REAL *to = (REAL *)j->pack + head * j->head_pack + first * kn;
    for (int64_t k = 0; k < kn; k++, to += width)
      for (int64_t e = 0; e < width; e++) to[e] = e < n ? w[k * j->d + e] : 0;
  }
}

/* The gates of rows [first, end) of a head at step t. */
static void FN(backward_gates)(const job *j, int64_t t, int64_t head, int64_t first, int64_t end) {
  static const REAL none[64];
  const int64_t d = j->d, plane = j->batch * j->width, at = first * j->width + head * d;
  const int64_t gates = (t * j->batch + first) * j->gates * j->width + head * j->gates * d;
  const REAL *states = j->at_states;
  backward_unit s = { .h = (t ? (const REAL *)j->at_y + (t - 1) * plane : (const REAL *)j->state) + at,
                      .before = t ? states + (t - 1) * j->states * plane + at : (const REAL *)j->state + plane + at,
                      .after = states + t * j->states * plane + at,
                      .saved = (const REAL *)j->at_gates +
                               ((t * j->batch + first) * j->width + head * d) * TY_SAVED_GATES,
                      .dstate = (REAL *)j->dstate + at,
                      .dx = (REAL *)j->dx + gates,
                      .du = (REAL *)j->du + gates,
                      .d = d,
                      .plane = plane,
                      .rows = end - first,
                      .g_row = j->g ? j->width : 0,
                      .row = j->width,
                      .saved_row = TY_SAVED_GATES * j->width,
                      .dx_row = j->gates * j->width };
  for (int64_t e = 0; e < d; e += 64) { /* as many units as there are zeros for an absent gradient */
    int64_t n = d - e < 64 ? d - e : 64;
    s.g = j->g ? (const REAL *)j->g + t * plane + at + e : none;
    FN(cell_backward)(j->cell, &s, n);
    s.h += n, s.before += n, s.after += n, s.saved += n, s.dstate += n, s.dx += n, s.du += n;
  }
}

/* What of the gradient of h goes through the recurrent product, added to the rest of it. */
static void FN(backward_panel)(const job *j, int64_t t, int64_t head, int64_t panel, int64_t first_block,
                               int64_t end_block) {
  int vectors;
  const int64_t d = j->d, kn = j->gates * d, first = FN(column_of)(j, panel, &vectors), width = vectors * LANES;
  const int64_t n = d - first < width ? d - first : width, du_row = j->gates * j->width;
  const REAL *weights = (const REAL *)j->pack + head * j->head_pack + first * kn;
  const REAL *du = (const REAL *)j->du + t * j->batch * du_row + head * kn;
  REAL sum[ROWS * WIDE * LANES] __attribute__((aligned(64)));
  for (int64_t block = first_block; block < end_block; block++) {
    int64_t r0 = row_of(j, block), rows = row_of(j, block + 1) - r0;
    (vectors == 1 ? FN(product_1) : FN(product_4))((int)rows, kn, du + r0 * du_row, du_row, weights, sum);
    for (int64_t r = 0; r < rows; r++) {
      REAL *restrict dh = (REAL *)j->dstate + (r0 + r) * j->width + head * d + first;
      const REAL *restrict from = sum + r * width;
      for (int64_t e = 0; e < n; e++) dh[e] += from[e];
    }
  }
}

static void FN(backward_alone)(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  while (begin < end) {
    int64_t head = begin / j->blocks, first = begin % j->blocks;
    int64_t stop = first + (end - begin) < j->blocks ? first + (end - begin) : j->blocks;
    for (int64_t t = j->steps - 1; t >= 0; t--) {
      FN(backward_gates)(j, t, head, row_of(j, first), row_of(j, stop));
      for (int64_t panel = 0; panel < FN(columns)(j); panel++) FN(backward_panel)(j, t, head, panel, first, stop);
    }
    begin += stop - first;
  }
}

static void FN(backward_step_gates)(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  for (int64_t i = begin; i < end; i++) FN(backward_gates)(j, j->step, i / j->batch, i % j->batch, i % j->batch + 1);
}

static void FN(backward_step)(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  int64_t panels = FN(columns)(j);
  for (int64_t i = begin; i < end; i++) FN(backward_panel)(j, j->step, i / panels, i % panels, 0, j->blocks);
}

static bool FN(backward)(job *j) {
  int64_t columns = FN(columns)(j), panels = j->heads * columns, kn = j->gates * j->d, rows = j->heads * j->batch;
  j->head_pack = (j->d + LANES - 1) / LANES * LANES * kn;
  size_t bytes = (size_t)(j->heads * j->head_pack) * sizeof(REAL);
  if (!(j->pack = ty_scratch_alloc(bytes))) return false;
  ty_parallel_for(panels, 1 + (1 << 15) / (kn * LANES), FN(pack_backward), j);
  if (cut(j, sizeof(REAL))) {
    for (j->step = j->steps - 1; j->step >= 0; j->step--) {
      ty_parallel_for(rows, FN(share_of)(rows), FN(backward_step_gates), j);
      ty_parallel_for(panels, FN(share_of)(panels), FN(backward_step), j);
    }
  } else {
    int64_t tasks = j->heads * j->blocks;
    ty_parallel_for(tasks, FN(share_of)(tasks), FN(backward_alone), j);
  }
  ty_scratch_free(j->pack, bytes);
  return true;
}

#undef forward_unit
#undef backward_unit
#undef VEC
