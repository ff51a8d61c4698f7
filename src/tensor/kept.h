/* The host's side of kernels/kept.h: whose weights may be kept, when that ends, and how much memory it may take. */
#ifndef TY_KEPT_H
#define TY_KEPT_H

#include "../../kernels/kept.h"
#include "tensor.h"

void ty_kept_drop(ty_storage *s); /* the forms of one storage: it is about to be freed, or was written */
void ty_kept_drop_all(void);
int64_t ty_kept_bytes(void); /* of all forms; cheap */

/* Most bytes of all forms together; -1: the default, a share of what is live. */
void ty_kept_set_budget(int64_t bytes);

#endif
