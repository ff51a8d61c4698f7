/* What the files of the recurrent layers share. */
#ifndef TY_OPS_RECURRENCE_H
#define TY_OPS_RECURRENCE_H

#include "../../kernels/recurrence.h"
#include "op.h"

ty_cell ty_cell_named(const char *name);

/* The gradients of recurrence_steps in differentiable ops: the rule under create_graph. */
bool ty_recurrence_composed(ty_vjp *c);

#endif
