/* Tiles of matmul_trit for one type. Included by trit.c. */

/* The signed sums of `n` numbers, at most five; those of the rest count as 0. The place of a sum has the trits plus 1
 * as its digits in base 3, the first the lowest; places from 243 on repeat the first ones, as their digits do. */
static void FN(sums)(const REAL *x, int64_t n, REAL *sum) {
  int64_t count = 1;
  sum[0] = 0;
  for (int64_t i = 0; i < TRITS; i++, count *= 3) {
    const REAL add = i < n ? x[i] : 0;
    for (int64_t s = 0; s < count; s++) {
      const REAL old = sum[s];
      sum[s] = old - add;
      sum[count + s] = old;
      sum[2 * count + s] = old + add;
    }
  }
  for (int64_t s = count; s < SUMS; s++) sum[s] = sum[s - count];
}

static inline REAL FN(looked_up)(const REAL *sum, const uint8_t *code, int64_t bytes) {
  REAL even = 0, odd = 0;
  int64_t b = 0;
  for (; b + 1 < bytes; b += 2) {
    even += sum[b * SUMS + code[b]];
    odd += sum[(b + 1) * SUMS + code[b + 1]];
  }
  if (b < bytes) even += sum[b * SUMS + code[b]];
  return even + odd;
}

static void FN(tiles)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const ty_kernel_args *k = j->k;
  const size_t bytes = sizeof(REAL) * SUMS * (size_t)j->bytes;
  REAL *sum = ty_scratch_alloc(bytes);
  if (!sum) {
    j->failed = true;
    return;
  }
  for (int64_t tile = begin; tile < end && !ty_interrupted; tile++) {
    const int64_t line = tile / j->tiles, first = tile % j->tiles * TILE;
    const int64_t last = first + TILE < j->rows ? first + TILE : j->rows;
    const REAL *x = (const REAL *)k->in[0]->data + line * j->columns;
    REAL *y = (REAL *)k->out[0]->data + line * j->rows;
    for (int64_t n = first; n < last; n++) y[n] = 0;
    for (int64_t g = 0; g < j->groups; g++) {
      const int64_t from = g * j->group, to = from + j->group < j->columns ? from + j->group : j->columns;
      for (int64_t b = 0; b < j->bytes; b++) {
        const int64_t at = from + b * TRITS;
        FN(sums)(x + at, to - at, sum + b * SUMS);
      }
      const uint8_t *code = (const uint8_t *)k->in[1]->data + (g * j->rows + first) * j->planes * j->bytes;
      const REAL *scale = (const REAL *)j->scales + (g * j->rows + first) * j->planes;
      for (int64_t n = first; n < last; n++)
        for (int64_t p = 0; p < j->planes; p++, code += j->bytes) y[n] += *scale++ * FN(looked_up)(sum, code, j->bytes);
    }
  }
  ty_scratch_free(sum, bytes);
}
