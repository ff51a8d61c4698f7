/* Pooling for one element type; included by pool.c with REAL and NAME(x) set. */

typedef struct NAME(pool) {
  const REAL *x;
  REAL *y;
  int64_t *position; /* of the largest, or NULL */
  int64_t h, w, oh, ow;
  const ty_p_pool *p;
} NAME(pool);

static void NAME(max_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(pool) *q = context;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict x = q->x + plane * q->h * q->w;
    REAL *restrict y = q->y + plane * q->oh * q->ow;
    int64_t *restrict position = q->position + plane * q->oh * q->ow;
    for (int64_t oy = 0; oy < q->oh; oy++) {
      window v = window_of(q->p, 0, oy, q->h, q->oh);
      for (int64_t ox = 0; ox < q->ow; ox++) {
        window u = window_of(q->p, 1, ox, q->w, q->ow);
        int64_t best = v.first * q->w + u.first;
        REAL most = x[best];
        for (int64_t i = v.first; i < v.last; i += v.step)
          for (int64_t j = u.first; j < u.last; j += u.step) {
            REAL t = x[i * q->w + j];
            if (t > most || (t != t && most == most)) { /* the first NaN wins */
              most = t;
              best = i * q->w + j;
            }
          }
        y[oy * q->ow + ox] = most;
        position[oy * q->ow + ox] = best;
      }
    }
  }
}

static void NAME(mean_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(pool) *q = context;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict x = q->x + plane * q->h * q->w;
    REAL *restrict y = q->y + plane * q->oh * q->ow;
    for (int64_t oy = 0; oy < q->oh; oy++) {
      window v = window_of(q->p, 0, oy, q->h, q->oh);
      for (int64_t ox = 0; ox < q->ow; ox++) {
        window u = window_of(q->p, 1, ox, q->w, q->ow);
        REAL sum = 0;
        for (int64_t i = v.first; i < v.last; i++) {
          const REAL *restrict row = x + i * q->w;
          for (int64_t j = u.first; j < u.last; j++) sum += row[j];
        }
        y[oy * q->ow + ox] = sum / (REAL)(v.count * u.count);
      }
    }
  }
}

/* Here x is the gradient of the result [oh, ow], y that of the input [h, w]. */
static void NAME(spread_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(pool) *q = context;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict g = q->x + plane * q->oh * q->ow;
    REAL *restrict y = q->y + plane * q->h * q->w;
    for (int64_t i = 0; i < q->h * q->w; i++) y[i] = 0;
    for (int64_t oy = 0; oy < q->oh; oy++) {
      window v = window_of(q->p, 0, oy, q->h, q->oh);
      for (int64_t ox = 0; ox < q->ow; ox++) {
        window u = window_of(q->p, 1, ox, q->w, q->ow);
        REAL share = g[oy * q->ow + ox] / (REAL)(v.count * u.count);
        for (int64_t i = v.first; i < v.last; i++) {
          REAL *restrict row = y + i * q->w;
          for (int64_t j = u.first; j < u.last; j++) row[j] += share;
        }
      }
    }
  }
}
