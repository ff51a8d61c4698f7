/* Words by hand-written scanners, for the three regular expressions that most byte-level models split text by. They
 * stop where the expressions do; the tests compare the two. */
#include "internal.h"

typedef enum class { LETTER, NUMBER, BLANK, NEWLINE, OTHER } class;

static const uint8_t ascii[128] = {
#define A LETTER
#define N NUMBER
#define S BLANK
#define R NEWLINE
#define O OTHER
  O, O, O, O, O, O, O, O, O, S, R, S, S, R, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, /* 0x00 */
  S, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, N, N, N, N, N, N, N, N, N, N, O, O, O, O, O, O, /* 0x20 */
  O, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, O, O, O, O, O, /* 0x40 */
  O, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, O, O, O, O, O, /* 0x60 */
#undef A
#undef N
#undef S
#undef R
#undef O
};

static class class_at(const uint8_t *p, unsigned *length) {
  if (*p < 0x80) {
    *length = 1;
    return ascii[*p];
  }
  uint32_t c = ty_char_at(p, length);
  if (ty_is_letter(c)) return LETTER;
  if (ty_is_number(c)) return NUMBER;
  return ty_is_space(c) ? BLANK : OTHER;
}

static const uint8_t *run(const uint8_t *p, const uint8_t *end, class wanted) {
  unsigned n;
  while (p < end && class_at(p, &n) == wanted) p += n;
  return p;
}

/* After an apostrophe: s, t, re, ve, m, ll, d; returns what follows, or NULL. */
static const uint8_t *contraction(const uint8_t *p, const uint8_t *end, bool any_case) {
  if (p == end) return NULL;
  uint8_t a = *p, b = end - p > 1 ? p[1] : 0;
  if (any_case) {
    if (a == 0xc5 && b == 0xbf) return p + 2; /* the long s */
    if (a >= 'A' && a <= 'Z') a |= 32;
    if (b >= 'A' && b <= 'Z') b |= 32;
  }
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 1;
  return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? p + 2 : NULL;
}

/* White space from p: all of it at the end of the text, else all but the last character, which goes to what follows
 * unless it is the only one. With `lines`, up to and with the last line break, if there is one. */
static const uint8_t *blanks(const uint8_t *p, const uint8_t *end, bool lines) {
  const uint8_t *q = p, *last = p, *after_line = NULL;
  unsigned n;
  while (q < end) {
    class c = class_at(q, &n);
    if (c != BLANK && c != NEWLINE) break;
    last = q;
    q += n;
    if (c == NEWLINE) after_line = q;
  }
  if (lines && after_line) return after_line;
  return q == end || last == p ? q : last;
}

static const uint8_t *gpt2(const uint8_t *p, const uint8_t *end) {
  unsigned n;
  class c = class_at(p, &n);
  const uint8_t *after = *p == '\'' ? contraction(p + 1, end, false) : NULL;
  if (after) return after;
  if (c == BLANK || c == NEWLINE) {
    unsigned more;
    class next = *p == ' ' && p + 1 < end ? class_at(p + 1, &more) : BLANK;
    if (next == BLANK || next == NEWLINE) return blanks(p, end, false);
    return run(p + 1 + more, end, next);
  }
  return run(p + n, end, c);
}

/* digits: how many make a word at most. */
static const uint8_t *llama3(const uint8_t *p, const uint8_t *end, int digits) {
  unsigned n, more = 0;
  class c = class_at(p, &n);
  if (c == LETTER) return run(p + n, end, LETTER);
  if (c == NUMBER) {
    for (; digits && p < end && class_at(p, &n) == NUMBER; digits--) p += n;
    return p;
  }
  const uint8_t *after = *p == '\'' ? contraction(p + 1, end, true) : NULL;
  if (after) return after;
  class next = c != NEWLINE && p + n < end ? class_at(p + n, &more) : BLANK;
  if (c != NEWLINE && next == LETTER && p + n < end) return run(p + n + more, end, LETTER);
  if (c == OTHER || (*p == ' ' && next == OTHER)) return run(run(p + n, end, OTHER), end, NEWLINE);
  return blanks(p, end, true);
}

size_t ty_scan(ty_pattern_kind kind, const uint8_t *text, size_t size, size_t from) {
  const uint8_t *p = text + from, *end = text + size;
  if (kind == TY_PATTERN_GPT2) return (size_t)(gpt2(p, end) - text);
  return (size_t)(llama3(p, end, kind == TY_PATTERN_LLAMA3 ? 3 : 1) - text);
}
