/* The gradient of a convolution's weight on tiles, for one type of elements; included after conv_tiles_real.h.
 *
 * Sums run over places. A is the results' gradient, 32 results by 32 places, with 0 where a place is no result. B is
 * the source as pairs of neighbouring places by 32 channels: once with the pairs that begin at even places and once
 * with the others, so that whatever a tap sees begins with a whole row of pairs. Some images, or rows of one, at a
 * time are packed and multiplied; their sums add up in order. */

enum {
  NAME(k_steps) = PLANES > 1 ? 8 : 16 /* of a block of places, which serves all taps while it is cached */
};

typedef struct NAME(slopes) {
  const lattice *l;
  const conv_shape *s;
  const PIECE *x, *g;
  PIECE *dw;
  uint16_t *lines;                /* of g: [blocks of results][PLANES][32][line] */
  uint32_t *pairs;                /* [blocks][phases][versions][PLANES][2][turned][16] */
  float *sums;                    /* [blocks of results][blocks][taps][32 results][32 channels] */
  int64_t image, steps;           /* places of an image; steps of 32 places */
  int64_t versions, line, turned; /* places of a line of g; rows of pairs */
  int64_t images, rows;           /* of a chunk, */
  int64_t group, n0, n1, r0;      /* and which */
  bool first, odd, failed;
} NAME(slopes);

/* ---- packing ---- */

/* Rows of a channel's plane. Writes up to 32 elements more. */
static void NAME(single_rows)(const lattice *l, const NAME(line) * line, int64_t rows, uint16_t *to, int64_t plane,
                              NAME(sizes) * sizes) {
  const __m512i zero = _mm512_setzero_si512();
  for (int64_t i = 0; i < rows; i++, to += l->pitch) {
    const PIECE *row = NAME(row_of)(l, line, i);
    int64_t from = row ? line->from : l->pitch, j = from;
    for (int64_t q = 0; q < from; q += 32)
      for (int p = 0; p < PLANES; p++) _mm512_storeu_si512(to + p * plane + q, zero);
    for (; j < from + line->n && row; j += 32) {
      int64_t at = j - from;
      __m512i planes[PLANES];
      if (l->col_step == 1) NAME(pick_32)(row + at, 1, line->n - at, planes, sizes);
      else NAME(pick_32)(row + at * l->col_step, l->col_step, line->n - at, planes, sizes);
      for (int p = 0; p < PLANES; p++) _mm512_storeu_si512(to + p * plane + j, planes[p]);
    }
    for (; j < l->pitch; j += 32)
      for (int p = 0; p < PLANES; p++) _mm512_storeu_si512(to + p * plane + j, zero);
  }
}

/* The chunk's pairs of 16 channels in one phase: images run on, and behind the last are zeros. */
static void NAME(pack_half)(NAME(slopes) * w, int64_t half, int64_t phase, uint16_t *lines, int64_t plane,
                            NAME(sizes) * sizes) {
  const lattice *l = w->l;
  const conv_shape *s = w->s;
  const int64_t step = TY_TILE * plane, places = (w->n1 - w->n0) * w->image;
  for (int64_t r = 0; r < TY_TILE; r++) {
    uint16_t *to = lines + r * plane;
    for (int64_t n = w->n0; n < w->n1; n++, to += w->image) {
      const PIECE *x = w->x + (n * s->groups + w->group) * s->cg * s->h * s->w;
      NAME(line) line = NAME(line_of)(l, x, half * TY_TILE + r, w->r0, phase);
      NAME(single_rows)(l, &line, w->rows + l->more_rows, to, step, sizes);
    }
    for (int p = 0; p < PLANES; p++) memset(to + p * step, 0, sizeof *to * (size_t)(plane - places));
  }
  int64_t phases = l->row_phases * l->col_phases;
  for (int64_t version = 0; version < w->versions; version++)
    for (int p = 0; p < PLANES; p++) {
      int64_t at = (((half / 2 * phases + phase) * w->versions + version) * PLANES + p) * 2 + half % 2;
      uint32_t *to = w->pairs + at * w->turned * TY_TILE;
      for (int64_t q = 0; q < w->turned; q += TY_TILE) {
        __m512i v[TY_TILE];
        for (int64_t r = 0; r < TY_TILE; r++) v[r] = _mm512_loadu_si512(lines + p * step + r * plane + 2 * q + version);
        ty_tile_turn(v, to + q * TY_TILE, TY_TILE);
      }
    }
}

static void NAME(pack_source)(void *context, int64_t begin, int64_t end) {
  NAME(slopes) *w = context;
  NAME(sizes) sizes = NAME(no_sizes)();
  int64_t plane = 2 * w->turned + 64, phases = w->l->row_phases * w->l->col_phases;
  size_t bytes = sizeof(uint16_t) * (size_t)(PLANES * TY_TILE * plane);
  uint16_t *lines = ty_scratch_alloc(bytes);
  if (!lines) {
    w->failed = true;
    return;
  }
  for (int64_t half = begin; half < end; half++)
    for (int64_t phase = 0; phase < phases; phase++) NAME(pack_half)(w, half, phase, lines, plane, &sizes);
  if (NAME(odd)(&sizes)) w->odd = true;
  ty_scratch_free(lines, bytes);
}

/* The chunk's gradients of results, on the same places as the source's. */
static void NAME(pack_gradients)(void *context, int64_t begin, int64_t end) {
  NAME(slopes) *w = context;
  const lattice *l = w->l;
  const conv_shape *s = w->s;
  NAME(sizes) sizes = NAME(no_sizes)();
  int64_t rows = l->rows - w->r0 < w->rows ? l->rows - w->r0 : w->rows, step = 32 * w->line;
  for (int64_t o = begin; o < end; o++) {
    uint16_t *to = w->lines + (o / 32 * PLANES * 32 + o % 32) * w->line;
    for (int p = 0; p < PLANES; p++) memset(to + p * step, 0, sizeof *to * (size_t)w->line);
    for (int64_t n = w->n0; n < w->n1 && o < s->og; n++, to += w->image) {
      const PIECE *from = w->g + (((n * s->groups + w->group) * s->og + o) * s->oh + w->r0) * s->ow;
      for (int64_t i = 0; i < rows; i++, from += s->ow)
        for (int64_t j = 0; j < s->ow; j += 32) {
          __m512i planes[PLANES];
          NAME(pick_32)(from + j, 1, s->ow - j, planes, &sizes);
          for (int p = 0; p < PLANES; p++) _mm512_storeu_si512(to + p * step + i * l->pitch + j, planes[p]);
        }
    }
  }
  if (NAME(odd)(&sizes)) w->odd = true;
}

/* ---- 32 results by 32 channels ---- */

#define LOAD_A(p)                         \
  _tile_loadd(4, g + (p)*32 * line, row); \
  _tile_loadd(5, g + ((p)*32 + 16) * line, row);
#define MEET(pa, pb, loads_a, loads_b)                          \
  if (loads_a) { LOAD_A(pa) }                                   \
  if (loads_b) { TY_TILES_B(b + (pb)*2 * half, half, TY_TILE) } \
  TY_TILES_MULTIPLY(_tile_dpbf16ps)

__attribute__((noinline, target(TY_TILES_TARGET))) static void NAME(native_slopes)(int64_t steps, const uint16_t *g,
                                                                                   int64_t line, const uint32_t *b,
                                                                                   int64_t half, float *c, bool add) {
  const int64_t row = line * (int64_t)sizeof *g;
  if (add) {
    TY_TILES_SUMS(_tile_loadd, c, 32)
  } else {
    TY_TILES_CLEAR()
  }
  for (int64_t s = 0; s < steps; s++, g += 32, b += TY_TILE * TY_TILE) { MEETINGS(MEET) }
  TY_TILES_SUMS(_tile_stored, c, 32)
}

static void NAME(plain_slopes)(int64_t steps, const uint16_t *g, int64_t line, const uint32_t *b, int64_t half,
                               float *c, bool add) {
  uint32_t a[32 * TY_TILE];
  if (!add) memset(c, 0, sizeof *c * 32 * 32);
#define MEET_PLAIN(pa, pb, loads_a, loads_b)                                              \
  for (int64_t r = 0; r < 32; r++) memcpy(a + r * TY_TILE, g + ((pa)*32 + r) * line, 64); \
  ty_tiles_plainly(32, a, TY_TILE *TY_TILE, TY_TILE, b + (pb)*2 * half, half, TY_TILE, c, 32);
  for (int64_t s = 0; s < steps; s++, g += 32, b += TY_TILE * TY_TILE) { MEETINGS(MEET_PLAIN) }
}

/* Sums of the chunk for blocks of results and channels. */
static void NAME(sum_blocks)(void *context, int64_t begin, int64_t end) {
  NAME(slopes) *w = context;
  const lattice *l = w->l;
  const part *p = &l->part[0];
  const int64_t phases = l->row_phases * l->col_phases, half = w->turned * TY_TILE;
  float more[32 * 32] __attribute__((aligned(64)));
  ty_tiles_open();
  for (int64_t at = begin; at < end && !ty_interrupted; at++) {
    int64_t results = at / l->blocks, block = at % l->blocks;
    for (int64_t k = 0; k < w->steps; k += NAME(k_steps)) {
      int64_t steps = w->steps - k < NAME(k_steps) ? w->steps - k : NAME(k_steps);
      const uint16_t *g = w->lines + results * PLANES * 32 * w->line + k * 32;
      for (int64_t t = 0; t < p->count; t++) {
        int64_t place = p->taps[t].row * l->pitch + p->taps[t].col + k * 32, of = block * phases + p->taps[t].phase;
        const uint32_t *b = w->pairs + (of * w->versions + place % 2) * PLANES * 2 * half + place / 2 * TY_TILE;
        float *sums = w->sums + (at * p->count + t) * 32 * 32;
        bool fresh = w->first && k == 0, apart = PLANES > 1 && !fresh;
        (ty_tiles() == TY_NATIVE_TILES ? NAME(native_slopes) : NAME(plain_slopes))(
            steps, g, w->line, b, half, apart ? more : sums, !fresh && !apart);
        for (int i = 0; apart && i < 32 * 32; i++) sums[i] += more[i];
      }
    }
  }
  ty_tiles_close();
}

/* ---- from sums to gradients ---- */

static void NAME(store_lanes)(PIECE *to, __m512i x, int64_t n) {
  __mmask16 mask = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
#if PLANES == 1
  _mm256_mask_storeu_epi16(to, mask, rounded(_mm512_castsi512_ps(x)));
#else
  _mm512_mask_storeu_epi32(to, mask, x);
#endif
}

/* Gradients of a result's `taps` taps in `channels` channels: sums [taps][32 32] of which the first row counts. */
static void NAME(turn_taps)(const float *sums, int64_t taps, int64_t channels, PIECE *to) {
  uint32_t turned[TY_TILE * TY_TILE] __attribute__((aligned(64)));
  for (int64_t t = 0; t < taps; t += TY_TILE)
    for (int64_t v = 0; v < channels; v += TY_TILE) {
      __m512i lanes[TY_TILE];
      for (int64_t i = 0; i < TY_TILE; i++)
        lanes[i] = t + i < taps ? _mm512_loadu_si512(sums + (t + i) * 32 * 32 + v) : _mm512_setzero_si512();
      ty_tile_turn(lanes, turned, TY_TILE);
      for (int64_t i = 0; i < TY_TILE && v + i < channels; i++)
        NAME(store_lanes)(to + (v + i) * taps + t, _mm512_loadu_si512(turned + i * TY_TILE), taps - t);
    }
}

/* A result's gradients from its row of sums for folded channels v .. of a block. */
static void NAME(store_result)(const NAME(slopes) * w, const float *sums, int64_t v, PIECE *to) {
  const lattice *l = w->l;
  const part *p = &l->part[0];
  int64_t taps = w->s->kh * w->s->kw, all = l->channels * l->fold, n = all - v < 32 ? all - v : 32;
  if (l->fold > 1) {
    for (int64_t t = 0; t < p->count; t++)
      for (int64_t i = 0; i < n; i++) {
        PIECE *at = to + (v + i) / l->fold * taps + (v + i) % l->fold + p->taps[t].weight;
        NAME(narrow)(sums + t * 32 * 32 + i, at, 1);
      }
  } else if (taps == 1) {
    for (int64_t i = 0; i < n; i += TY_TILE) NAME(store_lanes)(to + v + i, _mm512_loadu_si512(sums + i), n - i);
  } else {
    NAME(turn_taps)(sums, taps, n, to + v * taps);
  }
}

static void NAME(store_sums)(void *context, int64_t begin, int64_t end) {
  const NAME(slopes) *w = context;
  const lattice *l = w->l;
  const conv_shape *s = w->s;
  int64_t out = s->cg * s->kh * s->kw, count = l->part[0].count;
  for (int64_t at = begin; at < end; at++) {
    int64_t o = at / l->blocks * 32;
    for (int64_t r = 0; r < 32 && o + r < s->og; r++) NAME(store_result)
    (w, w->sums + at * count * 32 * 32 + r * 32, at % l->blocks * 32, w->dw + (w->group * s->og + o + r) * out);
  }
}

/* ---- the whole ---- */

/* How much of the batch is packed at a time. */
static void NAME(chunks)(NAME(slopes) * w) {
  const lattice *l = w->l;
  const conv_shape *s = w->s;
  enum { CACHED = 1536 << 10, LEAST = 512 }; /* bytes; places, as sums are loaded and stored each time */
  int64_t phases = l->row_phases * l->col_phases;
  w->versions = 1;
  for (int64_t t = 0; t < l->part[0].count; t++)
    if ((l->part[0].taps[t].row * l->pitch + l->part[0].taps[t].col) % 2) w->versions = 2;
  int64_t bytes = (l->blocks * 32 * phases * w->versions + (s->og + 31) / 32 * 32) * PLANES * 2; /* of a place */
  w->rows = l->rows, w->images = 1;
  for (;; w->rows = (w->rows + 1) / 2) {
    w->image = (w->rows + l->more_rows) * l->pitch;
    if (w->image * bytes <= CACHED || w->rows == 1 || w->image <= LEAST) break;
  }
  if (w->rows == l->rows) {
    w->images = CACHED / (w->image * bytes);
    if (w->images * w->image < LEAST) w->images = (LEAST + w->image - 1) / w->image;
    w->images = w->images < 1 ? 1 : w->images > s->n ? s->n : w->images;
  }
  int64_t places = (w->images * w->image + 31) / 32 * 32;
  w->line = (places + l->pitch + 96) / 64 * 64 + 32; /* 64 bytes times an odd number */
  w->turned = (places + l->more_rows * l->pitch + l->more_cols + 31) / 32 * TY_TILE + TY_TILE;
}

static void NAME(sum_chunk)(NAME(slopes) * w) {
  int64_t results = (w->s->og + 31) / 32;
  w->steps = ((w->n1 - w->n0) * w->image + 31) / 32;
  ty_parallel_for(w->l->blocks * 2, 1, NAME(pack_source), w);
  ty_parallel_for(results * 32, 4, NAME(pack_gradients), w);
  if (w->odd || w->failed || ty_interrupted) return;
  ty_parallel_for(results * w->l->blocks, 1, NAME(sum_blocks), w);
  w->first = false;
}

static bool NAME(slopes_of)(NAME(slopes) * w) {
  const lattice *l = w->l;
  const conv_shape *s = w->s;
  NAME(chunks)(w);
  int64_t phases = l->row_phases * l->col_phases, results = (s->og + 31) / 32, blocks = results * l->blocks;
  size_t lines = sizeof(uint16_t) * (size_t)(results * PLANES * 32 * w->line);
  size_t pairs = sizeof(uint32_t) * (size_t)(l->blocks * phases * w->versions * PLANES * 2 * w->turned * TY_TILE);
  size_t sums = sizeof(float) * (size_t)(blocks * l->part[0].count * 32 * 32);
  size_t bytes = 64 + sums + pairs + lines;
  char *memory = ty_scratch_alloc(bytes), *at = (char *)(((uintptr_t)memory + 63) / 64 * 64);
  if (!memory) return false;
  w->sums = (float *)(void *)at, at += sums;
  w->pairs = (uint32_t *)(void *)at, at += pairs;
  w->lines = (uint16_t *)(void *)at;
  for (w->group = 0; w->group < s->groups && !w->odd && !w->failed; w->group++) {
    w->first = true;
    for (w->n0 = 0; w->n0 < s->n; w->n0 = w->n1) {
      w->n1 = w->n0 + w->images < s->n ? w->n0 + w->images : s->n;
      for (w->r0 = 0; w->r0 < l->rows && !w->odd && !w->failed && !ty_interrupted; w->r0 += w->rows) NAME(sum_chunk)(w);
    }
    if (!w->odd && !w->failed) ty_parallel_for(blocks, 1, NAME(store_sums), w);
  }
  ty_scratch_free(memory, bytes);
  return !w->failed;
}

#undef LOAD_A
#undef MEET
#undef MEET_PLAIN
