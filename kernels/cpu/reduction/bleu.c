/* BLEU of token ids. The n-grams of a candidate go into a table, order by order: an n-gram is the place of its first
 * n - 1 ids in the table before and that of its last id in the first one, so that keys of 64 bits are exact. */
#include "../cpu.h"

#include <string.h>

#include "../../bleu.h"

typedef struct slot {
  uint64_t key;
  int32_t count;     /* in the candidate; 0: an empty slot */
  int32_t best;      /* the most in a reference, as far as it counts: at most `count` */
  int32_t now;       /* in `reference` */
  int32_t reference; /* the one that came by last, from 1 on */
} slot;

typedef struct bleu_ctx {
  const ty_p_bleu *p;
  int64_t n, t, r, s; /* candidates, their ids, references of each, ids of these */
  const int64_t *x, *y, *x_lengths, *y_lengths;
  int64_t *counts;
  char *scratch;
  size_t each; /* bytes of scratch of a task */
  int64_t tasks;
} bleu_ctx;

static int bits_of(int64_t entries) { /* a table of them is at most half full */
  int bits = 1;
  while ((int64_t)1 << bits < 2 * entries) bits++;
  return bits;
}

/* Where the key is, or the empty slot for it. */
static inline int32_t place_of(const slot *table, int bits, uint64_t key) {
  uint64_t at = key * 0x9e3779b97f4a7c15u >> (64 - bits), last = ((uint64_t)1 << bits) - 1;
  while (table[at].count && table[at].key != key) at = (at + 1) & last;
  return (int32_t)at;
}

/* The key of the n-gram at `i` from the places of what it is made of; false when the candidate lacks one of these. */
static inline bool key_of(const int64_t *ids, const int32_t *grams, const int32_t *ones, int64_t n, int64_t i,
                          uint64_t *key) {
  if (n == 1) {
    *key = (uint64_t)ids[i];
    return true;
  }
  *key = (uint64_t)(uint32_t)grams[i] << 32 | (uint32_t)ones[i + n - 1];
  return grams[i] >= 0 && ones[i + n - 1] >= 0;
}

static int64_t length_of(const bleu_ctx *c, const int64_t *ids, int64_t most, const int64_t *length) {
  if (length) return *length;
  int64_t i = 0;
  while (i < most && ids[i] != c->p->padding) i++;
  return i;
}

/* -1: it is not there. */
static int64_t reference_length(const bleu_ctx *c, int64_t row) {
  int64_t length = length_of(c, c->y + row * c->s, c->s, c->y_lengths ? c->y_lengths + row : NULL);
  return length == 0 && !c->y_lengths ? -1 : length;
}

/* Matches of the n-grams of one reference beyond those of the references before. Its places take the place of those
 * of its (n-1)-grams. */
static int64_t match(slot *table, int bits, const int64_t *ids, int64_t length, int64_t n, int32_t reference,
                     int32_t *grams, int32_t *ones) {
  int64_t matches = 0;
  for (int64_t i = 0; i + n <= length; i++) {
    uint64_t key;
    int32_t at = -1;
    if (key_of(ids, grams, ones, n, i, &key)) {
      at = place_of(table, bits, key);
      slot *x = table + at;
      if (!x->count) {
        at = -1;
      } else {
        if (x->reference != reference) x->reference = reference, x->now = 0;
        if (++x->now > x->best && x->best < x->count) x->best++, matches++;
      }
    }
    grams[i] = at;
    if (n == 1) ones[i] = at;
  }
  return matches;
}

static void count_row(const bleu_ctx *c, int64_t row, char *room) {
  int64_t order = c->p->order, *counts = c->counts + row * ty_bleu_width(c->p);
  const int64_t *ids = c->x + row * c->t;
  int64_t length = length_of(c, ids, c->t, c->x_lengths ? c->x_lengths + row : NULL), closest = -1;
  for (int64_t k = row * c->r; k < (row + 1) * c->r; k++) {
    int64_t other = reference_length(c, k);
    if (other >= 0 && (closest < 0 || ty_bleu_closer(other, closest, length))) closest = other;
  }
  for (int64_t n = 0; n < order; n++) counts[n] = 0, counts[order + n] = n < length ? length - n : 0;
  counts[2 * order] = length, counts[2 * order + 1] = closest < 0 ? 0 : closest;

  slot *table = (slot *)(void *)room;
  int bits = bits_of(length);
  int32_t *grams = (int32_t *)(void *)(table + ((int64_t)1 << bits)), *ones = grams + length, *others = ones + length;
  for (int64_t n = 1; n <= order && n <= length; n++) {
    memset(table, 0, sizeof *table << bits);
    for (int64_t i = 0; i + n <= length; i++) {
      uint64_t key;
      key_of(ids, grams, ones, n, i, &key);
      int32_t at = place_of(table, bits, key);
      table[at].key = key;
      table[at].count++;
      grams[i] = at;
      if (n == 1) ones[i] = at;
    }
    int64_t matches = 0;
    for (int64_t k = 0; k < c->r; k++) {
      int64_t other = reference_length(c, row * c->r + k);
      int32_t *theirs = others + k * 2 * c->s;
      matches += match(table, bits, c->y + (row * c->r + k) * c->s, other, n, (int32_t)k + 1, theirs, theirs + c->s);
    }
    counts[n - 1] = matches;
    if (!matches) break; /* no longer ones either */
  }
}

static void count_tasks(void *context, int64_t begin, int64_t end) {
  const bleu_ctx *c = context;
  int64_t share = (c->n + c->tasks - 1) / c->tasks;
  for (int64_t task = begin; task < end; task++)
    for (int64_t row = task * share; row < (task + 1) * share && row < c->n && !ty_interrupted; row++)
      count_row(c, row, c->scratch + (size_t)task * c->each);
}

static bool lengths_fit(const ty_view *lengths, int64_t low, int64_t most, const char *name) {
  for (int64_t i = 0; lengths && i < lengths->count; i++) {
    int64_t x = ((const int64_t *)lengths->data)[i];
    if (x < low || x > most)
      return ty_fail(TY_EINDEX, "bleu: %s: %lld at position %lld is not a length of a row of %lld ids", name,
                     (long long)x, (long long)i, (long long)most);
  }
  return true;
}

static void put(const ty_view *v, int64_t i, double x) {
  if (v->dtype == TY_F64) ((double *)v->data)[i] = x;
  else ((float *)v->data)[i] = (float)x;
}

/* One score of the sums; an order without n-grams counts as one n-gram in each sentence, as NLTK does. */
static bool score_corpus(const bleu_ctx *c, const double *weights, const ty_view *score) {
  int64_t width = ty_bleu_width(c->p), order = c->p->order;
  size_t bytes = (size_t)width * sizeof(int64_t);
  int64_t *sums = ty_scratch_alloc(bytes);
  if (!sums) return false;
  memset(sums, 0, bytes);
  for (int64_t row = 0; row < c->n; row++)
    for (int64_t i = 0; i < width; i++) {
      int64_t x = c->counts[row * width + i];
      sums[i] += i >= order && i < 2 * order && x < 1 ? 1 : x;
    }
  put(score, 0, ty_bleu_score(sums, weights, c->p));
  ty_scratch_free(sums, bytes);
  return true;
}

/* in: candidates, references, lengths of each, weights; out: score, counts. */
bool TY_KERNEL(bleu)(const ty_kernel_args *k) {
  const ty_view *x = k->in[0], *y = k->in[1];
  bleu_ctx c = { .p = k->params,
                 .n = x->size[0],
                 .t = x->size[1],
                 .r = y->ndim == 3 ? y->size[1] : 1,
                 .s = y->size[y->ndim - 1],
                 .x = x->data,
                 .y = y->data,
                 .x_lengths = k->in[2] ? k->in[2]->data : NULL,
                 .y_lengths = k->in[3] ? k->in[3]->data : NULL,
                 .counts = k->out[1]->data };
  const double *weights = k->in[4] ? k->in[4]->data : NULL;
  if (!lengths_fit(k->in[2], 0, c.t, "candidate_lengths") ||
      !lengths_fit(k->in[3], INT64_MIN, c.s, "reference_lengths"))
    return false;
  if (c.n) {
    /* Small work is one task; scratch grows with the tasks, not with the candidates. */
    c.tasks = c.n * (c.t + c.r * c.s) < 1024 ? 1 : ty_parallel_threads() * 4;
    if (c.tasks > c.n) c.tasks = c.n;
    c.each = (sizeof(slot) << bits_of(c.t)) + (size_t)(2 * c.t + 2 * c.r * c.s) * sizeof(int32_t);
    c.each = (c.each + 63) / 64 * 64;
    size_t bytes = (size_t)c.tasks * c.each;
    if (!(c.scratch = ty_scratch_alloc(bytes))) return false;
    ty_parallel_for(c.tasks, 1, count_tasks, &c);
    ty_scratch_free(c.scratch, bytes);
  }
  if (c.p->corpus) return score_corpus(&c, weights, k->out[0]);
  for (int64_t row = 0; row < c.n; row++)
    put(k->out[0], row, ty_bleu_score(c.counts + row * ty_bleu_width(c.p), weights, c.p));
  return true;
}
