/* Byte pair encoding (Sennrich et al. 2016): the pair of neighbours with the lowest rank is merged, the leftmost of
 * equal ones first, until no pair has a rank. Short words by looking at all pairs, long ones with a heap; words that
 * were split before come from a small table. */
#include <stdlib.h>

#include "internal.h"

/* ---- ranks of pairs ---- */

typedef struct ty_merge {
  uint32_t left, right, rank, id; /* left TY_NO_ID: free */
} merge;

static inline uint64_t hash_pair(uint32_t left, uint32_t right) {
  uint64_t h = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15;
  return h ^ h >> 29;
}

/* rank << 32 | id, or UINT64_MAX. */
static inline uint64_t find(const ty_bpe *b, uint32_t left, uint32_t right) {
  for (uint64_t i = hash_pair(left, right) & b->mask;; i = (i + 1) & b->mask) {
    const merge *m = &b->merges[i];
    if (m->left == left && m->right == right) return (uint64_t)m->rank << 32 | m->id;
    if (m->left == TY_NO_ID) return UINT64_MAX;
  }
}

bool ty_bpe_prepare(ty_bpe *b, size_t merges) {
  uint64_t room = 16;
  while (room < merges * 2) room *= 2;
  b->merges = malloc(room * sizeof *b->merges);
  if (!b->merges) return ty_fail(TY_ENOMEM, "no memory for %zu merges", merges);
  memset(b->merges, 0xff, room * sizeof *b->merges);
  b->mask = room - 1;
  return true;
}

/* Of equal pairs the last counts. */
bool ty_bpe_merge(ty_bpe *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t id) {
  uint64_t i = hash_pair(left, right) & b->mask;
  while (b->merges[i].left != TY_NO_ID && (b->merges[i].left != left || b->merges[i].right != right))
    i = (i + 1) & b->mask;
  b->merges[i] = (merge){ left, right, rank, id };
  return true;
}

/* The id of a character where it stands in the word. */
static uint32_t char_id(const ty_bpe *b, const ty_vocab *v, ty_bytes *scratch, const void *text, size_t size,
                        bool first, bool last) {
  if ((first || !b->prefix.size) && (!last || !b->suffix.size)) return ty_vocab_find(v, text, size);
  scratch->size = 0;
  if ((!first && !ty_bytes_put(scratch, b->prefix.text, b->prefix.size)) || !ty_bytes_put(scratch, text, size) ||
      (last && !ty_bytes_put(scratch, b->suffix.text, b->suffix.size)))
    return TY_NO_ID;
  return ty_vocab_find(v, scratch->data, scratch->size);
}

/* The token as bytes; false when it is not made of the characters that stand for bytes. */
static bool as_bytes(ty_str token, char *out, size_t *size) {
  const uint8_t *p = (const uint8_t *)token.text, *end = p + token.size;
  *size = 0;
  for (unsigned n; p < end; p += n) {
    int byte = ty_char_byte(ty_char_at(p, &n));
    if (byte < 0) return false;
    out[(*size)++] = (char)byte;
  }
  return true;
}

/* With `bytes`: the ids of single bytes, and tokens as bytes where whole words are looked up. */
bool ty_bpe_finish(ty_bpe *b, ty_arena *arena, const ty_vocab *v) {
  if (!b->bytes) return true;
  ty_bytes scratch = { 0 };
  for (int place = 0; place < 4; place++)
    for (int byte = 0; byte < 256; byte++) {
      uint8_t s[4];
      unsigned n = ty_char_put(s, ty_byte_char((uint8_t)byte));
      b->byte_id[place][byte] = char_id(b, v, &scratch, s, n, !(place & 2), place & 1);
    }
  ty_bytes_free(&scratch);
  if (!b->ignore_merges) return true;
  b->raw.token = calloc((size_t)v->size + 1, sizeof *b->raw.token);
  if (!b->raw.token) return ty_fail(TY_ENOMEM, "no memory for a vocabulary of %u tokens", v->size);
  b->raw.size = v->size;
  for (uint32_t id = 0; id < v->size; id++) {
    ty_str s = v->token[id], *raw = &b->raw.token[id];
    if (!s.text) continue;
    char *text = ty_arena_alloc(arena, s.size + 1);
    if (!text) return false;
    if (as_bytes(s, text, &raw->size)) raw->text = text;
  }
  return ty_vocab_build(&b->raw);
}

void ty_bpe_free(ty_bpe *b) {
  free(b->merges);
  ty_vocab_free(&b->raw);
}

/* ---- words that were split before ---- */

/* One place for each hash: a new word takes the place of the old one. 64 bytes, a cache line. */
enum { CACHED_TEXT = 30, CACHED_IDS = 8, CACHE_PLACES = 1 << 14 };
typedef struct ty_cached {
  uint8_t size, count;
  uint8_t text[CACHED_TEXT];
  uint32_t id[CACHED_IDS];
} cached;

/* The place of a word, or NULL when it is not to be kept. */
static cached *place_of(ty_work *w, const uint8_t *text, size_t size) {
  if (size > CACHED_TEXT || w->spans || size == 0) return NULL;
  if (!w->cache) {
    w->cache = aligned_alloc(64, CACHE_PLACES * sizeof(cached));
    if (!w->cache) return NULL;
    memset(w->cache, 0, CACHE_PLACES * sizeof(cached));
  }
  return &w->cache[ty_hash(text, size) % CACHE_PLACES];
}

/* ---- merging ---- */

static bool room_for(ty_symbols *s, size_t count) {
  if (count <= s->capacity) return true;
  size_t room = count * 2;
  uint32_t *words = realloc(s->id, room * 4 * sizeof *words);
  if (!words) return ty_fail(TY_ENOMEM, "no memory for a word of %zu bytes", count);
  s->id = words;
  s->length = words + room, s->previous = words + 2 * room, s->next = words + 3 * room;
  uint64_t *ranks = realloc(s->order, room * sizeof *ranks);
  if (!ranks) {
    s->capacity = 0;
    return ty_fail(TY_ENOMEM, "no memory for a word of %zu bytes", count);
  }
  s->order = ranks;
  s->capacity = room;
  return true;
}

/* Looks at all pairs for each merge: count is small. */
static size_t merge_short(const ty_bpe *b, ty_symbols *s, size_t count) {
  uint64_t *rank = s->order;
  uint32_t *id = s->id, *length = s->length;
  for (size_t i = 0; i + 1 < count; i++) rank[i] = find(b, id[i], id[i + 1]);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; i++)
      if (rank[i] < rank[best]) best = i;
    if (rank[best] == UINT64_MAX) break;
    id[best] = (uint32_t)rank[best];
    length[best] += length[best + 1];
    count--;
    for (size_t i = best + 1; i < count; i++) id[i] = id[i + 1], length[i] = length[i + 1];
    for (size_t i = best + 1; i + 1 < count; i++) rank[i] = rank[i + 1];
    if (best) rank[best - 1] = find(b, id[best - 1], id[best]);
    if (best + 1 < count) rank[best] = find(b, id[best], id[best + 1]);
  }
  return count;
}

typedef struct ty_heap_item {
  uint64_t rank;            /* and id, as find() has them */
  uint32_t at, left, right; /* the pair, which may be gone by the time it is its turn */
} item;

static inline bool before(const item *a, const item *b) {
  uint32_t x = (uint32_t)(a->rank >> 32), y = (uint32_t)(b->rank >> 32);
  return x != y ? x < y : a->at < b->at;
}

static bool heap_push(ty_symbols *s, size_t *size, item new) {
  if (!ty_grow(&s->heap, &s->heap_capacity, *size, 1, sizeof *s->heap)) return false;
  size_t i = (*size)++;
  for (; i && before(&new, &s->heap[(i - 1) / 2]); i = (i - 1) / 2) s->heap[i] = s->heap[(i - 1) / 2];
  s->heap[i] = new;
  return true;
}

static item heap_pop(item *heap, size_t *size) {
  item top = heap[0], last = heap[--*size];
  size_t i = 0;
  for (;;) {
    size_t child = 2 * i + 1;
    if (child >= *size) break;
    if (child + 1 < *size && before(&heap[child + 1], &heap[child])) child++;
    if (!before(&heap[child], &last)) break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = last;
  return top;
}

static bool push_pair(const ty_bpe *b, ty_symbols *s, size_t *size, uint32_t at) {
  uint64_t rank = find(b, s->id[at], s->id[s->next[at]]);
  return rank == UINT64_MAX || heap_push(s, size, (item){ rank, at, s->id[at], s->id[s->next[at]] });
}

static bool merge_long(const ty_bpe *b, ty_symbols *s, size_t *count) {
  size_t size = 0, n = *count;
  for (size_t i = 0; i < n; i++) {
    s->previous[i] = i ? (uint32_t)i - 1 : TY_NO_ID;
    s->next[i] = i + 1 < n ? (uint32_t)i + 1 : TY_NO_ID;
  }
  for (size_t i = 0; i + 1 < n; i++)
    if (!push_pair(b, s, &size, (uint32_t)i)) return false;
  while (size) {
    item top = heap_pop(s->heap, &size);
    uint32_t at = top.at, right = s->next[at];
    if (s->id[at] != top.left || right == TY_NO_ID || s->id[right] != top.right) continue;
    s->id[at] = (uint32_t)top.rank;
    s->length[at] += s->length[right];
    s->id[right] = TY_NO_ID; /* gone; no pair has such an id */
    s->next[at] = s->next[right];
    if (s->next[at] != TY_NO_ID) {
      s->previous[s->next[at]] = at;
      if (!push_pair(b, s, &size, at)) return false;
    }
    if (s->previous[at] != TY_NO_ID && !push_pair(b, s, &size, s->previous[at])) return false;
  }
  *count = 0;
  for (uint32_t i = 0; n && i != TY_NO_ID; i = s->next[i], (*count)++) {
    s->id[*count] = s->id[i];
    s->length[*count] = s->length[i];
  }
  return true;
}

/* ---- words to symbols ---- */

static size_t byte_symbols(const ty_bpe *b, ty_symbols *s, const uint8_t *text, size_t size) {
  size_t count = 0;
  uint32_t unknown = 0; /* bytes that are not in the vocabulary and wait for their token */
  for (size_t i = 0; i < size; i++) {
    uint32_t id = b->byte_id[(i ? 2 : 0) + (i + 1 == size)][text[i]];
    if (id == TY_NO_ID) {
      if (b->unknown == TY_NO_ID) continue;
      if (unknown && !b->fuse_unknown) s->id[count] = b->unknown, s->length[count++] = unknown, unknown = 0;
      unknown++;
      continue;
    }
    if (unknown) s->id[count] = b->unknown, s->length[count++] = unknown, unknown = 0;
    s->id[count] = id;
    s->length[count++] = 1;
  }
  if (unknown) s->id[count] = b->unknown, s->length[count++] = unknown;
  return count;
}

/* The ids <0xXX> of the bytes of a character as the vocabulary would have it. */
static bool fall_back(const ty_tokenizer *t, ty_symbols *s, const uint8_t *text, size_t size, size_t *count) {
  for (size_t i = 0; i < size; i++) {
    static const char digits[] = "0123456789ABCDEF";
    const char name[6] = { '<', '0', 'x', digits[text[i] >> 4], digits[text[i] & 15], '>' };
    uint32_t id = ty_vocab_find(&t->vocab, name, 6);
    if (id == TY_NO_ID) return false;
    s->id[*count + i] = id;
    s->length[*count + i] = 1;
  }
  *count += size;
  return true;
}

static size_t char_symbols(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t size) {
  const ty_bpe *b = &t->bpe;
  ty_symbols *s = &w->symbols;
  size_t count = 0;
  uint32_t unknown = 0;
  unsigned n;
  for (size_t i = 0; i < size; i += n) {
    ty_char_at(text + i, &n);
    bool first = i == 0, last = i + n == size;
    uint32_t id = char_id(b, &t->vocab, &w->scratch, text + i, n, first, last);
    if (id != TY_NO_ID) {
      if (unknown) s->id[count] = b->unknown, s->length[count++] = unknown, unknown = 0;
      s->id[count] = id;
      s->length[count++] = n;
      continue;
    }
    if (b->byte_fallback) { /* of all that was looked up, prefix and suffix with it */
      bool whole = (!first && b->prefix.size) || (last && b->suffix.size);
      if (fall_back(t, s, whole ? w->scratch.data : text + i, whole ? w->scratch.size : n, &count)) continue;
    }
    if (b->unknown == TY_NO_ID) continue;
    if (unknown && !b->fuse_unknown) s->id[count] = b->unknown, s->length[count++] = unknown, unknown = 0;
    unknown += n;
  }
  if (unknown) s->id[count] = b->unknown, s->length[count++] = unknown;
  return count;
}

enum { SHORT = 48 };

bool ty_bpe_word(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t size, size_t at) {
  const ty_bpe *b = &t->bpe;
  cached *kept = place_of(w, text, size);
  if (kept && kept->size == size && memcmp(kept->text, text, size) == 0) {
    for (int i = 0; i < kept->count; i++)
      if (!ty_emit(w, kept->id[i], 0, 0)) return false;
    return true;
  }
  size_t count;
  if (b->ignore_merges) {
    uint32_t id = ty_vocab_find(b->bytes ? &b->raw : &t->vocab, text, size);
    if (id != TY_NO_ID) return ty_emit(w, id, at, at + size);
  }
  /* A character falls back to its bytes, and those of the prefix and the suffix. */
  if (!room_for(&w->symbols, size * (1 + b->prefix.size) + b->suffix.size + 1)) return false;
  ty_symbols *s = &w->symbols;
  count = b->bytes ? byte_symbols(b, s, text, size) : char_symbols(t, w, text, size);
  if (count <= SHORT) count = merge_short(b, s, count);
  else if (!merge_long(b, s, &count)) return false;
  for (size_t i = 0; i < count; i++) {
    if (!ty_emit(w, s->id[i], at, at + s->length[i])) return false;
    at += s->length[i];
  }
  if (kept && count <= CACHED_IDS) {
    kept->size = (uint8_t)size;
    kept->count = (uint8_t)count;
    memcpy(kept->text, text, size);
    memcpy(kept->id, s->id, count * sizeof *s->id);
  }
  return true;
}
