/* Tiles of matmul_trit for one type. Included by trit.c. */

/* The signed sums of `n` numbers, at most five, in the order of their bytes; those of the rest count as 0. */
static void FN(sums)(const REAL *x, int64_t n, REAL *sum) {
  REAL all[CODES] = { 0 }; /* the trits plus 1 are the digits of a place in base 3 */
  int64_t count = 1;
  for (int64_t i = 0; i < TRITS; i++, count *= 3) {
    const REAL add = i < n ? x[i] : 0;
    for (int64_t s = 0; s < count; s++) {
      const REAL old = all[s];
      all[s] = old - add;
      all[count + s] = old;
      all[2 * count + s] = old + add;
    }
  }
  for (int64_t s = 0; s < SIGN; s++) {
    sum[s] = all[LARGEST + at_most(s, LARGEST)];
    sum[SIGN + s] = -sum[s];
  }
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
    const int64_t line = tile / j->tiles, first = tile % j->tiles * TALL, last = at_most(first + TALL, j->blocks);
    const REAL *x = (const REAL *)k->in[0]->data + line * j->columns;
    REAL *y = (REAL *)k->out[0]->data + line * j->rows;
    for (int64_t n = first * BLOCK; n < at_most(last * BLOCK, j->rows); n++) y[n] = 0;
    for (int64_t g = 0; g < j->groups; g++) {
      const int64_t from = g * j->group, to = at_most(from + j->group, j->columns);
      for (int64_t b = 0; b < j->bytes; b++) {
        const int64_t at = from + b * TRITS;
        FN(sums)(x + at, to - at, sum + b * SUMS);
      }
      for (int64_t block = first; block < last; block++) {
        const int64_t row = block * BLOCK, rows = at_most(j->rows - row, BLOCK);
        const REAL *scale = (const REAL *)j->scales + (g * j->rows + row) * j->planes;
        for (int64_t p = 0; p < j->planes; p++) {
          const uint8_t *code = codes_of(j, g, block) + p * BLOCK;
          REAL part[BLOCK] = { 0 };
          for (int64_t b = 0; b < j->bytes; b++, code += j->planes * BLOCK)
            for (int64_t r = 0; r < BLOCK; r++) part[r] += sum[b * SUMS + code[r]];
          for (int64_t r = 0; r < rows; r++) y[row + r] += scale[r * j->planes + p] * part[r];
        }
      }
    }
  }
  ty_scratch_free(sum, bytes);
}
