/* The model of a tokenizer.json: its vocabulary, merges or scores. */
#include <math.h>
#include <stdlib.h>

#include "read.h"

typedef struct entry {
  ty_str token;
  uint32_t id;
} entry;

typedef struct model {
  ty_str type, unknown, prefix, suffix;
  bool has_prefix, has_vocab, scored; /* scored: the vocabulary is a list with scores */
  uint64_t unknown_id, longest;       /* unknown_id UINT64_MAX: none */
  entry *entry;
  size_t count, capacity, score_capacity;
  ty_json merges; /* where they are; p NULL: there are none */
} model;

enum { MOST_TOKENS = 1 << 28 };

static bool scored_entry(ty_reading *r, model *m) {
  bool more;
  ty_json_value v;
  double *score = &r->t->unigram.score[m->count];
  if (!ty_json_enter(&r->j, '[') || !ty_json_next(&r->j, &more)) return false;
  if (!more) return ty_json_fail(&r->j, "expected a token and its score");
  if (!ty_read_text(r, &m->entry[m->count].token) || !ty_json_next(&r->j, &more)) return false;
  if (!more) return ty_json_fail(&r->j, "the score is missing");
  if (!ty_json_number(&r->j, &v) || !ty_json_next(&r->j, &more)) return false;
  if (more) return ty_json_fail(&r->j, "expected a token and its score and no more");
  *score = v.number;
  m->entry[m->count].id = (uint32_t)m->count;
  return true;
}

static bool read_vocab(ty_reading *r, model *m) {
  const char *key;
  size_t n;
  bool more;
  uint64_t id;
  if (m->has_vocab) return ty_json_fail(&r->j, "a key is there twice");
  m->has_vocab = true;
  m->scored = ty_json_peek(&r->j) == TY_JSON_ARRAY;
  if (!ty_json_enter(&r->j, m->scored ? '[' : '{')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return true;
    if (!ty_grow(&m->entry, &m->capacity, m->count, 1, sizeof *m->entry)) return false;
    entry *e = &m->entry[m->count];
    if (m->scored) {
      if (!ty_grow(&r->t->unigram.score, &m->score_capacity, m->count, 1, sizeof(double)) || !scored_entry(r, m))
        return false;
    } else {
      if (!ty_json_key(&r->j, &key, &n) || !ty_arena_text(&r->t->arena, key, n, &e->token) ||
          !ty_read_count(r, MOST_TOKENS, &id))
        return false;
      e->id = (uint32_t)id;
    }
    if (++m->count > MOST_TOKENS) return ty_json_fail(&r->j, "too many tokens");
  }
  return false;
}

/* A text or null. */
static bool text_or_null(ty_reading *r, ty_str *out) {
  bool null;
  return ty_read_null(r, &null) && (null || ty_read_text(r, out));
}

static bool read_keys(ty_reading *r, model *m) {
  ty_bpe *b = &r->t->bpe;
  const char *key;
  size_t n;
  bool more, null = false;
  if (!ty_json_enter(&r->j, '{')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return true;
    if (!ty_json_key(&r->j, &key, &n)) return false;
    bool ok;
    if (ty_key_is(key, n, "type")) ok = ty_read_text(r, &m->type);
    else if (ty_key_is(key, n, "vocab")) ok = read_vocab(r, m);
    else if (ty_key_is(key, n, "merges"))
      m->merges = r->j, ok = ty_json_skip(&r->j); /* the vocabulary may come later */
    else if (ty_key_is(key, n, "unk_token")) ok = text_or_null(r, &m->unknown);
    else if (ty_key_is(key, n, "unk_id"))
      ok = ty_read_null(r, &null) && (null || ty_read_count(r, MOST_TOKENS, &m->unknown_id));
    else if (ty_key_is(key, n, "continuing_subword_prefix")) m->has_prefix = true, ok = text_or_null(r, &m->prefix);
    else if (ty_key_is(key, n, "end_of_word_suffix")) ok = text_or_null(r, &m->suffix);
    else if (ty_key_is(key, n, "fuse_unk")) ok = ty_read_bool(r, &b->fuse_unknown);
    else if (ty_key_is(key, n, "byte_fallback")) ok = ty_read_bool(r, &b->byte_fallback);
    else if (ty_key_is(key, n, "ignore_merges")) ok = ty_read_bool(r, &b->ignore_merges);
    else if (ty_key_is(key, n, "max_input_chars_per_word")) ok = ty_read_count(r, INT64_MAX, &m->longest);
    else ok = ty_json_skip(&r->j);
    if (!ok) return false;
  }
  return false;
}

static bool build_vocab(ty_reading *r, model *m) {
  ty_vocab *v = &r->t->vocab;
  uint32_t size = 0;
  for (size_t i = 0; i < m->count; i++)
    if (m->entry[i].id >= size) size = m->entry[i].id + 1;
  if (size > m->count * 4 + 65536)
    return ty_fail(TY_EIO, "%s: ids go up to %u, but there are only %zu tokens", ty_quote_text(r->j.name), size - 1,
                   m->count);
  v->token = calloc((size_t)size + 1, sizeof *v->token);
  if (!v->token) return ty_fail(TY_ENOMEM, "no memory for a vocabulary of %u tokens", size);
  v->size = size;
  for (size_t i = 0; i < m->count; i++) {
    ty_str *s = &v->token[m->entry[i].id];
    if (s->text)
      return ty_fail(TY_EIO, "%s: the id %u belongs to two tokens: %s and %s", ty_quote_text(r->j.name), m->entry[i].id,
                     ty_quote(s->text, s->size), ty_quote(m->entry[i].token.text, m->entry[i].token.size));
    *s = m->entry[i].token;
  }
  return ty_vocab_build(v);
}

/* ---- merges ---- */

static bool one_merge(ty_reading *r, const model *m, ty_bytes *text, uint32_t rank) {
  const ty_vocab *v = &r->t->vocab;
  const char *s;
  size_t n, left;
  bool more;
  text->size = 0;
  if (ty_json_peek(&r->j) == TY_JSON_STRING) {
    if (!ty_json_string(&r->j, &s, &n) || !ty_bytes_put(text, s, n)) return false;
    const char *blank = n ? memchr(text->data, ' ', n) : NULL;
    left = blank ? (size_t)(blank - (const char *)text->data) : n;
    if (!blank || memchr(blank + 1, ' ', n - left - 1))
      return ty_json_fail(&r->j, "merge %u is not two tokens with a space between them", rank);
    memmove(text->data + left, text->data + left + 1, n - left - 1);
    text->size--;
  } else {
    if (!ty_json_enter(&r->j, '[') || !ty_json_next(&r->j, &more)) return false;
    if (!more) return ty_json_fail(&r->j, "merge %u is empty", rank);
    if (!ty_json_string(&r->j, &s, &left) || !ty_bytes_put(text, s, left) || !ty_json_next(&r->j, &more)) return false;
    if (!more) return ty_json_fail(&r->j, "merge %u has one token only", rank);
    if (!ty_json_string(&r->j, &s, &n) || !ty_bytes_put(text, s, n) || !ty_json_next(&r->j, &more)) return false;
    if (more) return ty_json_fail(&r->j, "merge %u has more than two tokens", rank);
  }
  if (!ty_bytes_reserve(text, 1)) return false; /* so that there is a pointer */
  char *p = (char *)text->data;
  size_t right = text->size - left, skip = m->prefix.size;
  uint32_t a = ty_vocab_find(v, p, left), b = ty_vocab_find(v, p + left, right);
  if (a == TY_NO_ID || b == TY_NO_ID || right < skip)
    return ty_json_fail(&r->j, "merge %u: %s is not in the vocabulary", rank,
                        a == TY_NO_ID ? ty_quote(p, left) : ty_quote(p + left, right));
  memmove(p + left, p + left + skip, right - skip);
  uint32_t id = ty_vocab_find(v, p, left + right - skip);
  if (id == TY_NO_ID)
    return ty_json_fail(&r->j, "merge %u: its result %s is not in the vocabulary", rank,
                        ty_quote(p, left + right - skip));
  return ty_bpe_merge(&r->t->bpe, a, b, rank, id);
}

static bool read_merges(ty_reading *r, model *m) {
  ty_bytes text = { 0 }, scratch = r->j.scratch;
  ty_json after = r->j;
  bool more, ok;
  size_t count = 0;
  if (!m->merges.p) return ty_bpe_prepare(&r->t->bpe, 0);
  /* Twice: to count them, and to read them. The memory for strings may have moved since. */
  r->j = m->merges;
  r->j.scratch = scratch;
  ok = ty_json_enter(&r->j, '[');
  while (ok && (ok = ty_json_next(&r->j, &more)) && more && (ok = ty_json_skip(&r->j))) count++;
  scratch = r->j.scratch;
  r->j = m->merges;
  r->j.scratch = scratch;
  ok = ok && ty_bpe_prepare(&r->t->bpe, count) && ty_json_enter(&r->j, '[');
  uint32_t rank = 0;
  while (ok && (ok = ty_json_next(&r->j, &more)) && more && (ok = one_merge(r, m, &text, rank))) rank++;
  scratch = r->j.scratch;
  if (ok) r->j = after;
  r->j.scratch = scratch;
  ty_bytes_free(&text);
  return ok;
}

/* ---- the four models ---- */

static bool unknown_token(ty_reading *r, const model *m, uint32_t *id) {
  if (!m->unknown.text) return true;
  *id = ty_vocab_find(&r->t->vocab, m->unknown.text, m->unknown.size);
  return true;
}

static bool make_bpe(ty_reading *r, model *m) {
  ty_bpe *b = &r->t->bpe;
  b->prefix = m->prefix, b->suffix = m->suffix;
  if (m->scored) return ty_json_fail(&r->j, "the vocabulary of a BPE model is an object");
  if (b->prefix.size > 64 || b->suffix.size > 64)
    return ty_json_fail(&r->j, "a prefix or suffix of more than 64 bytes");
  unknown_token(r, m, &b->unknown);
  if (m->unknown.size && b->unknown == TY_NO_ID)
    return ty_json_fail(&r->j, "unk_token %s is not in the vocabulary", ty_quote(m->unknown.text, m->unknown.size));
  return read_merges(r, m);
}

static bool make_unigram(ty_reading *r, model *m) {
  ty_unigram *u = &r->t->unigram;
  ty_vocab *v = &r->t->vocab;
  if (!m->scored) return ty_json_fail(&r->j, "the vocabulary of a Unigram model is a list of tokens and scores");
  if (m->unknown_id != UINT64_MAX && m->unknown_id >= v->size)
    return ty_json_fail(&r->j, "unk_id is not in the vocabulary");
  u->unknown = m->unknown_id == UINT64_MAX ? TY_NO_ID : (uint32_t)m->unknown_id;
  u->byte_fallback = r->t->bpe.byte_fallback;
  u->least = INFINITY;
  ty_trie_entry *entries = malloc(((size_t)v->size + 1) * sizeof *entries);
  if (!entries) return ty_fail(TY_ENOMEM, "no memory for a vocabulary of %u tokens", v->size);
  for (uint32_t i = 0; i < v->size; i++) {
    if (u->score[i] < u->least) u->least = u->score[i];
    entries[i] = (ty_trie_entry){ v->token[i], i };
  }
  bool ok = ty_trie_build(&u->trie, entries, v->size);
  free(entries);
  return ok;
}

bool ty_read_model(ty_reading *r) {
  ty_tokenizer *t = r->t;
  model m = { .unknown_id = UINT64_MAX, .longest = 100, .prefix = { "", 0 }, .suffix = { "", 0 } };
  bool ok = read_keys(r, &m);
  if (ok && !m.has_vocab) ok = ty_json_fail(&r->j, "the model has no vocabulary");
  ok = ok && build_vocab(r, &m);
  if (ok) {
    ty_str type = m.type;
    if (!type.size) /* old files do not say */
      type = m.merges.p     ? (ty_str){ "BPE", 3 }
             : m.scored     ? (ty_str){ "Unigram", 7 }
             : m.has_prefix ? (ty_str){ "WordPiece", 9 }
                            : (ty_str){ "WordLevel", 9 };
    t->wordpiece = (ty_wordpiece){ m.prefix, TY_NO_ID, m.longest };
    unknown_token(r, &m, &t->wordpiece.unknown);
    if (ty_str_is(type, "BPE")) t->model = TY_BPE, ok = make_bpe(r, &m);
    else if (ty_str_is(type, "Unigram")) t->model = TY_UNIGRAM, ok = make_unigram(r, &m);
    else if (ty_str_is(type, "WordPiece")) t->model = TY_WORDPIECE;
    else if (ty_str_is(type, "WordLevel")) t->model = TY_WORDLEVEL;
    else ok = ty_json_fail(&r->j, "unknown model %s", ty_quote(type.text, type.size));
    if (ok && m.scored && t->model != TY_UNIGRAM) ok = ty_json_fail(&r->j, "this model's vocabulary is an object");
  }
  free(m.entry);
  return ok;
}
