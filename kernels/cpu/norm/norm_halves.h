/* Part of norm.c: layer_norm and rms_norm of rows of f16 and bf16. Statistics, weights and their gradients are f32. */

/* The job of rows from `row` on whose x, g and results are at `room`, one after the other, `size` elements each. */
static job half_part(const job *c, float *room, int64_t size, int64_t row) {
  job part = *c;
  part.stream = false;
  part.x = room, part.g = room + size, part.y = part.dx = room + 2 * size;
  if (c->mean) part.mean = (const float *)c->mean + row;
  if (c->rstd) part.rstd = (const float *)c->rstd + row;
  if (c->mean_out) part.mean_out = (float *)c->mean_out + row;
  if (c->rstd_out) part.rstd_out = (float *)c->rstd_out + row;
  return part;
}

static void half_rows(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->width, most = halves_rows(n), size = most * n;
  const size_t bytes = 3 * (size_t)size * sizeof(float);
  float *room = ty_scratch_alloc(bytes);
  if (!room) {
    __atomic_store_n(c->failed, true, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t row = begin; row < end; row += most) {
    const int64_t rows = end - row < most ? end - row : most;
    job part = half_part(c, room, size, row);
    ty_half_load(c->dtype, room, (const uint16_t *)c->x + row * n, rows * n);
#if defined(__AVX512F__)
    if (n <= NARROW_WIDTH) narrow_rows(&part, 0, rows);
    else
#endif
      rows_f32(&part, 0, rows);
    halves_put(c->dtype, (uint16_t *)c->y + row * n, part.y, room, rows * n, c->stream);
  }
  if (c->stream) stream_end();
  ty_scratch_free(room, bytes);
}

/* begin and end count chunks. */
static void half_rows_backward(void *context, int64_t begin, int64_t end) {
  const job *c = context;
  const int64_t n = c->width, most = halves_rows(n) < TOGETHER ? TOGETHER : halves_rows(n), size = most * n;
  const size_t bytes = 3 * (size_t)size * sizeof(float);
  float *room = ty_scratch_alloc(bytes), *dw, *db;
  if (!room) {
    __atomic_store_n(c->failed, true, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t chunk = begin; chunk < end; chunk++) {
    chunk_sums_f32(c, chunk, &dw, &db);
    const int64_t stop = (chunk + 1) * c->chunk < c->rows ? (chunk + 1) * c->chunk : c->rows;
    for (int64_t row = chunk * c->chunk; row < stop; row += most) {
      const int64_t rows = stop - row < most ? stop - row : most;
      job part = half_part(c, room, size, row);
      ty_half_load(c->dtype, room, (const uint16_t *)c->x + row * n, rows * n);
      ty_half_load(c->dtype, room + size, (const uint16_t *)c->g + row * n, rows * n);
#if defined(__AVX512F__)
      if (n <= NARROW_WIDTH) narrow_backward(&part, 0, rows, dw, db);
      else
#endif
        some_backward_f32(&part, 0, rows, dw, db);
      halves_put(c->dtype, (uint16_t *)c->dx + row * n, part.dx, room, rows * n, c->stream);
    }
  }
  if (c->stream) stream_end();
  ty_scratch_free(room, bytes);
}
