/* The normalizer that SentencePiece compiles into its models: a double array (Aoe 1989, as darts-clone lays it out)
 * from characters to what replaces them. */
#include <stdlib.h>
#include <utf8proc.h>

#include "internal.h"

struct ty_charsmap {
  uint32_t *unit;
  size_t units;
  const char *text; /* replacements, each ended by NUL */
  size_t size;
  uint8_t *bytes;
};

static int digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Returns the number of bytes, SIZE_MAX for what is no base64. */
static size_t decode_base64(const char *text, size_t size, uint8_t *out) {
  size_t n = 0;
  uint32_t bits = 0;
  int have = 0;
  while (size && text[size - 1] == '=') size--;
  for (size_t i = 0; i < size; i++) {
    int d = digit(text[i]);
    if (d < 0) return SIZE_MAX;
    bits = bits << 6 | (uint32_t)d;
    have += 6;
    if (have >= 8) {
      have -= 8;
      out[n++] = (uint8_t)(bits >> have);
    }
  }
  return n;
}

ty_charsmap *ty_charsmap_read(const char *base64, size_t size) {
  ty_charsmap *m = calloc(1, sizeof *m);
  uint8_t *bytes = malloc(size / 4 * 3 + 4);
  if (!m || !bytes) {
    free(m);
    free(bytes);
    ty_fail(TY_ENOMEM, "no memory for a tokenizer");
    return NULL;
  }
  m->bytes = bytes;
  size_t n = decode_base64(base64, size, bytes);
  uint32_t trie = n != SIZE_MAX && n >= 4 ? (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
                                                (uint32_t)bytes[3] << 24
                                          : 0;
  if (n == SIZE_MAX || n < 4 || trie % 4 || trie == 0 || trie > n - 4) {
    ty_charsmap_free(m);
    ty_fail(TY_EIO, "precompiled_charsmap is no character map");
    return NULL;
  }
  m->units = trie / 4;
  m->unit = malloc(trie);
  if (!m->unit) {
    ty_charsmap_free(m);
    ty_fail(TY_ENOMEM, "no memory for a tokenizer");
    return NULL;
  }
  for (size_t i = 0; i < m->units; i++) {
    const uint8_t *p = bytes + 4 + 4 * i;
    m->unit[i] = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
  }
  m->text = (const char *)bytes + 4 + trie;
  m->size = n - 4 - trie;
  return m;
}

void ty_charsmap_free(ty_charsmap *m) {
  if (!m) return;
  free(m->unit);
  free(m->bytes);
  free(m);
}

static size_t offset_of(uint32_t unit) { return (size_t)(unit >> 10) << ((unit & 0x200) >> 6); }

/* What replaces the shortest beginning of the text that the map knows; false: none. */
static bool look_up(const ty_charsmap *m, const uint8_t *text, size_t size, ty_str *out) {
  size_t at = offset_of(m->unit[0]);
  for (size_t i = 0; i < size && text[i]; i++) {
    at ^= text[i];
    if (at >= m->units) return false;
    uint32_t unit = m->unit[at];
    if ((unit & 0x800000ff) != text[i]) return false;
    at ^= offset_of(unit);
    if (!(unit & 0x100)) continue;
    if (at >= m->units) return false;
    size_t begin = m->unit[at] & 0x7fffffff;
    if (begin > m->size) return false;
    *out = (ty_str){ m->text + begin, strnlen(m->text + begin, m->size - begin) };
    return ty_valid_utf8(out->text, out->size);
  }
  return false;
}

bool ty_charsmap_apply(const ty_charsmap *m, const ty_piece *in, ty_string *out) {
  for (size_t i = 0; i < in->size;) {
    unsigned n;
    uint32_t c = ty_char_at(in->text + i, &n);
    size_t end = i + n; /* of the grapheme cluster: it is tried whole, if it is short */
    utf8proc_int32_t state = 0;
    while (end < in->size) {
      uint32_t next = ty_char_at(in->text + end, &n);
      if (utf8proc_grapheme_break_stateful((utf8proc_int32_t)c, (utf8proc_int32_t)next, &state)) break;
      c = next;
      end += n;
    }
    ty_str found;
    if (end - i < 6 && look_up(m, in->text + i, end - i, &found)) {
      if (!ty_string_put(out, found.text, found.size, ty_piece_span(in, i, end))) return false;
      i = end;
      continue;
    }
    for (; i < end; i += n) {
      ty_char_at(in->text + i, &n);
      if (!look_up(m, in->text + i, n, &found)) found = (ty_str){ (const char *)in->text + i, n };
      if (!ty_string_put(out, found.text, found.size, ty_piece_span(in, i, i + n))) return false;
    }
  }
  return true;
}
