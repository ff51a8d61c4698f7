/* Training a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019): counting words, and writing what was learnt as
 * a tokenizer.json. */
#include <stdio.h>
#include <stdlib.h>

#include "../../kernels/cpu/parallel.h"
#include "../io/formats.h"
#include "../io/json.h"
#include "../tycho.h"
#include "merges.h"

struct ty_trainer {
  ty_train_options options;
  ty_arena arena;
  ty_pattern pattern;
  bool gpt2; /* the pattern is that of ByteLevel itself */
  ty_words words;
};

enum { PIECES = 64, PIECE_BYTES = 1 << 22 };

static bool copy_options(ty_trainer *t, const ty_train_options *o) {
  t->options = *o;
  const char **text = ty_arena_alloc(&t->arena, (o->special_count + 1) * sizeof *text);
  size_t *size = ty_arena_alloc(&t->arena, (o->special_count + 1) * sizeof *size);
  if (!text || !size) return false;
  for (size_t i = 0; i < o->special_count; i++) {
    ty_str s;
    if (!ty_valid_utf8(o->special[i], o->special_size[i]))
      return ty_fail(TY_EINVAL, "tokenizer.train: the special token %s is no UTF-8",
                     ty_quote(o->special[i], o->special_size[i]));
    if (!ty_arena_text(&t->arena, o->special[i], o->special_size[i], &s)) return false;
    text[i] = s.text, size[i] = s.size;
  }
  t->options.special = text, t->options.special_size = size;
  const char *p = o->pattern;
  const char *expression = strcmp(p, "gpt2") == 0     ? ty_pattern_gpt2
                           : strcmp(p, "llama3") == 0 ? ty_pattern_llama3
                           : strcmp(p, "qwen2") == 0  ? ty_pattern_qwen2
                                                      : p;
  ty_str s;
  t->gpt2 = expression == ty_pattern_gpt2;
  if (o->prefix_space && !t->gpt2)
    return ty_fail(TY_EINVAL, "tokenizer.train: prefix_space goes with the pattern \"gpt2\" only");
  if (o->vocabulary < 256 + o->special_count)
    return ty_fail(TY_EINVAL,
                   "tokenizer.train: a vocabulary of %u tokens has no room for 256 bytes and %zu special tokens",
                   o->vocabulary, o->special_count);
  return ty_arena_text(&t->arena, expression, strlen(expression), &s) &&
         ty_pattern_compile(&t->pattern, "tokenizer.train: pattern", true, s, true);
}

ty_trainer *ty_trainer_new(const ty_train_options *options) {
  ty_trainer *t = calloc(1, sizeof *t);
  if (!t) {
    ty_fail(TY_ENOMEM, "no memory for training a tokenizer");
    return NULL;
  }
  if (copy_options(t, options)) return t;
  ty_trainer_free(t);
  return NULL;
}

void ty_trainer_free(ty_trainer *t) {
  if (!t) return;
  ty_words_free(&t->words);
  ty_pattern_free(&t->pattern);
  ty_arena_free(&t->arena);
  free(t);
}

/* ---- counting ---- */

static bool count_valid(const ty_trainer *t, ty_matcher *m, ty_words *w, const uint8_t *text, size_t size) {
  size_t done = 0, from = 0, last = SIZE_MAX, begin, end;
  while (from <= size) {
    if (!ty_pattern_next(&t->pattern, m, text, size, from, last, &begin, &end)) return false;
    if (begin == SIZE_MAX) break;
    if (!ty_words_add(w, text + done, begin - done, 1) || !ty_words_add(w, text + begin, end - begin, 1)) return false;
    from = done = last = end;
  }
  return ty_words_add(w, text + done, size - done, 1);
}

static bool count_text(const ty_trainer *t, ty_matcher *m, ty_words *w, ty_bytes *scratch, const char *text,
                       size_t size) {
  unsigned bad;
  bool prefix = t->options.prefix_space && size && *text != ' ';
  if (!prefix && ty_utf8_span((const uint8_t *)text, size, &bad) == size)
    return count_valid(t, m, w, (const uint8_t *)text, size);
  scratch->size = 0;
  return (!prefix || ty_bytes_put(scratch, " ", 1)) && ty_utf8_repair((const uint8_t *)text, size, scratch) &&
         count_valid(t, m, w, scratch->data, scratch->size);
}

typedef struct piece {
  size_t begin, end; /* texts */
  ty_words words;
  bool failed;
  char error[256];
} piece;

typedef struct counting {
  const ty_trainer *t;
  const char *const *texts;
  const size_t *sizes;
  piece *piece;
} counting;

static void count_pieces(void *context, int64_t begin, int64_t end) {
  counting *c = context;
  ty_matcher m = { 0 };
  ty_bytes scratch = { 0 };
  for (int64_t k = begin; k < end; k++) {
    piece *p = &c->piece[k];
    for (size_t i = p->begin; i < p->end && !p->failed; i++)
      p->failed = !count_text(c->t, &m, &p->words, &scratch, c->texts[i], c->sizes[i]);
    if (p->failed) snprintf(p->error, sizeof p->error, "%s", ty_error());
  }
  ty_matcher_free(&m);
  ty_bytes_free(&scratch);
}

bool ty_trainer_add(ty_trainer *t, const char *const *texts, const size_t *sizes, size_t count) {
  piece *pieces = calloc(PIECES, sizeof *pieces);
  if (!pieces) return ty_fail(TY_ENOMEM, "no memory for training a tokenizer");
  size_t total = 0, used = 0, bytes = 0;
  for (size_t i = 0; i < count; i++) total += sizes[i];
  for (size_t i = 0; i < count; i++) { /* about as many bytes in each */
    pieces[used].end = i + 1;
    bytes += sizes[i];
    if (bytes * PIECES >= total * (used + 1) && used + 1 < PIECES && i + 1 < count) pieces[++used].begin = i + 1;
  }
  counting c = { t, texts, sizes, pieces };
  if (count) ty_parallel_for(used < PIECES ? (int64_t)used + 1 : PIECES, 1, count_pieces, &c);
  bool ok = !ty_interrupted || ty_fail(TY_EINTR, "interrupted");
  for (size_t i = 0; i < PIECES; i++) {
    if (ok && pieces[i].failed) ok = ty_fail(TY_EINVAL, "%s", pieces[i].error);
    ok = ok && ty_words_merge(&t->words, &pieces[i].words);
    ty_words_free(&pieces[i].words);
  }
  free(pieces);
  return ok;
}

/* Lines that have been read and wait to be counted together. */
typedef struct lines {
  ty_bytes text;
  size_t *at, count, capacity;
} lines;

static bool count_lines(ty_trainer *t, lines *l) {
  const char **texts = malloc((l->count + 1) * sizeof *texts);
  size_t *sizes = malloc((l->count + 1) * sizeof *sizes);
  bool ok = texts && sizes ? true : ty_fail(TY_ENOMEM, "no memory for training a tokenizer");
  for (size_t i = 0; ok && i < l->count; i++) {
    texts[i] = (const char *)l->text.data + l->at[i];
    sizes[i] = (i + 1 < l->count ? l->at[i + 1] : l->text.size) - l->at[i];
  }
  ok = ok && ty_trainer_add(t, texts, sizes, l->count);
  free(texts);
  free(sizes);
  l->text.size = l->count = 0;
  return ok;
}

bool ty_trainer_add_file(ty_trainer *t, const char *path) {
  ty_text *file = ty_text_open(path);
  if (!file) return false;
  lines l = { 0 };
  const char *line;
  size_t size;
  bool ok;
  while ((ok = ty_text_line(file, &line, &size)) && line) {
    ok = ty_grow(&l.at, &l.capacity, l.count, 1, sizeof *l.at);
    if (!ok) break;
    l.at[l.count++] = l.text.size;
    ok = ty_bytes_put(&l.text, line, size) && ty_bytes_put(&l.text, "\n", 1) &&
         (l.text.size < PIECE_BYTES || count_lines(t, &l));
    if (!ok) break;
  }
  ok = ok && count_lines(t, &l);
  ty_text_close(file);
  ty_bytes_free(&l.text);
  free(l.at);
  return ok;
}

/* ---- writing ---- */

static bool put(ty_bytes *b, const char *text) { return ty_bytes_put(b, text, strlen(text)); }

static bool write_json(const ty_trainer *t, const ty_learned *l, ty_bytes *b) {
  const ty_train_options *o = &t->options;
  const ty_vocab *v = &l->vocab;
  const char *space = o->prefix_space ? "true" : "false";
  bool ok = put(b, "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[");
  for (size_t i = 0, written = 0; ok && i < o->special_count; i++) {
    bool repeated = false;
    for (size_t k = 0; k < i; k++)
      repeated |= o->special_size[k] == o->special_size[i] &&
                  memcmp(o->special[k], o->special[i], o->special_size[i]) == 0;
    if (repeated) continue;
    ok = ty_bytes_printf(b, "%s{\"id\":%zu,\"content\":", written ? "," : "", written) &&
         ty_json_put_string(b, o->special[i], o->special_size[i]) &&
         put(b, ",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}");
    written++;
  }
  ok = ok && put(b, "],\"normalizer\":null,\"pre_tokenizer\":");
  if (!t->gpt2)
    ok = ok && put(b, "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":") &&
         ty_json_put_string(b, t->pattern.text.text, t->pattern.text.size) &&
         put(b, "},\"behavior\":\"Isolated\",\"invert\":false},");
  ok = ok &&
       ty_bytes_printf(b, "{\"type\":\"ByteLevel\",\"add_prefix_space\":%s,\"trim_offsets\":true,\"use_regex\":%s}%s,",
                       space, t->gpt2 ? "true" : "false", t->gpt2 ? "" : "]}");
  ok = ok &&
       ty_bytes_printf(b,
                       "\"post_processor\":{\"type\":\"ByteLevel\",\"add_prefix_space\":%s,\"trim_offsets\":false,"
                       "\"use_regex\":true},\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,"
                       "\"trim_offsets\":true,\"use_regex\":true},",
                       space);
  ok =
      ok &&
      put(b,
          "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null,"
          "\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":false,\"vocab\":{");
  for (uint32_t i = 0; ok && i < v->size; i++)
    ok = put(b, i ? "," : "") && ty_json_put_string(b, v->token[i].text, v->token[i].size) &&
         ty_bytes_printf(b, ":%u", i);
  ok = ok && put(b, "},\"merges\":[");
  for (size_t i = 0; ok && i < l->merges; i++) {
    ty_str left = v->token[l->merge[i][0]], right = v->token[l->merge[i][1]];
    ok = put(b, i ? ",[" : "[") && ty_json_put_string(b, left.text, left.size) && put(b, ",") &&
         ty_json_put_string(b, right.text, right.size) && put(b, "]");
  }
  return ok && put(b, "]}}\n");
}

bool ty_trainer_finish(ty_trainer *t, ty_bytes *json) {
  ty_learned l = { 0 };
  bool ok = ty_learn_merges(&t->words, &t->options, &l) && write_json(t, &l, json);
  ty_learned_free(&l);
  return ok;
}
