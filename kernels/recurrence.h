/* What recurrent cells are made of: for the ops and for the kernels of every device. */
#ifndef TY_KERNELS_RECURRENCE_H
#define TY_KERNELS_RECURRENCE_H

#include "params.h"

enum { TY_SAVED_GATES = 4 }; /* of every unit, for the gradient: four numbers, whatever the cell */

static inline bool ty_cell_is_slstm(ty_cell cell) { return cell == TY_SLSTM || cell == TY_SLSTM_EXP; }
static inline int ty_cell_gates(ty_cell cell) { return cell == TY_GRU ? 3 : 4; }
/* Tensors of the state: h; h and c; h, c, n and m. */
static inline int ty_cell_states(ty_cell cell) { return cell == TY_GRU ? 1 : cell == TY_LSTM ? 2 : 4; }

#endif
