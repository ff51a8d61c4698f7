/* The part of Python's pickles that describes tensors, read as data: numbers, text, tuples, lists, dictionaries,
 * storages and tensors. Everything else is refused by name; no code is ever run. */
#ifndef TY_IO_PICKLE_H
#define TY_IO_PICKLE_H

#include "formats.h"

typedef enum ty_pickle_kind {
  TY_PICKLE_NONE,
  TY_PICKLE_BOOL,
  TY_PICKLE_INT,
  TY_PICKLE_FLOAT,
  TY_PICKLE_TEXT,
  TY_PICKLE_TUPLE,
  TY_PICKLE_LIST,
  TY_PICKLE_DICT,
  TY_PICKLE_GLOBAL,
  TY_PICKLE_STORAGE,
  TY_PICKLE_TENSOR_VALUE, /* its items are the arguments of _rebuild_tensor_v2 */
  TY_PICKLE_MARK,
} ty_pickle_kind;

typedef enum ty_pickle_global {
  TY_PICKLE_ORDERED_DICT,
  TY_PICKLE_SIZE,
  TY_PICKLE_TENSOR,
  TY_PICKLE_PARAMETER,
  TY_PICKLE_STORAGE_TYPE,
} ty_pickle_global;

typedef struct ty_pickle_value {
  uint8_t kind, global, dtype;
  uint32_t first, last, count; /* items of a tuple, entries of a list or dictionary; count also: bytes of text */
  const char *text;            /* in the data; of a storage: its key */
  union {
    int64_t i; /* of a storage: its number of elements */
    double f;
  };
} ty_pickle_value;

/* Of a list or dictionary; `next` leads to the one after it. */
typedef struct ty_pickle_entry {
  uint32_t key, value, next;
} ty_pickle_entry;

typedef struct ty_pickle {
  const char *file;
  const uint8_t *data; /* borrowed, and what texts point to */
  size_t size, cursor;
  ty_bytes values, items, entries, stack, memo;
  uint32_t result;
} ty_pickle;

bool ty_pickle_read(ty_pickle *p, const void *data, size_t size, const char *file);
void ty_pickle_free(ty_pickle *p); /* also after a failed read */
const ty_pickle_value *ty_pickle_at(const ty_pickle *p, uint32_t i);
uint32_t ty_pickle_item(const ty_pickle *p, const ty_pickle_value *tuple, uint32_t i);
const ty_pickle_entry *ty_pickle_entry_at(const ty_pickle *p, uint32_t i); /* NULL after the last */

#endif
