/* WordPiece (Schuster and Nakajima 2012, as BERT has it): the longest token that begins the word, and so on; and
 * WordLevel, where words are tokens. */
#include "internal.h"

bool ty_wordpiece_word(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t size, size_t at) {
  const ty_wordpiece *p = &t->wordpiece;
  size_t before = w->out->count, start = 0;
  bool bad = ty_char_count(text, size) > p->longest;
  while (!bad && start < size) {
    size_t end = size;
    uint32_t id = TY_NO_ID;
    if (end - start > t->longest_token) { /* a whole number of characters */
      end = start + t->longest_token;
      while (end > start && (text[end] & 0xc0) == 0x80) end--;
    }
    while (end > start) {
      w->scratch.size = 0;
      if (start && (!ty_bytes_put(&w->scratch, p->prefix.text, p->prefix.size) ||
                    !ty_bytes_put(&w->scratch, text + start, end - start)))
        return false;
      id = start ? ty_vocab_find(&t->vocab, w->scratch.data, w->scratch.size) : ty_vocab_find(&t->vocab, text, end);
      if (id != TY_NO_ID) break;
      unsigned n;
      ty_char_before(text + end, &n);
      end -= n;
    }
    bad = id == TY_NO_ID;
    if (!bad && !ty_emit(w, id, at + start, at + end)) return false;
    start = end;
  }
  if (!bad) return true;
  w->out->count = before;
  if (p->unknown == TY_NO_ID)
    return ty_fail(TY_EINVAL, "tokenizer: %s is not in the vocabulary, which has no unknown token",
                   ty_quote(text, size));
  return ty_emit(w, p->unknown, at, at + size);
}

bool ty_wordlevel_word(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t size, size_t at) {
  uint32_t id = ty_vocab_find(&t->vocab, text, size);
  if (id == TY_NO_ID) id = t->wordpiece.unknown;
  if (id == TY_NO_ID)
    return ty_fail(TY_EINVAL, "tokenizer: %s is not in the vocabulary, which has no unknown token",
                   ty_quote(text, size));
  return ty_emit(w, id, at, at + size);
}
