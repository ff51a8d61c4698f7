/* f32 convolutions with 3x3 kernels by Winograd's transforms. What is multiplied lies in three arrays,
 *   v [point][tile][channel]   the transformed input,
 *   u [chunk][point][channel][PAIR]   the transformed kernels, a chunk being two vectors of output channels,
 *   m [point][tile][PAIR]   their products, one dense product per point,
 * in pieces that stay in the L2 cache. Every result is summed in one order, however the work was cut. */
#include "conv_winograd.h"

#include "conv_taps.h"

#define L2_FLOATS (320 << 10) /* of the transformed input of one piece of work */
#define L1_FLOATS (6 << 10)   /* of the part of the input, channels last, that is being transformed */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t rounded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Steps between points have a line more than they need: powers of two would meet in the same sets of the caches. */
static int64_t spread(int64_t floats) { return floats + LANES; }

/* ---- tiles ---- */

/* Images cut into tiles: inputs, which overlap by two (`edge`), or gradients. */
typedef struct tiling {
  const float *x;
  int64_t c, h, w, ph, pw, edge;
  int64_t th, tw, rows; /* tile rows and columns of an image, tile rows of all */
  int64_t channels;     /* c in whole vectors */
  int64_t piece;        /* tile rows gathered at once */
} tiling;

static tiling tiling_of(const float *x, int64_t n, int64_t c, int64_t h, int64_t w, int64_t ph, int64_t pw,
                        int64_t edge, int64_t oh, int64_t ow) {
  tiling t = { .x = x, .c = c, .h = h, .w = w, .ph = ph, .pw = pw, .edge = edge };
  t.th = (oh + OUT - 1) / OUT;
  t.tw = (ow + OUT - 1) / OUT;
  t.rows = n * t.th;
  t.channels = rounded(c, LANES);
  int64_t line = (OUT * t.tw + edge) * LANES;
  t.piece = (L1_FLOATS / line - edge) / OUT;
  if (t.piece < 1) t.piece = 1;
  return t;
}

/* Floats that transform_rows() needs to work in. */
static int64_t tiling_scratch(const tiling *t) {
  return (OUT * t->piece + t->edge + TILE) * (OUT * t->tw + t->edge) * LANES;
}

/* Tile rows row0 .. row1, channels c0 .. c1, to v[point * step + (tile from row0) * channels + c]. */
static void transform_rows(const tiling *t, int64_t row0, int64_t row1, int64_t c0, int64_t c1, float *v, int64_t step,
                           float *scratch) {
  int64_t columns = OUT * t->tw + t->edge, line = columns * LANES;
  float *half = scratch + (OUT * t->piece + t->edge) * line;
  for (int64_t row = row0, count; row < row1; row += count) {
    int64_t image = row / t->th, r = row % t->th;
    count = least(least(t->piece, t->th - r), row1 - row);
    for (int64_t c = c0; c < c1; c += LANES) {
      gather_planes(t->x + (image * t->c + c) * t->h * t->w, t->h, t->w, least(LANES, t->c - c), LANES, r * OUT - t->ph,
                    OUT * count + t->edge, -t->pw, columns, scratch, LANES);
      for (int64_t k = 0; k < count; k++) {
        float *to = v + (row - row0 + k) * t->tw * t->channels + c, *from = scratch + k * OUT * line;
        if (t->edge) transform_input(from, t->tw, half, to, t->channels, step);
        else transform_gradient(from, t->tw, to, t->channels, step);
      }
    }
  }
}

/* All of them, shared out by pieces and by vectors of channels. */
typedef struct tiling_call {
  const tiling *t;
  float *v;
  int64_t step;
  bool *failed;
} tiling_call;

static void tiling_units(void *context, int64_t begin, int64_t end) {
  const tiling_call *w = context;
  const tiling *t = w->t;
  size_t bytes = sizeof(float) * (size_t)tiling_scratch(t);
  float *scratch = ty_scratch_alloc(bytes);
  if (!scratch) {
    *w->failed = true;
    return;
  }
  int64_t pieces = (t->th + t->piece - 1) / t->piece, all = t->rows / t->th * pieces;
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    int64_t c = i / all * LANES, first = i % all / pieces * t->th, row0 = first + i % all % pieces * t->piece;
    transform_rows(t, row0, least(row0 + t->piece, first + t->th), c, c + LANES, w->v + row0 * t->tw * t->channels,
                   w->step, scratch);
  }
  ty_scratch_free(scratch, bytes);
}

static void transform_all(const tiling *t, float *v, int64_t step, bool *failed) {
  tiling_call c = { t, v, step, failed };
  int64_t pieces = (t->th + t->piece - 1) / t->piece;
  ty_parallel_for(t->rows / t->th * pieces * (t->channels / LANES), 1, tiling_units, &c);
}

/* ---- the convolution, forward or for the gradient of the input ---- */

typedef struct call {
  const conv_shape *s;
  tiling in;
  const float *weight;
  int64_t from_out, from_in; /* elements between the kernels of output and of input channels */
  bool turned;               /* the kernels are used back to front */
  const conv_epilogue *e;
  float *y;
  int64_t block;           /* tile rows per unit */
  int64_t chunks, u_chunk; /* of output channels; floats of u for each */
  float *u, *v;            /* u: NULL when each piece of work transforms what it needs */
  int64_t v_step;
  bool filled, failed; /* u holds the kernels already */
  int64_t done;        /* chunks whose kernels are in u now: Ctrl-C skips some */
} call;

static int64_t u_step(const call *w) { return spread(w->s->c * PAIR); }

/* The kernels of one chunk: u[point * u_step + channel * width + o]. */
static void transform_kernels(const call *w, int64_t chunk, float *u) {
  float taps[9 * LANES] __attribute__((aligned(64))), reversed[9 * LANES] __attribute__((aligned(64)));
  int64_t width = vectors_of(w->s->o, chunk) * LANES;
  for (int64_t half = 0; half < width; half += LANES) {
    int64_t o = chunk * PAIR + half;
    for (int64_t c = 0; c < w->s->c; c++) {
      const float *from = w->weight + o * w->from_out + c * w->from_in;
      interleave(from, w->from_out, least(LANES, w->s->o - o), 9, taps, LANES, LANES);
      for (int t = 0; w->turned && t < 9; t++)
        *(lanes *)(reversed + (8 - t) * LANES) = *(const lanes *)(taps + t * LANES);
      transform_kernel(w->turned ? reversed : taps, u + c * width + half, u_step(w));
    }
  }
}

/* Products and results of one chunk for the tile rows row0 .. row1, whose transformed input is at v. */
static void multiply_chunk(const call *w, int64_t chunk, int64_t row0, int64_t row1, const float *v, int64_t v_step,
                           const float *u, float *m, float *band) {
  const conv_shape *s = w->s;
  const tiling *in = &w->in;
  int64_t tiles = (row1 - row0) * in->tw, vectors = vectors_of(w->s->o, chunk), width = vectors * LANES;
  int64_t m_step = spread(tiles * PAIR);
  for (int p = 0; p < POINTS; p++) {
    micro product = { .segments = 1, .k = s->c, .a = v + p * v_step, .step = in->channels, .c_row = width };
    product.b = u + p * u_step(w);
    product.c = m + p * m_step;
    multiply_along(&product, tiles, vectors);
  }
  float block[OUT * OUT * LANES] __attribute__((aligned(64)));
  for (int64_t half = 0; half < width; half += LANES)
    for (int64_t row = row0; row < row1; row++) {
      int64_t image = row / in->th, y0 = row % in->th * OUT, lines = least(OUT, s->oh - y0);
      for (int64_t t = 0; t < in->tw; t++) {
        int64_t x0 = t * OUT, columns = least(OUT, s->ow - x0);
        transform_results(m + ((row - row0) * in->tw + t) * width + half, m_step, block);
        for (int64_t i = 0; i < lines; i++)
          for (int64_t j = 0; j < columns; j++)
            *(lanes *)(band + (i * s->ow + x0 + j) * LANES) = *(const lanes *)(block + (i * OUT + j) * LANES);
      }
      int64_t o = chunk * PAIR + half, area = s->oh * s->ow;
      finish_planes(w->e, band, LANES, lines * s->ow, least(LANES, s->o - o), w->y,
                    (image * s->o + o) * area + y0 * s->ow, area, o);
    }
}

/* Floats of what multiply_chunk() fills, for this many tile rows. */
static int64_t product_floats(const call *w, int64_t rows) { return POINTS * spread(rows * w->in.tw * PAIR); }
static int64_t band_floats(const call *w) { return OUT * w->s->ow * LANES; }

static void *take(call *w, int64_t floats) {
  void *p = ty_scratch_alloc(sizeof(float) * (size_t)floats);
  if (!p) w->failed = true;
  return p;
}
static void give(void *p, int64_t floats) {
  if (p) ty_scratch_free(p, sizeof(float) * (size_t)floats);
}

static void kernel_units(void *context, int64_t begin, int64_t end) {
  call *w = context;
  for (int64_t i = begin; i < end; i++) transform_kernels(w, i, w->u + i * w->u_chunk);
}

/* A block of tile rows: all its channels are transformed, then multiplied with chunk after chunk of the kernels. */
static void block_units(void *context, int64_t begin, int64_t end) {
  call *w = context;
  int64_t v_step = spread(w->block * w->in.tw * w->in.channels), for_v = POINTS * v_step;
  int64_t for_m = product_floats(w, w->block), for_band = band_floats(w);
  int64_t for_tiling = tiling_scratch(&w->in), floats = for_v + for_m + for_band + for_tiling;
  float *v = take(w, floats);
  if (!v) return;
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    int64_t row0 = i * w->block, row1 = least(row0 + w->block, w->in.rows);
    transform_rows(&w->in, row0, row1, 0, w->in.channels, v, v_step, v + for_v + for_m + for_band);
    for (int64_t chunk = 0; chunk < w->chunks; chunk++)
      multiply_chunk(w, chunk, row0, row1, v, v_step, w->u + chunk * w->u_chunk, v + for_v, v + for_v + for_m);
  }
  give(v, floats);
}

/* The transformed kernels: of all calls, or of this one if `anyway`. */
static ty_kept open_kernels(call *w, bool anyway) {
  static const char maker;
  ty_kept u = conv_kept(w->s, w->weight, &maker, w->turned, sizeof(float) * (size_t)(w->chunks * w->u_chunk), anyway);
  w->u = u.data;
  w->filled = u.filled;
  return u;
}

static bool by_blocks(call *w) {
  ty_kept u = open_kernels(w, true);
  if (!u.data) return false;
  if (!w->filled) ty_parallel_for_all(w->chunks, 1, kernel_units, w);
  ty_parallel_for((w->in.rows + w->block - 1) / w->block, 1, block_units, w);
  ty_kept_close(&u, true);
  return !w->failed;
}

static void chunk_units(void *context, int64_t begin, int64_t end) {
  call *w = context;
  int64_t for_u = w->u ? 0 : w->u_chunk, for_m = product_floats(w, w->block), floats = for_u + for_m + band_floats(w);
  float *m = take(w, floats), *band = m + for_m, *own = band + band_floats(w);
  if (!m) return;
  for (int64_t chunk = begin; chunk < end && !ty_interrupted; chunk++) {
    float *u = w->u ? w->u + chunk * w->u_chunk : own;
    if (!w->filled) transform_kernels(w, chunk, u);
    __atomic_fetch_add(&w->done, 1, __ATOMIC_RELAXED);
    for (int64_t row0 = 0; row0 < w->in.rows; row0 += w->block)
      multiply_chunk(w, chunk, row0, least(row0 + w->block, w->in.rows), w->v + row0 * w->in.tw * w->in.channels,
                     w->v_step, u, m, band);
  }
  give(m, floats);
}

/* For few tiles and many channels, where the kernels are most of the data: unless they are kept, they are transformed
 * chunk by chunk as they are needed, each to be multiplied with all tiles. */
static bool by_chunks(call *w) {
  w->v_step = spread(w->in.rows * w->in.tw * w->in.channels);
  w->v = take(w, POINTS * w->v_step);
  if (!w->v) return false;
  ty_kept u = open_kernels(w, false);
  transform_all(&w->in, w->v, w->v_step, &w->failed);
  if (!w->failed) ty_parallel_for(w->chunks, 1, chunk_units, w);
  ty_kept_close(&u, w->done == w->chunks);
  give(w->v, POINTS * w->v_step);
  return !w->failed;
}

static bool convolve(call *w) {
  const conv_shape *s = w->s;
  int64_t row = POINTS * w->in.tw * w->in.channels; /* floats of v for a tile row */
  w->chunks = chunks_of(s->o);
  w->u_chunk = POINTS * u_step(w);
  w->block = L2_FLOATS / row;
  if (w->block * w->in.tw < 28) w->block = 28 / w->in.tw;
  if (w->block < 1) w->block = 1;
  int threads = ty_parallel_threads();
  if (w->chunks * w->u_chunk > (1 << 20) && w->in.rows * w->in.tw <= 128 && w->chunks >= 2 * threads) {
    w->block = least(w->in.rows, 1 + 128 / w->in.tw);
    return by_chunks(w);
  }
  int64_t blocks = rounded((w->in.rows + w->block - 1) / w->block, threads); /* even shares */
  w->block = (w->in.rows + blocks - 1) / blocks;
  return by_blocks(w);
}

bool TY_KERNEL(conv_winograd)(const conv_shape *s, const float *x, const float *weight, const conv_epilogue *e,
                              float *y) {
  call w = { .s = s, .weight = weight, .from_out = s->c * 9, .from_in = 9, .e = e, .y = y };
  w.in = tiling_of(x, s->n, s->c, s->h, s->w, s->ph, s->pw, 2, s->oh, s->ow);
  return convolve(&w);
}

bool TY_KERNEL(conv_winograd_input)(const conv_shape *s, const float *g, const float *weight, float *dx) {
  conv_shape t = *s; /* the convolution from g to dx */
  t.c = s->o, t.h = s->oh, t.w = s->ow, t.o = s->c, t.oh = s->h, t.ow = s->w;
  const conv_epilogue none = { NULL, NULL, TY_NO_ACTIVATION };
  call w = { .s = &t, .weight = weight, .from_out = 9, .from_in = s->c * 9, .turned = true, .e = &none, .y = dx };
  w.in = tiling_of(g, t.n, t.c, t.h, t.w, 2 - s->ph, 2 - s->pw, 2, t.oh, t.ow);
  return convolve(&w);
}

/* ---- the gradient of the weight ---- */

/* du[point][channel][PAIR], the sums over tiles of v times the transformed gradient, are brought back to taps:
 * sums[part][chunk][tap][channel][PAIR]. */
typedef struct weight_call {
  const conv_shape *s;
  tiling in, out;
  float *v, *g, *sums;
  int64_t v_step, g_step, block, parts, chunks, channels, slices; /* `channels` of the input in each of `slices` */
  float *dw;
  bool failed;
} weight_call;

static void bring_back(const weight_call *w, int64_t part, int64_t chunk, int64_t c0, int64_t c1, const float *du,
                       int64_t du_step) {
  int64_t width = LANES * vectors_of(w->s->o, chunk), c = w->s->c;
  float *sums = w->sums + (part * w->chunks + chunk) * 9 * c * PAIR;
  for (int64_t i = c0; i < c1; i++)
    for (int64_t half = 0; half < width; half += LANES)
      transform_taps(du + (i - c0) * width + half, du_step, sums + i * width + half, c * width);
}

/* Parts of the tile rows, each summed block by block. */
static void part_units(void *context, int64_t begin, int64_t end) {
  weight_call *w = context;
  const tiling *in = &w->in, *out = &w->out;
  int64_t c = w->s->c, tiles = w->block * in->tw, v_step = spread(tiles * in->channels);
  int64_t g_step = spread(tiles * out->channels), du_step = spread(c * PAIR);
  int64_t for_v = POINTS * v_step, for_g = POINTS * g_step, for_du = w->chunks * POINTS * du_step;
  int64_t a = tiling_scratch(in), b = tiling_scratch(out), floats = for_v + for_g + for_du + (a > b ? a : b);
  float *v = ty_scratch_alloc(sizeof(float) * (size_t)floats), *g = v + for_v, *du = g + for_g, *scratch = du + for_du;
  if (!v) {
    w->failed = true;
    return;
  }
  for (int64_t part = begin; part < end; part++) {
    int64_t first = in->rows * part / w->parts, last = in->rows * (part + 1) / w->parts;
    for (int64_t row0 = first; row0 < last && !ty_interrupted; row0 += w->block) {
      int64_t row1 = least(row0 + w->block, last);
      transform_rows(in, row0, row1, 0, in->channels, v, v_step, scratch);
      transform_rows(out, row0, row1, 0, out->channels, g, g_step, scratch);
      for (int64_t chunk = 0; chunk < w->chunks; chunk++) {
        int64_t width = LANES * vectors_of(w->s->o, chunk);
        for (int p = 0; p < POINTS; p++) {
          micro product = { .segments = 1, .k = (row1 - row0) * in->tw, .a = v + p * v_step, .step = in->channels };
          product.b = g + p * g_step + chunk * PAIR;
          product.b_row = out->channels;
          product.c = du + (chunk * POINTS + p) * du_step;
          product.c_row = width;
          product.add = row0 > first;
          multiply_across(&product, c, width / LANES);
        }
      }
    }
    for (int64_t chunk = 0; chunk < w->chunks; chunk++)
      bring_back(w, part, chunk, 0, c, du + chunk * POINTS * du_step, du_step);
  }
  ty_scratch_free(v, sizeof(float) * (size_t)floats);
}

/* Slices of input channels by chunks of output channels, each summed over all tiles. */
static void slice_units(void *context, int64_t begin, int64_t end) {
  weight_call *w = context;
  int64_t du_step = spread(w->channels * PAIR);
  size_t bytes = sizeof(float) * (size_t)(POINTS * du_step);
  float *du = ty_scratch_alloc(bytes);
  if (!du) {
    w->failed = true;
    return;
  }
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    int64_t chunk = i / w->slices, c0 = i % w->slices * w->channels, c1 = least(c0 + w->channels, w->s->c);
    int64_t width = LANES * vectors_of(w->s->o, chunk);
    for (int p = 0; p < POINTS; p++) {
      micro product = { .segments = 1, .k = w->in.rows * w->in.tw, .a = w->v + p * w->v_step + c0 };
      product.step = w->in.channels;
      product.b = w->g + p * w->g_step + chunk * PAIR;
      product.b_row = w->out.channels;
      product.c = du + p * du_step;
      product.c_row = width;
      multiply_across(&product, c1 - c0, width / LANES);
    }
    bring_back(w, 0, chunk, c0, c1, du, du_step);
  }
  ty_scratch_free(du, bytes);
}

static bool weight_by_slices(weight_call *w) {
  int64_t tiles = w->in.rows * w->in.tw;
  w->v_step = spread(tiles * w->in.channels);
  w->g_step = spread(tiles * w->out.channels);
  size_t bytes = sizeof(float) * (size_t)(POINTS * (w->v_step + w->g_step));
  w->v = ty_scratch_alloc(bytes);
  if (!w->v) return false;
  w->g = w->v + POINTS * w->v_step;
  transform_all(&w->in, w->v, w->v_step, &w->failed);
  transform_all(&w->out, w->g, w->g_step, &w->failed);
  w->channels = 4 * MOST_ROWS;
  w->slices = (w->s->c + w->channels - 1) / w->channels;
  w->channels = (w->s->c + w->slices - 1) / w->slices;
  if (!w->failed) ty_parallel_for(w->chunks * w->slices, 1, slice_units, w);
  ty_scratch_free(w->v, bytes);
  return !w->failed;
}

bool TY_KERNEL(conv_winograd_weight)(const conv_shape *s, const float *g, const float *x, float *dw) {
  weight_call w = { .s = s, .parts = 1, .dw = dw };
  w.in = tiling_of(x, s->n, s->c, s->h, s->w, s->ph, s->pw, 2, s->oh, s->ow);
  w.out = tiling_of(g, s->n, s->o, s->oh, s->ow, 0, 0, 0, s->oh, s->ow);
  w.chunks = chunks_of(s->o);
  bool slices = s->c * s->o >= 160 * 160; /* many partial sums of large weights cost more than they save */
  if (!slices) {
    w.parts = least(least(w.in.rows, 8), 1 + w.in.rows * w.in.tw / 32);
    w.block = 1 + L2_FLOATS / 2 / (POINTS * w.in.tw * (w.in.channels + w.out.channels) / 2);
    w.block = least(w.block, (w.in.rows + w.parts - 1) / w.parts);
  }
  size_t bytes = sizeof(float) * (size_t)(w.parts * w.chunks * 9 * s->c * PAIR);
  w.sums = ty_scratch_alloc(bytes);
  if (!w.sums) return false;
  if (slices) weight_by_slices(&w);
  else ty_parallel_for(w.parts, 1, part_units, &w);
  if (!w.failed) combine_taps(w.sums, w.parts, s->o, s->c, 9, dw);
  ty_scratch_free(w.sums, bytes);
  return !w.failed;
}
