/* The large live storages of a pool, and the report of them when memory is out. */
#ifndef TY_LIVE_H
#define TY_LIVE_H

#include "tensor.h"

typedef struct ty_use { /* by a stream */
  struct ty_use *next;
  int device, stream;
} ty_use;

struct ty_live {
  struct ty_live *next, *prev; /* a ring with a sentinel */
  size_t nbytes;
  int dtype, ndim;
  int64_t size[TY_MAX_DIMS];
  int stream;
  ty_use *uses;
};

typedef struct ty_shortage {
  int device;
  size_t wanted;
  ty_dtype dtype;
  int ndim;
  const int64_t *size;
  int64_t live, beyond, cached, budget;
} ty_shortage;

/* Reports what was wanted, and the largest storages of the ring. */
bool ty_fail_out_of_memory(const ty_shortage *s, const ty_live *ring);

#endif
