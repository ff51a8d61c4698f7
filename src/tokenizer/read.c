/* tokenizer.json: the whole, its added tokens, and what is made of it once everything is there. */
#include "read.h"

#include <stdlib.h>

/* ---- values ---- */

bool ty_read_bool(ty_reading *r, bool *out) {
  ty_json_kind kind = ty_json_peek(&r->j);
  if (kind != TY_JSON_TRUE && kind != TY_JSON_FALSE)
    return kind == TY_JSON_BAD ? false : ty_json_fail(&r->j, "expected true or false");
  *out = kind == TY_JSON_TRUE;
  return ty_json_word(&r->j);
}

bool ty_read_count(ty_reading *r, uint64_t most, uint64_t *out) {
  ty_json_value v;
  ty_json_kind kind = ty_json_peek(&r->j);
  if (kind == TY_JSON_BAD) return false;
  if (kind != TY_JSON_NUMBER) return ty_json_fail(&r->j, "expected a number");
  if (!ty_json_number(&r->j, &v)) return false;
  if (!v.is_integer || v.integer < 0 || (uint64_t)v.integer > most)
    return ty_json_fail(&r->j, "expected an integer from 0 to %llu", (unsigned long long)most);
  *out = (uint64_t)v.integer;
  return true;
}

bool ty_read_text(ty_reading *r, ty_str *out) {
  const char *s;
  size_t n;
  return ty_json_string(&r->j, &s, &n) && ty_arena_text(&r->t->arena, s, n, out);
}

bool ty_read_null(ty_reading *r, bool *null) {
  ty_json_kind kind = ty_json_peek(&r->j);
  *null = kind == TY_JSON_NULL;
  if (kind == TY_JSON_BAD) return false;
  return !*null || ty_json_word(&r->j);
}

bool ty_read_type(ty_reading *r, ty_str *out) {
  ty_json *j = &r->j;
  const char *p = j->p, *s;
  int depth = j->depth;
  bool first = j->first, more, found = false;
  size_t n;
  *out = (ty_str){ "", 0 };
  if (!ty_json_enter(j, '{')) return false;
  while (!found) {
    if (!ty_json_next(j, &more)) return false;
    if (!more) break;
    if (!ty_json_key(j, &s, &n)) return false;
    found = ty_key_is(s, n, "type");
    if (found ? !ty_json_string(j, &s, &n) : !ty_json_skip(j)) return false;
    if (found) *out = (ty_str){ s, n };
  }
  j->p = p, j->depth = depth, j->first = first;
  return true;
}

/* ---- added tokens ---- */

static bool added_token(ty_reading *r, ty_added *a) {
  const char *key;
  size_t n;
  bool more, has_id = false, has_content = false, has_normalized = false;
  uint64_t id = 0;
  *a = (ty_added){ 0 };
  if (!ty_json_enter(&r->j, '{')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) {
      if (!has_id || !has_content) return ty_json_fail(&r->j, "an added token needs id and content");
      a->id = (uint32_t)id;
      if (!has_normalized) a->normalized = !a->special;
      return true;
    }
    if (!ty_json_key(&r->j, &key, &n)) return false;
    bool ok;
    if (ty_key_is(key, n, "id")) ok = has_id = ty_read_count(r, 1 << 28, &id);
    else if (ty_key_is(key, n, "content")) ok = has_content = ty_read_text(r, &a->content);
    else if (ty_key_is(key, n, "single_word")) ok = ty_read_bool(r, &a->single_word);
    else if (ty_key_is(key, n, "lstrip")) ok = ty_read_bool(r, &a->left);
    else if (ty_key_is(key, n, "rstrip")) ok = ty_read_bool(r, &a->right);
    else if (ty_key_is(key, n, "normalized")) ok = has_normalized = ty_read_bool(r, &a->normalized);
    else if (ty_key_is(key, n, "special")) ok = ty_read_bool(r, &a->special);
    else ok = ty_json_skip(&r->j);
    if (!ok) return false;
  }
  return false;
}

static bool added_tokens(ty_reading *r) {
  ty_tokenizer *t = r->t;
  size_t capacity = 0;
  bool more, null;
  if (!ty_read_null(r, &null) || null) return null;
  if (!ty_json_enter(&r->j, '[')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return true;
    if (!ty_grow(&t->added, &capacity, t->added_count, 1, sizeof *t->added)) return false;
    if (!added_token(r, &t->added[t->added_count])) return false;
    if (t->added[t->added_count].content.size) t->added_count++;
  }
  return false;
}

static bool padding(ty_reading *r) {
  const char *key, *side;
  size_t n;
  uint64_t id;
  bool more, null;
  if (!ty_read_null(r, &null) || null) return null;
  if (!ty_json_enter(&r->j, '{')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return true;
    if (!ty_json_key(&r->j, &key, &n)) return false;
    if (ty_key_is(key, n, "pad_id")) {
      if (!ty_read_count(r, UINT32_MAX - 1, &id)) return false;
      r->t->pad_id = (int64_t)id;
    } else if (ty_key_is(key, n, "direction")) {
      if (!ty_json_string(&r->j, &side, &n)) return false;
      r->t->pad_left = ty_key_is(side, n, "Left");
    } else if (!ty_json_skip(&r->j)) {
      return false;
    }
  }
  return false;
}

/* ---- the whole ---- */

typedef bool stage_fn(ty_reading *r);

static bool stage(ty_reading *r, stage_fn *read) {
  bool null;
  return ty_read_null(r, &null) && (null || read(r));
}

static bool read_all(ty_reading *r) {
  const char *key;
  size_t n;
  bool more, has_model = false;
  if (!ty_json_enter(&r->j, '{')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) {
      if (!has_model) return ty_json_fail(&r->j, "there is no model");
      return ty_json_finish(&r->j);
    }
    if (!ty_json_key(&r->j, &key, &n)) return false;
    bool ok, again = false;
    if (ty_key_is(key, n, "added_tokens")) again = r->t->added != NULL, ok = again || added_tokens(r);
    else if (ty_key_is(key, n, "normalizer"))
      again = r->t->normalizers.count, ok = again || stage(r, ty_read_normalizer);
    else if (ty_key_is(key, n, "pre_tokenizer"))
      again = r->t->pre_tokenizers.count, ok = again || stage(r, ty_read_pre_tokenizer);
    else if (ty_key_is(key, n, "post_processor"))
      again = r->t->has_template || r->t->trims, ok = again || stage(r, ty_read_post_processor);
    else if (ty_key_is(key, n, "decoder")) again = r->t->decoders.count, ok = again || stage(r, ty_read_decoder);
    else if (ty_key_is(key, n, "padding")) ok = padding(r);
    else if (ty_key_is(key, n, "model")) again = has_model, ok = again || (has_model = ty_read_model(r));
    else ok = ty_json_skip(&r->j);
    if (again) return ty_json_fail(&r->j, "a key is there twice");
    if (!ok) return false;
  }
  return false;
}

static int by_id(const void *pa, const void *pb) {
  const ty_added *a = pa, *b = pb;
  return (a->id > b->id) - (a->id < b->id);
}

/* Which tokens decoding leaves out with the special ones: those that the normalizers have made, or left, one of them.
 * The reference goes by the text that it puts out, and so does this. */
static bool mark_skipped(ty_tokenizer *t) {
  ty_vocab special = { .token = calloc(t->added_count + 1, sizeof *special.token) };
  if (!special.token) return ty_fail(TY_ENOMEM, "no memory for a tokenizer");
  for (size_t i = 0; i < t->added_count; i++)
    if (t->added[i].special) special.token[special.size++] = t->added[i].content;
  bool ok = ty_vocab_build(&special);
  for (size_t i = 0; ok && i < t->added_count; i++) {
    ty_added *a = &t->added[i];
    a->skipped = ty_vocab_find(&special, a->normal.text, a->normal.size) != TY_NO_ID;
  }
  ty_vocab_free(&special);
  return ok;
}

/* Ids, what the tokens look like after the normalizers, and the tries that find them. */
static bool finish_added(ty_tokenizer *t, const char *name) {
  t->size = t->vocab.size;
  for (size_t i = 0; i < t->added_count; i++) {
    ty_added *a = &t->added[i];
    uint32_t known = ty_vocab_find(&t->vocab, a->content.text, a->content.size);
    if (known != TY_NO_ID) a->id = known; /* the model's own */
    if (a->id >= (uint64_t)t->vocab.size * 2 + t->added_count + 65536)
      return ty_fail(TY_EIO, "%s: the id %u of the added token %s is far out of the vocabulary of %u tokens",
                     ty_quote_text(name), a->id, ty_quote(a->content.text, a->content.size), t->vocab.count);
    if (a->id >= t->size) t->size = a->id + 1;
  }
  if (t->added_count) qsort(t->added, t->added_count, sizeof *t->added, by_id);
  size_t kept = 0; /* a token that is there twice counts once */
  for (size_t i = 0; i < t->added_count; i++) {
    ty_added *a = &t->added[i], *b = kept ? &t->added[kept - 1] : NULL;
    if (b && b->id == a->id) {
      if (b->content.size != a->content.size || memcmp(b->content.text, a->content.text, a->content.size) != 0)
        return ty_fail(TY_EIO, "%s: the id %u belongs to two added tokens", ty_quote_text(name), a->id);
      *b = *a;
    } else {
      t->added[kept++] = *a;
    }
  }
  t->added_count = kept;
  ty_trie_entry *entries = malloc((kept + 1) * sizeof *entries);
  ty_work *w = ty_work_take(t);
  bool ok = w && (entries || ty_fail(TY_ENOMEM, "no memory for a tokenizer"));
  for (int normal = 0; ok && normal < 2; normal++) {
    size_t count = 0;
    for (size_t i = 0; ok && i < kept; i++) {
      ty_added *a = &t->added[i];
      if (a->normalized != (bool)normal) continue;
      ty_piece p = { (const uint8_t *)a->content.text, a->content.size, NULL, 0 };
      a->normal = a->content;
      if (normal) ok = ty_normalize(t, w, &p) && ty_arena_text(&t->arena, (const char *)p.text, p.size, &a->normal);
      if (ok && a->normal.size) entries[count++] = (ty_trie_entry){ a->normal, (uint32_t)i };
    }
    if (ok && count) ok = ty_trie_build(normal ? &t->normal_added : &t->raw_added, entries, count);
  }
  free(entries);
  if (w) ty_work_give(t, w);
  return ok && mark_skipped(t);
}

static bool finish(ty_tokenizer *t, const char *name) {
  ty_components *p = &t->pre_tokenizers;
  for (size_t i = 0; i < p->count; i++)
    t->tracks |= p->item[i].kind == TY_METASPACE && p->item[i].prepend == TY_PREPEND_FIRST && t->normalizers.count > 0;
  for (uint32_t i = 0; i < t->vocab.size; i++)
    if (t->vocab.token[i].text && t->vocab.token[i].size > t->longest_token) t->longest_token = t->vocab.token[i].size;
  if (t->model == TY_BPE) {
    t->bpe.bytes = p->count && p->item[p->count - 1].kind == TY_BYTE_LEVEL && !t->bpe.byte_fallback;
    if (!ty_bpe_finish(&t->bpe, &t->arena, &t->vocab)) return false;
  }
  return finish_added(t, name);
}

ty_tokenizer *ty_tokenizer_read(const char *name, const char *text, size_t size) {
  ty_tokenizer *t = calloc(1, sizeof *t);
  if (!t) {
    ty_fail(TY_ENOMEM, "no memory for a tokenizer");
    return NULL;
  }
  pthread_mutex_init(&t->lock, NULL);
  t->pad_id = -1;
  t->bpe.unknown = t->unigram.unknown = t->wordpiece.unknown = TY_NO_ID;
  ty_reading r = { .t = t };
  bool ok = ty_bytes_reserve(&t->json, 1) && ty_bytes_put(&t->json, text, size); /* no NULL, even of nothing */
  ty_json_open(&r.j, name, t->json.data, t->json.size);
  ok = ok && read_all(&r) && finish(t, name);
  ty_json_close(&r.j);
  if (ok) return t;
  ty_tokenizer_free(t);
  return NULL;
}

static void free_components(ty_components *c) {
  for (size_t i = 0; i < c->count; i++) {
    ty_pattern_free(&c->item[i].pattern);
    ty_charsmap_free(c->item[i].map);
  }
  free(c->item);
}

void ty_tokenizer_free(ty_tokenizer *t) {
  if (!t) return;
  free_components(&t->normalizers);
  free_components(&t->pre_tokenizers);
  free_components(&t->decoders);
  ty_vocab_free(&t->vocab);
  ty_bpe_free(&t->bpe);
  free(t->unigram.score);
  ty_trie_free(&t->unigram.trie);
  ty_trie_free(&t->raw_added);
  ty_trie_free(&t->normal_added);
  free(t->added);
  for (ty_work *w = t->idle, *next; w; w = next) {
    next = w->next;
    ty_work_free(w);
  }
  pthread_mutex_destroy(&t->lock);
  ty_bytes_free(&t->json);
  ty_arena_free(&t->arena);
  free(t);
}

/* ---- what a tokenizer says of itself ---- */

const char *ty_tokenizer_text(const ty_tokenizer *t, size_t *size) {
  *size = t->json.size;
  return (const char *)t->json.data;
}

uint32_t ty_tokenizer_size(const ty_tokenizer *t) { return t->size; }

const char *ty_tokenizer_model(const ty_tokenizer *t) {
  static const char *const names[] = { "BPE", "Unigram", "WordPiece", "WordLevel" };
  return names[t->model];
}

int64_t ty_tokenizer_pad_id(const ty_tokenizer *t, bool *left) {
  *left = t->pad_left;
  return t->pad_id;
}

bool ty_tokenizer_token(const ty_tokenizer *t, uint32_t id, ty_token_info *info) {
  const ty_added *a = ty_added_find(t, id);
  ty_str s = a ? a->content : id < t->vocab.size ? t->vocab.token[id] : (ty_str){ 0 };
  *info = (ty_token_info){ s.text, s.size, a != NULL, a && a->special };
  return s.text != NULL;
}

bool ty_tokenizer_id(const ty_tokenizer *t, const char *token, size_t size, uint32_t *id) {
  *id = ty_vocab_find(&t->vocab, token, size);
  for (size_t i = 0; *id == TY_NO_ID && i < t->added_count; i++)
    if (t->added[i].content.size == size && memcmp(t->added[i].content.text, token, size) == 0) *id = t->added[i].id;
  return *id != TY_NO_ID;
}
