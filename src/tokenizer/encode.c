/* Text to ids: added tokens, normalizers, added tokens again, words, the model, and what is put round it. */
#include <stdlib.h>

#include "internal.h"

/* ---- memory of a thread ---- */

ty_work *ty_work_take(ty_tokenizer *t) {
  pthread_mutex_lock(&t->lock);
  ty_work *w = t->idle;
  if (w) t->idle = w->next;
  pthread_mutex_unlock(&t->lock);
  if (!w) w = calloc(1, sizeof *w);
  if (!w) ty_fail(TY_ENOMEM, "no memory for a tokenizer's work");
  return w;
}

enum { MOST_IDLE = 1 << 26 }; /* bytes that are worth keeping for the next text */

void ty_work_give(ty_tokenizer *t, ty_work *w) {
  size_t held = (w->cuts.capacity + w->other_cuts.capacity) * sizeof(ty_cut) + w->repaired.text.capacity +
                w->normal[0].text.capacity + w->split[0].text.capacity + w->node_capacity * 16 +
                w->symbols.capacity * 24 + (w->first.capacity + w->second.capacity) * sizeof(uint32_t);
  if (held > MOST_IDLE) {
    ty_work_free(w);
    return;
  }
  pthread_mutex_lock(&t->lock);
  w->next = t->idle;
  t->idle = w;
  pthread_mutex_unlock(&t->lock);
}

void ty_encoding_free(ty_encoding *e) {
  free(e->ids);
  free(e->types);
  free(e->spans);
  *e = (ty_encoding){ 0 };
}

void ty_work_free(ty_work *w) {
  ty_matcher_free(&w->matcher);
  for (int i = 0; i < 2; i++) {
    ty_string_free(&w->normal[i]);
    ty_string_free(&w->split[i]);
  }
  ty_string_free(&w->repaired);
  free(w->cuts.item);
  free(w->other_cuts.item);
  free(w->symbols.id);
  free(w->symbols.order);
  free(w->symbols.heap);
  free(w->cache);
  free(w->nodes);
  ty_bytes_free(&w->scratch);
  ty_encoding_free(&w->first);
  ty_encoding_free(&w->second);
  free(w);
}

/* Room for more tokens. */
static bool reserve(ty_encoding *e, size_t more, bool types, bool spans) {
  size_t old = e->capacity, room = e->capacity;
  if (!ty_grow(&e->ids, &room, e->count, more, sizeof *e->ids)) return false;
  if (types && (room != old || !e->types)) {
    uint8_t *p = realloc(e->types, room);
    if (!p) return ty_fail(TY_ENOMEM, "no memory for %zu tokens", room);
    e->types = p;
  }
  e->capacity = room;
  return !spans || ty_grow(&e->spans, &e->span_capacity, e->count, room - e->count, sizeof *e->spans);
}

bool ty_emit_slow(ty_work *w) { return reserve(w->out, 1, false, w->spans); }

/* ---- added tokens ---- */

const ty_added *ty_added_find(const ty_tokenizer *t, uint32_t id) {
  size_t low = 0, high = t->added_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (t->added[middle].id < id) low = middle + 1;
    else high = middle;
  }
  return low < t->added_count && t->added[low].id == id ? &t->added[low] : NULL;
}

uint32_t ty_added_next(const ty_tokenizer *t, const ty_trie *trie, const uint8_t *text, size_t size, size_t from,
                       size_t *begin, size_t *end) {
  const ty_trie_node *root = trie->node;
  for (size_t i = from; i < size; i++) {
    uint32_t state = ty_trie_step(trie, 0, text[i]), best = TY_NO_ID;
    if (!state) {
      if (root->children == 1) { /* mostly they all begin with the same bracket */
        const uint8_t *p = memchr(text + i, trie->node[root->first].byte, size - i);
        if (!p) return TY_NO_ID;
        i = (size_t)(p - text) - 1;
      }
      continue;
    }
    for (size_t k = i + 1; state; k++) {
      if (trie->node[state].value != TY_NO_ID) best = trie->node[state].value, *end = k;
      if (k == size) break;
      state = ty_trie_step(trie, state, text[k]);
    }
    if (best == TY_NO_ID) continue;
    *begin = i;
    return best;
  }
  return TY_NO_ID;
}

typedef bool rest_fn(const ty_tokenizer *t, ty_work *w, const ty_piece *piece);

/* Emits the added tokens of a piece and hands on what is between them. */
static bool split_added(const ty_tokenizer *t, ty_work *w, const ty_trie *trie, const ty_piece *p, rest_fn *rest) {
  size_t done = 0, from = 0, begin, end;
  uint32_t found;
  unsigned n;
  while (trie->node && (found = ty_added_next(t, trie, p->text, p->size, from, &begin, &end)) != TY_NO_ID) {
    const ty_added *a = &t->added[found];
    from = end;
    if (w->plain && a->special) continue;
    if (a->single_word && ((begin && ty_is_word(ty_char_before(p->text + begin, &n))) ||
                           (end < p->size && ty_is_word(ty_char_at(p->text + end, &n)))))
      continue;
    if (a->left)
      while (begin > done && ty_is_space(ty_char_before(p->text + begin, &n))) begin -= n;
    if (a->right)
      while (end < p->size && ty_is_space(ty_char_at(p->text + end, &n))) end += n;
    if (done < begin) {
      ty_piece part = ty_piece_part(p, done, begin);
      if (!rest(t, w, &part)) return false;
    }
    ty_span span = ty_piece_span(p, begin, end);
    if (!ty_emit(w, a->id, span.begin, span.end)) return false;
    done = end;
  }
  if (done == p->size) return true;
  ty_piece part = ty_piece_part(p, done, p->size);
  return rest(t, w, &part);
}

/* ---- words ---- */

static bool words(const ty_tokenizer *t, ty_work *w, const ty_piece *from) {
  ty_piece piece = *from;
  size_t first = w->out->count;
  if (!ty_pretokenize(t, w, &piece)) return false;
  bool (*word)(const ty_tokenizer *, ty_work *, const uint8_t *, size_t, size_t) = t->model == TY_BPE ? ty_bpe_word
                                                                                   : t->model == TY_UNIGRAM
                                                                                       ? ty_unigram_word
                                                                                   : t->model == TY_WORDPIECE
                                                                                       ? ty_wordpiece_word
                                                                                       : ty_wordlevel_word;
  for (size_t i = 0; i < w->cuts.count; i++) {
    ty_cut c = w->cuts.item[i];
    if (!word(t, w, piece.text + c.begin, c.end - c.begin, c.begin)) return false;
    if (i % 65536 == 65535 && ty_interrupted) return ty_fail(TY_EINTR, "interrupted");
  }
  if (!w->spans) return true;
  for (size_t i = first; i < w->out->count; i++) {
    ty_span *s = &w->out->spans[i];
    if (!piece.spans) { /* bytes of a character: all of it */
      while (s->begin && (piece.text[s->begin] & 0xc0) == 0x80) s->begin--;
      while (s->end < piece.size && (piece.text[s->end] & 0xc0) == 0x80) s->end++;
    }
    *s = ty_piece_span(&piece, s->begin, s->end);
  }
  return true;
}

static bool normal_text(const ty_tokenizer *t, ty_work *w, const ty_piece *from) {
  ty_piece piece = *from;
  return ty_normalize(t, w, &piece) && split_added(t, w, &t->normal_added, &piece, words);
}

/* U+FFFD for what is no UTF-8. */
static bool repair(ty_work *w, ty_piece *p) {
  unsigned bad;
  size_t good = ty_utf8_span(p->text, p->size, &bad);
  if (good == p->size) return true;
  ty_string *out = &w->repaired;
  out->tracked = w->tracked;
  out->text.size = out->from.size = 0;
  for (size_t at = 0; at < p->size;) {
    good = ty_utf8_span(p->text + at, p->size - at, &bad);
    unsigned n;
    for (size_t end = at + good; at < end; at += n) {
      ty_char_at(p->text + at, &n);
      if (!ty_string_put(out, p->text + at, n, (ty_span){ (uint32_t)at, (uint32_t)(at + n) })) return false;
    }
    if (bad && !ty_string_put(out, "\xef\xbf\xbd", 3, (ty_span){ (uint32_t)at, (uint32_t)(at + bad) })) return false;
    at += bad;
  }
  *p = (ty_piece){ out->text.data, out->text.size, out->tracked ? (const ty_span *)(const void *)out->from.data : NULL,
                   0 };
  return true;
}

/* Blanks at the ends of a string, a blank of byte-level models among them. */
static void count_blanks(const uint8_t *text, size_t size, uint32_t *leading, uint32_t *trailing) {
  const uint8_t *p = text, *end = text + size;
  unsigned n;
  uint32_t c;
  *leading = *trailing = 0;
  for (; p < end && ((c = ty_char_at(p, &n)) == 0x120 || ty_is_space(c)); p += n) ++*leading;
  for (; end > text && ((c = ty_char_before(end, &n)) == 0x120 || ty_is_space(c)); end -= n) ++*trailing;
}

/* ByteLevel and Roberta leave the blanks at the ends of a token out of its span. They go by what the token's string
 * is, character by character; that of an added token is what stands in the text. */
static void trim(const ty_tokenizer *t, ty_encoding *e, const uint8_t *text, size_t size) {
  for (size_t i = 0; i < e->count; i++) {
    ty_span *s = &e->spans[i];
    const ty_added *a = ty_added_find(t, e->ids[i]);
    uint32_t leading, trailing;
    unsigned bad;
    bool valid = a && ty_utf8_span(text + s->begin, s->end - s->begin, &bad) == s->end - s->begin;
    ty_str token = valid ? (ty_str){ (const char *)text + s->begin, s->end - s->begin }
                   : a   ? a->content
                         : t->vocab.token[e->ids[i]];
    count_blanks((const uint8_t *)token.text, token.size, &leading, &trailing);
    if (leading == 1 && t->trim_prefix_space && (i == 0 || s->begin == 0)) leading = 0;
    for (; leading && s->begin < s->end; leading--) do
        s->begin++;
      while (s->begin < s->end && (text[s->begin] & 0xc0) == 0x80);
    for (; trailing && s->end > s->begin; trailing--) do
        s->end--;
      while (s->end > s->begin && (text[s->end] & 0xc0) == 0x80);
  }
}

static bool encode_text(ty_tokenizer *t, ty_work *w, const char *text, size_t size, ty_encoding *out) {
  if (size >= UINT32_MAX) return ty_fail(TY_EINVAL, "tokenizer: a text of %zu bytes is too long", size);
  out->count = 0;
  w->out = out;
  if (!reserve(out, 1, false, w->spans)) return false; /* spans for all that was there without */
  ty_piece piece = { (const uint8_t *)text, size, NULL, 0 };
  if (size && (!repair(w, &piece) || !split_added(t, w, &t->raw_added, &piece, normal_text))) return false;
  if (w->spans && t->trims) trim(t, out, (const uint8_t *)text, size);
  return true;
}

/* ---- putting it together ---- */

static void keep(ty_encoding *e, size_t count, bool cut_left) {
  if (count >= e->count) return;
  size_t begin = cut_left ? e->count - count : 0;
  memmove(e->ids, e->ids + begin, count * sizeof *e->ids);
  if (e->spans && e->span_capacity >= e->count) memmove(e->spans, e->spans + begin, count * sizeof *e->spans);
  e->count = count;
}

/* The longer of two texts is cut first. */
static void cut(ty_encoding *a, ty_encoding *b, size_t most, bool cut_left) {
  if (a->count + b->count <= most) return;
  ty_encoding *small = a->count <= b->count ? a : b, *large = small == a ? b : a;
  size_t n1 = small->count, n2 = n1 > most ? n1 : most > 2 * n1 ? most - n1 : n1;
  if (n1 + n2 > most) n1 = most / 2, n2 = n1 + most % 2;
  keep(small, n1, cut_left);
  keep(large, n2, cut_left);
}

static bool append(ty_encoding *out, const ty_encoding *from, uint8_t type, bool spans) {
  if (!reserve(out, from->count, true, spans)) return false;
  if (from->count) memcpy(out->ids + out->count, from->ids, from->count * sizeof *from->ids);
  if (from->count) memset(out->types + out->count, type, from->count);
  if (from->count && spans) memcpy(out->spans + out->count, from->spans, from->count * sizeof *from->spans);
  out->count += from->count;
  return true;
}

static bool assemble(ty_tokenizer *t, ty_work *w, bool paired, const ty_encode_options *o, ty_encoding *out) {
  const ty_template *template = paired ? &t->pair : &t->single;
  size_t extra = 0;
  for (size_t i = 0; t->has_template && o->special && i < template->count; i++)
    if (!template->piece[i].sequence) extra += template->piece[i].count;
  if (!paired) w->second.count = 0;
  if (o->most) {
    if (o->most < extra)
      return ty_fail(TY_EINVAL, "tokenizer: expected at most %u tokens, but the special tokens alone are %zu", o->most,
                     extra);
    if (paired) cut(&w->first, &w->second, o->most - extra, o->cut_left);
    else keep(&w->first, o->most - extra, o->cut_left);
  }
  out->count = 0;
  if (!reserve(out, 1, true, o->spans)) return false; /* so that there is memory even for no tokens */
  if (!t->has_template) return append(out, &w->first, 0, o->spans) && append(out, &w->second, 1, o->spans);
  for (size_t i = 0; i < template->count; i++) {
    const ty_template_piece *p = &template->piece[i];
    if (p->sequence) {
      if (!append(out, p->second ? &w->second : &w->first, p->type, o->spans)) return false;
      continue;
    }
    if (!o->special) continue;
    if (!reserve(out, p->count, true, o->spans)) return false;
    for (uint32_t k = 0; k < p->count; k++) {
      out->ids[out->count] = p->ids[k];
      out->types[out->count] = p->type;
      if (o->spans) out->spans[out->count] = (ty_span){ 0 };
      out->count++;
    }
  }
  return true;
}

bool ty_tokenizer_encode(ty_tokenizer *t, const char *text, size_t size, const char *pair, size_t pair_size,
                         const ty_encode_options *options, ty_encoding *out) {
  ty_work *w = ty_work_take(t);
  if (!w) return false;
  w->spans = options->spans;
  w->tracked = options->spans || t->tracks;
  w->plain = options->plain;
  bool ok = encode_text(t, w, text, size, &w->first) && (!pair || encode_text(t, w, pair, pair_size, &w->second)) &&
            assemble(t, w, pair != NULL, options, out);
  ty_work_give(t, w);
  return ok;
}
