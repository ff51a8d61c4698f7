/* Interpolation for one element type; included by interpolate.c with REAL and NAME(x) set. */

typedef struct NAME(resize) {
  const REAL *from;
  REAL *to;
  int64_t h, w, oh, ow;
  const ty_sample *rows, *columns; /* where each row and column of the result lies in the image */
  bool linear, doubled, halves;    /* of twice as many columns: nearest, linear with half pixels */
  bool *failed;
} NAME(resize);

/* A row of the image along the columns of the result. */
static void NAME(along)(const NAME(resize) * r, const REAL *restrict x, REAL *restrict y) {
  const ty_sample *restrict columns = r->columns;
  if (r->doubled) {
    for (int64_t j = 0; j < r->w; j++) y[2 * j] = y[2 * j + 1] = x[j];
  } else if (!r->linear) {
    for (int64_t j = 0; j < r->ow; j++) y[j] = x[columns[j].first];
  } else if (r->halves) {
    /* As written below; the weights of all but the ends are 1/4 and 3/4. */
    const REAL u = (REAL)0.25, v = (REAL)0.75;
    y[0] = x[0];
    for (int64_t j = 0; j + 1 < r->w; j++) {
      const REAL a = x[j], b = x[j + 1];
      y[2 * j + 1] = (1 - u) * a + u * b;
      y[2 * j + 2] = (1 - v) * a + v * b;
    }
    y[2 * r->w - 1] = x[r->w - 1];
  } else {
    for (int64_t j = 0; j < r->ow; j++) {
      const ty_sample s = columns[j];
      const REAL u = (REAL)s.weight;
      y[j] = (1 - u) * x[s.first] + u * x[s.second];
    }
  }
}

/* Each row of the image is resized along once, though several rows of the result lie between it and its neighbour. */
static void NAME(planes)(void *context, int64_t begin, int64_t end) {
  const NAME(resize) *r = context;
  const size_t bytes = sizeof(REAL) * 2 * (size_t)r->ow;
  REAL *room = r->linear ? ty_scratch_alloc(bytes) : NULL;
  if (r->linear && !room) {
    r->failed[0] = true;
    return;
  }
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict x = r->from + plane * r->h * r->w;
    REAL *restrict y = r->to + plane * r->oh * r->ow;
    int64_t have[2] = { -1, -1 }; /* the rows that are in the room */
    for (int64_t i = 0; i < r->oh; i++, y += r->ow) {
      const int64_t first = r->rows[i].first, second = r->rows[i].second;
      if (!r->linear) {
        if (have[0] == first) memcpy(y, y - r->ow, sizeof(REAL) * (size_t)r->ow);
        else NAME(along)(r, x + first * r->w, y);
        have[0] = first;
        continue;
      }
      const int upper = have[1] == first ? 1 : 0;
      REAL *top = room + upper * r->ow, *bottom = room + !upper * r->ow;
      if (have[upper] != first) NAME(along)(r, x + first * r->w, top);
      have[upper] = first;
      if (second == first) bottom = top;
      else {
        if (have[!upper] != second) NAME(along)(r, x + second * r->w, bottom);
        have[!upper] = second;
      }
      const REAL v = (REAL)r->rows[i].weight;
      for (int64_t j = 0; j < r->ow; j++) y[j] = (1 - v) * top[j] + v * bottom[j];
    }
  }
  if (room) ty_scratch_free(room, bytes);
}

/* The transpose: from the gradient of the result [oh, ow] to that of the image [h, w]. */
static void NAME(backward_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(resize) *r = context;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict g = r->from + plane * r->oh * r->ow;
    REAL *restrict x = r->to + plane * r->h * r->w;
    for (int64_t i = 0; i < r->h * r->w; i++) x[i] = 0;
    for (int64_t i = 0; i < r->oh; i++, g += r->ow) {
      REAL *top = x + r->rows[i].first * r->w, *bottom = x + r->rows[i].second * r->w;
      if (!r->linear) {
        for (int64_t j = 0; j < r->ow; j++) top[r->columns[j].first] += g[j];
        continue;
      }
      REAL v = (REAL)r->rows[i].weight;
      for (int64_t j = 0; j < r->ow; j++) {
        ty_sample s = r->columns[j];
        REAL u = (REAL)s.weight, a = (1 - v) * g[j], b = v * g[j];
        top[s.first] += (1 - u) * a;
        top[s.second] += u * a;
        bottom[s.first] += (1 - u) * b;
        bottom[s.second] += u * b;
      }
    }
  }
}
