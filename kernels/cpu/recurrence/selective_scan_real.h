/* Template (no guard: selective_scan.c includes it once per element type). Of a block of channels, rows are [WIDTH] and
 * states [states][WIDTH]; channels that a block lacks are zero. */

#define advance FN(advance)
#define backward FN(backward)
#define backward_block FN(backward_block)
#define exp_weight FN(ty_exp_weight)
#define fetch FN(fetch)
#define fetch_turned FN(fetch_turned)
#define forward FN(forward)
#define forward_block FN(forward_block)
#define retreat FN(retreat)
#define store_turned FN(store_turned)
#define sum_a FN(sum_a)
#define sum_rows FN(sum_rows)

/* WIDTH neighbours of which there are `count`. */
static void fetch(REAL *to, const REAL *from, int64_t count) {
  for (int64_t j = 0; j < WIDTH; j++) to[j] = j < count ? from[j] : 0;
}

/* Channels by states [count][states] to states by channels; NULL: zeros. */
static void fetch_turned(REAL *to, const REAL *from, int64_t count, int64_t states) {
  for (int64_t i = 0; i < states; i++)
    for (int64_t j = 0; j < WIDTH; j++) to[i * WIDTH + j] = from && j < count ? from[j * states + i] : 0;
}

static void store_turned(REAL *to, const REAL *from, int64_t count, int64_t states) {
  for (int64_t j = 0; j < count; j++)
    for (int64_t i = 0; i < states; i++) to[j * states + i] = from[i * WIDTH + j];
}

/* One token: the states before it become those behind it (`to` may be `from`); decay: where exp(delta a) goes, or NULL;
 * y: where what c reads is added, or NULL. */
static inline void advance(REAL *to, const REAL *from, const REAL *restrict a, const REAL *restrict delta,
                           const REAL *restrict added, const REAL *restrict b, const REAL *restrict c, int64_t states,
                           REAL *restrict decay, REAL *restrict y) {
  for (int64_t i = 0; i < states; i++) {
    const REAL *restrict row = a + i * WIDTH;
    const REAL *before = from + i * WIDTH;
    REAL *behind = to + i * WIDTH, in = b[i], out = c[i];
    if (decay) {
      REAL *restrict kept = decay + i * WIDTH;
      _Pragma("omp simd") for (int j = 0; j < WIDTH; j++) {
        REAL e = exp_weight(delta[j] * row[j]);
        kept[j] = e;
        behind[j] = e * before[j] + added[j] * in;
      }
    } else if (y) {
      _Pragma("omp simd") for (int j = 0; j < WIDTH; j++) {
        REAL h = exp_weight(delta[j] * row[j]) * before[j] + added[j] * in;
        behind[j] = h;
        y[j] += h * out;
      }
    } else {
      _Pragma("omp simd") for (int j = 0; j < WIDTH; j++)
          behind[j] = exp_weight(delta[j] * row[j]) * before[j] + added[j] * in;
    }
  }
}

static void forward_block(const context *k, int64_t at, int64_t block, REAL *memory) {
  int64_t n = k->states, d = k->channels, first = block * WIDTH, count = d - first < WIDTH ? d - first : WIDTH;
  const REAL *u = k->in[0]->data, *delta = k->in[1]->data, *a = k->in[2]->data, *b = k->in[3]->data;
  const REAL *c = k->in[4]->data, *state = k->in[5] ? k->in[5]->data : NULL;
  REAL *y = k->out[0]->data, *last = k->out[1]->data, *rates = memory, *h = memory + n * WIDTH;
  REAL step[WIDTH], added[WIDTH], result[WIDTH];
  int64_t corner = (at * d + first) * n;
  fetch_turned(rates, a + first * n, count, n);
  fetch_turned(h, state ? state + corner : NULL, count, n);
  for (int64_t t = 0; t < k->length; t++) {
    int64_t token = at * k->length + t;
    fetch(step, delta + token * d + first, count);
    fetch(added, u + token * d + first, count);
    for (int j = 0; j < WIDTH; j++) added[j] *= step[j], result[j] = 0;
    advance(h, h, rates, step, added, b + token * n, c + token * n, n, NULL, result);
    memcpy(y + token * d + first, result, (size_t)count * sizeof(REAL));
  }
  store_turned(last + corner, h, count, n);
}

static void forward(void *given, int64_t begin, int64_t end) {
  context *k = given;
  size_t bytes = (size_t)(2 * k->states * WIDTH + 1) * sizeof(REAL);
  REAL *memory = room(k, bytes);
  if (!memory) return;
  for (int64_t task = begin; task < end; task++) forward_block(k, task / k->blocks, task % k->blocks, memory);
  ty_scratch_free(memory, bytes);
}

/* One token back. g: the gradient of the states behind it, without what it reads itself; becomes that of the states
 * before it. h, before: the states behind and before it. */
static inline void retreat(REAL *restrict g, REAL *restrict da, const REAL *restrict a, const REAL *restrict decay,
                           const REAL *restrict h, const REAL *restrict before, const REAL *restrict step,
                           const REAL *restrict added, const REAL *restrict dy, const REAL *restrict b,
                           const REAL *restrict c, int64_t states, REAL *restrict into, REAL *restrict slope,
                           REAL *restrict db, REAL *restrict dc) {
  for (int64_t i = 0; i < states; i++) {
    int64_t row = i * WIDTH;
    REAL in = b[i], out = c[i], by_in = 0, by_out = 0;
    _Pragma("omp simd reduction(+ : by_in, by_out)") for (int j = 0; j < WIDTH; j++) {
      REAL all = g[row + j] + out * dy[j], held = all * decay[row + j], rate = held * before[row + j];
      by_out += h[row + j] * dy[j];
      by_in += all * added[j];
      into[j] += all * in;
      slope[j] += rate * a[row + j];
      da[row + j] += rate * step[j];
      g[row + j] = held;
    }
    db[i] += by_in;
    dc[i] += by_out;
  }
}

static void backward_block(const context *k, int64_t at, int64_t block, REAL *db, REAL *dc, REAL *memory) {
  int64_t n = k->states, d = k->channels, first = block * WIDTH, count = d - first < WIDTH ? d - first : WIDTH;
  int64_t size = n * WIDTH, chunks = (k->length + CHUNK - 1) / CHUNK, corner = (at * d + first) * n;
  const REAL *u = k->in[0]->data, *delta = k->in[1]->data, *a = k->in[2]->data, *b = k->in[3]->data;
  const REAL *c = k->in[4]->data, *state = k->in[5] ? k->in[5]->data : NULL;
  const REAL *dy = k->in[6]->data, *dlast = k->in[7] ? k->in[7]->data : NULL;
  REAL *du = k->out[0]->data, *ddelta = k->out[1]->data, *dstate = k->out[5]->data;
  REAL *rates = memory, *da = rates + size, *g = da + size, *decay = g + size, *h = decay + CHUNK * size;
  REAL *starts = h + (CHUNK + 1) * size; /* [chunks]: the states before each chunk */
  REAL step[WIDTH], value[WIDTH], added[WIDTH], above[WIDTH], into[WIDTH], slope[WIDTH];
  fetch_turned(rates, a + first * n, count, n);
  fetch_turned(g, dlast ? dlast + corner : NULL, count, n);
  memset(da, 0, (size_t)size * sizeof(REAL));
  fetch_turned(h, state ? state + corner : NULL, count, n);
  for (int64_t t = 0; t < k->length; t++) {
    int64_t token = at * k->length + t;
    if (t % CHUNK == 0) memcpy(starts + t / CHUNK * size, h, (size_t)size * sizeof(REAL));
    if (t >= (chunks - 1) * CHUNK) break; /* the last chunk is walked below */
    fetch(step, delta + token * d + first, count);
    fetch(added, u + token * d + first, count);
    for (int j = 0; j < WIDTH; j++) added[j] *= step[j];
    advance(h, h, rates, step, added, b + token * n, c + token * n, n, NULL, NULL);
  }
  for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
    int64_t begin = chunk * CHUNK, end = begin + CHUNK < k->length ? begin + CHUNK : k->length;
    memcpy(h, starts + chunk * size, (size_t)size * sizeof(REAL));
    for (int64_t t = begin; t < end; t++) {
      int64_t token = at * k->length + t, i = t - begin;
      fetch(step, delta + token * d + first, count);
      fetch(added, u + token * d + first, count);
      for (int j = 0; j < WIDTH; j++) added[j] *= step[j];
      advance(h + (i + 1) * size, h + i * size, rates, step, added, b + token * n, c + token * n, n, decay + i * size,
              NULL);
    }
    for (int64_t t = end - 1; t >= begin; t--) {
      int64_t token = at * k->length + t, i = t - begin;
      fetch(step, delta + token * d + first, count);
      fetch(value, u + token * d + first, count);
      fetch(above, dy + token * d + first, count);
      for (int j = 0; j < WIDTH; j++) added[j] = value[j] * step[j], into[j] = 0, slope[j] = 0;
      retreat(g, da, rates, decay + i * size, h + (i + 1) * size, h + i * size, step, added, above, b + token * n,
              c + token * n, n, into, slope, db + token * n, dc + token * n);
      for (int64_t j = 0; j < count; j++) {
        du[token * d + first + j] = step[j] * into[j];
        ddelta[token * d + first + j] = value[j] * into[j] + slope[j];
      }
    }
  }
  store_turned(dstate + corner, g, count, n);
  store_turned((REAL *)k->partial + 2 * k->groups * k->batch * k->length * n + corner, da, count, n);
}

static void backward(void *given, int64_t begin, int64_t end) {
  context *k = given;
  int64_t chunks = (k->length + CHUNK - 1) / CHUNK, rows = k->length * k->states;
  size_t bytes = (size_t)((2 * CHUNK + 4 + chunks) * k->states * WIDTH + 1) * sizeof(REAL);
  REAL *memory = room(k, bytes), *db = k->partial, *dc = db + k->groups * k->batch * rows;
  if (!memory) return;
  for (int64_t task = begin; task < end; task++) {
    int64_t at = task / k->groups, group = task % k->groups, part = (group * k->batch + at) * rows;
    memset(db + part, 0, (size_t)rows * sizeof(REAL));
    memset(dc + part, 0, (size_t)rows * sizeof(REAL));
    /* Rows are counted over the whole batch. */
    REAL *own_b = db + group * k->batch * rows, *own_c = dc + group * k->batch * rows;
    for (int64_t block = k->blocks * group / k->groups; block < k->blocks * (group + 1) / k->groups; block++)
      backward_block(k, at, block, own_b, own_c, memory);
  }
  ty_scratch_free(memory, bytes);
}

static void sum_rows(void *given, int64_t begin, int64_t end) {
  const context *k = given;
  int64_t rows = k->batch * k->length * k->states;
  for (int which = 0; which < 2; which++) {
    const REAL *from = (const REAL *)k->partial + which * k->groups * rows;
    REAL *to = k->out[3 + which]->data;
    for (int64_t e = begin; e < end; e++) {
      REAL sum = 0;
      for (int64_t group = 0; group < k->groups; group++) sum += from[group * rows + e];
      to[e] = sum;
    }
  }
}

static void sum_a(void *given, int64_t begin, int64_t end) {
  const context *k = given;
  int64_t size = k->channels * k->states;
  const REAL *from = (const REAL *)k->partial + 2 * k->groups * k->batch * k->length * k->states;
  REAL *to = k->out[2]->data;
  for (int64_t e = begin; e < end; e++) {
    REAL sum = 0;
    for (int64_t at = 0; at < k->batch; at++) sum += from[at * size + e];
    to[e] = sum;
  }
}

#undef advance
#undef backward
#undef backward_block
#undef exp_weight
#undef fetch
#undef fetch_turned
#undef forward
#undef forward_block
#undef retreat
#undef store_turned
#undef sum_a
#undef sum_rows
