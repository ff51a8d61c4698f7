/* What text is split by: a text, a known regular expression (scan.c), or any other by PCRE2. Files have expressions
 * in the syntax of Oniguruma, of which those parts that PCRE2 reads otherwise are rewritten; what has no counterpart
 * is an error. Categories get the characters that PCRE2's tables may be too old for. Limits on steps and memory keep a
 * hostile expression from running for ever. */
#define _GNU_SOURCE /* memmem */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

enum { MOST_PATTERN = 1 << 16, MOST_STEPS = 20000000, MOST_HEAP_KIB = 1 << 16, JIT_STACK = 1 << 20 };

const char *const ty_pattern_gpt2 =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const char *const ty_pattern_llama3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
                                      "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
                                      "\\s+(?!\\S)|\\s+";
const char *const ty_pattern_qwen2 =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
    "\\s+(?!\\S)|\\s+";

/* ---- from Oniguruma's syntax ---- */

#define SPACES \
  "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define NO_SPACES                                                                                                    \
  "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}" \
  "\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}"
#define WORDS                                                                                                     \
  "\\p{L}\\p{M}\\p{Nl}\\p{Nd}\\p{Pc}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{" \
  "1f189}"
#define MORE_WORDS "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}" /* Oniguruma counts these to \w outside of brackets alone */

typedef struct rewriting {
  const char *where, *p, *end;
  ty_bytes out;
  size_t atom;       /* where in `out` the last item begins that a quantifier can follow */
  size_t groups[64]; /* where open groups begin */
  int depth;
} rewriting;

static bool refuse(const rewriting *r, const char *what) {
  return ty_fail(TY_EUNSUPPORTED, "%s: %s in a regular expression is not supported", r->where, what);
}

static bool put(rewriting *r, const char *text) { return ty_bytes_put(&r->out, text, strlen(text)); }

/* Inside of brackets: the characters of a category that may be newer than PCRE2's tables. */
static bool put_newer(rewriting *r, const char *category) {
  size_t place = 0;
  for (uint32_t first, last; ty_newer_next(category, &place, &first, &last);) {
    char range[40];
    snprintf(range, sizeof range, first == last ? "\\x{%x}" : "\\x{%x}-\\x{%x}", first, last);
    if (!put(r, range)) return false;
  }
  return true;
}

/* A category, whole: inside of brackets, or as brackets of its own. What is not of it cannot have those that are newer
 * taken out inside of brackets. */
static bool put_category(rewriting *r, const char *category, bool negated, bool in_class) {
  const char *open = in_class ? negated ? "\\P{" : "\\p{" : negated ? "[^\\p{" : "[\\p{";
  return put(r, open) && put(r, category) && put(r, "}") && ((in_class && negated) || put_newer(r, category)) &&
         (in_class || put(r, "]"));
}

/* \w, inside of brackets. */
static bool put_word(rewriting *r) {
  return put(r, WORDS) && put_newer(r, "L") && put_newer(r, "M") && put_newer(r, "Nd") && put_newer(r, "Nl") &&
         put_newer(r, "Pc");
}

/* Whether s is the word, without case, blanks, hyphens and underlines. */
static bool same_name(const char *s, size_t n, const char *word) {
  for (size_t i = 0; i < n; i++) {
    if (s[i] == '_' || s[i] == '-' || s[i] == ' ') continue;
    char c = s[i] >= 'A' && s[i] <= 'Z' ? (char)(s[i] | 32) : s[i];
    if (c != *word || !*word) return false;
    word++;
  }
  return !*word;
}

/* \p{...} and \P{...}; r->p is at the p. */
static bool property(rewriting *r, bool in_class) {
  static const char *const names[][2] = {
    { "letter", "L" },
    { "mark", "M" },
    { "number", "N" },
    { "punctuation", "P" },
    { "punct", "P" },
    { "symbol", "S" },
    { "separator", "Z" },
    { "other", "C" },
    { "uppercaseletter", "Lu" },
    { "lowercaseletter", "Ll" },
    { "titlecaseletter", "Lt" },
    { "modifierletter", "Lm" },
    { "otherletter", "Lo" },
    { "decimalnumber", "Nd" },
    { "digit", "Nd" },
    { "alphabetic", "Alphabetic" },
    { "alpha", "Alphabetic" },
    { "lowercase", "Lowercase" },
    { "uppercase", "Uppercase" },
    { "any", "Any" },
    { "whitespace", "White_Space" },
    { "emoji", "Emoji" },
    { "ideographic", "Ideographic" },
  };
  bool negated = *r->p++ == 'P';
  if (r->p == r->end || *r->p != '{') return refuse(r, "\\p without braces");
  const char *name = ++r->p;
  while (r->p < r->end && *r->p != '}') r->p++;
  if (r->p == r->end) return refuse(r, "\\p{ without an end");
  size_t size = (size_t)(r->p++ - name);
  if (size && *name == '^') name++, size--, negated = !negated;
  for (size_t i = 0; i < size; i++)
    if (!((name[i] | 32) >= 'a' && (name[i] | 32) <= 'z') && !strchr("_- &", name[i])) return refuse(r, "such a \\p{}");
  if (size == 0 || size > 60) return refuse(r, "such a \\p{}");
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (same_name(name, size, names[i][0])) return put_category(r, names[i][1], negated, in_class);
  char category[3] = { 0 };
  if (size <= 2) return put_category(r, memcpy(category, name, size), negated, in_class);
  return put(r, negated ? "\\P{sc:" : "\\p{sc:") && /* not its script extensions */
         ty_bytes_put(&r->out, name, size) && put(r, "}");
}

/* After a backslash. */
static bool escape(rewriting *r, bool in_class) {
  if (r->p == r->end) return refuse(r, "a backslash at the end");
  char c = *r->p;
  const char *inside = c == 's' ? SPACES : c == 'S' ? NO_SPACES : c == 'h' ? "0-9a-fA-F" : NULL;
  if (c == 'p' || c == 'P') return property(r, in_class);
  r->p++;
  if (inside) return in_class ? put(r, inside) : put(r, "[") && put(r, inside) && put(r, "]");
  if ((c == 'W' || c == 'H') && in_class) return refuse(r, "\\W or \\H in brackets");
  if (c == 'w' && in_class) return put_word(r);
  if (c == 'w' || c == 'W') return put(r, c == 'w' ? "[" : "[^") && put_word(r) && put(r, MORE_WORDS "]");
  if (c == 'H') return put(r, "[^0-9a-fA-F]");
  if (c == 'd' || c == 'D') return put_category(r, "Nd", c == 'D', in_class);
  if (c == 'u') {
    if (r->end - r->p < 4) return refuse(r, "\\u without four digits");
    bool ok = put(r, "\\x{") && ty_bytes_put(&r->out, r->p, 4) && put(r, "}");
    r->p += 4;
    return ok;
  }
  if (strchr("gkKRXyYOCGE", c)) return refuse(r, "this escape");
  const char text[2] = { '\\', c };
  return ty_bytes_put(&r->out, text, 2);
}

/* After the opening bracket, up to and with the closing one. */
static bool brackets(rewriting *r) {
  if (!put(r, "[")) return false;
  if (r->p < r->end && *r->p == '^' && (r->p++, !put(r, "^"))) return false;
  for (bool first = true; r->p < r->end; first = false) {
    char c = *r->p++;
    if (c == ']' && !first) return put(r, "]");
    if (c == '\\') {
      if (!escape(r, true)) return false;
    } else if (c == '[' && r->p < r->end && *r->p == ':') {
      const char *start = r->p - 1;
      while (r->p < r->end && *r->p != ']') r->p++;
      if (r->p == r->end) return refuse(r, "[: without an end");
      r->p++;
      if (!ty_bytes_put(&r->out, start, (size_t)(r->p - start))) return false;
    } else if (c == '[') {
      return refuse(r, "a class within a class");
    } else if (c == '&' && r->p < r->end && *r->p == '&') {
      return refuse(r, "&& in brackets");
    } else if (!ty_bytes_put(&r->out, &c, 1)) {
      return false;
    }
  }
  return refuse(r, "[ without an end");
}

/* {n,m} with what follows; r->p is behind the brace. In Oniguruma a + behind it repeats the repetition. */
static bool interval(rewriting *r) {
  const char *q = r->p;
  while (q < r->end && ((*q >= '0' && *q <= '9') || *q == ',')) q++;
  bool whole = q > r->p && q < r->end && *q == '}';
  const char *start = r->p - 1;
  if (!whole) return put(r, "\\{");
  if (*r->p == ',') return refuse(r, "{,n}");
  r->p = q + 1;
  if (!ty_bytes_put(&r->out, start, (size_t)(r->p - start))) return false;
  if (r->p == r->end || *r->p != '+') return true;
  r->p++;
  size_t size = r->out.size - r->atom;
  if (!put(r, "(?:)+")) return false;
  memmove(r->out.data + r->atom + 3, r->out.data + r->atom, size);
  memcpy(r->out.data + r->atom, "(?:", 3);
  memcpy(r->out.data + r->atom + 3 + size, ")+", 2);
  return true;
}

static bool rewrite(rewriting *r) {
  while (r->p < r->end) {
    char c = *r->p++;
    if (c == '{') {
      if (!interval(r)) return false;
      continue;
    }
    if (c == '*' || c == '+' || c == '?') {
      if (!ty_bytes_put(&r->out, &c, 1)) return false;
      continue;
    }
    if (c == ')') {
      if (!r->depth) return refuse(r, ") without (");
      r->atom = r->groups[--r->depth];
      if (!put(r, ")")) return false;
      continue;
    }
    r->atom = r->out.size;
    if (c == '(') {
      if (r->depth == 64) return refuse(r, "groups 64 deep");
      if (r->end - r->p > 1 && r->p[0] == '?' && strchr("#RC&P|(0123456789", r->p[1])) return refuse(r, "this group");
      if (r->p < r->end && *r->p == '*') return refuse(r, "(*");
      r->groups[r->depth++] = r->out.size;
      if (!put(r, "(")) return false;
      if (r->p < r->end && *r->p == '?') { /* its sign is no quantifier */
        const char *start = r->p++;
        while (r->p < r->end && strchr(":=!<>imx-", *r->p)) r->p++;
        if (!ty_bytes_put(&r->out, start, (size_t)(r->p - start))) return false;
      }
      continue;
    }
    if (c == '[' ? !brackets(r) : c == '\\' ? !escape(r, false) : !ty_bytes_put(&r->out, &c, 1)) return false;
    if (c != '[' && c != '\\' && (c & 0x80)) /* the rest of a character */
      while (r->p < r->end && (*r->p & 0xc0) == 0x80)
        if (!ty_bytes_put(&r->out, r->p++, 1)) return false;
  }
  return true;
}

/* ---- compiling and matching ---- */

bool ty_pattern_compile(ty_pattern *p, const char *where, bool regex, ty_str text, bool scanners) {
  *p = (ty_pattern){ .kind = TY_PATTERN_TEXT, .text = text };
  if (!regex) return true;
  if (text.size > MOST_PATTERN)
    return ty_fail(TY_EIO, "%s: a regular expression of %zu bytes is too long", where, text.size);
  if (scanners) {
    p->kind = ty_str_is(text, ty_pattern_gpt2)     ? TY_PATTERN_GPT2
              : ty_str_is(text, ty_pattern_llama3) ? TY_PATTERN_LLAMA3
              : ty_str_is(text, ty_pattern_qwen2)  ? TY_PATTERN_QWEN2
                                                   : TY_PATTERN_TEXT;
    if (p->kind != TY_PATTERN_TEXT) return true;
  }
  p->kind = TY_PATTERN_REGEX;
  rewriting r = { .where = where, .p = text.text, .end = text.text + text.size };
  int code = 0;
  PCRE2_SIZE at = 0;
  bool ok = rewrite(&r);
  if (ok) {
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (context) pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    p->code = pcre2_compile(r.out.data ? r.out.data : (PCRE2_SPTR) "", r.out.size,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_UTF_CHECK,
                            &code, &at, context);
    pcre2_compile_context_free(context);
    if (!p->code) {
      PCRE2_UCHAR message[120];
      pcre2_get_error_message(code, message, sizeof message);
      ok = ty_fail(TY_EIO, "%s: the regular expression %s: %s", where, ty_quote(text.text, text.size), (char *)message);
    } else {
      pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); /* without it, matching is slower */
    }
  }
  ty_bytes_free(&r.out);
  return ok;
}

void ty_pattern_free(ty_pattern *p) {
  if (p->code) pcre2_code_free(p->code);
  p->code = NULL;
}

void ty_matcher_free(ty_matcher *m) {
  pcre2_match_data_free(m->data);
  pcre2_match_context_free(m->context);
  pcre2_jit_stack_free(m->stack);
}

static bool prepare(ty_matcher *m) {
  if (m->data) return true;
  m->context = pcre2_match_context_create(NULL);
  m->stack = pcre2_jit_stack_create(1 << 15, JIT_STACK, NULL); /* NULL when there is no JIT */
  if (m->context) {
    pcre2_set_match_limit(m->context, MOST_STEPS);
    pcre2_set_heap_limit(m->context, MOST_HEAP_KIB);
    if (m->stack) pcre2_jit_stack_assign(m->context, NULL, m->stack);
    m->data = pcre2_match_data_create(1, NULL);
  }
  return m->data || ty_fail(TY_ENOMEM, "no memory for matching");
}

static bool next_text(ty_str wanted, const uint8_t *text, size_t size, size_t from, size_t *begin, size_t *end) {
  const uint8_t *at = wanted.size ? memmem(text + from, size - from, wanted.text, wanted.size) : NULL;
  *begin = at ? (size_t)(at - text) : SIZE_MAX;
  *end = at ? *begin + wanted.size : SIZE_MAX;
  return true;
}

bool ty_pattern_next(const ty_pattern *p, ty_matcher *m, const uint8_t *text, size_t size, size_t from, size_t last,
                     size_t *begin, size_t *end) {
  if (p->kind == TY_PATTERN_TEXT) return next_text(p->text, text, size, from, begin, end);
  if (p->kind != TY_PATTERN_REGEX) {
    *begin = from < size ? from : SIZE_MAX;
    if (from < size) *end = ty_scan(p->kind, text, size, from);
    return true;
  }
  if (!prepare(m)) return false;
  for (;;) {
    int n = pcre2_match(p->code, text, size, from, PCRE2_NO_UTF_CHECK, m->data, m->context);
    if (n == PCRE2_ERROR_NOMATCH) {
      *begin = SIZE_MAX;
      return true;
    }
    if (n < 0) {
      PCRE2_UCHAR message[120];
      pcre2_get_error_message(n, message, sizeof message);
      return ty_fail(TY_EINVAL, "tokenizer: matching the regular expression %s: %s",
                     ty_quote(p->text.text, p->text.size), (char *)message);
    }
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(m->data);
    *begin = v[0], *end = v[1];
    if (*begin > *end) return ty_fail(TY_EINVAL, "tokenizer: a match that ends before it begins");
    if (*begin < *end || *begin != last) return true;
    if (from >= size) { /* the empty match that was already there */
      *begin = SIZE_MAX;
      return true;
    }
    unsigned length;
    ty_char_at(text + from, &length);
    from += length;
  }
}
