/* Template: the four kernels for one element type, over lines that come from memory, by lanes or line by line. */

#include "fft_vectors.h"
#include "fft_passes.h"
#include "fft_line.h"

#define E REAL
#define ON(x) FN(x##_line)
#include "fft_half.h"
#undef E
#undef ON
#define E VEC
#define ON(x) FN(x##_lanes)
#include "fft_half.h"
#undef E
#undef ON

typedef struct FN(job) {
  const ty_fft_plan *plan;
  ty_fft_kind kind;
  const REAL *x;
  REAL *y;
  int64_t lines, inner, length, out, n;
  int64_t frames, signal,
      hop;            /* lines begin `hop` apart, `frames` of them in each `signal` positions; without: 1 line */
  const REAL *window; /* what signals are multiplied by, where inner is 1; or NULL */
  bool inverse, doubled, failed;
  REAL scale, first;
} FN(job);

/* Where in a buffer, or a line, position i of a real signal is: at i itself, at its place among the complex numbers
 * that are transformed, or there after folding for a cosine transform. `mirrored`: in the result of a transform that
 * should have been an inverse one. */
enum { FN(PLAIN), FN(SIGNAL), FN(FOLDED) };
INLINED int64_t FN(place)(const FN(job) * j, int64_t i, const int mode, const bool mirrored) {
  if (mode == FN(PLAIN)) return i;
  int64_t f = mode == FN(FOLDED) ? TY_FFT_FOLDED(i, j->n) : i, part = 0;
  if (j->plan->packed) part = f % 2, f /= 2;
  if (mirrored && f) f = j->plan->length - f;
  return 2 * f + part;
}

INLINED const REAL *FN(line_at)(const FN(job) * j, int64_t line, int64_t parts) {
  const int64_t block = line / j->inner, within = line % j->inner;
  return j->x + (block / j->frames * j->signal + block % j->frames * j->hop + within) * parts;
}

/* ---- by lanes ---- */

/* The first `taken` positions of `count` lines from `line` on; missing lines are zeros. */
INLINED void FN(gather)(const FN(job) * j, int64_t line, int count, const int parts, int64_t taken, const int mode,
                        const bool swap, VEC *to) {
  const int64_t inner = j->inner, within = line % inner, step = inner * parts;
  if (count == LANES && within + LANES <= inner) {
    const REAL *from = j->x + (line / inner * j->length * inner + within) * parts;
    for (int64_t i = 0; i < taken; i++, from += step) {
      if (parts == 2) FN(load_pairs)(from, swap, &to[2 * i], &to[2 * i + 1]);
      else {
        const VEC v = (VEC) * (const LOOSE *)from;
        to[FN(place)(j, i, mode, false)] = SHUFFLE(v, v, IN_ORDER);
      }
    }
    return;
  }
  const REAL *row[LANES];
  for (int l = 0; l < count; l++) row[l] = FN(line_at)(j, line + l, parts);
  const REAL *window = parts == 1 ? j->window : NULL;
  int64_t f = 0;
  for (; inner == 1 && count == LANES && f + LANES <= taken * parts; f += LANES) {
    VEC v[LANES];
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) v[l] = (VEC) * (const LOOSE *)(row[l] + f);
    if (window) {
      const VEC w = (VEC) * (const LOOSE *)(window + f);
#pragma GCC unroll 16
      for (int l = 0; l < LANES; l++) v[l] *= w;
    }
    FN(transpose)(v);
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) to[parts == 2 ? (f + l) ^ swap : FN(place)(j, f + l, mode, false)] = v[l];
  }
  for (; f < taken * parts; f++) {
    REAL v[LANES] = { 0 };
    for (int l = 0; l < count; l++) v[l] = row[l][f / parts * step + f % parts];
    for (int l = 0; l < count && window; l++) v[l] *= window[f];
    to[parts == 2 ? f ^ swap : FN(place)(j, f, mode, false)] = (VEC) * (const LOOSE *)v;
  }
}

/* The first `have` positions to memory, as many as the result takes, and zeros after them. */
INLINED void FN(scatter)(const FN(job) * j, int64_t line, int count, const int parts, int64_t have, const int mode,
                         const bool swap, const VEC *from) {
  const int64_t inner = j->inner, within = line % inner, step = inner * parts, given = have < j->out ? have : j->out;
  const REAL scale = j->scale;
  if (count == LANES && within + LANES <= inner) {
    REAL *to = j->y + (line / inner * j->out * inner + within) * parts;
    for (int64_t i = 0; i < j->out; i++, to += step) {
      if (i >= given) memset(to, 0, (size_t)parts * sizeof(VEC));
      else if (parts == 2) FN(store_pairs)(to, swap, from[2 * i] * scale, from[2 * i + 1] * scale);
      else {
        const VEC v = from[FN(place)(j, i, mode, true)] * scale;
        *(LOOSE *)to = (LOOSE)SHUFFLE(v, v, NATURAL);
      }
    }
    return;
  }
  REAL *row[LANES];
  for (int l = 0; l < count; l++) row[l] = j->y + ((line + l) / inner * j->out * inner + (line + l) % inner) * parts;
  int64_t f = 0;
  for (; inner == 1 && count == LANES && f + LANES <= given * parts; f += LANES) {
    VEC v[LANES];
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) v[l] = from[parts == 2 ? (f + l) ^ swap : FN(place)(j, f + l, mode, true)] * scale;
    FN(transpose)(v);
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) *(LOOSE *)(row[l] + f) = (LOOSE)v[l];
  }
  for (; f < j->out * parts; f++) {
    VEC v = { 0 };
    if (f < given * parts) v = from[parts == 2 ? f ^ swap : FN(place)(j, f, mode, true)] * scale;
    for (int l = 0; l < count; l++) row[l][f / parts * step + f % parts] = v[l];
  }
}

/* Vectors of one of the two buffers. */
static int64_t FN(group_room)(const ty_fft_plan *p) {
  const int64_t half = p->key.n / 2 + 1;
  return 2 * (p->lanes->room > half ? p->lanes->room : half);
}

static void FN(zero)(VEC *x, int64_t count) { memset(x, 0, (size_t)count * sizeof *x); }

static void FN(group_cosine)(const FN(job) * j, int64_t line, int count, int64_t taken, VEC *a, VEC *b) {
  static const FN(ends) none = { 0 };
  const ty_fft_plan *p = j->plan;
  const int64_t n = j->n, h = p->length;
  if (!j->inverse) {
    if (!p->packed || taken < n) FN(zero)(a, 2 * h);
    FN(gather)(j, line, count, 1, taken, FN(FOLDED), false, a);
    VEC *r = FN(transform)(p->lanes, &none, a, b), *other = r == a ? b : a;
    if (p->packed) FN(unpack_lanes)(r, r, h, p->roots, 1);
    FN(to_cosines_lanes)(r, other, n, p->quarter, j->first);
    FN(scatter)(j, line, count, 1, n, FN(PLAIN), false, other);
    return;
  }
  FN(gather)(j, line, count, 1, taken, FN(PLAIN), false, b);
  FN(zero)(b + taken, n - taken);
  if (!p->packed) FN(zero)(a, 2 * n);
  FN(from_cosines_lanes)(b, a, n, p->quarter, j->first);
  if (p->packed) FN(pack_lanes)(a, a, h, p->roots, 1);
  else FN(weigh_lanes)(a, n, 2, false);
  FN(scatter)(j, line, count, 1, n, FN(FOLDED), false, FN(transform)(p->lanes, &none, a, b));
}

static void FN(group)(const FN(job) * j, int64_t line, int count, VEC *a, VEC *b) {
  static const FN(ends) none = { 0 };
  const ty_fft_plan *p = j->plan;
  const int64_t n = j->n, h = p->length, half = n / 2 + 1, inner = j->inner;
  const int64_t of = j->kind == TY_FFT_HALF ? half : n, taken = j->length < of ? j->length : of;
  VEC *r;
  if (j->kind == TY_FFT_COSINE) {
    FN(group_cosine)(j, line, count, taken, a, b);
  } else if (j->kind == TY_FFT_COMPLEX) {
    if (count == LANES && line % inner + LANES <= inner && taken == n && j->out == n) {
      const int64_t block = line / inner, within = line % inner;
      const FN(ends) e = { j->x + (block * j->length * inner + within) * 2,
                           j->y + (block * n * inner + within) * 2,
                           2 * inner,
                           2 * inner,
                           j->scale,
                           j->inverse };
      FN(transform)(p->lanes, &e, a, b);
      return;
    }
    FN(gather)(j, line, count, 2, taken, FN(PLAIN), j->inverse, a);
    FN(zero)(a + 2 * taken, 2 * (n - taken));
    r = FN(transform)(p->lanes, &none, a, b);
    FN(scatter)(j, line, count, 2, n, FN(PLAIN), j->inverse, r);
  } else if (j->kind == TY_FFT_REAL) {
    if (!p->packed || taken < n) FN(zero)(a, 2 * h);
    FN(gather)(j, line, count, 1, taken, FN(SIGNAL), false, a);
    r = FN(transform)(p->lanes, &none, a, b);
    if (p->packed) FN(unpack_lanes)(r, r, h, p->roots, 1);
    if (j->doubled || j->inverse) FN(weigh_lanes)(r, n, j->doubled ? 2 : 1, j->inverse);
    FN(scatter)(j, line, count, 2, half, FN(PLAIN), false, r);
  } else {
    if (!p->packed || taken < half) FN(zero)(a, 2 * (p->packed ? half : n));
    FN(gather)(j, line, count, 2, taken, FN(PLAIN), false, a);
    if (!p->packed) a[1] = (VEC){ 0 };
    FN(weigh_lanes)(a, n, (REAL)(p->packed ? (j->doubled ? 1 : 0.5) : (j->doubled ? 2 : 1)), j->inverse);
    if (p->packed) FN(pack_lanes)(a, a, h, p->roots, 1);
    r = FN(transform)(p->lanes, &none, a, b);
    FN(scatter)(j, line, count, 1, n, FN(SIGNAL), false, r);
  }
}

/* Lines that are cut into groups together: of 16 lanes those that lie beside each other, where there are enough, since
 * a group with lines of two places comes number by number, which takes 2.6 times as long; of 8 lanes hardly longer.
 * Not where every second place ends with a group by itself. */
static int64_t FN(stretch)(const FN(job) * j) {
  return LANES == 16 && j->inner >= LANES && j->inner % (LANES / 2) != 0 ? j->inner : j->lines;
}

static void FN(groups)(void *context, int64_t begin, int64_t end) {
  FN(job) *j = context;
  const int64_t room = FN(group_room)(j->plan);
  const size_t bytes = 2 * (size_t)room * sizeof(VEC);
  VEC *a = ty_scratch_alloc(bytes);
  if (!a) {
    j->failed = true;
    return;
  }
  const int64_t stretch = FN(stretch)(j), per_stretch = (stretch + LANES - 1) / LANES;
  for (int64_t g = begin; g < end && !ty_interrupted; g++) {
    const int64_t at = g % per_stretch * LANES, rest = stretch - at;
    FN(group)(j, g / per_stretch * stretch + at, rest < LANES ? (int)rest : LANES, a, a + room);
  }
  ty_scratch_free(a, bytes);
}

/* ---- line by line ---- */

static void FN(gather_one)(const FN(job) * j, const REAL *x, int parts, int64_t taken, int64_t of, int mode, REAL *to) {
  const int64_t step = j->inner * parts;
  if (parts == 2)
    for (int64_t i = 0; i < taken; i++, x += step) to[2 * i] = x[0], to[2 * i + 1] = x[1];
  else
    for (int64_t i = 0; i < taken; i++, x += step)
      to[FN(place)(j, i, mode, false)] = j->window ? x[0] * j->window[i] : x[0];
  for (int64_t i = taken; i < of; i++) {
    if (parts == 2) to[2 * i] = to[2 * i + 1] = 0;
    else to[FN(place)(j, i, mode, false)] = 0;
  }
}

static void FN(scatter_one)(const FN(job) * j, const REAL *from, int parts, int64_t have, int mode, REAL *y) {
  const int64_t step = j->inner * parts, given = have < j->out ? have : j->out;
  if (parts == 2)
    for (int64_t i = 0; i < given; i++, y += step) y[0] = from[2 * i], y[1] = from[2 * i + 1];
  else
    for (int64_t i = 0; i < given; i++, y += step) y[0] = from[FN(place)(j, i, mode, false)];
  for (int64_t i = given; i < j->out; i++, y += step) memset(y, 0, (size_t)parts * sizeof *y);
}

/* As unpack_line and pack_line, LANES of them at a time from both ends. */
static void FN(unpack_fast)(const REAL *z, REAL *y, int64_t h, const REAL *w) {
  int64_t k = 1;
  for (; k + LANES - 1 < h - k - LANES + 1; k += LANES) {
    const int64_t m = h - k - LANES + 1;
    VEC ar, ai, br, bi, c, s, front[2], back[2];
    FN(load_pairs)(z + 2 * k, false, &ar, &ai);
    FN(load_pairs)(z + 2 * m, false, &br, &bi);
    FN(load_pairs)(w + 2 * k, false, &c, &s);
    FN(unpack_pair_lanes)(ar, ai, SHUFFLE(br, br, BACKWARDS), SHUFFLE(bi, bi, BACKWARDS), c, s, front, back);
    FN(store_pairs)(y + 2 * k, false, front[0], front[1]);
    FN(store_pairs)(y + 2 * m, false, SHUFFLE(back[0], back[0], BACKWARDS), SHUFFLE(back[1], back[1], BACKWARDS));
  }
  FN(unpack_line)(z, y, h, w, k);
}

static void FN(pack_fast)(const REAL *x, REAL *z, int64_t h, const REAL *w) {
  int64_t k = 1;
  for (; k + LANES - 1 < h - k - LANES + 1; k += LANES) {
    const int64_t m = h - k - LANES + 1;
    VEC ar, ai, br, bi, c, s, front[2], back[2];
    FN(load_pairs)(x + 2 * k, false, &ar, &ai);
    FN(load_pairs)(x + 2 * m, false, &br, &bi);
    FN(load_pairs)(w + 2 * k, false, &c, &s);
    FN(pack_pair_lanes)(ar, ai, SHUFFLE(br, br, BACKWARDS), SHUFFLE(bi, bi, BACKWARDS), c, s, front, back);
    FN(store_pairs)(z + 2 * k, false, front[0], front[1]);
    FN(store_pairs)(z + 2 * m, false, SHUFFLE(back[0], back[0], BACKWARDS), SHUFFLE(back[1], back[1], BACKWARDS));
  }
  FN(pack_line)(x, z, h, w, k);
}

/* One line; what it needs: s and t, 2 (n + 2) REALs each, and the room of run_line. */
typedef struct FN(desk) {
  REAL *s, *t;
  VEC *room;
  bool shared;
} FN(desk);

static bool FN(one_half)(const FN(job) * j, const FN(desk) * d, const REAL *x, REAL *y, int64_t taken) {
  const ty_fft_plan *p = j->plan;
  const int64_t n = j->n, half = n / 2 + 1;
  const REAL weight = (REAL)(p->packed ? (j->doubled ? 1 : 0.5) : (j->doubled ? 2 : 1));
  const bool direct = j->inner == 1 && taken == half && p->packed && weight == 1 && !j->inverse;
  if (!direct) {
    FN(gather_one)(j, x, 2, taken, p->packed ? half : n, FN(PLAIN), d->s);
    FN(weigh_line)(d->s, n, weight, j->inverse);
  }
  if (p->packed) FN(pack_fast)(direct ? x : d->s, d->s, p->length, p->roots);
  else d->s[1] = 0;
  REAL *to = j->inner == 1 && j->out == n && p->packed ? y : d->t;
  if (!FN(run_line)(p->line, d->s, to, true, j->scale, d->room, d->shared, j->inner == 1 ? y : NULL, j->out))
    return false;
  if (to != y) FN(scatter_one)(j, d->t, 1, n, FN(SIGNAL), y);
  return true;
}

static bool FN(one_cosine_back)(const FN(job) * j, const FN(desk) * d, const REAL *x, REAL *y, int64_t taken) {
  const ty_fft_plan *p = j->plan;
  const int64_t n = j->n, half = n / 2 + 1;
  const bool whole = j->inner == 1 && taken == n;
  if (!whole) FN(gather_one)(j, x, 1, taken, n, FN(PLAIN), d->t);
  FN(from_cosines_line)(whole ? x : d->t, d->s, n, p->quarter, j->first);
  if (p->packed) FN(pack_fast)(d->s, d->s, p->length, p->roots);
  else {
    FN(weigh_line)(d->s, n, 2, false);
    memset(d->s + 2 * half, 0, (size_t)(n - half) * 2 * sizeof *d->s);
  }
  if (!FN(run_line)(p->line, d->s, d->t, true, j->scale, d->room, d->shared, j->inner == 1 ? y : NULL, j->out))
    return false;
  FN(scatter_one)(j, d->t, 1, n, FN(FOLDED), y);
  return true;
}

static bool FN(one)(const FN(job) * j, int64_t line, const FN(desk) * d) {
  const ty_fft_plan *p = j->plan;
  const int64_t n = j->n, half = n / 2 + 1, inner = j->inner;
  const bool complex_in = j->kind == TY_FFT_COMPLEX || j->kind == TY_FFT_HALF;
  const bool complex_out = j->kind == TY_FFT_COMPLEX || j->kind == TY_FFT_REAL;
  const REAL *x = FN(line_at)(j, line, complex_in ? 2 : 1);
  REAL *y = j->y + (line / inner * j->out * inner + line % inner) * (complex_out ? 2 : 1), *s = d->s, *t = d->t;
  const int64_t of = j->kind == TY_FFT_HALF ? half : n, taken = j->length < of ? j->length : of;
  if (j->kind == TY_FFT_HALF) return FN(one_half)(j, d, x, y, taken);
  if (j->kind == TY_FFT_COSINE && j->inverse) return FN(one_cosine_back)(j, d, x, y, taken);
  const bool whole_in = inner == 1 && taken == n;
  const bool whole_out = inner == 1 && j->out == (j->kind == TY_FFT_REAL ? half : n);
  if (j->kind == TY_FFT_COMPLEX) {
    if (!whole_in) FN(gather_one)(j, x, 2, taken, n, FN(PLAIN), s);
    if (!FN(run_line)(p->line, whole_in ? x : s, whole_out ? y : t, j->inverse, j->scale, d->room, d->shared,
                      inner == 1 ? y : NULL, 2 * j->out))
      return false;
    if (!whole_out) FN(scatter_one)(j, t, 2, n, FN(PLAIN), y);
    return true;
  }
  const bool cosine = j->kind == TY_FFT_COSINE, direct = whole_in && p->packed && !cosine && !j->window;
  if (!p->packed) memset(s, 0, (size_t)n * 2 * sizeof *s);
  if (!direct) FN(gather_one)(j, x, 1, taken, n, cosine ? FN(FOLDED) : FN(SIGNAL), s);
  if (!FN(run_line)(p->line, direct ? x : s, t, false, j->scale, d->room, d->shared, inner == 1 ? y : NULL,
                    (cosine ? 1 : 2) * j->out))
    return false;
  REAL *to = whole_out ? y : s;
  if (cosine) {
    if (p->packed) FN(unpack_fast)(t, t, p->length, p->roots);
    FN(to_cosines_line)(t, to, n, p->quarter, j->first);
  } else {
    if (p->packed) FN(unpack_fast)(t, to, p->length, p->roots);
    else memcpy(to, t, (size_t)half * 2 * sizeof *t);
    if (j->doubled || j->inverse) FN(weigh_line)(to, n, j->doubled ? 2 : 1, j->inverse);
  }
  if (!whole_out) FN(scatter_one)(j, to, cosine ? 1 : 2, cosine ? n : half, FN(PLAIN), y);
  return true;
}

/* shared: the threads share each of these lines. */
static void FN(lines)(FN(job) * j, int64_t begin, int64_t end, bool shared) {
  const int64_t side = FN(blocks)(2 * (j->n + 2));
  const ty_fft_line *p = j->plan->line;
  const size_t bytes = (size_t)(2 * side + (shared ? FN(middle_room)(p) : FN(line_room)(p))) * sizeof(VEC);
  VEC *room = ty_scratch_alloc(bytes);
  if (!room) {
    j->failed = true;
    return;
  }
  const FN(desk) d = { (REAL *)room, (REAL *)(room + side), room + 2 * side, shared };
  for (int64_t l = begin; l < end && !ty_interrupted; l++)
    if (!FN(one)(j, l, &d)) j->failed = true;
  ty_scratch_free(room, bytes);
}

static void FN(some_lines)(void *context, int64_t begin, int64_t end) { FN(lines)(context, begin, end, false); }

static bool FN(by_line)(int64_t h, int64_t lines, int64_t inner) {
  if (h < 16 * LANES || (h <= 32 * LANES && lines >= LANES)) return false;
  if (inner > 1 && lines >= LANES / 2) return h * (int64_t)sizeof(VEC) * 4 > 1 << 20;
  if (lines < LANES / 2 || h > 4096) return true;
  return ty_fft_cuts_well(h, LANES);
}

static bool FN(run)(FN(job) * j) {
  const bool real = j->kind != TY_FFT_COMPLEX;
  const int64_t h = real && j->n % 2 == 0 ? j->n / 2 : j->n;
  const ty_fft_key key = {
    j->n, LANES, sizeof(REAL) == 8, FN(by_line)(h, j->lines, j->inner), real, j->kind == TY_FFT_COSINE
  };
  if (!(j->plan = ty_fft_plan_open(&key))) return false;
  const int64_t stretch = FN(stretch)(j), groups = j->lines / stretch * ((stretch + LANES - 1) / LANES);
  if (!key.by_line) ty_parallel_for(groups, 1 + 16384 / (h * LANES), FN(groups), j);
  else if (h >= 1 << 15 && j->lines < 2 * ty_parallel_threads()) FN(lines)(j, 0, j->lines, true);
  else ty_parallel_for(j->lines, 1 + 16384 / h, FN(some_lines), j);
  ty_fft_plan_close(j->plan);
  return !j->failed;
}

/* Planes: their rows and then, in place, their columns, of which there are at least two. */
typedef struct FN(planes) {
  FN(job) rows, columns;
  int64_t from, to; /* elements of a plane */
  bool failed;
} FN(planes);

static void FN(some_planes)(void *context, int64_t begin, int64_t end) {
  FN(planes) *p = context;
  for (int64_t i = begin; i < end && !ty_interrupted; i++) {
    FN(job) rows = p->rows, columns = p->columns;
    rows.x += i * p->from, rows.y += i * p->to;
    columns.y += i * p->to, columns.x = columns.y;
    if (!FN(run)(&rows) || !FN(run)(&columns)) p->failed = true;
  }
}

/* One by one where the columns then find a plane in the second cache. */
static bool FN(run_planes)(FN(planes) * p, int64_t count) {
  if (count >= ty_parallel_threads() && p->to * (int64_t)sizeof(REAL) <= 3 << 18) {
    ty_parallel_for(count, 1 + 32768 / p->to, FN(some_planes), p);
    return !p->failed;
  }
  p->rows.lines *= count, p->columns.lines *= count;
  return FN(run)(&p->rows) && FN(run)(&p->columns);
}

#include "fft_conv.h"

#undef VEC
#undef LOOSE
