/* The merges that a byte-level BPE learns from counted words. */
#ifndef TY_TOKENIZER_MERGES_H
#define TY_TOKENIZER_MERGES_H

#include "words.h"

typedef struct ty_learned {
  ty_vocab vocab; /* special tokens, bytes, merges; its table is not built by ty_vocab_build() */
  ty_arena arena; /* the tokens */
  uint32_t (*merge)[2];
  size_t merges, capacity;
} ty_learned;

bool ty_learn_merges(const ty_words *words, const ty_train_options *options, ty_learned *out);
void ty_learned_free(ty_learned *l);

#endif
