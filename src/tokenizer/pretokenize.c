/* Pre-tokenizers: each cuts the words so far into smaller ones, by matches and what is to be done with them. */
#include "internal.h"

/* What is between matches, and matches, in order; `add` does with them what the behavior says. */
typedef struct splitter {
  ty_cuts *out;
  ty_behavior behavior;
  size_t first;  /* cuts of this word begin here */
  bool previous; /* the piece before was a match */
} splitter;

static bool push(ty_cuts *c, size_t begin, size_t end) {
  if (!ty_grow(&c->item, &c->capacity, c->count, 1, sizeof *c->item)) return false;
  c->item[c->count++] = (ty_cut){ (uint32_t)begin, (uint32_t)end };
  return true;
}

static bool add(splitter *s, size_t begin, size_t end, bool match) {
  bool joins = false, before = s->previous, some = s->out->count > s->first;
  switch (s->behavior) {
    case TY_ISOLATED: break;
    case TY_REMOVED:
      if (match) return true;
      break;
    case TY_CONTIGUOUS: joins = match == before; break;
    case TY_MERGED_WITH_PREVIOUS: joins = match && !before; break;
    case TY_MERGED_WITH_NEXT: joins = before && !match; break;
  }
  s->previous = match;
  if (joins && some) {
    s->out->item[s->out->count - 1].end = (uint32_t)end;
    return true;
  }
  return begin == end || push(s->out, begin, end);
}

typedef bool test_char(uint32_t c);

static bool split_chars(splitter *s, const uint8_t *text, ty_cut cut, test_char *test, const ty_component *p) {
  size_t last = cut.begin;
  unsigned n;
  for (size_t i = cut.begin; i < cut.end; i += n) {
    uint32_t c = ty_char_at(text + i, &n);
    bool match = test ? test(c) : n == p->delimiter.size && memcmp(text + i, p->delimiter.text, n) == 0;
    if (!match) continue;
    if ((last < i && !add(s, last, i, false)) || !add(s, i, i + n, true)) return false;
    last = i + n;
  }
  return last == cut.end || add(s, last, cut.end, false);
}

static bool split_pattern(splitter *s, ty_matcher *m, const uint8_t *text, ty_cut cut, const ty_pattern *p,
                          bool invert) {
  const uint8_t *word = text + cut.begin;
  size_t size = cut.end - cut.begin, done = 0, last = SIZE_MAX, begin, end;
  while (done <= size) {
    if (!ty_pattern_next(p, m, word, size, done, last, &begin, &end)) return false;
    if (begin == SIZE_MAX) break;
    size_t from = last == SIZE_MAX ? 0 : last;
    if ((from < begin && !add(s, cut.begin + from, cut.begin + begin, invert)) ||
        !add(s, cut.begin + begin, cut.begin + end, !invert))
      return false;
    done = last = end;
  }
  size_t from = last == SIZE_MAX ? 0 : last;
  return from == size || add(s, cut.begin + from, cut.end, invert);
}

/* Words of \w and words of what is neither that nor white space. */
static bool split_words(ty_cuts *out, const uint8_t *text, ty_cut cut) {
  unsigned n;
  for (size_t i = cut.begin, begin; i < cut.end;) {
    uint32_t c = ty_char_at(text + i, &n);
    bool word = ty_is_word(c);
    begin = i;
    i += n;
    if (!word && ty_is_space(c)) continue;
    while (i < cut.end) {
      c = ty_char_at(text + i, &n);
      if (ty_is_word(c) != word || (!word && ty_is_space(c))) break;
      i += n;
    }
    if (!push(out, begin, i)) return false;
  }
  return true;
}

static bool split_lengths(ty_cuts *out, const uint8_t *text, ty_cut cut, uint64_t length) {
  unsigned n;
  for (size_t i = cut.begin, begin; i < cut.end;) {
    begin = i;
    for (uint64_t k = 0; k < length && i < cut.end; k++, i += n) ty_char_at(text + i, &n);
    if (!push(out, begin, i)) return false;
  }
  return true;
}

/* The other memory for cuts, empty. */
static ty_cuts *other(ty_work *w) {
  w->other_cuts.count = 0;
  return &w->other_cuts;
}

static void take(ty_work *w) {
  ty_cuts t = w->cuts;
  w->cuts = w->other_cuts;
  w->other_cuts = t;
}

static bool split_all(const ty_component *p, ty_work *w, const ty_piece *piece, test_char *test, ty_behavior behavior) {
  ty_cuts *out = other(w);
  for (size_t i = 0; i < w->cuts.count; i++) {
    ty_cut cut = w->cuts.item[i];
    splitter s = { out, behavior, out->count, false };
    bool ok = true;
    switch (p->kind) {
      case TY_WHITESPACE: ok = split_words(out, piece->text, cut); break;
      case TY_FIXED_LENGTH: ok = split_lengths(out, piece->text, cut, p->start); break;
      case TY_SPLIT:
      case TY_METASPACE:
      case TY_BYTE_LEVEL: ok = split_pattern(&s, &w->matcher, piece->text, cut, &p->pattern, p->invert); break;
      default: ok = split_chars(&s, piece->text, cut, test, p);
    }
    if (!ok) return false;
  }
  take(w);
  return true;
}

/* ---- pre-tokenizers that write ---- */

static ty_string *fresh(ty_work *w, const ty_piece *piece) {
  ty_string *out = &w->split[piece->text == w->split[0].text.data];
  out->text.size = out->from.size = 0;
  out->tracked = w->tracked;
  return out;
}

static bool written(ty_work *w, ty_piece *piece, const ty_string *out) {
  if (out->text.size > UINT32_MAX) return ty_fail(TY_EINVAL, "tokenizer: the text is too long");
  *piece = (ty_piece){ out->text.data, out->text.size,
                       out->tracked ? (const ty_span *)(const void *)out->from.data : NULL, piece->base };
  take(w);
  return true;
}

/* Spaces become the replacement, which also goes before words that do not begin with it. */
static bool metaspace(const ty_component *p, ty_work *w, ty_piece *piece) {
  ty_string *out = fresh(w, piece);
  ty_cuts *cuts = other(w);
  for (size_t i = 0; i < w->cuts.count; i++) {
    ty_cut cut = w->cuts.item[i];
    const uint8_t *text = piece->text + cut.begin;
    size_t size = cut.end - cut.begin, begin = out->text.size;
    unsigned n;
    ty_char_at(text, &n);
    bool has = *text == ' ' || (size >= p->content.size && memcmp(text, p->content.text, p->content.size) == 0);
    bool first = ty_piece_span(piece, cut.begin, cut.begin + 1).begin == 0;
    if (!has && (p->prepend == TY_PREPEND_ALWAYS || (p->prepend == TY_PREPEND_FIRST && first)) &&
        !ty_string_put(out, p->content.text, p->content.size, ty_piece_span(piece, cut.begin, cut.begin + n)))
      return false;
    for (size_t k = cut.begin; k < cut.end; k += n) {
      ty_char_at(piece->text + k, &n);
      bool space = piece->text[k] == ' ';
      if (!ty_string_put(out, space ? p->content.text : (const char *)piece->text + k, space ? p->content.size : n,
                         ty_piece_span(piece, k, k + n)))
        return false;
    }
    if (!push(cuts, begin, out->text.size)) return false;
  }
  return written(w, piece, out) && (!p->split || split_all(p, w, piece, NULL, TY_MERGED_WITH_NEXT));
}

static bool prefix_space(ty_work *w, ty_piece *piece) {
  bool needed = false;
  for (size_t i = 0; i < w->cuts.count; i++) needed |= piece->text[w->cuts.item[i].begin] != ' ';
  if (!needed) return true;
  ty_string *out = fresh(w, piece);
  ty_cuts *cuts = other(w);
  for (size_t i = 0; i < w->cuts.count; i++) {
    ty_cut cut = w->cuts.item[i];
    size_t begin = out->text.size;
    unsigned n;
    ty_char_at(piece->text + cut.begin, &n);
    if (piece->text[cut.begin] != ' ' && !ty_string_put(out, " ", 1, ty_piece_span(piece, cut.begin, cut.begin + n)))
      return false;
    for (size_t k = cut.begin; k < cut.end; k += n) {
      ty_char_at(piece->text + k, &n);
      if (!ty_string_put(out, piece->text + k, n, ty_piece_span(piece, k, k + n))) return false;
    }
    if (!push(cuts, begin, out->text.size)) return false;
  }
  return written(w, piece, out);
}

static bool bytes_as_chars(ty_work *w, ty_piece *piece) {
  ty_string *out = fresh(w, piece);
  ty_cuts *cuts = other(w);
  for (size_t i = 0; i < w->cuts.count; i++) {
    ty_cut cut = w->cuts.item[i];
    size_t begin = out->text.size;
    unsigned n;
    for (size_t k = cut.begin; k < cut.end;) {
      ty_char_at(piece->text + k, &n);
      ty_span from = ty_piece_span(piece, k, k + n);
      for (; n; n--, k++) {
        uint8_t s[4];
        if (!ty_string_put(out, s, ty_char_put(s, ty_byte_char(piece->text[k])), from)) return false;
      }
    }
    if (!push(cuts, begin, out->text.size)) return false;
  }
  return written(w, piece, out);
}

bool ty_pretokenize(const ty_tokenizer *t, ty_work *w, ty_piece *piece) {
  w->cuts.count = 0;
  if (!piece->size) return true;
  if (piece->size > UINT32_MAX) return ty_fail(TY_EINVAL, "tokenizer: the text is too long");
  if (!push(&w->cuts, 0, piece->size)) return false;
  for (size_t i = 0; i < t->pre_tokenizers.count; i++) {
    const ty_component *p = &t->pre_tokenizers.item[i];
    bool ok = true;
    switch (p->kind) {
      case TY_WHITESPACE_SPLIT: ok = split_all(p, w, piece, ty_is_space, TY_REMOVED); break;
      case TY_BERT_PRE_TOKENIZER:
        ok = split_all(p, w, piece, ty_is_space, TY_REMOVED) && split_all(p, w, piece, ty_is_punctuation, TY_ISOLATED);
        break;
      case TY_PUNCTUATION: ok = split_all(p, w, piece, ty_is_punctuation, p->behavior); break;
      case TY_DIGITS: ok = split_all(p, w, piece, ty_is_digit, p->individual ? TY_ISOLATED : TY_CONTIGUOUS); break;
      case TY_DELIMITER: ok = split_all(p, w, piece, NULL, TY_REMOVED); break;
      case TY_METASPACE: ok = metaspace(p, w, piece); break;
      case TY_BYTE_LEVEL:
        ok = (!p->prefix_space || prefix_space(w, piece)) &&
             (!p->use_regex || split_all(p, w, piece, NULL, TY_ISOLATED));
        if (ok && !(t->bpe.bytes && i + 1 == t->pre_tokenizers.count)) ok = bytes_as_chars(w, piece);
        break;
      default: ok = split_all(p, w, piece, NULL, p->behavior);
    }
    if (!ok) return false;
  }
  return true;
}
