/* Convolution where every channel has its own kernel, 3, 5 or 7 high, with strides and dilation down of 1, for one element
 * type; included by conv_depthwise.h. A column of the kernel stays in registers, and every vector that is loaded serves
 * all the rows of results that see it. For rows that fill most of a vector, lanes are pixels and nothing is turned: a
 * plane is copied between zeros. For narrower ones they are channels, as conv_depthwise.h interleaves them. */

#if TY_VECTOR_BYTES == 64
#define MOST_DOWN 14 /* rows of results at once: with a column of a kernel they fill the registers */
#define SKIPS(i, d) ((i) < (d)->top || (i) >= (d)->bottom)
#else
#define MOST_DOWN 7
#define SKIPS(i, d) false /* with two multiplications a cycle the tests cost more than the zeros */
#endif

/* What rows of results are sums of, from one place on. */
typedef struct NAME(down) {
  int64_t kw, step; /* taps of a row, and from one to the next in the input */
  int64_t row, out_row;
  int64_t left, right, top, bottom; /* of channels: the taps and rows that meet more than zeros, from and to */
} NAME(down);

/* `rows` vectors of results below each other. `apart`: the lanes are channels, with weights and `start` of their own;
 * else they are pixels of one channel. */
static inline __attribute__((always_inline)) void NAME(sum_block)(const bool apart, const int kh, const int rows,
                                                                  const NAME(down) * d, const REAL *in,
                                                                  const REAL *weight, const REAL *start, REAL *out) {
  const int64_t kw = d->kw, step = d->step, row = d->row, out_row = d->out_row, next = apart ? CHANNELS : 1;
  V sum[MOST_DOWN];
#pragma GCC unroll 14
  for (int r = 0; r < rows; r++) {
    if (apart) sum[r] = AT(start, 0);
    else sum[r] = (V){ 0 } + *start;
  }
  if (apart) in += d->left * step, weight += d->left * next;
  for (int64_t k = apart ? d->right - d->left : kw; k > 0; k--, in += step, weight += next) {
    V w[7];
#pragma GCC unroll 7
    for (int i = 0; i < kh; i++) {
      if (apart) w[i] = AT(weight, i * kw * next);
      else w[i] = (V){ 0 } + weight[i * kw];
    }
    const REAL *at = in;
#pragma GCC unroll 20
    for (int i = 0; i < rows + kh - 1; i++, at += row) {
      __asm__("" : "+r"(at)); /* else gcc keeps the addresses of all rows, more than there are registers */
      if (apart && SKIPS(i, d)) continue;
      const V x = AT(at, 0);
#pragma GCC unroll 7
      for (int j = 0; j < kh; j++)
        if (i - j >= 0 && i - j < rows) sum[i - j] += w[j] * x;
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < rows; r++) *(V *)(out + r * out_row) = sum[r];
}

typedef void NAME(block_fn)(const NAME(down) * d, const REAL *in, const REAL *weight, const REAL *start, REAL *out);

/* clang-format off */
#define BLOCK(apart, kh, rows)                                                                                         \
  static void NAME(block_##apart##_##kh##_##rows)(const NAME(down) *d, const REAL *in, const REAL *weight,             \
                                                  const REAL *start, REAL *out) {                                      \
    NAME(sum_block)(apart, kh, rows, d, in, weight, start, out);                                                       \
  }
#define BLOCKS(apart, kh)                                                                                              \
  BLOCK(apart, kh, 1) BLOCK(apart, kh, 2) BLOCK(apart, kh, 3) BLOCK(apart, kh, 4) BLOCK(apart, kh, 5)                  \
  BLOCK(apart, kh, 6) BLOCK(apart, kh, 7) MORE_BLOCKS(apart, kh)
#define NAMES(apart, kh)                                                                                               \
  { NAME(block_##apart##_##kh##_1), NAME(block_##apart##_##kh##_2), NAME(block_##apart##_##kh##_3),                    \
    NAME(block_##apart##_##kh##_4), NAME(block_##apart##_##kh##_5), NAME(block_##apart##_##kh##_6),                    \
    NAME(block_##apart##_##kh##_7) MORE_NAMES(apart, kh) }
#if MOST_DOWN == 14
#define MORE_BLOCKS(apart, kh)                                                                                         \
  BLOCK(apart, kh, 8) BLOCK(apart, kh, 9) BLOCK(apart, kh, 10) BLOCK(apart, kh, 11) BLOCK(apart, kh, 12)               \
  BLOCK(apart, kh, 13) BLOCK(apart, kh, 14)
#define MORE_NAMES(apart, kh)                                                                                          \
  , NAME(block_##apart##_##kh##_8), NAME(block_##apart##_##kh##_9), NAME(block_##apart##_##kh##_10),                   \
  NAME(block_##apart##_##kh##_11), NAME(block_##apart##_##kh##_12), NAME(block_##apart##_##kh##_13),                   \
  NAME(block_##apart##_##kh##_14)
#else
#define MORE_BLOCKS(apart, kh)
#define MORE_NAMES(apart, kh)
#endif
BLOCKS(0, 3) BLOCKS(0, 5) BLOCKS(0, 7) BLOCKS(1, 3) BLOCKS(1, 5) BLOCKS(1, 7)

static NAME(block_fn) *const NAME(blocks)[2][3][MOST_DOWN] = { /* [apart][kh / 2 - 1][rows - 1] */
  { NAMES(0, 3), NAMES(0, 5), NAMES(0, 7) }, { NAMES(1, 3), NAMES(1, 5), NAMES(1, 7) }
};
/* clang-format on */
#undef BLOCK
#undef NAMES
#undef BLOCKS
#undef MORE_NAMES
#undef MORE_BLOCKS

/* Whether the kernel is one of those. */
static bool NAME(has_blocks)(const conv_shape *s) {
  return s->sh == 1 && s->sw == 1 && s->dh == 1 && (s->kh == 3 || s->kh == 5 || s->kh == 7);
}

/* `rows` x n interleaved vectors, of which the first sees row y of the image. */
static void NAME(sum_columns)(const conv_shape *s, const NAME(down) * first, int64_t y, int64_t rows, int64_t n,
                              const REAL *in, const REAL *weight, const REAL *start, REAL *out) {
  NAME(down) trimmed = *first, *d = &trimmed;
  for (int64_t groups = (rows + MOST_DOWN - 1) / MOST_DOWN; groups > 0; groups--) {
    int64_t down = (rows + groups - 1) / groups; /* even groups */
    d->top = y < 0 ? -y : 0, d->bottom = s->h - y;
    for (int64_t j = 0; j < n; j++) {
      int64_t before = s->pw - j, after = s->w + s->pw - j; /* columns of zeros; where they begin again */
      d->left = before > 0 ? (before + s->dw - 1) / s->dw : 0;
      d->right = after > 0 ? (after + s->dw - 1) / s->dw : 0;
      if (d->right > s->kw) d->right = s->kw;
      if (d->left > d->right) d->left = d->right;
      NAME(blocks)[1][s->kh / 2 - 1][down - 1](d, in + j * CHANNELS, weight, start, out + j * CHANNELS);
    }
    in += down * d->row, out += down * d->out_row;
    rows -= down, y += down;
  }
}

/* ---- lanes are pixels ---- */

typedef struct NAME(rows_call) {
  const conv_shape *s;
  const REAL *x, *weight, *bias;
  REAL *y;
  int64_t row;         /* of the plane between zeros */
  int64_t band, bands; /* rows of results whose input stays in the L1 cache */
  bool failed;
} NAME(rows_call);

/* n values; a call of memcpy costs more than the rows are worth. */
static inline void NAME(copy_row)(const REAL *from, int64_t n, REAL *to) {
  if (n >= CHANNELS) {
    for (int64_t i = 0; i < n; i += CHANNELS) {
      int64_t at = i + CHANNELS <= n ? i : n - CHANNELS; /* the last overlap those before */
      *(V *)(to + at) = AT(from, at);
    }
    return;
  }
  if (n >= 4) {
    for (int64_t i = 0; i + 4 < n; i += 4) *(NAME(quad) *)(to + i) = *(const NAME(quad) *)(from + i);
    *(NAME(quad) *)(to + n - 4) = *(const NAME(quad) *)(from + n - 4);
    return;
  }
  for (int64_t i = 0; i < n; i++) to[i] = from[i];
}

/* Results of one band of a channel, to `y`. Vectors that are wider than a row run over into the rows that follow, which
 * are written later; but not beyond `end`. What comes after this band in x is asked for on the way, a line for every vector
 * of results. */
static void NAME(sum_band)(const NAME(rows_call) * d, int64_t rows, const REAL *plane, const REAL *weight,
                           const REAL *bias, REAL *y, const REAL *end, const REAL *ahead) {
  const conv_shape *s = d->s;
  NAME(block_fn) *const *block = NAME(blocks)[0][s->kh / 2 - 1];
  NAME(down) down = { .kw = s->kw, .step = s->dw, .row = d->row };
  REAL edge[MOST_DOWN * LANE_BYTES / sizeof(REAL)] __attribute__((aligned(LANE_BYTES)));
  for (int64_t groups = (rows + MOST_DOWN - 1) / MOST_DOWN; groups > 0; groups--) {
    int64_t n = (rows + groups - 1) / groups; /* even groups */
    for (int64_t j = 0; j < s->ow; j += CHANNELS) {
      int64_t at = j + CHANNELS <= s->ow || j == 0 ? j : s->ow - CHANNELS; /* the last overlap those before */
      REAL *to = y + at;
      for (int64_t r = 0; r < n; r++, ahead += CHANNELS) __builtin_prefetch(ahead);
      bool whole = end - to >= (n - 1) * s->ow + CHANNELS;
      down.out_row = whole ? s->ow : CHANNELS;
      block[n - 1](&down, plane + at, weight, bias, whole ? to : edge);
      for (int64_t r = 0; !whole && r < n; r++) NAME(copy_row)(edge + r * CHANNELS, s->ow - at, to + r * s->ow);
    }
    plane += n * d->row, y += n * s->ow;
    rows -= n;
  }
}

/* Rows first .. of a plane between zeros; the columns of zeros are there already. */
static void NAME(load_rows)(const NAME(rows_call) * d, int64_t image, int64_t first, int64_t rows, REAL *in) {
  const conv_shape *s = d->s;
  const REAL *x = d->x + image * s->h * s->w;
  in += s->pw;
  for (int64_t y = first - s->ph; y < first - s->ph + rows; y++, in += d->row) {
    if (y >= 0 && y < s->h) NAME(copy_row)(x + y * s->w, s->w, in);
    else
      for (int64_t i = 0; i < s->w; i += CHANNELS) *(V *)(in + i) = (V){ 0 };
  }
}

static void NAME(rows_units)(void *context, int64_t begin, int64_t end) {
  NAME(rows_call) *d = context;
  const conv_shape *s = d->s;
  int64_t most = d->band + s->kh - 1, plane = s->oh * s->ow;
  size_t bytes = sizeof(REAL) * (size_t)(most * d->row + CHANNELS); /* whole vectors are cleared */
  REAL *in = ty_scratch_alloc(bytes);
  if (!in) {
    __atomic_store_n(&d->failed, true, __ATOMIC_RELAXED);
    return;
  }
  memset(in, 0, bytes);
  const REAL zero = 0;
  int64_t after = end / d->bands * plane + end % d->bands * d->band * s->ow; /* where the units that follow begin */
  for (int64_t u = begin; u < end && !ty_interrupted; u++) {
    int64_t image = u / d->bands, channel = image % s->c, first = u % d->bands * d->band;
    int64_t rows = s->oh - first < d->band ? s->oh - first : d->band;
    int64_t below = first + rows + s->kh - 1 - s->ph; /* the first row that is not read now */
    NAME(load_rows)(d, image, first, rows + s->kh - 1, in);
    NAME(sum_band)
    (d, rows, in, d->weight + channel * s->kh * s->kw, d->bias ? d->bias + channel : &zero,
     d->y + image * plane + first * s->ow, d->y + after,
     d->x + image * s->h * s->w + (below < s->h ? below : s->h) * s->w);
  }
  ty_scratch_free(in, bytes);
}

/* Whether lanes that rows leave empty cost less than turning planes into vectors of channels. */
static bool NAME(suits_rows)(const conv_shape *s) {
  int64_t vectors = (s->ow + CHANNELS - 1) / CHANNELS;
  return NAME(has_blocks)(s) && 8 * s->ow >= 7 * vectors * CHANNELS;
}

static bool NAME(depthwise_rows)(const conv_shape *s, const REAL *x, const REAL *weight, const REAL *bias, REAL *y) {
  NAME(rows_call) d = { .s = s, .x = x, .weight = weight, .bias = bias, .y = y };
  d.row = (s->ow > CHANNELS ? s->ow : CHANNELS) + (s->kw - 1) * s->dw;
  int64_t fitting = (16 << 10) / (d.row * (int64_t)sizeof(REAL)) / MOST_DOWN * MOST_DOWN;
  d.bands = fitting > 0 ? (s->oh + fitting - 1) / fitting : (s->oh + MOST_DOWN - 1) / MOST_DOWN;
  d.band = (s->oh + d.bands - 1) / d.bands;
  d.bands = (s->oh + d.band - 1) / d.band;
  int64_t work = d.band * s->ow * s->kh * s->kw;
  ty_parallel_for(s->n * s->c * d.bands, 1 + 65536 / (work + 1), NAME(rows_units), &d);
  return !d.failed;
}
