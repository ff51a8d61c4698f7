/* Template: the backward pass. Included after attention_forward.h. With P the weights, G the output's gradient and
 * delta = rowsum(G y): dV = P' G, dS = P (G V' - delta), dQ = dS K, dK = dS' Q (Dao et al. 2022). A task owns one
 * key-value head and a share of its query rows; it walks the key tiles outside and the query blocks inside. */

/* The packed query rows of up to SPAN blocks of BACK_QUERIES. */
typedef struct backward_work {
  query *rows;
  int count[SPAN];
  int64_t low[SPAN], high[SPAN]; /* keys that a block sees */
  REAL *q_panels, *g_panels;     /* queries (scaled) and gradients, for products over d and dv */
  REAL *q, *g, *dq;              /* rows, padded */
  REAL *delta, *lse;
  REAL *keys, *values; /* the tile, across: [d][KEYS], [dv][KEYS] */
  REAL *key_rows;      /* the tile, along: [KEYS][d padded] */
  REAL *dk, *dv;       /* its gradients, along */
  REAL *p, *ds;        /* [BACK_QUERIES][KEYS] */
} backward_work;

typedef struct backward_context {
  const plan *plan;
  const gradients *a;
  int64_t blocks, shares, span, room,
      room_v;    /* blocks of a key-value head, in how many shares; at most `span` at a time */
  REAL *partial; /* with several shares: per task dk [s][d] and dv [s][dv] */
  bool failed;
} backward_context;

static void span_load(const backward_context *c, int64_t b, int64_t kv_head, int64_t first, int64_t n,
                      backward_work *w) {
  const plan *p = c->plan;
  const gradients *a = c->a;
  for (int64_t i = 0; i < n; i++) {
    query *rows = w->rows + i * BACK_QUERIES;
    w->count[i] = block_rows(p, kv_head, first + i, BACK_QUERIES, rows);
    reach(rows, w->count[i], &w->low[i], &w->high[i]);
    int64_t full = (w->count[i] + GROUP - 1) / GROUP * GROUP;
    for (int64_t r = 0; r < full; r++) {
      int64_t at = i * BACK_QUERIES + r;
      if (r >= w->count[i]) {
        clear_panel_row(w->q_panels, at, p->d);
        clear_panel_row(w->g_panels, at, p->dv);
        continue;
      }
      int64_t head = rows[r].head, pos = rows[r].pos;
      const REAL *q = (const REAL *)(const void *)element(p->q, b, head, pos, 0);
      const REAL *g = (const REAL *)(const void *)element(a->g, b, head, pos, 0);
      const REAL *y = (const REAL *)(const void *)element(a->y, b, head, pos, 0);
      pack_panel_row(w->q_panels, at, q, p->q->stride[3], p->d, (REAL)p->scale);
      pack_panel_row(w->g_panels, at, g, a->g->stride[3], p->dv, 1);
      pack_row(w->q + at * c->room, q, p->q->stride[3], p->d, c->room, (REAL)p->scale);
      pack_row(w->g + at * c->room_v, g, a->g->stride[3], p->dv, c->room_v, 1);
      REAL delta = 0;
      for (int64_t k = 0; k < p->dv; k++) delta += g[k * a->g->stride[3]] * y[k * a->y->stride[3]];
      const ty_view *lse = a->lse, *dlse = a->dlse;
      w->delta[at] = delta;
      if (dlse) /* dS = P (G V' - delta + dlse) */
        w->delta[at] -=
            ((const REAL *)dlse->data)[b * dlse->stride[0] + head * dlse->stride[1] + pos * dlse->stride[2]];
      w->lse[at] = ((const REAL *)lse->data)[b * lse->stride[0] + head * lse->stride[1] + pos * lse->stride[2]];
      if (w->lse[at] == (REAL)-INFINITY) rows[r].low = rows[r].high = 0;
    }
  }
}

/* Weights and dS of one row in columns [begin, end); zero in the rest of the tile, which the products over rows
 * read. bent: dS before the cap of the scores, as queries and keys want it and the mask does not. */
static inline void weights_row(const plan *p, int64_t b, const query *r, int64_t j0, int64_t begin, int64_t end,
                               REAL lse, REAL delta, bool bent, REAL *restrict s, REAL *restrict ds) {
  REAL slopes[KEYS];
  if (p->softcap > 0) cap_row(p, begin, end, s, slopes);
  limit_row(p, b, r, j0, begin, end, s);
  int64_t n = (end - begin) / LANES * LANES; /* known to the compiler now */
  REAL *restrict s0 = s + begin, *restrict ds0 = ds + begin;
#if defined(__AVX512F__) && LANES == 16
  for (int64_t j = 0; j < n; j += LANES) {
    __m512 weight = ty_exp_weights(_mm512_sub_ps(_mm512_loadu_ps(s0 + j), _mm512_set1_ps(lse)));
    _mm512_storeu_ps(s0 + j, weight);
    _mm512_storeu_ps(ds0 + j, _mm512_mul_ps(weight, _mm512_sub_ps(_mm512_loadu_ps(ds0 + j), _mm512_set1_ps(delta))));
  }
#else
#pragma omp simd
  for (int64_t j = 0; j < n; j++) {
    REAL weight = exp_weight(s0[j] - lse);
    s0[j] = weight;
    ds0[j] = weight * (ds0[j] - delta);
  }
#endif
  if (p->softcap > 0 && bent)
    for (int64_t j = 0; j < n; j++) ds0[j] *= slopes[begin + j];
  int64_t from = most_of(begin, r->low - j0), to = least(end, r->high - j0);
  /* What the row does not see stays out even where the hidden key holds NaN, or lse is -infinity. */
  if (to < from) from = to = KEYS;
  for (int64_t j = 0; j < from; j++) s[j] = ds[j] = 0;
  for (int64_t j = to; j < KEYS; j++) s[j] = ds[j] = 0;
  from = most_of(begin, r->gap_low - j0), to = least(end, r->gap_high - j0);
  for (int64_t j = from; j < to; j++) s[j] = ds[j] = 0;
}

/* Scores and their gradients of one query block in one key tile, then its part of dq. Says in `begins` and `ends`
 * which columns of each group of rows were computed. */
static void block_weights(const backward_context *c, int64_t b, int64_t i, int64_t j0, backward_work *w,
                          int64_t *begins, int64_t *ends) {
  const plan *p = c->plan;
  for (int first = 0; first < w->count[i]; first += GROUP) {
    int count = (int)least(GROUP, w->count[i] - first);
    int64_t at = i * BACK_QUERIES + first, low, high;
    const query *rows = w->rows + at;
    reach(rows, count, &low, &high);
    int64_t from = most_of(low - j0, 0), to = least(high - j0, KEYS);
    begins[first / GROUP] = ends[first / GROUP] = 0;
    if (from >= to || all_in_gap(rows, count, j0 + from, j0 + to)) continue;
    if (!mask_shows(p, b, rows, count, j0, from, to)) continue;
    int64_t begin = from / LANES * LANES, end = padded(to);
    begins[first / GROUP] = begin, ends[first / GROUP] = end;
    REAL *s = w->p + first * KEYS, *ds = w->ds + first * KEYS;
    product_scores(count, end - begin, p->d, w->q_panels + at * p->d, w->keys + begin, s + begin);
    product_scores(count, end - begin, p->dv, w->g_panels + at * p->dv, w->values + begin, ds + begin);
    for (int r = 0; r < count; r++)
      weights_row(p, b, rows + r, j0, begin, end, w->lse[at + r], w->delta[at + r], true, s + r * KEYS, ds + r * KEYS);
    product_queries(count, c->room, to - begin, ds + begin, w->key_rows + begin * c->room, w->dq + at * c->room);
  }
}

static void span_tile(const backward_context *c, int64_t b, int64_t kv_head, int64_t j0, int64_t n, backward_work *w,
                      REAL *dk, REAL *dv) {
  const plan *p = c->plan;
  int64_t keys = least(KEYS, p->s - j0);
  bool packed = false;
  for (int64_t i = 0; i < n; i++) {
    if (w->high[i] <= j0 || w->low[i] >= j0 + KEYS) continue;
    if (!packed) {
      const REAL *k = (const REAL *)(const void *)element(p->k, b, kv_head, j0, 0);
      const REAL *v = (const REAL *)(const void *)element(p->v, b, kv_head, j0, 0);
      pack_across(w->keys, k, p->k->stride[2], p->k->stride[3], keys, p->d);
      pack_across(w->values, v, p->v->stride[2], p->v->stride[3], keys, p->dv);
      pack_along(w->key_rows, k, p->k->stride[2], p->k->stride[3], keys, p->d, c->room);
      memset(w->dk, 0, (size_t)(KEYS * c->room) * sizeof(REAL));
      memset(w->dv, 0, (size_t)(KEYS * c->room_v) * sizeof(REAL));
      packed = true;
    }
    int64_t begins[BACK_QUERIES / GROUP], ends[BACK_QUERIES / GROUP];
    block_weights(c, b, i, j0, w, begins, ends);
    int groups = (w->count[i] + GROUP - 1) / GROUP;
    for (int64_t key = 0; key < keys; key += GROUP) {
      /* The rows in which these keys were computed; the groups between that were skipped must not be read. */
      for (int first = 0; first < groups;) {
        if (begins[first] >= key + GROUP || ends[first] <= key) {
          first++;
          continue;
        }
        int last = first;
        while (last < groups && begins[last] < key + GROUP && ends[last] > key) last++;
        int64_t row0 = first * GROUP, n_rows = least(last * GROUP, w->count[i]) - row0, at = i * BACK_QUERIES + row0;
        product_keys(c->room_v, n_rows, w->p + row0 * KEYS + key, w->g + at * c->room_v, w->dv + key * c->room_v);
        product_keys(c->room, n_rows, w->ds + row0 * KEYS + key, w->q + at * c->room, w->dk + key * c->room);
        first = last;
      }
    }
  }
  if (!packed) return;
  for (int64_t j = 0; j < keys; j++) {
    for (int64_t k = 0; k < p->d; k++) dk[(j0 + j) * p->d + k] += w->dk[j * c->room + k];
    for (int64_t k = 0; k < p->dv; k++) dv[(j0 + j) * p->dv + k] += w->dv[j * c->room_v + k];
  }
}

static void backward_task(const backward_context *c, int64_t task, backward_work *w) {
  const plan *p = c->plan;
  int64_t share = task % c->shares, head = task / c->shares, b = head / p->kv_heads, kv_head = head % p->kv_heads;
  REAL *dk, *dv;
  if (c->shares == 1) {
    dk = (REAL *)c->a->dk->data + head * p->s * p->d;
    dv = (REAL *)c->a->dv->data + head * p->s * p->dv;
  } else {
    dk = c->partial + task * p->s * (p->d + p->dv);
    dv = dk + p->s * p->d;
  }
  if (p->s && p->d) memset(dk, 0, (size_t)(p->s * p->d) * sizeof(REAL)); /* empty tensors have no memory */
  if (p->s && p->dv) memset(dv, 0, (size_t)(p->s * p->dv) * sizeof(REAL));
  int64_t stop = c->blocks * (share + 1) / c->shares;
  for (int64_t first = c->blocks * share / c->shares; first < stop; first += c->span) {
    int64_t n = least(c->span, stop - first);
    span_load(c, b, kv_head, first, n, w);
    memset(w->dq, 0, (size_t)(n * BACK_QUERIES * c->room) * sizeof(REAL));
    for (int64_t j0 = 0; j0 < p->s; j0 += KEYS) span_tile(c, b, kv_head, j0, n, w, dk, dv);
    for (int64_t i = 0; i < n; i++)
      for (int r = 0; r < w->count[i]; r++) {
        const query *at = w->rows + i * BACK_QUERIES + r;
        REAL *to = (REAL *)c->a->dq->data + ((b * p->heads + at->head) * p->t + at->pos) * p->d;
        const REAL *from = w->dq + (i * BACK_QUERIES + r) * c->room;
        for (int64_t k = 0; k < p->d; k++) to[k] = from[k] * (REAL)p->scale;
      }
  }
}

/* Memory for a span of `blocks`; NULL with c->failed set. */
static REAL *span_alloc(backward_context *c, int64_t blocks, backward_work *w, size_t *bytes) {
  const plan *p = c->plan;
  int64_t rows = blocks * BACK_QUERIES;
  int64_t elements = rows * (p->d + p->dv + 2 * c->room + c->room_v + 2) +
                     KEYS * (p->d + p->dv + 2 * c->room + c->room_v + 2 * BACK_QUERIES);
  *bytes = (size_t)elements * sizeof(REAL) + (size_t)rows * sizeof(query);
  REAL *memory = ty_scratch_alloc(*bytes), *at = memory;
  if (!memory) {
    __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
    return NULL;
  }
  w->keys = at, at += KEYS * p->d;
  w->values = at, at += KEYS * p->dv;
  w->key_rows = at, at += KEYS * c->room;
  w->dk = at, at += KEYS * c->room;
  w->dv = at, at += KEYS * c->room_v;
  w->p = at, at += KEYS * BACK_QUERIES;
  w->ds = at, at += KEYS * BACK_QUERIES;
  w->q_panels = at, at += rows * p->d;
  w->g_panels = at, at += rows * p->dv;
  w->q = at, at += rows * c->room;
  w->dq = at, at += rows * c->room;
  w->g = at, at += rows * c->room_v;
  w->delta = at, at += rows;
  w->lse = at, at += rows;
  w->rows = (query *)(void *)at;
  return memory;
}

static void backward_piece(void *context, int64_t begin, int64_t end) {
  backward_context *c = context;
  backward_work w;
  size_t bytes;
  REAL *memory = span_alloc(c, c->span, &w, &bytes);
  if (!memory) return;
  for (int64_t task = begin; task < end; task++) backward_task(c, task, &w);
  ty_scratch_free(memory, bytes);
}

/* Adds up the shares of each key-value head, in order. i counts rows of keys. */
static void collect_piece(void *context, int64_t begin, int64_t end) {
  backward_context *c = context;
  const plan *p = c->plan;
  for (int64_t i = begin; i < end; i++) {
    int64_t head = i / p->s, j = i % p->s;
    REAL *dk = (REAL *)c->a->dk->data + i * p->d, *dv = (REAL *)c->a->dv->data + i * p->dv;
    for (int64_t share = 0; share < c->shares; share++) {
      const REAL *from = c->partial + (head * c->shares + share) * p->s * (p->d + p->dv),
                 *from_v = from + p->s * p->d + j * p->dv;
      from += j * p->d;
      for (int64_t k = 0; k < p->d; k++) dk[k] = share ? dk[k] + from[k] : from[k];
      for (int64_t k = 0; k < p->dv; k++) dv[k] = share ? dv[k] + from_v[k] : from_v[k];
    }
  }
}

/* Adds what one block of queries of one head gives to part `at` of the mask's gradient. */
static void mask_block(const backward_context *c, int64_t b, int64_t head, int64_t kv_head, int64_t block, int64_t at,
                       backward_work *w) {
  const plan *p = c->plan;
  const ty_view *m = c->a->dmask;
  span_load(c, b, head, block, 1, w);
  for (int64_t j0 = w->low[0] / KEYS * KEYS; j0 < w->high[0]; j0 += KEYS) {
    int64_t keys = least(KEYS, p->s - j0);
    pack_across(w->keys, (const REAL *)(const void *)element(p->k, b, kv_head, j0, 0), p->k->stride[2], p->k->stride[3],
                keys, p->d);
    pack_across(w->values, (const REAL *)(const void *)element(p->v, b, kv_head, j0, 0), p->v->stride[2],
                p->v->stride[3], keys, p->dv);
    for (int r = 0; r < w->count[0]; r++) {
      const query *rows = w->rows + r;
      int64_t from = most_of(rows->low - j0, 0), to = least(rows->high - j0, KEYS), in_group = r % GROUP;
      if (in_group == 0) {
        int count = (int)least(GROUP, w->count[0] - r);
        product_scores(count, KEYS, p->d, w->q_panels + r * p->d, w->keys, w->p);
        product_scores(count, KEYS, p->dv, w->g_panels + r * p->dv, w->values, w->ds);
      }
      if (from >= to) continue;
      REAL *ds = w->ds + in_group * KEYS;
      weights_row(p, b, rows, j0, 0, KEYS, w->lse[r], w->delta[r], false, w->p + in_group * KEYS, ds);
      REAL *to_mask = (REAL *)m->data + (at * m->size[2] + (m->size[2] == 1 ? 0 : rows->pos)) * m->size[3];
      if (m->size[3] == 1)
        for (int64_t j = from; j < to; j++) to_mask[0] += ds[j];
      else
        for (int64_t j = from; j < to; j++) to_mask[j0 + j] += ds[j];
    }
  }
}

/* The gradient of an added mask, of which each element may serve many batches, heads, queries or keys. A task owns
 * the rows of the mask that one block of queries needs, or all of them when the queries share one. */
static void mask_piece(void *context, int64_t begin, int64_t end) {
  backward_context *c = context;
  const plan *p = c->plan;
  const ty_view *m = c->a->dmask;
  backward_work w;
  size_t bytes;
  REAL *memory = span_alloc(c, 1, &w, &bytes);
  if (!memory) return;
  plan one = *p; /* a group of one head: blocks within a head */
  one.group = 1;
  int64_t blocks = blocks_of(&one, BACK_QUERIES), batch_step = m->size[0], head_step = m->size[1];
  backward_context single = *c;
  single.plan = &one;
  for (int64_t task = begin; task < end; task++) {
    int64_t of_block = m->size[2] == 1 ? 1 : blocks, at = task / of_block;
    int64_t first = m->size[2] == 1 ? 0 : task % of_block, last = m->size[2] == 1 ? blocks : first + 1;
    for (int64_t b = at / head_step; b < p->batch; b += batch_step)
      for (int64_t h = at % head_step; h < p->heads; h += head_step)
        for (int64_t block = first; block < last; block++) mask_block(&single, b, h, h / p->group, block, at, &w);
  }
  ty_scratch_free(memory, bytes);
}

static bool backward(const plan *p, const gradients *a) {
  backward_context c = {
    .plan = p, .a = a, .blocks = blocks_of(p, BACK_QUERIES), .shares = 1, .room = padded(p->d), .room_v = padded(p->dv)
  };
  int64_t heads = p->batch * p->kv_heads;
  /* dk and dv exist once per share, so there are no more shares than it takes to keep several threads busy. */
  if (heads > 0 && heads < TASKS / 2) c.shares = most_of(1, least((TASKS + heads - 1) / heads, c.blocks / 4));
  c.span = most_of(1, least(SPAN, (c.blocks + c.shares - 1) / c.shares));
  size_t bytes = (size_t)(heads * c.shares * p->s * (p->d + p->dv)) * sizeof(REAL);
  if (c.shares > 1 && !(c.partial = ty_scratch_alloc(bytes))) return false;
  int64_t work = least(BACK_QUERIES * c.span, p->group * p->t) * p->s * (p->d + p->dv);
  ty_parallel_for(heads * c.shares, 1 + 100000 / (work + 1), backward_piece, &c);
  if (c.shares > 1) {
    if (!c.failed) ty_parallel_for(heads * p->s, 64, collect_piece, &c);
    ty_scratch_free(c.partial, bytes);
  }
  if (a->dmask && !c.failed) {
    memset(a->dmask->data, 0, (size_t)a->dmask->count * sizeof(REAL));
    plan one = *p;
    one.group = 1;
    int64_t blocks = a->dmask->size[2] == 1 ? 1 : blocks_of(&one, BACK_QUERIES);
    ty_parallel_for(a->dmask->size[0] * a->dmask->size[1] * blocks, 1, mask_piece, &c);
  }
  return !c.failed || ty_fail(TY_ENOMEM, "out of memory for the tiles of attention");
}
