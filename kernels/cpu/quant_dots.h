/* y = x W' for few rows of x: each row of W is read once and multiplied with all rows of x. The product of a group is
 * (scale of w) (scale of x) (sum of code q - zero sum of q), and where there are mins less min (scale of x) (sum of q).
 * Included by quant_linear.c. */

/* out[r] for the rows of x, at most FEW. */
static void row_dots(ty_dtype dtype, const coded *x, int64_t rows, const char *row, const float *scale,
                     const float *min, float *out) {
  enum { PART = 256, LANES = 16 };
  uint8_t code[PART] __attribute__((aligned(64)));
  float sums[FEW][LANES] = { { 0 } };
  for (int64_t k0 = 0; k0 < x->k; k0 += PART) {
    int64_t n = x->k - k0 < PART ? x->k - k0 : PART;
    row_codes(dtype, row, k0, n, code);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t at = 0; at < n; at += 32) {
        int64_t first = r * x->k + k0 + at;
        const int8_t *restrict q = x->q + first;
        const uint8_t *restrict c = code + at;
        int32_t dot[2] = { 0, 0 };
        for (int i = 0; i < 16; i++) dot[0] += c[i] * q[i];
        for (int i = 16; i < 32; i++) dot[1] += c[i] * q[i];
        const int32_t *start = x->start + first / x->group;
        const float *w = scale + (k0 + at) / x->group;
        float total = (float)(dot[0] + start[0]) * w[0] + (x->group == 16 ? (float)(dot[1] + start[1]) * w[1] : 0);
        if (x->group == 32) total = (float)(dot[0] + dot[1] + start[0]) * w[0];
        float *sum = &sums[r][at / 32 % LANES];
        *sum += total * x->scale[first / 32];
        if (dtype == TY_Q4_K) *sum -= min[(k0 + at) / 32] * x->sum[first / 32];
      }
  }
  for (int64_t r = 0; r < rows; r++) {
    out[r] = 0;
    for (int i = 0; i < LANES; i++) out[r] += sums[r][i];
  }
}

/* Rows [begin, end) of W. */
static void dots_rows(void *context, int64_t begin, int64_t end) {
  product *p = context;
  const coded *x = p->x;
  size_t bytes = sizeof(float) * (size_t)(x->k / x->group + x->k / 32);
  float *scale = ty_scratch_alloc(bytes), *min = scale ? scale + x->k / x->group : NULL;
  if (!scale) {
    p->failed = true;
    return;
  }
  for (int64_t j = begin; j < end && !ty_interrupted; j++) {
    const char *row = p->w + j * p->w_row;
    row_scales(p->dtype, row, 0, x->k, scale, min);
    for (int64_t r0 = 0; r0 < p->rows; r0 += FEW) {
      int64_t rows = p->rows - r0 < FEW ? p->rows - r0 : FEW;
      coded part = *x;
      part.q += r0 * x->k, part.scale += r0 * x->k / 32, part.sum += r0 * x->k / 32;
      part.start += r0 * x->k / x->group;
      float y[FEW];
      row_dots(p->dtype, &part, rows, row, scale, min, y);
      for (int64_t r = 0; r < rows; r++) p->y[(r0 + r) * p->n + j] = y[r] + (p->bias ? p->bias[j] : 0);
    }
  }
  ty_scratch_free(scale, bytes);
}
