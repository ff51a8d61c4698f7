/* What the files of this folder share. */
#ifndef TY_TOKENIZER_INTERNAL_H
#define TY_TOKENIZER_INTERNAL_H

#include <pthread.h>
#include <string.h>
#include "tokenizer.h"
#include "unicode.h"

#define TY_NO_ID UINT32_MAX

/* ---- memory.c: what lives as long as the tokenizer, and growing arrays ---- */

typedef struct ty_str {
  const char *text;
  size_t size;
} ty_str;

typedef struct ty_arena {
  struct ty_arena_block *blocks;
  size_t left;
} ty_arena;
void *ty_arena_alloc(ty_arena *a, size_t size); /* zeroed */
bool ty_arena_text(ty_arena *a, const char *text, size_t size, ty_str *out);
void ty_arena_free(ty_arena *a);

/* Makes room for `more` elements after `count`; *array is from malloc. */
bool ty_grow(void *array, size_t *capacity, size_t count, size_t more, size_t element);

static inline bool ty_str_is(ty_str s, const char *text) {
  return s.size == strlen(text) && memcmp(s.text, text, s.size) == 0;
}

uint64_t ty_hash(const void *text, size_t size);

/* ---- vocab.c: strings by number and numbers by string ---- */

typedef struct ty_vocab {
  ty_str *token;   /* by id; text NULL where there is none */
  uint32_t size;   /* ids */
  uint32_t count;  /* tokens */
  uint32_t *table; /* ids by hash, TY_NO_ID: free */
  uint32_t mask;
} ty_vocab;
bool ty_vocab_build(ty_vocab *v); /* after `token` and `size` are set: the last of equal strings is found */
uint32_t ty_vocab_find(const ty_vocab *v, const void *text, size_t size); /* TY_NO_ID */
void ty_vocab_free(ty_vocab *v);

/* ---- trie.c: byte strings that begin a text ---- */

typedef struct ty_trie_node {
  uint32_t first; /* of the children, which lie together in the order of their bytes */
  uint32_t value; /* TY_NO_ID: nothing ends here */
  uint16_t children;
  uint8_t byte;
} ty_trie_node;
typedef struct ty_trie {
  ty_trie_node *node; /* [0] is the root */
  uint32_t count;
} ty_trie;
typedef struct ty_trie_entry {
  ty_str text;
  uint32_t value;
} ty_trie_entry;
bool ty_trie_build(ty_trie *t, ty_trie_entry *entries, size_t count); /* sorts them; of equal texts the last counts */
void ty_trie_free(ty_trie *t);
/* The child of `node` for a byte; 0: there is none. */
uint32_t ty_trie_step(const ty_trie *t, uint32_t node, uint8_t byte);

/* ---- pattern.c: what text is split by ---- */

typedef enum ty_pattern_kind {
  TY_PATTERN_TEXT,
  TY_PATTERN_REGEX,
  TY_PATTERN_GPT2,
  TY_PATTERN_LLAMA3,
  TY_PATTERN_QWEN2
} ty_pattern_kind;
typedef struct ty_pattern {
  ty_pattern_kind kind;
  ty_str text;
  struct pcre2_real_code_8 *code;
} ty_pattern;
/* The regular expressions of the known kinds. */
extern const char *const ty_pattern_gpt2, *const ty_pattern_llama3, *const ty_pattern_qwen2;
bool ty_pattern_compile(ty_pattern *p, const char *where, bool regex, ty_str text, bool scanners);
void ty_pattern_free(ty_pattern *p);

typedef struct ty_matcher { /* one thread's memory for regular expressions */
  struct pcre2_real_match_data_8 *data;
  struct pcre2_real_match_context_8 *context;
  struct pcre2_real_jit_stack_8 *stack;
} ty_matcher;
void ty_matcher_free(ty_matcher *m);
/* The next match at or after `from`, not an empty one at `last` (where the one before ended; SIZE_MAX: none).
 * *begin is SIZE_MAX when there is none. */
bool ty_pattern_next(const ty_pattern *p, ty_matcher *m, const uint8_t *text, size_t size, size_t from, size_t last,
                     size_t *begin, size_t *end);
/* scan.c: where the word that begins at `from` ends, for the kinds with scanners. */
size_t ty_scan(ty_pattern_kind kind, const uint8_t *text, size_t size, size_t from);

/* ---- components: normalizers, pre-tokenizers, decoders ---- */

typedef enum ty_component_kind {
  /* normalizers */
  TY_NFC,
  TY_NFD,
  TY_NFKC,
  TY_NFKD,
  TY_LOWERCASE,
  TY_NMT,
  TY_STRIP_ACCENTS,
  TY_BERT_NORMALIZER,
  TY_PRECOMPILED,
  TY_PREPEND,
  /* several stages */
  TY_REPLACE,
  TY_STRIP,
  TY_BYTE_LEVEL,
  TY_METASPACE,
  /* pre-tokenizers */
  TY_WHITESPACE,
  TY_WHITESPACE_SPLIT,
  TY_BERT_PRE_TOKENIZER,
  TY_PUNCTUATION,
  TY_DIGITS,
  TY_SPLIT,
  TY_DELIMITER,
  TY_FIXED_LENGTH,
  /* decoders */
  TY_WORDPIECE_DECODER,
  TY_BPE_DECODER,
  TY_BYTE_FALLBACK,
  TY_FUSE,
  TY_CTC
} ty_component_kind;

typedef enum ty_behavior {
  TY_ISOLATED,
  TY_REMOVED,
  TY_MERGED_WITH_PREVIOUS,
  TY_MERGED_WITH_NEXT,
  TY_CONTIGUOUS
} ty_behavior;

typedef enum ty_prepend { TY_PREPEND_NEVER, TY_PREPEND_FIRST, TY_PREPEND_ALWAYS } ty_prepend;

typedef struct ty_charsmap ty_charsmap;

typedef struct ty_component {
  ty_component_kind kind;
  bool left, right;                        /* strip */
  bool prefix_space, use_regex;            /* byte level */
  bool clean, chinese, accents, lower;     /* Bert */
  bool individual, invert, split, cleanup; /* digits, split, metaspace, wordpiece decoder */
  ty_behavior behavior;                    /* split, punctuation */
  ty_prepend prepend;                      /* metaspace */
  ty_str content, delimiter;               /* prepend, replace, metaspace, prefixes and suffixes */
  uint64_t start, stop;                    /* the decoder Strip; length of FixedLength */
  ty_pattern pattern;
  ty_charsmap *map;
} ty_component;

typedef struct ty_components {
  ty_component *item;
  size_t count, capacity;
} ty_components;

/* Text on its way, with where it came from. */
typedef struct ty_string {
  ty_bytes text;
  ty_bytes from; /* ty_span for each byte, when tracked */
  bool tracked;
} ty_string;
void ty_string_free(ty_string *s);
bool ty_string_put(ty_string *s, const void *text, size_t size, ty_span from);

/* A piece of the input, or of a string; spans NULL: byte i of it is byte base + i of the input. */
typedef struct ty_piece {
  const uint8_t *text;
  size_t size;
  const ty_span *spans;
  uint32_t base;
} ty_piece;
static inline ty_span ty_piece_span(const ty_piece *p, size_t begin, size_t end) {
  if (!p->spans) return (ty_span){ p->base + (uint32_t)begin, p->base + (uint32_t)end };
  if (begin == end) return begin ? (ty_span){ p->spans[begin - 1].end, p->spans[begin - 1].end } : (ty_span){ 0 };
  return (ty_span){ p->spans[begin].begin, p->spans[end - 1].end };
}
static inline ty_piece ty_piece_part(const ty_piece *p, size_t begin, size_t end) {
  return (ty_piece){ p->text + begin, end - begin, p->spans ? p->spans + begin : NULL, p->base + (uint32_t)begin };
}

/* ---- normalize.c ---- */

typedef struct ty_work ty_work;
/* All normalizers in turn; *piece is then in memory of w, or as it was. */
bool ty_normalize(const ty_tokenizer *t, ty_work *w, ty_piece *piece);
ty_charsmap *ty_charsmap_read(const char *base64, size_t size);
void ty_charsmap_free(ty_charsmap *m);
bool ty_charsmap_apply(const ty_charsmap *m, const ty_piece *in, ty_string *out);

/* ---- pretokenize.c ---- */

typedef struct ty_cut {
  uint32_t begin, end;
} ty_cut;
typedef struct ty_cuts {
  ty_cut *item;
  size_t count, capacity;
} ty_cuts;
/* Cuts the piece into words: w->cuts; *piece may become another text. */
bool ty_pretokenize(const ty_tokenizer *t, ty_work *w, ty_piece *piece);

/* ---- models ---- */

/* The tokens of one word go to the end of w->out; spans are bytes of the piece. */
typedef struct ty_bpe {
  ty_str prefix, suffix;
  uint32_t unknown; /* TY_NO_ID: unknown characters are left out */
  bool fuse_unknown, byte_fallback, ignore_merges;
  bool bytes;              /* words are bytes, not the characters that byte-level models write them as */
  struct ty_merge *merges; /* by hash of the pair */
  uint64_t mask;
  uint32_t byte_id[4][256]; /* with `bytes`: by 2 * (not the first) + (the last) */
  ty_vocab raw;             /* with `bytes` and ignore_merges: tokens as bytes */
} ty_bpe;
bool ty_bpe_merge(ty_bpe *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t id);
bool ty_bpe_prepare(ty_bpe *b, size_t merges); /* room for so many */
bool ty_bpe_finish(ty_bpe *b, ty_arena *arena, const ty_vocab *v);
void ty_bpe_free(ty_bpe *b);
bool ty_bpe_word(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t size, size_t at);

typedef struct ty_unigram {
  double *score; /* by id */
  double least;
  uint32_t unknown;
  bool byte_fallback;
  ty_trie trie;
} ty_unigram;
bool ty_unigram_word(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t size, size_t at);

typedef struct ty_wordpiece {
  ty_str prefix;
  uint32_t unknown;
  uint64_t longest;
} ty_wordpiece;
bool ty_wordpiece_word(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t size, size_t at);
bool ty_wordlevel_word(const ty_tokenizer *t, ty_work *w, const uint8_t *text, size_t size, size_t at);

/* ---- added tokens and what comes after the model ---- */

typedef struct ty_added {
  uint32_t id;
  ty_str content, normal; /* as the text has it; after the normalizers, for the decoder */
  bool single_word, left, right, normalized, special;
  bool skipped; /* what decoding puts out for it is a special token: left out where these are */
} ty_added;

typedef struct ty_template_piece {
  bool sequence; /* the text, else `ids` */
  bool second;   /* the second text */
  uint8_t type;
  uint32_t *ids;
  uint32_t count;
} ty_template_piece;
typedef struct ty_template {
  ty_template_piece *piece;
  size_t count;
} ty_template;

typedef enum ty_model { TY_BPE, TY_UNIGRAM, TY_WORDPIECE, TY_WORDLEVEL } ty_model;

struct ty_tokenizer {
  ty_arena arena;
  ty_bytes json;
  ty_model model;
  ty_vocab vocab;
  ty_bpe bpe;
  ty_unigram unigram;
  ty_wordpiece wordpiece;
  ty_components normalizers, pre_tokenizers, decoders;
  ty_added *added; /* by id */
  size_t added_count;
  ty_trie raw_added,
      normal_added; /* those that are looked for before the normalizers and after them: places in added */
  uint32_t size;
  size_t longest_token; /* bytes */
  bool has_template, trims, trim_prefix_space;
  ty_template single, pair;
  int64_t pad_id;
  bool pad_left;
  bool tracks; /* a pre-tokenizer wants to know whether a word was the first */
  pthread_mutex_t lock;
  ty_work *idle; /* memory of threads that are done */
};

const ty_added *ty_added_find(const ty_tokenizer *t, uint32_t id);
/* The next added token at or after `from`: leftmost, and of these the longest. Place in added, TY_NO_ID: none. */
uint32_t ty_added_next(const ty_tokenizer *t, const ty_trie *trie, const uint8_t *text, size_t size, size_t from,
                       size_t *begin, size_t *end);

/* ---- one thread's memory while it encodes ---- */

typedef struct ty_symbols {
  uint32_t *id, *length, *previous, *next;
  uint64_t *order;
  struct ty_heap_item *heap;
  size_t capacity, heap_capacity;
} ty_symbols;

struct ty_work {
  ty_work *next;
  ty_matcher matcher;
  ty_string normal[2], split[2], repaired;
  ty_cuts cuts, other_cuts;
  ty_symbols symbols;
  struct ty_cached *cache; /* words that were split before: bpe.c */
  void *nodes;             /* the best paths of unigram.c */
  size_t node_capacity;
  ty_bytes scratch;
  ty_encoding first, second;
  ty_encoding *out;
  bool spans, tracked, plain;
};
ty_work *ty_work_take(ty_tokenizer *t);
void ty_work_give(ty_tokenizer *t, ty_work *w);
void ty_work_free(ty_work *w);

/* Appends a token; the span is in bytes of the piece that is being read. */
bool ty_emit_slow(ty_work *w);
static inline bool ty_emit(ty_work *w, uint32_t id, size_t begin, size_t end) {
  ty_encoding *e = w->out;
  if (e->count == e->capacity && !ty_emit_slow(w)) return false;
  e->ids[e->count] = id;
  if (w->spans) e->spans[e->count] = (ty_span){ (uint32_t)begin, (uint32_t)end };
  e->count++;
  return true;
}

#endif
