/* A trie of byte strings, laid out level by level: which entries of a vocabulary begin a text. */
#include <stdlib.h>

#include "internal.h"

static int by_text(const void *pa, const void *pb) {
  const ty_trie_entry *a = pa, *b = pb;
  int c = memcmp(a->text.text, b->text.text, a->text.size < b->text.size ? a->text.size : b->text.size);
  if (c) return c;
  if (a->text.size != b->text.size) return a->text.size < b->text.size ? -1 : 1;
  return (a->value > b->value) - (a->value < b->value);
}

/* The entries below a node: [begin, end), which have their first `depth` bytes in common. */
typedef struct range {
  uint32_t begin, end, depth;
} range;

bool ty_trie_build(ty_trie *t, ty_trie_entry *entries, size_t count) {
  uint64_t most = 1; /* nodes: one for each byte that the text before does not share */
  qsort(entries, count, sizeof *entries, by_text);
  for (size_t i = 0; i < count; i++) {
    size_t shared = 0;
    if (i)
      while (shared < entries[i].text.size && shared < entries[i - 1].text.size &&
             entries[i].text.text[shared] == entries[i - 1].text.text[shared])
        shared++;
    most += entries[i].text.size - shared;
  }
  *t = (ty_trie){ 0 };
  range *below = most < UINT32_MAX ? malloc(most * sizeof *below) : NULL;
  t->node = most < UINT32_MAX ? calloc(most, sizeof *t->node) : NULL;
  if (!below || !t->node) {
    free(below);
    return ty_fail(TY_ENOMEM, "no memory for a trie of %zu strings", count);
  }
  below[0] = (range){ 0, (uint32_t)count, 0 };
  t->count = 1;
  for (uint32_t n = 0; n < t->count; n++) {
    range r = below[n];
    ty_trie_node *node = &t->node[n];
    node->value = TY_NO_ID;
    while (r.begin < r.end && entries[r.begin].text.size == r.depth) node->value = entries[r.begin++].value;
    node->first = t->count;
    while (r.begin < r.end) {
      uint8_t byte = (uint8_t)entries[r.begin].text.text[r.depth];
      uint32_t end = r.begin;
      while (end < r.end && (uint8_t)entries[end].text.text[r.depth] == byte) end++;
      t->node[t->count].byte = byte;
      below[t->count++] = (range){ r.begin, end, r.depth + 1 };
      node->children++;
      r.begin = end;
    }
  }
  free(below);
  return true;
}

void ty_trie_free(ty_trie *t) { free(t->node); }

uint32_t ty_trie_step(const ty_trie *t, uint32_t node, uint8_t byte) {
  uint32_t low = t->node[node].first, high = low + t->node[node].children;
  while (low < high) {
    uint32_t middle = (low + high) / 2;
    if (t->node[middle].byte < byte) low = middle + 1;
    else high = middle;
  }
  return low < t->node[node].first + t->node[node].children && t->node[low].byte == byte ? low : 0;
}
