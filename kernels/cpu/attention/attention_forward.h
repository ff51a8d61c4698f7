/* Template: the forward pass. Included after attention_tile.h. */

/* The mask's part of a row of scores that begins at key j0: adds it, or writes -infinity where it hides the key. */
static inline void mask_row(const plan *p, int64_t b, const query *r, int64_t j0, int64_t from, int64_t to, REAL *s) {
  if (!p->mask) return;
  const char *base = element(p->mask, b, r->head, r->pos, j0);
  int64_t step = p->mask->stride[3];
  if (p->mask->dtype == TY_BOOL) {
    const uint8_t *m = (const uint8_t *)base;
    if (step == 1)
      for (int64_t j = from; j < to; j++) s[j] = m[j] ? s[j] : (REAL)-INFINITY;
    else
      for (int64_t j = from; j < to; j++) s[j] = m[j * step] ? s[j] : (REAL)-INFINITY;
  } else {
    const REAL *m = (const REAL *)(const void *)base;
    if (step == 1)
      for (int64_t j = from; j < to; j++) s[j] += m[j];
    else
      for (int64_t j = from; j < to; j++) s[j] += m[j * step];
  }
}

/* Whether the mask leaves any of the keys [j0 + from, j0 + to) visible to any of the rows. */
static bool mask_shows(const plan *p, int64_t b, const query *rows, int n, int64_t j0, int64_t from, int64_t to) {
  if (!p->mask) return true;
  int64_t step = p->mask->stride[3];
  for (int i = 0; i < n; i++) {
    const char *base = element(p->mask, b, rows[i].head, rows[i].pos, j0);
    int any = 0;
    if (p->mask->dtype == TY_BOOL) {
      const uint8_t *m = (const uint8_t *)base;
      for (int64_t j = from; j < to; j++) any |= m[j * step];
    } else {
      const REAL *m = (const REAL *)(const void *)base;
      for (int64_t j = from; j < to; j++) any |= !(m[j * step] == (REAL)-INFINITY);
    }
    if (any) return true;
  }
  return false;
}

/* Bends scores in columns [begin, end), multiples of LANES, before the mask; slopes: NULL, or what their derivatives
 * are to be multiplied by. */
static inline void cap_row(const plan *p, int64_t begin, int64_t end, REAL *restrict s, REAL *restrict slopes) {
  const REAL cap = (REAL)p->softcap, inverse = (REAL)(1 / p->softcap);
  int64_t n = (end - begin) / LANES * LANES; /* known to the compiler now */
  s += begin;
  if (!slopes) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) s[j] = cap * tanh_of(s[j] * inverse);
    return;
  }
  slopes += begin;
#pragma omp simd
  for (int64_t j = 0; j < n; j++) {
    REAL bent = tanh_of(s[j] * inverse);
    s[j] = cap * bent;
    slopes[j] = 1 - bent * bent;
  }
}

/* Scores of one row in columns [begin, end) of the tile at key j0: -infinity for what the row may not see. */
static inline void limit_row(const plan *p, int64_t b, const query *r, int64_t j0, int64_t begin, int64_t end,
                             REAL *s) {
  int64_t from = most_of(begin, r->low - j0), to = least(end, r->high - j0);
  if (to < from) from = to = end;
  for (int64_t j = begin; j < from; j++) s[j] = (REAL)-INFINITY;
  mask_row(p, b, r, j0, from, to, s);
  for (int64_t j = to; j < end; j++) s[j] = (REAL)-INFINITY;
  from = most_of(begin, r->gap_low - j0), to = least(end, r->gap_high - j0);
  for (int64_t j = from; j < to; j++) s[j] = (REAL)-INFINITY;
}

/* Moves the running maxima of a group of rows on to `top`, and says what the sums so far are to be multiplied by. */
static inline void move_maxima(const REAL *restrict top, REAL *restrict maximum, REAL *restrict factor) {
#pragma omp simd
  for (int i = 0; i < GROUP; i++) {
    REAL before = maximum[i], now = top[i] > before ? top[i] : before;
    factor[i] = exp_weight(before - (now == (REAL)-INFINITY ? 0 : now)); /* nothing seen yet: 0 of nothing */
    maximum[i] = now;
  }
}

/* Turns a row of n scores, a multiple of LANES, into weights relative to the maximum and adds them to the sum, one per
 * lane, after this was multiplied by factor. */
static inline void weigh_row(REAL *s, int64_t n, REAL maximum, REAL factor, REAL *sum) {
  REAL shift = maximum == (REAL)-INFINITY ? 0 : maximum; /* nothing seen yet: the weights are exp(-infinity) */
  VEC total = *(const VEC *)sum * factor;
#if defined(__AVX512F__) && LANES == 16
  for (int64_t j = 0; j < n; j += LANES) {
    __m512 w = ty_exp_weights(_mm512_sub_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(shift)));
    _mm512_storeu_ps(s + j, w);
    total += (VEC)w;
  }
#else
  n = n / LANES * LANES;
#pragma omp simd
  for (int64_t j = 0; j < n; j++) s[j] = exp_weight(s[j] - shift);
  for (int64_t j = 0; j < n; j += LANES) total += *(const VEC *)(s + j);
#endif
  *(VEC *)sum = total;
}

/* What a block of query rows is computed in and what comes out: sums still to be divided. */
typedef struct forward_work {
  query rows[QUERIES];
  REAL maximum[QUERIES];
  REAL *sum;           /* [rows][LANES] */
  REAL *out;           /* [rows][dv padded] */
  REAL *panels;        /* the queries, scaled */
  REAL *keys;          /* [d][KEYS] */
  REAL *values;        /* [KEYS][dv padded] */
  REAL *scores;        /* [GROUP][KEYS] */
  REAL *rows_of_pages; /* [KEYS][d or dv]: where keys lie in pages */
} forward_work;

typedef struct forward_context {
  const plan *plan;
  const ty_view *out, *lse;
  int64_t blocks, splits, split_keys, room, rows;
  REAL *partial; /* with splits: per task and row the sums [room], the maximum and the total */
  bool failed;
} forward_context;

/* Rows [j0, j0 + n) of one head of keys or values that lie in pages, one after another. */
static void collect_rows(const plan *p, const ty_view *x, int64_t kv_head, int64_t j0, int64_t n, int64_t width,
                         REAL *to) {
  const int64_t heads = x->size[1], *numbers = p->pages->numbers, step = p->pages->step, size = p->pages->size;
  if (width == 0) return; /* nothing is there, not even memory */
  for (int64_t j = j0; j < j0 + n; j++, to += width) {
    const int64_t at = ((numbers[j / size * step] * size + j % size) * heads + kv_head) * width;
    if (!ty_is_half((ty_dtype)x->dtype)) {
      memcpy(to, (const REAL *)x->data + at, (size_t)width * sizeof(REAL));
      continue;
    }
    float wide[KEYS];
    for (int64_t first = 0; first < width; first += KEYS) {
      const int64_t some = least(KEYS, width - first);
      ty_half_load((ty_dtype)x->dtype, wide, (const uint16_t *)x->data + at + first, some);
      for (int64_t k = 0; k < some; k++) to[first + k] = (REAL)wide[k];
    }
  }
}

/* Packs the keys and values of the tile at key j0. */
static void pack_tile(const plan *p, int64_t b, int64_t kv_head, int64_t j0, int64_t room, forward_work *w) {
  const int64_t keys = least(KEYS, p->s - j0);
  if (p->pages) {
    collect_rows(p, p->k, kv_head, j0, keys, p->d, w->rows_of_pages);
    pack_across(w->keys, w->rows_of_pages, p->d, 1, keys, p->d);
    collect_rows(p, p->v, kv_head, j0, keys, p->dv, w->rows_of_pages);
    pack_along(w->values, w->rows_of_pages, p->dv, 1, keys, p->dv, room);
    return;
  }
  pack_across(w->keys, (const REAL *)(const void *)element(p->k, b, kv_head, j0, 0), p->k->stride[2], p->k->stride[3],
              keys, p->d);
  pack_along(w->values, (const REAL *)(const void *)element(p->v, b, kv_head, j0, 0), p->v->stride[2], p->v->stride[3],
             keys, p->dv, room);
}

static void block_tile(const plan *p, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t room, forward_work *w) {
  bool packed = false;
  for (int first = 0; first < n; first += GROUP) {
    int count = (int)least(GROUP, n - first);
    const query *rows = w->rows + first;
    int64_t low, high;
    reach(rows, count, &low, &high);
    int64_t from = most_of(low - j0, 0), to = least(high - j0, KEYS);
    if (from >= to || all_in_gap(rows, count, j0 + from, j0 + to)) continue;
    if (!mask_shows(p, b, rows, count, j0, from, to)) continue;
    if (!packed) pack_tile(p, b, kv_head, j0, room, w);
    packed = true;
    int64_t begin = from / LANES * LANES, end = padded(to);
    product_scores(count, end - begin, p->d, w->panels + first * p->d, w->keys + begin, w->scores + begin);
    REAL top[GROUP], factor[GROUP];
    for (int i = 0; i < GROUP; i++) top[i] = (REAL)-INFINITY;
    for (int i = 0; i < count; i++) {
      REAL *s = w->scores + i * KEYS;
      if (p->softcap > 0) cap_row(p, begin, end, s, NULL);
      limit_row(p, b, rows + i, j0, begin, end, s);
      top[i] = row_max(s + begin, end - begin);
    }
    move_maxima(top, w->maximum + first, factor);
    for (int i = 0; i < count; i++) {
      int row = first + i;
      weigh_row(w->scores + i * KEYS + begin, end - begin, w->maximum[row], factor[i], w->sum + row * LANES);
    }
    product_values(count, room, to - begin, w->scores + begin, w->values + begin * room, w->out + first * room, factor);
  }
}

/* Divides the sums of a row; a row that has seen nothing is 0. */
static inline void finish_row(const forward_context *c, int64_t b, const query *r, const REAL *sums, REAL maximum,
                              REAL total) {
  const plan *p = c->plan;
  int64_t at = b * p->heads * p->t + r->head * p->head_row + r->pos * p->pos_row;
  REAL *out = (REAL *)c->out->data + at * p->dv, inverse = total == 0 ? 0 : 1 / total;
  for (int64_t k = 0; k < p->dv; k++) out[k] = sums[k] * inverse;
  if (c->lse) ((REAL *)c->lse->data)[at] = total == 0 ? (REAL)-INFINITY : maximum + log_of(total);
}

static void forward_task(const forward_context *c, int64_t task, forward_work *w) {
  const plan *p = c->plan;
  int64_t split = task % c->splits, block = task / c->splits % c->blocks, at = task / c->splits / c->blocks;
  int64_t kv_head = at % p->kv_heads, b = at / p->kv_heads, room = c->room;
  int n = block_rows(p, kv_head, block, QUERIES, w->rows);
  for (int i = 0; i < n; i++) {
    w->maximum[i] = (REAL)-INFINITY;
    pack_panel_row(w->panels, i, (const REAL *)(const void *)element(p->q, b, w->rows[i].head, w->rows[i].pos, 0),
                   p->q->stride[3], p->d, (REAL)p->scale);
  }
  int64_t full = (n + GROUP - 1) / GROUP * GROUP;
  for (int64_t i = n; i < full; i++) {
    w->maximum[i] = (REAL)-INFINITY;
    clear_panel_row(w->panels, i, p->d);
  }
  memset(w->sum, 0, (size_t)(n * LANES) * sizeof(REAL));
  memset(w->out, 0, (size_t)(full * room) * sizeof(REAL));
  int64_t low, high;
  reach(w->rows, n, &low, &high);
  low = most_of(low, split * c->split_keys), high = least(high, (split + 1) * c->split_keys);
  for (int64_t j0 = low / KEYS * KEYS; j0 < high; j0 += KEYS) block_tile(p, b, kv_head, j0, n, room, w);
  for (int i = 0; i < n; i++) {
    REAL total = 0;
    for (int l = 0; l < LANES; l++) total += w->sum[i * LANES + l];
    if (c->splits == 1) {
      finish_row(c, b, w->rows + i, w->out + i * room, w->maximum[i], total);
    } else {
      REAL *to = c->partial + (task * c->rows + i) * (room + 2);
      memcpy(to, w->out + i * room, (size_t)room * sizeof(REAL));
      to[room] = w->maximum[i], to[room + 1] = total;
    }
  }
}

/* Memory for a block; NULL with c->failed set. */
static REAL *forward_alloc(forward_context *c, forward_work **work, size_t *bytes) {
  const plan *p = c->plan;
  int64_t rows = (c->rows + GROUP - 1) / GROUP * GROUP;
  int64_t elements = rows * (LANES + c->room + p->d) + KEYS * (p->d + c->room + GROUP);
  if (p->pages) elements += KEYS * most_of(p->d, p->dv);
  *bytes = (size_t)elements * sizeof(REAL) + sizeof(forward_work);
  REAL *memory = ty_scratch_alloc(*bytes);
  if (!memory) {
    __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
    return NULL;
  }
  forward_work *w = *work = (forward_work *)(void *)(memory + elements);
  w->sum = memory;
  w->out = w->sum + rows * LANES;
  w->panels = w->out + rows * c->room;
  w->keys = w->panels + rows * p->d;
  w->values = w->keys + KEYS * p->d;
  w->scores = w->values + KEYS * c->room;
  w->rows_of_pages = w->scores + KEYS * GROUP;
  return memory;
}

static void forward_piece(void *context, int64_t begin, int64_t end) {
  forward_context *c = context;
  forward_work *w;
  size_t bytes;
  REAL *memory = forward_alloc(c, &w, &bytes);
  if (!memory) return;
  for (int64_t task = begin; task < end; task++) forward_task(c, task, w);
  ty_scratch_free(memory, bytes);
}

/* Joins the splits of each block, in order. */
static void join_piece(void *context, int64_t begin, int64_t end) {
  forward_context *c = context;
  const plan *p = c->plan;
  query rows[QUERIES];
  for (int64_t i = begin; i < end; i++) {
    int64_t at = i / c->blocks, b = at / p->kv_heads, width = c->room + 2;
    int n = block_rows(p, at % p->kv_heads, i % c->blocks, QUERIES, rows);
    for (int r = 0; r < n; r++) {
      REAL *first = c->partial + (i * c->splits * c->rows + r) * width, *part = first;
      REAL top = first[c->room];
      for (int64_t s = 1; s < c->splits; s++) {
        REAL m = first[s * c->rows * width + c->room];
        if (m > top) top = m;
      }
      REAL shift = top == (REAL)-INFINITY ? 0 : top;
      for (int64_t s = 0; s < c->splits; s++, part += c->rows * width) {
        REAL factor = part[c->room] == top ? 1 : exp_weight(part[c->room] - shift);
        if (s == 0)
          for (int64_t k = 0; k < c->room; k++) first[k] *= factor;
        else
          for (int64_t k = 0; k < c->room; k++) first[k] += part[k] * factor;
        first[c->room + 1] = s == 0 ? first[c->room + 1] * factor : first[c->room + 1] + part[c->room + 1] * factor;
      }
      finish_row(c, b, rows + r, first, top, first[c->room + 1]);
    }
  }
}

static bool forward(const plan *p, const ty_view *out, const ty_view *lse) {
  forward_context c = { .plan = p,
                        .out = out,
                        .lse = lse,
                        .blocks = blocks_of(p, QUERIES),
                        .splits = 1,
                        .split_keys = INT64_MAX / 2,
                        .room = padded(p->dv),
                        .rows = least(QUERIES, p->group * p->t) };
  int64_t blocks = p->batch * p->kv_heads * c.blocks;
  if (blocks == 0) return true;
  if (blocks < TASKS && p->s > 2 * SPLIT) {
    c.splits = least((TASKS + blocks - 1) / blocks, (p->s + SPLIT - 1) / SPLIT);
    c.split_keys = ((p->s + c.splits - 1) / c.splits + KEYS - 1) / KEYS * KEYS;
  }
  size_t bytes = (size_t)(blocks * c.splits * c.rows * (c.room + 2)) * sizeof(REAL);
  if (c.splits > 1 && !(c.partial = ty_scratch_alloc(bytes))) return false;
  int64_t work = c.rows * least(p->s, c.split_keys) * (p->d + p->dv);
  ty_parallel_for(blocks * c.splits, 1 + 200000 / (work + 1), forward_piece, &c);
  if (c.splits > 1) {
    if (!c.failed) ty_parallel_for(blocks, 1, join_piece, &c);
    ty_scratch_free(c.partial, bytes);
  }
  return !c.failed || ty_fail(TY_ENOMEM, "out of memory for the tiles of attention");
}
