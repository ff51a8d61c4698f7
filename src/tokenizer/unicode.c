/* Characters: see unicode.h. Categories are those of utf8proc, and for characters that are newer than it those of
 * ranges.h, which also has the classes that the reference takes from tables of other ages. */
#include "unicode.h"

#include <string.h>
#include <utf8proc.h>

#include "ranges.h"

#define COUNT(table) (sizeof(table) / sizeof *(table))

unsigned ty_char_put(uint8_t out[4], uint32_t c) {
  if (c < 0x80) {
    out[0] = (uint8_t)c;
    return 1;
  }
  unsigned n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  out[0] = (uint8_t)((0xf00 >> n) | (c >> (6 * (n - 1))));
  for (unsigned i = 1; i < n; i++) out[i] = (uint8_t)(0x80 | ((c >> (6 * (n - 1 - i))) & 0x3f));
  return n;
}

size_t ty_utf8_span(const uint8_t *p, size_t size, unsigned *bad) {
  const uint8_t *start = p, *end = p + size;
  *bad = 0;
  while (p < end) {
    uint64_t eight;
    while (end - p >= 8 && (memcpy(&eight, p, 8), !(eight & 0x8080808080808080))) p += 8;
    if (p == end) break;
    uint8_t c = *p;
    if (c < 0x80) {
      p++;
      continue;
    }
    int more = c >= 0xc2 && c <= 0xdf ? 1 : c >= 0xe0 && c <= 0xef ? 2 : c >= 0xf0 && c <= 0xf4 ? 3 : 0;
    uint8_t low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80, high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
    int good = 0; /* continuation bytes that a character can have here */
    while (good < more && p + good + 1 < end && p[good + 1] >= low && p[good + 1] <= high) {
      low = 0x80, high = 0xbf;
      good++;
    }
    if (!more || good < more) {
      *bad = (unsigned)good + 1;
      break;
    }
    p += more + 1;
  }
  return (size_t)(p - start);
}

bool ty_utf8_repair(const uint8_t *p, size_t size, ty_bytes *out) {
  while (size) {
    unsigned bad;
    size_t good = ty_utf8_span(p, size, &bad);
    if (!ty_bytes_put(out, p, good) || (bad && !ty_bytes_put(out, "\xef\xbf\xbd", 3))) return false;
    p += good + bad, size -= good + bad;
  }
  return true;
}

bool ty_is_space(uint32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
         c == 0x202f || c == 0x205f || c == 0x3000;
}

static bool among(const ty_char_range *table, size_t count, uint32_t c) {
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (table[middle].last < c) low = middle + 1;
    else high = middle;
  }
  return low < count && table[low].first <= c;
}

/* The category of a character that utf8proc does not know, "" when it is not assigned. */
static const char *newer_category(uint32_t c) {
  size_t low = 0, high = COUNT(ty_newer);
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ty_newer[middle].last < c) low = middle + 1;
    else high = middle;
  }
  return low < COUNT(ty_newer) && ty_newer[low].first <= c ? ty_newer[low].category : "";
}

bool ty_newer_next(const char *category, size_t *place, uint32_t *first, uint32_t *last) {
  size_t i = *place, n = strlen(category);
  while (i < COUNT(ty_newer) && strncmp(ty_newer[i].category, category, n) != 0) i++;
  if (i == COUNT(ty_newer)) return false;
  *first = ty_newer[i].first, *last = ty_newer[i].last;
  for (i++; i < COUNT(ty_newer) && ty_newer[i].first == *last + 1; i++) {
    if (strncmp(ty_newer[i].category, category, n) != 0) break;
    *last = ty_newer[i].last;
  }
  *place = i;
  return true;
}

/* Whether the category is one from `first` to `last`, which have the letter `major`. */
static bool category_between(uint32_t c, int first, int last, char major) {
  int k = (int)utf8proc_category((utf8proc_int32_t)c);
  return k == UTF8PROC_CATEGORY_CN ? newer_category(c)[0] == major : k >= first && k <= last;
}

bool ty_is_letter(uint32_t c) {
  if (c < 0x80) return (c | 32) >= 'a' && (c | 32) <= 'z';
  return category_between(c, UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LO, 'L');
}

bool ty_is_number(uint32_t c) {
  if (c < 0x80) return c >= '0' && c <= '9';
  return category_between(c, UTF8PROC_CATEGORY_ND, UTF8PROC_CATEGORY_NO, 'N');
}

bool ty_is_digit(uint32_t c) { return ty_is_number(c) || among(ty_more_digits, COUNT(ty_more_digits), c); }

bool ty_is_punctuation(uint32_t c) { return among(ty_punctuation, COUNT(ty_punctuation), c); }

bool ty_is_accent(uint32_t c) { return c >= 0x300 && among(ty_accents, COUNT(ty_accents), c); }

bool ty_is_nonspacing_mark(uint32_t c) { return c >= 0x300 && among(ty_nonspacing, COUNT(ty_nonspacing), c); }

bool ty_is_control(uint32_t c) { return among(ty_controls, COUNT(ty_controls), c); }

bool ty_is_undecomposed(uint32_t c) { return among(ty_undecomposed, COUNT(ty_undecomposed), c) || *newer_category(c); }

uint32_t ty_lower(uint32_t c) {
  for (size_t i = 0; c >= ty_newer_lower[0].first && i < COUNT(ty_newer_lower); i++)
    if (c >= ty_newer_lower[i].first && c <= ty_newer_lower[i].last)
      return (uint32_t)((int32_t)c + ty_newer_lower[i].offset);
  return (uint32_t)utf8proc_tolower((utf8proc_int32_t)c);
}

/* UTS 18, annex C: Alphabetic, M, Nd, Pc and Join_Control. Alphabetic is L, Nl, marks and the letters in circles and
 * squares. */
bool ty_is_word(uint32_t c) {
  if (c < 0x80) return ty_is_letter(c) || ty_is_number(c) || c == '_';
  if ((c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) || (c >= 0x1f150 && c <= 0x1f169) ||
      (c >= 0x1f170 && c <= 0x1f189) || c == 0x200c || c == 0x200d)
    return true;
  switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    case UTF8PROC_CATEGORY_CN: {
      const char *k = newer_category(c);
      return *k == 'L' || *k == 'M' || !strcmp(k, "Nd") || !strcmp(k, "Nl") || !strcmp(k, "Pc");
    }
    default: return false;
  }
}

static bool stands_for_itself(uint32_t c) { return (c >= '!' && c <= '~') || (c >= 0xa1 && c <= 0xff && c != 0xad); }

uint32_t ty_byte_char(uint8_t byte) {
  if (stands_for_itself(byte)) return byte;
  return 0x100u + (byte <= ' ' ? byte : byte == 0xad ? 67u : byte - 0x7fu + 33u);
}

int ty_char_byte(uint32_t c) {
  if (stands_for_itself(c)) return (int)c;
  if (c < 0x100 || c > 0x143) return -1;
  uint32_t n = c - 0x100;
  return (int)(n <= ' ' ? n : n == 67 ? 0xad : n - 33 + 0x7f);
}
