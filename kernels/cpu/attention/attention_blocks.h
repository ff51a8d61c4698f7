/* Template: attention of a block of queries to listed blocks of keys. The listed keys and values are gathered and the
 * block is an attention of its own; what is not listed costs nothing. Included after attention_backward.h. */

typedef struct blocks_context {
  const plan *plan;
  const block_lists *lists;
  const ty_view *out, *lse;
  const gradients *a;
  int64_t shares; /* of a key-value head's blocks of queries, each with its own sums for the keys */
  REAL *partial;  /* with several shares: per task dk [s][d] and dv [s][dv] */
  bool failed;
} blocks_context;

/* One block of queries as a problem of its own, and where its keys are gathered. */
typedef struct blocks_own {
  plan plan;
  ty_view q, k, v;
  REAL *keys, *values;
} blocks_own;

/* The rows of one block of queries of a view [b, h, t, width] or [b, h, t]. */
static ty_view blocks_rows(const ty_view *v, int64_t b, int64_t head, int64_t first, int64_t n) {
  ty_view x = *v;
  size_t bytes = (size_t)(b * v->stride[0] + head * v->stride[1] + first * v->stride[2]) * sizeof(REAL);
  x.data = v->data ? (char *)v->data + bytes : NULL;
  x.size[0] = x.size[1] = 1, x.size[2] = n;
  return x;
}

static void blocks_copy(REAL *to, const ty_view *v, int64_t b, int64_t kv_head, int64_t j, int64_t n, int64_t width) {
  int64_t step = v->stride[3];
  if (width == 0) return; /* an empty tensor has no memory */
  for (int64_t i = 0; i < n; i++, to += width) {
    const REAL *from = (const REAL *)(const void *)element(v, b, kv_head, j + i, 0);
    if (step == 1) memcpy(to, from, (size_t)width * sizeof(REAL));
    else
      for (int64_t k = 0; k < width; k++) to[k] = from[k * step];
  }
}

static inline int64_t blocks_entry(const blocks_context *c, int64_t b, int64_t head, int64_t block, int64_t at) {
  return *(const int64_t *)(const void *)element(c->lists->list, b, head, block, at);
}

/* Keys from `j` on that a listed block has. */
static inline int64_t blocks_keys(const blocks_context *c, int64_t j) {
  return least(c->lists->key_block, c->plan->s - j);
}

static void blocks_gather(const blocks_context *c, int64_t b, int64_t head, int64_t block, blocks_own *x) {
  const plan *p = c->plan;
  const block_lists *l = c->lists;
  int64_t first = block * l->query_block, rows = least(l->query_block, p->t - first), n = 0;
  for (int64_t at = 0; at < l->kept; at++) {
    int64_t number = blocks_entry(c, b, head, block, at), j = number * l->key_block;
    if (number < 0) continue;
    int64_t keys = blocks_keys(c, j);
    blocks_copy(x->keys + n * p->d, p->k, b, head / p->group, j, keys, p->d);
    blocks_copy(x->values + n * p->dv, p->v, b, head / p->group, j, keys, p->dv);
    n += keys;
  }
  x->q = blocks_rows(p->q, b, head, first, rows);
  x->k = (ty_view){
    .data = x->keys, .dtype = p->k->dtype, .ndim = 4, .size = { 1, 1, n, p->d }, .stride = { 0, 0, p->d, 1 }
  };
  x->v = (ty_view){
    .data = x->values, .dtype = p->v->dtype, .ndim = 4, .size = { 1, 1, n, p->dv }, .stride = { 0, 0, p->dv, 1 }
  };
  x->plan = (plan){ .q = &x->q,
                    .k = &x->k,
                    .v = &x->v,
                    .batch = 1,
                    .heads = 1,
                    .kv_heads = 1,
                    .group = 1,
                    .t = rows,
                    .head_row = rows,
                    .pos_row = 1,
                    .s = n,
                    .d = p->d,
                    .dv = p->dv,
                    .scale = p->scale,
                    .reach = { .s = n, .window = -1 } };
}

static REAL *blocks_alloc(blocks_context *c, int64_t widths, size_t *bytes) {
  const block_lists *l = c->lists;
  *bytes = (size_t)(l->kept * least(l->key_block, c->plan->s) * widths + 1) * sizeof(REAL);
  REAL *memory = ty_scratch_alloc(*bytes);
  if (!memory) __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
  return memory;
}

static void blocks_forward_piece(void *context, int64_t begin, int64_t end) {
  blocks_context *c = context;
  const plan *p = c->plan;
  blocks_own x;
  forward_context f = { .plan = &x.plan, .splits = 1, .split_keys = INT64_MAX / 2, .room = padded(p->dv) };
  f.rows = least(QUERIES, least(c->lists->query_block, p->t));
  x.plan = *p; /* the widths, which the memory is measured by */
  forward_work *w;
  size_t bytes, gathered;
  REAL *memory = forward_alloc(&f, &w, &bytes), *room = blocks_alloc(c, p->d + p->dv, &gathered);
  if (f.failed) __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
  if (memory && room) {
    x.keys = room, x.values = room + c->lists->kept * least(c->lists->key_block, p->s) * p->d;
    for (int64_t task = begin; task < end; task++) {
      int64_t block = task % c->lists->queries, head = task / c->lists->queries % p->heads;
      int64_t b = task / c->lists->queries / p->heads, first = block * c->lists->query_block;
      blocks_gather(c, b, head, block, &x);
      ty_view out = blocks_rows(c->out, b, head, first, x.plan.t), lse = blocks_rows(c->lse, b, head, first, x.plan.t);
      f.out = &out, f.lse = &lse, f.blocks = blocks_of(&x.plan, QUERIES);
      for (int64_t i = 0; i < f.blocks; i++) forward_task(&f, i, w);
    }
  }
  if (memory) ty_scratch_free(memory, bytes);
  if (room) ty_scratch_free(room, gathered);
}

static bool blocks_forward(const plan *p, const block_lists *lists, const ty_view *out, const ty_view *lse) {
  blocks_context c = { .plan = p, .lists = lists, .out = out, .lse = lse };
  int64_t tasks = p->batch * p->heads * lists->queries;
  int64_t work = lists->query_block * lists->kept * lists->key_block * (p->d + p->dv);
  if (tasks) ty_parallel_for(tasks, 1 + 200000 / (work + 1), blocks_forward_piece, &c);
  return !c.failed || ty_fail(TY_ENOMEM, "out of memory for the tiles of attention");
}

/* A task is a share of the blocks of queries of all heads of a key-value head, one after the other. */
static void blocks_backward_piece(void *context, int64_t begin, int64_t end) {
  blocks_context *c = context;
  const plan *p = c->plan;
  const block_lists *l = c->lists;
  blocks_own x = { .plan = *p };
  gradients own;
  backward_context f = { .plan = &x.plan, .a = &own, .shares = 1, .room = padded(p->d), .room_v = padded(p->dv) };
  f.span = least(SPAN, (least(l->query_block, p->t) + BACK_QUERIES - 1) / BACK_QUERIES);
  backward_work w;
  size_t bytes, gathered;
  REAL *memory = span_alloc(&f, f.span, &w, &bytes), *room = blocks_alloc(c, 2 * (p->d + p->dv), &gathered);
  if (f.failed) __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
  int64_t most = l->kept * least(l->key_block, p->s);
  for (int64_t task = begin; memory && room && task < end; task++) {
    int64_t share = task % c->shares, at = task / c->shares, b = at / p->kv_heads, kv_head = at % p->kv_heads;
    REAL *dk = (REAL *)c->a->dk->data + at * p->s * p->d, *dv = (REAL *)c->a->dv->data + at * p->s * p->dv;
    if (c->shares > 1) dk = c->partial + task * p->s * (p->d + p->dv), dv = dk + p->s * p->d;
    if (p->s && p->d) memset(dk, 0, (size_t)(p->s * p->d) * sizeof(REAL)); /* empty tensors have no memory */
    if (p->s && p->dv) memset(dv, 0, (size_t)(p->s * p->dv) * sizeof(REAL));
    int64_t n = p->group * l->queries, stop = n * (share + 1) / c->shares;
    for (int64_t i = n * share / c->shares; i < stop; i++) {
      int64_t head = kv_head * p->group + i / l->queries, block = i % l->queries, first = block * l->query_block;
      x.keys = room, x.values = room + most * p->d;
      blocks_gather(c, b, head, block, &x);
      ty_view g = blocks_rows(c->a->g, b, head, first, x.plan.t), y = blocks_rows(c->a->y, b, head, first, x.plan.t);
      ty_view lse = blocks_rows(c->a->lse, b, head, first, x.plan.t), dlse;
      ty_view dq = blocks_rows(c->a->dq, b, head, first, x.plan.t), dk_own = x.k, dv_own = x.v;
      if (c->a->dlse) dlse = blocks_rows(c->a->dlse, b, head, first, x.plan.t);
      dk_own.data = room + most * (p->d + p->dv), dv_own.data = room + most * (2 * p->d + p->dv);
      own = (gradients){
        .g = &g, .y = &y, .lse = &lse, .dlse = c->a->dlse ? &dlse : NULL, .dq = &dq, .dk = &dk_own, .dv = &dv_own
      };
      f.blocks = blocks_of(&x.plan, BACK_QUERIES);
      backward_task(&f, 0, &w);
      const REAL *from = dk_own.data, *from_v = dv_own.data;
      for (int64_t entry = 0; entry < l->kept; entry++) {
        int64_t number = blocks_entry(c, b, head, block, entry), j = number * l->key_block;
        if (number < 0) continue;
        int64_t keys = blocks_keys(c, j);
        for (int64_t k = 0; k < keys * p->d; k++) dk[j * p->d + k] += from[k];
        for (int64_t k = 0; k < keys * p->dv; k++) dv[j * p->dv + k] += from_v[k];
        from += keys * p->d, from_v += keys * p->dv;
      }
    }
  }
  if (memory) ty_scratch_free(memory, bytes);
  if (room) ty_scratch_free(room, gathered);
}

static bool blocks_backward(const plan *p, const block_lists *lists, const gradients *a) {
  blocks_context c = { .plan = p, .lists = lists, .a = a, .shares = 1 };
  int64_t heads = p->batch * p->kv_heads, n = p->group * lists->queries;
  if (heads > 0 && heads < TASKS / 2) c.shares = most_of(1, least((TASKS + heads - 1) / heads, n / 16));
  size_t bytes = (size_t)(heads * c.shares * p->s * (p->d + p->dv)) * sizeof(REAL);
  if (c.shares > 1 && !(c.partial = ty_scratch_alloc(bytes))) return false;
  if (heads) ty_parallel_for(heads * c.shares, 1, blocks_backward_piece, &c);
  if (c.shares > 1) {
    backward_context collect = { .plan = p, .a = a, .shares = c.shares, .partial = c.partial };
    if (!c.failed) ty_parallel_for(heads * p->s, 64, collect_piece, &collect);
    ty_scratch_free(c.partial, bytes);
  }
  return !c.failed || ty_fail(TY_ENOMEM, "out of memory for the tiles of attention");
}
