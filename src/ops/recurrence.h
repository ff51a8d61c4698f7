/* What the files of the recurrent layers share. */
#ifndef TY_OPS_RECURRENCE_H
#define TY_OPS_RECURRENCE_H

#include "op.h"

enum { TY_SAVED_GATES = 4 }; /* of every unit, for the gradient: four numbers, whatever the cell */

ty_cell ty_cell_named(const char *name);
static inline bool ty_cell_is_slstm(ty_cell cell) { return cell == TY_SLSTM || cell == TY_SLSTM_EXP; }
static inline int ty_cell_gates(ty_cell cell) { return cell == TY_GRU ? 3 : 4; }
/* Tensors of the state: h; h and c; h, c, n and m. */
static inline int ty_cell_states(ty_cell cell) { return cell == TY_GRU ? 1 : cell == TY_LSTM ? 2 : 4; }

/* The gradients of recurrence_steps in differentiable ops: the rule under create_graph. */
bool ty_recurrence_composed(ty_vjp *c);

#endif
