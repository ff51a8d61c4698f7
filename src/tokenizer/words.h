/* How often words occur: a growing hash table of byte strings. */
#ifndef TY_TOKENIZER_WORDS_H
#define TY_TOKENIZER_WORDS_H

#include "internal.h"

typedef struct ty_word {
  uint64_t hash, count;
  size_t at;
  uint32_t size;
} ty_word;

typedef struct ty_words {
  ty_bytes text; /* all words, one after the other */
  ty_word *word;
  size_t count, capacity;
  uint32_t *table;
  size_t room;
} ty_words;

bool ty_words_add(ty_words *w, const void *text, size_t size, uint64_t times);
bool ty_words_merge(ty_words *w, const ty_words *from);
void ty_words_free(ty_words *w);

#endif
