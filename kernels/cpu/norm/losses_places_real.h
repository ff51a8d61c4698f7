/* Template of losses.c: logits [n, classes, places], of which the vectors lie along the places, a block of them at a
 * time. */

enum { FN(chunk) = 16 }; /* whose blocks are read twice, from the first cache */

/* The log-sum-exp of k places over the classes, `step` apart, in one pass over memory (Milakov and Gimelshein 2018).
 * NaN without a finite element. */
static void FN(log_sums)(const REAL *restrict x, int64_t classes, int64_t step, int64_t k, REAL *restrict lse) {
  REAL top[FN(block)], from[FN(block)], sum[FN(block)];
  for (int64_t p = 0; p < k; p++) top[p] = (REAL)-INFINITY, sum[p] = 0;
  for (int64_t first = 0; first < classes; first += FN(chunk)) {
    const int64_t end = classes - first < FN(chunk) ? classes : first + FN(chunk);
    for (int64_t p = 0; p < k; p++) from[p] = top[p];
    for (int64_t c = first; c < end; c++) {
      const REAL *restrict row = x + c * step;
#pragma omp simd
      for (int64_t p = 0; p < k; p++) top[p] = row[p] > top[p] ? row[p] : top[p];
    }
#pragma omp simd
    for (int64_t p = 0; p < k; p++) {
      const REAL before = from[p];
      from[p] = top[p] > (REAL)-INFINITY ? top[p] : 0;
      sum[p] *= FN(ty_exp_weight)(before - from[p]);
    }
    for (int64_t c = first; c < end; c++) {
      const REAL *restrict row = x + c * step;
#pragma omp simd
      for (int64_t p = 0; p < k; p++) sum[p] += FN(ty_exp_weight)(row[p] - from[p]);
    }
  }
  for (int64_t p = 0; p < k; p++) lse[p] = top[p] > (REAL)-INFINITY ? top[p] + FN(ty_log)(sum[p]) : (REAL)NAN;
}

/* The block of a piece: its first element of n, as a position of targets and of logits, and its length. */
typedef struct FN(piece) {
  int64_t target, logit, k;
} FN(piece);

static inline FN(piece) FN(piece_of)(const job *c, int64_t piece) {
  const int64_t step = FN(block), per = (c->places + step - 1) / step, n = piece / per, at = piece % per * step;
  return (FN(piece)){ n * c->places + at, n * c->classes * c->places + at,
                      c->places - at < step ? c->places - at : step };
}

static void FN(places)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const REAL *restrict w = c->weight;
  const REAL smooth = (REAL)(c->p.label_smoothing / (double)c->classes), hard = (REAL)(1 - c->p.label_smoothing);
  REAL lse[FN(block)], spread[FN(block)];
  for (int64_t i = begin; i < end; i++) {
    const FN(piece) at = FN(piece_of)(c, i);
    const REAL *x = (const REAL *)c->x + at.logit;
    for (int64_t p = 0; p < at.k; p++) lse[p] = spread[p] = 0;
    if (!c->p.log_probs) FN(log_sums)(x, c->classes, c->places, at.k, lse);
    for (int64_t l = 0; l < c->classes && smooth != 0; l++) {
      const REAL *restrict row = x + l * c->places, of_class = w ? w[l] : 1;
#pragma omp simd
      for (int64_t p = 0; p < at.k; p++) spread[p] += of_class * (lse[p] - row[p]);
    }
    REAL *loss = (REAL *)c->loss + at.target, *weight = (REAL *)c->row_weight + at.target;
    memcpy((REAL *)c->lse_out + at.target, lse, sizeof *lse * (size_t)at.k);
    for (int64_t p = 0; p < at.k; p++) {
      const int64_t y = target_at(c, at.target + p);
      loss[p] = weight[p] = 0;
      if (y == c->p.ignore_index) continue;
      weight[p] = w ? w[y] : 1;
      loss[p] = hard * weight[p] * (lse[p] - x[y * c->places + p]) + (smooth != 0 ? smooth * spread[p] : 0);
    }
  }
}

static void FN(places_backward)(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const REAL *restrict w = c->weight;
  const double of_class = c->p.label_smoothing / (double)c->classes;
  REAL all[FN(block)], even[FN(block)], own[FN(block)], block[FN(block)];
  int32_t hit[FN(block)]; /* the class, or -1 where it is ignored */
  for (int64_t i = begin; i < end; i++) {
    const FN(piece) at = FN(piece_of)(c, i);
    const REAL *restrict lse = (const REAL *)c->lse + at.target, *g = (const REAL *)c->g + at.target;
    for (int64_t p = 0; p < at.k; p++) {
      const int64_t y = target_at(c, at.target + p);
      const bool ignored = y == c->p.ignore_index;
      const double hard = ignored ? 0 : (1 - c->p.label_smoothing) * (w ? (double)w[y] : 1);
      hit[p] = ignored ? -1 : (int32_t)y;
      all[p] = (REAL)(hard + of_class * c->weight_sum) * g[p];
      even[p] = (REAL)of_class * g[p];
      own[p] = (REAL)hard * g[p];
    }
    for (int32_t l = 0; l < (int32_t)c->classes; l++) {
      const REAL *restrict x = (const REAL *)c->x + at.logit + l * c->places, weight = w ? w[l] : 1;
      REAL *to = (REAL *)c->dx + at.logit + l * c->places, *restrict dx = c->stream ? block : to;
      if (c->p.log_probs) {
#pragma omp simd
        for (int64_t p = 0; p < at.k; p++) {
          const REAL d = (hit[p] == l ? -own[p] : 0) - even[p] * weight;
          dx[p] = hit[p] < 0 ? 0 : d;
        }
      } else {
#pragma omp simd
        for (int64_t p = 0; p < at.k; p++) {
          const REAL d = FN(ty_exp_weight)(x[p] - lse[p]) * all[p] - even[p] * weight;
          dx[p] = hit[p] < 0 ? 0 : d - (hit[p] == l ? own[p] : 0);
        }
      }
      if (c->stream) stream_copy(to, block, (size_t)at.k * sizeof(REAL));
    }
  }
  if (c->stream) stream_end();
}
