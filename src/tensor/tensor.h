/* The tensor: a reference-counted view on a reference-counted storage. Internal layout; users of the C library
 * see tycho.h. Counts of tensors are not atomic: a tensor belongs to one thread at a time; a storage may be shared
 * between threads, so its count is. */
#ifndef TY_TENSOR_H
#define TY_TENSOR_H

#include <stdatomic.h>
#include "../../kernels/base.h"

typedef struct ty_tensor ty_tensor;
typedef struct ty_node ty_node;
typedef struct ty_live ty_live;
typedef struct ty_batch ty_batch;

/* Memory of somebody else, and how it is given back. */
typedef struct ty_foreign {
  void (*release)(void *owner);
  void *owner;
} ty_foreign;

typedef enum ty_device {
  TY_CPU,
  TY_META,
  TY_CUDA, /* TY_CUDA + i: GPU i */
  /* For ty_tensor_new() and counters: */
  TY_PINNED = TY_CUDA + TY_MAX_GPUS, /* page-locked memory; its tensors are the CPU's */
  TY_PAGED, /* TY_PAGED + i: unified memory, whose pages the driver moves out of GPU i and back; tensors of that GPU */
  TY_DEVICE_DEFAULT = -1
} ty_device;

typedef struct ty_storage {
  atomic_uint refs;
  uint32_t version; /* bumped by every in-place write */
  int device;
  bool pinned;                /* page-locked memory of the CPU, which GPUs copy from and to by themselves */
  bool paged;                 /* unified memory of a GPU, or the CPU's in a file: pages go where room is */
  bool settled;               /* nobody writes it but ops, which tell: what kernels make of it may be kept */
  void *bytes;                /* NULL on the meta device and for empty storages */
  size_t nbytes;              /* as asked for */
  size_t capacity;            /* as taken from the pool; 0: not ours */
  ty_live *live;              /* entry in the table of large live storages, for the out-of-memory report */
  ty_foreign *foreign;        /* a mapped file, a host program's buffer; else NULL */
  struct ty_kept_entry *kept; /* forms of weights in it: see kept.h */
} ty_storage;

/* What a hook on a gradient is: called with the gradient (borrowed), returns a new reference that replaces it,
 * or NULL with *failed unset to leave it as it is. */
typedef struct ty_hook {
  struct ty_hook *next;
  uint64_t id;
  ty_tensor *(*call)(void *owner, ty_tensor *grad, bool *failed);
  void (*release)(void *owner);
  void *owner;
} ty_hook;

struct ty_tensor {
  ty_view v; /* first: a ty_tensor* is a ty_view* for the kernels */
  uint32_t refs;
  uint32_t version; /* of the storage, when `node` was recorded: a later write through another view is an error */
  ty_storage *storage;
  ty_node *node;   /* what computed it, when that is being recorded; NULL: a leaf */
  ty_tensor *grad; /* leaves (and those that retain_grad) only */
  ty_hook *hooks;  /* leaves only; hooks of computed tensors live in the node */
  ty_batch *batch; /* of all samples, inside ty.vmap: see ops/vmap.h; else NULL */
  uint16_t node_output;
  bool requires_grad; /* a leaf that wants a gradient, or has a node */
  bool is_view;
  bool retains_grad;
};

static inline ty_dtype ty_dtype_of(const ty_tensor *t) { return (ty_dtype)t->v.dtype; }
static inline int ty_device_of(const ty_tensor *t) { return t->storage->device; }

/* All below: arguments are borrowed, results are new references, NULL/false after ty_fail(). */

/* A new contiguous tensor with undefined contents. */
ty_tensor *ty_tensor_new(int device, ty_dtype dtype, int ndim, const int64_t *size);
/* A view on the storage of `base`; offset in elements from base's first element. */
ty_tensor *ty_tensor_view(ty_tensor *base, int ndim, const int64_t *size, const int64_t *stride, int64_t offset);
/* The same storage and shape without history. */
ty_tensor *ty_tensor_alias(ty_tensor *t);
/* The same with memory of its device that gives way when there is little: unified memory of a GPU; on the CPU a
 * temporary file. Contents are zero on the CPU. */
ty_tensor *ty_tensor_new_paged(int device, ty_dtype dtype, int ndim, const int64_t *size);
/* A tensor on memory of somebody else; `release(owner)` is called when the last view is gone (also on failure). */
ty_tensor *ty_tensor_wrap(void *bytes, ty_dtype dtype, int ndim, const int64_t *size, void (*release)(void *),
                          void *owner);

static inline ty_tensor *ty_retain(ty_tensor *t) {
  if (t) t->refs++;
  return t;
}
void ty_node_release(ty_node *n);  /* autograd/graph.c */
void ty_batch_retain(ty_batch *b); /* ops/vmap.c */
void ty_batch_release(ty_batch *b);
void ty_tensor_free(ty_tensor *t);
static inline void ty_release(ty_tensor *t) {
  if (t && --t->refs == 0) ty_tensor_free(t);
}

/* Recomputes count and contiguous from size and stride. */
void ty_view_update(ty_view *v);
void ty_view_set_contiguous(ty_view *v, int ndim, const int64_t *size); /* sets strides in C order */
bool ty_view_repeats(const ty_view *v); /* some elements are seen several times (expanded) */
bool ty_same_shape(const ty_view *a, const ty_view *b);
/* "[2, 3] f32 cpu" into a rotating buffer of this thread, for error texts; NULL gives "nil". */
const char *ty_describe(const ty_tensor *t);
const char *ty_shape_text(int ndim, const int64_t *size);

#endif
