/* Convolution where every channel has its own kernel, for one element type; included by conv_real.h. CHANNELS channels are
 * interleaved, so that each vector holds one pixel of all of them: whatever the width, stride and dilation, every lane
 * works and no load is unaligned. The planes are padded with zeros, so that no tap needs a bounds check. Work is cut by
 * the shape alone: images, sets of channels, and bands of rows. */

#define LANE_BYTES (TY_VECTOR_BYTES < 4 * sizeof(REAL) ? 4 * sizeof(REAL) : TY_VECTOR_BYTES) /* transpose_4's least */
typedef REAL NAME(pixel) __attribute__((vector_size(LANE_BYTES), aligned(sizeof(REAL)), may_alias));
#define V NAME(pixel)
#define CHANNELS ((int64_t)(LANE_BYTES / sizeof(REAL)))
#define AT(p, offset) (*(const V *)((p) + (offset)))

/* Rows y0 .. y0+rows of the padded image (row ph is the image's first) of `channels` channels. */
static void NAME(pad_rows)(const REAL *restrict x, const conv_shape *s, int64_t channels, int64_t y0, int64_t rows,
                           REAL *restrict dst) {
  int64_t width = s->w + 2 * s->pw;
  for (int64_t c = 0; c < channels; c++)
    for (int64_t r = 0; r < rows; r++, dst += width) {
      int64_t y = y0 + r - s->ph;
      if (y < 0 || y >= s->h) {
        memset(dst, 0, sizeof(REAL) * (size_t)width);
        continue;
      }
      for (int64_t i = 0; i < s->pw; i++) dst[i] = dst[s->pw + s->w + i] = 0;
      memcpy(dst + s->pw, x + (c * s->h + y) * s->w, sizeof(REAL) * (size_t)s->w);
    }
}

#include "conv_depthwise_rows.h"

/* ---- between planes of one channel and interleaved ones ---- */

/* to[i * CHANNELS + c] = x[c * plane + i] for i < n and the first `channels` lanes; the others get copies. */
static void NAME(interleave)(const REAL *x, int64_t plane, int64_t channels, int64_t n, REAL *to) {
  if (sizeof(REAL) == sizeof(float) && channels == CHANNELS && n >= 4) {
    interleave((const float *)(const void *)x, plane, LANES, n, (float *)(void *)to, LANES, LANES);
    return;
  }
  for (int64_t c = 0; c < CHANNELS; c += 4) {
    const REAL *r[4];
    for (int64_t k = 0; k < 4; k++) r[k] = x + (c + k < channels ? c + k : channels - 1) * plane;
    NAME(transpose_4)(r[0], r[1], r[2], r[3], n < 4 ? n : n / 4 * 4, to + c, CHANNELS);
    int64_t last = n - 4; /* once more for some */
    if (n > 4 && n % 4)
      NAME(transpose_4)(r[0] + last, r[1] + last, r[2] + last, r[3] + last, 4, to + last * CHANNELS + c, CHANNELS);
  }
}

/* Rows y0 .. y0 + rows of h x w images, with zeros around: `left` columns before them, `row` in all. */
static void NAME(load_plane)(const REAL *x, int64_t channels, int64_t h, int64_t w, int64_t y0, int64_t rows,
                             int64_t left, int64_t row, REAL *to) {
  size_t pixel = sizeof(REAL) * (size_t)CHANNELS;
  for (int64_t r = 0; r < rows; r++, to += row * CHANNELS) {
    int64_t y = y0 + r, right = row - left - w;
    if (y < 0 || y >= h) {
      memset(to, 0, pixel * (size_t)row);
      continue;
    }
    memset(to, 0, pixel * (size_t)left);
    NAME(interleave)(x + y * w, h * w, channels, w, to + left * CHANNELS);
    if (right > 0) memset(to + (left + w) * CHANNELS, 0, pixel * (size_t)right);
  }
}

typedef struct NAME(depthwise_call) {
  const conv_shape *s;
  const REAL *x, *bias;
  REAL *weight; /* [sets][taps][CHANNELS] */
  REAL *y;
  int64_t sets, band, bands; /* of CHANNELS channels; rows of the result */
  bool failed;
} NAME(depthwise_call);

static int64_t NAME(channels_of)(const conv_shape *s, int64_t set) {
  int64_t left = s->c - set * CHANNELS;
  return left < CHANNELS ? left : CHANNELS;
}

/* Bands of `rows` rows of the result: enough units of work for many threads, and planes that stay in the cache.
 * `row_bytes`: of the input, for a row of the result. */
static void NAME(cut)(NAME(depthwise_call) * d, int64_t units, int64_t rows, int64_t row_bytes, int64_t multiple) {
  int64_t wanted = units < 16 ? (16 + units - 1) / units : 1, most = rows / (4 * d->s->kh) + 1;
  if (wanted > most) wanted = most;
  int64_t fitting = rows * row_bytes / (1 << 19) + 1;
  if (wanted < fitting) wanted = fitting;
  d->band = ((rows + wanted - 1) / wanted + multiple - 1) / multiple * multiple;
  d->bands = (rows + d->band - 1) / d->band;
}

static bool NAME(pack_weights)(NAME(depthwise_call) * d, const REAL *weight) {
  int64_t taps = d->s->kh * d->s->kw;
  d->weight = ty_scratch_alloc(sizeof(REAL) * (size_t)(d->sets * taps * CHANNELS));
  for (int64_t i = 0; d->weight && i < d->sets; i++) NAME(interleave)
  (weight + i * CHANNELS * taps, taps, NAME(channels_of)(d->s, i), taps, d->weight + i * taps * CHANNELS);
  return d->weight != NULL;
}

static void NAME(free_weights)(NAME(depthwise_call) * d) {
  ty_scratch_free(d->weight, sizeof(REAL) * (size_t)(d->sets * d->s->kh * d->s->kw * CHANNELS));
}

/* ---- sums over taps: the convolution, and its gradient for the input ---- */

typedef struct NAME(taps) {
  int64_t n, in_row, step, out_row, out_step; /* between neighbours of the result in the input and in the result */
  const int64_t *offset;                      /* of each tap in the input */
  const int64_t *index;                       /* and among the weights */
} NAME(taps);

/* `rows` rows of `n` neighbours of the result; constants, with `step`, where it is inlined. */
static inline __attribute__((always_inline)) void NAME(sum_run)(const int rows, const int n, const int64_t step,
                                                                const NAME(taps) * t, const REAL *in,
                                                                const REAL *weight, const REAL *start, REAL *out) {
  V sum[2][14];
#pragma GCC unroll 2
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 14
    for (int i = 0; i < n; i++) sum[r][i] = AT(start, 0);
  for (int64_t k = 0; k < t->n; k++) {
    const V w = AT(weight, t->index[k]);
    const REAL *x[2] = { in + t->offset[k], in + t->offset[k] + (rows > 1 ? t->in_row : 0) };
    __asm__("" : "+r"(x[0]), "+r"(x[1])); /* else gcc keeps a register with the sum for every i */
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 14
      for (int i = 0; i < n; i++) sum[r][i] += w * AT(x[r], i * step);
  }
#pragma GCC unroll 2
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 14
    for (int i = 0; i < n; i++) *(V *)(out + r * t->out_row + i * t->out_step) = sum[r][i];
}

/* `rows` (1 or 2) rows of n. The last run overlaps the one before it. */
#define RUNS(rows, width, between)                                                                    \
  for (int64_t j = 0; j < n; j += width) {                                                            \
    int64_t at = j + width <= n ? j : n - width;                                                      \
    NAME(sum_run)(rows, width, between, t, in + at * t->step, weight, start, out + at * t->out_step); \
  }
#define ROWS(name, between)                                                                             \
  static void NAME(name)(int rows, int64_t n, const NAME(taps) * t, const REAL *in, const REAL *weight, \
                         const REAL *start, REAL *out) {                                                \
    if (n >= 14 || n <= 3)                                                                              \
      for (int r = 0; r < rows; r++, in += t->in_row, out += t->out_row) {                              \
        if (n >= 14) RUNS(1, 14, between) else RUNS(1, 1, between)                                      \
      }                                                                                                 \
    else if (rows == 2 && n >= 7) RUNS(2, 7, between)                                                   \
    else if (rows == 2) RUNS(2, 4, between)                                                             \
    else if (n >= 7) RUNS(1, 7, between)                                                                \
    else RUNS(1, 4, between)                                                                            \
  }
ROWS(sum_rows_1, CHANNELS)
ROWS(sum_rows_2, 2 * CHANNELS)
ROWS(sum_rows_any, t->step)
#undef ROWS
#undef RUNS

static void NAME(sum_rows)(int rows, int64_t n, const NAME(taps) * t, const REAL *in, const REAL *weight,
                           const REAL *start, REAL *out) {
  if (t->step == CHANNELS) NAME(sum_rows_1)(rows, n, t, in, weight, start, out);
  else if (t->step == 2 * CHANNELS) NAME(sum_rows_2)(rows, n, t, in, weight, start, out);
  else NAME(sum_rows_any)(rows, n, t, in, weight, start, out);
}

/* Rows of the result that are computed before they are separated. */
static int64_t NAME(chunk_of)(int64_t width) { return width >= 32 ? 2 : (64 / (width + 1) + 1) / 2 * 2; }

/* ---- forward ---- */

static void NAME(depthwise_units)(void *context, int64_t begin, int64_t end) {
  NAME(depthwise_call) *d = context;
  const conv_shape *s = d->s;
  int64_t row = s->w + 2 * s->pw, most = (d->band - 1) * s->sh + (s->kh - 1) * s->dh + 1, taps = s->kh * s->kw;
  const bool blocks = NAME(has_blocks)(s);
  int64_t chunk = blocks ? MOST_DOWN : NAME(chunk_of)(s->ow);
  int64_t plane_size = most * row * CHANNELS, result_size = chunk * s->ow * CHANNELS;
  size_t offsets = sizeof(int64_t) * (size_t)(2 * taps);
  size_t bytes = sizeof(REAL) * (size_t)(plane_size + result_size) + offsets;
  REAL *plane = ty_scratch_alloc(bytes), *result = plane + plane_size;
  if (!plane) {
    __atomic_store_n(&d->failed, true, __ATOMIC_RELAXED);
    return;
  }
  int64_t *offset = (int64_t *)(void *)(result + result_size), *index = offset + taps;
  for (int64_t k = 0; k < taps; k++) {
    offset[k] = (k / s->kw * s->dh * row + k % s->kw * s->dw) * CHANNELS;
    index[k] = k * CHANNELS;
  }
  NAME(taps) t = { taps, s->sh * row * CHANNELS, s->sw * CHANNELS, s->ow * CHANNELS, CHANNELS, offset, index };
  const NAME(down) down = { .kw = s->kw, .step = s->dw * CHANNELS, .row = row * CHANNELS, .out_row = s->ow * CHANNELS };
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t first = u % d->bands * d->band, stop = first + d->band < s->oh ? first + d->band : s->oh;
    int64_t set = u / d->bands % d->sets, n = u / d->bands / d->sets, channels = NAME(channels_of)(s, set);
    int64_t image = n * s->c + set * CHANNELS;
    const REAL *weight = d->weight + set * taps * CHANNELS;
    REAL start[LANE_BYTES / sizeof(REAL)] = { 0 };
    for (int64_t c = 0; d->bias && c < channels; c++) start[c] = d->bias[set * CHANNELS + c];
    NAME(load_plane)
    (d->x + image * s->h * s->w, channels, s->h, s->w, first * s->sh - s->ph,
     (stop - first - 1) * s->sh + (s->kh - 1) * s->dh + 1, s->pw, row, plane);
    for (int64_t y = first; y < stop; y += chunk) {
      int64_t rows = stop - y < chunk ? stop - y : chunk;
      const REAL *in = plane + (y - first) * t.in_row;
      if (blocks) NAME(sum_columns)(s, &down, y - s->ph, rows, s->ow, in, weight, start, result);
      for (int64_t r = 0; !blocks && r < rows; r += 2) NAME(sum_rows)
      (rows - r > 1 ? 2 : 1, s->ow, &t, in + r * t.in_row, weight, start, result + r * t.out_row);
      NAME(transpose)
      (result, CHANNELS, rows * s->ow, channels, d->y + image * s->oh * s->ow + y * s->ow, s->oh * s->ow);
    }
  }
  ty_scratch_free(plane, bytes);
}

static bool NAME(depthwise)(const conv_shape *s, const REAL *x, const REAL *weight, const REAL *bias, REAL *y) {
  if (NAME(suits_rows)(s)) return NAME(depthwise_rows)(s, x, weight, bias, y);
  NAME(depthwise_call) d = { .s = s, .x = x, .bias = bias, .y = y, .sets = (s->c + CHANNELS - 1) / CHANNELS };
  if (!NAME(pack_weights)(&d, weight)) return false;
  NAME(cut)(&d, s->n * d.sets, s->oh, s->sh * (s->w + 2 * s->pw) * (int64_t)LANE_BYTES, 2);
  int64_t work = d.band * s->ow * s->kh * s->kw;
  ty_parallel_for(s->n * d.sets * d.bands, 1 + 4096 / (work + 1), NAME(depthwise_units), &d);
  NAME(free_weights)(&d);
  return !d.failed;
}

/* ---- gradient for the input ----
 * Pixel y of the input was met by tap k at row (y + ph - k dh) / sh of the result, where that is whole. For the pixels
 * that are alike modulo the stride the taps are the same, so each such phase is a sum over taps too. */

typedef struct NAME(phase) {
  int64_t n;
  int64_t *tap, *shift; /* which taps, and the position in the result for the first pixel of the phase */
} NAME(phase);

static void NAME(find_phase)(NAME(phase) * f, int64_t first, int64_t padding, int64_t kernel, int64_t dilation,
                             int64_t stride) {
  f->n = 0;
  for (int64_t k = 0; k < kernel; k++) {
    int64_t at = first + padding - k * dilation;
    if (at % stride) continue;
    f->tap[f->n] = k;
    f->shift[f->n++] = at / stride;
  }
}

static void NAME(depthwise_input_units)(void *context, int64_t begin, int64_t end) {
  NAME(depthwise_call) *d = context;
  const conv_shape *s = d->s;
  /* The plane of the result's gradient begins `top` rows and `left` columns before it. */
  int64_t top = (s->kh - 1) * s->dh / s->sh + 1, left = (s->kw - 1) * s->dw / s->sw + 1;
  int64_t right = (s->w - 1 + s->pw) / s->sw + 1, row = left + (right > s->ow ? right : s->ow);
  int64_t most = top + (d->band - 1 + s->ph) / s->sh + 1, taps = s->kh * s->kw;
  int64_t plane_size = most * row * CHANNELS, chunk = NAME(chunk_of)(s->w) * s->sh,
          result_size = chunk * s->w * CHANNELS;
  size_t lists = sizeof(int64_t) * (size_t)(2 * (taps + s->kh + s->kw));
  size_t bytes = sizeof(REAL) * (size_t)(plane_size + result_size) + lists;
  REAL *plane = ty_scratch_alloc(bytes), *result = plane + plane_size;
  if (!plane) {
    __atomic_store_n(&d->failed, true, __ATOMIC_RELAXED);
    return;
  }
  int64_t *offset = (int64_t *)(void *)(result + result_size), *index = offset + taps, *rest = index + taps;
  NAME(phase) down = { 0, rest, rest + s->kh }, across = { 0, rest + 2 * s->kh, rest + 2 * s->kh + s->kw };
  const REAL zero[LANE_BYTES / sizeof(REAL)] = { 0 };
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t first = u % d->bands * d->band, stop = first + d->band < s->h ? first + d->band : s->h;
    int64_t set = u / d->bands % d->sets, n = u / d->bands / d->sets, channels = NAME(channels_of)(s, set);
    int64_t image = n * s->c + set * CHANNELS,
            origin = first / s->sh - top; /* bands begin at multiples of the stride */
    NAME(load_plane)
    (d->x + image * s->oh * s->ow, channels, s->oh, s->ow, origin, top + (stop - 1 - first + s->ph) / s->sh + 1, left,
     row, plane);
    for (int64_t y = first; y < stop; y += chunk) {
      int64_t rows = stop - y < chunk ? stop - y : chunk;
      for (int64_t fy = 0; fy < s->sh && fy < rows; fy++) {
        NAME(find_phase)(&down, fy, s->ph, s->kh, s->dh, s->sh);
        for (int64_t fx = 0; fx < s->sw && fx < s->w; fx++) {
          NAME(find_phase)(&across, fx, s->pw, s->kw, s->dw, s->sw);
          NAME(taps) t = { 0, row * CHANNELS, CHANNELS, s->sh * s->w * CHANNELS, s->sw * CHANNELS, offset, index };
          for (int64_t a = 0; a < down.n; a++)
            for (int64_t b = 0; b < across.n; b++, t.n++) {
              offset[t.n] = (down.shift[a] * row + across.shift[b]) * CHANNELS;
              index[t.n] = (down.tap[a] * s->kw + across.tap[b]) * CHANNELS;
            }
          int64_t width = (s->w - fx + s->sw - 1) / s->sw, count = (rows - fy + s->sh - 1) / s->sh;
          const REAL *in = plane + ((y / s->sh - origin) * row + left) * CHANNELS;
          for (int64_t r = 0; r < count; r += 2) NAME(sum_rows)
          (count - r > 1 ? 2 : 1, width, &t, in + r * t.in_row, d->weight + set * taps * CHANNELS, zero,
           result + ((r * s->sh + fy) * s->w + fx) * CHANNELS);
        }
      }
      NAME(transpose)(result, CHANNELS, rows * s->w, channels, d->y + image * s->h * s->w + y * s->w, s->h * s->w);
    }
  }
  ty_scratch_free(plane, bytes);
}

static bool NAME(depthwise_backward_input)(const conv_shape *s, const REAL *g, const REAL *weight, REAL *dx) {
  NAME(depthwise_call) d = { .s = s, .x = g, .y = dx, .sets = (s->c + CHANNELS - 1) / CHANNELS };
  if (!NAME(pack_weights)(&d, weight)) return false;
  NAME(cut)(&d, s->n * d.sets, s->h, (s->ow + s->kw) * (int64_t)LANE_BYTES / s->sh + 1, 2 * s->sh);
  int64_t work = d.band * s->w * s->kh * s->kw;
  ty_parallel_for(s->n * d.sets * d.bands, 1 + 4096 / (work + 1), NAME(depthwise_input_units), &d);
  NAME(free_weights)(&d);
  return !d.failed;
}

/* ---- gradient for the weight ---- */

typedef struct NAME(correlation) {
  const conv_shape *s;
  int64_t row, rows; /* of the plane; rows of the result in it */
  const REAL *plane, *g;
} NAME(correlation);

/* Adds to the sums of `down` by `across` taps that begin at (ky, kx); `step`: between taps of a row. */
static inline __attribute__((always_inline)) void NAME(correlate)(const int down, const int across, const int64_t step,
                                                                  const NAME(correlation) * k, int64_t ky, int64_t kx,
                                                                  REAL *sums) {
  const conv_shape *s = k->s;
  const int64_t row = s->dh * k->row * CHANNELS;
  V sum[3][7];
#pragma GCC unroll 3
  for (int a = 0; a < down; a++)
#pragma GCC unroll 7
    for (int b = 0; b < across; b++) sum[a][b] = AT(sums, ((ky + a) * s->kw + kx + b) * CHANNELS);
  const REAL *g = k->g;
  for (int64_t r = 0; r < k->rows; r++) {
    const REAL *x = k->plane + ((r * s->sh + ky * s->dh) * k->row + kx * s->dw) * CHANNELS;
    for (int64_t j = 0; j < s->ow; j++, g += CHANNELS, x += s->sw * CHANNELS) {
      const V v = AT(g, 0);
#pragma GCC unroll 3
      for (int a = 0; a < down; a++)
#pragma GCC unroll 7
        for (int b = 0; b < across; b++) sum[a][b] += v * AT(x + a * row, b * step);
    }
  }
#pragma GCC unroll 3
  for (int a = 0; a < down; a++)
#pragma GCC unroll 7
    for (int b = 0; b < across; b++) *(V *)(sums + ((ky + a) * s->kw + kx + b) * CHANNELS) = sum[a][b];
}

/* All taps: those of the usual kernels so many at a time that the sums fill the registers. */
static void NAME(correlate_all)(const NAME(correlation) * k, REAL *sums) {
  const conv_shape *s = k->s;
  int64_t ky = 0;
  if (s->dw == 1 && s->kw == 7) {
    for (; ky + 2 <= s->kh; ky += 2) NAME(correlate)(2, 7, CHANNELS, k, ky, 0, sums);
    for (; ky < s->kh; ky++) NAME(correlate)(1, 7, CHANNELS, k, ky, 0, sums);
  } else if (s->dw == 1 && s->kw == 5) {
    for (; ky + 2 <= s->kh; ky += 2) NAME(correlate)(2, 5, CHANNELS, k, ky, 0, sums);
    for (; ky < s->kh; ky++) NAME(correlate)(1, 5, CHANNELS, k, ky, 0, sums);
  } else if (s->dw == 1 && s->kw == 3) {
    for (; ky + 3 <= s->kh; ky += 3) NAME(correlate)(3, 3, CHANNELS, k, ky, 0, sums);
    for (; ky < s->kh; ky++) NAME(correlate)(1, 3, CHANNELS, k, ky, 0, sums);
  }
  for (; ky < s->kh; ky++) {
    int64_t kx = 0;
    for (; kx + 4 <= s->kw; kx += 4) NAME(correlate)(1, 4, s->dw * CHANNELS, k, ky, kx, sums);
    for (; kx < s->kw; kx++) NAME(correlate)(1, 1, s->dw * CHANNELS, k, ky, kx, sums);
  }
}

typedef struct NAME(weights_call) {
  NAME(depthwise_call) call; /* weight: the sums [sets][parts][taps][CHANNELS] */
  const REAL *g;
  int64_t parts; /* shares of the bands of all images */
} NAME(weights_call);

static void NAME(depthwise_weight_units)(void *context, int64_t begin, int64_t end) {
  NAME(weights_call) *w = context;
  NAME(depthwise_call) *d = &w->call;
  const conv_shape *s = d->s;
  int64_t row = s->w + 2 * s->pw, most = (d->band - 1) * s->sh + (s->kh - 1) * s->dh + 1, taps = s->kh * s->kw;
  int64_t plane_size = most * row * CHANNELS, g_size = d->band * s->ow * CHANNELS, all = s->n * d->bands;
  size_t bytes = sizeof(REAL) * (size_t)(plane_size + g_size);
  REAL *plane = ty_scratch_alloc(bytes), *g = plane + plane_size;
  if (!plane) {
    __atomic_store_n(&d->failed, true, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t u = begin; u < end; u++) {
    int64_t part = u % w->parts, set = u / w->parts, channels = NAME(channels_of)(s, set);
    REAL *sums = d->weight + u * taps * CHANNELS;
    memset(sums, 0, sizeof(REAL) * (size_t)(taps * CHANNELS));
    for (int64_t i = all * part / w->parts; i < all * (part + 1) / w->parts && !ty_interrupted; i++) {
      int64_t first = i % d->bands * d->band, rows = s->oh - first < d->band ? s->oh - first : d->band;
      int64_t image = i / d->bands * s->c + set * CHANNELS;
      NAME(load_plane)
      (d->x + image * s->h * s->w, channels, s->h, s->w, first * s->sh - s->ph,
       (rows - 1) * s->sh + (s->kh - 1) * s->dh + 1, s->pw, row, plane);
      NAME(interleave)(w->g + (image * s->oh + first) * s->ow, s->oh * s->ow, channels, rows * s->ow, g);
      NAME(correlate_all)(&(NAME(correlation)){ s, row, rows, plane, g }, sums);
    }
  }
  ty_scratch_free(plane, bytes);
}

static bool NAME(depthwise_backward_weight)(const conv_shape *s, const REAL *g, const REAL *x, REAL *dw) {
  int64_t taps = s->kh * s->kw, sets = (s->c + CHANNELS - 1) / CHANNELS;
  NAME(weights_call) w = { .call = { .s = s, .x = x, .sets = sets }, .g = g };
  NAME(cut)(&w.call, s->n * sets, s->oh, (s->sh * (s->w + 2 * s->pw) + s->ow) * (int64_t)LANE_BYTES, 1);
  int64_t all = s->n * w.call.bands;
  w.parts = sets >= 16 ? 1 : (16 + sets - 1) / sets;
  if (w.parts > all) w.parts = all;
  size_t bytes = sizeof(REAL) * (size_t)(sets * w.parts * taps * CHANNELS);
  REAL *sums = w.call.weight = ty_scratch_alloc(bytes);
  if (!sums) return false;
  int64_t work = (all + w.parts - 1) / w.parts * w.call.band * s->ow * taps;
  ty_parallel_for(sets * w.parts, 1 + 4096 / (work + 1), NAME(depthwise_weight_units), &w);
  for (int64_t set = 0; set < sets; set++) {
    REAL *restrict to = sums + set * w.parts * taps * CHANNELS;
    for (int64_t p = 1; p < w.parts; p++)
      for (int64_t i = 0; i < taps * CHANNELS; i++) to[i] += to[p * taps * CHANNELS + i];
    NAME(transpose)(to, CHANNELS, taps, NAME(channels_of)(s, set), dw + set * CHANNELS * taps, taps);
  }
  ty_scratch_free(sums, bytes);
  return !w.call.failed;
}

#undef V
#undef CHANNELS
#undef LANE_BYTES
#undef MOST_DOWN
#undef SKIPS
#undef AT
