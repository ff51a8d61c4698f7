/* What kernels make of weights before they multiply: panels in the order in which they are read, transforms. While a
 * weight stays as it is, that is kept from call to call. */
#ifndef TY_KERNELS_KEPT_H
#define TY_KERNELS_KEPT_H

#include "base.h"

/* What tells one such form from all others that the weights of a storage may have been brought into. */
typedef struct ty_kept_form {
  const void *weight; /* its first element */
  const void *maker;  /* anything that belongs to one kernel only */
  int64_t layout[8];  /* all that it depends on besides the elements */
} ty_kept_form;

typedef struct ty_kept {
  void *data;
  bool filled; /* by an earlier call; else the caller does it */
  size_t bytes;
  struct ty_kept_entry *entry; /* NULL: scratch memory of this call */
} ty_kept;

/* Memory for the form, which takes `bytes`, and what is kept in it. `weights` is ty_kernel_args.weights; a form is kept
 * from its second use on. Otherwise the memory is that of this call, if `anyway`, with data NULL after ty_fail(); or
 * there is none. */
ty_kept ty_kept_open(struct ty_storage *weights, const ty_kept_form *form, size_t bytes, bool anyway);
/* After the last look at it. good: it holds what it should, all of it: ty_parallel_for() may skip pieces. */
void ty_kept_close(ty_kept *k, bool good);

#endif
