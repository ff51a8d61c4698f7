/* Normalizers, pre-tokenizers and decoders of a tokenizer.json. Sequences become flat lists. Every kind has its keys;
 * as no two kinds mean different things by one key, they are read by one function. */
#include <stdlib.h>

#include "read.h"

typedef enum stage { NORMALIZER = 1, PRE_TOKENIZER = 2, DECODER = 4 } stage;

static const struct {
  const char *name;
  int stages;
  ty_component_kind kind;
} kinds[] = {
  { "NFC", NORMALIZER, TY_NFC },
  { "NFD", NORMALIZER, TY_NFD },
  { "NFKC", NORMALIZER, TY_NFKC },
  { "NFKD", NORMALIZER, TY_NFKD },
  { "Lowercase", NORMALIZER, TY_LOWERCASE },
  { "Nmt", NORMALIZER, TY_NMT },
  { "StripAccents", NORMALIZER, TY_STRIP_ACCENTS },
  { "BertNormalizer", NORMALIZER, TY_BERT_NORMALIZER },
  { "Precompiled", NORMALIZER, TY_PRECOMPILED },
  { "Prepend", NORMALIZER, TY_PREPEND },
  { "Replace", NORMALIZER | DECODER, TY_REPLACE },
  { "Strip", NORMALIZER | DECODER, TY_STRIP },
  { "ByteLevel", NORMALIZER | PRE_TOKENIZER | DECODER, TY_BYTE_LEVEL },
  { "Metaspace", PRE_TOKENIZER | DECODER, TY_METASPACE },
  { "Whitespace", PRE_TOKENIZER, TY_WHITESPACE },
  { "WhitespaceSplit", PRE_TOKENIZER, TY_WHITESPACE_SPLIT },
  { "BertPreTokenizer", PRE_TOKENIZER, TY_BERT_PRE_TOKENIZER },
  { "Punctuation", PRE_TOKENIZER, TY_PUNCTUATION },
  { "Digits", PRE_TOKENIZER, TY_DIGITS },
  { "Split", PRE_TOKENIZER, TY_SPLIT },
  { "CharDelimiterSplit", PRE_TOKENIZER, TY_DELIMITER },
  { "FixedLength", PRE_TOKENIZER, TY_FIXED_LENGTH },
  { "WordPiece", DECODER, TY_WORDPIECE_DECODER },
  { "BPEDecoder", DECODER, TY_BPE_DECODER },
  { "ByteFallback", DECODER, TY_BYTE_FALLBACK },
  { "Fuse", DECODER, TY_FUSE },
  { "CTC", DECODER, TY_CTC },
};

enum { MOST_COMPONENTS = 256 };

/* One of several words. */
static bool choice(ty_reading *r, const char *const *words, const uint8_t *values, uint8_t *out) {
  const char *s;
  size_t n;
  if (!ty_json_string(&r->j, &s, &n)) return false;
  for (int i = 0; words[i]; i++)
    if (ty_key_is(s, n, words[i])) {
      *out = values[i];
      return true;
    }
  return ty_json_fail(&r->j, "unknown value %s", ty_quote(s, n));
}

/* { "String": text } or { "Regex": expression }. */
static bool pattern(ty_reading *r, ty_component *c) {
  const char *key;
  size_t n;
  bool more, regex;
  ty_str text;
  if (c->pattern.text.text) return ty_json_fail(&r->j, "a key is there twice");
  if (!ty_json_enter(&r->j, '{') || !ty_json_next(&r->j, &more)) return false;
  if (!more) return ty_json_fail(&r->j, "expected String or Regex");
  if (!ty_json_key(&r->j, &key, &n)) return false;
  regex = ty_key_is(key, n, "Regex");
  if (!regex && !ty_key_is(key, n, "String"))
    return ty_json_fail(&r->j, "expected String or Regex, got %s", ty_quote(key, n));
  if (!ty_read_text(r, &text) || !ty_json_next(&r->j, &more)) return false;
  if (more) return ty_json_fail(&r->j, "expected one of String and Regex");
  return ty_pattern_compile(&c->pattern, r->j.name, regex, text, true);
}

static bool charsmap(ty_reading *r, ty_component *c) {
  const char *s;
  size_t n;
  if (c->map) return ty_json_fail(&r->j, "a key is there twice");
  if (!ty_json_string(&r->j, &s, &n)) return false;
  c->map = ty_charsmap_read(s, n);
  return c->map != NULL;
}

/* What the keys say before they are put together. */
typedef struct keys {
  bool has_content, has_accents, has_scheme, has_behavior;
} keys;

static bool read_key(ty_reading *r, ty_component *c, keys *k, const char *key, size_t n) {
  static const char *const behaviors[] = { "Isolated",       "Removed",    "MergedWithPrevious",
                                           "MergedWithNext", "Contiguous", NULL };
  static const uint8_t behavior_values[] = { TY_ISOLATED, TY_REMOVED, TY_MERGED_WITH_PREVIOUS, TY_MERGED_WITH_NEXT,
                                             TY_CONTIGUOUS };
  static const char *const schemes[] = { "always", "never", "first", NULL };
  static const uint8_t scheme_values[] = { TY_PREPEND_ALWAYS, TY_PREPEND_NEVER, TY_PREPEND_FIRST };
  static const char *const texts[] = { "content", "prepend", "replacement", "prefix", "suffix", "pad_token", NULL };
  uint8_t value;
  bool null;
  for (int i = 0; texts[i]; i++)
    if (ty_key_is(key, n, texts[i])) return k->has_content = true, ty_read_text(r, &c->content);
  if (ty_key_is(key, n, "delimiter") || ty_key_is(key, n, "word_delimiter_token"))
    return ty_read_text(r, &c->delimiter);
  if ((c->kind == TY_REPLACE || c->kind == TY_SPLIT) && ty_key_is(key, n, "pattern")) return pattern(r, c);
  if (ty_key_is(key, n, "precompiled_charsmap")) return charsmap(r, c);
  if (ty_key_is(key, n, "behavior")) {
    if (!choice(r, behaviors, behavior_values, &value)) return false;
    c->behavior = (ty_behavior)value;
    return k->has_behavior = true;
  }
  if (ty_key_is(key, n, "prepend_scheme")) {
    if (!choice(r, schemes, scheme_values, &value)) return false;
    c->prepend = (ty_prepend)value;
    return k->has_scheme = true;
  }
  if (ty_key_is(key, n, "strip_accents")) {
    if (!ty_read_null(r, &null) || null) return null;
    return k->has_accents = true, ty_read_bool(r, &c->accents);
  }
  if (ty_key_is(key, n, "add_prefix_space")) {
    if (!ty_read_null(r, &null) || null) return null;
    return ty_read_bool(r, &c->prefix_space);
  }
  if (ty_key_is(key, n, "split")) {
    if (!ty_read_null(r, &null) || null) return null;
    return ty_read_bool(r, &c->split);
  }
  if (ty_key_is(key, n, "use_regex")) return ty_read_bool(r, &c->use_regex);
  if (ty_key_is(key, n, "strip_left")) return ty_read_bool(r, &c->left);
  if (ty_key_is(key, n, "strip_right")) return ty_read_bool(r, &c->right);
  if (ty_key_is(key, n, "clean_text")) return ty_read_bool(r, &c->clean);
  if (ty_key_is(key, n, "handle_chinese_chars")) return ty_read_bool(r, &c->chinese);
  if (ty_key_is(key, n, "lowercase")) return ty_read_bool(r, &c->lower);
  if (ty_key_is(key, n, "individual_digits")) return ty_read_bool(r, &c->individual);
  if (ty_key_is(key, n, "invert")) return ty_read_bool(r, &c->invert);
  if (ty_key_is(key, n, "cleanup")) return ty_read_bool(r, &c->cleanup);
  if (ty_key_is(key, n, "start") || ty_key_is(key, n, "length")) return ty_read_count(r, INT64_MAX, &c->start);
  if (ty_key_is(key, n, "stop")) return ty_read_count(r, INT64_MAX, &c->stop);
  return ty_json_skip(&r->j);
}

static bool one_char(ty_str s) {
  return s.size >= 1 && s.size <= 4 && ty_char_count((const uint8_t *)s.text, s.size) == 1;
}

/* Whether all that the kind needs is there. */
static bool complete(ty_reading *r, ty_component *c, const keys *k, stage s) {
  ty_json *j = &r->j;
  switch (c->kind) {
    case TY_REPLACE:
    case TY_SPLIT:
      if (!c->pattern.text.text) return ty_json_fail(j, "the pattern is missing");
      if (c->kind == TY_SPLIT && !k->has_behavior) return ty_json_fail(j, "the behavior is missing");
      if (c->kind == TY_REPLACE && !k->has_content) return ty_json_fail(j, "the content is missing");
      return true;
    case TY_PREPEND:
    case TY_WORDPIECE_DECODER:
    case TY_BPE_DECODER:
    case TY_CTC: return k->has_content || ty_json_fail(j, "its text is missing");
    case TY_PRECOMPILED: return c->map || ty_json_fail(j, "precompiled_charsmap is missing");
    case TY_METASPACE:
      if (!one_char(c->content)) return ty_json_fail(j, "the replacement has to be one character");
      if (!k->has_scheme) c->prepend = c->prefix_space ? TY_PREPEND_ALWAYS : TY_PREPEND_NEVER; /* old files */
      return ty_pattern_compile(&c->pattern, j->name, false, c->content, false);
    case TY_BYTE_LEVEL: {
      ty_str text = { ty_pattern_gpt2, strlen(ty_pattern_gpt2) };
      return s != PRE_TOKENIZER || ty_pattern_compile(&c->pattern, j->name, true, text, true);
    }
    case TY_DELIMITER: return one_char(c->delimiter) || ty_json_fail(j, "the delimiter has to be one character");
    case TY_STRIP:
      return s != DECODER || one_char(c->content) || ty_json_fail(j, "the content has to be one character");
    case TY_FIXED_LENGTH: return c->start || ty_json_fail(j, "a length of 0");
    case TY_BERT_NORMALIZER:
      if (!k->has_accents) c->accents = c->lower;
      return true;
    default: return true;
  }
}

static bool component(ty_reading *r, ty_components *list, stage s, const char *sequence);

static bool components(ty_reading *r, ty_components *list, stage s, const char *sequence) {
  bool more;
  if (!ty_json_enter(&r->j, '[')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return true;
    if (!component(r, list, s, sequence)) return false;
  }
  return false;
}

static bool read_sequence(ty_reading *r, ty_components *list, stage s, const char *sequence) {
  const char *key;
  size_t n;
  bool more;
  if (!ty_json_enter(&r->j, '{')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return true;
    if (!ty_json_key(&r->j, &key, &n)) return false;
    if (ty_key_is(key, n, sequence) ? !components(r, list, s, sequence) : !ty_json_skip(&r->j)) return false;
  }
  return false;
}

static bool component(ty_reading *r, ty_components *list, stage s, const char *sequence) {
  const char *key;
  size_t n;
  bool more;
  ty_str type;
  keys k = { 0 };
  if (!ty_read_type(r, &type)) return false;
  if (ty_str_is(type, "Sequence")) return read_sequence(r, list, s, sequence);
  size_t found = 0, count = sizeof kinds / sizeof *kinds;
  while (found < count && !((kinds[found].stages & s) && ty_str_is(type, kinds[found].name))) found++;
  if (found == count)
    return ty_json_fail(&r->j, "%s %s is not supported",
                        s == NORMALIZER ? "the normalizer"
                        : s == DECODER  ? "the decoder"
                                        : "the pre-tokenizer",
                        ty_quote(type.text, type.size));
  if (list->count == MOST_COMPONENTS) return ty_json_fail(&r->j, "more than %d steps", MOST_COMPONENTS);
  if (!ty_grow(&list->item, &list->capacity, list->count, 1, sizeof *list->item)) return false;
  ty_component *c = &list->item[list->count++];
  *c = (ty_component){ .kind = kinds[found].kind,
                       .prefix_space = true,
                       .use_regex = true,
                       .split = true,
                       .prepend = TY_PREPEND_ALWAYS,
                       .clean = true,
                       .chinese = true,
                       .lower = true,
                       .cleanup = true,
                       .content = { "", 0 },
                       .delimiter = { "", 0 } };
  if (c->kind == TY_FIXED_LENGTH) c->start = 5;
  if (!ty_json_enter(&r->j, '{')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return complete(r, c, &k, s);
    if (!ty_json_key(&r->j, &key, &n) || !read_key(r, c, &k, key, n)) return false;
  }
  return false;
}

bool ty_read_normalizer(ty_reading *r) { return component(r, &r->t->normalizers, NORMALIZER, "normalizers"); }
bool ty_read_pre_tokenizer(ty_reading *r) {
  return component(r, &r->t->pre_tokenizers, PRE_TOKENIZER, "pretokenizers");
}
bool ty_read_decoder(ty_reading *r) { return component(r, &r->t->decoders, DECODER, "decoders"); }
