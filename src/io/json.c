/* The pull reader of JSON: see json.h. */
#include "json.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "number.h"

void ty_json_open(ty_json *j, const char *name, const void *text, size_t size) {
  *j = (ty_json){ .name = name, .text = text, .p = text, .end = (const char *)text + size };
}

void ty_json_close(ty_json *j) { ty_bytes_free(&j->scratch); }

bool ty_json_fail(ty_json *j, const char *format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  long line = 1;
  const char *start = j->text;
  for (const char *p = j->text; p < j->p; p++)
    if (*p == '\n') {
      line++;
      start = p + 1;
    }
  return ty_fail(TY_EIO, "%s: line %ld, column %ld: %s", ty_quote_text(j->name), line, (long)(j->p - start) + 1, text);
}

static void blanks(ty_json *j) {
  while (j->p < j->end && (*j->p == ' ' || *j->p == '\n' || *j->p == '\r' || *j->p == '\t')) j->p++;
}

/* What stands at the reading position, for error texts. */
static const char *here(const ty_json *j) {
  if (j->p >= j->end) return "the end of the text";
  return ty_quote(j->p, 1);
}

ty_json_kind ty_json_peek(ty_json *j) {
  blanks(j);
  if (j->p < j->end) switch (*j->p) {
      case '{': return TY_JSON_OBJECT;
      case '[': return TY_JSON_ARRAY;
      case '"': return TY_JSON_STRING;
      case 'n': return TY_JSON_NULL;
      case 't': return TY_JSON_TRUE;
      case 'f': return TY_JSON_FALSE;
      default:
        if (*j->p == '-' || (*j->p >= '0' && *j->p <= '9')) return TY_JSON_NUMBER;
    }
  ty_json_fail(j, "expected a JSON value, got %s", here(j));
  return TY_JSON_BAD;
}

bool ty_json_word(ty_json *j) {
  static const char *const words[] = { "null", "false", "true" };
  blanks(j);
  for (int i = 0; i < 3; i++) {
    size_t n = strlen(words[i]);
    if ((size_t)(j->end - j->p) >= n && memcmp(j->p, words[i], n) == 0) {
      j->p += n;
      return true;
    }
  }
  return ty_json_fail(j, "expected null, true or false");
}

static bool digits(ty_json *j) {
  const char *start = j->p;
  while (j->p < j->end && *j->p >= '0' && *j->p <= '9') j->p++;
  return j->p > start || ty_json_fail(j, "expected a digit, got %s", here(j));
}

bool ty_json_number(ty_json *j, ty_json_value *out) {
  blanks(j);
  const char *start = j->p;
  bool negative = j->p < j->end && *j->p == '-', whole = true;
  if (negative) j->p++;
  if (j->p < j->end && *j->p == '0') j->p++;
  else if (!digits(j)) return false;
  if (j->p < j->end && *j->p >= '0' && *j->p <= '9') return ty_json_fail(j, "a number may not begin with 0");
  if (j->p < j->end && *j->p == '.') {
    whole = false;
    j->p++;
    if (!digits(j)) return false;
  }
  if (j->p < j->end && (*j->p == 'e' || *j->p == 'E')) {
    whole = false;
    j->p++;
    if (j->p < j->end && (*j->p == '+' || *j->p == '-')) j->p++;
    if (!digits(j)) return false;
  }
  *out = (ty_json_value){ 0 };
  out->is_integer = whole && ty_parse_integer(start, j->p, &out->integer) &&
                    !(negative && out->integer == 0); /* -0 is a float */
  if (out->is_integer) {
    out->number = (double)out->integer;
    return true;
  }
  if (ty_parse_number(start, j->p, &out->number) != j->p) return ty_json_fail(j, "the number has too many digits");
  if (out->number > 1.7976931348623157e308 || out->number < -1.7976931348623157e308)
    return ty_json_fail(j, "the number is too large for a double");
  return true;
}

static bool hex4(ty_json *j, unsigned *out) {
  *out = 0;
  for (int i = 0; i < 4; i++, j->p++) {
    char c = j->p < j->end ? *j->p : 0;
    unsigned d = c >= '0' && c <= '9'   ? (unsigned)(c - '0')
                 : c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10
                 : c >= 'A' && c <= 'F' ? (unsigned)(c - 'A') + 10
                                        : 16;
    if (d == 16) return ty_json_fail(j, "expected four hexadecimal digits after \\u");
    *out = *out * 16 + d;
  }
  return true;
}

static bool put_utf8(ty_bytes *b, unsigned c) {
  uint8_t s[4];
  size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  if (n == 1) s[0] = (uint8_t)c;
  else {
    s[0] = (uint8_t)((0xf00 >> n) | (c >> (6 * (n - 1))));
    for (size_t i = 1; i < n; i++) s[i] = (uint8_t)(0x80 | ((c >> (6 * (n - 1 - i))) & 0x3f));
  }
  return ty_bytes_put(b, s, n);
}

/* After the backslash. */
static bool escape(ty_json *j) {
  static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
  char c = j->p < j->end ? *j->p++ : 0;
  const char *at = c ? strchr(from, c) : NULL;
  if (at) return ty_bytes_put(&j->scratch, &to[at - from], 1);
  if (c != 'u') return ty_json_fail(j, "\\ is followed by something that is no JSON escape");
  unsigned unit, low;
  if (!hex4(j, &unit)) return false;
  if (unit >= 0xd800 && unit < 0xe000) {
    if (unit >= 0xdc00 || j->end - j->p < 2 || j->p[0] != '\\' || j->p[1] != 'u')
      return ty_json_fail(j, "half of a surrogate pair");
    j->p += 2;
    if (!hex4(j, &low)) return false;
    if (low < 0xdc00 || low > 0xdfff) return ty_json_fail(j, "half of a surrogate pair");
    unit = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
  }
  return put_utf8(&j->scratch, unit);
}

bool ty_json_string(ty_json *j, const char **text, size_t *size) {
  blanks(j);
  if (j->p >= j->end || *j->p != '"') return ty_json_fail(j, "expected a string, got %s", here(j));
  const char *start = ++j->p, *piece = start;
  bool escaped = false;
  j->scratch.size = 0;
  for (;;) {
    while (j->p < j->end && *j->p != '"' && *j->p != '\\' && (unsigned char)*j->p >= 0x20) j->p++;
    if (j->p >= j->end) return ty_json_fail(j, "the text ends inside a string");
    if ((unsigned char)*j->p < 0x20) return ty_json_fail(j, "a control character in a string");
    if (!ty_valid_utf8(piece, (size_t)(j->p - piece))) return ty_json_fail(j, "a string is not valid UTF-8");
    if (*j->p == '"' && !escaped) {
      *text = start;
      *size = (size_t)(j->p++ - start);
      return true;
    }
    if (!ty_bytes_put(&j->scratch, piece, (size_t)(j->p - piece))) return false;
    if (*j->p++ == '"') {
      *text = j->scratch.data ? (const char *)j->scratch.data : "";
      *size = j->scratch.size;
      return true;
    }
    escaped = true;
    if (!escape(j)) return false;
    piece = j->p;
  }
}

bool ty_json_enter(ty_json *j, char bracket) {
  blanks(j);
  if (j->p >= j->end || *j->p != bracket) return ty_json_fail(j, "expected '%c', got %s", bracket, here(j));
  if (j->depth == TY_JSON_DEPTH) return ty_json_fail(j, "nested deeper than %d", TY_JSON_DEPTH);
  j->open[j->depth++] = *j->p++;
  j->first = true;
  return true;
}

bool ty_json_next(ty_json *j, bool *more) {
  char closer = j->open[j->depth - 1] == '[' ? ']' : '}';
  blanks(j);
  if (j->p < j->end && *j->p == closer) {
    j->p++;
    j->depth--;
    j->first = false;
    *more = false;
    return true;
  }
  if (!j->first) {
    if (j->p >= j->end || *j->p != ',') return ty_json_fail(j, "expected ',' or '%c', got %s", closer, here(j));
    j->p++;
    blanks(j);
    if (j->p < j->end && *j->p == closer) return ty_json_fail(j, "a comma before '%c'", closer);
  }
  j->first = false;
  *more = true;
  return true;
}

bool ty_json_key(ty_json *j, const char **text, size_t *size) {
  if (!ty_json_string(j, text, size)) return false;
  blanks(j);
  if (j->p >= j->end || *j->p != ':') return ty_json_fail(j, "expected ':' after a key, got %s", here(j));
  j->p++;
  return true;
}

bool ty_json_skip(ty_json *j) {
  const char *s;
  size_t n;
  ty_json_value number;
  int floor = j->depth;
  do {
    bool more = true;
    if (j->depth > floor) {
      if (!ty_json_next(j, &more)) return false;
      if (more && j->open[j->depth - 1] == '{' && !ty_json_key(j, &s, &n)) return false;
    }
    if (!more) continue;
    switch (ty_json_peek(j)) {
      case TY_JSON_BAD: return false;
      case TY_JSON_NUMBER:
        if (!ty_json_number(j, &number)) return false;
        break;
      case TY_JSON_STRING:
        if (!ty_json_string(j, &s, &n)) return false;
        break;
      case TY_JSON_ARRAY:
      case TY_JSON_OBJECT:
        if (!ty_json_enter(j, *j->p)) return false;
        break;
      default:
        if (!ty_json_word(j)) return false;
    }
  } while (j->depth > floor);
  return true;
}

bool ty_json_finish(ty_json *j) {
  blanks(j);
  return j->p == j->end || ty_json_fail(j, "the text goes on after the value: %s", here(j));
}

bool ty_json_put_string(ty_bytes *out, const char *text, size_t size) {
  if (!ty_valid_utf8(text, size))
    return ty_fail(TY_EINVAL, "json: a string is not valid UTF-8: %s", ty_quote(text, size));
  if (!ty_bytes_put(out, "\"", 1)) return false;
  size_t from = 0;
  for (size_t i = 0; i < size; i++) {
    unsigned char c = (unsigned char)text[i];
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    if (!ty_bytes_put(out, text + from, i - from)) return false;
    from = i + 1;
    static const char plain[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    const char *at = c ? strchr(plain, c) : NULL;
    bool ok = at ? ty_bytes_printf(out, "\\%c", letters[at - plain]) : ty_bytes_printf(out, "\\u%04x", c);
    if (!ok) return false;
  }
  return ty_bytes_put(out, text + from, size - from) && ty_bytes_put(out, "\"", 1);
}
