/* Attention of f32 and bf16 on tiles of sums (tiles.h), forward. f32 is split into three numbers of bf16 whose
 * products are added up, as in matrix products (gemm_tiles_pack.h); the weights of bf16 are two such numbers, which
 * is more than its results hold. Included by attention.c after the template of forward for f32.
 *
 * Keys and values are packed once for all queries. 32 query rows and KEY_TILE keys at a time are multiplied; what is
 * done to scores is that of attention_forward.h. */

enum {
  KEY_TILE = 128,            /* keys whose scores are computed at once */
  STEP = 32,                 /* keys, or neighbours of a row, in a step of a product */
  BLOCK = TY_TILE * TY_TILE, /* units of a tile */
  MOST_PLANES = 3
};

/* ---- numbers of bf16 ---- */

/* 32 neighbours as `planes` vectors of bf16. */
TILE_INLINE void split_along(__m512i x0, __m512i x1, const int planes, __m512i *to) {
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  for (int p = 0; p < planes; p++) {
    const bool rest = planes != 2 && p == planes - 1; /* of f32 and bf16 nothing is left after the last; two round */
    __m512i a = rest ? x0 : ty_bf16_part(&x0), b = rest ? x1 : ty_bf16_part(&x1);
    __m512i packed = _mm512_packus_epi32(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
    to[p] = _mm512_permutexvar_epi64(order, packed);
  }
}

/* Units of 16 columns from two rows. */
TILE_INLINE void split_across(__m512i x0, __m512i x1, const int planes, __m512i *to) {
  for (int p = 0; p < planes; p++) {
    const bool rest = planes != 2 && p == planes - 1; /* of f32 and bf16 nothing is left after the last; two round */
    __m512i a = rest ? x0 : ty_bf16_part(&x0), b = rest ? x1 : ty_bf16_part(&x1);
    to[p] = _mm512_or_si512(_mm512_srli_epi32(a, 16), b);
  }
}

/* A row of a view, in elements of bf16 or f32. */
typedef struct tile_row {
  const char *at; /* NULL: zeros */
  int64_t column, n;
} tile_row;

static inline tile_row row_of(const ty_view *x, int64_t b, int64_t head, int64_t at) {
  return (tile_row){ at < x->size[2] ? element(x, b, head, at, 0) : NULL, x->stride[3], x->size[3] };
}

/* 16 elements from `from` on: bf16 in the upper half of each lane, f32 as it is; 0 behind the end. */
TILE_INLINE __m512i row_part(tile_row row, int64_t from, const bool half) {
  int64_t rest = row.n - from;
  if (rest <= 0 || !row.at) return _mm512_setzero_si512();
  const __mmask16 mask = rest >= 16 ? 0xffff : (__mmask16)((1u << rest) - 1);
  const uint16_t *halves = (const uint16_t *)(const void *)row.at;
  const uint32_t *words = (const uint32_t *)(const void *)row.at;
  if (row.column == 1 && half)
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, halves + from)), 16);
  if (row.column == 1) return _mm512_maskz_loadu_epi32(mask, words + from);
  uint32_t x[16] = { 0 };
  for (int64_t i = 0; i < 16 && i < rest; i++) {
    int64_t at = (from + i) * row.column;
    x[i] = half ? (uint32_t)halves[at] << 16 : words[at];
  }
  return _mm512_loadu_si512(x);
}

/* Whether any of 16 numbers is infinite or NaN, which would spread to rows that do not see it; or of f32 one that
 * has no parts (gemm_tiles_pack.h). */
TILE_INLINE __mmask16 odd_ones(__m512i x, const bool half) {
  const __m512i twice = _mm512_add_epi32(x, x), least = _mm512_set1_epi32(TY_PARTS_TINY - 1);
  if (half) return _mm512_cmpge_epu32_mask(twice, _mm512_set1_epi32((int)0xff000000));
  return _mm512_cmpge_epu32_mask(twice, _mm512_set1_epi32((int)TY_PARTS_LARGE)) |
         _mm512_cmplt_epu32_mask(_mm512_sub_epi32(twice, _mm512_set1_epi32(1)), least);
}

/* ---- products ---- */

/* 32 rows by 32 columns. A: [steps][planes][2][16 rows][16 units]; B: [steps] of b_step units, with planes b_plane
 * apart, of tiles of 16 units by 16 columns. Rows of c lie c_row apart. */
typedef struct tile_product {
  int64_t steps, a_step, b_step, b_plane, c_row;
  const uint32_t *a, *b;
  float *c;
  bool add; /* to what is there */
} tile_product;

#define MEET(pa, pb, loads_a, loads_b)                             \
  if (loads_a) { TY_TILES_A(a + (pa)*2 * BLOCK, BLOCK, TY_TILE) }  \
  if (loads_b) { TY_TILES_B(b + (pb)*t->b_plane, BLOCK, TY_TILE) } \
  TY_TILES_MULTIPLY(_tile_dpbf16ps)
#define MEET_PLAIN(pa, pb, loads_a, loads_b) \
  ty_tiles_plainly(32, a + (pa)*2 * BLOCK, BLOCK, TY_TILE, b + (pb)*t->b_plane, BLOCK, TY_TILE, t->c, t->c_row);

#define TILE_PRODUCT(name, MEETINGS)                                                                    \
  __attribute__((noinline, target(TY_TILES_TARGET))) static void name##_native(const tile_product *t) { \
    const uint32_t *a = t->a, *b = t->b;                                                                \
    if (t->add) {                                                                                       \
      TY_TILES_SUMS(_tile_loadd, t->c, t->c_row)                                                        \
    } else {                                                                                            \
      TY_TILES_CLEAR()                                                                                  \
    }                                                                                                   \
    for (int64_t s = 0; s < t->steps; s++, a += t->a_step, b += t->b_step) { MEETINGS(MEET) }           \
    TY_TILES_SUMS(_tile_stored, t->c, t->c_row)                                                         \
  }                                                                                                     \
  static void name(const tile_product *t) {                                                             \
    if (ty_tiles() == TY_NATIVE_TILES) {                                                                \
      name##_native(t);                                                                                 \
      return;                                                                                           \
    }                                                                                                   \
    const uint32_t *a = t->a, *b = t->b;                                                                \
    for (int64_t i = 0; i < 32 && !t->add; i++) memset(t->c + i * t->c_row, 0, 32 * sizeof *t->c);      \
    for (int64_t s = 0; s < t->steps; s++, a += t->a_step, b += t->b_step) { MEETINGS(MEET_PLAIN) }     \
  }

TILE_PRODUCT(multiply_pairs, TY_MEETINGS_1_2)   /* one of A, two of B */
TILE_PRODUCT(multiply_short, TY_MEETINGS_1_1)   /* one part of each */
TILE_PRODUCT(multiply_long, TY_MEETINGS_3_3)    /* three of each */
TILE_PRODUCT(multiply_weights, TY_MEETINGS_2_1) /* two of A, one of B */

/* ---- packing ---- */

typedef struct tiles_context {
  forward_context f;
  bool half, odd;
  int planes, weight_planes;        /* numbers of bf16 for one of q, k and v, and for a weight */
  int64_t d_steps, v_blocks, tiles; /* steps of d; blocks of 16 columns of values, an even number; of 32 keys */
  int64_t key_units, tile_units;    /* units of 32 keys, and with their values */
  uint32_t *packed;                 /* [b, kv_heads][tiles] of keys [d_steps][planes][2], values [planes][v_blocks] */
} tiles_context;

/* 32 keys and their values. Returns whether there are odd ones. */
TILE_INLINE bool pack_keys(const tiles_context *c, int64_t b, int64_t head, int64_t j0, const bool half, uint32_t *to) {
  const plan *p = c->f.plan;
  const int planes = half ? 1 : 3;
  __mmask16 odd = 0;
  for (int64_t k = 0; k < c->d_steps * STEP; k += STEP)
    for (int64_t part = 0; part < 2; part++) {
      __m512i v[MOST_PLANES][TY_TILE], parts[MOST_PLANES];
      for (int64_t i = 0; i < TY_TILE; i++) {
        tile_row row = row_of(p->k, b, head, j0 + part * TY_TILE + i);
        __m512i x0 = row_part(row, k, half), x1 = row_part(row, k + 16, half);
        odd |= odd_ones(x0, half) | odd_ones(x1, half);
        split_along(x0, x1, planes, parts);
        for (int q = 0; q < planes; q++) v[q][i] = parts[q];
      }
      for (int q = 0; q < planes; q++) ty_tile_turn(v[q], to + ((k / STEP * planes + q) * 2 + part) * BLOCK, TY_TILE);
    }
  to += c->key_units;
  for (int64_t u = 0; u < TY_TILE; u++) {
    tile_row row = row_of(p->v, b, head, j0 + 2 * u), next = row_of(p->v, b, head, j0 + 2 * u + 1);
    for (int64_t block = 0; block < c->v_blocks; block++) {
      __m512i parts[MOST_PLANES], x0 = row_part(row, block * TY_TILE, half), x1 = row_part(next, block * TY_TILE, half);
      odd |= odd_ones(x0, half) | odd_ones(x1, half);
      split_across(x0, x1, planes, parts);
      for (int q = 0; q < planes; q++)
        _mm512_storeu_si512(to + (q * c->v_blocks + block) * BLOCK + u * TY_TILE, parts[q]);
    }
  }
  return odd;
}

static void pack_pieces(void *context, int64_t begin, int64_t end) {
  tiles_context *c = context;
  const plan *p = c->f.plan;
  for (int64_t i = begin; i < end; i++) {
    int64_t head = i / c->tiles % p->kv_heads, b = i / c->tiles / p->kv_heads, j0 = i % c->tiles * STEP;
    uint32_t *to = c->packed + i * c->tile_units;
    bool odd = c->half ? pack_keys(c, b, head, j0, true, to) : pack_keys(c, b, head, j0, false, to);
    if (odd) __atomic_store_n(&c->odd, true, __ATOMIC_RELAXED);
  }
}

/* 32 query rows, [d_steps][planes][2][16][16]. */
TILE_INLINE void pack_queries(const tiles_context *c, int64_t b, const query *rows, int count, const bool half,
                              uint32_t *to) {
  const plan *p = c->f.plan;
  const int planes = half ? 1 : 3;
  for (int64_t r = 0; r < 32; r++) {
    tile_row row = r < count ? row_of(p->q, b, rows[r].head, rows[r].pos) : (tile_row){ NULL, 1, 0 };
    for (int64_t k = 0; k < c->d_steps; k++) {
      __m512i parts[MOST_PLANES];
      split_along(row_part(row, k * STEP, half), row_part(row, k * STEP + 16, half), planes, parts);
      for (int q = 0; q < planes; q++) _mm512_storeu_si512(to + (k * planes + q) * 2 * BLOCK + r * TY_TILE, parts[q]);
    }
  }
}

/* Looks for odd ones among the queries of f32, by heads: parts of an infinity are NaN. */
static void scan_queries(void *context, int64_t begin, int64_t end) {
  tiles_context *c = context;
  const plan *p = c->f.plan;
  __mmask16 odd = 0;
  for (int64_t i = begin; i < end; i++)
    for (int64_t at = 0; at < p->t; at++) {
      tile_row row = row_of(p->q, i / p->heads, i % p->heads, at);
      for (int64_t k = 0; k < p->d; k += 16) odd |= odd_ones(row_part(row, k, false), false);
    }
  if (odd) __atomic_store_n(&c->odd, true, __ATOMIC_RELAXED);
}

/* ---- a block of queries ---- */

typedef struct tiles_work {
  query rows[QUERIES];
  float maximum[QUERIES];
  float sum[QUERIES * LANES_F32] __attribute__((aligned(64)));
  float scores[32 * KEY_TILE] __attribute__((aligned(64)));
  float values[32 * 32] __attribute__((aligned(64)));
  uint32_t weights[KEY_TILE / STEP * MOST_PLANES * 2 * BLOCK] __attribute__((aligned(64)));
  uint32_t *queries; /* [QUERIES / 32] of pack_queries() */
  float *out;        /* [QUERIES][room] */
} tiles_work;

/* Scores of 32 rows in columns [begin, end) of the tile at key j0, multiples of STEP. */
static void tile_scores(const tiles_context *c, const uint32_t *tiles, int64_t begin, int64_t end, const uint32_t *q,
                        float *scores) {
  for (int64_t j = begin; j < end; j += STEP) {
    tile_product t = { .steps = c->d_steps,
                       .a_step = c->planes * 2 * BLOCK,
                       .b_step = c->planes * 2 * BLOCK,
                       .b_plane = 2 * BLOCK,
                       .c_row = KEY_TILE,
                       .a = q,
                       .b = tiles + j / STEP * c->tile_units,
                       .c = scores + j };
    if (c->half) multiply_short(&t);
    else multiply_long(&t);
  }
}

/* out [32][room] = out * factor + weights times values. */
static void tile_values(const tiles_context *c, const uint32_t *tiles, int64_t begin, int64_t end, int count,
                        const float *factor, tiles_work *w, float *out) {
  const int64_t room = c->f.room;
  for (int64_t v = 0; v < c->v_blocks; v += 2) {
    tile_product t = { .steps = (end - begin) / STEP,
                       .a_step = c->weight_planes * 2 * BLOCK,
                       .b_step = c->tile_units,
                       .b_plane = c->v_blocks * BLOCK,
                       .c_row = 32,
                       .a = w->weights,
                       .b = tiles + begin / STEP * c->tile_units + c->key_units + v * BLOCK,
                       .c = w->values };
    if (c->half) multiply_weights(&t);
    else multiply_long(&t);
    for (int i = 0; i < count; i++) {
      float *to = out + i * room + v * TY_TILE;
      const __m512 f = _mm512_set1_ps(factor[i]);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), f, _mm512_loadu_ps(w->values + i * 32)));
      _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(_mm512_loadu_ps(to + 16), f, _mm512_loadu_ps(w->values + i * 32 + 16)));
    }
  }
}

/* Whether a row sees all of columns [begin, end) of the tile at key j0, as they are. */
static inline bool sees_all(const plan *p, const query *r, int64_t j0, int64_t begin, int64_t end) {
  bool gap = r->gap_low < j0 + end && r->gap_high > j0 + begin && r->gap_low < r->gap_high;
  return !p->mask && p->softcap == 0 && p->scale > 0 && r->low <= j0 + begin && r->high >= j0 + end && !gap;
}

/* The largest of a row's scores, once it shows only what it may; *scale: what they are yet to be multiplied by. */
static inline float ready_row(const plan *p, int64_t b, const query *r, int64_t j0, int64_t begin, int64_t end,
                              float *s, float *scale) {
  *scale = (float)p->scale;
  if (sees_all(p, r, j0, begin, end)) return row_max(s + begin, end - begin) * *scale;
  for (int64_t j = begin; j < end; j += 16)
    _mm512_storeu_ps(s + j, _mm512_mul_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(*scale)));
  *scale = 1;
  if (p->softcap > 0) cap_row(p, begin, end, s, NULL);
  limit_row(p, b, r, j0, begin, end, s);
  return row_max(s + begin, end - begin);
}

/* Weights of a row of n scores relative to the maximum: to the sum, one per lane, and in parts to the rows of A. */
TILE_INLINE void weigh_split_row(const float *s, int64_t n, float scale, float maximum, float factor, float *sum,
                                 const int planes, uint32_t *to) {
  const __m512 shift = _mm512_set1_ps(maximum == -INFINITY ? 0 : maximum), k = _mm512_set1_ps(scale);
  __m512 total = _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(factor));
  for (int64_t j = 0; j < n; j += STEP, to += planes * 2 * BLOCK) {
    __m512 a = ty_exp_weights(_mm512_fmsub_ps(_mm512_loadu_ps(s + j), k, shift));
    __m512 b = ty_exp_weights(_mm512_fmsub_ps(_mm512_loadu_ps(s + j + 16), k, shift));
    __m512i parts[MOST_PLANES];
    total = _mm512_add_ps(total, _mm512_add_ps(a, b));
    split_along(_mm512_castps_si512(a), _mm512_castps_si512(b), planes, parts);
    for (int q = 0; q < planes; q++) _mm512_storeu_si512(to + q * 2 * BLOCK, parts[q]);
  }
  _mm512_storeu_ps(sum, total);
}

/* 32 rows from `first` on in the keys of the tile at j0. */
static void tile_rows(const tiles_context *c, int64_t b, const uint32_t *tiles, int64_t j0, int first, int count,
                      tiles_work *w) {
  const plan *p = c->f.plan;
  const query *rows = w->rows + first;
  int64_t low, high;
  reach(rows, count, &low, &high);
  int64_t from = most_of(low - j0, 0), to = least(high - j0, KEY_TILE);
  if (from >= to || all_in_gap(rows, count, j0 + from, j0 + to) || !mask_shows(p, b, rows, count, j0, from, to)) return;
  int64_t begin = from / STEP * STEP, end = (to + STEP - 1) / STEP * STEP, n = end - begin;
  float top[32], factor[32], scale[32];
  tile_scores(c, tiles, begin, end, w->queries + first / 32 * c->d_steps * c->planes * 2 * BLOCK, w->scores);
  for (int i = 0; i < 32; i++)
    top[i] = i < count ? ready_row(p, b, rows + i, j0, begin, end, w->scores + i * KEY_TILE, scale + i) : -INFINITY;
  for (int i = 0; i < 32; i += GROUP) move_maxima(top + i, w->maximum + first + i, factor + i);
  for (int i = 0; i < count; i++) {
    const float *s = w->scores + i * KEY_TILE + begin;
    float top_now = w->maximum[first + i];
    float *sum = w->sum + (first + i) * LANES_F32;
    uint32_t *to = w->weights + i * TY_TILE;
    if (c->half) weigh_split_row(s, n, scale[i], top_now, factor[i], sum, 2, to);
    else weigh_split_row(s, n, scale[i], top_now, factor[i], sum, 3, to);
  }
  tile_values(c, tiles, begin, end, count, factor, w, w->out + first * c->f.room);
}

/* finish_row() for either type. */
static void finish_half_row(const tiles_context *c, int64_t b, const query *r, float *sums, float maximum,
                            float total) {
  const plan *p = c->f.plan;
  if (!c->half) {
    finish_row(&c->f, b, r, sums, maximum, total);
    return;
  }
  int64_t at = (b * p->heads + r->head) * p->t + r->pos;
  float inverse = total == 0 ? 0 : 1 / total;
  for (int64_t k = 0; k < p->dv; k++) sums[k] *= inverse;
  ty_half_store(TY_BF16, (uint16_t *)c->f.out->data + at * p->dv, sums, p->dv);
  ((float *)c->f.lse->data)[at] = total == 0 ? -INFINITY : maximum + log_of(total);
}

static void tiles_task(const tiles_context *c, int64_t task, tiles_work *w) {
  const plan *p = c->f.plan;
  int64_t block = task % c->f.blocks, at = task / c->f.blocks, kv_head = at % p->kv_heads, b = at / p->kv_heads, low,
          high;
  int n = block_rows(p, kv_head, block, QUERIES, w->rows);
  for (int i = 0; i < QUERIES; i++) w->maximum[i] = -INFINITY;
  memset(w->sum, 0, sizeof w->sum);
  memset(w->out, 0, sizeof *w->out * (size_t)(QUERIES * c->f.room));
  for (int first = 0; first < n; first += 32) {
    uint32_t *to = w->queries + first / 32 * c->d_steps * c->planes * 2 * BLOCK;
    int count = (int)least(32, n - first);
    if (c->half) pack_queries(c, b, w->rows + first, count, true, to);
    else pack_queries(c, b, w->rows + first, count, false, to);
  }
  reach(w->rows, n, &low, &high);
  for (int64_t j0 = low / KEY_TILE * KEY_TILE; j0 < high && !ty_interrupted; j0 += KEY_TILE)
    for (int first = 0; first < n; first += 32)
      tile_rows(c, b, c->packed + (at * c->tiles + j0 / STEP) * c->tile_units, j0, first, (int)least(32, n - first), w);
  for (int i = 0; i < n; i++) {
    float total = 0;
    for (int l = 0; l < LANES_F32; l++) total += w->sum[i * LANES_F32 + l];
    finish_half_row(c, b, w->rows + i, w->out + i * c->f.room, w->maximum[i], total);
  }
}

static void tiles_piece(void *context, int64_t begin, int64_t end) {
  tiles_context *c = context;
  size_t queries = sizeof(uint32_t) * (size_t)(QUERIES / 32 * c->d_steps * c->planes * 2 * BLOCK);
  size_t bytes = sizeof(tiles_work) + queries + sizeof(float) * (size_t)(QUERIES * c->f.room) + 64;
  char *memory = ty_scratch_alloc(bytes);
  if (!memory) {
    __atomic_store_n(&c->f.failed, true, __ATOMIC_RELAXED);
    return;
  }
  tiles_work *w = (tiles_work *)(void *)(((uintptr_t)memory + 63) / 64 * 64);
  w->queries = (uint32_t *)(void *)(w + 1);
  w->out = (float *)(void *)((char *)w->queries + queries);
  ty_tiles_open();
  for (int64_t task = begin; task < end; task++) tiles_task(c, task, w);
  ty_tiles_close();
  ty_scratch_free(memory, bytes);
}

/* ---- the whole ---- */

/* Whether the products fill tiles, and are many enough for all threads without being split. f32 is six products for
 * one: much of a tile must not be empty. */
static bool fills_tiles(const plan *p, bool half) {
  int64_t rows = p->group * p->t, blocks = p->batch * p->kv_heads * blocks_of(p, QUERIES);
  if (ty_tiles() == TY_NO_TILES || rows < 32 || p->s < 32 || p->d < 16 || p->dv < 16) return false;
  if (!half && (p->d % 32 || p->dv % 32 || p->d + p->dv < 128 || p->s < 512)) return false;
  return blocks >= TASKS || p->s <= 2 * SPLIT;
}

/* Forward; *done says whether it was. False after ty_fail(). */
static bool tiles_forward(const plan *p, const ty_view *out, const ty_view *lse, bool *done) {
  bool half = out->dtype == TY_BF16;
  tiles_context c = { .f = { .plan = p, .out = out, .lse = lse, .blocks = blocks_of(p, QUERIES), .splits = 1 },
                      .half = half,
                      .planes = half ? 1 : 3,
                      .weight_planes = half ? 2 : 3 };
  *done = false;
  if (!fills_tiles(p, half)) return true;
  c.d_steps = (p->d + STEP - 1) / STEP;
  c.v_blocks = (p->dv + STEP - 1) / STEP * 2;
  c.tiles = (p->s + STEP - 1) / STEP;
  c.key_units = c.d_steps * c.planes * 2 * BLOCK;
  c.tile_units = c.key_units + c.planes * c.v_blocks * BLOCK;
  c.f.room = c.v_blocks * TY_TILE;
  int64_t heads = p->batch * p->kv_heads;
  size_t bytes = sizeof(uint32_t) * (size_t)(heads * c.tiles * c.tile_units) + 64;
  char *memory = ty_scratch_alloc(bytes);
  if (!memory) return false;
  c.packed = (uint32_t *)(void *)(((uintptr_t)memory + 63) / 64 * 64);
  ty_parallel_for(heads * c.tiles, 8, pack_pieces, &c);
  if (!half) ty_parallel_for(p->batch * p->heads, 1, scan_queries, &c);
  if (!c.odd) ty_parallel_for(heads * c.f.blocks, 1, tiles_piece, &c);
  ty_scratch_free(memory, bytes);
  *done = !c.odd && !c.f.failed;
  return !c.f.failed || ty_fail(TY_ENOMEM, "out of memory for the tiles of attention");
}
