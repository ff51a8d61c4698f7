/* Learning merges: the most frequent pair of neighbours becomes a token, until there are enough. Counts of pairs are
 * kept up to date by the words that a merge changes, and a heap gives the next pair. Equal counts: the lower ids first.
 * The order of events is that of huggingface's BpeTrainer, so that the tokens are the same. */
#include "merges.h"

#include <stdlib.h>

typedef struct positions { /* words, each once */
  uint32_t *word;
  size_t count, capacity;
} positions;

typedef struct pair {
  uint32_t left, right;
  int64_t count;
  positions found; /* words where it has appeared since it was last put in the heap */
} pair;

typedef struct candidate {
  uint64_t count;
  uint32_t left, right, pair;
  positions in;
} candidate;

typedef struct learner {
  const ty_words *words;
  const ty_train_options *options;
  ty_learned *out;
  uint32_t *symbol; /* of all words */
  size_t *begin;    /* where each word's symbols begin; they end, ... */
  uint32_t *length; /* ... of each word, after the merges so far */
  uint32_t *size;   /* bytes of each token */
  pair *pairs;
  size_t pair_count, pair_capacity;
  uint32_t *table;
  size_t room;
  uint32_t *touched; /* pairs that have words in `found` */
  size_t touched_count, touched_capacity;
  candidate *heap;
  size_t heap_count, heap_capacity;
} learner;

/* ---- tokens ---- */

/* The token's id; a new one when there is none. */
static bool token_of(ty_learned *l, const char *text, size_t size, uint32_t *id) {
  ty_vocab *v = &l->vocab;
  uint32_t i = (uint32_t)ty_hash(text, size) & v->mask;
  for (; v->table[i] != TY_NO_ID; i = (i + 1) & v->mask) {
    ty_str s = v->token[v->table[i]];
    if (s.size != size || memcmp(s.text, text, size) != 0) continue;
    *id = v->table[i];
    return true;
  }
  *id = v->table[i] = v->size;
  return ty_arena_text(&l->arena, text, size, &v->token[v->size++]);
}

/* Special tokens and the 256 bytes in the order of their characters; byte_id: of each byte. */
static bool first_tokens(learner *l, uint32_t byte_id[256]) {
  const ty_train_options *o = l->options;
  ty_vocab *v = &l->out->vocab;
  uint64_t most = (uint64_t)o->vocabulary + 1, room = 1024;
  while (room < most * 2) room *= 2;
  v->token = calloc(most, sizeof *v->token);
  v->table = malloc(room * sizeof *v->table);
  l->size = calloc(most, sizeof *l->size);
  if (!v->token || !v->table || !l->size) return ty_fail(TY_ENOMEM, "no memory for %u tokens", o->vocabulary);
  memset(v->table, 0xff, room * sizeof *v->table);
  v->mask = (uint32_t)(room - 1);
  uint32_t id;
  for (size_t i = 0; i < o->special_count; i++)
    if (!token_of(l->out, o->special[i], o->special_size[i], &id)) return false;
  for (uint32_t c = 0; c < 0x144; c++) {
    uint8_t s[4];
    int byte = ty_char_byte(c);
    if (byte < 0) continue;
    if (!token_of(l->out, (const char *)s, ty_char_put(s, c), &id)) return false;
    byte_id[byte] = id;
    l->size[id] = 1;
  }
  return true;
}

/* ---- pairs ---- */

static bool grow_pairs(learner *l) {
  size_t room = l->room ? l->room * 2 : 4096;
  uint32_t *table = malloc(room * sizeof *table);
  if (!table) return ty_fail(TY_ENOMEM, "no memory for %zu pairs", l->pair_count);
  memset(table, 0xff, room * sizeof *table);
  for (size_t k = 0; k < l->pair_count; k++) {
    const uint32_t key[2] = { l->pairs[k].left, l->pairs[k].right };
    size_t i = ty_hash(key, sizeof key) & (room - 1);
    while (table[i] != UINT32_MAX) i = (i + 1) & (room - 1);
    table[i] = (uint32_t)k;
  }
  free(l->table);
  l->table = table;
  l->room = room;
  return true;
}

static bool pair_of(learner *l, uint32_t left, uint32_t right, uint32_t *out) {
  if (l->pair_count * 2 >= l->room && !grow_pairs(l)) return false;
  const uint32_t key[2] = { left, right };
  size_t i = ty_hash(key, sizeof key) & (l->room - 1);
  for (; l->table[i] != UINT32_MAX; i = (i + 1) & (l->room - 1)) {
    *out = l->table[i];
    if (l->pairs[*out].left == left && l->pairs[*out].right == right) return true;
  }
  if (!ty_grow(&l->pairs, &l->pair_capacity, l->pair_count, 1, sizeof *l->pairs)) return false;
  *out = l->table[i] = (uint32_t)l->pair_count++;
  l->pairs[*out] = (pair){ .left = left, .right = right };
  return true;
}

/* The pair is `times` more in a word, or less. */
static bool change(learner *l, uint32_t left, uint32_t right, uint32_t word, int64_t times) {
  uint32_t k;
  if (!pair_of(l, left, right, &k)) return false;
  pair *p = &l->pairs[k];
  p->count += times * (int64_t)l->words->word[word].count;
  positions *f = &p->found;
  if (times < 0 || (f->count && f->word[f->count - 1] == word)) return true;
  if (!f->count) {
    if (!ty_grow(&l->touched, &l->touched_capacity, l->touched_count, 1, sizeof *l->touched)) return false;
    l->touched[l->touched_count++] = k;
  }
  if (!ty_grow(&f->word, &f->capacity, f->count, 1, sizeof *f->word)) return false;
  f->word[f->count++] = word;
  return true;
}

/* ---- the heap ---- */

static bool before(const candidate *a, const candidate *b) {
  if (a->count != b->count) return a->count > b->count;
  return a->left != b->left ? a->left < b->left : a->right < b->right;
}

static bool push(learner *l, candidate c) {
  if (!ty_grow(&l->heap, &l->heap_capacity, l->heap_count, 1, sizeof *l->heap)) return false;
  size_t i = l->heap_count++;
  for (; i && before(&c, &l->heap[(i - 1) / 2]); i = (i - 1) / 2) l->heap[i] = l->heap[(i - 1) / 2];
  l->heap[i] = c;
  return true;
}

/* Puts c where the top was. */
static void sink(learner *l, candidate c) {
  size_t i = 0;
  for (;;) {
    size_t child = 2 * i + 1;
    if (child >= l->heap_count) break;
    if (child + 1 < l->heap_count && before(&l->heap[child + 1], &l->heap[child])) child++;
    if (!before(&l->heap[child], &c)) break;
    l->heap[i] = l->heap[child];
    i = child;
  }
  l->heap[i] = c;
}

static candidate pop(learner *l) {
  candidate top = l->heap[0], last = l->heap[--l->heap_count];
  if (l->heap_count) sink(l, last);
  return top;
}

/* What was touched becomes candidates. */
static bool push_touched(learner *l) {
  bool ok = true;
  for (size_t i = 0; i < l->touched_count; i++) {
    pair *p = &l->pairs[l->touched[i]];
    positions in = p->found;
    p->found = (positions){ 0 };
    if (ok && p->count > 0) {
      ok = push(l, (candidate){ (uint64_t)p->count, p->left, p->right, l->touched[i], in });
      if (ok) continue;
    }
    free(in.word);
  }
  l->touched_count = 0;
  return ok;
}

/* ---- learning ---- */

static bool count_pairs(learner *l, const uint32_t byte_id[256]) {
  const ty_words *w = l->words;
  l->symbol = malloc((w->text.size + 1) * sizeof *l->symbol);
  l->begin = malloc((w->count + 1) * sizeof *l->begin);
  l->length = malloc((w->count + 1) * sizeof *l->length);
  if (!l->symbol || !l->begin || !l->length) return ty_fail(TY_ENOMEM, "no memory for %zu words", w->count);
  for (size_t k = 0; k < w->count; k++) {
    const ty_word *word = &w->word[k];
    l->begin[k] = word->at;
    l->length[k] = word->size;
    uint32_t *s = l->symbol + word->at;
    for (uint32_t i = 0; i < word->size; i++) s[i] = byte_id[w->text.data[word->at + i]];
    for (uint32_t i = 0; i + 1 < word->size; i++)
      if (!change(l, s[i], s[i + 1], (uint32_t)k, 1)) return false;
  }
  return push_touched(l);
}

static bool fits(const learner *l, uint32_t a, uint32_t b) {
  return !l->options->longest || l->size[a] + l->size[b] < l->options->longest;
}

static bool merge_in_word(learner *l, uint32_t word, uint32_t left, uint32_t right, uint32_t new) {
  uint32_t *s = l->symbol + l->begin[word], n = l->length[word], to = 0;
  for (uint32_t i = 0; i < n;) {
    if (s[i] != left || i + 1 == n || s[i + 1] != right) {
      s[to++] = s[i++];
      continue;
    }
    if (to) {
      if (!change(l, s[to - 1], left, word, -1)) return false;
      if (fits(l, s[to - 1], new) && !change(l, s[to - 1], new, word, 1)) return false;
    }
    if (i + 2 < n) {
      if (!change(l, right, s[i + 2], word, -1)) return false;
      if (fits(l, s[i + 2], new) && !change(l, new, s[i + 2], word, 1)) return false;
    }
    s[to++] = new;
    i += 2;
  }
  l->length[word] = to;
  return true;
}

static bool merge_pair(learner *l, const candidate *c, ty_bytes *text) {
  ty_learned *out = l->out;
  ty_str a = out->vocab.token[c->left], b = out->vocab.token[c->right];
  uint32_t new;
  text->size = 0;
  if (!ty_bytes_put(text, a.text, a.size) || !ty_bytes_put(text, b.text, b.size) ||
      !token_of(out, (const char *)text->data, text->size, &new) ||
      !ty_grow(&out->merge, &out->capacity, out->merges, 1, sizeof *out->merge))
    return false;
  l->size[new] = l->size[c->left] + l->size[c->right];
  out->merge[out->merges][0] = c->left;
  out->merge[out->merges++][1] = c->right;
  for (size_t i = 0; i < c->in.count; i++)
    if (!merge_in_word(l, c->in.word[i], c->left, c->right, new)) return false;
  return push_touched(l);
}

static bool learn(learner *l) {
  const ty_train_options *o = l->options;
  ty_bytes text = { 0 };
  bool ok = true;
  while (ok && l->out->vocab.size < o->vocabulary && l->heap_count) {
    int64_t now = l->pairs[l->heap[0].pair].count;
    if (l->heap[0].count != (uint64_t)now) { /* it has become rarer: back to its place */
      candidate c = l->heap[0];
      c.count = now > 0 ? (uint64_t)now : 0;
      l->pairs[c.pair].count = now > 0 ? now : 0;
      sink(l, c);
      continue;
    }
    if (l->heap[0].count < 1 || l->heap[0].count < o->frequency) break;
    if (ty_interrupted) {
      ok = ty_fail(TY_EINTR, "interrupted");
      break;
    }
    candidate top = pop(l);
    ok = merge_pair(l, &top, &text);
    free(top.in.word);
  }
  ty_bytes_free(&text);
  return ok;
}

bool ty_learn_merges(const ty_words *words, const ty_train_options *options, ty_learned *out) {
  learner l = { .words = words, .options = options, .out = out };
  uint32_t byte_id[256];
  bool ok = first_tokens(&l, byte_id) && count_pairs(&l, byte_id) && learn(&l);
  for (size_t i = 0; i < l.pair_count; i++) free(l.pairs[i].found.word);
  for (size_t i = 0; i < l.heap_count; i++) free(l.heap[i].in.word);
  free(l.symbol);
  free(l.begin);
  free(l.length);
  free(l.size);
  free(l.pairs);
  free(l.table);
  free(l.touched);
  free(l.heap);
  return ok;
}

void ty_learned_free(ty_learned *l) {
  ty_vocab_free(&l->vocab);
  ty_arena_free(&l->arena);
  free(l->merge);
}
