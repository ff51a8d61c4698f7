/* Convolution for one element type; included by conv.c with REAL and NAME(x) set.
 *
 * A convolution is a matrix product of the weight [o, c kh kw] with the matrix of all windows [c kh kw, oh ow], which
 * is never stored: the product asks for its panels and they are copied from a zero-padded band of the image. Bands are
 * a number of output rows, fixed by the shape, and are the unit that threads share. */

#include "../transpose_real.h"
#include "conv_depthwise.h"

/* ---- bands ---- */
/* A band of output rows of one image and one group, with the padded input rows it reads. */
typedef struct NAME(band) {
  const conv_shape *s;
  const REAL *x;      /* padded channels, of which the band is a part */
  int64_t plane, row; /* elements from channel to channel, from row to row */
} NAME(band);

static int64_t NAME(band_input_rows)(const conv_shape *s, int64_t rows) {
  return (rows - 1) * s->sh + (s->kh - 1) * s->dh + 1;
}

static bool NAME(needs_padding)(const conv_shape *s) { return s->ph || s->pw; }

static size_t NAME(band_bytes)(const conv_shape *s, int64_t rows) {
  if (!NAME(needs_padding)(s)) return 0;
  return sizeof(REAL) * (size_t)(s->cg * NAME(band_input_rows)(s, rows) * (s->w + 2 * s->pw));
}

/* The band of output rows r0 .. r0+rows; `scratch` holds band_bytes. */
static NAME(band) NAME(make_band)(const conv_shape *s, const REAL *x, int64_t r0, int64_t rows, REAL *scratch) {
  NAME(band) b = { .s = s };
  if (NAME(needs_padding)(s)) {
    int64_t in = NAME(band_input_rows)(s, rows);
    NAME(pad_rows)(x, s, s->cg, r0 * s->sh, in, scratch);
    b.x = scratch;
    b.row = s->w + 2 * s->pw;
    b.plane = in * b.row;
  } else {
    b.x = x + r0 * s->sh * s->w;
    b.row = s->w;
    b.plane = s->h * s->w;
  }
  return b;
}

/* Output rows per band: enough columns for the matrix product, little enough memory. */
static int64_t NAME(band_rows)(const conv_shape *s) {
  int64_t columns = 1 + (int64_t)(2e7 / ((double)s->og * (double)(s->cg * s->kh * s->kw)));
  if (columns < 1024) columns = 1024;
  int64_t rows = (columns + s->ow - 1) / s->ow;
  if (rows > s->oh) rows = s->oh;
  while (rows > 1 && NAME(band_bytes)(s, rows) > 4 << 20) rows = (rows + 1) / 2;
  int64_t bands = (s->oh + rows - 1) / rows;
  return (s->oh + bands - 1) / bands;
}

/* ---- panels of the matrix of windows ---- */

static inline void NAME(copy_run)(const REAL *restrict src, int64_t step, int64_t n, REAL *restrict dst) {
  if (step == 1) {
    for (int64_t j = 0; j < n; j++) dst[j] = src[j];
  } else if (step == 2) {
    for (int64_t j = 0; j < n; j++) dst[j] = src[2 * j];
  } else {
    for (int64_t j = 0; j < n; j++) dst[j] = src[j * step];
  }
}

enum { NAME(WIDEST) = TY_PANEL_BYTES / sizeof(REAL) };

/* Rows k0 .. of the matrix (channel, tap), columns j0 .. (output position in the band). */
static void NAME(pack_windows)(const void *context, int64_t k0, int64_t kc, int64_t j0, int64_t nc, void *out,
                               int64_t stride) {
  const NAME(band) *b = context;
  const conv_shape *s = b->s;
  /* The positions are runs within output rows. */
  struct {
    int64_t at, length, source;
  } run[NAME(WIDEST)];
  int runs = 0;
  for (int64_t j = 0; j < nc;) {
    int64_t y = (j0 + j) / s->ow, x = (j0 + j) % s->ow, length = s->ow - x < nc - j ? s->ow - x : nc - j;
    run[runs].at = j;
    run[runs].length = length;
    run[runs++].source = y * s->sh * b->row + x * s->sw;
    j += length;
  }
  int64_t kx = k0 % s->kw, ky = k0 / s->kw % s->kh, c = k0 / (s->kw * s->kh);
  REAL *restrict dst = out;
  const bool whole = runs == 1 && nc == NAME(WIDEST) && s->sw == 1, together = s->sw > 1 && s->dw == 1 && s->kw >= 4;
  for (int64_t k = 0; k < kc; k++, dst += stride) {
    const REAL *src = b->x + c * b->plane + ky * s->dh * b->row + kx * s->dw;
    if (together && kx == 0 && kc - k >= s->kw) { /* a row of the kernel: windows beside each other, turned */
      for (int r = 0; r < runs; r++)
        NAME(transpose)(src + run[r].source, s->sw, run[r].length, s->kw, dst + run[r].at, stride);
      kx = s->kw - 1;
      k += kx;
      dst += kx * stride;
    } else if (whole) {
      memcpy(dst, src + run[0].source, sizeof(REAL) * NAME(WIDEST));
    } else {
      for (int r = 0; r < runs; r++) NAME(copy_run)(src + run[r].source, s->sw, run[r].length, dst + run[r].at);
    }
    if (++kx == s->kw) {
      kx = 0;
      if (++ky == s->kh) {
        ky = 0;
        c++;
      }
    }
  }
}

/* The same transposed: rows are output positions, columns (channel, tap). */
static void NAME(pack_windows_across)(const void *context, int64_t k0, int64_t kc, int64_t j0, int64_t nc, void *out,
                                      int64_t stride) {
  const NAME(band) *b = context;
  const conv_shape *s = b->s;
  int64_t offset[NAME(WIDEST)];
  for (int64_t j = 0; j < nc; j++) {
    int64_t t = j0 + j;
    offset[j] = t / (s->kw * s->kh) * b->plane + t / s->kw % s->kh * s->dh * b->row + t % s->kw * s->dw;
  }
  REAL *restrict dst = out;
  for (int64_t k = 0; k < kc;) {
    int64_t y = (k0 + k) / s->ow, x = (k0 + k) % s->ow, length = s->ow - x < kc - k ? s->ow - x : kc - k;
    const REAL *restrict src = b->x + y * s->sh * b->row + x * s->sw;
    int64_t j = 0;
    if (s->sw == 1)
      for (; j + 4 <= nc; j += 4) NAME(transpose_4)
    (src + offset[j], src + offset[j + 1], src + offset[j + 2], src + offset[j + 3], length, dst + j, stride);
    for (; j < nc; j++)
      for (int64_t i = 0; i < length; i++) dst[i * stride + j] = src[offset[j] + i * s->sw];
    k += length;
    dst += length * stride;
  }
}

/* ---- forward ---- */

typedef struct NAME(forward) {
  const conv_shape *s;
  const REAL *x, *weight, *bias;
  REAL *y;
  int64_t rows, bands;
  bool failed;
} NAME(forward);

static void NAME(forward_units)(void *context, int64_t begin, int64_t end) {
  NAME(forward) *f = context;
  const conv_shape *s = f->s;
  size_t bytes = NAME(band_bytes)(s, f->rows);
  REAL *scratch = bytes ? ty_scratch_alloc(bytes) : NULL;
  if (bytes && !scratch) {
    f->failed = true;
    return;
  }
  int64_t area = s->oh * s->ow, k = s->cg * s->kh * s->kw;
  bool plain = s->kh == 1 && s->kw == 1 && s->sh == 1 && s->sw == 1 && !NAME(needs_padding)(s);
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t r0 = u % f->bands * f->rows, group = u / f->bands % s->groups, image = u / f->bands / s->groups;
    int64_t rows = s->oh - r0 < f->rows ? s->oh - r0 : f->rows;
    const REAL *x = f->x + (image * s->c + group * s->cg) * s->h * s->w;
    ty_gemm g = {
      .m = s->og,
      .n = rows * s->ow,
      .k = k,
      .a = f->weight + group * s->og * k,
      .a_row = k,
      .a_col = 1,
      .c = f->y + (image * s->o + group * s->og) * area + r0 * s->ow,
      .c_row = area,
      .row_bias = f->bias ? f->bias + group * s->og : NULL,
    };
    NAME(band) b;
    if (plain) {
      g.b = x + r0 * s->w;
      g.b_row = s->h * s->w;
      g.b_col = 1;
    } else {
      b = NAME(make_band)(s, x, r0, rows, scratch);
      g.b = &b;
      g.pack = NAME(pack_windows);
    }
    if (!GEMM(&g)) f->failed = true;
  }
  if (scratch) ty_scratch_free(scratch, bytes);
}

static bool NAME(conv)(const conv_shape *s, const REAL *x, const REAL *weight, const REAL *bias, REAL *y) {
  if (conv_is_depthwise(s)) return NAME(depthwise)(s, x, weight, bias, y);
  NAME(forward) f = { .s = s, .x = x, .weight = weight, .bias = bias, .y = y, .rows = NAME(band_rows)(s) };
  f.bands = (s->oh + f.rows - 1) / f.rows;
  int64_t units = s->n * s->groups * f.bands;
  double work = (double)s->og * (double)(s->cg * s->kh * s->kw) * (double)(f.rows * s->ow);
  if (units >= 2 * ty_parallel_threads() || work < 1e6) {
    ty_parallel_for(units, 1 + (int64_t)(2e5 / (work + 1)), NAME(forward_units), &f);
  } else {
    NAME(forward_units)(&f, 0, units); /* the products are shared out instead */
  }
  return !f.failed;
}

/* ---- gradient for the input ---- */

/* weight [groups, og, cg, taps] as [groups, cg, og, taps reversed]: the gradient is a convolution with this. */
static void NAME(turn_weight)(const conv_shape *s, const REAL *restrict weight, REAL *restrict turned) {
  int64_t taps = s->kh * s->kw;
  for (int64_t g = 0; g < s->groups; g++)
    for (int64_t o = 0; o < s->og; o++)
      for (int64_t c = 0; c < s->cg; c++) {
        const REAL *from = weight + ((g * s->og + o) * s->cg + c) * taps;
        REAL *to = turned + ((g * s->cg + c) * s->og + o) * taps;
        for (int64_t t = 0; t < taps; t++) to[taps - 1 - t] = from[t];
      }
}

typedef struct NAME(scatter) {
  const conv_shape *s;
  const REAL *g, *weight;
  REAL *dx;
  int64_t channels, chunks; /* channels of x per unit, units per group */
  bool failed;
} NAME(scatter);

/* Adds the products of every tap to the positions of x it saw. */
static void NAME(add_windows)(const conv_shape *s, const REAL *restrict windows, int64_t channels, REAL *restrict dx) {
  int64_t area = s->oh * s->ow;
  memset(dx, 0, sizeof(REAL) * (size_t)(channels * s->h * s->w));
  for (int64_t c = 0; c < channels; c++)
    for (int64_t ky = 0; ky < s->kh; ky++)
      for (int64_t kx = 0; kx < s->kw; kx++, windows += area) {
        int64_t shift = kx * s->dw - s->pw; /* the columns whose tap lies inside x */
        int64_t first = shift < 0 ? (-shift + s->sw - 1) / s->sw : 0;
        int64_t last = s->w - 1 - shift < 0 ? -1 : (s->w - 1 - shift) / s->sw;
        if (last >= s->ow) last = s->ow - 1;
        for (int64_t oy = 0; oy < s->oh; oy++) {
          int64_t y = oy * s->sh + ky * s->dh - s->ph;
          if (y < 0 || y >= s->h) continue;
          REAL *restrict row = dx + (c * s->h + y) * s->w + shift;
          const REAL *restrict from = windows + oy * s->ow;
          if (s->sw == 1) {
            for (int64_t ox = first; ox <= last; ox++) row[ox] += from[ox];
          } else {
            for (int64_t ox = first; ox <= last; ox++) row[ox * s->sw] += from[ox];
          }
        }
      }
}

static void NAME(scatter_units)(void *context, int64_t begin, int64_t end) {
  NAME(scatter) *f = context;
  const conv_shape *s = f->s;
  int64_t area = s->oh * s->ow, taps = s->kh * s->kw, k = s->cg * taps;
  size_t bytes = sizeof(REAL) * (size_t)(f->channels * taps * area);
  REAL *windows = ty_scratch_alloc(bytes);
  if (!windows) {
    f->failed = true;
    return;
  }
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t c0 = u % f->chunks * f->channels, group = u / f->chunks % s->groups, image = u / f->chunks / s->groups;
    int64_t channels = s->cg - c0 < f->channels ? s->cg - c0 : f->channels;
    ty_gemm g = {
      .m = channels * taps,
      .n = area,
      .k = s->og,
      .a = f->weight + group * s->og * k + c0 * taps,
      .a_row = 1,
      .a_col = k,
      .b = f->g + (image * s->o + group * s->og) * area,
      .b_row = area,
      .b_col = 1,
      .c = windows,
      .c_row = area,
    };
    if (!GEMM(&g)) f->failed = true;
    NAME(add_windows)(s, windows, channels, f->dx + (image * s->c + group * s->cg + c0) * s->h * s->w);
  }
  ty_scratch_free(windows, bytes);
}

static bool NAME(conv_backward_input)(const conv_shape *s, const REAL *g, const REAL *weight, REAL *dx) {
  conv_shape t; /* the convolution from g to dx */
  if (conv_turned(s, &t)) {
    size_t bytes = sizeof(REAL) * (size_t)(s->o * s->cg * s->kh * s->kw);
    REAL *turned = ty_scratch_alloc(bytes);
    if (!turned) return false;
    NAME(turn_weight)(s, weight, turned);
    bool ok = NAME(conv)(&t, g, turned, NULL, dx);
    ty_scratch_free(turned, bytes);
    return ok;
  }
  if (conv_is_depthwise(s)) return NAME(depthwise_backward_input)(s, g, weight, dx);
  int64_t per_channel = s->kh * s->kw * s->oh * s->ow, channels = (1 << 18) / (per_channel + 1) + 1;
  NAME(scatter) f = { .s = s, .g = g, .weight = weight, .dx = dx, .channels = channels < s->cg ? channels : s->cg };
  f.chunks = (s->cg + f.channels - 1) / f.channels;
  double work = (double)(f.channels * per_channel) * (double)s->og;
  ty_parallel_for(s->n * s->groups * f.chunks, 1 + (int64_t)(2e5 / (work + 1)), NAME(scatter_units), &f);
  return !f.failed;
}

/* ---- gradient for the weight ---- */

typedef struct NAME(weight_sum) {
  const conv_shape *s;
  const REAL *g, *x;
  REAL *sums; /* [parts][o, cg, kh, kw] */
  int64_t rows, bands, parts, units;
  bool failed;
} NAME(weight_sum);

/* Sums of the parts begin .. end: each a range of bands, in order. */
static void NAME(weight_parts)(void *context, int64_t begin, int64_t end) {
  NAME(weight_sum) *f = context;
  const conv_shape *s = f->s;
  size_t bytes = NAME(band_bytes)(s, f->rows);
  REAL *scratch = bytes ? ty_scratch_alloc(bytes) : NULL;
  if (bytes && !scratch) {
    f->failed = true;
    return;
  }
  int64_t area = s->oh * s->ow, k = s->cg * s->kh * s->kw;
  for (int64_t p = begin; p < end; p++) {
    int64_t first = f->units * p / f->parts, last = f->units * (p + 1) / f->parts;
    for (int64_t u = first; u < last && !ty_interrupted; u++)
      for (int64_t group = 0; group < s->groups; group++) {
        int64_t r0 = u % f->bands * f->rows, image = u / f->bands;
        int64_t rows = s->oh - r0 < f->rows ? s->oh - r0 : f->rows;
        NAME(band) b = NAME(make_band)(s, f->x + (image * s->c + group * s->cg) * s->h * s->w, r0, rows, scratch);
        ty_gemm g = {
          .m = s->og,
          .n = k,
          .k = rows * s->ow,
          .a = f->g + (image * s->o + group * s->og) * area + r0 * s->ow,
          .a_row = area,
          .a_col = 1,
          .b = &b,
          .pack = NAME(pack_windows_across),
          .c = f->sums + p * s->o * k + group * s->og * k,
          .c_row = k,
          .add = u > first,
        };
        if (!GEMM(&g)) f->failed = true;
      }
  }
  if (scratch) ty_scratch_free(scratch, bytes);
}

static bool NAME(conv_backward_weight)(const conv_shape *s, const REAL *g, const REAL *x, REAL *dw) {
  int64_t count = s->o * s->cg * s->kh * s->kw;
  if (conv_is_depthwise(s)) return NAME(depthwise_backward_weight)(s, g, x, dw);
  NAME(weight_sum) f = { .s = s, .g = g, .x = x, .rows = NAME(band_rows)(s), .sums = dw };
  f.bands = (s->oh + f.rows - 1) / f.rows;
  f.units = s->n * f.bands;
  /* Parts of the batch side by side, unless the weight is so large that a single product keeps all threads busy. */
  f.parts = f.units < 16 ? f.units : 16;
  if (f.parts > (1 << 22) / count) f.parts = (1 << 22) / count;
  if (f.parts < 4) f.parts = 1;
  if (f.parts == 1) {
    NAME(weight_parts)(&f, 0, 1);
    return !f.failed;
  }
  size_t bytes = sizeof(REAL) * (size_t)(f.parts * count);
  f.sums = ty_scratch_alloc(bytes);
  if (!f.sums) return false;
  double work = (double)count * (double)(s->n * s->oh * s->ow) / (double)f.parts;
  ty_parallel_for(f.parts, 1 + (int64_t)(2e5 / (work + 1)), NAME(weight_parts), &f);
  for (int64_t i = 0; i < count; i++) dw[i] = f.sums[i];
  for (int64_t p = 1; p < f.parts; p++) {
    const REAL *restrict sum = f.sums + p * count;
    for (int64_t i = 0; i < count; i++) dw[i] += sum[i];
  }
  ty_scratch_free(f.sums, bytes);
  return !f.failed;
}
