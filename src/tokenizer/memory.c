/* Memory that lives as long as a tokenizer, growing arrays, and the hash of strings. */
#include <stdlib.h>

#include "internal.h"

typedef struct ty_arena_block {
  struct ty_arena_block *next;
  size_t used;
  max_align_t data[];
} block;

enum { BLOCK = 1 << 16 };

void *ty_arena_alloc(ty_arena *a, size_t size) {
  size = (size + 15) & ~(size_t)15;
  if (!a->blocks || size > a->left) {
    size_t room = size > BLOCK ? size : BLOCK;
    block *b = calloc(1, sizeof *b + room);
    if (!b) {
      ty_fail(TY_ENOMEM, "no memory for a tokenizer");
      return NULL;
    }
    b->next = a->blocks;
    a->blocks = b;
    a->left = room;
  }
  void *p = (char *)a->blocks->data + a->blocks->used;
  a->blocks->used += size;
  a->left -= size;
  return p;
}

bool ty_arena_text(ty_arena *a, const char *text, size_t size, ty_str *out) {
  char *p = ty_arena_alloc(a, size + 1);
  if (!p) return false;
  memcpy(p, text, size);
  *out = (ty_str){ p, size };
  return true;
}

void ty_arena_free(ty_arena *a) {
  for (block *b = a->blocks, *next; b; b = next) {
    next = b->next;
    free(b);
  }
  *a = (ty_arena){ 0 };
}

bool ty_grow(void *array, size_t *capacity, size_t count, size_t more, size_t element) {
  void **p = array;
  if (more <= *capacity - count) return true;
  size_t wanted = count + more, room = *capacity * 2 > wanted ? *capacity * 2 : wanted;
  if (room < 16) room = 16;
  void *moved = room <= PTRDIFF_MAX / element ? realloc(*p, room * element) : NULL;
  if (!moved) return ty_fail(TY_ENOMEM, "no memory for a tokenizer's work");
  *p = moved;
  *capacity = room;
  return true;
}

static inline uint64_t mix(uint64_t a, uint64_t b) {
  __uint128_t p = (__uint128_t)a * b;
  return (uint64_t)p ^ (uint64_t)(p >> 64);
}

/* Multiply and fold, 16 bytes at a time. */
uint64_t ty_hash(const void *text, size_t size) {
  const uint64_t k0 = 0xa0761d6478bd642f, k1 = 0xe7037ed1a0b428db;
  const uint8_t *p = text;
  uint64_t h = size * k0, a = 0, b = 0;
  size_t n = size;
  for (; n > 16; n -= 16, p += 16) {
    memcpy(&a, p, 8);
    memcpy(&b, p + 8, 8);
    h = mix(a ^ h ^ k0, b ^ k1);
  }
  a = b = 0;
  if (n >= 8) {
    memcpy(&a, p, 8);
    memcpy(&b, p + n - 8, 8);
  } else if (n >= 4) {
    uint32_t x, y;
    memcpy(&x, p, 4);
    memcpy(&y, p + n - 4, 4);
    a = x, b = y;
  } else if (n) {
    a = (uint64_t)p[0] << 16 | (uint64_t)p[n / 2] << 8 | p[n - 1];
  }
  return mix(a ^ h ^ k1, b ^ k0);
}

void ty_string_free(ty_string *s) {
  ty_bytes_free(&s->text);
  ty_bytes_free(&s->from);
}

bool ty_string_put(ty_string *s, const void *text, size_t size, ty_span from) {
  if (!ty_bytes_put(&s->text, text, size)) return false;
  if (!s->tracked || !size) return true; /* of nothing there may be no memory */
  if (!ty_bytes_reserve(&s->from, size * sizeof from)) return false;
  ty_span *p = (ty_span *)(void *)(s->from.data + s->from.size);
  for (size_t i = 0; i < size; i++) p[i] = from;
  s->from.size += size * sizeof from;
  return true;
}
