/* Template of segments.c: softmax over segments, for one REAL. A task has the segments that begin in its piece. */

/* Their largest elements are taken off, all exponentials are taken in one go, and the sums are divided by. */
static void FN(weights)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t inner = c->inner;
  for (int64_t t = begin; t < end; t++) {
    const piece p = piece_of(c, t);
    const int64_t s0 = ty_segment_from(c->offsets, c->m, p.begin, 0), s1 = ty_segment_from(c->offsets, c->m, p.end, 0);
    const int64_t first = c->offsets[s0], last = c->offsets[s1], before = p.outer * c->n * inner;
    const REAL *x = (const REAL *)c->x + before;
    REAL *out = (REAL *)c->out + before, *work = (REAL *)c->partial + before;
    for (int64_t s = s0; s < s1; s++) {
      const int64_t a = c->offsets[s], b = c->offsets[s + 1];
      for (int64_t i0 = 0; i0 < inner; i0 += COLUMNS) {
        const int64_t width = inner - i0 < COLUMNS ? inner - i0 : COLUMNS;
        REAL top[COLUMNS];
        for (int64_t i = 0; i < width; i++) top[i] = (REAL)-INFINITY;
        for (int64_t j = a; j < b; j++) {
          const REAL *row = x + position(c, j) * inner + i0;
          for (int64_t i = 0; i < width; i++) top[i] = row[i] > top[i] ? row[i] : top[i];
        }
        for (int64_t j = a; j < b; j++) {
          const REAL *row = x + position(c, j) * inner + i0;
          REAL *to = work + j * inner + i0;
          for (int64_t i = 0; i < width; i++) to[i] = row[i] - top[i];
        }
      }
    }
#pragma omp simd
    for (int64_t i = first * inner; i < last * inner; i++) work[i] = FN(ty_exp_weight)(work[i]);
    for (int64_t s = s0; s < s1; s++) {
      const int64_t a = c->offsets[s], b = c->offsets[s + 1];
      for (int64_t i0 = 0; i0 < inner; i0 += COLUMNS) {
        const int64_t width = inner - i0 < COLUMNS ? inner - i0 : COLUMNS;
        REAL sum[COLUMNS] = { 0 };
        for (int64_t j = a; j < b; j++)
          for (int64_t i = 0; i < width; i++) sum[i] += work[j * inner + i0 + i];
        for (int64_t i = 0; i < width; i++) sum[i] = 1 / sum[i];
        for (int64_t j = a; j < b; j++) {
          REAL *to = out + position(c, j) * inner + i0;
          const REAL *from = work + j * inner + i0;
          for (int64_t i = 0; i < width; i++) to[i] = from[i] * sum[i];
        }
      }
    }
  }
}

static void FN(weights_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t inner = c->inner;
  for (int64_t t = begin; t < end; t++) {
    const piece p = piece_of(c, t);
    const int64_t s0 = ty_segment_from(c->offsets, c->m, p.begin, 0), s1 = ty_segment_from(c->offsets, c->m, p.end, 0);
    const int64_t before = p.outer * c->n * inner;
    const REAL *g = (const REAL *)c->x + before, *y = (const REAL *)c->y + before;
    REAL *dx = (REAL *)c->out + before;
    for (int64_t s = s0; s < s1; s++) {
      const int64_t a = c->offsets[s], b = c->offsets[s + 1];
      for (int64_t i0 = 0; i0 < inner; i0 += COLUMNS) {
        const int64_t width = inner - i0 < COLUMNS ? inner - i0 : COLUMNS;
        REAL sum[COLUMNS] = { 0 };
        for (int64_t j = a; j < b; j++) {
          const int64_t at = position(c, j) * inner + i0;
          for (int64_t i = 0; i < width; i++) sum[i] += g[at + i] * y[at + i];
        }
        for (int64_t j = a; j < b; j++) {
          const int64_t at = position(c, j) * inner + i0;
          for (int64_t i = 0; i < width; i++) dx[at + i] = y[at + i] * (g[at + i] - sum[i]);
        }
      }
    }
  }
}
