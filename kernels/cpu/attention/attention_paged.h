/* Template: queries of many sequences, packed one after another, to the keys of their own, which lie in pages. Included
 * after attention_forward.h, whose tiles these are: each sequence is a plan. How a sequence is cut depends on its own
 * lengths alone, so that it comes out the same in every company. */

typedef struct paged_context {
  const ty_kernel_args *k;
  int64_t sequences;
  ty_view *q, *out; /* of each sequence */
  page_list *pages;
  plan *plans;
  forward_context *parts;
  int64_t *tasks, *blocks; /* before each sequence, and at the end in all */
  int64_t rows;            /* of the largest block */
  bool failed;
} paged_context;

/* Sequence i as a plan, after those before it; false after ty_fail(). */
static bool paged_plan(paged_context *c, int64_t i) {
  const ty_kernel_args *k = c->k;
  const ty_p_paged *params = k->params;
  const ty_view *q = k->in[0], *keys = k->in[1], *values = k->in[2], *pages = k->in[3];
  const int64_t *begins = k->in[4]->data, *lengths = k->in[5]->data, rows = q->size[0];
  const int64_t from = begins[i], t = begins[i + 1] - from, s = lengths[i], slots = keys->size[0] / params->page;
  if (from < 0 || t < 0 || begins[i + 1] > rows || begins[0] != 0 || begins[c->sequences] != rows)
    return ty_fail(TY_EINDEX, "cu_seqlens: index %lld is out of range for size %lld", (long long)begins[i + 1],
                   (long long)(rows + 1));
  if (s < t || s > pages->size[1] * params->page)
    return ty_fail(TY_EINDEX, "lengths: index %lld is out of range for size %lld", (long long)s,
                   (long long)(pages->size[1] * params->page + 1));
  const int64_t *numbers = (const int64_t *)pages->data + i * pages->size[1];
  for (int64_t j = 0; j < (s + params->page - 1) / params->page; j++)
    if (numbers[j] < 0 || numbers[j] >= slots)
      return ty_fail(TY_EINDEX, "pages: index %lld is out of range for size %lld", (long long)numbers[j],
                     (long long)slots);
  c->pages[i] = (page_list){ numbers, 1, params->page };
  const int64_t heads = q->size[1], d = q->size[2], dv = values->size[2];
  c->q[i] = (ty_view){ .dtype = q->dtype,
                       .ndim = 4,
                       .data = (REAL *)q->data + from * heads * d,
                       .size = { 1, heads, t, d },
                       .stride = { 0, d, heads * d, 1 } };
  c->out[i] = (ty_view){ .data = (REAL *)k->out[0]->data + from * heads * dv };
  const ty_p_attention how = {
    .scale = params->scale, .softcap = params->softcap, .causal = true, .window = params->window
  };
  c->plans[i] = (plan){ .q = &c->q[i],
                        .k = keys,
                        .v = values,
                        .pages = &c->pages[i],
                        .batch = 1,
                        .heads = heads,
                        .kv_heads = keys->size[1],
                        .group = keys->size[1] ? heads / keys->size[1] : 0,
                        .t = t,
                        .s = s,
                        .d = d,
                        .dv = dv,
                        .head_row = 1,
                        .pos_row = heads,
                        .scale = params->scale,
                        .softcap = params->softcap,
                        .reach = ty_reach_of(t, s, &how, NULL) };
  const plan *p = &c->plans[i];
  forward_context *f = &c->parts[i];
  *f = (forward_context){ .plan = p,
                          .out = &c->out[i],
                          .blocks = blocks_of(p, QUERIES),
                          .splits = 1,
                          .split_keys = INT64_MAX / 2,
                          .room = padded(dv),
                          .rows = least(QUERIES, p->group * t) };
  if (f->blocks == 1 && s > 2 * SPLIT) {
    f->splits = (s + SPLIT - 1) / SPLIT;
    f->split_keys = ((s + f->splits - 1) / f->splits + KEYS - 1) / KEYS * KEYS;
  }
  c->rows = most_of(c->rows, f->rows);
  const int64_t blocks = f->blocks * p->kv_heads;
  c->blocks[i + 1] = c->blocks[i] + (f->splits > 1 ? blocks : 0);
  c->tasks[i + 1] = c->tasks[i] + blocks * f->splits;
  return true;
}

/* The sequence to which number `at` of all belongs, where each one's begin. */
static int64_t paged_place(const int64_t *begins, int64_t n, int64_t at) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    if (begins[middle] <= at) low = middle;
    else high = middle;
  }
  return low;
}

static void paged_piece(void *context, int64_t begin, int64_t end) {
  paged_context *c = context;
  forward_context most = c->parts[0]; /* whose memory is large enough for all */
  most.rows = c->rows;
  forward_work *w;
  size_t bytes;
  REAL *memory = forward_alloc(&most, &w, &bytes);
  if (!memory) {
    __atomic_store_n(&c->failed, true, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t at = begin; at < end; at++) {
    const int64_t i = paged_place(c->tasks, c->sequences, at);
    forward_task(&c->parts[i], at - c->tasks[i], w);
  }
  ty_scratch_free(memory, bytes);
}

static void paged_join_piece(void *context, int64_t begin, int64_t end) {
  paged_context *c = context;
  for (int64_t at = begin; at < end; at++) {
    const int64_t i = paged_place(c->blocks, c->sequences, at);
    join_piece(&c->parts[i], at - c->blocks[i], at - c->blocks[i] + 1);
  }
}

/* in: q [n, h, d] in REAL, k, v, pages, cu_seqlens, lengths; out: [n, h, dv]. */
static bool paged(const ty_kernel_args *k) {
  paged_context c = { .k = k, .sequences = k->in[5]->size[0], .rows = 1 };
  const size_t n = (size_t)c.sequences;
  const size_t each = sizeof(ty_view) * 2 + sizeof(page_list) + sizeof(plan) + sizeof(forward_context);
  const size_t bytes = n * each + 2 * (n + 1) * sizeof(int64_t);
  char *memory = ty_scratch_alloc(bytes), *at = memory;
  if (!memory) return ty_fail(TY_ENOMEM, "out of memory for %lld sequences", (long long)c.sequences);
  c.q = (ty_view *)(void *)at, at += n * sizeof *c.q;
  c.out = (ty_view *)(void *)at, at += n * sizeof *c.out;
  c.plans = (plan *)(void *)at, at += n * sizeof *c.plans;
  c.parts = (forward_context *)(void *)at, at += n * sizeof *c.parts;
  c.pages = (page_list *)(void *)at, at += n * sizeof *c.pages;
  c.tasks = (int64_t *)(void *)at, c.blocks = c.tasks + n + 1;
  c.tasks[0] = c.blocks[0] = 0;
  bool ok = true;
  int64_t numbers = 0, work = 1; /* what splits are kept in */
  for (int64_t i = 0; i < c.sequences && ok; i++) {
    ok = paged_plan(&c, i);
    const forward_context *f = &c.parts[i];
    if (ok && f->splits > 1) numbers += f->blocks * f->plan->kv_heads * f->splits * f->rows * (f->room + 2);
    if (ok) work += f->rows * least(f->plan->s, f->split_keys) * (f->plan->d + f->plan->dv);
  }
  REAL *partial = ok && numbers ? ty_scratch_alloc((size_t)numbers * sizeof(REAL)) : NULL;
  if (ok && numbers && !partial) ok = ty_fail(TY_ENOMEM, "out of memory for the parts of attention");
  REAL *next = partial;
  for (int64_t i = 0; i < c.sequences && partial; i++) {
    forward_context *f = &c.parts[i];
    if (f->splits == 1) continue;
    f->partial = next;
    next += f->blocks * f->plan->kv_heads * f->splits * f->rows * (f->room + 2);
  }
  const int64_t tasks = ok ? c.tasks[c.sequences] : 0;
  if (tasks) {
    ty_parallel_for(tasks, 1 + 200000 / (work / tasks + 1), paged_piece, &c);
    if (!c.failed && c.blocks[c.sequences]) ty_parallel_for(c.blocks[c.sequences], 1, paged_join_piece, &c);
    if (c.failed) ok = ty_fail(TY_ENOMEM, "out of memory for the tiles of attention");
  }
  if (partial) ty_scratch_free(partial, (size_t)numbers * sizeof(REAL));
  ty_scratch_free(memory, bytes);
  return ok;
}
