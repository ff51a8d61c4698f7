/* JSON by pulling: the reader walks the text and asks for one thing after the other, so nothing is built that the
 * caller did not ask for (a file of brackets costs no memory), integers stay exact to 64 bits, and strings may hold
 * any character. RFC 8259, UTF-8 only.
 *
 *   ty_json_enter(j, '[') or '{', then while (ty_json_next(j, &more) && more) { key; value }, which also takes the
 *   closing bracket. Every function returns false after ty_fail() with the name of the text, line and column. */
#ifndef TY_IO_JSON_H
#define TY_IO_JSON_H

#include "file.h"

enum { TY_JSON_DEPTH = 128 };

typedef struct ty_json {
  const char *name; /* for errors: the file; borrowed */
  const char *text, *p, *end;
  int depth;
  bool first;               /* nothing of the innermost open value has been read */
  char open[TY_JSON_DEPTH]; /* the brackets we are in */
  ty_bytes scratch;         /* the string read last, when it had escapes */
} ty_json;

typedef enum ty_json_kind {
  TY_JSON_BAD,
  TY_JSON_NULL,
  TY_JSON_FALSE,
  TY_JSON_TRUE,
  TY_JSON_NUMBER,
  TY_JSON_STRING,
  TY_JSON_ARRAY,
  TY_JSON_OBJECT
} ty_json_kind;

typedef struct ty_json_value {
  bool is_integer;
  int64_t integer;
  double number;
} ty_json_value;

void ty_json_open(ty_json *j, const char *name, const void *text, size_t size); /* borrows both */
void ty_json_close(ty_json *j);
ty_json_kind ty_json_peek(ty_json *j); /* what comes next; TY_JSON_BAD after ty_fail() */
bool ty_json_word(ty_json *j);         /* null, true, false */
bool ty_json_number(ty_json *j, ty_json_value *out);
bool ty_json_string(ty_json *j, const char **text, size_t *size); /* valid until the next string */
bool ty_json_enter(ty_json *j, char bracket);
bool ty_json_next(ty_json *j, bool *more);
bool ty_json_key(ty_json *j, const char **text, size_t *size); /* a string and the colon */
bool ty_json_skip(ty_json *j);                                 /* a whole value */
bool ty_json_finish(ty_json *j);                               /* nothing but blanks is left */
bool ty_json_fail(ty_json *j, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A string with quotes and escapes; fails when it is not UTF-8. */
bool ty_json_put_string(ty_bytes *out, const char *text, size_t size);

#endif
