/* Counts of words: see words.h. */
#include "words.h"

#include <stdlib.h>

static bool grow(ty_words *w) {
  size_t room = w->room ? w->room * 2 : 1024;
  uint32_t *table = malloc(room * sizeof *table);
  if (!table) return ty_fail(TY_ENOMEM, "no memory for the counts of %zu words", w->count);
  memset(table, 0xff, room * sizeof *table);
  for (size_t k = 0; k < w->count; k++) {
    size_t i = w->word[k].hash & (room - 1);
    while (table[i] != UINT32_MAX) i = (i + 1) & (room - 1);
    table[i] = (uint32_t)k;
  }
  free(w->table);
  w->table = table;
  w->room = room;
  return true;
}

static bool add(ty_words *w, const void *text, size_t size, uint64_t times, uint64_t hash) {
  if (w->count * 2 >= w->room && !grow(w)) return false;
  size_t i = hash & (w->room - 1);
  for (; w->table[i] != UINT32_MAX; i = (i + 1) & (w->room - 1)) {
    ty_word *k = &w->word[w->table[i]];
    if (k->hash == hash && k->size == size && memcmp(w->text.data + k->at, text, size) == 0) {
      k->count += times;
      return true;
    }
  }
  if (w->count >= UINT32_MAX - 1 || size > UINT32_MAX) return ty_fail(TY_EINVAL, "tokenizer: too many different words");
  if (!ty_grow(&w->word, &w->capacity, w->count, 1, sizeof *w->word)) return false;
  w->word[w->count] = (ty_word){ hash, times, w->text.size, (uint32_t)size };
  if (!ty_bytes_put(&w->text, text, size)) return false;
  w->table[i] = (uint32_t)w->count++;
  return true;
}

bool ty_words_add(ty_words *w, const void *text, size_t size, uint64_t times) {
  return size == 0 || add(w, text, size, times, ty_hash(text, size));
}

bool ty_words_merge(ty_words *w, const ty_words *from) {
  for (size_t i = 0; i < from->count; i++) {
    const ty_word *k = &from->word[i];
    if (!add(w, from->text.data + k->at, k->size, k->count, k->hash)) return false;
  }
  return true;
}

void ty_words_free(ty_words *w) {
  ty_bytes_free(&w->text);
  free(w->word);
  free(w->table);
  *w = (ty_words){ 0 };
}
