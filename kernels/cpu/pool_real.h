/* Pooling for one element type; included by pool.c with REAL and NAME(x) set. */

typedef struct NAME(pool) {
  const REAL *x;
  REAL *y;
  int64_t *position; /* of the largest, or NULL */
  int64_t h, w, oh, ow;
  const ty_p_pool *p;
} NAME(pool);

/* The first and last of the windows j0 .. j1 (last < first: none) whose tap at column `shift` + j * stride lies in the
 * image. */
static inline void NAME(inside)(int64_t shift, int64_t stride, int64_t w, int64_t j0, int64_t j1, int64_t *first,
                                int64_t *last) {
  int64_t lo = shift < 0 ? (-shift + stride - 1) / stride : 0, hi = shift < w ? (w - 1 - shift) / stride : -1;
  *first = lo < j0 ? j0 : lo < j1 ? lo : j1;
  *last = hi < j1 - 1 ? hi : j1 - 1;
}

/* The body for the usual strides, which the compiler then knows. */
#define FOR_STRIDE(stride, BODY) \
  if ((stride) == 1) {           \
    BODY(1)                      \
  } else if ((stride) == 2) {    \
    BODY(2)                      \
  } else {                       \
    BODY(stride)                 \
  }

/* A block of windows of one output row, tap by tap, so that the first in order wins. */
static void NAME(max_block)(const NAME(pool) * q, const REAL *restrict x, int64_t oy, int64_t j0, int64_t j1,
                            REAL *restrict y, int64_t *restrict position) {
  const ty_p_pool *p = q->p;
  REAL most[BLOCK], here[BLOCK];
  INTEGER where[BLOCK]; /* of the best one, counted from the window's first position; -1: none yet */
  int64_t width = (j1 - j0 + 15) / 16 * 16, row0 = oy * p->stride[0] - p->padding[0], first, last;
  for (int64_t j = 0; j < width; j++) {
    most[j] = -(REAL)INFINITY;
    where[j] = -1;
  }
  for (int64_t ky = 0; ky < p->kernel[0]; ky++) {
    int64_t row = row0 + ky * p->dilation[0];
    if (row < 0 || row >= q->h) continue;
    for (int64_t kx = 0; kx < p->kernel[1]; kx++) {
      int64_t shift = kx * p->dilation[1] - p->padding[1];
      NAME(inside)(shift, p->stride[1], q->w, j0, j1, &first, &last);
      const REAL *restrict from = x + row * q->w + shift;
      INTEGER at = (INTEGER)(ky * p->dilation[0] * q->w + kx * p->dilation[1]);
      for (int64_t j = 0; j < first - j0; j++) here[j] = -(REAL)INFINITY;
#define BODY(stride) \
  for (int64_t j = first; j <= last; j++) here[j - j0] = from[j * (stride)];
      FOR_STRIDE(p->stride[1], BODY)
#undef BODY
      for (int64_t j = (last < first ? first - 1 : last) + 1 - j0; j < width; j++) here[j] = -(REAL)INFINITY;
      for (int64_t j = 0; j < width; j += 16)
        for (int i = 0; i < 16; i++) {
          REAL t = here[j + i], m = most[j + i];
          bool better = (t > m) | ((t != t) & (m == m)); /* the first NaN wins */
          most[j + i] = better ? t : m;
          where[j + i] = better ? at : where[j + i];
        }
    }
  }
  for (int64_t j = j0; j < j1; j++) {
    y[j] = most[j - j0];
    position[j] = row0 * q->w + j * p->stride[1] - p->padding[1] + where[j - j0];
    if (where[j - j0] >= 0) continue;
    ty_window v = ty_window_of(p, 0, oy, q->h, q->oh),
              u = ty_window_of(p, 1, j, q->w, q->ow); /* nothing but -infinity: the first */
    position[j] = v.first * q->w + u.first;
  }
}

static void NAME(max_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(pool) *q = context;
  for (int64_t plane = begin; plane < end; plane++)
    for (int64_t oy = 0; oy < q->oh; oy++)
      for (int64_t j = 0; j < q->ow; j += BLOCK) NAME(max_block)
  (q, q->x + plane * q->h * q->w, oy, j, q->ow - j < BLOCK ? q->ow : j + BLOCK, q->y + (plane * q->oh + oy) * q->ow,
   q->position + (plane * q->oh + oy) * q->ow);
}

static void NAME(adaptive_max_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(pool) *q = context;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict x = q->x + plane * q->h * q->w;
    REAL *restrict y = q->y + plane * q->oh * q->ow;
    int64_t *restrict position = q->position + plane * q->oh * q->ow;
    for (int64_t oy = 0; oy < q->oh; oy++) {
      ty_window v = ty_window_of(q->p, 0, oy, q->h, q->oh);
      for (int64_t ox = 0; ox < q->ow; ox++) {
        ty_window u = ty_window_of(q->p, 1, ox, q->w, q->ow);
        int64_t best = v.first * q->w + u.first;
        REAL most = x[best];
        for (int64_t i = v.first; i < v.last; i++)
          for (int64_t j = u.first; j < u.last; j++) {
            REAL t = x[i * q->w + j];
            if (t > most || (t != t && most == most)) {
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
  const ty_p_pool *p = q->p;
  /* Windows whole .. cut - 1 of a row lie in the image with all they have. */
  const int64_t before = (p->padding[1] + p->stride[1] - 1) / p->stride[1];
  const int64_t whole = before < q->ow ? before : q->ow, room = q->w + p->padding[1] - p->kernel[1];
  const int64_t fit = room < 0 ? 0 : room / p->stride[1] + 1, cut = fit < whole ? whole : fit < q->ow ? fit : q->ow;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict x = q->x + plane * q->h * q->w;
    REAL *restrict y = q->y + plane * q->oh * q->ow;
    for (int64_t oy = 0; oy < q->oh; oy++, y += q->ow) {
      ty_window v = ty_window_of(p, 0, oy, q->h, q->oh);
      for (int64_t j = 0; j < q->ow; j++) y[j] = 0;
      for (int64_t row = v.first; row < v.last; row++)
        for (int64_t kx = 0; kx < p->kernel[1]; kx++) {
          int64_t shift = kx - p->padding[1], first, last;
          NAME(inside)(shift, p->stride[1], q->w, 0, q->ow, &first, &last);
          const REAL *restrict from = x + row * q->w + shift;
#define BODY(stride) \
  for (int64_t j = first; j <= last; j++) y[j] += from[j * (stride)];
          FOR_STRIDE(p->stride[1], BODY)
#undef BODY
        }
      int64_t j = 0;
      for (; j < whole; j++) y[j] /= (REAL)(v.count * ty_window_of(p, 1, j, q->w, q->ow).count);
      if (whole < cut) {
        const REAL count = (REAL)(v.count * ty_window_of(p, 1, whole, q->w, q->ow).count);
        for (; j < cut; j++) y[j] /= count;
      }
      for (; j < q->ow; j++) y[j] /= (REAL)(v.count * ty_window_of(p, 1, j, q->w, q->ow).count);
    }
  }
}

static void NAME(adaptive_mean_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(pool) *q = context;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict x = q->x + plane * q->h * q->w;
    REAL *restrict y = q->y + plane * q->oh * q->ow;
    for (int64_t oy = 0; oy < q->oh; oy++) {
      ty_window v = ty_window_of(q->p, 0, oy, q->h, q->oh);
      for (int64_t ox = 0; ox < q->ow; ox++) {
        ty_window u = ty_window_of(q->p, 1, ox, q->w, q->ow);
        REAL sum = 0;
        for (int64_t i = v.first; i < v.last; i++) {
          const REAL *restrict row = x + i * q->w;
#pragma omp simd reduction(+ : sum)
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
      ty_window v = ty_window_of(q->p, 0, oy, q->h, q->oh);
      for (int64_t ox = 0; ox < q->ow; ox++) {
        ty_window u = ty_window_of(q->p, 1, ox, q->w, q->ow);
        REAL share = g[oy * q->ow + ox] / (REAL)(v.count * u.count);
        for (int64_t i = v.first; i < v.last; i++) {
          REAL *restrict row = y + i * q->w;
          for (int64_t j = u.first; j < u.last; j++) row[j] += share;
        }
      }
    }
  }
}

static void NAME(spread_maxima)(void *context, int64_t begin, int64_t end) {
  spread *s = context;
  bool bad = false;
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict g = (const REAL *)s->g + plane * s->results;
    const int64_t *restrict position = s->position + plane * s->results;
    REAL *restrict y = (REAL *)s->dx + plane * s->pixels;
    for (int64_t i = 0; i < s->pixels; i++) y[i] = 0;
    for (int64_t i = 0; i < s->results; i++) {
      if ((uint64_t)position[i] < (uint64_t)s->pixels) y[position[i]] += g[i];
      else bad = true;
    }
  }
  if (bad) atomic_store(&s->bad, true);
}
