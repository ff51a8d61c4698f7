/* The gradients of attention of bf16 on tiles of sums; included after attention_tiles.h. The tasks are those of
 * attention_backward.h: a key-value head and a share of its query rows.
 *
 * Scores are computed transposed, a row for each key, so that weights and their gradients are rows of A for what
 * keys and values get and pairs of B for what queries get. Both are two numbers of bf16 each. 64 keys and 64 query
 * rows at a time are multiplied; all gradients are sums of f32 that the products add to. */

enum {
  SIDE = 64,       /* keys, and query rows, of a tile */
  SPAN_BLOCKS = 8, /* blocks of query rows that are packed at a time */
  SLOPE_PLANES = 2
};

typedef struct slopes_context {
  const plan *p;
  const gradients *a;
  int64_t d_steps, v_steps;              /* steps of 32 in d and dv */
  int64_t tiles, key_units, query_units; /* of 32 keys; units that 32 keys, and 32 query rows, take packed */
  int64_t blocks, shares, room, room_v;
  uint32_t *packed; /* [b, kv_heads][tiles][key_units] */
  float *sums;      /* [b, kv_heads][shares][keys padded] of dk [room], then of dv [room_v] */
  bool odd, failed;
} slopes_context;

typedef struct slopes_work {
  query rows[SPAN_BLOCKS][BACK_QUERIES];
  int count[SPAN_BLOCKS];
  int64_t low[SPAN_BLOCKS], high[SPAN_BLOCKS];
  int32_t limits[SPAN_BLOCKS][4][BACK_QUERIES]; /* of the rows: low, high, gap_low, gap_high */
  float lse[SPAN_BLOCKS][BACK_QUERIES], delta[SPAN_BLOCKS][BACK_QUERIES];
  float scores[SIDE * SIDE] __attribute__((aligned(64))), slopes[SIDE * SIDE] __attribute__((aligned(64)));
  uint32_t weights[2 * 2 * SLOPE_PLANES * 2 * BLOCK]
      __attribute__((aligned(64)));                                              /* A: [keys / 32][rows / 32][planes] */
  uint32_t along[2 * 2 * SLOPE_PLANES * 2 * BLOCK] __attribute__((aligned(64))); /* the same of dS */
  uint32_t across[2 * SLOPE_PLANES * 4 * BLOCK] __attribute__((aligned(64)));    /* B of dS: [keys / 32][planes][4] */
  uint32_t *queries;                                                             /* [SPAN_BLOCKS * 2][query_units] */
  float *dq;                                                                     /* [SPAN_BLOCKS][room][SIDE] */
} slopes_work;

/* ---- packing ---- */

/* 32 rows as A: [steps][2][16 rows][16 units]. */
static bool rows_along(const tile_row *rows, int64_t steps, uint32_t *to) {
  __mmask16 odd = 0;
  for (int64_t r = 0; r < 32; r++)
    for (int64_t k = 0; k < steps; k++) {
      __m512i part, x0 = row_part(rows[r], k * STEP, true), x1 = row_part(rows[r], k * STEP + 16, true);
      odd |= odd_ones(x0, true) | odd_ones(x1, true);
      split_along(x0, x1, 1, &part);
      _mm512_storeu_si512(to + k * 2 * BLOCK + r * TY_TILE, part);
    }
  return odd;
}

/* The same as B, [steps][2][16 units][16 rows]. */
static void turn_along(const tile_row *rows, int64_t steps, uint32_t *to) {
  for (int64_t k = 0; k < steps; k++)
    for (int64_t half = 0; half < 2; half++) {
      __m512i v[TY_TILE];
      for (int64_t i = 0; i < TY_TILE; i++) {
        tile_row row = rows[half * TY_TILE + i];
        split_along(row_part(row, k * STEP, true), row_part(row, k * STEP + 16, true), 1, &v[i]);
      }
      ty_tile_turn(v, to + (k * 2 + half) * BLOCK, TY_TILE);
    }
}

/* Pairs of 32 rows: B, [steps * 2][16 pairs][16 columns], or turned A, the same with rows for columns. */
static void rows_across(const tile_row *rows, int64_t steps, bool turned, uint32_t *to) {
  for (int64_t block = 0; block < 2 * steps; block++, to += BLOCK) {
    __m512i v[TY_TILE];
    for (int64_t u = 0; u < TY_TILE; u++)
      split_across(row_part(rows[2 * u], block * TY_TILE, true), row_part(rows[2 * u + 1], block * TY_TILE, true), 1,
                   &v[u]);
    if (turned) ty_tile_turn(v, to, TY_TILE);
    else
      for (int64_t u = 0; u < TY_TILE; u++) _mm512_storeu_si512(to + u * TY_TILE, v[u]);
  }
}

/* 32 keys: rows of keys and of values as A, and keys turned, whose products are with dS. */
static void pack_slope_keys(void *context, int64_t begin, int64_t end) {
  slopes_context *c = context;
  const plan *p = c->p;
  for (int64_t i = begin; i < end; i++) {
    int64_t head = i / c->tiles % p->kv_heads, b = i / c->tiles / p->kv_heads, j0 = i % c->tiles * 32;
    uint32_t *to = c->packed + i * c->key_units;
    tile_row k[32], v[32];
    for (int64_t r = 0; r < 32; r++) k[r] = row_of(p->k, b, head, j0 + r), v[r] = row_of(p->v, b, head, j0 + r);
    bool odd = rows_along(k, c->d_steps, to);
    odd |= rows_along(v, c->v_steps, to + c->d_steps * 2 * BLOCK);
    rows_across(k, c->d_steps, true, to + (c->d_steps + c->v_steps) * 2 * BLOCK);
    if (odd) __atomic_store_n(&c->odd, true, __ATOMIC_RELAXED);
  }
}

/* 32 query rows from `first` on of a block: q and g turned, and their pairs. */
static void pack_slope_rows(const slopes_context *c, int64_t b, const query *rows, int count, uint32_t *to) {
  const plan *p = c->p;
  tile_row q[32], g[32];
  for (int r = 0; r < 32; r++) {
    q[r] = g[r] = (tile_row){ NULL, 1, 0 };
    if (r < count)
      q[r] = row_of(p->q, b, rows[r].head, rows[r].pos), g[r] = row_of(c->a->g, b, rows[r].head, rows[r].pos);
  }
  turn_along(q, c->d_steps, to);
  turn_along(g, c->v_steps, to + c->d_steps * 2 * BLOCK);
  to += (c->d_steps + c->v_steps) * 2 * BLOCK;
  rows_across(q, c->d_steps, false, to);
  rows_across(g, c->v_steps, false, to + c->d_steps * 2 * BLOCK);
}

static void scan_rows(void *context, int64_t begin, int64_t end) {
  slopes_context *c = context;
  const plan *p = c->p;
  __mmask16 odd = 0;
  for (int64_t i = begin; i < end; i++)
    for (int64_t at = 0; at < p->t; at++) {
      tile_row q = row_of(p->q, i / p->heads, i % p->heads, at), g = row_of(c->a->g, i / p->heads, i % p->heads, at);
      for (int64_t k = 0; k < p->d; k += 16) odd |= odd_ones(row_part(q, k, true), true);
      for (int64_t k = 0; k < p->dv; k += 16) odd |= odd_ones(row_part(g, k, true), true);
    }
  if (odd) __atomic_store_n(&c->odd, true, __ATOMIC_RELAXED);
}

/* What is known of a query row besides its numbers. */
static void load_row(const slopes_context *c, int64_t b, slopes_work *w, int64_t i, int r) {
  const plan *p = c->p;
  query *at = &w->rows[i][r];
  const ty_view *lse = c->a->lse;
  tile_row g = row_of(c->a->g, b, at->head, at->pos), y = row_of(c->a->y, b, at->head, at->pos);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < p->dv; k += 16)
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(row_part(g, k, true)), _mm512_castsi512_ps(row_part(y, k, true)), sum);
  w->delta[i][r] = _mm512_reduce_add_ps(sum);
  w->lse[i][r] = ((const float *)lse->data)[b * lse->stride[0] + at->head * lse->stride[1] + at->pos * lse->stride[2]];
  if (w->lse[i][r] == -INFINITY) at->low = at->high = 0;
}

static void load_span(const slopes_context *c, int64_t b, int64_t kv_head, int64_t first, int64_t n, slopes_work *w) {
  for (int64_t i = 0; i < n; i++) {
    w->count[i] = block_rows(c->p, kv_head, first + i, BACK_QUERIES, w->rows[i]);
    for (int r = 0; r < BACK_QUERIES; r++) {
      query none = { 0 }, *at = &w->rows[i][r];
      w->lse[i][r] = w->delta[i][r] = 0;
      if (r < w->count[i]) load_row(c, b, w, i, r);
      else *at = none;
      w->limits[i][0][r] = (int32_t)at->low, w->limits[i][1][r] = (int32_t)at->high;
      w->limits[i][2][r] = (int32_t)at->gap_low, w->limits[i][3][r] = (int32_t)at->gap_high;
    }
    reach(w->rows[i], w->count[i], &w->low[i], &w->high[i]);
    for (int half = 0; half < 2; half++)
      pack_slope_rows(c, b, w->rows[i] + half * 32, (int)least(32, w->count[i] - half * 32),
                      w->queries + (i * 2 + half) * c->query_units);
  }
  memset(w->dq, 0, sizeof *w->dq * (size_t)(n * c->room * SIDE));
}

/* ---- a tile ---- */

/* Which of 16 rows see key j. */
static inline __mmask16 seen(int32_t (*limits)[BACK_QUERIES], int64_t l, int64_t j) {
  const __m512i key = _mm512_set1_epi32((int32_t)j);
  __mmask16 in = _mm512_cmpge_epi32_mask(key, _mm512_loadu_si512(limits[0] + l)) &
                 _mm512_cmplt_epi32_mask(key, _mm512_loadu_si512(limits[1] + l));
  __mmask16 gap = _mm512_cmpge_epi32_mask(key, _mm512_loadu_si512(limits[2] + l)) &
                  _mm512_cmplt_epi32_mask(key, _mm512_loadu_si512(limits[3] + l));
  return in & (__mmask16)~gap;
}

/* Weights and dS of a key's row: scores to weights, slopes (dP) to dS, in place. */
static void slope_row(const slopes_context *c, slopes_work *w, int64_t i, int64_t j, bool all, float *s, float *ds) {
  const plan *p = c->p;
  const __m512 scale = _mm512_set1_ps((float)p->scale);
  float bends[SIDE];
  if (p->softcap > 0) {
    for (int64_t l = 0; l < SIDE; l++) s[l] *= (float)p->scale;
    cap_row(p, 0, SIDE, s, bends);
  }
  for (int64_t l = 0; l < SIDE; l += 16) {
    __m512 x = _mm512_loadu_ps(s + l), lse = _mm512_loadu_ps(w->lse[i] + l), slope = _mm512_loadu_ps(ds + l);
    x = p->softcap > 0 ? _mm512_sub_ps(x, lse) : _mm512_fmsub_ps(x, scale, lse);
    __mmask16 mask = all ? 0xffff : seen(w->limits[i], l, j);
    x = _mm512_maskz_mov_ps(mask, ty_exp_weights(x));
    slope = _mm512_maskz_mul_ps(mask, x, _mm512_sub_ps(slope, _mm512_loadu_ps(w->delta[i] + l)));
    if (p->softcap > 0) slope = _mm512_mul_ps(slope, _mm512_loadu_ps(bends + l));
    _mm512_storeu_ps(s + l, x), _mm512_storeu_ps(ds + l, slope);
  }
}

/* A row of 64 as parts of A for products over query rows. */
static inline void split_row(const float *row, int64_t key, uint32_t *to) {
  to += key / 32 * 2 * SLOPE_PLANES * 2 * BLOCK + key % 32 * TY_TILE;
  for (int64_t l = 0; l < SIDE; l += 32) {
    __m512i parts[SLOPE_PLANES];
    split_along(_mm512_loadu_si512(row + l), _mm512_loadu_si512(row + l + 16), SLOPE_PLANES, parts);
    for (int q = 0; q < SLOPE_PLANES; q++) _mm512_storeu_si512(to + (l / 32 * SLOPE_PLANES + q) * 2 * BLOCK, parts[q]);
  }
}

static void split_slopes(slopes_work *w) {
  for (int64_t r = 0; r < SIDE; r++) {
    split_row(w->scores + r * SIDE, r, w->weights);
    split_row(w->slopes + r * SIDE, r, w->along);
  }
  for (int64_t r = 0; r < SIDE; r += 2)
    for (int64_t l = 0; l < SIDE; l += 16) {
      __m512i parts[SLOPE_PLANES], x0 = _mm512_loadu_si512(w->slopes + r * SIDE + l);
      split_across(x0, _mm512_loadu_si512(w->slopes + (r + 1) * SIDE + l), SLOPE_PLANES, parts);
      for (int q = 0; q < SLOPE_PLANES; q++)
        _mm512_storeu_si512(w->across + ((r / 32 * SLOPE_PLANES + q) * 4 + l / 16) * BLOCK + r % 32 / 2 * TY_TILE,
                            parts[q]);
    }
}

/* c [64][columns] += a b: a is w->weights or w->along, b pairs of the 64 query rows from `b` on. */
static void add_to_keys(const slopes_context *c, const uint32_t *a, const uint32_t *b, int64_t room, float *sums) {
  for (int64_t key = 0; key < 2; key++)
    for (int64_t col = 0; col < room; col += 32)
      multiply_weights(&(tile_product){ .steps = 2,
                                        .a_step = SLOPE_PLANES * 2 * BLOCK,
                                        .b_step = c->query_units,
                                        .c_row = room,
                                        .a = a + key * 2 * SLOPE_PLANES * 2 * BLOCK,
                                        .b = b + col / 16 * BLOCK,
                                        .c = sums + key * 32 * room + col,
                                        .add = true });
}

/* Block i of the span and the 64 keys from j0 on, packed in two tiles at `keys`; what they add to dk and dv. */
static void slope_tile(const slopes_context *c, slopes_work *w, int64_t i, int64_t j0, const uint32_t *keys, float *dk,
                       float *dv) {
  const uint32_t *rows = w->queries + i * 2 * c->query_units;
  const int64_t d_units = c->d_steps * 2 * BLOCK, v_units = c->v_steps * 2 * BLOCK;
  for (int64_t key = 0; key < 2; key++)
    for (int64_t row = 0; row < 2; row++) {
      tile_product t = { .steps = c->d_steps,
                         .a_step = 2 * BLOCK,
                         .b_step = 2 * BLOCK,
                         .c_row = SIDE,
                         .a = keys + key * c->key_units,
                         .b = rows + row * c->query_units,
                         .c = w->scores + key * 32 * SIDE + row * 32 };
      multiply_short(&t);
      t.steps = c->v_steps, t.a += d_units, t.b += d_units, t.c = w->slopes + key * 32 * SIDE + row * 32;
      multiply_short(&t);
    }
  bool all = w->count[i] == BACK_QUERIES;
  for (int r = 0; r < BACK_QUERIES && all; r++) {
    const query *q = &w->rows[i][r];
    bool gap = q->gap_low < q->gap_high && q->gap_low < j0 + SIDE && q->gap_high > j0;
    all = q->low <= j0 && q->high >= j0 + SIDE && !gap;
  }
  for (int64_t r = 0; r < SIDE; r++) slope_row(c, w, i, j0 + r, all, w->scores + r * SIDE, w->slopes + r * SIDE);
  split_slopes(w);
  add_to_keys(c, w->along, rows + d_units + v_units, c->room, dk);
  add_to_keys(c, w->weights, rows + 2 * d_units + v_units, c->room_v, dv);
  for (int64_t col = 0; col < c->room; col += 32)
    for (int64_t row = 0; row < 2; row++)
      multiply_pairs(&(tile_product){ .steps = 2,
                                      .a_step = c->key_units,
                                      .b_step = SLOPE_PLANES * 4 * BLOCK,
                                      .b_plane = 4 * BLOCK,
                                      .c_row = SIDE,
                                      .a = keys + d_units + v_units + col / 16 * BLOCK,
                                      .b = w->across + row * 2 * BLOCK,
                                      .c = w->dq + (i * c->room + col) * SIDE + row * 32,
                                      .add = true });
}

/* ---- tasks ---- */

static float *sums_of(const slopes_context *c, int64_t task) {
  return c->sums + task * c->tiles * 32 * (c->room + c->room_v);
}

static void store_queries(const slopes_context *c, int64_t b, int64_t n, slopes_work *w) {
  const plan *p = c->p;
  float row[SIDE * 32]; /* 32 columns at a time */
  for (int64_t i = 0; i < n; i++)
    for (int64_t k = 0; k < p->d; k += 32)
      for (int r = 0; r < w->count[i]; r++) {
        int64_t width = least(32, p->d - k);
        const query *at = &w->rows[i][r];
        for (int64_t q = 0; q < width; q++) row[q] = w->dq[(i * c->room + k + q) * SIDE + r] * (float)p->scale;
        uint16_t *to = (uint16_t *)c->a->dq->data + ((b * p->heads + at->head) * p->t + at->pos) * p->d + k;
        ty_half_store(TY_BF16, to, row, width);
      }
}

static void slopes_task(const slopes_context *c, int64_t task, slopes_work *w) {
  const plan *p = c->p;
  int64_t share = task % c->shares, head = task / c->shares, b = head / p->kv_heads, kv_head = head % p->kv_heads;
  float *dk = sums_of(c, task), *dv = dk + c->tiles * 32 * c->room;
  memset(dk, 0, sizeof *dk * (size_t)(c->tiles * 32 * (c->room + c->room_v)));
  int64_t stop = c->blocks * (share + 1) / c->shares;
  for (int64_t first = c->blocks * share / c->shares; first < stop; first += SPAN_BLOCKS) {
    int64_t n = least(SPAN_BLOCKS, stop - first);
    load_span(c, b, kv_head, first, n, w);
    for (int64_t j0 = 0; j0 < p->s && !ty_interrupted; j0 += SIDE)
      for (int64_t i = 0; i < n; i++) {
        if (w->high[i] <= j0 || w->low[i] >= j0 + SIDE ||
            all_in_gap(w->rows[i], w->count[i], j0, least(j0 + SIDE, p->s)))
          continue;
        const uint32_t *keys = c->packed + (head * c->tiles + j0 / 32) * c->key_units;
        slope_tile(c, w, i, j0, keys, dk + j0 * c->room, dv + j0 * c->room_v);
      }
    store_queries(c, b, n, w);
  }
}

static void slopes_piece(void *context, int64_t begin, int64_t end) {
  slopes_context *c = context;
  size_t queries = sizeof(uint32_t) * (size_t)(SPAN_BLOCKS * 2 * c->query_units);
  size_t bytes = sizeof(slopes_work) + queries + sizeof(float) * (size_t)(SPAN_BLOCKS * c->room * SIDE) + 64;
  char *memory = ty_scratch_alloc(bytes);
  if (!memory) {
    __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
    return;
  }
  slopes_work *w = (slopes_work *)(void *)(((uintptr_t)memory + 63) / 64 * 64);
  w->queries = (uint32_t *)(void *)(w + 1);
  w->dq = (float *)(void *)((char *)w->queries + queries);
  ty_tiles_open();
  for (int64_t task = begin; task < end; task++) slopes_task(c, task, w);
  ty_tiles_close();
  ty_scratch_free(memory, bytes);
}

/* Adds up the shares of a row of keys, in order, and rounds. */
static void store_keys(void *context, int64_t begin, int64_t end) {
  const slopes_context *c = context;
  const plan *p = c->p;
  for (int64_t i = begin; i < end; i++) {
    int64_t head = i / p->s, j = i % p->s;
    for (int which = 0; which < 2; which++) {
      int64_t room = which ? c->room_v : c->room, width = which ? p->dv : p->d,
              skip = which ? c->tiles * 32 * c->room : 0;
      float *sum = sums_of(c, head * c->shares) + skip + j * room;
      for (int64_t share = 1; share < c->shares; share++) {
        const float *more = sums_of(c, head * c->shares + share) + skip + j * room;
        for (int64_t k = 0; k < width; k++) sum[k] += more[k];
      }
      for (int64_t k = 0; k < width && !which; k++) sum[k] *= (float)p->scale;
      ty_half_store(TY_BF16, (uint16_t *)(which ? c->a->dv : c->a->dk)->data + i * width, sum, width);
    }
  }
}

/* The gradients; *done says whether they are there. False after ty_fail(). */
static bool tiles_backward(const plan *p, const gradients *a, bool *done) {
  slopes_context c = { .p = p, .a = a, .blocks = blocks_of(p, BACK_QUERIES), .shares = 1 };
  *done = false;
  if (ty_tiles() == TY_NO_TILES || p->mask || a->dlse || p->group * p->t < 32 || p->s < 32 || p->d < 16 || p->dv < 16 ||
      p->s > INT32_MAX / 2)
    return true;
  c.d_steps = (p->d + 31) / 32, c.v_steps = (p->dv + 31) / 32, c.tiles = (p->s + SIDE - 1) / SIDE * 2;
  c.room = c.d_steps * 32, c.room_v = c.v_steps * 32;
  c.key_units = (2 * c.d_steps + c.v_steps) * 2 * BLOCK, c.query_units = 2 * (c.d_steps + c.v_steps) * 2 * BLOCK;
  int64_t heads = p->batch * p->kv_heads;
  if (heads > 0 && heads < TASKS / 2) c.shares = most_of(1, least((TASKS + heads - 1) / heads, c.blocks / 4));
  size_t packed = sizeof(uint32_t) * (size_t)(heads * c.tiles * c.key_units);
  size_t bytes = packed + sizeof(float) * (size_t)(heads * c.shares * c.tiles * 32 * (c.room + c.room_v)) + 64;
  char *memory = ty_scratch_alloc(bytes);
  if (!memory) return false;
  c.packed = (uint32_t *)(void *)(((uintptr_t)memory + 63) / 64 * 64);
  c.sums = (float *)(void *)((char *)c.packed + packed);
  ty_parallel_for(heads * c.tiles, 8, pack_slope_keys, &c);
  ty_parallel_for(p->batch * p->heads, 1, scan_rows, &c);
  if (!c.odd) ty_parallel_for(heads * c.shares, 1, slopes_piece, &c);
  if (!c.odd && !c.failed) ty_parallel_for(heads * p->s, 64, store_keys, &c);
  ty_scratch_free(memory, bytes);
  *done = !c.odd && !c.failed;
  return !c.failed || ty_fail(TY_ENOMEM, "out of memory for the tiles of attention");
}
