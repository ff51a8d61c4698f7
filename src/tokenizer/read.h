/* What the files that read a tokenizer.json share. */
#ifndef TY_TOKENIZER_READ_H
#define TY_TOKENIZER_READ_H

#include "../io/json.h"
#include "internal.h"

typedef struct ty_reading {
  ty_json j;
  ty_tokenizer *t;
} ty_reading;

/* Values of one kind, or an error that says where. */
bool ty_read_bool(ty_reading *r, bool *out);
bool ty_read_count(ty_reading *r, uint64_t most, uint64_t *out);
bool ty_read_text(ty_reading *r, ty_str *out);
bool ty_read_null(ty_reading *r, bool *null); /* takes the null when there is one */
static inline bool ty_key_is(const char *key, size_t size, const char *word) {
  return size == strlen(word) && memcmp(key, word, size) == 0;
}
/* The "type" of the object that comes next, which stays unread; "" without one. Valid until the next string. */
bool ty_read_type(ty_reading *r, ty_str *out);

bool ty_read_normalizer(ty_reading *r);
bool ty_read_pre_tokenizer(ty_reading *r);
bool ty_read_decoder(ty_reading *r);
bool ty_read_post_processor(ty_reading *r);
bool ty_read_model(ty_reading *r);

#endif
