/* Part of norm.c: layer_norm and rms_norm of rows of at most NARROW_WIDTH f32. */

NARROW_INLINE void narrow_forward(const job *c, int64_t begin, int64_t end, int v, __mmask16 last) {
  const int64_t n = c->width;
  const float share = 1 / (float)n, eps = (float)c->eps;
  __m512 w[NARROW_MOST], b[NARROW_MOST];
  NARROW_EACH(i) w[i] = _mm512_set1_ps(1), b[i] = _mm512_setzero_ps();
  if (c->weight) narrow_load(w, c->weight, v, last, 0);
  if (c->bias) narrow_load(b, c->bias, v, last, 0);
  for (int64_t row = begin; row < end; row++) {
    __m512 x[NARROW_MOST], square[NARROW_MOST];
    narrow_load(x, (const float *)c->x + row * n, v, last, 0);
    if (c->centred) { /* around the first element, so that the sum rounds off little of what varies */
      const float first = ((const float *)c->x)[row * n];
      NARROW_EACH(i) x[i] = _mm512_maskz_sub_ps(narrow_mask(i, v, last), x[i], _mm512_set1_ps(first));
      const float mean = narrow_sum(x, v) * share;
      NARROW_EACH(i) x[i] = _mm512_maskz_sub_ps(narrow_mask(i, v, last), x[i], _mm512_set1_ps(mean));
      ((float *)c->mean_out)[row] = first + mean;
    }
    NARROW_EACH(i) square[i] = _mm512_mul_ps(x[i], x[i]);
    const float rstd = 1 / sqrtf(narrow_sum(square, v) * share + eps);
    ((float *)c->rstd_out)[row] = rstd;
    NARROW_EACH(i) x[i] = _mm512_fmadd_ps(_mm512_mul_ps(x[i], _mm512_set1_ps(rstd)), w[i], b[i]);
    narrow_store((float *)c->y + row * n, x, v, last);
  }
}

/* Rows of a chunk; its dw and db, to which they add, stay in registers. */
NARROW_INLINE void narrow_chunk(const job *c, int64_t begin, int64_t end, float *dw_out, float *db_out, int v,
                                __mmask16 last) {
  const int64_t n = c->width;
  const float share = 1 / (float)n;
  __m512 w[NARROW_MOST], dw[NARROW_MOST], db[NARROW_MOST];
  NARROW_EACH(i) w[i] = _mm512_set1_ps(1), dw[i] = db[i] = _mm512_setzero_ps();
  if (c->weight) narrow_load(w, c->weight, v, last, 0);
  if (dw_out) narrow_load(dw, dw_out, v, last, 0);
  if (db_out) narrow_load(db, db_out, v, last, 0);
  for (int64_t row = begin; row < end; row++) {
    __m512 h[NARROW_MOST], u[NARROW_MOST], p[NARROW_MOST];
    const __m512 mean = _mm512_set1_ps(c->centred ? ((const float *)c->mean)[row] : 0);
    const __m512 rstd = _mm512_set1_ps(((const float *)c->rstd)[row]);
    narrow_load(h, (const float *)c->x + row * n, v, last, 0);
    narrow_load(u, (const float *)c->g + row * n, v, last, 0);
    NARROW_EACH(i) {
      h[i] = _mm512_mul_ps(_mm512_sub_ps(h[i], mean), rstd);
      dw[i] = _mm512_fmadd_ps(u[i], h[i], dw[i]), db[i] = _mm512_add_ps(db[i], u[i]);
      u[i] = _mm512_mul_ps(u[i], w[i]); /* 0 beyond the row, because g is */
      p[i] = _mm512_mul_ps(u[i], h[i]);
    }
    const __m512 a = _mm512_set1_ps(c->centred ? narrow_sum(u, v) * share : 0);
    const __m512 a_h = _mm512_set1_ps(narrow_sum(p, v) * share);
    NARROW_EACH(i) u[i] = _mm512_mul_ps(rstd, _mm512_fnmadd_ps(h[i], a_h, _mm512_sub_ps(u[i], a)));
    narrow_store((float *)c->dx + row * n, u, v, last);
  }
  if (dw_out) narrow_store(dw_out, dw, v, last);
  if (db_out) narrow_store(db_out, db, v, last);
}

static void narrow_rows(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  NARROW_CALL(narrow_forward, c->width, c, begin, end);
}

static void narrow_backward(const job *c, int64_t row, int64_t stop, float *dw, float *db) {
  NARROW_CALL(narrow_chunk, c->width, c, row, stop, dw, db);
}

static void narrow_rows_backward(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  for (int64_t chunk = begin; chunk < end; chunk++) {
    float *dw, *db;
    chunk_sums_f32(c, chunk, &dw, &db);
    int64_t first = chunk * c->chunk, stop = first + c->chunk < c->rows ? first + c->chunk : c->rows;
    narrow_backward(c, first, stop, dw, db);
  }
}
