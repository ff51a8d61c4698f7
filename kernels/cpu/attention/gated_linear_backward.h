/* Template: the backward pass. Included after gated_linear_real.h. With G the gradient of o, S the state before a chunk
 * and D that of the state behind it, a token's part of the gradients through the states is
 *   dq = since * (S G'), dk = until * (D v'), dv = (until * k) D,
 * and what tokens of a chunk do to each other comes to it, from the scores G v' and the weights. As g decays all that
 * comes before from all that comes after, dg[t] is the sum of q * dq - k * dk over all tokens from t on plus what the
 * last state gives (Yang et al. 2024, section C); a token's effect on itself is left out of both, where it would only
 * cancel. One walk forward recomputes S for dq, one back carries D for the rest. */

#define backward FN(backward)
#define from_keys FN(from_keys)
#define from_queries FN(from_queries)
#define walk_back FN(walk_back)
#define walk_on FN(walk_on)
#define weigh_states FN(weigh_states)

/* y[i] += sum over j < i of w[i][j] * the decay from j to i * k[j], rows. */
static void from_keys(int64_t room, const REAL *w, const REAL *k, const REAL *decay, REAL *y) {
  for (int64_t d = 0; d < room; d += LANES) {
    VEC keys[CHUNK];
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK; i++) {
      VEC a = *(const VEC *)(decay + i * room + d), sum = *(const VEC *)(y + i * room + d);
#pragma GCC unroll 16
      for (int j = 0; j < i; j++) {
        keys[j] *= a;
        sum += w[i * CHUNK + j] * keys[j];
      }
      keys[i] = *(const VEC *)(k + i * room + d);
      *(VEC *)(y + i * room + d) = sum;
    }
  }
}

/* y[j] += sum over i > j of w[i][j] * the decay from j to i * q[i]. */
static void from_queries(int64_t room, const REAL *w, const REAL *q, const REAL *decay, REAL *y) {
  for (int64_t d = 0; d < room; d += LANES) {
    VEC queries[CHUNK], a = { 0 };
#pragma GCC unroll 16
    for (int j = CHUNK - 1; j >= 0; j--) {
      VEC sum = *(const VEC *)(y + j * room + d);
#pragma GCC unroll 16
      for (int i = j + 1; i < CHUNK; i++) {
        queries[i] *= a;
        sum += w[i * CHUNK + j] * queries[i];
      }
      queries[j] = *(const VEC *)(q + j * room + d);
      a = *(const VEC *)(decay + j * room + d);
      *(VEC *)(y + j * room + d) = sum;
    }
  }
}

/* dq, the scores and the states at the end of spans; q * dq stays in dg. */
static void walk_on(const context *c, const line *l, work *w) {
  const plan *p = c->plan;
  int64_t room = p->room_k, columns = p->room_v, span = 0;
  REAL *scores = w->scores;
  load_state(w->state, p, p->state, l);
  for (int64_t t = l->begin; t < l->end; t += CHUNK, scores += CHUNK * CHUNK) {
    int64_t n = least(CHUNK, l->end - t);
    load_chunk(p, l, t, n, w);
    load_rows(w->go, c->go, l, t, n, p->dv, columns, 1);
    panel_of(w->panels[0], w->go, columns);
    panel_of(w->panels[1], w->v, columns);
    panel_times(CHUNK, CHUNK, columns, w->panels[0], w->panels[1], scores);
    state_times(room, columns, w->state, w->panels[0], w->panels[2]);
    rows_of(w->out, w->panels[2], room);
    for (int64_t i = 0; i < CHUNK * room; i++) w->out[i] *= w->since[i];
    from_keys(room, scores, w->k, w->decay, w->out);
    for (int64_t i = 0; i < CHUNK; i++) {
      REAL own = scores[i * CHUNK + i], scale = (REAL)p->scale;
      for (int64_t d = 0; d < room; d++) {
        w->into[i * room + d] = w->q[i * room + d] * w->out[i * room + d];
        w->out[i * room + d] = scale * (w->out[i * room + d] + own * w->k[i * room + d]);
      }
    }
    store_rows(c->dq, l, t, n, w->out, room);
    store_rows(c->dg, l, t, n, w->into, room);
    move_state(room, columns, n, w->onto, w->whole, w->v, w->state);
    if ((t - l->begin) / CHUNK % SPAN == SPAN - 1 && t + CHUNK < l->end) {
      memcpy(w->spans + span * room * columns, w->state, (size_t)(room * columns) * sizeof(REAL));
      span++;
    }
  }
}

/* What the gates of all tokens so far do to the result by way of this state. */
static void weigh_states(const plan *p, const REAL *state, work *w) {
  for (int64_t d = 0; d < p->room_k; d++) {
    REAL sum = 0;
    const REAL *s = state + d * p->room_v, *ds = w->dstate + d * p->room_v;
    int64_t n = p->room_v / CHUNK * CHUNK; /* known to the compiler now */
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) sum += s[j] * ds[j];
    w->running[d] = sum;
  }
}

/* The rest, from the end. */
static void walk_back(const context *c, const line *l, work *w) {
  const plan *p = c->plan;
  int64_t room = p->room_k, columns = p->room_v, dk = p->dk, chunks = (l->end - l->begin + CHUNK - 1) / CHUNK;
  load_state(w->dstate, p, c->dstate, l);
  weigh_states(p, w->state, w);
  for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
    int64_t t = l->begin + chunk * CHUNK, n = least(CHUNK, l->end - t);
    const REAL *scores = w->scores + chunk * CHUNK * CHUNK;
    if (chunk % SPAN == SPAN - 1 && chunk < chunks - 1) weigh_states(p, w->spans + chunk / SPAN * room * columns, w);
    load_chunk(p, l, t, n, w);
    load_rows(w->go, c->go, l, t, n, p->dv, columns, 1);
    panel_of(w->panels[0], w->q, room);
    panel_of(w->panels[1], w->k, room);
    panel_of(w->panels[2], w->decay, room);
    weights(room, w->panels[0], w->panels[1], w->panels[2], w->weights);
    panel_of(w->panels[3], w->onto, room);
    panel_times(CHUNK, columns, room, w->panels[3], w->dstate, w->out);
    add_weighted_back(columns, w->weights, w->go, w->out);
    store_rows(c->dv, l, t, n, w->out, columns);

    panel_of(w->panels[0], w->v, columns);
    state_times(room, columns, w->dstate, w->panels[0], w->panels[1]);
    rows_of(w->out, w->panels[1], room);
    for (int64_t i = 0; i < CHUNK * room; i++) w->out[i] *= w->until[i];
    from_queries(room, scores, w->q, w->decay, w->out);
    for (int64_t i = n - 1; i >= 0; i--) {
      REAL own = scores[i * CHUNK + i];
      REAL *dg = (REAL *)c->dg->data + ((l->row * p->heads + l->head) * p->length + t + i) * dk;
      for (int64_t d = 0; d < dk; d++) {
        w->running[d] += dg[d] - w->k[i * room + d] * w->out[i * room + d];
        dg[d] = w->running[d];
        w->out[i * room + d] += own * w->q[i * room + d];
      }
    }
    store_rows(c->dk, l, t, n, w->out, room);
    move_state(room, columns, n, w->into, w->whole, w->go, w->dstate);
  }
  store_state(c->ds, p, l, w->dstate);
}

static void backward(void *given, int64_t begin, int64_t end) {
  context *c = given;
  const plan *p = c->plan;
  work w;
  size_t bytes;
  int64_t chunks = (p->length + CHUNK - 1) / CHUNK, spans = chunks / SPAN * p->room_k * p->room_v;
  REAL *memory = work_alloc(c, spans + chunks * CHUNK * CHUNK, &w, &bytes);
  if (!memory) return;
  w.scores = w.spans + spans;
  for (int64_t task = begin; task < end; task++) {
    line l = line_of(p, task);
    walk_on(c, &l, &w);
    walk_back(c, &l, &w);
  }
  ty_scratch_free(memory, bytes);
}
