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

/* A vector, and what comparing two gives. */
typedef REAL NAME(lanes) __attribute__((vector_size(POOL_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INTEGER NAME(marks) __attribute__((vector_size(POOL_BYTES), aligned(sizeof(REAL)), may_alias));

/* x where marked, else y. By lanes: gcc asks of bytes whether they are negative before it blends them. */
static inline NAME(marks) NAME(pick)(NAME(marks) marked, NAME(marks) x, NAME(marks) y) {
#if defined(__AVX2__)
  if (sizeof(REAL) == 4) return (NAME(marks))_mm256_blendv_ps((__m256)y, (__m256)x, (__m256)marked);
  return (NAME(marks))_mm256_blendv_pd((__m256d)y, (__m256d)x, (__m256d)marked);
#else
  return (x & marked) | (y & ~marked);
#endif
}

/* Where x takes the place of the best so far: where it is larger, and the first NaN. */
static inline NAME(marks) NAME(better)(NAME(lanes) x, NAME(lanes) best) {
#if defined(__AVX2__)
  if (sizeof(REAL) == 4) return (NAME(marks))pool_better((__m256)x, (__m256)best);
#endif
  return ~(x <= best) & (best == best);
}

/* The larger of each, with where it is; of equals the one that was there, and the first NaN. */
static inline __attribute__((always_inline)) void NAME(larger)(NAME(lanes) * best, NAME(marks) * at, NAME(lanes) x,
                                                               NAME(marks) here) {
  const NAME(marks) better = NAME(better)(x, *best);
  *best = (NAME(lanes))NAME(pick)(better, (NAME(marks))x, (NAME(marks)) * best);
  *at = NAME(pick)(better, here, *at);
}

/* Of a row: the largest of each window's taps along it, and which. */
typedef struct NAME(maxima) {
  REAL most[BLOCK] __attribute__((aligned(64))); /* a vector across lines would be slow to come back */
  INTEGER where[BLOCK];
} NAME(maxima);

enum { NAME(LANES) = POOL_BYTES / sizeof(REAL) };
#define LANES NAME(LANES)

/* A part of a row that begins at `start`, possibly before it, and what lies beyond the edges: `outside`. Of stride 2
 * its even and odd elements. */
static inline __attribute__((always_inline)) void NAME(split_row)(const REAL *restrict x, int64_t w, int64_t start,
                                                                  int64_t stride, int64_t n, REAL outside,
                                                                  REAL (*restrict part)[FEW_ROOM]) {
  const int64_t first = start < 0 ? (-start + stride - 1) / stride : 0, fit = start < w ? (w - start) / stride : 0;
  const int64_t low = first < n ? first : n, most = fit < n ? fit : n, high = most < low ? low : most;
  for (int64_t i = 0; i < n; i++) {
    if (i == low) i = high; /* from where on they are not whole inside */
    for (int64_t k = 0; k < stride && i < n; k++) {
      const int64_t at = start + i * stride + k;
      part[k][i] = at >= 0 && at < w ? x[at] : outside;
    }
  }
  const REAL *restrict from = x + start;
  if (stride == 1) {
    for (int64_t i = low; i < high; i++) part[0][i] = from[i];
  } else {
    for (int64_t i = low; i < high; i++) part[0][i] = from[2 * i], part[1][i] = from[2 * i + 1];
  }
}

/* Of a row of the image the largest of each window's `kernel` taps along it, and which tap that is. part: scratch. */
static inline __attribute__((always_inline)) void NAME(max_along)(const REAL *restrict row, int64_t w, int64_t start,
                                                                  int64_t n, int kernel, int stride,
                                                                  REAL (*restrict part)[FEW_ROOM],
                                                                  NAME(maxima) *restrict along) {
#if defined(__AVX2__)
  if (sizeof(REAL) == 4 && kernel == 3 && stride == 2) {
    pool_max_threes((const void *)row, w, start, (void *)along->most, (void *)along->where,
                    (n + LANES - 1) / LANES * LANES);
    return;
  }
#endif
  NAME(split_row)(row, w, start, stride, n + (kernel - 1) / stride, -(REAL)INFINITY, part);
  /* In vectors by hand: gcc makes none of a chain of comparisons. */
  for (int64_t j = 0; j < n; j += LANES) {
    NAME(lanes) best = *(const NAME(lanes) *)(const void *)(part[0] + j);
    NAME(marks) at = { 0 };
#define TAP(k)                 \
  if (k < kernel) NAME(larger) \
  (&best, &at, *(const NAME(lanes) *)(const void *)(part[k % stride] + j + k / stride), (NAME(marks)){ 0 } + k);
    TAP(1)
    TAP(2)
#undef TAP
    *(NAME(lanes) *)(void *)(along->most + j) = best;
    *(NAME(marks) *)(void *)(along->where + j) = at;
  }
}

/* max_block() of windows of few taps, of all rows of results: along each row of the image first, once for all windows
 * that have it, then down. */
static inline __attribute__((always_inline)) void NAME(max_few)(const NAME(pool) * q, const REAL *restrict x,
                                                                int64_t j0, int64_t j1, REAL *restrict y,
                                                                int64_t *restrict position, int kernel, int stride) {
  const ty_p_pool *p = q->p;
  REAL part[2][FEW_ROOM] = { 0 }; /* whole vectors are read, of the last one the rest for nothing */
  NAME(maxima) ring[3], outside, found;
  int64_t held[3] = { -1, -1, -1 }; /* the rows in it, each at its number modulo 3 */
  const int64_t start = j0 * stride - p->padding[1], n = j1 - j0;
  for (int64_t j = 0; j < BLOCK; j++) outside.most[j] = -(REAL)INFINITY, outside.where[j] = 0;
  for (int64_t oy = 0; oy < q->oh; oy++) {
    const int64_t row0 = oy * p->stride[0] - p->padding[0];
    const NAME(maxima) * rows[3];
    for (int ky = 0; ky < kernel; ky++) {
      const int64_t row = row0 + ky, place = row % 3;
      rows[ky] = row < 0 || row >= q->h ? &outside : &ring[place];
      if (rows[ky] == &outside || held[place] == row) continue;
      NAME(max_along)(x + row * q->w, q->w, start, n, kernel, stride, part, &ring[place]);
      held[place] = row;
    }
    NAME(marks) none = { 0 };
    for (int64_t j = 0; j < n; j += LANES) {
      NAME(lanes) best = *(const NAME(lanes) *)(const void *)(rows[0]->most + j);
      NAME(marks) at = *(const NAME(marks) *)(const void *)(rows[0]->where + j);
#define ROW(k)                                                          \
  if (k < kernel) NAME(larger)                                          \
  (&best, &at, *(const NAME(lanes) *)(const void *)(rows[k]->most + j), \
   *(const NAME(marks) *)(const void *)(rows[k]->where + j) + k * (INTEGER)q->w);
      ROW(1)
      ROW(2)
#undef ROW
      none |= best == (NAME(lanes)){ 0 } - (REAL)INFINITY;
      *(NAME(lanes) *)(void *)(found.most + j) = best;
      *(NAME(marks) *)(void *)(found.where + j) = at;
      if (j + LANES <= n) *(NAME(lanes) *)(void *)(y + oy * q->ow + j0 + j) = best;
    }
    INTEGER nothing = 0;
    for (int i = 0; i < LANES; i++) nothing |= none[i];
    const int64_t first = row0 * q->w + start, out = oy * q->ow + j0;
    for (int64_t j = n / LANES * LANES; j < n; j++) y[out + j] = found.most[j];
    for (int64_t j = 0; j < n; j++) position[out + j] = first + j * stride + found.where[j];
    if (!nothing) continue;
    for (int64_t j = 0; j < n; j++) /* nothing but -infinity: the first */
      if (found.most[j] == -(REAL)INFINITY)
        position[out + j] = ty_window_of(p, 0, oy, q->h, q->oh).first * q->w +
                            ty_window_of(p, 1, j0 + j, q->w, q->ow).first;
  }
}

static void NAME(max_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(pool) *q = context;
  const ty_p_pool *p = q->p;
  const bool few = p->kernel[0] == p->kernel[1] && p->dilation[0] == 1 && p->dilation[1] == 1;
  const int64_t kernel = few ? p->kernel[0] : 0, stride = p->stride[1];
#if defined(__AVX2__)
  const bool pairs = sizeof(REAL) == 4 && stride == 2 && p->kernel[1] == 2 && p->dilation[1] == 1 &&
                     p->padding[0] == 0 && p->padding[1] == 0 && 2 * q->ow <= q->w;
  if (pairs && p->kernel[0] == 1 && (q->oh - 1) * p->stride[0] < q->h) {
    for (int64_t i = begin * q->oh; i < end * q->oh; i++) {
      const int64_t at = i % q->oh * p->stride[0] * q->w;
      pool_max_pairs((const void *)(q->x + i / q->oh * q->h * q->w + at), at, (void *)(q->y + i * q->ow),
                     q->position + i * q->ow, q->ow);
    }
    return;
  }
  if (pairs && kernel == 2 && p->stride[0] == 2 && 2 * q->oh <= q->h) {
    for (int64_t i = begin * q->oh; i < end * q->oh; i++) {
      const int64_t at = i % q->oh * 2 * q->w;
      const REAL *x = q->x + i / q->oh * q->h * q->w + at;
      pool_max_squares((const void *)x, (const void *)(x + q->w), q->w, at, (void *)(q->y + i * q->ow),
                       q->position + i * q->ow, q->ow);
    }
    return;
  }
#endif
  for (int64_t plane = begin; plane < end; plane++)
    for (int64_t j0 = 0; j0 < q->ow; j0 += BLOCK) {
      const int64_t j1 = q->ow - j0 < BLOCK ? q->ow : j0 + BLOCK;
      const REAL *x = q->x + plane * q->h * q->w;
      REAL *y = q->y + plane * q->oh * q->ow;
      int64_t *position = q->position + plane * q->oh * q->ow;
      if (kernel == 3 && stride == 2) NAME(max_few)(q, x, j0, j1, y, position, 3, 2);
      else if (kernel == 2 && stride == 2) NAME(max_few)(q, x, j0, j1, y, position, 2, 2);
      else if (kernel == 3 && stride == 1) NAME(max_few)(q, x, j0, j1, y, position, 3, 1);
      else
        for (int64_t oy = 0; oy < q->oh; oy++) NAME(max_block)(q, x, oy, j0, j1, y + oy * q->ow, position + oy * q->ow);
    }
}

#undef LANES

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

/* Sums of the windows j0 .. j1 of a row over the rows of `v`: down first, in whole vectors, then along. */
static void NAME(window_sums)(const NAME(pool) * q, const REAL *restrict x, ty_window v, int64_t j0, int64_t j1,
                              REAL *restrict y) {
  const ty_p_pool *p = q->p;
  const int64_t stride = p->stride[1], kernel = p->kernel[1], start = j0 * stride - p->padding[1];
  const int64_t n = ((j1 - j0 - 1) * stride + kernel + 15) / 16 * 16; /* whole vectors, as far as the row goes */
  const int64_t low = start < 0 ? -start : 0, inside = q->w - start < n ? q->w - start : n;
  const int64_t high = inside < low ? low : inside;
  REAL sums[MEAN_ROOM];
  for (int64_t i = 0; i < (low < n ? low : n); i++) sums[i] = 0;
  for (int64_t i = high; i < n; i++) sums[i] = 0;
  if (v.last - v.first == 3) {
    const REAL *restrict a = x + v.first * q->w + start, *restrict b = a + q->w, *restrict c = b + q->w;
    for (int64_t i = low; i < high; i++) sums[i] = a[i] + b[i] + c[i];
  } else {
    for (int64_t i = low; i < high; i++) sums[i] = 0;
    for (int64_t row = v.first; row < v.last; row++) {
      const REAL *restrict from = x + row * q->w + start;
      for (int64_t i = low; i < high; i++) sums[i] += from[i];
    }
  }
  y += j0;
#define ALONG(e) \
  for (int64_t j = 0; j < j1 - j0; j++) y[j] = (e);
  if (kernel == 2 && stride == 2) {
    ALONG(sums[2 * j] + sums[2 * j + 1])
#if defined(__AVX2__)
  } else if (kernel == 3 && stride == 2 && sizeof(REAL) == 4) {
    pool_sum_threes((const void *)sums, (void *)y, j1 - j0);
#endif
  } else if (kernel == 3 && stride == 2) {
    ALONG(sums[2 * j] + sums[2 * j + 1] + sums[2 * j + 2])
  } else if (kernel == 3 && stride == 1) {
    ALONG(sums[j] + sums[j + 1] + sums[j + 2])
  } else {
    ALONG(sums[j * stride])
    for (int64_t k = 1; k < kernel; k++) ALONG(y[j] + sums[j * stride + k])
  }
#undef ALONG
}

/* Asks for what is so far behind these n elements: windows take several rows at once, which caches do not foresee. */
static inline void NAME(expect)(const REAL *x, int64_t n) {
  const char *from = (const char *)x + STREAM_AHEAD;
  for (int64_t i = 0; i < n * (int64_t)sizeof(REAL); i += STREAM_LINE) __builtin_prefetch(from + i, 0, 2);
}

/* Sums down a window's rows, a few vectors at a time, which stay in registers. */
static inline void NAME(sums_down)(REAL *restrict sums, const REAL *restrict x, int64_t w, int64_t rows) {
  enum { LANES = POOL_BYTES / sizeof(REAL) };
  int64_t j = 0;
  for (; j + 4 * LANES <= w; j += 4 * LANES) {
    NAME(lanes) a = { 0 }, b = a, c = a, d = a;
    for (int64_t i = 0; i < rows; i++) {
      const NAME(lanes) *from = (const NAME(lanes) *)(const void *)(x + i * w + j);
      a += from[0], b += from[1], c += from[2], d += from[3];
    }
    NAME(lanes) *to = (NAME(lanes) *)(void *)(sums + j);
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
  }
  for (; j + LANES <= w; j += LANES) {
    NAME(lanes) a = { 0 };
    for (int64_t i = 0; i < rows; i++) a += *(const NAME(lanes) *)(const void *)(x + i * w + j);
    *(NAME(lanes) *)(void *)(sums + j) = a;
  }
  for (; j < w; j++) {
    sums[j] = 0;
    for (int64_t i = 0; i < rows; i++) sums[j] += x[i * w + j];
  }
}

static REAL NAME(sum_of)(const REAL *restrict x, int64_t n) {
  REAL sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += x[i];
  return sum;
}

/* sum_of() that does not set up vectors for a few. */
static inline REAL NAME(sum_of_some)(const REAL *restrict x, int64_t n) {
  if (n > 32) return NAME(sum_of)(x, n);
  REAL a = 0, b = 0, c = 0, d = 0;
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) a += x[i], b += x[i + 1], c += x[i + 2], d += x[i + 3];
  for (; i < n; i++) a += x[i];
  return (a + b) + (c + d);
}

/* The windows along a dimension, as far as there is room, so that none is divided out again for every row or plane. */
static void NAME(windows_along)(const NAME(pool) * q, int d, ty_window *windows) {
  const int64_t size = d ? q->w : q->h, n = d ? q->ow : q->oh;
  for (int64_t i = 0; i < n && i < BLOCK; i++) windows[i] = ty_window_of(q->p, d, i, size, n);
}

static inline ty_window NAME(window_at)(const NAME(pool) * q, int d, const ty_window *windows, int64_t i) {
  return i < BLOCK ? windows[i] : ty_window_of(q->p, d, i, d ? q->w : q->h, d ? q->ow : q->oh);
}

/* The means of one output row's windows that reach far or lie anywhere: down first, in whole vectors. */
static void NAME(wide_window_means)(const NAME(pool) * q, const ty_window *windows, const REAL *restrict x, ty_window v,
                                    REAL *restrict y) {
  REAL sums[MEAN_ROOM];
  const bool down = q->w <= MEAN_ROOM;
  if (down) {
    NAME(expect)(x + v.first * q->w, (v.last - v.first) * q->w);
    NAME(sums_down)(sums, x + v.first * q->w, q->w, v.last - v.first);
  }
  for (int64_t i = 0; i < q->ow; i++) {
    const ty_window u = NAME(window_at)(q, 1, windows, i);
    const int64_t n = u.last - u.first;
    REAL sum = 0;
    if (down) sum = NAME(sum_of_some)(sums + u.first, n);
    else
      for (int64_t row = v.first; row < v.last; row++) sum += NAME(sum_of_some)(x + row * q->w + u.first, n);
    y[i] = sum / (REAL)(v.count * u.count);
  }
}

static void NAME(mean_planes)(void *context, int64_t begin, int64_t end) {
  const NAME(pool) *q = context;
  const ty_p_pool *p = q->p;
  /* Windows whole .. cut - 1 of a row lie in the image with all they have. */
  const int64_t before = (p->padding[1] + p->stride[1] - 1) / p->stride[1];
  const int64_t whole = before < q->ow ? before : q->ow, room = q->w + p->padding[1] - p->kernel[1];
  const int64_t fit = room < 0 ? 0 : room / p->stride[1] + 1, cut = fit < whole ? whole : fit < q->ow ? fit : q->ow;
  const bool narrow = p->stride[1] <= 4 && p->kernel[1] <= 64; /* which MEAN_ROOM holds */
  ty_window windows[BLOCK];
  if (!narrow) NAME(windows_along)(q, 1, windows);
#if defined(__AVX2__)
  const bool squares = sizeof(REAL) == 4 && p->kernel[0] == 2 && p->kernel[1] == 2 && p->stride[1] == 2 &&
                       p->padding[1] == 0 && cut == q->ow && !p->divisor;
#endif
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict x = q->x + plane * q->h * q->w;
    REAL *restrict y = q->y + plane * q->oh * q->ow;
    for (int64_t oy = 0; oy < q->oh; oy++, y += q->ow) {
      ty_window v = ty_window_of(p, 0, oy, q->h, q->oh);
      if (narrow) NAME(expect)(x + v.first * q->w, p->stride[0] * q->w);
#if defined(__AVX2__)
      if (squares && v.last - v.first == 2 && v.count == 2) {
        pool_mean_squares((const void *)(x + v.first * q->w), (const void *)(x + (v.first + 1) * q->w), (void *)y,
                          q->ow);
        continue;
      }
#endif
      if (!narrow) {
        NAME(wide_window_means)(q, windows, x, v, y);
        continue;
      }
      for (int64_t j = 0; j < q->ow; j += BLOCK)
        NAME(window_sums)(q, x, v, j, q->ow - j < BLOCK ? q->ow : j + BLOCK, y);
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
  const bool one = q->oh == 1 && q->ow == 1;
  ty_window windows[BLOCK], down[BLOCK];
  NAME(windows_along)(q, 1, windows);
  NAME(windows_along)(q, 0, down);
  if (one && sizeof(REAL) == 4 && q->h * q->w <= ROW_SUMS_MOST) {
    const int64_t count = q->h * q->w;
    row_sums((const float *)q->x + begin * count, count, end - begin, (float *)q->y + begin);
    for (int64_t plane = begin; plane < end; plane++) q->y[plane] /= (REAL)count;
    return;
  }
  for (int64_t plane = begin; plane < end; plane++) {
    const REAL *restrict x = q->x + plane * q->h * q->w;
    REAL *restrict y = q->y + plane * q->oh * q->ow;
    if (one) {
      const int64_t count = q->h * q->w;
      REAL sum = 0;
      for (int64_t i = 0; i < count; i += 4096) sum += NAME(sum_of)(x + i, count - i < 4096 ? count - i : 4096);
      y[0] = sum / (REAL)count;
      continue;
    }
    for (int64_t oy = 0; oy < q->oh; oy++, y += q->ow) {
      const ty_window v = NAME(window_at)(q, 0, down, oy);
      NAME(wide_window_means)(q, windows, x, v, y);
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
