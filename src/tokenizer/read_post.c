/* The post-processor of a tokenizer.json: a template of special tokens round one text or two, which Bert's and
 * Roberta's are, too. */
#include <stdlib.h>

#include "read.h"

/* A special token of a template, by name until the table that gives its ids is read. */
typedef struct name {
  ty_str name;
  uint32_t *ids;
  uint32_t count;
} name;

typedef struct post {
  ty_str single[64], pair[64]; /* names of the pieces of the templates; text NULL: a sequence */
  name *names;
  size_t count, capacity;
} post;

/* ty_json_next() whose *more is true after a failure. */
static bool next(ty_reading *r, bool *more) {
  *more = true;
  return ty_json_next(&r->j, more);
}

static bool sequence_id(ty_reading *r, bool *second) {
  const char *s;
  size_t n;
  if (!ty_json_string(&r->j, &s, &n)) return false;
  *second = ty_key_is(s, n, "B");
  return *second || ty_key_is(s, n, "A") || ty_json_fail(&r->j, "expected A or B, got %s", ty_quote(s, n));
}

/* { "SpecialToken": { "id": name, "type_id": 0 } } or { "Sequence": { "id": "A", "type_id": 0 } } */
static bool piece(ty_reading *r, ty_template_piece *p, ty_str *token) {
  const char *key;
  size_t n;
  bool more, has_id = false;
  uint64_t type = 0;
  if (!ty_json_enter(&r->j, '{') || !ty_json_next(&r->j, &more)) return false;
  if (!more) return ty_json_fail(&r->j, "expected SpecialToken or Sequence");
  if (!ty_json_key(&r->j, &key, &n)) return false;
  p->sequence = ty_key_is(key, n, "Sequence");
  if (!p->sequence && !ty_key_is(key, n, "SpecialToken"))
    return ty_json_fail(&r->j, "expected SpecialToken or Sequence, got %s", ty_quote(key, n));
  if (!ty_json_enter(&r->j, '{')) return false;
  while (next(r, &more) && more) {
    if (!ty_json_key(&r->j, &key, &n)) return false;
    bool ok;
    if (ty_key_is(key, n, "id")) ok = has_id = p->sequence ? sequence_id(r, &p->second) : ty_read_text(r, token);
    else if (ty_key_is(key, n, "type_id")) ok = ty_read_count(r, 255, &type);
    else ok = ty_json_skip(&r->j);
    if (!ok) return false;
  }
  if (more) return false; /* next() failed */
  p->type = (uint8_t)type;
  if (!ty_json_next(&r->j, &more)) return false;
  if (more || !has_id) return ty_json_fail(&r->j, "expected a piece of a template with an id");
  return true;
}

static bool template(ty_reading *r, ty_template *t, ty_str *tokens) {
  bool more;
  if (t->count) return ty_json_fail(&r->j, "a key is there twice");
  t->piece = ty_arena_alloc(&r->t->arena, 64 * sizeof *t->piece);
  if (!t->piece || !ty_json_enter(&r->j, '[')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return true;
    if (t->count == 64) return ty_json_fail(&r->j, "a template of more than 64 pieces");
    if (!piece(r, &t->piece[t->count], &tokens[t->count])) return false;
    t->count++;
  }
  return false;
}

/* { name: { "id": name, "ids": [1], "tokens": [name] } ... } */
static bool special_tokens(ty_reading *r, post *p) {
  const char *key;
  size_t n;
  bool more;
  uint64_t id;
  if (!ty_json_enter(&r->j, '{')) return false;
  while (next(r, &more) && more) {
    if (!ty_grow(&p->names, &p->capacity, p->count, 1, sizeof *p->names)) return false;
    name *e = &p->names[p->count++];
    *e = (name){ .ids = ty_arena_alloc(&r->t->arena, 64 * sizeof *e->ids) };
    if (!e->ids || !ty_json_key(&r->j, &key, &n) || !ty_arena_text(&r->t->arena, key, n, &e->name) ||
        !ty_json_enter(&r->j, '{'))
      return false;
    while (next(r, &more) && more) {
      if (!ty_json_key(&r->j, &key, &n)) return false;
      if (!ty_key_is(key, n, "ids")) {
        if (!ty_json_skip(&r->j)) return false;
        continue;
      }
      if (!ty_json_enter(&r->j, '[')) return false;
      while (next(r, &more) && more) {
        if (e->count == 64) return ty_json_fail(&r->j, "more than 64 ids");
        if (!ty_read_count(r, INT32_MAX, &id)) return false;
        e->ids[e->count++] = (uint32_t)id;
      }
      if (more) return false; /* next() failed */
    }
    if (more) return false;
  }
  return !more;
}

/* ["[SEP]", 102] */
static bool token_and_id(ty_reading *r, uint32_t *out) {
  const char *s;
  size_t n;
  bool more;
  uint64_t id = 0;
  if (!ty_json_enter(&r->j, '[') || !ty_json_next(&r->j, &more)) return false;
  if (!more) return ty_json_fail(&r->j, "expected a token and its id");
  if (!ty_json_string(&r->j, &s, &n) || !ty_json_next(&r->j, &more)) return false;
  if (!more) return ty_json_fail(&r->j, "expected a token and its id");
  if (!ty_read_count(r, INT32_MAX, &id) || !ty_json_next(&r->j, &more)) return false;
  *out = (uint32_t)id;
  return !more || ty_json_fail(&r->j, "expected a token and its id");
}

static bool resolve(ty_reading *r, const post *p, ty_template *t, const ty_str *tokens) {
  for (size_t i = 0; i < t->count; i++) {
    if (t->piece[i].sequence) continue;
    size_t k = 0;
    while (k < p->count && (p->names[k].name.size != tokens[i].size ||
                            memcmp(p->names[k].name.text, tokens[i].text, tokens[i].size) != 0))
      k++;
    if (k == p->count)
      return ty_json_fail(&r->j, "the template's token %s is not among special_tokens",
                          ty_quote(tokens[i].text, tokens[i].size));
    t->piece[i].ids = p->names[k].ids;
    t->piece[i].count = p->names[k].count;
  }
  return true;
}

/* [CLS] A [SEP] and [CLS] A [SEP] B [SEP]; Roberta has the separator twice between the texts, and one type. */
static bool fixed(ty_reading *r, uint32_t first, uint32_t last, bool roberta) {
  ty_tokenizer *t = r->t;
  uint32_t *ids = ty_arena_alloc(&t->arena, 4 * sizeof *ids);
  ty_template_piece *p = ty_arena_alloc(&t->arena, 5 * sizeof *p);
  if (!ids || !p) return false;
  ids[0] = first, ids[1] = ids[2] = last;
  p[0] = (ty_template_piece){ .ids = ids, .count = 1 };
  p[1] = (ty_template_piece){ .sequence = true };
  p[2] = (ty_template_piece){ .ids = ids + 1, .count = 1 };
  p[3] = (ty_template_piece){ .sequence = true, .second = true, .type = !roberta };
  p[4] = (ty_template_piece){ .ids = ids + 1, .count = 1, .type = !roberta };
  t->single = (ty_template){ p, 3 };
  t->pair = (ty_template){ p, 5 };
  if (!roberta) return true;
  ty_template_piece *q = ty_arena_alloc(&t->arena, 5 * sizeof *q);
  if (!q) return false;
  memcpy(q, p, 5 * sizeof *p);
  q[2].count = 2;
  t->pair.piece = q;
  return true;
}

static bool processor(ty_reading *r);

static bool processors(ty_reading *r) {
  bool more;
  if (!ty_json_enter(&r->j, '[')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return true;
    if (!processor(r)) return false;
  }
  return false;
}

static bool read_keys(ty_reading *r, post *p, ty_str type, uint32_t *sep, uint32_t *cls, bool *trims, bool *prefix) {
  const char *key;
  size_t n;
  bool more, sequence = ty_str_is(type, "Sequence");
  if (!ty_json_enter(&r->j, '{')) return false;
  while (ty_json_next(&r->j, &more)) {
    if (!more) return true;
    if (!ty_json_key(&r->j, &key, &n)) return false;
    bool ok;
    if (sequence) ok = ty_key_is(key, n, "processors") ? processors(r) : ty_json_skip(&r->j);
    else if (ty_key_is(key, n, "single")) ok = template(r, &r->t->single, p->single);
    else if (ty_key_is(key, n, "pair")) ok = template(r, &r->t->pair, p->pair);
    else if (ty_key_is(key, n, "special_tokens")) ok = special_tokens(r, p);
    else if (ty_key_is(key, n, "sep")) ok = token_and_id(r, sep);
    else if (ty_key_is(key, n, "cls")) ok = token_and_id(r, cls);
    else if (ty_key_is(key, n, "trim_offsets")) ok = ty_read_bool(r, trims);
    else if (ty_key_is(key, n, "add_prefix_space")) ok = ty_read_bool(r, prefix);
    else ok = ty_json_skip(&r->j);
    if (!ok) return false;
  }
  return false;
}

static bool processor(ty_reading *r) {
  ty_tokenizer *t = r->t;
  static const char *const types[] = { "Sequence", "ByteLevel", "TemplateProcessing", "BertProcessing",
                                       "RobertaProcessing" };
  ty_str type;
  int kind = 0;
  if (!ty_read_type(r, &type)) return false;
  while (kind < 5 && !ty_str_is(type, types[kind])) kind++;
  if (kind == 5) return ty_json_fail(&r->j, "the post-processor %s is not supported", ty_quote(type.text, type.size));
  if (kind >= 2 && t->has_template) return ty_json_fail(&r->j, "a second template is not supported");
  post *p = calloc(1, sizeof *p);
  if (!p) return ty_fail(TY_ENOMEM, "no memory for a tokenizer");
  uint32_t sep = TY_NO_ID, cls = TY_NO_ID;
  bool trims = kind == 1 || kind == 4, prefix = trims;
  bool ok = read_keys(r, p, (ty_str){ types[kind], strlen(types[kind]) }, &sep, &cls, &trims, &prefix);
  if (ok && (kind == 1 || kind == 4) && trims) t->trims = true, t->trim_prefix_space = prefix;
  if (ok && kind == 2) ok = resolve(r, p, &t->single, p->single) && resolve(r, p, &t->pair, p->pair);
  if (ok && kind > 2) {
    ok = sep != TY_NO_ID && cls != TY_NO_ID ? fixed(r, cls, sep, kind == 4)
                                            : ty_json_fail(&r->j, "sep or cls is missing");
  }
  if (ok && kind >= 2) t->has_template = true;
  free(p->names);
  free(p);
  return ok;
}

bool ty_read_post_processor(ty_reading *r) { return processor(r); }
