/* Tokenizers: text to the ids of a model's vocabulary and back. One is read from the JSON text that is tokenizer.json,
 * whoever wrote it: a file, the trainer, or what a GGUF file says put into that form. It never changes after that, so
 * threads may use one together. Functions return false or NULL after ty_fail().
 *
 * Bytes that are no UTF-8 count as U+FFFD, one for each maximal subpart of a character (the Unicode standard, 3.9;
 * Python's errors="replace"), for byte-level models too, so that the ids are those of the reference. */
#ifndef TY_TOKENIZER_H
#define TY_TOKENIZER_H

#include "../io/file.h"

typedef struct ty_tokenizer ty_tokenizer;

/* `name`: the file, for errors. Copies the text. */
ty_tokenizer *ty_tokenizer_read(const char *name, const char *text, size_t size);
void ty_tokenizer_free(ty_tokenizer *t);
/* The JSON text that it was read from. */
const char *ty_tokenizer_text(const ty_tokenizer *t, size_t *size);

typedef struct ty_token_info {
  const char *text; /* as the vocabulary writes it */
  size_t size;
  bool added, special;
} ty_token_info;
uint32_t ty_tokenizer_size(const ty_tokenizer *t);                                /* the largest id, plus one */
bool ty_tokenizer_token(const ty_tokenizer *t, uint32_t id, ty_token_info *info); /* false: no such id; no ty_fail() */
bool ty_tokenizer_id(const ty_tokenizer *t, const char *token, size_t size, uint32_t *id); /* likewise */
const char *ty_tokenizer_model(const ty_tokenizer *t);                                     /* "BPE", "Unigram" ... */
/* What the file says of padding: -1 without. */
int64_t ty_tokenizer_pad_id(const ty_tokenizer *t, bool *left);

/* ---- text to ids ---- */

typedef struct ty_span {
  uint32_t begin, end; /* bytes of the text, whole characters; 0, 0 for what is not in the text */
} ty_span;

typedef struct ty_encode_options {
  bool special;  /* add what the post-processor adds: [CLS], <s> ... */
  bool plain;    /* special tokens that stand in the text are text like any other */
  bool spans;    /* where in the text each token is */
  uint32_t most; /* cut to so many tokens, special ones counted; 0: not */
  bool cut_left; /* at the left */
} ty_encode_options;

typedef struct ty_encoding {
  uint32_t *ids;
  uint8_t *types; /* which of the two texts, as the post-processor numbers them */
  ty_span *spans; /* with the option only */
  size_t count, capacity, span_capacity;
} ty_encoding;
void ty_encoding_free(ty_encoding *e);

/* `pair`: a second text, or NULL. The encoding's memory is used again. */
bool ty_tokenizer_encode(ty_tokenizer *t, const char *text, size_t size, const char *pair, size_t pair_size,
                         const ty_encode_options *options, ty_encoding *out);

/* Several texts, each for itself; `out` has `count` encodings, zeroed at first, which the caller frees in any case. */
bool ty_tokenizer_encode_batch(ty_tokenizer *t, const char *const *texts, const size_t *sizes, size_t count,
                               const ty_encode_options *options, ty_encoding *out);

/* ---- ids to text ---- */

bool ty_tokenizer_decode(ty_tokenizer *t, const uint32_t *ids, size_t count, bool skip_special, ty_bytes *out);

/* Text as the ids come, never half a character. */
typedef struct ty_stream {
  uint32_t *ids;
  size_t count, capacity, said; /* ids[0 .. said) have been put out and give the rest its context */
  bool skip_special;
} ty_stream;
bool ty_stream_put(ty_tokenizer *t, ty_stream *s, const uint32_t *ids, size_t count, ty_bytes *out);
bool ty_stream_finish(ty_tokenizer *t, ty_stream *s, ty_bytes *out); /* what is left, U+FFFD for half characters */
void ty_stream_free(ty_stream *s);

/* ---- training a byte-level BPE ---- */

typedef struct ty_trainer ty_trainer;

typedef struct ty_train_options {
  const char *pattern;        /* "gpt2", "llama3", "qwen2": how text is cut into words, see ty_pattern */
  uint32_t vocabulary;        /* tokens at most, special ones and the 256 bytes counted */
  uint64_t frequency;         /* a pair that is seen less often is not merged */
  uint32_t longest;           /* bytes of a token at most; 0: no bound */
  bool prefix_space;          /* a space is put before a text that has none */
  const char *const *special; /* special tokens, which come first */
  const size_t *special_size;
  size_t special_count;
} ty_train_options;

ty_trainer *ty_trainer_new(const ty_train_options *options); /* copies them */
void ty_trainer_free(ty_trainer *t);
/* Each text is cut for itself; counted on all threads, with the same result for every number of them. */
bool ty_trainer_add(ty_trainer *t, const char *const *texts, const size_t *sizes, size_t count);
bool ty_trainer_add_file(ty_trainer *t, const char *path); /* each line with its end is a text; gzip is unpacked */
bool ty_trainer_finish(ty_trainer *t, ty_bytes *json);     /* the text of a tokenizer.json */

#endif
