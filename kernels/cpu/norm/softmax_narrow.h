/* Part of softmax.c: rows of at most NARROW_WIDTH f32. */

NARROW_INLINE void narrow_softmax(const job *c, int64_t begin, int64_t end, int v, __mmask16 last) {
  const int64_t n = c->n;
  for (int64_t row = begin; row < end; row++) {
    __m512 x[NARROW_MOST];
    narrow_load(x, (const float *)c->x + row * n, v, last, -INFINITY);
    const __m512 top = _mm512_set1_ps(narrow_max(x, v));
    NARROW_EACH(i) x[i] = ty_exp_weights(_mm512_sub_ps(x[i], top));
    /* Without any finite element all of this is NaN, and so are the lanes beyond the row, which are not stored. */
    const __m512 scale = _mm512_set1_ps(1 / narrow_sum(x, v));
    NARROW_EACH(i) x[i] = _mm512_mul_ps(x[i], scale);
    narrow_store((float *)c->out + row * n, x, v, last);
  }
}

NARROW_INLINE void narrow_log_softmax(const job *c, int64_t begin, int64_t end, int v, __mmask16 last) {
  const int64_t n = c->n;
  float top[NARROW_LANES], sum[NARROW_LANES];
  for (int64_t row = begin; row < end; row += NARROW_LANES) {
    int rows = end - row < NARROW_LANES ? (int)(end - row) : NARROW_LANES;
    narrow_log_sums((const float *)c->x + row * n, n, rows, top, sum, v, last);
    for (int r = 0; r < rows; r++) {
      __m512 x[NARROW_MOST];
      narrow_load(x, (const float *)c->x + (row + r) * n, v, last, 0);
      NARROW_EACH(i)
      x[i] = _mm512_sub_ps(_mm512_sub_ps(x[i], _mm512_set1_ps(top[r])), _mm512_set1_ps(sum[r]));
      narrow_store((float *)c->out + (row + r) * n, x, v, last);
    }
  }
}

NARROW_INLINE void narrow_backward(const job *c, int64_t begin, int64_t end, int v, __mmask16 last) {
  const int64_t n = c->n;
  for (int64_t row = begin; row < end; row++) {
    __m512 y[NARROW_MOST], g[NARROW_MOST];
    narrow_load(y, (const float *)c->x + row * n, v, last, 0);
    narrow_load(g, (const float *)c->g + row * n, v, last, 0);
    if (c->log) {
      const __m512 sum = _mm512_set1_ps(narrow_sum(g, v));
      NARROW_EACH(i) g[i] = _mm512_fnmadd_ps(ty_exp_weights(y[i]), sum, g[i]);
    } else {
      __m512 p[NARROW_MOST];
      NARROW_EACH(i) p[i] = _mm512_mul_ps(g[i], y[i]);
      const __m512 sum = _mm512_set1_ps(narrow_sum(p, v));
      NARROW_EACH(i) g[i] = _mm512_mul_ps(y[i], _mm512_sub_ps(g[i], sum));
    }
    narrow_store((float *)c->out + row * n, g, v, last);
  }
}

static void narrow_lines(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  if (c->log) NARROW_CALL(narrow_log_softmax, c->n, c, begin, end);
  else NARROW_CALL(narrow_softmax, c->n, c, begin, end);
}

static void narrow_lines_backward(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  NARROW_CALL(narrow_backward, c->n, c, begin, end);
}
