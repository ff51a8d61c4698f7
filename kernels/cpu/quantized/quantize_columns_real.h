/* Tiles of quantize_columns for one type. Included by quantize_columns.c. */

typedef REAL FN(lanes) __attribute__((vector_size(LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

static void FN(tiles)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const ty_kernel_args *k = j->k;
  const int64_t n = j->n;
  const REAL top = (REAL)(((const ty_p_dim *)k->params)->k - 1);
  const REAL *w = k->in[0]->data, *factor = k->in[1]->data, *scale = k->in[2]->data, *offset = k->in[3]->data;
  uint8_t *code = k->out[0]->data;
  REAL *error = k->out[1]->data;
  size_t bytes = sizeof(REAL) * (size_t)n * LANES;
  REAL(*column)[LANES] = ty_scratch_alloc(bytes);
  if (!column) {
    j->failed = true;
    return;
  }
  for (int64_t tile = begin; tile < end && !ty_interrupted; tile++) {
    const int64_t first = tile * LANES, rows = j->rows - first < LANES ? j->rows - first : LANES;
    for (int64_t i = 0; i < n; i++)
      for (int64_t r = 0; r < LANES; r++) column[i][r] = r < rows ? w[(first + r) * n + i] : 0;
    for (int64_t i = 0; i < n; i++) {
      REAL s[LANES], at[LANES], q[LANES], e[LANES];
      const REAL pivot = factor[i * n + i];
      for (int64_t r = 0; r < LANES; r++) {
        const int64_t from = (first + (r < rows ? r : 0)) * n + i;
        s[r] = scale[from], at[r] = offset[from];
      }
      for (int r = 0; r < LANES; r++) {
        REAL x = RINT((column[i][r] - at[r]) / s[r]);
        x = s[r] != 0 && x > 0 ? x : 0; /* NaN: 0 */
        q[r] = x < top ? x : top;
        e[r] = (column[i][r] - (s[r] * q[r] + at[r])) / pivot;
      }
      for (int64_t r = 0; r < rows; r++) {
        code[(first + r) * n + i] = (uint8_t)q[r];
        error[(first + r) * n + i] = e[r];
      }
      const FN(lanes) off = *(const FN(lanes) *)(const void *)e;
      for (int64_t next = i + 1; next < n; next++) *(FN(lanes) *)(void *)column[next] -= off * factor[i * n + next];
    }
  }
  ty_scratch_free(column, bytes);
}
