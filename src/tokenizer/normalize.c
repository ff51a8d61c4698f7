/* Normalizers: each reads a piece and writes another, which remembers for every byte what part of the input it came
 * from. */
#include <stdlib.h>
#include <utf8proc.h>

#include "internal.h"

static bool put_char(ty_string *out, uint32_t c, ty_span from) {
  uint8_t s[4];
  return ty_string_put(out, s, ty_char_put(s, c), from);
}

static bool put_part(ty_string *out, const ty_piece *in, size_t begin, size_t end) {
  if (!out->tracked) return ty_bytes_put(&out->text, in->text + begin, end - begin);
  for (unsigned n; begin < end; begin += n) {
    ty_char_at(in->text + begin, &n);
    if (!ty_string_put(out, in->text + begin, n, ty_piece_span(in, begin, begin + n))) return false;
  }
  return true;
}

/* ---- NFC and its kin ---- */

/* A character on its way to the canonical order. */
typedef struct mark {
  utf8proc_int32_t c;
  int class;
  ty_span from;
} mark;

enum { MOST_OF_ONE = 64 }; /* U+FDFA becomes 18 characters */

typedef struct marks {
  mark *item;
  size_t count, capacity;
} marks;

static int class_of(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

/* Stable: equal classes stay in their order. */
static void order(mark *m, size_t count) {
  for (size_t i = 1; i < count; i++)
    for (size_t j = i; j && m[j - 1].class > m[j].class; j--) {
      mark t = m[j];
      m[j] = m[j - 1];
      m[j - 1] = t;
    }
}

/* The composition of two characters, or -1. */
static utf8proc_int32_t compose(utf8proc_int32_t a, utf8proc_int32_t b) {
  utf8proc_int32_t pair[2] = { a, b };
  return utf8proc_normalize_utf32(pair, 2, UTF8PROC_STABLE | UTF8PROC_COMPOSE) == 1 ? pair[0] : -1;
}

/* One run: a starter and all that is not. In: decomposed and ordered. */
static size_t compose_run(mark *m, size_t count) {
  if (!count) return 0;
  size_t kept = 1, starter = m[0].class == 0 ? 0 : SIZE_MAX;
  int last = 0; /* the class of what was kept before; a class not higher blocks */
  for (size_t i = 1; i < count; i++) {
    bool blocked = starter == SIZE_MAX || (kept - 1 > starter && (last == 0 || last >= m[i].class));
    utf8proc_int32_t c = blocked ? -1 : compose(m[starter].c, m[i].c);
    if (c >= 0) {
      m[starter].c = c;
      if (m[i].from.end > m[starter].from.end) m[starter].from.end = m[i].from.end;
      continue;
    }
    m[kept] = m[i];
    last = m[i].class;
    if (last == 0) starter = kept;
    kept++;
  }
  return kept;
}

static bool flush(marks *m, bool composing, ty_string *out) {
  size_t begin = 0;
  while (begin < m->count && m->item[begin].class == 0) begin++; /* the canonical order, run by run */
  for (size_t i = begin; i < m->count;) {
    size_t end = i;
    while (end < m->count && m->item[end].class) end++;
    if (end - i < 64) order(m->item + i, end - i);
    else { /* a hostile pile of marks */ mark *sorted = malloc((end - i) * sizeof *sorted);
      if (!sorted) return ty_fail(TY_ENOMEM, "no memory for normalization");
      size_t n = 0;
      for (int class = 1; class < 256; class ++)
        for (size_t j = i; j < end; j++)
          if (m->item[j].class == class) sorted[n++] = m->item[j];
      memcpy(m->item + i, sorted, n * sizeof *sorted);
      free(sorted);
    }
    i = end;
    while (i < m->count && m->item[i].class == 0) i++;
  }
  size_t count = composing ? compose_run(m->item, m->count) : m->count;
  for (size_t i = 0; i < count; i++)
    if (!put_char(out, (uint32_t)m->item[i].c, m->item[i].from)) return false;
  m->count = 0;
  return true;
}

/* Text is put out whenever a character begins that nothing before it can change: ASCII. */
static bool unicode_form(const ty_piece *in, ty_string *out, bool compatible, bool composing) {
  marks m = { 0 };
  bool ok = true;
  utf8proc_option_t options = UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0);
  size_t i = 0;
  while (ok && i < in->size) {
    unsigned n;
    uint32_t c = ty_char_at(in->text + i, &n);
    if (c < 0x80) {
      size_t begin = i;
      ok = flush(&m, composing, out);
      while (i < in->size && in->text[i] < 0x80) i++;
      if (i < in->size) i--; /* marks may follow: the last one waits */
      ok = ok && put_part(out, in, begin, i);
      if (i == in->size) break;
      c = in->text[i];
      n = 1;
    }
    utf8proc_int32_t parts[MOST_OF_ONE];
    int boundary = 0;
    utf8proc_ssize_t count = utf8proc_decompose_char((utf8proc_int32_t)c, parts, MOST_OF_ONE, options, &boundary);
    bool changed = count != 1 || parts[0] != (utf8proc_int32_t)c;
    if (count < 0 || count > MOST_OF_ONE || (changed && ty_is_undecomposed(c))) {
      parts[0] = (utf8proc_int32_t)c;
      count = 1;
    }
    ok = ok && ty_grow(&m.item, &m.capacity, m.count, (size_t)count, sizeof *m.item);
    for (utf8proc_ssize_t k = 0; ok && k < count; k++)
      m.item[m.count++] = (mark){ parts[k], class_of(parts[k]), ty_piece_span(in, i, i + n) };
    i += n;
  }
  ok = ok && flush(&m, composing, out);
  free(m.item);
  return ok;
}

/* Below U+0300 composed text is as it should be; below U+00C0 decomposed text is, too (and U+00A0 for the compatible
 * forms is not). */
static bool is_plain(const ty_piece *in, ty_component_kind kind) {
  for (size_t i = 0; i < in->size; i++)
    if (in->text[i] >= (kind == TY_NFC ? 0xcc : 0x80)) return false;
  return true;
}

/* ---- characters one by one ---- */

static uint32_t nmt(uint32_t c) {
  if ((c >= 1 && c <= 8) || c == 0x0b || (c >= 0x0e && c <= 0x1f) || c == 0x7f || c == 0x8f || c == 0x9f)
    return TY_NO_ID;
  if (c == 9 || c == 10 || c == 12 || c == 13 || c == 0x1680 || (c >= 0x200b && c <= 0x200f) || c == 0x2028 ||
      c == 0x2029 || c == 0x2581 || c == 0xfeff || c == 0xfffd)
    return ' ';
  return c;
}

static bool is_chinese(uint32_t c) {
  return (c >= 0x4e00 && c <= 0x9fff) || (c >= 0x3400 && c <= 0x4dbf) || (c >= 0x20000 && c <= 0x2a6df) ||
         (c >= 0x2a700 && c <= 0x2b73f) || (c >= 0x2b740 && c <= 0x2b81f) || (c >= 0x2b920 && c <= 0x2ceaf) ||
         (c >= 0xf900 && c <= 0xfaff) || (c >= 0x2f800 && c <= 0x2fa1f);
}

static bool put_lower(ty_string *out, uint32_t c, ty_span from) {
  if (c == 0x130) return put_char(out, 'i', from) && put_char(out, 0x307, from); /* SpecialCasing.txt */
  return put_char(out, ty_lower(c), from);
}

/* What a normalizer that sees one character at a time makes of it. */
static bool one_char(const ty_component *n, ty_string *out, uint32_t c, ty_span from) {
  switch (n->kind) {
    case TY_LOWERCASE: return put_lower(out, c, from);
    case TY_NMT: c = nmt(c); return c == TY_NO_ID || put_char(out, c, from);
    case TY_STRIP_ACCENTS: return ty_is_accent(c) || put_char(out, c, from);
    default: return put_char(out, c, from);
  }
}

static bool each_char(const ty_component *n, const ty_piece *in, ty_string *out) {
  for (size_t i = 0; i < in->size;) {
    unsigned length;
    uint32_t c = ty_char_at(in->text + i, &length);
    if (!one_char(n, out, c, ty_piece_span(in, i, i + length))) return false;
    i += length;
  }
  return true;
}

static bool bert_clean(const ty_component *n, const ty_piece *in, ty_string *out) {
  for (size_t i = 0; i < in->size;) {
    unsigned length;
    uint32_t c = ty_char_at(in->text + i, &length);
    ty_span from = ty_piece_span(in, i, i + length);
    i += length;
    if (n->clean) {
      bool blank = c == '\t' || c == '\n' || c == '\r';
      if (!blank && ty_is_control(c)) continue;
      if (blank || ty_is_space(c)) c = ' ';
    }
    bool spaced = n->chinese && is_chinese(c);
    if ((spaced && !put_char(out, ' ', from)) || !put_char(out, c, from) || (spaced && !put_char(out, ' ', from)))
      return false;
  }
  return true;
}

static bool bert_rest(const ty_component *n, const ty_piece *in, ty_string *out) {
  for (size_t i = 0; i < in->size;) {
    unsigned length;
    uint32_t c = ty_char_at(in->text + i, &length);
    ty_span from = ty_piece_span(in, i, i + length);
    i += length;
    if (n->accents && ty_is_nonspacing_mark(c)) continue;
    if (!(n->lower ? put_lower(out, c, from) : put_char(out, c, from))) return false;
  }
  return true;
}

/* ---- the chain ---- */

static bool replace(const ty_component *n, ty_work *w, const ty_piece *in, ty_string *out) {
  size_t at = 0, begin, end, last = SIZE_MAX;
  for (;;) {
    if (at > in->size) break;
    if (!ty_pattern_next(&n->pattern, &w->matcher, in->text, in->size, at, last, &begin, &end)) return false;
    if (begin == SIZE_MAX) break;
    if (!put_part(out, in, last == SIZE_MAX ? 0 : last, begin)) return false;
    if (!ty_string_put(out, n->content.text, n->content.size, ty_piece_span(in, begin, end))) return false;
    at = last = end;
  }
  return put_part(out, in, last == SIZE_MAX ? 0 : last, in->size);
}

static bool strip(const ty_component *n, const ty_piece *in, ty_string *out) {
  size_t begin = 0, end = in->size;
  unsigned length;
  while (n->left && begin < end && ty_is_space(ty_char_at(in->text + begin, &length))) begin += length;
  while (n->right && end > begin && ty_is_space(ty_char_before(in->text + end, &length))) end -= length;
  return put_part(out, in, begin, end);
}

static bool prepend(const ty_component *n, const ty_piece *in, ty_string *out) {
  if (!in->size) return true;
  unsigned length;
  ty_char_at(in->text, &length);
  return ty_string_put(out, n->content.text, n->content.size, ty_piece_span(in, 0, length)) &&
         put_part(out, in, 0, in->size);
}

static bool byte_level(const ty_piece *in, ty_string *out) {
  for (size_t i = 0; i < in->size;) {
    unsigned length;
    ty_char_at(in->text + i, &length);
    ty_span from = ty_piece_span(in, i, i + length);
    for (; length; length--, i++)
      if (!put_char(out, ty_byte_char(in->text[i]), from)) return false;
  }
  return true;
}

static bool apply(const ty_component *n, ty_work *w, const ty_piece *in, ty_string *out) {
  switch (n->kind) {
    case TY_NFC: return unicode_form(in, out, false, true);
    case TY_NFD: return unicode_form(in, out, false, false);
    case TY_NFKC: return unicode_form(in, out, true, true);
    case TY_NFKD: return unicode_form(in, out, true, false);
    case TY_PRECOMPILED: return ty_charsmap_apply(n->map, in, out);
    case TY_PREPEND: return prepend(n, in, out);
    case TY_REPLACE: return replace(n, w, in, out);
    case TY_STRIP: return strip(n, in, out);
    case TY_BYTE_LEVEL: return byte_level(in, out);
    default: return each_char(n, in, out);
  }
}

/* One step: from *piece to the string of w that it is not in. */
typedef struct steps {
  ty_work *w;
  ty_piece *piece;
  int next;
} steps;

static ty_string *begin_step(steps *s) {
  ty_string *out = &s->w->normal[s->next];
  out->tracked = s->w->tracked;
  out->text.size = out->from.size = 0;
  return out;
}

static void end_step(steps *s) {
  ty_string *out = &s->w->normal[s->next];
  s->next ^= 1;
  *s->piece = (ty_piece){ out->text.data, out->text.size,
                          out->tracked ? (const ty_span *)(const void *)out->from.data : NULL, s->piece->base };
}

bool ty_normalize(const ty_tokenizer *t, ty_work *w, ty_piece *piece) {
  steps s = { w, piece, 0 };
  for (size_t i = 0; i < t->normalizers.count; i++) {
    const ty_component *n = &t->normalizers.item[i];
    if (n->kind <= TY_NFKD && is_plain(piece, n->kind)) continue;
    if (n->kind != TY_BERT_NORMALIZER) {
      if (!apply(n, w, piece, begin_step(&s))) return false;
      end_step(&s);
      continue;
    }
    if (n->clean || n->chinese) {
      if (!bert_clean(n, piece, begin_step(&s))) return false;
      end_step(&s);
    }
    if (n->accents && !is_plain(piece, TY_NFD)) {
      if (!unicode_form(piece, begin_step(&s), false, false)) return false;
      end_step(&s);
    }
    if (n->accents || n->lower) {
      if (!bert_rest(n, piece, begin_step(&s))) return false;
      end_step(&s);
    }
  }
  return true;
}
