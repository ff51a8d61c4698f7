/* A vocabulary: strings by number and, through a hash table, numbers by string. */
#include <stdlib.h>

#include "internal.h"

bool ty_vocab_build(ty_vocab *v) {
  v->count = 0;
  for (uint32_t i = 0; i < v->size; i++) v->count += v->token[i].text != NULL;
  uint64_t room = 16;
  while (room < (uint64_t)v->count * 2) room *= 2;
  v->table = malloc(room * sizeof *v->table);
  if (!v->table) return ty_fail(TY_ENOMEM, "no memory for a vocabulary of %u tokens", v->count);
  memset(v->table, 0xff, room * sizeof *v->table);
  v->mask = (uint32_t)(room - 1);
  for (uint32_t id = 0; id < v->size; id++) {
    ty_str s = v->token[id];
    if (!s.text) continue;
    uint32_t i = (uint32_t)ty_hash(s.text, s.size) & v->mask;
    while (v->table[i] != TY_NO_ID) {
      ty_str o = v->token[v->table[i]];
      if (o.size == s.size && memcmp(o.text, s.text, s.size) == 0) break;
      i = (i + 1) & v->mask;
    }
    v->table[i] = id;
  }
  return true;
}

uint32_t ty_vocab_find(const ty_vocab *v, const void *text, size_t size) {
  if (!v->table) return TY_NO_ID;
  for (uint32_t i = (uint32_t)ty_hash(text, size) & v->mask;; i = (i + 1) & v->mask) {
    uint32_t id = v->table[i];
    if (id == TY_NO_ID) return id;
    ty_str o = v->token[id];
    if (o.size == size && memcmp(o.text, text, size) == 0) return id;
  }
}

void ty_vocab_free(ty_vocab *v) {
  free(v->token);
  free(v->table);
}
