/* Convolutions on tiles for one type of elements; included by conv_tiles.c with PLANES (numbers of bf16 that add up
 * to an element), PIECE (its type) and NAME(x) set.
 *
 * Forward, the weights are A: 32 results by 32 channels. B is the source itself, as planes of pairs of channels
 * (conv_lattice.h): a tile of it is 16 pairs by 16 neighbouring places, loaded from wherever the tap looks. So there
 * is no matrix of windows; what is packed has the size of the source. */

enum {
  NAME(a_tile) = TY_TILE * TY_TILE,         /* units of 16 results and a step */
  NAME(a_step) = PLANES * 2 * NAME(a_tile), /* of a block of results and a step */
  NAME(chunk) = PLANES > 1 ? 16 : INT32_MAX /* steps whose sums are added up at once: rounding of long sums adds up */
};

/* ---- planes of the source ---- */

/* Where a folded channel's lines lie: its place (row, 0) of the source, of which `from` .. `from` + n are columns of
 * the plane's rows from row `row` of the source on. */
typedef struct NAME(line) {
  const PIECE *at; /* of row 0 */
  int64_t row, from, n;
} NAME(line);

static NAME(line) NAME(line_of)(const lattice *l, const PIECE *x, int64_t v, int64_t r0, int64_t phase) {
  NAME(line) line = { .row = -1, .from = l->pitch };
  if (v >= l->channels * l->fold) return line;
  int64_t of = v % l->fold, shift = of % l->fold_cols * l->across, end;
  lattice_inside(l, phase % l->col_phases, shift, &line.from, &end);
  line.n = end - line.from;
  if (line.n == 0) line.from = l->pitch;
  line.row = r0 * l->row_step + phase / l->col_phases + l->row0 + of / l->fold_cols * l->down;
  line.at = x + v / l->fold * l->h * l->w + line.from * l->col_step + phase % l->col_phases + l->col0 + shift;
  return line;
}

/* Row i of a line, or NULL. */
TILE_INLINE const PIECE *NAME(row_of)(const lattice *l, const NAME(line) * line, int64_t i) {
  int64_t row = line->row + i * l->row_step;
  return line->n == 0 || row < 0 || row >= l->h ? NULL : line->at + row * l->w;
}

/* Up to 16 elements of a line's row from place `at` of the plane's on: 0 where there is none. */
TILE_INLINE __m512i NAME(pick_at)(const NAME(line) * line, const PIECE *row, int64_t step, int64_t at) {
  int64_t i = at - line->from;
  if (!row || i <= -16) return _mm512_setzero_si512();
  if (i >= 0) return NAME(pick)(row + i * step, step, line->n - i);
  uint32_t space[32] = { 0 };
  _mm512_storeu_si512(space - i, NAME(pick)(row, step, line->n));
  return _mm512_loadu_si512(space);
}

TILE_INLINE void NAME(clear_units)(uint32_t *to, int64_t plane, int64_t from, int64_t end) {
  for (int64_t j = from; j < end; j += 16)
    for (int p = 0; p < PLANES; p++) _mm512_storeu_si512(to + p * plane + j, _mm512_setzero_si512());
}

/* A row of a plane of pairs whose lines have the same columns. */
TILE_INLINE void NAME(even_row)(const NAME(line) * line, const PIECE *a, const PIECE *b, const int64_t step,
                                uint32_t *to, int64_t plane, NAME(sizes) * sizes) {
  int64_t n = line->n, j = 0;
  __m512i units[PLANES], x, y;
  to += line->from;
  for (; j < n; j += 16, to += 16) {
    int64_t count = n - j >= 16 ? 16 : n - j;
    x = NAME(pick)(a + j * step, step, count), y = NAME(pick)(b + j * step, step, count);
    if (PLANES > 1) NAME(note)(x, sizes), NAME(note)(y, sizes);
    NAME(units)(x, y, units);
    for (int p = 0; p < PLANES; p++) _mm512_storeu_si512(to + p * plane, units[p]);
  }
}

/* Rows of a plane of pairs of channels: the columns of the source that lie in it, and 0 elsewhere. Writes up to 16
 * units more. */
static void NAME(pair_rows)(const lattice *l, const NAME(line) * line, int64_t rows, uint32_t *to, int64_t plane,
                            NAME(sizes) * sizes) {
  const bool even = line[0].from == line[1].from && line[0].n == line[1].n;
  int64_t from = line[0].from < line[1].from ? line[0].from : line[1].from, end = line[0].from + line[0].n;
  for (int64_t i = 0; i < rows; i++, to += l->pitch) {
    const PIECE *a = NAME(row_of)(l, &line[0], i), *b = NAME(row_of)(l, &line[1], i);
    if (!a && !b) {
      NAME(clear_units)(to, plane, 0, l->pitch);
      continue;
    }
    NAME(clear_units)(to, plane, 0, from);
    if (even && a && b && l->col_step <= 2) {
      if (l->col_step == 1) NAME(even_row)(line, a, b, 1, to, plane, sizes);
      else NAME(even_row)(line, a, b, 2, to, plane, sizes);
      NAME(clear_units)(to, plane, end, l->pitch);
      continue;
    }
    for (int64_t j = from; j < l->pitch; j += 16) {
      __m512i units[PLANES], x = NAME(pick_at)(&line[0], a, l->col_step, j);
      __m512i y = NAME(pick_at)(&line[1], b, l->col_step, j);
      if (PLANES > 1) NAME(note)(x, sizes), NAME(note)(y, sizes);
      NAME(units)(x, y, units);
      for (int p = 0; p < PLANES; p++) _mm512_storeu_si512(to + p * plane + j, units[p]);
    }
  }
  NAME(clear_units)(to, plane, 0, l->more_cols); /* what the last row runs into */
}

/* ---- units: some images, or some rows of one ---- */

typedef struct NAME(job) {
  const lattice *l;
  const PIECE *x, *residual; /* the source, and what is added to results */
  PIECE *y;
  const float *bias;
  ty_activation activation;
  const uint32_t *weights[MOST_PARTS]; /* [blocks of results][steps][PLANES][2][16][16] */
  int64_t n, groups, results;          /* images; results of a group */
  int64_t images, rows, bands;         /* of a unit */
  int64_t h, w;                        /* of y */
  int64_t plane;                       /* units of a pair of channels */
  bool odd, failed;
} NAME(job);

typedef struct NAME(work) {
  uint32_t *pairs;           /* [images][blocks][phases][PLANES][16][plane] */
  int64_t *offset;           /* of the steps, in an image's pairs */
  uint32_t *valid;           /* of each block of 32 places, those that are results, */
  int64_t *first;            /* and the first of them, counted in results */
  PIECE *spread[MOST_PARTS]; /* results of a part, [32][rows][cols] */
} NAME(work);

static int64_t NAME(phases)(const lattice *l) { return l->row_phases * l->col_phases; }

/* Elements of a plane of `rows` results: 64 bytes times an odd number, which spreads planes over the sets of a
 * cache. */
static int64_t NAME(plane_of)(const lattice *l, int64_t rows) {
  int64_t places = (rows + l->more_rows) * l->pitch + l->more_cols + 64;
  return (places / 16 + 1) / 2 * 32 + 16;
}

static int64_t NAME(image_units)(const NAME(job) * j) {
  return j->l->blocks * NAME(phases)(j->l) * PLANES * TY_TILE * j->plane;
}

static void NAME(pack_image)(const NAME(job) * j, const PIECE *x, int64_t r0, uint32_t *to, NAME(sizes) * sizes) {
  const lattice *l = j->l;
  for (int64_t block = 0; block < l->blocks; block++)
    for (int64_t phase = 0; phase < NAME(phases)(l); phase++, to += PLANES * TY_TILE * j->plane)
      for (int64_t u = 0; u < TY_TILE; u++) {
        int64_t v = block * CHANNELS + 2 * u;
        NAME(line) line[2] = { NAME(line_of)(l, x, v, r0, phase), NAME(line_of)(l, x, v + 1, r0, phase) };
        NAME(pair_rows)(l, line, j->rows + l->more_rows, to + u * j->plane, TY_TILE * j->plane, sizes);
      }
}

/* ---- 32 results by 32 places ---- */

#define MEET(pa, pb, loads_a, loads_b)                                              \
  if (loads_a) { TY_TILES_A(a + (pa)*2 * NAME(a_tile), NAME(a_tile), TY_TILE) }     \
  if (loads_b) { TY_TILES_B(x + offset[s] + (pb)*TY_TILE * plane, TY_TILE, plane) } \
  TY_TILES_MULTIPLY(_tile_dpbf16ps)

/* c [32][32] = the sums of `steps` steps. */
__attribute__((noinline, target(TY_TILES_TARGET))) static void NAME(native)(int64_t steps, const uint32_t *a,
                                                                            const uint32_t *x, const int64_t *offset,
                                                                            int64_t plane, float *c) {
  TY_TILES_CLEAR()
  for (int64_t s = 0; s < steps; s++, a += NAME(a_step)) { MEETINGS(MEET) }
  TY_TILES_SUMS(_tile_stored, c, 32)
}

/* The same without the instructions. */
static void NAME(plain)(int64_t steps, const uint32_t *a, const uint32_t *x, const int64_t *offset, int64_t plane,
                        float *c) {
  memset(c, 0, sizeof *c * 32 * 32);
#define MEET_PLAIN(pa, pb, loads_a, loads_b)                                                                   \
  ty_tiles_plainly(32, a + (pa)*2 * NAME(a_tile), NAME(a_tile), TY_TILE, x + offset[s] + (pb)*TY_TILE * plane, \
                   TY_TILE, plane, c, 32);
  for (int64_t s = 0; s < steps; s++, a += NAME(a_step)) { MEETINGS(MEET_PLAIN) }
}

static void NAME(sums)(int64_t steps, const uint32_t *a, const uint32_t *x, const int64_t *offset, int64_t plane,
                       float *c) {
  float more[32 * 32] __attribute__((aligned(64)));
  if (steps == 0) memset(c, 0, sizeof more); /* a phase that no tap sees */
  for (int64_t s = 0; s < steps; s += NAME(chunk)) {
    int64_t count = steps - s < NAME(chunk) ? steps - s : NAME(chunk);
    float *to = s ? more : c;
    (ty_tiles() == TY_NATIVE_TILES ? NAME(native) : NAME(plain))(count, a + s * NAME(a_step), x, offset + s, plane, to);
    for (int i = 0; s && i < 32 * 32; i++) c[i] += more[i];
  }
}

/* ---- from sums to results ---- */

static void NAME(widen)(const PIECE *from, float *to, int64_t n) {
#if PLANES == 1
  ty_half_load(TY_BF16, to, from, n);
#else
  memcpy(to, from, sizeof *to * (size_t)n);
#endif
}

static void NAME(narrow)(const float *from, PIECE *to, int64_t n) {
#if PLANES == 1
  ty_half_store(TY_BF16, to, from, n);
#else
  memcpy(to, from, sizeof *to * (size_t)n);
#endif
}

TILE_INLINE void NAME(put)(PIECE *to, __m512 x, __mmask16 lanes, int n) {
  __m512 together = _mm512_maskz_compress_ps(lanes, x);
  __mmask16 mask = (__mmask16)((1u << n) - 1);
#if PLANES == 1
  _mm256_mask_storeu_epi16(to, mask, rounded(together));
#else
  _mm512_mask_storeu_ps(to, mask, together);
#endif
}

/* Results of 32 places, of which `valid` exist, for `count` channels: c [32][32] to planes `step` apart. */
static void NAME(finish)(const NAME(job) * j, const float *c, int64_t count, uint32_t valid, const float *bias,
                         const PIECE *residual, PIECE *y, int64_t step) {
  const __mmask16 low = (__mmask16)valid, high = (__mmask16)(valid >> 16);
  const int n = __builtin_popcount(low), m = __builtin_popcount(high);
  for (int64_t r = 0; r < count; r++, c += 32, y += step) {
    __m512 base = _mm512_set1_ps(bias ? bias[r] : 0);
    __m512 a = _mm512_add_ps(_mm512_loadu_ps(c), base), b = _mm512_add_ps(_mm512_loadu_ps(c + 16), base);
    if (residual || j->activation) {
      float x[32], more[32];
      _mm512_storeu_ps(x, _mm512_maskz_compress_ps(low, a));
      _mm512_storeu_ps(x + n, _mm512_maskz_compress_ps(high, b));
      if (residual) {
        NAME(widen)(residual + r * step, more, n + m);
        for (int i = 0; i < n + m; i++) x[i] += more[i];
      }
      ty_activate_f32(j->activation, x, n + m);
      NAME(narrow)(x, y, n + m);
    } else {
      NAME(put)(y, a, low, n);
      NAME(put)(y + n, b, high, m);
    }
  }
}

/* Which places of a unit's blocks are results of a part. Returns how many blocks there are. */
static int64_t NAME(places)(const NAME(job) * j, const part *p, int64_t r0, NAME(work) * w) {
  int64_t rows = p->rows - r0 < j->rows ? p->rows - r0 : j->rows, pitch = j->l->pitch, blocks = 0, found = 0;
  int64_t row = 0, col = 0;
  if (rows <= 0) return 0;
  for (int64_t q = 0; q < (rows - 1) * pitch + p->cols; q += 32, blocks++) {
    uint32_t valid = 0;
    w->first[blocks] = found;
    for (int i = 0; i < 32; i++) {
      if (row < rows && col < p->cols) valid |= 1u << i, found++;
      if (++col == pitch) col = 0, row++;
    }
    w->valid[blocks] = valid;
  }
  return blocks;
}

static void NAME(steps_of)(const NAME(job) * j, const part *p, int64_t *offset) {
  for (int64_t block = 0; block < j->l->blocks; block++)
    for (int64_t t = 0; t < p->count; t++) {
      const tap *at = &p->taps[t];
      *offset++ = (block * NAME(phases)(j->l) + at->phase) * PLANES * TY_TILE * j->plane + at->row * j->l->pitch +
                  at->col;
    }
}

/* `count` results of one image and a part, with their weights a: to planes of y from `to` on, `step` apart. */
static void NAME(block_of_results)(const NAME(job) * j, const uint32_t *a, int64_t steps, int64_t count,
                                   const uint32_t *pairs, int64_t blocks, const NAME(work) * w, const float *bias,
                                   const PIECE *residual, PIECE *to, int64_t step) {
  float c[32 * 32] __attribute__((aligned(64)));
  for (int64_t b = 0; b < blocks; b++) {
    int64_t at = w->first[b];
    NAME(sums)(steps, a, pairs + b * 32, w->offset, j->plane, c);
    NAME(finish)(j, c, count, w->valid[b], bias, residual ? residual + at : NULL, to + at, step);
  }
}

/* Two lines as one, element by element; the second may have one less. */
static void NAME(zip)(const PIECE *a, const PIECE *b, int64_t n, PIECE *to) {
  int64_t i = 0;
#if PLANES == 1
  for (; i + 16 <= n / 2; i += 16) {
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(a + i)));
    __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(b + i)));
    _mm512_storeu_si512(to + 2 * i, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
  }
#endif
  for (; i < n / 2; i++) to[2 * i] = a[i], to[2 * i + 1] = b[i];
  if (n % 2) to[n - 1] = a[n / 2];
}

/* Rows of the image from those of its phases, for `count` channels. */
static void NAME(gather_phases)(const NAME(job) * j, int64_t r0, int64_t count, const NAME(work) * w, PIECE *y) {
  const lattice *l = j->l;
  for (int64_t c = 0; c < count; c++, y += j->h * j->w)
    for (int64_t r = r0 * l->spread_rows; r < (r0 + j->rows) * l->spread_rows && r < j->h; r++) {
      int64_t q = r % l->spread_rows * l->spread_cols, row = r / l->spread_rows - r0;
      const PIECE *from[2] = { NULL, NULL };
      for (int64_t i = 0; i < l->spread_cols; i++) {
        const part *p = &l->part[q + i];
        from[i] = w->spread[q + i] + (c * j->rows + row) * p->cols;
      }
      if (l->spread_cols == 2) NAME(zip)(from[0], from[1], j->w, y + r * j->w);
      else memcpy(y + r * j->w, from[0], sizeof *y * (size_t)j->w);
    }
}

/* A unit's rows r0 .. of results of images n0 .. n1 of a group, once its pairs are there. */
static void NAME(multiply_unit)(const NAME(job) * j, int64_t group, int64_t n0, int64_t n1, int64_t r0,
                                NAME(work) * w) {
  const lattice *l = j->l;
  bool spread = l->parts > 1;
  for (int64_t o = 0; o < j->results; o += 32) {
    int64_t count = j->results - o < 32 ? j->results - o : 32, all = group * j->results + o;
    const float *bias = j->bias ? j->bias + all : NULL;
    for (int64_t n = n0; n < n1; n++) {
      const uint32_t *pairs = w->pairs + (n - n0) * NAME(image_units)(j);
      int64_t at = (n * j->groups * j->results + all) * j->h * j->w;
      for (int64_t q = 0; q < l->parts; q++) {
        const part *p = &l->part[q];
        if (spread || (o == 0 && n == n0)) NAME(steps_of)(j, p, w->offset);
        int64_t blocks = NAME(places)(j, p, r0, w), place = at + r0 * j->w, steps = l->blocks * p->count;
        const uint32_t *a = j->weights[q] + (group * ((j->results + 31) / 32) + o / 32) * steps * NAME(a_step);
        const PIECE *residual = j->residual ? j->residual + place : NULL;
        if (spread)
          NAME(block_of_results)(j, a, steps, count, pairs, blocks, w, NULL, NULL, w->spread[q], j->rows * p->cols);
        else NAME(block_of_results)(j, a, steps, count, pairs, blocks, w, bias, residual, j->y + place, j->h * j->w);
      }
      if (spread) NAME(gather_phases)(j, r0, count, w, j->y + at);
    }
  }
}

static void NAME(pieces)(void *context, int64_t begin, int64_t end) {
  NAME(job) *j = context;
  const lattice *l = j->l;
  int64_t steps = l->blocks * MOST_TAPS, blocks = (j->rows * l->pitch + 31) / 32, parts = l->parts > 1 ? l->parts : 0;
  size_t pairs = sizeof(uint32_t) * (size_t)(j->images * NAME(image_units)(j) + 64);
  size_t spread = (sizeof(PIECE) * (size_t)(32 * j->rows * l->cols) + 63) / 64 * 64;
  size_t bytes = pairs + (size_t)steps * 8 + (size_t)blocks * 12 + (size_t)parts * spread + 64;
  char *memory = ty_scratch_alloc(bytes), *at = memory;
  if (!memory) {
    j->failed = true;
    return;
  }
  NAME(work) w = { .pairs = (uint32_t *)(void *)(((uintptr_t)at + 63) / 64 * 64) };
  at = (char *)w.pairs + pairs - 64;
  for (int64_t q = 0; q < parts; q++, at += spread) w.spread[q] = (PIECE *)(void *)at;
  w.offset = (int64_t *)(void *)at, at += steps * 8;
  w.first = (int64_t *)(void *)at, at += blocks * 8;
  w.valid = (uint32_t *)(void *)at;
  NAME(sizes) sizes = NAME(no_sizes)();
  ty_tiles_open();
  for (int64_t u = begin; u < end && !j->odd && !ty_interrupted; u++) {
    int64_t band = u % j->bands, group = u / j->bands % j->groups, n0 = u / j->bands / j->groups * j->images;
    int64_t n1 = n0 + j->images < j->n ? n0 + j->images : j->n;
    for (int64_t n = n0; n < n1; n++) NAME(pack_image)
    (j, j->x + (n * j->groups + group) * l->channels * l->h * l->w, band * j->rows,
     w.pairs + (n - n0) * NAME(image_units)(j), &sizes);
    if (PLANES > 1 && NAME(odd)(&sizes)) j->odd = true;
    else NAME(multiply_unit)(j, group, n0, n1, band * j->rows, &w);
  }
  ty_tiles_close();
  ty_scratch_free(memory, bytes);
}

/* How much of the batch makes a unit: what stays in the second cache, and enough units for all threads. */
static void NAME(share)(NAME(job) * j) {
  const lattice *l = j->l;
  enum { CACHED = 768 << 10 };
  int64_t threads = ty_parallel_threads(), wanted = threads > 1 ? 2 * threads : 1;
  j->rows = l->rows, j->images = 1;
  for (;;) {
    j->bands = (l->rows + j->rows - 1) / j->rows;
    j->plane = NAME(plane_of)(l, j->rows);
    bool fits = NAME(image_units)(j) * 4 <= CACHED && j->n * j->groups * j->bands >= wanted;
    if (fits || j->rows * l->pitch <= 256 || j->rows == 1) break;
    j->rows = (j->rows + 1) / 2;
  }
  if (j->bands > 1) return;
  int64_t most = CACHED / (4 * NAME(image_units)(j)), share = (j->n * j->groups + wanted - 1) / wanted;
  j->images = most < share ? most : share;
  if (j->images < 1) j->images = 1;
}

/* ---- the weights ---- */

/* A weight of [results, channels, taps] in a lattice's steps: `out` and `in` are the distances of results and
 * channels. */
typedef struct NAME(packing) {
  const lattice *l;
  const part *p;
  const PIECE *weight;
  int64_t results, taps, out, in, group; /* group: from one to the next */
  uint32_t *to;
  bool odd;
} NAME(packing);

/* 16 units of a result: folded channels v .. v+32 at a tap. */
static void NAME(folded_row)(const NAME(packing) * k, const PIECE *from, int64_t v, uint32_t *to, NAME(sizes) * sizes) {
  const lattice *l = k->l;
  uint32_t x[2][16] = { 0 };
  for (int64_t i = 0; i < 32 && v + i < l->channels * l->fold; i++) {
    const PIECE *p = from + (v + i) / l->fold * k->in + (v + i) % l->fold;
#if PLANES == 1
    x[i % 2][i / 2] = (uint32_t)*p << 16;
#else
    memcpy(&x[i % 2][i / 2], p, sizeof *p);
#endif
  }
  __m512i units[PLANES], a = _mm512_loadu_si512(x[0]), b = _mm512_loadu_si512(x[1]);
  NAME(note)(a, sizes), NAME(note)(b, sizes);
  NAME(units)(a, b, units);
  for (int p = 0; p < PLANES; p++) _mm512_storeu_si512(to + p * 2 * NAME(a_tile), units[p]);
}

/* turned[p][i]: 16 units of neighbour i, from 16 pairs of channels that lie `in` apart, of which `channels` exist,
 * with n neighbours each. */
static void NAME(turn_pairs)(const PIECE *from, int64_t in, int64_t channels, int64_t n,
                             uint32_t (*turned)[TY_TILE * TY_TILE], NAME(sizes) * sizes) {
  __m512i v[PLANES][TY_TILE], units[PLANES];
  for (int64_t u = 0; u < TY_TILE; u++) {
    __m512i a = NAME(pick)(from + 2 * u * in, 1, 2 * u < channels ? n : 0);
    __m512i b = NAME(pick)(from + (2 * u + 1) * in, 1, 2 * u + 1 < channels ? n : 0);
    NAME(note)(a, sizes), NAME(note)(b, sizes);
    NAME(units)(a, b, units);
    for (int p = 0; p < PLANES; p++) v[p][u] = units[p];
  }
  for (int p = 0; p < PLANES; p++) ty_tile_turn(v[p], turned[p], TY_TILE);
}

/* A block of up to 32 results and channels at all taps of the part: [taps][PLANES][2][16][16]. */
static void NAME(pack_block)(const NAME(packing) * k, const PIECE *weight, int64_t v, int64_t count, uint32_t *to,
                             NAME(sizes) * sizes) {
  const lattice *l = k->l;
  uint32_t turned[PLANES][TY_TILE * TY_TILE] __attribute__((aligned(64)));
  int64_t channels = l->channels - v;
  memset(to, 0, sizeof *to * (size_t)(k->p->count * NAME(a_step)));
  if (l->fold > 1) {
    for (int64_t t = 0; t < k->p->count; t++)
      for (int64_t r = 0; r < count; r++)
        NAME(folded_row)(k, weight + r * k->out + k->p->taps[t].weight, v, to + t * NAME(a_step) + r * TY_TILE, sizes);
    return;
  }
  weight += v * k->in;
  if (k->in == 1 && k->p->count) { /* one tap, whose channels are neighbours */
    for (int64_t r = 0; r < count; r++) {
      __m512i planes[PLANES];
      NAME(pick_32)(weight + r * k->out, 1, channels, planes, sizes);
      for (int p = 0; p < PLANES; p++) _mm512_storeu_si512(to + p * 2 * NAME(a_tile) + r * TY_TILE, planes[p]);
    }
    return;
  }
  if (k->out == 1 && k->p->count) { /* one tap, whose results are neighbours */
    for (int64_t r = 0; r < count; r += TY_TILE) {
      NAME(turn_pairs)(weight + r, k->in, channels, count - r, turned, sizes);
      for (int p = 0; p < PLANES; p++) memcpy(to + p * 2 * NAME(a_tile) + r * TY_TILE, turned[p], sizeof turned[p]);
    }
    return;
  }
  for (int64_t r = 0; r < count; r++)
    for (int64_t t0 = 0; t0 < k->taps; t0 += TY_TILE) {
      NAME(turn_pairs)(weight + r * k->out + t0, k->in, channels, k->taps - t0, turned, sizes);
      for (int64_t t = 0; t < k->p->count; t++) {
        int64_t i = k->p->taps[t].weight - t0;
        for (int p = 0; p < PLANES && i >= 0 && i < TY_TILE; p++)
          memcpy(to + t * NAME(a_step) + p * 2 * NAME(a_tile) + r * TY_TILE, turned[p] + i * TY_TILE, 64);
      }
    }
}

static void NAME(pack_weights)(void *context, int64_t begin, int64_t end) {
  NAME(packing) *k = context;
  const lattice *l = k->l;
  NAME(sizes) sizes = NAME(no_sizes)();
  int64_t blocks = (k->results + 31) / 32;
  for (int64_t b = begin; b < end; b++) {
    int64_t o = b % blocks * 32, count = k->results - o < 32 ? k->results - o : 32;
    const PIECE *weight = k->weight + b / blocks * k->group + o * k->out;
    for (int64_t block = 0; block < l->blocks; block++) NAME(pack_block)
    (k, weight, block * CHANNELS, count, k->to + (b * l->blocks + block) * k->p->count * NAME(a_step), &sizes);
  }
  if (PLANES > 1 && NAME(odd)(&sizes)) k->odd = true;
}

/* ---- the whole ---- */

/* The packed weights of all parts, kept for a convolution from call to call; before each part's whether it is odd. */
static bool NAME(weights_of)(NAME(job) * j, const conv_shape *s, const PIECE *weight, bool backward, ty_kept *kept) {
  static const char maker;
  const lattice *l = j->l;
  int64_t blocks = (j->results + 31) / 32 * s->groups, units = 0, taps = s->kh * s->kw;
  for (int64_t q = 0; q < l->parts; q++) units += 16 + blocks * l->blocks * l->part[q].count * NAME(a_step);
  *kept = conv_kept(s, (const float *)(const void *)weight, &maker, l->fold, sizeof(uint32_t) * (size_t)units, true);
  uint32_t *to = kept->data;
  if (!to) return false;
  for (int64_t q = 0; q < l->parts; q++) {
    NAME(packing)
    k = { .l = l, .p = &l->part[q], .weight = weight, .results = j->results, .taps = taps, .to = to + 16 };
    k.out = backward ? taps : s->cg * taps, k.in = backward ? s->cg * taps : taps, k.group = s->og * s->cg * taps;
    if (!kept->filled) {
      ty_parallel_for_all(blocks, 1, NAME(pack_weights), &k);
      *to = k.odd;
    }
    if (*to) j->odd = true;
    j->weights[q] = to + 16;
    to += 16 + blocks * l->blocks * k.p->count * NAME(a_step);
  }
  return true;
}

/* Computes y; j holds what is done to results. False after ty_fail() only; j->odd says that nothing was done. */
static bool NAME(run)(NAME(job) * j, const conv_shape *s, const PIECE *weight, bool backward) {
  ty_kept kept;
  j->n = s->n, j->groups = s->groups, j->results = backward ? s->cg : s->og;
  j->h = backward ? s->h : s->oh, j->w = backward ? s->w : s->ow;
  NAME(share)(j);
  if (!NAME(weights_of)(j, s, weight, backward, &kept)) return false;
  int64_t units = (j->n + j->images - 1) / j->images * j->groups * j->bands;
  if (!j->odd) ty_parallel_for(units, 1, NAME(pieces), j);
  ty_kept_close(&kept, true);
  return !j->failed;
}

#undef MEET
#undef MEET_PLAIN
