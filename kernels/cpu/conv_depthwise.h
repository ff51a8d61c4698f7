/* Convolution where every channel has its own kernel, for one element type; included by conv_real.h. A channel is
 * copied into a zero-padded plane, so that no tap needs a bounds check; channels are what threads share. */

typedef REAL NAME(vec) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#define V NAME(vec)
#define VL ((int64_t)(TY_VECTOR_BYTES / sizeof(REAL)))
#define BLOCK 4 /* output rows computed together: each load of x serves up to four */

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

typedef struct NAME(depthwise_call) {
  const conv_shape *s;
  const REAL *x, *weight, *bias, *g;
  REAL *y;
  int64_t row;  /* width of the padded plane */
  size_t plane; /* bytes of it, with room to read past its end */
  bool failed;
} NAME(depthwise_call);

static NAME(depthwise_call) NAME(depthwise_of)(const conv_shape *s) {
  int64_t row = s->w + 2 * s->pw, rows = s->h + 2 * s->ph + BLOCK;
  size_t plane = sizeof(REAL) * (size_t)(rows * row + 2 * VL + s->ow + 4 * s->dw);
  return (NAME(depthwise_call)){ .s = s, .row = row, .plane = plane };
}

/* ---- forward ---- */

/* Four output rows by one or two vectors; stride 1, no dilation between rows. Row iy of the input meets output row r
 * with kernel row iy - r. `valid` rows are written. */
/* clang-format off */
#define TAP_WIDE(r)                                                                                                    \
  {                                                                                                                    \
    const REAL t = weight[(iy - r) * kw + kx];                                                                         \
    c##r##0 += t * x0;                                                                                                 \
    c##r##1 += t * x1;                                                                                                 \
  }
#define TAP_NARROW(r) { c##r##0 += weight[(iy - r) * kw + kx] * x0; }
#define LOAD_WIDE const V x0 = *(const V *)(in + kx * dw); const V x1 = *(const V *)(in + kx * dw + VL);
#define LOAD_NARROW const V x0 = *(const V *)(in + kx * dw);
#define CASE(lo, hi, LOAD, TAP)                                                                                        \
  case lo * BLOCK + hi:                                                                                                \
    for (int64_t kx = 0; kx < kw; kx++) {                                                                              \
      LOAD                                                                                                             \
      if (lo <= 0 && 0 <= hi) TAP(0)                                                                                   \
      if (lo <= 1 && 1 <= hi) TAP(1)                                                                                   \
      if (lo <= 2 && 2 <= hi) TAP(2)                                                                                   \
      if (lo <= 3 && 3 <= hi) TAP(3)                                                                                   \
    }                                                                                                                  \
    break;
#define CASES(LOAD, TAP)                                                                                               \
  CASE(0, 0, LOAD, TAP) CASE(0, 1, LOAD, TAP) CASE(0, 2, LOAD, TAP) CASE(0, 3, LOAD, TAP) CASE(1, 1, LOAD, TAP)        \
  CASE(1, 2, LOAD, TAP) CASE(1, 3, LOAD, TAP) CASE(2, 2, LOAD, TAP) CASE(2, 3, LOAD, TAP) CASE(3, 3, LOAD, TAP)
/* clang-format on */

#define START_WIDE \
  V c00 = start, c01 = start, c10 = start, c11 = start, c20 = start, c21 = start, c30 = start, c31 = start;
#define START_NARROW V c00 = start, c10 = start, c20 = start, c30 = start;
#define STORE_WIDE(r) \
  if (valid > r) *(V *)(y + r * y_row) = c##r##0, *(V *)(y + r * y_row + VL) = c##r##1;
#define STORE_NARROW(r) \
  if (valid > r) *(V *)(y + r * y_row) = c##r##0;

/* The usual kernels with their sizes known to the compiler, and any other. Only the smallest is unrolled wholly. */
typedef void NAME(rows_fn)(const REAL *restrict x, int64_t row, const REAL *restrict weight, int64_t any_kh,
                           int64_t any_kw, int64_t any_dw, REAL bias, REAL *restrict y, int64_t y_row, int64_t valid);
#define ROWS(name, FORM, kh_, kw_, dw_, UNROLL)                                                                       \
  static void NAME(name)(const REAL *restrict x, int64_t row, const REAL *restrict weight, int64_t any_kh,            \
                         int64_t any_kw, int64_t any_dw, REAL bias, REAL *restrict y, int64_t y_row, int64_t valid) { \
    const int64_t kh = kh_, kw = kw_, dw = dw_;                                                                       \
    const V start = (V){ 0 } + bias;                                                                                  \
    START_##FORM UNROLL for (int64_t iy = 0; iy < kh + BLOCK - 1; iy++) {                                             \
      const REAL *restrict in = x + iy * row;                                                                         \
      int64_t lo = iy - kh + 1 < 0 ? 0 : iy - kh + 1, hi = iy < BLOCK - 1 ? iy : BLOCK - 1;                           \
      switch (lo * BLOCK + hi) { CASES(LOAD_##FORM, TAP_##FORM) }                                                     \
    }                                                                                                                 \
    STORE_##FORM(0) STORE_##FORM(1) STORE_##FORM(2) STORE_##FORM(3)                                                   \
  }
ROWS(wide_3, WIDE, 3, 3, 1, _Pragma("GCC unroll 6"))
ROWS(wide_5, WIDE, 5, 5, 1, )
ROWS(wide_7, WIDE, 7, 7, 1, )
ROWS(wide_any, WIDE, any_kh, any_kw, any_dw, )
ROWS(narrow_3, NARROW, 3, 3, 1, _Pragma("GCC unroll 6"))
ROWS(narrow_5, NARROW, 5, 5, 1, )
ROWS(narrow_7, NARROW, 7, 7, 1, )
ROWS(narrow_any, NARROW, any_kh, any_kw, any_dw, )
#undef ROWS

static void NAME(plane_blocks)(const conv_shape *s, const REAL *x, int64_t row, const REAL *weight, REAL bias,
                               REAL *y) {
  static NAME(rows_fn) *const known[2][3] = { { NAME(narrow_3), NAME(narrow_5), NAME(narrow_7) },
                                              { NAME(wide_3), NAME(wide_5), NAME(wide_7) } };
  bool is_known = s->kh == s->kw && s->dw == 1 && (s->kh == 3 || s->kh == 5 || s->kh == 7);
  NAME(rows_fn) *narrow = is_known ? known[0][s->kh / 2 - 1] : NAME(narrow_any);
  NAME(rows_fn) *wide = is_known ? known[1][s->kh / 2 - 1] : NAME(wide_any);
  for (int64_t r = 0; r < s->oh; r += BLOCK) {
    int64_t valid = s->oh - r < BLOCK ? s->oh - r : BLOCK;
    if (s->ow < VL) {
      REAL block[BLOCK * TY_VECTOR_BYTES / sizeof(REAL)];
      narrow(x + r * row, row, weight, s->kh, s->kw, s->dw, bias, block, VL, valid);
      for (int64_t i = 0; i < valid; i++)
        for (int64_t j = 0; j < s->ow; j++) y[(r + i) * s->ow + j] = block[i * VL + j];
      continue;
    }
    /* The last vectors of a row overlap those before: the same values are written twice. */
    int64_t j = 0;
    for (; s->ow >= 2 * VL && j + VL < s->ow; j += 2 * VL) {
      int64_t at = j + 2 * VL <= s->ow ? j : s->ow - 2 * VL;
      wide(x + r * row + at, row, weight, s->kh, s->kw, s->dw, bias, y + r * s->ow + at, s->ow, valid);
    }
    for (; j < s->ow; j += VL) {
      int64_t at = j + VL <= s->ow ? j : s->ow - VL;
      narrow(x + r * row + at, row, weight, s->kh, s->kw, s->dw, bias, y + r * s->ow + at, s->ow, valid);
    }
  }
}

/* Any stride and dilation: a row at a time. */
static void NAME(plane_rows)(const conv_shape *s, const REAL *x, int64_t row, const REAL *weight, REAL bias, REAL *y) {
  for (int64_t r = 0; r < s->oh; r++) {
    REAL *restrict to = y + r * s->ow;
    for (int64_t j = 0; j < s->ow; j++) to[j] = bias;
    for (int64_t ky = 0; ky < s->kh; ky++)
      for (int64_t kx = 0; kx < s->kw; kx++) {
        const REAL *restrict from = x + (r * s->sh + ky * s->dh) * row + kx * s->dw, t = weight[ky * s->kw + kx];
        if (s->sw == 1) {
          for (int64_t j = 0; j < s->ow; j++) to[j] += t * from[j];
        } else if (s->sw == 2) {
          for (int64_t j = 0; j < s->ow; j++) to[j] += t * from[2 * j];
        } else {
          for (int64_t j = 0; j < s->ow; j++) to[j] += t * from[j * s->sw];
        }
      }
  }
}

static void NAME(depthwise_planes)(void *context, int64_t begin, int64_t end) {
  NAME(depthwise_call) *d = context;
  const conv_shape *s = d->s;
  REAL *plane = ty_scratch_alloc(d->plane);
  if (!plane) {
    d->failed = true;
    return;
  }
  int64_t rows = s->h + 2 * s->ph, used = rows * d->row;
  memset(plane + used, 0, d->plane - sizeof(REAL) * (size_t)used);
  for (int64_t p = begin; p < end; p++) {
    int64_t c = p % s->c;
    const REAL *weight = d->weight + c * s->kh * s->kw;
    REAL bias = d->bias ? d->bias[c] : 0, *y = d->y + p * s->oh * s->ow;
    NAME(pad_rows)(d->x + p * s->h * s->w, s, 1, 0, rows, plane);
    if (s->sh == 1 && s->sw == 1 && s->dh == 1) NAME(plane_blocks)(s, plane, d->row, weight, bias, y);
    else NAME(plane_rows)(s, plane, d->row, weight, bias, y);
  }
  ty_scratch_free(plane, d->plane);
}

static int64_t NAME(depthwise_grain)(const conv_shape *s) { return 1 + 65536 / (s->oh * s->ow * s->kh * s->kw + 1); }

static bool NAME(depthwise)(const conv_shape *s, const REAL *x, const REAL *weight, const REAL *bias, REAL *y) {
  NAME(depthwise_call) d = NAME(depthwise_of)(s);
  d.x = x, d.weight = weight, d.bias = bias, d.y = y;
  ty_parallel_for(s->n * s->c, NAME(depthwise_grain)(s), NAME(depthwise_planes), &d);
  return !d.failed;
}

/* ---- gradient for the input, for strides other than 1 (else it is a convolution) ---- */

static void NAME(depthwise_scatter)(void *context, int64_t begin, int64_t end) {
  NAME(depthwise_call) *d = context;
  const conv_shape *s = d->s;
  REAL *plane = ty_scratch_alloc(d->plane);
  if (!plane) {
    d->failed = true;
    return;
  }
  for (int64_t p = begin; p < end; p++) {
    const REAL *weight = d->weight + p % s->c * s->kh * s->kw, *g = d->g + p * s->oh * s->ow;
    memset(plane, 0, d->plane);
    for (int64_t r = 0; r < s->oh; r++)
      for (int64_t ky = 0; ky < s->kh; ky++)
        for (int64_t kx = 0; kx < s->kw; kx++) {
          REAL *restrict to = plane + (r * s->sh + ky * s->dh) * d->row + kx * s->dw, t = weight[ky * s->kw + kx];
          const REAL *restrict from = g + r * s->ow;
          for (int64_t j = 0; j < s->ow; j++) to[j * s->sw] += t * from[j];
        }
    for (int64_t r = 0; r < s->h; r++)
      memcpy(d->y + (p * s->h + r) * s->w, plane + (r + s->ph) * d->row + s->pw, sizeof(REAL) * (size_t)s->w);
  }
  ty_scratch_free(plane, d->plane);
}

static bool NAME(depthwise_backward_input)(const conv_shape *s, const REAL *g, const REAL *weight, REAL *dx) {
  NAME(depthwise_call) d = NAME(depthwise_of)(s);
  d.g = g, d.weight = weight, d.y = dx;
  ty_parallel_for(s->n * s->c, NAME(depthwise_grain)(s), NAME(depthwise_scatter), &d);
  return !d.failed;
}

/* ---- gradient for the weight ---- */

typedef INTEGER NAME(lanes) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

static int64_t NAME(whole_rows)(const conv_shape *s) { return (s->ow + VL - 1) / VL * VL; }

static inline REAL NAME(sum_lanes)(V v) {
  REAL t = 0;
  for (int i = 0; i < VL; i++) t += v[i];
  return t;
}

/* Up to four neighbouring taps: the dot products of g, rows of whole vectors with zeros at their ends, with x shifted
 * by 0, dw, 2 dw and 3 dw. All four are computed; those past `taps` read the room behind the plane and are dropped. */
static void NAME(four_taps)(const conv_shape *s, const REAL *restrict g, const REAL *restrict x, int64_t row,
                            int64_t taps, REAL *restrict sum) {
  V a0 = { 0 }, a1 = { 0 }, a2 = { 0 }, a3 = { 0 };
  int64_t whole = s->ow - s->ow % VL, d = s->dw;
  NAME(lanes) mask; /* of the columns in a last vector that is not full: what lies behind them may be infinite */
  for (int64_t i = 0; i < VL; i++) mask[i] = whole + i < s->ow ? -1 : 0;
  for (int64_t r = 0; r < s->oh; r++, g += NAME(whole_rows)(s), x += s->sh * row) {
    for (int64_t j = 0; j < whole; j += VL) {
      const V v = *(const V *)(g + j);
      a0 += v * *(const V *)(x + j);
      a1 += v * *(const V *)(x + j + d);
      a2 += v * *(const V *)(x + j + 2 * d);
      a3 += v * *(const V *)(x + j + 3 * d);
    }
    if (whole < s->ow) {
      const V v = *(const V *)(g + whole);
      a0 += v * (V)(*(const NAME(lanes) *)(x + whole) & mask);
      a1 += v * (V)(*(const NAME(lanes) *)(x + whole + d) & mask);
      a2 += v * (V)(*(const NAME(lanes) *)(x + whole + 2 * d) & mask);
      a3 += v * (V)(*(const NAME(lanes) *)(x + whole + 3 * d) & mask);
    }
  }
  REAL t[] = { NAME(sum_lanes)(a0), NAME(sum_lanes)(a1), NAME(sum_lanes)(a2), NAME(sum_lanes)(a3) };
  for (int64_t i = 0; i < taps; i++) sum[i] += t[i];
}

static void NAME(one_tap)(const conv_shape *s, const REAL *restrict g, const REAL *restrict x, int64_t row,
                          REAL *restrict sum) {
  REAL t = 0;
  for (int64_t r = 0; r < s->oh; r++, g += s->ow, x += s->sh * row) {
    if (s->sw == 2) {
#pragma omp simd reduction(+ : t)
      for (int64_t j = 0; j < s->ow; j++) t += g[j] * x[2 * j];
    } else {
      for (int64_t j = 0; j < s->ow; j++) t += g[j] * x[j * s->sw];
    }
  }
  *sum += t;
}

static void NAME(depthwise_weights)(void *context, int64_t begin, int64_t end) {
  NAME(depthwise_call) *d = context;
  const conv_shape *s = d->s;
  int64_t g_row = NAME(whole_rows)(s);
  size_t g_bytes = s->sw == 1 ? sizeof(REAL) * (size_t)(s->oh * g_row) : 0, bytes = (d->plane + 63) / 64 * 64 + g_bytes;
  char *scratch = ty_scratch_alloc(bytes);
  if (!scratch) {
    d->failed = true;
    return;
  }
  REAL *plane = (REAL *)(void *)scratch, *rows = (REAL *)(void *)(scratch + bytes - g_bytes);
  memset(scratch, 0, bytes);
  for (int64_t c = begin; c < end; c++) {
    REAL *dw = d->y + c * s->kh * s->kw;
    for (int64_t t = 0; t < s->kh * s->kw; t++) dw[t] = 0;
    for (int64_t n = 0; n < s->n && !ty_interrupted; n++) {
      int64_t p = n * s->c + c;
      const REAL *g = d->g + p * s->oh * s->ow;
      NAME(pad_rows)(d->x + p * s->h * s->w, s, 1, 0, s->h + 2 * s->ph, plane);
      if (g_bytes)
        for (int64_t r = 0; r < s->oh; r++) memcpy(rows + r * g_row, g + r * s->ow, sizeof(REAL) * (size_t)s->ow);
      for (int64_t ky = 0; ky < s->kh; ky++) {
        const REAL *x = plane + ky * s->dh * d->row;
        REAL *sums = dw + ky * s->kw;
        if (g_bytes) {
          for (int64_t kx = 0; kx < s->kw; kx += 4)
            NAME(four_taps)(s, rows, x + kx * s->dw, d->row, s->kw - kx < 4 ? s->kw - kx : 4, sums + kx);
        } else {
          for (int64_t kx = 0; kx < s->kw; kx++) NAME(one_tap)(s, g, x + kx * s->dw, d->row, sums + kx);
        }
      }
    }
  }
  ty_scratch_free(scratch, bytes);
}

static bool NAME(depthwise_backward_weight)(const conv_shape *s, const REAL *g, const REAL *x, REAL *dw) {
  NAME(depthwise_call) d = NAME(depthwise_of)(s);
  d.g = g, d.x = x, d.y = dw;
  ty_parallel_for(s->c, 1 + NAME(depthwise_grain)(s) / s->n, NAME(depthwise_weights), &d);
  return !d.failed;
}

#undef V
#undef VL
