/* Products with Q8_0 for quant_tiles.c: the codes of weights and of x are numbers of bf16 as they are, a step of the
 * tiles makes the exact sums of a group of 32, and vectors bring these to f32 while the tiles make the next ones. It is
 * the faster way where weights times their scales would be two numbers, and x two more.
 *
 * A stage takes two groups of a panel of W and of one of x. Its sums lie apart until the stage after it; more groups
 * would not leave the first cache to W. */

enum {
  STAGE = 2,
  BLOCK = 8,
  BLOCK_K = 32 * BLOCK,
  PANEL_SUMS = PANEL * PANEL
}; /* groups of a stage and of a block of k */

/* x [block of k][panel][group][2][16 units][16 rows], and its scales [block][panel][group][PANEL]. */
typedef struct scaled {
  const ty_quant_product *p;
  int64_t panels, groups; /* of x; groups of k, with one of zeros where they are odd */
  uint32_t *code;
  float *scale;
  bool failed;
} scaled;

static int64_t groups_from(const scaled *s, int64_t block) { return MIN2(BLOCK, s->groups - block * BLOCK); }

/* Of the block's groups, all panels up to this one. */
static int64_t groups_before(const scaled *s, int64_t block, int64_t panel) {
  return block * BLOCK * s->panels + panel * groups_from(s, block);
}

/* Numbers of bf16 of two vectors of small integers, side by side. */
INLINE __m512i exact_units(__m512 x0, __m512 x1) {
  __m512i upper = _mm512_and_si512(_mm512_castps_si512(x1), _mm512_set1_epi32((int)0xffff0000));
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(x0), 16), upper);
}

/* ---- x ---- */

static void code_panel(const scaled *s, int64_t panel, int64_t block) {
  const ty_quant_product *p = s->p;
  int64_t k = block * BLOCK_K, count = MIN2(BLOCK_K, p->k - k), groups = groups_from(s, block);
  uint32_t *code = s->code + groups_before(s, block, panel) * STEP;
  float *scale = s->scale + groups_before(s, block, panel) * PANEL;
  for (int64_t half = 0; half < PANEL; half += TY_TILE) {
    __m512i units[BLOCK][TY_TILE];
    for (int64_t r = 0; r < TY_TILE; r++) {
      int64_t row = panel * PANEL + half + r;
      const float *x = p->x + row * p->k + k;
      float part[BLOCK_K];
      if (row >= p->rows || count < BLOCK_K) memset(part, 0, sizeof part);
      if (row >= p->rows) x = part;
      else if (count < BLOCK_K) x = memcpy(part, x, sizeof *part * (size_t)count);
      coded_groups c;
      code_groups(x, false, &c);
      for (int64_t i = 0; i < groups; i++) {
        units[i][r] = exact_units(bytes_to_f32(c.q[i], true), bytes_to_f32(c.q[i] + 16, true));
        scale[i * PANEL + half + r] = c.scale[i];
      }
    }
    for (int64_t i = 0; i < groups; i++) ty_tile_turn(units[i], code + i * STEP + half * TY_TILE, TY_TILE);
  }
}

static void code_panels(void *context, int64_t begin, int64_t end) {
  const scaled *s = context;
  for (int64_t panel = begin; panel < end; panel++)
    for (int64_t block = 0; block * BLOCK < s->groups; block++) code_panel(s, panel, block);
}

/* ---- W ---- */

typedef struct block_of_w {
  uint32_t code[BLOCK][STEP] __attribute__((aligned(64))); /* [2][16 rows][16 units] */
  float scale[PANEL][BLOCK];
} block_of_w;

static void decode_block(const scaled *s, int64_t j, int64_t block, block_of_w *to) {
  const ty_quant_product *p = s->p;
  int64_t k = block * BLOCK_K, n = MIN2(PANEL, p->n - j), groups = MIN2(BLOCK, p->k / 32 - block * BLOCK);
  if (groups % 2) {
    memset(to->scale, 0, sizeof to->scale);
    memset(to->code[groups], 0, sizeof to->code[groups]);
  }
  for (int64_t r = 0; r < PANEL; r++) {
    if (r + SOON < n) fetch_row(p, j + r + SOON, k, groups);
    const ty_q8_0 *b = (const ty_q8_0 *)(const void *)block_at(TY_Q8_0, p->w + (j + MIN2(r, n - 1)) * p->w_row, k);
    gather_f16(b->d, sizeof *b, groups, to->scale[r]);
    for (int64_t i = 0; i < groups; i++, b++)
      _mm512_storeu_si512(to->code[i] + r * TY_TILE,
                          exact_units(bytes_to_f32(b->q, true), bytes_to_f32(b->q + 16, true)));
  }
}

/* ---- a stage ---- */

/* Sums [STAGE][2][2][16][16], what they are scaled with (of W [PANEL][BLOCK], of x [STAGE][PANEL]), and where they go,
 * [PANEL of W][PANEL of x]. */
typedef struct scaling {
  float *sums, *to;
  const float *w, *x;
} scaling;

/* Where the sums of tile t (of W: t / 2, of x: t % 2) are. */
INLINE float *tile_of(float *sums, const int group, const int t) { return sums + (4 * group + t) * TY_TILE * TY_TILE; }

/* Rows [r, r + n) of W, with the scales of x. */
INLINE void scale_rows(const scaling *d, __m512 x[STAGE][2], int r, const int n) {
  for (int end = r + n; r < end; r++) {
    float *to = d->to + r * PANEL;
    __m512 y0 = _mm512_loadu_ps(to), y1 = _mm512_loadu_ps(to + 16);
#pragma GCC unroll 2
    for (int g = 0; g < STAGE; g++) {
      const float *sums = tile_of(d->sums, g, r / TY_TILE * 2) + r % TY_TILE * TY_TILE;
      __m512 w = _mm512_set1_ps(d->w[r * BLOCK + g]);
      y0 = _mm512_fmadd_ps(_mm512_mul_ps(w, x[g][0]), _mm512_loadu_ps(sums), y0);
      y1 = _mm512_fmadd_ps(_mm512_mul_ps(w, x[g][1]), _mm512_loadu_ps(sums + TY_TILE * TY_TILE), y1);
    }
    _mm512_storeu_ps(to, y0);
    _mm512_storeu_ps(to + 16, y1);
  }
}

INLINE void load_scales(const float *from, __m512 x[STAGE][2]) {
  for (int g = 0; g < STAGE; g++)
    for (int h = 0; h < 2; h++) x[g][h] = _mm512_loadu_ps(from + g * PANEL + h * TY_TILE);
}

static void scale_all(const scaling *d) {
  __m512 x[STAGE][2];
  load_scales(d->x, x);
  scale_rows(d, x, 0, PANEL);
}

/* The sums of a stage, and meanwhile those of the one before to f32. Each tile is stored when the next ones are under
 * way. The compiler does not know what the instructions read and write, which is nothing that `done` has. */
__attribute__((noinline, target(TY_TILES_TARGET))) static void stage(const uint32_t *w, const uint32_t *x, float *sums,
                                                                     const scaling *done) {
  enum { SHARE = PANEL / STAGE / 4, TILE = TY_TILE * TY_TILE };
  const scaling d = *done;
  __m512 scale[STAGE][2];
  load_scales(d.x, scale);
#pragma GCC unroll 2
  for (int g = 0; g < STAGE; g++, w += STEP, x += STEP) {
    const int r = g * 4 * SHARE;
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x, 64);
    _tile_zero(0);
    _tile_dpbf16ps(0, 4, 6);
    if (g) _tile_stored(1, tile_of(sums, g - 1, 1), 64);
    scale_rows(&d, scale, r, SHARE);
    _tile_loadd(7, x + TILE, 64);
    _tile_zero(1);
    _tile_dpbf16ps(1, 4, 7);
    if (g) _tile_stored(2, tile_of(sums, g - 1, 2), 64);
    scale_rows(&d, scale, r + SHARE, SHARE);
    _tile_loadd(5, w + TILE, 64);
    _tile_zero(2);
    _tile_dpbf16ps(2, 5, 6);
    if (g) _tile_stored(3, tile_of(sums, g - 1, 3), 64);
    scale_rows(&d, scale, r + 2 * SHARE, SHARE);
    _tile_zero(3);
    _tile_dpbf16ps(3, 5, 7);
    _tile_stored(0, tile_of(sums, g, 0), 64);
    scale_rows(&d, scale, r + 3 * SHARE, SHARE);
  }
  _tile_stored(1, tile_of(sums, STAGE - 1, 1), 64);
  _tile_stored(2, tile_of(sums, STAGE - 1, 2), 64);
  _tile_stored(3, tile_of(sums, STAGE - 1, 3), 64);
}

/* The same without the instructions. */
static void plain_stage(const uint32_t *w, const uint32_t *x, float *sums, const scaling *done) {
  scale_all(done);
  memset(sums, 0, sizeof *sums * STAGE * PANEL_SUMS);
  for (int g = 0; g < STAGE; g++, w += STEP, x += STEP)
    for (int t = 0; t < 4; t++)
      ty_tiles_plainly(TY_TILE, w + t / 2 * TY_TILE * TY_TILE, 0, TY_TILE, x + t % 2 * TY_TILE * TY_TILE, 0, TY_TILE,
                       tile_of(sums, g, t), TY_TILE);
}

/* ---- panels of W ---- */

/* Panels of x that a panel of W meets at a time, whose sums stay in the second cache; panels of W that share a part of
 * x while it is there. */
enum { MOST_PANELS = 16, TURNS = 4 };

typedef struct room {
  block_of_w w;
  float sums[2][STAGE * PANEL_SUMS] __attribute__((aligned(64)));
  float none[PANEL_SUMS] __attribute__((aligned(64))); /* where what comes before the first sums is added */
  float y[TURNS][MOST_PANELS][PANEL_SUMS] __attribute__((aligned(64)));
} room;

/* Panels [p0, p1) of x with what m->w has, to y. */
static void multiply_block(const scaled *s, int64_t block, int64_t p0, int64_t p1, room *m, float (*y)[PANEL_SUMS]) {
  int64_t groups = groups_from(s, block);
  scaling done = { m->sums[1], m->none, m->w.scale[0], s->scale };
  int turn = 0;
  for (int64_t panel = p0; panel < p1; panel++) {
    int64_t at = groups_before(s, block, panel);
    for (int64_t g = 0; g < groups; g += STAGE, turn ^= 1) {
      (ty_tiles() == TY_NATIVE_TILES ? stage : plain_stage)(m->w.code[g], s->code + (at + g) * STEP, m->sums[turn],
                                                            &done);
      done = (scaling){ m->sums[turn], y[panel - p0], m->w.scale[0] + g, s->scale + (at + g) * PANEL };
    }
  }
  scale_all(&done);
}

/* Panels [begin, end) of W, at most TURNS, with panels [p0, p1) of x. */
static void multiply_turns(const scaled *s, int64_t begin, int64_t end, int64_t p0, int64_t p1, room *m) {
  const ty_quant_product *p = s->p;
  memset(m->y, 0, sizeof m->y);
  for (int64_t block = 0; block * BLOCK < s->groups; block++)
    for (int64_t i = begin; i < end; i++) {
      decode_block(s, i * PANEL, block, &m->w);
      multiply_block(s, block, p0, p1, m, m->y[i - begin]);
    }
  for (int64_t panel = p0; panel < p1; panel++)
    for (int64_t i = begin; i < end; i++)
      put_turned(p, i * PANEL, MIN2(PANEL, p->n - i * PANEL), panel * PANEL, MIN2(PANEL, p->rows - panel * PANEL),
                 m->y[i - begin][panel - p0]);
}

static void scaled_panels(void *context, int64_t begin, int64_t end) {
  scaled *s = context;
  room *m = ty_scratch_alloc(sizeof *m);
  if (!m) {
    s->failed = true;
    return;
  }
  memset(m->sums, 0, sizeof m->sums);
  ty_tiles_open();
  for (int64_t i = begin; i < end && !ty_interrupted; i += TURNS)
    for (int64_t p0 = 0; p0 < s->panels; p0 += MOST_PANELS)
      multiply_turns(s, i, MIN2(i + TURNS, end), p0, MIN2(s->panels, p0 + MOST_PANELS), m);
  ty_tiles_close();
  ty_scratch_free(m, sizeof *m);
}

static bool by_scaled_sums(const ty_quant_product *p) {
  scaled s = { .p = p, .panels = (p->rows + PANEL - 1) / PANEL, .groups = (p->k / 32 + 1) / 2 * 2 };
  size_t count = (size_t)(s.panels * s.groups), bytes = count * (STEP * sizeof *s.code + PANEL * sizeof *s.scale);
  s.code = ty_scratch_alloc(bytes);
  if (!s.code) return ty_fail(TY_ENOMEM, "linear: out of memory");
  s.scale = (float *)(void *)(s.code + count * STEP);
  ty_parallel_for(s.panels, 1, code_panels, &s);
  ty_parallel_for((p->n + PANEL - 1) / PANEL, 1, scaled_panels, &s);
  ty_scratch_free(s.code, bytes);
  return s.failed ? ty_fail(TY_ENOMEM, "linear: out of memory") : true;
}
