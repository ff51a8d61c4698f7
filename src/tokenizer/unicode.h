/* Characters: UTF-8 and the classes that tokenizers ask for. */
#ifndef TY_TOKENIZER_UNICODE_H
#define TY_TOKENIZER_UNICODE_H

#include "../io/file.h"

/* The character at p of valid text, and its length. */
static inline uint32_t ty_char_at(const uint8_t *p, unsigned *length) {
  if (p[0] < 0x80) {
    *length = 1;
    return p[0];
  }
  if (p[0] < 0xe0) {
    *length = 2;
    return (uint32_t)(p[0] & 0x1f) << 6 | (p[1] & 0x3f);
  }
  if (p[0] < 0xf0) {
    *length = 3;
    return (uint32_t)(p[0] & 0x0f) << 12 | (uint32_t)(p[1] & 0x3f) << 6 | (p[2] & 0x3f);
  }
  *length = 4;
  return (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3f) << 12 | (uint32_t)(p[2] & 0x3f) << 6 | (p[3] & 0x3f);
}

/* The character before p. */
static inline uint32_t ty_char_before(const uint8_t *p, unsigned *length) {
  const uint8_t *q = p - 1;
  while ((*q & 0xc0) == 0x80) q--;
  return ty_char_at(q, length);
}

static inline size_t ty_char_count(const uint8_t *p, size_t size) {
  size_t n = 0;
  for (size_t i = 0; i < size; i++) n += (p[i] & 0xc0) != 0x80;
  return n;
}

unsigned ty_char_put(uint8_t out[4], uint32_t c); /* returns the length */

/* The valid text at the start of [p, p + size), and, where it ends early, how many bytes one U+FFFD stands for. */
size_t ty_utf8_span(const uint8_t *p, size_t size, unsigned *bad);
/* Appends the text with U+FFFD for what is no UTF-8. */
bool ty_utf8_repair(const uint8_t *p, size_t size, ty_bytes *out);

bool ty_is_space(uint32_t c);           /* White_Space */
bool ty_is_letter(uint32_t c);          /* L */
bool ty_is_number(uint32_t c);          /* N */
bool ty_is_digit(uint32_t c);           /* what the reference's Digits takes: N */
bool ty_is_punctuation(uint32_t c);     /* what its Punctuation takes: P, and more of ASCII */
bool ty_is_accent(uint32_t c);          /* what its StripAccents leaves out: M */
bool ty_is_nonspacing_mark(uint32_t c); /* what its BertNormalizer takes for Mn */
bool ty_is_control(uint32_t c);         /* and for C, less what is not assigned, and U+FFFD */
bool ty_is_word(uint32_t c);            /* what \w means in its Whitespace */
bool ty_is_undecomposed(uint32_t c);    /* its NFD and NFKD leave it as it is, in spite of newer tables */
uint32_t ty_lower(uint32_t c);          /* the one character that it is in lower case */

/* The next range of characters of a category ("L", "Nd") that libraries of Unicode 14 lack; *place is 0 at first. False:
 * there is no more. */
bool ty_newer_next(const char *category, size_t *place, uint32_t *first, uint32_t *last);

/* The 256 characters that byte-level models write bytes as: printable ones stand for themselves, the others for
 * U+0100 and up (Radford et al. 2019, the released encoder.py). */
uint32_t ty_byte_char(uint8_t byte);
int ty_char_byte(uint32_t c); /* -1: it is none of them */

#endif
