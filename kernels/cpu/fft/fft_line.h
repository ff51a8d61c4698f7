/* Template: the transform of one line, as a matrix [n1, n2]: the columns in the lanes of vectors, times roots of unity,
 * transposed in registers, and the rows in the lanes of vectors. Lines lie in memory as pairs, without gaps. */

typedef struct FN(line_job) {
  const ty_fft_line *plan;
  const REAL *from;
  REAL *to;
  VEC *middle;  /* [blocks of rows, n2] elements */
  VEC *buffers; /* of a thread alone; NULL: to be made */
  const char
      *ahead; /* where the result is going to be: fetched meanwhile, as no prefetcher foresees writes far apart */
  int64_t ahead_bytes;
  REAL scale;
  bool inverse, failed;
} FN(line_job);

static int64_t FN(blocks)(int64_t n) { return (n + LANES - 1) / LANES; }

/* Vectors that the two buffers of the lanes take, and all that a line needs with and without these. */
static int64_t FN(lane_room)(const ty_fft_line *p) {
  const int64_t a = p->first->room, b = p->second->room;
  return 2 * (a > b ? a : b);
}
static int64_t FN(middle_room)(const ty_fft_line *p) {
  if (!p->inner) return 2 * FN(blocks)(p->n1) * p->n2;
  return 4 * FN(blocks)(p->inner->n) + FN(middle_room)(p->inner);
}
static int64_t FN(line_room)(const ty_fft_line *p) {
  const ty_fft_line *inner = p->inner ? p->inner : p;
  return FN(middle_room)(p) + 2 * FN(lane_room)(inner);
}

/* `count` pairs, less than LANES, with zeros after them. */
static void FN(load_some)(const REAL *from, int64_t count, bool swap, VEC *re, VEC *im) {
  REAL pairs[2 * LANES] = { 0 };
  memcpy(pairs, from, (size_t)count * 2 * sizeof *pairs);
  FN(load_pairs)(pairs, swap, re, im);
}

static void FN(store_some)(REAL *to, int64_t count, bool swap, VEC re, VEC im) {
  REAL pairs[2 * LANES];
  FN(store_pairs)(pairs, swap, re, im);
  memcpy(to, pairs, (size_t)count * 2 * sizeof *pairs);
}

/* A block of columns, x, into the blocks of rows of the middle. w: what elements are multiplied by. */
static void FN(turn)(const VEC *x, const VEC *w, int64_t n1, int64_t n2, int64_t column, VEC *middle) {
  const int64_t columns = n2 - column < LANES ? n2 - column : LANES;
  for (int64_t k = 0; k < n1; k += LANES) {
    VEC re[LANES], im[LANES];
    if (k + LANES <= n1) {
#pragma GCC unroll 16
      for (int l = 0; l < LANES; l++) {
        const int64_t at = 2 * (k + IN_ORDER(l));
        re[l] = x[at] * w[at] - x[at + 1] * w[at + 1];
        im[l] = x[at] * w[at + 1] + x[at + 1] * w[at];
      }
    } else {
      for (int l = 0; l < LANES; l++) {
        const int64_t at = 2 * (k + IN_ORDER(l));
        re[l] = im[l] = (VEC){ 0 };
        if (at >= 2 * n1) continue;
        re[l] = x[at] * w[at] - x[at + 1] * w[at + 1];
        im[l] = x[at] * w[at + 1] + x[at + 1] * w[at];
      }
    }
    VEC *to = middle + 2 * (k / LANES * n2 + column);
    FN(transpose)(re);
    if (columns == LANES) {
#pragma GCC unroll 16
      for (int l = 0; l < LANES; l++) to[2 * IN_ORDER(l)] = re[l];
    } else {
      for (int l = 0; l < LANES; l++)
        if (IN_ORDER(l) < columns) to[2 * IN_ORDER(l)] = re[l];
    }
    FN(transpose)(im);
    if (columns == LANES) {
#pragma GCC unroll 16
      for (int l = 0; l < LANES; l++) to[2 * IN_ORDER(l) + 1] = im[l];
    } else {
      for (int l = 0; l < LANES; l++)
        if (IN_ORDER(l) < columns) to[2 * IN_ORDER(l) + 1] = im[l];
    }
  }
}

static VEC *FN(own_buffers)(FN(line_job) * j, size_t *bytes) {
  *bytes = 2 * (size_t)FN(lane_room)(j->plan) * sizeof(VEC);
  if (j->buffers) return j->buffers;
  VEC *a = ty_scratch_alloc(*bytes);
  if (!a) j->failed = true;
  return a;
}

static void FN(columns)(void *context, int64_t begin, int64_t end) {
  FN(line_job) *j = context;
  const ty_fft_line *p = j->plan;
  size_t bytes;
  VEC *a = FN(own_buffers)(j, &bytes), *b = a + FN(lane_room)(p);
  if (!a) return;
  const int64_t blocks = FN(blocks)(p->n2);
  for (int64_t block = begin; block < end; block++) {
    const int64_t column = block * LANES, count = p->n2 - column;
    FN(ends) e = { .from = j->from + 2 * column, .from_step = 2 * p->n2, .inverse = j->inverse };
    if (j->ahead) {
      const char *to = j->ahead + j->ahead_bytes * block / blocks,
                 *stop = j->ahead + j->ahead_bytes * (block + 1) / blocks;
      for (; to < stop; to += 64) __builtin_prefetch(to, 1);
    }
    if (count < LANES) {
      for (int64_t k = 0; k < p->n1; k++)
        FN(load_some)(e.from + k * e.from_step, count, j->inverse, &a[2 * k], &a[2 * k + 1]);
      e.from = NULL;
    }
    const VEC *x = FN(transform)(p->first, &e, a, b);
    FN(turn)(x, (const VEC *)p->between + block * p->n1 * 2, p->n1, p->n2, column, j->middle);
  }
  if (a != j->buffers) ty_scratch_free(a, bytes);
}

static void FN(rows)(void *context, int64_t begin, int64_t end) {
  FN(line_job) *j = context;
  const ty_fft_line *p = j->plan;
  size_t bytes;
  VEC *a = FN(own_buffers)(j, &bytes), *b = a + FN(lane_room)(p);
  if (!a) return;
  for (int64_t block = begin; block < end; block++) {
    const int64_t row = block * LANES, count = p->n1 - row;
    FN(ends) e = { .to = j->to + 2 * row, .to_step = 2 * p->n1, .scale = j->scale, .inverse = j->inverse };
    VEC *x = j->middle + 2 * block * p->n2;
    if (p->second->inner) x = memcpy(a, x, (size_t)p->n2 * 2 * sizeof *x); /* a chirp needs more room */
    if (count < LANES) e.to = NULL;
    x = FN(transform)(p->second, &e, x, b);
    for (int64_t k = 0; x && k < p->n2; k++)
      FN(store_some)(j->to + 2 * (k * p->n1 + row), count, j->inverse, x[2 * k] * j->scale, x[2 * k + 1] * j->scale);
  }
  if (a != j->buffers) ty_scratch_free(a, bytes);
}

/* n pairs at `from` to `to`, which are apart. room: FN(line_room) vectors, or FN(middle_room) of them when `shared`:
 * then the threads share this line. ahead: memory that will be written soon, or NULL. */
static bool FN(run_line)(const ty_fft_line *p, const REAL *from, REAL *to, bool inverse, REAL scale, VEC *room,
                         bool shared, const REAL *ahead, int64_t ahead_count) {
  if (p->inner) {
    const int64_t n = p->n, length = p->inner->n;
    const REAL *w = p->chirp, *s = p->spectrum;
    VEC *rest = room + 4 * FN(blocks)(length);
    REAL *x = (REAL *)room, *y = (REAL *)(room + 2 * FN(blocks)(length));
    const int re = inverse, im = !inverse;
    for (int64_t k = 0; k < n; k++) {
      const REAL a = from[2 * k + re], b = from[2 * k + im];
      x[2 * k] = a * w[2 * k] - b * w[2 * k + 1];
      x[2 * k + 1] = a * w[2 * k + 1] + b * w[2 * k];
    }
    memset(x + 2 * n, 0, (size_t)(length - n) * 2 * sizeof *x);
    if (!FN(run_line)(p->inner, x, y, false, 1, rest, shared, NULL, 0)) return false;
    for (int64_t k = 0; k < length; k++) {
      const REAL a = y[2 * k], b = y[2 * k + 1];
      y[2 * k] = a * s[2 * k] - b * s[2 * k + 1];
      y[2 * k + 1] = a * s[2 * k + 1] + b * s[2 * k];
    }
    if (!FN(run_line)(p->inner, y, x, true, scale, rest, shared, NULL, 0)) return false;
    for (int64_t k = 0; k < n; k++) {
      const REAL a = x[2 * k], b = x[2 * k + 1];
      to[2 * k + re] = a * w[2 * k] - b * w[2 * k + 1];
      to[2 * k + im] = a * w[2 * k + 1] + b * w[2 * k];
    }
    return true;
  }
  FN(line_job) j = { .plan = p, .from = from, .to = to, .middle = room, .scale = scale, .inverse = inverse };
  if (!shared) {
    j.buffers = room + FN(middle_room)(p);
    j.ahead = (const char *)ahead;
    j.ahead_bytes = ahead_count * (int64_t)sizeof *ahead;
  }
  const int64_t columns = FN(blocks)(p->n2), rows = FN(blocks)(p->n1);
  if (shared) {
    ty_parallel_for(columns, 1 + 16384 / (p->n1 * LANES), FN(columns), &j);
    if (!j.failed) ty_parallel_for(rows, 1 + 16384 / (p->n2 * LANES), FN(rows), &j);
  } else {
    FN(columns)(&j, 0, columns);
    FN(rows)(&j, 0, rows);
  }
  return !j.failed;
}
