/* Template: long convolutions, line by line: a line's spectrum, times that of its channel's kernel, and back, while all
 * of it lies in a cache. Signals are real and packed, two neighbours to a complex number: kernels/fft_plan.h. */

typedef struct FN(conv) {
  const ty_fft_plan *plan;
  const REAL *x, *kernel; /* or, for the gradient of a kernel, g */
  REAL *y;
  int64_t batch, channels, chunks; /* chunks: of the batch, each a task with its own transform of the kernel */
  int64_t taken, taps, length, start;
  bool turned, of_kernel, failed;
} FN(conv);

/* Buffers of a thread: two packed lines, a spectrum or two of h + 1, and what a transform needs. */
typedef struct FN(bench) {
  REAL *a, *b, *kernel, *sum;
  VEC *room;
  size_t bytes;
} FN(bench);

static bool FN(bench_open)(const ty_fft_plan *p, FN(bench) * d) {
  const int64_t side = FN(blocks)(p->key.n + 2);
  d->bytes = (size_t)(4 * side + FN(line_room)(p->line)) * sizeof(VEC);
  VEC *room = ty_scratch_alloc(d->bytes);
  if (!room) return false;
  d->a = (REAL *)room, d->b = (REAL *)(room + side);
  d->kernel = (REAL *)(room + 2 * side), d->sum = (REAL *)(room + 3 * side), d->room = room + 4 * side;
  return true;
}

/* Transforms x with zeros after it, packed, from a to b. */
static bool FN(forward)(const ty_fft_plan *p, const REAL *x, int64_t taken, const FN(bench) * d) {
  memcpy(d->a, x, (size_t)taken * sizeof *x);
  memset(d->a + taken, 0, (size_t)(p->key.n - taken) * sizeof *x);
  return FN(run_line)(p->line, d->a, d->b, false, 1, d->room, false, NULL, 0);
}

/* Transforms b back to a, and writes positions of it from `start` on, which may be negative, to y. */
static bool FN(backward)(const ty_fft_plan *p, const FN(bench) * d, int64_t start, int64_t length, REAL *y) {
  const int64_t n = p->key.n, from = start < 0 ? start + n : start, first = n - from < length ? n - from : length;
  if (!FN(run_line)(p->line, d->b, d->a, true, (REAL)1 / (REAL)n, d->room, false, y, length)) return false;
  memcpy(y, d->a + from, (size_t)first * sizeof *y);
  memcpy(y + first, d->a, (size_t)(length - first) * sizeof *y);
  return true;
}

/* A pair of elements by another, or by its conjugate. */
#define TIMES(x, re, im)                                           \
  do {                                                             \
    const __typeof__(re) times_re = (x)[0] * (re) - (x)[1] * (im); \
    (x)[1] = (x)[0] * (im) + (x)[1] * (re), (x)[0] = times_re;     \
  } while (0)

/* z, packed, becomes the product of the spectrum that it stands for with s, h + 1 frequencies, or with its conjugate:
 * taken apart, multiplied and packed again, from both ends at once. */
INLINED void FN(multiply_by)(REAL *z, const REAL *s, int64_t h, const REAL *w, const bool conj) {
  const REAL sign = conj ? -1 : 1;
  int64_t k = 1;
  for (; k + LANES - 1 < h - k - LANES + 1; k += LANES) {
    const int64_t m = h - k - LANES + 1;
    VEC ar, ai, br, bi, c, e, front[2], back[2], re, im;
    FN(load_pairs)(z + 2 * k, false, &ar, &ai);
    FN(load_pairs)(z + 2 * m, false, &br, &bi);
    FN(load_pairs)(w + 2 * k, false, &c, &e);
    FN(unpack_pair_lanes)(ar, ai, SHUFFLE(br, br, BACKWARDS), SHUFFLE(bi, bi, BACKWARDS), c, e, front, back);
    FN(load_pairs)(s + 2 * k, false, &re, &im);
    TIMES(front, re, im * sign);
    FN(load_pairs)(s + 2 * m, false, &re, &im);
    re = SHUFFLE(re, re, BACKWARDS), im = SHUFFLE(im, im, BACKWARDS) * sign;
    TIMES(back, re, im);
    VEC zf[2], zb[2];
    FN(pack_pair_lanes)(front[0], front[1], back[0], back[1], c, e, zf, zb);
    FN(store_pairs)(z + 2 * k, false, zf[0], zf[1]);
    FN(store_pairs)(z + 2 * m, false, SHUFFLE(zb[0], zb[0], BACKWARDS), SHUFFLE(zb[1], zb[1], BACKWARDS));
  }
  for (; 2 * k < h; k++) {
    const int64_t m = h - k;
    REAL front[2], back[2];
    FN(unpack_pair_line)(z[2 * k], z[2 * k + 1], z[2 * m], z[2 * m + 1], w[2 * k], w[2 * k + 1], front, back);
    TIMES(front, s[2 * k], s[2 * k + 1] * sign);
    TIMES(back, s[2 * m], s[2 * m + 1] * sign);
    FN(pack_pair_line)(front[0], front[1], back[0], back[1], w[2 * k], w[2 * k + 1], z + 2 * k, z + 2 * m);
  }
  if (h % 2 == 0) { /* the spectrum there is the conjugate, and packs to twice its conjugate */
    REAL x[2] = { z[h], -z[h + 1] };
    TIMES(x, s[h], s[h + 1] * sign);
    z[h] = 2 * x[0], z[h + 1] = -2 * x[1];
  }
  const REAL first = (z[0] + z[1]) * s[0], last = (z[0] - z[1]) * s[2 * h];
  z[0] = first + last, z[1] = first - last;
}

static void FN(multiply)(REAL *z, const REAL *s, int64_t h, const REAL *w, bool conj) {
  if (conj) FN(multiply_by)(z, s, h, w, true);
  else FN(multiply_by)(z, s, h, w, false);
}

/* The lines of a channel, or of a part of the batch. */
static bool FN(conv_lines)(const FN(conv) * j, int64_t channel, int64_t begin, int64_t end, const FN(bench) * d) {
  const ty_fft_plan *p = j->plan;
  if (!FN(forward)(p, j->kernel + channel * j->taps, j->taps, d)) return false;
  FN(unpack_fast)(d->b, d->kernel, p->length, p->roots);
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    const int64_t line = i * j->channels + channel;
    if (!FN(forward)(p, j->x + line * j->taken, j->taken, d)) return false;
    FN(multiply)(d->b, d->kernel, p->length, p->roots, j->turned);
    if (!FN(backward)(p, d, j->start, j->length, j->y + line * j->length)) return false;
  }
  return true;
}

/* The gradient of a channel's kernel: the spectra of g times conjugates of those of x, summed over the batch, and back
 * once. */
static bool FN(conv_kernel)(const FN(conv) * j, int64_t channel, const FN(bench) * d) {
  const ty_fft_plan *p = j->plan;
  const int64_t h = p->length;
  memset(d->sum, 0, (size_t)(h + 1) * 2 * sizeof *d->sum);
  for (int64_t i = 0; i < j->batch && !ty_interrupted; i++) {
    const int64_t line = i * j->channels + channel;
    if (!FN(forward)(p, j->x + line * j->taken, j->taken, d)) return false;
    FN(unpack_fast)(d->b, d->kernel, h, p->roots);
    if (!FN(forward)(p, j->kernel + line * j->taps, j->taps, d)) return false;
    FN(unpack_fast)(d->b, d->b, h, p->roots);
    const REAL *restrict g = d->b, *restrict x = d->kernel;
    REAL *restrict sum = d->sum;
    for (int64_t k = 0; k <= h; k++) {
      sum[2 * k] += g[2 * k] * x[2 * k] + g[2 * k + 1] * x[2 * k + 1];
      sum[2 * k + 1] += g[2 * k + 1] * x[2 * k] - g[2 * k] * x[2 * k + 1];
    }
  }
  FN(pack_fast)(d->sum, d->b, h, p->roots);
  return FN(backward)(p, d, j->start, j->length, j->y + channel * j->length);
}

/* Task i: a channel, or, of lines, one of the chunks of a channel's. */
static void FN(conv_tasks)(void *context, int64_t begin, int64_t end) {
  FN(conv) *j = context;
  FN(bench) d;
  if (!FN(bench_open)(j->plan, &d)) {
    j->failed = true;
    return;
  }
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    const int64_t channel = i / j->chunks, chunk = i % j->chunks;
    const bool ok = j->of_kernel ? FN(conv_kernel)(j, channel, &d)
                                 : FN(conv_lines)(j, channel, chunk * j->batch / j->chunks,
                                                  (chunk + 1) * j->batch / j->chunks, &d);
    if (!ok) j->failed = true;
  }
  ty_scratch_free(d.a, d.bytes);
}

/* n: even, and no position of a result that is read is reached twice around a circle of n. */
static bool FN(run_conv)(FN(conv) * j, int64_t n) {
  const ty_fft_key key = { n, LANES, sizeof(REAL) == 8, true, true, false };
  if (!(j->plan = ty_fft_plan_open(&key))) return false;
  const int64_t wanted = j->of_kernel ? 1 : 4 * ty_parallel_threads() / j->channels;
  j->chunks = wanted < 1 ? 1 : wanted > j->batch ? j->batch : wanted;
  ty_parallel_for(j->channels * j->chunks, 1 + 16384 / (n * j->batch / j->chunks), FN(conv_tasks), j);
  ty_fft_plan_close(j->plan);
  return !j->failed;
}

#undef TIMES
