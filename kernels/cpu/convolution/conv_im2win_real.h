/* Template (no guard: conv_im2win.c includes it once per element type). */

#define LANES ((int64_t)(TY_VECTOR_BYTES / sizeof(REAL)))
#define PANEL (2 * LANES) /* output channels */

#include "../transpose_real.h"

typedef REAL NAME(lanes) __attribute__((vector_size(TY_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

/* ---- windows ---- */

/* What the windows of rows of results see of a channel: [begin, end) of oh * c. */
static void NAME(write_windows)(void *context, int64_t begin, int64_t end) {
  const job *j = context;
  const conv_shape *s = j->s;
  for (int64_t r = begin; r < end; r++) {
    const int64_t top = r / s->c * s->sh - s->ph;
    const REAL *x = (const REAL *)j->x + (j->image * s->c + r % s->c) * s->h * s->w;
    REAL *to = (REAL *)j->windows + r * j->used * s->kh;
    const int64_t first = least(s->pw, j->used), last = least(s->w + s->pw, j->used); /* columns that x has */
    for (int64_t i = 0; i < s->kh; i++) {
      const int64_t row = top + i * s->dh;
      const bool there = row >= 0 && row < s->h;
      const REAL *from = x + (there ? row : 0) * s->w;
      const int64_t begins = there ? first : j->used;
      for (int64_t u = 0; u < begins; u++) to[u * s->kh + i] = 0;
      if (!there) continue;
      for (int64_t u = first; u < last; u++) to[u * s->kh + i] = from[u - s->pw];
      for (int64_t u = last; u < j->used; u++) to[u * s->kh + i] = 0;
    }
  }
}

/* ---- kernels ---- */

/* Channels [c0, c0 + count) of `width` kernels from the o-th on, as [c][kw][kh][PANEL]; kernels that are not there are
 * zeros. room: kh * kw rows. */
static void NAME(pack)(const job *j, int64_t o, int64_t width, int64_t c0, int64_t count, REAL *to, REAL *room) {
  const conv_shape *s = j->s;
  const int64_t taps = s->kh * s->kw, all = s->cg * taps;
  const REAL *from = (const REAL *)j->weight + o * all + c0 * taps;
  if (width < PANEL) memset(room, 0, (size_t)(taps * PANEL) * sizeof *room);
  for (int64_t c = 0; c < count; c++, from += taps, to += taps * PANEL) {
    NAME(transpose)(from, all, width, taps, room, PANEL);
    for (int64_t v = 0; v < s->kw; v++)
      for (int64_t i = 0; i < s->kh; i++)
        memcpy(to + (v * s->kh + i) * PANEL, room + (i * s->kw + v) * PANEL, PANEL * sizeof *to);
  }
}

/* ---- sums ---- */

/* PLACES results of a panel: `from` are the first values of their windows in the first channel, `next` elements before
 * those in the next one. sums [PLACES][PANEL] hold what is there already. */
static inline void NAME(add_products)(const job *j, const REAL *const *from, int64_t next, int64_t channels,
                                      const REAL *kernels, REAL *sums) {
  NAME(lanes) sum[PLACES][2];
  for (int q = 0; q < PLACES; q++)
    for (int v = 0; v < 2; v++) sum[q][v] = *(NAME(lanes) *)(sums + q * PANEL + v * LANES);
  /* Windows of the next places end so far behind the last of these; the processor does not see it coming, as the runs
   * between are those of other channels. */
  const int64_t ahead = PLACES * j->s->sw * j->s->kh + j->length, line = 64 / (int64_t)sizeof(REAL);
  for (int64_t c = 0; c < channels; c++) {
    __builtin_prefetch(from[PLACES - 1] + c * next + ahead);
    __builtin_prefetch(from[PLACES - 1] + c * next + ahead - line);
    for (int64_t r = 0; r < j->runs; r++) {
      const int64_t at = c * next + r * j->step;
      const REAL *a[PLACES];
      for (int q = 0; q < PLACES; q++) a[q] = from[q] + at;
      for (int64_t k = 0; k < j->length; k++, kernels += PANEL) {
        const NAME(lanes) w0 = *(const NAME(lanes) *)kernels, w1 = *(const NAME(lanes) *)(kernels + LANES);
        for (int q = 0; q < PLACES; q++) sum[q][0] += a[q][k] * w0, sum[q][1] += a[q][k] * w1;
      }
    }
  }
  for (int q = 0; q < PLACES; q++)
    for (int v = 0; v < 2; v++) *(NAME(lanes) *)(sums + q * PANEL + v * LANES) = sum[q][v];
}

/* Results [begin, end) of `width` channels from the o-th on, with the kernels of channels [c0, c0 + count). */
static void NAME(add_places)(const job *j, int64_t o, int64_t width, int64_t c0, int64_t count, const REAL *kernels,
                             int64_t begin, int64_t end) {
  const conv_shape *s = j->s;
  const int64_t places = s->oh * s->ow, channel = j->used * s->kh;
  const REAL *windows = (const REAL *)j->windows + (o / s->og * s->cg + c0) * channel, *bias = j->bias;
  REAL *y = (REAL *)j->y + (j->image * s->o + o) * places;
  REAL sums[PLACES * PANEL] __attribute__((aligned(64)));
  const REAL *from[PLACES];
  for (int64_t p = begin; p < end; p += PLACES) {
    const int64_t here = least(PLACES, end - p);
    for (int64_t q = 0; q < PLACES; q++) {
      const int64_t at = p + least(q, here - 1);
      from[q] = windows + at / s->ow * s->c * channel + at % s->ow * s->sw * s->kh;
    }
    if (c0 > 0) {
      if (here < PLACES || width < PANEL) memset(sums, 0, sizeof sums);
      NAME(transpose)(y + p, places, width, here, sums, PANEL);
    } else {
      for (int64_t i = 0; i < PANEL; i++) sums[i] = bias && i < width ? bias[o + i] : 0;
      for (int64_t q = 1; q < PLACES; q++) memcpy(sums + q * PANEL, sums, PANEL * sizeof *sums);
    }
    NAME(add_products)(j, from, channel, count, kernels, sums);
    NAME(transpose)(sums, PANEL, here, width, y + p, places);
  }
}

/* Tasks: blocks of output channels, each of one group, by chunks of places. */
static void NAME(add_tasks)(void *context, int64_t begin, int64_t end) {
  job *j = context;
  const conv_shape *s = j->s;
  const int64_t taps = s->kh * s->kw, blocks = (s->og + PANEL - 1) / PANEL, places = s->oh * s->ow;
  const size_t bytes = (size_t)((j->channels + 1) * taps * PANEL) * sizeof(REAL);
  REAL *kernels = ty_scratch_alloc(bytes);
  if (!kernels) {
    atomic_store(&j->failed, true);
    return;
  }
  for (int64_t t = begin; t < end && !ty_interrupted; t++) {
    const int64_t block = t / j->chunks, first = block % blocks * PANEL, o = block / blocks * s->og + first;
    const int64_t width = least(PANEL, s->og - first), from = t % j->chunks * TASK_PLACES;
    for (int64_t c = 0; c < s->cg; c += j->channels) {
      const int64_t count = least(j->channels, s->cg - c);
      NAME(pack)(j, o, width, c, count, kernels, kernels + j->channels * taps * PANEL);
      NAME(add_places)(j, o, width, c, count, kernels, from, least(from + TASK_PLACES, places));
    }
  }
  ty_scratch_free(kernels, bytes);
}

static void NAME(run)(job *j) {
  const conv_shape *s = j->s;
  const int64_t blocks = s->groups * ((s->og + PANEL - 1) / PANEL);
  if (s->cg == 0) { /* nothing to sum */
    REAL *y = j->y;
    for (int64_t i = 0; i < s->n * s->o * s->oh * s->ow; i++)
      y[i] = j->bias ? ((const REAL *)j->bias)[i / (s->oh * s->ow) % s->o] : 0;
    return;
  }
  for (j->image = 0; j->image < s->n && !ty_interrupted; j->image++) {
    ty_parallel_for(s->c * s->oh, 1 + 32768 / (j->used * s->kh), NAME(write_windows), j);
    ty_parallel_for(blocks * j->chunks, 1, NAME(add_tasks), j);
  }
}

#undef LANES
#undef PANEL
