/* Template of sparse_products.c, for one REAL. */

typedef REAL FN(lanes) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef REAL FN(quarter) __attribute__((vector_size(16)));
enum { FN(LANES) = TY_VECTOR_BYTES / sizeof(REAL) };

/* The rows that begin in a task's range. */
static inline void FN(rows_of)(const job *c, int64_t begin, int64_t end, int64_t *first, int64_t *last) {
  *first = ty_segment_from(c->offsets, c->m, begin, 1);
  *last = ty_segment_from(c->offsets, c->m, end, 1);
}

/* Row `column` of the dense matrix, which will be read soon; it need not be one. */
static inline void FN(ask_for)(const job *c, int64_t column, int64_t n) {
  const uintptr_t row = (uintptr_t)c->b + (uintptr_t)column * (uintptr_t)c->d * sizeof(REAL);
  for (int64_t i = 0; i < n; i += 64 / (int64_t)sizeof(REAL))
    __builtin_prefetch((const void *)(row + (uintptr_t)i * sizeof(REAL)));
}

/* Columns from `at` on of a row of the result, `count` vectors (a constant) of them. */
static inline __attribute__((always_inline)) bool FN(row_lanes)(const job *c, int64_t r, int64_t at, const int count,
                                                                const bool far) {
  const REAL *values = c->a, *x = (const REAL *)c->b + at;
  FN(lanes) sum[8];
  const int64_t entries = c->offsets[c->m];
  bool bad = false;
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) sum[i] = (FN(lanes)){ 0 };
  for (int64_t j = c->offsets[r], last = c->offsets[r + 1]; j < last; j++) {
    const int64_t column = c->columns[j];
    if ((uint64_t)column >= (uint64_t)c->n) {
      bad = true;
      continue;
    }
    const REAL v = values[c->order ? c->order[j] : j];
    const FN(lanes) *row = (const FN(lanes) *)(x + column * c->d);
    if (far && j + AHEAD < entries) {
      const uintptr_t next = (uintptr_t)x + (uintptr_t)c->columns[j + AHEAD] * (uintptr_t)c->d * sizeof(REAL);
#pragma GCC unroll 8
      for (int i = 0; i < count; i++) __builtin_prefetch((const void *)(next + (uintptr_t)i * TY_VECTOR_BYTES));
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) sum[i] += v * row[i];
  }
  FN(lanes) *y = (FN(lanes) *)((REAL *)c->out + r * c->d + at);
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) y[i] = sum[i];
  return bad;
}

/* The columns that fill no vector. */
static inline bool FN(row_rest)(const job *c, int64_t r, int64_t at) {
  const REAL *values = c->a, *x = (const REAL *)c->b + at;
  const int64_t n = c->d - at;
  REAL sum[FN(LANES)] = { 0 }, *y = (REAL *)c->out + r * c->d + at;
  bool bad = false;
  for (int64_t j = c->offsets[r], last = c->offsets[r + 1]; j < last; j++) {
    const int64_t column = c->columns[j];
    if ((uint64_t)column >= (uint64_t)c->n) {
      bad = true;
      continue;
    }
    const REAL v = values[c->order ? c->order[j] : j];
    for (int64_t i = 0; i < n; i++) sum[i] += v * x[column * c->d + i];
  }
  for (int64_t i = 0; i < n; i++) y[i] = sum[i];
  return bad;
}

static inline __attribute__((always_inline)) void FN(rows_in)(job *c, int64_t begin, int64_t end, const bool far) {
  int64_t first, last;
  bool bad = false;
  FN(rows_of)(c, begin, end, &first, &last);
  for (int64_t r = first; r < last; r++) {
    int64_t at = 0;
    for (; at + 8 * FN(LANES) <= c->d; at += 8 * FN(LANES)) bad |= FN(row_lanes)(c, r, at, 8, far);
    if (at + 4 * FN(LANES) <= c->d) bad |= FN(row_lanes)(c, r, at, 4, far), at += 4 * FN(LANES);
    if (at + 2 * FN(LANES) <= c->d) bad |= FN(row_lanes)(c, r, at, 2, far), at += 2 * FN(LANES);
    if (at + FN(LANES) <= c->d) bad |= FN(row_lanes)(c, r, at, 1, far), at += FN(LANES);
    if (at < c->d || c->d == 0) bad |= FN(row_rest)(c, r, at);
  }
  if (bad) atomic_store(&c->bad, true);
}

static void FN(rows)(void *context, int64_t begin, int64_t end) {
  job *c = context;
  if (c->far) FN(rows_in)(c, begin, end, true);
  else FN(rows_in)(c, begin, end, false);
}

/* Of a dense matrix of one column. A column that is out of range counts as the first and is told afterwards. */
static inline __attribute__((always_inline)) void FN(vector_in)(job *c, int64_t begin, int64_t end,
                                                                const int64_t *order) {
  const REAL *values = c->a, *x = c->b;
  const int64_t *columns = c->columns;
  const uint64_t n = (uint64_t)c->n;
  int64_t first, last;
  uint64_t bad = 0;
  FN(rows_of)(c, begin, end, &first, &last);
  for (int64_t r = first; r < last; r++) {
    REAL sum[2] = { 0 };
    int64_t j = c->offsets[r];
    const int64_t stop = c->offsets[r + 1];
    for (; j + 2 <= stop; j += 2)
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        const uint64_t column = (uint64_t)columns[j + i], outside = column >= n;
        bad |= outside;
        sum[i] += values[order ? order[j + i] : j + i] * x[outside ? 0 : column];
      }
    if (j < stop) {
      const uint64_t column = (uint64_t)columns[j], outside = column >= n;
      bad |= outside;
      sum[0] += values[order ? order[j] : j] * x[outside ? 0 : column];
    }
    ((REAL *)c->out)[r] = sum[0] + sum[1];
  }
  if (bad) atomic_store(&c->bad, true);
}

static void FN(vector)(void *context, int64_t begin, int64_t end) {
  job *c = context;
  if (c->n == 0) FN(rows)(context, begin, end); /* there is no first */
  else if (c->order) FN(vector_in)(c, begin, end, c->order);
  else FN(vector_in)(c, begin, end, NULL);
}

static inline REAL FN(sum_of)(FN(lanes) v) {
  FN(quarter) parts[TY_VECTOR_BYTES / 16], sum;
  memcpy(parts, &v, sizeof v);
  sum = parts[0];
#pragma GCC unroll 4
  for (int i = 1; i < TY_VECTOR_BYTES / 16; i++) sum += parts[i];
  REAL all = sum[0];
#pragma GCC unroll 4
  for (int i = 1; i < (int)(16 / sizeof(REAL)); i++) all += sum[i];
  return all;
}

/* The products of a row of a with `count` (a constant) rows of b. */
static inline __attribute__((always_inline)) void FN(dots)(const REAL *a, const REAL *const *b, int64_t d, REAL *dots,
                                                           const int count) {
  FN(lanes) sum[4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) sum[i] = (FN(lanes)){ 0 };
  int64_t at = 0;
  for (; at + FN(LANES) <= d; at += FN(LANES)) {
    const FN(lanes) x = *(const FN(lanes) *)(a + at);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) sum[i] += x * *(const FN(lanes) *)(b[i] + at);
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) dots[i] = FN(sum_of)(sum[i]);
  for (; at < d; at++)
    for (int i = 0; i < count; i++) dots[i] += a[at] * b[i][at];
}

static void FN(sampled)(void *context, int64_t begin, int64_t end) {
  job *c = context;
  int64_t first, last;
  bool bad = false;
  const int64_t entries = c->offsets[c->m];
  FN(rows_of)(c, begin, end, &first, &last);
  for (int64_t r = first; r < last; r++) {
    const REAL *a = (const REAL *)c->a + r * c->d, *b[4];
    REAL found[4], *out = c->out;
    const int64_t stop = c->offsets[r + 1];
    for (int64_t j = c->offsets[r]; j < stop; j += 4) {
      const int count = stop - j < 4 ? (int)(stop - j) : 4;
      if (c->far && j + 8 <= entries)
        for (int i = 0; i < 4; i++) FN(ask_for)(c, c->columns[j + 4 + i], c->d);
      for (int i = 0; i < count; i++) {
        const int64_t column = c->columns[j + i];
        const bool inside = (uint64_t)column < (uint64_t)c->n;
        bad |= !inside;
        b[i] = inside ? (const REAL *)c->b + column * c->d : a; /* any row: the result is not used */
      }
      if (count == 4) FN(dots)(a, b, c->d, found, 4);
      else
        for (int i = 0; i < count; i++) FN(dots)(a, b + i, c->d, found + i, 1);
      for (int i = 0; i < count; i++) out[c->order ? c->order[j + i] : j + i] = found[i];
    }
  }
  if (bad) atomic_store(&c->bad, true);
}
