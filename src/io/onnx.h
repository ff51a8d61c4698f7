/* ONNX files: a protocol buffer that libprotobuf-c reads and writes by the messages of onnx.proto. Here: what keeps a
 * hostile file from more than an error, and tensors. Without libprotobuf-c (TY_HAVE_ONNX) there is only
 * ty_onnx_missing(). */
#ifndef TY_IO_ONNX_H
#define TY_IO_ONNX_H

#include "formats.h"

enum {
  TY_ONNX_GRAPHS_DEEP = 16,     /* graphs in graphs */
  TY_ONNX_MESSAGES = 1 << 22,   /* in all: nodes, names, attributes ... */
  TY_ONNX_EXTERNAL_FROM = 1024, /* bytes: smaller tensors stay in the file when weights go beside it */
};

/* ONNX's numbers of element types. */
enum {
  TY_ONNX_FLOAT = 1,
  TY_ONNX_UINT8,
  TY_ONNX_INT8,
  TY_ONNX_UINT16,
  TY_ONNX_INT16,
  TY_ONNX_INT32,
  TY_ONNX_INT64,
  TY_ONNX_STRING,
  TY_ONNX_BOOL,
  TY_ONNX_FLOAT16,
  TY_ONNX_DOUBLE,
  TY_ONNX_UINT32,
  TY_ONNX_UINT64,
  TY_ONNX_COMPLEX64,
  TY_ONNX_COMPLEX128,
  TY_ONNX_BFLOAT16,
  TY_ONNX_UINT4 = 21,
  TY_ONNX_INT4,
  TY_ONNX_TYPES
};
/* And of attributes. */
enum {
  TY_ONNX_A_FLOAT = 1,
  TY_ONNX_A_INT,
  TY_ONNX_A_STRING,
  TY_ONNX_A_TENSOR,
  TY_ONNX_A_GRAPH,
  TY_ONNX_A_FLOATS,
  TY_ONNX_A_INTS,
  TY_ONNX_A_STRINGS,
  TY_ONNX_A_TENSORS,
  TY_ONNX_A_GRAPHS,
};

/* "u16" ..., also of types that our tensors lack; NULL: unknown. */
const char *ty_onnx_type_name(int32_t type);
/* Whether `type` is read, and what its tensors become here: u16 i32, u32 and u64 i64, four bits eight. */
bool ty_onnx_dtype(int32_t type, ty_dtype *out);
/* ONNX's number for a dtype; 0: none. */
int32_t ty_onnx_type_of(ty_dtype dtype);

bool ty_onnx_missing(void); /* false after ty_fail(): the build has no libprotobuf-c */

#ifdef TY_HAVE_ONNX
#include "onnx.pb-c.h"

typedef struct ty_onnx {
  TyOnnx__Model *model;
  const char *path; /* as the caller named it: borrowed */
  struct ty_onnx_data *data;
} ty_onnx;

/* Reads the file into messages that are well formed: every message below is there or NULL, strings end. */
bool ty_onnx_open(const char *path, ty_onnx *out);
/* The same from memory; tensors in other files are beside `path`. */
bool ty_onnx_parse(const void *bytes, size_t size, const char *path, ty_onnx *out);
void ty_onnx_close(ty_onnx *o);
/* A new tensor; it takes the bytes out of the message where it can, so this is asked once for each. */
ty_tensor *ty_onnx_tensor(ty_onnx *o, TyOnnx__Tensor *t);
/* Writes a model whose tensors have raw_data. data_path: a file that gets what tensors of TY_ONNX_EXTERNAL_FROM bytes
 * and more hold, named `data_name` in the model; NULL: none. The messages are changed then. */
bool ty_onnx_write(const char *path, TyOnnx__Model *model, const char *data_path, const char *data_name);
#endif

#endif
