/* Plans of transforms: how lengths are taken apart, tables, and the plans that are kept. */
#include "fft_plan.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { PLANS = 32, BLOCKS = 128 };
static const size_t MOST_BYTES = (size_t)96 << 20; /* of the plans that nobody uses at the moment */

typedef struct stored {
  ty_fft_plan plan;
  void *block[BLOCKS];
  int blocks, users;
  size_t bytes;
  uint64_t used; /* when */
  bool kept;     /* in the table */
} stored;

/* A plan in the making. */
typedef struct maker {
  stored *s;
  bool wide, failed;
  int lanes;
} maker;

static void *room(maker *m, size_t bytes) {
  bytes = (bytes + 63) / 64 * 64 + 64;
  void *p = m->failed || m->s->blocks == BLOCKS ? NULL : aligned_alloc(64, bytes);
  if (!p) {
    m->failed = true;
    return NULL;
  }
  m->s->block[m->s->blocks++] = p;
  m->s->bytes += bytes;
  return p;
}

/* ---- roots of unity: exp(-2 pi i k / n), each the product of two from tables of about sqrt(n) ---- */

typedef struct number {
  long double re, im;
} number;

static number times(number a, number b) { return (number){ a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re }; }

static number root(int64_t k, int64_t n) {
  static const long double two_pi = 6.283185307179586476925286766559005768L;
  bool flip = false, swap = false, turn = false;
  k %= n;
  if (2 * k > n) k = n - k, flip = true; /* to the first half, quarter, eighth */
  if (4 * k > n) turn = true;
  int64_t a = turn ? n - 2 * k : 2 * k; /* halves of steps, as n / 2 - k may be none */
  if (4 * a > n) a = n - 2 * a, swap = true;
  else a = 2 * a;
  long double angle = two_pi * (long double)a / (4 * (long double)n), c = cosl(angle), s = sinl(angle);
  number w = swap ? (number){ s, c } : (number){ c, s };
  if (turn) w.re = -w.re;
  if (!flip) w.im = -w.im;
  return w;
}

typedef struct circle {
  int64_t n;
  int bits;
  number *high, *low;
} circle;

static bool make_circle(maker *m, circle *c, int64_t n) {
  c->n = n;
  for (c->bits = 1; (int64_t)1 << (2 * c->bits) < n;) c->bits++;
  const int64_t low = (int64_t)1 << c->bits, high = (n >> c->bits) + 1;
  c->low = m->failed ? NULL : malloc(sizeof *c->low * (size_t)(low + high));
  if (!c->low) {
    m->failed = true;
    return false;
  }
  c->high = c->low + low;
  for (int64_t k = 0; k < low; k++) c->low[k] = root(k, n);
  for (int64_t k = 0; k < high; k++) c->high[k] = root((k << c->bits) % n, n);
  return true;
}

static number at(const circle *c, int64_t k) {
  return times(c->high[k >> c->bits], c->low[k & (((int64_t)1 << c->bits) - 1)]);
}

static void put(const maker *m, void *table, int64_t at, long double x) {
  if (m->wide) ((double *)table)[at] = (double)x;
  else ((float *)table)[at] = (float)x;
}

static void put_pair(const maker *m, void *table, int64_t at, number x) {
  put(m, table, 2 * at, x.re);
  put(m, table, 2 * at + 1, x.im);
}

static size_t real_size(const maker *m) { return m->wide ? sizeof(double) : sizeof(float); }

/* count roots: exp(-2 pi i k / n). */
static const void *root_table(maker *m, int64_t n, int64_t count) {
  circle c;
  void *table = room(m, 2 * real_size(m) * (size_t)count);
  if (!table || !make_circle(m, &c, n)) return NULL;
  for (int64_t k = 0; k < count; k++) put_pair(m, table, k, at(&c, k));
  free(c.low);
  return table;
}

/* ---- lengths ---- */

static int64_t largest_prime(int64_t n) {
  int64_t most = 1;
  for (int64_t p = 2; p * p <= n; p++)
    while (n % p == 0) most = p, n /= p;
  return n > most ? n : most;
}

static bool smooth(int64_t n) { return largest_prime(n) <= TY_FFT_LARGEST; }

/* The shortest convenient length of at least n. */
static int64_t convenient(int64_t n) {
  static const int64_t odd[] = { 1, 3, 5, 9, 15 };
  int64_t best = INT64_MAX;
  for (int i = 0; i < 5; i++) {
    int64_t l = odd[i];
    while (l < n) l *= 2;
    if (l < best && (l % 64 == 0 || n < 64 || best == INT64_MAX)) best = l;
  }
  return best;
}

static double fill(int64_t n, int lanes) { return (double)((n + lanes - 1) / lanes * lanes) / (double)n; }

/* How badly n1 lines of n2, and the converse, fill vectors, and how unlike the two are. */
static double cost(int64_t n1, int64_t n2, int lanes) {
  double unlike = n1 < n2 ? (double)n2 / (double)n1 : (double)n1 / (double)n2;
  double chirps = (smooth(n1) ? 1 : 4) + (smooth(n2) ? 1 : 4);
  return (fill(n1, lanes) + fill(n2, lanes)) * chirps * (1 + 0.05 * log2(unlike));
}

/* n1 of the best matrix [n1, n / n1]; 1 when there is none. */
static int64_t cut(int64_t n, int lanes, double *least) {
  int64_t best = 1;
  *least = INFINITY;
  for (int64_t a = 2; a * a <= n; a++) {
    if (n % a) continue;
    for (int way = 0; way < 2; way++) {
      double c = cost(way ? n / a : a, way ? a : n / a, lanes);
      if (c < *least) *least = c, best = way ? n / a : a;
    }
  }
  return best;
}

bool ty_fft_cuts_well(int64_t n, int lanes) {
  double least;
  if (n % ((int64_t)lanes * lanes) == 0) return true;
  return cut(n, lanes, &least) > 1 && least < 5;
}

/* ---- chirps ---- */

/* y = the transform of x, `step` apart, by plain recursion over the factors; n has none beyond 5. */
static void transform(const circle *c, int64_t n, const number *x, int64_t step, number *y) {
  if (n == 1) {
    *y = *x;
    return;
  }
  const int64_t r = n % 2 == 0 ? 2 : n % 3 == 0 ? 3 : 5, m = n / r;
  for (int64_t j = 0; j < r; j++) transform(c, m, x + j * step, step * r, y + j * m);
  for (int64_t k = 0; k < m; k++) {
    number a[5];
    for (int64_t j = 0; j < r; j++) a[j] = times(y[j * m + k], at(c, j * k * (c->n / n)));
    for (int64_t q = 0; q < r; q++) {
      number sum = a[0];
      for (int64_t j = 1; j < r; j++) {
        number t = times(a[j], at(c, j * q % r * (c->n / r)));
        sum.re += t.re, sum.im += t.im;
      }
      y[q * m + k] = sum;
    }
  }
}

static void make_chirp(maker *m, int64_t n, int64_t length, const void **chirp, const void **spectrum) {
  circle half, whole;
  void *table = room(m, 2 * real_size(m) * (size_t)n), *image = room(m, 2 * real_size(m) * (size_t)length);
  if (!table || !image || !make_circle(m, &half, 2 * n)) return;
  number *x = calloc(2 * (size_t)length, sizeof *x), *y = x + length;
  if (!x || !make_circle(m, &whole, length)) {
    m->failed = true;
    free(x);
    free(half.low);
    return;
  }
  for (int64_t k = 0; k < n; k++) {
    number w = at(&half, k * k % (2 * n));
    put_pair(m, table, k, w);
    w.im = -w.im;
    x[k] = w;
    if (k) x[length - k] = w;
  }
  transform(&whole, length, x, 1, y);
  for (int64_t k = 0; k < length; k++)
    put_pair(m, image, k, (number){ y[k].re / (long double)length, y[k].im / (long double)length });
  free(x);
  free(half.low);
  free(whole.low);
  *chirp = table;
  *spectrum = image;
}

/* ---- plans ---- */

static int radices(int64_t n, int *radix) {
  int count = 0, twos = 0;
  for (; n % 2 == 0; n /= 2) twos++;
  int eights = twos % 3 == 1 && twos > 1 ? twos / 3 - 1 : twos / 3;
  for (int i = 0; i < eights; i++) radix[count++] = 8;
  twos -= 3 * eights;
  if (twos % 2) radix[count++] = 2;
  for (int64_t p = 3; n > 1; p += 2)
    for (; n % p == 0; n /= p) radix[count++] = (int)p;
  for (; twos > 1; twos -= 2) radix[count++] = 4; /* last, where a pass may write the result itself */
  return count;
}

static ty_fft_lanes *make_lanes(maker *m, int64_t n) {
  ty_fft_lanes *p = room(m, sizeof *p);
  if (!p) return NULL;
  memset(p, 0, sizeof *p);
  p->n = p->room = n;
  if (!smooth(n)) {
    int64_t length = convenient(2 * n - 1);
    p->inner = make_lanes(m, length);
    p->room = length;
    make_chirp(m, n, length, &p->chirp, &p->spectrum);
    return p;
  }
  p->passes = radices(n, p->radix);
  circle c;
  if (!make_circle(m, &c, n)) return NULL;
  int64_t rest = n;
  for (int i = 0; i < p->passes; i++) {
    const int r = p->radix[i];
    rest /= r;
    if (r > 8) p->circle[i] = root_table(m, r, r);
    void *table = rest > 1 ? room(m, 2 * real_size(m) * (size_t)(rest * (r - 1))) : NULL;
    p->twiddle[i] = table;
    for (int64_t j = 0; table && j < rest; j++)
      for (int k = 1; k < r; k++) put_pair(m, table, j * (r - 1) + k - 1, at(&c, j * k * (n / (r * rest))));
  }
  free(c.low);
  return p;
}

static ty_fft_line *make_line(maker *m, int64_t n) {
  ty_fft_line *p = room(m, sizeof *p);
  if (!p) return NULL;
  memset(p, 0, sizeof *p);
  p->n = n;
  double least;
  const int64_t prime = largest_prime(n), lanes = m->lanes;
  p->n1 = cut(n, (int)lanes, &least);
  if (prime > TY_FFT_LARGEST && (n / prime < lanes || prime > 4096)) {
    int64_t length = convenient(2 * n - 1);
    p->inner = make_line(m, length);
    make_chirp(m, n, length, &p->chirp, &p->spectrum);
    return p;
  }
  p->n2 = n / p->n1;
  p->first = make_lanes(m, p->n1);
  p->second = make_lanes(m, p->n2);
  const int64_t blocks = (p->n2 + lanes - 1) / lanes, pairs = m->wide ? 1 : 2;
  void *table = room(m, 2 * real_size(m) * (size_t)(blocks * lanes * p->n1));
  circle c;
  if (!table || !make_circle(m, &c, n)) return NULL;
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t k = 0; k < p->n1; k++)
      for (int64_t l = 0; l < lanes; l++) {
        int64_t column = b * lanes + TY_FFT_ORDER(l, lanes, pairs);
        number w = column < p->n2 ? at(&c, column * k) : (number){ 0, 0 };
        put(m, table, ((b * p->n1 + k) * 2) * lanes + l, w.re);
        put(m, table, ((b * p->n1 + k) * 2 + 1) * lanes + l, w.im);
      }
  free(c.low);
  p->between = table;
  return p;
}

static void discard(stored *s) {
  for (int i = 0; i < s->blocks; i++) free(s->block[i]);
  free(s);
}

static stored *make_plan(const ty_fft_key *key) {
  stored *s = calloc(1, sizeof *s);
  if (!s) {
    ty_fail(TY_ENOMEM, "no memory for the tables of a transform of %lld positions", (long long)key->n);
    return NULL;
  }
  maker m = { s, key->wide, false, key->lanes };
  ty_fft_plan *p = &s->plan;
  p->key = *key;
  p->packed = key->real && key->n % 2 == 0;
  p->length = p->packed ? key->n / 2 : key->n;
  if (key->by_line) p->line = make_line(&m, p->length);
  else p->lanes = make_lanes(&m, p->length);
  if (p->packed) p->roots = root_table(&m, key->n, p->length / 2 + 1);
  if (key->cosine) p->quarter = root_table(&m, 4 * key->n, key->n / 2 + 1);
  if (!m.failed) return s;
  discard(s);
  ty_fail(TY_ENOMEM, "no memory for the tables of a transform of %lld positions", (long long)key->n);
  return NULL;
}

/* ---- those that were made ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stored *table[PLANS];
static uint64_t clock_;

static bool same(const ty_fft_key *a, const ty_fft_key *b) {
  return a->n == b->n && a->lanes == b->lanes && a->wide == b->wide && a->by_line == b->by_line && a->real == b->real &&
         a->cosine == b->cosine;
}

/* Under the lock: a place in the table for `bytes` more, or -1. */
static int make_place(size_t bytes) {
  for (;;) {
    size_t held = bytes;
    int empty = -1, oldest = -1;
    for (int i = 0; i < PLANS; i++) {
      if (!table[i]) {
        empty = i;
        continue;
      }
      held += table[i]->bytes;
      if (table[i]->users == 0 && (oldest < 0 || table[i]->used < table[oldest]->used)) oldest = i;
    }
    if (empty >= 0 && held <= MOST_BYTES) return empty;
    if (oldest < 0) return -1;
    discard(table[oldest]);
    table[oldest] = NULL;
  }
}

const ty_fft_plan *ty_fft_plan_open(const ty_fft_key *key) {
  stored *found = NULL;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < PLANS && !found; i++)
    if (table[i] && same(&table[i]->plan.key, key)) found = table[i];
  if (found) {
    found->users++;
    found->used = ++clock_;
  }
  pthread_mutex_unlock(&lock);
  if (found) return &found->plan;
  if (!(found = make_plan(key))) return NULL;
  pthread_mutex_lock(&lock);
  found->users = 1;
  found->used = ++clock_;
  int place = found->bytes <= MOST_BYTES ? make_place(found->bytes) : -1;
  if (place >= 0) {
    table[place] = found;
    found->kept = true;
  }
  pthread_mutex_unlock(&lock);
  return &found->plan;
}

void ty_fft_plan_close(const ty_fft_plan *plan) {
  stored *s = (stored *)(void *)(uintptr_t)plan; /* its first member */
  pthread_mutex_lock(&lock);
  bool last = --s->users == 0 && !s->kept;
  pthread_mutex_unlock(&lock);
  if (last) discard(s);
}
