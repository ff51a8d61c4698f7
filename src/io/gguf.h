/* GGUF, the files of ggml and llama.cpp: metadata of any type, tensors in ggml's block formats. By its specification,
 * docs/gguf.md in ggml, and its reader's checks. A dimension's order is reversed: ours are as in NumPy. */
#ifndef TY_IO_GGUF_H
#define TY_IO_GGUF_H

#include "formats.h"

typedef enum ty_gguf_type { /* of metadata values */
                            TY_GGUF_U8,
                            TY_GGUF_I8,
                            TY_GGUF_U16,
                            TY_GGUF_I16,
                            TY_GGUF_U32,
                            TY_GGUF_I32,
                            TY_GGUF_F32,
                            TY_GGUF_BOOL,
                            TY_GGUF_STRING,
                            TY_GGUF_ARRAY,
                            TY_GGUF_U64,
                            TY_GGUF_I64,
                            TY_GGUF_F64,
                            TY_GGUF_TYPES
} ty_gguf_type;
extern const char *const ty_gguf_type_name[TY_GGUF_TYPES]; /* "u32" ... */

enum { TY_GGUF_DIMS = 4, TY_GGUF_DEPTH = 4 /* arrays in arrays */, TY_GGUF_NAME_MOST = 63, TY_GGUF_ALIGNMENT = 32 };

/* A key and the bytes of its value, in the mapping. */
typedef struct ty_gguf_entry {
  const char *key;
  size_t key_size;
  ty_gguf_type type;
  const uint8_t *value;
} ty_gguf_entry;

typedef struct ty_gguf_tensor {
  const char *name; /* in the mapping */
  size_t name_size;
  const char *format; /* ggml's name of the type */
  int dtype;          /* ty_dtype, or -1: none of ours */
  int ndim;
  int64_t shape[TY_GGUF_DIMS];
  uint64_t offset, bytes; /* in the file */
} ty_gguf_tensor;

typedef struct ty_gguf {
  ty_mapping *map;
  uint32_t version;
  uint64_t alignment;
  ty_gguf_entry *entries;
  size_t entry_count;
  ty_gguf_tensor *tensors; /* in the order of the file */
  size_t tensor_count;
} ty_gguf;

/* Reads and checks all but the tensors' values. `name`: the file, for errors. */
bool ty_gguf_open(ty_mapping *m, const char *name, ty_gguf *out);
void ty_gguf_close(ty_gguf *g);
/* A view on the mapping (unless `copy`); fails for formats that Tycho lacks. */
ty_tensor *ty_gguf_get(const ty_gguf *g, size_t i, bool copy);

/* One metadata value. Of an array: what it holds, and how many follow. */
typedef struct ty_gguf_value {
  union {
    int64_t i; /* the integers but u64, bool */
    uint64_t u;
    double f;
    struct {
      const char *text;
      size_t size;
    };
    struct {
      ty_gguf_type of;
      uint64_t count;
    };
  };
} ty_gguf_value;
/* Reads the value of `type` at *at and moves behind it (behind the head of an array); false past `end`. */
bool ty_gguf_read_value(const uint8_t **at, const uint8_t *end, ty_gguf_type type, ty_gguf_value *out);

/* Writes tensors, after `entry_count` metadata entries as the format has them: key, type, value. A multiple of 8 that
 * is a power of two, `alignment` is written as an entry of its own when it is not TY_GGUF_ALIGNMENT. */
bool ty_gguf_write(const char *path, const ty_bundle *tensors, const ty_bytes *entries, uint64_t entry_count,
                   uint64_t alignment);
bool ty_gguf_put_string(ty_bytes *b, const char *text, size_t size);
bool ty_gguf_put(ty_bytes *b, uint64_t value, int bytes); /* little-endian */

#endif
