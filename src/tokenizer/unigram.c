/* Unigram (Kudo 2018): of all ways to cut a word into tokens the one with the largest sum of scores, by dynamic
 * programming from left to right. */
#include <stdlib.h>

#include "internal.h"

typedef struct node {
  double score;
  uint32_t from, id; /* of the best token that ends here; from TY_NO_ID: none */
} node;

static const double unknown_penalty = 10;

static inline void offer(node *n, double score, uint32_t from, uint32_t id) {
  if (n->from == TY_NO_ID || score > n->score) *n = (node){ score, from, id };
}

static bool emit_unknown(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t begin, size_t end, size_t at) {
  const ty_unigram *u = &t->unigram;
  uint32_t id = ty_vocab_find(&t->vocab, text + begin, end - begin);
  if (id != TY_NO_ID) return ty_emit(w, id, at + begin, at + end);
  if (u->byte_fallback) {
    size_t before = w->out->count, i = begin;
    for (; i < end; i++) {
      static const char digits[] = "0123456789ABCDEF";
      const char name[6] = { '<', '0', 'x', digits[text[i] >> 4], digits[text[i] & 15], '>' };
      id = ty_vocab_find(&t->vocab, name, 6);
      if (id == TY_NO_ID) break;
      if (!ty_emit(w, id, at + begin, at + end)) return false;
    }
    if (i == end) return true;
    w->out->count = before;
  }
  return ty_emit(w, u->unknown, at + begin, at + end);
}

bool ty_unigram_word(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t size, size_t at) {
  const ty_unigram *u = &t->unigram;
  if (!ty_grow(&w->nodes, &w->node_capacity, 0, size + 1, sizeof(node))) return false;
  node *n = w->nodes;
  for (size_t i = 0; i <= size; i++) n[i] = (node){ 0, TY_NO_ID, 0 };
  unsigned length;
  for (size_t i = 0; i < size; i += length) {
    ty_char_at(text + i, &length);
    bool single = false; /* a token is this character alone */
    uint32_t state = 0;
    for (size_t k = i; k < size && (state = ty_trie_step(&u->trie, state, text[k])); k++) {
      uint32_t id = u->trie.node[state].value;
      if (id == TY_NO_ID) continue;
      offer(&n[k + 1], n[i].score + u->score[id], (uint32_t)i, id);
      single |= k + 1 - i == length;
    }
    if (single) continue;
    if (u->unknown == TY_NO_ID)
      return ty_fail(TY_EINVAL, "tokenizer: %s is not in the vocabulary, which has no unknown token",
                     ty_quote(text + i, length));
    offer(&n[i + length], n[i].score + u->least - unknown_penalty, (uint32_t)i, u->unknown);
  }
  size_t next = size; /* turn the links of the best path round: each end learns where the token after it ends */
  for (size_t end = size; end;) {
    size_t from = n[end].from;
    n[end].from = (uint32_t)next;
    next = end;
    end = from;
  }
  for (size_t begin = 0; begin < size;) {
    size_t stop = next, follows = n[stop].from;
    uint32_t id = n[stop].id;
    if (id == u->unknown) { /* neighbours that are unknown are one */
      size_t last = stop;
      while (last < size && n[n[last].from].id == u->unknown) last = n[last].from;
      follows = n[last].from;
      if (!emit_unknown(t, w, text, begin, last, at)) return false;
      begin = last;
    } else {
      if (!ty_emit(w, id, at + begin, at + stop)) return false;
      begin = stop;
    }
    next = follows;
  }
  return true;
}
